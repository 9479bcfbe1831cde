"""Small frames and capture files by hand: Ethernet to RoCEv2, and pcap and pcapng around them."""

from __future__ import annotations

import ipaddress
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from everystep.tap.pieces import FRAME, Frames

MAC_A, MAC_B = bytes.fromhex("0a0000000001"), bytes.fromhex("0a0000000002")
IP6_A, IP6_B = "fe80::1", "fe80::2"
IP4_A, IP4_B = "10.0.0.1", "10.0.0.2"
ROCE = 4791

SEND_FIRST, SEND_MIDDLE, SEND_LAST, SEND_LAST_IMM, SEND_ONLY, SEND_ONLY_IMM = range(6)
WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST, WRITE_LAST_IMM, WRITE_ONLY, WRITE_ONLY_IMM = range(6, 12)
READ_REQUEST, READ_FIRST, READ_MIDDLE, READ_LAST, READ_ONLY, ACKNOWLEDGE = range(12, 18)
COMPARE_SWAP, SEND_ONLY_INVALIDATE = 19, 23


def ethernet(payload: bytes, kind: int, *, tags: Sequence[int] = ()) -> bytes:
    """From A to B, with one VLAN tag for each EtherType in `tags`."""
    return (
        MAC_B + MAC_A + b"".join(struct.pack(">HH", t, 7) for t in tags) + struct.pack(">H", kind)
    ) + payload


def ip6(
    payload: bytes, protocol: int, *, a: str = IP6_A, b: str = IP6_B, extensions: bytes = b""
) -> bytes:
    """`extensions` stands before the payload; `protocol` is then that of the first of them."""
    head = struct.pack(">IHBB", 0x60000000, len(extensions) + len(payload), protocol, 64)
    addresses = ipaddress.ip_address(a).packed + ipaddress.ip_address(b).packed
    return head + addresses + extensions + payload


def ip4(
    payload: bytes,
    protocol: int,
    *,
    a: str = IP4_A,
    b: str = IP4_B,
    options: bytes = b"",
    fragment: int = 0,
) -> bytes:
    """`fragment` is the field of flags and offset."""
    words = 5 + len(options) // 4
    head = struct.pack(
        ">BBHHHBBH", 0x40 | words, 0, 4 * words + len(payload), 1, fragment, 64, protocol, 0
    )
    addresses = ipaddress.ip_address(a).packed + ipaddress.ip_address(b).packed
    return head + addresses + options + payload


def udp(payload: bytes, *, source: int = 50000, destination: int = ROCE) -> bytes:
    return struct.pack(">HHHH", source, destination, 8 + len(payload), 0) + payload


def tcp(
    payload: bytes,
    *,
    source: int = 1000,
    destination: int = 2000,
    sequence: int = 0,
    acknowledgement: int = 0,
    flags: int = 16,
    options: bytes = b"",
) -> bytes:
    words = 5 + len(options) // 4
    return (
        struct.pack(
            ">HHIIBBHHH",
            *(source, destination, sequence, acknowledgement),
            *(words << 4, flags, 512, 0, 0),
        )
        + options
        + payload
    )


def icrc(ip: bytes, rest: bytes) -> bytes:
    """The invariant CRC of an IP header and what follows it, UDP header and BTH first."""
    head = bytearray(ip)
    if head[0] >> 4 == 6:
        head[0] |= 15
        head[1:4] = b"\xff" * 3
        head[7] = 255
    else:
        head[1] = head[8] = 255
        head[10:12] = b"\xff\xff"
    body = bytearray(rest)
    body[6:8] = b"\xff\xff"
    body[12] = 255
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + head + body))


def reth(va: int, rkey: int, length: int) -> bytes:
    return struct.pack(">QII", va, rkey, length)


def immediate(value: int) -> bytes:
    """As NCCL on x86 writes it."""
    return struct.pack("<I", value)


def aeth(syndrome: int, count: int) -> bytes:
    return struct.pack(">I", syndrome << 24 | count)


def roce(
    opcode: int,
    psn: int,
    payload: bytes = b"",
    *,
    headers: bytes = b"",
    qp: int = 77,
    version: int = 0,
    family: int = 6,
    back: bool = False,
    source: int = 50000,
    tags: Sequence[int] = (),
    trailer: bytes = b"",
    extensions: bytes = b"",
    protocol: int = 17,
) -> bytes:
    """A frame; `back`: from B to A. A payload that is no multiple of 4 is padded."""
    pad = -len(payload) % 4
    bth = struct.pack(">BBHII", opcode, pad << 4 | version, 0xFFFF, qp, psn)
    body = bth + headers + payload + b"\0" * pad
    whole = udp(body + b"\0" * 4, source=source)
    if family == 6:
        ends = (IP6_B, IP6_A) if back else (IP6_A, IP6_B)
        packet = ip6(whole, protocol, a=ends[0], b=ends[1], extensions=extensions)
    else:
        ends = (IP4_B, IP4_A) if back else (IP4_A, IP4_B)
        packet = ip4(whole, protocol, a=ends[0], b=ends[1], options=extensions)
    at = len(packet) - len(whole)
    packet = packet[:-4] + icrc(packet[:at], whole[:-4])
    return ethernet(packet + trailer, 0x86DD if family == 6 else 0x0800, tags=tags)


def write(
    psn: int,
    data: bytes,
    *,
    va: int = 0x1000,
    rkey: int = 5,
    mtu: int = 1024,
    imm: bool = True,
    qp: int = 77,
    family: int = 6,
    back: bool = False,
) -> list[bytes]:
    """The frames of one WRITE; its immediate is its length."""
    head = reth(va, rkey, len(data))
    tail = immediate(len(data)) if imm else b""
    parts = [data[i : i + mtu] for i in range(0, len(data), mtu)] or [b""]
    frames = []
    for i, part in enumerate(parts):
        first, last = i == 0, i == len(parts) - 1
        opcode = {
            (True, True): WRITE_ONLY_IMM if imm else WRITE_ONLY,
            (True, False): WRITE_FIRST,
            (False, False): WRITE_MIDDLE,
            (False, True): WRITE_LAST_IMM if imm else WRITE_LAST,
        }[first, last]
        headers = (head if first else b"") + (tail if last else b"")
        number = (psn + i) % (1 << 24)
        frames.append(roce(opcode, number, part, headers=headers, qp=qp, family=family, back=back))
    return frames


def batch(frames: Sequence[bytes], *, first: int = 1, cut: int | None = None) -> Frames:
    """As a capture would give them, a microsecond apart; `cut`: bytes captured of each at most."""
    kept = [frame if cut is None else frame[:cut] for frame in frames]
    table = np.zeros(len(kept), FRAME)
    table["captured"] = [len(frame) for frame in kept]
    table["length"] = [len(frame) for frame in frames]
    table["at"] = np.cumsum(table["captured"]) - table["captured"]
    table["time_ns"] = (np.arange(len(kept)) + first) * 1000
    data = np.frombuffer(b"".join(kept), np.uint8)
    return Frames(data, table, first)


# ---------------------------------------------------------------- files


def pcap(
    frames: Sequence[bytes],
    *,
    big: bool = False,
    ns: bool = False,
    link: int = 1,
    cut: int = 65535,
    ticks: Sequence[tuple[int, int]] = (),
) -> bytes:
    """`ticks`: of each frame, seconds and fractions."""
    order = ">" if big else "<"
    magic = 0xA1B23C4D if ns else 0xA1B2C3D4
    out = struct.pack(order + "IHHIIII", magic, 2, 4, 0, 0, cut, link)
    for i, frame in enumerate(frames):
        s, fraction = ticks[i] if ticks else (i, 0)
        kept = frame[:cut]
        out += struct.pack(order + "IIII", s, fraction, len(kept), len(frame)) + kept
    return out


def block(kind: int, body: bytes, *, big: bool = False) -> bytes:
    body += b"\0" * (-len(body) % 4)
    order = ">" if big else "<"
    length = len(body) + 12
    return struct.pack(order + "II", kind, length) + body + struct.pack(order + "I", length)


def section(*, big: bool = False) -> bytes:
    order = ">" if big else "<"
    return block(0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1), big=big)


def interface(
    *,
    big: bool = False,
    link: int = 1,
    snap: int = 0,
    resolution: int | None = None,
    offset_s: int | None = None,
) -> bytes:
    order = ">" if big else "<"
    body = struct.pack(order + "HHI", link, 0, snap)
    body += struct.pack(order + "HH", 1, 3) + b"abc\0"  # a comment, padded
    if resolution is not None:
        body += struct.pack(order + "HHB3x", 9, 1, resolution)
    if offset_s is not None:
        body += struct.pack(order + "HHq", 14, 8, offset_s)
    return block(1, body + struct.pack(order + "HH", 0, 0), big=big)


def enhanced(frame: bytes, ticks: int, *, number: int = 0, big: bool = False) -> bytes:
    order = ">" if big else "<"
    fixed = struct.pack(
        order + "IIIII", number, ticks >> 32, ticks & 0xFFFFFFFF, len(frame), len(frame)
    )
    return block(6, fixed + frame + b"\0" * (-len(frame) % 4), big=big)


def simple(frame: bytes, *, snap: int = 0, big: bool = False) -> bytes:
    kept = frame[:snap] if snap else frame
    return block(3, struct.pack((">" if big else "<") + "I", len(frame)) + kept, big=big)


def obsolete(frame: bytes, ticks: int, *, number: int = 0, big: bool = False) -> bytes:
    order = ">" if big else "<"
    fixed = struct.pack(
        order + "HHIIII", number, 0, ticks >> 32, ticks & 0xFFFFFFFF, len(frame), len(frame)
    )
    return block(2, fixed + frame, big=big)
