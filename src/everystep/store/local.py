"""A directory as a backend."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from everystep.errors import Damaged, Missing, RunBusy, StoreFailed, StoreFull
from everystep.store import durable
from everystep.store.appending import append
from everystep.store.backend import Abilities, Entry, NewFile
from everystep.store.spares import Spares
from everystep.types import Buffer

LOCK_PATIENCE_S = 5.0
"""How long to wait for a slot: a killed process may still be on its way out."""

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
        self._root_text = str(self._root).rstrip("/")
        self._calls = calls or durable.SystemCalls()
        self._anchored: set[Path] = set()
        self._tag = f"{os.getpid():x}-{secrets.token_hex(4)}"
        self._spares = Spares(self._root, self._tag, self._calls)

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
        *folders, last = name.split("/")
        above = self._root_text
        for part in folders:
            above = f"{above}/{_checked(part, name)}"
            if os.path.islink(above):
                raise StoreFailed("is a link, and a store has none", path=Path(above))
        return Path(f"{above}/{_checked(last, name)}")

    def _paths(self, names: Sequence[str]) -> list[Path]:
        """Where several names lie; a folder that they share is looked at once."""
        folders: dict[str, Path] = {}
        found = []
        for name in names:
            folder, _, last = name.rpartition("/")
            if folder not in folders:
                folders[folder] = self._path(name).parent
            found.append(folders[folder] / _checked(last, name))
        return found

    def _make_directories(self, path: Path) -> None:
        """See `durable.make_directories`; nothing of it is done again where all is as it was."""
        if path in self._anchored and path.is_dir():
            return
        durable.make_directories(self._root, path, self._anchored, self._calls)

    def put(self, files: Sequence[NewFile]) -> None:
        """See `Backend.put`. All files are written and fsynced, then renamed in their order.

        A large file overwrites a spare of about its size. Where none fits, and the space for a new
        one is not there, the spares go first; they go too when there is no space after all.
        """
        ready: list[tuple[Path, Path]] = []
        directories: set[Path] = set()
        self._spares.most_bytes = max(self._spares.most_bytes, sum(f.nbytes for f in files))
        try:
            for file, path in zip(files, self._paths([f.name for f in files]), strict=True):
                with translated(path):
                    if path.parent not in directories:
                        self._make_directories(path.parent)
                        directories.add(path.parent)
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
            for directory in sorted(directories):
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

    def append(self, name: str, parts: Sequence[Buffer], at: int) -> None:
        """See `Backend.append`."""
        path = self._path(name)
        try:
            with translated(path):
                if at == 0:
                    self._make_directories(path.parent)
                append(path, parts, at, self._calls)
        except Missing as error:
            raise StoreFailed("the file or its directory has vanished", path=path) from error
        except StoreFull:
            self.release_spares()
            raise

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
            if large and _is_another(found, os.lstat(path)):
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
            self._make_directories(target.parent)
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
        children. Whichever descriptor of the file this process closes, all its locks on it go: so
        none is closed while another slot is held, and the file stays empty and is never read."""
        path = self._path(name)
        with _held_here(path, slot):
            with translated(path):
                self._make_directories(path.parent)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                fd = os.open(path, flags, 0o666)
            try:
                with translated(path):
                    _require_regular(os.fstat(fd), path)
                    _acquire(fd, slot, path)
                yield
            finally:
                _give_up(fd, path, slot)


def _checked(part: str, name: str) -> str:
    """A part of a name, which must be one that a store uses."""
    if not _PART.fullmatch(part):
        raise StoreFailed("is not a name that a store uses", path=name)
    return part


def _is_another(before: os.stat_result, now: os.stat_result) -> bool:
    """Whether a name stands for another file than before, or for one that was written over. One
    that has become longer was appended to: what is written over never is longer than it was."""
    if (before.st_dev, before.st_ino) != (now.st_dev, now.st_ino):
        return True
    return before.st_mtime_ns != now.st_mtime_ns and now.st_size <= before.st_size


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
_left_open: dict[str, list[int]] = {}
"""Descriptors of lock files that may not be closed yet."""


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


def _give_up(fd: int, path: Path, slot: int) -> None:
    """Unlock a slot, and close what may be closed now."""
    real = os.path.realpath(path)
    with _owned_guard:
        with contextlib.suppress(OSError):
            fcntl.lockf(fd, fcntl.LOCK_UN, 1, slot)
        mine = [key[1] for key, pid in _owned.items() if key[0] == real and pid == os.getpid()]
        left = _left_open.setdefault(real, [])
        left.append(fd)
        if set(mine) <= {slot}:
            for one in _left_open.pop(real):
                os.close(one)


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
