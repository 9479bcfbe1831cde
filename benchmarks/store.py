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
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

import everystep
from benchmarks.common import (
    MIB,
    forget,
    make_state,
    page_aligned,
    peak_added_bytes,
    plain_read,
    plain_write,
    remove,
    timed,
)
from benchmarks.figures import Figure, finish, median_of

BLOCKING = everystep.Full(blocking=True)


def save_once(
    run: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[float, int]:
    """Seconds that the step() of a new run takes, and how many bytes it writes."""
    with everystep.Checkpointer(run, model=model, optimizer=optimizer, strategy=BLOCKING) as ck:
        ck.restore()
        took_s = timed(ck.step)
        return took_s, ck.stats[-1].written_bytes


def many_small(directory: Path, runs: int) -> list[Figure]:
    """What a step of 10,000 tensors of 4 KB costs beside its bytes."""
    parameters = [torch.nn.Parameter(torch.zeros(1024)) for _ in range(2500)]
    model = torch.nn.ParameterList(parameters)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    cpu_us, added, times = [], [], []
    with everystep.Checkpointer(
        directory, model=model, optimizer=optimizer, strategy=BLOCKING
    ) as ck:
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
    data = page_aligned(nbytes)
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
        with everystep.Checkpointer(
            run, model=fresh, optimizer=fresh_optimizer, strategy=BLOCKING
        ) as ck:
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
