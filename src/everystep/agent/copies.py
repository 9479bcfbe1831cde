"""The copy of another rank's state in this agent's memory: folded as its owner's replica is, and
written in its place when its owner is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import numpy as np
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.arena import Arena
from everystep.agent.image import Image, SlotLayout
from everystep.agent.link import LEAST_BYTES
from everystep.agent.process import LOCK_SLOT
from everystep.agent.relay import Copied, Limit
from everystep.agent.replica import Replica
from everystep.agent.rings import Queued
from everystep.agent.slots import Slot, Slots, State
from everystep.agent.writer import Writer
from everystep.errors import Damaged, EverystepError, RunBusy, StoreFailed
from everystep.store import format as fmt
from everystep.store.local import LocalBackend

MOST_WAITING = 8
"""So many records may wait to be folded here, and so many bytes if that is more; then their owner
waits, or gives the copy up."""

LOOK_S = 0.1
_WORDS = 300
"""Characters of what strangers have a part in."""

_NONSENSE = (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What values that no owner sends may end in."""

_WRITES_S = 600.0
"""A copy that has not been written by then is given up."""


class Received:
    """Where an owner's records lie until they are not needed any more."""

    def __init__(self) -> None:
        self._held: dict[int, memoryview] = {}

    @property
    def are_too_many(self) -> bool:
        """Whether no more should come for now."""
        if len(self._held) < MOST_WAITING:
            return False
        return sum(len(data) for data in self._held.values()) > LEAST_BYTES

    def add(self, record: p.Record, data: memoryview) -> None:
        """Keep one."""
        self._held[record.number] = data

    def view(self, record: p.Record) -> memoryview:
        """The bytes of a record, which may be released.

        Raises:
            StoreFailed: it is not there.
        """
        found = self._held.get(record.number)
        if found is None:
            raise StoreFailed("a record lies outside of its memory", found=str(record))
        return found[:]

    def free(self, record: p.Record) -> None:
        """A record is not needed any more."""
        self._held.pop(record.number, None)


class Copy:
    """One rank's state, from what its owner sends; by one thread at a time, but for the properties.

    Args:
        path: of the run.
        begin: the owner's session.
        bound: how far all ranks' copies go.
        wire: leads to the owner.
    """

    def __init__(self, path: Path, begin: p.Begin, bound: Limit, wire: w.Wire) -> None:
        self._path, self.begin, self._bound, self.wire = path, begin, bound, wire
        self._guard = threading.Condition()
        self._records = Received()
        self._arena: Arena | None = None
        self._slots: Slots[Image] | None = None
        self._replica: Replica | None = None
        self._opened: p.OpenLog | None = None
        self._next_step = 0
        """Whose record leads on."""
        self._stop = False
        self.is_owned = True
        """The owner's agent is connected."""
        self.problem: str | None = None
        """Why there is no copy any more."""
        self.is_lasting = False
        """Another copy would come to the same end."""
        self._told_s = 0.0
        self.lost_s = 0.0
        """When the owner's agent was last heard of, on the host's monotonic clock."""

    @property
    def is_there(self) -> bool:
        """Whether there is a state that can be written."""
        return self._replica is not None and self.problem is None

    def _tell(self, message: Struct) -> None:
        if isinstance(message, p.NotFolded):
            self.problem = f"step {message.step}: {message.reason}"
        with self._guard:
            self._guard.notify_all()

    # ------------------------------------------------------------ from its owner

    def begin_from(self, base: w.Base) -> None:
        """Take a state, whose bytes follow.

        Raises:
            EOFError, OSError: they do not.
            StoreFailed: there is no room for them.
            Damaged: they make no sense.
        """
        self._drop()
        try:
            image = self._image(base)
        except _NONSENSE as error:
            raise Damaged(f"a state makes no sense: {error!r}"[:_WORDS]) from error
        self._slots = Slots(1, "block")
        self._slots.all[0] = self._first(image)
        backend = LocalBackend(self._path)
        with self._guard:
            self._replica = Replica(
                backend, self.begin, self._records, self._guard, self._tell, lambda: None,
                Copied(self._bound),
            )  # fmt: skip
            self._replica.begin_from(0, image, self._slots)
        self._next_step = base.seal.step + 1

    def _image(self, base: w.Base) -> Image:
        """The state, whose bytes follow, in memory."""
        described = base.describe
        layout = SlotLayout(
            described.layout, described.specs, described.pieces, described.rest_bytes
        )
        if base.nbytes > layout.slot_bytes:
            raise StoreFailed("a state is larger than it says", found=base.nbytes)
        self._arena = Arena.made(1, layout.slot_bytes)
        view = self._arena.slot(0)
        self.wire.receive_into(view[: base.nbytes])
        layout.write_headers(view)
        return Image(self.begin, layout, base.seal, None, view)

    def _first(self, image: Image) -> Slot[Image]:
        """The slot that a copy begins in: the owner need not have written it, and this one does not
        either before the owner is lost."""
        return Slot(0, State.SEALED, image, 1, failures=1)

    def open_log(self, opened: p.OpenLog) -> None:
        """What the records that follow are."""
        self._opened = opened

    def add(self, message: w.Next) -> None:
        """Take a record, whose bytes follow, once there is room for it.

        Raises:
            EOFError, OSError: they do not.
            StoreFailed: it comes out of turn.
        """
        replica, opened = self._replica, self._opened
        if replica is None or opened is None:
            raise StoreFailed("a record came before the state")
        if message.record.step != self._next_step:
            raise StoreFailed(
                "a record came out of turn", expected=self._next_step, found=message.record.step
            )
        with self._guard:
            while self._records.are_too_many and self.problem is None and not self._stop:
                if not self.wire.is_open():
                    break
                self._guard.wait(LOOK_S)
                self._alive()
        data = np.empty(message.nbytes, np.uint8).data  # no more memory than has come
        self.wire.receive_into(data)
        data = self._whole(message.record, data, opened)
        self._next_step += 1
        with self._guard:
            self._received(Queued(message.record, opened), data)
            replica.add(Queued(message.record, opened))

    def _received(self, queued: Queued, data: memoryview) -> None:
        """A record is here, which is to be folded; `guard` is held."""
        self._records.add(queued.record, data)

    def _whole(self, record: p.Record, data: memoryview, opened: p.OpenLog) -> memoryview:
        """The bytes of a record, with all that is to be folded."""
        return data

    def _alive(self) -> None:
        """Let the owner wait."""
        now_s = time.monotonic()
        if now_s > self._told_s + w.ALIVE_S:
            self._told_s = now_s
            self.wire.send(w.Alive())

    # ------------------------------------------------------------ in its owner's place

    def rescue(self) -> bool:
        """Write the state at the step that all ranks' agents agree on, as the owner's agent would
        have; returns whether there was one and nobody else does. Call it when training has
        stopped, and once."""
        replica, slots = self._replica, self._slots
        if replica is None or slots is None or not self.is_there:
            return False
        backend = LocalBackend(self._path)
        try:
            with backend.lock(fmt.LOCK_FILE, LOCK_SLOT + self.begin.rank):
                self._write(backend, replica, slots)
        except RunBusy:  # the owner's agent is there after all, or another holder
            return False
        finally:
            self._drop()
        return True

    def _write(self, backend: LocalBackend, replica: Replica, slots: Slots[Image]) -> None:
        writer = Writer(backend, self.begin, self._guard, lambda message: None)
        self._drain(replica, slots, writer)
        replica.close()
        writer.close()

    def _drain(self, replica: Replica, slots: Slots[Image], writer: Writer) -> None:
        """Return when all is written."""
        with self._guard:
            slots.draining, writer.slots = True, slots
            replica.drain(on=True, is_alone=True)
            ends_s = time.monotonic() + _WRITES_S
            while not (replica.idle and writer.idle) and not self._stop:
                if time.monotonic() > ends_s or self.problem is not None:
                    break
                self._guard.wait(LOOK_S)

    def _drop(self) -> None:
        replica, self._replica = self._replica, None
        if replica is not None:
            with contextlib.suppress(EverystepError):
                replica.close()
        self._records, self._slots, self.problem = Received(), None, None
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def rouse(self) -> None:
        """There may be something to fold."""
        with self._guard:
            self._guard.notify_all()

    def stop(self) -> None:
        """Let whoever waits in here go on."""
        with self._guard:
            self._stop = True
            self._guard.notify_all()

    def close(self) -> None:
        """Forget the state."""
        self.stop()
        self._drop()
