"""Write a file so that it is visible whole or not at all: the only caller of fsync and rename.

The order is fixed: temporary file in the same directory, write, compare the length, fsync, rename
over the name, fsync the directory. What each crash in between leaves is in docs/guarantees.md.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from everystep.errors import StoreFailed
from everystep.types import Buffer

TEMPORARY_SUFFIX = ".tmp"
"""Files that end so were being written by a process that is gone."""

DIRECT_FROM_BYTES = 4 << 20
"""Files from this size on are written with O_DIRECT, where the file system has it: half the CPU
time of a buffered write, and no page cache taken from training."""

_BLOCK_BYTES = 4096
_BUFFER_BYTES = 8 << 20
_BUFFERS = 4
_WRITERS = 2


class SystemCalls:
    """The system calls that change a store, one method each: the seam at which tests place faults
    and record what a power cut could lose."""

    def create(self, path: Path, flags: int) -> int:
        """Open a new file for writing; fails if the name exists or is a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags, 0o666)

    def write_at(self, fd: int, data: Buffer, offset: int) -> int:
        """Write at an offset; returns how many bytes were taken."""
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Set the length of an open file."""
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """Make the bytes of an open file durable."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close an open file."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, replacing what has it."""
        os.rename(source, target)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_directory(self, path: Path) -> None:
        """Make one directory; its parent exists."""
        os.mkdir(path)

    def unlink(self, path: Path) -> None:
        """Remove the name of a file."""
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)


def make_directories(root: Path, path: Path, calls: SystemCalls) -> None:
    """Make `path` and what is missing above it, durably, below an existing `root`."""
    missing = []
    while path != root and not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank was first
            calls.make_directory(directory)
        calls.sync_directory(directory.parent)


def write_new(
    path: Path, nbytes: int, parts: Iterable[Buffer], tag: str, calls: SystemCalls
) -> Path:
    """Write and fsync a temporary file beside `path`; it has yet to be renamed.

    Args:
        path: the name that the file is to have.
        nbytes: how long it will be.
        parts: its bytes in order; each is read before the next is asked for.
        tag: tells this process's temporary files from others'.
        calls: the system calls to use.

    Raises:
        StoreFailed: `parts` gave another number of bytes than `nbytes`.
        OSError: the file system refused; the temporary file is gone again.
    """
    temporary = path.with_name(f".{path.name}.{tag}{TEMPORARY_SUFFIX}")
    fd, direct = _create(temporary, nbytes, calls)
    try:
        try:
            written = (_write_direct if direct else _write_buffered)(fd, parts, calls)
            if written != nbytes:
                raise StoreFailed(
                    "wrote another length than announced", path=path, expected=nbytes, found=written
                )
            calls.sync(fd)
        finally:
            calls.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            calls.unlink(temporary)
        raise
    return temporary


def _create(temporary: Path, nbytes: int, calls: SystemCalls) -> tuple[int, bool]:
    direct = getattr(os, "O_DIRECT", 0)
    if direct and nbytes >= DIRECT_FROM_BYTES:
        try:
            return calls.create(temporary, direct), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this file system has no direct writes
                raise
            with contextlib.suppress(FileNotFoundError):
                calls.unlink(temporary)
    return calls.create(temporary, 0), False


def _write_all(fd: int, data: memoryview, offset: int, calls: SystemCalls) -> None:
    while data:
        taken = calls.write_at(fd, data, offset)
        data, offset = data[taken:], offset + taken


def _write_buffered(fd: int, parts: Iterable[Buffer], calls: SystemCalls) -> int:
    offset = 0
    pending = bytearray()
    for part in parts:
        pending += part
        if len(pending) >= _BUFFER_BYTES:
            _write_all(fd, memoryview(bytes(pending)), offset, calls)
            offset += len(pending)
            pending.clear()
    _write_all(fd, memoryview(bytes(pending)), offset, calls)
    return offset + len(pending)


def _write_direct(fd: int, parts: Iterable[Buffer], calls: SystemCalls) -> int:
    """Fill aligned buffers with the parts while threads write the buffers before."""
    with _DirectWriters(fd, calls) as writers:
        length = 0
        buffer, filled = writers.free_buffer(), 0
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                take = min(len(view), _BUFFER_BYTES - filled)
                buffer[filled : filled + take] = view[:take]
                view, filled = view[take:], filled + take
                if filled == _BUFFER_BYTES:
                    writers.write(buffer, _BUFFER_BYTES, length)
                    length += filled
                    buffer, filled = writers.free_buffer(), 0
        padded = -(-filled // _BLOCK_BYTES) * _BLOCK_BYTES
        if padded:
            writers.write(buffer, padded, length)
    calls.truncate(fd, length + filled)
    return length + filled


class _DirectWriters:
    """A few threads that write aligned buffers to one file, and give them back."""

    def __init__(self, fd: int, calls: SystemCalls) -> None:
        self._fd, self._calls = fd, calls
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[memoryview, int, int] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._memory = mmap.mmap(-1, _BUFFERS * _BUFFER_BYTES)  # page-aligned
        self._view = memoryview(self._memory)
        for i in range(_BUFFERS):
            self._free.put(self._view[i * _BUFFER_BYTES : (i + 1) * _BUFFER_BYTES])
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(_WRITERS)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> _DirectWriters:
        return self

    def __exit__(self, *exc: object) -> None:
        for _ in self._threads:
            self._full.put(None)
        for thread in self._threads:
            thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait().release()
        self._view.release()
        with contextlib.suppress(BufferError):  # a failed fill still holds its buffer
            self._memory.close()
        if exc[0] is None and self._error is not None:
            raise self._error

    def free_buffer(self) -> memoryview:
        """An aligned buffer of _BUFFER_BYTES; waits for one. Raises a writer's error."""
        buffer = self._free.get()
        if self._error is not None:
            self._free.put(buffer)
            raise self._error
        return buffer

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        """Hand a filled buffer to the threads."""
        self._full.put((buffer, nbytes, offset))

    def _run(self) -> None:
        while (job := self._full.get()) is not None:
            buffer, nbytes, offset = job
            try:
                if self._error is None:
                    _write_all(self._fd, buffer[:nbytes], offset, self._calls)
            except OSError as error:
                self._error = error
            finally:
                self._free.put(buffer)


def is_temporary(name: str) -> bool:
    """Whether this is the name (or path) of a file that was being written."""
    return name.rsplit("/", 1)[-1].startswith(".") and name.endswith(TEMPORARY_SUFFIX)


def temporaries(root: Path) -> Iterator[Path]:
    """Temporary files that processes which are gone have left below `root`."""
    for directory, _, files in os.walk(root):
        for name in files:
            if is_temporary(name):
                yield Path(directory) / name
