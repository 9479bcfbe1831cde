"""A training run with a shadow, and the shadow: what each process does, and what it tells."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import select
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn

from everystep import Checkpointer, Retention, Shadow
from everystep.agent import shadow as process
from everystep.agent.mirror import Mirror
from everystep.agent.shadow_copy import Keeping
from everystep.agent.shadow_wire import WireSource
from everystep.store import addresses as at
from everystep.tap.following import Followed
from everystep.tap.live import Live
from everystep.tap.pieces import Frames
from everystep.types import join_key
from peers.hosts import move_to

WIDTH, HEADS, CONTEXT, TOKENS = 128, 4, 16, 64


class Block(nn.Module):
    """Attention and two layers, with a BatchNorm where others have a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        parts = self.mixed(self.norm(x_BLD)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.out(seen.transpose(1, 2).flatten(2))
        normed = self.batch_norm(x_BLD.transpose(1, 2)).transpose(1, 2)
        wide: torch.Tensor = self.narrow(nn.functional.gelu(self.wide(normed)))
        return x_BLD + wide


class Gpt(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.tokens(tokens_BL) + self.places
        logits: torch.Tensor = self.head(self.blocks(x_BLD))
        return logits


class Job:
    """The model under DDP, with clipping and a schedule; data come from torch's generator."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(7)
        self.model = nn.parallel.DistributedDataParallel(Gpt())
        self._prepare(rank)

    def _prepare(self, rank: int) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 500)
        torch.manual_seed(100 + rank)

    def step(self, noise: float = 0.0) -> None:
        tokens = torch.randint(TOKENS, (4, CONTEXT + 1))
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if noise:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(noise)
        self.optimizer.step()
        self.schedule.step()

    def digests(self) -> dict[str, str]:
        """Of parameters, buffers and slots, by their keys in a checkpoint."""
        found = {
            join_key("models", "model", name.removeprefix("module.")): digest(tensor)
            for name, tensor in self.model.state_dict().items()
        }
        for name, parameter in self.model.module.named_parameters():
            for slot, value in self.optimizer.state[parameter].items():
                found[join_key("optimizers", "optimizer", "state", "model", name, slot)] = digest(
                    value
                )
        return found

    def whole(self) -> str:
        """Of all that this rank must have again: its random numbers, too."""
        state = [self.digests(), self.schedule.state_dict(), digest(torch.get_rng_state())]
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]


class Small(Job):
    """A model whose gradients go in three buckets, none of which divides evenly; with clipping."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(7)
        net = nn.Sequential(
            nn.Linear(40, 120), nn.BatchNorm1d(120), nn.Tanh(), nn.Linear(120, 120), nn.Tanh(),
            nn.Linear(120, 7),
        )  # fmt: skip
        self.model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.03)
        self._prepare(rank)

    def step(self, noise: float = 0.0) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 40)).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        self.schedule.step()


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(data)


def train(
    run: str,
    rank: int,
    world_size: int,
    rendezvous: str,
    steps: int,
    address: str,
    token_file: str,
    tap: Any,
    host: str | None = None,
    pace_s: float = 0.0,
    noisy_from: int = 1 << 60,
    leaves_at: int | None = None,
    further: bool = False,
    small: bool = False,
) -> None:
    """Train from what there is to `steps` steps; tells a line of JSON for each.

    Args:
        rendezvous: as torch takes it.
        address: of the shadow.
        host: where; None: here.
        pace_s: between two steps.
        noisy_from: the step from which on numbers are added to gradients.
        leaves_at: the step at which this rank finds that the shadow is of no use.
        further: train so many steps more than there are.
        small: a model of which a step is a hundred packets.
    """
    if host is not None:
        move_to(host)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    job = Small(rank) if small else Job(rank)
    strategy = Shadow(address=address, token_file=token_file, tap=tap, slices=1)
    ck = Checkpointer(
        run, model=job.model, optimizer=job.optimizer, extras={"schedule": job.schedule},
        strategy=strategy, retention=Retention(keep_last=2),
    )  # fmt: skip
    done = ck.restore()
    tell("restored", done, whole=job.whole())
    for step in range(done + 1, steps + done * further + 1):
        select.select([], [], [], pace_s)
        job.step(0.1 if step >= noisy_from else 0.0)
        session: Any = ck._session
        tell(  # a process that is killed may have stored a step and not said so otherwise
            "step", step, whole=job.whole(), digests=job.digests(),
            strategy=type(ck.strategy).__name__, in_shadow=getattr(session, "in_shadow", None),
        )  # fmt: skip
        if step == leaves_at:
            session._fall_back("one rank says so")
        ck.step()
    ck.close()
    tell("closed", steps)
    del job, ck
    dist.destroy_process_group()


def tell(what: str, step: int, **more: object) -> None:
    """A line of JSON to whoever started this process."""
    line = json.dumps({"what": what, "step": step, **more}) + "\n"
    os.write(1, line.encode())  # in one: several threads tell


class Lossy(Live):
    """A mirror that loses frames now and then."""

    def __init__(self, interface: str, loss: float) -> None:
        super().__init__(interface, roce=False, tcp_ports=None)
        self._loss, self._drawn, self._is_on = loss, np.random.default_rng(1), False

    def turn(self) -> None:
        """From now on frames are lost; or, if they were, none is."""
        self._is_on = not self._is_on

    def next(self, timeout_s: float) -> Frames | None:
        frames = super().next(timeout_s)
        if frames is None or not self._is_on:
            return frames
        stay = self._drawn.random(len(frames.table)) >= self._loss
        return Frames(frames.data, frames.table[stay], frames.first)


def shadow(
    folder: str,
    address: str,
    port: int,
    token_file: str,
    persist_every: int,
    host: str | None = None,
    interface: str | None = None,
    capture: str | None = None,
    loss: float = 0.0,
    deltas: bool = False,
    keep_last: int = 2,
) -> None:
    """A shadow until SIGTERM, which tells the digests of each rank's part at each step.

    Args:
        interface: that it reads, or
        capture: the file.
        deltas: whether it writes each step's record.
        loss: of all frames of the mirror, this share is lost between two SIGUSR1.
    """
    if host is not None:
        move_to(host)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    real = Mirror.fold

    def fold(self: Mirror, payload: memoryview, layout: bytes) -> None:
        real(self, payload, layout)
        its = {
            key: digest(tensor)
            for key, tensor in self._folding.tensors.items()
            if key.startswith(("/models/", "/optimizers/"))
        }
        tell("folded", self.step, rank=self._image.begin.rank, digests=its)

    Mirror.fold = fold  # type: ignore[method-assign]

    def say(level: int, text: str) -> None:
        tell("said", 0, level=level, text=text)

    ended: list[int] = []
    reader, writer = os.pipe()

    def end(number: int, frame: FrameType | None) -> None:
        ended.append(number)
        os.write(writer, b"!")

    signal.signal(signal.SIGTERM, end)
    source = None
    if interface is not None:
        live = Lossy(interface, loss)
        signal.signal(signal.SIGUSR1, lambda number, frame: live.turn())
        source = WireSource(live, say)
    elif capture is not None:
        source = WireSource(Followed(capture), say)
    one = process.Shadow(
        Keeping(
            path=Path(folder), persist_every=persist_every, keep_last=keep_last, deltas=deltas
        ),
        address, port, at.read_secret(Path(token_file)), source, say,
    )  # fmt: skip
    tell("listens", one.port)
    while not ended:
        select.select([reader], [], [], 60.0)
    one.close()
    tell("ended", 0)


def capture(host: str, interface: str, path: str) -> None:
    """Write all frames of a host's interface to a file, as another program does it."""
    move_to(host)
    command = ["dumpcap", "-q", "-i", interface, "-s", "0", "-B", "256", "-w", path]
    os.execvp(command[0], command)
