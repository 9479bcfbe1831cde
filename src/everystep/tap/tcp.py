"""TCP streams out of mirrored segments: what arrived, in order, and what the mirror lost.

Each direction of each connection is a stream of its own; its first byte seen has position 0.
Segments may come out of order, twice, overlapping or cut short, and a capture may begin in the
middle. Where bytes are missing, later ones wait, until the missing ones come or surely will not:

- the other side has acknowledged them (it got them, the mirror did not, and nobody sends them
  again), and some more packets of the connection have passed; or
- more later data waits than is allowed.

Then the stream goes on behind the hole, and the hole's exact range is told. Sequence numbers wrap;
positions do not. Source: RFC 9293.

TCP checksums are checked where that is asked for, since a mirror may damage a packet. On virtual
interfaces, and on hosts that leave them to the network card, they are not yet filled in where
packets are captured: the sum of the pseudo-header stands in their place, and such a segment is
taken as it is.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from everystep.errors import UsageError
from everystep.tap.capture import need_extension
from everystep.tap.pieces import Bytes, Packets, Table

try:
    from everystep.tap import _tcp
except ImportError:  # no compiler where this was installed
    _tcp = None  # type: ignore[assignment]

DATA, SPILLED, LOST, BROKEN, ENDED = range(5)
"""Kinds of extents: bytes in the frames; bytes that had waited, in the spill; a range that will not
come; a break of unknown length (sequence numbers unlike all before); the end (FIN, RST)."""

EXTENT = np.dtype(
    [
        ("position", "<u8"),  # in the stream
        ("at", "<u8"),  # DATA: offset in the data of the frames; SPILLED: in the spill
        ("length", "<u8"),
        ("frame", "<u8"),  # number; LOST: of the frame that showed it, or 0
        ("stream", "<u4"),
        ("kind", "<u4"),
    ]
)

OPENED = np.dtype(
    [
        ("stream", "<u4"),  # never used twice by one reassembler
        ("source", "<u4"),  # index into the table of addresses
        ("destination", "<u4"),
        ("source_port", "<u2"),
        ("destination_port", "<u2"),
        ("reverse", "<u4"),  # stream of the other direction, whether or not it is open
        ("from_start", "<u4"),  # 1: position 0 is the first byte that was ever sent
    ]
)

_NOTHING = np.empty(0, np.uint8)


class Extents(Struct, frozen=True, eq=False):
    """What one batch of packets added to the streams. Holds until the next batch."""

    table: Table
    """EXTENT, sorted by stream; those of a stream continue each other without gap or overlap."""
    streams: tuple[tuple[int, int, int], ...]
    """Number of each stream that went on, and where its rows begin and end."""
    data: Bytes
    """Of the frames."""
    spill: Bytes
    opened: Table
    """OPENED."""
    closed: tuple[int, ...]
    """Streams that were replaced by a new connection, or forgotten to make room."""


class Reassembler:
    """Follows every TCP connection that it is shown, in bounded memory."""

    def __init__(
        self,
        *,
        connections: int = 1024,
        stream_bytes: int = 4 << 20,
        total_bytes: int = 256 << 20,
        patience: int = 16,
        checksums: bool = False,
    ) -> None:
        """No connections yet.

        Args:
            connections: followed at a time; beyond, the one idle longest is forgotten.
            stream_bytes: that may wait behind a hole of one stream; it should be more than the
                senders' window, so that what is sent again still comes in time.
            total_bytes: that may wait in all.
            patience: packets of a connection that pass after an acknowledgement before what it
                covers counts as lost: more than a mirror may reorder.
            checksums: leave out segments whose TCP checksum is wrong.

        Raises:
            UsageError: bounds out of range.
            Unsupported: the compiled loops are not installed.
        """
        need_extension(_tcp)
        if not 1 <= connections <= 1 << 20 or not 0 <= stream_bytes <= 1 << 30:
            raise UsageError("at most 2**20 connections and 2**30 bytes per stream")
        if total_bytes < 0 or patience < 0:
            raise UsageError("bounds are not negative")
        self._tracker = _tcp.Tracker(connections, stream_bytes, total_bytes, patience, checksums)

    def feed(self, packets: Packets) -> Extents:
        """What these packets add."""
        frames = packets.frames
        return _extents(self._tracker.feed(packets.table, frames.data, frames.first), frames.data)

    def flush(self, *, final: bool = False) -> Extents:
        """Wait no longer for what was acknowledged; `final`: for nothing, as at a file's end."""
        return _extents(self._tracker.flush(final), _NOTHING)

    def ignore(self, stream: int) -> None:
        """This stream is of no interest: it gives no extents any more and takes no memory."""
        self._tracker.ignore(stream)

    def counts(self) -> dict[str, int]:
        """Segments, duplicates (or too late), late (waited), strange (numbers unlike the others),
        cut (not captured whole), bad_checksums, lost_bytes, forgotten (connections), ignored
        (segments)."""
        counts: dict[str, int] = self._tracker.counts()
        return counts


def _extents(parts: tuple[bytearray, ...], data: Bytes) -> Extents:
    table, groups, spill, opened, closed = parts
    return Extents(
        np.frombuffer(table, EXTENT),
        tuple((a, b, c) for a, b, c in np.frombuffer(groups, np.uint64).reshape(-1, 3).tolist()),
        data,
        np.frombuffer(spill, np.uint8),
        np.frombuffer(opened, OPENED),
        tuple(np.frombuffer(closed, np.uint32).tolist()),
    )
