"""The cost model's choice of (f, b), beside the best that brute force finds in a simulation."""

from __future__ import annotations

import os
import shutil
import statistics
from itertools import product
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from benchmarks.common import Setting, bytes_of, page_aligned, plain_write, settle, timed
from benchmarks.delta_recovery import SHARED, chain_to, record
from benchmarks.delta_sets import DENSITY
from benchmarks.figures import Figure, median_of
from everystep.planning.failures import poisson, simulate
from everystep.planning.intervals import Costs, broken, choose
from everystep.recovery import reach
from everystep.recovery.part import read_part
from everystep.store.run import Run

ELEMENTS = 124_000_000
STEP_S = 0.5
MTBFS_S = {"10 min": 600.0, "1 h": 3_600.0, "10 h": 36_000.0}
FULLS = (4, 6, 8, 12, 16, 20, 24, 30, 40, 60, 90, 130, 200, 300, 500, 900, 1600, 3000)
BATCHES = (1, 2, 3, 4, 6, 8, 14, 24, 40, 80)
TRIED_STEPS = 10
"""Deltas that are folded to see what a step takes, where no other part has measured it."""

_STALL_S = 0.001
"""Of a delta, of a write: about what the part `emulated` shows."""


def measure_choice(setting: Setting) -> list[Figure]:
    """All of this part."""
    settle(setting.settle_s)
    replay_s, load_s = _recovery(setting)
    costs = Costs(
        step_s=STEP_S,
        state_bytes=12 * ELEMENTS,
        delta_bytes=int(5.05 * DENSITY * ELEMENTS),
        write_bytes_per_s=_write_rate(setting),
        replay_s=replay_s,
        mtbf_s=1.0,
        load_s=load_s,
        sync_s=_sync_s(setting.directory / "small"),
        batch_stall_s=_STALL_S,
        record_stall_s=_STALL_S,
        full_stall_s=20 * _STALL_S,
    )
    figures = [
        median_of("choice: S, the state", [costs.state_bytes / 1e9], "GB"),
        median_of("choice: W, the rate of writing", [costs.write_bytes_per_s / 1e9], "GB/s"),
        median_of("choice: a write's fsync", [1000 * costs.sync_s], "ms"),
        median_of("choice: R, the replay of a step", [1000 * costs.replay_s], "ms"),
        median_of("choice: a full is read", [costs.load_s], "s"),
    ]
    for name, mtbf_s in MTBFS_S.items():
        figures += _against_brute_force(name, replace(costs, mtbf_s=mtbf_s))
    return figures


def _against_brute_force(name: str, costs: Costs) -> list[Figure]:
    """The same failures strike every choice, so that chance is no part of the comparison."""
    duration_s = 400 * costs.mtbf_s
    draw = poisson(np.random.default_rng(7), costs.mtbf_s, costs.host_share)
    failures = [next(draw) for _ in range(600)]

    def wasted(full_every: int, batch: int) -> float:
        spent = simulate(costs, full_every, batch, failures, duration_s=duration_s)
        return spent.wasted_share

    found = choose(costs)
    best = min(
        wasted(f, b)
        for f, b in product(FULLS, BATCHES)
        if b <= f and broken(costs, None, f, b) is None
    )
    mine = wasted(found.full_every, found.batch)
    head = f"choice, a failure every {name}: "
    return [
        median_of(head + "f", [found.full_every], "steps"),
        median_of(head + "b", [found.batch], "steps"),
        median_of(head + "wasted time", [100 * mine], "%"),
        median_of(head + "wasted / least by brute force", [mine / best], "x", reach=1.05),
    ]


def _recovery(setting: Setting) -> tuple[float, float]:
    """R, and the time that a full takes to be read: as another part found them, or of a few steps
    of a fifth of the state, times five."""
    if SHARED.replay_s is not None and SHARED.load_s is not None:
        return SHARED.replay_s, SHARED.load_s
    place = setting.directory / "few"
    record(place, True, TRIED_STEPS)
    run = Run.open(place)
    chain = chain_to(run, 1 + TRIED_STEPS)
    state = read_part(run, chain.full, 0)
    scale = 12 * ELEMENTS / bytes_of(list(state.tensors.values()))
    load_s = timed(lambda: read_part(run, chain.full, 0))
    replay_s = (timed(lambda: reach.read_chain(run, chain, 0)) - load_s) / TRIED_STEPS
    shutil.rmtree(place)
    return scale * replay_s, scale * load_s


def _write_rate(setting: Setting) -> float:
    data = page_aligned(12 * ELEMENTS // (5 if setting.quick else 1))
    path = setting.directory / "plain"
    took_s = plain_write(path, data, direct=True)
    path.unlink()
    return len(data) / took_s


def _sync_s(path: Path) -> float:
    """An append of 4 KB, and its fsync."""
    with path.open("wb", buffering=0) as file:

        def append() -> None:
            file.write(bytes(4096))
            os.fsync(file.fileno())

        runs = [timed(append) for _ in range(20)]
    path.unlink()
    return statistics.median(runs)
