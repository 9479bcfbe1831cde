"""Record the system calls of a commit, and build every state that a power cut could leave of them.

The model is as hostile as POSIX allows: bytes of a file count once the file has been fsynced, names
in a directory once the directory has been fsynced, and until then each of them may be there or not,
in any combination. A file whose name survived and whose bytes did not is empty, zero, cut, or holds
something else; one that was written over, parts of what it held before, too. Only a rename within
one directory is taken to happen whole or not at all, and bytes behind which others were appended
stay: a disk writes a sector whole or not at all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from everystep.store.durable import SystemCalls
from everystep.types import Buffer

_ALL_UP_TO = 128
"""States of one prefix that are tried one by one; of more, a sample."""


class Call(NamedTuple):
    """One call that has succeeded, or a note of the scene that is being recorded."""

    name: str
    path: str = ""
    target: str = ""
    file: int = 0
    data: bytes = b""
    at: int = 0
    note: object = None


class Died(BaseException):
    """The process is dead: nothing that it would still do is done."""


class Recorder(SystemCalls):
    """Performs the calls below one root and writes them down. Nothing is really fsynced: what the
    disk would keep is worked out from the log."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.dies_after: int | None = None
        """How many calls (notes too) are in the log when the process dies; None: it lives."""
        self._files: dict[int, int] = {}
        self._inodes: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._guard = threading.Lock()
        self.log: list[Call] = []

    def note(self, note: object) -> None:
        """Put a remark of the scene between the calls."""
        self._add(Call("note", note=note))

    def _add(self, call: Call) -> None:
        with self._guard:
            self.log.append(call)

    def _alive(self) -> None:
        if self.dies_after is not None and len(self.log) >= self.dies_after:
            raise Died

    def _name(self, path: Path) -> str:
        self._alive()
        return path.relative_to(self._root).as_posix()

    def create(self, path: Path, flags: int) -> int:
        """Perform and record."""
        name = self._name(path)
        fd = super().create(path, flags)
        with self._guard:
            self._files[fd] = self._inodes[os.fstat(fd).st_ino] = next(self._numbers)
        self._add(Call("create", name, file=self._files[fd]))
        return fd

    def reopen(self, path: Path) -> int:
        """Perform and record; what is written then goes into the file that has been there."""
        name = self._name(path)
        fd = super().reopen(path)
        with self._guard:
            self._files[fd] = self._inodes[os.fstat(fd).st_ino]
        self._add(Call("reopen", name, file=self._files[fd]))
        return fd

    def write_at(self, fd: int, data: Buffer, offset: int) -> int:
        """Perform and record what was taken."""
        self._alive()
        taken = super().write_at(fd, data, offset)
        self._add(Call("write", file=self._files[fd], data=bytes(data[:taken]), at=offset))
        return taken

    def write_parts_at(self, fd: int, parts: Sequence[Buffer], offset: int) -> int:
        """Perform and record what was taken."""
        self._alive()
        taken = super().write_parts_at(fd, parts, offset)
        data = b"".join(parts)[:taken]
        self._add(Call("write", file=self._files[fd], data=data, at=offset))
        return taken

    def truncate(self, fd: int, nbytes: int) -> None:
        """Perform and record."""
        self._alive()
        super().truncate(fd, nbytes)
        self._add(Call("truncate", file=self._files[fd], at=nbytes))

    def sync(self, fd: int) -> None:
        """Record."""
        self._alive()
        self._add(Call("sync", file=self._files[fd]))

    def rename(self, source: Path, target: Path) -> None:
        """Perform and record."""
        call = Call("rename", self._name(source), self._name(target))
        super().rename(source, target)
        self._add(call)

    def sync_directory(self, path: Path) -> None:
        """Record; a directory that is not there is an error as it would be."""
        call = Call("sync_directory", self._name(path))
        if not path.is_dir():
            raise FileNotFoundError(2, "no such directory", str(path))
        self._add(call)

    def make_directory(self, path: Path) -> None:
        """Perform and record."""
        call = Call("make_directory", self._name(path))
        super().make_directory(path)
        self._add(call)

    def unlink(self, path: Path) -> None:
        """Perform and record."""
        call = Call("unlink", self._name(path))
        super().unlink(path)
        self._add(call)

    def remove_directory(self, path: Path) -> None:
        """Perform and record."""
        call = Call("remove_directory", self._name(path))
        super().remove_directory(path)
        self._add(call)


class _File:
    """Bytes on the disk, and bytes as programs see them."""

    def __init__(self) -> None:
        self.kept = b""
        self.seen = b""

    def survivors(self, rng: random.Random, *, named: bool) -> list[bytes]:
        """What may be found in it; `named`: whether it may have a name that counts."""
        if self.kept == self.seen:
            return [self.kept]
        appended = bool(self.kept) and self.seen.startswith(self.kept)
        stays = len(self.kept) if appended else 0  # no byte of it was written again
        half = self.seen[: stays + (len(self.seen) - stays) // 2]
        found = [self.kept, half]
        if named:
            rest = len(self.seen) - len(half)
            zeros = self.seen[:stays] + bytes(len(self.seen) - stays)
            found += [zeros, half + bytes(rest), half + rng.randbytes(rest)]
        if named and self.kept and not appended:
            found += [
                half + self.kept[len(half) :],
                self.kept[: len(half)] + self.seen[len(half) :],
            ]
        return list(dict.fromkeys([*found, self.seen]))


_Change = list[tuple[str, "_File | _Directory | None"]]
"""Names that one call gives or takes away at once, within one directory."""


class _Directory:
    """Names on the disk, and changes that are not there yet."""

    def __init__(self) -> None:
        self.kept: dict[str, _File | _Directory] = {}
        self.pending: list[_Change] = []

    def seen(self) -> dict[str, _File | _Directory]:
        """The names as programs see them."""
        return self.after([True] * len(self.pending))

    def after(self, applied: Sequence[object]) -> dict[str, _File | _Directory]:
        """The names if only some of the changes reached the disk."""
        names = dict(self.kept)
        for change, reached in zip(self.pending, applied, strict=True):
            for name, thing in change if reached else ():
                if thing is None:
                    names.pop(name, None)
                else:
                    names[name] = thing
        return names


Tree = dict[str, "bytes | None"]
"""A directory tree: path to bytes, or None for a directory."""


class Disk:
    """A disk that replays a log, and tells what may be on it if the power fails now."""

    def __init__(self) -> None:
        self._root = _Directory()
        self._files: dict[int, _File] = {}

    def _directory(self, path: PurePosixPath) -> _Directory:
        found: _Directory = self._root
        for part in path.parts:
            inner = found.seen()[part]
            if not isinstance(inner, _Directory):
                raise NotADirectoryError(str(path))
            found = inner
        return found

    def replay(self, call: Call) -> None:
        """Take in one call."""
        path, target = PurePosixPath(call.path), PurePosixPath(call.target)
        if call.name in ("write", "truncate", "sync"):
            self._replay_on_file(call)
        elif call.name == "sync_directory":
            directory = self._directory(path)
            directory.kept, directory.pending = directory.seen(), []
        elif call.name == "rename":
            source, into = self._directory(path.parent), self._directory(target.parent)
            moved = source.seen()[path.name]
            if source is into:
                source.pending.append([(path.name, None), (target.name, moved)])
            else:
                into.pending.append([(target.name, moved)])
                source.pending.append([(path.name, None)])
        elif call.name not in ("note", "reopen"):
            thing: _File | _Directory | None = None
            if call.name == "create":
                thing = self._files[call.file] = _File()
            elif call.name == "make_directory":
                thing = _Directory()
            self._directory(path.parent).pending.append([(path.name, thing)])

    def _replay_on_file(self, call: Call) -> None:
        file = self._files[call.file]
        if call.name == "sync":
            file.kept = file.seen
        elif call.name == "truncate":
            file.seen = file.seen[: call.at].ljust(call.at, b"\0")
        else:
            before = file.seen.ljust(call.at, b"\0")
            file.seen = before[: call.at] + call.data + before[call.at + len(call.data) :]

    def survivors(self, rng: random.Random) -> Iterator[Tree]:
        """The trees that a power cut may leave, each once."""
        directories, files = self._reachable()
        changes = [(directory, len(directory.pending)) for directory in directories]
        switches = [count for _, count in changes]
        contents = [file.survivors(rng, named=named) for file, named in files]
        sizes = [2] * sum(switches) + [len(found) for found in contents]
        given: set[int] = set()
        for choice in _choices(sizes, rng):
            bits = iter(choice)
            applied = {
                id(directory): list(itertools.islice(bits, count)) for directory, count in changes
            }
            texts = {
                id(file): found[index]
                for (file, _), found, index in zip(files, contents, bits, strict=True)
            }
            tree: Tree = {}
            _lay_down(self._root, "", applied, texts, tree)
            known = hash(frozenset(tree.items()))
            if known not in given:
                given.add(known)
                yield tree

    def _reachable(self) -> tuple[list[_Directory], list[tuple[_File, bool]]]:
        """All directories and files that may have a name, and whether that of a file counts."""
        directories: dict[int, _Directory] = {}
        files: dict[int, tuple[_File, bool]] = {}
        pending: list[tuple[str, _File | _Directory]] = [("", self._root)]
        while pending:
            name, thing = pending.pop()
            if isinstance(thing, _File):
                named = not name.endswith(".tmp") or files.get(id(thing), (thing, False))[1]
                files[id(thing)] = (thing, named)
            elif id(thing) not in directories:
                directories[id(thing)] = thing
                pending += thing.kept.items()
                for change in thing.pending:
                    pending += [(n, t) for n, t in change if t is not None]
        return list(directories.values()), list(files.values())


def _choices(sizes: Sequence[int], rng: random.Random) -> Iterator[tuple[int, ...]]:
    """All choices of one number below each size; or the corners and a sample, where that is many.

    The last number of a file means that all of it is there.
    """
    total = 1
    for size in sizes:
        total *= size
    if total <= _ALL_UP_TO:
        yield from itertools.product(*(range(size) for size in sizes))
        return
    nothing, everything = [0] * len(sizes), [size - 1 for size in sizes]
    yield tuple(nothing)
    yield tuple(everything)
    for index, size in enumerate(sizes):
        for value in range(size):
            yield (*everything[:index], value, *everything[index + 1 :])
            yield (*nothing[:index], value, *nothing[index + 1 :])
    for _ in range(_ALL_UP_TO):
        yield tuple(rng.randrange(size) for size in sizes)


def _lay_down(
    directory: _Directory,
    path: str,
    applied: dict[int, list[int]],
    texts: dict[int, bytes],
    tree: Tree,
) -> None:
    for name, thing in directory.after(applied[id(directory)]).items():
        if isinstance(thing, _File):
            tree[path + name] = texts[id(thing)]
        else:
            tree[path + name] = None
            _lay_down(thing, f"{path}{name}/", applied, texts, tree)


class Cut(NamedTuple):
    """A power cut, and one tree that it may leave."""

    after: int
    """How many entries of the log had been performed."""
    tree: Tree
    notes: list[object]
    """The notes before it."""


def power_cuts(log: Sequence[Call], start: int, rng: random.Random) -> Iterator[Cut]:
    """For every prefix of a log from `start` calls on, every tree that may survive it."""
    disk = Disk()
    notes: list[object] = []
    for done in range(len(log) + 1):
        if done:
            disk.replay(log[done - 1])
            if log[done - 1].name == "note":
                notes.append(log[done - 1].note)
        if done >= start and (done == start or log[done - 1].name != "close"):
            for tree in disk.survivors(rng):
                yield Cut(done, tree, list(notes))


def lay_out(tree: Tree, root: Path) -> None:
    """Make `root` hold exactly this tree."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(root)
    root.mkdir(parents=True)
    for name, data in tree.items():
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)
