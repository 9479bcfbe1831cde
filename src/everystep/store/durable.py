"""Write a file so that it is visible whole or not at all: the only caller of fsync and rename.

The order is fixed: temporary file (a new one in the same directory, or one to be written over),
write, compare the length, fsync, rename over the name, fsync the directory. What each crash in
between leaves is in docs/guarantees.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import signal
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from everystep.errors import StoreFailed
from everystep.types import Buffer

TEMPORARY_SUFFIX = ".tmp"
"""Files that end so were being written by a process that is gone."""

DIRECT_FROM_BYTES = 4 << 20
"""Files from this size on are written with O_DIRECT, where the file system has it: half the CPU
time of a buffered write, and no page cache taken from training."""

_DIRECT = getattr(os, "O_DIRECT", 0)
_BLOCK_BYTES = 4096
_BUFFER_BYTES = 16 << 20
_BUFFERS = 3
"""How many pieces of a file there are at a time: one being made, the others handed over."""


class SystemCalls:
    """The system calls that change a store, one method each: the seam at which tests place faults
    and record what a power cut could lose."""

    def create(self, path: Path, flags: int) -> int:
        """Open a new file for writing; fails if the name exists or is a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags, 0o666)

    def reopen(self, path: Path) -> int:
        """Open a file for overwriting it directly; fails if it is anything but a regular file with
        one name that nobody has open or mapped."""
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | _DIRECT)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise OSError(errno.EBUSY, "has another name, or is no file")
            # a lease is refused while others have the file open; SIGIO, for those who open it while
            # we hold the lease, would end the process, and SIGURG is ignored
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write_at(self, fd: int, data: Buffer, offset: int) -> int:
        """Write at an offset; returns how many bytes were taken."""
        return os.pwrite(fd, data, offset)

    def write_parts_at(self, fd: int, parts: Sequence[Buffer], offset: int) -> int:
        """Write at most 1,024 parts at an offset; returns how many bytes were taken."""
        return os.pwritev(fd, parts, offset)

    def write_through_cache(self, fd: int) -> None:
        """End direct writes to an open file."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_DIRECT)

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
    path: Path,
    nbytes: int,
    parts: Iterable[Buffer],
    tag: str,
    calls: SystemCalls,
    *,
    lasting: bool = False,
    spare: Path | None = None,
) -> Path:
    """Write and fsync a temporary file, which has yet to be renamed.

    Args:
        path: the name that the file is to have; the temporary file lies beside it.
        nbytes: how long it will be.
        parts: its bytes in order; each is read before the next is asked for.
        tag: tells this process's temporary files from others'.
        calls: the system calls to use.
        lasting: the parts stay as they are until this returns, so that what is aligned of them, in
            (writable) memory and in the file, can be written from where it lies.
        spare: a temporary file to overwrite, which then is the one that is returned, wherever it
            lies. Where it cannot be had, a new one is made. It is used up in either case.

    Raises:
        StoreFailed: `parts` gave another number of bytes than `nbytes`.
        OSError: the file system refused; the temporary file is gone again.
    """
    temporary, fd, direct = _open(path, nbytes, tag, spare, calls)
    try:
        try:
            if direct:
                written = _write_direct(fd, parts, lasting, calls)
            else:
                written = _write_buffered(fd, parts, calls)
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


def _open(
    path: Path, nbytes: int, tag: str, spare: Path | None, calls: SystemCalls
) -> tuple[Path, int, bool]:
    """A temporary file, its descriptor, and whether writes to it are direct."""
    if spare is not None:
        try:
            return spare, calls.reopen(spare), True
        except BaseException as error:
            with contextlib.suppress(OSError):
                calls.unlink(spare)
            if not isinstance(error, OSError):
                raise
    temporary = path.with_name(f".{path.name}.{tag}{TEMPORARY_SUFFIX}")
    if _DIRECT and nbytes >= DIRECT_FROM_BYTES:
        try:
            return temporary, calls.create(temporary, _DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: this file system has no direct writes
                raise
            with contextlib.suppress(FileNotFoundError):
                calls.unlink(temporary)
    return temporary, calls.create(temporary, 0), False


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


def _write_direct(fd: int, parts: Iterable[Buffer], lasting: bool, calls: SystemCalls) -> int:
    with ThreadPoolExecutor(1, thread_name_prefix="everystep-write") as thread:
        writer = _DirectWriter(fd, lasting, thread, calls)
        for part in parts:
            writer.add(part)
        length = writer.finish()
    calls.truncate(fd, length)
    return length


class _DirectWriter:
    """Cuts parts into aligned pieces, which a thread writes while the next one is being made. One
    thread, since writes that extend a file take turns in the file system anyway.

    A piece is a stretch of a lasting part that is aligned in memory as in the file, or else one of
    `_BUFFERS` buffers, into which bytes are gathered. A buffer is free when its turn comes again:
    all but the last `_BUFFERS` - 1 pieces have been written by then.
    """

    def __init__(
        self, fd: int, lasting: bool, thread: ThreadPoolExecutor, calls: SystemCalls
    ) -> None:
        self._fd, self._lasting, self._thread, self._calls = fd, lasting, thread, calls
        self._under_way: deque[Future[None]] = deque()
        self._buffers: list[mmap.mmap] = []  # each made at its first turn
        self._turn = 0
        self._filled = 0  # bytes in the buffer whose turn it is
        self._offset = 0  # of the next piece in the file

    def add(self, part: Buffer) -> None:
        """Write a part, or keep its end for later. Raises what has stopped the thread."""
        view = memoryview(part).cast("B")
        while view:
            ahead = self._bytes_to_a_block(view)
            nbytes = min(len(view), _BUFFER_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
            if ahead == 0 and nbytes:
                self._flush()
                self._submit(view[:nbytes], nbytes)
            else:
                nbytes = min(len(view), ahead or _BUFFER_BYTES - self._filled)
                self._gather(view[:nbytes])
            view = view[nbytes:]

    def finish(self) -> int:
        """Write what is left, padded, and wait; returns the length of all parts."""
        length = self._offset + self._filled
        self._flush()
        while self._under_way:
            self._wait()
        return length

    def _bytes_to_a_block(self, view: memoryview) -> int | None:
        """After how many bytes of a view a block begins in memory and in the file; None: never, or
        it is not known, or the view does not last."""
        if not self._lasting or view.readonly:
            return None
        in_memory = -ctypes.addressof(ctypes.c_char.from_buffer(view)) % _BLOCK_BYTES
        return in_memory if in_memory == -self._filled % _BLOCK_BYTES else None

    def _gather(self, view: memoryview) -> None:
        if self._turn == len(self._buffers):
            buffer = mmap.mmap(-1, _BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if not self._lasting:  # larger requests to the disk; too much memory for a last block
                with contextlib.suppress(OSError):
                    buffer.madvise(mmap.MADV_HUGEPAGE)
            self._buffers.append(buffer)
        self._buffers[self._turn][self._filled : self._filled + len(view)] = view
        self._filled += len(view)
        if self._filled == _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._filled:
            padded = -(-self._filled // _BLOCK_BYTES) * _BLOCK_BYTES
            buffer = memoryview(self._buffers[self._turn])
            self._submit(buffer[:padded], self._filled)
            self._turn, self._filled = (self._turn + 1) % _BUFFERS, 0

    def _submit(self, piece: memoryview, nbytes: int) -> None:
        if len(self._under_way) == _BUFFERS - 1:
            self._wait()
        try:
            write = self._thread.submit(
                _write_direct_all, self._fd, piece, self._offset, self._calls
            )
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, "no thread can be started") from error
        self._under_way.append(write)
        self._offset += nbytes

    def _wait(self) -> None:
        try:
            self._under_way.popleft().result()
        except OSError:
            raise
        except Exception as error:
            raise OSError(errno.EIO, "the writing thread has failed") from error


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
