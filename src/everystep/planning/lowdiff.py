"""LowDiff's own model of wasted time, to compare (SC 2025, its section on the optimal
configuration).

It counts one merge per batch, not per step, and no write as hidden; `intervals` has ours.
"""

from __future__ import annotations

from typing import NamedTuple


class Optimum(NamedTuple):
    """Where the paper's form is least."""

    fulls_per_s: float
    batch_s: float


def wasted_share(
    state_bytes: int,
    write_bytes_per_s: float,
    load_s: float,
    merge_s: float,
    mtbf_s: float,
    *,
    fulls_per_s: float,
    batch_s: float,
) -> float:
    """The wasted share of time: `(1/M) [b/2 + R_F + (R_D/2) (1/(f b) - 1)] + f S / W`.

    Per failure, b/2 seconds of work are lost (half a batch), a full is loaded (R_F), and half of
    the 1/(f b) - 1 differentials between two fulls are merged, R_D seconds each. Per full, S / W
    seconds are paid, as if nothing of its write were hidden. It holds where a whole batch is merged
    into one differential, where every failure takes what was not written, where there is at least
    one batch per full (`f b <= 1`), and to first order in 1/M.

    Args:
        state_bytes: S.
        write_bytes_per_s: W.
        load_s: R_F.
        merge_s: R_D, of one batched differential.
        mtbf_s: M.
        fulls_per_s: f.
        batch_s: b, seconds of training per batch.
    """
    merges = 1 / (fulls_per_s * batch_s) - 1
    per_failure_s = batch_s / 2 + load_s + merge_s / 2 * merges
    return per_failure_s / mtbf_s + fulls_per_s * state_bytes / write_bytes_per_s


def optimum(state_bytes: int, write_bytes_per_s: float, merge_s: float, mtbf_s: float) -> Optimum:
    """`b* = (2 M S R_D / W)^(1/3)` and `f* = (R_D W^2 / (4 M^2 S^2))^(1/3)`.

    Both derivatives of `wasted_share` are zero where `b^2 = R_D / f` and `f^2 = R_D W / (2 M S b)`;
    these follow. There is at least one batch per full where `R_D^2 W <= 2 M S`.
    """
    write_s = state_bytes / write_bytes_per_s
    batch_s = (2 * mtbf_s * write_s * merge_s) ** (1 / 3)
    return Optimum((merge_s / (4 * mtbf_s**2 * write_s**2)) ** (1 / 3), batch_s)
