"""Small real runs that the tests of the command line look at, and what a command gives back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

import everystep
from everystep.state import raw
from everystep.store.format import TimelineRecord
from everystep.store.full import Part, Source, write_full
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from everystep.types import Piece, Shard, StepRef, TensorSpec
from trips import BLOCKING


class Said(NamedTuple):
    """What a command gave back."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which is one JSON object on one line."""
        assert self.out.count("\n") == 1, self.out
        return msgspec.json.decode(self.out)


class Job:
    """A little training whose data depends on nothing but the step."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=100)

    def train(self, step: int) -> float:
        """The step-th step; returns its loss."""
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = self.model(data).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def run(self, path: Path, upto: int, start: int | None = None) -> None:
        """Train with a checkpoint at every step."""
        with everystep.Checkpointer(
            path,
            model=self.model,
            optimizer=self.optimizer,
            extras={"schedule": self.schedule},
            strategy=BLOCKING,
            retention=everystep.Retention(keep_last=None),
        ) as ck:
            for step in range(ck.restore(start) + 1, upto + 1):
                ck.step(loss=self.train(step), at=step)

    def bits(self) -> dict[str, bytes]:
        """Weights and slots, bit for bit, by name."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        held = {f"model {name}": p.detach() for name, p in self.model.named_parameters()}
        for parameter, slot in self.optimizer.state.items():
            held |= {f"{names[id(parameter)]} {name}": value for name, value in slot.items()}
        return {name: raw.bits_of(held, name) for name in held}


WHOLE = torch.arange(12, dtype=torch.float32).reshape(4, 3)
"""The sharded tensor of step 1: rank 0 holds rows 0 and 1."""


def two_ranks(path: Path) -> None:
    """Write two steps as two ranks would: `same` is replicated and shared out, `rows` is sharded,
    `own` is each rank's; between the steps `rows` changes on rank 1 and `own` on both."""
    run = Run.open_or_create(LocalBackend(path))
    run.begin_session(1, TimelineRecord(name="main", parent=None), 2, None, {"torch": "x"})
    for step in (1, 2):
        for rank in (0, 1):
            write_part(run, step, rank)


def write_part(run: Run, step: int, rank: int, session: int = 1) -> None:
    """One rank's part of one step of `two_ranks`."""
    rows = WHOLE[2 * rank : 2 * rank + 2].clone()
    rows[1, 2] += 0.5 * (step - 1) * rank
    tensors = {
        "same": torch.tensor([1.0, -0.0, 2.0, 3.0]),
        "rows": rows,
        "own": torch.tensor([10 * rank + step], dtype=torch.int64),
    }
    shard = Shard(
        global_shape=(4, 3),
        offsets=(2 * rank, 0),
        mesh_shape=(2,),
        mesh_dim_names=None,
        placements=("S(0)",),
    )
    specs = {
        name: TensorSpec(
            key=f"/models/model/{name}",
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            shard=shard if name == "rows" else None,
            replicated=name == "same",
        )
        for name, tensor in tensors.items()
    }
    pieces = [Piece(specs[name].key, 0, specs[name].elements) for name in ("rows", "own")]
    pieces.append(Piece(specs["same"].key, 2 * rank, 2 * rank + 2))
    part = Part(
        ref=StepRef("main", step),
        run=run.id,
        session=session,
        rank=rank,
        world_size=2,
        tree=tree(rank, step),
        metrics={"loss": 1 / step},
        created="2026-01-01T00:00:00Z",
        versions={"torch": "x"},
    )
    sources = [Source(specs[name], _chunks(tensors[name])) for name in tensors]
    write_full(run.backend, part, sources, pieces)


def tree(rank: int, step: int) -> dict[str, Any]:
    """The JSON part of a state."""
    return {
        "models": {"model": {"aliases": {"twin": "same"}, "frozen": [], "extra_state": {}}},
        "optimizers": {},
        "extras": {"counter": {"rank": rank, "done": step}},
        "loaders": {},
        "rng": {"seed": 5},
    }


def _chunks(tensor: torch.Tensor) -> Callable[[int, int], Any]:
    return lambda start, stop: raw.host_chunks(tensor, start, stop)


def flip(run: Path, pattern: str, at: int) -> Path:
    """Flip one bit of the only file that matches the pattern below the run."""
    (path,) = run.glob(pattern)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return path
