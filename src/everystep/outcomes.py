"""What to do when a step could not be stored, as the user has chosen."""

from __future__ import annotations

import logging
from typing import Literal

from everystep.errors import ReplicasDiffer, StoreError, TooManyFailedSteps, UsageError
from everystep.types import StepRef

_log = logging.getLogger("everystep")


class Outcomes:
    """Says so, counts, and raises where that is wanted. For the training thread."""

    def __init__(self, on_error: Literal["report", "raise"], most_failed: int | None) -> None:
        if on_error not in ("report", "raise"):
            raise UsageError(f"on_error={on_error!r}: neither 'report' nor 'raise'")
        self._raises, self._most_failed = on_error == "raise", most_failed
        self._failed_in_a_row = 0

    def stored(self) -> None:
        """A step is durable."""
        self._failed_in_a_row = 0

    def failed(self, ref: StepRef, problem: StoreError) -> None:
        """A step could not be stored.

        Raises:
            StoreError: this one, where the user wants that.
            TooManyFailedSteps: the user's limit is reached.
        """
        self._failed_in_a_row += 1
        _log.error(
            "step %s is not stored: %s; training goes on, and the next step tries again "
            "(%d in a row failed)", ref, problem.headline(), self._failed_in_a_row,
        )  # fmt: skip
        if self._raises:
            raise problem
        limit = self._most_failed
        if limit is not None and self._failed_in_a_row >= limit:
            raise TooManyFailedSteps(
                f"{self._failed_in_a_row} steps in a row could not be stored",
                step=ref,
                hint=problem.hint,
            ) from problem

    def diverged(self, ref: StepRef) -> None:
        """Ranks hold different bits of what they must hold alike.

        Raises:
            ReplicasDiffer: where the user wants that.
        """
        problem = ReplicasDiffer(
            "ranks hold different bits of parameters or slots that must be alike; "
            "from now on every rank stores its own",
            step=ref,
            hint="docs/exactness.md says which operations of torch are not bit-stable",
        )
        _log.error("%s", problem.headline())
        if self._raises:
            raise problem
