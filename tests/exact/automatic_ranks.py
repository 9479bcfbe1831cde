"""What each rank does in tests/exact/test_automatic.py: train with `auto`, which changes in every
round, until all strategies were in use; and, in new processes, restore steps around the changes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch.distributed as dist

from everystep import Retention
from everystep.automatic import Automatic
from everystep.types import StepRef
from exact.matrix import Case
from exact.ranks import difference, digests, join, leave, made
from planted import at_once, in_turn

SCENES = {
    "ddp": Case("AdamW/foreach", "fp32", "ddp"),
    "fsdp": Case("AdamW/foreach", "fp32", "fsdp"),
}
CHANGES = ["Full", "Deltas", "Replica", "Full"]
AFTER = 5
"""Steps after the last change that is wanted."""

LEAD = 32
"""Steps from a decision to a change: each rank looks for it many times meanwhile."""

MOST = 3000


def main(phase: str, scene: str, folder: str, rank: int, world_size: int) -> None:
    """Run one phase."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    place = Path(folder)
    join(phase, place, rank, world_size)
    told = train(place, scene) if phase == "train" else resume(place, scene, rank)
    (place / f"{phase}-{rank}.json").write_text(json.dumps(told))
    leave()


def train(place: Path, scene: str) -> dict[str, object]:
    """The first life: when each strategy was in use first, and digests of the last states and of
    those around changes."""
    one = made(SCENES[scene], 1)
    changes: list[tuple[int, str]] = []
    states = {}
    with pytest.MonkeyPatch.context() as patch:
        at_once(patch, in_turn, lead=LEAD)
        keep_all = Retention(keep_last=None)
        with one.checkpointer(place / "run", strategy="auto", retention=keep_all) as ck:
            step = ck.restore()
            while len(changes) < len(CHANGES) or step < changes[-1][0] + AFTER:
                assert step < MOST, changes
                one.step(step)
                ck.step()
                step += 1
                states[step] = digests(one.state())
                name = type(ck.strategy).__name__
                if not changes or changes[-1][1] != name:
                    changes.append((step, name))
    near = {s + d for s, _ in changes for d in (-1, 0, 1)} | {step}
    return {"changes": changes, "states": {s: states[s] for s in near if s in states}}


LATE, LATE_STEPS = 20, 150
"""Steps by which rank 1 changes later than it should, and steps of the run."""


def late(phase: str, folder: str, rank: int, world_size: int) -> None:
    """Rank 1 hears too late of the change to `Deltas`: train, and (`resume`) go on."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    place = Path(folder)
    join(phase, place, rank, world_size)
    told = _late(place, 1 if phase == "train" else 2, rank)
    (place / f"{phase}-{rank}.json").write_text(json.dumps(told))
    leave()


def _late(place: Path, seed: int, rank: int) -> dict[str, object]:
    """What is told."""
    one = made(SCENES["ddp"], seed)
    when, changes = Automatic._when, []
    with pytest.MonkeyPatch.context() as patch:
        at_once(patch, lambda facts, now: in_turn(facts, "full"), lead=LEAD)
        if rank == 1:
            patch.setattr(Automatic, "_when", lambda *its: when(*its) + LATE)
        keep_all = Retention(keep_last=None)
        with one.checkpointer(place / "run", strategy="auto", retention=keep_all) as ck:
            done = ck.restore()
            first = digests(one.state())
            for step in range(done, LATE_STEPS):
                one.step(step)
                ck.step()
                if type(ck.strategy).__name__ == "Deltas" and not changes:
                    changes.append(step + 1)
    dist.barrier()  # until all is durable
    return {
        "done": done, "changes": changes, "first": first, "last": digests(one.state()),
        "steps": ck.steps(),
    }  # fmt: skip


def resume(place: Path, scene: str, rank: int) -> dict[str, object]:
    """The second life: which of the states differ from what they were."""
    before = json.loads((place / f"train-{rank}.json").read_text())["states"]
    one = made(SCENES[scene], 2)
    with one.checkpointer(place / "run", strategy="auto") as ck:
        done = ck.restore()
        strategy = type(ck.strategy).__name__
        found = {str(done): difference(before[str(done)], digests(one.state()))}
        there = {str(step) for step in ck.steps()}
        for step in sorted(there & before.keys(), key=int):
            ck.restore(StepRef("main", int(step)))
            found[step] = difference(before[step], digests(one.state()))
    return {"done": done, "strategy": strategy, "differences": found}
