"""What the stages of the tap hand to each other: frames, packets, messages, pieces, buffers.

    capture ─► Frames ─► packets ─► Packets ─► roce ─► Messages ─► nccl ─► Piece, Announced ─► ring
                                           ├─► tcp ──► sockets ─► Messages ─► nccl
                                           └─► tcp ──► gloo ───────────► Piece, Announced ─► ring

Every stage takes batches and gives batches, so that Python runs once per batch or per message and
never per packet. Arrays handed out belong to the giver: they hold until it is fed again, but for
those of `Reduced`, which stay.

**Placement of payload.** roce writes each message's payload once, at its place by packet sequence
number, into its own arena. In which form is decided per stream and remote key (R_Key), because one
NCCL connection has a buffer, and so a key, for each protocol:

- `RAW`: the bytes of the wire. Every message begins so; this is what content rules are applied to.
- `LL`: 16-byte lines of data, flag, data, flag (u32): the flags are checked and left out.
- `LL128`: 2,048-byte slices of 1,920 data bytes: the flags are checked and left out, the data put
  into the order of the buffer.

Once a decoder knows the protocol of a key, it calls `roce.place(stream, rkey, form)`; messages that
begin after that come in this form, with their flag. For those that came before, `roce.unpack` does
the same to raw bytes. A packet whose flags are not those of its message is not taken: its range is
missing. A message whose beginning was lost has no key and comes raw.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[Any]
"""A one-dimensional structured array."""

FRAME = np.dtype(
    [
        ("at", "<u8"),  # offset of the frame in the data of its batch
        ("time_ns", "<i8"),  # since 1970; 0 where the capture tells no time
        ("captured", "<u4"),  # bytes of it that are in the data
        ("length", "<u4"),  # bytes that it had on the wire
    ]
)


class Frames(Struct, frozen=True, eq=False):
    """A batch of captured Ethernet frames, in the order of the capture."""

    data: Bytes
    """Read-only: a mapped file, or a block of a ring."""
    table: Table
    """FRAME, a row per frame; every row lies within `data`."""
    first: int
    """Number of the first frame, counted from 1 as Wireshark does."""


PACKET = np.dtype(
    [
        ("at", "<u8"),  # offset of the payload of UDP or TCP in the data of the frames
        ("frame", "<u4"),  # row of the table of frames
        ("length", "<u4"),  # bytes of the payload, by the IP and UDP lengths
        ("captured", "<u4"),  # bytes of it that are in the data: less where the frame was cut
        ("header", "<u4"),  # bytes from the IP header to the payload
        ("source", "<u4"),  # index into the table of addresses
        ("destination", "<u4"),
        ("sequence", "<u4"),  # TCP; 0 for UDP
        ("acknowledgement", "<u4"),  # TCP
        ("source_port", "<u2"),
        ("destination_port", "<u2"),
        ("window", "<u2"),  # TCP, not scaled
        ("flags", "u1"),  # TCP: FIN 1, SYN 2, RST 4, PSH 8, ACK 16, URG 32, ECE 64, CWR 128
        ("protocol", "u1"),  # 6 TCP, 17 UDP
    ]
)


class Address(Struct, frozen=True):
    """An end of packets."""

    ip: str
    """As `ipaddress` writes it."""
    mac: str
    """Of the frames that came from it, or went to it if none came: `0c:42:a1:9f:58:f8`. Beyond a
    router it is the router's."""


class Packets(Struct, frozen=True, eq=False):
    """The UDP and TCP packets of one batch of frames."""

    frames: Frames
    table: Table
    """PACKET, a row per packet, in the order of the frames."""


# ---------------------------------------------------------------- RoCE

RAW, LL, LL128 = FORMS = (0, 1, 2)
"""Forms of placed payload."""

SEND, WRITE, READ_RESPONSE, READ_REQUEST = 0, 1, 2, 3
"""Operations."""

PSN_COUNT = 1 << 24
"""Packet sequence numbers are counted modulo this."""

TCP_STREAMS = 1 << 31
"""Streams with numbers from this one on are of TCP (see sockets)."""

STREAM = np.dtype(
    [
        ("number", "<u4"),  # never used twice by one tracker
        ("source", "<u4"),  # index into the table of addresses
        ("destination", "<u4"),
        ("qp", "<u4"),  # destination queue pair
        ("source_port", "<u2"),  # of UDP: both directions of a queue pair have the same
        ("is_response", "u1"),  # 1: READ responses, numbered by the other side
        ("_", "u1"),
    ]
)

MESSAGE = np.dtype(
    [
        ("va", "<u8"),  # remote address; 0 where there is no RETH or it was lost
        ("length", "<u8"),  # bytes on the wire: by RETH, or as far as seen
        ("flag", "<u8"),  # LL, LL128: the flag of its lines (step + 1); else 0
        ("frame", "<u8"),  # number of the first frame of it that was seen
        ("last_frame", "<u8"),  # of the last one
        ("immediate_frame", "<u8"),  # of the empty write with the immediate (split writes), or 0
        ("time_ns", "<i8"),  # of the last one
        ("at", "<u8"),  # offset of the placed payload in `Messages.data`
        ("nbytes", "<u8"),  # of the placed payload
        ("range_at", "<u4"),  # its first row of `Messages.ranges`
        ("ranges", "<u4"),  # how many; 0 where nothing of the payload is there
        ("stream", "<u4"),  # number
        ("psn", "<u4"),  # of the first packet (of the first seen, where the beginning was lost)
        ("packets", "<u4"),  # different packets of it that were seen
        ("span", "<u4"),  # sequence numbers that it takes; 0 where unknown
        ("mtu", "<u4"),  # payload of every packet but the last; 0 where unknown
        ("rkey", "<u4"),
        ("immediate", "<u4"),  # read as little-endian; 0 where there is none
        ("operation", "u1"),
        ("form", "u1"),
        ("has_immediate", "u1"),
        ("complete", "u1"),  # every byte and the end were seen
        ("has_head", "u1"),  # the first packet was seen
        ("is_split", "u1"),  # written without immediate, then an empty write with it (adaptive
        # routing): `packets` and `span` count both
        ("flag_errors", "u1"),  # packets not taken because of their flags; 255: or more
        ("given_up", "u1"),  # 1: what is missing may still come, but room or time ran out
        ("is_chain", "u1"),  # several WRITE ONLY packets
        ("_", "V3"),
    ]
)
"""A message: one SEND, WRITE, READ response or READ request, as far as seen.

WRITE ONLY packets of one MTU each that continue each other (same key, addresses and sequence
numbers rising together), as adaptive routing sends them, are one message. A write of more than 512
bytes without immediate waits for an empty write with an immediate equal to its length at the next
sequence number: the two are one message, and `is_split`. A chain that is not has lost that write:
how long it was, and whether it began earlier, is unknown, and it is not `complete`.

Without `has_head`, the message is a run of packets without gap whose beginning was lost: `va`,
`rkey` are 0, `span` is 0, the offsets count from the first packet seen, and its true start lies
between the end of the message before and `psn`. SEND and READ responses tell no length: they end
at a gap, too.
"""

ACK = np.dtype(
    [
        ("frame", "<u8"),  # number
        ("time_ns", "<i8"),
        ("source", "<u4"),  # index into the table of addresses: who received the data
        ("destination", "<u4"),
        ("qp", "<u4"),  # destination queue pair, of the sender of the data
        ("psn", "<u4"),  # last packet that arrived in order
        ("count", "<u4"),  # messages completed (MSN), 24 bits
        ("source_port", "<u2"),
        ("syndrome", "u1"),  # top three bits: 0 ACK, 1 receiver not ready, 3 NAK
        ("_", "u1"),
    ]
)


class Messages(Struct, frozen=True, eq=False):
    """What one batch of packets completed, or ended otherwise."""

    table: Table
    """MESSAGE, in the order of their end (not of their beginning)."""
    data: Bytes
    """The arena, read-only: row `i` has its payload at `[at, at + nbytes)`. Bytes outside the
    present ranges are stale: never to be used."""
    ranges: npt.NDArray[np.int64]
    """Shape (n, 2): present bytes [start, stop) of the wire (not of the placed data), per message
    sorted and apart from each other; LL: half of it, LL128: by slices."""
    acks: Table
    """ACK, in the order of the capture."""
    opened: Table
    """STREAM: streams first met in this batch."""
    closed: npt.NDArray[np.uint32]
    """Numbers of streams that were forgotten: idle longest, when there were too many."""


# ---------------------------------------------------------------- collectives


class Piece(Struct, frozen=True, eq=False):
    """Some bytes of a reduced buffer, from one mirrored stream."""

    collective: int
    """Number of the all-reduce within its communicator: the same for every copy and direction."""
    start: int
    """Where the bytes lie in the buffer."""
    data: Bytes
    """Valid until the decoder is fed again."""
    stream: int
    """Which mirrored connection and direction: two pieces of one stream are no twins."""
    frame: int
    """Number of the frame that completed it."""


class Announced(Struct, frozen=True):
    """The size of a buffer has become known."""

    collective: int
    nbytes: int


class Source(Struct, frozen=True):
    """Where a range of a reduced buffer came from."""

    start: int
    stop: int
    stream: int
    frame: int


class Mismatch(Struct, frozen=True):
    """Two copies of one range differ: one of them was damaged on its way, or is not what it was
    taken for."""

    collective: int
    at: int
    """First byte of the buffer that differs."""
    stop: int
    """End of the range that both held."""
    streams: tuple[int, int]
    frames: tuple[int, int]


class Reduced(Struct, frozen=True, eq=False):
    """A reduced buffer, whole or given up."""

    collective: int
    data: Bytes
    """Of the announced size, or as far as seen; bytes in `missing` are not to be used. Not written
    to again."""
    present: tuple[tuple[int, int], ...]
    """Ranges [start, stop) in bytes, sorted, apart from each other."""
    missing: tuple[tuple[int, int], ...]
    """The rest."""
    sources: tuple[Source, ...]
    mismatches: tuple[Mismatch, ...] = ()
    """Not empty: the buffer must not be trusted."""
    sized: bool = True
    """Whether the size was announced: where not, what lies beyond the last byte seen is unknown."""
