"""The same jobs as `generator`'s, over NCCL's socket transport: written from the description of the
wire alone, apart from the decoder.

One TCP connection per direction and channel, from the sender of the data to the receiver: magic
number, kind of socket, number of the socket; then for each message its size and its bytes.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, field

from tap.generator import Buffer, Connection, Job, Packet, ll128_slices, ll_lines, plain
from tap.gloo_wire import ACK, PSH, SYN, segment

MAGIC, NET_SOCKET = 0x564AB9F2FC4B9D6C, 3
HANDSHAKE = 5
"""Packets that make a connection."""


@dataclass
class Side:
    """One TCP connection, from the end that connects."""

    sender: int
    receiver: int
    ports: tuple[int, int]
    sequence: int
    other: int


@dataclass
class SocketJob(Job):
    """A communicator over sockets."""

    sockets: int = 0
    """Data sockets of a connection beside the one that has the sizes."""
    first_sequence: int = 0xFFFFFF00
    """So that every test wraps."""
    sides: dict[tuple[int, int], list[Side]] = field(default_factory=dict)
    is_first: dict[int, bool] = field(default_factory=lambda: defaultdict(bool))
    """By index in `packets`: whether the packet has the size of a message."""

    def __post_init__(self) -> None:
        super().__post_init__()
        port = iter(range(40_000, 60_000))
        for (channel, sender), connection in self.connections.items():
            listener = next(port)
            self.sides[channel, sender] = [
                self._connect(connection, (next(port), listener), number)
                for number in range(self.sockets + 1)
            ]

    def _connect(self, connection: Connection, ports: tuple[int, int], number: int) -> Side:
        side = Side(connection.sender, connection.receiver, ports, self.first_sequence, 5)
        self._segment(side, SYN, b"")
        side.sequence += 1
        self._segment(side, SYN | ACK, b"", back=True)
        side.other += 1
        self._segment(side, ACK, b"")
        self.stream(side, struct.pack("<QIB", MAGIC, NET_SOCKET, number))
        return side

    def _send(self, connection: Connection, data: Buffer, protocol: str, steps: int) -> None:
        t = connection.step
        connection.step += steps
        payload = {"LL": ll_lines, "LL128": ll128_slices, "Simple": plain}[protocol](data, t)
        *others, control = self.sides[connection.channel, connection.sender]
        size = struct.pack("<i", len(payload))
        self.is_first[len(self.packets)] = True
        if not others:
            self.stream(control, size + payload.tobytes())
            return
        self.stream(control, size)
        task = max(65_536, -(-len(payload) // len(others)))
        for at in range(0, len(payload), task):
            self.stream(others[0], payload[at : at + task].tobytes())
            others = [*others[1:], others[0]]

    def stream(self, side: Side, data: bytes) -> None:
        """In segments, every second one acknowledged, and the last."""
        for at in range(0, len(data), self.wire.mtu):
            piece = data[at : at + self.wire.mtu]
            self._segment(side, PSH | ACK, piece)
            side.sequence += len(piece)
            if at // self.wire.mtu % 2 or at + self.wire.mtu >= len(data):
                self._segment(side, ACK, b"", back=True)

    def _segment(self, side: Side, flags: int, data: bytes, *, back: bool = False) -> None:
        ends, ports = (side.sender, side.receiver), side.ports
        numbers = side.sequence, side.other if flags & ACK else 0
        if back:
            ends, ports, numbers = ends[::-1], ports[::-1], (side.other, side.sequence)
        hosts = ends[0] + 1, ends[1] + 1
        frame = segment(hosts, ports, *numbers, flags, data)
        self.packets.append(Packet(*ends, frame, is_data=bool(data)))
