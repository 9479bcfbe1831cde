"""The connection between the agents of two hosts: messages come whole and in order, from one that
knows the session's secret.

A message is 8 bytes of length (little-endian) and that many bytes of MessagePack of one of
`peer_messages`; one with `nbytes` is followed by that many bytes. Beyond loopback all of it is
inside TLS 1.3. The secret itself is never sent: each end shows that it knows it by an HMAC over
what the other has drawn and, where the listener's certificate was not known before, over its hash:
nobody in between can have another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from everystep.agent.certificates import client_context
from everystep.agent.channel import MAX_MESSAGE_BYTES
from everystep.agent.peer_messages import (
    NONCE_BYTES,
    Agreed,
    Alive,
    Answer,
    Base,
    Challenge,
    Ended,
    File,
    GiveFile,
    Keep,
    Kept,
    ListSteps,
    Next,
    NotKept,
    Rescue,
    Rescued,
    Share,
    Shared,
    Standing,
    StoredStep,
    Welcome,
    decoder,
)
from everystep.errors import EverystepError, StoreFailed
from everystep.store.addresses import Address

__all__ = [
    "ALIVE_S",
    "GREETING_S",
    "SILENT_S",
    "UNKNOWN",
    "Agreed",
    "Alive",
    "Answer",
    "Base",
    "Challenge",
    "Ended",
    "File",
    "GiveFile",
    "Gone",
    "Keep",
    "Kept",
    "ListSteps",
    "Next",
    "NotKept",
    "Rescue",
    "Rescued",
    "Share",
    "Shared",
    "Standing",
    "StoredStep",
    "Welcome",
    "Wire",
    "connected",
    "is_loopback",
    "require_safe",
    "welcomed",
]  # fmt: skip

GREETING_S = 5.0
"""Whoever has not shown by then that it knows the secret is sent away."""

SILENT_S = 5.0
"""An agent of which nothing has been heard for so long is gone."""

ALIVE_S = 1.0
"""So often each end says something."""

_FIRST_BYTES = 1 << 10
"""No message is longer before both ends know each other."""

_WORDS = 200
_SLICE_BYTES = 256 << 10
_LENGTH = struct.Struct("<Q")

UNKNOWN = ""
"""In place of the hash of a certificate that is not known before."""

Gone = (OSError, EOFError, StoreFailed)
"""What ends a connection."""


def is_loopback(host: str) -> bool:
    """Whether an IP address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Wire:
    """One end of a connection; for one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._ends_s = time.monotonic() + GREETING_S
        self._is_known = False
        self.heard_s = time.monotonic()
        """When something came the last time, on the host's monotonic clock."""

    def fileno(self) -> int:
        """The descriptor to wait for; -1 once it is closed."""
        return self._socket.fileno()

    def trust(self) -> None:
        """The other end knows the secret: it has time from now on."""
        self._is_known = True

    def _left_s(self) -> float:
        """How long to wait for the next bytes."""
        if self._is_known:
            return SILENT_S
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise StoreFailed("whoever has connected has not shown that it knows the secret")
        return left_s

    def send(
        self,
        message: Struct,
        payload: memoryview | None = None,
        pace: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Send a message, and the bytes that follow it.

        Args:
            pace: called before so many bytes of these are sent.

        Raises:
            OSError: the other end is gone, or takes nothing.
            StoreFailed: the message is too long.
        """
        content = msgspec.msgpack.encode(message)
        if len(content) > MAX_MESSAGE_BYTES:
            raise StoreFailed("a message is too long", found=f"{len(content):,} bytes")
        self._socket.settimeout(self._left_s())
        self._socket.sendall(_LENGTH.pack(len(content)) + content)
        self.send_bytes(payload or memoryview(b""), pace)

    def send_bytes(
        self, payload: memoryview, pace: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Send bytes that follow a message; see `send`.

        Raises:
            OSError: the other end is gone, or takes nothing.
        """
        for start in range(0, len(payload), _SLICE_BYTES):
            data = payload[start : start + _SLICE_BYTES]
            pace(len(data))
            self._socket.sendall(data)

    def has_come(self, wait_s: float, also: int | None = None) -> bool:
        """Wait until there is something to receive.

        Args:
            wait_s: for how long at most.
            also: a descriptor; wait no longer when that is readable.
        """
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        if also is not None:
            poll.register(also, select.POLLIN)
        return any(fd == self.fileno() for fd, _ in poll.poll(max(0.0, wait_s) * 1000))

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError, OSError: the other end is gone, or silent.
            StoreFailed: what came is no message.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > (MAX_MESSAGE_BYTES if self._is_known else _FIRST_BYTES):
            raise StoreFailed("a message is too long", found=f"{length:,} bytes")
        content = self._exactly(length)
        try:
            return decoder.decode(content)
        except (msgspec.MsgspecError, EverystepError, RecursionError) as error:
            why = ascii(str(error)[:_WORDS])  # whoever has sent it has a part in these words
            raise StoreFailed(f"a message is malformed: {why}") from error

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray()
        while len(data) < nbytes:  # no more memory than has come
            more = bytearray(min(nbytes - len(data), 1 << 20))
            self.receive_into(memoryview(more))
            data += more
        return data

    def receive_into(self, view: memoryview) -> None:
        """The bytes that follow a message.

        Raises:
            EOFError, OSError: the other end is gone, or silent.
        """
        while view:
            self._socket.settimeout(self._left_s())
            count = self._socket.recv_into(view[: 1 << 20])
            if count == 0:
                raise EOFError("the other end is gone")
            self.heard_s = time.monotonic()
            view = view[count:]

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def is_open(self) -> bool:
        """Whether the other end has not ended the connection, as far as is known here."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLRDHUP)
        return not poll.poll(0)

    def interrupt(self) -> None:
        """Let whatever thread waits here find that the other end is gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


# ---------------------------------------------------------------- making one


def connected(address: Address, token: bytes) -> Wire:
    """A connection to an agent, both ends of which know the secret.

    Raises:
        OSError, EOFError: it cannot be reached.
        StoreFailed: it is not the one that has published the address, or not to be spoken to: it
            is beyond loopback and has no certificate.
    """
    require_safe(address.host, has_tls=address.certificate is not None)
    connection = socket.create_connection((address.host, address.port), timeout=GREETING_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        binding = b""
        if address.certificate is not None:
            connection, binding = _pinned(connection, address)
        wire = Wire(connection)
        challenge = _expect(wire, Challenge)
        nonce = secrets.token_bytes(NONCE_BYTES)
        wire.send(Answer(nonce, _proof(token, b"caller", challenge.nonce, nonce, binding)))
        welcome = _expect(wire, Welcome)
        expected = _proof(token, b"listener", challenge.nonce, nonce, binding)
        if not hmac.compare_digest(welcome.proof, expected):
            raise StoreFailed("the agent does not know the session's secret", path=_place(address))
        wire.trust()
    except BaseException:
        connection.close()
        raise
    return wire


def _pinned(connection: socket.socket, address: Address) -> tuple[socket.socket, bytes]:
    """The connection inside TLS, and what of it goes into the proofs."""
    secure = client_context().wrap_socket(connection)
    found = hashlib.sha256(secure.getpeercert(binary_form=True) or b"").hexdigest()
    if address.certificate == UNKNOWN:
        return secure, bytes.fromhex(found)
    if found != address.certificate:
        secure.close()
        raise StoreFailed(
            "the agent has another certificate than it has published",
            path=_place(address),
            expected=address.certificate,
            found=found,
        )
    return secure, b""


def welcomed(
    connection: socket.socket, context: ssl.SSLContext | None, token: bytes, binding: bytes = b""
) -> Wire:
    """The same from the other end: whoever has connected knows the secret.

    Args:
        binding: the SHA-256 of the certificate, where callers do not know it before.

    Raises:
        OSError, EOFError, StoreFailed: it does not, or says nothing for too long.
    """
    connection.settimeout(GREETING_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is not None:
        connection = context.wrap_socket(connection, server_side=True)
    wire = Wire(connection)
    try:
        nonce = secrets.token_bytes(NONCE_BYTES)
        wire.send(Challenge(nonce))
        answer = _expect(wire, Answer)
        expected = _proof(token, b"caller", nonce, answer.nonce, binding)
        if not hmac.compare_digest(answer.proof, expected):
            raise StoreFailed("whoever has connected does not know the secret")
        wire.send(Welcome(_proof(token, b"listener", nonce, answer.nonce, binding)))
        wire.trust()
    except BaseException:
        wire.close()
        raise
    return wire


def require_safe(host: str, *, has_tls: bool) -> None:
    """Refuse to send a state over a network as it is.

    Raises:
        StoreFailed: the address is beyond loopback, and there is no TLS.
    """
    if not has_tls and not is_loopback(host):
        raise StoreFailed(
            "an agent beyond loopback is spoken to through TLS only, and this one has none",
            path=host,
            hint="pip install everystep[peers] on every host",
        )


def _expect(wire: Wire, kind: type[Any]) -> Any:
    message = wire.receive()
    if not isinstance(message, kind):
        raise StoreFailed("a message came out of turn", found=type(message).__name__)
    return message


def _proof(token: bytes, whose: bytes, listeners: bytes, callers: bytes, binding: bytes) -> bytes:
    return hmac.digest(token, whose + listeners + callers + binding, "sha256")


def _place(address: Address) -> str:
    return f"{address.host}:{address.port}"
