"""A real small job: two ranks on this host that train a transformer under DDP, with and without.

Each round has a loop without checkpoints, one with ours, and one of another kind, in an order that
changes, so that all see the same machine. CPU time is of both ranks and their agents. Beside it
stand one copy, one hash and one write of what each rank stores, in the same processes.

The other kinds take turns. Two are peers, by which each rank saves the full state at every step.
The third shows what the disk alone takes: the same training, where a process beside each rank does
nothing but one plain O_DIRECT write of as many bytes as ours at every step. Where the machine is
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

import everystep
from benchmarks.common import (
    HOME,
    Setting,
    cpu_s,
    library_cpu_s,
    page_aligned,
    plain_write,
)
from benchmarks.figures import Figure, median_of
from benchmarks.limits import copy_whole
from benchmarks.loop import Everystep, Nothing, Subject
from benchmarks.peers import DcpAsyncSave, TorchSave

RANKS = 2
WARM_STEPS = 3
TIMEOUT_S = 600.0
BATCH = 4
"""Sequences of 64 tokens per rank and step. Only the peers' figures may set it: with 8,
`torch.save` kept 72 % of the throughput and DCP 80 %; with 24, 74 and 82 %."""

NONE, OURS, WRITE = "none", "ours", "write"
OTHERS = {
    WRITE: "a plain write beside",
    "save": "torch.save by each rank",
    "dcp": "DCP async_save by each rank",
}
"""Kinds of loops that take turns."""


@dataclass
class Loops:
    """What one rank has measured of one kind: one number per loop."""

    walls: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Seconds, until all that was to become durable was."""
    own: list[float] = field(default_factory=list)
    """The same of the library's threads and agents alone."""
    stolen: list[float] = field(default_factory=list)
    """Share of the processors' time that the host of this machine took."""
    rounds: list[int] = field(default_factory=list)


@dataclass
class Found:
    """What one rank has measured."""

    loops: dict[str, Loops] = field(default_factory=dict)
    stalls: list[float] = field(default_factory=list)
    """Seconds, of each step with ours."""
    writes: list[float] = field(default_factory=list)
    """Plain writes per step: a step asks for none while one is under way."""
    durable: list[int] = field(default_factory=list)
    """Of the steps of each loop with ours."""
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
    """The training of one rank.

    Args:
        batch: sequences of 64 tokens per step.
    """

    def __init__(self, batch: int) -> None:
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
        self._batch = batch

    def step(self) -> None:
        """One step on random bytes."""
        data = torch.randint(0, 256, (self._batch, 65))
        self.optimizer.zero_grad()
        scores = self.model(data[:, :-1])
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), data[:, 1:].flatten()).backward()
        self.optimizer.step()


def measure_loop(job: Job, subject: Subject, steps: int, into: Loops, number: int) -> None:
    """Some steps with a subject, after some that are not counted. Collective.

    Args:
        into: gets seconds of the steps, and CPU seconds until all of them are durable.
        number: of the round.
    """
    for _ in range(WARM_STEPS):
        job.step()
        subject.step()
    subject.finish()
    dist.barrier()
    before = _processor_ticks()
    own_before_s, cpu_before_s, begun_s = library_cpu_s(), cpu_s(), time.perf_counter()
    for _ in range(steps):
        job.step()
        subject.step()
    into.walls.append(time.perf_counter() - begun_s)
    after = _processor_ticks()
    into.stolen.append((after[0] - before[0]) / max(1, after[1] - before[1]))
    subject.finish()
    into.cpu.append(cpu_s() - cpu_before_s)
    into.own.append(library_cpu_s() - own_before_s)
    into.rounds.append(number)


class _Rank:
    """One rank's training, and what it finds."""

    def __init__(self, directory: Path, rank: int, steps: int) -> None:
        self._directory, self._rank, self._steps = directory, rank, steps
        self._job = Job(BATCH)
        self.found = Found(loops={kind: Loops() for kind in [NONE, OURS, *OTHERS]})

    def loop(self, kind: str, number: int) -> None:
        """Some steps of one kind."""
        own = self._directory / f"{kind}-{number}-{self._rank}"
        subject = self._subject(kind, self._directory / f"run-{number}", own)
        found = self.found
        try:
            measure_loop(self._job, subject, self._steps, found.loops[kind], number)
            if isinstance(subject, Everystep):
                stats = subject.ck.stats[-self._steps :]
                stored = [one for one in stats if one.durable]
                found.durable.append(len(stored))
                found.stalls += [one.stall_s for one in stats]
                written = statistics.median(one.written_bytes for one in stored)
                found.written_bytes = int(written)
            elif isinstance(subject, Writing):
                found.writes.append(subject.writes / (WARM_STEPS + self._steps))
        finally:
            subject.close()
        if own.exists():
            shutil.rmtree(own)
        dist.barrier()

    def _subject(self, kind: str, run: Path, own: Path) -> Subject:
        model, optimizer = self._job.model, self._job.optimizer
        if kind == NONE:
            return Nothing()
        if kind == OURS:
            return Everystep(run, model, optimizer, everystep.Full(every=1), idle_s=2.0)
        if kind == WRITE:
            return Writing(own.with_suffix(".bin"), self.found.written_bytes)
        peer: Callable[..., Subject] = TorchSave if kind == "save" else DcpAsyncSave
        return peer(own, model, optimizer)


def work(directory: Path, rank: int, rounds: int, steps: int) -> None:
    """All of one rank; what was found is written to a file."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    rendezvous = f"file://{directory / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    one = _Rank(directory, rank, steps)
    for number in range(rounds):
        order = [NONE, OURS, list(OTHERS)[number % len(OTHERS)]]
        for kind in order if number % 2 == 0 else reversed(order):
            one.loop(kind, number)
    _limits(directory / f"plain-{rank}.bin", one.found)
    (directory / f"found-{rank}.json").write_text(json.dumps(asdict(one.found)))
    dist.barrier()
    del (
        one
    )  # a DDP model that outlives its group may wait for gloo's threads for ever, and they for it
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


def run_ranks(program: str, place: Path, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Start the ranks, wait, and return what each has written to `found-RANK.json`.

    Args:
        program: the module that is one rank.
        place: an empty folder, which is removed.
    """
    place.mkdir()
    command = [sys.executable, "-m", program, str(place)]
    words = [[str(rank), str(rounds), str(steps)] for rank in range(RANKS)]
    ranks = [subprocess.Popen([*command, *its], cwd=HOME) for its in words]
    try:
        for rank in ranks:
            if rank.wait(TIMEOUT_S):
                raise ChildProcessError(f"a rank ended with status {rank.returncode}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = [json.loads((place / f"found-{rank}.json").read_text()) for rank in range(RANKS)]
    shutil.rmtree(place)
    return found


def measure_small_job(setting: Setting) -> list[Figure]:
    """All of this part. Each run is a round."""
    steps = 5 if setting.quick else 8
    each = []
    for its in run_ranks("benchmarks.small_job", setting.directory / "job", setting.runs, steps):
        loops = {kind: Loops(**loops) for kind, loops in its.pop("loops").items()}
        each.append(Found(loops=loops, **its))
    return _figures(each, steps)


def _figures(found: list[Found], steps: int) -> list[Figure]:
    first, head = found[0].loops, f"small job, {RANKS} ranks: "
    bare, ours = first[NONE].walls, first[OURS].walls
    written = {
        number: wall for number, wall in zip(first[WRITE].rounds, first[WRITE].walls, strict=True)
    }
    beside = [wall / ours[number] for number, wall in written.items()]
    used, own, bare_cpu = [], [], []
    for number in range(len(bare)):
        cpu = {kind: sum(rank.loops[kind].cpu[number] for rank in found) for kind in (NONE, OURS)}
        bare_cpu.append(cpu[NONE] / steps)
        stored = max(1, min(rank.durable[number] for rank in found))
        used.append((cpu[OURS] - cpu[NONE]) / stored)
        own.append(sum(rank.loops[OURS].own[number] for rank in found) / stored)
    limit_s = sum(rank.limit_cpu for rank in found)
    durable = [count / steps for rank in found for count in rank.durable]
    told = {OURS: "with checkpoints", **{kind: f"with {what}" for kind, what in OTHERS.items()}}
    return [
        median_of(head + "state", [sum(rank.written_bytes for rank in found) / 1e9], "GB"),
        median_of(head + "step without checkpoints", [wall / steps for wall in bare], "s"),
        median_of(head + "step", [wall / steps for wall in ours], "s"),
        median_of(head + "stall", [stall for rank in found for stall in rank.stalls], "s"),
        median_of(head + "throughput / without", kept(first, OURS), "x", 0.9, at_least=True),
        *(
            median_of(f"{head}throughput {told[kind]} / without", kept(first, kind), "x")
            for kind in OTHERS
            if first[kind].walls
        ),
        median_of(head + f"throughput / {told[WRITE]}", beside, "x"),
        median_of(
            head + "plain writes per step", [w for rank in found for w in rank.writes], "share"
        ),
        *(
            median_of(f"{head}taken by the host, {what}", first[kind].stolen, "share of CPU")
            for kind, what in {NONE: "without", **told}.items()
            if first[kind].walls
        ),
        median_of(head + "durable steps", durable, "share"),
        median_of(head + "CPU time of a step without checkpoints", bare_cpu, "s"),
        median_of(head + "CPU time per durable checkpoint", used, "s"),
        median_of(head + "of that its own threads and agents", own, "s"),
        median_of(head + "CPU time of a copy", [sum(r.copy_cpu for r in found)], "s"),
        median_of(head + "CPU time of a hash", [sum(r.hash_cpu for r in found)], "s"),
        median_of(head + "CPU time of a write", [sum(r.write_cpu for r in found)], "s"),
        median_of(
            head + "CPU time / copy + hash + write", [one / limit_s for one in used], "x", reach=1.5
        ),
    ]


def kept(loops: Mapping[str, Loops], kind: str) -> list[float]:
    """The throughput of each loop of a kind, beside the one without checkpoints of its round."""
    its, bare = loops[kind], loops[NONE].walls
    return [bare[number] / wall for number, wall in zip(its.rounds, its.walls, strict=True)]


if __name__ == "__main__":
    work(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
