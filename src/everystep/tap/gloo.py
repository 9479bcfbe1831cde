"""Pieces of reduced buffers out of gloo's TCP streams.

gloo sends operations one behind the other: a preamble of 48 bytes, and for data the bytes. The
preamble names the collective (PyTorch counts all collectives of a process group: the tag), not the
place in the buffer; that follows from the order of the messages of one tag, by `gloo_schedule`.

What makes a place certain:

- Every message of the tag from its first on was seen. The first one seen is the first one sent if
  the stream was followed from its beginning, or if data of at least `threads` smaller tags has
  been seen since it was last found again: a rank takes collectives in the order of their tags, and
  works on so many at a time, so that what was under way in the gap has a smaller tag.
- Or there are just as many messages as the all-reduce has, of the right lengths.
- Or, behind a gap, the caller has said that the collective is over (`settle`), and the stream has
  gone on without a gap to one that is not, so that the last message seen is the last one sent.

Everything else is left out. Messages whose place is not yet certain (or the size of whose buffer
is not, where sizes are not told) wait in memory, up to a bound.

One decoder follows one process group. Where two streams seem to come from the same rank, the later
one is left out and counted (`conflicts`): tell the decoder which `ports` belong to the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from everystep.errors import UsageError
from everystep.tap.gloo_flows import Flow, Ring, Room
from everystep.tap.gloo_streams import NO_TAG, Body, Stream
from everystep.tap.packets import Parser
from everystep.tap.pieces import Announced, Packets, Table
from everystep.tap.ring import SCATTERED, Event, Refused, Scattered
from everystep.tap.tcp import BROKEN, ENDED, Extents, Reassembler

try:
    from everystep.tap import _tcp
except ImportError:  # no compiler where this was installed; Reassembler says so
    _tcp = None  # type: ignore[assignment]

_HEADER, _RESYNC, _SKIPPED, _WRONG = range(4)

_MARK = np.dtype(
    [
        ("position", "<u8"),
        ("length", "<u8"),
        ("slot", "<u8"),
        ("frame", "<u8"),
        ("opcode", "<u4"),
        ("kind", "<u4"),
    ]
)
_BODY = np.dtype([("position", "<u8"), ("stop", "<u8"), ("start", "<i8"), ("collective", "<u8")])

_PREAMBLE = 48
_DATA = 1
_ALL_REDUCE = 4
_STRANGER_BYTES = 4096  # from the start of a connection without a preamble: it is not gloo's
_SILENT_BYTES = 16 << 20  # the same in the middle of one: longer than any segment
_FLOWS = 256


class Gloo:
    """Follows the ring all-reduces of one process group in mirrored packets."""

    def __init__(
        self,
        parser: Parser,
        *,
        ranks: int,
        item_bytes: int = 4,
        sizes: Collection[int] | None = None,
        hosts: Mapping[str, int] | None = None,
        ports: Collection[int] | None = None,
        threads: int = 8,
        waiting_bytes: int = 4 << 30,
        reassembler: Reassembler | None = None,
    ) -> None:
        """Nothing seen yet.

        Args:
            parser: that the packets come from; it knows their addresses.
            ranks: of the process group.
            item_bytes: of one element of the buffers.
            sizes: in bytes, of every buffer that the group all-reduces; others are left out. None:
                of any size; then a buffer waits in memory until its end. One that is not told, but
                is cut into segments just as long as those of one that is (which takes more than
                ranks * 4/3 MiB), shows only by its further messages: then `Refused` is given, which
                may be after the buffer was.
            hosts: rank by IP address, where each rank has its own. None: ranks are learned from
                the place of the short segment, which fails where every buffer divides evenly.
            ports: TCP ports, of either side, of the process group's connections; None: all.
            threads: at most so many collectives of the group are under way on one rank (PyTorch:
                2, unless told otherwise).
            waiting_bytes: that may wait in memory for their places; beyond, they are left out.
            reassembler: with other bounds, or with checksums.

        Raises:
            UsageError: an argument out of range.
            Unsupported: the compiled loops are not installed.
        """
        if ranks < 2 or item_bytes < 1 or threads < 1 or waiting_bytes < 0:
            raise UsageError("at least two ranks, one byte per element and one thread")
        self._parser = parser
        self._ring = Ring(ranks, item_bytes, None)
        self.tell(sizes)
        self._hosts, self._threads = hosts, threads
        self._ports = None if ports is None else frozenset(ports)
        self._room = Room(waiting_bytes)
        self._tcp = Reassembler() if reassembler is None else reassembler
        self._streams: dict[int, Stream] = {}
        self._senders: dict[int, int] = {}  # stream by rank
        self._settled = -1
        self._counts = dict.fromkeys(
            ("data", "notices", "others", "gaps", "wrong", "foreign", "conflicts", "refused"), 0
        )

    def tell(self, sizes: Collection[int] | None) -> None:
        """Sizes, as at the beginning, of every buffer from the next all-reduce on that shows.

        Raises:
            UsageError: a size that is not of whole elements.
        """
        item_bytes = self._ring.item_bytes
        if sizes is not None and any(size < 1 or size % item_bytes for size in sizes):
            raise UsageError("sizes are in bytes, of whole elements")
        told = None if sizes is None else tuple(sorted(set(sizes)))
        self._ring = Ring(self._ring.ranks, item_bytes, told)

    def feed(self, packets: Packets) -> list[Event]:
        """What these packets tell. Pieces hold until the next call of any method."""
        self._room.cool()
        return self._take(self._tcp.feed(packets))

    def flush(self, *, final: bool = False) -> list[Event]:
        """Wait no longer for packets that the other side has acknowledged; `final`: for none."""
        self._room.cool()
        return self._take(self._tcp.flush(final=final))

    def settle(self, collective: int) -> list[Event]:
        """Every collective up to this number is over on every rank, and was before any later one
        began, as when an optimizer step lies between."""
        self._room.cool()
        self._settled = max(self._settled, collective)
        events: list[Event] = []
        for stream in [*self._streams.values()]:
            stream.end_flows(self._settled)
            events += self._conclude(stream)
        return events

    def counts(self) -> dict[str, int]:
        """Messages of data, notices, others (operations that are no all-reduce), gaps (places from
        which on preambles may have been lost), wrong (preambles), foreign (streams), conflicts
        (streams that come from a rank that has one), refused (all-reduces); and those of
        `Reassembler.counts`."""
        return self._counts | self._tcp.counts()

    # ---------------------------------------------------------------- streams

    def _take(self, extents: Extents) -> list[Event]:
        for row in extents.opened:
            self._open(row)
        events: list[Event] = []
        for number, start, stop in extents.streams:
            stream = self._streams.get(number)
            if stream is not None:
                events += self._go_on(stream, extents.table[start:stop], extents)
        for number in extents.closed:
            self._forget(number)
        return events

    def _open(self, row: np.void) -> None:
        ports = {int(row["source_port"]), int(row["destination_port"])}
        if self._ports is not None and not ports & self._ports:
            self._tcp.ignore(int(row["stream"]))
            return
        rank = None
        if self._hosts is not None:
            rank = self._hosts.get(self._parser.address(int(row["source"])).ip)
        self._streams[int(row["stream"])] = Stream(row, rank)

    def _forget(self, number: int) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        for flow in stream.flows.values():
            flow.release()
        for rank, owner in [*self._senders.items()]:
            if owner == number:
                del self._senders[rank]

    def _leave_out(self, stream: Stream, why: str) -> None:
        self._counts[why] += 1
        self._tcp.ignore(stream.number)
        self._forget(stream.number)

    def _go_on(self, stream: Stream, table: Table, extents: Extents) -> list[Event]:
        marks, stream.position, stream.hunting, stream.carry = _tcp.walk(
            table, extents.data, extents.spill, stream.position, stream.hunting, stream.carry
        )
        events: list[Event] = []
        bodies = [] if stream.body is None else [stream.body]
        for mark in np.frombuffer(marks, _MARK).tolist():
            self._mark(stream, mark, bodies, events)
            if stream.number not in self._streams:
                return events
        if not stream.is_found:
            self._look_for_strangers(stream, table)
            return events
        events += self._cut(table, bodies, extents)
        for flow in {id(body.flow): body.flow for body in bodies}.values():
            placed = flow.take_placed()
            if placed is not None:
                events.append(placed)
        reached = int(table["position"][-1] + table["length"][-1])
        stream.body = bodies[-1] if bodies and bodies[-1].stop > reached else None
        if ENDED in table["kind"] and not stream.hunting:
            stream.newest = NO_TAG
            stream.end_flows(self._settled)
        events += self._conclude(stream)
        return events

    def _look_for_strangers(self, stream: Stream, table: Table) -> None:
        stream.seen_bytes += int(table["length"].sum())
        limit = _STRANGER_BYTES if stream.from_start else _SILENT_BYTES
        if stream.seen_bytes > limit or BROKEN in table["kind"]:
            self._leave_out(stream, "foreign")

    def _mark(
        self,
        stream: Stream,
        mark: tuple[int, int, int, int, int, int],
        bodies: list[Body],
        events: list[Event],
    ) -> None:
        position, length, slot, frame, opcode, kind = mark
        if kind == _RESYNC:
            # the side that has connected sends eight bytes before its first preamble
            if not stream.is_found and position not in (0, 8):
                stream.gap()
            stream.is_found = True
        elif kind != _HEADER:
            self._counts["gaps" if kind == _SKIPPED else "wrong"] += 1
            if bodies:
                bodies[-1].stop = min(bodies[-1].stop, position)
            if stream.is_found:
                stream.gap()
        else:
            body = self._operation(stream, (length, slot, frame, opcode), events)
            if body is not None:
                body.position += position + _PREAMBLE
                body.stop += position + _PREAMBLE
                bodies.append(body)

    def _operation(
        self, stream: Stream, header: tuple[int, int, int, int], events: list[Event]
    ) -> Body | None:
        length, slot, frame, opcode = header
        prefix, tag = slot >> 56, slot >> 24 & 0xFFFFFFFF
        if 1 <= prefix <= 8:  # else it is from one rank to another, with a tag of the user's
            stream.note(tag, self._threads)
            stream.end_flows(self._settled)
        if opcode == _DATA and prefix == _ALL_REDUCE:
            self._counts["data"] += 1
            return self._message(stream, tag, length, frame, events)
        self._counts["others" if opcode <= _DATA else "notices"] += 1
        return None

    # ---------------------------------------------------------------- messages

    def _message(
        self, stream: Stream, tag: int, length: int, frame: int, events: list[Event]
    ) -> Body | None:
        flow = stream.flows.get(tag)
        if flow is None:
            flow = self._begin(stream, tag)
        was_known, was_refused = flow.fit is not None, flow.is_refused
        place = flow.message(length, frame, self._ranks_of(stream))
        flow.gaps = stream.gaps
        if not was_known:
            events += self._learn(stream, flow)
        if flow.is_refused and not was_refused:
            events += self._refuse(flow)
        if place is None or flow.is_refused:
            return None
        return Body(0, length, place.start, flow, waits=place.waits)

    def _begin(self, stream: Stream, tag: int) -> Flow:
        if len(stream.flows) >= _FLOWS:
            stream.flows.popitem(last=False)[1].release()
        is_certain = stream.begins(tag, self._threads)
        flow = Flow(self._ring, self._room, number=tag, stream=stream.number, is_certain=is_certain)
        stream.flows[tag] = flow
        return flow

    def _ranks_of(self, stream: Stream) -> Sequence[int]:
        return range(self._ring.ranks) if stream.rank is None else (stream.rank,)

    def _learn(self, stream: Stream, flow: Flow) -> list[Event]:
        """A flow has found its plan, and with it the rank that sends it."""
        if flow.fit is None:
            return []
        if not self._claim(stream, flow.fit.rank):
            flow.refuse()
            self._leave_out(stream, "conflicts")
            return []
        return [Announced(flow.number, flow.fit.nbytes)]

    def _claim(self, stream: Stream, rank: int) -> bool:
        stream.rank = rank
        if self._senders.setdefault(rank, stream.number) != stream.number:
            return False
        if self._ring.ranks == 2 and stream.reverse in self._streams:
            self._streams[stream.reverse].rank = 1 - rank
        return True

    def _refuse(self, flow: Flow) -> list[Event]:
        self._counts["refused"] += 1
        return [] if flow.fit is None else [Refused(flow.number)]

    def _conclude(self, stream: Stream) -> list[Event]:
        events: list[Event] = []
        while stream.ended:
            events += self._over(stream, *stream.ended.pop(0))
        return events

    def _over(self, stream: Stream, flow: Flow, is_last: bool) -> list[Event]:
        events: list[Event] = []
        was_known, was_refused = flow.fit is not None, flow.is_refused
        flow.over(self._ranks_of(stream), is_last=is_last)
        if flow.is_refused and not was_refused:
            events += self._refuse(flow)
        if not was_known:
            events += self._learn(stream, flow)
        placed = flow.take_placed()
        if placed is not None:
            events.append(placed)
        flow.release()
        return events

    def _cut(self, table: Table, bodies: list[Body], extents: Extents) -> list[Event]:
        """The parts of the bodies that are in these extents: to their places, or to what waits."""
        waiting = [body for body in bodies if body.waits]
        if waiting:
            rows = _rows(table, [(b.position, b.stop, b.start, i) for i, b in enumerate(waiting)])
            of = rows["collective"]
            edges = [0, *(np.flatnonzero(of[1:] != of[:-1]) + 1).tolist(), len(rows)]
            for start, stop in itertools.pairwise(edges):
                if start < stop:
                    flow = waiting[int(of[start])].flow
                    flow.write(rows[start:stop], extents.data, extents.spill)
        rows = _rows(
            table,
            [
                (body.position, body.stop, body.start, body.flow.number)
                for body in bodies
                if not (body.waits or body.flow.is_refused)
            ],
        )
        return [Scattered(rows, extents.data, extents.spill)] if len(rows) else []


def _rows(table: Table, bodies: list[tuple[int, int, int, int]]) -> Table:
    return np.frombuffer(_tcp.cut(table, np.array(bodies, _BODY)), SCATTERED)
