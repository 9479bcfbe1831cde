"""examples/loss_spike.py: it goes back, and ends where a run without the bad batch ends."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import everystep
from everystep.state import raw

SCRIPT = Path(__file__).parents[2] / "examples" / "loss_spike.py"


def run_script(script: Path, run: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(script), str(run)],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_loss_spike_is_left_out_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_script(SCRIPT, tmp_path / "run")
    spikes = [line for line in said if "a spike" in line]
    assert len(spikes) == 1 and spikes[0].startswith("step 71: ")
    assert "back at step 70; batch 70 is left out from now on" in said
    assert said[-1] == f"done: everystep ls {tmp_path / 'run'}"
    without = tmp_path / "without.py"
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count("skipped = set()") == 1
    without.write_text(text.replace("skipped = set()", "skipped = {70}"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(without), str(tmp_path / "other")])
    runpy.run_path(str(without), run_name="__main__")  # in this process: it has imported torch
    assert "a spike" not in capsys.readouterr().out
    went_back, never_there = (everystep.load(tmp_path / name) for name in ("run", "other"))
    assert (str(went_back.ref), str(never_there.ref)) == ("main@70:120", "main:120")
    assert went_back.tensors.keys() == never_there.tensors.keys()
    learnt = [key for key in went_back.tensors if not key.startswith("/rng/")]
    assert len(learnt) == 6 + 18
    for key in learnt:  # generators that no one seeds differ between processes
        assert raw.bits_of(went_back.tensors, key) == raw.bits_of(never_there.tensors, key), key
    assert went_back.extra("loader") == never_there.extra("loader") == {"next": 121}
