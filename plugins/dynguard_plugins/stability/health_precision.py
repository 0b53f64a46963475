"""``lost_updates``: weights in bf16 or fp16 whose updates are smaller than half of their last digit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynguard import Evidence, Finding, Prescription, Severity
from dynguard_plugins.stability.health_probe import sample

if TYPE_CHECKING:
    from dynguard.events import GradientEvent

Receiver = Callable[[list[float]], list[Finding]]
NARROW = ("torch.bfloat16", "torch.float16")
ENTRIES = 4096  # of each parameter
PARAMETERS = 32  # that are looked at
FIRST = 5  # steps before the first look
SPAN = 25  # updates between the copy and the look
LOOKS = 2  # in a row that have to agree
CHANGED = 0.05  # share of entries below which updates are lost
SLOWEST = 0.1  # of the highest learning rate so far: the end of a schedule may stand still
RISING = 1.2  # over a look: a warm-up has yet to arrive
PAUSE, LONGEST_PAUSE = 50, 1600  # steps to the next look after one that found nothing, doubling


@dataclass(slots=True)
class Look:
    """Sampled entries of some parameters with which of them have a gradient, at one moment."""

    layers: list[int]
    begun: int
    rate: float
    copies: list[Any]
    masks: list[Any]


class Precision:
    """Compares a sample of every low-precision parameter with itself, 25 updates later.

    One update may well leave most entries alone where rounding is stochastic or its error is carried along; those have
    changed after 25. What never changes although its gradient is not zero has lost its updates.
    """

    def __init__(self) -> None:
        self.clock = 0
        self.next = FIRST
        self.pause = PAUSE
        self.highest = 0.0
        self.told = False
        self.low: dict[int, int] = {}
        self._narrow: list[int] | None = None
        self._look: Look | None = None
        self._held = 0

    def due(self, event: GradientEvent) -> tuple[Any, Receiver] | None:
        """Start a look, or give (shares on the device, who takes them) of one that is finished."""
        self.clock += 1
        if self.clock < self.next or self.told:
            return None
        if self._narrow is None or self.clock == self.next:
            self._narrow = narrow(event.parameters)
        if not self._narrow:
            self.next = self.clock + LONGEST_PAUSE
            return None
        look = self._look
        if look is None:
            self._begin(event, self._narrow)
            return None
        self._held += event.rejected is True
        if self.clock - look.begun - self._held < SPAN:
            return None
        self._look = None
        self.next = self.clock + PAUSE  # until the answer is there
        rate = _rate(event, look.layers[0])
        fair = rate >= SLOWEST * self.highest and rate <= RISING * look.rate and rate > 0
        if not fair:
            return None
        sizes = [int(event.parameters[i].numel()) for i in self._narrow]
        total, names, step = sum(sizes), event.names, event.step
        weights = {i: size / total for i, size in zip(self._narrow, sizes, strict=True)}
        matrix = {i: event.parameters[i].ndim > 1 for i in look.layers}
        return shares(look, event.parameters), lambda values: self._answer(look, values, weights, matrix, names, step)

    def _begin(self, event: GradientEvent, layers: Sequence[int]) -> None:
        chosen = [i for i in _spread(layers) if _dense(event.gradients[i])]
        if not chosen:
            self.next = self.clock + PAUSE
            return
        rate = _rate(event, chosen[0])
        self.highest = max(self.highest, rate)
        self._held = 0
        copies = [sample(event.parameters[i], ENTRIES).clone() for i in chosen]
        masks = [sample(event.gradients[i], ENTRIES) != 0 for i in chosen]
        self._look = Look(chosen, self.clock, rate, copies, masks)

    def _answer(
        self,
        look: Look,
        values: list[float],
        weights: dict[int, float],
        matrix: dict[int, bool],
        names: Sequence[str],
        step: int,
    ) -> list[Finding]:
        """Take the shares of changed entries, -1 where no entry had a gradient."""
        known = {i: v for i, v in zip(look.layers, values, strict=True) if v >= 0}
        low = {i for i, v in known.items() if v < CHANGED}
        self.low = {i: self.low.get(i, 0) + 1 for i in low}
        lost = [i for i in sorted(low) if self.low[i] >= LOOKS]
        seen = sum(weights[i] for i in known) or 1.0
        part = sum(weights[i] for i in lost) / seen
        if lost and (part >= 0.5 or any(matrix[i] for i in lost)):
            self.told = True
            return [_finding(lost, known, part, names, step, look.rate)]
        self.next = self.clock + (0 if any(matrix[i] for i in low) else self.pause)
        self.pause = PAUSE if low else min(2 * self.pause, LONGEST_PAUSE)
        return []

    def state_dict(self) -> dict[str, Any]:
        """Counts; a look that is under way starts anew."""
        return {name: getattr(self, name) for name in ("clock", "next", "pause", "highest", "told")} | {
            "low": dict(self.low)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up ``state_dict()``."""
        for name in ("clock", "next", "pause", "highest", "told"):
            setattr(self, name, state[name])
        self.low, self._narrow, self._look = dict(state["low"]), None, None


def narrow(parameters: Sequence[Any]) -> list[int]:
    """Indices of the parameters in bf16 or fp16."""
    return [i for i, p in enumerate(parameters) if str(getattr(p, "dtype", "")) in NARROW and _dense(p)]


def shares(look: Look, parameters: Sequence[Any]) -> Any:
    """(k,) tensor: share of the entries with a gradient that changed since, -1 where none had a gradient."""
    import torch

    rows = []
    for layer, old, mask in zip(look.layers, look.copies, look.masks, strict=True):
        changed = ((sample(parameters[layer], ENTRIES) != old) & mask).sum()
        having = mask.sum()
        rows.append(torch.where(having > 0, changed / having.clamp_min(1), -1.0))
    return torch.stack([row.to(rows[0].device, non_blocking=True) for row in rows]).float()


def _dense(tensor: Any) -> bool:
    return tensor is not None and str(getattr(tensor, "layout", "")) == "torch.strided"


def _spread(layers: Sequence[int]) -> Sequence[int]:
    return layers[:: -(-len(layers) // PARAMETERS)]


def _rate(event: GradientEvent, layer: int) -> float:
    """Learning rate of a layer; one on a device is taken to be constant."""
    rate = event.learning_rates[layer] if len(event.learning_rates) else 0.0
    return float(rate) if isinstance(rate, (int, float)) else 1.0


def _finding(
    lost: list[int], known: dict[int, float], part: float, names: Sequence[str], step: int, rate: float
) -> Finding:
    whole = len(lost) == len(known) > 1
    share = max(known[i] for i in lost)
    which = f"{len(lost)} of {len(known)} parameters looked at" if len(lost) > 1 else repr(names[lost[0]])
    return Finding(
        kind="lost_updates",
        severity=Severity.WARNING if part >= 0.5 else Severity.INFO,
        step=step,
        subject="" if whole else names[lost[0]],
        premise=f"in {which} at most {share:.1%} of the entries that have a gradient changed in {SPAN} updates: these "
        "are smaller than half of the weights' last digit and vanish in rounding",
        implies="the weights stand still, whatever the loss says",
        expected_effect="with weights that can hold the updates the run goes on learning",
        evidence=tuple(
            Evidence(name=name, value=value)
            for name, value in {
                "changed_share": share, "updates": SPAN, "parameters_lost": len(lost), "parameters_seen": len(known),
                "share_of_weights": part, "lr": rate,
            }.items()
        ),
        prescriptions=(
            Prescription(
                parameter="dtype of the weights", current="bf16 or fp16", proposed="float32 master weights",
                why="keep the weights in float32 and compute under autocast, or round stochastically",
                undo="model.to(torch.bfloat16)",
            ),
        ),
    )  # fmt: skip
