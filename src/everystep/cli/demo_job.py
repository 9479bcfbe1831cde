"""The training job of the demo: a small GPT on two ranks, checkpointed at every step.

`everystep demo` starts it under torchrun; nothing in it knows that it will be killed.
"""

import argparse
import hashlib
import json
import os
import random
import sysconfig
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import everystep

VOCABULARY = 256  # one token per byte
CONTEXT = 64
BATCH = 16
WIDTH = 64
HEADS = 4
BLOCKS = 4
DROPOUT = 0.1
TEXT_BYTES = 64 * 1024  # small, so that the loader begins a new epoch within the demo


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))  # (batch, time, 3, heads, size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, size)
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """Tokens to the logits of the next token; input and output embedding are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, time) to logits (batch, time, vocabulary)."""
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


class Loader:
    """This rank's share of the text in shuffled windows, epoch after epoch, from where it stood."""

    def __init__(self, text: Tensor, rank: int, ranks: int, seed: int) -> None:
        windows = text.unfold(0, CONTEXT + 1, CONTEXT)  # (windows, context + 1)
        self._windows = windows[rank::ranks]
        self._generator = torch.Generator().manual_seed(seed + rank)
        self._epoch, self._at = -1, len(self._windows)
        self._order = torch.empty(0, dtype=torch.int64)

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next tokens and their successors, each (batch, context)."""
        if self._at + BATCH > len(self._windows):
            self._epoch, self._at = self._epoch + 1, 0
            self._order = torch.randperm(len(self._windows), generator=self._generator)
        chosen = self._windows[self._order[self._at : self._at + BATCH]].long()
        self._at += BATCH
        return chosen[:, :-1], chosen[:, 1:]

    def state_dict(self) -> dict[str, object]:
        """Where the loader stands: epoch, place in it, order of it, and what comes after."""
        generator = self._generator.get_state()
        return {
            "epoch": self._epoch,
            "at": self._at,
            "order": self._order,
            "generator": generator,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Stand where `state` stood."""
        epoch, at, order, generator = (state[k] for k in ("epoch", "at", "order", "generator"))
        if not (isinstance(epoch, int) and isinstance(at, int)):
            raise TypeError("loader state: 'epoch' and 'at' must be whole numbers")
        if not (isinstance(order, Tensor) and isinstance(generator, Tensor)):
            raise TypeError("loader state: 'order' and 'generator' must be tensors")
        self._epoch, self._at, self._order = epoch, at, order
        self._generator.set_state(generator)


class Journal:
    """One line per event, appended with one write each: what is in it survives SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def write(self, name: str, step: int, **more: object) -> None:
        """Append an event, with the time of a clock that all processes of this host share."""
        event = {"name": name, "step": step, "at_s": time.monotonic(), "life": self._life}
        os.write(self._fd, json.dumps(event | {"pid": os.getpid()} | more).encode() + b"\n")


def library_text() -> Tensor:
    """The first bytes of the source of Python's standard library, as (bytes,) uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


def set_seed(seed: int) -> None:
    """Start the global generators of Python, NumPy and torch alike in every run."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def live_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Hash of the weights and moments in memory, taken without any help of everystep."""
    digest = hashlib.sha256()
    moments = [slot[key] for slot in optimizer.state.values() for key in sorted(slot)]
    for tensor in [*model.state_dict().values(), *moments]:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def train(run: Path, journal: Journal, steps: int, seed: int) -> None:
    """Train to `steps` from wherever the checkpoints stand."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    set_seed(seed)  # the same weights on all ranks
    model = DistributedDataParallel(GPT())
    set_seed(seed + 1 + rank)  # other dropout on each
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    loader = Loader(library_text(), rank, ranks, seed)
    began_s = time.perf_counter()
    with everystep.Checkpointer(
        run,
        model=model,
        optimizer=optimizer,
        extras={"schedule": schedule, "loader": loader},
        retention=everystep.Retention(keep_last=3),
    ) as ck:
        done = ck.restore()
        journal.write("restored", done, took_s=time.perf_counter() - began_s)
        for step in range(done + 1, steps + 1):
            began_s = time.perf_counter()
            x, y = loader.batch()
            loss: Tensor = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            trained_s = time.perf_counter()
            journal.write("trained", step, took_s=trained_s - began_s, loss=loss.item())
            ck.step(loss=loss.item())
            saved_s, size = time.perf_counter() - trained_s, ck.stats[-1].copied_bytes
            journal.write("saved", step, took_s=saved_s, copied_bytes=size)
        journal.write("ended", steps, live=live_hash(model.module, optimizer))


def main() -> None:
    """Read the command line, join the other ranks, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the run and of the ranks' journals")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    journal = Journal(options.folder / f"rank{os.environ['RANK']}.jsonl")
    journal.write("started", 0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        train(options.folder / "run", journal, options.steps, options.seed)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
