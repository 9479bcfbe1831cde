"""A real small job: two ranks that train with top-k, with a delta of every step and in other ways.

Each round has a loop without checkpoints, one with ours, and one of another way, in an order that
changes, so that all see the same machine. The virtual machine that this may run on loses CPU time
to its host when it writes: the share that was stolen stands beside each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import everystep
from benchmarks.common import HOME, Setting, cpu_s
from benchmarks.delta_sets import DENSITY
from benchmarks.figures import Figure, median_of
from benchmarks.loop import Everystep, Nothing, Subject
from benchmarks.peers import DcpAsyncSave, TorchSave
from benchmarks.small_job import RANKS, TIMEOUT_S, WARM_STEPS, Job
from everystep.deltas.hooks import CompressionHook

NONE, OURS = "none", "a delta of every step"
OTHERS = {
    "pairs": "torch.save of the pairs, fsync",
    "full": "torch.save of the full state, rank 0",
    "dcp": "DCP async_save of the full state, rank 0",
}
"""Other ways, each at every step; they take turns."""


@dataclass
class Loops:
    """What one rank has measured of one way: one number per loop."""

    walls: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Seconds, until all that was to become durable was."""
    stolen: list[float] = field(default_factory=list)
    """Share of the machine's CPU time."""
    rounds: list[int] = field(default_factory=list)


class Pairs:
    """Each rank saves its share of the merged gradient, int32 indices and values, in a new file."""

    warm = True

    def __init__(self, directory: Path, hook: CompressionHook, rank: int) -> None:
        self._directory, self._hook, self._rank = directory, hook, rank
        self._directory.mkdir()
        self._turn = 0

    def step(self) -> None:
        """See `Subject.step`."""
        self._turn += 1
        known = self._hook.known().values()
        pairs = [(self._share(its.indices.int()), self._share(its.values)) for its in known]
        with (self._directory / str(self._turn)).open("wb") as file:
            torch.save(pairs, file)
            file.flush()
            os.fsync(file.fileno())

    def _share(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.tensor_split(RANKS)[self._rank].clone()

    def finish(self) -> None:
        """See `Subject.finish`."""

    def close(self) -> None:
        """See `Subject.close`."""


class Rank:
    """One rank's training, and what it finds."""

    def __init__(self, directory: Path, rank: int, steps: int) -> None:
        self._directory, self._rank, self._steps = directory, rank, steps
        self._job = Job()
        topk = everystep.compressors.TopK(density=DENSITY)
        self._hook = everystep.compress(self._job.model, topk)
        self.loops = {name: Loops() for name in [NONE, OURS, *OTHERS]}
        self.durable: list[float] = []
        self.stalls: list[float] = []

    def loop(self, name: str, number: int) -> None:
        """Some steps in one way."""
        place = self._directory / f"{name}-{number}"
        rank_place = self._directory / f"{name}-{number}-{self._rank}"
        subject = self._subject(name, place, rank_place)
        try:
            for _ in range(WARM_STEPS):
                self._step(subject)
            subject.finish()
            dist.barrier()
            cpu_before_s, stolen_before, begun_s = cpu_s(), _stolen(), time.perf_counter()
            for _ in range(self._steps):
                self._step(subject)
            wall_s = time.perf_counter() - begun_s
            stolen = [now - before for now, before in zip(_stolen(), stolen_before, strict=True)]
            subject.finish()
            used_s = cpu_s() - cpu_before_s
            if isinstance(subject, Everystep):
                stats = subject.ck.stats[-self._steps :]
                self.durable.append(sum(one.durable for one in stats) / len(stats))
                self.stalls += [one.stall_s for one in stats]
        finally:
            subject.close()
        loops = self.loops[name]
        loops.walls.append(wall_s)
        loops.cpu.append(used_s)
        loops.stolen.append(stolen[0] / max(1, stolen[1]))
        loops.rounds.append(number)
        dist.barrier()
        for path in (place, rank_place):
            if path.exists() and (path == rank_place or self._rank == 0):
                shutil.rmtree(path)

    def _step(self, subject: Subject) -> None:
        self._job.step()
        subject.step()

    def _subject(self, name: str, place: Path, rank_place: Path) -> Subject:
        model, optimizer = self._job.model, self._job.optimizer
        if name == OURS:
            strategy = everystep.Deltas(full_every=10_000, batch=1)
            extras = {"compressor": self._hook}
            return Everystep(place, model, optimizer, strategy, idle_s=2.0, extras=extras)
        if name == "pairs":
            return Pairs(rank_place, self._hook, self._rank)
        if name == NONE or self._rank:
            return Nothing()
        kind: Callable[..., Subject] = TorchSave if name == "full" else DcpAsyncSave
        return kind(place, model, optimizer)


def _stolen() -> tuple[int, int]:
    """CPU time that was stolen from this machine, and all of it, in ticks since its start."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return numbers[7], sum(numbers)


def work(directory: Path, rank: int, rounds: int, steps: int) -> None:
    """All of one rank; what was found is written to a file."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    rendezvous = f"file://{directory / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    one = Rank(directory, rank, steps)
    for number in range(rounds):
        other = list(OTHERS)[number % len(OTHERS)]
        order = [NONE, OURS, other]
        for name in order if number % 2 == 0 else reversed(order):
            one.loop(name, number)
    found = {
        "loops": {name: asdict(loops) for name, loops in one.loops.items()},
        "durable": one.durable,
        "stalls": one.stalls,
    }
    (directory / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure_job(setting: Setting) -> list[Figure]:
    """Start the ranks, wait, and put together what they found."""
    place = setting.directory / "job"
    place.mkdir()
    rounds, steps = (len(OTHERS), 5) if setting.quick else (2 * len(OTHERS), 10)
    command = [sys.executable, "-m", "benchmarks.delta_job", str(place)]
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
    return _figures(found, steps)


def _figures(found: list[dict[str, object]], steps: int) -> list[Figure]:
    each = [{name: Loops(**its) for name, its in one["loops"].items()} for one in found]  # type: ignore[attr-defined]
    head, first = f"small job, {RANKS} ranks, top-k: ", each[0]
    bare = first[NONE]
    figures = [
        median_of(head + "step without checkpoints", [w / steps for w in bare.walls], "s"),
        median_of(head + "stolen CPU time without", [100 * s for s in bare.stolen], "%"),
    ]
    for name, told in {OURS: OURS, **OTHERS}.items():
        loops = first[name]
        walls = zip(loops.rounds, loops.walls, strict=True)
        ratios = [bare.walls[number] / wall for number, wall in walls]
        reach = 0.97 if name == OURS else None
        used = [
            sum(rank[name].cpu[i] - rank[NONE].cpu[number] for rank in each) / steps
            for i, number in enumerate(loops.rounds)
        ]
        figures += [
            median_of(f"{head}{told}: throughput / without", ratios, "x", reach, at_least=True),
            median_of(f"{head}{told}: CPU time per step, beside none", used, "s"),
            median_of(f"{head}{told}: stolen CPU time", [100 * s for s in loops.stolen], "%"),
        ]
    durable = [share for one in found for share in one["durable"]]  # type: ignore[attr-defined]
    stalls = [1000 * stall for one in found for stall in one["stalls"]]  # type: ignore[attr-defined]
    return [
        *figures,
        median_of(f"{head}{OURS}: durable steps", durable, "share", reach=1.0, at_least=True),
        median_of(f"{head}{OURS}: stall by its own count", stalls, "ms"),
    ]


if __name__ == "__main__":
    work(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
