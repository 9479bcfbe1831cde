"""The thread of the agent that makes sealed steps durable, and looks after the store."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from everystep.agent.image import Image
from everystep.agent.measures import Measures
from everystep.agent.protocol import Began, Begin, Diverged, Notice, NotStored, Stored
from everystep.agent.slots import Slot, Slots
from everystep.errors import Damaged, EverystepError, Missing, StoreError, StoreFailed
from everystep.planning.hiding import Interval
from everystep.store import format as fmt
from everystep.store.backend import Backend, NewFile
from everystep.store.format import DataFile, RankRecord
from everystep.store.full import write_part
from everystep.store.increments import Durable
from everystep.store.local import LocalBackend
from everystep.store.measured import Measure, MeasuredBy, Span, write_lines
from everystep.store.retention import Upkeep
from everystep.store.run import Run, StepEntry
from everystep.types import StepRef

RETRY_S = 1.0
"""A step that the store refused is tried again after this time."""

_TRIES_AT_THE_END = 3
_MEASURES_EVERY_S = 10.0
_LATE_STEPS = 8
"""After so many steps that some rank has not stored, say so."""


def ranks_behind(waiting: Sequence[StepEntry]) -> tuple[StepRef | None, str | None]:
    """What there is to say of steps that have not become complete: the first whose ranks hold
    different bits, and a warning where a rank seems to have given up."""
    diverged = next((entry.ref for entry in waiting if entry.diverged), None)
    late = [entry for entry in waiting if entry.missing_ranks]
    if len(late) < _LATE_STEPS or len(late) % _LATE_STEPS:
        return diverged, None
    return diverged, (
        f"step {late[0].ref} is not complete: nothing of rank {late[0].missing} yet; does every "
        "rank call step()?"
    )


def not_removed(error: StoreError) -> str:
    """What to say where retention fails."""
    return f"old checkpoints could not be removed: {error.headline()}"


def keep_identity(backend: Backend, identity: Sequence[tuple[str, bytes]]) -> str | None:
    """Make sure that the directory is still that of a run: steps in one that somebody has emptied
    could never be restored. Returns what to tell, if it was not.

    Args:
        identity: files that make it one: name and bytes.

    Raises:
        StoreError: they cannot be written.
    """
    try:
        backend.size(fmt.RUN_FILE)
    except Missing:
        for name, data in identity:
            backend.put([NewFile(name, len(data), [data])])
        return f"{fmt.RUN_FILE} is gone, and any steps with it: written again"
    return None


class Writer:
    """Writes what `slots` say, in one thread. Its owner's methods are called with `guard` held.

    Args:
        run: the run, at home in its backend.
        slots: the slots, which change under `guard`.
        guard: notified whenever there may be something to do.
        tell: takes messages for the trainer; called from the thread, with `guard` or without.
    """

    def __init__(
        self,
        backend: LocalBackend,
        begin: Begin,
        guard: threading.Condition,
        tell: Callable[[Struct], None],
    ) -> None:
        self._backend, self._begin, self._guard, self._tell = backend, begin, guard, tell
        self._by = MeasuredBy(begin.session, begin.rank, begin.world_size)
        self._run = Run(backend, fmt.RunRecord(run=begin.run, created=""))
        known = [*begin.known, *self._of_this_session()]
        self._upkeep = Upkeep(self._run, begin.retention, begin.rank, known, begin.pinned)
        self.slots: Slots[Image] | None = None
        self._durable: Durable | None = None
        """The newest image of a replica that this thread has written."""
        self._measures = Measures()
        self._measures_due_s = 0.0
        self._interval = Interval()
        self._steps_seen = 0
        self._last_seal_s: float | None = None
        self._seal_gap_s = 0.0
        self._retry_at_s = 0.0
        self._tries_left = _TRIES_AT_THE_END
        self._stop = False
        tell(Began(begin.session))  # before whatever the thread has to tell
        self._thread = threading.Thread(target=self._work, name="everystep-write", daemon=True)
        self._thread.start()

    def _of_this_session(self) -> list[StepEntry]:
        """What an agent before this one has stored."""
        begin = self._begin
        try:
            steps = self._run.listing().steps
        except StoreError:
            return []
        return [e for e in steps if (e.session, e.ref.timeline) == (begin.session, begin.timeline)]

    # ------------------------------------------------------------ called with `guard` held

    def seal(self, index: int, image: Image, slots: Slots[Image]) -> None:
        """Take a whole step."""
        now_s = time.monotonic()
        if self._last_seal_s is not None:
            gap_s = now_s - self._last_seal_s
            self._seal_gap_s = gap_s if not self._seal_gap_s else (self._seal_gap_s + gap_s) / 2
        self._last_seal_s = now_s
        self._steps_seen += 1
        # those between deltas are far apart, and none gives way to one that is not taken yet
        wanted = self._steps_seen == 1 or image.seal.owed or self._begin.logs
        checkpoint = image.seal.step // max(1, image.seal.every)
        if self._begin.world_size > 1:  # ranks choose on their own, and must choose alike
            wanted = wanted or checkpoint % self._interval.steps == 0
        slots.seal(index, image, wanted=wanted)
        self._tries_left = _TRIES_AT_THE_END

    def measured(self, measure: Measure) -> None:
        """Take what the trainer has measured of a step."""
        self._measures.measured(measure)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether all that can be written is written, if no new step will come."""
        if self.slots is None:
            return True
        unsaved = self.slots.unsaved()
        return not unsaved or (self._tries_left <= 0 and not self._is_writing())

    def _is_writing(self) -> bool:
        return self.slots is not None and any(s.state.value == "writing" for s in self.slots.all)

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while True:
            with self._guard:
                slot = self._wait_for_work()
                if slot is None:
                    break
            self._write(slot)
            self._keep_measures(at_the_end=False)
        self._keep_measures(at_the_end=True)

    def _wait_for_work(self) -> Slot[Image] | None:
        while True:
            slot = None
            if self.slots is not None and not self._must_pause():
                slot = self.slots.next_to_write(only_wanted=self._begin.world_size > 1)
            if slot is not None:
                return slot
            if self._stop:
                return None
            self._guard.wait(RETRY_S / 2)

    def _must_pause(self) -> bool:
        failing = self.slots is not None and any(slot.failures for slot in self.slots.unsaved())
        return failing and time.monotonic() < self._retry_at_s

    def _write(self, slot: Slot[Image]) -> None:
        image = slot.content
        if image is None:
            return
        started_s = time.monotonic()
        error: EverystepError | None = None
        written = 0
        try:
            written = self._store(image)
        except EverystepError as failure:
            error = failure
        except (OSError, MemoryError) as failure:
            error = StoreFailed(f"the agent failed: {failure}", step=image.ref)
        ended_s = time.monotonic()
        took_s = ended_s - started_s
        with self._guard:
            if error is None:
                self._note_stored(image, written, took_s, ended_s)
            else:
                told = (type(error).__name__, error.headline(), error.hint)
                self._tell(NotStored(step=image.ref.step, error=told))
                self._tries_left -= 1
            if self.slots is not None:
                self.slots.written(slot, saved=error is None)
            self._retry_at_s = ended_s + RETRY_S
            self._guard.notify_all()
        if error is None:
            self._look_after(image)

    def _note_stored(self, image: Image, written: int, took_s: float, at_s: float) -> None:
        step = image.ref.step
        stored = Stored(step=step, written_bytes=written, took_s=took_s, at_s=at_s)
        spans = [Span("write", at_s - took_s, at_s)]
        if image.hashing is not None:
            spans.insert(0, Span("hash", *image.hashing))
        self._measures.stored(stored, spans)
        self._tries_left = _TRIES_AT_THE_END
        self._choose_interval(written, took_s)
        self._tell(stored)

    def _store(self, image: Image) -> int:
        """Make a step durable; returns how many bytes that took. An agent that has died may have
        stored it and not said so: it is left alone then, since a writing that fails is undone."""
        for entry in self._run.entries(image.ref):
            if entry.session == self._begin.session and any(
                part.rank == self._begin.rank for part in entry.parts
            ):
                self._durable = None  # what it is made of is not known
                return 0
        if self._begin.rank == 0:
            lost = keep_identity(self._backend, self._begin.identity)
            if lost is not None:
                self._tell(Notice(logging.WARNING, lost))
        record = self._write_part(image)
        return sum(file.nbytes for file in record.files if file.step is None)

    def _write_part(self, image: Image) -> RankRecord:
        """All of a step, or of a replica what has changed."""
        part, specs = image.part(), image.specs
        if not self._begin.replica:
            return write_part(self._backend, part, specs, image.contents(), image.whole)
        last = self._durable
        if last is not None and not self._are_there(image.ref, last.used_files):
            last = None
        increment, whole = image.increment(last)
        record = write_part(self._backend, part, specs, increment.contents, whole)
        self._durable = increment.stored(image.ref, record.files, last)
        return record

    def _are_there(self, ref: StepRef, files: Sequence[DataFile]) -> bool:
        """Whether nobody has taken away what the next image would refer to."""
        try:
            sizes = [self._backend.size(fmt.data_path(ref, file)) for file in files]
        except (Missing, Damaged):
            return False
        return sizes == [file.nbytes for file in files]

    def _choose_interval(self, written: int, took_s: float) -> None:
        if self._seal_gap_s > 0 and took_s > 0 and written:
            rate = written / took_s
            self._interval = self._interval.observe(written, self._seal_gap_s, rate)

    def _look_after(self, image: Image) -> None:
        """Retention, and a look at the other ranks; never a reason to end anything."""
        try:
            waiting = self._upkeep.after_step(image.ref, self._begin.session, image.refers_to)
        except StoreError as error:
            self._tell(Notice(logging.ERROR, not_removed(error)))
            return
        diverged, late = ranks_behind(waiting)
        if late is not None:
            self._tell(Notice(logging.WARNING, late))
        if diverged is not None:
            self._tell(Diverged(diverged))

    def _keep_measures(self, *, at_the_end: bool) -> None:
        """Write what was measured, now and then; it is no loss where that fails."""
        if not at_the_end and time.monotonic() < self._measures_due_s:
            return
        self._measures_due_s = time.monotonic() + _MEASURES_EVERY_S
        with self._guard:
            lines = self._measures.lines()
        if lines:
            with contextlib.suppress(StoreError):
                write_lines(self._backend, self._by, lines)

    def close(self) -> None:
        """End the thread once nothing is left that it can write. Call it without `guard`."""
        with self._guard:
            self._stop = True
            self._guard.notify_all()
        self._thread.join()
        with contextlib.suppress(StoreError):
            self._upkeep.close()
        self._backend.release_spares()
