"""Fulls that the agent makes: they stall nothing, come later, and no more often than it can."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everystep.errors import UsageError
from everystep.planning.intervals import (
    Costs,
    Limits,
    broken,
    choose,
    disk_load,
    least_by_agent,
    predict,
    rhythm,
)

FACTS: dict[str, Any] = {
    "step_s": 0.5, "state_bytes": 1_500_000_000, "delta_bytes": 6_000_000,
    "write_bytes_per_s": 1e9, "replay_s": 0.05, "mtbf_s": 10_800.0, "sync_s": 0.004,
}  # fmt: skip

GPT = Costs(**FACTS, fold_s=0.1)
"""A copy that takes 1.5 s to be written."""


def test_a_full_that_the_agent_makes_stalls_nothing() -> None:
    with pytest.raises(UsageError, match="stalls nothing"):
        Costs(**FACTS, fold_s=0.1, full_stall_s=0.02)
    assert predict(GPT, 100, 1).visible_share == 0.0


def test_it_is_durable_when_its_step_is_folded_and_it_is_written() -> None:
    """By hand: a step takes 6 ms of the disk besides its fsync, so that it has 0.49 of 0.5 s."""
    beat = rhythm(GPT, 100, 1)
    assert beat.full_lag_s == pytest.approx(0.01 + 0.1 + 1.5 * 0.5 / 0.49)
    training = rhythm(Costs(**FACTS), 100, 1)
    assert training.full_lag_s == pytest.approx(1.5 * 0.5 / 0.49)
    assert predict(GPT, 100, 1).replay_share > predict(Costs(**FACTS), 100, 1).replay_share


def test_no_more_often_than_the_agent_can() -> None:
    """A quarter of the disk's time: 6 s or 12 steps. Half of what folding leaves of the time, 0.4 s
    a step: 3 s, and 7.5 steps."""
    assert least_by_agent(Costs(**FACTS)) == 0.0
    assert least_by_agent(GPT) == 12.0
    assert broken(GPT, None, 11, 1) == "agent"
    assert broken(GPT, None, 12, 1) is None
    slow = Costs(**FACTS, fold_s=0.4)
    assert least_by_agent(slow) == pytest.approx(30.0)
    assert choose(GPT).full_every == 12
    assert choose(slow).full_every in (30, 31)


def test_an_agent_that_folds_slower_than_training_steps() -> None:
    for fold_s in (0.5, 0.7):
        costs = Costs(**FACTS, fold_s=fold_s)
        assert least_by_agent(costs) == math.inf
        with pytest.raises(UsageError, match="the agent folds or writes too slowly"):
            choose(costs)


@given(
    step_s=st.floats(0.05, 5), state_bytes=st.integers(10**6, 10**11),
    write_bytes_per_s=st.floats(1e8, 1e10), fold_s=st.floats(0, 1),
    sync_s=st.floats(0, 0.02), batch=st.none() | st.integers(1, 50),
)  # fmt: skip
def test_what_is_chosen_can_be_kept_to(batch: int | None, **facts: Any) -> None:
    costs = Costs(**{**FACTS, **facts})
    try:
        found = choose(costs, batch=batch)
    except UsageError:
        assume(False)
        raise
    write_s = costs.state_bytes / costs.write_bytes_per_s
    cycle_s = found.full_every * costs.step_s
    assert write_s <= cycle_s / 4 * (1 + 1e-9)
    assert costs.fold_s is not None
    assert 2 * write_s <= (cycle_s - found.full_every * costs.fold_s) * (1 + 1e-9)
    assert disk_load(costs, found.full_every, found.batch) <= Limits().disk_share
