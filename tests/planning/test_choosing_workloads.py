"""`auto` against the best fixed strategy, each at its best settings, in simulated wasted time.

All meet the same failures, so that what is left to chance is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from everystep.errors import UsageError
from everystep.planning.choosing import NAMES, Name, choose
from everystep.planning.facts import Facts
from everystep.planning.failures import poisson
from everystep.planning.strategies_sim import Settings, simulate

GB, MB = 10**9, 10**6
LINK = {"offload_bytes_per_s": 25e9, "snapshot_bytes_per_s": 1.2e12}
MEMORY = {"offload_bytes_per_s": 4e9, "snapshot_bytes_per_s": 6e9, "on_device": False}


def facts(state_gb: float, window_s: float, write_bytes_per_s: float, **more: object) -> Facts:
    figures: dict[str, object] = {
        "state_bytes": round(state_gb * GB), "gradient_bytes": round(state_gb * GB / 3),
        "window_s": window_s, "update_s": window_s / 20, "write_bytes_per_s": write_bytes_per_s,
        "mtbf_s": 1800.0, "restart_s": 5.0, **LINK,
    }  # fmt: skip
    return Facts(**{**figures, **more})  # type: ignore[arg-type]


WORKLOADS: dict[str, tuple[Facts, Name]] = {
    "small state, fast disk, dense, short step": (facts(0.5, 0.2, 2e9), "full"),
    "large state, fast disk, dense, long step": (facts(26, 2.0, 5e9), "full"),
    "large state, slow link, dense, short step": (
        facts(40, 0.6, 5e9, offload_bytes_per_s=10e9, snapshot_bytes_per_s=2e11), "full",
    ),
    "large state, slow disk, compressed, long step": (
        facts(8, 8.0, 2e8, delta_bytes=30 * MB, fold_s=0.4, host_share=1.0), "deltas",
    ),
    "small state, slow disk, compressed, short step": (
        facts(0.5, 0.5, 3e7, delta_bytes=2 * MB, fold_s=0.03, sync_s=0.01), "deltas",
    ),
    "small state in host memory, compressed, long step": (
        facts(1.5, 3.0, 2e8, delta_bytes=6 * MB, fold_s=0.1, mtbf_s=3600.0, **MEMORY), "deltas",
    ),
    "small state in host memory, dense, short step": (facts(0.4, 0.3, 5e8, **MEMORY), "full"),
    "little host memory, dense, long step": (
        facts(26, 4.0, 2e9, fold_s=1.0, host_memory_bytes=48 * GB), "replica",
    ),
    "several ranks, slow disk, compressed, long step": (
        facts(2, 4.0, 1e8, delta_bytes=8 * MB, fold_s=0.2, world_size=8, mtbf_s=900.0), "deltas",
    ),
}  # fmt: skip


def best_settings(one: Facts, name: Name, memory_bytes: int) -> Iterator[Settings]:
    """All that is worth a try, in steps that the wasted time hardly feels."""
    if name == "full":
        slots = min(3, memory_bytes // one.state_bytes)
        yield from (Settings(every=1 << k, slots=slots) for k in range(8) if slots >= 2)
        return
    every = sorted({round(1.3**k) for k in range(28)})
    if name == "replica":
        room = (memory_bytes - one.state_bytes) // one.record_bytes
        yield from (Settings(every=n, records=room) for n in every if room >= 2)
        return
    room = (memory_bytes - 2 * one.state_bytes) // one.record_bytes
    for n in every:
        yield from (Settings(every=n, batch=b) for b in (1, 2, 4, 8) if 2 * b <= room and b <= n)


def wasted(one: Facts, name: Name, settings: Settings) -> float:
    failures = poisson(np.random.default_rng(11), one.mtbf_s, one.host_share)
    try:
        spent = simulate(one, name, settings, failures, duration_s=150 * one.mtbf_s)
    except UsageError:  # more than storage can take
        return 1.0
    return spent.wasted_share


@pytest.mark.parametrize("workload", WORKLOADS)
def test_auto_is_near_the_best_fixed_strategy(workload: str) -> None:
    one, wins = WORKLOADS[workload]
    memory_bytes = one.host_memory_bytes or 1 << 45
    least = {
        name: min((wasted(one, name, s) for s in best_settings(one, name, memory_bytes)), default=1)
        for name in NAMES
    }
    assert min(least, key=lambda name: least[name]) == wins
    verdict = choose(one)
    found = verdict.predicted[verdict.strategy]
    assert found.every is not None
    mine = wasted(
        one,
        verdict.strategy,
        Settings(
            every=found.every,
            batch=found.batch or 1,
            slots=found.memory_bytes // one.state_bytes,
            records=found.buffer_records or 2,
        ),
    )
    assert mine <= 1.1 * min(least.values())
