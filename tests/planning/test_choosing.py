"""Which strategy is chosen, what it would waste by rules alone, and when it is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from everystep.errors import UsageError
from everystep.planning.choosing import LEAST, MARGIN, NAMES, Name, choose, full_at, replica_at
from everystep.planning.facts import FOLD_BYTES_PER_S, Facts, slowest
from everystep.planning.failures import Failure, poisson
from everystep.planning.intervals import predict
from everystep.planning.strategies_sim import Settings, Spent, simulate

GB = 10**9

DENSE = Facts(
    state_bytes=26 * GB, gradient_bytes=9 * GB, window_s=1.2, update_s=0.05,
    offload_bytes_per_s=25e9, snapshot_bytes_per_s=1e12, write_bytes_per_s=2e9, mtbf_s=10_800.0,
    restart_s=30.0,
)  # fmt: skip
"""The state leaves in the window; the disk takes it in 13 s."""

SPARSE = replace(
    DENSE, state_bytes=8 * GB, gradient_bytes=3 * GB, window_s=8.0, write_bytes_per_s=2e8,
    delta_bytes=30_000_000, fold_s=0.4,
)  # fmt: skip
"""A full takes the disk 40 s, a record 0.15 s, of a step of 8 s."""

CRAMPED = replace(DENSE, window_s=4.0, fold_s=1.0, host_memory_bytes=48 * GB)
"""Host memory has room for one state and two steps' gradients."""

PLAIN = Facts(
    state_bytes=8, gradient_bytes=2, window_s=3.0, update_s=1.0, offload_bytes_per_s=4.0,
    snapshot_bytes_per_s=16.0, write_bytes_per_s=1.0, mtbf_s=1.0, fold_s=0.5, load_s=6.0,
    restart_s=5.0,
)  # fmt: skip
"""A step of 4 s; a state leaves in 2 s and is written in 8 s; a record lengthens a step by 1/8 s
and is there 1/2 s after its end. Its mean time between failures is unused."""


def run(name: Name, every: int, *failures: Failure, until_s: float, **more: int) -> Spent:
    return simulate(PLAIN, name, Settings(every=every, **more), failures, duration_s=until_s)


# ---------------------------------------------------------------- the simulation, by hand


def test_fulls_without_failures() -> None:
    spent = run("full", 1, until_s=40.0)
    assert (spent.steps, spent.useful_s, spent.wasted_share) == (10, 40.0, 0.0)
    # a window of 1 s lets 4 of 8 bytes out; the rest takes 4/16 s, with every second step
    short = replace(PLAIN, window_s=1.0, update_s=1.0)
    spent = simulate(short, "full", Settings(every=2), [], duration_s=2 * 4.25)
    assert (spent.steps, spent.useful_s) == (4, 8.0)


def test_a_dead_process_finds_the_newest_staged_state() -> None:
    # steps end at 4, 8, …; that of 8 is staged at 10. Back after 5 s and 8/4 s of load
    for at_s, step in ((9.875, 1), (10.0, 2)):
        spent = run("full", 1, Failure(at_s, host=False), until_s=at_s + 7 + 4)
        assert (spent.steps, spent.recovering_s) == (step + 1, 7.0)
        assert (spent.process_failures, spent.host_failures) == (1, 0)
    assert run("full", 2, Failure(15.0, host=False), until_s=22.0).steps == 2


def test_a_dead_host_leaves_the_newest_durable_state() -> None:
    # step 1 is staged at 6 and durable at 14; then 3 (staged at 14, the newest) at 22
    for at_s, step in ((13.875, 0), (14.0, 1), (21.875, 1), (22.0, 3)):
        spent = run("full", 1, Failure(at_s), until_s=at_s + 11 + 8)
        assert (spent.steps, spent.recovering_s) == (step + 2, 11.0)


def test_two_slots_have_room_only_when_the_last_but_one_is_written() -> None:
    # step 1 is written from 6 to 14, 2 staged at 10: 3 finds no room at 12, 4 does at 16
    for at_s, step in ((17.875, 2), (18.0, 4)):
        spent = run("full", 1, Failure(at_s, host=False), until_s=at_s + 7, slots=2)
        assert spent.steps == step
    assert run("full", 1, Failure(17.875, host=False), until_s=24.875).steps == 3


def test_what_a_dead_process_left_is_written() -> None:
    # step 2, in memory since 10, is written by the agent within 8 s of the death
    for at_s, step in ((18.875, 1), (19.0, 2)):
        spent = run("full", 1, Failure(11.0, host=False), Failure(at_s), until_s=at_s + 11)
        assert spent.steps == (2 if step == 2 else 0)
        assert (spent.process_failures, spent.host_failures) == (1, 1)


def test_a_replica_loses_the_step_in_progress_or_those_since_it_was_written() -> None:
    # steps end at 4.125, 8.25, …; the first copy is written at 8, step 1 folded at 8.5
    assert run("replica", 4, until_s=33.0).steps == 8
    died = Failure(17.0, host=False)
    spent = run("replica", 4, died, until_s=17.0 + 7)
    assert (spent.steps, spent.recovering_s) == (4, 7.0)
    # step 4 is there at 17, folded at 17.5, durable at 25.5
    for at_s, step in ((25.375, 0), (25.5, 4)):
        assert run("replica", 4, Failure(at_s), until_s=at_s + 11).steps == step


def test_a_replica_that_is_behind_is_waited_for() -> None:
    # dead at 9, after step 2 of 8.75 that is folded at 9.25: sooner than processes start
    assert run("replica", 4, Failure(9.0, host=False), until_s=99.0).recovering_s == 7.0
    # dead at 18, while the copy is written until 25.5; nothing waits but step 4
    slow = replace(PLAIN, restart_s=0.0, fold_s=3.0)
    spent = simulate(slow, "replica", Settings(every=9), [Failure(9.0, host=False)], duration_s=99)
    assert spent.recovering_s == pytest.approx(14.0 - 9.0 + 2)  # 8, then two folds of 3 s


def test_a_replica_waits_for_memory_of_records() -> None:
    # records of steps 1 and 2 wait until 8.5 and 9; the third step would end at 12.375
    assert run("replica", 99, until_s=12.375, records=2).steps == 3
    slow = replace(PLAIN, write_bytes_per_s=0.5)  # the first copy is written at 16
    for at_s, step in ((16.375, 2), (16.5, 3)):
        spent = simulate(slow, "replica", Settings(every=99, records=2), [], duration_s=at_s)
        assert spent.steps == step


def test_a_recovery_that_fails_begins_again() -> None:
    spent = run("full", 1, Failure(30.0), Failure(35.0), Failure(45.0), until_s=56.0)
    assert (spent.recovering_s, spent.host_failures) == (5.0 + 10.0 + 11.0, 3)
    died = run("full", 1, Failure(30.0, host=False), Failure(35.0), until_s=46.0)
    assert died.steps == 5, "the newest that was durable at 30"


def test_deltas_are_simulated_elsewhere_and_senseless_runs_nowhere() -> None:
    assert run("deltas", 6, until_s=39.0, batch=2).steps == 9
    with pytest.raises(UsageError, match="makes no sense"):
        run("full", 0, until_s=1.0)
    with pytest.raises(UsageError, match="makes no sense"):
        run("replica", 1, until_s=math.inf)
    with pytest.raises(UsageError, match="after one at"):
        run("full", 1, Failure(8.0), Failure(7.0), until_s=9.0)


# ---------------------------------------------------------------- against the closed form


@dataclass
class Case:
    """What is drawn."""

    facts: Facts
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    window_s = draw(st.sampled_from([0.4, 1.0, 4.0]))
    link = draw(st.sampled_from([1.0, 4.0, 40.0]))
    facts = Facts(
        state_bytes=draw(st.sampled_from([1, 3, 10])) * GB, gradient_bytes=GB // 3,
        window_s=window_s, update_s=draw(st.sampled_from([0.0, 0.1])) * window_s,
        offload_bytes_per_s=link * 1e9,
        snapshot_bytes_per_s=draw(st.sampled_from([1.0, 20.0])) * link * 1e9,
        write_bytes_per_s=draw(st.sampled_from([0.3, 1.0, 5.0])) * 1e9,
        mtbf_s=draw(st.sampled_from([600.0, 3_600.0])),
        host_share=draw(st.sampled_from([0.0, 0.3, 1.0])),
        sync_s=draw(st.sampled_from([0.0, 0.05])),
        fold_s=draw(st.sampled_from([0.0, 0.3, 0.8])) * window_s,
        record_stall_s=draw(st.sampled_from([None, 0.0, 0.01])),
        restart_s=draw(st.sampled_from([0.0, 20.0])), on_device=draw(st.booleans()),
        host_memory_bytes=draw(st.sampled_from([None, 2, 3])),
    )  # fmt: skip
    if facts.host_memory_bytes is not None:
        room = facts.host_memory_bytes * facts.state_bytes + 3 * facts.gradient_bytes
        facts = replace(facts, host_memory_bytes=room)
    return Case(facts, draw(st.integers(0, 10**6)))


@pytest.mark.parametrize("name", ["full", "replica"])
@settings(max_examples=20)
@given(case=cases())
def test_prediction_and_simulation_agree(name: Name, case: Case) -> None:
    facts = case.facts
    found = choose(facts).predicted[name]
    assume(found.impossible is None)
    every, room = found.every or 1, found.buffer_records or 1
    slots = found.memory_bytes // facts.state_bytes
    how = Settings(every=every, slots=slots, records=room)
    failures = poisson(np.random.default_rng(case.seed), facts.mtbf_s, facts.host_share)
    spent = simulate(facts, name, how, failures, duration_s=250 * facts.mtbf_s)
    n = spent.process_failures + spent.host_failures
    drawn = replace(facts, mtbf_s=spent.duration_s / n, host_share=spent.host_failures / n)
    again = full_at(drawn, every, slots) if name == "full" else replica_at(drawn, every, room)
    by_failures = again.wasted_share - again.visible_share
    allowed = by_failures * 5 / math.sqrt(n) + by_failures**2
    if name == "full" and facts.write_s > (period_s := every * facts.step_s):
        # writes that fall into step with slow storage take newer states than half a period old
        allowed += drawn.host_share * period_s / 2 / drawn.mtbf_s
    assert abs(spent.wasted_share - again.wasted_share) <= allowed
    length_s = 2e4 * facts.step_s
    waits = simulate(facts, name, how, [], duration_s=length_s)
    first = facts.write_s / length_s if name == "replica" else 0.0  # its first copy is written once
    assert waits.wasted_share == pytest.approx(again.visible_share, abs=1e-3 + first)


# ---------------------------------------------------------------- the choice


def test_each_has_its_case() -> None:
    full, deltas, replica = choose(DENSE), choose(SPARSE), choose(CRAMPED)
    assert (full.strategy, full.predicted["full"].every) == ("full", 1)
    assert full.predicted["full"].visible_share == 0
    assert deltas.strategy == "deltas"
    assert replica.strategy == "replica"
    assert set(replica.wasted) == set(NAMES)
    assert [name for name, share in replica.wasted.items() if share < math.inf] == ["replica"]
    for verdict in (full, deltas, replica):
        assert verdict.wasted[verdict.strategy] == min(verdict.wasted.values())
        for found in verdict.predicted.values():
            if found.impossible is None:
                parts = (found.visible_share, found.process_share, found.host_share)
                assert sum(parts) == pytest.approx(found.wasted_share) and min(parts) >= 0


def test_deltas_are_predicted_by_their_own_model() -> None:
    found = choose(SPARSE).predicted["deltas"]
    assert found.every is not None and found.batch is not None
    assert found.wasted_share == predict(SPARSE.costs(), found.every, found.batch).share
    many = choose(replace(SPARSE, world_size=4)).predicted["deltas"].every or 0
    assert many & (many - 1) == 0 < many
    assert found.every & (found.every - 1) != 0, "else this shows nothing"


def test_fulls_among_deltas_are_no_more_often_than_the_link_carries() -> None:
    slow = replace(SPARSE, offload_bytes_per_s=1e8, fold_s=3.0, write_bytes_per_s=1e11)
    found = choose(slow).predicted["deltas"]
    # 8.03 GB, at 0.1 GB/s, less what is snapshotted: about ten steps of 8.05 s
    assert found.every is not None and found.every >= 9


@pytest.mark.parametrize(
    ("memory_bytes", "possible"),
    [(26 * GB, ""), (44 * GB - 1, ""), (44 * GB, "replica"), (52 * GB, "full replica"),
     (70 * GB - 1, "full replica"), (70 * GB, "full replica deltas")],
)  # fmt: skip
def test_what_host_memory_has_room_for(memory_bytes: int, possible: str) -> None:
    facts = replace(DENSE, host_memory_bytes=memory_bytes, write_bytes_per_s=2e10, fold_s=0.3)
    if not possible:
        with pytest.raises(UsageError, match="two states need 52 GB of host memory"):
            choose(facts)
        return
    verdict = choose(facts)
    for name in NAMES:
        found = verdict.predicted[name]
        assert (found.impossible is None) == (name in possible.split()), name
        assert found.memory_bytes <= memory_bytes
        if found.impossible is not None:
            assert found.impossible.endswith(f"{memory_bytes / GB:.3g} GB")


def test_with_two_slots_a_state_waits_for_the_write_before() -> None:
    two, three = (choose(replace(DENSE, host_memory_bytes=n * 26 * GB)) for n in (2, 3))
    assert three.predicted["full"].every == 1
    assert two.predicted["full"].every == 16  # 13 s are 10.4 steps
    assert two.predicted["full"].memory_bytes == 52 * GB


def test_why_it_is_not_possible() -> None:
    why = "a closure runs the model again"
    verdict = choose(replace(SPARSE, excluded={"deltas": why, "replica": why}))
    assert verdict.strategy == "full"
    for name in ("deltas", "replica"):
        assert verdict.predicted[name].impossible == "a closure runs the model again"
        assert f"{name}: not possible, a closure runs" in verdict.reason
    slow = choose(replace(SPARSE, delta_bytes=2 * GB)).predicted["deltas"].impossible
    assert slow is not None and "storage is too slow" in slow


def test_the_reason_is_one_line() -> None:
    reason = choose(SPARSE).reason
    assert "\n" not in reason
    assert reason.startswith("deltas, a full at every ")
    assert " of time, most of it as hosts fail; " in reason
    never = replace(DENSE, mtbf_s=math.inf)
    assert choose(never).reason.startswith("full, at every step: wastes no time; ")


def test_the_one_in_use_is_left_for_a_margin_only() -> None:
    assert choose(SPARSE, now="deltas").strategy == "deltas"
    assert choose(SPARSE, now="full").strategy == "deltas"
    # the slower the disk, the better are deltas; in between, what is in use stays
    stayed = 0
    for k in range(7):
        facts = replace(SPARSE, write_bytes_per_s=1e8 * 2.5**k)
        fresh = choose(facts)
        for now in NAMES:
            kept = choose(facts, now)
            saved = fresh.wasted[now] - fresh.wasted[fresh.strategy]
            stays = saved <= max(LEAST, MARGIN * fresh.wasted[now])
            assert kept.strategy == (now if stays else fresh.strategy)
            if kept.strategy != fresh.strategy:
                assert f"; {fresh.strategy} would save too little" in kept.reason
                stayed += 1
    assert stayed > 0


def test_the_one_in_use_is_left_when_it_becomes_impossible() -> None:
    closure = replace(SPARSE, excluded={"deltas": "a closure"})
    assert choose(closure, now="deltas").strategy == "full"
    with pytest.raises(UsageError, match="no strategy is possible: it fell back"):
        choose(replace(SPARSE, excluded=dict.fromkeys(NAMES, "it fell back")))


def test_little_is_gained_by_a_change_where_little_is_lost() -> None:
    seldom = replace(SPARSE, mtbf_s=30 * 86_400.0)
    wasted = choose(seldom).wasted
    assert choose(seldom).strategy == "deltas"
    assert MARGIN * wasted["full"] < wasted["full"] - wasted["deltas"] < LEAST
    assert choose(seldom, now="full").strategy == "full"


def test_a_replica_gets_gradients_as_they_are() -> None:
    # 9 GB of gradients, or 30 MB of them: a record of the replica is the same
    found = [choose(one).predicted["replica"] for one in (DENSE, replace(DENSE, delta_bytes=9))]
    assert found[0] == found[1]
    assert replica_at(DENSE, 7, 3) == replica_at(replace(DENSE, delta_bytes=9), 7, 3)
    how = Settings(every=7, records=3)
    spent = [
        simulate(one, "replica", how, [Failure(99.0)], duration_s=500.0)
        for one in (DENSE, replace(DENSE, delta_bytes=9))
    ]
    assert spent[0] == spent[1]


# ---------------------------------------------------------------- facts


def test_facts_that_are_not_known() -> None:
    bare = Facts(
        state_bytes=8 * GB, gradient_bytes=3 * GB, window_s=1.0, update_s=0.25,
        offload_bytes_per_s=2e9, snapshot_bytes_per_s=1e12, write_bytes_per_s=1e9, mtbf_s=60.0,
    )  # fmt: skip
    assert (bare.record_bytes, bare.refold_s) == (3 * GB, 8 * GB / FOLD_BYTES_PER_S)
    assert (bare.write_s, bare.read_s, bare.reload_s) == (8.0, 8.0, 4.0)
    # copied at 1 TB/s; the link takes 1.5 s of a step of 1.25 s
    assert bare.record_s == pytest.approx(0.003 + 0.25)
    known = replace(bare, delta_bytes=GB, fold_s=0.5, load_s=3.0, sync_s=0.5, record_stall_s=0.125)
    assert (known.record_bytes, known.refold_s, known.record_s) == (GB, 0.5, 0.125)
    assert (known.write_s, known.read_s) == (8.5, 3.0)


def test_the_slowest_of_all_ranks() -> None:
    other = replace(
        DENSE, state_bytes=27 * GB, write_bytes_per_s=1e9, window_s=1.3, mtbf_s=99.0, fold_s=0.5,
        host_memory_bytes=GB, excluded={"deltas": "a closure"}, on_device=False,
    )  # fmt: skip
    assert slowest([DENSE]) == DENSE
    for ranks in ([DENSE, other], [other, DENSE]):
        assert slowest(ranks) == replace(other, on_device=True)
    told = [{"deltas": "first"}, {"deltas": "second", "replica": "third"}]
    both = slowest([replace(DENSE, excluded=one) for one in told]).excluded
    assert both == {"deltas": "first", "replica": "third"}
    assert slowest([replace(DENSE, host_memory_bytes=n) for n in (3, 2)]).host_memory_bytes == 2


@pytest.mark.parametrize(
    "wrong",
    [{"state_bytes": 0}, {"gradient_bytes": 0}, {"window_s": 0.0}, {"update_s": -1.0},
     {"offload_bytes_per_s": math.inf}, {"write_bytes_per_s": math.nan}, {"mtbf_s": 0.0},
     {"host_share": 1.5}, {"delta_bytes": 0}, {"fold_s": -1.0}, {"host_memory_bytes": -1},
     {"world_size": 0}, {"sync_s": math.inf}, {"snapshot_bytes_per_s": 0.0}],
)  # fmt: skip
def test_facts_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}=.* makes no sense"):
        replace(DENSE, **wrong)
