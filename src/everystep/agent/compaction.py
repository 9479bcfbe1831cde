"""Compaction: new full checkpoints that the agent makes from the log, and training never pays for.

What the log holds is read back and folded as soon as it is durable, so that its memory in the
trainer is free by then, and training waits for none of this. A state that cannot be folded on is no
loss: the log has every step.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.image import Image
from everystep.agent.keeper import Base, Keeper
from everystep.agent.rings import Queued
from everystep.agent.slots import Slots
from everystep.errors import EverystepError, StoreFailed
from everystep.store import logformat as lf
from everystep.store import segments
from everystep.store.backend import Backend
from everystep.store.log import Appended
from everystep.types import StepRef

if TYPE_CHECKING:
    from everystep.agent.mirror import Mirror

LEAST_BEHIND = 1000
"""Up to so many steps nothing is said of how far the copy is behind: while it is written it stands
still, and it catches up."""

_MOST_WAITING = 100_000
"""Before there is a copy: its full checkpoint is on its way, or torch is."""


class _Logged(NamedTuple):
    """A record that is durable."""

    number: int
    opened: p.OpenLog
    place: Appended

    @property
    def step(self) -> int:
        """Where it leads to."""
        return self.place.found.step


class Compaction(Keeper):
    """Folds what the log holds, and has the state written as a full checkpoint after every so many
    steps (`Persist`). All methods but `close` are called with `guard` held.

    Args:
        others: see `Keeper`. With `Begin.again` nothing that is in staging memory is begun from
            before the next `Rebase`, which comes when all that is there has been told: an agent
            that is gone may have folded in it.
    """

    def __init__(
        self,
        backend: Backend,
        begin: p.Begin,
        guard: threading.Condition,
        tell: Callable[[Struct], None],
        wake: Callable[[], None],
    ) -> None:
        super().__init__(backend, begin, guard, tell, wake)
        self._waiting: collections.deque[_Logged] = collections.deque()
        self._distrusts = begin.again
        self._allowed = _MOST_WAITING
        """Steps by which the copy may be behind."""
        self._is_folding = False
        self._is_over = False
        """Training has ended: nobody needs a state that is further on."""
        self._room = bytearray()
        self._thread.start()

    # ------------------------------------------------------------ called with `guard` held

    def take(self, message: p.Persist | p.Rebase) -> None:
        """Act on what the trainer tells."""
        self._distrusts = self._distrusts and not isinstance(message, p.Rebase)
        super().take(message)

    def add(self, queued: Queued, place: Appended) -> None:
        """Fold this one, too."""
        if not self._failed:
            self._waiting.append(_Logged(queued.record.number, queued.opened, place))
            self._guard.notify_all()

    def begin_from(self, index: int, image: Image, slots: Slots[Image]) -> None:
        """Take a full checkpoint that has been sealed for the beginning, once it is written. Where
        there is to be no copy, its slot is needed for the next one."""
        super().begin_from(index, image, slots)
        if self._failed:
            self._base = Base(index, image, slots)
        self._let_go = self._let_go or self._distrusts or self._failed

    def drain(self, *, on: bool, is_alone: bool) -> None:
        """What is in the log is durable: nothing needs to be done at once.

        Args:
            is_alone: training has ended.
        """
        self._is_over = self._is_over or (on and is_alone)
        self._guard.notify_all()

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, nor a slot to be given back. Folding may go on: what is
        folded is durable."""
        if (self._busy and not self._is_folding) or self._is_under_way():
            return False
        return not self._let_go or (self._held is None and self._base is None)

    def unsaved(self) -> list[StepRef]:
        """Nothing is in memory only."""
        return []

    # ------------------------------------------------------------ what is due

    def _next(self) -> Callable[[], None] | None:
        self._note_writing()
        base = self._base
        if base is not None and base.is_written and self._let_go:
            return self._give_up_slot
        if self._stop or self._is_over:
            return None
        if base is not None:  # a copy of what is not stored would be all that there is
            return self._adopt_and_allow if base.is_saved else None
        while self._waiting and self._is_useless(self._waiting[0]):
            self._waiting.popleft()
        if self._is_under_way():
            return None
        if len(self._waiting) > max(self._allowed, 2 * self._every):
            return self._fall_behind
        if self._let_go:
            return None if self._held is None else self._give_up_slot
        if self._held is None:
            return None
        if self._is_due():
            return self._persist
        return self._fold if self._can_fold() else None

    def _is_useless(self, logged: _Logged) -> bool:
        """Whether a record cannot be folded, now or later."""
        if self._failed:
            return True
        if self._mirror is not None:
            return logged.step <= self._step
        return logged.opened.base <= self._gone  # else its full checkpoint is on its way

    def _can_fold(self) -> bool:
        if self._mirror is None or not self._waiting:
            return False
        return self._waiting[0].step == self._step + 1

    def _is_due(self) -> bool:
        if self._is_sealed or self._persisted >= self._step:
            return False
        return self._every > 0 and self._step % self._every == 0

    # ------------------------------------------------------------ the thread

    def _adopt_and_allow(self) -> None:
        self._adopt()
        with self._guard:  # what has come meanwhile is no sign of slowness
            self._allowed = max(LEAST_BEHIND, 2 * len(self._waiting))

    def _fold(self) -> None:
        with self._guard:
            logged, mirror = self._waiting[0], self._may_change()
            self._is_folding = mirror is not None
        if mirror is not None:
            self._fold_onto(mirror, logged)
        with self._guard:
            self._is_folding = False

    def _fold_onto(self, mirror: Mirror, logged: _Logged) -> None:
        started_s = time.monotonic()
        try:
            payload = self._read(logged.place)
        except EverystepError as error:
            self._fail(logged.step, error)
            return
        if not self._advance(mirror, logged.step, payload, logged.opened.layout):
            return
        with self._guard:
            self._waiting.popleft()
            self._step = logged.step
        self._tell_folded(logged.number, started_s)

    def _read(self, place: Appended) -> memoryview:
        """The payload of a record, proved."""
        length = lf.padded(place.found.nbytes)
        if length > len(self._room):
            self._room = bytearray(length)
        into = memoryview(self._room)
        return segments.read(self._backend, place.name, place.found, into)

    def _fall_behind(self) -> None:
        """Folding is slower than training: the copy would never catch up."""
        with self._guard:
            first, behind = self._waiting[0].step, len(self._waiting)
        error = StoreFailed(f"the agent is {behind:,} steps behind")
        self._fail(first, error)

    def _fail(self, step: int, error: Exception, *, differs: bool = False) -> None:
        super()._fail(step, error, differs=differs)
        with self._guard:
            self._waiting.clear()
            self._let_go = True  # it may be being written
