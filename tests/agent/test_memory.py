"""Files in memory before those of a store: the laws of a backend hold."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everystep.agent import protocol as p
from everystep.agent.arena import Arena
from everystep.agent.channel import Channel, address
from everystep.agent.memory import Overlay
from everystep.errors import Damaged, Missing
from everystep.store.backend import Entry, NewFile
from everystep.store.local import LocalBackend
from waiting import until

RUN = f"{os.getpid():032x}"
LARGE = os.urandom(100_000)
SMALL = b"in memory"


def answering(answer: Callable[[Channel], None]) -> threading.Thread:
    """An agent that answers one question."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address(RUN, 0))
    listener.listen()

    def serve() -> None:
        with listener:
            channel = Channel(listener.accept()[0])
            while not channel.wait(10) or not channel.receive():
                pass
            answer(channel)
            while channel.pending and channel.fileno() >= 0:
                channel.wait(1, to_receive=False)
                channel.flush()
            channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Overlay]:
    """`steps/a` and `steps/b` in memory, `steps/b` and `steps/c` on the store."""
    arena = Arena.made(2, 1 << 17)
    arena.view(4096, len(LARGE))[:] = LARGE
    files = [p.InMemory("steps/a", len(LARGE), 4096), p.InMemory("steps/b", 9, 0, SMALL)]
    thread = answering(lambda c: c.send(p.Files(files, (2, 1 << 17)), arena.fd))
    below = LocalBackend(tmp_path)
    below.put([NewFile("steps/b", 8, [b"on store"]), NewFile("steps/c", 8, [b"on store"])])
    found = Overlay(below, RUN, [0, 1])
    thread.join()
    arena.close()
    yield found
    found.close()


def read(overlay: Overlay, name: str, start: int = 0, stop: int | None = None) -> bytes:
    data = bytearray((overlay.size(name) if stop is None else stop) - start)
    overlay.read(name, memoryview(data), start)
    return bytes(data)


def test_memory_stands_before_the_store(overlay: Overlay) -> None:
    assert sorted(overlay.names) == ["steps/a", "steps/b"]
    assert read(overlay, "steps/a") == LARGE
    assert read(overlay, "steps/a", 7, 99_000) == LARGE[7:99_000]
    assert read(overlay, "steps/a", 50, 60) == LARGE[50:60]
    assert read(overlay, "steps/b") == SMALL
    assert read(overlay, "steps/c") == b"on store"
    assert overlay.abilities.locks


def test_each_file_is_listed_once(overlay: Overlay) -> None:
    expected = [Entry("steps/a", 100_000), Entry("steps/b", 9), Entry("steps/c", 8)]
    assert sorted(overlay.list("steps")) == expected
    assert sorted(overlay.list("")) == expected
    assert list(overlay.list("steps/a")) == []
    assert list(overlay.list("step")) == []


@pytest.mark.parametrize("name", ["steps/a", "steps/b"])
@pytest.mark.parametrize("nbytes", [1, 70_000])
def test_reading_beyond_the_end_is_damage(overlay: Overlay, name: str, nbytes: int) -> None:
    with pytest.raises(Damaged, match="ends too early"):
        overlay.read(name, memoryview(bytearray(nbytes)), overlay.size(name))
    overlay.read(name, memoryview(bytearray(0)), 0)


def test_what_is_lent_is_read_to_no_other_place(overlay: Overlay) -> None:
    lent = overlay.lend("steps/a", 7, 50)
    assert lent is not None and bytes(lent) == LARGE[7:57]
    overlay.read("steps/a", lent, 7)
    assert read(overlay, "steps/a") == LARGE
    assert overlay.lend("steps/a", 7, len(LARGE)) is None
    assert overlay.lend("steps/b", 0, 9) is None and overlay.lend("steps/c", 0, 8) is None


def test_memory_that_may_become_shorter_is_not_used(tmp_path: Path) -> None:
    """Its size is sealed where an agent of ours has made it; reading beyond its end would kill."""
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 17)
    files = [p.InMemory("steps/a", 100_000, 0)]
    thread = answering(lambda c: c.send(p.Files(files, (1, 1 << 17)), fd))
    found = Overlay(LocalBackend(tmp_path), RUN, [0])
    thread.join()
    os.close(fd)
    assert list(found.names) == []
    found.close()


def test_what_is_nowhere_is_missing(overlay: Overlay) -> None:
    with pytest.raises(Missing):
        overlay.size("steps/d")
    with pytest.raises(Missing):
        read(overlay, "steps/d", 0, 1)
    with pytest.raises(Missing):
        overlay.move("steps/d", "steps/e")


def test_what_is_put_takes_the_place_of_what_is_in_memory(overlay: Overlay) -> None:
    overlay.put([NewFile("steps/a", 3, [b"new"])])
    assert read(overlay, "steps/a") == b"new"
    assert sorted(overlay.list(""))[0] == Entry("steps/a", 3)


def test_what_is_deleted_is_gone_from_both(overlay: Overlay) -> None:
    for name in ("steps/a", "steps/b", "steps/b", "steps/d"):
        overlay.delete(name)
    assert list(overlay.list("")) == [Entry("steps/c", 8)]
    with pytest.raises(Missing):
        overlay.size("steps/b")


def test_what_is_moved_is_gone_from_its_place(overlay: Overlay) -> None:
    overlay.move("steps/a", "damaged/a")  # in memory only: nothing to keep
    overlay.move("steps/b", "damaged/b")
    overlay.move("steps/c", "damaged/c")
    assert sorted(e.name for e in overlay.list("")) == ["damaged/b", "damaged/c"]
    assert read(overlay, "damaged/b") == b"on store"


def test_what_is_moved_onto_a_file_in_memory_replaces_it(overlay: Overlay) -> None:
    overlay.move("steps/c", "steps/a")
    assert read(overlay, "steps/a") == b"on store"


def test_locks_are_those_of_the_store(overlay: Overlay, tmp_path: Path) -> None:
    with overlay.lock("owner.lock", 3):
        assert (tmp_path / "owner.lock").exists()


def test_large_files_that_were_sent_can_be_read(tmp_path: Path) -> None:
    """Not from staging memory, but as bytes of the message, which are not writable."""
    thread = answering(lambda c: c.send(p.Files([p.InMemory("steps/a", len(LARGE), 0, LARGE)])))
    overlay = Overlay(LocalBackend(tmp_path), RUN, [0])
    thread.join()
    assert read(overlay, "steps/a") == LARGE
    overlay.close()


def test_closing_gives_the_memory_back(overlay: Overlay) -> None:
    assert "everystep-staging" in Path("/proc/self/maps").read_text()
    overlay.close()
    maps = Path("/proc/self/maps")
    until(lambda: "everystep-staging" not in maps.read_text(), 60, "the memory to be given back")
    assert sorted(overlay.list("")) == [Entry("steps/b", 8), Entry("steps/c", 8)]


def test_without_agents_it_is_the_store(tmp_path: Path) -> None:
    below = LocalBackend(tmp_path)
    below.put([NewFile("steps/b", 8, [b"on store"])])
    overlay = Overlay(below, RUN, range(3))
    assert overlay.names == []
    assert read(overlay, "steps/b") == b"on store"
    overlay.close()


def a_truncated_memory(channel: Channel) -> None:
    fd = os.memfd_create("everystep-staging")
    os.ftruncate(fd, 4096)
    channel.send(p.Files([p.InMemory("steps/a", 100, 8192)], (2, 8192)), fd)
    os.close(fd)


def a_pipe(channel: Channel) -> None:
    ends = os.pipe()
    channel.send(p.Files([p.InMemory("steps/a", 100, 0)], (2, 8192)), ends[0])
    for end in ends:
        os.close(end)


def garbage(channel: Channel) -> None:
    channel._socket.send(b"\xff" * 100)


@pytest.mark.parametrize("answer", [a_truncated_memory, a_pipe, garbage, Channel.close])
def test_an_agent_that_does_not_keep_to_the_rules_is_passed_over(
    tmp_path: Path, answer: Callable[[Channel], None]
) -> None:
    thread = answering(answer)
    overlay = Overlay(LocalBackend(tmp_path), RUN, [0])
    thread.join()
    assert overlay.names == []
    overlay.close()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(1 << 40, 10), (-5, 10), (0, 1 << 40), (16_000, 1000)]
)
def test_places_outside_the_memory_are_not_read(tmp_path: Path, offset: int, nbytes: int) -> None:
    arena = Arena.made(2, 8192)
    file = p.InMemory("steps/a", nbytes, offset)
    thread = answering(lambda c: c.send(p.Files([file], (2, 8192)), arena.fd))
    overlay = Overlay(LocalBackend(tmp_path), RUN, [0])
    thread.join()
    assert overlay.names == []
    overlay.close()
    arena.close()


def test_an_agent_that_says_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everystep.agent.memory._PATIENCE_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(RUN, 0))
        listener.listen()
        overlay = Overlay(LocalBackend(tmp_path), RUN, [0])
        assert overlay.names == []
        overlay.close()
    until(lambda: RUN not in Path("/proc/net/unix").read_text(), 60, "the socket to be gone")
