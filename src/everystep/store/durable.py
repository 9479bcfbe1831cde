"""Write a file so that it is visible whole or not at all: the only caller of fsync and rename.

The order is fixed: temporary file in the same directory, write, compare the length, fsync, rename
over the name, fsync the directory. What each crash in between leaves is in docs/guarantees.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import shutil
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
_BUFFER_BYTES = 16 << 20
_BUFFERS = 3


class SystemCalls:
    """The system calls that change a store, one method each: the seam at which tests place faults
    and record what a power cut could lose."""

    def create(self, path: Path, flags: int) -> int:
        """Open a new file for writing; fails if the name exists or is a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags, 0o666)

    def write_at(self, fd: int, data: Buffer, offset: int) -> int:
        """Write at an offset; returns how many bytes were taken."""
        return os.pwrite(fd, data, offset)

    def write_through_cache(self, fd: int) -> None:
        """End direct writes to an open file."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))

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


_ANCHORED = 100


def make_directories(root: Path, path: Path, anchored: set[Path], calls: SystemCalls) -> None:
    """Make `path` and what is missing above it, durably, below an existing `root`.

    A directory that is there may have been made by a process that died before its name was
    durable, so the name is made durable all the same, once.

    Args:
        anchored: directories whose names this process has made durable; kept up to date, and
            short. Whoever removes a directory takes it out.
    """
    above = [path, *path.parents]
    for directory in reversed(above[: above.index(root)]):
        if directory in anchored and directory.is_dir():
            continue
        with contextlib.suppress(FileExistsError):
            calls.make_directory(directory)
        calls.sync_directory(directory.parent)
        if len(anchored) >= _ANCHORED:
            anchored.clear()
        anchored.add(directory)


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
        if taken == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, offset = data[taken:], offset + taken


def _write_direct_all(fd: int, data: memoryview, offset: int, calls: SystemCalls) -> None:
    """Write through the page cache what the file system refuses to take directly: some say so
    only now, and after a short write (a disk that is nearly full) the rest is not aligned."""
    try:
        _write_all(fd, data, offset, calls)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        calls.write_through_cache(fd)
        _write_all(fd, data, offset, calls)


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
    """Fill aligned buffers with the parts while a thread writes the buffers before."""
    with _DirectWriter(fd, calls) as writer:
        length = 0
        buffer, filled = writer.free_buffer(), 0
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                take = min(len(view), _BUFFER_BYTES - filled)
                buffer[filled : filled + take] = view[:take]
                view, filled = view[take:], filled + take
                if filled == _BUFFER_BYTES:
                    writer.write(buffer, _BUFFER_BYTES, length)
                    length += filled
                    buffer, filled = writer.free_buffer(), 0
        padded = -(-filled // _BLOCK_BYTES) * _BLOCK_BYTES
        if padded:
            writer.write(buffer, padded, length)
    calls.truncate(fd, length + filled)
    return length + filled


class _DirectWriter:
    """A thread that writes aligned buffers to one file, and gives them back. One, since writes that
    extend a file take turns in the file system anyway."""

    def __init__(self, fd: int, calls: SystemCalls) -> None:
        self._fd, self._calls = fd, calls
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[memoryview, int, int] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, _BUFFERS * _BUFFER_BYTES, flags=kind)  # page-aligned
        with contextlib.suppress(OSError):  # fewer, larger requests to the disk, where it works
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._memory)
        for i in range(_BUFFERS):
            self._free.put(self._view[i * _BUFFER_BYTES : (i + 1) * _BUFFER_BYTES])
        self._thread = threading.Thread(target=self._run, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, "no thread can be started") from error

    def __enter__(self) -> _DirectWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._full.put(None)
        self._thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait().release()
        self._view.release()
        with contextlib.suppress(BufferError):  # a failed fill still holds its buffer
            self._memory.close()
        if exc[0] is None and self._error is not None:
            raise self._error

    def free_buffer(self) -> memoryview:
        """An aligned buffer of _BUFFER_BYTES; waits for one. Raises the writer's error."""
        buffer = self._free.get()
        if self._error is not None:
            self._free.put(buffer)
            raise self._error
        return buffer

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        """Hand a filled buffer to the thread."""
        self._full.put((buffer, nbytes, offset))

    def _run(self) -> None:
        while (job := self._full.get()) is not None:
            buffer, nbytes, offset = job
            failure: OSError | None = OSError(errno.EIO, "the writing thread has failed")
            try:
                if self._error is None:
                    _write_direct_all(self._fd, buffer[:nbytes], offset, self._calls)
                failure = None
            except OSError as error:
                failure = error
            finally:  # after whatever else was raised, too: bytes that are missing are an error
                self._error = self._error or failure
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


def publish(temporary: Path, path: Path, calls: SystemCalls) -> None:
    """Give a finished file or folder beside `path` that name, durably, with all that is in it.

    A file replaces a file at once. Where a folder is replaced, or replaces something, what has the
    name is first moved aside beside it (`.tmp`), and removed at the end: a crash in between leaves
    both, and neither is half.

    Raises:
        OSError: the file system refused; what had the name has it still.
    """
    for directory, _, files in os.walk(temporary, topdown=False):
        for name in files:
            _sync_file(Path(directory, name), calls)
        calls.sync_directory(Path(directory))
    if not temporary.is_dir():
        _sync_file(temporary, calls)
    aside = temporary.with_name(temporary.name.removesuffix(TEMPORARY_SUFFIX) + "-old.tmp")
    in_the_way = os.path.lexists(path) and (temporary.is_dir() or path.is_dir())
    if in_the_way:
        calls.rename(path, aside)
    try:
        calls.rename(temporary, path)
    except OSError:
        if in_the_way:
            calls.rename(aside, path)
        raise
    calls.sync_directory(path.parent)
    if in_the_way and aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside)
    elif in_the_way:
        calls.unlink(aside)


def _sync_file(path: Path, calls: SystemCalls) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        calls.sync(fd)
    finally:
        os.close(fd)
