"""A run directory: its identity, its listing, its sessions and timelines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from byte_runs import begin, files_of, forged, framed, new_run, small_state, write_part, write_step
from everystep.errors import (
    Damaged,
    Missing,
    NotARun,
    NothingToRestore,
    StoreError,
    StoreFailed,
)
from everystep.store import format as fmt
from everystep.store.format import PartName, TimelineRecord
from everystep.store.local import LocalBackend
from everystep.store.run import Listing, Run, StepEntry, fork_name
from everystep.types import StepRef


def main(step: int) -> StepRef:
    return StepRef("main", step)


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- identity


def test_a_run_is_made_once_and_found_again(tmp_path: Path) -> None:
    run = Run.open_or_create(LocalBackend(tmp_path))
    assert re.fullmatch("[0-9a-f]{32}", run.id)
    before = files_of(tmp_path)
    assert set(before) == {"run.json", "timelines/main.json"}
    assert Run.open_or_create(LocalBackend(tmp_path)).id == Run.open(tmp_path).id == run.id
    assert files_of(tmp_path) == before


def test_two_runs_have_different_identities(tmp_path: Path) -> None:
    ids = {new_run(tmp_path / name).id for name in "ab"}
    assert len(ids) == 2


@pytest.mark.parametrize("how", ["lost", "damaged", "another record"])
def test_a_lost_identity_is_taken_from_the_sessions(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A10."""
    run = new_run(tmp_path)
    write_step(run, main(1))
    begin(run, 2)
    flip(tmp_path / "sessions" / "000002.json")  # one of them may be damaged, too
    path = tmp_path / "run.json"
    if how == "lost":
        path.unlink()
    elif how == "damaged":
        flip(path)
    else:
        path.write_bytes(framed({"format": 1}))
    assert Run.open(tmp_path).id == run.id
    assert "identity taken from sessions/000001.json" in caplog.text
    assert Run.open_or_create(LocalBackend(tmp_path)).id == run.id
    caplog.clear()
    assert Run.open(tmp_path).id == run.id, "its owner has written it again"
    assert caplog.text == ""
    assert main(1) in run.listing().complete()


def test_an_identity_that_is_nowhere(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_step(run, main(1))
    flip(tmp_path / "sessions" / "000001.json")
    flip(tmp_path / "run.json")
    before = files_of(tmp_path)
    with pytest.raises(Damaged):
        Run.open(tmp_path)
    with pytest.raises(Damaged):
        Run.open_or_create(LocalBackend(tmp_path))
    (tmp_path / "run.json").unlink()
    with pytest.raises(NotARun):
        Run.open(tmp_path)
    with pytest.raises(NotARun, match="not empty"):
        Run.open_or_create(LocalBackend(tmp_path))
    before.pop("run.json")
    assert files_of(tmp_path) == before


def test_a_newer_run_is_left_alone(tmp_path: Path) -> None:
    new_run(tmp_path)
    (tmp_path / "run.json").write_bytes(framed({"format": fmt.FORMAT + 1}))
    before = files_of(tmp_path)
    for attempt in (Run.open, lambda path: Run.open_or_create(LocalBackend(path))):
        with pytest.raises(StoreError, match="newer"):
            attempt(tmp_path)
    assert files_of(tmp_path) == before


def test_a_directory_with_other_things_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="no such directory"):
        Run.open(tmp_path / "nothing")
    (tmp_path / "results.csv").write_bytes(b"1,2")
    with pytest.raises(NotARun, match="has no run"):
        Run.open(tmp_path)
    with pytest.raises(NotARun, match=r"results\.csv"):
        Run.open_or_create(LocalBackend(tmp_path))
    assert files_of(tmp_path) == {"results.csv": b"1,2"}


def test_a_start_that_was_cut_off_is_begun_again(tmp_path: Path) -> None:
    """Whatever a crash leaves of the first writes, the next start goes on."""
    run = Run.open_or_create(LocalBackend(tmp_path))
    (tmp_path / "run.json").unlink()
    (tmp_path / "owner.lock").touch()
    (tmp_path / ".run.json.1-2.tmp").write_bytes(b"half")
    (tmp_path / "timelines" / ".main.json.1-2.tmp").write_bytes(b"half")
    assert Run.open_or_create(LocalBackend(tmp_path)).id != run.id


# ---------------------------------------------------------------- listing


def test_a_listing_tells_what_is_there(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2)
    write_step(run, main(1), 2)
    write_part(run, main(2), small_state(), rank=0, world_size=2)
    (tmp_path / "steps/main/000000000002/s000001-r00001of00002.model.safetensors").write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    (tmp_path / "steps/main/000000000002/notes").write_bytes(b"mine")
    (tmp_path / "steps/main/000000000002/.a.json.1-2.tmp").write_bytes(b"half")
    (tmp_path / "timelines/a b.json").write_bytes(b"mine")
    (tmp_path / "sessions/mine.json").write_bytes(b"mine")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/x").write_bytes(b"")
    listing = run.listing()
    assert [(e.ref, e.complete, e.missing_ranks) for e in listing.steps] == [
        (main(1), True, []),
        (main(2), False, [1]),
    ]
    inside = tmp_path / "steps/main/000000000001"
    assert listing.steps[0].nbytes == sum(path.stat().st_size for path in inside.iterdir())
    assert listing.loose == ((main(2), "s000001-r00001of00002"),)
    assert listing.strangers == (
        "notes.txt",
        "sessions/mine.json",
        "steps/main/000000000002/.a.json.1-2.tmp",
        "steps/main/000000000002/notes",
        "timelines/a b.json",
    )
    assert listing.damages == ()
    assert [session.session for session in listing.sessions] == [1]
    assert listing.current_timeline() == "main"


def test_a_directory_alone_is_no_checkpoint(tmp_path: Path) -> None:
    """A05."""
    run = new_run(tmp_path)
    (tmp_path / "steps/main/000000000007").mkdir(parents=True)
    assert run.listing().steps == ()
    (tmp_path / "steps/main/000000000007/s000001-r00000of00001.model.safetensors").touch()
    assert run.listing().steps == ()
    assert run.listing().loose == ((main(7), "s000001-r00000of00001"),)


def test_a_step_written_by_two_sessions_is_that_of_the_newer(tmp_path: Path) -> None:
    """A17: a new writing has another name, and the old marker says nothing about it."""
    run = new_run(tmp_path)
    write_step(run, main(1), session=1)
    write_part(run, main(1), small_state(), session=2, world_size=2)
    assert run.listing().complete()[main(1)].session == 1
    write_part(run, main(1), small_state(), session=2, rank=1, world_size=2)
    assert run.listing().complete()[main(1)].session == 2


def test_a_lost_timeline_is_known_by_its_name(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_step(run, main(1))
    begin(run, 2, "main@1", parent=main(1), restored=main(1))
    write_step(run, StepRef("main@1", 2), session=2)
    for path in (tmp_path / "timelines").iterdir():
        flip(path)
    listing = run.listing()
    assert len(listing.damages) == 2
    assert listing.timelines["main@1"] == TimelineRecord(name="main@1", parent=main(1))
    assert [str(entry.ref) for entry in listing.line("main@1")] == ["main:1", "main@1:2"]


def test_a_lost_timeline_without_steps_is_known_from_its_session(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_step(run, main(1))
    begin(run, 2, "main@1", parent=main(1), restored=main(1))
    flip(tmp_path / "timelines" / "main@1.json")
    listing = run.listing()
    assert listing.current_timeline() == "main@1"
    assert [str(entry.ref) for entry in listing.line("main@1")] == ["main:1"]


def test_a_damaged_session_is_known_from_its_steps(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_step(run, main(1))
    begin(run, 2, "main@1", parent=main(1), restored=main(1))
    write_step(run, StepRef("main@1", 2), session=2)
    flip(tmp_path / "sessions" / "000002.json")
    listing = run.listing()
    assert listing.current_timeline() == "main@1"
    assert [str(damage.path) for damage in listing.damages] == ["sessions/000002.json"]
    assert run.clean_up() == 3


def test_records_that_say_something_else_than_their_names(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_step(run, main(1))
    begin(run, 2)
    begin(run, 3, "x", parent=main(1))
    begin(run, 4)
    forged(tmp_path / "timelines/x.json", name="main", parent={"timeline": "main", "step": 9})
    forged(tmp_path / "sessions/000002.json", session=9)
    forged(tmp_path / "sessions/000003.json", timeline="../../x")
    forged(tmp_path / "sessions/000004.json", run="f" * 32)
    listing = run.listing()
    assert {str(damage.path) for damage in listing.damages} == {
        *["timelines/x.json", "sessions/000002.json"],
        *["sessions/000003.json", "sessions/000004.json"],
    }
    assert all("belongs elsewhere" in str(damage) for damage in listing.damages)
    assert listing.timelines.keys() == {"main"}
    assert listing.current_timeline() == "main"


# ---------------------------------------------------------------- one step


def test_a_record_belongs_to_its_run_step_session_and_rank(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", 2)
    other = new_run(tmp_path / "other", 2)
    write_step(run, main(1), 2)
    write_step(other, main(1), 2)
    write_step(run, main(2), 2)
    (entry,) = run.entries(main(1))
    first = tmp_path / "run/steps/main/000000000001"
    good = {path.name: path.read_bytes() for path in first.iterdir()}
    names = [part.marker for part in entry.parts]
    elsewhere = [
        tmp_path / "other/steps/main/000000000001" / names[0],
        next((tmp_path / "run/steps/main/000000000002").glob("*r00000*.json")),
        first / names[1],
    ]
    for source in elsewhere:
        (first / names[0]).write_bytes(source.read_bytes())
        with pytest.raises(Damaged, match="belongs elsewhere"):
            run.record(entry, 0)
        (first / names[0]).write_bytes(good[names[0]])
    for change in ({"session": 2}, {"world_size": 3}, {"timeline": "x"}, {"run": ""}):
        forged(first / names[0], **change)
        with pytest.raises(Damaged, match="belongs elsewhere"):
            run.record(entry, 0)
        (first / names[0]).write_bytes(good[names[0]])
    assert run.records(entry).keys() == {0, 1}


def test_a_rank_that_stored_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2)
    write_part(run, main(1), small_state(), world_size=2)
    with pytest.raises(Missing, match="stored nothing"):
        run.record(run.entries(main(1))[0], 1)


def test_setting_a_step_aside_moves_all_of_it_and_nothing_else(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2)
    for step in (1, 2):
        write_step(run, main(step), 2)
    before = files_of(tmp_path)
    (entry,) = run.entries(main(2))
    assert run.set_aside(entry) == "damaged/main/000000000002"
    moved = {
        name.replace("steps/main/000000000002", "damaged/main/000000000002"): data
        for name, data in before.items()
    }
    assert files_of(tmp_path) == moved
    assert run.listing().complete().keys() == {main(1)}
    assert run.listing().strangers == ()


def test_a_part_ceases_to_exist_before_its_data_goes(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_step(run, main(1))
    names = [name.rsplit(".", 1)[1] for name in run.part_files(main(1), "s000001-r00000of00001")]
    assert names == ["json", "safetensors", "safetensors"]
    run.delete_part(main(1), "s000001-r00000of00001")
    assert run.entries(main(1)) == []
    assert not (tmp_path / "steps").exists()


def test_deleting_one_part_leaves_those_with_similar_names(tmp_path: Path) -> None:
    run = new_run(tmp_path, 11)
    for session, rank in ((1, 1), (1, 10), (11, 1)):
        write_part(run, main(1), small_state(), rank=rank, world_size=11, session=session)
    run.delete_part(main(1), PartName(1, 1, 11, "").stem)
    left = {(e.session, part.rank) for e in run.entries(main(1)) for part in e.parts}
    assert left == {(1, 10), (11, 1)}


# ---------------------------------------------------------------- sessions


def test_cleaning_up_removes_what_can_never_become_complete(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2)
    write_step(run, main(1), 2)
    whole = files_of(tmp_path)
    write_part(run, main(2), small_state(), rank=1, world_size=2)
    loose = tmp_path / "steps/main/000000000003/s000001-r00000of00002.state.safetensors"
    loose.parent.mkdir()
    loose.write_bytes(b"half")
    assert run.clean_up() == 2
    assert files_of(tmp_path) == whole


def test_replicas_that_differ_are_kept_as_evidence(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2)
    for rank in (0, 1):
        write_part(run, main(1), small_state(seed=rank), rank=rank, world_size=2)
    before = files_of(tmp_path)
    assert run.clean_up() == 2
    assert files_of(tmp_path) == before


def test_session_numbers_go_up_whatever_is_left(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.clean_up() == 2
    write_step(run, main(1), session=41)
    assert run.clean_up() == 42
    (tmp_path / "sessions" / ("9" * 200 + ".json")).write_bytes(b"")
    (tmp_path / "sessions" / "\u00b2\u00b2\u00b2\u00b2\u00b2\u00b2.json").write_bytes(b"")
    assert run.clean_up() == 42
    (tmp_path / "sessions" / "999999999.json").write_bytes(b"")
    with pytest.raises(StoreFailed, match="no more session numbers"):
        run.clean_up()


def test_a_session_writes_its_timeline_once(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    path = tmp_path / "timelines" / "main.json"
    before = path.stat()
    begin(run, 2, "main", parent=main(9))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# ---------------------------------------------------------------- lines and forks


def entry(timeline: str, step: int, session: int = 1) -> StepEntry:
    part = PartName(session, 0, 1, "")
    return StepEntry(
        ref=StepRef(timeline, step), session=session, world_size=1, parts=(part,), nbytes=0
    )


def made_up(steps: list[str], forks: dict[str, str | None]) -> Listing:
    refs = [StepRef.parse(text) for text in steps]
    return Listing(
        steps=tuple(entry(ref.timeline, ref.step) for ref in refs),
        timelines={
            name: TimelineRecord(name=name, parent=StepRef.parse(parent) if parent else None)
            for name, parent in forks.items()
        },
        sessions=(),
    )


def line(listing: Listing, timeline: str) -> list[str]:
    return [str(found.ref) for found in listing.line(timeline)]


def test_a_line_goes_through_forks() -> None:
    listing = made_up(
        ["main:1", "main:2", "main:3", "a:3", "a:4", "b:4", "other:1"],
        {"main": None, "a": "main:2", "b": "a:3", "other": None},
    )
    assert line(listing, "main") == ["main:1", "main:2", "main:3"]
    assert line(listing, "a") == ["main:1", "main:2", "a:3", "a:4"]
    assert line(listing, "b") == ["main:1", "main:2", "a:3", "b:4"]
    with pytest.raises(NothingToRestore, match="no timeline 'x'"):
        listing.line("x")


def test_a_line_ends_where_an_ancestor_is_gone() -> None:
    """What is left of the timeline itself can be restored all the same."""
    assert line(made_up(["a:3"], {"a": "gone:2"}), "a") == ["a:3"]


def test_a_line_that_goes_in_a_circle_ends() -> None:
    listing = made_up(["a:1", "b:2"], {"a": "b:9", "b": "a:9"})
    assert line(listing, "a") == ["a:1", "b:2"]


def test_names_of_forks() -> None:
    listing = made_up([], {"main": None, "main@5": "main:5", "main@5.2": "main:5"})
    assert fork_name(listing, main(6)) == "main@6"
    assert fork_name(listing, main(5)) == "main@5.3"
    long = StepRef("m" * 97, 5)
    assert fork_name(listing, long) == "t"
    crowded = made_up([], {"t": None, "t.2": None, "main": None})
    assert fork_name(crowded, long) == "t.3"
    deep = "main"
    for step in range(1, 60):
        name = fork_name(made_up([], {deep: None}), StepRef(deep, step))
        assert fmt.parse_timeline_file(fmt.timeline_file(name)) == name
        deep = name


def test_the_current_timeline_is_that_of_the_newest_session() -> None:
    assert made_up([], {}).current_timeline() == "main"
    listing = Listing(
        steps=(entry("a", 9, session=2), entry("b", 1, session=3)), timelines={}, sessions=()
    )
    assert listing.current_timeline() == "b"


def test_missing_ranks_in_words() -> None:
    part = PartName(1, 1, 99_999, "")
    huge = StepEntry(ref=main(1), session=1, world_size=99_999, parts=(part,), nbytes=0)
    assert huge.missing == "0, 2, 3, 4, 5, 6, 7, 8 and 99990 more"
    assert entry("main", 1).missing == ""
