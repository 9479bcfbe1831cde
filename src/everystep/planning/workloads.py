"""Workloads on which the choice of a strategy is compared with every fixed one, in simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from everystep.errors import UsageError
from everystep.planning.choosing import NAMES, Name, choose
from everystep.planning.facts import Facts
from everystep.planning.failures import Failure
from everystep.planning.strategies_sim import Settings, simulate

_GB, _MB = 10**9, 10**6
_LINK = {"offload_bytes_per_s": 25e9, "snapshot_bytes_per_s": 1.2e12}
_MEMORY = {"offload_bytes_per_s": 4e9, "snapshot_bytes_per_s": 6e9, "on_device": False}
_PLENTY_BYTES = 1 << 45


def _facts(state_gb: float, window_s: float, write_bytes_per_s: float, **more: object) -> Facts:
    figures: dict[str, object] = {
        "state_bytes": round(state_gb * _GB), "gradient_bytes": round(state_gb * _GB / 3),
        "window_s": window_s, "update_s": window_s / 20, "write_bytes_per_s": write_bytes_per_s,
        "mtbf_s": 1800.0, "restart_s": 5.0, **_LINK,
    }  # fmt: skip
    return Facts(**{**figures, **more})  # type: ignore[arg-type]


WORKLOADS: dict[str, tuple[Facts, Name]] = {
    "small state, fast disk, dense, short step": (_facts(0.5, 0.2, 2e9), "full"),
    "large state, fast disk, dense, long step": (_facts(26, 2.0, 5e9), "full"),
    "large state, slow link, dense, short step": (
        _facts(40, 0.6, 5e9, offload_bytes_per_s=10e9, snapshot_bytes_per_s=2e11), "full",
    ),
    "large state, slow disk, compressed, long step": (
        _facts(8, 8.0, 2e8, delta_bytes=30 * _MB, fold_s=0.4, host_share=1.0), "deltas",
    ),
    "small state, slow disk, compressed, short step": (
        _facts(0.5, 0.5, 3e7, delta_bytes=2 * _MB, fold_s=0.03, sync_s=0.01), "deltas",
    ),
    "small state in host memory, compressed, long step": (
        _facts(1.5, 3.0, 2e8, delta_bytes=6 * _MB, fold_s=0.1, mtbf_s=3600.0, **_MEMORY), "deltas",
    ),
    "small state in host memory, dense, short step": (_facts(0.4, 0.3, 5e8, **_MEMORY), "full"),
    "little host memory, dense, long step": (
        _facts(26, 4.0, 2e9, fold_s=1.0, host_memory_bytes=48 * _GB), "replica",
    ),
    "several ranks, slow disk, compressed, long step": (
        _facts(2, 4.0, 1e8, delta_bytes=8 * _MB, fold_s=0.2, world_size=8, mtbf_s=900.0), "deltas",
    ),
}  # fmt: skip
"""The facts, and the strategy that wastes the least."""


class Comparison(Struct, frozen=True, kw_only=True):
    """Wasted shares of the time of one workload."""

    chosen: Name
    chosen_share: float
    """Of the one that was chosen, at the settings that were."""
    best_share: dict[Name, float]
    """Of each at the settings that brute force finds."""

    @property
    def best(self) -> Name:
        """The one that wastes the least."""
        return min(NAMES, key=lambda name: self.best_share[name])


def compare(facts: Facts, failures: Sequence[Failure], duration_s: float) -> Comparison:
    """Simulate all strategies, which meet the same failures: so chance is no part of it.

    Args:
        facts: of the workload.
        failures: by time.
        duration_s: of training.
    """
    verdict = choose(facts, "full")
    found = verdict.predicted[verdict.strategy]
    settings = Settings(
        every=found.every or 1,
        batch=found.batch or 1,
        slots=found.memory_bytes // facts.state_bytes,
        records=found.buffer_records or 2,
    )
    best = {
        name: min((_wasted(facts, name, one, failures, duration_s) for one in tried), default=1.0)
        for name, tried in ((name, _settings(facts, name)) for name in NAMES)
    }
    return Comparison(
        chosen=verdict.strategy,
        chosen_share=_wasted(facts, verdict.strategy, settings, failures, duration_s),
        best_share=best,
    )


def _settings(facts: Facts, name: Name) -> Iterator[Settings]:
    """All that is worth a try, in steps that the wasted time hardly feels."""
    memory_bytes = facts.host_memory_bytes or _PLENTY_BYTES
    if name == "full":
        slots = min(3, memory_bytes // facts.state_bytes)
        yield from (Settings(every=1 << k, slots=slots) for k in range(8) if slots >= 2)
        return
    every = sorted({round(1.3**k) for k in range(28)})
    if name == "replica":
        room = (memory_bytes - facts.state_bytes) // facts.gradient_bytes
        yield from (Settings(every=n, records=room) for n in every if room >= 2)
        return
    room = (memory_bytes - 2 * facts.state_bytes) // facts.record_bytes
    for n in every:
        yield from (Settings(every=n, batch=b) for b in (1, 2, 4, 8) if 2 * b <= room and b <= n)


def _wasted(
    facts: Facts, name: Name, settings: Settings, failures: Sequence[Failure], duration_s: float
) -> float:
    try:
        return simulate(facts, name, settings, failures, duration_s=duration_s).wasted_share
    except UsageError:  # more than storage can take
        return 1.0
