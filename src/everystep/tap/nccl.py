"""NCCL over RoCE or TCP: messages of mirrored links in, pieces of reduced buffers out.

Streams of messages are sorted into connections (clear-to-send records go against the data of theirs
on the same pair of queue pairs), connections into rings and transfers by sender. Each of those is
read by its own grammar (rings, sendrecv); this module feeds them and hands out what they find.
"""

from __future__ import annotations

from collections.abc import Sequence

from everystep.errors import UsageError
from everystep.tap.collectives import Expectations
from everystep.tap.connections import Connection
from everystep.tap.pieces import Announced, Bytes, Messages, Piece
from everystep.tap.positions import Window
from everystep.tap.ring import Scattered
from everystep.tap.rings import Doubt
from everystep.tap.schedule import Shape
from everystep.tap.sorting import Options, Sorter
from everystep.tap.unpacking import Placer
from everystep.tap.writes import FORMS, Write

__all__ = ["Decoder", "Options", "Placer"]


Found = Piece | Scattered | Announced | Doubt
"""What a decoder gives, in order; after a Doubt, numbers count anew."""


_REMEMBERED = 1024


class Decoder:
    """From messages to pieces; one communicator."""

    def __init__(self, placer: Placer, options: Options) -> None:
        """Raises UsageError for options that name no ring."""
        if options.ranks < 2:
            raise UsageError("a ring has at least two ranks", found=options.ranks)
        if options.ring is not None and len(set(options.ring)) != options.ranks:
            raise UsageError("the ring must name every rank once", found=options.ring)
        ways = (False, True) if options.added_step is None else (options.added_step,)
        shapes = [Shape(options.ranks, options.element_bytes, added) for added in ways]
        self.options = options
        self.expected = Expectations(shapes)
        if options.minor is not None:
            self.expected.contiguous = options.minor >= 20
            self.expected.is_fine = options.minor >= 22
        self.sorted = Sorter(
            placer, options, self.expected, self._place, self._doubt, self._scattered
        )
        self.contradicted = 0
        """Messages that are not what their place in a collective asks for: not used."""
        self._out: list[Found] = []
        self._announced: dict[int, None] = {}

    def expect(self, first: int, counts: Sequence[int]) -> None:
        """From all-reduce `first` on, the buffers have these numbers of elements, repeated.

        Where sizes are told, all-reduces of other sizes are not counted.
        """
        self.expected.tell(first, counts)

    def name(self, address: int, rank: int) -> None:
        """An address (index into the table of addresses) is of this rank."""
        self.sorted.name(address, rank)

    @property
    def doubts(self) -> list[Doubt]:
        """Where loss made the number of an all-reduce uncertain."""
        return [doubt for ring in self.sorted.rings for doubt in ring.doubts]

    @property
    def left_out(self) -> int:
        """Messages that no collective was found for: lost their neighbours, or of what is not read
        (see docs/wire.md, Limits)."""
        cuts = [c.cut for c in self.sorted.connections if c.cut is not None]
        found = self.sorted.refused + sum(cut.left_out for cut in cuts)
        return found + sum(ring.left_out for ring in self.sorted.rings)

    def feed(self, messages: Messages) -> list[Found]:
        """Take the next messages; the pieces are valid until the next call."""
        self._out = []
        for fresh in self.sorted.take(messages):
            self._read(final=False)
            for write in fresh:
                if write.collective is None:  # its payload will be overwritten
                    write.data = write.data.copy()
        return self._out

    def finish(self) -> list[Found]:
        """What can still be said when nothing more will come."""
        self._out = []
        self.sorted.decide()
        self._read(final=True)
        return self._out

    def _read(self, *, final: bool) -> None:
        rings, transfers = self.sorted.rings, self.sorted.transfers
        while True:
            found = False
            for ring in rings:
                found |= ring.read(final=final)
            for transfer in transfers:
                if self.options.send_recv:
                    found |= transfer.read(self.sorted.ring_of(transfer.connections[0]))
            if found:
                continue
            # one message at a time: what is left may make sense of the rest
            if not any(ring.give_up(final=final) for ring in rings) and not any(
                transfer.give_up(final=final) for transfer in transfers
            ):
                return

    def _place(self, connection: Connection, write: Write, window: Window, place: int) -> None:
        """A message has got its place in a collective: hand out what it holds of the buffer."""
        sent, plan = window.plan.sends[place], window.plan
        collective = window.collective
        collective.saw(write)
        for one in (write, *write.pieces):
            one.collective, one.sent = collective, sent
        if collective.kind not in ("allreduce", "p2p") or sent is None:
            return
        schedule = collective.schedule
        if schedule is not None and collective.number not in self._announced:
            self._announced[collective.number] = None
            if len(self._announced) > _REMEMBERED:
                del self._announced[next(iter(self._announced))]
            self._out.append(Announced(collective.number, schedule.nbytes))
        if write.protocol is None and write.ranges and plan.protocol != "Simple":
            # its beginning was lost, and so its key: now its protocol is known
            write.protocol = plan.protocol
            write.unpack(FORMS[plan.protocol])
        if not self._is_as_planned(connection, write, window, place):
            self.contradicted += 1
            return
        if not sent.reduced or sent.start == sent.stop:
            return
        e = plan.element_bytes
        start, nbytes = sent.start * e, (sent.stop - sent.start) * e
        if write.complete:
            self._piece(write, start, write.data[:nbytes])
            return
        shift = write.data_offset()
        for a, b in write.data_ranges(nbytes):
            self._piece(write, start + a, write.data[a - shift : b - shift])

    def _scattered(self, pieces: Scattered) -> None:
        if len(pieces.table):
            self._out.append(pieces)

    def _doubt(self, doubt: Doubt) -> None:
        self._out.append(doubt)
        for transfers in self.sorted.transfers:
            transfers.number = None

    def _piece(self, write: Write, start: int, data: Bytes) -> None:
        number = write.collective.number if write.collective is not None else 0
        write.is_used = True
        self._out.append(Piece(number, start, data, write.stream, write.last_frame))

    def _is_as_planned(
        self, connection: Connection, write: Write, window: Window, place: int
    ) -> bool:
        plan = window.plan
        if write.protocol not in (None, plan.protocol):
            return False
        if plan.protocol != "Simple" and write.flag:
            lead = write.flag - 1 - window.first - place
            if window.lead is None:  # Simple takes more than one step for a message
                window.lead = (connection.lead or 0) if connection.has_only_flags else lead
            if (lead - window.lead) % (1 << 32):
                return False
        if write.has_head:
            return write.length == plan.lengths[place]
        return write.offset + write.length <= plan.lengths[place]
