"""What each rank does in tests/agent/test_persist_ranks.py: train rows at both ends of an
embedding, so that on each of two ranks a part of its share changes and the rest is referred to."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from agent.replica_scenes import agents_in_threads
from everystep import Checkpointer, Replica, Retention
from everystep.store import increments
from everystep.types import StepRef
from exact.ranks import join, leave

ROWS, WIDTH, USED = 2000, 16, 120
UNIT = 4096
"""Bytes: the embedding has 32 of them, of which two at each end change."""

STEPS, EVERY, MORE = 12, 3, 4


class Training:
    """An embedding and a head under DDP, on words of each rank's own."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(1)
        net = nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH), nn.Linear(WIDTH, 4))
        self.model = nn.parallel.DistributedDataParallel(net)
        self.optimizers = {
            "rows": torch.optim.SGD(net[0].parameters(), lr=0.1),
            "head": torch.optim.AdamW(net[1].parameters(), lr=0.01),
        }
        torch.manual_seed(10 + rank)

    def step(self) -> None:
        """One step: no gradient but zero reaches the rows in the middle."""
        words = torch.cat(
            [torch.randint(0, USED, (8, 3)), torch.randint(ROWS - USED, ROWS, (8, 3))]
        )
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        self.model(words).square().sum().backward()
        for optimizer in self.optimizers.values():
            optimizer.step()

    def checkpointer(self, path: Path) -> Checkpointer:
        """All of it, with a copy that is persisted now and then."""
        return Checkpointer(
            path, model=self.model, optimizer=self.optimizers,
            strategy=Replica(persist_every=EVERY), retention=Retention(keep_last=None),
            on_error="raise",
        )  # fmt: skip

    def digest(self) -> str:
        """Of every bit of the state."""
        found = hashlib.sha256()
        slots = self.optimizers["head"].state_dict()["state"]
        for tensor in [
            *self.model.state_dict().values(),
            *(value for slot in slots.values() for value in slot.values()),
            torch.get_rng_state(),
        ]:
            found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()


def main(phase: str, folder: str, rank: int, world_size: int) -> None:
    """`train` and persist; or `resume`: restore every step that is there, and train on from the
    last. Told: the digest of each step."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    join(phase, Path(folder), rank, world_size)
    told = _life(phase, Path(folder, "run"), Training(rank))
    Path(folder, f"{phase}-{rank}.json").write_text(json.dumps(told))
    leave()


def _life(phase: str, run: Path, training: Training) -> dict[int, str]:
    """The digest of each step that was trained or restored."""
    told: dict[int, str] = {}

    def train(until: int, ck: Checkpointer | None) -> None:
        for step in range(max(told, default=0) + 1, until + 1):
            training.step()
            if ck is not None:
                ck.step()
            told[step] = training.digest()

    with pytest.MonkeyPatch.context() as patch, agents_in_threads():
        patch.setattr(increments, "UNIT_BYTES", UNIT)
        with training.checkpointer(run) as ck:
            for step in ck.steps():
                ck.restore(StepRef("main", step))
                told[step] = training.digest()
            if not told:
                ck.restore()
            train(STEPS if phase == "train" else STEPS + MORE, ck)
    if phase == "train":
        train(STEPS + MORE, None)
    return told
