"""Images in part of two ranks under DDP: each rank's refer to units of its own earlier ones, and
all are had again, bit for bit, by new processes."""

from __future__ import annotations

import json
from pathlib import Path

from agent.persist_ranks import EVERY, MORE, ROWS, STEPS, WIDTH
from everystep.store.run import Run
from everystep.store.verify import verify_run
from exact.test_ranks import DEADLINE_S, SIZE
from zygote import Zygote


def test_ranks_refer_to_their_earlier_images(zygote: Zygote, run_dir: Path) -> None:
    run_dir.mkdir()
    for phase in ("train", "resume"):
        zygote.run_ranks("agent.persist_ranks.main", run_dir, SIZE, DEADLINE_S, phase=phase)
    persisted = [1, *range(EVERY, STEPS + 1, EVERY)]
    for rank in range(SIZE):
        first, second = (
            json.loads((run_dir / f"{phase}-{rank}.json").read_text())
            for phase in ("train", "resume")
        )
        wanted = {*persisted, *range(STEPS + 1, STEPS + MORE + 1)}
        assert {int(step) for step in second} == wanted
        assert second == {step: first[step] for step in second}
    run = Run.open(run_dir / "run")
    listing = run.listing()
    assert [finding.what for finding in verify_run(run, listing)] == []
    whole_bytes = ROWS * WIDTH * 4 // SIZE
    of_first_life = [entry for entry in listing.steps if entry.ref.step in persisted]
    assert [entry.ref.step for entry in of_first_life] == persisted
    for rank in range(SIZE):
        referring = 0
        for entry in of_first_life[1:]:
            files = run.record(entry, rank).files
            earlier = {file.step.step for file in files if file.step is not None}
            assert earlier <= set(persisted)
            written = sum(file.nbytes for file in files if file.step is None)
            assert written < whole_bytes / 2 or not earlier
            referring += bool(earlier)
        assert referring >= 2, f"of rank {rank}"
