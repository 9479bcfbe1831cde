"""Committed runs of every version of the format: today's code reads them as they were meant."""

from __future__ import annotations

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
FORMAT_1 = HERE / "format-1"


def test_there_is_a_run_of_every_version() -> None:
    made = {path.name for path in HERE.iterdir() if path.name.startswith("format-")}
    assert made == {f"format-{version}" for version in range(1, fmt.FORMAT + 1)}


def test_the_runs_are_small() -> None:
    assert sum(len(data) for data in files_of(FORMAT_1).values()) < 24_000


@pytest.mark.skipif(fmt.FORMAT > 1, reason="today's code writes a later version")
def test_todays_code_writes_the_same_bytes(tmp_path: Path) -> None:
    paths = [Path(everystep.__file__).parent.parent, HERE.parent]
    subprocess.run(
        [sys.executable, HERE / "make.py", tmp_path / "run"],
        env={"PYTHONPATH": ":".join(map(str, paths))},
        check=True,
        timeout=60,
    )
    assert files_of(tmp_path / "run") == files_of(FORMAT_1)


def test_it_verifies() -> None:
    run = Run.open(FORMAT_1)
    assert list(verify_run(run, run.listing())) == []


def test_it_lists() -> None:
    run = Run.open(FORMAT_1)
    listing = run.listing()
    assert run.id == "00112233445566778899aabbccddeeff"
    assert listing.current_timeline() == "main@1"
    assert [str(entry.ref) for entry in listing.line("main@1")] == ["main:1", "main@1:2"]
    assert [s.restored for s in listing.sessions] == [None, StepRef("main", 1)]
    assert all(entry.complete and entry.world_size == 2 for entry in listing.steps)


@pytest.mark.parametrize(("step", "number"), [("main:1", 1), (None, 2), ("2", 2)])
def test_it_loads_bit_for_bit(step: str | None, number: int) -> None:
    state = everystep.load(FORMAT_1, step, rank=1)
    assert state.step == number
    assert state.metrics == {"loss": 1 / number, "note": "ä"}
    model = state.models["model"]
    bits = {name: raw.bits_of(model, name) for name in model}
    assert bits == {
        "fc.weight": struct.pack("<6f", 1, -0.0, 3, 4, 5, number),
        "tied": struct.pack("<6f", 1, -0.0, 3, 4, 5, number),
        "fc.bias": b"\x80\x3f\x00\xc0",
        "rows": struct.pack("<4f", 0, number, 1, number),
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


def test_damage_in_it_is_found(tmp_path: Path) -> None:
    shutil.copytree(FORMAT_1, tmp_path / "run")
    (path,) = tmp_path.glob("run/steps/main/*/*r00001*.state.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    run = Run.open(tmp_path / "run")
    assert [f.path for f in verify_run(run, run.listing())] == [
        str(path.relative_to(tmp_path / "run"))
    ]
