"""What a run with deltas has measured of itself: the figures of the cost model, and which steps can
be had."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import Literal

from everystep.engine.meter import Cost
from everystep.planning.intervals import Costs
from everystep.planning.persisting import persist_every

_REPLAY_BYTES_PER_S = 4e9
"""Of the state, until a replay was measured."""

_ENOUGH_STEPS = 8
_FIRST_PERSIST_EVERY = 16
_KEPT = 64


class Pace:
    """The newest figures."""

    def __init__(self) -> None:
        self.steps: collections.deque[Cost] = collections.deque(maxlen=_KEPT)
        self.fulls: collections.deque[tuple[int, float]] = collections.deque(maxlen=8)
        """(bytes, seconds) of writing one."""
        self.deltas: collections.deque[int] = collections.deque(maxlen=_KEPT)
        """Bytes of one."""
        self.writes: collections.deque[tuple[int, float]] = collections.deque(maxlen=_KEPT)
        """(bytes, seconds) of appending to the log, fsync included."""
        self.replays: collections.deque[tuple[int, float]] = collections.deque(maxlen=8)
        """(steps, seconds) of replaying a stretch."""

    @property
    def state_bytes(self) -> int:
        """Of a full checkpoint; 0: none was written yet."""
        return self.fulls[-1][0] if self.fulls else 0

    def costs(self, mtbf_s: float) -> Costs | None:
        """The figures of the cost model; None: too little is known."""
        steps, deltas, writes = list(self.steps)[1:], list(self.deltas), list(self.writes)
        if len(steps) < _ENOUGH_STEPS or not self.fulls or not deltas or not writes:
            return None
        durations = [cost.ended_s - cost.begun_s - cost.stall_s for cost in steps]
        step_s = max(1e-6, statistics.median(durations))
        nbytes = statistics.median(n for n, _ in self.fulls)
        rate, sync_s = _two_sizes(list(self.fulls), writes)
        # what comes once, as reading the full does, weighs least in the longest
        length, took_s = max(self.replays, default=(1, nbytes / _REPLAY_BYTES_PER_S))
        stalls = [cost.stall_s for cost in steps if not cost.due]
        full_stalls = [cost.stall_s for cost in steps if cost.due]
        record_s = statistics.median(stalls) if stalls else 0.0
        full_s = statistics.median(full_stalls) if full_stalls else record_s
        return Costs(
            step_s=step_s,
            state_bytes=max(1, int(nbytes)),
            delta_bytes=max(1, int(statistics.median(deltas))),
            write_bytes_per_s=rate,
            # to lose steps is cheaper than to replay them where that takes longer than they took;
            # the longest batches would be best, and deltas would protect from nothing
            replay_s=min(took_s / length, step_s),
            mtbf_s=mtbf_s,
            load_s=nbytes / rate,
            sync_s=sync_s,
            record_stall_s=record_s,
            full_stall_s=max(0.0, full_s - record_s),
        )


def _two_sizes(
    large: Sequence[tuple[int, float]], small: Sequence[tuple[int, float]]
) -> tuple[float, float]:
    """What a byte and what a write costs, from the medians of writes of two sizes: the line
    `seconds = sync_s + bytes / rate` through both.

    Args:
        large: (bytes, seconds) of full checkpoints.
        small: of appends.

    Returns:
        The rate in bytes per second, and sync_s in seconds.
    """
    (full, full_s), (append, append_s) = (
        (statistics.median(n for n, _ in writes), statistics.median(s for _, s in writes))
        for writes in (large, small)
    )
    if full > append and full_s > append_s:
        rate = (full - append) / (full_s - append_s)
    else:  # appends as long as fulls: no line
        rate = max(full, append) / max(full_s, append_s)
    return rate, max(0.0, append_s - append / rate)


class Chain:
    """Which logged steps can be had from a full that is durable too.

    Args:
        base: the step whose state is on the store; 0: none.
    """

    def __init__(self, base: int) -> None:
        self.base = base or None
        self._bases = [base] if base else []
        self._fulls = [base] if base else []
        self.newest_logged = 0
        """The newest step whose delta is durable."""
        self._logged: collections.deque[tuple[int, int]] = collections.deque()

    def begin(self, step: int) -> None:
        """The chain goes on from the state after this step, once that is stored."""
        self.base = step
        self._bases = [*self._bases[-_KEPT:], step]

    def stored(self, step: int) -> None:
        """The full of a step is durable."""
        self._fulls = [*self._fulls[-_KEPT:], step]

    def logged(self, step: int, nbytes: int) -> None:
        """The delta of a step is durable."""
        self._logged.append((step, nbytes))
        self.newest_logged = step

    def restorable(self) -> list[tuple[int, int]]:
        """Steps, and the bytes of their deltas, that can be had and were not told yet."""
        found = []
        fulls, bases = self._fulls, self._bases
        newest = max(fulls, default=0)
        for _ in range(len(self._logged)):
            step, nbytes = self._logged.popleft()
            base = max((base for base in bases if base < step), default=None)
            if base is not None and any(base <= full <= step for full in fulls):
                found.append((step, nbytes))
            elif step > newest:  # its full may yet come
                self._logged.append((step, nbytes))
        return found


class Persisting:
    """How often a replica is written.

    Args:
        every: steps between two; `auto`: as the cost model says.
        mtbf_s: the mean time between failures; None: not known.
        alike: several ranks choose on their own, and must choose alike.
    """

    def __init__(
        self, every: int | Literal["auto"], mtbf_s: float | None, *, alike: bool = False
    ) -> None:
        self._auto, self._alike = every == "auto", alike
        self.every = _FIRST_PERSIST_EVERY if every == "auto" else int(every)
        self._mtbf_s = mtbf_s
        self.steps: collections.deque[Cost] = collections.deque(maxlen=_KEPT)
        self.folds: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self.writes: collections.deque[float] = collections.deque(maxlen=8)
        """Seconds."""

    def choose(self) -> int:
        """Steps between two writings from now on."""
        steps = list(self.steps)[1:]
        if not self._auto or len(steps) < _ENOUGH_STEPS or not self.writes:
            return self.every
        step_s = statistics.median(cost.ended_s - cost.begun_s - cost.stall_s for cost in steps)
        fold_s = statistics.median(self.folds) if self.folds else 0.0
        write_s = statistics.median(self.writes)
        wanted = persist_every(step_s=step_s, fold_s=fold_s, write_s=write_s)
        if self._alike:  # each of them divides the others
            wanted = 1 << (wanted - 1).bit_length()
        if not self.every / 1.5 <= wanted <= self.every * 1.5:
            self.every = wanted
        return self.every
