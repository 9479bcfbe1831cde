"""What each rank does in tests/exact/test_compaction_ranks.py: as in `logged_ranks`, with an agent
in a thread, which makes the full checkpoints after the first."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from agent.replica_scenes import agents_in_threads
from crash.trainer import Job
from everystep import Checkpointer, Deltas, Retention
from everystep.agent.mirror import Mirror
from everystep.types import StepRef
from exact import logged_ranks
from exact.logged_ranks import complete
from exact.ranks import join, leave
from waiting import until

EVERY = 3
COMPACTED = Deltas(full_every=EVERY, batch=2, compact=True, slices=2, check=False)


def main(phase: str, folder: str, rank: int, world_size: int) -> None:
    """Run one phase of all scenes."""
    logged_ranks.LOGGED, logged_ranks.AWAITED = COMPACTED, (EVERY, 2 * EVERY)
    logged_ranks.main(phase, folder, rank, world_size)


FAILS_AT, LAST = 5, 13

FULLS = (1, 3, 9, 12)
"""Of both ranks: that the copy has ended is heard in step 6, which has one of rank 0 only."""


def alone(phase: str, folder: str, rank: int, world_size: int) -> None:
    """The copy of rank 1 ends in one step, and its training takes full checkpoints from then on.
    Told: the digest of each step that was trained, or restored."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    join(phase, Path(folder), rank, world_size)
    real = Mirror.fold

    def fold(self: Mirror, payload: memoryview, layout: bytes) -> None:
        if self.step + 1 == FAILS_AT and rank == 1:
            raise MemoryError("there is no room")
        real(self, payload, layout)

    if phase == "train":
        Mirror.fold = fold  # type: ignore[method-assign]
    told = _life(phase, Path(folder, "run"), rank, world_size)
    Path(folder, f"{phase}-{rank}.json").write_text(json.dumps(told))
    leave()


def _life(phase: str, run: Path, rank: int, world_size: int) -> dict[int, str]:
    """What is told."""
    job, told = Job(rank, world_size), {}
    keep_all = Retention(keep_last=None)
    with (
        agents_in_threads(),
        job.checkpointer(str(run), strategy=COMPACTED, retention=keep_all) as ck,
    ):
        if phase == "resume":
            for step in range(1, LAST + 1):
                assert ck.restore(StepRef("main", step)) == step
                told[step] = job.digest()
            return told
        assert ck.restore() == 0
        for step in range(1, LAST + 1):
            job.step(1)
            told[step] = job.digest()
            ck.step()
            if step == FAILS_AT and rank == 1:
                _until_it_is_told(ck)
            if step in FULLS:
                until(lambda: StepRef("main", step) in complete(run), 60, f"a full of {step}")  # noqa: B023
    return told


def _until_it_is_told(ck: Checkpointer) -> None:
    until(lambda: getattr(ck._session, "_not_folded", None) is not None, 60, "NotFolded")
