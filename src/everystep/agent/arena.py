"""Staging memory that the trainer fills and the agent reads: a memfd, divided into slots.

A memfd needs no file system and so no room in /dev/shm; it lives as long as a process has it open
or mapped, so that it outlives whichever of the two dies first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path

from everystep.errors import StoreFailed

PAGE_BYTES = mmap.PAGESIZE

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): map pages for writing without changing them."""

_COLLAPSE = 25
"""MADV_COLLAPSE (Linux 6.1): bring a stretch into one large page, whatever is set for the host."""

_STRETCH_BYTES = 64 << 20

_LARGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the interpreter lock
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mmap.argtypes = [*_libc.madvise.argtypes, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10

_MEMORY = ctypes.c_char * (1 << 46)
"""All of it."""

_HINT = "free some memory, or use Full(blocking=True), which needs no staging memory"


def whole_pages(nbytes: int) -> int:
    """The number of bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _mapped(fd: int, nbytes: int) -> tuple[memoryview, int]:
    """The beginning of a file as memory, and its address: that of a large page, as these can be
    mapped nowhere else. It is unmapped when nobody has a view of it any more.

    Raises:
        OSError: the kernel has no room for it.
        ValueError: the file is shorter.
    """
    if not 0 < nbytes <= os.fstat(fd).st_size:
        raise ValueError("the file is shorter")
    aligned, whole = _large_page_bytes() or PAGE_BYTES, whole_pages(nbytes)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = _libc.mmap(None, whole + aligned, 0, kind, -1, 0)
    if reserved == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    start = -(-reserved // aligned) * aligned
    _libc.munmap(start + whole, reserved + aligned - start)
    if start > reserved:
        _libc.munmap(reserved, start - reserved)
    both = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(start, whole, both, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _FAILED:
        error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _libc.munmap(start, whole)
        raise error
    memory = _MEMORY.from_address(start)
    weakref.finalize(memory, _libc.munmap, start, whole).atexit = False
    return memoryview(memory)[:nbytes].cast("B"), start


def _large_page_bytes() -> int:
    """The size of the kernel's large pages; 0: it has none."""
    try:
        return int(_LARGE_PAGE.read_text())
    except (OSError, ValueError):
        return 0


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
            self._view, self.address = _mapped(fd, slots * slot_bytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise StoreFailed(
                f"staging memory cannot be mapped: {error}",
                expected=f"{slots} x {slot_bytes:,} bytes",
                hint=_HINT,
            ) from error

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
        byte; returns False where the kernel cannot.

        In large pages, where they are to be had: all who map them do so at once, and a direct write
        takes a fifth of the CPU time.
        """
        done = self._collapse(_large_page_bytes())
        for offset in range(done, len(self), _STRETCH_BYTES):
            length = min(_STRETCH_BYTES, len(self) - offset)
            if _libc.madvise(self.address + offset, length, _POPULATE_WRITE) != 0:
                return False
        return True

    def _collapse(self, large_bytes: int) -> int:
        """Bring the memory into large pages; returns up to where that could be done. Small pages
        that somebody is using meanwhile stay what they are."""
        if not large_bytes or self.address % large_bytes:
            return 0
        end = len(self) // large_bytes * large_bytes
        for offset in range(0, end, large_bytes):
            first = self.address + offset  # a large page is made where there is a small one
            if _libc.madvise(first, PAGE_BYTES, _POPULATE_WRITE) != 0:
                return offset
            if _libc.madvise(first, large_bytes, _COLLAPSE) != 0:
                if ctypes.get_errno() not in (errno.EAGAIN, errno.EBUSY):
                    return offset
                _libc.madvise(first, large_bytes, _POPULATE_WRITE)
        return end

    def close(self) -> None:
        """Unmap and close. Views that somebody still holds keep the memory until they are gone."""
        # unmapping many pages takes a while, and may come with the interpreter lock held
        _libc.madvise(self.address, len(self), mmap.MADV_DONTNEED)
        self._view.release()
        os.close(self.fd)
