"""Frames of a live interface, from a ring that the kernel fills."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from everystep.errors import CaptureFailed
from everystep.tap import bpf
from everystep.tap.capture import need_extension
from everystep.tap.pieces import FRAME, Bytes, Frames

try:
    from everystep.tap import _packets
except ImportError:  # no compiler where this was installed
    _packets = None  # type: ignore[assignment]

# linux/if_packet.h, asm-generic/socket.h
_SOL_PACKET = 263
_ADD_MEMBERSHIP, _RX_RING, _STATISTICS, _VERSION, _IGNORE_OUTGOING = 1, 5, 6, 10, 23
_PROMISCUOUS = 1
_TPACKET_V3 = 2
_ATTACH_FILTER = 26
_ALL_PROTOCOLS = 3

_FRAME_BYTES = 2048  # only the kernel's arithmetic needs it: frames lie one behind the other
_RETIRE_MS = 4  # a block that is not full is handed over after this


class Drops(Struct, frozen=True):
    """What the kernel counted since the capture began."""

    packets: int
    """That passed the filter."""
    dropped: int
    """Of them: there was no room in the ring."""
    freezes: int
    """How often the ring was full."""


class Mirror(Protocol):
    """Frames that come as time goes on; for one thread at a time."""

    quiet_s: float
    """Where no frame has come for so long, none of those before is on its way."""

    @property
    def is_behind(self) -> bool:
        """Whether there is much that has not been had yet, although it was seen long ago."""
        ...

    def next(self, timeout_s: float) -> Frames | None:
        """The next batch; None if none comes within `timeout_s` seconds. The last one may be gone.

        Raises:
            TapError: none will come any more.
        """
        ...

    def drops(self) -> Drops:
        """What was counted so far."""
        ...

    def close(self) -> None:
        """End; a second time: no effect."""
        ...


class Live:
    """Frames of an interface from a memory-mapped ring (AF_PACKET, TPACKET_V3); a context manager.

    A batch lies in the ring itself: it is valid until the next one is asked for.
    """

    quiet_s = 0.1
    is_behind = False
    """What does not fit the ring is dropped: it is never far."""

    def __init__(
        self,
        interface: str,
        *,
        roce: bool = True,
        tcp_ports: Sequence[int] | None = (),
        ignore_outgoing: bool = False,
        block_bytes: int = 1 << 20,
        blocks: int = 64,
    ) -> None:
        """Begin to capture, in promiscuous mode.

        Args:
            interface: name of an Ethernet interface.
            roce: whether UDP packets to port 4791 are taken.
            tcp_ports: TCP packets from or to these are taken; at most 64. None: all.
            ignore_outgoing: leave out what this host sends; on `lo` that is one of two copies.
            block_bytes: of one block of the ring; a multiple of the page size.
            blocks: how many. The ring must hold what comes while the reader is busy.

        Raises:
            CaptureFailed: no such interface, or this process may not (CAP_NET_RAW).
            UsageError: ports out of range.
            Unsupported: the compiled loops are not installed.
        """
        need_extension(_packets)
        code = bpf.program(roce=roce, tcp_ports=tcp_ports)
        self.interface = interface
        self._block_bytes, self._blocks = block_bytes, blocks
        self._block, self._held = 0, False
        self._first = 1
        self._drops = [0, 0, 0]
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._ring = self._begin(code, ignore_outgoing)
        except OSError as error:
            self._socket.close()
            raise self._failed(error) from error
        self._rows = np.empty(block_bytes // 64, FRAME)  # a frame's header alone takes more

    def _failed(self, error: OSError) -> CaptureFailed:
        return CaptureFailed(
            f"cannot capture {self.interface}: {error}",
            hint="run as root or with CAP_NET_RAW; `ip link` lists the interfaces",
        )

    def _begin(self, code: bytes, ignore_outgoing: bool) -> Bytes:
        """Set up the filter and the ring before the first packet can come."""
        instructions = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions))
        sock = self._socket
        sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
        sock.setsockopt(_SOL_PACKET, _VERSION, _TPACKET_V3)
        if ignore_outgoing:
            sock.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        total = self._block_bytes * self._blocks
        request = (self._block_bytes, self._blocks, _FRAME_BYTES, total // _FRAME_BYTES)
        sock.setsockopt(_SOL_PACKET, _RX_RING, struct.pack("=7I", *request, _RETIRE_MS, 0, 0))
        index = socket.if_nametoindex(self.interface)
        membership = struct.pack("=iHH8s", index, _PROMISCUOUS, 0, b"")
        sock.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, membership)
        ring = mmap.mmap(sock.fileno(), total, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        sock.bind((self.interface, _ALL_PROTOCOLS))
        return np.frombuffer(ring, np.uint8)

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; a second time: no effect. The ring is unmapped when the last batch is forgotten."""
        self._socket.close()
        self._ring = np.empty(0, np.uint8)

    def fileno(self) -> int:
        """Of the socket: readable when a block is ready."""
        return self._socket.fileno()

    def next(self, timeout_s: float) -> Frames | None:
        """The next batch; None if none comes within `timeout_s` seconds. Gives back the last one.

        Raises:
            CaptureFailed: the interface has gone.
        """
        start = self._block * self._block_bytes
        if self._held:
            _packets.release_block(self._ring, start, self._block_bytes)
            self._held = False
            self._block = (self._block + 1) % self._blocks
            start = self._block * self._block_bytes
        count = _packets.ring_block(self._ring, start, self._block_bytes, self._rows)
        if count is None:
            self._wait(timeout_s)
            count = _packets.ring_block(self._ring, start, self._block_bytes, self._rows)
        if count is None:
            return None
        self._held = True
        data = self._ring.view()
        data.flags.writeable = False
        frames = Frames(data, self._rows[:count], self._first)
        self._first += count
        return frames

    def _wait(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLERR)
        for _, events in poll.poll(timeout_s * 1000):
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if events & select.POLLERR and error:
                raise self._failed(OSError(error, os.strerror(error)))

    def drops(self) -> Drops:
        """What the kernel counted so far."""
        counted = self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 12)
        for i, number in enumerate(struct.unpack("=III", counted)):
            self._drops[i] += number
        return Drops(*self._drops)
