"""A real small job: two ranks on this host that train a transformer under DDP, with and without.

Loops with and without checkpoints take turns, so that both see the same machine. CPU time is of
both ranks and their agents. Beside it stand one copy, one hash and one write of what each rank
stores, in the same processes.

A third kind of loop shows what the disk alone takes: the same training, where a process beside each
rank does nothing but one plain O_DIRECT write of as many bytes at every step. Where the machine is
virtual, its host may take the processors away for the work that a write is (`steal` in /proc/stat),
and no checkpointer can be faster than that.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

import everystep
from benchmarks.common import HOME, cpu_s, page_aligned, plain_write
from benchmarks.figures import Figure, median_of
from benchmarks.limits import copy_whole
from benchmarks.loop import Everystep, Nothing, Subject

RANKS = 2
WARM_STEPS = 3
TIMEOUT_S = 600.0
STOLEN = {"none": "without", "ours": "with checkpoints", "write": "with a plain write beside"}
"""Kinds of loops."""


@dataclass
class Found:
    """What one rank has measured: one number per round, in seconds."""

    bare_walls: list[float] = field(default_factory=list)
    bare_cpu: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    write_walls: list[float] = field(default_factory=list)
    """With a plain write beside every step."""
    writes: list[float] = field(default_factory=list)
    """Writes per step of these: a step asks for none while one is under way."""
    steal: dict[str, list[float]] = field(default_factory=dict)
    """By the kind of loop: the share of the processors' time that the host of this machine took."""
    durable: list[int] = field(default_factory=list)
    written_bytes: int = 0
    copy_cpu: float = 0.0
    hash_cpu: float = 0.0
    write_cpu: float = 0.0
    """CPU seconds of one copy, one hash and one O_DIRECT write of so many bytes."""

    @property
    def limit_cpu(self) -> float:
        """All three."""
        return self.copy_cpu + self.hash_cpu + self.write_cpu


class Writing:
    """A process beside the rank that overwrites a file once for every step, and does nothing else:
    at most one write is under way, and a step that comes meanwhile asks for none."""

    warm = True

    def __init__(self, path: Path, nbytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), str(nbytes)],
            cwd=HOME, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        if self._process.stdin is None or self._process.stdout is None:
            raise ChildProcessError("no pipes")
        self._ask, self._answers = self._process.stdin, self._process.stdout
        self._answers.read(1)  # it is ready
        self._under_way = False
        self.writes = 0

    def step(self) -> None:
        """See `Subject.step`."""
        if self._under_way and not select.select([self._answers], [], [], 0)[0]:
            return
        self.finish()
        self._ask.write(b"w")
        self._ask.flush()
        self._under_way = True
        self.writes += 1

    def finish(self) -> None:
        """See `Subject.finish`."""
        if self._under_way:
            self._answers.read(1)
            self._under_way = False

    def close(self) -> None:
        """See `Subject.close`."""
        self._process.communicate()


_WRITER = """
import os, sys
from pathlib import Path
from benchmarks.common import page_aligned, plain_write
path, data = Path(sys.argv[1]), page_aligned(int(sys.argv[2]))
plain_write(path, data, direct=True)
while os.write(1, b"d") and os.read(0, 1):
    plain_write(path, data, direct=True, overwrite=True)
path.unlink()
"""


def _processor_ticks() -> tuple[int, int]:
    """Of all processors since the machine started: those that the host took, and all."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


class Job:
    """The training of one rank."""

    def __init__(self) -> None:
        width = 384
        block = torch.nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, batch_first=True)
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Embedding(256, width),
            torch.nn.TransformerEncoder(block, 6, enable_nested_tensor=False),
            torch.nn.Linear(width, 256),
        )
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        """One step on random bytes."""
        data = torch.randint(0, 256, (4, 65))
        self.optimizer.zero_grad()
        scores = self.model(data[:, :-1])
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), data[:, 1:].flatten()).backward()
        self.optimizer.step()


def _loop(job: Job, subject: Subject, steps: int, steal: list[float]) -> tuple[float, float]:
    """Seconds and CPU seconds of so many steps; the latter until all of them are durable.

    Args:
        steal: gets the share that the host took of the former.
    """
    for _ in range(WARM_STEPS):
        job.step()
        subject.step()
    subject.finish()
    dist.barrier()
    before = _processor_ticks()
    cpu_before_s, begun_s = cpu_s(), time.perf_counter()
    for _ in range(steps):
        job.step()
        subject.step()
    wall_s = time.perf_counter() - begun_s
    after = _processor_ticks()
    steal.append((after[0] - before[0]) / max(1, after[1] - before[1]))
    subject.finish()
    return wall_s, cpu_s() - cpu_before_s


def _round(job: Job, run: Path, steps: int, found: Found) -> None:
    """A loop with checkpoints."""
    strategy = everystep.Full(every=1)
    subject = Everystep(run, job.model, job.optimizer, strategy, idle_s=2.0)
    try:
        wall_s, used_s = _loop(job, subject, steps, found.steal.setdefault("ours", []))
        stats = subject.ck.stats[-steps:]
    finally:
        subject.close()
    found.walls.append(wall_s)
    found.cpu.append(used_s)
    found.durable.append(sum(one.durable for one in stats))
    found.stalls += [one.stall_s for one in stats]
    found.written_bytes = int(statistics.median(one.written_bytes for one in stats if one.durable))


def _written(job: Job, path: Path, steps: int, found: Found) -> None:
    """A loop beside which a process writes."""
    subject = Writing(path, found.written_bytes)
    try:
        wall_s, _ = _loop(job, subject, steps, found.steal.setdefault("write", []))
    finally:
        subject.close()
    found.write_walls.append(wall_s)
    found.writes.append(subject.writes / (WARM_STEPS + steps))


def work(directory: Path, rank: int, rounds: int, steps: int) -> None:
    """All of one rank; what was found is written to a file."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    rendezvous = f"file://{directory / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    job, found = Job(), Found()
    for number in range(rounds):
        # a write is of what ours has written before
        kinds = ["none", "ours", "write"] if number % 2 == 0 else ["write", "ours", "none"]
        for kind in kinds:
            if kind == "ours":
                _round(job, directory / f"run-{number}", steps, found)
            elif kind == "write":
                _written(job, directory / f"beside-{rank}.bin", steps, found)
            else:
                steal = found.steal.setdefault(kind, [])
                wall_s, used_s = _loop(job, Nothing(), steps, steal)
                found.bare_walls.append(wall_s)
                found.bare_cpu.append(used_s)
    _limits(directory / f"plain-{rank}.bin", found)
    (directory / f"found-{rank}.json").write_text(json.dumps(asdict(found)))
    dist.barrier()
    dist.destroy_process_group()


def _limits(path: Path, found: Found) -> None:
    data, target = page_aligned(found.written_bytes), page_aligned(found.written_bytes)
    plain_write(path, data, direct=True)
    found.copy_cpu = _cpu_of(lambda: copy_whole(data, target))
    found.hash_cpu = _cpu_of(lambda: xxhash.xxh3_128(data).digest())
    found.write_cpu = _cpu_of(lambda: plain_write(path, data, direct=True, overwrite=True))


def _cpu_of(action: Callable[[], object]) -> float:
    """CPU seconds of this process in an action, the median of five after the first."""
    runs = []
    for _ in range(6):
        before_s = time.process_time()
        action()
        runs.append(time.process_time() - before_s)
    return statistics.median(runs[1:])


def measure_small_job(directory: Path, quick: bool) -> list[Figure]:
    """Start the ranks, wait, and put together what they found."""
    place = directory / "job"
    place.mkdir()
    rounds, steps = (2, 6) if quick else (5, 15)
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.small_job",
                str(place),
                *map(str, (r, rounds, steps)),
            ],
            cwd=HOME,
        )
        for r in range(RANKS)
    ]
    try:
        for rank in ranks:
            if rank.wait(TIMEOUT_S):
                raise ChildProcessError(f"a rank ended with status {rank.returncode}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = [
        Found(**json.loads((place / f"found-{rank}.json").read_text())) for rank in range(RANKS)
    ]
    shutil.rmtree(place)
    return _figures(found, rounds, steps)


def _figures(found: list[Found], rounds: int, steps: int) -> list[Figure]:
    first, head = found[0], f"small job, {RANKS} ranks: "
    throughput = [bare / wall for bare, wall in zip(first.bare_walls, first.walls, strict=True)]
    writing = [bare / w for bare, w in zip(first.bare_walls, first.write_walls, strict=True)]
    beside = [write / wall for write, wall in zip(first.write_walls, first.walls, strict=True)]
    used, bare_cpu = [], []
    for number in range(rounds):
        ours = sum(rank.cpu[number] for rank in found)
        bare = sum(rank.bare_cpu[number] for rank in found)
        bare_cpu.append(bare / steps)
        used.append((ours - bare) / max(1, min(rank.durable[number] for rank in found)))
    limit_s = sum(rank.limit_cpu for rank in found)
    durable = [count / steps for rank in found for count in rank.durable]
    return [
        median_of(head + "state", [sum(rank.written_bytes for rank in found) / 1e9], "GB"),
        median_of(
            head + "step without checkpoints", [wall / steps for wall in first.bare_walls], "s"
        ),
        median_of(head + "step", [wall / steps for wall in first.walls], "s"),
        median_of(head + "stall", [stall for rank in found for stall in rank.stalls], "s"),
        median_of(head + "throughput / without", throughput, "x", reach=0.9, at_least=True),
        median_of(head + "throughput with a plain write beside / without", writing, "x"),
        median_of(head + "throughput / with a plain write beside", beside, "x"),
        median_of(
            head + "plain writes per step", [w for rank in found for w in rank.writes], "share"
        ),
        *(
            median_of(f"{head}taken by the host, {what}", first.steal[kind], "share of CPU")
            for kind, what in STOLEN.items()
        ),
        median_of(head + "durable steps", durable, "share"),
        median_of(head + "CPU time of a step without checkpoints", bare_cpu, "s"),
        median_of(head + "CPU time per durable checkpoint", used, "s"),
        median_of(head + "CPU time of a copy", [sum(r.copy_cpu for r in found)], "s"),
        median_of(head + "CPU time of a hash", [sum(r.hash_cpu for r in found)], "s"),
        median_of(head + "CPU time of a write", [sum(r.write_cpu for r in found)], "s"),
        median_of(
            head + "CPU time / copy + hash + write", [one / limit_s for one in used], "x", reach=1.5
        ),
    ]


if __name__ == "__main__":
    work(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
