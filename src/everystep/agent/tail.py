"""The trainer's end of the log: records in shared memory, kept until the agent has made them
durable, so that an agent that dies takes none along."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.arena import whole_pages
from everystep.agent.ring import Ring
from everystep.errors import StoreFailed

LEAST_RING_BYTES = 4 << 20
RECORDS_AT_ONCE = 8
"""A ring has room for so many records like the first, or for two batches."""

_ALIGNMENT = 64
"""Of records, in bytes: tensors lie in them."""

Send = Callable[[Struct, int | None], None]


class _Kept(NamedTuple):
    """A record that is not known to be durable."""

    record: p.Record
    opened: p.OpenLog


class Tail:
    """A `RecordSink` whose other end is the agent.

    Args:
        changed: guards it; notified when there is news.
        send: sends a message, and a descriptor, to the agent there is; called with `changed`
            held.
        until_sent: returns when all that was sent has left this process; called without it.
        alone: whether there has been no agent for too long.
    """

    def __init__(
        self,
        changed: threading.Condition,
        send: Send,
        until_sent: Callable[[], None],
        alone: Callable[[], bool],
    ) -> None:
        self._changed, self._send, self._alone = changed, send, alone
        self._until_sent = until_sent
        self._rings: list[Ring] = []
        self._kept: collections.deque[_Kept] = collections.deque()
        self._opened: p.OpenLog | None = None
        self._batch = p.Batch(1)
        self._numbers = 0
        self._ring_numbers = 0
        self._reserved: tuple[Ring, int, int] | None = None
        self._budget_bytes: int | None = None
        self._mirrored = False
        self._persist: p.Persist | None = None
        self.refusal: str | None = None
        """Why the store does not take what waits; None: it does, as far as is known."""

    def begin(self, budget_bytes: int | None, *, mirrored: bool = False) -> None:
        """A session begins; call it with `changed` held. What another one has left is given up.

        Args:
            budget_bytes: the most memory for records that wait; None: as they need.
            mirrored: a record is kept until it is folded, not only until it is durable.
        """
        self._budget_bytes, self._mirrored = budget_bytes, mirrored
        self._opened, self._reserved, self._persist = None, None, None
        self._batch, self.refusal = p.Batch(1), None
        self._kept.clear()
        self._drop_rings(self._rings)

    # ------------------------------------------------------------ a RecordSink

    def open_log(self, base: int, layout: bytes) -> None:
        """See `RecordSink.open_log`."""
        with self._changed:
            self._opened = p.OpenLog(base=base, layout=layout)
            self._send(self._opened, None)

    def set_batch(self, records: int) -> None:
        """See `RecordSink.set_batch`."""
        with self._changed:
            if self._batch.records != records:
                self._batch = p.Batch(records)
                self._send(self._batch, None)

    def persist_every(self, steps: int) -> None:
        """Have the replica written after every so many steps; 0: not any more."""
        with self._changed:
            if self._persist is None or self._persist.steps != steps:
                self._persist = p.Persist(steps)
                self._send(self._persist, None)

    def rebase(self, step: int) -> None:
        """Have the replica give its slot to this step, which comes whole."""
        with self._changed:
            self._send(p.Rebase(step), None)

    def reserve(self, nbytes: int, wait_s: float) -> memoryview | None:
        """See `RecordSink.reserve`."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            hurried = False
            while True:
                ring = self._ring_for(nbytes)
                offset = (
                    None
                    if ring is None
                    else ring.stretches.take(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)
                )
                if ring is not None and offset is not None:
                    self._reserved = (ring, offset, nbytes)
                    return ring.arena.view(offset, nbytes)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self.refusal is not None or self._alone():
                    return None
                if not hurried:
                    self._send(p.Flush(), None)
                    hurried = True
                self._changed.wait(min(left_s, 1.0))

    def _ring_for(self, nbytes: int) -> Ring | None:
        """The newest ring, or a larger one where this record would fill half of it; None: that
        must wait until older ones are empty."""
        newest = self._rings[-1] if self._rings else None
        if newest is not None and 2 * nbytes <= newest.stretches.nbytes:
            return newest
        wanted = max(LEAST_RING_BYTES, nbytes * max(RECORDS_AT_ONCE, 2 * self._batch.records))
        if self._budget_bytes is not None:
            fits = newest is not None and nbytes <= newest.stretches.nbytes
            if 2 * whole_pages(nbytes) > self._budget_bytes:
                if fits:
                    return newest
                raise StoreFailed(
                    "two records do not fit the memory for them",
                    expected=f"<= {self._budget_bytes // 2:,} bytes",
                    found=f"{nbytes:,}",
                    hint="raise Deltas(buffer_bytes=…), or use Full()",
                )
            self._drop_rings([ring for ring in self._rings if not len(ring.stretches)])
            left = self._budget_bytes - sum(len(ring.arena) for ring in self._rings)
            if left < 2 * whole_pages(nbytes):
                return newest if fits and newest in self._rings else None
            wanted = min(wanted, left)
        self._ring_numbers += 1
        ring = Ring(self._ring_numbers, nbytes, wanted)
        self._rings.append(ring)
        self._send(p.OpenRing(ring.number, ring.facts), ring.arena.fd)
        self._drop_idle()
        return ring

    def publish(self, step: int, safe: int | None = None) -> None:
        """See `RecordSink.publish`."""
        with self._changed:
            reserved, self._reserved = self._reserved, None
            if reserved is None or self._opened is None:
                raise StoreFailed("the memory of a record was lost while it was filled")
            ring, offset, nbytes = reserved
            self._numbers += 1
            record = p.Record(
                number=self._numbers, step=step, ring=ring.number, offset=offset, nbytes=nbytes,
                safe=step if safe is None else safe,
            )  # fmt: skip
            self._kept.append(_Kept(record, self._opened))
            self._send(record, None)
        self._until_sent()

    def withdraw(self) -> None:
        """See `RecordSink.withdraw`."""
        with self._changed:
            reserved, self._reserved = self._reserved, None
            if reserved is not None:
                reserved[0].stretches.take_back()

    def unsaved(self) -> list[int]:
        """The steps whose records are not known to be durable."""
        with self._changed:
            return [kept.record.step for kept in self._kept]

    # ------------------------------------------------------------ for the client, `changed` held

    def heard(self, message: p.Logged | p.NotLogged | p.Folded) -> None:
        """Free what is not needed any more. Where the store refuses, nobody waits for that any
        more."""
        if isinstance(message, p.NotLogged):
            self.refusal = message.error[1]
            return
        if isinstance(message, p.Logged):
            self.refusal = None
        if not isinstance(message, p.Folded if self._mirrored else p.Logged):
            return
        rings = {ring.number: ring for ring in self._rings}
        while self._kept and self._kept[0].record.number <= message.number:
            kept = self._kept.popleft()
            rings[kept.record.ring].stretches.free()
        self._drop_idle()

    def handed_over(self) -> Iterator[tuple[Any, int | None]]:
        """All that a new agent must be told, in order: messages and their descriptors."""
        for ring in self._rings:
            yield p.OpenRing(ring.number, ring.facts), ring.arena.fd
        yield self._batch, None
        if self._persist is not None:
            yield self._persist, None
        opened: p.OpenLog | None = None
        for kept in self._kept:
            if kept.opened is not opened:
                opened = kept.opened
                yield msgspec.structs.replace(opened, stale=self._mirrored), None
            yield kept.record, None
        if self._opened is not None and self._opened is not opened:
            yield msgspec.structs.replace(self._opened, stale=self._mirrored), None
        if not self._mirrored:  # all that the one before may have folded in is known by now
            yield p.Rebase(0), None
        yield p.Flush(), None  # somebody may be waiting for room

    def close(self) -> None:
        """Unmap everything."""
        self._kept.clear()
        self._drop_rings(self._rings)

    def _drop_idle(self) -> None:
        self._drop_rings([ring for ring in self._rings[:-1] if not len(ring.stretches)])

    def _drop_rings(self, rings: list[Ring]) -> None:
        for ring in list(rings):
            self._rings.remove(ring)
            ring.close()
