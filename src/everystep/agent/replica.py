"""The replica: a second copy of a rank's state, onto which each step is folded from memory as it
comes, in the order and up to the step that all ranks' agents can follow."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.common import ASK_AGAIN_S, Common
from everystep.agent.keeper import NOT_FOLDED, Keeper
from everystep.agent.relay import Beside
from everystep.agent.rings import Memory, Queued
from everystep.store.backend import Backend
from everystep.store.format import LAST_STEP
from everystep.store.newest import Newest
from everystep.types import StepRef


class Replica(Keeper):
    """Folds what it is given. All methods but `close` are called with `guard` held.

    Args:
        rings: where records lie.
        beside: where there are copies on other hosts.
        more: whether records that are here already are yet to be added.
        others: see `Keeper`.
    """

    def __init__(
        self,
        backend: Backend,
        begin: p.Begin,
        rings: Memory,
        guard: threading.Condition,
        tell: Callable[[Struct], None],
        wake: Callable[[], None],
        beside: Beside | None = None,
        more: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(backend, begin, guard, tell, wake)
        self._rings, self._beside, self._more = rings, beside, more
        self._is_copy = beside is not None and beside.is_copy
        self._waiting: collections.deque[Queued] = collections.deque()
        self._common: Common | None = None
        """What the agents of several ranks agree on, where training has stopped."""
        if begin.world_size > 1:
            newest = Newest(backend, begin.session, begin.rank, begin.world_size)
            self._common = Common(newest, guard)
        self._hurry = False
        self._also: int | None = None
        self._thread.start()

    # ------------------------------------------------------------ called with `guard` held

    def add(self, queued: Queued) -> None:
        """Fold this one, too."""
        self._waiting.append(queued)
        if self._common is not None:
            self._common.safe = max(self._common.safe, queued.record.safe)
        self._guard.notify_all()

    def persist_at(self, step: int) -> None:
        """Have the state written at this step, too, if it has not come so far yet."""
        self._also = step

    def drain(self, *, on: bool, is_alone: bool = False) -> None:
        """Fold and persist everything at once from now on, or (`on=False`) as it comes again.

        Args:
            is_alone: training has ended, and no record will come any more.
        """
        if self._common is not None:
            self._common.drain(on=on, is_alone=is_alone)
        self._hurry = on
        self._guard.notify_all()

    @property
    def idle(self) -> bool:
        """Whether all that can be folded is, and is written or refused, if nothing new comes."""
        if self._busy or self._is_under_way() or self._awaits_others():
            return False
        if self._held is None and self._looks_for_others() and not self._has_looked():
            return False  # they would wait for word from this one
        if self._next() not in (None, self._look_for_others):
            return False
        return self._base is None or self._base.is_written

    def unsaved(self) -> list[StepRef]:
        """The steps that are in memory only: the newest one that is folded, and those that wait."""
        steps = [one.record.step for one in self._waiting]
        if self._held is not None and self._persisted < self._step:
            steps.append(self._step)
        return [StepRef(self._begin.timeline, step) for step in sorted(steps)]

    # ------------------------------------------------------------ what is due

    def _next(self) -> Callable[[], None] | None:
        """What to do now; None: nothing."""
        self._note_writing()
        if self._base is not None and self._base.is_written:
            return self._give_up_slot if self._let_go and not self._leads_on() else self._adopt
        if self._waiting and self._is_useless(self._waiting[0]):
            return self._drop
        if self._must_hand_out() is not False:
            return self._hand_out
        if self._is_under_way():
            return None
        wants_room = self._let_go and not self._can_fold()
        looks = self._looks_for_others() and not self._can_fold()
        if looks and self._common is not None:
            is_due = self._common.is_due()
            if is_due or (self._common.step is None and self._awaits_others()):
                return self._look_for_others if is_due else None
        if self._held is None:
            return None
        if self._is_due() or (wants_room and self._persisted < self._step and not self._is_sealed):
            return self._persist
        if wants_room:
            return self._give_up_slot
        return self._fold if self._can_fold() else None

    def _leads_on(self) -> bool:
        """Whether a record waits that the full checkpoint to begin from can be taken on by."""
        first = -1 if self._base is None else self._base.image.ref.step + 1
        return any(one.record.step == first and not one.opened.stale for one in self._waiting)

    def _is_useless(self, waiting: Queued) -> bool:
        """Whether a record cannot be folded, now or later."""
        if waiting.opened.stale or self._failed:
            return True
        if self._common is not None and self._common.is_beyond(waiting.record.step):
            return True
        if self._base is not None:
            return waiting.record.step <= self._base.image.ref.step
        if self._mirror is not None:
            return waiting.record.step <= self._step
        return waiting.opened.base <= self._gone  # else its full checkpoint is on its way

    def _can_fold(self) -> bool:
        if self._mirror is None or not self._waiting:
            return False
        step = self._waiting[0].record.step
        return step == self._step + 1 and step <= self._limit()

    def _limit(self) -> int:
        """The step beyond which must not be folded: some rank may not get there."""
        if self._common is None:
            return int(LAST_STEP)
        if self._common.step is not None or self._beside is None:
            return self._common.limit
        newest = self._waiting[-1].record.step if self._waiting else self._step
        return min(self._common.limit, self._beside.limit(newest))

    def _looks_for_others(self) -> bool:
        return self._common is not None and self._base is None and self._common.is_open

    def _has_looked(self) -> bool:
        return self._common is not None and self._common.has_looked

    def _awaits_others(self) -> bool:
        is_open = self._held is not None and self._looks_for_others()
        return is_open and self._common is not None and self._common.waits

    def _look_for_others(self) -> None:
        """Tell the other ranks' agents how far this one can go, and hear from them."""
        if self._common is None:
            return
        with self._guard:
            steps = {one.record.step for one in self._waiting}
            reached = 0 if self._held is None else self._step
            while reached + 1 in steps:
                reached += 1
            if reached and self._beside is not None and not self._beside.is_settled():
                self._common.put_off()
                return  # a copy must be able to go as far
        self._common.look(reached, self._step)

    def _is_due(self) -> bool:
        if self._is_sealed or self._persisted >= self._step:
            return False
        if self._hurry and not self._can_fold() and not self._more():
            return True
        return self._step == self._also or (self._every > 0 and self._step % self._every == 0)

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        if self._common is not None and not self._is_copy:
            self._common.forget_earlier()
        super()._work()

    def _pause_s(self) -> float:
        return ASK_AGAIN_S if self._awaits_others() else super()._pause_s()

    def _fold(self) -> None:
        with self._guard:
            waiting, mirror = self._waiting[0], self._may_change()
            if mirror is None:
                return
            view = self._rings.view(waiting.record)
        started_s, step = time.monotonic(), waiting.record.step
        if not self._advance(mirror, step, view, waiting.opened.layout):
            return
        with self._guard:
            self._rings.free(self._waiting.popleft().record)
            self._step = step
        self._tell_folded(waiting.record.number, started_s)

    def _must_hand_out(self) -> Queued | bool:
        if self._beside is None or self._mirror is None:
            return False
        is_still = not self._is_under_way()
        return self._beside.due(self._step, self._waiting, is_still=is_still)

    def _hand_out(self) -> None:
        """Give what is due to those that hold copies."""
        with self._guard:
            due, beside, mirror = self._must_hand_out(), self._beside, self._mirror
            if beside is None or mirror is None or due is False:
                return
            view = self._rings.view(due.record) if isinstance(due, Queued) else memoryview(b"")
        if isinstance(due, Queued):
            beside.forward(due, view)
            return
        try:
            beside.give(mirror.image())
        except NOT_FOLDED as error:
            self._fail(self._step, error)

    def _drop(self) -> None:
        """A record that leads nowhere: its memory is free."""
        with self._guard:
            record = self._waiting.popleft().record
            self._rings.free(record)
        self._tell(p.Folded(number=record.number, step=record.step, took_s=0.0, at_s=0.0))

    def close(self) -> None:
        """End the thread once nothing is left to do. Call it without `guard`."""
        super().close()
        if self._common is not None and not self._is_copy:  # a lost rank's word is its last
            self._common.close()
