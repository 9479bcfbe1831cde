"""The agent's staging memory: whose steps lie where in it, and which slot is filled next."""

from __future__ import annotations

import contextlib
import threading

from everystep.agent import protocol as p
from everystep.agent.arena import Arena
from everystep.agent.image import Image, SlotLayout
from everystep.agent.slots import Slots
from everystep.errors import EverystepError, StoreFailed, UsageError


class Staging:
    """What a session has in memory. For one thread; only `slots` is shared, under `guard`."""

    def __init__(self, guard: threading.Condition) -> None:
        self._guard = guard
        self._begin: p.Begin | None = None
        self._arena: Arena | None = None
        self._layout: SlotLayout | None = None
        self._headers: dict[int, int] = {}
        self.slots: Slots[Image] | None = None
        self.still: p.Still | None = None
        self.pending: p.Describe | None = None
        """A description that has no answer yet."""

    def begin(self, begin: p.Begin) -> None:
        """Forget an earlier session; its memory stays, where it is as this one may have it."""
        last, self._begin = self._begin, begin
        with self._guard:
            self.slots, self.still, self.pending, self._layout = None, None, None, None
            self._headers.clear()
        facts = (begin.policy, begin.staging_bytes, begin.replica)
        if last is not None and facts != (last.policy, last.staging_bytes, last.replica):
            self.close()

    def adopt(self, fd: int, slots: int, slot_bytes: int) -> None:
        """Use the memory that an agent before this one has left.

        Raises:
            StoreFailed: it cannot be mapped.
        """
        self._use(Arena(fd, slots, slot_bytes))

    def _use(self, arena: Arena) -> None:
        self.close()
        self._arena = arena
        threading.Thread(target=arena.populate, name="everystep-populate", daemon=True).start()

    def place(self, *, is_idle: bool) -> tuple[p.Places, int | None] | None:
        """The answer to the pending description, with a descriptor; None: there is none to be
        given yet, since what is in memory must be durable first.

        Args:
            is_idle: whether that is so.
        """
        message, begin = self.pending, self._begin
        if message is None or begin is None:
            return None
        try:
            layout = SlotLayout(message.layout, message.specs, message.pieces, message.rest_bytes)
            if self._arena is None or self._arena.slot_bytes < layout.slot_bytes:
                if not is_idle:
                    return None
                self._use(_arena_for(layout.slot_bytes, begin))
        except EverystepError as error:
            self.pending = None
            problem = error.headline()
            return p.Places(message.layout, [], 0, problem=problem, hint=error.hint), None
        self.pending, self._layout = None, layout
        arena = self._held()
        with self._guard:
            if self.slots is None:
                self.slots = Slots(arena.slots, begin.policy)
                for index in filter(self.slots.has, message.taken):
                    self.slots.take(index)
            self.slots.draining = False
        facts = (arena.slots, arena.slot_bytes)
        return p.Places(message.layout, layout.offsets, layout.rest_offset, facts), arena.fd

    def _held(self) -> Arena:
        if self._arena is None:
            raise StoreFailed("there is no staging memory")
        return self._arena

    def image(self, message: p.Seal) -> tuple[Image, Slots[Image]]:
        """A step that has been staged whole.

        Raises:
            StoreFailed: it comes out of turn.
            Damaged: it does not fit its slot.
        """
        slots, begin, layout = self.slots, self._begin, self._layout
        if slots is None or begin is None or layout is None:
            raise StoreFailed("a step came out of turn")
        if not slots.has(message.slot) or layout.number != message.layout:
            raise StoreFailed("a step came for a slot or layout that is not there")
        view = self._held().slot(message.slot)
        image = Image(begin, layout, message, self.still, view)
        if self._headers.get(message.slot) != message.layout:
            layout.write_headers(view)
            self._headers[message.slot] = message.layout
        return image, slots

    def release(self, slot: int) -> None:
        """Take back a slot that the trainer does not fill."""
        with self._guard:
            if self.slots is not None and self.slots.has(slot):
                self.slots.release(slot)

    def drain(self, *, on: bool, is_alone: bool) -> None:
        """Write everything that is not durable.

        Args:
            on: False: do not, any more.
            is_alone: whether the trainer is gone, and fills no slot.
        """
        with self._guard:
            if self.slots is not None:
                self.slots.draining = on
                for slot in self.slots.all if is_alone else ():
                    self.slots.release(slot.index)
            self._guard.notify_all()
            newest = None if self.slots is None else self.slots.newest()
        if is_alone and newest is not None and newest.saved and newest.content is not None:
            with contextlib.suppress(EverystepError):  # a trainer that comes back need not wait
                newest.content.files(newest.index * self._held().slot_bytes)

    def unsaved(self) -> list[Image]:
        """The steps that are not durable, newest first."""
        with self._guard:
            unsaved = [] if self.slots is None else self.slots.unsaved()
            return [slot.content for slot in unsaved if slot.content is not None]

    def files(self) -> tuple[p.Files, int | None]:
        """The files of the newest step in memory, and of all that are nowhere else, with a
        descriptor of the memory. Others are on the store, and describing one takes a while."""
        arena = self._arena
        if arena is None:
            return p.Files([]), None
        with self._guard:
            slots = self.slots
            newest = None if slots is None else slots.newest()
            held = [s for s in slots.all if s is newest or not s.saved] if slots else []
            found = [(slot.index, slot.content) for slot in held if slot.content is not None]
        files: list[p.InMemory] = []
        for index, image in found:
            with contextlib.suppress(EverystepError):
                files += image.files(index * arena.slot_bytes)
        return p.Files(files, (arena.slots, arena.slot_bytes)), arena.fd

    def close(self) -> None:
        """Give the memory back."""
        with self._guard:
            old, self._arena, self.slots = self._arena, None, None
            self._headers.clear()
        if old is not None:
            old.close()


def _arena_for(slot_bytes: int, begin: p.Begin) -> Arena:
    """New staging memory: as many slots as the policy can use and the budget allows."""
    if begin.replica:  # the trainer fills it but rarely, and has it to itself then
        return Arena.made(1, slot_bytes)
    slots = 3 if begin.policy == "skip" else 2
    if begin.staging_bytes is not None:
        slots = min(slots, begin.staging_bytes // slot_bytes)
        if slots < 2:
            raise UsageError(
                f"Full(staging_bytes={begin.staging_bytes:,}) has no room for two checkpoints",
                expected=f">= {2 * slot_bytes:,}",
                hint="give it a larger number, or use Full(blocking=True)",
            )
    return Arena.most(slots, slot_bytes)
