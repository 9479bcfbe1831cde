"""How often a replica is written to the store."""

from __future__ import annotations

import math

DISK_SHARE = 0.25
"""Of all time the store may be writing replicas: what else is there needs it, too."""


def persist_every(*, step_s: float, fold_s: float, write_s: float) -> int:
    """Steps between two writings of a replica.

    While it is written the replica stands still, and training goes on. The loss of a host costs
    the steps since the last one that is durable, i/2 + w/t of them on average for an interval of i
    steps of t seconds and a writing of w seconds; so the shortest interval is the best that neither
    keeps the store busy for more than `DISK_SHARE` of the time nor lets the replica fall behind: in
    the time i t - w that is left it must fold i steps of f seconds each.

    Args:
        step_s: a training step, in seconds.
        fold_s: folding one.
        write_s: writing the replica.
    """
    busy = write_s / (DISK_SHARE * step_s)
    spare_s = step_s - fold_s
    behind = 2 * write_s / spare_s if spare_s > 0 else math.inf  # half of the spare time is spared
    steps = max(1.0, busy, behind)
    return 1 << 20 if steps > 1 << 20 else math.ceil(steps)
