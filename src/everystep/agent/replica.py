"""The replica: a rank's state in the agent's memory, taken from step to step by folding.

A full checkpoint that the trainer has staged is its beginning. It stays in that slot, where each
step's delta is folded onto it as it comes, and from time to time the slot is sealed again and
written, like one that the trainer has filled. Only the thread of this class needs torch.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.common import ASK_AGAIN_S, Common
from everystep.agent.evidence import in_words, keep
from everystep.agent.image import Image
from everystep.agent.relay import Beside
from everystep.agent.rings import Memory, Queued
from everystep.agent.slots import Slots, State
from everystep.agent.writer import RETRY_S
from everystep.errors import EverystepError
from everystep.store.backend import Backend
from everystep.store.format import LAST_STEP, UNKNOWN
from everystep.store.newest import Newest
from everystep.types import StepRef

if TYPE_CHECKING:
    from everystep.agent.mirror import Mirror

_NOT_FOLDED = (EverystepError, ImportError, AttributeError, RuntimeError, MemoryError)
"""What ends a replica, and not the agent."""


class _Base(NamedTuple):
    """A slot with a full checkpoint."""

    slot: int
    image: Image
    slots: Slots[Image]


class Replica:
    """Folds what it is given, in one thread. All methods but `close` are called with `guard` held.

    Args:
        begin: the session, with `Begin.replica`.
        rings: where records lie.
        guard: notified whenever there may be something to do.
        tell: takes messages for the trainer.
        wake: lets the agent look for what has become possible.
        beside: where there are copies on other hosts.
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
    ) -> None:
        self._backend, self._begin, self._wake = backend, begin, wake
        self._rings, self._guard, self._tell, self._beside = rings, guard, tell, beside
        self._is_copy = beside is not None and beside.is_copy
        self._waiting: collections.deque[Queued] = collections.deque()
        self._base: _Base | None = None
        """Not begun from yet."""
        self._held: _Base | None = None
        """Whose slot is folded in."""
        self._mirror: Mirror | None = None
        self._step = self._persisted = 0
        self._gone = -1
        """The step at which the last state was given up."""
        self._every = 0
        self._is_sealed = False
        """The slot is being written, or has been, and must not be folded in."""
        self._common: Common | None = None
        """What the agents of several ranks agree on, where training has stopped."""
        if begin.world_size > 1:
            newest = Newest(backend, begin.session, begin.rank, begin.world_size)
            self._common = Common(newest, guard)
        self._let_go = self._hurry = self._stop = self._busy = False
        self._failed = False
        """There will be no replica any more."""
        self._thread = threading.Thread(target=self._work, name="everystep-fold", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called with `guard` held

    def take(self, message: p.Persist | p.Rebase) -> None:
        """Act on what the trainer tells."""
        if isinstance(message, p.Persist):
            self._every = message.steps
        else:
            self._let_go = True
        self._guard.notify_all()

    def add(self, queued: Queued) -> None:
        """Fold this one, too."""
        self._waiting.append(queued)
        if self._common is not None:
            self._common.safe = max(self._common.safe, queued.record.safe)
        self._guard.notify_all()

    def begin_from(self, index: int, image: Image, slots: Slots[Image]) -> None:
        """Take a full checkpoint that has been sealed for the beginning, once it is written."""
        if self._common is not None and any(spec.replicated for spec in image.specs):
            image.agreement = UNKNOWN  # other ranks may have this step by folding
        if not self._failed:
            self._base, self._let_go = _Base(index, image, slots), False
            self._guard.notify_all()

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
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether all that can be folded is, and is written or refused, if nothing new comes."""
        if self._busy or self._is_under_way() or self._awaits_others():
            return False
        if self._next() not in (None, self._look_for_others):
            return False
        return self._base is None or self._is_written(self._base)

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
        if self._base is not None and self._is_written(self._base):
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

    def _is_written(self, base: _Base) -> bool:
        slot = base.slots.all[base.slot]
        return (
            slot.content is base.image
            and slot.state is State.SEALED
            and (slot.saved or slot.failures > 0)
        )

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
            if self._beside is not None and not self._beside.is_settled():
                self._common.put_off()
                return  # a copy must be able to go as far
        self._common.look(reached, self._step)

    def _is_due(self) -> bool:
        if self._is_sealed or self._persisted >= self._step:
            return False
        if self._hurry and not self._can_fold():
            return True
        return self._every > 0 and self._step % self._every == 0

    def _is_under_way(self) -> bool:
        """Whether the slot is being written."""
        if self._held is None or not self._is_sealed:
            return False
        slot = self._held.slots.all[self._held.slot]
        return slot.state is not State.SEALED or not (slot.saved or slot.failures)

    def _note_writing(self) -> None:
        held = self._held
        if held is not None and self._is_sealed and held.slots.all[held.slot].saved:
            self._persisted = self._step

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        if self._common is not None and not self._is_copy:
            self._common.forget_earlier()
        while True:
            with self._guard:
                while (action := self._next()) is None:
                    if self._stop:
                        return
                    self._guard.wait(ASK_AGAIN_S if self._awaits_others() else RETRY_S / 2)
                self._busy = True
            try:
                action()
            finally:
                with self._guard:
                    self._busy = False
                    self._guard.notify_all()

    def _adopt(self) -> None:
        """Begin from a full checkpoint."""
        with self._guard:
            base = self._base
            if base is None or not self._is_written(base):
                return
            is_saved = base.slots.all[base.slot].saved
            base.slots.lend(base.slot)
            self._base, self._held, self._is_sealed = None, base, False
            self._step = base.image.ref.step
            self._persisted = self._step if is_saved else -1
        started_s = time.monotonic()
        try:
            from everystep.agent.mirror import Mirror

            mirror = Mirror(base.image, self._begin.classes, self._begin.paths)
        except _NOT_FOLDED as error:
            self._fail(self._step, error)
            return
        with self._guard:
            self._mirror = mirror
        self._tell(p.Mirrored(step=self._step, took_s=time.monotonic() - started_s))

    def _fold(self) -> None:
        with self._guard:
            waiting, mirror, held = self._waiting[0], self._mirror, self._held
            if mirror is None or held is None or self._is_under_way():
                return  # what could not be written is being tried again
            if self._is_sealed:
                held.slots.lend(held.slot)
                self._is_sealed = False
            view = self._rings.view(waiting.record)
        started_s = time.monotonic()
        try:
            mirror.fold(view, waiting.opened.layout)
        except _NOT_FOLDED as error:
            keep(self._backend, self._begin, waiting.record.step, view, error)
            self._fail(waiting.record.step, error)
            return
        with self._guard:
            self._rings.free(self._waiting.popleft().record)
            self._step = waiting.record.step
        ended_s = time.monotonic()
        self._tell(
            p.Folded(
                number=waiting.record.number,
                step=waiting.record.step,
                took_s=ended_s - started_s,
                at_s=ended_s,
            )
        )

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
        except _NOT_FOLDED as error:
            self._fail(self._step, error)

    def _drop(self) -> None:
        """A record that leads nowhere: its memory is free."""
        with self._guard:
            record = self._waiting.popleft().record
            self._rings.free(record)
        self._tell(p.Folded(number=record.number, step=record.step, took_s=0.0, at_s=0.0))

    def _persist(self) -> None:
        with self._guard:
            mirror, held = self._mirror, self._held
        if mirror is None or held is None:
            return
        try:
            image = mirror.image()
        except _NOT_FOLDED as error:
            self._fail(self._step, error)
            return
        with self._guard:
            held.slots.seal(held.slot, image, wanted=True)
            self._is_sealed = True

    def _give_up_slot(self) -> None:
        with self._guard:
            held = self._held or self._base
            if held is None or self._is_under_way():
                return
            if held is self._base and not self._is_written(held):
                return  # it is being tried again
            self._gone = max(self._step, held.image.ref.step)
            held.slots.give_up(held.slot)
            self._held = self._mirror = self._base = None
            self._is_sealed = False
        self._wake()

    def _fail(self, step: int, error: Exception) -> None:
        """The trainer must store in full from here on."""
        with self._guard:
            self._failed = True
        self._give_up_slot()
        self._tell(p.NotFolded(step=step, reason=in_words(error)))

    def close(self) -> None:
        """End the thread once nothing is left to do. Call it without `guard`."""
        with self._guard:
            self._stop = True
            self._guard.notify_all()
        self._thread.join()
        if self._common is not None and not self._is_copy:  # a lost rank's word is its last
            self._common.close()
        self._mirror = self._held = self._base = None
