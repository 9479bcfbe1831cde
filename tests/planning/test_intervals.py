"""The choice of fulls and batches: limits, edges, the closed form, and brute force."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from everystep.errors import UsageError
from everystep.planning.closed_form import first_order
from everystep.planning.failures import poisson, simulate
from everystep.planning.intervals import (
    LONGEST_CHAIN,
    PATIENCE,
    Choice,
    Costs,
    Limits,
    broken,
    choose,
    disk_load,
    predict,
    rhythm,
)

GPT = Costs(
    step_s=0.5, state_bytes=1_500_000_000, delta_bytes=6_000_000, write_bytes_per_s=1e9,
    replay_s=0.05, mtbf_s=10_800.0, load_s=2.0, restart_s=20.0, sync_s=0.004,
    batch_stall_s=0.002, record_stall_s=0.001, full_stall_s=0.02,
)  # fmt: skip
"""124 M parameters at 1 % density on a fast disk."""


def times(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high) | st.just(0.0)


@st.composite
def all_costs(draw: st.DrawFn) -> Costs:
    return Costs(
        step_s=draw(st.floats(0.05, 5)),
        state_bytes=draw(st.integers(10**6, 10**11)),
        delta_bytes=draw(st.integers(10**4, 10**8)),
        write_bytes_per_s=draw(st.floats(1e8, 1e10)),
        replay_s=draw(times(1e-3, 1)),
        mtbf_s=draw(st.floats(600, 1e6)),
        load_s=draw(times(0.1, 60)),
        restart_s=draw(times(1, 120)),
        host_share=draw(st.floats(0, 1)),
        sync_s=draw(times(1e-4, 0.02)),
        batch_stall_s=draw(times(1e-4, 0.05)),
        record_stall_s=draw(times(1e-4, 0.05)),
        full_stall_s=draw(times(1e-3, 5)),
    )


def chosen(costs: Costs, limits: Limits | None = None, **more: Any) -> Choice:
    try:
        return choose(costs, limits, **more)
    except UsageError:
        assume(False)
        raise


# ---------------------------------------------------------------- edges


def test_one_of_each_by_hand() -> None:
    costs = Costs(
        step_s=1.0, state_bytes=100, delta_bytes=10, write_bytes_per_s=1000.0, replay_s=0.5,
        mtbf_s=1e9, load_s=2.0, restart_s=3.0, batch_stall_s=0.25,
    )  # fmt: skip
    beat = rhythm(costs, 1, 1)
    assert beat.cycle_s == 1.25
    assert (beat.batch_steps, beat.batch_lag_s) == (1.0, 0.01)
    assert beat.full_lag_s == pytest.approx(0.1 / (1 - 0.01 / 1.25))
    waste = predict(costs, 1, 1)
    # half a step and the lag are lost; what is replayed is what the full's lag adds to the batch's
    replayed = (beat.full_lag_s - 0.01) / 1.25
    per_failure_s = 1.25 / 2 + 0.01 + 2 + 3 + 0.5 * replayed
    assert waste.share == pytest.approx(0.2 + 0.8 * per_failure_s / 1e9, rel=1e-12)
    assert waste.disk_share == pytest.approx(0.11)
    assert (waste.storage_bytes, waste.memory_bytes) == (220, 20)


def test_a_batch_longer_than_the_fulls_are_apart_is_cut() -> None:
    assert rhythm(GPT, 10, 100) == rhythm(GPT, 10, 10)
    assert predict(GPT, 10, 100) == predict(GPT, 10, 10)
    cut = rhythm(GPT, 10, 4)  # 4 + 4 + 2
    assert cut.batch_steps == (16 + 16 + 4) / 10
    assert cut.cycle_s == pytest.approx(10 * 0.501 + 3 * 0.002 + 0.02)


@given(all_costs(), st.integers(1, 2000), st.integers(1, 200))
def test_the_causes_add_up(costs: Costs, full_every: int, batch: int) -> None:
    assume(disk_load(costs, full_every, batch) <= 1)
    w = predict(costs, full_every, batch)
    parts = (w.visible_share, w.lost_share, w.restart_share, w.load_share, w.replay_share)
    assert sum(parts) == pytest.approx(w.share, abs=1e-9)
    assert 0 <= w.share <= 1
    assert min(w.visible_share, w.lost_share, w.restart_share, w.load_share) >= -1e-12


@given(all_costs(), st.integers(1, 2000), st.integers(1, 200))
def test_without_failures_only_what_is_visible_is_wasted(
    costs: Costs, full_every: int, batch: int
) -> None:
    assume(disk_load(costs, full_every, batch) <= 1)
    w = predict(replace(costs, mtbf_s=math.inf), full_every, batch)
    step_s = rhythm(costs, full_every, batch).cycle_s / full_every
    assert w.share == pytest.approx(1 - costs.step_s / step_s, abs=1e-12)
    assert w.lost_share == w.replay_share == w.load_share == w.restart_share == 0


@given(
    all_costs(), st.integers(1, 2000), st.integers(1, 200), st.floats(1, 3),
    st.sampled_from([
        "replay_s", "load_s", "restart_s", "batch_stall_s", "record_stall_s", "full_stall_s",
    ]),
)  # fmt: skip
def test_waste_does_not_fall_where_a_cost_rises(
    costs: Costs, full_every: int, batch: int, times: float, name: str
) -> None:
    dearer = replace(costs, **{name: getattr(costs, name) * times})
    assume(disk_load(dearer, full_every, batch) <= 1)
    if name.endswith("stall_s"):  # with failures a longer cycle has fewer steps to be replayed
        dearer, costs = (replace(c, mtbf_s=math.inf) for c in (dearer, costs))
    assert predict(dearer, full_every, batch).share >= (
        predict(costs, full_every, batch).share - 1e-12
    )


@given(all_costs(), st.integers(1, 2000), st.integers(1, 200), st.floats(1, 100))
def test_waste_falls_where_failures_are_rarer(
    costs: Costs, full_every: int, batch: int, times: float
) -> None:
    assume(disk_load(costs, full_every, batch) <= 1)
    rarer = replace(costs, mtbf_s=costs.mtbf_s * times)
    assert predict(rarer, full_every, batch).share <= (
        predict(costs, full_every, batch).share + 1e-12
    )


@pytest.mark.parametrize(("full_every", "batch"), [(0, 1), (1, 0), (-1, 1)])
def test_fewer_than_one_step(full_every: int, batch: int) -> None:
    with pytest.raises(UsageError, match="fewer than one step"):
        predict(GPT, full_every, batch)


def test_more_than_storage_can_take() -> None:
    with pytest.raises(UsageError, match="more than storage can take"):
        predict(GPT, 1, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_s", 0), ("state_bytes", 0), ("delta_bytes", -1), ("write_bytes_per_s", math.inf),
        ("replay_s", -1.0), ("mtbf_s", 0), ("host_share", 1.1), ("host_share", -0.1),
        ("full_stall_s", math.nan), ("load_s", math.inf),
    ],
)  # fmt: skip
def test_costs_that_make_no_sense(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        replace(GPT, **{name: value})


@pytest.mark.parametrize(
    "more", [{"disk_share": 0.0}, {"disk_share": 1.5}, {"storage_bytes": -1}, {"memory_bytes": -1}]
)
def test_limits_that_make_no_sense(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Limits(**more)


# ---------------------------------------------------------------- the choice


@given(all_costs(), st.floats(0.05, 1))
def test_a_choice_respects_its_limits(costs: Costs, disk_share: float) -> None:
    limits = Limits(
        disk_share=disk_share, storage_bytes=4 * costs.state_bytes,
        memory_bytes=20 * costs.delta_bytes,
    )  # fmt: skip
    found = chosen(costs, limits)
    assert 1 <= found.batch <= min(found.full_every, 10)
    assert found.full_every % found.batch == 0
    assert disk_load(costs, found.full_every, found.batch) <= disk_share
    waste = predict(costs, found.full_every, found.batch)
    assert waste.storage_bytes <= 4 * costs.state_bytes
    assert waste.memory_bytes <= 20 * costs.delta_bytes


@given(all_costs(), st.integers(0, 10**9))
def test_no_choice_of_the_model_wastes_much_less(costs: Costs, seed: int) -> None:
    found = chosen(costs)
    least = predict(costs, found.full_every, found.batch).share
    draw = np.random.default_rng(seed)
    for _ in range(200):
        full_every = int(found.full_every * 2 ** draw.uniform(-3, 3)) + int(draw.integers(0, 3))
        batch = int(found.batch * 2 ** draw.uniform(-3, 3)) + int(draw.integers(0, 3))
        full_every = min(max(full_every, 1), LONGEST_CHAIN)
        batch = min(max(batch, 1), full_every)
        if broken(costs, None, full_every, batch) is None:
            assert least <= 1.05 * predict(costs, full_every, batch).share


def test_the_closed_form_is_found_where_nothing_limits() -> None:
    for mtbf_s in (3_600.0, 36_000.0, 360_000.0):
        costs = replace(GPT, mtbf_s=mtbf_s, full_stall_s=0.3, replay_s=0.02)
        best, free = choose(costs), first_order(costs)
        assert best.batch == pytest.approx(free.batch_steps, rel=0.15)
        assert best.full_every == pytest.approx(free.full_every_steps, rel=0.15)


def test_where_one_side_costs_nothing() -> None:
    hidden = choose(replace(GPT, full_stall_s=0.0, batch_stall_s=0.0))
    assert (hidden.full_every, hidden.batch) == (4, 1)  # 0.38 of the disk, then more than 0.9
    assert disk_load(GPT, 3, 1) > 0.9
    seldom = choose(replace(GPT, replay_s=0.0))
    assert seldom.full_every > LONGEST_CHAIN - seldom.batch
    assert first_order(replace(GPT, replay_s=0.0)).full_every_steps == math.inf
    assert first_order(replace(GPT, host_share=0.0)).batch_steps == math.inf
    assert first_order(replace(GPT, batch_stall_s=0.0, full_stall_s=0.0)) == (0.0, 0.0)


def test_a_slow_fsync_makes_batches() -> None:
    costs = replace(GPT, batch_stall_s=0.0, sync_s=0.6)
    assert choose(costs).batch == 2
    assert broken(costs, None, LONGEST_CHAIN, 1) == "disk"


def test_given_numbers_are_kept() -> None:
    assert choose(GPT, full_every=501).full_every == 501
    assert choose(GPT, batch=7).batch == 7
    assert choose(GPT, batch=7).full_every % 7 == 0
    assert choose(GPT, full_every=501, batch=7) == Choice(501, 7)


@pytest.mark.parametrize(
    ("costs", "limits", "words"),
    [
        (replace(GPT, delta_bytes=600_000_000), Limits(), "storage is too slow"),
        (GPT, Limits(storage_bytes=3 * 10**9), "storage budget"),
        (GPT, Limits(storage_bytes=1000), "storage budget"),
        (GPT, Limits(memory_bytes=11_999_999), "two batches do not fit"),
    ],
)
def test_limits_that_leave_no_choice(costs: Costs, limits: Limits, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose(costs, limits)


def test_a_choice_changes_only_for_a_gain_that_lasts() -> None:
    first = choose(GPT)
    assert first.observe(replace(GPT, mtbf_s=12_000.0)) == first
    rare = replace(GPT, mtbf_s=1_000_000.0, restart_s=0.0, load_s=0.0, record_stall_s=0.0)
    now = first
    for calm in range(1, PATIENCE):
        now = now.observe(rare)
        assert now == replace(first, calm=calm)
    assert now.observe(GPT) == first, "one observation against it, and the count begins again"
    assert now.observe(rare) == choose(rare)


def test_a_choice_that_breaks_a_limit_changes_at_once() -> None:
    first = choose(GPT)
    limits = Limits(memory_bytes=2 * GPT.delta_bytes)
    assert first.batch > 1
    assert first.observe(GPT, limits) == choose(GPT, limits)
    slow = replace(GPT, write_bytes_per_s=2e7)
    assert first.observe(slow) == choose(slow)
    with pytest.raises(UsageError):
        first.observe(replace(GPT, write_bytes_per_s=1e6))


# ---------------------------------------------------------------- against brute force


@pytest.mark.parametrize("mtbf_s", [600.0, 3_600.0, 36_000.0])
@pytest.mark.parametrize(("host_share", "full_stall_s"), [(1.0, 0.02), (0.3, 0.5)])
def test_the_choice_wastes_at_most_5_percent_more_than_the_best_simulated(
    mtbf_s: float, host_share: float, full_stall_s: float
) -> None:
    """The same failures strike every choice, so that chance is no part of the comparison."""
    costs = replace(
        GPT, mtbf_s=mtbf_s, host_share=host_share, full_stall_s=full_stall_s, restart_s=0.0,
        load_s=1.0, record_stall_s=0.0,
    )  # fmt: skip
    duration_s = 400 * mtbf_s
    draw = poisson(np.random.default_rng(7), mtbf_s, host_share)
    failures = [next(draw) for _ in range(600)]
    assert failures[-1].at_s > duration_s

    def wasted(full_every: int, batch: int) -> float:
        spent = simulate(costs, full_every, batch, failures, duration_s=duration_s)
        return spent.wasted_share

    found = choose(costs)
    tried = {
        (f, b): wasted(f, b)
        for f, b in product((4, 8, 16, 30, 60, 90, 130, 200, 300, 500, 900, 1600, 3000),
                            (1, 2, 4, 8, 14, 24, 40, 80))
        if b <= f and broken(costs, None, f, b) is None
    }  # fmt: skip
    assert len(tried) > 50
    assert wasted(found.full_every, found.batch) <= 1.05 * min(tried.values())
    assert max(tried.values()) > 1.5 * min(tried.values()), "the choice matters"
