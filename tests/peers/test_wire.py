"""Agents of two hosts know each other; whoever else connects is sent away, quickly and unheard."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everystep.agent import wire as w
from everystep.agent.certificates import server_context
from everystep.errors import Damaged, Missing, StoreError, StoreFailed
from everystep.store import addresses as at
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from waiting import until

TOKEN, OTHER = b"t" * 64, b"u" * 64
DEADLINE_S = 60.0


class Listener:
    """An agent that welcomes whoever connects, one after the other."""

    def __init__(self, token: bytes = TOKEN, *, tls: bool = True, host: str = "127.0.0.1") -> None:
        self._token, self._context, certificate = token, None, None
        if tls:
            self._context, certificate = server_context()
        self._socket = socket.create_server((host, 0))
        port = self._socket.getsockname()[1]
        self.address = at.Address(rank=0, host=host, port=port, certificate=certificate, holds=[])
        self.wires: list[w.Wire] = []
        self.refused: list[Exception] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._socket.accept()[0]
            except OSError:
                return
            try:
                self.wires.append(w.welcomed(connection, self._context, self._token))
            except w.Gone as error:
                self.refused.append(error)
                connection.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        for wire in self.wires:
            wire.close()


@contextlib.contextmanager
def listening(*args: bytes, tls: bool = True) -> Iterator[Listener]:
    listener = Listener(*args, tls=tls)
    try:
        yield listener
    finally:
        listener.close()


@pytest.mark.parametrize("tls", [True, False])
def test_messages_and_the_bytes_behind_them_come_whole(tls: bool) -> None:
    data = memoryview(os.urandom(3 << 20))
    with listening(tls=tls) as listener:
        wire = w.connected(listener.address, TOKEN)
        until(lambda: listener.wires, DEADLINE_S, "the welcome")
        sender = threading.Thread(target=lambda: (wire.send(w.Kept(7), data), wire.send(w.Ended())))
        sender.start()
        there = listener.wires[0]
        assert there.receive() == w.Kept(7)
        into = bytearray(len(data))
        there.receive_into(memoryview(into))
        assert into == data
        assert there.has_come(DEADLINE_S)
        assert there.receive() == w.Ended()
        sender.join()
        assert not there.has_come(0.0)
        wire.close()
        assert there.has_come(DEADLINE_S)
        with pytest.raises(EOFError):
            there.receive()


@pytest.mark.parametrize("tls", [True, False])
def test_a_caller_that_does_not_know_the_secret(tls: bool) -> None:
    with listening(tls=tls) as listener:
        with pytest.raises((EOFError, OSError)):
            w.connected(listener.address, OTHER)
        until(lambda: listener.refused, DEADLINE_S, "the refusal")
        assert "does not know the secret" in str(listener.refused[0])
        assert not listener.wires


def test_a_listener_that_does_not_know_the_secret() -> None:
    def serve() -> None:
        wire = w.Wire(listener.accept()[0])
        wire.send(w.Challenge(bytes(32)))
        answers.append(wire.receive())
        wire.send(w.Welcome(bytes(32)))
        wire.close()

    answers: list[w.Answer] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        address = at.Address(rank=0, host="127.0.0.1", port=port, certificate=None, holds=[])
        with pytest.raises(StoreFailed, match="does not know the session's secret"):
            w.connected(address, TOKEN)
        thread.join()
    assert TOKEN not in answers[0].proof + answers[0].nonce


def test_another_certificate_than_the_published_one_is_not_spoken_to() -> None:
    with listening() as listener, listening() as other:
        port = other.address.port
        wrong = at.Address(
            rank=0, host="127.0.0.1", port=port, certificate=listener.address.certificate, holds=[]
        )
        with pytest.raises(StoreFailed, match="another certificate"):
            w.connected(wrong, TOKEN)
        until(lambda: other.refused, DEADLINE_S, "the end of the connection")
        assert not other.wires


@pytest.mark.parametrize("host", ["10.1.2.3", "fd00::1", "example.org", ""])
def test_nothing_is_sent_beyond_loopback_without_tls(host: str) -> None:
    address = at.Address(rank=0, host=host, port=1, certificate=None, holds=[])
    with pytest.raises(StoreFailed, match="through TLS only"):
        w.connected(address, TOKEN)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "noise": lambda: os.urandom(4096),
    "a huge length": lambda: struct.pack("<Q", 1 << 60) + b"x" * 64,
    "more than a greeting": lambda: struct.pack("<Q", 4096) + bytes(4096),
    "no message": lambda: struct.pack("<Q", 16) + b"\xc1" * 16,
    "deeply nested": lambda: struct.pack("<Q", 1000) + b"\x91" * 1000,
    "another message": lambda: _framed(w.Rescue()),
    "a short number": lambda: _framed({"type": "Answer", "nonce": b"x", "proof": b""}),
    "no proof": lambda: _framed(w.Answer(bytes(32), b"")),
    "HTTP": lambda: b"GET / HTTP/1.1\r\n\r\n",
}


def _framed(message: object) -> bytes:
    content = w.msgspec.msgpack.encode(message)
    return struct.pack("<Q", len(content)) + content


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("tls", [True, False])
def test_hostile_bytes_end_the_connection(kind: str, tls: bool) -> None:
    with listening(tls=tls) as listener:
        place = ("127.0.0.1", listener.address.port)
        with socket.create_connection(place) as connection, contextlib.suppress(OSError):
            connection.sendall(HOSTILE[kind]())
            connection.settimeout(DEADLINE_S)
            while connection.recv(1 << 16):
                pass
        until(lambda: listener.refused, DEADLINE_S, "the end of the connection")
        assert not listener.wires
        w.connected(listener.address, TOKEN).close()  # others are still welcome


@pytest.mark.parametrize("drip", [b"", b"\x10"])
def test_whoever_says_nothing_is_sent_away(drip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w, "GREETING_S", 0.3)
    with listening(tls=False) as listener:
        with socket.create_connection(("127.0.0.1", listener.address.port)) as connection:
            connection.settimeout(0.02)

            def is_over() -> bool:
                with contextlib.suppress(OSError):
                    connection.sendall(drip)
                return bool(listener.refused)

            until(is_over, DEADLINE_S, "the end of the connection")
        assert not listener.wires


def test_a_silent_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w, "SILENT_S", 0.2)
    with listening() as listener:
        wire = w.connected(listener.address, TOKEN)
        with pytest.raises(OSError, match="timed out"):
            wire.receive()
        wire.close()


def test_tls_is_of_the_newest_version_only() -> None:
    context, _ = server_context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    with listening() as listener:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        place = ("127.0.0.1", listener.address.port)
        with socket.create_connection(place) as connection, pytest.raises(ssl.SSLError):
            old.wrap_socket(connection)
        until(lambda: listener.refused, DEADLINE_S, "the refusal")


# ---------------------------------------------------------------- files


@pytest.fixture
def backend(run_dir: Path) -> LocalBackend:
    backend = LocalBackend.made(run_dir)
    Run.open_or_create(backend)
    return backend


def test_only_the_user_may_read_the_secret(backend: LocalBackend, run_dir: Path) -> None:
    with pytest.raises(Missing):
        at.read_token(run_dir, 3)
    at.make_token(run_dir, 3)
    token = at.read_token(run_dir, 3)
    at.make_token(run_dir, 3)
    assert len(token) == 2 * at.TOKEN_BYTES and at.read_token(run_dir, 3) != token
    path = run_dir / at.token_file(3)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(StoreFailed, match="others may read"):
        at.read_token(run_dir, 3)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(Damaged):
        at.read_token(run_dir, 3)
    path.unlink()
    path.symlink_to(run_dir / "run.json")
    with pytest.raises(StoreError):
        at.read_token(run_dir, 3)


def test_addresses_are_known_by_their_names(backend: LocalBackend, run_dir: Path) -> None:
    assert at.newest_session(backend) == (0, [])
    for session, rank in [(1, 0), (2, 0), (2, 1)]:
        address = at.Address(rank=rank, host="127.0.0.1", port=5, certificate=None, holds=[])
        at.put_address(backend, session, address)
        at.make_token(run_dir, session)
    session, found = at.newest_session(backend)
    assert (session, [one.rank for one in found]) == (2, [0, 1])
    assert Run.open(run_dir).listing().strangers == ()
    (run_dir / at.address_file(2, 1)).write_bytes(b"{")
    assert [one.rank for one in at.newest_session(backend)[1]] == [0]
    at.forget(backend, before=2)
    assert sorted(entry.name for entry in backend.list("agents")) == [
        at.address_file(2, 0), at.address_file(2, 1), at.token_file(2),
    ]  # fmt: skip
