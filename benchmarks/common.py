"""What several benchmarks share: a training state, plain reads and writes, clocks, cleaning up."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

CHUNK_BYTES = 16 << 20
MIB = 1 << 20
SETTLE_S = 1.0
HOME = Path(__file__).resolve().parent.parent
"""From where `python -m benchmarks.NAME` finds itself."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Setting:
    """Where, how much, and how often. The quick state is a fifth of the whole one."""

    directory: Path
    quick: bool
    runs: int

    @property
    def steps(self) -> int:
        """How many steps of a loop are measured."""
        return max(5, self.runs)

    @property
    def peer_steps(self) -> int:
        """How many steps of a loop with another's checkpoints are measured: they take half of the
        time of all, and no reach is so near to them."""
        return min(3, self.runs)

    @property
    def settle_s(self) -> float:
        """How long the disk may take to come to rest."""
        return SETTLE_S / 3 if self.quick else SETTLE_S

    @property
    def hidden_s(self) -> float:
        """T where storage keeps up."""
        return 1.0 if self.quick else 2.5

    @property
    def saturated_s(self) -> float:
        """T where storage is the bottleneck by far."""
        return 0.05 if self.quick else 0.2

    @property
    def others_s(self) -> tuple[float, ...]:
        """More T, for the picture."""
        return () if self.quick else (1.0,)


def make_state(quick: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A GPT-2 small in shape, and AdamW with its slots made."""
    layers, width, vocabulary = (12, 768, 50_304) if not quick else (4, 512, 24_576)
    block = torch.nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(vocabulary, width),
        torch.nn.TransformerEncoder(block, layers, enable_nested_tensor=False),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor of a state: parameters, buffers, and the optimizer's slots."""
    found = [tensor.detach() for tensor in [*model.parameters(), *model.buffers()]]
    for slots in optimizer.state.values():
        found += [value for value in slots.values() if isinstance(value, torch.Tensor)]
    return found


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """How many bytes they hold together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def plain_write(path: Path, data: memoryview, direct: bool, *, overwrite: bool = False) -> float:
    """Seconds to write a file in large pieces and fsync it.

    Args:
        overwrite: what is there is overwritten in place; False: the file is made anew.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
    flags |= 0 if overwrite else os.O_TRUNC

    def write() -> None:
        fd = os.open(path, flags)
        try:
            for start in range(0, len(data), CHUNK_BYTES):
                piece = data[start : start + CHUNK_BYTES]
                while piece:
                    piece = piece[os.write(fd, piece) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    return timed(write)


def plain_read(path: Path) -> float:
    """Seconds to read a file into new memory."""

    def read() -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            into = memoryview(np.empty(os.fstat(fd).st_size, dtype=np.uint8))
            done = 0
            while done < len(into):
                done += os.preadv(fd, [into[done : done + CHUNK_BYTES]], done)
        finally:
            os.close(fd)

    return timed(read)


def forget(directory: Path) -> None:
    """Drop the pages of all files below a directory from memory."""
    for path in directory.rglob("*"):
        if path.is_file() and path.name != "owner.lock":
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def remove(path: Path, settle_s: float = SETTLE_S) -> None:
    """Remove a file or folder, and let the disk finish with it: freeing large files goes on for
    seconds in the background on some file systems, and would be counted to the next write."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    settle(settle_s)


def settle(settle_s: float) -> None:
    """Let the disk come to rest, and give back what this process no longer needs."""
    gc.collect()
    os.sync()
    time.sleep(settle_s)


def page_aligned(nbytes: int, *, large: bool = False) -> memoryview:
    """Bytes that are not zero, at an address that O_DIRECT accepts; whole blocks of 4 KiB.

    Args:
        large: in large pages, from which the disk is written fastest. Else in small ones, as the
            memory of a program is.
    """
    memory = mmap.mmap(-1, -(-nbytes // 4096) * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large:
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    np.frombuffer(view, dtype=np.uint8)[:] = 7
    return view


def address_of(view: memoryview) -> int:
    """Where its bytes begin in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def resident_bytes(field: str) -> int:
    """A memory figure of this process from the kernel, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_added_bytes(action: Callable[[], object]) -> int:
    """How far resident memory rises above what it was before, at most, during an action."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    before = resident_bytes("VmRSS")
    action()
    return max(0, resident_bytes("VmHWM") - before)


def cpu_s() -> float:
    """CPU seconds of this process, all its threads, and all its descendants so far."""
    own = os.times()
    reaped = own.children_user + own.children_system
    return time.process_time() + reaped + _descendants_cpu_s()


def library_cpu_s() -> float:
    """CPU seconds of the library's threads in this process, and of all its descendants."""
    of_threads = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("everystep"):
            told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            of_threads += int(told.split()[0]) / 1e9
    return of_threads + _descendants_cpu_s()


def _descendants_cpu_s() -> float:
    """CPU seconds of the processes that live below this one, and of those they have reaped."""
    stats: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # the name, in parentheses, may hold anything; what follows it is numbers
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        stats[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_S)
    total, below = 0.0, {os.getpid()}
    while below:
        below = {pid for pid, (parent, _) in stats.items() if parent in below}
        total += sum(stats[pid][1] for pid in below)
    return total
