"""Who this process is among the ranks, and how ranks agree: plain JSON, never pickle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from everystep.types import Json


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job. Its methods are collective: every rank calls them."""

    rank: int
    world_size: int

    @staticmethod
    def here() -> Ranks:
        """The default process group, or a job of one where there is none."""
        if dist.is_available() and dist.is_initialized():
            return Ranks(dist.get_rank(), dist.get_world_size())
        return Ranks(0, 1)

    def from_first(self, value: Json) -> Json:
        """Rank 0's value, on every rank."""
        return self.gather(value)[0]

    def gather(self, value: Json) -> Sequence[Json]:
        """Every rank's value, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        device = _device()
        text = bytearray(msgspec.json.encode(value))
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(text)], dtype=torch.int64, device=device))
        longest = int(max(int(n) for n in lengths))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
        all_texts = [
            torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(self.world_size)
        ]
        dist.all_gather(all_texts, mine.to(device))
        return [
            msgspec.json.decode(part[: int(n)].cpu().numpy().tobytes())
            for part, n in zip(all_texts, lengths, strict=True)
        ]


def _device() -> torch.device:
    """A device on which the default group communicates: the CPU where it can."""
    config = str(dist.get_backend_config())
    if "cpu:" in config or config in ("gloo", "mpi"):
        return torch.device("cpu")
    return torch.device(config.split(":", 1)[0] if ":" in config else "cuda")
