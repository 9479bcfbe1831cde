"""The messages, and the socket that carries them: whole, in order, and whatever the other sends."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.agent import protocol as p
from everystep.agent.channel import MAX_MESSAGE_BYTES, Channel, address, peer_pid, same_user
from everystep.errors import StoreFailed
from everystep.types import Piece, StepRef, TensorSpec

refs = st.builds(StepRef, st.sampled_from(["main", "main@3"]), st.integers(0, 1 << 40))
keys = st.sampled_from(["/models/model/a", "/optimizers/o/state/b"])
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs = st.builds(
    TensorSpec,
    key=keys,
    dtype=st.sampled_from(["float32", "int8"]),
    shape=shapes,
    replicated=st.booleans(),
)
pieces = st.builds(Piece, keys, st.integers(0, 9), st.integers(0, 9))
json = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
hashes = st.text("0123456789abcdef", min_size=32, max_size=32)
plain = st.one_of(
    st.builds(p.Hello, st.integers(1, 1 << 22), st.booleans()),
    st.builds(p.Ready, st.integers(1, 1 << 22), st.none() | st.text(max_size=9)),
    st.builds(p.Grant, st.integers(0, 3)),
    st.builds(p.Ping, st.integers(0, 1 << 60)),
    st.builds(
        p.Seal,
        slot=st.integers(0, 3),
        layout=st.integers(0, 9),
        step=st.integers(0, 1 << 40),
        created=st.just("2026-01-01T00:00:00Z"),
        hashes=st.dictionaries(st.integers(0, 9), hashes, max_size=3),
        whole=st.dictionaries(keys, hashes),
        rest=st.lists(specs, max_size=2),
        still=st.booleans(),
        tree=st.binary(max_size=40) | st.integers(1, 200_000).map(bytes),
        metrics=st.dictionaries(st.text(max_size=4), json, max_size=3),
    ),
    st.builds(
        p.NotStored,
        step=st.integers(0, 9),
        error=st.none() | st.tuples(st.text(max_size=4), st.text(max_size=4), st.none()),
    ),
    st.builds(p.Diverged, refs),
    st.builds(p.Settled, st.lists(refs, max_size=3)),
    st.just(p.Bye()),
)
with_memory = st.one_of(
    st.builds(
        p.Describe,
        layout=st.integers(0, 9),
        specs=st.lists(specs, max_size=3),
        pieces=st.lists(pieces, max_size=3),
        rest_bytes=st.integers(0, 1 << 40),
        arena=st.just((2, 4096)),
        taken=st.lists(st.integers(0, 1), max_size=1),
    ),
    st.builds(
        p.Places,
        layout=st.integers(0, 9),
        offsets=st.lists(st.integers(0, 1 << 40), max_size=3),
        rest_offset=st.integers(0, 9),
        arena=st.just((2, 4096)),
    ),
)


@contextmanager
def channels(buffer_bytes: int | None = None) -> Iterator[tuple[Channel, Channel]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if buffer_bytes is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    sender, receiver = Channel(one), Channel(other)
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


@given(st.data(), st.lists(plain | with_memory, min_size=1, max_size=12), st.booleans())
def test_messages_come_whole_and_in_order_with_their_descriptors(
    data: st.DataObject, messages: list[Any], small: bool
) -> None:
    received: list[tuple[Any, int | None]] = []
    with contextlib.ExitStack() as owned, channels(4096 if small else None) as (sender, receiver):
        owned.callback(lambda: [os.close(fd) for _, fd in received if fd is not None])
        inodes = []
        for message in messages:
            fd = os.memfd_create("test") if getattr(message, "arena", None) else None
            sender.send(message, fd)
            if fd is not None:
                inodes.append(os.fstat(fd).st_ino)
                os.close(fd)  # what is on its way is the channel's own
            while data.draw(st.booleans()):
                received += receiver.receive()
        while sender.pending or len(received) < len(messages):
            received += receiver.receive()
            sender.flush()
        assert [message for message, _ in received] == messages
        fds = [fd for _, fd in received]
        assert [fd is not None for fd in fds] == [hasattr(m, "arena") for m in messages]
        found = [os.fstat(fd).st_ino for fd in fds if fd is not None]
        assert found == inodes
        for fd in fds:
            if fd is not None:
                assert not os.get_inheritable(fd)


def encoded(message: Any) -> bytes:
    content = msgspec.msgpack.encode(message)
    return struct.pack("<Q", len(content)) + content


@given(st.lists(plain, min_size=1, max_size=5), st.data())
def test_a_message_may_come_in_any_pieces(messages: list[Any], data: st.DataObject) -> None:
    stream = b"".join(map(encoded, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    one, other = socket.socketpair()
    receiver = Channel(other)
    received = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        at = start
        while at < stop:
            at += one.send(stream[at:stop], socket.MSG_DONTWAIT)
            received += receiver.receive()
    while len(received) < len(messages):
        received += receiver.receive()
    assert received == [(message, None) for message in messages]
    one.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


def end_of(stream: bytes) -> type[Exception]:
    """What a reader makes of bytes and then the end."""
    one, other = socket.socketpair()
    receiver = Channel(other)
    try:
        at = 0
        while at < len(stream):
            at += one.send(stream[at : at + 50_000])
            receiver.receive()
        one.close()
        while True:
            assert receiver.wait(5), "it hangs"
            receiver.receive()
    except (StoreFailed, EOFError) as error:
        return type(error)
    finally:
        one.close()
        receiver.close()


@settings(max_examples=200)
@given(st.data())
def test_hostile_bytes_end_in_an_error_of_ours(data: st.DataObject) -> None:
    stream = bytearray(b"".join(map(encoded, data.draw(st.lists(plain | with_memory, max_size=3)))))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(stream)))
        stream[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=12))
    end_of(bytes(stream))


def framed(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\x82\xa4type\xa7Settled\xa7unsaved\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa4Seal\xa7metrics\x81\xa1a" + b"\x91" * 100_000,
        b"\x82\xa4type\xa4Seal\xa7metrics\xdf\xff\xff\xff\xff",
        b"\x82\xa4type\xa4Seal\xa7created\xa1\xff",
        b"\x82\xa4type\xa4Ping\xa6number\xa1x",
        b"\x81\xa4type\xa7Nothing",
        msgspec.msgpack.encode({"type": "Begin", "retention": {"keep_last": 0}}),
    ],
    ids=["nothing", "opcode", "array", "nested", "map", "utf-8", "type", "name", "retention"],
)
def test_a_malformed_message_is_refused(content: bytes) -> None:
    tracemalloc.start()
    try:
        assert end_of(framed(content)) is StoreFailed
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_a_length_beyond_the_cap_is_refused_at_once(length: int) -> None:
    assert end_of(struct.pack("<Q", length)) is StoreFailed


def test_memory_comes_with_the_bytes_not_with_what_is_announced() -> None:
    tracemalloc.start()
    try:
        assert end_of(struct.pack("<Q", MAX_MESSAGE_BYTES) + b"x" * 1000) is EOFError
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_message_that_no_reader_would_take_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everystep.agent.channel.MAX_MESSAGE_BYTES", 100)
    with channels() as (sender, receiver):
        with pytest.raises(StoreFailed, match="too long"):
            sender.send(p.Ready(1, "x" * 200))
        sender.send(p.Ping(1))
        assert receiver.receive() == [(p.Ping(1), None)]


def test_descriptors_that_belong_to_nothing_are_refused_and_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    one, other = socket.socketpair()
    receiver = Channel(other)
    rights = array.array("i", [one.fileno()] * 3)
    with pytest.raises(StoreFailed, match="descriptors"):
        for _ in range(10):
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            one.sendmsg([encoded(p.Ping(1))], beside)
            receiver.receive()
    receiver.close()
    one.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_whose_message_comes_with_garbage_is_closed() -> None:
    one, other = socket.socketpair()
    receiver = Channel(other)
    message = encoded(p.Places(1, [], 0, (2, 4096))) + framed(b"\xc1")
    rights = array.array("i", [one.fileno()])
    one.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    with pytest.raises(StoreFailed):
        receiver.receive()
    receiver.close()
    one.close()  # the fixture of all tests looks for what is left


def test_the_end_of_the_other_is_seen() -> None:
    with channels() as (sender, receiver):
        sender.send(p.Ping(1))
        sender.close()
        assert receiver.receive() == [(p.Ping(1), None)]
        with pytest.raises(EOFError):
            receiver.receive()
        with pytest.raises(BrokenPipeError):
            receiver.send(p.Pong(1))
        with pytest.raises(BrokenPipeError):
            sender.send(p.Ping(2), 0)
        with pytest.raises(ValueError, match="descriptor"):
            sender.wait(0)


def test_waiting_for_the_other_to_take_what_is_pending() -> None:
    with channels(4096) as (sender, receiver):
        sender.send(p.Ready(1, "x" * 1_000_000))
        assert sender.pending
        assert not sender.wait(0, to_receive=False)
        received: list[Any] = []
        while sender.pending:
            received += receiver.receive()
            assert not sender.wait(5, to_receive=False)
            sender.flush()
        while not received:
            received += receiver.receive()
        assert received == [(p.Ready(1, "x" * 1_000_000), None)]
        receiver.send(p.Pong(1))
        assert sender.wait(5)
        assert not sender.wait(0, to_receive=False)


def test_the_same_user_is_let_in() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert same_user(one)
        assert peer_pid(one) == os.getpid()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="takes the name of another user")
def test_another_user_is_not() -> None:
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
        "s.connect('\\0everystep-test-' + sys.argv[1]); s.recv(1)"
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0everystep-test-{os.getpid()}")
        listener.listen()
        child = subprocess.Popen([sys.executable, "-c", program, str(os.getpid())])
        assert select.select([listener], [], [], 30)[0]
        connection, _ = listener.accept()
        with connection:
            assert not same_user(connection)
            assert peer_pid(connection) == child.pid
        assert child.wait(60) == 0


def test_the_name_of_the_socket_is_that_of_user_run_and_rank() -> None:
    names = {address(run, rank) for run in ("a" * 32, "b" * 32) for rank in (0, 1)}
    assert len(names) == 4
    assert all(name.startswith(f"\0everystep/{os.getuid()}/") for name in names)
    assert max(map(len, names)) < 108  # sun_path
