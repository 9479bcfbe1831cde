"""One agent's connection to another that holds a copy for it: what waits to be sent, and what has
arrived."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.pace import Pace
from everystep.agent.rings import Queued
from everystep.errors import EverystepError, StoreFailed

RETRY_S = 0.25
MOST_RETRY_S = 30.0
"""Between two attempts to have a copy there; each that fails doubles the time."""

LEAST_BYTES = 64 << 20
"""So many bytes of records may wait, or as many as the state has, or four records."""

_LASTING_STEPS = 16
"""A copy that has come so far was no failure."""


class _Item(NamedTuple):
    """A message, and the bytes that follow it."""

    message: Struct
    payload: memoryview | None = None


class Link:
    """Sends in a thread of its own. All methods but `close` are called with `guard` held.

    Args:
        holder: who is to hold the copy, in words.
        begin: the owner's session.
        connect: makes a connection; raises one of `wire.Gone` while there is none to be had.
        pace: of all that is sent.
        guard: notified whenever something has arrived, or a state is wanted.
        tell: takes sentences for the user, and how urgent they are.
        ends: the holder may forget the copy when this is closed: all is durable.
    """

    def __init__(
        self,
        holder: str,
        begin: p.Begin,
        connect: Callable[[], w.Wire],
        pace: Pace,
        guard: threading.Condition,
        tell: Callable[[int, str], None],
        *,
        ends: bool = True,
    ) -> None:
        self._holder, self._begin, self._connect, self._ends = holder, begin, connect, ends
        self._pace, self._guard, self._tell = pace, guard, tell
        self.is_there = False
        """Whether it can be given something."""
        self.next_step: int | None = None
        """The step whose record it lacks; None: it lacks a state."""
        self.kept: int | None = None
        """The step to which it can go, once it has been given all that there was; None: it has no
        copy, or is far behind."""
        self.refusal: w.NotKept | None = None
        """What was said of the last copy that has been given up there."""
        self._arrived = 0
        self._begun = self._handed = 0
        self._queue: collections.deque[_Item] = collections.deque()
        self._queued_bytes, self._most_bytes = 0, 0
        self._opened: p.OpenLog | None = None
        self._waits_s = RETRY_S
        self._said: str | None = None
        self._stop = False
        self._wake, self._wakened = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wire: w.Wire | None = None
        self._thread = threading.Thread(target=self._work, name="everystep-link", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called with `guard` held

    @property
    def is_settled(self) -> bool:
        """Whether all that it was given has arrived, or never will."""
        return self.next_step is None or self._arrived == self._handed

    def give_state(self, base: w.Base, payload: memoryview) -> None:
        """Let it have a state, from which records go on."""
        self._drop()
        self._most_bytes = max(LEAST_BYTES, len(payload))
        self._queue.append(_Item(base, payload))
        self._begun = self._handed = base.seal.step
        self._arrived = -1
        self.next_step = base.seal.step + 1
        self._rouse()

    def give_record(self, queued: Queued, payload: memoryview) -> None:
        """Let it have the record of the next step; it is given up where too many wait."""
        if queued.opened is not self._opened:
            self._opened = queued.opened
            self._queue.append(_Item(queued.opened))
        self._most_bytes = max(self._most_bytes, 4 * len(payload))
        self._queued_bytes += len(payload)
        if self._queued_bytes > self._most_bytes:
            self.give_up(f"it is {self._queued_bytes:,} bytes behind")
            return
        message = w.Next(record=queued.record, nbytes=len(payload))
        self._queue.append(_Item(message, payload))
        self._handed, self.next_step = queued.record.step, queued.record.step + 1
        self._rouse()

    def give_up(self, why: str) -> None:
        """It begins anew, after a while."""
        self._drop()
        self.is_there = False  # what it was given now would go with the connection
        self._waits_s = min(MOST_RETRY_S, max(1.0, 2 * self._waits_s))
        self._say(f"{self._holder} holds no copy of rank {self._begin.rank} for now: {why}")
        if self._wire is not None:
            self._wire.interrupt()

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        if text != self._said:
            self._said = text
            self._tell(level, text)

    def _drop(self) -> None:
        self._queue.clear()
        self._queued_bytes, self._opened = 0, None
        self.next_step = self.kept = None

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakened, b"!")

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while not self._stop:
            try:
                self._wire = self._connect()
                self._talk(self._wire)
            except w.Gone as error:
                self._lose(error)
            finally:
                if self._wire is not None:
                    self._wire.close()
                self._wire = None
            with self._guard:
                self._drop()
                self.is_there = False
                self._guard.notify_all()
                ends_s = time.monotonic() + self._waits_s
                while not self._stop and time.monotonic() < ends_s:
                    self._guard.wait(max(0.0, ends_s - time.monotonic()))

    def _lose(self, error: Exception) -> None:
        with self._guard:
            if self._stop or (self.next_step is None and not isinstance(error, EverystepError)):
                return  # it is about to start, or to end
            if isinstance(error, EverystepError):  # this does not pass by itself
                self._waits_s = min(MOST_RETRY_S, 2 * self._waits_s)
            reason = error.headline() if isinstance(error, EverystepError) else repr(error)
            own = self._begin.rank
            self._say(f"{self._holder} holds no copy of rank {own} for now: {reason}")

    def _talk(self, wire: w.Wire) -> None:
        wire.send(w.Keep(msgspec.structs.replace(self._begin, peers=None, logs=False)))
        with self._guard:
            self.is_there = True
            self._guard.notify_all()
        alive_s = sent_s = time.monotonic()
        while not self._stop:
            item = self._take()
            if item is not None:
                wire.send(item.message, item.payload, self._pace.take)
                alive_s = sent_s = time.monotonic()
            while wire.has_come(0.0 if item is not None else w.ALIVE_S / 2, self._wake):
                self._hear(wire.receive())
            self._clear()
            if time.monotonic() > alive_s + w.ALIVE_S:
                wire.send(w.Alive())
                alive_s = time.monotonic()
            if time.monotonic() > max(wire.heard_s, sent_s) + w.SILENT_S:
                raise EOFError("the other agent is silent")
        if self._ends and (self.next_step is not None or self.kept is not None):
            wire.send(w.Ended())

    def _take(self) -> _Item | None:
        with self._guard:
            if not self._queue:
                return None
            item = self._queue.popleft()
            if isinstance(item.message, w.Next) and item.payload is not None:
                self._queued_bytes -= len(item.payload)
            return item

    def _clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def _hear(self, message: Struct) -> None:
        with self._guard:
            if isinstance(message, w.Kept):
                self._arrived = message.step
                if self.kept is None and message.step == self._handed:
                    own = self._begin.rank
                    text = f"{self._holder} holds a copy of rank {own} from step {message.step}"
                    self._say(text, logging.INFO)
                    self.kept = message.step
                elif self.kept is not None:
                    self.kept = message.step
                if message.step >= self._begun + _LASTING_STEPS:
                    self._waits_s, self._said = RETRY_S, None
                self._guard.notify_all()
            elif isinstance(message, w.NotKept):
                self.refusal = message
                self.give_up(message.reason)
            elif not isinstance(message, w.Alive):
                raise StoreFailed("a message came out of turn", found=type(message).__name__)

    def close(self) -> None:
        """End the thread, and let the other agent forget the copy. Call it without `guard`."""
        with self._guard:
            self._stop = True
            self._rouse()
            self._guard.notify_all()
        self._thread.join()
        os.close(self._wake)
        os.close(self._wakened)


def copied(view: memoryview) -> memoryview:
    """The same bytes elsewhere; others may use the interpreter meanwhile.

    Raises:
        MemoryError: there is no room for them.
    """
    into = np.empty(len(view), np.uint8)
    np.copyto(into, np.frombuffer(view, np.uint8))
    return into.data
