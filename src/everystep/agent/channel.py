"""The socket between trainer and agent: messages come whole, in order, and with descriptors.

A message is 8 bytes of length (little-endian) and that many bytes of MessagePack of one of the
structs of `protocol`; descriptors travel beside its first byte (SCM_RIGHTS). Both ends check that
the other belongs to the same user.
"""

from __future__ import annotations

import array
import collections
import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from everystep.agent.protocol import decoder
from everystep.errors import EverystepError, StoreFailed

MAX_MESSAGE_BYTES = 512 << 20
"""Room for what a step has beside its tensors: a record of twice the length that a store takes."""

_MOST_DESCRIPTORS = 4
"""So many may have come for messages that are still on their way."""

_LENGTH = struct.Struct("<Q")
_PEER = struct.Struct("3i")


def address(run: str, rank: int) -> str:
    """Where the agent of a rank listens: a name in the abstract namespace of Unix sockets, which
    vanishes with the process."""
    return f"\0everystep/{os.getuid()}/{run}/{rank}"


def same_user(connection: socket.socket) -> bool:
    """Whether the other end belongs to this user (SO_PEERCRED)."""
    return _peer(connection)[1] == os.geteuid()


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end when the connection was made."""
    return _peer(connection)[0]


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, gid = _PEER.unpack(peer)
    return pid, uid, gid


class Channel:
    """One end of a connection. Nothing but `wait` waits: what the socket does not take is kept, and
    goes with the next `flush`. Any thread may send; receiving is for one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._guard = threading.Lock()
        self._outgoing: collections.deque[tuple[memoryview, int | None]] = collections.deque()
        self._received = bytearray()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """The descriptor to wait for; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether there is something left to flush."""
        return bool(self._outgoing)

    def wait(self, wait_s: float, *, to_receive: bool = True, to_send: bool = True) -> bool:
        """Wait until there is something to receive, or what is pending can go on its way.

        Args:
            wait_s: for how long at most.
            to_receive: False: not for the former.
            to_send: False: not for the latter.

        Returns:
            Whether there is something to receive, an end included.

        Raises:
            ValueError: the channel is closed.
        """
        events = select.POLLIN if to_receive else 0
        if to_send and self.pending:
            events |= select.POLLOUT
        poll = select.poll()  # knows no limit on the numbers of descriptors, as `select` does
        poll.register(self.fileno(), events)
        found = poll.poll(max(0.0, wait_s) * 1000)
        return any(event & ~select.POLLOUT for _, event in found)

    def send(self, message: Struct, fd: int | None = None, *, later: bool = False) -> None:
        """Send one message, and a copy of a descriptor with it.

        Args:
            later: leave it to the next `flush`, in whatever thread.

        Raises:
            OSError: the other end is gone.
            StoreFailed: the message is too long; nothing is sent.
        """
        content = msgspec.msgpack.encode(message)
        if len(content) > MAX_MESSAGE_BYTES:
            raise StoreFailed("a message is too long", found=f"{len(content):,} bytes")
        data = memoryview(_LENGTH.pack(len(content)) + content)
        with self._guard:
            if self.fileno() < 0:
                raise BrokenPipeError("the channel is closed")
            self._outgoing.append((data, None if fd is None else os.dup(fd)))
        if not later:
            self.flush()

    def flush(self) -> None:
        """Send what is waiting, as far as the socket takes it.

        Raises:
            OSError: the other end is gone.
        """
        with self._guard, contextlib.suppress(BlockingIOError):
            while self._outgoing:
                data, fd = self._outgoing[0]
                rights = [] if fd is None else [array.array("i", [fd]).tobytes()]
                beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, right) for right in rights]
                sent = self._socket.sendmsg([data], beside, socket.MSG_NOSIGNAL)
                if fd is not None:
                    os.close(fd)
                self._outgoing.popleft()
                if sent < len(data):
                    self._outgoing.appendleft((data[sent:], None))

    def receive(self) -> list[tuple[Any, int | None]]:
        """Messages that have come whole, each with the descriptor that came with it.

        Raises:
            EOFError: the other end is gone.
            StoreFailed: what came is no message.
        """
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 20, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                rights = array.array("i")
                rights.frombytes(content[: len(content) - len(content) % rights.itemsize])
                self._fds += rights
        if not data:
            raise EOFError
        self._received += data
        messages: list[tuple[Any, int | None]] = []
        try:
            messages.extend(self._messages())
            if len(self._fds) > _MOST_DESCRIPTORS:
                raise StoreFailed("descriptors came that belong to no message")
        except StoreFailed:
            self._fds += [fd for _, fd in messages if fd is not None]
            raise
        return messages

    def _messages(self) -> Iterator[tuple[Any, int | None]]:
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MAX_MESSAGE_BYTES:
                raise StoreFailed("a message is too long", found=f"{length:,} bytes")
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            content = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            try:
                message = decoder.decode(content)
            except (msgspec.MsgspecError, EverystepError, RecursionError) as error:
                raise StoreFailed(f"a message is malformed: {error}") from error
            carries = getattr(message, "arena", None) is not None
            yield message, self._fds.pop(0) if carries and self._fds else None

    def close(self) -> None:
        """Close the connection, and descriptors that nobody took."""
        with self._guard:
            unsent = [fd for _, fd in self._outgoing if fd is not None]
            self._outgoing.clear()
            self._socket.close()
        for fd in [*unsent, *self._fds]:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds.clear()
