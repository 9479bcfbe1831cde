"""The simulation of failures by hand, and against the closed form; the estimate of their rate.

Of the closed form the simulation is fed with, mean time and share of hosts are those of the
failures that it drew, so that only what each failure costs is left to chance: its standard
deviation is at most about its mean, so that of n failures' sum is below 1/sqrt(n) of it. Five of
these are allowed, and the square of the share that failures waste for what comes in their second
order (a failure in the wake of another).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from everystep.errors import UsageError
from everystep.planning.failures import Failure, Spent, estimate_mtbf, poisson, simulate
from everystep.planning.intervals import Costs, disk_load, predict, rhythm

PLAIN = Costs(
    step_s=1.0, state_bytes=400, delta_bytes=1, write_bytes_per_s=1000.0, replay_s=0.25,
    mtbf_s=1.0, load_s=2.0, restart_s=3.0, sync_s=0.125,
)  # fmt: skip
"""A step per second, a full in 0.4 s, nothing visible. Its mean time between failures is unused."""

STALLS = replace(PLAIN, batch_stall_s=0.25, record_stall_s=0.0625, full_stall_s=0.5)


def run(
    costs: Costs, full_every: int, batch: int, *failures: Failure, duration_s: float = 100.0
) -> Spent:
    return simulate(costs, full_every, batch, failures, duration_s=duration_s)


def add_up(spent: Spent) -> None:
    parts = (
        spent.useful_s, spent.visible_s, spent.lost_s, spent.restart_s, spent.load_s,
        spent.replay_s,
    )  # fmt: skip
    assert sum(parts) == pytest.approx(spent.duration_s)
    assert min(parts) >= -1e-12 * spent.duration_s


# ---------------------------------------------------------------- by hand


def test_without_failures() -> None:
    spent = run(PLAIN, 10, 4)
    assert (spent.steps, spent.useful_s, spent.visible_s, spent.lost_s) == (100, 100.0, 0.0, 0.0)
    # 4 + 4 + 2 deltas between two fulls: three writes
    cycle_s = 10 * 1.0625 + 3 * 0.25 + 0.5
    spent = run(STALLS, 10, 4, duration_s=3 * cycle_s)
    assert (spent.steps, spent.useful_s) == (30, 30.0)
    assert spent.visible_s == pytest.approx(3 * (cycle_s - 10))


def test_a_process_dies_and_loses_the_step_in_progress() -> None:
    spent = run(PLAIN, 10, 4, Failure(27.5, host=False), duration_s=40.0)
    # full 20, seven steps replayed; back at 27.5 + 3 + 2 + 1.75, in step 27
    assert (spent.restart_s, spent.load_s, spent.replay_s) == (3.0, 2.0, 1.75)
    assert spent.steps == 27 + 5  # 5.75 s are left
    assert spent.lost_s == pytest.approx(0.5 + 0.75)
    assert (spent.process_failures, spent.host_failures) == (1, 0)
    add_up(spent)


def test_a_host_dies_and_loses_what_was_not_durable() -> None:
    # batches end at 24, 28, 30: at 27.5 step 24 is durable
    spent = run(PLAIN, 10, 4, Failure(27.5), duration_s=40.0)
    assert spent.replay_s == 1.0
    assert spent.steps == 24 + 6  # back at 33.5
    assert spent.lost_s == pytest.approx(3.5 + 0.5)
    add_up(spent)


def test_a_batch_is_durable_only_when_its_write_is_over() -> None:
    # the write of 21 to 24 is over 0.125 + 0.004 s after step 24
    lag_s = 0.129
    for at_s, step in ((24 + lag_s - 0.001, 20), (24 + lag_s + 0.001, 24)):
        spent = run(PLAIN, 10, 4, Failure(at_s), duration_s=at_s + 6.5)
        assert spent.steps == step + (1 if step == 20 else 0)
        assert spent.replay_s == (step - 20) * 0.25
        add_up(spent)


def test_a_full_is_durable_only_when_its_write_is_over() -> None:
    full_lag_s = rhythm(PLAIN, 10, 1).full_lag_s
    assert 0.4 < full_lag_s < 0.7
    for at_s, replayed in ((20 + full_lag_s - 0.01, 10), (20 + full_lag_s + 0.01, 0)):
        spent = run(PLAIN, 10, 1, Failure(at_s), duration_s=at_s + 10)
        assert spent.replay_s == replayed * 0.25
        add_up(spent)
    # the agent still has it where only the process dies
    assert run(PLAIN, 10, 1, Failure(20.1, host=False)).replay_s == 0.0


def test_the_agent_writes_what_a_dead_process_has_left() -> None:
    first = Failure(27.5, host=False)  # 27 steps; 25 to 27 are durable 0.125 + 0.003 s later
    early, late = (run(PLAIN, 10, 4, first, Failure(27.5 + s)) for s in (0.12, 0.13))
    assert early.replay_s == pytest.approx(4 * 0.25)
    assert late.replay_s == pytest.approx(7 * 0.25)
    for spent in (early, late):
        assert (spent.process_failures, spent.host_failures) == (1, 1)
        add_up(spent)


def test_a_recovery_that_fails_begins_again() -> None:
    spent = run(PLAIN, 10, 4, Failure(25.5), Failure(27.5), Failure(31.5), duration_s=60.0)
    # 2 s of restart; then 3 s and 1 s of load; then all of it
    assert (spent.restart_s, spent.load_s, spent.replay_s) == (8.0, 3.0, 1.0)
    add_up(spent)


def test_batches_begin_anew_after_a_restart() -> None:
    # restarted at step 27 at 34.25; batches end at 30 (the full), 34, …
    spent = run(PLAIN, 10, 4, Failure(27.5, host=False), Failure(34.25 + 6.5), duration_s=60.0)
    assert spent.replay_s == pytest.approx(1.75 + 0.0)
    assert spent.steps == 30 + math.floor(60 - (34.25 + 6.5 + 5.0))
    add_up(spent)


def test_failures_at_the_end_and_out_of_order() -> None:
    assert run(PLAIN, 10, 1, Failure(100.0)).host_failures == 0
    assert run(PLAIN, 10, 1, Failure(0.0)).steps == 95
    with pytest.raises(UsageError, match="after one at"):
        run(PLAIN, 10, 1, Failure(5.0), Failure(4.0))
    with pytest.raises(UsageError, match="duration_s"):
        run(PLAIN, 10, 1, duration_s=0.0)
    with pytest.raises(UsageError, match="fewer than one step"):
        run(PLAIN, 0, 1)


def test_poisson_failures() -> None:
    draw = poisson(np.random.default_rng(3), 50.0, 0.25)
    found = [next(draw) for _ in range(4000)]
    gaps = np.diff([failure.at_s for failure in found])
    assert gaps.min() > 0
    assert np.mean(gaps) == pytest.approx(50, rel=5 / math.sqrt(4000))
    assert np.std(gaps) == pytest.approx(50, rel=0.1)
    assert np.mean([failure.host for failure in found]) == pytest.approx(0.25, abs=0.035)
    assert list(poisson(np.random.default_rng(3), math.inf, 1.0)) == []


# ---------------------------------------------------------------- against the closed form


@settings(max_examples=40)
@given(
    full_every=st.integers(1, 400),
    batch=st.integers(1, 60),
    host_share=st.sampled_from([0.0, 0.3, 1.0]),
    mtbf_s=st.sampled_from([600.0, 3_600.0, 36_000.0]),
    stalls=st.tuples(*[st.sampled_from([0.0, 0.002, 0.05])] * 3),
    replay_s=st.sampled_from([0.0, 0.01, 0.2]),
    restart_s=st.sampled_from([0.0, 10.0, 40.0]),
    fold_s=st.sampled_from([None, 0.02, 0.3]),
    seed=st.integers(0, 10**6),
)
def test_closed_form_and_simulation_agree(
    full_every: int, batch: int, host_share: float, mtbf_s: float,
    stalls: tuple[float, float, float], replay_s: float, restart_s: float, fold_s: float | None,
    seed: int,
) -> None:  # fmt: skip
    costs = Costs(
        step_s=0.5, state_bytes=10**9, delta_bytes=5 * 10**6, write_bytes_per_s=1e9,
        replay_s=replay_s, mtbf_s=mtbf_s, load_s=1.0, restart_s=restart_s, sync_s=0.003,
        batch_stall_s=stalls[0], record_stall_s=stalls[1],
        full_stall_s=10 * stalls[2] if fold_s is None else 0.0, fold_s=fold_s,
    )  # fmt: skip
    assume(disk_load(costs, full_every, batch) <= 1)
    failures = poisson(np.random.default_rng(seed), mtbf_s, host_share)
    spent = simulate(costs, full_every, batch, failures, duration_s=1500 * mtbf_s)
    add_up(spent)
    n = spent.process_failures + spent.host_failures
    drawn = replace(costs, mtbf_s=spent.duration_s / n, host_share=spent.host_failures / n)
    waste = predict(drawn, full_every, batch)
    by_failures = waste.share - waste.visible_share
    allowed = by_failures * 5 / math.sqrt(n) + by_failures**2
    assert abs(spent.wasted_share - waste.share) <= allowed
    for name in ("lost", "restart", "load", "replay"):
        share = getattr(spent, f"{name}_s") / spent.duration_s
        assert abs(share - getattr(waste, f"{name}_share")) <= allowed, name
    assert abs(spent.visible_s / spent.duration_s - waste.visible_share) <= allowed


# ---------------------------------------------------------------- how often


def test_the_prior_alone_and_what_is_seen() -> None:
    none = estimate_mtbf(0, 0.0, prior_s=1000.0)
    assert none.mean_s == 1000.0
    # one event: an exponential
    assert none.low_s == pytest.approx(1000 / -math.log(0.05))
    assert none.high_s == pytest.approx(1000 / -math.log(0.95))
    assert estimate_mtbf(3, 9_000.0, prior_s=1000.0).mean_s == 2500.0
    assert estimate_mtbf(0, 9_000.0, prior_s=1000.0).mean_s == 10_000.0
    assert estimate_mtbf(9, 0.0, prior_s=1000.0, prior_failures=2).mean_s == 2000 / 11


def test_with_many_failures_the_limits_close_in() -> None:
    few, many = estimate_mtbf(4, 40_000.0), estimate_mtbf(1600, 16_000_000.0)
    for found in (few, many):
        assert found.low_s < found.mean_s < found.high_s
    assert many.mean_s == pytest.approx(10_000, rel=0.01)
    assert many.high_s / many.low_s < 1.1 < 2 < few.high_s / few.low_s


def test_the_limits_hold_the_rate_as_often_as_they_say() -> None:
    draw = np.random.default_rng(5)
    prior_s, held = 1000.0, 0
    for _ in range(2000):
        rate = draw.gamma(2, 1 / (2 * prior_s))
        seen = int(draw.poisson(rate * 5000))
        found = estimate_mtbf(seen, 5000.0, prior_s=prior_s, prior_failures=2)
        held += found.low_s <= 1 / rate <= found.high_s
    assert held / 2000 == pytest.approx(0.9, abs=5 * math.sqrt(0.09 / 2000))


@pytest.mark.parametrize(
    ("failures", "observed_s", "prior_s", "prior_failures"),
    [(-1, 0.0, 1.0, 1), (0, -1.0, 1.0, 1), (0, math.inf, 1.0, 1), (0, 0.0, 0.0, 1),
     (0, 0.0, 1.0, 0), (0, math.nan, 1.0, 1)],
)  # fmt: skip
def test_estimates_that_make_no_sense(
    failures: int, observed_s: float, prior_s: float, prior_failures: int
) -> None:
    with pytest.raises(UsageError, match="makes no sense"):
        estimate_mtbf(failures, observed_s, prior_s=prior_s, prior_failures=prior_failures)
