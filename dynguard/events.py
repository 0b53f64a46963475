"""The events of a training step. One batched event per phase, never one per layer.

All arrays are on the device of the model, as 0-d or 1-d tensors of float32 or wider, or numpy arrays where there is no
torch (trees, fakes in tests). Reading one on the host costs a synchronisation, so detectors answer with a
:class:`~dynguard.signals.Signal` instead and let the bus read once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(slots=True, frozen=True)
class RunInfo:
    """What ``on_run_start`` is told.

    Attributes:
        run: name of the run.
        directory: where the run's files go, or None when nothing is written (rank > 0, or no writable place).
        parameters: names of all trainable parameters by source (optimizer); empty for trees.
        plugins: names of the enabled plugins in the order of dispatch.
        rank, world_size: of ``torch.distributed``, else 0 and 1.
        ranks: how many of them train one model and decide together; 1 where each is for itself.
        info: versions, device, policy and options, as strict JSON.
    """

    run: str
    directory: Path | None = None
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    rank: int = 0
    world_size: int = 1
    ranks: int = 1
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class LossEvent:
    """One observed loss: at ``flow.observe(loss=..., batch=..., metrics=...)``, once per micro-batch.

    Attributes:
        step: the optimizer step that this loss belongs to, from 0.
        micro_step: which micro-batch of that step, from 0 (gradient accumulation).
        loss: 0-d, detached, float32 or wider; None where only metrics were observed.
        batch: what the user gave, untouched, or None.
        metrics: further scalars by name that the user gave.
    """

    step: int
    micro_step: int
    loss: Any
    batch: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


class GradientStatistics(Protocol):
    """Where a GradientEvent's numbers come from: each is computed on first use and shared by all plugins."""

    @property
    def norms(self) -> Any:
        """L2 norm of every gradient, shape (n,)."""

    @property
    def global_norm(self) -> Any:
        """L2 norm of all gradients together, 0-d."""

    @property
    def max_abs(self) -> Any:
        """Largest absolute entry of every gradient, shape (n,)."""

    @property
    def rms_ratio(self) -> Any:
        """RMS of g / sqrt(v) with Adam's second moment v before the update, shape (n,); NaN where there is no v."""

    @property
    def cosine(self) -> Any:
        """Cosine of every gradient to that of the last step, shape (n,); NaN at the first."""


class Training(Protocol):
    """What is being trained: for probes that evaluate the loss again, and guards that repair an optimizer's state.

    Only within the hook that was given the event; detectors read, guards may change.
    """

    @property
    def model(self) -> Any:
        """The model as the user gave it (one, or a list or dict), or None."""

    @property
    def optimizer(self) -> Any:
        """The optimizer of this source."""

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any] | None:
        """``(model, batch) -> loss``, or None where the user gave none."""

    @property
    def scaler(self) -> Any:
        """The GradScaler given to ``flow.track``, or None."""

    @property
    def groups(self) -> Sequence[int]:
        """(n,) which of the optimizer's parameter groups holds each parameter."""

    def scale_learning_rate(self, factor: Any) -> None:
        """Multiply all learning rates for the update that is about to happen, and for that one only.

        The user's scheduler never sees it: the rates are what they were once the update is done. Factors multiply.

        Args:
            factor: a number or 0-d tensor; no host read is made.
        """

    def scale_update(self, index: int, factor: Any) -> None:
        """Take only a part of the update that is about to happen to one parameter, weight decay included.

        Costs a copy of the parameter. The optimizer's state is updated as ever.

        Args:
            index: of the parameter in the event.
            factor: number or 0-d tensor by which the parameter's way is multiplied.
        """

    def scale_rows(self, index: int, rows: Any, factors: Any) -> None:
        """The same for single rows of one parameter; costs a copy of these rows.

        Args:
            index: of the parameter in the event.
            rows: (r,) row numbers, ascending.
            factors: (r,) by which each row's way is multiplied.
        """

    def scale_row_gradients(self, index: int, rows: Any, factors: Any) -> None:
        """Multiply the gradient of single rows of one parameter in place, be it dense or sparse; no host read.

        Args:
            index: of the parameter in the event.
            rows: (r,) row numbers, ascending.
            factors: (r,) by which each row's gradient is multiplied.
        """


@dataclass(slots=True)
class GradientEvent:
    """All gradients of one optimizer step, after backward and before the update. One per optimizer step.

    Attributes:
        step: optimizer step of this source, from 0.
        source: name of the optimizer ("" where there is only one).
        names: names of the n parameters, in the order of the model (the forward order where the model is written so).
            A parameter that joins later is appended: an index never changes its meaning.
        statistics: the lazy numbers; use the properties below.
        parameters: the n parameters.
        gradients: their gradients, None where a parameter has none at this step. Only ``adjust_gradients`` may write.
        learning_rates: (n,) learning rate of each parameter's group, as numbers.
        loss: mean of the losses observed for this step, 0-d on the device, or None.
        losses: the observed losses by micro-batch.
        batches: the observed batches by micro-batch.
        rejected: whether the *last* step of this source was kept from the weights (skipped or rolled back), as bool or
            0-d bool on the device. A baseline must leave out what was rejected.
        tables: indices of the parameters that are embedding tables (rows looked up by id).
        adaptive: whether the optimizer divides by a second moment (Adam and its kin), so that the size of a single
            gradient hardly changes the size of the step.
        scale: factor by which the gradients are still multiplied (a fused optimizer under GradScaler), 0-d or None;
            the statistics are already unscaled.
        overflow: a GradScaler's own flag for this step where a fused optimizer carries it out, non-zero if it drops the
            step; 0-d on the device, or None.
        training: model, optimizer and loss function, or None in tests without one.
    """

    step: int
    source: str
    names: tuple[str, ...]
    statistics: GradientStatistics
    parameters: Sequence[Any] = ()
    gradients: Sequence[Any] = ()
    learning_rates: Sequence[float] = ()
    loss: Any = None
    losses: Sequence[Any] = ()
    batches: Sequence[Any] = ()
    rejected: Any = False
    tables: frozenset[int] = frozenset()
    adaptive: bool = False
    scale: Any = None
    overflow: Any = None
    training: Training | None = None

    @property
    def norms(self) -> Any:
        """L2 norm of every gradient, shape (n,), float32 or wider; 0 where there is no gradient."""
        return self.statistics.norms

    @property
    def global_norm(self) -> Any:
        """L2 norm over all gradients together, 0-d, float32 or wider."""
        return self.statistics.global_norm

    @property
    def max_abs(self) -> Any:
        """Largest absolute entry of every gradient, shape (n,)."""
        return self.statistics.max_abs

    @property
    def rms_ratio(self) -> Any:
        """RMS of g / sqrt(v), v being Adam's bias-corrected second moment before the update, shape (n,).

        NaN where the optimizer keeps no second moment. StableAdamW's quantity (Wortsman et al. 2023, "Stable and
        low-precision training for large-scale vision-language models", section 3.4).
        """
        return self.statistics.rms_ratio

    @property
    def cosine(self) -> Any:
        """Cosine of every gradient to that of the last step, shape (n,); NaN at the first. Keeps a copy, so opt-in."""
        return self.statistics.cosine


@dataclass(slots=True)
class ParameterEvent:
    """The parameters after the update, when due (every ``parameters_every`` steps).

    Attributes:
        step, source, names: as in GradientEvent.
        parameters: the n parameters after the update.
        norms: (n,) L2 norm of every parameter; non-finite where an entry is.
        learning_rates: (n,) learning rates used.
        skipped: whether the update was kept from the weights.
        training: as in GradientEvent.
    """

    step: int
    source: str
    names: tuple[str, ...]
    parameters: Sequence[Any]
    norms: Any
    learning_rates: Sequence[float] = ()
    skipped: bool = False
    training: Training | None = None


@dataclass(slots=True)
class EmbeddingEvent:
    """The rows of one embedding table that were looked up in this step.

    Attributes:
        step, source: as in GradientEvent.
        table: name of the table's weight, e.g. ``emb.weight``.
        rows: (r,) int64 unique row numbers, ascending. On a device, where their number can't be known without waiting
            for it, r is as large as it may be and places left over repeat the last row with a count of 0.
        counts: (r,) int64 how often each was looked up in this step.
        row_gradient_norms: (r,) L2 norm of each row's gradient, duplicates summed.
        gradients: (r, d) the rows' gradients, or None.
        weight: the (N, d) table.
        labels: names of the rows by row number, where the user gave them.
        padding: the table's ``padding_idx``, or None.
        learning_rate: of the table's parameter group, or None.
        rejected: as in GradientEvent.
        index: of the table among the parameters of the source.
        training: as in GradientEvent.
        elsewhere: whether rows that were not looked up have a gradient (a head that is tied to the table): looked for
            now and then in a sample, 0-d bool; False in between and where the gradient is sparse.
    """

    step: int
    source: str
    table: str
    rows: Any
    counts: Any
    row_gradient_norms: Any
    gradients: Any = None
    weight: Any = None
    labels: Sequence[str] | None = None
    padding: int | None = None
    learning_rate: Any = None
    rejected: Any = False
    index: int = 0
    training: Training | None = None
    elsewhere: Any = False


@dataclass(slots=True)
class TreeEvent:
    """One boosting round.

    Attributes:
        round: boosting round, from 0.
        library: ``xgboost``, ``lightgbm`` or ``catboost``.
        trees: column name -> (nodes,) numpy array: the columnar table of the trees that this round added, see
            :mod:`dynguard.trees.table`. Empty where a library shows metrics only: CatBoost's rounds come once with
            their metrics, while ``fit`` runs, and again with their trees when it has ended.
        metrics: metric name -> value, by data set, e.g. ``{"valid": {"rmse": 0.31}}``.
        feature_names: names of the features by column.
        parameters: the library's training parameters, as far as known.
    """

    round: int
    library: str
    trees: Mapping[str, Any]
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    feature_names: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


Event = LossEvent | GradientEvent | ParameterEvent | EmbeddingEvent | TreeEvent
