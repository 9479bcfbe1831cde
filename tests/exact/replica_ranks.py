"""What each rank does in tests/exact/test_replica_ranks.py: as in `logged_ranks`, with an agent in
a thread, which does each step again."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from agent.replica_scenes import agents_in_threads
from crash.trainer import Job
from everystep import Replica, Retention
from everystep.agent.mirror import Mirror
from everystep.errors import Damaged
from everystep.recovery import blocks
from exact import logged_ranks
from exact.ranks import join, leave
from waiting import until


def main(phase: str, folder: str, rank: int, world_size: int) -> None:
    """Run one phase of all scenes."""
    every: Any = Replica(persist_every=1, slices=2)
    logged_ranks.LOGGED = every
    if rank == 0:  # which folds block by block what can be cut, and the other whole tensors
        blocks.BLOCK_ELEMENTS = 64
    logged_ranks.main(phase, folder, rank, world_size)


FAILS_AT, LAST = 5, 30


def alone(phase: str, folder: str, rank: int, world_size: int) -> None:
    """The copy of rank 1 fails in one step, and that rank stores in full from then on; the other
    one's goes on. Told: what was restored, and the last digest."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    join(phase, Path(folder), rank, world_size)
    real = Mirror.fold

    def fold(self: Mirror, payload: memoryview, layout: bytes) -> None:
        if self.step + 1 == FAILS_AT and rank == 1:
            raise Damaged("it is not what it was", step=FAILS_AT)
        real(self, payload, layout)

    Mirror.fold = fold  # type: ignore[method-assign]
    told = _life(Path(folder, "run"), rank, world_size)
    Path(folder, f"{phase}-{rank}.json").write_text(json.dumps(told))
    leave()


def _life(run: Path, rank: int, world_size: int) -> dict[str, object]:
    """What is told."""
    job, strategy = Job(rank, world_size), Replica(persist_every=4)
    keep_all = Retention(keep_last=None)
    with (
        agents_in_threads(),
        job.checkpointer(str(run), strategy=strategy, retention=keep_all) as ck,
    ):
        done = ck.restore()
        restored = job.digest()
        for step in range(done + 1, LAST + 1):
            job.step(1)
            ck.step()
            session: Any = ck._session
            if step == FAILS_AT + 4 and rank == 1:  # it is folded when both have handed it over
                until(lambda: session._unfoldable is not None, 60, "NotFolded")  # noqa: B023
    return {"done": done, "restored": restored, "last": job.digest()}
