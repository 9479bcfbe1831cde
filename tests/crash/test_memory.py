"""A save holds a few buffers, whatever the size of the state; and saves leave nothing behind."""

from __future__ import annotations

from pathlib import Path

from zygote import Zygote

STATE_BYTES = 400 << 20
BUDGET_BYTES = 96 << 20
"""For the buffers of a save: it is a fixed amount, far below the state. 51 to 70 MB were seen."""


def test_a_save_of_a_large_state_takes_little_memory(zygote: Zygote, tmp_path: Path) -> None:
    said = zygote.run(
        "crash.trainer.save_large",
        tmp_path / "log",
        run=str(tmp_path / "run"),
        nbytes=STATE_BYTES,
        saves=2,
    )
    held, *added = (int(line) for line in said.split())
    print(f"state of {held >> 20} MB; each save added {[n >> 20 for n in added]} MB at its peak")
    assert held >= STATE_BYTES * 9 // 10
    assert len(added) == 2
    assert max(added) < BUDGET_BYTES


def test_many_saves_leave_nothing_behind(zygote: Zygote, tmp_path: Path) -> None:
    """More tensors than the process may have open files."""
    said = zygote.run(
        "crash.trainer.save_often", tmp_path / "log", run=str(tmp_path / "run"),
        nbytes=24 << 20, saves=50, open_files=40,
    )  # fmt: skip
    rows = [[int(number) for number in line.split()] for line in said.splitlines()]
    resident, descriptors, threads = zip(*rows, strict=True)
    assert len(rows) == 50
    print(f"resident after 10: {resident[9] >> 10} KB, after 50: {resident[-1] >> 10} KB")
    # half of one save: the allocator may keep a few MB for a thread that came late
    assert max(resident[30:]) - max(resident[:20]) < 12 << 20
    assert len(set(descriptors[5:])) <= 2  # a removal in the background has one open at times
    assert max(descriptors) < 40
    assert max(threads[5:]) <= max(threads[:5])
