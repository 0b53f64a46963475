"""What ``check_plugin`` puts a plugin through: the events of an ordinary run and of what goes wrong; all records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from dynguard.actions import Action, Intervention
from dynguard.events import RunInfo
from dynguard.findings import (
    Evidence,
    Figure,
    Finding,
    Metrics,
    Names,
    Prescription,
    Record,
    RunEnd,
    RunStart,
    Section,
    Severity,
    Table,
)
from dynguard.testing.factories import (
    FakeTraining,
    embedding_event,
    gradient_event,
    loss_event,
    parameter_event,
    run_info,
    tree_event,
)
from dynguard.testing.statistics import is_tensor

Arrays: TypeAlias = Literal["numpy", "torch"]
Convert: TypeAlias = Callable[[Any], Any]
# Enough for a baseline to leave its warm-up in most detectors.
CLEAN_STEPS = 60
SHAPES = {
    "embedding.weight": (6, 4),
    "body.0.weight": (4, 4),
    "body.0.bias": (4,),
    "head.weight": (3, 4),
    "empty": (0,),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One event, made anew at each call of ``make`` so that nobody sees what another has done to it."""

    label: str
    make: Callable[[], Any]


def converter(arrays: Arrays) -> Convert:
    """Turns numpy arrays into what the events of the trials hold."""
    if arrays == "numpy":
        return lambda array: array
    import torch

    return torch.tensor


def start_of_run(directory: Any = None) -> RunInfo:
    """What ``on_run_start`` is told in the trials."""
    return run_info("trial", directory=directory, parameters={"": tuple(SHAPES), "second": ("other.weight",)})


def trials(arrays: Arrays) -> dict[str, list[Trial]]:
    """The events of each detector hook and of the guards' hot hooks, in order."""
    convert = converter(arrays)
    gradients = list(_gradient_trials(convert))
    return {
        "on_loss": list(_loss_trials(convert)),
        "on_gradients": gradients,
        "on_embeddings": list(_embedding_trials(convert)),
        "adjust_embeddings": list(_embedding_trials(convert, FakeTraining)),
        "adjust_gradients": gradients,
        "on_parameters": list(_parameter_trials(convert)),
        "on_trees": list(_tree_trials()),
    }


def _clean(step: int, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {name: (0.1 * rng.standard_normal(shape)).astype(dtype) for name, shape in SHAPES.items()}


def _with(step: int, **changed: Any) -> dict[str, Any]:
    """Clean gradients, but those of the body's weight and bias as given."""
    return _clean(step) | {"body.0." + name: value for name, value in changed.items()}


def _entry(step: int, value: float) -> dict[str, Any]:
    weight = _clean(step)["body.0.weight"]
    weight[1, 2] = value
    return _with(step, weight=weight)


def _gradient_sets() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(what is special, name -> gradient) step by step, as numpy arrays."""
    yield from (("clean", _clean(step)) for step in range(CLEAN_STEPS))
    n = CLEAN_STEPS
    yield "one layer x 10,000", _with(n, weight=_clean(n)["body.0.weight"] * 1e4)
    yield "after the spike", _clean(n + 1)
    yield "NaN in one entry", _entry(n + 2, math.nan)
    yield "infinity in one entry", _entry(n + 3, math.inf)
    yield "all NaN", {name: np.full_like(g, math.nan) for name, g in _clean(n).items()}
    yield "all zero", {name: np.zeros_like(g) for name, g in _clean(n).items()}
    yield "a parameter without a gradient", _with(n + 4, bias=None)
    yield "no parameter has a gradient", dict.fromkeys(SHAPES)
    yield "half precision", _clean(n + 5, np.float16)
    yield "double precision", _clean(n + 6, np.float64)
    yield "bfloat16", _clean(n + 7)
    yield "a sparse gradient", _clean(n + 8)
    for step in range(n + 9, n + 13):
        yield "a parameter that joined late", _clean(step) | {"adapter.weight": np.ones(3, dtype=np.float32)}


def _gradient_trials(convert: Convert) -> Iterator[Trial]:
    for step, (label, gradients) in enumerate(_gradient_sets()):
        rejected = label == "after the spike"
        yield Trial(f"step {step} ({label})", _gradient_maker(step, label, gradients, convert, rejected=rejected))
    other = {"other.weight": np.ones((2, 2), dtype=np.float32)}
    yield Trial("step 0 of a second optimizer", _gradient_maker(0, "", other, convert, source="second"))


def _gradient_maker(
    step: int, label: str, gradients: Mapping[str, Any], convert: Convert, **more: Any
) -> Callable[[], Any]:
    shapes = {name: SHAPES.get(name, (3,)) if g is None else g.shape for name, g in gradients.items()}

    def make() -> Any:
        return gradient_event(
            step,
            gradients=_as_torch_has_it(label, {n: g if g is None else convert(g.copy()) for n, g in gradients.items()}),
            parameters={name: convert(np.ones(shape, dtype=np.float32)) for name, shape in shapes.items()},
            previous={n: convert(g) for n, g in _clean(step - 1).items()} if step else None,
            second_moments={name: convert(np.full(shape, 0.01, dtype=np.float32)) for name, shape in shapes.items()},
            loss=convert(np.asarray(1.0, dtype=np.float32)),
            tables=("embedding.weight",),
            **more,
        )

    return make


def _as_torch_has_it(label: str, gradients: dict[str, Any]) -> dict[str, Any]:
    """The kinds of gradients that numpy does not know, as tensors; numpy arrays are left as they are."""
    if not is_tensor(gradients.get("head.weight")):
        return gradients
    if label == "bfloat16":
        return {name: g.bfloat16() for name, g in gradients.items()}
    if label == "a sparse gradient":
        return gradients | {"embedding.weight": gradients["embedding.weight"].to_sparse(1)}
    return gradients


def _loss_trials(convert: Convert) -> Iterator[Trial]:
    values = [1.0, 0.9, 1.1, 0.8, 0.0, -2.0, 1e6, math.nan, math.inf, -math.inf, 0.7]
    for step, value in enumerate(values):
        yield Trial(f"step {step} (loss {value:g})", _loss_maker(step, value, convert))
    yield Trial("a loss that is a plain number", lambda: _plain_loss(len(values)))
    yield Trial("metrics without a loss", lambda: loss_event(len(values), None, metrics={"accuracy": 0.5}))


def _plain_loss(step: int) -> Any:
    """``flow.observe(loss=0.7)``: a number is passed on as it is."""
    event = loss_event(step)
    event.loss = 0.7
    return event


def _loss_maker(step: int, value: float, convert: Convert) -> Callable[[], Any]:
    def make() -> Any:
        batch = (convert(np.ones((2, 3), dtype=np.float32)), convert(np.array([0, 1])))
        return loss_event(step, convert(np.asarray(value, dtype=np.float32)), batch=batch)

    return make


def _parameter_trials(convert: Convert) -> Iterator[Trial]:
    for step, (label, parameters) in enumerate(_gradient_sets()):
        if all(p is not None for p in parameters.values()):
            yield Trial(f"step {step} ({label})", _parameter_maker(step, parameters, convert))


def _parameter_maker(step: int, parameters: Mapping[str, Any], convert: Convert) -> Callable[[], Any]:
    return lambda: parameter_event(step, parameters={name: convert(p.copy()) for name, p in parameters.items()})


def _embedding_trials(convert: Convert, training: Callable[[], Any] = lambda: None) -> Iterator[Trial]:
    def maker(step: int, ids: Any, fill: float) -> Callable[[], Any]:
        return lambda: embedding_event(
            step,
            ids=convert(ids),
            gradients=convert(np.full((len(ids), 4), fill, dtype=np.float32)),
            weight=convert(_clean(step)["embedding.weight"]),
            labels=[f"row {row}" for row in range(6)],
            training=training(),
        )

    rows = np.random.default_rng(0).integers(0, 6, size=(8, 5))
    for step, ids in enumerate(rows):
        yield Trial(f"step {step} (clean)", maker(step, ids, 0.1))
    yield Trial("step 8 (one row only)", maker(8, np.full(5, 2), 0.1))
    yield Trial("step 9 (NaN)", maker(9, rows[0], math.nan))
    yield Trial("step 10 (zero)", maker(10, rows[1], 0.0))
    yield Trial("step 11 (clean again)", maker(11, rows[2], 0.1))


def _tree_trials() -> Iterator[Trial]:
    rounds = [[0.3, -0.2, 0.1], [0.2, -0.1], [0.05], [-3e8, 0.1], [math.nan, 0.1], [math.inf], [0.0, 0.0], [0.1, -0.1]]
    for number, values in enumerate(rounds):
        yield Trial(f"round {number} (leaves {values})", _tree_maker(number, values))


def _tree_maker(number: int, values: list[float]) -> Callable[[], Any]:
    metrics = {"train": {"rmse": 1.0 / (number + 1)}, "valid": {"rmse": math.nan if number == 4 else 0.5}}
    return lambda: tree_event(number, values=values, metrics=metrics)


def interventions() -> list[Intervention]:
    """One for each action that guards are told of."""
    told = (Action.CLIP, Action.SKIP, Action.ROLLBACK, Action.PROCEED)
    return [Intervention(step=20 + i, action=action, subject="head.weight") for i, action in enumerate(told)]


HARD_TEXT = "<a> & \"b\" 'c' \u00e9 \U0001f600 \x00\x1b[31m \u202e line\nline"


def records() -> list[Record]:
    """One record of each kind and more, with all that is hard to write: NaN, infinities, long and strange text."""
    finding = Finding(
        kind="grad_spike",
        severity=Severity.CRITICAL,
        step=3,
        subject=HARD_TEXT,
        rows=(0, 7),
        action=Action.SKIP,
        evidence=(Evidence(name="gradient_norm", value=math.inf), Evidence(name="loss", value=math.nan, unit="nats")),
        premise=HARD_TEXT,
        confidence=0.999,
        detector="trial",
        prescriptions=(Prescription(parameter="lr", current=0.1, proposed=0.01, why="too high"),),
    )
    table = Table(title="t", columns=("a", HARD_TEXT), rows=((1, math.nan), ("x", None), (True, -math.inf)))
    figure = Figure(title="f", x=(0, 1), series={"loss": (1.0, None)}, alt="two points")
    vectors = {"gradient_norm": np.array([1.0, math.nan, math.inf, 0.0], dtype=np.float32)}
    return [
        RunStart(run="trial", time=1.0, info={"torch": "2.x"}),
        Names(vector="gradient_norm", names=tuple(SHAPES)),
        Metrics(step=0, values={"loss": 1.0, "lr": 0.1}),
        Metrics(step=1, values={"loss": math.nan, HARD_TEXT: -math.inf}, vectors=vectors),
        Metrics(step=1, values={"loss": 1.0}, source="second"),
        *(Finding(kind="grad_spike", severity=severity) for severity in Severity),
        finding,
        *interventions(),
        Intervention(step=9, action=Action.RAISE, reason=HARD_TEXT, carried_out=False),
        Section(title=HARD_TEXT, text="text", tables=(table,), figures=(figure,), findings=(finding,), plugin="trial"),
        RunEnd(
            run="trial", time=2.0, steps=10, error="ValueError: \x00", overhead={"trial": 0.1}, dropped={"trial": 1}
        ),
    ]
