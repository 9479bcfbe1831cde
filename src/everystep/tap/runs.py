"""Messages that are just what comes next in an all-reduce under way, many at a time.

Only what is plain: one queue pair, every byte there, in order, with the key, flags, immediates and
lengths that were foreseen. The first message that is not ends the run, and goes the sure way by
itself, like all that is of a collective whose place is not known yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from everystep.tap import roce
from everystep.tap.connections import Connection
from everystep.tap.located import SPLIT_BYTES
from everystep.tap.pieces import PSN_COUNT, Table
from everystep.tap.positions import Window
from everystep.tap.ring import SCATTERED
from everystep.tap.writes import FORMS

_LEAST = 4
"""Fewer are not worth it."""

_FLAGS = 1 << 32


def run(connection: Connection, stream: int, rows: Table) -> tuple[int, Window] | None:
    """How many of the first rows (MESSAGE) of a stream are what its newest collective asks for."""
    course = connection.courses[stream]
    if connection.is_tcp or not connection.windows or course.psn is None or connection.is_spread:
        return None
    window = connection.windows[-1]
    first = course.last + 1
    if not window.first <= first < window.stop or window.collective.kind != "allreduce":
        return None
    if connection.floating or connection.is_refused or connection.is_split:
        return None
    rows = rows[: window.stop - first]
    count = _plain(connection, window, first, rows)
    if count < _LEAST or not _rooms_agree(connection, rows[count - 1], first + count - 1):
        return None
    return count, window


def _plain(connection: Connection, window: Window, first: int, rows: Table) -> int:
    """How many of the first rows are as foreseen."""
    protocol, flag = window.plan.protocol, 0
    if protocol != "Simple":
        if connection.lead is None or not connection.has_only_flags:
            return 0
        flag = (first + connection.lead + 1) % _FLAGS
    place = first - window.first
    lengths = window.plan.wire[place : place + len(rows)]
    keys = [key for key, framing in connection.protocols.items() if framing == protocol]
    return roce.foreseen(
        rows,
        lengths,
        psn=_psn(connection),
        flag=flag,
        form=FORMS[protocol],
        keys=np.array(keys, np.uint32),
    )


def _psn(connection: Connection) -> int:
    (course,) = connection.courses.values()
    return course.psn or 0


def _rooms_agree(connection: Connection, row: Any, position: int) -> bool:
    """Whether the receiver's last record of an address is not one that is still to come."""
    rooms = connection.rooms
    if not rooms.is_fixed:
        rooms.observe(int(row["va"]), int(row["rkey"]), int(row["frame"]), position)
    least = rooms.least(int(row["va"]), int(row["rkey"]), int(row["frame"]))
    return least is None or least <= position


def move_on(connection: Connection, stream: int, rows: Table) -> None:
    """Note that these rows stand where they should."""
    course = connection.courses[stream]
    last = rows[-1]
    course.psn = (int(last["psn"]) + int(last["span"])) % PSN_COUNT
    course.last += len(rows)
    connection.messages += len(rows)
    connection.mtu = max(connection.mtu, int(rows["mtu"].max()))
    if (rows["length"] > SPLIT_BYTES).any():
        connection.is_split = False
    if connection.lead is not None and connection.has_only_flags:
        flagged = np.flatnonzero(rows["flag"])
        if len(flagged):
            connection.step = course.last - (len(rows) - 1 - int(flagged[-1])) + connection.lead


def pieces(window: Window, first: int, stream: int, rows: Table) -> Table:
    """SCATTERED: what these rows hold of the reduced buffer."""
    place = first - window.first
    starts, nbytes = (part[place : place + len(rows)] for part in window.plan.reduced)
    used = nbytes > 0
    found = np.zeros(int(used.sum()), SCATTERED)
    found["start"], found["length"] = starts[used], nbytes[used]
    found["at"], found["frame"] = rows["at"][used], rows["last_frame"][used]
    found["collective"], found["stream"] = window.collective.number, stream
    return found
