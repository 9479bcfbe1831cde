"""Committed runs of every version of the format: today's code reads them as they were meant."""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import everystep
from byte_runs import files_of
from everystep.state import raw
from everystep.store import format as fmt
from everystep.store.run import Run
from everystep.store.verify import verify_run
from everystep.types import StepRef

HERE = Path(__file__).parent
FORMAT_1, FORMAT_2 = HERE / "format-1", HERE / "format-2"
NEWEST = FORMAT_2
EVERY = [FORMAT_1, FORMAT_2]

every_version = pytest.mark.parametrize("golden", EVERY, ids=lambda path: path.name)


def test_there_is_a_run_of_every_version() -> None:
    made = {path.name for path in HERE.iterdir() if path.name.startswith("format-")}
    assert made == {f"format-{version}" for version in range(1, fmt.FORMAT + 1)}
    assert made == {path.name for path in EVERY}


@every_version
def test_the_runs_are_small(golden: Path) -> None:
    assert sum(len(data) for data in files_of(golden).values()) < 40_000


@every_version
def test_every_record_is_of_the_version(golden: Path) -> None:
    version = int(golden.name.removeprefix("format-"))
    records = [data for name, data in files_of(golden).items() if name.endswith(".json")]
    found = [json.loads(data)["content"]["format"] for data in records]
    assert found == [version] * len(records) and records


def test_todays_code_writes_the_same_bytes(tmp_path: Path) -> None:
    paths = [Path(everystep.__file__).parent.parent, HERE.parent]
    subprocess.run(
        [sys.executable, HERE / "make.py", tmp_path / "run"],
        env={"PYTHONPATH": ":".join(map(str, paths))},
        check=True,
        timeout=60,
    )
    assert files_of(tmp_path / "run") == files_of(NEWEST)


@every_version
def test_it_verifies(golden: Path) -> None:
    run = Run.open(golden)
    assert list(verify_run(run, run.listing())) == []


@every_version
def test_it_lists(golden: Path) -> None:
    run = Run.open(golden)
    listing = run.listing()
    assert run.id == "00112233445566778899aabbccddeeff"
    assert listing.current_timeline() == "main@1"
    line = ["main:1", "main@1:2"] if golden == FORMAT_1 else ["main:1", "main@1:2", "main@1:3"]
    assert [str(entry.ref) for entry in listing.line("main@1")] == line
    assert [s.restored for s in listing.sessions] == [None, StepRef("main", 1)]
    assert all(entry.complete and entry.world_size == 2 for entry in listing.steps)


@pytest.mark.parametrize(
    ("golden", "step", "number", "n"),
    [
        *[(FORMAT_1, "main:1", 1, 1), (FORMAT_1, None, 2, 2), (FORMAT_1, "2", 2, 2)],
        *[(FORMAT_2, "main:1", 1, 1), (FORMAT_2, None, 3, 1), (FORMAT_2, "2", 2, 2)],
    ],
)
def test_it_loads_bit_for_bit(golden: Path, step: str | None, number: int, n: int) -> None:
    """Step 3 of format 2 has the model of step 1 by reference."""
    state = everystep.load(golden, step, rank=1)
    assert state.step == number
    assert state.metrics == {"loss": 1 / number, "note": "ä"}
    model = state.models["model"]
    bits = {name: raw.bits_of(model, name) for name in model}
    assert bits == {
        "fc.weight": struct.pack("<6f", 1, -0.0, 3, 4, 5, n),
        "tied": struct.pack("<6f", 1, -0.0, 3, 4, 5, n),
        "fc.bias": b"\x80\x3f\x00\xc0",
        "rows": struct.pack("<4f", 0, n, 1, n),
        "phase": struct.pack("<2f", 0, 1),
        "empty": b"",
    }
    assert {name: tuple(tensor.shape) for name, tensor in model.items()} == {
        "fc.weight": (2, 3),
        "tied": (2, 3),
        "fc.bias": (2,),
        "rows": (2, 2),
        "phase": (),
        "empty": (0, 3),
    }
    optimizer = state.optimizer()
    assert optimizer["param_groups"] == [
        {"params": ["fc.weight"], "lr": 0.001, "betas": (0.9, 0.999)}
    ]
    assert optimizer["state"]["fc.weight"]["step"] == number
    assert optimizer["state"]["fc.weight"]["exp_avg"].tolist() == [[0.5] * 3] * 2
    schedule = state.extra("schedule")
    assert schedule["last"] == 2**53 + 1
    assert schedule["worst"] == -math.inf
    assert schedule["nan"].tobytes() == b"\x01\x00\xc0\x7f"
    assert schedule["seen"] == {1: "one", (2, 3): {4}}
    assert schedule["rank"] == 1
    assert state.tensors["/rng/torch"].tolist() == [1, number, 255]


@every_version
def test_damage_in_it_is_found(tmp_path: Path, golden: Path) -> None:
    """By every step whose record names the file."""
    shutil.copytree(golden, tmp_path / "run")
    (path,) = tmp_path.glob("run/steps/main/*/*r00001*.model.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    run = Run.open(tmp_path / "run")
    found = [(str(f.step), f.path) for f in verify_run(run, run.listing())]
    steps = ["main:1"] if golden == FORMAT_1 else ["main:1", "main@1:3"]
    assert found == [(step, str(path.relative_to(tmp_path / "run"))) for step in steps]


def test_what_step_3_does_not_store() -> None:
    """Slots fall to rank 1 alone, so that the ranks refer to different steps."""
    run = Run.open(FORMAT_2)
    (entry,) = run.entries(StepRef("main@1", 3))
    for rank in (0, 1):
        stem = f"s000002-r{rank:05d}of00002"
        expected = {
            (f"s000001-r{rank:05d}of00002.model.safetensors", StepRef("main", 1)),
            (f"{stem}.rest.safetensors", None),
        }
        if rank == 1:
            expected.add((f"{stem}.state.safetensors", StepRef("main@1", 2)))
        assert {(file.name, file.step) for file in run.record(entry, rank).files} == expected
        names = {name.rsplit("/", 1)[1] for name in run.part_files(entry.ref, stem)}
        assert {name for name in names if name.endswith(".safetensors")} == {
            f"{stem}.rest.safetensors"
        }
