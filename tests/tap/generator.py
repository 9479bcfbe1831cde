"""Synthetic captures of NCCL's ring collectives over RoCEv2, with what they hold.

Written from the description of the wire alone: a literal walk of NCCL's device loop on every rank,
which shares no line with the decoder. `Job` is a communicator with real buffers: `all_reduce` adds
them up hop by hop as the ring does, so what the wire carries and what the ranks end with are the
same bytes. `Job.packets` are all that crossed any link, in causal order; `mirrored` picks those
that a port shows, `damaged` loses, doubles, delays and spoils some, `write` makes a file of them.
"""

from __future__ import annotations

import functools
import random
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]

SIZES = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
SLOT_BYTES = {"LL": 65_536, "LL128": 614_400, "Simple": 524_288}
MOST_DATA_BYTES = {"LL": 32_768, "LL128": 576_000, "Simple": 2_097_152}
"""Of a chunk: of Simple in two messages."""
FIFO_STRIDE = 256


@dataclass(frozen=True)
class Wire:
    """How a communicator is set up."""

    ranks: int = 2
    channels: int = 1
    protocol: str = "LL"
    dtype: str = "float32"
    mtu: int = 4096
    version: int = 19
    """Minor version of NCCL 2: up to 19 the buffer is cut in one way, from 22 on in another."""
    queue_pairs: int = 1
    split: bool = False
    """Whether each message is cut over all queue pairs of a connection."""
    adaptive: bool = False
    """Whether large messages are a write without immediate and an empty one with it."""
    ip: int = 6
    vlan: int | None = None
    check_sums: bool = True
    """False: the ICRC is four zero bytes, which is quicker to make."""
    rings: tuple[tuple[int, ...], ...] = ()
    """Of each channel the ranks in the order of its ring; by default all in their own order."""

    def ring(self, channel: int) -> tuple[int, ...]:
        """The ranks of a channel's ring, that of rank 0 first."""
        return self.rings[channel] if self.rings else tuple(range(self.ranks))


@dataclass(frozen=True)
class Packet:
    """What crosses a link once."""

    source: int
    """The rank whose port it leaves."""
    destination: int
    frame: bytes
    is_data: bool
    """Part of a data message; else a clear-to-send, or an ack."""


@dataclass
class Pair:
    """A queue pair between two ranks, as seen from the end that sends data."""

    data_qp: int
    cts_qp: int
    data_psn: int = 0
    cts_psn: int = 0
    finished: int = 0

    @property
    def port(self) -> int:
        """UDP source port of both directions."""
        v = (self.data_qp * self.cts_qp) & (1 << 64) - 1
        v ^= v >> 20
        v ^= v >> 40
        f = v & 0xFFFFF
        return 0xC000 | ((f & 0x3FFF) ^ (f >> 14))


@dataclass
class Connection:
    """One direction of one channel between two neighbours."""

    sender: int
    receiver: int
    channel: int
    pairs: list[Pair]
    fifo: int
    base: dict[str, int]
    rkey: dict[str, int]
    fifo_rkey: int
    step: int = 0
    """The next: counted from when the connection was made, over all protocols."""
    asked: int = 0
    """Clear-to-sends so far."""


@dataclass(frozen=True)
class Reduction:
    """An all-reduce that went over the wire."""

    number: int
    """Among the all-reduces of its job, from 0."""
    reduced: Buffer
    """What every rank has at the end, shape (nbytes,)."""
    first: int
    """Index in `Job.packets` of its first packet."""
    stop: int


@dataclass
class Job:
    """A communicator, and all that it has sent."""

    wire: Wire
    seed: int = 0
    first_step: int = 0
    first_psn: int = 0
    packets: list[Packet] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        numbers = iter(range(300, 100_000, 3))
        self.connections: dict[tuple[int, int], Connection] = {}
        """By channel and sender."""
        for channel in range(self.wire.channels):
            ring = self.wire.ring(channel)
            for index, sender in enumerate(ring):
                receiver = ring[(index + 1) % len(ring)]
                pairs = [
                    Pair(next(numbers), next(numbers), self.first_psn, self.first_psn)
                    for _ in range(self.wire.queue_pairs)
                ]
                keys = draw.sample(range(1 << 16, 1 << 22), 4)
                self.connections[channel, sender] = Connection(
                    sender, receiver, channel, pairs, fifo=draw.randrange(1 << 20, 1 << 40) << 8,
                    base={p: draw.randrange(1, 1 << 24) << 22 for p in SLOT_BYTES},
                    rkey=dict(zip(SLOT_BYTES, keys, strict=False)), fifo_rkey=keys[3],
                    step=self.first_step,
                )  # fmt: skip

    # ------------------------------------------------------------ collectives

    def all_reduce(self, inputs: Sequence[npt.NDArray[np.generic]]) -> Buffer:
        """Add up a buffer of each rank; returns what all have afterwards.

        Args:
            inputs: by rank, shape (elements,); bfloat16 as its upper halves, uint16.
        """
        first = len(self.packets)
        values = [np.ascontiguousarray(one) for one in inputs]
        e, n = SIZES[self.wire.dtype], len(values[0])
        assert all(one.nbytes == n * e for one in values)
        result = np.zeros(n * e, np.uint8)
        if self.wire.protocol == "Simple":
            for connection in self.connections.values():
                connection.step = up(connection.step, 4)
        for loop in self._loops(n):
            held: dict[tuple[int, int, int], npt.NDArray[np.generic]] = {}
            for s in range(2 * (self.wire.ranks - 1)):
                for channel, chunks in enumerate(loop):
                    for position in range(self.wire.ranks):
                        self._hop(values, held, channel, position, s, chunks)
            for channel, chunks in enumerate(loop):
                for chunk, (start, stop) in enumerate(chunks):
                    whole = held[channel, chunk, chunk].tobytes()
                    result[start * e : stop * e] = np.frombuffer(whole, np.uint8)
        self.reductions.append(Reduction(len(self.reductions), result, first, len(self.packets)))
        return result

    def _hop(
        self,
        values: list[npt.NDArray[np.generic]],
        held: dict[tuple[int, int, int], npt.NDArray[np.generic]],
        channel: int,
        position: int,
        s: int,
        chunks: list[tuple[int, int]],
    ) -> None:
        """One send of one rank: what it has received plus its own, or what is reduced."""
        k, ring = self.wire.ranks, self.wire.ring(channel)
        chunk = (position - 1 - s) % k
        start, stop = chunks[chunk]
        own = values[ring[position]][start:stop]
        before = (position - 1) % k
        if s == 0:
            sent = own
        elif s <= k - 1:  # the last addition is at the rank that the chunk is named after
            sent = added(held[channel, chunk, before], own, self.wire.dtype)
        else:
            sent = held[channel, chunk, before]
        held[channel, chunk, position] = sent
        if s == k - 1:
            assert position == chunk
        self._send_chunk(self.connections[channel, ring[position]], sent)

    def _loops(self, n: int) -> Iterator[list[list[tuple[int, int]]]]:
        """For each loop and channel the first and last element of each chunk."""
        if self.wire.version <= 19:
            yield from self._loops_of_all(n)
        else:
            yield from self._loops_of_parts(n)

    def _threads(self, n: int) -> tuple[int, int]:
        """Worker threads, and how many channels are used."""
        w = self.wire
        threads, channels = {"LL": 512, "LL128": 640, "Simple": 512}[w.protocol], w.channels
        need = {"LL": 8 * w.ranks, "LL128": 8, "Simple": 64}[w.protocol]
        while n * SIZES[w.dtype] < channels * threads * need:
            if channels > 1:
                channels -= 1
            elif threads % 128 == 0:
                threads //= 2
            else:
                break
        return max(threads, 96), channels

    def _loops_of_all(self, n: int) -> Iterator[list[list[tuple[int, int]]]]:
        w, k, e = self.wire, self.wire.ranks, SIZES[self.wire.dtype]
        threads, channels = self._threads(n)
        most = MOST_DATA_BYTES[w.protocol] // e
        for g in range(0, n, channels * k * most):
            rest = n - g
            if w.protocol == "Simple":
                size = min(most, -(-rest // (channels * k)))
                grain = threads * 8 // e
                size = up(size, grain)
            else:
                grain = threads * 8 // e if w.protocol == "LL" else threads * (60 // e) // 2
                size = min(most, -(-rest // (channels * k * grain)) * grain)
            loop = []
            for b in range(channels):
                row = []
                for c in range(k):
                    block = b * k + c if w.protocol == "Simple" else c * channels + b
                    start = min(n, g + block * size)
                    row.append((start, min(n, start + size)))
                loop.append(row)
            yield loop

    def _loops_of_parts(self, n: int) -> Iterator[list[list[tuple[int, int]]]]:
        w, k, e = self.wire, self.wire.ranks, SIZES[self.wire.dtype]
        threads, channels = self._threads(n)
        align = 16 // e
        if w.version < 22:
            align = {
                "LL": threads * 8 // e, "LL128": 480 * (threads // 32) // e, "Simple": 4096 // e,
            }[w.protocol]  # fmt: skip
        most = MOST_DATA_BYTES[w.protocol] // e
        part = up(-(-n // channels), align)
        parts = [(min(n, b * part), min(n, (b + 1) * part)) for b in range(channels)]
        for turn in range(max(-(-(stop - o) // (k * most)) for o, stop in parts)):
            loop = []
            for o, stop in parts:
                g = o + turn * k * most
                rest = max(0, stop - g)
                size = most if rest >= k * most else up(-(-rest // k), align)
                row = []
                for c in range(k):
                    start = min(stop, g + c * size)
                    row.append((start, min(stop, start + size)))
                loop.append(row)
            yield loop

    def all_gather(self, block: bytes) -> None:
        """As DDP's first: some bytes of each rank to all others."""
        for s in range(self.wire.ranks - 1):
            for position in range(self.wire.ranks):
                own = (position - s) % self.wire.ranks
                data = np.frombuffer(bytes([own]) + block[1:], np.uint8)
                self._send(self.connections[0, self.wire.ring(0)[position]], data, "LL", 1)

    def broadcast(self, data: bytes) -> None:
        """From the first of each ring on, to the last, which sends nothing."""
        for at in range(0, len(data), MOST_DATA_BYTES["LL"]):
            piece = np.frombuffer(data[at : at + MOST_DATA_BYTES["LL"]], np.uint8)
            for position in range(self.wire.ranks - 1):
                self._send(self.connections[0, self.wire.ring(0)[position]], piece, "LL", 1)

    # ------------------------------------------------------------ messages

    def _send_chunk(self, connection: Connection, chunk: npt.NDArray[np.generic]) -> None:
        data = np.frombuffer(chunk.tobytes(), np.uint8)
        w, e = self.wire, SIZES[self.wire.dtype]
        if w.protocol != "Simple":
            self._send(connection, data, w.protocol, 1)
            return
        n = len(data) // e
        cut = min(n, max(16 * -(-n // 32), 32_768 // e))
        self._send(connection, data[: cut * e], "Simple", 2)
        rest = min(cut, n - cut)
        assert cut + rest == n
        self._send(connection, data[cut * e :], "Simple", 2)

    def _send(self, connection: Connection, data: Buffer, protocol: str, steps: int) -> None:
        """One message: asked for, sent, acknowledged."""
        t = connection.step
        connection.step += steps
        payload = {"LL": ll_lines, "LL128": ll128_slices, "Simple": plain}[protocol](data, t)
        va = connection.base[protocol] + t % 8 * SLOT_BYTES[protocol]
        size = {"LL": 65_536, "LL128": 614_400, "Simple": 1_048_576}[protocol]
        self._clear_to_send(connection, va, size, connection.rkey[protocol])
        number = connection.asked - 1
        for pair, piece, at in self._cut(connection, payload, number):
            self._write(connection, pair, piece, va + at, connection.rkey[protocol], len(payload))

    def _cut(
        self, connection: Connection, payload: Buffer, number: int
    ) -> Iterator[tuple[Pair, Buffer, int]]:
        """Which queue pair carries which bytes of a message."""
        pairs = connection.pairs
        if not self.wire.split:
            yield pairs[number % len(pairs)], payload, 0
            return
        part = up(-(-len(payload) // len(pairs)), 128)
        for q, pair in enumerate(pairs):
            yield pair, payload[q * part : (q + 1) * part], q * part

    def _clear_to_send(self, connection: Connection, va: int, size: int, rkey: int) -> None:
        connection.asked += 1
        idx, tag, v = connection.asked, connection.sender, self.wire.version
        if v <= 19:
            record = struct.pack("<QiIIIQ", va, size, rkey, 1, tag, idx)
        elif v <= 23:
            record = struct.pack("<Qi2IIIxxxxQ", va, size, rkey, 0, 1, tag, idx)
        elif v <= 29:
            record = struct.pack("<QQ4IIIQ", va, size, rkey, 0, 0, 0, 1, tag, idx)
        else:
            record = struct.pack("<QQ8IIIQ", va, size, rkey, *[0] * 7, 1, tag, idx)
        record = record if v <= 19 else record.ljust(64, b"\0")
        pair = connection.pairs[0]
        where = connection.fifo + FIFO_STRIDE * ((idx - 1) % 256)
        reth = struct.pack(">QII", where, connection.fifo_rkey, len(record))
        bth = self._bth(10, pair.cts_qp, pair.cts_psn)
        pair.cts_psn = (pair.cts_psn + 1) % (1 << 24)
        ends = (connection.receiver, connection.sender)
        self._emit(ends, pair.port, bth + reth, record, is_data=False)

    def _write(
        self, connection: Connection, pair: Pair, data: Buffer, va: int, rkey: int, total: int
    ) -> None:
        """An RDMA write with immediate, and the ack of its last packet."""
        ends = (connection.sender, connection.receiver)
        imm = struct.pack("<I" if self.wire.version <= 28 else ">I", total)
        apart = self.wire.adaptive and total > 8192
        count = max(1, -(-len(data) // self.wire.mtu))
        for i in range(count):
            piece = data[i * self.wire.mtu : (i + 1) * self.wire.mtu].tobytes()
            first, last = i == 0, i == count - 1
            opcode = (10 if last else 6) if first else (8 if last else 7)
            more = struct.pack(">QII", va, rkey, len(data)) if first else b""
            if last and not apart:
                opcode, more = opcode + 1, more + imm
            bth = self._bth(opcode, pair.data_qp, pair.data_psn, ask=last)
            pair.data_psn = (pair.data_psn + 1) % (1 << 24)
            self._emit(ends, pair.port, bth + more, piece, is_data=True)
        if apart:
            bth = self._bth(11, pair.data_qp, pair.data_psn, ask=True)
            pair.data_psn = (pair.data_psn + 1) % (1 << 24)
            self._emit(ends, pair.port, bth + struct.pack(">QII", 0, 0, 0) + imm, b"", is_data=True)
        pair.finished += 1 + apart
        ack = self._bth(17, pair.cts_qp, (pair.data_psn - 1) % (1 << 24))
        aeth = struct.pack(">I", pair.finished % (1 << 24))
        self._emit(ends[::-1], pair.port, ack + aeth, b"", is_data=False)

    @staticmethod
    def _bth(opcode: int, qp: int, psn: int, *, ask: bool = False) -> bytes:
        return struct.pack(">BBHII", opcode, 0x40, 0xFFFF, qp, ask << 31 | psn)

    def _emit(
        self, ends: tuple[int, int], port: int, headers: bytes, payload: bytes, *, is_data: bool
    ) -> None:
        pad = -len(payload) % 4
        body = headers[:1] + bytes((headers[1] | pad << 4,)) + headers[2:] + payload + bytes(pad)
        around, masked = outside(self.wire.ip, self.wire.vlan, ends, port, len(body))
        crc = bytes(4)
        if self.wire.check_sums:
            spoken = zlib.crc32(body[:4] + b"\xff" + body[5:12], masked)
            crc = struct.pack("<I", zlib.crc32(body[12:], spoken))
        self.packets.append(Packet(*ends, around + body + crc, is_data))


@functools.cache
def outside(
    version: int, vlan: int | None, ends: tuple[int, int], port: int, length: int
) -> tuple[bytes, int]:
    """Ethernet, IP and UDP before a BTH, and the checksum of what the ICRC covers of them."""
    macs = [bytes((2, 0, 0, 0, 0, rank + 1)) for rank in ends]
    tag = b"" if vlan is None else struct.pack(">HH", 0x8100, vlan)
    length += 8 + 4
    udp = struct.pack(">HHHH", port, 4791, length, 0)
    if version == 6:
        places = [b"\xfe\x80" + bytes(13) + bytes((rank + 1,)) for rank in ends]
        kind = 0x86DD
        ip = struct.pack(">IHBB", 0x60200000, length, 17, 64) + places[0] + places[1]
        masked = struct.pack(">IHBB", 0x6FFFFFFF, length, 17, 255) + places[0] + places[1]
    else:
        places = [bytes((10, 0, 0, rank + 1)) for rank in ends]
        kind, rest = 0x0800, struct.pack(">HHHB", 20 + length, 0, 0x4000, 64)
        ip = b"\x45\x02" + rest + b"\x11\0\0" + places[0] + places[1]
        masked = b"\x45\xff" + rest[:-1] + b"\xff\x11\xff\xff" + places[0] + places[1]
    crc = zlib.crc32(b"\xff" * 8 + masked + udp[:6] + b"\xff\xff")
    return macs[1] + macs[0] + tag + struct.pack(">H", kind) + ip + udp, crc


# ---------------------------------------------------------------- arithmetic and forms


def up(number: int, multiple: int) -> int:
    """The next multiple that is not less."""
    return -(-number // multiple) * multiple


def added(
    received: npt.NDArray[np.generic], own: npt.NDArray[np.generic], dtype: str
) -> npt.NDArray[np.generic]:
    """One hop: received plus own."""
    if dtype != "bfloat16":
        return (received + own).astype(received.dtype)  # type: ignore[operator]
    one, other = ((half.astype(np.uint32) << 16).view(np.float32) for half in (received, own))
    return ((one + other).view(np.uint32) >> 16).astype(np.uint16)


def ll_lines(data: Buffer, t: int) -> Buffer:
    """16-byte lines: data, flag, data, flag."""
    lines = -(-len(data) // 8)
    padded = np.full(8 * lines, 0xA5, np.uint8)  # the tail is undefined
    padded[: len(data)] = data
    words = np.empty((2 * lines, 2), "<u4")
    words[:, 0] = padded.view("<u4")
    words[:, 1] = (t + 1) % (1 << 32)
    return words.reshape(-1).view(np.uint8)


def ll128_slices(data: Buffer, t: int) -> Buffer:
    """2,048-byte slices of 240 words of eight bytes and 16 flags."""
    slices = -(-len(data) // 1920)
    padded = np.full(1920 * slices, 0x5A, np.uint8)
    padded[: len(data)] = data
    words = padded.view("<u8").reshape(slices, 240)
    out = np.empty((slices, 256), "<u8")
    for w in range(256):
        g, lane, b = w // 64, w % 64 // 2, w % 2
        if lane % 8 == 7 and b == 1:
            out[:, w] = t + 1
        elif lane % 8 == 7:
            out[:, w] = words[
                :, 2 * (30 * g + lane) if g % 2 == 0 else 2 * (30 * (g - 1) + lane) + 1
            ]
        elif g % 2 == 0:
            out[:, w] = words[:, 2 * (30 * g + lane) + b]
        else:
            out[:, w] = words[:, 2 * (30 * (g - 1) + 32 + lane - lane // 8) + b]
    return out.reshape(-1).view(np.uint8)


def plain(data: Buffer, t: int) -> Buffer:
    """As it is."""
    return data


# ---------------------------------------------------------------- what a mirror shows


def mirrored(packets: Iterable[Packet], port: int, direction: str = "both") -> list[Packet]:
    """What a mirror of one rank's port shows: `out`, `in` or `both`."""
    out, into = direction in ("out", "both"), direction in ("in", "both")
    return [p for p in packets if (out and p.source == port) or (into and p.destination == port)]


def damaged(
    packets: Sequence[Packet],
    draw: random.Random,
    *,
    lost: float = 0.0,
    doubled: float = 0.0,
    delayed: float = 0.0,
    cut: float = 0.0,
    flipped: float = 0.0,
) -> list[Packet]:
    """Each share of the packets, chosen at random: not there, there twice, some places later, its
    end missing, a bit of it changed."""
    late: list[tuple[float, Packet]] = []
    for place, packet in enumerate(packets):
        if draw.random() < lost:
            continue
        frame = packet.frame
        if draw.random() < cut:
            frame = frame[: draw.randrange(len(frame))]
        if draw.random() < flipped:
            spoiled = bytearray(frame)
            if spoiled:
                spoiled[draw.randrange(len(spoiled))] ^= 1 << draw.randrange(8)
            frame = bytes(spoiled)
        changed = Packet(packet.source, packet.destination, frame, packet.is_data)
        delay = draw.randrange(1, 12) if draw.random() < delayed else 0
        late.append((place + delay + 0.5 * (delay > 0), changed))
        if draw.random() < doubled:
            late.append((place + draw.randrange(1, 12) + 0.5, changed))
    return [packet for _, packet in sorted(late, key=lambda one: one[0])]


def write(path: Path, packets: Iterable[Packet]) -> None:
    """A pcap file, in nanoseconds, a microsecond between packets."""
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 262_144, 1))
        for number, packet in enumerate(packets):
            seconds, micros = divmod(number, 10**6)
            size = len(packet.frame)
            file.write(struct.pack("<IIII", 1_700_000_000 + seconds, 1000 * micros, size, size))
            file.write(packet.frame)


def random_inputs(wire: Wire, elements: int, seed: int) -> list[npt.NDArray[np.generic]]:
    """A buffer for each rank."""
    draw = np.random.default_rng(seed)
    made: list[npt.NDArray[np.generic]] = []
    for _ in range(wire.ranks):
        values = draw.standard_normal(elements).astype(np.float32)
        if wire.dtype == "bfloat16":
            made.append((values.view(np.uint32) >> 16).astype(np.uint16))
        elif wire.dtype == "int32":
            made.append(draw.integers(-(10**6), 10**6, elements, dtype=np.int32))
        else:
            made.append(values.astype(wire.dtype))
    return made
