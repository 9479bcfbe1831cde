"""A second copy of a rank's state in a slot of staging memory, taken from step to step there.

A full checkpoint that the trainer has staged is its beginning. It stays in that slot, where steps
are folded onto it, and from time to time the slot is sealed again and written, like one that the
trainer has filled. Only the thread of this class needs torch. Which steps are folded, and when the
slot is sealed, is decided by `Replica`, whose records lie in memory, and by `Compaction`, whose are
in the log.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.evidence import in_words, keep
from everystep.agent.image import Image
from everystep.agent.slots import Slots, State
from everystep.agent.writer import RETRY_S
from everystep.errors import CannotRestore, Damaged, EverystepError
from everystep.store.backend import Backend
from everystep.store.format import UNKNOWN

if TYPE_CHECKING:
    from everystep.agent.mirror import Mirror

NOT_FOLDED = (EverystepError, ImportError, AttributeError, RuntimeError, MemoryError)
"""What ends a copy, and not the agent."""


class Base(NamedTuple):
    """A slot with a full checkpoint."""

    slot: int
    image: Image
    slots: Slots[Image]

    @property
    def is_written(self) -> bool:
        """Whether it is on the store, or was refused."""
        slot = self.slots.all[self.slot]
        is_its = slot.content is self.image and slot.state is State.SEALED
        return is_its and (slot.saved or slot.failures > 0)

    @property
    def is_saved(self) -> bool:
        """Whether it is on the store."""
        slot = self.slots.all[self.slot]
        return self.is_written and slot.saved


class Keeper(ABC):
    """Does what `_next` says, in one thread. All methods but `close` are called with `guard` held.

    Args:
        begin: the session, with `Begin.replica`.
        guard: notified whenever there may be something to do.
        tell: takes messages for the trainer.
        wake: lets the agent look for what has become possible.
    """

    def __init__(
        self,
        backend: Backend,
        begin: p.Begin,
        guard: threading.Condition,
        tell: Callable[[Struct], None],
        wake: Callable[[], None],
    ) -> None:
        self._backend, self._begin, self._wake = backend, begin, wake
        self._guard, self._tell = guard, tell
        self._base: Base | None = None
        """Not begun from yet."""
        self._held: Base | None = None
        """Whose slot is folded in."""
        self._mirror: Mirror | None = None
        self._step = self._persisted = 0
        self._gone = -1
        """The step at which the last state was given up."""
        self._every = 0
        self._is_sealed = False
        """The slot is being written, or has been, and must not be folded in."""
        self._whole = 0
        """The newest step that was said to come whole."""
        self._let_go = self._stop = self._busy = False
        self._failed = False
        """There will be no copy any more."""
        self._thread = threading.Thread(target=self._work, name="everystep-fold", daemon=True)

    # ------------------------------------------------------------ called with `guard` held

    def take(self, message: p.Persist | p.Rebase) -> None:
        """Act on what the trainer tells."""
        if isinstance(message, p.Persist):
            self._every = message.steps
        else:
            self._whole, self._let_go = message.step, True
        self._guard.notify_all()

    def begin_from(self, index: int, image: Image, slots: Slots[Image]) -> None:
        """Take a full checkpoint that has been sealed for the beginning, once it is written."""
        if self._begin.world_size > 1 and any(spec.replicated for spec in image.specs):
            image.agreement = UNKNOWN  # other ranks may have this step by folding
        if not self._failed:
            # an earlier one may have been on its way when a later one was spoken of
            self._base, self._let_go = Base(index, image, slots), image.ref.step < self._whole
            self._guard.notify_all()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _is_under_way(self) -> bool:
        """Whether the slot is being written."""
        return self._held is not None and self._is_sealed and not self._is_seal_over(self._held)

    def _is_seal_over(self, held: Base) -> bool:
        slot = held.slots.all[held.slot]
        return slot.state is State.SEALED and (slot.saved or slot.failures > 0)

    def _note_writing(self) -> None:
        held = self._held
        if held is not None and self._is_sealed and held.slots.all[held.slot].saved:
            self._persisted = self._step

    # ------------------------------------------------------------ the thread

    @abstractmethod
    def _next(self) -> Callable[[], None] | None:
        """What to do now; None: nothing."""

    def _pause_s(self) -> float:
        """After how long to look again, if nobody notifies."""
        return RETRY_S / 2

    def _work(self) -> None:
        while True:
            with self._guard:
                while (action := self._next()) is None:
                    if self._stop:
                        return
                    self._guard.wait(self._pause_s())
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
            if base is None or not base.is_written:
                return
            is_saved = base.is_saved
            base.slots.lend(base.slot)
            self._base, self._held, self._is_sealed = None, base, False
            self._step = base.image.ref.step
            self._persisted = self._step if is_saved else -1
        started_s = time.monotonic()
        try:
            from everystep.agent.mirror import Mirror

            mirror = Mirror(base.image, self._begin.classes, self._begin.paths)
        except NOT_FOLDED as error:
            self._fail(self._step, error)
            return
        with self._guard:
            self._mirror = mirror
        self._tell(p.Mirrored(step=self._step, took_s=time.monotonic() - started_s))

    def _may_change(self) -> Mirror | None:
        """The state, with its slot to be changed; None: not now. `guard` is held."""
        if self._mirror is None or self._held is None or self._is_under_way():
            return None  # what could not be written is being tried again
        if self._is_sealed:
            self._held.slots.lend(self._held.slot)
            self._is_sealed = False
        return self._mirror

    def _advance(self, mirror: Mirror, step: int, payload: memoryview, layout: bytes) -> bool:
        """Fold one step; whether that went well. If not, there is no copy any more."""
        try:
            mirror.fold(payload, layout)
        except NOT_FOLDED as error:
            keep(self._backend, self._begin, step, payload, error)
            self._fail(step, error, differs=isinstance(error, Damaged | CannotRestore))
            return False
        return True

    def _tell_folded(self, number: int, started_s: float) -> None:
        ended_s = time.monotonic()
        took_s = ended_s - started_s
        self._tell(p.Folded(number=number, step=self._step, took_s=took_s, at_s=ended_s))

    def _persist(self) -> None:
        """Let the state be written as it is."""
        with self._guard:
            mirror, held = self._mirror, self._held
        if mirror is None or held is None:
            return
        try:
            image = mirror.image()
        except NOT_FOLDED as error:
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
            if held is self._base and not held.is_written:
                return  # it is being tried again
            self._gone = max(self._step, held.image.ref.step)
            held.slots.give_up(held.slot)
            self._held = self._mirror = self._base = None
            self._is_sealed = False
        self._wake()

    def _fail(self, step: int, error: Exception, *, differs: bool = False) -> None:
        """There is no copy from here on.

        Args:
            differs: the records of the step do not give what training had.
        """
        with self._guard:
            self._failed = True
        self._give_up_slot()
        self._tell(p.NotFolded(step=step, reason=in_words(error), differs=differs))

    def close(self) -> None:
        """End the thread once nothing is left to do. Call it without `guard`."""
        with self._guard:
            self._stop = True
            self._guard.notify_all()
        self._thread.join()
        self._mirror = self._held = self._base = None
