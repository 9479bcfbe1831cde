"""The kernel's filter, by the kernel: attached to a socket that frames are written to."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence

import pytest

from everystep.errors import UsageError
from everystep.tap import bpf
from tap import frames as f

_SO_ATTACH_FILTER = 26


def passes(frame: bytes, *, roce: bool = True, tcp_ports: Sequence[int] | None = ()) -> bool:
    code = bpf.program(roce=roce, tcp_ports=tcp_ports)
    kept = ctypes.create_string_buffer(code, len(code))
    there, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with there, here:
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(kept))
        here.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        here.setblocking(False)
        try:
            there.send(frame)
            return here.recv(1 << 16) == frame
        except (BlockingIOError, PermissionError):
            return False


@pytest.mark.parametrize("tags", [[], [0x8100], [0x88A8, 0x8100]])
@pytest.mark.parametrize("family", [4, 6])
def test_collective_traffic_passes(tags: list[int], family: int) -> None:
    kind, ip = (0x0800, f.ip4) if family == 4 else (0x86DD, f.ip6)
    roce = f.ethernet(ip(f.udp(b"x"), 17), kind, tags=tags)
    assert passes(roce)
    assert not passes(roce, roce=False, tcp_ports=[f.ROCE])
    assert not passes(
        f.ethernet(ip(f.udp(b"x", source=f.ROCE, destination=9), 17), kind, tags=tags)
    )
    tcp = f.ethernet(ip(f.tcp(b"x", source=1234, destination=5678), 6), kind, tags=tags)
    assert not passes(tcp)
    assert passes(tcp, tcp_ports=[7, 1234]) and passes(tcp, tcp_ports=[5678])
    assert not passes(tcp, tcp_ports=[1235])
    assert passes(tcp, roce=False, tcp_ports=None)
    assert not passes(roce, roce=False, tcp_ports=None)
    assert not passes(f.ethernet(ip(f.udp(b"", destination=5678), 17), kind), tcp_ports=[5678])


def test_options_are_looked_behind() -> None:
    assert passes(f.ethernet(f.ip4(f.udp(b"x"), 17, options=b"\1" * 12), 0x0800))
    for kind in (0, 43, 44, 60):
        for inner in (17, 6, 60):
            header = bytes([inner]) + b"\0" * 7
            assert passes(f.ethernet(f.ip6(f.udp(b"x"), kind, extensions=header), 0x86DD))
        # as multicast listeners report themselves
        icmp = f.ip6(b"\0" * 20, kind, extensions=bytes([58]) + b"\0" * 7)
        assert not passes(f.ethernet(icmp, 0x86DD))


def test_other_traffic_does_not_pass() -> None:
    assert not passes(f.ethernet(b"\0" * 60, 0x0806))
    assert not passes(f.ethernet(f.ip4(f.udp(b"x"), 17, fragment=3), 0x0800))
    assert not passes(f.ethernet(f.ip4(b"\0" * 20, 1), 0x0800))
    assert not passes(f.ethernet(f.ip6(b"\0" * 20, 58), 0x86DD))
    assert not passes(f.ethernet(f.ip4(f.udp(b"x"), 17), 0x0800, tags=[0x8100] * 3))
    assert not passes(f.ethernet(b"", 0x0800))


def test_as_many_ports_as_there_may_be() -> None:
    ports = list(range(1000, 1000 + bpf.MAX_PORTS))
    frame = f.ethernet(f.ip6(f.tcp(b"", source=1, destination=ports[-1]), 6), 0x86DD, tags=[0x8100])
    assert passes(frame, tcp_ports=ports)
    assert not passes(frame, tcp_ports=ports[:-1])
    for bad in ([*ports, 1], [0], [65536]):
        with pytest.raises(UsageError, match="port"):
            bpf.program(tcp_ports=bad)
