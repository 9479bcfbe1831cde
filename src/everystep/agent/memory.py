"""The files of steps that agents hold in memory, laid over those on the store: what a restart
reads."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from everystep.agent import protocol as p
from everystep.agent.arena import Arena
from everystep.agent.channel import Channel, address, same_user
from everystep.errors import Damaged, Missing, StoreFailed
from everystep.store.backend import Abilities, Backend, Entry, NewFile
from everystep.types import Buffer

_PATIENCE_S = 10.0


class Overlay:
    """A backend in which files in memory stand before those of another backend.

    What is put goes to the backend below; what is deleted or moved is gone from memory, too.
    """

    def __init__(self, below: Backend, run: str, ranks: Iterable[int]) -> None:
        """Ask the agents of these ranks that live on this host."""
        self._below = below
        self._files: dict[str, memoryview] = {}
        self._arenas: list[Arena] = []
        for rank in ranks:
            self._ask(run, rank)

    @property
    def names(self) -> Sequence[str]:
        """The files that are in memory."""
        return list(self._files)

    def _ask(self, run: str, rank: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address(run, rank))
        except OSError:
            connection.close()
            return
        channel = Channel(connection)
        try:
            if same_user(connection):
                self._take(channel)
        finally:
            channel.close()

    def _take(self, channel: Channel) -> None:
        with contextlib.suppress(OSError, EOFError, StoreFailed):
            channel.send(p.ListFiles())
            deadline_s = time.monotonic() + _PATIENCE_S
            while (left_s := deadline_s - time.monotonic()) > 0:
                if not channel.wait(left_s):
                    channel.flush()
                    continue
                for message, fd in channel.receive():
                    if isinstance(message, p.Files):
                        self._add(message, fd)
                        return

    def _add(self, message: p.Files, fd: int | None) -> None:
        arena = None
        if message.arena is not None and fd is not None:
            arena = Arena(fd, *message.arena)
            self._arenas.append(arena)
            if not arena.lasts:  # what lies beyond its end could not be read as damage
                return
        for file in message.files:
            if file.data is not None:
                self._files[file.name] = memoryview(file.data)
            elif arena is not None and 0 <= file.offset <= file.offset + file.nbytes <= len(arena):
                self._files[file.name] = arena.view(file.offset, file.nbytes)

    @property
    def abilities(self) -> Abilities:
        """Those of the backend below."""
        return self._below.abilities

    def put(self, files: Sequence[NewFile]) -> None:
        """See `Backend.put`."""
        for file in files:
            self._files.pop(file.name, None)
        self._below.put(files)

    def append(self, name: str, parts: Sequence[Buffer], at: int) -> None:
        """See `Backend.append`."""
        self._files.pop(name, None)
        self._below.append(name, parts, at)

    def read(self, name: str, into: memoryview, offset: int) -> None:
        """See `Backend.read`."""
        held = self._files.get(name)
        if held is None:
            self._below.read(name, into, offset)
            return
        source = held[offset : offset + len(into)]
        if len(source) < len(into):
            raise Damaged("the file ends too early", path=name, at=offset + len(source))
        if source.readonly or not into:
            into[:] = source
        elif _address(into) != _address(source):  # else it has been lent
            ctypes.memmove(_address(into), _address(source), len(into))

    def lend(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        """The bytes of a file that is in memory, until `close`; reading to there copies nothing.
        None: they are not in memory."""
        held = self._files.get(name)
        if held is None or held.readonly or offset + nbytes > len(held):
            return None
        return held[offset : offset + nbytes]

    def size(self, name: str) -> int:
        """See `Backend.size`."""
        held = self._files.get(name)
        return self._below.size(name) if held is None else len(held)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See `Backend.list`."""
        before = prefix + "/" if prefix else ""
        for name, held in list(self._files.items()):
            if name.startswith(before):
                yield Entry(name, len(held))
        for entry in self._below.list(prefix):
            if entry.name not in self._files:
                yield entry

    def delete(self, name: str, *, reuse: bool = False) -> None:
        """See `Backend.delete`."""
        self._files.pop(name, None)
        self._below.delete(name, reuse=reuse)

    def move(self, name: str, to: str) -> None:
        """See `Backend.move`."""
        held = self._files.pop(name, None)
        try:
            self._below.move(name, to)
        except Missing:
            if held is None:
                raise
        self._files.pop(to, None)

    def lock(self, name: str, slot: int) -> AbstractContextManager[None]:
        """See `Backend.lock`."""
        return self._below.lock(name, slot)

    def close(self) -> None:
        """Let go of the memory. A thread gives it back: for large memory that takes a while."""
        self._files.clear()
        arenas, self._arenas = self._arenas, []
        if arenas:
            threading.Thread(target=_give_back, args=(arenas,), name="everystep-unmap").start()


def _give_back(arenas: Sequence[Arena]) -> None:
    for arena in arenas:
        arena.close()


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
