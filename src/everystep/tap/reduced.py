"""Captured frames to reduced buffers: parser, decoder and assembler in one.

Numbers are the decoder's own: gloo's are the tags on the wire, which count every collective of the
process group from 0 on; NCCL's count its all-reduces.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from msgspec import Struct

from everystep.tap.gloo import Gloo
from everystep.tap.nccl import Decoder
from everystep.tap.packets import Parser
from everystep.tap.pieces import Announced, Frames, Packets, Reduced
from everystep.tap.ring import Assembler, Event, Refused
from everystep.tap.rings import Doubt
from everystep.tap.roce import Tracker

_REMEMBERED = 1 << 14


class Withdrawn(Struct, frozen=True):
    """A range of a buffer that is not to be trusted, though it may have been given."""

    collective: int
    start: int
    stop: int | None
    """None: to its end."""


class Buffers:
    """What decoders give, put together."""

    def __init__(self, assembler: Assembler) -> None:
        """Nothing in the making.

        Args:
            assembler: used by nobody else.
        """
        self._assembler = assembler
        self.is_doubted = False
        """Loss has made the decoder's numbers uncertain: nothing is given from then on."""
        self.sizes: OrderedDict[int, int] = OrderedDict()
        """Bytes of the last thousands of buffers, by number, from when they are announced."""
        self._withdrawn: list[Withdrawn] = []

    def take(self, events: Iterable[Event | Doubt]) -> list[Reduced]:
        """What these complete, or let give up. A number may come twice: the later one counts."""
        given: list[Reduced] = []
        for event in events:
            if isinstance(event, Doubt):
                self.is_doubted = True
            if isinstance(event, Doubt) or self.is_doubted:
                continue
            if isinstance(event, Announced):
                self._announced(event)
            elif isinstance(event, Refused):
                self.sizes.pop(event.collective, None)
                self._withdrawn.append(Withdrawn(event.collective, 0, None))
            given += self._assembler.add(event)
        return given

    def give_up(self, through: int | None = None) -> list[Reduced]:
        """End every buffer in the making with a number up to `through`, or all."""
        return self._assembler.give_up(through)

    def withdrawn(self) -> list[Withdrawn]:
        """What has turned out since the last call: refused all-reduces, and twins that differ."""
        found = self._withdrawn + [
            Withdrawn(alarm.collective, alarm.at, alarm.stop) for alarm in self._assembler.alarms
        ]
        self._withdrawn = []
        self._assembler.alarms.clear()
        return found

    def _announced(self, event: Announced) -> None:
        self.sizes.setdefault(event.collective, event.nbytes)
        while len(self.sizes) > _REMEMBERED:
            self.sizes.popitem(last=False)


class Reader:
    """Follows one process group from its frames to its reduced buffers."""

    def __init__(
        self,
        parser: Parser,
        decoder: Gloo | tuple[Tracker, Decoder],
        assembler: Assembler | None = None,
    ) -> None:
        """Nothing seen yet.

        Args:
            parser: that the decoder knows, where it is gloo's.
            decoder: gloo's, or NCCL's with its tracker.
            assembler: with other bounds.

        Raises:
            Unsupported: the compiled loops are not installed.
        """
        self._parser = parser
        self._gloo = decoder if isinstance(decoder, Gloo) else None
        self._nccl = None if isinstance(decoder, Gloo) else decoder
        self.buffers = Buffers(Assembler() if assembler is None else assembler)

    def feed(self, frames: Frames) -> list[Reduced]:
        """What these frames complete."""
        packets = self._parser.parse(frames)
        if self._gloo is not None:
            return self.buffers.take(self._gloo.feed(packets))
        return self._messages(packets)

    def flush(self) -> list[Reduced]:
        """Wait no longer for packets that were acknowledged, and so were lost by the mirror: to be
        called when none have come for a while."""
        return [] if self._gloo is None else self.buffers.take(self._gloo.flush())

    def settle(self, through: int) -> list[Reduced]:
        """Every collective up to this number is over; see `Gloo.settle`."""
        return [] if self._gloo is None else self.buffers.take(self._gloo.settle(through))

    def tell(self, sizes: Collection[int] | None) -> None:
        """From the next all-reduce on the buffers have these sizes, in bytes; see `Gloo.tell`."""
        if self._gloo is not None:
            self._gloo.tell(sizes)

    def why_nothing(self) -> str | None:
        """In words, where nothing that was seen could be read."""
        counts = {} if self._gloo is None else self._gloo.counts()
        if self.buffers.sizes or not (counts.get("data") or counts.get("bad_checksums")):
            return None
        if not counts["data"]:
            return (
                f"{counts['bad_checksums']:,} segments had a wrong TCP checksum (where the network "
                "card puts segments together: `ethtool -K IFACE lro off`)"
            )
        return (
            "all-reduces were seen, but not which rank sends which of them: every buffer divides "
            "evenly (tell `Gloo` the `hosts`), or the sizes are others"
        )

    def end(self) -> list[Reduced]:
        """Nothing more comes."""
        given: list[Reduced] = []
        if self._gloo is not None:
            given += self.buffers.take(self._gloo.flush(final=True))
        if self._nccl is not None:
            tracker, decoder = self._nccl
            given += self.buffers.take(decoder.feed(tracker.flush()))
            given += self.buffers.take(decoder.finish())
        return given + self.buffers.give_up()

    def _messages(self, packets: Packets) -> list[Reduced]:
        given: list[Reduced] = []
        if self._nccl is not None:
            tracker, decoder = self._nccl
            for messages in tracker.feed(packets):
                given += self.buffers.take(decoder.feed(messages))
        return given
