"""What the machine can do at best with the bytes of a state: copy, hash, and write them once."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from benchmarks.common import (
    Setting,
    address_of,
    bytes_of,
    page_aligned,
    plain_write,
    remove,
    settle,
    timed,
)
from benchmarks.figures import Figure, median_of


@dataclass(frozen=True)
class Limits:
    """Runs of each, in seconds per state."""

    nbytes: int
    copies: list[float]
    copies_by_tensor: list[float]
    hashes: list[float]
    writes_new: list[float]
    writes_over: list[float]

    @property
    def copy_s(self) -> float:
        """One warm memory copy of the state."""
        return statistics.median(self.copies)

    @property
    def write_s(self) -> float:
        """The state on the disk, by the faster way."""
        return min(statistics.median(self.writes_new), statistics.median(self.writes_over))

    @property
    def write_bytes_per_s(self) -> float:
        """W."""
        return self.nbytes / self.write_s

    def figures(self) -> list[Figure]:
        """All of them."""
        return [
            median_of("limits: bytes of the state", [self.nbytes / 1e9], "GB"),
            median_of("limits: memory copy, whole", self.copies, "s"),
            median_of("limits: memory copy, by tensor", self.copies_by_tensor, "s"),
            median_of("limits: xxh3 hash", self.hashes, "s"),
            median_of("limits: O_DIRECT write, new file", self.writes_new, "s"),
            median_of("limits: O_DIRECT write, over an old file", self.writes_over, "s"),
        ]


def measure_limits(setting: Setting, tensors: list[torch.Tensor]) -> Limits:
    """One thread each, on touched pages; writes are fsynced, and of large pages."""
    nbytes = bytes_of(tensors)
    data = page_aligned(nbytes, large=True)
    runs = setting.runs
    new, old = setting.directory / "new.bin", setting.directory / "old.bin"
    plain_write(old, data, direct=True)
    writes_new, writes_over = [], []
    for _ in range(runs):
        remove(new, setting.settle_s)
        writes_new.append(plain_write(new, data, direct=True))
        settle(setting.settle_s)
        writes_over.append(plain_write(old, data, direct=True, overwrite=True))
    new.unlink()
    remove(old, setting.settle_s)
    data, target = page_aligned(nbytes), page_aligned(nbytes)
    return Limits(
        nbytes=nbytes,
        copies=_warm(runs, lambda: copy_whole(data, target)),
        copies_by_tensor=_warm(runs, lambda: copy_by_tensor(tensors, target)),
        hashes=_warm(runs, lambda: xxhash.xxh3_128(data).digest()),
        writes_new=writes_new,
        writes_over=writes_over,
    )


def copy_whole(source: memoryview, target: memoryview) -> None:
    """One memmove."""
    ctypes.memmove(address_of(target), address_of(source), len(source))


def copy_by_tensor(tensors: list[torch.Tensor], target: memoryview) -> None:
    """One memmove per tensor, one behind the other."""
    to = address_of(target)
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        ctypes.memmove(to, tensor.data_ptr(), nbytes)
        to += nbytes


def _warm(runs: int, action: Callable[[], object]) -> list[float]:
    action()
    return [timed(action) for _ in range(runs)]
