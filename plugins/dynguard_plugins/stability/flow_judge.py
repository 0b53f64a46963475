"""What windows of steps say of each layer: signal, movement, dead units, growth over depth. On the host, with numpy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dynguard_plugins.stability.flow_sample import Window

Array = npt.NDArray[np.float64]
KEPT = 64  # windows that are remembered
FIELDS = ("snr", "gradient", "rms", "speed", "net", "weight", "before", "after", "variance", "counted")
STILL = 1e-6  # way over a window, relative to the weights, of a layer that stands still
SLOWER = 30.0  # times slower than before, at the same gradient
BLOWN = 100.0  # sqrt(v) over the gradient where nothing is known of the time before
CAUSE = 10.0  # sqrt(v) over the gradient from which on it is the cause of a standstill
FALLEN = 3.0  # a gradient below a third of what it was has fallen: a layer that has learned may rest
FAINT = 1e-4  # of the median gradient norm of all layers; fainter ones are rounding (a bias before BatchNorm)
IN_A_ROW = 2  # windows that must agree
UNITS_IN_A_ROW = 3  # windows in which a unit's gradient is zero before it is dead
INFORMATIVE = 4  # sampled inputs that carry anything, before a zero row says something of its unit
SLOWEST, RISING = 0.1, 1.2  # learning rates: the end of a schedule may stand still, a warm-up has yet to arrive
LEAST_LAYERS, FIT, STEEP, SPAN = 6, 0.9, 3.0, 1e3


@dataclass(slots=True)
class Stalled:
    """One layer that hardly moves although its gradient is alive."""

    layer: int
    cause: str  # second_moment, rounding, unknown
    numbers: dict[str, float]


@dataclass(slots=True)
class Chain:
    """Gradient norms of layers of one kind over depth, as a line in the logarithm."""

    layers: list[int]
    factor: float  # by which the gradient grows per layer, from the last to the first
    fit: float
    first: float
    last: float


class Layers:
    """All that is known of the layers of one source."""

    def __init__(self) -> None:
        self.history: list[dict[str, Array]] = []
        self.streaks: dict[int, npt.NDArray[np.int64]] = {}
        self.slow: dict[int, int] = {}
        self.highest: Array = np.zeros(0)
        self.steep: dict[str, int] = {}
        self.dead: dict[int, float] = {}

    def take(self, window: Window, units: frozenset[int]) -> None:
        """Fold in a window. Reads the device.

        Args:
            window: as it was gathered.
            units: indices of parameters whose rows are the incoming weights of units.
        """
        row = numbers(window)
        if self.history and len(row["net"]) < len(self.last["net"]):
            self.load_state_dict(Layers().state_dict())  # other parameters: an index no longer means what it did
        self.highest = np.fmax(_longer(self.highest, len(row["after"])), np.fmax(row["before"], row["after"]))
        self.history = [*self.history, row][-KEPT:]
        self._count_rows(window, units)

    @property
    def last(self) -> dict[str, Array]:
        """The numbers of the newest window."""
        return self.history[-1]

    def series(self, name: str) -> Array:
        """(windows, n) of one number, NaN where a layer was not there yet."""
        count = len(self.last[name])
        return np.stack([_longer(row[name], count, np.nan) for row in self.history])

    # -- layers that stopped

    def frozen(self) -> list[int]:
        """Layers whose learning rate is exactly 0 although they have a gradient."""
        row = self.last
        return _where((row["before"] == 0) & (row["after"] == 0) & (row["net"] == 0) & (row["gradient"] > 0))

    def stalled(self, narrow: frozenset[int], leave: frozenset[int], adaptive: bool) -> list[Stalled]:
        """Layers that have hardly moved for some windows, with what holds them.

        Args:
            narrow: those in bf16 or fp16, whose rounding others look after.
            leave: those not to be judged (tables).
            adaptive: whether the optimizer divides by a second moment.
        """
        suspects = self._suspects()
        self.slow = {i: self.slow.get(i, 0) + 1 for i in suspects if i not in leave}
        found = []
        for i in (i for i, windows in self.slow.items() if windows >= IN_A_ROW):
            ratio = float(self.last["variance"][i] / max(self.last["rms"][i], 1e-300))
            cause = self._cause(i, ratio, adaptive)
            if cause == "second_moment" or i not in narrow:
                found.append(Stalled(i, cause, self._evidence(i, ratio)))
        return found

    def _suspects(self) -> list[int]:
        row = self.last
        gradients = self.series("gradient")
        before = median(gradients[:-1]) if len(self.history) > 1 else row["gradient"]
        some = row["gradient"][row["gradient"] > 0]
        alive = (row["gradient"] > 0) & (row["gradient"] * FALLEN >= before)
        alive &= row["gradient"] >= FAINT * (np.median(some) if len(some) else 0.0)
        fair = (row["before"] > 0) & (row["after"] >= SLOWEST * self.highest)
        fair &= row["after"] <= RISING * row["before"]
        still = np.fmax(row["net"], row["speed"]) <= STILL * row["weight"]  # not one that swings to and fro
        still &= row["weight"] > 0
        slow = still | self._slower() | self._blown(gradients)
        return _where(alive & fair & slow & (row["counted"] > 0))

    def _slower(self) -> npt.NDArray[np.bool_]:
        """Whose movement per learning rate is far below what it was."""
        past = self.history[: -IN_A_ROW + 1] if len(self.history) > IN_A_ROW else []
        if len(past) < IN_A_ROW:
            return np.zeros(len(self.last["net"]), bool)
        verdict = np.ones(len(self.last["net"]), bool)
        with np.errstate(all="ignore"):
            rates = np.fmax(self.series("before"), self.series("after"))
            for name in ("speed", "net"):
                per_rate = self.series(name) / rates
                verdict &= per_rate[-1] * SLOWER <= median(per_rate[: len(past)])
        return verdict

    def _blown(self, gradients: Array) -> npt.NDArray[np.bool_]:
        """Whose second moment is far above squares of the gradient that have been the same for three windows."""
        row = self.last
        if len(gradients) < 3:
            return np.zeros(len(row["rms"]), bool)
        newest = gradients[-3:]
        steady = newest.max(0) <= FALLEN * newest.min(0)
        blown: npt.NDArray[np.bool_] = steady & (row["rms"] > 0) & (row["variance"] >= BLOWN * row["rms"])
        return blown

    def _cause(self, i: int, ratio: float, adaptive: bool) -> str:
        row = self.last
        if ratio >= CAUSE:
            return "second_moment"
        root = np.sqrt(max(row["counted"][i], 1.0))
        if not adaptive and row["after"][i] * row["rms"][i] < 2.0**-24 * row["weight"][i] / root:
            return "rounding"
        return "unknown"

    def _evidence(self, i: int, ratio: float) -> dict[str, float]:
        row = self.last
        found = {
            "relative_movement": float(row["net"][i] / row["weight"][i]) if row["weight"][i] else 0.0,
            "gradient_norm": float(row["gradient"][i]), "lr": float(row["after"][i]),
        }  # fmt: skip
        return found | ({"second_moment_over_gradient": ratio} if np.isfinite(ratio) else {})

    # -- units

    def _count_rows(self, window: Window, units: frozenset[int]) -> None:
        alive, zero = _host(window.alive).astype(bool), _host(window.zero).astype(bool)
        enough = float(_host(window.numbers["count"])) >= INFORMATIVE
        for s in window.layout.sections:
            if s.index not in units or not enough:
                continue
            lively, empty = (a[s.start : s.stop].reshape(s.rows, s.columns) for a in (alive, zero))
            if lively.any(0).sum() < min(INFORMATIVE, s.columns) or s.rows < 2:
                continue
            silent = ~lively.any(1) & ~empty.all(1)
            before = self.streaks.get(s.index)
            before = before if before is not None and len(before) == s.rows else np.zeros(s.rows, np.int64)
            self.streaks[s.index] = np.where(silent, before + 1, 0)
        self.dead = {i: float((row >= UNITS_IN_A_ROW).mean()) for i, row in self.streaks.items()}

    # -- depth

    def chains(self, names: Sequence[str]) -> Iterator[Chain]:
        """Rows of like layers whose gradient grows or falls steadily with depth, twice in a row."""
        found = {key: chain for key, chain in _chains(names, self.last) if _steep(chain)}
        self.steep = {key: self.steep.get(key, 0) + 1 for key in found}
        yield from (found[key] for key, windows in self.steep.items() if windows >= IN_A_ROW)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain arrays."""
        return {
            "history": [dict(row) for row in self.history], "streaks": dict(self.streaks), "slow": dict(self.slow),
            "highest": self.highest, "steep": dict(self.steep), "dead": dict(self.dead),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self.history = [{name: np.array(row[name], float) for name in FIELDS} for row in state["history"]]
        self.streaks = {int(i): np.array(row, np.int64) for i, row in state["streaks"].items()}
        self.slow, self.steep = {int(i): int(k) for i, k in state["slow"].items()}, dict(state["steep"])
        self.highest = np.array(state["highest"], float)
        self.dead = {int(i): float(share) for i, share in state["dead"].items()}


def numbers(window: Window) -> dict[str, Array]:
    """(n,) numbers of a window by FIELDS, NaN where unknown.

    snr is ``|E g|^2 / tr Var g``: with k gradients of mean m, tr Var is estimated by V = sum |g - m|^2 / (k - 1), and
    ``|E g|^2`` by ``|m|^2 - V / k``, as the mean of k noisy gradients still has V / k of their variance (so it is below
    zero now and then where there is no signal). The inverse is the simple gradient noise scale in units of the batch
    (McCandlish et al. 2018, arXiv:1812.06162, eq. 2.9). Sums in float32 tell no ratio above 1e6.
    """
    count = len(window.absent)
    got = {name: np.asarray(_host(value), float) for name, value in window.numbers.items()}
    k = np.maximum(float(got["count"]) - np.array(window.absent, float), 0.0)
    present = np.zeros(count)
    for s in window.layout.sections:
        present[s.index] = s.stop - s.start
    free = 1.0 if float(got["held"]) <= 0.5 * window.updates else np.nan  # of a window mostly held back, no movement
    with np.errstate(all="ignore"):
        mean2, k1 = got["sum2"] / k**2, np.where(k >= 3, k - 1, np.nan)
        spread = np.maximum(got["squares"] - got["sum2"] / k, 1e-6 * got["squares"]) / k1
        row = {
            "snr": np.where(got["squares"] > 0, (mean2 - spread / k) / spread, np.nan),
            "rms": np.sqrt(got["squares"] / (k * present)),
            "gradient": _gradient(window.norms, count),
            "speed": np.sqrt(got["way"]) * free, "net": np.sqrt(got["net"]) * free,
            "weight": np.sqrt(got["weight"]),
            "before": _rates(window.rates[0]), "after": _rates(window.rates[1]),
            "variance": np.full(count, np.nan), "counted": present * (k >= 3),
        }  # fmt: skip
        for i, total, entries, correction in window.variance:
            row["variance"][i] = np.sqrt(float(_host(total)) / entries / float(_host(correction)))
    return {name: np.asarray(row[name], float) for name in FIELDS}


def _gradient(norms: list[Any], count: int) -> Array:
    """(n,) median of the gradient norm over the steps that count."""
    rows = [row for row in (_host(norm) for norm in norms) if np.isfinite(row).all()]
    return median(np.stack(rows)) if rows else np.full(count, np.nan)


def _chains(names: Sequence[str], row: dict[str, Array]) -> Iterator[tuple[str, Chain]]:
    kinds: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        if row["counted"][i] > 0:
            kinds.setdefault(re.sub(r"\d+", "#", name), []).append(i)
    for key, layers in kinds.items():
        norms = row["gradient"][layers]
        if len(layers) < LEAST_LAYERS or not (norms > 0).all():  # a NaN is not
            continue
        depth, logs = np.arange(len(layers), dtype=float), np.log(norms)
        slope, offset = np.polyfit(depth, logs, 1)
        total = float(((logs - logs.mean()) ** 2).sum())
        left = float(((logs - slope * depth - offset) ** 2).sum())
        yield key, Chain(layers, float(np.exp(-slope)), 1 - left / total if total else 0.0, norms[0], norms[-1])


def _steep(chain: Chain) -> bool:
    ratio = max(chain.factor, 1 / chain.factor)
    return chain.fit >= FIT and (ratio > STEEP or ratio ** (len(chain.layers) - 1) >= SPAN)


def _rates(rates: list[Any]) -> Array:
    return np.array([float(_host(rate)) for rate in rates], float)


def _host(value: Any) -> Any:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value, float)


def median(rows: Array) -> Array:
    """Median by column of what is known; NaN where nothing is."""
    known = np.isfinite(rows).any(0)
    result: Array = np.full(rows.shape[1], np.nan)
    if known.any():
        result[known] = np.nanmedian(rows[:, known], axis=0)
    return result


def _longer(row: Array, count: int, fill: float = 0.0) -> Array:
    return np.concatenate((row, np.full(max(count - len(row), 0), fill)))


def _where(mask: Any) -> list[int]:
    return [int(i) for i in np.flatnonzero(mask)]
