"""UDP and TCP packets out of Ethernet frames: headers only, one row each."""

from __future__ import annotations

import ipaddress
import secrets

import numpy as np

from everystep.tap.capture import need_extension
from everystep.tap.pieces import PACKET, Address, Frames, Packets

try:
    from everystep.tap import _packets
except ImportError:  # no compiler where this was installed
    _packets = None  # type: ignore[assignment]

REASONS = (
    "shorter than its headers",
    "not IP",
    "fragment",
    "neither UDP nor TCP",
    "malformed",
    "too many addresses",
)
"""Why a frame gives no packet. Fragments are skipped: RoCE and TCP send none."""


class Parser:
    """Reads headers; keeps the table of addresses, which holds up to 65,536."""

    def __init__(self) -> None:
        """A new table of addresses.

        Raises:
            Unsupported: the compiled loops are not installed.
        """
        need_extension(_packets)
        self._state = _packets.new_parser(secrets.randbits(64))

    def parse(self, frames: Frames) -> Packets:
        """The packets of these frames."""
        rows = np.empty(len(frames.table), PACKET)
        count = _packets.parse(self._state, frames.data, frames.table, rows)
        return Packets(frames, rows[:count])

    @property
    def address_count(self) -> int:
        """How many addresses the table holds."""
        return _packets.address_count(self._state)

    def address(self, index: int) -> Address:
        """What is known by now of an index in a packet.

        Raises:
            IndexError: there is no such address.
        """
        ip, mac = _packets.address_at(self._state, index)
        return Address(str(ipaddress.ip_address(ip)), mac.hex(":"))

    def skipped(self) -> dict[str, int]:
        """How many frames gave no packet, by reason."""
        return dict(zip(REASONS, _packets.counts(self._state)[: len(REASONS)], strict=True))

    @property
    def cut(self) -> int:
        """How many packets were given whose payload was not captured whole."""
        return _packets.counts(self._state)[len(REASONS)]
