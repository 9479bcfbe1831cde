"""Write at the end of a file, durably: one write and one fsync.

The bytes go through the page cache, and no space is set aside beforehand: O_DIRECT would need every
append to end at a multiple of the block size and its parts gathered in aligned memory, which costs
what it saves; and a file that has been allocated ahead needs its metadata written all the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from everystep.errors import StoreFailed
from everystep.store.durable import SystemCalls
from everystep.types import Buffer

_MOST_PARTS = 1024
"""In one system call (IOV_MAX of Linux)."""


def append(path: Path, parts: Sequence[Buffer], at: int, calls: SystemCalls) -> None:
    """Append to a file of `at` bytes; with 0, make it. Its directory exists.

    Raises:
        StoreFailed: it does not have `at` bytes, or is no regular file.
        OSError: the file system refused; what is behind the first `at` bytes is removed if that can
            be, with 0 the file.
    """
    fd = _created(path, calls) if at == 0 else _opened(path, at)
    try:
        try:
            _write_all(fd, parts, at, calls)
            calls.sync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                calls.truncate(fd, at)
            raise
        finally:
            calls.close(fd)
        if at == 0:
            calls.sync_directory(path.parent)
    except BaseException:
        if at == 0:
            with contextlib.suppress(OSError):
                calls.unlink(path)
        raise


def _created(path: Path, calls: SystemCalls) -> int:
    try:
        return calls.create(path, 0)
    except FileExistsError as error:
        raise StoreFailed("is there already", path=path) from error


def _opened(path: Path, at: int) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != at:
        os.close(fd)
        raise StoreFailed("length", path=path, expected=at, found=found.st_size)
    return fd


def _write_all(fd: int, parts: Sequence[Buffer], offset: int, calls: SystemCalls) -> None:
    left = [view for view in (memoryview(part).cast("B") for part in parts) if view]
    left.reverse()  # the next part is the last
    while left:
        some = left[: -_MOST_PARTS - 1 : -1]
        taken = calls.write_parts_at(fd, some, offset)
        if taken == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset += taken
        while left and taken >= len(left[-1]):
            taken -= len(left.pop())
        if taken:
            left[-1] = left[-1][taken:]
