"""Reduced elements that a rank sends on by itself, after the all-reduce that left them out.

A ring never forwards one chunk of k: a mirror of one link misses it. A trainer may close that hole
with an ordinary send of the missing chunk (or of the whole buffer): separate queue pairs, protocol
Simple, one per all-reduce. Which one belongs to which is a matter of counting.
"""

from __future__ import annotations

from collections.abc import Iterator

from everystep.tap.bringup import NOT_RING
from everystep.tap.collectives import Collective, Expectations, Plan
from everystep.tap.connections import Connection
from everystep.tap.rings import Place, Ring
from everystep.tap.schedule import Extent, Sent
from everystep.tap.writes import Write

MAX_MESSAGE_BYTES = 131072
"""NCCL_P2P_NET_CHUNKSIZE."""

_MIN_PART_BYTES = 16384
_MAX_PENDING = 256


class Transfers:
    """All send/recv connections of one sender."""

    def __init__(self, expected: Expectations, place: Place, record: bool) -> None:
        self.expected = expected
        self.connections: list[Connection] = []
        self.collectives: list[Collective] = []
        self.number: int | None = None
        """Of the all-reduce whose elements come next."""
        self.is_lost = False
        """Whether messages were lost, and which of which all-reduce is unknown."""
        self._place = place
        self._record = record

    def add(self, connection: Connection) -> None:
        """Another connection of this sender."""
        self.connections.append(connection)
        self.connections.sort(key=lambda c: c.data_qp or 0)

    def walk(self, connection: Connection, write: Write, position: int, packets: int) -> int | None:
        """The position that begins `packets` after `position`, if transfers are alike."""
        lengths: tuple[int, ...] = (write.length,)  # before the first: all like this one
        window = connection.window_of(position - 1)
        if window is not None and window.stop == position:
            lengths = window.plan.lengths
        offsets = connection.spans(lengths)
        if offsets is None or (window is None and position):
            return None
        whole, rest = divmod(packets, offsets[-1])
        if rest not in offsets[:-1] or lengths[offsets.index(rest)] != write.length:
            return None
        return position + whole * len(lengths) + offsets.index(rest)

    def read(self, ring: Ring | None) -> bool:
        """Match what waits with all-reduces whose schedule is known; whether any was matched."""
        found = False
        while any(c.pending for c in self.connections) and self._next(ring):
            found = True
        for connection in self.connections:
            waiting = len(connection.pending)
            for write, window, place in connection.retry(self.walk):
                self._place(connection, write, window, place)
            found |= len(connection.pending) > waiting
        return found

    def give_up(self, *, final: bool) -> bool:
        """Leave out one message that belongs to no all-reduce, if it is time to."""
        waiting = sum(len(c.pending) for c in self.connections)
        if not waiting or not (final or waiting > _MAX_PENDING):
            return False
        return self._leave_out()

    def _next(self, ring: Ring | None) -> bool:
        if ring is None or ring.rank_index is None or self.is_lost:
            return False
        if self.number is None:
            self.number = self._first()
        if self.number is None:
            return False
        lost = 0
        while (schedule := self.expected.schedule(self.number + lost)) is not None:
            e = schedule.shape.element_bytes
            choices = [[(0, schedule.count)]]
            missing = schedule.missing_chunk(ring.rank_index)
            if len(missing) == 1:
                choices.insert(0, missing)
            for ((start, stop),) in choices:
                for plans in self._splits((start, stop), e):
                    if self._fits(plans, lost):
                        self._take(plans, lost)
                        return True
            if any(c.base in c.pending for c in self.connections):
                return False
            lost += 1
        return False

    def _first(self) -> int | None:
        if all(c.from_start for c in self.connections if c.base is not None):
            return 0
        frame = min(w.frame for c in self.connections for w in c.pending.values())
        return self.expected.number_before(frame)

    def _splits(self, extent: Extent, element_bytes: int) -> Iterator[list[Plan]]:
        """The ways in which NCCL may share a transfer out over the connections that are there."""
        start, stop = (extent[0] * element_bytes, extent[1] * element_bytes)
        tried = set()
        for channels in range(1, 65):
            part = -(-max(_MIN_PART_BYTES, -(-(stop - start) // channels)) // _MIN_PART_BYTES)
            part *= _MIN_PART_BYTES
            parts = -(-(stop - start) // part)
            if part in tried or parts > len(self.connections):
                continue
            tried.add(part)
            plans = [
                _plan(at, min(at + part, stop), element_bytes) for at in range(start, stop, part)
            ]
            yield plans

    def _fits(self, plans: list[Plan], lost: int) -> bool:
        agreeing = 0
        for connection, plan in zip(self.connections, plans, strict=False):
            if connection.base is None:
                return False
            base, psn = connection.base, connection.base_psn
            if lost:
                offsets = connection.spans(plan.lengths)
                if psn is None or offsets is None:
                    return False
                base += lost * len(plan.lengths)
                psn = (psn + lost * offsets[-1]) % (1 << 24)
            found = connection.fits(plan, base, psn)
            if found is None:
                return False
            agreeing += found[0]
        return agreeing > 0

    def _take(self, plans: list[Plan], lost: int) -> None:
        for _ in range(lost + 1):
            self._take_one(plans)

    def _take_one(self, plans: list[Plan]) -> None:
        number = self.number or 0
        self.number = number + 1
        collective = Collective("p2p", number, writes=[] if self._record else None)
        if self._record:
            self.collectives.append(collective)
        for connection, plan in zip(self.connections, plans, strict=False):
            for write in connection.take(plan, collective):
                window = connection.windows[-1]
                self._place(connection, write, window, (write.position or 0) - window.first)
            for write, window, place in connection.found_places():
                self._place(connection, write, window, place)

    def _leave_out(self) -> bool:
        stuck = [c for c in self.connections if c.pending]
        connection = min(stuck, key=lambda c: min(w.frame for w in c.pending.values()))
        self.is_lost |= connection.base not in connection.pending
        write = connection.skip()
        if write is not None:
            write.collective = collective = Collective(
                "other", 0, writes=[] if self._record else None
            )
            collective.saw(write)
            if self._record:
                self.collectives.append(collective)
        return True


def _plan(start: int, stop: int, element_bytes: int) -> Plan:
    """Messages that hold bytes [start, stop) of a buffer."""
    sends = []
    lengths = []
    for at in range(start, stop, MAX_MESSAGE_BYTES):
        end = min(at + MAX_MESSAGE_BYTES, stop)
        sends.append(Sent(NOT_RING, NOT_RING, at // element_bytes, end // element_bytes, True))
        lengths.append(end - at)
    return Plan(tuple(sends), tuple(lengths), "Simple", element_bytes)
