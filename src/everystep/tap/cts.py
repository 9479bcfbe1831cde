"""The clear-to-send records that an NCCL receiver writes into its sender's memory.

Before each message the receiver tells where it may be written, how much, and the message's number
on its connection. Up to NCCL 2.19 a record has 32 bytes, since 2.20 it has 64, in three layouts.
Several requests (nreqs) follow each other in one write.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache

import numpy as np
from msgspec import Struct

from everystep.tap.pieces import WRITE, Bytes, Table

MAX_REQUESTS = 8
MAX_WRITE_BYTES = 64 * MAX_REQUESTS

_MAX_INDEX = 1 << 48
_MAX_RANK = 1 << 20
_MAX_ROOM = 1 << 31


class Layout(Struct, frozen=True):
    """How a record is laid out."""

    nccl: str
    """The versions that write it."""
    fields: str
    """As `struct` has it: address, room, keys, requests, tag, index."""

    @property
    def nbytes(self) -> int:
        return struct.calcsize(self.fields)


LAYOUTS = (
    Layout("up to 2.19", "<QiIIIQ"),
    Layout("2.20 to 2.23", "<Qi2III4xQ24x"),
    Layout("2.24 to 2.29", "<QQ4IIIQ16x"),
    Layout("2.30", "<QQ8IIIQ"),
)


class ClearToSend(Struct, frozen=True):
    """One request: message `idx` of a connection may be written."""

    addr: int
    """Where the data shall be written."""
    size: int
    """Bytes of room there: tells the protocol."""
    rkey: int
    nreqs: int
    tag: int
    """Rank of the data's sender."""
    idx: int
    """Number of the message on its connection, from 1."""


_FIELDS = ClearToSend.__struct_fields__


def parse(
    payload: bytes, layout: Layout | None = None
) -> tuple[Layout, tuple[ClearToSend, ...]] | None:
    """The records in the payload of one write, or None where it holds none.

    `layout` is the one that earlier records had; without it the first that makes sense is taken.
    """
    for candidate in LAYOUTS if layout is None else (layout,):
        found = _parse(payload, candidate)
        if found:
            return candidate, found
    return None


def parse_all(rows: Table, data: Bytes, layout: Layout) -> Table | None:
    """The records that messages (rows of MESSAGE) are, with `ClearToSend`'s fields as columns, or
    None where one of them is not a whole write of one record."""
    is_plain = (rows["operation"] == WRITE) & (rows["length"] == layout.nbytes)
    is_plain &= (rows["complete"] == 1) & (rows["has_immediate"] == 0)
    if not is_plain.all():
        return None
    places = rows["at"].astype(np.int64)[:, None] + np.arange(layout.nbytes)
    found: Table = np.ascontiguousarray(data[places]).view(_dtype(layout))[:, 0]
    is_right = (
        (found["nreqs"] == 1)
        & (found["idx"] >= 1) & (found["idx"] <= _MAX_INDEX)
        & (found["tag"] <= _MAX_RANK)
        & (found["size"] > 0) & (found["size"] <= _MAX_ROOM)
        & (found["addr"] != 0)
    )  # fmt: skip
    return found if is_right.all() else None


@lru_cache(maxsize=len(LAYOUTS))
def _dtype(layout: Layout) -> np.dtype[np.void]:
    at = 0
    fields = []
    for count, code in re.findall(r"(\d*)([QiIx])", layout.fields):
        size = struct.calcsize("<" + code)
        for _ in range(int(count or 1)):
            if code != "x":
                fields.append(("<" + {"Q": "u8", "i": "i4", "I": "u4"}[code], at))
            at += size
    told = [*fields[:3], *fields[-3:]]
    return np.dtype(
        {
            "names": list(_FIELDS),
            "formats": [kind for kind, _ in told],
            "offsets": [offset for _, offset in told],
            "itemsize": at,
        }
    )


def _parse(payload: bytes, layout: Layout) -> tuple[ClearToSend, ...]:
    number, rest = divmod(len(payload), layout.nbytes)
    if rest or not 1 <= number <= MAX_REQUESTS:
        return ()
    found = []
    for addr, size, rkey, *_, requests, tag, index in struct.iter_unpack(layout.fields, payload):
        if requests != number or not 1 <= index <= _MAX_INDEX:
            return ()
        if tag > _MAX_RANK or not 0 < size <= _MAX_ROOM or addr == 0:
            return ()
        found.append(ClearToSend(addr, size, rkey, requests, tag, index))
    return tuple(found)
