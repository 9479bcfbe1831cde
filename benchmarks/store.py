"""A blocking save and a restore of a real training state, beside a plain write and read of the
same bytes on the same disk.

    python -m benchmarks.store [--quick] [--json] [--dir DIR] [--runs N]

The state is a transformer of 124 M fp32 parameters with AdamW: 1.5 GB (`--quick`: a quarter of
it). Saves and plain writes take turns in changing order, as do restores and plain reads, so that
both see the same disk. The plain write is the faster of a buffered and an O_DIRECT one, each to a
new file with fsync. Reads are cold: the files' pages are dropped before. What it does not show:
other disks, a store over a network, several ranks.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import everystep
from benchmarks.figures import Figure, finish, median_of

CHUNK_BYTES = 16 << 20
MIB = 1 << 20
SETTLE_S = 3.0


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


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def plain_write(path: Path, data: memoryview, direct: bool) -> float:
    """Seconds to write a new file in large pieces and fsync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)

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


def remove(path: Path) -> None:
    """Remove a file or folder, and let the disk finish with it: freeing large files goes on for
    seconds in the background on some file systems, and would be counted to the next write."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.sync()
    time.sleep(SETTLE_S)


def page_aligned(nbytes: int) -> memoryview:
    """Bytes that are not zero, at an address that O_DIRECT accepts."""
    view = memoryview(mmap.mmap(-1, nbytes))
    np.frombuffer(view, dtype=np.uint8)[:] = 7
    return view


def save_once(
    run: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[float, int]:
    """Seconds that the step() of a new run takes, and how many bytes it writes."""
    with everystep.Checkpointer(run, model=model, optimizer=optimizer) as ck:
        ck.restore()
        took_s = timed(ck.step)
        return took_s, ck.stats[-1].written_bytes


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


def many_small(directory: Path, runs: int) -> list[Figure]:
    """What a step of 10,000 tensors of 4 KB costs beside its bytes."""
    parameters = [torch.nn.Parameter(torch.zeros(1024)) for _ in range(2500)]
    model = torch.nn.ParameterList(parameters)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    cpu_us, added, times = [], [], []
    with everystep.Checkpointer(directory, model=model, optimizer=optimizer) as ck:
        ck.restore()
        for _ in range(runs):
            before = time.process_time()
            added.append(peak_added_bytes(ck.step) / MIB)
            cpu_us.append((time.process_time() - before) / 10_000 * 1e6)
            times.append(ck.stats[-1].stall_s)
    return [
        median_of("10,000 small tensors: a save", times, "s"),
        median_of("10,000 small tensors: CPU each", cpu_us, "µs"),
        median_of("10,000 small tensors: memory added", added, "MiB", reach=64),
    ]


def measure(directory: Path, quick: bool, runs: int) -> list[Figure]:
    """All figures of this benchmark."""
    model, optimizer = make_state(quick)
    nbytes = save_once(directory / "first", model, optimizer)[1]
    shutil.rmtree(directory / "first")
    run, plain = directory / "run", directory / "plain.bin"
    data = page_aligned(-(-nbytes // 4096) * 4096)
    times: dict[str, list[float]] = {"save": [], "buffered": [], "direct": []}
    added = []

    def save() -> None:
        times["save"].append(save_once(run, model, optimizer)[0])

    for turn in range(runs):
        order = [*times][turn % 3 :] + [*times][: turn % 3]
        for kind in order:
            remove(run if kind == "save" else plain)
            if kind == "save":
                added.append(peak_added_bytes(save))
            else:
                times[kind].append(plain_write(plain, data, direct=kind == "direct"))
    if not plain.exists():
        plain_write(plain, data, direct=True)
    del data
    fresh, fresh_optimizer = make_state(quick)
    restores, reads = [], []
    for _ in range(runs):
        forget(directory)
        reads.append(plain_read(plain))
        forget(directory)
        with everystep.Checkpointer(run, model=fresh, optimizer=fresh_optimizer) as ck:
            restores.append(timed(lambda: ck.restore(required=True)))
    saves, buffered, direct = times["save"], times["buffered"], times["direct"]
    write_s = min(buffered, direct, key=statistics.median)
    save_ratios = [taken / write for taken, write in zip(saves, write_s, strict=True)]
    read_ratios = [restore / read for restore, read in zip(restores, reads, strict=True)]
    return [
        median_of("bytes", [nbytes / 1e9], "GB"),
        median_of("plain write, buffered", buffered, "s"),
        median_of("plain write, O_DIRECT", direct, "s"),
        median_of("blocking save", saves, "s"),
        median_of("blocking save / plain write", save_ratios, "x", reach=1.25),
        median_of("memory added by a save", [n / MIB for n in added], "MiB", reach=64),
        median_of("plain read, cold", reads, "s"),
        median_of("restore, cold", restores, "s"),
        median_of("restore / plain read", read_ratios, "x", reach=1.25),
        *many_small(directory / "small", runs),
    ]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller state, fewer runs")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--dir", type=Path, default=Path("."), help="on which disk (default: .)")
    parser.add_argument("--runs", type=int, help="how many (default: 5, quick: 3)")
    options = parser.parse_args()
    runs = options.runs or (3 if options.quick else 5)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="benchmark-") as directory:
        figures = measure(Path(directory), options.quick, runs)
    finish(figures, as_json=options.json)


if __name__ == "__main__":
    main()
