"""One rank's state in a shadow: folded as its records come, and written at every so many steps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.copies import Copy
from everystep.agent.image import Image
from everystep.agent.process import LOCK_SLOT
from everystep.agent.relay import Limit
from everystep.agent.rings import Queued
from everystep.agent.shadow_log import ShadowLog
from everystep.agent.slots import Slot, State
from everystep.agent.writer import Writer
from everystep.errors import EverystepError, StoreFailed
from everystep.store import format as fmt
from everystep.store.backend import NewFile
from everystep.store.local import LocalBackend
from everystep.store.newest import Newest
from everystep.store.retention import Retention
from everystep.store.run import Run
from everystep.types import StepRef, is_timeline


class GradientSource(Protocol):
    """Gradients of each step that the records do not hold. Any thread may call it."""

    def begin(self, session: int, ranks: int, hosts: Sequence[str]) -> None:
        """A session begins, or goes on: its collectives are counted from 0.

        Args:
            session: its number.
            ranks: of its process group.
            hosts: the IP address of each rank, where that is known.
        """
        ...

    def whole(
        self, record: p.Record, data: memoryview, layout: bytes, alive: Callable[[], None]
    ) -> memoryview:
        """The record with the gradients in it; waits until they have been seen.

        Args:
            layout: of the record.
            alive: called now and then meanwhile.

        Raises:
            NotSeen: a part of them is lost.
            Unexplained: what was seen is not what the optimizer was given.
            Damaged: it is no record.
        """
        ...

    def begin_from(self, step: int) -> None:
        """The state after this step was given: nothing before it is needed any more."""
        ...

    def close(self) -> None:
        """End."""
        ...


class NotSeen(StoreFailed):
    """A step's gradients were not seen whole on the network."""


class Unexplained(StoreFailed):
    """A step's gradients are not those that were seen times one number."""


class Keeping(Struct, frozen=True, kw_only=True):
    """How a shadow keeps states."""

    path: Path
    """Of its run."""
    persist_every: int
    """Steps."""
    keep_last: int
    """Steps on its store."""
    deltas: bool = False
    """Whether each step's record is written, too."""


class ShadowCopy(Copy):
    """By one thread at a time, but for the properties.

    Args:
        keeping: where, and how.
        begin: the owner's session.
        bound: how far all ranks' copies go.
        wire: leads to the owner.
        source: of gradients that records do not hold.
        say: takes sentences for the user, and how urgent they are.

    Raises:
        StoreError: the directory cannot be written.
        StoreFailed: it holds another run.
    """

    def __init__(
        self,
        keeping: Keeping,
        begin: p.Begin,
        bound: Limit,
        wire: w.Wire,
        source: GradientSource | None,
        say: Callable[[int, str], None],
    ) -> None:
        self._keeping, self._source, self._say = keeping, source, say
        if not (is_timeline(begin.timeline) and 0 <= begin.rank < begin.world_size):
            raise StoreFailed("a session that makes no sense", path=ascii(begin.timeline)[:100])
        backend = LocalBackend.made(keeping.path)
        _be_of(backend, begin)
        steps = Run(backend, fmt.RunRecord(run=begin.run, created="")).listing().steps
        known = [entry for entry in steps if entry.ref.timeline == begin.timeline]
        if source is not None:
            hosts = [] if begin.shadow is None else begin.shadow.hosts
            source.begin(begin.session, begin.world_size, hosts)
        begin = msgspec.structs.replace(
            begin, known=known, pinned=[], retention=Retention(keep_last=keeping.keep_last),
            shadow=None,
        )  # fmt: skip
        self._others = bound
        self._last: int | None = None
        """What was the bound when training had ended."""
        super().__init__(keeping.path, begin, self, wire)
        self._writer: Writer | None = None
        self._log: ShadowLog | None = None
        self._lock = contextlib.ExitStack()
        self.kept: int | None = None
        """The step to which it can go; None: there is no state."""
        self.stored: int | None = None
        """The newest step that is on the store."""
        self._is_paused = False

    def begin_from(self, base: w.Base) -> None:
        """See `Copy.begin_from`."""
        if self._source is not None:
            self._source.begin_from(base.seal.step)
        self.kept = None
        super().begin_from(base)
        slots, replica = self._slots, self._replica
        if slots is None or replica is None:
            return
        backend = LocalBackend(self._path)
        self._lock.enter_context(backend.lock(fmt.LOCK_FILE, LOCK_SLOT + self.begin.rank))
        self._writer = Writer(backend, self.begin, self._guard, self._heard)
        if self._keeping.deltas:
            every = self._keeping.persist_every
            self._log = ShadowLog(backend, self.begin, self._guard, self._say, every)
        with self._guard:
            self._writer.slots = slots
            replica.take(p.Persist(0 if self._is_paused else self._keeping.persist_every))
        if self.begin.world_size > 1:  # what an earlier copy of this rank has told is over
            begin = self.begin
            Newest(backend, begin.session, begin.rank, begin.world_size).forget_own()
        self.kept = base.seal.step

    def _first(self, image: Image) -> Slot[Image]:
        return Slot(0, State.SEALED, image, 1, wanted=True)

    def add(self, message: w.Next) -> None:
        """See `Copy.add`."""
        super().add(message)
        self.kept = message.record.step

    def _received(self, queued: Queued, data: memoryview) -> None:
        super()._received(queued, data)
        if self._log is not None:
            self._log.add(queued, data, is_paused=self._is_paused)

    def _whole(self, record: p.Record, data: memoryview, opened: p.OpenLog) -> memoryview:
        if self._source is None:
            return data
        try:
            return self._source.whole(record, data, opened.layout, self._alive)
        except Unexplained:
            self.is_lasting = True
            raise

    def _heard(self, message: Struct) -> None:
        """What the writer tells."""
        if isinstance(message, p.Stored):
            self.stored = message.step
        elif isinstance(message, p.Notice):
            self._say(message.level, message.text)
        elif isinstance(message, p.NotStored) and message.error is not None:
            ref = StepRef(self.begin.timeline, message.step)
            self._say(logging.ERROR, f"step {ref} of rank {self.begin.rank}: {message.error[1]}")

    def persist_at(self, step: int) -> None:
        """Have the state written at this step, too."""
        with self._guard:
            if self._replica is not None:
                self._replica.persist_at(step)

    def step(self, newest: int) -> int:
        """See `Limit`. Copies that have been written go, and hold back nobody: so it is not asked
        any more where all are about to agree on the last step."""
        return self._others.step(newest) if self._last is None else self._last

    def pause(self, *, on: bool) -> None:
        """Write nothing before training ends, or (`on=False`) as usual again."""
        with self._guard:
            self._is_paused = on
            if self._replica is not None:
                self._replica.take(p.Persist(0 if on else self._keeping.persist_every))

    # ------------------------------------------------------------ the end

    def rescue(self) -> bool:
        """Write the state at the step that all ranks' copies agree on; see `Copy.rescue`."""
        replica, slots, writer = self._replica, self._slots, self._writer
        if replica is None or slots is None or writer is None or not self.is_there:
            return False
        self._last = self._others.step(0)
        try:
            self._drain(replica, slots, writer)
        finally:
            self._drop()
        return True

    def _drop(self) -> None:
        self.kept = None
        writer, self._writer = self._writer, None
        if writer is not None:
            replica, self._replica = self._replica, None
            if replica is not None:
                with contextlib.suppress(EverystepError):
                    replica.close()
            writer.close()
        log, self._log = self._log, None
        if log is not None:
            log.close()
        super()._drop()
        self._lock.close()


def _be_of(backend: LocalBackend, begin: p.Begin) -> None:
    """Let a directory be of the owner's run.

    Raises:
        StoreFailed: it is of another one.
    """
    identity: Mapping[str, Any] = dict(begin.identity)
    for name, data in identity.items():
        if not fmt.is_identity(name):
            raise StoreFailed("a file that is none of a run's identity", path=ascii(name)[:100])
        try:
            backend.size(name)
        except EverystepError:
            backend.put([NewFile(name, len(data), [data])])
    found = Run.open(Path(backend.abilities.location)).id
    if found != begin.run:
        raise StoreFailed(
            "the shadow's directory holds another run",
            path=backend.abilities.location,
            expected=begin.run,
            found=found,
            hint="start it with an empty directory",
        )
