"""The best interval and batch in closed form: steps need not be whole, and there are no limits."""

from __future__ import annotations

import math
from typing import NamedTuple

from everystep.planning.intervals import Costs


class Relaxed(NamedTuple):
    """An optimum that knows neither whole steps nor limits; infinite: the more the better."""

    full_every_steps: float
    batch_steps: float


def first_order(costs: Costs) -> Relaxed:
    """The closed form, to first order in 1/M, of what `intervals.choose` finds by search.

    The waste has `v / (t F) + R F / (2 M)` in F (v: the visible cost of a full), so
    `F* = sqrt(2 v M / (t R))`: as in the rule of Young and Daly, with R / t for the rate at which
    work is lost. It has `c / (t B) + h (t - R) (1/2 + D / (W t)) B / M` in B (c: the visible cost
    of a write, h: the share of failures that take the host): a step more that is lost is one less
    to be replayed. So `B* = sqrt(c M / (h t (t - R) (1/2 + D / (W t))))`. How B changes the lag of
    fulls is left out.
    """
    t, replay_s = costs.step_s, costs.replay_s
    lag = 0.5 + costs.delta_bytes / (costs.write_bytes_per_s * t)
    return Relaxed(
        _root(2 * costs.full_stall_s, t * replay_s, costs.mtbf_s),
        _root(costs.batch_stall_s, costs.host_share * t * (t - replay_s) * lag, costs.mtbf_s),
    )


def _root(paid: float, per_failure: float, mtbf_s: float) -> float:
    if paid == 0:
        return 0.0
    return math.sqrt(paid * mtbf_s / per_failure) if per_failure > 0 else math.inf
