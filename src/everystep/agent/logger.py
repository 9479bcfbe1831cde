"""Appends the trainer's records to the log, some at a time, in a thread of the agent."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.arena import Arena
from everystep.agent.writer import RETRY_S
from everystep.errors import EverystepError, StoreError, StoreFailed
from everystep.store.backend import Backend
from everystep.store.log import Log, NewRecord
from everystep.store.logformat import LOGS, parse_log_path
from everystep.store.segments import scan
from everystep.types import StepRef

MESSAGES = (p.OpenLog, p.OpenRing, p.Record, p.Batch, p.Flush)
"""Those of the trainer that are for a `Logger`."""

_TRIES_AT_THE_END = 3
_MOST_BYTES = 256 << 20
"""More is not appended at once, so that memory becomes free in between."""


class _Waiting(NamedTuple):
    record: p.Record
    opened: p.OpenLog


class Logger:
    """Appends what it is given, in one thread. All methods but `close` are called with `guard`
    held.

    Args:
        guard: notified whenever there may be something to do.
        tell: takes messages for the trainer.
    """

    def __init__(
        self,
        backend: Backend,
        begin: p.Begin,
        guard: threading.Condition,
        tell: Callable[[Struct], None],
    ) -> None:
        self._begin, self._guard, self._tell = begin, guard, tell
        self._backend = backend
        self._log = Log(
            backend,
            run=begin.run,
            timeline=begin.timeline,
            session=begin.session,
            rank=begin.rank,
            world_size=begin.world_size,
        )
        self._opened: p.OpenLog | None = None
        self._written_of: p.OpenLog | None = None
        self._rings: dict[int, Arena] = {}
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._batch = 1
        self._flush_up_to = 0
        self._hurry = self._stop = self._writing = False
        self._retry_at_s = 0.0
        self._tries_left = _TRIES_AT_THE_END
        self._thread = threading.Thread(target=self._work, name="everystep-log", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called with `guard` held

    def take(self, message: Struct, fd: int | None) -> None:
        """Act on one of `MESSAGES`.

        Args:
            fd: came along; it is taken over.

        Raises:
            StoreFailed: memory cannot be mapped, or nothing was said of what a record is.
        """
        if isinstance(message, p.OpenRing):
            self._open_ring(message, fd)
        elif isinstance(message, p.OpenLog):
            self._opened = message
            self._flush()  # a batch ends with its layout
        elif isinstance(message, p.Record):
            self._add(message)
        elif isinstance(message, p.Batch):
            self._batch = max(1, message.records)
        elif isinstance(message, p.Flush):
            self._flush()
        self._guard.notify_all()

    def _open_ring(self, message: p.OpenRing, fd: int | None) -> None:
        if fd is None or message.ring in self._rings:
            if fd is not None:
                os.close(fd)
            raise StoreFailed("memory for records that is none", found=str(message))
        self._rings[message.ring] = Arena(fd, *message.arena)

    def _flush(self) -> None:
        if self._waiting:
            self._flush_up_to = self._waiting[-1].record.number

    def _add(self, record: p.Record) -> None:
        if self._opened is None:
            raise StoreFailed("a record of no layout", found=str(record))
        self._waiting.append(_Waiting(record, self._opened))
        self._tries_left = _TRIES_AT_THE_END

    def drain(self, *, on: bool) -> None:
        """Append everything at once from now on, or (`on=False`) in batches again."""
        if on and not self._hurry:
            self._tries_left = _TRIES_AT_THE_END
        self._hurry = on
        self._guard.notify_all()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether all that can be appended is, if nothing new will come."""
        return not self._writing and (not self._waiting or self._tries_left <= 0)

    def unsaved(self) -> list[StepRef]:
        """The steps whose records are in memory only."""
        return [StepRef(self._begin.timeline, one.record.step) for one in self._waiting]

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            with self._guard:
                while not self._is_due():
                    if self._stop and (not self._waiting or self._tries_left <= 0):
                        return
                    self._guard.wait(RETRY_S / 2)
                batch = self._next_batch()
                self._writing = True
            self._append(batch)
            with self._guard:
                self._drop_rings()
                self._guard.notify_all()

    def _is_due(self) -> bool:
        if not self._waiting or time.monotonic() < self._retry_at_s:
            return False
        if self._tries_left <= 0 and self._stop:
            return False
        first = self._waiting[0].record.number
        full = len(self._waiting) >= self._batch
        return full or self._hurry or self._stop or first <= self._flush_up_to

    def _next_batch(self) -> list[_Waiting]:
        """The oldest that wait, of one layout."""
        batch: list[_Waiting] = []
        nbytes = 0
        for one in self._waiting:
            nbytes += one.record.nbytes
            if batch and (one.opened is not batch[0].opened or nbytes > _MOST_BYTES):
                break
            batch.append(one)
        return batch

    def _append(self, batch: list[_Waiting]) -> None:
        started_s = time.monotonic()
        # of an error only the words are kept: its frames hold views of the records
        problem: tuple[str, str, str | None] | None = None
        written = 0
        try:
            written = self._store(batch)
        except EverystepError as error:
            problem = (type(error).__name__, error.headline(), error.hint)
        except (OSError, MemoryError) as error:
            problem = (StoreFailed.__name__, f"the agent failed: {error}", None)
        ended_s = time.monotonic()
        last = batch[-1].record
        with self._guard:
            self._writing = False
            if problem is not None:
                self._tell(p.NotLogged(step=batch[0].record.step, error=problem))
                self._tries_left -= 1
                self._retry_at_s = ended_s + RETRY_S
                self._flush_up_to = max(self._flush_up_to, last.number)  # however few they are
                return
            self._tries_left = _TRIES_AT_THE_END
            for _ in batch:
                self._waiting.popleft()
            self._tell(
                p.Logged(
                    number=last.number,
                    step=last.step,
                    written_bytes=written,
                    took_s=ended_s - started_s,
                    at_s=ended_s,
                )
            )

    def _store(self, batch: list[_Waiting]) -> int:
        opened = batch[0].opened
        if opened is not self._written_of:
            base, after = opened.base, None
            if self._written_of is None:
                base, after = self._before(batch[0].record.step, base)
            else:
                with contextlib.suppress(StoreError):  # an index less
                    self._log.seal()
            self._log.begin(base, opened.layout, after)
            self._written_of = opened
        views: list[memoryview] = []
        try:
            for record in (one.record for one in batch):
                views.append(self._view(record))
            records = [
                NewRecord(one.record.step, one.record.nbytes, [view])
                for one, view in zip(batch, views, strict=True)
            ]
            return self._log.append(records)
        finally:
            for view in views:
                view.release()

    def _view(self, record: p.Record) -> memoryview:
        ring = self._rings.get(record.ring)
        if ring is None or record.offset + record.nbytes > len(ring):
            raise StoreFailed("a record lies outside of its memory", found=str(record))
        return ring.view(record.offset, record.nbytes)

    def _before(self, step: int, base: int) -> tuple[int, bytes | None]:
        """The newest record before a step that an agent before this one has appended in this
        session, and its digest.

        What that agent has appended of this step and later ones is not believed, and appended
        again: it may have died before the fsync.
        """
        begin = self._begin
        newest: tuple[int, bytes | None] = (base, None)
        for entry in self._backend.list(f"{LOGS}/{begin.timeline}"):
            segment = parse_log_path(entry.name)
            if segment is None or (segment.session, segment.rank) != (begin.session, begin.rank):
                continue
            for found in scan(self._backend, entry.name, begin.run).records:
                if found.step < step and (newest[1] is None or found.step >= newest[0]):
                    newest = (found.step, found.digest)
        return max(base, newest[0]), newest[1]

    def _drop_rings(self) -> None:
        """Unmap those but the newest that nothing lies in any more."""
        used = {one.record.ring for one in self._waiting} | {max(self._rings, default=0)}
        for number in [number for number in self._rings if number not in used]:
            self._rings.pop(number).close()

    def close(self) -> None:
        """End the thread once nothing is left that it can append. Call it without `guard`."""
        with self._guard:
            self._stop = True
            self._guard.notify_all()
        self._thread.join()
        try:
            self._log.seal()
        except StoreError as error:
            self._tell(p.Notice(logging.WARNING, f"the log was not sealed: {error.headline()}"))
        for ring in self._rings.values():
            ring.close()
