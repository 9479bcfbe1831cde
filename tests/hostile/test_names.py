"""Names that lead out of a run, or lie about what is in it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

import everystep
from byte_runs import NoSync, begin, files_of, forged, framed, new_run, write_step
from everystep.errors import CannotRestore, Damaged, EverystepError
from everystep.recovery.plan import plan_restore
from everystep.recovery.restore import require_fresh
from everystep.store.format import PartName
from everystep.store.run import Run
from everystep.store.verify import verify_run
from everystep.types import StepRef

REF = StepRef("main", 1)
STEP = "steps/main/000000000001"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of one step, beside things that are none of its business."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    write_step(new_run(tmp_path / "run", calls=NoSync()), REF)
    return tmp_path / "run"


def record_of(root: Path) -> Path:
    (path,) = (root / STEP).glob("*.json")
    return path


def damages(root: Path) -> list[str]:
    run = Run.open(root)
    return [f.what for f in verify_run(run, run.listing()) if f.level == "damage"]


@pytest.mark.parametrize(
    "name",
    [
        "../../../../outside/secret",
        "/etc/passwd",
        "..",
        ".",
        "",
        "sub/s000001-r00000of00001.model.safetensors",
        "../000000000001/s000001-r00000of00001.model.safetensors",
        "s000001-r00000of00001.model.safetensors/../../../run.json",
        "s000002-r00000of00001.model.safetensors",
        "s000001-r00001of00001.model.safetensors",
        "s000001-r00000of00001.json",
        "s000001-r00000of00001.model.safetensors\0",
        "s000001-r00000of00001.mödel.safetensors",
        "x" * 100_000,
    ],
)
def test_a_data_file_elsewhere(root: Path, name: str) -> None:
    """A record with a valid hash names a data file that is not of its part."""
    record = record_of(root)
    run = Run.open(root)
    (entry,) = run.entries(REF)
    files = [{"name": name, "nbytes": 6, "header_bytes": 6, "header_xxh3_128": "0" * 32}]
    forged(record, files=files)
    with pytest.raises(Damaged, match="not a data file of its part") as raised:
        run.record(entry, 0)
    assert len(str(raised.value)) < 1000
    assert any("not a data file" in what for what in damages(root))
    with pytest.raises(CannotRestore):
        everystep.load(root)


def test_one_data_file_under_two_descriptions(root: Path) -> None:
    """A record names a file twice, with other lengths."""
    record = record_of(root)
    name = "s000001-r00000of00001.model.safetensors"
    one = {"name": name, "nbytes": 600, "header_bytes": 60, "header_xxh3_128": "0" * 32}
    forged(record, files=[one, {**one, "nbytes": 601}])
    assert damages(root) == ["it names a file twice"]


@pytest.mark.parametrize("name", ["../../outside", "..", "/", "a/b", "ä", "x" * 101, "a\nb"])
def test_a_timeline_elsewhere(root: Path, name: str) -> None:
    """The newest session, with a valid hash, says that training goes on in another directory."""
    begin(Run.open(root), 2)
    forged(root / "sessions/000002.json", timeline=name)
    listing = Run.open(root).listing()
    assert [str(damage.path) for damage in listing.damages] == ["sessions/000002.json"]
    assert plan_restore(listing, [], None).timeline.name == "main"


def test_a_timeline_whose_parent_is_elsewhere(root: Path) -> None:
    """A timeline forks from a step in another directory."""
    parent = {"timeline": "../../outside", "step": 1}
    (root / "timelines/x.json").write_bytes(framed({"format": 1, "name": "x", "parent": parent}))
    listing = Run.open(root).listing()
    assert listing.line("x") == []


def test_directories_with_names_that_are_none(root: Path) -> None:
    """Steps in directories that no writer makes are strangers, and nothing is done with them."""
    marker = "s000001-r00000of00001.json"
    for directory in ("steps/...", "steps/ma in/000000000001", "steps/main/1", "steps/main/x"):
        (root / directory).mkdir(parents=True)
        (root / directory / marker).write_bytes(b"")
    before = files_of(root)
    run = Run.open(root)
    listing = run.listing()
    assert len(listing.strangers) == 4
    run.clean_up()
    assert files_of(root) == before


def test_more_ranks_than_there_can_be(root: Path) -> None:
    """A name that says 99,999 ranks costs no more than one that says two."""
    part = PartName(1, 7, 99_999, "")
    (root / "steps/main/000000000009").mkdir()
    (root / "steps/main/000000000009" / part.marker).write_bytes(b"")
    run = Run.open(root)
    listing = run.listing()
    assert [e.complete for e in listing.steps] == [True, False]
    notes = [f.what for f in verify_run(run, listing) if "incomplete" in f.what]
    assert len(notes) == 1 and len(notes[0]) < 200
    empty = type(listing)(steps=(listing.steps[1],), timelines=listing.timelines, sessions=())
    with pytest.raises(CannotRestore) as raised:
        require_fresh(empty)
    assert len(str(raised.value)) < 500


def test_one_rank_twice(tmp_path: Path) -> None:
    """Two records of rank 0 do not make a step of two ranks."""
    root = tmp_path / "run"
    run = new_run(root, 2, NoSync())
    directory = root / STEP
    directory.mkdir(parents=True)
    for replica in ("", "a" * 16, "b" * 16):
        (directory / PartName(1, 0, 2, replica).marker).write_bytes(b"")
    assert not any(entry.complete for entry in run.listing().steps)


# ---------------------------------------------------------------- links and special files


def everything(root: Path) -> None:
    """Whatever reads, cleans or writes a run; errors of ours are fine, all else is not."""
    attempts: list[Any] = [
        lambda: damages(root),
        lambda: everystep.load(root),
        lambda: Run.open(root).clean_up(),
        lambda: write_step(Run.open(root), StepRef("main", 2)),
        lambda: Run.open(root).backend.sweep(),
        lambda: [Run.open(root).set_aside(e) for e in Run.open(root).listing().steps],
    ]
    for attempt in attempts:
        try:
            attempt()
        except EverystepError as error:
            assert len(str(error)) < 10_000


@pytest.mark.parametrize("where", ["steps", "steps/main", STEP, "timelines", "sessions", "damaged"])
def test_a_folder_that_is_a_link(root: Path, tmp_path: Path, where: str) -> None:
    """A folder of the run is a link to one outside, in which nothing is written or deleted."""
    target = tmp_path / "outside" / "folder"
    if (root / where).exists():
        os.renames(root / where, target)
    else:
        target.mkdir()
    (target / ".x.json.1-2.tmp").write_bytes(b"not ours to sweep")
    (root / where).parent.mkdir(parents=True, exist_ok=True)
    (root / where).symlink_to(target)
    before = files_of(tmp_path / "outside")
    everything(root)
    assert files_of(tmp_path / "outside") == before


def test_steps_behind_a_link_are_no_fresh_start(root: Path, tmp_path: Path) -> None:
    """X02: whoever moves the steps to a larger disk and leaves a link must hear of it."""
    os.renames(root / "steps", tmp_path / "outside" / "steps")
    (root / "steps").symlink_to(tmp_path / "outside" / "steps")
    listing = Run.open(root).listing()
    assert listing.steps == ()
    with pytest.raises(CannotRestore, match="holds steps"):
        require_fresh(listing)


@pytest.mark.parametrize("where", ["file", STEP, "steps/side"])
def test_a_reference_through_a_link(root: Path, tmp_path: Path, where: str) -> None:
    """Step 2 refers to a file of an earlier step, and the file or a folder above it is a link."""
    first = StepRef("side", 1) if where == "steps/side" else REF
    run = Run.open(root)
    begin(run, 1, "side")
    if first != REF:
        write_step(run, first)
    write_step(run, StepRef("main", 2), earlier=first)
    assert damages(root) == []
    link = root / where
    if where == "file":
        (link,) = (root / STEP).glob("*.model.safetensors")
    target = tmp_path / "outside" / "moved"
    link.rename(target)
    link.symlink_to(target)
    before = files_of(tmp_path / "outside")
    found = damages(root)
    assert found and all("link" in what or "not there" in what for what in found)
    with pytest.raises(EverystepError):
        everystep.load(root, step=2)
    everything(root)
    assert files_of(tmp_path / "outside") == before


@pytest.mark.parametrize(
    "what", ["run.json", "timelines/main.json", "sessions/000001.json", "record", "data"]
)
@pytest.mark.parametrize("kind", ["link", "loop", "dangling", "pipe", "socket", "folder", "zero"])
def test_a_file_that_is_none(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, kind: str
) -> None:
    """A file of the run is a link, a pipe (to open it waits for ever), or a device."""
    path = root / what
    if what in ("record", "data"):
        pattern = "*.json" if what == "record" else "*.model.safetensors"
        (path,) = (root / STEP).glob(pattern)
    data = path.read_bytes()
    path.unlink()
    outside = tmp_path / "outside" / "copy"
    outside.write_bytes(data)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "outside" / "made by a write")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            monkeypatch.chdir(path.parent)  # the name of a socket is short
            listener.bind(path.name)
    before = files_of(tmp_path / "outside")
    if kind != "folder":
        assert any("link, folder or special" in what for what in damages(root))
    everything(root)
    assert files_of(tmp_path / "outside") == before
