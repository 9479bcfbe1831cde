"""A line cut at its full checkpoints."""

from __future__ import annotations

from pathlib import Path

import byte_logs
import byte_runs
from everystep.recovery.stretches import line_of, stretches
from everystep.store.chains import plan_chains
from everystep.store.run import Run
from everystep.types import StepRef


def test_every_full_begins_a_stretch_and_the_next_one_ends_it(tmp_path: Path) -> None:
    run = byte_runs.new_run(tmp_path / "run", calls=byte_runs.NoSync())
    for step in (2, 5, 9, 12):
        byte_runs.write_step(run, StepRef("main", step))
    byte_logs.write_log(run.backend, [3, 4, 5, 6, 8, 9, 10], base=2, run=run.id)
    listing = run.listing()
    segments = run.segments(listing)
    found = [
        (s.chain.full.ref.step, [link.ref.step for link in s.chain.links],
         s.proves and s.proves.ref.step)
        for s in stretches(plan_chains(listing, segments, "main"))
    ]  # fmt: skip
    assert found == [(2, [3, 4, 5], 5), (5, [6], None), (9, [10], None), (12, [], None)]
    line = line_of(listing, segments, "main")
    assert {
        ref.step: (had.full is not None, had.link is not None) for ref, had in line.had.items()
    } == {
        2: (True, False), 3: (False, True), 4: (False, True), 5: (True, True), 6: (False, True),
        9: (True, False), 10: (False, True), 12: (True, False),
    }  # fmt: skip
    assert [(gap.ref.step, gap.last) for gap in line.gaps] == [(7, 8)]


def test_a_run_without_a_step(tmp_path: Path) -> None:
    run: Run = byte_runs.new_run(tmp_path / "run", calls=byte_runs.NoSync())
    assert stretches(plan_chains(run.listing(), [], "main")) == []


def test_a_fork_has_its_own_steps_alone(tmp_path: Path) -> None:
    run = byte_runs.new_run(tmp_path / "run", calls=byte_runs.NoSync())
    byte_runs.write_step(run, StepRef("main", 1))
    byte_logs.write_log(run.backend, [2, 3, 4], base=1, run=run.id)
    fork = StepRef("main", 3)
    byte_runs.begin(run, 2, "main@3", parent=fork, restored=fork)
    byte_logs.write_log(run.backend, [4, 5], base=3, run=run.id, timeline="main@3", session=2)
    listing = run.listing()
    segments = run.segments(listing)
    own = line_of(listing, segments, "main@3").had
    assert [str(ref) for ref in own] == ["main@3:4", "main@3:5"]
    assert [ref.step for ref in line_of(listing, segments, "main").had] == [1, 2, 3, 4]
    (stretch,) = stretches(plan_chains(listing, segments, "main@3"))
    assert [str(link.ref) for link in stretch.chain.links] == [
        "main:2", "main:3", "main@3:4", "main@3:5",
    ]  # fmt: skip
