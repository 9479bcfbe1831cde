"""`auto` against the best fixed strategy, each at its best settings, in simulated wasted time."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest

from everystep.planning.failures import poisson
from everystep.planning.workloads import WORKLOADS, compare


@pytest.mark.parametrize("workload", WORKLOADS)
def test_auto_is_near_the_best_fixed_strategy(workload: str) -> None:
    facts, wins = WORKLOADS[workload]
    duration_s = 150 * facts.mtbf_s
    draw = poisson(np.random.default_rng(11), facts.mtbf_s, facts.host_share)
    failures = list(takewhile(lambda failure: failure.at_s < duration_s, draw))
    found = compare(facts, failures, duration_s)
    assert found.best == wins
    assert found.chosen_share <= 1.1 * found.best_share[wins]
