"""Appends the trainer's records to the log, some at a time, in a thread of the agent."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.rings import Memory, Queued
from everystep.agent.writer import RETRY_S
from everystep.errors import EverystepError, StoreError, StoreFailed
from everystep.store.backend import Backend
from everystep.store.log import Appended, Log, NewRecord
from everystep.store.logformat import LOGS, parse_log_path
from everystep.store.segments import scan
from everystep.types import StepRef

_TRIES_AT_THE_END = 3
_MOST_BYTES = 256 << 20
"""More is not appended at once, so that memory becomes free in between."""


class Logger:
    """Appends what it is given, in one thread. All methods but `close` are called with `guard`
    held.

    Args:
        guard: notified whenever there may be something to do.
        tell: takes messages for the trainer.
        rings: where records lie.
        appended: called with each record that is durable, which it takes over, and where it lies.
    """

    def __init__(
        self,
        backend: Backend,
        begin: p.Begin,
        guard: threading.Condition,
        tell: Callable[[Struct], None],
        rings: Memory,
        appended: Callable[[Queued, Appended], None],
    ) -> None:
        self._begin, self._guard, self._tell = begin, guard, tell
        self._rings, self._appended = rings, appended
        self._backend = backend
        self._log = Log(
            backend,
            run=begin.run,
            timeline=begin.timeline,
            session=begin.session,
            rank=begin.rank,
            world_size=begin.world_size,
        )
        self._written_of: p.OpenLog | None = None
        self._ended = False
        """The segment is to end with what was appended last."""
        self._waiting: collections.deque[Queued] = collections.deque()
        self._batch = 1
        self._full_every = 0
        """A segment ends with each step whose number is a multiple of this; 0: none does."""
        self._flush_up_to = 0
        self._hurry = self._stop = self._writing = False
        self._retry_at_s = 0.0
        self._tries_left = _TRIES_AT_THE_END
        self._thread = threading.Thread(target=self._work, name="everystep-log", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called with `guard` held

    def take(self, message: Struct) -> None:
        """Act on what the trainer says of records."""
        if isinstance(message, p.Batch):
            self._batch = max(1, message.records)
        elif isinstance(message, p.Persist):
            self._full_every = message.steps
        else:  # all at once is wanted, or another layout follows, with which a batch ends
            self._flush()
        self._guard.notify_all()

    def add(self, queued: Queued) -> None:
        """Append this one, too."""
        self._waiting.append(queued)
        self._tries_left = _TRIES_AT_THE_END
        self._guard.notify_all()

    def forget(self) -> list[Queued]:
        """Give up what waits, where the store refuses it; returns that. Not while it is written."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def _flush(self) -> None:
        if self._waiting:
            self._flush_up_to = self._waiting[-1].record.number

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
                self._guard.notify_all()

    def _is_due(self) -> bool:
        if not self._waiting or time.monotonic() < self._retry_at_s:
            return False
        if self._tries_left <= 0 and self._stop:
            return False
        first = self._waiting[0].record.number
        full = len(self._waiting) >= self._batch or any(map(self._ends, self._waiting))
        return full or self._hurry or self._stop or first <= self._flush_up_to

    def _ends(self, queued: Queued) -> bool:
        """Whether a segment, and so a batch, ends with a record."""
        return self._full_every > 0 and queued.record.step % self._full_every == 0

    def _next_batch(self) -> list[Queued]:
        """The oldest that wait, of one layout."""
        batch: list[Queued] = []
        nbytes = 0
        for one in self._waiting:
            nbytes += one.record.nbytes
            if batch and (one.opened is not batch[0].opened or nbytes > _MOST_BYTES):
                break
            batch.append(one)
            if self._ends(one):
                break
        return batch

    def _append(self, batch: list[Queued]) -> None:
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
            for place in self._log.appended:
                self._appended(self._waiting.popleft(), place)
            self._ended = self._ends(batch[-1])
            self._tell(
                p.Logged(
                    number=last.number,
                    step=last.step,
                    written_bytes=written,
                    took_s=ended_s - started_s,
                    at_s=ended_s,
                )
            )

    def _store(self, batch: list[Queued]) -> int:
        opened = batch[0].opened
        if opened is not self._written_of or self._ended:
            base, after = opened.base, None
            if self._written_of is None:
                base, after = self._before(batch[0].record.step, base)
            else:
                with contextlib.suppress(StoreError):  # an index less
                    self._log.seal()
            if self._ended and opened is self._written_of:
                base = batch[0].record.step - 1
            self._log.begin(base, opened.layout, after)
            self._written_of, self._ended = opened, False
        views: list[memoryview] = []
        try:
            for record in (one.record for one in batch):
                with self._guard:
                    views.append(self._rings.view(record))
            records = [
                NewRecord(one.record.step, one.record.nbytes, [view])
                for one, view in zip(batch, views, strict=True)
            ]
            return self._log.append(records)
        finally:
            for view in views:
                view.release()

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
