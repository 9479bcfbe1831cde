"""What each step cost and what became of it, put together from all who know a part of it."""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass

from everystep.types import StepStats

KEPT_STEPS = 10_000


@dataclass
class Entry:
    """One step."""

    step: int
    stall_s: float = 0.0
    snapshot_s: float = 0.0
    staging_s: float = 0.0
    bookkeeping_s: float = 0.0
    copied_bytes: int = 0
    written_bytes: int = 0
    staged: bool = False
    durable: bool = False
    staged_lag_steps: int = 0
    durable_lag_steps: int = 0
    error: str | None = None
    deviation: str | None = None


class StepLog:
    """The newest steps of this process. The training thread fills its entries; that a step is
    durable may be noted by any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._entries: collections.OrderedDict[int, Entry] = collections.OrderedDict()
        self._newest_durable = 0

    def begin(self, step: int, durable: int) -> Entry:
        """Add a step.

        Args:
            durable: the newest step that was durable before any of this log.
        """
        with self._guard:
            entry = Entry(step)
            self._newest_durable = max(self._newest_durable, durable)
            self._entries.pop(step, None)
            self._entries[step] = entry
            while len(self._entries) > KEPT_STEPS:
                self._entries.popitem(last=False)
            return entry

    def forget_progress(self) -> None:
        """Another step was restored: lags are counted anew."""
        with self._guard:
            self._newest_durable = 0

    def get(self, step: int) -> Entry | None:
        """The entry of a step."""
        with self._guard:
            return self._entries.get(step)

    def durable(self, step: int, written_bytes: int) -> None:
        """Note that a step is on the store."""
        with self._guard:
            self._newest_durable = max(self._newest_durable, step)
            entry = self._entries.get(step)
            if entry is not None:
                entry.staged = entry.durable = True
                entry.written_bytes = written_bytes
                entry.error = None

    def durable_lag(self, step: int) -> int:
        """How many steps the newest durable one is behind."""
        return step - self._newest_durable

    def all(self) -> tuple[StepStats, ...]:
        """The steps, oldest first."""
        with self._guard:
            return tuple(StepStats(**vars(entry)) for entry in self._entries.values())
