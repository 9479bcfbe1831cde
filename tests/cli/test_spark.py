"""A series of numbers as one line of bars."""

from __future__ import annotations

import math

import pytest

from everystep.cli.spark import spark


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 5, ""),
        ([3.0], 5, "▁"),
        ([2.0, 2.0], 5, "▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0.0, math.nan, 1.0, math.inf], 8, "▁×█×"),
        ([math.nan, math.nan], 8, "××"),
        ([1, 1, 1, 9, 1, 1, 1, 1], 4, "▁█▁▁"),
        ([9, 9, 1, 9, 9, 9, 9, 9], 4, "█▁██"),
        ([1, 10, 100, 1_000, 10_000, 100_000, 10**6, 10**7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 10, 100, 1_000], 8, "▁▁▁█"),
        ([1, math.nan, 100], 8, "▁×█"),
    ],
)
def test_what_is_drawn(values: list[float], width: int, drawn: str) -> None:
    assert spark(values, width) == drawn


def test_a_single_spike_is_seen_in_a_long_series() -> None:
    values = [1.0] * 10_000
    values[4321] = 50.0
    line = spark(values)
    assert (len(line), line.count("█"), line.index("█")) == (60, 1, 4321 * 60 // 10_000)
