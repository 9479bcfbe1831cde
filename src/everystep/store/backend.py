"""The interface between the store and the place that keeps its bytes, with its laws.

Names are relative, with `/` between parts; directories are not things, and appear and vanish with
the files in them. All failures are raised as `everystep.errors.StoreError` or one of its kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from everystep.types import Buffer


class Abilities(NamedTuple):
    """What a backend can do, as facts to branch on."""

    location: str
    """Where it is, for people."""
    locks: bool
    """Whether `lock` keeps other hosts and processes out."""


class Entry(NamedTuple):
    """One file."""

    name: str
    nbytes: int


class NewFile(NamedTuple):
    """A file to be written."""

    name: str
    nbytes: int
    parts: Iterable[Buffer]
    """The bytes in order, `nbytes` in all; each part is used before the next is asked for."""
    lasting: bool = False
    """Whether every part also stays as it is until `put` returns. Then a backend may write from
    where the parts lie, while it asks for the next ones: less work for the processor, but a disk
    may be slower with scattered small pages. False: it copies what it still needs."""


class Reader(Protocol):
    """Three verbs that change nothing. Any thread may call any of them."""

    @property
    def abilities(self) -> Abilities:
        """Facts about this backend; constant."""
        ...

    def read(self, name: str, into: memoryview, offset: int) -> None:
        """Fill a writable byte view from `offset` of a file. Idempotent.

        Raises:
            Missing: there is no such file, or it was deleted or replaced while it was read, so that
                its bytes may have been another file's.
            Damaged: it ends before the view is full, or it is a link or special file.
            StoreFailed: any other refusal.
        """
        ...

    def size(self, name: str) -> int:
        """The length of a file in bytes.

        Raises:
            Missing: there is no such file.
            Damaged: it is a link or special file.
        """
        ...

    def list(self, prefix: str) -> Iterator[Entry]:
        """All files whose name is below `prefix/` (all, where it is empty), in no given order.
        Links and special files are listed too, so that they are seen, and are never followed or
        opened. Nothing there is an empty list."""
        ...


class Backend(Reader, Protocol):
    """Five verbs more. Any thread may call any of them; only `lock` waits for others."""

    def put(self, files: Sequence[NewFile]) -> None:
        """Write files. When it returns, all are durable under their names.

        Each appears whole or not at all, but a crash may leave some of them and not others: what
        makes the others valid is put by a later call. A file that exists is replaced.

        Raises:
            StoreFull: no space or quota; none of the files that were not yet complete appears.
            StoreFailed: any other refusal.
        """
        ...

    def append(self, name: str, parts: Sequence[Buffer], at: int) -> None:
        """Write at the end of a file. When it returns, the bytes are durable there, and so is the
        name. One writer appends to a file at a time; who reads it meanwhile may see any part.

        A crash leaves the first `at` bytes as they were, and behind them any part of the new ones,
        or other bytes, or nothing: what is appended must show by itself whether it is whole.

        Args:
            name: the file.
            parts: the bytes in order; they stay as they are until this returns.
            at: the length of the file now. 0: there is no such file, and it is made.

        Raises:
            StoreFull: no space or quota. As after any failure, what is behind the first `at` bytes
                is unknown (the backend removes it if it can), so that nothing more may be appended
                to this file. One that was to be made may be there or not.
            StoreFailed: any other refusal; also, with nothing written, where the file does not have
                the length `at`.
        """
        ...

    def delete(self, name: str, *, reuse: bool = False) -> None:
        """Remove a file, durably. What is not there is no error.

        Args:
            reuse: the backend may keep the space of the file, out of sight, and let a later `put`
                overwrite it: once the name is durably gone, and never while the bytes can be
                reached by another name or through a descriptor that somebody has.

        Raises:
            StoreFailed: the store refused.
        """
        ...

    def move(self, name: str, to: str) -> None:
        """Give a file another name, durably, replacing what has it.

        Raises:
            Missing: there is no such file.
        """
        ...

    def lock(self, name: str, slot: int) -> AbstractContextManager[None]:
        """Own a slot of a lock file while the context lasts. Ends with the process at the latest;
        a slot that a dead process held is free. Waits a few seconds for one that is held.

        Raises:
            RunBusy: a live process, this one included, holds it.
        """
        ...
