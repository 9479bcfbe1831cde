"""What `prune` would remove, from made-up listings."""

from __future__ import annotations

import pytest

from everystep.store import format as fmt
from everystep.store.format import PartName, SessionRecord, TimelineRecord
from everystep.store.pruning import PrunePlan, pins, plan_prune
from everystep.store.retention import Retention
from everystep.store.run import Listing, StepEntry
from everystep.types import StepRef

EVERYTHING = Retention(keep_last=None)


def entry(
    text: str, session: int = 1, ranks: tuple[int, ...] = (0,), of: int = 1, replica: str = ""
) -> StepEntry:
    parts = tuple(PartName(session, rank, of, replica and f"{replica}{rank}") for rank in ranks)
    return StepEntry(
        ref=StepRef.parse(text), session=session, world_size=of, parts=parts, nbytes=11 * len(parts)
    )


def listing(
    *entries: StepEntry, loose: tuple[tuple[str, str], ...] = (), restored: str | None = None,
    forks: tuple[tuple[str, str], ...] = (),
) -> Listing:  # fmt: skip
    timelines = {"main": TimelineRecord(name="main", parent=None)}
    for name, parent in forks:
        timelines[name] = TimelineRecord(name=name, parent=StepRef.parse(parent))
    session = SessionRecord(
        run="r", session=9, timeline="main", world_size=1, created="", host="", pid=1,
        restored=None if restored is None else StepRef.parse(restored), versions={},
    )  # fmt: skip
    return Listing(
        steps=tuple(sorted(entries, key=lambda e: (e.ref, e.session))),
        timelines=timelines,
        sessions=(session,),
        loose=tuple((StepRef.parse(ref), stem) for ref, stem in loose),
    )


def files_of(made: Listing) -> dict[str, int]:
    """A data file of ten bytes and a record of one for every part."""
    files = {}
    for step in made.steps:
        for part in step.parts:
            directory = fmt.step_directory(step.ref)
            files[f"{directory}/{part.stem}.model.safetensors"] = 10
            files[f"{directory}/{part.marker}"] = 1
    for ref, stem in made.loose:
        files[f"{fmt.step_directory(ref)}/{stem}.model.safetensors"] = 10
    return files


def going(plan: PrunePlan) -> list[str]:
    return [f"{removal.kind} {removal.step}" for removal in plan.removals]


def kept(plan: PrunePlan) -> list[str]:
    return [str(step.ref) for step in plan.kept]


def test_each_timeline_keeps_its_own_newest() -> None:
    made = listing(
        *(entry(f"main:{n}") for n in range(1, 6)),
        *(entry(f"main@2:{n}") for n in range(3, 6)),
        forks=(("main@2", "main:2"),),
    )
    plan = plan_prune(made, files_of(made), Retention(keep_last=1), {}, {})
    assert going(plan) == ["step main:1", "step main:3", "step main:4", "step main@2:3",
                           "step main@2:4"]  # fmt: skip
    assert kept(plan) == ["main:2", "main:5", "main@2:5"], "the fork point stays"
    assert [str(step.ref) for step in plan.prove] == ["main:5", "main@2:5"]
    assert [removal.nbytes for removal in plan.removals] == [11] * 5
    one = plan_prune(made, files_of(made), Retention(keep_last=1), {}, {}, timeline="main@2")
    assert going(one) == ["step main@2:3", "step main@2:4"]
    assert [str(step.ref) for step in one.prove] == ["main@2:5"]
    assert kept(one) == ["main@2:5"]


def test_rules_add_up_and_the_restored_step_stays() -> None:
    made = listing(*(entry(f"main:{n}") for n in range(1, 11)), restored="main:3")
    metrics = {StepRef("main", n): float(abs(n - 7)) for n in range(1, 11)}
    policy = Retention(keep_last=1, keep_every=5, keep_best="loss")
    plan = plan_prune(made, files_of(made), policy, metrics, {})
    assert kept(plan) == ["main:3", "main:5", "main:7", "main:10"]
    assert pins(made) == {StepRef("main", 3), StepRef("main", 10)}


def refers(**steps: str) -> dict[StepRef, set[StepRef]]:
    """`refers(main5="main:1 side:2")`."""
    return {
        StepRef(name[:-1], int(name[-1])): {StepRef.parse(text) for text in to.split()}
        for name, to in steps.items()
    }


def spared(plan: PrunePlan) -> list[str]:
    return [f"{s.step} {' '.join(map(str, s.referred_by))}" for s in plan.spared]


def test_steps_to_which_others_refer_stay() -> None:
    made = listing(*(entry(f"main:{n}") for n in range(1, 7)))
    links = refers(main6="main:2", main5="main:3", main4="main:3 main:1")
    plan = plan_prune(made, files_of(made), Retention(keep_last=1), {}, links)
    assert kept(plan) == ["main:2", "main:6"]
    assert spared(plan) == ["main:2 main:6"]
    assert going(plan) == ["step main:4", "step main:1", "step main:5", "step main:3"]
    assert spared(plan_prune(made, files_of(made), Retention(keep_last=6), {}, links)) == []


def test_a_chain_is_kept_as_a_whole() -> None:
    made = listing(*(entry(f"main:{n}") for n in range(1, 6)))
    links = refers(main5="main:3", main3="main:1")
    plan = plan_prune(made, files_of(made), Retention(keep_last=1), {}, links)
    assert kept(plan) == ["main:1", "main:3", "main:5"]
    assert spared(plan) == ["main:1 main:3", "main:3 main:5"]


def test_references_cross_timelines_whichever_is_pruned() -> None:
    made = listing(
        *(entry(f"main:{n}") for n in range(1, 6)),
        *(entry(f"side:{n}") for n in range(3, 6)),
        forks=(("side", "main:2"),),
    )
    links = refers(side5="main:1", side4="main:3 side:3")
    both = plan_prune(made, files_of(made), Retention(keep_last=1), {}, links)
    assert kept(both) == ["main:1", "main:2", "main:5", "side:5"]
    order = going(both)
    assert order.index("step side:4") < order.index("step main:3") < len(order)
    assert order.index("step side:4") < order.index("step side:3")
    one = plan_prune(made, files_of(made), Retention(keep_last=1), {}, links, timeline="main")
    assert kept(one) == ["main:1", "main:2", "main:3", "main:5"], "all of the other timeline stays"
    assert spared(one) == ["main:1 side:5", "main:3 side:4"]


def test_parts_and_data_of_steps_that_are_needed_are_no_leftovers() -> None:
    stem = "s000001-r00000of00001"
    made = listing(
        entry("main:2", ranks=(1,), of=2), entry("main:3", ranks=(1,), of=2), entry("main:4"),
        loose=(("main:1", stem), ("main:5", stem)),
    )  # fmt: skip
    links = refers(main4="main:1 main:2")
    plan = plan_prune(made, files_of(made), EVERYTHING, {}, links)
    assert going(plan) == ["incomplete main:3", "unrecorded main:5"]
    assert spared(plan) == ["main:2 main:4"]


def test_without_a_rule_only_leftovers_go() -> None:
    stem = "s000001-r00000of00001"
    made = listing(entry("main:1"), entry("main:2", ranks=(1,), of=2), loose=(("main:3", stem),))
    files = files_of(made) | {"steps/main/x/.a.tmp": 5, "notes.txt": 3, "damaged/main/y/z": 2}
    plan = plan_prune(made, files, EVERYTHING, {}, {})
    assert going(plan) == ["incomplete main:2", "unrecorded main:3", "temporary None"]
    assert (kept(plan), plan.prove) == (["main:1"], ())
    assert plan.removals[1].names == (f"steps/main/000000000003/{stem}.model.safetensors",)
    assert plan.removals[1].session == 1
    assert plan.removals[2].names == ("steps/main/x/.a.tmp",)


def test_of_each_part_the_record_goes_first_and_each_file_once() -> None:
    made = listing(
        entry("main:1", ranks=(0, 1), of=2),
        entry("main:2", ranks=(1,), of=2),
        entry("main:3", ranks=(0, 1), of=2),
        entry("main:4", ranks=(0, 1), of=2),
        loose=(("main:2", "s000001-r00000of00002"),),
    )
    files = files_of(made)
    plan = plan_prune(made, files, Retention(keep_last=1), {}, {})
    assert going(plan) == ["step main:1", "incomplete main:2"]
    for removal in plan.removals:
        records = [name.endswith(".json") for name in removal.names]
        assert records == sorted(records, reverse=True) and any(records)
    gone = [name for removal in plan.removals for name in removal.names]
    assert len(set(gone)) == len(gone)
    assert set(gone) == {name for name in files if name.split("/")[2][-1] in "12"}


def test_writings_of_other_sessions_and_sizes_are_told_apart() -> None:
    made = listing(
        entry("main:1", session=1), entry("main:1", session=2), entry("main:2", session=2),
        entry("main:1", session=1, ranks=(0,), of=3),
    )  # fmt: skip
    plan = plan_prune(made, files_of(made), Retention(keep_last=2), {}, {})
    assert [(r.kind, r.session, r.names[0][-26:]) for r in plan.removals] == [
        ("step", 1, "s000001-r00000of00001.json"),
        ("incomplete", 1, "s000001-r00000of00003.json"),
    ]
    assert kept(plan) == ["main:1", "main:2"]


def test_steps_after_the_newest_complete_one_go_only_if_they_can_never_be_complete() -> None:
    made = listing(
        entry("main:1"), entry("main:2"), entry("main:3", ranks=(0,), of=2),
        entry("main:4", ranks=(0, 1), of=2, replica="a"),
    )  # fmt: skip
    plan = plan_prune(made, files_of(made), Retention(keep_last=1), {}, {})
    assert going(plan) == ["step main:1", "incomplete main:3"], "what diverged is evidence"
    assert kept(plan) == ["main:2"]


def test_what_diverged_goes_by_the_rules_when_something_newer_is_complete() -> None:
    made = listing(entry("main:1", ranks=(0, 1), of=2, replica="a"), entry("main:2"))
    assert going(plan_prune(made, files_of(made), EVERYTHING, {}, {})) == []
    plan = plan_prune(made, files_of(made), Retention(keep_last=5), {}, {})
    assert going(plan) == ["step main:1"]
    assert [str(step.ref) for step in plan.prove] == ["main:2"]


@pytest.mark.parametrize(
    ("timeline", "expected"),
    [
        (None, ["temporary None"] * 2 + ["damaged main:7", "damaged side.2:8", "damaged side:8"]),
        ("main", ["damaged main:7"]),
        ("side", ["damaged side:8"]),
    ],
)
def test_set_aside_steps_go_when_asked_and_within_their_timeline(
    timeline: str | None, expected: list[str]
) -> None:
    made = listing(forks=(("side", "main:1"),))
    files = {
        "damaged/main/000000000007/s000001-r00000of00001.json": 1,
        "damaged/main/000000000007/s000001-r00000of00001.model.safetensors": 2,
        "damaged/side/000000000008/s000001-r00000of00001.json": 1,
        ".run.json.1.tmp": 1,
        "steps/main/000000000001/.s.1.tmp": 1,
        "mainly/.x": 1,
        "damaged/side.2/000000000008/x": 1,
    }
    plan = plan_prune(made, files, EVERYTHING, {}, {}, timeline=timeline, set_aside=True)
    assert going(plan) == expected
    spared = plan_prune(made, files, EVERYTHING, {}, {}, timeline=timeline)
    assert going(spared) == [line for line in expected if not line.startswith("damaged")]
