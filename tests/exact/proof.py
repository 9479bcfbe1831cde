"""What a case must show, in one process: stored, lost, restored, and trained on, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystep import Full
from exact.matrix import STORED, TRAINED, Case, depends_on_neighbours, inexact, refused
from exact.scenes import build
from states import assert_same_state
from trips import BLOCKING


def prove(case: Case, run: Path, strategy: Full = BLOCKING) -> None:
    """Prove that a restored run goes on as one that was never interrupted, or, where torch itself
    does not, that it does not, and that the restored state is exact all the same.

    The uninterrupted run has no checkpointer: to store must change nothing.
    """
    reference = build(*case, seed=1).steps(0, STORED)
    at_stored = reference.state()
    at_end = reference.steps(STORED, TRAINED).state()

    first = build(*case, seed=1)
    with first.checkpointer(run, strategy=strategy) as ck:
        assert ck.restore() == 0
        for t in range(STORED):
            first.step(t)
            ck.step()
    stored = first.state()

    second = build(*case, seed=2)
    with second.checkpointer(run, strategy=strategy) as ck:
        assert ck.restore() == STORED
    assert_same_state(stored, second.state())
    second.steps(STORED, TRAINED)
    if inexact(case):
        assert depends_on_neighbours(first), "torch has become exact here: see docs/exactness.md"
    else:
        assert_same_state(at_stored, stored)
        assert_same_state(at_end, second.state())


def prove_refused(case: Case) -> None:
    """Prove that a combination cannot be trained, and that this is not the library's doing."""
    with pytest.raises(Exception, match=refused(case)):
        build(*case, seed=1).steps(0, 1)
