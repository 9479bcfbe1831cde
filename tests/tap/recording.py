"""Packets of an interface kept in memory, and changed: what a mirror might have shown instead."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from everystep.tap.pieces import FRAME, Frames
from peers.hosts import enter

_SOL_PACKET, _IGNORE_OUTGOING, _STATISTICS = 263, 23, 6
_RECEIVE_BUFFER_FORCE = 33
_ALL_PROTOCOLS = 3


class Recorder:
    """Keeps every frame that arrives at the loopback interface of a network while it is open. Needs
    root.

    Args:
        network: its name.
    """

    def __init__(self, network: str) -> None:
        with ThreadPoolExecutor(1) as pool:  # a socket is where the thread is that opens it
            self._socket = pool.submit(_opened, network).result()
        self._socket.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCE, 512 << 20)
        self._socket.settimeout(0.05)
        self._socket.bind(("lo", _ALL_PROTOCOLS))
        self._is_over = False
        self._thread = threading.Thread(target=self._record)
        self.packets: list[bytes] = []

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join()
        counted = self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 8)
        self._socket.close()
        assert int.from_bytes(counted[4:8], "little") == 0, "the kernel dropped packets"

    def _record(self) -> None:
        while True:
            try:
                self.packets.append(self._socket.recv(1 << 17))
            except TimeoutError:
                if self._is_over:  # nothing has come since
                    return


def _opened(network: str) -> socket.socket:
    enter(network)
    return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)


def frames_of(packets: list[bytes], first: int = 1, lengths: list[int] | None = None) -> Frames:
    """One batch; `lengths`: on the wire, where frames were cut."""
    table = np.zeros(len(packets), FRAME)
    table["captured"] = [len(packet) for packet in packets]
    table["length"] = table["captured"] if lengths is None else lengths
    table["at"] = np.cumsum(table["captured"], dtype=np.uint64) - table["captured"]
    return Frames(np.frombuffer(b"".join(packets) or b"\0", np.uint8), table, first)
