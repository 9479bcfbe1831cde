"""Every byte of a run: each one that is changed is found, in its file, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from byte_runs import (
    NoSync,
    begin,
    files_of,
    forged,
    new_run,
    small_state,
    tensor,
    write_part,
    write_step,
)
from everystep.errors import Damaged
from everystep.store import format as fmt
from everystep.store.backend import Entry
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from everystep.store.verify import Finding, verify_run, verify_step
from everystep.types import StepRef

REF = StepRef("main", 1)


def findings(root: Path) -> list[Finding]:
    run = Run.open(root)
    return list(verify_run(run, run.listing()))


class OneFileChanged(LocalBackend):
    """A run of which one file reads otherwise than it is: faster than to write each change."""

    def __init__(self, root: Path, files: dict[str, bytes]) -> None:
        super().__init__(root)
        self.files = files
        self.name, self.data = "", b""

    def list(self, prefix: str) -> Any:
        for name in self.files:
            if name.startswith(prefix + "/" if prefix else ""):
                yield Entry(name, self.size(name))

    def size(self, name: str) -> int:
        return len(self.data if name == self.name else self.files[name])

    def read(self, name: str, into: memoryview, offset: int) -> None:
        data = self.data if name == self.name else self.files[name]
        into[:] = data[offset : offset + len(into)]


def tiny_run(root: Path, world_size: int) -> dict[str, bytes]:
    """A run with a fork, a session and one step of as many ranks; its bytes by name."""
    run = new_run(root, world_size)
    for rank in range(world_size):
        state = [
            tensor("/models/model/w", "float32", 5, replicated=True),
            tensor("/rng/torch", "uint8", 3, seed=rank),
        ]
        write_part(run, REF, state, rank=rank, world_size=world_size)
    begin(run, 2, "main@1", world_size=world_size, parent=REF, restored=REF)
    assert findings(root) == []
    return files_of(root)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_flipped_byte_and_every_cut_is_found_in_its_file(
    tmp_path: Path, world_size: int
) -> None:
    files = tiny_run(tmp_path, world_size)
    assert len(files) == 5 + 3 * world_size
    backend = OneFileChanged(tmp_path, files)
    record = fmt.decode_record(files["run.json"], fmt.RunRecord, "run.json")
    changes = 0

    def check(name: str, data: bytes, what: str) -> None:
        nonlocal changes
        changes += 1
        backend.name, backend.data = name, data
        run = Run(backend, record)
        found = [f for f in verify_run(run, run.listing()) if f.level == "damage"]
        assert found, f"{name}: {what} is not found"
        assert {finding.path for finding in found} == {name}, f"{name}: {what}"

    for name, data in files.items():
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 1 << (at % 8)
            check(name, bytes(changed), f"byte {at} flipped")
            if at % world_size == 0:
                check(name, data[:at], f"cut to {at} bytes")
        check(name, data + b"\0", "a byte more")
        check(name, bytes(len(data)), "all zeros")
    assert changes >= sum(len(data) + len(data) // world_size for data in files.values())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_flip_on_the_disk_is_found(tmp_path: Path, world_size: int) -> None:
    """The same through the real files, at the two ends and in the middle of each."""
    files = tiny_run(tmp_path, world_size)
    for name, data in files.items():
        for at in (0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[at] ^= 0x10
            (tmp_path / name).write_bytes(changed)
            damage = [f for f in findings(tmp_path) if f.level == "damage"]
            assert {finding.path for finding in damage} == {name}
        (tmp_path / name).write_bytes(data)
    assert findings(tmp_path) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_missing_file_is_found(tmp_path: Path, world_size: int) -> None:
    """A record that is gone makes its step incomplete, which is said; a data file is damage; a
    session or timeline that is gone leaves no trace, and costs nothing."""
    files = tiny_run(tmp_path, world_size)
    for name, data in files.items():
        (tmp_path / name).unlink()
        found = findings(tmp_path)
        if name == "run.json" or name.endswith(".safetensors"):
            assert [(f.level, f.path) for f in found] == [("damage", name)]
        elif name.startswith("steps/"):
            assert {f.level for f in found} == {"note"}
            stem = fmt.owner_of(name.rsplit("/", 1)[1])
            assert f"steps/main/000000000001/{stem}" in {f.path for f in found}
        else:
            assert found == []
        (tmp_path / name).write_bytes(data)


def test_where_and_what_a_finding_says(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_step(run, REF)
    (path,) = tmp_path.glob("steps/main/*/*.state.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (found,) = findings(tmp_path)
    assert (found.level, found.step, found.rank) == ("damage", REF, 0)
    assert found.path == str(path.relative_to(tmp_path))
    assert found.at == len(data) - 24, "where the tensor begins"
    assert "optimizers.optimizer.state.exp" in found.what
    path.unlink()
    (found,) = findings(tmp_path)
    assert found.path == str(path.relative_to(tmp_path))


def test_all_damage_of_a_step_is_found_not_only_the_first(tmp_path: Path) -> None:
    write_step(new_run(tmp_path, 2), REF, 2)
    paths = sorted(tmp_path.glob("steps/main/*/*.safetensors"))
    for path in paths:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    damage = [f for f in findings(tmp_path) if f.level == "damage"]
    assert sorted(f.path or "" for f in damage) == [str(p.relative_to(tmp_path)) for p in paths]


def test_notes_are_no_damage(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2, NoSync())
    write_part(run, REF, small_state(), world_size=2)
    first = tmp_path / "steps/main/000000000001"
    (first / "s000001-r00000of00002.old.safetensors").write_bytes(b"x")
    (first / "s000001-r00001of00002.model.safetensors").write_bytes(b"x")
    (tmp_path / "notes").write_bytes(b"x")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "x").write_bytes(b"x")
    found = findings(tmp_path)
    assert {f.level for f in found} == {"note"}
    assert [f.what for f in found] == [
        "no record names this file",
        "incomplete: nothing of rank 1",
        "data without a record: being written, or given up",
        "not a file of this run, or a temporary one",
        "1 files of steps that failed their proof were set aside",
    ]


def test_replicas_that_differ_are_damage(tmp_path: Path) -> None:
    run = new_run(tmp_path, 2, NoSync())
    for rank in (0, 1):
        write_part(run, REF, small_state(seed=rank), rank=rank, world_size=2)
    found = findings(tmp_path)
    assert {f.level for f in found} == {"damage"}
    assert all("other bits" in f.what for f in found)


def test_what_verify_finds_fine_can_be_read(tmp_path: Path) -> None:
    """Pieces that are right one by one and make another tensor."""
    run = new_run(tmp_path, 2, NoSync())
    shared = tensor("/models/model/w", "uint8", 10, replicated=True)
    for rank in (0, 1):
        write_part(run, REF, [shared], rank=rank, world_size=2)
    wrong = {"spec": {"key": shared.key, "dtype": "uint8", "shape": [10], "replicated": True}}
    for path in tmp_path.glob("steps/main/*/*.json"):
        forged(path, tensors=[{**wrong, "xxh3_128": "0" * 32}])
    found = findings(tmp_path)
    assert found and all("make another tensor" in f.what for f in found)


def test_bytes_that_no_record_names_are_damage(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_part(run, REF, small_state())
    (path,) = tmp_path.glob("steps/main/*/*.json")
    forged(path, pieces=[])
    assert any("does not name" in f.what for f in findings(tmp_path))


def test_progress_counts_what_is_read(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_part(run, REF, small_state())
    seen: list[int] = []
    (entry,) = run.entries(REF)
    assert list(verify_step(run, entry, seen.append)) == []
    assert sum(seen) == sum(len(t.data) for t in small_state())


def test_an_identity_taken_from_a_session_is_still_a_finding(tmp_path: Path) -> None:
    tiny_run(tmp_path, 1)
    (tmp_path / "run.json").write_bytes(b"")
    assert [f.path for f in findings(tmp_path)] == ["run.json"]
    for path in (tmp_path / "sessions").iterdir():
        path.unlink()
    with pytest.raises(Damaged):
        Run.open(tmp_path)
