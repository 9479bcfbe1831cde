"""A delta of every step beside an emulated accelerator: the stall, the CPU time, and the bytes."""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass

import everystep
from benchmarks.common import Setting, bytes_of, settle, tensors_of, timed
from benchmarks.delta_sets import DENSITY, Prepared
from benchmarks.figures import Figure, median_of
from benchmarks.loop import Everystep, Nothing, Subject, Taken, drive
from everystep.store.run import Run
from everystep.types import StepStats

STEP_S = 0.5
"""The accelerator's step: the wait, and the update."""

BATCHES = (8, 1)
NO_MORE_FULLS = 1000


@dataclass(frozen=True)
class Ours:
    """A loop with deltas."""

    taken: Taken
    stats: list[StepStats]
    records: list[int]
    """Bytes of each in the log."""


def measure_emulated(setting: Setting) -> list[Figure]:
    """All of this part."""
    prepared = Prepared(setting.quick, fused=True)
    steps = max(2 * max(BATCHES), setting.steps)
    wait_s = max(0.0, STEP_S - statistics.median(_update_s(prepared) for _ in range(5)))
    bare = drive(
        prepared.optimizer, wait_s, Nothing, steps, at_least_before=2, backward=prepared.put_next
    )[0]
    head = f"emulated, step {STEP_S:g} s: "
    figures = [
        median_of(head + "step without checkpoints", bare.walls, "s"),
        median_of(head + "its update", bare.updates, "s"),
    ]
    records: list[int] = []
    for batch in BATCHES:
        ours = _ours(setting, prepared, wait_s, steps, batch)
        records = ours.records
        figures += _beside(f"{head}batch {batch}: ", ours, bare)
    return [*figures, *_bytes(prepared, records)]


def _update_s(prepared: Prepared) -> float:
    prepared.put_next()
    return timed(prepared.optimizer.step)


def _ours(setting: Setting, prepared: Prepared, wait_s: float, steps: int, batch: int) -> Ours:
    run = setting.directory / "run"
    settle(setting.settle_s)
    made: list[Everystep] = []

    def make() -> Subject:
        # what an accelerator does is not done again on the host
        strategy = everystep.Deltas(full_every=NO_MORE_FULLS, batch=batch)
        made.append(Everystep(run, prepared.model, prepared.optimizer, strategy, idle_s=2.0))
        return made[0]

    taken, _ = drive(
        prepared.optimizer, wait_s, make, steps, clean=True, backward=prepared.put_next
    )
    opened = Run.open(run)
    records = [
        found.payload_offset - found.offset + found.nbytes
        for segment in opened.segments(opened.listing())
        for found in segment.records
    ]
    shutil.rmtree(run)
    return Ours(taken, list(made[0].ck.stats[-steps:]), records[-steps:])


def _beside(head: str, ours: Ours, bare: Taken) -> list[Figure]:
    taken, stats = ours.taken, ours.stats
    shares = [100 * stall / STEP_S for stall in taken.stalls]
    added = [wall - bare.wall_s for wall in taken.walls]
    cpu_s = (taken.cpu_s - bare.cpu_s) / len(stats)
    return [
        median_of(head + "stall", [1000 * stall for stall in taken.stalls], "ms"),
        median_of(head + "stall by the clock around it", shares, "% of step", reach=0.5),
        median_of(head + "longest stall", [1000 * max(taken.stalls)], "ms"),
        median_of(head + "stall by its own count", [1000 * s.stall_s for s in stats], "ms"),
        median_of(head + "step beside none", [1000 * wall for wall in added], "ms"),
        median_of(head + "CPU time per step", [cpu_s], "s"),
        median_of(head + "newest durable step", [s.durable_lag_steps for s in stats], "steps ago"),
        median_of(head + "durable steps", [sum(s.durable for s in stats) / len(stats)], "share"),
    ]


def _bytes(prepared: Prepared, records: list[int]) -> list[Figure]:
    pairs, dense = prepared.pairs_bytes(), 4 * prepared.elements
    full = bytes_of(tensors_of(prepared.model, prepared.optimizer))
    head = f"bytes per step, top-k {DENSITY:.0%}: "
    each = [nbytes / prepared.kept for nbytes in records]
    return [
        median_of(head + "a record", [nbytes / 1e6 for nbytes in records], "MB"),
        median_of(head + "a record, per kept element", each, "bytes", reach=5.2),
        median_of(head + "torch.save of int32 indices and values", [pairs / 1e6], "MB"),
        median_of(head + "these / a record", [pairs / n for n in records], "x"),
        median_of(head + "dense gradients / a record", [dense / n for n in records], "x"),
        median_of(head + "a full state / a record", [full / n for n in records], "x"),
    ]
