"""A real small job: two ranks that train with top-k, with a delta of every step and in other ways.

Training goes on in short slices, every other one of them without checkpoints. A slice with a way
of taking them is compared with the mean of its two neighbours without, so that a machine that
becomes slower or faster meanwhile is slower or faster for both; of all such ratios the median
counts. All ways have slices of the same length, which begin in the same way. The virtual machine
that this may run on loses CPU time to its host when it writes: the share that was stolen stands
beside each.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist

import everystep
from benchmarks.common import Setting
from benchmarks.delta_sets import DENSITY
from benchmarks.figures import Figure, median_of
from benchmarks.loop import Everystep, Nothing, Subject
from benchmarks.peers import DcpAsyncSave, TorchSave
from benchmarks.small_job import NONE, RANKS, Job, Loops, measure_loop, run_ranks
from everystep.deltas.hooks import CompressionHook

BATCH = 4
"""Sequences of 64 tokens per rank and step. Only the other ways' figures may set it."""

OURS = "a delta of every step"
OTHERS = {
    "pairs": "torch.save of the pairs, fsync",
    "full": "torch.save of the full state, rank 0",
    "dcp": "DCP async_save of the full state, rank 0",
}
"""Other ways, each at every step."""

TURNS = (OURS, "pairs", "full", "dcp", OURS, "pairs", OURS, "pairs")
"""The order of slices, again and again. More go to those that differ least from none."""


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
        self._job = Job(BATCH)
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
            measure_loop(self._job, subject, self._steps, self.loops[name], number)
            if isinstance(subject, Everystep):
                stats = subject.ck.stats[-self._steps :]
                self.durable.append(sum(one.durable for one in stats) / len(stats))
                self.stalls += [one.stall_s for one in stats]
        finally:
            subject.close()
        dist.barrier()
        for path in (place, rank_place):
            if path.exists() and (path == rank_place or self._rank == 0):
                shutil.rmtree(path)

    def _subject(self, name: str, place: Path, rank_place: Path) -> Subject:
        model, optimizer = self._job.model, self._job.optimizer
        if name == OURS:
            # no full is due, so that a copy of the state in the agent would be for nothing
            strategy = everystep.Deltas(full_every=10_000, batch=1)
            extras = {"compressor": self._hook}
            return Everystep(place, model, optimizer, strategy, idle_s=2.0, extras=extras)
        if name == "pairs":
            return Pairs(rank_place, self._hook, self._rank)
        if name == NONE or self._rank:
            return Nothing()
        kind: Callable[..., Subject] = TorchSave if name == "full" else DcpAsyncSave
        return kind(place, model, optimizer)


def work(directory: Path, rank: int, slices: int, steps: int) -> None:
    """All of one rank; what was found is written to a file.

    Args:
        slices: so many with a way of taking checkpoints.
        steps: in each.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    rendezvous = f"file://{directory / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    one = Rank(directory, rank, steps)
    one.loop(NONE, 0)
    for number, name in enumerate(islice(cycle(TURNS), slices)):
        one.loop(name, 2 * number + 1)
        one.loop(NONE, 2 * number + 2)
    found = {
        "loops": {name: asdict(loops) for name, loops in one.loops.items()},
        "durable": one.durable,
        "stalls": one.stalls,
    }
    (directory / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    del (
        one
    )  # a DDP model that outlives its group may wait for gloo's threads for ever, and they for it
    dist.destroy_process_group()


def measure_job(setting: Setting) -> list[Figure]:
    """Start the ranks, wait, and put together what they found."""
    slices, steps = (4, 3) if setting.quick else (2 * len(TURNS), 8)
    found = run_ranks("benchmarks.delta_job", setting.directory / "job", slices, steps)
    return _figures(found, steps)


_ENOUGH = 3
"""Slices to judge by."""


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
        # one slice, as with --quick, differs from its neighbours by more than a few percent
        reach = 0.97 if name == OURS and len(loops.walls) >= _ENOUGH else None
        pairs = zip(loops.rounds, loops.walls, strict=True)
        ratios = [_beside(bare.walls, number) / wall for number, wall in pairs]
        used = [
            sum(one[name].cpu[i] - _beside(one[NONE].cpu, number) for one in each) / steps
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


def _beside(bare: Sequence[float], number: int) -> float:
    """The mean of the two slices without checkpoints around a slice.

    Args:
        bare: of those with even numbers, from 0 on.
        number: an odd one.
    """
    return (bare[number // 2] + bare[number // 2 + 1]) / 2


if __name__ == "__main__":
    work(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
