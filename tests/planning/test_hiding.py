"""The model of Checkflow: verdicts by hand, the interval that does not swing, and deviations."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.errors import UsageError
from everystep.planning import hiding
from everystep.planning.hiding import (
    Figures,
    Interval,
    Pace,
    deviation,
    least_interval,
    power_of_two,
    steps_between,
    verdict,
)


def figures(**more: float) -> Figures:
    """26 bytes, two seconds of window, half a second of update."""
    given_: dict[str, object] = {
        "state_bytes": 26, "forward_s": 1.0, "backward_s": 1.0, "update_s": 0.5,
        "offload_bytes_per_s": 10.0, "snapshot_bytes_per_s": 100.0, "write_bytes_per_s": 100.0,
    }  # fmt: skip
    return Figures(**{**given_, **more})  # type: ignore[arg-type]


def test_a_state_that_fits_the_window_costs_nothing() -> None:
    found = verdict(figures(state_bytes=20))
    assert found.hidden
    assert (found.every, found.snapshot_bytes, found.snapshot_s, found.stall_share) == (1, 0, 0, 0)
    assert (found.step_s, found.staged_s, found.extra_peak_bytes) == (2.5, 2.0, 0)
    assert (found.hides_at_window_s, found.hides_at_offload_bytes_per_s) == (2.0, 10.0)
    assert not verdict(figures(state_bytes=21)).hidden


def test_what_does_not_fit_is_snapshotted() -> None:
    # of 25 bytes 20 leave in the window; 5 are copied in 0.05 s, while half a byte of them leaves
    found = verdict(figures(state_bytes=25))
    assert not found.hidden
    assert (found.snapshot_bytes, found.snapshot_s, found.step_s) == (5, 0.05, 2.55)
    assert found.extra_peak_bytes == 5, "4.5 bytes, rounded up"
    assert (found.staged_s, found.hides_at_window_s) == (2.5, 2.5)
    assert verdict(figures(state_bytes=25, activation_bytes=5)).extra_peak_bytes == 0
    assert verdict(figures(state_bytes=25, activation_bytes=4)).extra_peak_bytes == 1


def test_the_stall_itself_gives_the_link_time() -> None:
    # the paper's condition: 25 bytes; with 0.6 s of stall for 6 bytes the link carries 6 more
    slow = figures(state_bytes=26, snapshot_bytes_per_s=10.0)
    assert Fraction(26) > Fraction(10) * Fraction(2.5)
    assert least_interval(slow) == 1
    assert least_interval(figures(state_bytes=26, snapshot_bytes_per_s=1e9)) == 2
    assert verdict(slow).every == 2, "a stall is no reason to stall more often"
    assert verdict(slow, every=1).stall_share > verdict(slow).stall_share


def test_the_interval_is_the_least_power_of_two_that_the_link_can_carry() -> None:
    found = verdict(figures(state_bytes=60, snapshot_bytes_per_s=1e9))
    assert (found.least_every, found.every) == (3, 4)
    assert verdict(figures(state_bytes=60, snapshot_bytes_per_s=1e9), every=3).every == 3
    with pytest.raises(UsageError, match="at every 2 steps") as refused:
        verdict(figures(state_bytes=60, snapshot_bytes_per_s=1e9), every=2)
    assert refused.value.hint == "at every 3 steps it can"


def test_memory_is_needed_where_the_next_forward_wants_its_place() -> None:
    # 100 bytes, 80 of them snapshotted, over four and more steps; free when the update ends: 80
    far = figures(state_bytes=100, snapshot_bytes_per_s=1e9, activation_bytes=80)
    assert verdict(far, every=4).extra_peak_bytes == 65, "at the end of the forward 15 are gone"


def test_on_the_cpu_snapshots_go_to_staging_memory_at_once() -> None:
    host = figures(state_bytes=500, snapshot_bytes_per_s=48.0, on_device=False)
    assert (verdict(host).every, verdict(host).least_every) == (32, 1)
    found = verdict(host, every=1)
    assert (found.every, found.snapshot_bytes, found.snapshot_s) == (1, 480, 10.0)
    assert (found.extra_peak_bytes, found.staged_s, found.step_s) == (0, 12.0, 12.5)


def test_storage_slower_than_checkpoints_come() -> None:
    found = verdict(figures(state_bytes=20, write_bytes_per_s=3.2))  # 6.25 s, 2.5 steps
    assert (found.durable_every_steps, found.durable_gap_steps) == (2.5, 3)
    assert (found.step_s, found.durable_at_write_bytes_per_s) == (2.5, 8.0)
    assert found.staging_bytes == 60
    found = verdict(figures(state_bytes=20, write_bytes_per_s=3.2), "block")
    assert (found.durable_every_steps, found.durable_gap_steps) == (1, 1)
    assert (found.step_s, found.staging_bytes) == (6.25, 40)
    assert found.snapshot_bytes == 20, "room comes when the window is over"
    assert (found.snapshot_s, found.staging_s) == (0.2, 3.55)
    assert found.durable_at_write_bytes_per_s == 8.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("state_bytes", v) for v in (0, -1)),
        *(("offload_bytes_per_s", v) for v in (0.0, -1.0, math.inf, math.nan)),
        *(("snapshot_bytes_per_s", v) for v in (0.0, math.nan)),
        *(("write_bytes_per_s", v) for v in (0.0, math.nan)),
        *(("forward_s", v) for v in (-1.0, math.inf, math.nan)),
        *((name, -1.0) for name in ("backward_s", "update_s", "activation_bytes")),
    ],
)
def test_figures_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        figures(**{name: value})


def test_there_must_be_a_window() -> None:
    with pytest.raises(UsageError, match="forward_s \\+ backward_s"):
        figures(forward_s=0.0, backward_s=0.0)


# ---------------------------------------------------------------- the interval, chosen online

POSITIVE = st.floats(1e-3, 1e3)


@given(state=st.integers(0, 10**6), cycle_s=POSITIVE, rate=POSITIVE)
def test_steps_between_is_the_least_number_that_is_enough(
    state: int, cycle_s: float, rate: float
) -> None:
    steps = steps_between(state, cycle_s, rate)
    one = Fraction(rate) * Fraction(cycle_s)
    assert steps >= 1 and state <= steps * one
    assert steps == 1 or state > (steps - 1) * one


def test_steps_between_is_exact_where_floats_are_not() -> None:
    assert math.ceil(3 / (0.3 * 10.0)) == 1, "0.3 is a little less than three tenths"
    assert steps_between(3, 0.3, 10.0) == 2
    assert steps_between(49, 7.0, 7.0) == 1
    assert steps_between(50, 7.0, 7.0) == 2
    for cycle_s, rate in ((0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(UsageError):
            steps_between(1, cycle_s, rate)


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (-1, 0, 1, 2, 3, 4, 5, 8, 9)] == [1, 1, 1, 2, 4, 4, 8, 8, 16]


def after(interval: Interval, *needs: float) -> list[int]:
    """The intervals after observations in which the link needs so many steps."""
    found = []
    for need in needs:
        interval = interval.observe(round(1000 * need), 1.0, 1000.0)
        found.append(interval.steps)
    return found


def test_it_rises_at_once_beyond_the_margin() -> None:
    assert after(Interval(), 1.0, 1.1, 1.101, 7.9, 100) == [1, 1, 2, 8, 128]


def test_it_falls_by_half_after_calm_that_lasts() -> None:
    calm = [1.0] * hiding.PATIENCE
    assert after(Interval(8), *calm) == [8] * (hiding.PATIENCE - 1) + [4]
    assert after(Interval(8), *calm, *calm, *calm)[:: hiding.PATIENCE] == [8, 4, 2]
    assert after(Interval(1), *calm) == [1] * hiding.PATIENCE
    interrupted = [*calm[:-1], 3.7, *calm[:-1]]
    assert after(Interval(8), *interrupted) == [8] * len(interrupted)


@given(needs=st.lists(st.floats(0.01, 300), max_size=40), start=st.integers(0, 9))
def test_it_is_a_power_of_two_and_never_far_too_small(needs: list[float], start: int) -> None:
    interval = Interval(1 << start)
    for need in needs:
        before = interval.steps
        interval = interval.observe(round(1000 * need), 1.0, 1000.0)
        assert interval.steps.bit_count() == 1
        assert round(1000 * need) <= 1100 * interval.steps
        assert interval.steps >= before // 2
        assert 0 <= interval.calm < hiding.PATIENCE


@given(need=st.floats(0.01, 300), wobble=st.lists(st.floats(-0.04, 0.04), min_size=99, max_size=99))
def test_it_does_not_swing_where_the_need_only_wobbles(need: float, wobble: list[float]) -> None:
    path = after(Interval(), *(need * (1 + share) for share in wobble))
    assert all(later >= earlier for earlier, later in pairwise(path))
    assert len(set(path)) <= 2


# ---------------------------------------------------------------- plan and reality


def test_reality_as_planned_is_not_told() -> None:
    plan = Pace(forward_s=1.0, snapshot_s=0.0, offload_bytes_per_s=25e9)
    assert deviation(plan, plan) is None
    assert deviation(plan, Pace(forward_s=1.2, offload_bytes_per_s=20e9)) is None
    assert deviation(plan, Pace(update_s=9.0)) is None, "nothing was planned"
    assert deviation(plan, Pace(snapshot_s=0.0009)) is None, "no share of zero, but nothing"
    assert deviation(Pace(), Pace(forward_s=1.0)) is None


def test_what_is_away_is_told_with_both_numbers() -> None:
    plan = Pace(forward_s=1.0, snapshot_s=0.0, offload_bytes_per_s=25e9, write_bytes_per_s=8e8)
    real = Pace(forward_s=1.21, snapshot_s=0.05, offload_bytes_per_s=12.5e9, write_bytes_per_s=1e9)
    assert deviation(plan, real) == (
        "forward 1.21 s, planned 1 s; snapshot 50 ms, planned 0 ms; "
        "offload 12.5 GB/s, planned 25 GB/s; write 1 GB/s, planned 800 MB/s"
    )
