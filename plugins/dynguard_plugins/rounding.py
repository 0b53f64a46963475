"""Numbers as reports show them."""

from __future__ import annotations

import math


def short(value: float | None) -> float | None:
    """Four significant digits; None for what is missing or not finite."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
