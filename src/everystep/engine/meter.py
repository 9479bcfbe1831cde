"""What a step cost: clocks, rates and spans, from which statistics are made."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from everystep.planning.hiding import Pace, deviation


class Lane(NamedTuple):
    """A stretch of time in which one thing was going on, on the host's monotonic clock."""

    name: str
    start_s: float
    stop_s: float


@dataclass
class Cost:
    """One step, as far as the training process knows. Times are in seconds."""

    step: int
    begun_s: float
    """When the step began, on the host's monotonic clock."""
    ended_s: float = 0.0
    snapshot_s: float = 0.0
    """Copying what was about to be overwritten."""
    staging_s: float = 0.0
    """Waiting for room in staging memory."""
    bookkeeping_s: float = 0.0
    """All else that the training thread was made to do."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    state_bytes: int = 0
    copied_bytes: int = 0
    offload_bytes: int = 0
    offload_s: float = 0.0
    """How long the thread beside training copied that many bytes."""
    snapshot_bytes: int = 0
    staged_at_s: float | None = None
    every: int = 1
    due: bool = True
    """A checkpoint of this step was to be taken."""
    owed: bool = False
    """It was, whatever its number: the log goes on from it only."""
    logged: bool = False
    """A delta of it was to be handed over."""
    logged_bytes: int = 0
    logged_at_s: float | None = None
    """When it was."""
    error: str | None = None
    deviation: str | None = None
    lanes: list[Lane] = field(default_factory=list)

    @property
    def stall_s(self) -> float:
        """By how much the library lengthened the step."""
        return self.snapshot_s + self.staging_s + self.bookkeeping_s

    @property
    def over(self) -> bool:
        """Whether nothing more will become known of it."""
        if not (self.due or self.logged):
            return True
        return self.left_at_s is not None or self.error is not None

    @property
    def left_at_s(self) -> float | None:
        """When all that a restore needs of it had left this process; None: it has not."""
        return self.staged_at_s if self.due else self.logged_at_s

    @property
    def offload_bytes_per_s(self) -> float | None:
        """The rate beside training; None: nothing was copied so."""
        return self.offload_bytes / self.offload_s if self.offload_s > 0 else None

    @property
    def snapshot_bytes_per_s(self) -> float | None:
        """The rate while training waited; None: nothing was copied so."""
        enough = self.snapshot_bytes > 0 and self.snapshot_s > 0
        return self.snapshot_bytes / self.snapshot_s if enough else None

    @contextmanager
    def stalled(self, cause: str) -> Iterator[None]:
        """Count the time that the training thread spends inside.

        Args:
            cause: `snapshot`, `staging` or `bookkeeping`.
        """
        started_s = time.monotonic()
        try:
            yield
        finally:
            ended_s = time.monotonic()
            name = f"{cause}_s"
            setattr(self, name, getattr(self, name) + ended_s - started_s)
            self.lanes.append(Lane("stall", started_s, ended_s))
            if cause == "snapshot":
                self.lanes.append(Lane("snapshot", started_s, ended_s))


_REMEMBERED = 9


class Plan:
    """What the next step is expected to be like: the medians of the newest ones."""

    def __init__(self) -> None:
        self._seen: collections.deque[Cost] = collections.deque(maxlen=_REMEMBERED)

    def compare(self, cost: Cost) -> str | None:
        """Where a step is more than 20 % away from what was expected, in words; and expect the
        next one accordingly. The first steps are compared with nothing."""
        told = None
        if len(self._seen) == _REMEMBERED:
            told = deviation(_medians(self._seen), _pace(cost))
        self._seen.append(cost)
        return told


def _medians(costs: Iterable[Cost]) -> Pace:
    paces = [_pace(cost) for cost in costs]
    medians = {}
    for name in Pace.__struct_fields__:
        known = [value for pace in paces if (value := getattr(pace, name)) is not None]
        medians[name] = statistics.median(known) if known else None
    return Pace(**medians)


def _pace(cost: Cost) -> Pace:
    return Pace(
        forward_s=cost.forward_s or None,
        backward_s=cost.backward_s or None,
        update_s=cost.update_s or None,
        snapshot_s=cost.snapshot_s,
        staging_s=cost.staging_s,
        offload_bytes_per_s=cost.offload_bytes_per_s,
    )
