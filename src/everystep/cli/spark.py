"""A series of numbers as one line of bars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

WIDTH = 60
"""A longer series is drawn in so many characters."""

_BARS = "▁▂▃▄▅▆▇█"

NOT_FINITE = "×"


WIDE = 100
"""From this ratio of the greatest to the least value on, bars are drawn on a logarithmic scale."""


def is_wide(values: Sequence[float]) -> bool:
    """Whether positive values are so far apart that a linear scale would show the largest alone."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) >= WIDE * min(finite)


def spark(values: Sequence[float], width: int = WIDTH) -> str:
    """Bars from the least value to the greatest, and `×` for what is not finite; on a logarithmic
    scale where the values are far apart (`is_wide`).

    Where several values share a character it shows the one that is farthest from the median of the
    series, so that a single spike is seen in a long one.
    """
    if is_wide(values):
        values = [math.log(value) if math.isfinite(value) else value for value in values]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return NOT_FINITE * min(len(values), width)
    low, high, middle = min(finite), max(finite), median(finite)
    count = min(len(values), width)
    bounds = [len(values) * i // count for i in range(count + 1)]
    return "".join(
        _bar(values[start:stop], low, high, middle) for start, stop in itertools.pairwise(bounds)
    )


def _bar(part: Sequence[float], low: float, high: float, middle: float) -> str:
    if not all(map(math.isfinite, part)):
        return NOT_FINITE
    value = max(part, key=lambda value: abs(value - middle))
    share = (value - low) / (high - low) if high > low else 0.0
    return _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]
