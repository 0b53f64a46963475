"""Factories of fake events: what a hook would be given, from the few numbers that a test is about."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynguard.events import EmbeddingEvent, GradientEvent, LossEvent, ParameterEvent, RunInfo, Training, TreeEvent
from dynguard.testing.statistics import FakeStatistics, is_tensor, norm, scalar, stack


def run_info(
    run: str = "test",
    *,
    directory: Path | str | None = None,
    parameters: Mapping[str, Sequence[str]] | None = None,
    plugins: Sequence[str] = (),
    rank: int = 0,
    world_size: int = 1,
    ranks: int = 1,
    info: Mapping[str, Any] | None = None,
) -> RunInfo:
    """What ``on_run_start`` is told; ``parameters`` maps each source to the names of its parameters."""
    return RunInfo(
        run=run,
        directory=Path(directory) if directory is not None else None,
        parameters={source: tuple(names) for source, names in (parameters or {}).items()},
        plugins=tuple(plugins),
        rank=rank,
        world_size=world_size,
        ranks=ranks,
        info=dict(info or {}),
    )


def loss_event(
    step: int = 0,
    loss: Any = 1.0,
    *,
    micro_step: int = 0,
    batch: Any = None,
    metrics: Mapping[str, Any] | None = None,
) -> LossEvent:
    """One observed loss: a number becomes a 0-d float32 array, a tensor is detached, None means metrics only."""
    return LossEvent(step=step, micro_step=micro_step, loss=scalar(loss), batch=batch, metrics=dict(metrics or {}))


def gradient_event(
    step: int = 0,
    *,
    norms: Mapping[str, float] | None = None,
    gradients: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    second_moments: Mapping[str, Any] | None = None,
    previous: Mapping[str, Any] | None = None,
    lr: float | Sequence[float] = 1e-3,
    source: str = "",
    loss: Any = None,
    batches: Sequence[Any] = (),
    rejected: Any = False,
    tables: Collection[str] = (),
    scale: Any = None,
    training: Training | None = None,
    adaptive: bool = False,
) -> GradientEvent:
    """All gradients of one step, named; give either their ``norms`` or the ``gradients`` themselves.

    Args:
        step: optimizer step, from 0.
        norms: name -> L2 norm; each gradient then has one entry, the norm. Default: ``{"weight": 1.0}``.
        gradients: name -> array, tensor or None; all statistics are computed from them.
        parameters: name -> parameter; zeros where left out.
        second_moments: name -> Adam's v, for ``rms_ratio``; NaN where left out.
        previous: name -> gradient of the step before, for ``cosine``; NaN where left out.
        lr: learning rate of all parameters or of each.
        source, batches, rejected, scale, training, adaptive: as in GradientEvent.
        loss: mean loss of the step, or None.
        tables: names of the parameters that are embedding tables.
    """
    if norms is not None and gradients is not None:
        raise ValueError("gradient_event: give norms or gradients, not both")
    if gradients is None:
        gradients = {name: _with_norm(name, value) for name, value in (norms or _default(norms)).items()}
    names, values = tuple(gradients), list(gradients.values())
    observed = scalar(loss)
    weights = [_parameter(name, g, parameters or {}) for name, g in gradients.items()]
    return GradientEvent(
        step=step,
        source=source,
        names=names,
        statistics=FakeStatistics.of(values, _in_order(names, second_moments), _in_order(names, previous), weights),
        parameters=weights,
        gradients=values,
        learning_rates=_rates(lr, len(names)),
        loss=observed,
        losses=() if observed is None else (observed,),
        batches=tuple(batches),
        rejected=rejected,
        tables=frozenset(index for index, name in enumerate(names) if name in tables),
        scale=scale,
        training=training,
        adaptive=adaptive,
    )


def _default(norms: Mapping[str, float] | None) -> dict[str, float]:
    return {"weight": 1.0} if norms is None else {}


def _with_norm(name: str, value: float) -> Any:
    if value < 0:
        raise ValueError(f"gradient_event: a norm is never negative; {name!r} has {value}")
    with np.errstate(over="ignore"):
        return np.array([value]).astype(np.float32)


def _in_order(names: Sequence[str], values: Mapping[str, Any] | None) -> list[Any] | None:
    return None if values is None else [values.get(name) for name in names]


def _parameter(name: str, gradient: Any, given: Mapping[str, Any]) -> Any:
    if name in given:
        return given[name]
    if is_tensor(gradient):
        return (
            gradient.new_zeros(gradient.shape).to_dense() if gradient.is_sparse else gradient.new_zeros(gradient.shape)
        )
    return np.zeros_like(gradient) if gradient is not None else np.zeros(1, dtype=np.float32)


def _rates(lr: float | Sequence[float], count: int) -> tuple[float, ...]:
    rates = (float(lr),) * count if isinstance(lr, int | float) else tuple(lr)
    if len(rates) != count:
        raise ValueError(f"lr has {len(rates)} entries for {count} parameters")
    return rates


def parameter_event(
    step: int = 0,
    *,
    norms: Mapping[str, float] | None = None,
    parameters: Mapping[str, Any] | None = None,
    lr: float | Sequence[float] = 1e-3,
    source: str = "",
    skipped: bool = False,
) -> ParameterEvent:
    """All parameters after the update, named; give either their ``norms`` or the ``parameters`` themselves."""
    if norms is not None and parameters is not None:
        raise ValueError("parameter_event: give norms or parameters, not both")
    if parameters is None:
        chosen = {"weight": 1.0} if norms is None else norms
        parameters = {name: np.array([value]).astype(np.float32) for name, value in chosen.items()}
    return ParameterEvent(
        step=step,
        source=source,
        names=tuple(parameters),
        parameters=list(parameters.values()),
        norms=stack([norm(p) for p in parameters.values()]),
        learning_rates=_rates(lr, len(parameters)),
        skipped=skipped,
    )


def embedding_event(
    step: int = 0,
    *,
    table: str = "embedding.weight",
    ids: Any = (0, 1, 1),
    gradients: Any = None,
    weight: Any = None,
    labels: Sequence[str] | None = None,
    source: str = "",
    training: Any = None,
) -> EmbeddingEvent:
    """The rows of one table that were looked up.

    Args:
        step: optimizer step, from 0.
        table: name of the table's weight.
        ids: (k,) row numbers as they were looked up, repeats included; a tensor makes an event of tensors.
        gradients: (k, d) one gradient per lookup; those of one row are summed. Without them each row has norm 1.
        weight: the (N, d) table, or None.
        labels: names of the rows by row number.
        source: name of the optimizer.
        training: what a guard may change through, e.g. a :class:`FakeTraining`.
    """
    rows, counts, summed, norms = (_tensor_rows if is_tensor(ids) else _array_rows)(ids, gradients)
    return EmbeddingEvent(
        step=step,
        source=source,
        table=table,
        rows=rows,
        counts=counts,
        row_gradient_norms=norms,
        gradients=summed,
        weight=weight,
        labels=labels,
        training=training,
    )


class FakeTraining:
    """Takes down what a guard asks for, as (method, arguments), and changes nothing."""

    model: Any = None
    optimizer: Any = None
    loss_fn: Any = None
    scaler: Any = None
    groups: Sequence[int] = (0,)

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def scale_learning_rate(self, factor: Any) -> None:
        """Of the coming update."""
        self.asked.append(("scale_learning_rate", (factor,)))

    def scale_update(self, index: int, factor: Any) -> None:
        """Of one parameter."""
        self.asked.append(("scale_update", (index, factor)))

    def scale_rows(self, index: int, rows: Any, factors: Any) -> None:
        """Of rows of one parameter."""
        self.asked.append(("scale_rows", (index, rows, factors)))

    def scale_row_gradients(self, index: int, rows: Any, factors: Any) -> None:
        """Of rows of one parameter."""
        self.asked.append(("scale_row_gradients", (index, rows, factors)))


def _array_rows(ids: Any, gradients: Any) -> tuple[Any, Any, Any, Any]:
    flat = np.asarray(ids, dtype=np.int64).reshape(-1)
    rows, where, counts = np.unique(flat, return_inverse=True, return_counts=True)
    if gradients is None:
        return rows, counts, None, np.ones(len(rows), dtype=np.float32)
    each = np.asarray(gradients, dtype=np.float32)
    summed = np.zeros((len(rows), each.shape[1]), dtype=np.float32)
    np.add.at(summed, where, each)
    return rows, counts, summed, np.linalg.norm(summed, axis=1)


def _tensor_rows(ids: Any, gradients: Any) -> tuple[Any, Any, Any, Any]:
    import torch

    rows, where, counts = torch.unique(ids.reshape(-1).long(), return_inverse=True, return_counts=True)
    if gradients is None:
        return rows, counts, None, torch.ones(len(rows), device=ids.device)
    summed = gradients.new_zeros((len(rows), gradients.shape[1])).index_add_(0, where, gradients.detach())
    return rows, counts, summed, summed.float().norm(dim=1)


def tree_event(
    round: int = 0,
    *,
    values: Sequence[float] = (0.1, -0.1),
    trees: Mapping[str, Any] | None = None,
    library: str = "xgboost",
    metrics: Mapping[str, Mapping[str, float]] | None = None,
    feature_names: Sequence[str] = ("a", "b"),
    parameters: Mapping[str, Any] | None = None,
    source: str = "",
) -> TreeEvent:
    """One boosting round that added one tree with these leaf ``values``, or the columns ``trees`` as they are.

    The tree is a chain: split i on feature i (in turn) has one leaf and the next split; a lone value is a root only.
    """
    return TreeEvent(
        round=round,
        library=library,
        trees=dict(trees) if trees is not None else _chain(round, values, max(len(feature_names), 1)),
        metrics={data: dict(by_name) for data, by_name in (metrics or {}).items()},
        feature_names=tuple(feature_names),
        parameters=dict(parameters or {}),
        source=source,
    )


def _chain(round_: int, values: Sequence[float], features: int) -> dict[str, Any]:
    leaves, splits = len(values), max(len(values) - 1, 0)
    nodes = leaves + splits
    leaf = np.arange(nodes) >= splits
    order = np.arange(splits)
    depth = np.concatenate([order, np.minimum(np.arange(leaves) + 1, splits)])
    nothing, ones = np.zeros(leaves), np.ones(leaves)
    return {
        "tree": np.full(nodes, round_, dtype=np.int64),
        "round": np.full(nodes, round_, dtype=np.int64),
        "class": np.zeros(nodes, dtype=np.int64),
        "node": np.arange(nodes, dtype=np.int64),
        "parent": np.concatenate([order - 1, np.minimum(np.arange(leaves), splits - 1)]).astype(np.int64),
        "left": np.concatenate([order + splits, np.full(leaves, -1)]).astype(np.int64),
        "right": np.concatenate([np.where(order < splits - 1, order + 1, 2 * splits), np.full(leaves, -1)]).astype(
            np.int64
        ),
        "feature": np.concatenate([order % features, np.full(leaves, -1)]).astype(np.int64),
        "threshold": np.concatenate([np.full(splits, 0.5), np.full(leaves, np.nan)]),
        "rule": np.where(leaf, 0, 1).astype(np.int8),
        "missing": np.ones(nodes, dtype=np.int8),
        "default_left": np.zeros(nodes, dtype=np.bool_),
        "set_start": np.zeros(nodes, dtype=np.int64),
        "set_length": np.zeros(nodes, dtype=np.int64),
        "gain": np.concatenate([np.ones(splits), nothing]),
        "cover": np.concatenate([leaves - order, ones]).astype(np.float64),
        "count": np.full(nodes, np.nan),
        "value": np.concatenate([np.zeros(splits), np.asarray(values, dtype=np.float64)]),
        "depth": depth.astype(np.int64),
        "leaf": leaf,
    }
