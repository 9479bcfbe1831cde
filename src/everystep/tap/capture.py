"""Frames out of pcap and pcapng files.

pcap: the classic file, of both byte orders, with microseconds or nanoseconds. pcapng: sections of
both byte orders, several interfaces with their own clocks (if_tsresol, if_tsoffset), enhanced,
simple and obsolete packet blocks; all other blocks are skipped. Source of both layouts: the IETF
drafts draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng.

A file that ends inside a block ends there, and `File.is_cut` says so; one that contradicts itself
elsewhere raises. Frames that are not Ethernet keep their number and have no bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from everystep.errors import NotACapture, Unsupported
from everystep.tap.pieces import FRAME, Bytes, Frames, Table

try:
    from everystep.tap import _packets
except ImportError:  # no compiler where this was installed
    _packets = None  # type: ignore[assignment]

BATCH_FRAMES = 4096
BATCH_BYTES = 8 << 20
"""About so many captured: what is read again later still lies in the cache then."""

_FULL, _END, _CUT, _ASK, _BAD = range(5)  # why an index stopped: _packets.c

_PCAP = {
    b"\xd4\xc3\xb2\xa1": (False, 1000),
    b"\xa1\xb2\xc3\xd4": (True, 1000),
    b"\x4d\x3c\xb2\xa1": (False, 1),
    b"\xa1\xb2\x3c\x4d": (True, 1),
}
"""First bytes: (big-endian, nanoseconds of a tick)."""

_SECTION = b"\x0a\x0d\x0d\x0a"
_BYTE_ORDER = 0x1A2B3C4D
_ETHERNET = 1
_MAX_INTERFACES = 256  # of one section: each is kept

_TIME_RESOLUTION, _TIME_OFFSET = 9, 14  # options of an interface

_INTERFACE = np.dtype(
    [("ticks_per_s", "<u8"), ("offset_s", "<i8"), ("snap", "<u4"), ("ethernet", "<u4")]
)


def need_extension(module: object) -> None:
    """Refuse to go on where the compiled loops are not there.

    Raises:
        Unsupported: they could not be compiled when this was installed.
    """
    if module is None:
        raise Unsupported(
            "the tap's compiled loops are not installed",
            hint="install a C compiler (gcc) and Python's headers, then install everystep again",
        )


class File:
    """The frames of one capture file, in batches; a context manager."""

    def __init__(self, data: Bytes, path: str | None = None) -> None:
        """Read the header.

        Args:
            data: the bytes of the file.
            path: named in errors.

        Raises:
            NotACapture: neither pcap nor pcapng.
            Unsupported: the compiled loops are not installed.
        """
        need_extension(_packets)
        self.path = path
        self.is_cut = False
        """Whether the file ended inside a block. Known at the end."""
        self._data = data
        self._at = self._before = 0
        self._frames = 0
        self._big = False
        self._interfaces = np.empty(0, _INTERFACE)
        self._ns_per_tick = 0
        self._is_ethernet = False
        magic = self._data[:4].tobytes()
        self.is_pcapng = magic == _SECTION
        if not self.is_pcapng:
            self._begin_pcap(magic)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the file. Batches handed out stay valid."""
        self._data = np.empty(0, np.uint8)
        self._at = 0

    def go_on(self, data: Bytes) -> None:
        """Read on in other bytes, once all frames of those before have been had.

        Args:
            data: begins with `rest`.
        """
        self._before += self._at
        self._data, self._at = data, 0

    @property
    def rest(self) -> Bytes:
        """What comes after the last whole block."""
        return self._data[self._at :]

    def __iter__(self) -> Iterator[Frames]:
        """Every frame, once.

        Raises:
            NotACapture: the file contradicts itself; frames before that have been given.
        """
        why = _FULL
        rows = np.empty(BATCH_FRAMES, FRAME)
        while why in (_FULL, _ASK) and len(self._data):
            if why == _ASK and self.is_pcapng and not self._describe():
                why = _CUT
                break
            self._at, count, why = self._index(rows)
            for part in _parts(rows[:count]):
                yield Frames(self._data, part, self._frames + 1)
                self._frames += len(part)
            rows = np.empty(BATCH_FRAMES, FRAME)
        if why == _BAD:
            raise self._damaged("a block contradicts itself")
        self.is_cut = why == _CUT

    def _index(self, rows: Table) -> tuple[int, int, int]:
        if not self.is_pcapng:
            return _packets.pcap(
                self._data, self._at, rows, self._big, self._ns_per_tick, self._is_ethernet
            )
        return _packets.pcapng(self._data, self._at, rows, self._big, self._interfaces)

    def _damaged(self, message: str) -> NotACapture:
        return NotACapture(
            message,
            path=self.path,
            at=self._before + self._at,
            hint="the frames before it can be used",
        )

    def _begin_pcap(self, magic: bytes) -> None:
        if magic not in _PCAP or len(self._data) < 24:
            raise NotACapture(
                "neither pcap nor pcapng",
                path=self.path,
                hint="convert it with: editcap -F pcapng FILE OUT",
            )
        self._big, self._ns_per_tick = _PCAP[magic]
        link = int.from_bytes(self._data[20:24].tobytes(), "big" if self._big else "little")
        self._is_ethernet = link & 0xFFFF == _ETHERNET
        self._at = 24

    # ---------------------------------------------------------------- pcapng

    def _describe(self) -> bool:
        """Read the section or interface that the index stopped at. False: the file ends in it."""
        left = self._data[self._at :]
        if len(left) < 12:
            return False
        head = left[:12].tobytes()
        is_section = head[:4] == _SECTION
        if is_section:
            self._begin_section(head)
        order = ">" if self._big else "<"
        (length,) = struct.unpack(order + "I", head[4:8])
        if length % 4 or length < (28 if is_section else 20):
            raise self._damaged("a block of an impossible length")
        if len(left) < length:
            return False
        block = left[:length].tobytes()
        if struct.unpack(order + "I", block[-4:])[0] != length:
            raise self._damaged("a block with two different lengths")
        if not is_section:
            self._add_interface(block, order)
        self._at += length
        return True

    def _begin_section(self, head: bytes) -> None:
        for big in (False, True):
            if int.from_bytes(head[8:12], "big" if big else "little") == _BYTE_ORDER:
                self._big = big
                self._interfaces = np.empty(0, _INTERFACE)
                return
        raise self._damaged("a section without byte order")

    def _add_interface(self, block: bytes, order: str) -> None:
        if len(self._interfaces) == _MAX_INTERFACES:
            raise self._damaged(f"more than {_MAX_INTERFACES:,} interfaces")
        link, _, snap = struct.unpack(order + "HHI", block[8:16])
        ticks_per_s, offset_s = 1_000_000, 0
        at, end = 16, len(block) - 4
        while at + 4 <= end:
            code, length = struct.unpack(order + "HH", block[at : at + 4])
            value = block[at + 4 : at + 4 + length]
            at += 4 + (length + 3) // 4 * 4
            if code == 0 or at > end:
                break
            if code == _TIME_RESOLUTION and length == 1:
                ticks_per_s = _ticks(value[0])
            elif code == _TIME_OFFSET and length == 8:
                offset_s = struct.unpack(order + "q", value)[0]
        row = (ticks_per_s, offset_s, snap, int(link == _ETHERNET))
        self._interfaces = np.append(self._interfaces, np.array(row, _INTERFACE))


def _parts(rows: Table) -> list[Table]:
    """The rows in parts alike, of not too many bytes each."""
    parts = max(1, -(-int(rows["captured"].sum(dtype=np.uint64)) // BATCH_BYTES))
    return [part for part in np.array_split(rows, parts) if len(part)]


def _ticks(resolution: int) -> int:
    """Of a second, by if_tsresol; 0 where they do not fit 64 bits."""
    ticks = int(2 ** (resolution & 127) if resolution & 128 else 10**resolution)
    return ticks if ticks < 1 << 64 else 0


def not_read(path: str, error: Exception) -> NotACapture:
    """What to raise where a file cannot be read."""
    return NotACapture(f"cannot be read: {error}", path=path)


def _mapped(path: str) -> Bytes:
    """The file's bytes, read-only.

    Raises:
        NotACapture: it cannot be read, or is empty.
    """
    try:
        with Path(path).open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise NotACapture("the file is empty", path=path)
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise not_read(path, error) from error
    mapping.madvise(mmap.MADV_SEQUENTIAL)
    return np.frombuffer(mapping, np.uint8)


def open(path: str | os.PathLike[str]) -> File:
    """The frames of a pcap or pcapng file, which is mapped until the last batch is forgotten.

    Raises:
        NotACapture: the file cannot be read, or is neither.
        Unsupported: the compiled loops are not installed.
    """
    need_extension(_packets)
    name = os.fspath(path)
    return File(_mapped(name), name)
