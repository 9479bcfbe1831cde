"""Messages turned into writes: the protocol of each found, and its flags taken out."""

from __future__ import annotations

from typing import Protocol

from everystep.tap import writes
from everystep.tap.connections import Connection
from everystep.tap.pieces import RAW
from everystep.tap.schedule import Protocol as Framing
from everystep.tap.sendrecv import MAX_MESSAGE_BYTES
from everystep.tap.writes import FORMS, Write, protocol_of

RING_ROOM = 262144
"""Simple: the room told in a ring is larger than this, that of a send/recv smaller."""

_NEAR = 4096
"""Steps by which a flag may jump before it is taken for data."""


class Placer(Protocol):
    """What roce's tracker does for a decoder (see pieces)."""

    def place(self, stream: int, rkey: int, form: int) -> bool:
        """Later messages with this key come in this form."""


class Unpacker:
    """What each remote key carries, as far as it has shown."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._confirmed: set[tuple[int, int]] = set()

    def read(self, connection: Connection, write: Write) -> None:
        """Find the protocol of a message, and take its flags out."""
        if connection.cut is None and not (write.has_head and write.length):
            write.restore(connection.mtu or write.mtu, write.told_lengths)
        if not write.length or not write.ranges or write.protocol is not None:
            return
        framing = self._framing(connection, write)
        write.protocol = framing
        if framing == "LL128" and connection.cut is not None:
            self._read_lines(write)
        elif framing is not None and write.row[writes.FORM] == RAW and framing != "Simple":
            write.unpack(FORMS[framing])
        key = (write.stream, write.rkey)
        if write.flag and write.row[writes.HAS_HEAD] and key not in self._confirmed:
            self._confirm(connection, write, key)

    @staticmethod
    def _read_lines(write: Write) -> None:
        """Take the flag only: slices may begin in one piece of a message and end in the next."""
        found, write.flag = protocol_of(write.data, write.ranges, 0)
        if found != "LL128":
            write.ranges, write.complete = [], False

    def _framing(self, connection: Connection, write: Write) -> Framing | None:
        if connection.is_tcp:
            return (
                self._by_content(connection, write) if write.has_head and write.has_line else None
            )
        if not write.row[writes.HAS_HEAD]:
            # whatever the connection carries, if that is one protocol only
            known = set(connection.protocols.values())
            if len(known) != 1 or (known == {"LL128"} and not write.has_head):
                return None  # an LL128 packet can be read once it is known where in its slice it is
            return known.pop()
        found = connection.protocols.get(write.rkey)
        if found is None and write.ranges:
            length = len(write.data) if connection.cut is None else write.total or 0
            found, flag = protocol_of(write.data, write.ranges, length)
            if found != "Simple" and not self._is_flag(connection, write, flag):
                found = "Simple"
            connection.protocols[write.rkey] = found
            if found == "LL" or (found == "LL128" and connection.cut is None):
                self._placer.place(write.stream, write.rkey, FORMS[found])
        return found

    def _by_content(self, connection: Connection, write: Write) -> Framing:
        """Of a message that has no key: its flags must go on from those before."""
        found, flag = protocol_of(write.data, write.ranges, len(write.data))
        if connection.step is None:
            is_flag = self._is_flag(connection, write, flag)
        else:
            psn = connection.courses[write.stream].psn
            lost = 0 if psn is None else max(0, connection.numbers.after(write.psn, psn))
            most = (
                _NEAR + lost // 2
            )  # a message is four bytes at least, and takes two steps at most
            is_flag = 0 < flag - 1 - connection.step <= most
        framing: Framing = found if is_flag else "Simple"
        connection.protocols[FORMS[framing]] = framing
        return framing

    def _is_flag(self, connection: Connection, write: Write, flag: int) -> bool:
        """Whether what looks like flags may be flags: a gradient of equal words looks so, too."""
        if connection.size is not None:
            return connection.size != MAX_MESSAGE_BYTES and connection.size < 2 * RING_ROOM * 2
        return write.psn != 0 or flag == 1

    def _confirm(self, connection: Connection, write: Write, key: tuple[int, int]) -> None:
        """The second message of a key shows whether the first was read rightly."""
        if connection.step is None:
            return
        ahead = abs(write.flag - 1 - connection.step)
        if connection.cut is not None and not ahead:
            return  # another piece of the same message
        if 0 < ahead <= _NEAR:
            self._confirmed.add(key)
            return
        connection.protocols[write.rkey] = "Simple"
        self._placer.place(write.stream, write.rkey, RAW)
        write.protocol, write.flag, write.ranges, write.complete = "Simple", 0, [], False
