"""Frames as a cable has them, where virtual interfaces have spared themselves some work."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

IP = 14
"""Bytes of an Ethernet header."""

_SEGMENT = 1448


class Packet(Struct):
    """A frame on its way to the shadow."""

    at: float
    """Its place among all of them: frame numbers of the recording."""
    data: bytes
    length: int
    """On the wire."""


def wired(packets: Sequence[Packet]) -> list[Packet]:
    """The same as a cable has them: small segments with right checksums, where virtual interfaces
    show large ones whose checksums nobody has filled in."""
    return [part for one in packets for part in _segments(one)]


def _segments(one: Packet) -> Iterator[Packet]:
    at = _tcp(one.data)
    if at is None:
        yield one
        return
    body = at + 4 * (one.data[at + 12] >> 4)
    stop = IP + int.from_bytes(one.data[IP + 2 : IP + 4])
    (sequence,) = struct.unpack_from(">I", one.data, at + 4)
    for start in range(body, max(stop, body + 1), _SEGMENT):
        last = start + _SEGMENT >= stop
        data = bytearray(one.data[:body] + one.data[start : min(start + _SEGMENT, stop)])
        struct.pack_into(">H", data, IP + 2, len(data) - IP)
        struct.pack_into(">I", data, at + 4, sequence + start - body & 0xFFFFFFFF)
        if not last:
            data[at + 13] &= ~9  # FIN and PSH are of the last one
        yield Packet(one.at + (start - body) / (1 << 20), summed(data), len(data))


def _tcp(data: bytes) -> int | None:
    """Where the TCP header begins; None: there is none."""
    if len(data) < IP + 40 or data[12:14] != b"\x08\x00" or data[IP + 9] != 6:
        return None
    at = IP + 4 * (data[IP] & 15)
    return at if at + 20 <= len(data) else None


def summed(data: bytes | bytearray) -> bytes:
    """With the right TCP checksum, if it is a TCP segment."""
    at = _tcp(bytes(data))
    if at is None:
        return bytes(data)
    tcp = bytes(data[at : at + 16]) + b"\0\0" + bytes(data[at + 18 :])
    pseudo = bytes(data[IP + 12 : IP + 20]) + struct.pack(">HH", 6, len(tcp) & 0xFFFF)
    words = np.frombuffer(pseudo + tcp + b"\0" * (len(tcp) % 2), ">u2")
    total = int(words.sum(dtype=np.uint64))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return bytes(data[: at + 16]) + struct.pack(">H", ~total & 0xFFFF) + bytes(data[at + 18 :])


def acknowledging(data: bytes, more: int) -> bytes:
    """The segment with an acknowledgement of so many bytes more, and the right checksum."""
    at = _tcp(data)
    if at is None:
        return data
    changed = bytearray(data)
    (number,) = struct.unpack_from(">I", data, at + 8)
    struct.pack_into(">I", changed, at + 8, number + more & 0xFFFFFFFF)
    return summed(changed)
