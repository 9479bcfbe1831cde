"""Whatever comes over its port, a shadow says what is wrong with it, keeps little memory for it,
and goes on for the others, exact."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.shadow_scenes import DEADLINE_S, Scene
from everystep.agent import holder
from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.peer_messages import decoder
from everystep.store import addresses as at
from everystep.store.retention import Retention
from everystep.strategies import Shadow
from waiting import until

HUGE = 1 << 61


@pytest.fixture
def scene(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(holder, "_COMPLAINS_S", 0.0)
    made = Scene(quick_path)
    yield made
    made.shadow.close()


def framed(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


# ---------------------------------------------------------------- in between


class Sent:
    """A message of an owner, and the bytes behind it."""

    def __init__(self, message: Any, payload: bytes) -> None:
        self.message, self.payload = message, payload

    @property
    def head(self) -> bytes:
        return framed(msgspec.msgpack.encode(self.message))

    @property
    def whole(self) -> bytes:
        return self.head + self.payload


Attack = Callable[[list[Sent]], list[bytes | None]]
"""From the third record and the one after it to what is sent; None: then nothing comes, while the
connection stays; at the end it is closed, unless both are whole."""

ATTACKS: dict[str, tuple[Attack, str]] = {
    "noise": (lambda two: [b"\xc1" * 4096], "too long"),
    "a huge length": (lambda two: [framed(b"", HUGE)], "too long"),
    "no message": (lambda two: [framed(b"\xc1" * 16)], "malformed"),
    "a message of nobody": (lambda two: [framed(b"\x81\xa4type\xa4Evil")], "malformed"),
    "terminal codes": (
        lambda two: [framed(msgspec.msgpack.encode({"type": "\x1b[2J" * 99}))], "malformed",
    ),
    "another's turn": (lambda two: [framed(msgspec.msgpack.encode(w.Rescue()))], ""),
    "the payload alone": (lambda two: [two[0].payload + two[1].whole], ""),
    "half a message": (lambda two: [two[0].head[:20]], ""),
    "half a payload": (lambda two: [two[0].whole[:-9]], ""),
    "half a payload, and on": (lambda two: [two[0].whole[:-9], two[1].whole], ""),
    "a message that stalls": (lambda two: [two[0].head[:20], None], ""),
    "a payload that stalls": (lambda two: [two[0].whole[:-9], None], ""),
    "replayed": (lambda two: [two[0].whole, two[0].whole], "out of turn"),
    "out of order": (lambda two: [two[1].whole, two[0].whole], "out of turn"),
    "left out": (lambda two: [two[1].whole], "out of turn"),
    "a huge payload": (
        lambda two: [Sent(w.Next(record=two[0].message.record, nbytes=HUGE), b"").whole],
        "",
    ),
    "another payload": (
        lambda two: [two[0].head + bytes(len(two[0].payload)), two[1].whole], "",
    ),
}  # fmt: skip


class Between:
    """Forwards connections to a shadow, and attacks the first one that has sent three records."""

    def __init__(self, port: int, attack: Attack) -> None:
        self._to, self._attack = ("127.0.0.1", port), attack
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.fired = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def _listen(self) -> None:
        while True:
            try:
                owner = self._listener.accept()[0]
            except OSError:
                return
            there = socket.create_connection(self._to)
            self._open += [owner, there]
            for act in (self._forth, self._back):
                self._threads.append(threading.Thread(target=act, args=[owner, there]))
                self._threads[-1].start()

    def _back(self, owner: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := there.recv(1 << 16):
                owner.sendall(data)
        self._end(owner, there)

    def _forth(self, owner: socket.socket, there: socket.socket) -> None:
        """What comes after the greeting is known message by message."""
        with contextlib.suppress(OSError, EOFError), owner.makefile("rb") as file:
            records: list[Sent] = []
            while True:
                sent = _read(file)
                if not isinstance(sent.message, w.Next) or self.fired:
                    there.sendall(sent.whole)
                    continue
                records.append(sent)
                if len(records) < 3:
                    there.sendall(sent.whole)
                elif len(records) == 4:
                    self.fired += 1
                    self._strike(records[2:], there)
                    break
            while file.read1(1 << 16):  # the owner may send until it finds out
                pass
        self._end(owner, there)

    def _strike(self, two: list[Sent], there: socket.socket) -> None:
        for data in self._attack(two):
            if data is None:
                return
            there.sendall(data)
        there.shutdown(socket.SHUT_WR)

    def _end(self, *both: socket.socket) -> None:
        for one in both:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end(self._listener)
        self._end(*self._open)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._open):
            one.close()


def _read(file: Any) -> Sent:
    (length,) = struct.unpack("<Q", _exactly(file, 8))
    message = decoder.decode(_exactly(file, length))
    return Sent(message, _exactly(file, getattr(message, "nbytes", 0)))


def _exactly(file: Any, nbytes: int) -> bytes:
    data: bytes = file.read(nbytes)
    if len(data) < nbytes:
        raise EOFError
    return data


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_session_that_is_attacked_comes_back_exact(
    kind: str, scene: Scene, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(w, "SILENT_S", 2.0)
    attack, said = ATTACKS[kind]
    between = Between(scene.shadow.port, attack)
    try:
        strategy = Shadow(
            address=f"127.0.0.1:{between.port}", token_file=str(scene.token), tap="software"
        )
        scene.train(run_dir, 12, strategy, waits=False)
    finally:
        between.close()
    assert between.fired == 1
    assert said in " ".join(scene.said)
    assert all(text.isprintable() and len(text) < 500 for text in scene.said)
    digests = scene.digests
    done, before, _ = scene.train(tmp_path / "other", 1, scene.strategy())
    assert (done, before) == (len(digests) - 1, digests[-1])


# ---------------------------------------------------------------- with the token, and without


def begin(**changed: object) -> p.Begin:
    made = p.Begin(
        run="r" * 32, session=1, timeline="main", rank=1, world_size=2, policy="skip",
        staging_bytes=None, linger_s=0.0, retention=Retention(), known=[], pinned=[], versions={},
        identity=[],
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


SESSIONS = {
    "no identity": (begin(), "no run"),
    "another's file": (begin(identity=[("../../evil", b"x")]), "identity"),
    "a module": (begin(identity=[("torch.py", b"x")]), "identity"),
    "a place of its own": (begin(timeline="../../evil"), "no sense"),
    "no rank": (begin(rank=7), "no sense"),
    "no wire": (
        begin(shadow=p.ShadowPlan(places=[("127.0.0.1", 1)], token_file="", tap="wire")),
        "reads no network",
    ),
}


@pytest.mark.parametrize("kind", SESSIONS)
def test_a_session_that_makes_no_sense(kind: str, scene: Scene, run_dir: Path) -> None:
    made, said = SESSIONS[kind]
    with caller(scene) as wire:
        wire.send(w.Keep(made))
        assert isinstance(wire.receive(), w.NotKept)
    until(lambda: said in " ".join(scene.said), DEADLINE_S, "it to be said")
    found = {path.name for path in scene.folder.rglob("*")}
    assert not found & {"evil", "torch.py"}
    scene.train(run_dir, 2, scene.strategy())  # others are served


@contextlib.contextmanager
def caller(scene: Scene) -> Iterator[w.Wire]:
    address = at.Address(
        rank=0, host="127.0.0.1", port=scene.shadow.port, certificate=None, holds=[]
    )
    wire = w.connected(address, at.read_secret(scene.token))
    try:
        yield wire
    finally:
        wire.close()


def test_only_what_was_offered_is_given(scene: Scene, run_dir: Path) -> None:
    scene.train(run_dir, 2, scene.strategy())
    for name in ("../token", "/etc/passwd", "run.json"):
        with caller(scene) as wire:
            wire.send(w.Rescue())
            assert isinstance(wire.receive(), w.Rescued)
            wire.send(w.GiveFile(name))
            with pytest.raises((EOFError, OSError)):
                wire.receive()
    assert sum("not offered" in text for text in scene.said) == 3
    with caller(scene) as wire:
        wire.send(w.Rescue())
        assert isinstance(wire.receive(), w.Rescued)
        wire.send(w.ListSteps(step=HUGE, timeline="../../evil"))
        assert wire.receive().step is None


def answered(place: tuple[str, int], scene: Scene) -> tuple[bytes, bytes]:
    """What one that knows the token has answered."""
    token = at.read_secret(scene.token)
    with socket.create_connection(place) as one, one.makefile("rb") as file:
        challenge, nonce = _read(file).message, os.urandom(32)
        proof = w._proof(token, b"caller", challenge.nonce, nonce, b"")
        one.sendall(framed(msgspec.msgpack.encode(w.Answer(nonce, proof))))
        assert isinstance(_read(file).message, w.Welcome)
    return nonce, proof


def test_whoever_does_not_know_the_token(scene: Scene, run_dir: Path) -> None:
    """Many that say nothing, some that say something else, and one that repeats what another has
    said; a run goes on meanwhile."""
    place = ("127.0.0.1", scene.shadow.port)
    silent = [socket.create_connection(place) for _ in range(40)]
    tracemalloc.start()
    try:
        for data in (os.urandom(1 << 20), framed(b"", HUGE), b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(place) as one, contextlib.suppress(OSError):
                one.sendall(data)
                one.settimeout(DEADLINE_S)
                while one.recv(1 << 16):
                    pass
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    answer = framed(msgspec.msgpack.encode(w.Answer(*answered(place, scene))))
    with socket.create_connection(place) as one:
        one.settimeout(DEADLINE_S)
        one.sendall(answer)
        while one.recv(1 << 16):
            pass
    until(lambda: "know the secret" in " ".join(scene.said), DEADLINE_S, "it to be said")
    scene.train(run_dir, 3, scene.strategy())
    for one in silent:
        one.close()
