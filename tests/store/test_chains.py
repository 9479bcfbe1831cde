"""Which steps can be had: by hand, and against a slow model of the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.errors import Damaged
from everystep.store import logformat as lf
from everystep.store.chains import Chain, Chains, Excluded, plan_chains
from everystep.store.entries import StepEntry
from everystep.store.format import PartName, SessionRecord, TimelineRecord
from everystep.store.logformat import Segment
from everystep.store.run import Listing
from everystep.store.segments import Found, Scanned
from everystep.types import StepRef


def full(step: int, session: int = 1, timeline: str = "main", ranks: str = "a") -> StepEntry:
    """A full checkpoint; `-` for a rank whose part is missing."""
    parts = tuple(
        PartName(session, rank, len(ranks), letter * 16)
        for rank, letter in enumerate(ranks)
        if letter != "-"
    )
    ref = StepRef(timeline, step)
    return StepEntry(ref=ref, session=session, world_size=len(ranks), parts=parts, nbytes=0)


def digest(*what: object) -> bytes:
    return lf.raw_digest(repr(what).encode())


def segment(
    steps: Sequence[int],
    session: int = 1,
    rank: int = 0,
    world_size: int = 1,
    *,
    timeline: str = "main",
    number: int = 1,
    base: int | None = None,
    after: bytes = lf.NO_DIGEST,
    layout: bytes = b"",
    seed: object = 0,
    torn: Damaged | None = None,
) -> Scanned:
    """A segment as a scan would show it."""
    base = min(steps, default=1) - 1 if base is None else base
    records = []
    for index, step in enumerate(steps):
        payload = digest(step, session, rank, seed)
        own = digest(payload, after, number)
        records.append(Found(step, 100 * (index + 1), 8, payload, own, after))
        after = own
    name = Segment(timeline, session, rank, world_size, number=number, base=base)
    return Scanned(name, layout, records, torn, False, 1000)


class Start(NamedTuple):
    """A session."""

    number: int
    restored: int | None = None
    world_size: int = 1
    timeline: str = "main"
    parent: str | None = None
    """The timeline of `restored`, where it is another."""


def listing(fulls: Sequence[StepEntry], *sessions: Start, lost: Sequence[int] = ()) -> Listing:
    """A listing; the records of the sessions `lost` are."""
    timelines: dict[str, TimelineRecord] = {}
    records = []
    for s in sessions:
        of = s.parent or s.timeline
        restored = None if s.restored is None else StepRef(of, s.restored)
        parent = restored if s.parent else None
        timelines.setdefault(s.timeline, TimelineRecord(name=s.timeline, parent=parent))
        if s.number not in lost:
            records.append(
                SessionRecord(
                    run="", session=s.number, timeline=s.timeline, world_size=s.world_size,
                    restored=restored, created="", host="", pid=0, versions={},
                )
            )  # fmt: skip
    return Listing(steps=tuple(fulls), timelines=timelines, sessions=tuple(records))


def shown(chain: Chain | None) -> str | None:
    """`full 4 of 1, 5 of 1, 6 of 2`"""
    if chain is None:
        return None
    links = [f", {link.ref.step} of {link.session}" for link in chain.links]
    return f"full {chain.full.ref.step} of {chain.full.session}" + "".join(links)


def had(chains: Chains) -> list[int]:
    return [ref.step for ref in chains.refs]


# ---------------------------------------------------------------- by hand


def test_deltas_after_a_full() -> None:
    chains = plan_chains(listing([full(2)], Start(1)), [segment([1, 2, 3, 4])], "main")
    assert had(chains) == [2, 3, 4]
    assert shown(chains.to(2)) == "full 2 of 1"
    assert shown(chains.to(4)) == "full 2 of 1, 3 of 1, 4 of 1"
    assert chains.to(1) is None and chains.to(5) is None
    (gap,) = chains.gaps
    assert gap == (StepRef("main", 1), 1, "there is no full checkpoint before", False, None)


def test_the_newest_full_is_the_base_and_its_own_delta_is_not_applied() -> None:
    """The published code applied the delta of the base once more, and left the last one out."""
    chains = plan_chains(listing([full(2), full(4)], Start(1)), [segment([3, 4, 5])], "main")
    assert shown(chains.to(3)) == "full 2 of 1, 3 of 1"
    assert shown(chains.to(4)) == "full 4 of 1"
    assert shown(chains.to(5)) == "full 4 of 1, 5 of 1"
    assert shown(chains.proof(4)) == "full 2 of 1, 3 of 1, 4 of 1"
    assert chains.proof(2) is None


def test_a_gap_is_not_bridged() -> None:
    fulls = [full(2), full(7)]
    chains = plan_chains(listing(fulls, Start(1)), [segment([3, 5, 6, 7, 8])], "main")
    assert had(chains) == [2, 3, 7, 8]
    assert chains.proof(7) is None
    assert chains.gaps == [(StepRef("main", 4), 6, "there is no delta", False, None)]


def test_every_rank_must_have_its_delta() -> None:
    scans = [segment([3, 4, 5], rank=0, world_size=3), segment([3, 4, 5], rank=1, world_size=3)]
    torn = Damaged("torn", path="x", at=5)
    scans.append(segment([3], rank=2, world_size=3, torn=torn))
    chains = plan_chains(listing([full(2, ranks="aaa")], Start(1, None, 3)), scans, "main")
    assert had(chains) == [2, 3]
    link = chains.to(3).links[0]  # type: ignore[union-attr]
    assert [place.scanned.segment.rank for place in link.places] == [0, 1, 2]
    assert chains.gaps == [(StepRef("main", 4), 5, "there is no delta of rank 2", False, torn)]


def test_a_restart_supersedes_what_came_after() -> None:
    scans = [segment([3, 4, 5, 6]), segment([5, 6, 7], session=2)]
    chains = plan_chains(listing([full(2)], Start(1), Start(2, 4)), scans, "main")
    assert shown(chains.to(7)) == "full 2 of 1, 3 of 1, 4 of 1, 5 of 2, 6 of 2, 7 of 2"
    short = [scans[0], segment([5], session=2)]
    chains = plan_chains(listing([full(2)], Start(1), Start(2, 4)), short, "main")
    assert had(chains) == [2, 3, 4, 5], "6 is another session's future"


def test_a_full_of_a_superseded_step_is_no_base() -> None:
    fulls = [full(2), full(6)]
    scans = [segment([3, 4, 5, 6]), segment([5, 6, 7], session=2)]
    chains = plan_chains(listing(fulls, Start(1), Start(2, 4)), scans, "main")
    assert shown(chains.to(7)) == "full 2 of 1, 3 of 1, 4 of 1, 5 of 2, 6 of 2, 7 of 2"


def test_a_session_that_stored_nothing_supersedes_nothing() -> None:
    scans = [segment([3, 4, 5, 6]), segment([], session=2)]
    chains = plan_chains(listing([full(2)], Start(1), Start(2, 3)), scans, "main")
    assert had(chains) == [2, 3, 4, 5, 6]


def test_a_session_whose_record_is_lost() -> None:
    scans = [segment([3, 4, 5, 6]), segment([5, 6], session=2)]
    chains = plan_chains(listing([full(2)], Start(1), Start(2, 4), lost=[2]), scans, "main")
    assert shown(chains.to(6)) == "full 2 of 1, 3 of 1, 4 of 1, 5 of 2, 6 of 2"


def test_a_fork_goes_on_from_its_parent() -> None:
    fulls = [full(2)]
    scans = [segment([3, 4, 5, 6]), segment([5, 6], session=2, timeline="fork")]
    runs = listing(fulls, Start(1), Start(2, 4, 1, "fork", "main"))
    chains = plan_chains(runs, scans, "fork")
    assert [str(ref) for ref in chains.refs] == ["main:2", "main:3", "main:4", "fork:5", "fork:6"]
    assert shown(chains.to(6)) == "full 2 of 1, 3 of 1, 4 of 1, 5 of 2, 6 of 2"
    assert had(plan_chains(runs, scans, "main")) == [2, 3, 4, 5, 6]
    assert had(plan_chains(runs, scans, "nowhere")) == []


def test_a_fork_remembers_its_parent_as_it_was() -> None:
    """What the parent lost later, because it was restarted from before, is the fork's still."""
    scans = [
        segment([3, 4, 5, 6]),
        segment([6], session=2, timeline="fork"),
        segment([4, 5], session=3),
    ]
    runs = listing([full(2)], Start(1), Start(2, 5, 1, "fork", "main"), Start(3, 3))
    assert shown(plan_chains(runs, scans, "fork").to(6)) == (
        "full 2 of 1, 3 of 1, 4 of 1, 5 of 1, 6 of 2"
    )
    assert shown(plan_chains(runs, scans, "main").to(5)) == "full 2 of 1, 3 of 1, 4 of 3, 5 of 3"


def test_timelines_that_are_each_others_parents_end() -> None:
    runs = listing([full(2)], Start(1), Start(2, 4, 1, "fork", "main"))
    timelines = {
        "main": TimelineRecord(name="main", parent=StepRef("fork", 9)),
        "fork": TimelineRecord(name="fork", parent=StepRef("main", 4)),
    }
    runs = Listing(steps=runs.steps, timelines=timelines, sessions=runs.sessions)
    assert had(plan_chains(runs, [segment([3, 4])], "fork")) == [2, 3, 4]


def test_a_record_must_follow_the_one_before() -> None:
    first = segment([3, 4])
    fits = segment([5, 6], number=2, after=first.records[-1].digest)
    strange = segment([5, 6], number=2, after=first.records[0].digest)
    runs = listing([full(2)], Start(1))
    assert had(plan_chains(runs, [first, fits], "main")) == [2, 3, 4, 5, 6]
    chains = plan_chains(runs, [first, strange], "main")
    assert had(chains) == [2, 3, 4]
    assert chains.gaps[0].what == "the delta of rank 0 does not follow the one before"
    after_a_full = listing([full(2), full(4)], Start(1))
    assert had(plan_chains(after_a_full, [strange], "main")) == [2, 4, 5, 6]


def test_a_record_that_was_written_twice() -> None:
    """The append failed, and yet all of it is there; then it was done again."""
    first = segment([3, 4, 5])
    again = segment([4, 5, 6], number=2, base=2, after=first.records[0].digest)
    runs = listing([full(2)], Start(1))
    chains = plan_chains(runs, [first, again], "main")
    assert had(chains) == [2, 3, 4, 5, 6]
    way = chains.to(6)
    assert way is not None
    assert [link.places[0].scanned.segment.number for link in way.links] == [1, 2, 2, 2]
    damaged = Excluded(deltas={(again.segment.name, again.records[0].offset)})
    chains = plan_chains(runs, [first, again], "main", damaged)
    way = chains.to(6)
    assert way is not None, "the same delta is in the first segment, too"
    assert [link.places[0].scanned.segment.number for link in way.links] == [1, 1, 2, 2]


def test_what_is_damaged_is_gone_around() -> None:
    runs = listing([full(2), full(4)], Start(1))
    scans = [segment([3, 4, 5])]
    chains = plan_chains(runs, scans, "main", Excluded(fulls={(StepRef("main", 4), 1)}))
    assert shown(chains.to(5)) == "full 2 of 1, 3 of 1, 4 of 1, 5 of 1"
    spoilt = (scans[0].segment.name, scans[0].records[2].offset)
    chains = plan_chains(runs, scans, "main", Excluded(deltas={spoilt}))
    assert had(chains) == [2, 3, 4]


def test_layouts_and_numbers_of_ranks_may_change_between_sessions() -> None:
    scans = [
        segment([3, 4], rank=0, world_size=2, layout=b"two"),
        segment([3, 4], rank=1, world_size=2, layout=b"two"),
        segment([5], session=2, layout=b"one"),
    ]
    runs = listing([full(2, ranks="aa")], Start(1, None, 2), Start(2, 4))
    way = plan_chains(runs, scans, "main").to(5)
    assert way is not None
    found = [[place.scanned.layout for place in link.places] for link in way.links]
    assert found == [[b"two", b"two"], [b"two", b"two"], [b"one"]]


def test_an_incomplete_full_is_none() -> None:
    runs = listing([full(2, ranks="a-"), full(2, ranks="ab")], Start(1, None, 2))
    scans = [segment([3], rank=rank, world_size=2) for rank in (0, 1)]
    assert had(plan_chains(runs, scans, "main")) == []


def test_a_hostile_number_of_ranks() -> None:
    scans = [segment(range(1, 300), rank=7, world_size=99_999)]
    chains = plan_chains(listing([full(1)], Start(1), lost=[1]), scans, "main")
    assert had(chains) == [1]
    assert chains.gaps[0].what == (
        "there is no delta of rank 0, 1, 2, 3, 4, 5, 6, 8 and 99990 more"
    )


# ---------------------------------------------------------------- against a model


class History(NamedTuple):
    """A made-up run."""

    listing: Listing
    scans: list[Scanned]
    timelines: list[str]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Sessions that restore any step, here or in a fork, with any losses."""
    starts: list[Start] = []
    fulls: list[StepEntry] = []
    scans: list[Scanned] = []
    timelines = ["main"]
    for number in range(1, draw(st.integers(1, 4)) + 1):
        world_size = draw(st.integers(1, 2))
        restored = draw(st.none() | st.integers(0, 8)) if number > 1 else None
        timeline, parent = draw(st.sampled_from(timelines)), None
        if restored is not None and draw(st.booleans()):
            parent, timeline = timeline, f"t{number}"
            timelines.append(timeline)
        starts.append(Start(number, restored, world_size, timeline, parent))
        first = (restored or 0) + 1
        last = first + draw(st.integers(0, 6))
        for step in range(first, last):
            if draw(st.integers(0, 3)) == 0:
                ranks = draw(st.sampled_from(["a", "-"] if world_size == 1 else ["aa", "a-"]))
                fulls.append(full(step, number, timeline, ranks))
        for rank in range(world_size):
            cut = draw(st.integers(first, last))
            digests = lf.NO_DIGEST
            for index, (start, stop) in enumerate([(first, cut), (cut, last)], 1):
                steps = [s for s in range(start, stop) if draw(st.integers(0, 9)) > 0]
                made = segment(
                    steps, number, rank, world_size, timeline=timeline, number=index, after=digests
                )
                scans.append(made)
                digests = made.records[-1].digest if made.records else digests
                if draw(st.integers(0, 5)) == 0:
                    digests = digest("another")
    return History(listing([f for f in fulls if f.parts], *starts), scans, timelines)


def written_by(history: History, timeline: str, step: int, before: float) -> int | None:
    """The session whose writing of a step is on the line of a timeline: slowly, by going back from
    the newest session."""
    runs, scans = history.listing, history.scans
    active = {s.segment.session for s in scans if s.records}
    active |= {e.session for e in runs.steps if e.whole}
    mine = [s for s in runs.sessions if s.timeline == timeline and s.session < before]
    for session in reversed(mine):
        if session.session not in active:
            continue
        restored = session.restored.step if session.restored else 0
        if step > restored:
            return session.session
    parent = runs.timelines[timeline].parent
    if parent is None or step > parent.step:
        return None
    return written_by(history, parent.timeline, step, min([before, *(s.session for s in mine)]))


def model(history: History, timeline: str, step: int) -> str | None:
    """How a step can be had, by trying: the way that `to` should give."""
    runs = history.listing
    session = written_by(history, timeline, step, float("inf"))
    for entry in runs.steps:
        if entry.complete and entry.ref.step == step and entry.session == session:
            return f"full {step} of {session}"
    world_size = next((s.world_size for s in runs.sessions if s.session == session), 0)
    records = [
        (scanned, found)
        for scanned in history.scans
        for found in scanned.records
        if scanned.segment.session == session and found.step == step
    ]
    if session is None or {s.segment.rank for s, _ in records} != set(range(world_size)):
        return None
    for scanned, found in records:
        before = [
            other.digest
            for s in history.scans
            for other in s.records
            if (s.segment.session, s.segment.rank) == (session, scanned.segment.rank)
            if other.step == step - 1
            if written_by(history, timeline, step - 1, float("inf")) == session
        ]
        if before and found.previous != lf.NO_DIGEST and found.previous not in before:
            return None
    way = model(history, timeline, step - 1) if step > 0 else None
    return None if way is None else f"{way}, {step} of {session}"


@settings(max_examples=400)
@given(histories())
def test_as_the_model_says(history: History) -> None:
    for timeline in history.timelines:
        chains = plan_chains(history.listing, history.scans, timeline)
        expected = {step: model(history, timeline, step) for step in range(20)}
        found = {step: shown(chains.to(step)) for step in range(20)}
        assert found == expected
        assert had(chains) == [step for step, way in expected.items() if way is not None]
        lost = {s for gap in chains.gaps for s in range(gap.ref.step, gap.last + 1)}
        assert lost.isdisjoint(had(chains))
        for step in had(chains):
            proof = chains.proof(step)
            assert proof is None or len(proof.links) > 0


@pytest.mark.parametrize("count", [20_000])
def test_a_long_log_is_planned_quickly(count: int) -> None:
    chains = plan_chains(listing([full(1)], Start(1)), [segment(range(1, count))], "main")
    assert len(chains.refs) == count - 1
