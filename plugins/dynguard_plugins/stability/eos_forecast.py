"""When the sharpness will reach the edge, if it goes on as it did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 10  # checks that the trend is taken from
LEAST = 6  # checks that make a trend
LEVEL = 0.9  # of the interval


@dataclass(slots=True, frozen=True)
class Forecast:
    """A crossing to come: after ``steps`` steps, between ``earliest`` and ``latest`` (may be infinite)."""

    steps: float
    earliest: float
    latest: float
    doubling: float


def forecast(steps: Sequence[int], ratios: Sequence[float]) -> Forecast | None:
    """The crossing of ratio 1, from a Theil-Sen trend of the log ratio (Theil 1950, Sen 1968).

    Args:
        steps: (n,) at which was measured, ascending.
        ratios: (n,) sharpness over threshold; what is not positive is left out.

    Returns:
        None where the trend is not surely upwards (its 90 % interval holds 0), or the ratio is 1 already.
    """
    from scipy.stats import theilslopes  # type: ignore[import-untyped]  # scipy ships no types

    pairs = [(s, math.log(r)) for s, r in zip(steps, ratios, strict=True) if r > 0 and math.isfinite(r)][-WINDOW:]
    if len(pairs) < LEAST:
        return None
    at, logs = [float(s) for s, _ in pairs], [v for _, v in pairs]
    if min(logs) == max(logs):
        return None
    found = theilslopes(logs, at, LEVEL)
    slope, low, high = float(found.slope), float(found.low_slope), float(found.high_slope)
    now = float(found.intercept) + slope * at[-1]
    if low <= 0 or slope <= 0 or max(now, logs[-1]) >= 0:
        return None
    return Forecast(-now / slope, -now / high, -now / low, math.log(2) / slope)
