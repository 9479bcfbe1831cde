"""Waiting for a state with a deadline: the only place in the tests that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_S = 0.005


def until(condition: Callable[[], object], deadline_s: float, what: str) -> None:
    """Return as soon as `condition()` is true; `what` names the state that was waited for.

    The condition is asked at least once, and once more after the deadline has passed, so that a
    slow machine cannot turn a state that is there into a failure.

    Raises: TimeoutError, naming `what`, when the state is not reached within `deadline_s` seconds.
    """
    end_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() >= end_s:
            if condition():
                return
            raise TimeoutError(f"waited {deadline_s} s for: {what}")
        time.sleep(_PAUSE_S)
