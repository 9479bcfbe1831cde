"""The paper's closed form against a numeric minimum of its sum."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everystep.planning.lowdiff import optimum, wasted_share

GOLDEN = (math.sqrt(5) - 1) / 2


def least(f: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum is least, by golden section over the logarithm."""
    a, b = math.log(low), math.log(high)
    for _ in range(80):
        c, d = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
        a, b = (a, d) if f(math.exp(c)) < f(math.exp(d)) else (c, b)
    return math.exp((a + b) / 2)


@given(
    state_bytes=st.integers(10**6, 10**12),
    write_bytes_per_s=st.floats(1e7, 1e11),
    merge_s=st.floats(1e-3, 10),
    mtbf_s=st.floats(60, 1e6),
)
def test_the_closed_form_is_the_minimum(
    state_bytes: int, write_bytes_per_s: float, merge_s: float, mtbf_s: float
) -> None:
    found = optimum(state_bytes, write_bytes_per_s, merge_s, mtbf_s)

    def waste(fulls_per_s: float, batch_s: float) -> float:
        return wasted_share(
            state_bytes, write_bytes_per_s, 0.0, merge_s, mtbf_s,
            fulls_per_s=fulls_per_s, batch_s=batch_s,
        )  # fmt: skip

    def best_batch_s(fulls_per_s: float) -> float:
        return least(lambda b: waste(fulls_per_s, b), found.batch_s / 1e3, found.batch_s * 1e3)

    around = found.fulls_per_s / 1e3, found.fulls_per_s * 1e3
    fulls_per_s = least(lambda f: waste(f, best_batch_s(f)), *around)
    assert fulls_per_s == pytest.approx(found.fulls_per_s, rel=1e-3)
    assert best_batch_s(fulls_per_s) == pytest.approx(found.batch_s, rel=1e-3)


@given(st.integers(10**6, 10**12), st.floats(1e7, 1e11), st.floats(1e-3, 1e3), st.floats(60, 1e6))
def test_where_there_is_a_batch_per_full(s: int, w: float, r: float, m: float) -> None:
    batches = optimum(s, w, r, m)
    margin = r**2 * w / (2 * m * s)
    assume(abs(margin - 1) > 1e-6)
    assert (batches.fulls_per_s * batches.batch_s <= 1) == (margin <= 1)


def test_a_sum_by_hand() -> None:
    # 1 GB/s, 2 GB, a full in 100 s, a batch of 10 s: (5 + 3 + 0.5 * 9) / 1000 + 0.01 * 2
    got = wasted_share(2 * 10**9, 1e9, 3.0, 1.0, 1000.0, fulls_per_s=0.01, batch_s=10.0)
    assert got == pytest.approx(0.0325)
