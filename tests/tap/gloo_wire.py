"""A small gloo of its own: the packets of ring all-reduces, from the description of the wire.

It walks the ring hop by hop, as gloo does, and shares nothing with the decoder.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16


def ring(inputs: Sequence[Floats]) -> tuple[list[list[bytes]], Floats]:
    """What each rank sends to the one before it, message by message, and the sum.

    Shapes: `inputs` k × (N,); float32.
    """
    ranks, total = len(inputs), 4 * len(inputs[0])
    count = max(-(-total // 1048576), 2 * ranks)
    while count % ranks:
        count += 1
    width = -(-total // count)
    while width % 4:
        width += 1
    per_chunk = count // ranks
    state = [bytearray(values.tobytes()) for values in inputs]
    sent: list[list[bytes]] = [[] for _ in range(ranks)]
    for phase in range(2):
        for i in range(count - per_chunk):
            hops = []
            for rank in range(ranks):
                first = (rank + 1 if phase == 0 else rank) * per_chunk
                at = (first + i) % count * width
                hops.append((rank, at, bytes(state[rank][at : at + width])))
            for rank, at, data in hops:
                if not data:
                    continue
                sent[rank].append(data)
                to = state[(rank - 1) % ranks]
                if phase == 0:
                    own = np.frombuffer(bytes(to[at : at + len(data)]), np.float32)
                    data = (own + np.frombuffer(data, np.float32)).tobytes()
                to[at : at + len(data)] = data
    for other in state[1:]:
        assert other == state[0]
    return sent, np.frombuffer(bytes(state[0]), np.float32)


def operation(opcode: int, tag: int, data: bytes | int, prefix: int = 4) -> bytes:
    """One preamble, with the data behind it for opcode 1; a notice tells only the length."""
    body = data if isinstance(data, bytes) else b""
    length = len(data) if isinstance(data, bytes) else data
    slot = prefix << 56 | tag << 24
    return struct.pack("<6Q", 48 + len(body), opcode, slot, 0, length, 0) + body


class Connection:
    """Two hosts, and every packet between them in order."""

    def __init__(
        self, packets: list[bytes], hosts: tuple[int, int], ports: tuple[int, int], *, mtu: int
    ) -> None:
        self._packets, self._hosts, self._ports, self._mtu = packets, hosts, ports, mtu
        # close to the end of the 32 bits, so that every test wraps
        self._next = [0xFFFFFF00, 0xFFFF8000]

    def open(self) -> None:
        """The first three packets, and gloo's eight bytes; side 0 connects."""
        self._packet(0, SYN, b"")
        self._next[0] = self._next[0] + 1 & 0xFFFFFFFF
        self._packet(1, SYN | ACK, b"")
        self._next[1] = self._next[1] + 1 & 0xFFFFFFFF
        self._packet(0, ACK, b"")
        self.send(0, struct.pack("<q", 3))

    def send(self, side: int, data: bytes) -> None:
        """Data in segments, every second one acknowledged, and the last."""
        for at in range(0, len(data), self._mtu):
            self._packet(side, PSH | ACK, data[at : at + self._mtu])
            if at // self._mtu % 2 or at + self._mtu >= len(data):
                self._packet(1 - side, ACK, b"")

    def close(self) -> None:
        """Both sides end."""
        for side in (0, 1):
            self._packet(side, FIN | ACK, b"")
            self._next[side] = self._next[side] + 1 & 0xFFFFFFFF
        self._packet(0, ACK, b"")

    def _packet(self, side: int, flags: int, data: bytes) -> None:
        self._packets.append(
            segment(
                (self._hosts[side], self._hosts[1 - side]),
                (self._ports[side], self._ports[1 - side]),
                self._next[side],
                self._next[1 - side] if flags & ACK else 0,
                flags,
                data,
            )
        )
        self._next[side] = self._next[side] + len(data) & 0xFFFFFFFF


def segment(
    hosts: tuple[int, int],
    ports: tuple[int, int],
    sequence: int,
    acknowledgement: int,
    flags: int,
    data: bytes,
) -> bytes:
    """One Ethernet frame: IPv4 addresses 10.0.0.x, no options, the right TCP checksum."""
    source, destination = (bytes([10, 0, 0, host]) for host in hosts)
    length = 20 + len(data)
    numbers = sequence & 0xFFFFFFFF, acknowledgement & 0xFFFFFFFF
    head = struct.pack(">HHIIBBHHH", *ports, *numbers, 0x50, flags, 512, 0, 0)
    pseudo = source + destination + struct.pack(">HH", 6, length & 0xFFFF)
    words = np.frombuffer(pseudo + head + data + b"\0" * (len(data) % 2), ">u2")
    total = int(words.sum(dtype=np.uint64))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    head = head[:16] + struct.pack(">H", ~total & 0xFFFF) + head[18:]
    ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + length, 0, 0x4000, 64, 6, 0) + source + destination
    macs = bytes([2, 0, 0, 0, 0, hosts[1], 2, 0, 0, 0, 0, hosts[0]])
    return macs + b"\x08\x00" + ip + head + data


class Group:
    """A process group of `ranks` hosts, 10.0.0.1 and on, seen at the port of one of them."""

    def __init__(self, ranks: int, *, mtu: int = 1448, seen: int | None = 0, seed: int = 0) -> None:
        """`seen`: the rank at whose port packets are seen; None: all."""
        self.ranks, self.packets = ranks, list[bytes]()
        self._random = random.Random(seed)
        self._tag = 0
        self._pairs: dict[tuple[int, int], tuple[Connection, int]] = {}
        for rank in range(ranks):
            to = (rank - 1) % ranks
            if (to, rank) in self._pairs:  # two ranks: both directions on one connection
                self._pairs[rank, to] = (self._pairs[to, rank][0], 1)
                continue
            is_seen = seen is None or seen in (rank, to)
            connection = Connection(
                self.packets if is_seen else [],
                (rank + 1, to + 1),
                (40000 + rank, 5000 + to),
                mtu=mtu,
            )
            connection.open()
            self._pairs[rank, to] = (connection, 0)

    def all_reduce(self, *inputs: Sequence[Floats]) -> list[tuple[int, Floats]]:
        """All-reduces that run at the same time, their messages mixed on each connection; each
        with its tag and the sum."""
        streams: list[tuple[int, int, list[bytes]]] = []
        results = []
        for values in inputs:
            sent, reduced = ring(values)
            streams += [(rank, self._tag, messages) for rank, messages in enumerate(sent)]
            results.append((self._tag, reduced))
            self._tag += 1
        while streams := [stream for stream in streams if stream[2]]:
            rank, tag, messages = self._random.choice(streams)
            data = messages.pop(0)
            connection, side = self._pairs[rank, (rank - 1) % self.ranks]
            connection.send(1 - side, operation(3, tag, len(data)))
            connection.send(side, operation(2, tag, len(data)))
            connection.send(side, operation(1, tag, data))
        return results

    def other(self) -> None:
        """A broadcast: another operation, that takes a tag."""
        connection, side = self._pairs[0, self.ranks - 1]
        connection.send(side, operation(1, self._tag, b"\1" * 900, prefix=6))
        self._tag += 1

    def close(self) -> None:
        """The job ends."""
        for connection in {id(pair[0]): pair[0] for pair in self._pairs.values()}.values():
            connection.close()
