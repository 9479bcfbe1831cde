"""One rank's records in a shadow's log, for as long as its store keeps up: what it does not take is
left out, up to the next full checkpoint, and holds up nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.copies import Received
from everystep.agent.link import LEAST_BYTES
from everystep.agent.logger import Logger
from everystep.agent.rings import Queued
from everystep.store.backend import Backend
from everystep.store.log import Appended


class ShadowLog:
    """All methods but `close` are called with `guard` held.

    Args:
        begin: the owner's session.
        guard: notified whenever something was written.
        say: takes sentences for the user, and how urgent they are.
        every: a full checkpoint is written at every so many steps.
    """

    def __init__(
        self,
        backend: Backend,
        begin: p.Begin,
        guard: threading.Condition,
        say: Callable[[int, str], None],
        every: int,
    ) -> None:
        self._say, self._every, self._rank = say, every, begin.rank
        self._records = Received()
        self._waiting_bytes = 0
        self._opened: p.OpenLog | None = None
        self._told: p.OpenLog | None = None
        """What the owner said of the records, as `_opened` says it here."""
        self._is_whole = True
        """The newest record that came is in the log, or will be."""
        self._logger = Logger(backend, begin, guard, self._heard, self._records, self._appended)
        with guard:
            self._logger.take(p.Persist(every))

    def add(self, queued: Queued, data: memoryview, *, is_paused: bool) -> None:
        """Append this one, too, if it leads on from what can be restored."""
        record = queued.record
        if is_paused:
            self._leave_out(record.step, "a shadow of the run is not there")
            return
        if not self._is_whole and (record.step - 1) % self._every:
            return
        if self._waiting_bytes + len(data) > max(LEAST_BYTES, 4 * len(data)):
            self._leave_out(record.step, "the store is slower than steps come")
            return
        if self._opened is None or not self._is_whole or queued.opened is not self._told:
            self._told = queued.opened
            self._opened = msgspec.structs.replace(queued.opened, base=record.step - 1)
        self._is_whole = True
        record = msgspec.structs.replace(record, nbytes=len(data))  # gradients are in it by now
        self._waiting_bytes += len(data)
        self._records.add(record, data)
        self._logger.add(Queued(record, self._opened))

    def _leave_out(self, step: int, why: str) -> None:
        """Of this step there is no record, nor of those up to the next full checkpoint."""
        last = step + -step % self._every - 1  # the one after it is stored in full
        if self._is_whole and last >= step:
            told = f"rank {self._rank}: steps {step} to {last} are not logged: {why}"
            self._say(logging.WARNING, told)
        self._is_whole = False

    def _appended(self, queued: Queued, place: Appended | None) -> None:
        self._free(queued)

    def _free(self, queued: Queued) -> None:
        self._records.free(queued.record)
        self._waiting_bytes -= queued.record.nbytes

    def _heard(self, message: Struct) -> None:
        """What the logger tells."""
        if isinstance(message, p.NotLogged):
            for queued in self._logger.forget():
                self._free(queued)
            self._leave_out(message.step, message.error[1])
        elif isinstance(message, p.Notice):
            self._say(message.level, message.text)

    def close(self) -> None:
        """Append what waits, and end. Call it without `guard`."""
        self._logger.close()
