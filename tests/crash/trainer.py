"""What the forked processes of these tests do: a small training whose every state has a digest."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import random
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everystep import Checkpointer, Retention
from faults import Faults, installed


class Board:
    """Numbers in a shared file, which a killed process cannot take with it."""

    FIELDS = ("restored", "returned", "place", "calls", "started")
    OUTSIDE, RESTORING, TRAINING, SAVING = range(4)

    def __init__(self, path: str | Path) -> None:
        if not Path(path).exists():
            Path(path).write_bytes(bytes(8 * len(self.FIELDS)))
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def __getitem__(self, field: str) -> int:
        number: int = struct.unpack_from("q", self._map, 8 * self.FIELDS.index(field))[0]
        return number

    def __setitem__(self, field: str, number: int) -> None:
        struct.pack_into("q", self._map, 8 * self.FIELDS.index(field), number)

    def clear(self) -> None:
        """For the next life."""
        for field in self.FIELDS:
            self[field] = -1 if field in ("restored", "returned") else 0

    def close(self) -> None:
        """Give the map up."""
        self._map.close()


class Counted(Faults):
    """Tells the board how many calls there have been."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board

    def _before(self, name: str, path: Path | None = None) -> None:
        self._board["calls"] += 1
        super()._before(name, path)


class Loader:
    """What a data loader is to a checkpoint: a position in a shuffled epoch."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []
        self._at = 0

    def next(self) -> torch.Tensor:
        """A batch."""
        if self._at == len(self._order):
            self._order = torch.randperm(7, generator=self._generator).tolist()
            self._at = 0
        index = self._order[self._at]
        self._at += 1
        return torch.linspace(-1, index, 32).reshape(4, 8) + random.random()

    def state_dict(self) -> dict[str, Any]:
        """Everything."""
        generator = self._generator.get_state()
        return {"generator": generator, "order": list(self._order), "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._generator.set_state(state["generator"])
        self._order, self._at = list(state["order"]), state["at"]


class Job:
    """A model with dropout, AdamW, a schedule, a loader and all generators in use."""

    def __init__(self, rank: int = 0, world_size: int = 1, width: int = 16) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 4)
        )
        if world_size > 1:
            self.model = DistributedDataParallel(self.model)
        torch.manual_seed(1 + rank)
        random.seed(rank)
        np.random.seed(rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.loader = Loader(rank)

    def checkpointer(self, run: str, **options: Any) -> Checkpointer:
        """Everything in it, handed over."""
        options.setdefault("retention", Retention(keep_last=2))
        extras = {"schedule": self.schedule, "loader": self.loader}
        return Checkpointer(
            run, model=self.model, optimizer=self.optimizer, extras=extras, **options
        )

    def step(self, loops: int = 3) -> None:
        """A training step of a few milliseconds."""
        self.optimizer.zero_grad()
        for _ in range(loops):
            loss = self.model(self.loader.next()).square().mean() * float(np.random.rand())
            loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def digest(self) -> str:
        """Of every bit of the state, without any help from the library."""
        found = hashlib.sha256()

        def add(thing: object) -> None:
            if isinstance(thing, torch.Tensor):
                found.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
                found.update(thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            elif isinstance(thing, np.ndarray):
                found.update(thing.tobytes())
            elif isinstance(thing, dict):
                for key in sorted(thing, key=repr):
                    found.update(repr(key).encode())
                    add(thing[key])
            elif isinstance(thing, list | tuple):
                for item in thing:
                    add(item)
            else:
                found.update(repr(thing).encode())

        add(self.model.state_dict())
        add(self.optimizer.state_dict())
        add(self.schedule.state_dict())
        add(self.loader.state_dict())
        add([torch.get_rng_state(), random.getstate(), np.random.get_state()])
        return found.hexdigest()


def _join(rank: int, world_size: int, meet: str) -> None:
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size
        )


def reference(total: int, rank: int = 0, world_size: int = 1, meet: str = "") -> None:
    """Train without this library; print the digest of every step."""
    _join(rank, world_size, meet)
    job = Job(rank, world_size)
    for step in range(total + 1):
        if step:
            job.step()
        print(job.digest())


def train(
    run: str,
    total: int,
    board: str,
    rank: int = 0,
    world_size: int = 1,
    meet: str = "",
    kill_at: int = 0,
) -> None:
    """Train from what there is to `total` steps; print the digest of what was restored, and of the
    end. `kill_at`: die before that system call of the store, counted from the start."""
    progress = Board(board)
    faults = Counted(progress)
    if kill_at:
        faults.kill_at(kill_at)
    _join(rank, world_size, meet)
    progress["place"] = Board.RESTORING
    job = Job(rank, world_size)
    with installed(faults), job.checkpointer(run) as ck:
        done = ck.restore()
        print("restored", done, job.digest(), flush=True)
        progress["restored"] = done
        for step in range(done + 1, total + 1):
            progress["place"] = Board.TRAINING
            job.step()
            progress["place"] = Board.SAVING
            ck.step()
            progress["returned"] = step
        progress["place"] = Board.OUTSIDE
    print("end", total, job.digest(), flush=True)
