"""Staging memory that the trainer fills and the agent reads: a memfd, divided into slots.

A memfd needs no file system and so no room in /dev/shm; it lives as long as a process has it open
or mapped, so that it outlives whichever of the two dies first.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from pathlib import Path

from everystep.errors import StoreFailed

PAGE_BYTES = mmap.PAGESIZE

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): map pages for writing without changing them."""

_STRETCH_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the interpreter lock
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_HINT = "free some memory, or use Full(blocking=True), which needs no staging memory"


def whole_pages(nbytes: int) -> int:
    """The number of bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def available_bytes(root: Path = Path("/")) -> int | None:
    """How much memory can still be had, of the host and of the control groups (version 2) that this
    process is in; None: it is not known.

    Args:
        root: of the file system with `proc` and `sys`.
    """
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError):
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mount = root / "sys/fs/cgroup"
        for group in (line[3:].strip("/") for line in groups if line.startswith("0::")):
            places = [mount / group, *(mount / group).parents]
            found += filter(None, map(_left_in_group, places[: places.index(mount) + 1]))
    return min(found, default=None)


def _left_in_group(group: Path) -> int | None:
    """What a control group may still take; the cache of files gives way."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(1, limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):  # "max", or there is no such group
        return None


class Arena:
    """A mapping of one memfd of `slots` times `slot_bytes`.

    Raises:
        StoreFailed: the memory is not to be had.
    """

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.fd, self.slots, self.slot_bytes = fd, slots, slot_bytes
        try:
            self._map = mmap.mmap(fd, slots * slot_bytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise StoreFailed(
                f"staging memory cannot be mapped: {error}",
                expected=f"{slots} x {slot_bytes:,} bytes",
                hint=_HINT,
            ) from error
        self._view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def lasts(self) -> bool:
        """Whether nobody can make the memory shorter, whoever has it."""
        try:
            return bool(fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # it is no memfd
            return False

    @staticmethod
    def made(slots: int, slot_bytes: int) -> Arena:
        """A new one, whose size nobody can change; its pages come when they are first touched.

        Raises:
            StoreFailed: the memory is not to be had.
        """
        nbytes, available = slots * slot_bytes, available_bytes()
        if available is not None and nbytes > available:  # the kernel would promise it all the same
            raise StoreFailed(
                "there is not enough memory for staging",
                expected=f"{slots} x {slot_bytes:,} bytes",
                found=f"{available:,}",
                hint=_HINT,
            )
        try:
            fd = os.memfd_create("everystep-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise StoreFailed(f"staging memory cannot be made: {error}", hint=_HINT) from error
        with contextlib.suppress(OSError, OverflowError):  # mapping it will say so
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return Arena(fd, slots, slot_bytes)

    @staticmethod
    def most(slots: int, slot_bytes: int) -> Arena:
        """A new one of so many slots, or of as many as there is memory for, but two at least.

        Raises:
            StoreFailed: the memory is not to be had.
        """
        for count in range(slots, 2, -1):
            with contextlib.suppress(StoreFailed):
                return Arena.made(count, slot_bytes)
        return Arena.made(2, slot_bytes)

    def __len__(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot, writable."""
        return self._view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A stretch of all slots' bytes."""
        return self._view[offset : offset + nbytes]

    def populate(self) -> bool:
        """Have all pages at hand: copying into fresh pages is several times slower. Changes no
        byte; returns False where the kernel cannot."""
        for offset in range(0, len(self), _STRETCH_BYTES):
            length = min(_STRETCH_BYTES, len(self) - offset)
            if _libc.madvise(self.address + offset, length, _POPULATE_WRITE) != 0:
                return False
        return True

    def close(self) -> None:
        """Unmap and close. Views that somebody still holds keep the memory until they are gone."""
        self._view.release()
        # `munmap` takes a while for many pages, and Python calls it with the interpreter lock held
        _libc.madvise(self.address, len(self), mmap.MADV_DONTNEED)
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)
