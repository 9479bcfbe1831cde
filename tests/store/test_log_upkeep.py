"""The log in a listing, under retention and under pruning."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_logs import LAYOUT, new_log, record, write_log
from byte_runs import NoSync, begin, files_of, new_run, write_step
from everystep.errors import Damaged
from everystep.store.chains import Chains, plan_chains
from everystep.store.entries import StepEntry
from everystep.store.format import PartName
from everystep.store.logformat import Segment
from everystep.store.pruning import carry_out, plan_prune
from everystep.store.retention import (
    Retention,
    Upkeep,
    kept_by_rules,
    plan_retention,
    plan_segments,
)
from everystep.store.run import Run
from everystep.store.segments import last_step
from everystep.types import StepRef


def main(step: int) -> StepRef:
    return StepRef("main", step)


def chains_of(run: Run, timeline: str = "main") -> Chains:
    listing = run.listing()
    return plan_chains(listing, run.segments(listing), timeline)


def had(run: Run, timeline: str = "main") -> list[int]:
    return [ref.step for ref in chains_of(run, timeline).refs]


def logs(run: Run) -> list[str]:
    return [f"{log.segment.base}.{log.segment.number}" for log in run.listing().logs]


# ---------------------------------------------------------------- listing


def test_a_listing_knows_segments(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_log(run.backend, [1, 2], run=run.id)
    write_log(run.backend, [3], run=run.id, timeline="lost", session=4)
    (tmp_path / "logs" / "main" / "mine.log").write_bytes(b"")
    listing = run.listing()
    assert listing.strangers == ("logs/main/mine.log",)
    assert [str(log.segment.timeline) for log in listing.logs] == ["lost", "main"]
    assert all(log.nbytes == (tmp_path / log.segment.name).stat().st_size for log in listing.logs)
    assert listing.current_timeline() == "lost"
    assert "lost" in listing.timelines
    assert run.clean_up() == 5, "no session takes the number of one whose log is there"
    assert run.listing() == listing


def test_segments_are_read_again_when_they_have_grown(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_step(run, main(1))
    log = new_log(run.backend, run.id)
    log.begin(1, LAYOUT)
    log.append([record(2)])
    first = run.segments(run.listing())
    assert run.segments(run.listing())[0] is first[0]
    log.append([record(3)])
    assert had(run) == [1, 2, 3]
    stale = run.listing()
    (tmp_path / stale.logs[0].segment.name).unlink()
    assert len(run.segments(stale)) == 1, "its heads are known"
    run = Run.open(tmp_path)
    assert run.segments(stale) == []


# ---------------------------------------------------------------- the plan


def made_up(step: int, ranks: int = 1) -> StepEntry:
    parts = tuple(PartName(1, rank, ranks, "") for rank in range(ranks))
    return StepEntry(ref=main(step), session=1, world_size=ranks, parts=parts, nbytes=0)


def segments(*spans: tuple[int, int]) -> dict[Segment, int]:
    return {
        Segment("main", 1, 0, 1, number=number, base=base): last
        for number, (base, last) in enumerate(spans, 1)
    }


def gone(
    fulls: list[int], spans: list[tuple[int, int]], policy: Retention, *folded: int
) -> list[int]:
    entries = [made_up(step) for step in fulls]
    plan = plan_segments(entries, segments(*spans), policy, {}, [main(step) for step in folded])
    return [segment.base for segment in plan]


TENS = [(0, 10), (10, 20), (20, 30), (30, 40)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Retention(keep_last=1), [0, 10, 20]),
        (Retention(keep_last=2), [0, 10]),
        (Retention(keep_last=9), [0]),
        (Retention(keep_last=1, keep_every=20), [0, 10]),
        (Retention(keep_last=None), []),
    ],
)
def test_segments_before_the_oldest_that_is_kept_go(policy: Retention, expected: list[int]) -> None:
    assert gone([10, 20, 30], TENS, policy) == expected


def test_a_segment_across_the_oldest_stays() -> None:
    """The full checkpoint became durable later than the deltas after it."""
    assert gone([10, 20], [(0, 12), (12, 20), (20, 23)], Retention(keep_last=2)) == []
    assert gone([10, 20], [(0, 10), (10, 21), (20, 23)], Retention(keep_last=1)) == [0]


def test_without_a_full_nothing_goes() -> None:
    assert gone([], TENS, Retention(keep_last=1)) == []


def test_the_way_to_a_step_that_is_kept_and_folded_stays() -> None:
    policy = Retention(keep_last=1)
    assert gone([10, 20, 30, 40], TENS, policy, 25) == [0, 10, 30]
    assert gone([10, 20, 30, 40], TENS, policy, 30, 5) == [0, 10, 30]
    entries = [made_up(step) for step in (10, 20, 30, 40)]
    plan = plan_retention(entries, policy, {}, [], {}, [main(25)])
    assert [entry.ref.step for entry in plan] == [10, 30]


@settings(max_examples=200)
@given(
    st.sets(st.integers(1, 40), min_size=1),
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.integers(1, 4),
    st.none() | st.integers(2, 9),
    st.sets(st.integers(1, 40), max_size=2),
)
def test_every_step_after_one_that_a_rule_keeps_can_still_be_had(
    fulls: set[int], lengths: list[int], last: int, every: int | None, pinned: set[int]
) -> None:
    policy = Retention(keep_last=last, keep_every=every)
    spans, base = [], 0
    for length in lengths:
        spans.append((base, base + length))
        base += length
    entries = [made_up(step) for step in sorted(fulls)]
    folded = [main(step) for step in pinned if step not in fulls]
    going = plan_segments(entries, segments(*spans), policy, {}, folded)
    staying = segments(*spans).keys() - set(going)
    left = {
        step for s in staying for step in range(s.base + 1, segments(*spans)[s] + 1)
    }  # every step has a delta
    removed = plan_retention(entries, policy, {}, [main(step) for step in pinned], {}, folded)
    stay = sorted(fulls - {entry.ref.step for entry in removed})
    kept = kept_by_rules({entry.ref: entry for entry in entries}, policy, {})
    assert {ref.step for ref in kept} <= set(stay)
    oldest = min(ref.step for ref in kept)
    assert left >= set(range(oldest + 1, base + 1))
    for ref in folded:
        before = [step for step in stay if step < ref.step]
        if any(step < ref.step for step in fulls):
            assert left >= set(range(before[-1] + 1, min(ref.step, base) + 1))
    assert all(segments(*spans)[s] <= oldest for s in going)


# ---------------------------------------------------------------- what a rank does


def test_upkeep_removes_what_is_not_needed(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_log(run.backend, [1], run=run.id, ranks=[1], world_size=2)
    write_log(run.backend, [1], run=run.id, timeline="other")
    log = new_log(run.backend, run.id)
    upkeep = Upkeep(run, Retention(keep_last=2), 0, (), ())
    log.begin(0, LAYOUT)
    for step in range(1, 13):
        log.append([record(step)])
        if step % 3 == 0:
            log.seal()
            log.begin(step, LAYOUT)
            write_step(run, main(step))
            upkeep.after_step(main(step), 1)
            upkeep.finish_removal()
    log.append([record(13)])
    upkeep.close()
    mine = [e.segment for e in run.listing().logs if e.segment.world_size == 1]
    assert [(s.timeline, s.base) for s in mine] == [("main", 9), ("main", 12), ("other", 0)]
    assert len(run.listing().logs) == 4, "another rank's stays"
    assert had(run) == [9, 10, 11, 12, 13]


def test_upkeep_never_removes_the_newest_segment(tmp_path: Path) -> None:
    """It may be the one that is being written, and a record may be on its way."""
    run = new_run(tmp_path, calls=NoSync())
    log = new_log(run.backend, run.id)
    log.begin(0, LAYOUT)
    log.append([record(1), record(2)])
    upkeep = Upkeep(run, Retention(keep_last=1), 0, (), ())
    for step in (1, 2, 3):
        write_step(run, main(step))
        upkeep.after_step(main(step), 1)
    upkeep.close()
    assert logs(run) == ["0.1"]
    log.append([record(4)])
    assert had(run) == [3, 4]


def test_the_step_that_a_session_was_restored_from_can_be_had_while_it_lasts(
    tmp_path: Path,
) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_step(run, main(1))
    write_step(run, main(3))
    write_log(run.backend, [2, 3], base=1, run=run.id)
    write_log(run.backend, [4, 5, 6], base=3, run=run.id)
    begin(run, 2, restored=main(5))
    known = run.listing().steps
    log = new_log(run.backend, run.id, session=2)
    log.begin(5, LAYOUT)
    upkeep = Upkeep(run, Retention(keep_last=1), 0, known, {main(5)})
    for step in range(6, 12):
        log.append([record(step)])
        if step % 2 == 0:
            log.seal()
            log.begin(step, LAYOUT)
            write_step(run, main(step), session=2)
            upkeep.after_step(main(step), 2)
    upkeep.close()
    assert had(run) == [3, 4, 5, 10, 11]


def test_a_segment_that_cannot_be_looked_at_is_told(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_log(run.backend, [1], run=run.id)
    write_log(run.backend, [2], base=1, run=run.id)
    path = tmp_path / run.listing().logs[0].segment.name
    path.unlink()
    path.symlink_to("elsewhere")
    upkeep = Upkeep(run, Retention(keep_last=1), 0, (), ())
    for step in (1, 2):
        write_step(run, main(step))
        upkeep.after_step(main(step), 1)
    with pytest.raises(Damaged, match="is a link"):
        upkeep.close()
    assert path.is_symlink()


# ---------------------------------------------------------------- prune


def test_prune_removes_segments_of_all_ranks(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2, calls=NoSync())
    for step in (0, 3, 6):
        write_step(run, main(step), 2)
        steps = range(step + 1, step + 4)
        write_log(run.backend, steps, base=step, run=run.id, ranks=[0, 1], world_size=2)
    begin(run, 2, "main@4", world_size=2, parent=main(4))
    listing = run.listing()
    ends = {s.segment: last_step(s) for s in run.segments(listing)}
    files = {entry.name: entry.nbytes for entry in run.backend.list("")}
    before = had(run, "main@4")
    assert before == [0, 1, 2, 3, 4]

    plan = plan_prune(listing, files, Retention(keep_last=1), {}, {}, segments=ends)
    removed = [(r.kind, r.step, r.session) for r in plan.removals]
    assert removed == [("step", main(0), 1), ("log", None, 1), ("log", None, 1)]
    assert all(".1.log" in name for r in plan.removals[1:] for name in r.names)
    carry_out(run, plan, lambda: None)
    assert had(run, "main@4") == [3, 4], "the step that a timeline forks from can be had"
    assert had(run) == [3, 4, 5, 6, 7, 8, 9]

    files = {entry.name: entry.nbytes for entry in run.backend.list("")}
    everything = Retention(keep_last=None)
    plan = plan_prune(run.listing(), files, everything, {}, {}, segments=ends)
    assert plan.removals == ()
    assert len(files_of(tmp_path / "logs")) == 4
