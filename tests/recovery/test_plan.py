"""What to restore, from made-up listings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.errors import CannotRestore, NothingToRestore
from everystep.recovery.plan import plan_restore
from everystep.recovery.restore import require_fresh
from everystep.store.chains import Excluded, plan_chains
from everystep.store.format import PartName, SessionRecord, TimelineRecord
from everystep.store.run import Listing, StepEntry
from everystep.types import StepRef, is_timeline


def ref(text: str) -> StepRef:
    return StepRef.parse(text)


def entry(text: str, session: int = 1, ranks: str = "a") -> StepEntry:
    parts = tuple(
        PartName(session, rank, len(ranks), letter * 16)
        for rank, letter in enumerate(ranks)
        if letter != "-"
    )
    return StepEntry(ref=ref(text), session=session, world_size=len(ranks), parts=parts, nbytes=0)


def session(number: int, timeline: str, restored: str | None = None) -> SessionRecord:
    return SessionRecord(
        run="",
        session=number,
        timeline=timeline,
        world_size=1,
        restored=ref(restored) if restored else None,
        created="",
        host="",
        pid=1,
        versions={},
    )


def listing(
    steps: list[StepEntry],
    forks: dict[str, str | None] | None = None,
    sessions: tuple[SessionRecord, ...] = (),
    strangers: tuple[str, ...] = (),
    loose: tuple[str, ...] = (),
) -> Listing:
    timelines = {
        name: TimelineRecord(name=name, parent=ref(parent) if parent else None)
        for name, parent in (forks or {"main": None}).items()
    }
    return Listing(
        steps=tuple(sorted(steps, key=lambda e: (e.ref, e.session))),
        timelines=timelines,
        sessions=sessions,
        strangers=strangers,
        loose=tuple((ref(text), "s000001-r00000of00001") for text in loose),
    )


def tried(made: Listing, step: int | str | StepRef | None = None) -> list[str]:
    """The full checkpoints that would be tried, one after the other, if each one failed."""
    asked = ref(step) if isinstance(step, str) else step
    return [str(entry.ref) for entry in attempts(made, asked)]


def plan_chains_steps(made: Listing, timeline: str) -> list[int]:
    return [r.step for r in plan_chains(made, [], timeline).refs if r.timeline == timeline]


def attempts(made: Listing, asked: int | StepRef | None = None) -> list[StepEntry]:
    found: list[StepEntry] = []
    excluded = Excluded()
    while (chain := plan_restore(made, [], asked, excluded).chain) is not None:
        assert not chain.links
        found.append(chain.full)
        full = (chain.full.ref, chain.full.session)
        excluded = excluded._replace(fulls={*excluded.fulls, full})
    return found


# ---------------------------------------------------------------- which step


def test_the_newest_first_and_the_older_ones_after_it() -> None:
    made = listing([entry("main:1"), entry("main:3"), entry("main:2")])
    assert tried(made) == ["main:3", "main:2", "main:1"]
    assert plan_restore(made, [], None).timeline == TimelineRecord(name="main", parent=None)
    assert not plan_restore(made, [], None).asked


def test_only_complete_steps_are_tried() -> None:
    """A03."""
    steps = [entry("main:1", 1, "aa"), entry("main:2", 1, "a-"), entry("main:3", 1, "ab")]
    assert tried(listing(steps)) == ["main:1"]


def test_the_line_leads_through_forks() -> None:
    forks = {"main": None, "main@2": "main:2", "main@2@4": "main@2:4", "main@1": "main:1"}
    steps = [entry(f"main:{n}") for n in (1, 2, 3)]
    steps += [entry("main@2:3", 2), entry("main@2:4", 2), entry("main@2:5", 2)]
    steps += [entry("main@2@4:5", 3), entry("main@1:2", 4)]
    made = listing(steps, forks, (session(3, "main@2@4"),))
    current = listing(steps, forks, (session(9, "main@2@4"),))
    assert tried(made) == ["main@1:2", "main:1"], "the newest session is the one of its steps"
    assert tried(current) == ["main@2@4:5", "main@2:4", "main@2:3", "main:2", "main:1"]
    assert plan_restore(current, [], None).timeline.name == "main@2@4"


def test_a_fork_without_steps_yet_goes_on_from_its_parent() -> None:
    made = listing(
        [entry(f"main:{n}") for n in (1, 2, 3)],
        {"main": None, "main@2": "main:2"},
        (session(1, "main"), session(2, "main@2", "main:2")),
    )
    assert tried(made) == ["main:2", "main:1"]
    assert plan_restore(made, [], None).timeline.name == "main@2"


def test_old_runs_high_numbers_do_not_win() -> None:
    """G06: by the session's timeline, and not by the number."""
    made = listing(
        [entry("old:9000"), entry("new:10", 2)],
        {"old": None, "new": None},
        (session(1, "old"), session(2, "new")),
    )
    assert tried(made) == ["new:10"]


def test_nothing_at_all_is_a_fresh_run() -> None:
    plan = plan_restore(listing([]), [], None)
    assert (plan.chain, plan.timeline.name) == (None, "main")
    nothing = Listing(steps=(), timelines={}, sessions=())
    assert plan_restore(nothing, [], None).timeline.name == "main"


# ---------------------------------------------------------------- a step that is asked for


def test_a_step_that_is_asked_for_is_the_only_candidate() -> None:
    made = listing([entry(f"main:{n}") for n in (1, 2, 3)])
    plan = plan_restore(made, [], 2)
    assert plan.asked
    assert tried(made, 2) == ["main:2"]
    assert plan.timeline == TimelineRecord(name="main@2", parent=ref("main:2"))
    assert plan_restore(made, [], ref("main:2")) == plan


def test_the_newest_by_its_number_goes_on_without_a_fork() -> None:
    made = listing([entry("main:1"), entry("main:2"), entry("main:3", 1, "a-")])
    assert plan_restore(made, [], 2).timeline.name == "main"


def test_a_step_of_the_parent_forks_the_parent() -> None:
    made = listing(
        [entry("main:1"), entry("main:2"), entry("main@1:2", 2)],
        {"main": None, "main@1": "main:1"},
        (session(2, "main@1", "main:1"),),
    )
    assert tried(made, 1) == ["main:1"]
    assert plan_restore(made, [], 1).timeline.name == "main@1.2"
    assert plan_restore(made, [], 2).timeline.name == "main@1", "its newest"
    assert plan_restore(made, [], ref("main:2")).timeline.name == "main", "the other's newest"


@pytest.mark.parametrize(
    ("step", "nearest"),
    [(5, "3, 4, 8"), (99, "4, 8, 9"), (0, "1, 3, 4"), (-1, "1, 3, 4")],
)
def test_a_step_that_is_not_there_names_its_neighbours(step: int, nearest: str) -> None:
    made = listing([entry(f"main:{n}") for n in (1, 3, 4, 8, 9)])
    with pytest.raises(NothingToRestore, match=f"step {step} is not there") as raised:
        plan_restore(made, [], step)
    assert str(raised.value).endswith(f"the nearest that can be restored: {nearest}")


def test_a_step_that_is_not_complete_is_not_there() -> None:
    made = listing([entry("main:1", 1, "aa"), entry("main:2", 1, "a-")])
    with pytest.raises(NothingToRestore, match="not complete"):
        plan_restore(made, [], 2)


@pytest.mark.parametrize("step", [ref("main:2"), ref("other:1"), 7])
def test_what_is_nowhere(step: int | StepRef) -> None:
    with pytest.raises(NothingToRestore):
        plan_restore(listing([entry("main:1")]), [], step)
    with pytest.raises(NothingToRestore):
        plan_restore(listing([]), [], step)


STEPS = st.lists(
    st.builds(
        entry,
        st.builds("{}:{}".format, st.sampled_from(["main", "main@2", "x"]), st.integers(1, 5)),
        st.integers(1, 4),
        st.sampled_from(["aa", "aa", "ab", "a-"]),
    ),
    max_size=10,
    unique_by=lambda e: (e.ref, e.session),
)
FORKS = st.fixed_dictionaries(
    {name: st.none() | st.sampled_from(["main:2", "main@2:3", "x:1"])
     for name in ("main", "main@2", "x")}
)  # fmt: skip


@given(STEPS, FORKS)
def test_whatever_the_listing_a_plan_is_sound(
    steps: list[StepEntry], forks: dict[str, str | None]
) -> None:
    made = listing(steps, forks)
    complete = made.complete()
    plan = plan_restore(made, [], None)
    candidates = attempts(made)
    assert all(e.complete for e in candidates)
    numbers = [e.ref.step for e in candidates]
    assert numbers == sorted(numbers, reverse=True)
    assert plan.timeline.name in made.timelines
    for asked in complete:
        if asked.step not in plan_chains_steps(made, asked.timeline):
            continue
        one = plan_restore(made, [], asked)
        assert one.chain is not None and one.chain.ref == asked
        assert is_timeline(one.timeline.name)
        if one.timeline.name not in made.timelines:
            assert one.timeline.parent == asked
        later = [r for r in complete if r.timeline == one.timeline.name and r.step > asked.step]
        assert later == [], "what is there is not written over"


# ---------------------------------------------------------------- is it fresh?


@pytest.mark.parametrize(
    "made",
    [
        listing([]),
        listing([entry("main:1", 1, "a-")], sessions=(session(1, "main"),)),
        listing([], loose=("main:1",)),
        listing([], strangers=("steps/main/000000000001/.x.json.1-2.tmp", ".run.json.1-2.tmp")),
    ],
    ids=["empty", "cut off in its first step", "before its first record", "temporary files"],
)
def test_a_start_that_was_cut_off_is_fresh(made: Listing) -> None:
    require_fresh(made)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (listing([entry("main:2", 1, "a-")]), "nothing of rank 1"),
        (listing([entry("main:1", 1, "a-"), entry("main:7", 1, "ab")]), "main:7"),
        (listing([], loose=("main:2",)), "main:2"),
        (listing([], strangers=("steps",)), "holds steps"),
        (listing([], sessions=(session(2, "main", "main:9"),)), "has had step main:9"),
        (listing([], {"main": None, "main@4": "main:4"}), "has had step main:4"),
        (listing([entry("x:1")], {"main": None}), "has had step x:1"),
    ],
    ids=[
        *["incomplete", "replicas differ", "data only", "a link", "steps deleted"],
        *["forked", "on another timeline"],
    ],
)
def test_what_has_had_steps_is_not_begun_anew_in_silence(made: Listing, says: str) -> None:
    """A10, X02."""
    with pytest.raises(CannotRestore, match=says):
        require_fresh(made)
