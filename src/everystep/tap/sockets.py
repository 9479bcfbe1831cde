"""NCCL over TCP: the messages of its socket transport, for the same decoder as those of RoCE.

By default one TCP connection carries one direction of one channel, from the sender of the data.
Nothing numbers its messages: a message stands where the bytes before it say (`BYTES`). Channels
are told apart by the order in which their connections were made; where several were there before
the capture, or one channel uses several sockets, none of them is read.

Source: NCCL's socket transport, 2.12 to 2.30; no real capture has proved it (see docs/wire.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from everystep.tap.pieces import ACK, MESSAGE, STREAM, TCP_STREAMS, WRITE, Messages, Packets, Table
from everystep.tap.positions import SIZE_BYTES
from everystep.tap.socket_streams import Stream
from everystep.tap.tcp import BROKEN, LOST, SPILLED, Extents, Reassembler
from everystep.tap.writes import Ranges

_RIVAL = 16  # another channel of the same collectives carries at least one byte for so many
_FOREIGN_BYTES = 16 << 20  # without a message: it is not NCCL's
_MOST_WAITING = 64 << 20


class Tracker:
    """Messages out of packets, batch by batch; for one thread."""

    def __init__(self, *, checksums: bool = False) -> None:
        """Follow no connection yet.

        Args:
            checksums: leave out segments whose TCP checksum is wrong.

        Raises:
            Unsupported: the compiled loops are not installed.
        """
        self._tcp = Reassembler(checksums=checksums)
        self._streams: dict[int, Stream] = {}
        self._counts = dict.fromkeys(("messages", "holes", "foreign", "split", "unordered"), 0)

    def feed(self, packets: Packets) -> Iterator[Messages]:
        """Take these packets."""
        yield self._take(self._tcp.feed(packets), final=False)

    def flush(self) -> Messages:
        """Wait for nothing more."""
        return self._take(self._tcp.flush(final=True), final=True)

    def counts(self) -> dict[str, int]:
        """Messages with a beginning; holes (that took the size of one); connections that are not
        read: foreign (not NCCL's), split (over several sockets), unordered (several channels, made
        before the capture); and those of `Reassembler.counts`."""
        self._counts["holes"] = sum(stream.holes for stream in self._streams.values())
        return self._counts | self._tcp.counts()

    # ---------------------------------------------------------------- streams

    def _take(self, extents: Extents, *, final: bool) -> Messages:
        for row in extents.opened:
            self._streams[int(row["stream"])] = Stream(row)
        grown = []
        for number, start, stop in extents.streams:
            stream = self._streams.get(number)
            if stream is not None:
                self._go_on(stream, extents.table[start:stop], extents)
                grown.append(stream)
        if final:
            grown = [*self._streams.values()]
            for stream in grown:
                stream.found += stream.cut(final=True)
        for stream in grown:
            self._judge(stream, final=final)
        ready = [s for s in self._streams.values() if s.found and not self._waits(s)]
        messages = self._messages(ready, extents.closed)
        for number in extents.closed:
            self._streams.pop(number, None)
        return messages

    def _go_on(self, stream: Stream, table: Table, extents: Extents) -> None:
        sources = extents.data.data, extents.spill.data
        for row in table:
            kind, length = int(row["kind"]), int(row["length"])
            if kind == BROKEN:
                stream.is_foreign = True
            elif kind == LOST:
                stream.found += stream.lose(length)
            elif length:
                at = int(row["at"])
                stream.add(sources[kind == SPILLED][at : at + length], int(row["frame"]))
        stream.found += stream.cut()

    def _judge(self, stream: Stream, *, final: bool) -> None:
        """Leave a stream out, and what belongs with it, if it cannot be read."""
        beside = [
            other
            for other in self._streams.values()
            if (other.source, other.destination) == (stream.source, stream.destination)
        ]
        if stream.is_foreign or stream.hunted_bytes > _FOREIGN_BYTES:
            self._leave_out([stream], "foreign")
        elif stream.socket:
            port = stream.ports[1]
            self._leave_out([other for other in beside if other.ports[1] == port], "split")
        elif not stream.from_start and stream.is_found:
            found = [other for other in beside if other.is_found]
            most = 0 if final else _MOST_WAITING
            if len(found) > 1 or (self._waits(stream) and stream.found_bytes > most):
                self._leave_out(found, "unordered")

    def _waits(self, stream: Stream) -> bool:
        """Whether another connection may turn out to be another channel, of unknown number."""
        return not stream.from_start and any(
            not other.is_found and _RIVAL * other.seen_bytes >= stream.seen_bytes
            for other in self._streams.values()
            if (other.source, other.destination) == (stream.source, stream.destination)
        )

    def _leave_out(self, streams: list[Stream], why: str) -> None:
        for stream in streams:
            self._counts[why] += 1
            self._tcp.ignore(stream.opened)
            self._streams.pop(stream.opened, None)

    # ---------------------------------------------------------------- handing out

    def _messages(self, streams: list[Stream], closed: Sequence[int]) -> Messages:
        """What was found of these streams."""
        cuts = [(stream.number, cut) for stream in streams for cut in stream.found]
        cuts.sort(key=lambda item: item[1].last_frame)
        self._counts["messages"] += sum(cut.has_head for _, cut in cuts)
        table = np.zeros(len(cuts), MESSAGE)
        ranges: Ranges = []
        at = 0
        for row, (number, cut) in zip(table, cuts, strict=True):
            row["length"], row["nbytes"], row["at"] = cut.length, len(cut.data), at
            row["frame"], row["last_frame"] = cut.frame, cut.last_frame
            row["range_at"], row["ranges"] = len(ranges), len(cut.ranges)
            row["stream"], row["psn"], row["operation"] = number, cut.number, WRITE
            row["complete"], row["has_head"] = cut.is_whole, cut.has_head
            row["span"] = SIZE_BYTES + cut.length if cut.has_head else 0
            at += len(cut.data)
            ranges += cut.ranges
        opened = [stream.told() for stream in streams if not stream.is_told]
        for stream in streams:
            stream.found = []
        return Messages(
            table=table,
            data=np.frombuffer(b"".join(cut.data for _, cut in cuts), np.uint8),
            ranges=np.array(ranges, np.int64).reshape(-1, 2),
            acks=np.empty(0, ACK),
            opened=np.array(opened, STREAM),
            closed=np.array([TCP_STREAMS + number for number in closed], np.uint32),
        )
