"""`auto` in tests: its rounds come at once, and choose what a test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from everystep import automatic, observed
from everystep.automatic import Automatic
from everystep.planning.choosing import Name, Verdict
from everystep.planning.facts import Facts
from everystep.strategies import Full

IN_TURN: dict[Name, Name] = {"full": "deltas", "deltas": "replica", "replica": "full"}


def in_turn(facts: Facts, now: Name) -> Verdict:
    """In the place of `choose`: another one in each round."""
    return Verdict(strategy=IN_TURN[now], reason=f"{IN_TURN[now]}: a test wants it", predicted={})


def at_once(
    patch: pytest.MonkeyPatch, choose: Callable[[Facts, Name], Verdict], *, lead: int = 1
) -> None:
    """Choose after every few steps, in this way, and change so many steps later at least, where
    there are other ranks."""
    no_step_left_out(patch)
    patch.setattr(automatic, "choose", choose)
    patch.setattr(observed, "ENOUGH_STEPS", 2)
    for name, value in {
        "FIRST_S": 0.0, "AGAIN_S": 0.0, "ALIKE": 1, "LOOK_S": 0.01, "LEAD_S": 0.0,
        "LEAD_STEPS": lead,
    }.items():  # fmt: skip
        patch.setattr(automatic, name, value)


def after_steps(patch: pytest.MonkeyPatch, plan: dict[int, Name]) -> None:
    """Change after these steps."""

    def due(self: Automatic, session: Any, done: int) -> Any:
        if done not in plan:
            return None
        session.flush()
        return automatic.STRATEGIES[plan[done]]

    no_step_left_out(patch)
    patch.setattr(Automatic, "due", due)


def no_step_left_out(patch: pytest.MonkeyPatch) -> None:
    """Also on a machine that others keep busy, where `Full()` takes a checkpoint now and then."""
    patch.setitem(automatic.STRATEGIES, "full", Full(every=1, policy="block"))
