"""The step that the agents of all ranks make durable when training has stopped."""

from __future__ import annotations

import threading
import time

from everystep.store.newest import Newest

PATIENCE_S = 20.0
"""For so long an agent waits for word from those of other ranks."""

ASK_AGAIN_S = 0.05
_ASK_LATER_S = 0.5
"""Between two looks for it, before and after that."""


class Common:
    """What one rank's agent knows of it. All methods but `look` are called with `guard` held.

    Args:
        newest: what ranks tell each other.
    """

    def __init__(self, newest: Newest, guard: threading.Condition) -> None:
        self._newest, self._guard = newest, guard
        self.step: int | None = None
        """Once all ranks have been heard."""
        self.safe = 0
        """Every rank has handed over its record of this step."""
        self._hurry = self._abandoned = False
        self.has_looked = False
        """Whether others have been told how far this rank can go, since training has stopped."""
        self._patience_ends_s = self._asked_s = 0.0

    def drain(self, *, on: bool, is_alone: bool) -> None:
        """Training has stopped, or (`on=False`) may go on.

        Args:
            is_alone: it has ended.
        """
        self._abandoned = self._abandoned or is_alone
        if on and not self._hurry:
            self._patience_ends_s = time.monotonic() + PATIENCE_S
            self.has_looked = False
        if not on and not self._abandoned:
            self._newest.withdraw()
            self.step = None
        self._hurry = on

    @property
    def limit(self) -> int:
        """The step beyond which must not be folded: some rank may not get there."""
        return self.safe if self.step is None else self.step

    def is_beyond(self, step: int) -> bool:
        """Whether a step is of no use, since other ranks have not come so far and never will."""
        return self._abandoned and self.step is not None and step > self.step

    @property
    def is_open(self) -> bool:
        """Whether the ranks' agents have yet to choose a step, or to hear that all have."""
        return self._hurry and (
            self.step is None or not (self._abandoned or self._newest.all_agreed)
        )

    @property
    def waits(self) -> bool:
        """Whether nothing should be decided before the others have been heard."""
        return self.is_open and time.monotonic() < self._patience_ends_s

    def is_due(self) -> bool:
        """Whether to look again."""
        pause_s = ASK_AGAIN_S if self.waits else _ASK_LATER_S
        return time.monotonic() >= self._asked_s + pause_s

    def put_off(self) -> None:
        """Look later."""
        self._asked_s = time.monotonic()

    def look(self, reached: int, at_least: int) -> None:
        """Tell the other ranks' agents how far this one can go, and hear from them. Call it without
        `guard`.

        Args:
            at_least: there is no way back from this step.
        """
        self._newest.tell(reached)
        step = self._newest.common()
        with self._guard:
            self.put_off()
            self.has_looked = True
            if step is not None and self.step is None and self._hurry:
                self.step = max(step, at_least)

    def forget_earlier(self) -> None:
        """Remove what this rank has told before."""
        self._newest.forget_earlier()

    def close(self) -> None:
        """Nothing that this rank has told holds any more, unless all have agreed on it, or it is
        that it holds nothing."""
        if not self._newest.has_nothing and (self.step is None or self._newest.all_agreed):
            self._newest.withdraw()
