"""A packet filter for the kernel: only collective traffic reaches the ring.

The program is classic BPF (`linux/filter.h`). It looks behind up to two VLAN tags, though the
kernel has usually taken the outer one off. UDP and TCP behind an IPv6 extension header pass
whatever their ports: they are rare, and the parser looks again at all that passes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from everystep.errors import UsageError

ROCE_PORT = 4791

MAX_PORTS = 64

_LOAD_HALF, _LOAD_BYTE = 0x28, 0x30  # from a fixed offset
_LOAD_HALF_INDEXED = 0x48
_LOAD_HEADER_LENGTH = 0xB1  # X = 4 * (byte & 15)
_IS_EQUAL, _HAS_BITS, _JUMP, _RETURN = 0x15, 0x45, 0x05, 0x06
_WHOLE = 0xFFFFFFFF

_Code = list[tuple[int, int, int, int]]
"""Instructions: code, jump if true, jump if false, operand."""

_IP4, _IP6, _TAGS = 0x0800, 0x86DD, (0x8100, 0x88A8, 0x9100)
_TCP, _UDP = 6, 17
_EXTENSIONS = (0, 43, 44, 60)  # hop by hop, routing, fragment, destination


def _accept_if(value: int) -> _Code:
    return [(_IS_EQUAL, 0, 1, value), (_RETURN, 0, 0, _WHOLE)]


def _if_equal(value: int, then: _Code) -> _Code:
    """`then` must end in a return."""
    return [(_IS_EQUAL, 1, 0, value), (_JUMP, 0, 0, len(then)), *then]


_REJECT: _Code = [(_RETURN, 0, 0, 0)]


def _ports(
    load: int, at: int, *, roce: bool, tcp_ports: Sequence[int] | None, protocol: int
) -> _Code:
    """Accept by the ports of the header at `at`; A holds the protocol's number at `protocol`."""
    udp: _Code = [(load, 0, 0, at + 2)]
    if roce:
        udp += _accept_if(ROCE_PORT)
    tcp: _Code = [(_RETURN, 0, 0, _WHOLE)] if tcp_ports is None else []
    for offset in (0, 2):
        tcp.append((load, 0, 0, at + offset))
        for port in tcp_ports or ():
            tcp += _accept_if(port)
    return [
        (_LOAD_BYTE, 0, 0, protocol),
        *_if_equal(_UDP, udp + _REJECT),
        *_if_equal(_TCP, tcp + _REJECT),
    ]


def program(*, roce: bool = True, tcp_ports: Sequence[int] | None = ()) -> bytes:
    """The instructions (`struct sock_filter`, in this machine's byte order) of a filter.

    Args:
        roce: whether UDP packets to port 4791 pass.
        tcp_ports: TCP packets from or to one of these pass; at most 64. None: all pass.

    Raises:
        UsageError: too many ports, or one out of range.
    """
    ports = list(tcp_ports or ())
    if len(ports) > MAX_PORTS or any(not 0 < port < 65536 for port in ports):
        raise UsageError(f"{ports!r} are not up to {MAX_PORTS} port numbers")
    code: _Code = []
    for type_at in (12, 16, 20):
        ip = type_at + 2
        ip4: _Code = [
            (_LOAD_HALF, 0, 0, ip + 6),
            (_HAS_BITS, 0, 1, 0x1FFF),  # a later fragment has no ports
            *_REJECT,
            (_LOAD_HEADER_LENGTH, 0, 0, ip),
            *_ports(_LOAD_HALF_INDEXED, ip, roce=roce, tcp_ports=tcp_ports, protocol=ip + 9),
            *_REJECT,
        ]
        ip6 = _ports(_LOAD_HALF, ip + 40, roce=roce, tcp_ports=tcp_ports, protocol=ip + 6)
        behind: _Code = [(_LOAD_BYTE, 0, 0, ip + 40)]
        for protocol in (_UDP, _TCP, *_EXTENSIONS):
            behind += _accept_if(protocol)
        for extension in _EXTENSIONS:
            ip6 += _if_equal(extension, behind + _REJECT)
        code += [(_LOAD_HALF, 0, 0, type_at)]
        code += _if_equal(_IP4, ip4)
        code += _if_equal(_IP6, ip6 + _REJECT)
        if type_at < 20:
            # go on behind the tag if it is one
            code += [
                (_IS_EQUAL, 3, 0, _TAGS[0]),
                (_IS_EQUAL, 2, 0, _TAGS[1]),
                (_IS_EQUAL, 1, 0, _TAGS[2]),
            ]
        code += _REJECT
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
