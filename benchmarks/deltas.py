"""Deltas at every step: what they cost training, how small they are, how fast they are folded.

    python -m benchmarks.deltas [--quick] [--json] [--dir DIR] [--runs N] [--only NAME,…]

The parts, each of which can be run alone:

- `emulated`: 124 M fp32 parameters, fused AdamW, 1 % top-k. A step takes 0.5 s: a wait in which the
  host is idle, as beside an accelerator, and then a real update. The gradients were compressed
  beforehand by the real hook, as the accelerator would have done it; what the hook knows is reused.
- `topk`: the exact selection of 1 % of 124 M elements, beside `torch.topk`.
- `job`: two ranks that train with top-k and error feedback on this CPU, beside a `torch.save` of
  the pairs of index and value, one of the full state, and DCP's `async_save`.
- `recovery`: a full state and 100 deltas of 124 M parameters, beside the same steps done one after
  another on dense gradients by `optimizer.step()`; equal bit for bit, or it fails.
- `storage`: a run of 1,000 steps on the disk.
- `choice`: the waste of the cost model's choice, beside the best of a brute-force search in the
  simulation of failures, with rates measured here.

All ratios are of one run. `--quick` takes a fifth of the state, and fewer steps. What it does not
show: a real accelerator, on which indices and values are copied to the host; selection there; other
disks; many ranks. CPU time is a difference of two loops, and so is as noisy as they.
"""

from __future__ import annotations

import torch

from benchmarks.command import Asked, Parts
from benchmarks.common import Setting, timed
from benchmarks.delta_choice import measure_choice
from benchmarks.delta_emulated import measure_emulated
from benchmarks.delta_job import measure_job
from benchmarks.delta_recovery import measure_recovery
from benchmarks.delta_sets import DENSITY
from benchmarks.delta_storage import measure_storage
from benchmarks.figures import Figure, median_of
from everystep.deltas.compressors import kept_of
from everystep.deltas.selection import largest


def measure_topk(setting: Setting) -> list[Figure]:
    """The same selection by us and by torch, in turns."""
    n = 124_000_000 // (5 if setting.quick else 1)
    values, k = torch.randn(n), kept_of(n, DENSITY)
    ours, theirs = [], []
    mine = largest(values, k)
    for _ in range(3):
        ours.append(timed(lambda: largest(values, k)))
        theirs.append(timed(lambda: torch.topk(values.abs(), k, sorted=False)))
    _check_same(values, mine, torch.topk(values.abs(), k, sorted=False).indices)
    ratios = [slow / fast for slow, fast in zip(theirs, ours, strict=True)]
    head = f"top-k, {DENSITY:.0%} of {n / 1e6:.0f} M: "
    return [
        median_of(head + "ours", ours, "s"),
        median_of(head + "torch.topk", theirs, "s"),
        median_of(head + "torch.topk / ours", ratios, "x", reach=5.0, at_least=True),
    ]


def _check_same(values: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Compare two selections; where magnitudes tie at the edge, torch may choose any of them.

    Raises:
        ValueError: they differ in more than that.
    """
    theirs = theirs.sort().values
    found = [values[chosen].abs() for chosen in (mine, theirs)]
    if not torch.equal(found[0].sort().values, found[1].sort().values):
        raise ValueError("the magnitudes that were selected differ")
    least = found[0].min()
    if not torch.equal(mine[found[0] > least], theirs[found[1] > least]):
        raise ValueError("the indices that were selected differ")


PARTS: Parts = {
    "emulated": measure_emulated,
    "topk": measure_topk,
    "job": measure_job,
    "recovery": measure_recovery,
    "storage": measure_storage,
    "choice": measure_choice,
}
"""By name, in the order in which they are run."""


if __name__ == "__main__":
    Asked.parse(__doc__ or "", PARTS).run()
