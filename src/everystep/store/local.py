"""A directory as a backend."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import shutil
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from everystep.errors import Damaged, Missing, RunBusy, StoreFailed, StoreFull
from everystep.store import durable
from everystep.store.backend import Abilities, Entry, NewFile

LOCK_PATIENCE_S = 5.0
"""How long to wait for a slot: a killed process may still be on its way out."""

_MOST_SPARES = 4
_MOST_SLACK = 1.25
"""A spare is overwritten by a file that needs all of it but a fifth."""

_PART = re.compile(r"[A-Za-z0-9_%@=+-][A-Za-z0-9_%@=+.-]{0,240}")
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_HINTS = {
    errno.EROFS: "mount the file system for writing, or choose another directory",
    errno.EACCES: "give this user the right to write there, or choose another directory",
    errno.EPERM: "give this user the right to write there, or choose another directory",
    errno.EIO: "look at the disk: the system log says more",
    errno.ENOTDIR: "choose another directory: something on this path is a file",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what the operating system says into our words, once, here."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        text = os.strerror(number).lower() if number else str(error)
        if number in _NO_SPACE:
            raise StoreFull(
                text, path=path, hint="free some space; the next step tries again"
            ) from error
        if number == errno.ENOENT:
            raise Missing("is not there", path=path) from error
        raise StoreFailed(text, path=path, hint=_HINTS.get(number)) from error


class LocalBackend:
    """Files below one directory, which must exist. See `Backend` for the laws."""

    def __init__(self, root: Path, calls: durable.SystemCalls | None = None) -> None:
        self._root = Path(os.path.abspath(root))
        self._calls = calls or durable.SystemCalls()
        self._anchored: set[Path] = set()
        self._tag = f"{os.getpid():x}-{secrets.token_hex(4)}"
        self._spares = _Spares(self._root, self._tag, self._calls)

    @classmethod
    def made(cls, root: Path) -> LocalBackend:
        """The backend of a directory, which is made, durably, where it is not there yet.

        Raises:
            StoreFailed: it cannot be made, or is a file.
        """
        backend = cls(root)
        there = backend._root
        while not there.is_dir() and there != there.parent:
            there = there.parent
        with translated(root):
            durable.make_directories(there, backend._root, set(), backend._calls)
            if not backend._root.is_dir():
                raise FileExistsError(errno.EEXIST, "is not a directory", str(root))
            with contextlib.suppress(PermissionError):  # who may not read it has not made it either
                backend._calls.sync_directory(backend._root.parent)
        return backend

    @property
    def abilities(self) -> Abilities:
        """A directory has locks where its file system has them."""
        return Abilities(location=str(self._root), locks=True)

    def _path(self, name: str) -> Path:
        """Where a name lies; refuses names and links that lead out of the directory."""
        parts = name.split("/")
        path = self._root
        for part in parts:
            if not _PART.fullmatch(part):
                raise StoreFailed("is not a name that a store uses", path=name)
            if path is not self._root and path.is_symlink():
                raise StoreFailed("is a link, and a store has none", path=path)
            path = path / part
        return path

    def put(self, files: Sequence[NewFile]) -> None:
        """See `Backend.put`. All files are written and fsynced, then renamed in their order.

        A large file overwrites a spare of about its size. Where none fits, and the space for a new
        one is not there, the spares go first; they go too when there is no space after all.
        """
        ready: list[tuple[Path, Path]] = []
        self._spares.most_bytes = max(self._spares.most_bytes, sum(f.nbytes for f in files))
        try:
            for file in files:
                path = self._path(file.name)
                with translated(path):
                    durable.make_directories(self._root, path.parent, self._anchored, self._calls)
                    temporary = durable.write_new(
                        path, file.nbytes, file.parts, self._tag, self._calls,
                        lasting=file.lasting, spare=self._spares.take(file.nbytes),
                    )  # fmt: skip
                ready.append((temporary, path))
            while ready:
                temporary, path = ready[0]
                with translated(path):
                    self._calls.rename(temporary, path)
                ready.pop(0)
            for directory in sorted({self._path(file.name).parent for file in files}):
                with translated(directory):
                    self._calls.sync_directory(directory)
        except Missing as error:
            raise StoreFailed(
                "the directory has vanished", path=error.path, hint="is the store still mounted?"
            ) from error
        except StoreFull:
            self.release_spares()
            raise
        finally:
            for temporary, _ in ready:
                with contextlib.suppress(OSError):
                    self._calls.unlink(temporary)

    def read(self, name: str, into: memoryview, offset: int) -> None:
        """See `Backend.read`."""
        path = self._path(name)
        with translated(path):
            _require_regular(os.lstat(path), path)  # opening a device can do things by itself
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = os.fstat(fd)
                _require_regular(found, path)
                while into:
                    taken = os.preadv(fd, [into[: 16 << 20]], offset)
                    if taken == 0:
                        raise Damaged("the file ends too early", path=path, at=offset)
                    into, offset = into[taken:], offset + taken
            finally:
                os.close(fd)
            large = found.st_size >= durable.DIRECT_FROM_BYTES  # others are never written over
            if large and _state(os.lstat(path)) != _state(found):
                raise Missing("was removed or replaced while it was read", path=path)

    def size(self, name: str) -> int:
        """See `Backend.size`."""
        path = self._path(name)
        with translated(path):
            found = os.lstat(path)
        _require_regular(found, path)
        return found.st_size

    def list(self, prefix: str) -> Iterator[Entry]:
        """See `Backend.list`."""
        top = self._path(prefix) if prefix else self._root
        if prefix and top.is_symlink():
            return
        pending = [(top, prefix + "/" if prefix else "")]
        while pending:
            directory, before = pending.pop()
            try:
                with translated(directory), os.scandir(directory) as found:
                    entries = list(_sizes(found))
            except Missing:
                continue  # nothing there, or removed while we looked
            for entry, nbytes in entries:
                if nbytes is None:
                    pending.append((Path(entry.path), f"{before}{_shown(entry.name)}/"))
                else:
                    yield Entry(before + _shown(entry.name), nbytes)

    def delete(self, name: str, *, reuse: bool = False) -> None:
        """See `Backend.delete`. Directories that become empty go too."""
        path = self._path(name)
        with contextlib.suppress(Missing), translated(path):
            if not (reuse and self._spares.keep(path)):
                self._calls.unlink(path)
                self._calls.sync_directory(path.parent)
            self._remove_empty(path.parent)

    def release_spares(self) -> None:
        """Remove what was kept for reuse; for the owner's end. What cannot be removed is a
        temporary file, which the next owner's `sweep` removes."""
        self._spares.release()

    def _remove_empty(self, directory: Path) -> None:
        while directory != self._root:
            self._anchored.discard(directory)
            try:
                self._calls.remove_directory(directory)
            except OSError:  # not empty, or in use: the files are gone, which is what counts
                return
            directory = directory.parent

    def move(self, name: str, to: str) -> None:
        """See `Backend.move`."""
        source, target = self._path(name), self._path(to)
        with translated(source):
            durable.make_directories(self._root, target.parent, self._anchored, self._calls)
            self._calls.rename(source, target)
            for directory in (target.parent, source.parent):  # a crash leaves both names, not none
                self._calls.sync_directory(directory)

    def sweep(self) -> None:
        """Remove temporary files that dead processes have left. Call it while owning the run."""
        for path in durable.temporaries(self._root):
            if self._tag not in path.name:
                with contextlib.suppress(OSError):
                    self._calls.unlink(path)

    @contextlib.contextmanager
    def lock(self, name: str, slot: int) -> Iterator[None]:
        """See `Backend.lock`. A POSIX record lock on byte `slot`: it does not pass to forked
        children, and no other descriptor of the file may be opened in this process, so the lock
        file stays empty and is never read."""
        path = self._path(name)
        with _held_here(path, slot):
            with translated(path):
                durable.make_directories(self._root, path.parent, self._anchored, self._calls)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                fd = os.open(path, flags, 0o666)
            try:
                with translated(path):
                    _require_regular(os.fstat(fd), path)
                    _acquire(fd, slot, path)
                yield
            finally:
                os.close(fd)


class _Spares:
    """Files that were deleted and are kept to be overwritten, which spares the file system the
    freeing and the allocation of their space. They are temporary files in the root.

    They are at most four, and together no larger than the largest `put` so far: so a run takes
    the space of one step more than it keeps.
    """

    def __init__(self, root: Path, tag: str, calls: durable.SystemCalls) -> None:
        self._root, self._tag, self._calls = root, tag, calls
        self._guard = threading.Lock()
        self._numbers = itertools.count()
        self._kept: list[tuple[int, Path]] = []  # length and place, oldest first
        self.most_bytes = 0
        """How much the largest `put` was to write."""

    def keep(self, path: Path) -> bool:
        """Make a spare of a file, whose name is then durably gone; False: it is not fit for one.

        Raises:
            OSError: the file is gone from its place, but perhaps not durably; it is no spare.
        """
        found = os.lstat(path)
        linked = not stat.S_ISREG(found.st_mode) or found.st_nlink > 1
        if linked or not durable.DIRECT_FROM_BYTES <= found.st_size <= self.most_bytes:
            return False
        spare = self._root / f".spare-{next(self._numbers)}.{self._tag}{durable.TEMPORARY_SUFFIX}"
        try:
            self._calls.rename(path, spare)
        except OSError:
            return False
        try:
            for directory in (path.parent, self._root):  # before a byte of it may change
                self._calls.sync_directory(directory)
        except BaseException:
            with contextlib.suppress(OSError):
                self._calls.unlink(spare)
            raise
        with self._guard:
            self._kept.append((found.st_size, spare))
        self.release(_MOST_SPARES, self.most_bytes)
        return True

    def take(self, nbytes: int) -> Path | None:
        """The smallest spare that a file of this length can overwrite; it is the caller's now.
        Where there is none, and no space for a new file, all spares go."""
        with self._guard:
            fits = [s for s in self._kept if nbytes <= s[0] <= _MOST_SLACK * nbytes]
            if fits and nbytes >= durable.DIRECT_FROM_BYTES:
                self._kept.remove(min(fits))
                return min(fits)[1]
        if self._kept and shutil.disk_usage(self._root).free < nbytes:
            self.release()
        return None

    def release(self, count: int = 0, nbytes: int = 0) -> None:
        """Remove the oldest until so many, of so many bytes together, are left."""
        with self._guard:
            gone = []
            while len(self._kept) > count or sum(s[0] for s in self._kept) > nbytes:
                gone.append(self._kept.pop(0)[1])
        for spare in gone:
            with contextlib.suppress(OSError):
                self._calls.unlink(spare)


def _state(found: os.stat_result) -> tuple[int, int, int]:
    """Which file it is, and when it was last written to."""
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _sizes(found: Iterator[os.DirEntry[str]]) -> Iterator[tuple[os.DirEntry[str], int | None]]:
    """Each entry with its length; None for a directory. What has just been removed is left out."""
    for entry in found:
        with contextlib.suppress(FileNotFoundError):
            folder = entry.is_dir(follow_symlinks=False)
            yield entry, None if folder else entry.stat(follow_symlinks=False).st_size


def _shown(name: str) -> str:
    """A name as text: bytes that are not UTF-8 as `\\xNN`, which no store name contains."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")


def _require_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Damaged("is a link, folder or special file, and a store has none", path=path, at=0)


_owned: dict[tuple[str, int], int] = {}
_owned_guard = threading.Lock()


@contextlib.contextmanager
def _held_here(path: Path, slot: int) -> Iterator[None]:
    """Record locks do not keep a process out of its own, so this table does."""
    key = (os.path.realpath(path), slot)
    with _owned_guard:
        if _owned.get(key) == os.getpid():
            raise RunBusy(
                "this process already has a Checkpointer on this run",
                path=path.parent,
                hint="close() it first, or use another directory",
            )
        _owned[key] = os.getpid()
    try:
        yield
    finally:
        with _owned_guard:
            _owned.pop(key, None)


def _acquire(fd: int, slot: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise RunBusy(
                    f"{_holder(fd, slot)} is using this run",
                    path=path.parent,
                    rank=slot,
                    hint="wait until it ends, stop it, or use another directory",
                ) from None
            time.sleep(0.05)


def _holder(fd: int, slot: int) -> str:
    """Who holds the lock on a byte, as far as the kernel knows (`struct flock`, 64-bit Linux)."""
    query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
    try:
        answer = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, query))
    except (OSError, struct.error):
        return "another process"
    return f"process {answer[4]}" if answer[4] > 0 else "a process on another host"


def exists(path: Path) -> bool:
    """Whether there is a directory; anything else under that name is an error.

    Raises:
        StoreFailed: the name is a file, or cannot be looked at.
    """
    with translated(path):
        if not path.is_dir() and os.path.lexists(path):
            raise StoreFailed("is not a directory", path=path, hint="choose another directory")
        return path.is_dir()
