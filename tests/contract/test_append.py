"""The laws of `Backend.append`, over every implementation of Backend."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from byte_runs import noise
from everystep.agent.memory import Overlay
from everystep.errors import Missing, StoreFailed
from everystep.store.backend import Backend, NewFile
from everystep.store.local import LocalBackend
from waiting import until

IMPLEMENTATIONS: dict[str, Callable[[Path], Backend]] = {
    "local": LocalBackend,
    "overlay": lambda root: Overlay(LocalBackend(root), "no run", []),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return IMPLEMENTATIONS[request.param](tmp_path)


def content(backend: Backend, name: str) -> bytes:
    data = bytearray(backend.size(name))
    backend.read(name, memoryview(data), 0)
    return bytes(data)


def test_a_file_is_made_and_grows(backend: Backend) -> None:
    backend.append("a/b/x", [b"one", memoryview(b"two")], 0)
    backend.append("a/b/x", [bytearray(b"three")], 6)
    assert content(backend, "a/b/x") == b"onetwothree"
    assert [entry for entry in backend.list("a")] == [("a/b/x", 11)]
    backend.delete("a/b/x")
    backend.append("a/b/x", [b"anew"], 0)
    assert content(backend, "a/b/x") == b"anew"


@pytest.mark.parametrize("sizes", [[], [0], [0, 3, 0], [1] * 3000, [5 << 20, 1, 3 << 20]])
def test_parts_of_all_sizes(backend: Backend, sizes: list[int]) -> None:
    parts = [noise(size, index) for index, size in enumerate(sizes)]
    backend.append("x", [b"before"], 0)
    backend.append("x", parts, 6)
    assert content(backend, "x") == b"before" + b"".join(parts)


def test_parts_that_are_no_bytes(backend: Backend) -> None:
    """A view of wider elements counts by its bytes."""
    backend.append("x", [memoryview(b"12345678").cast("I")], 0)
    backend.append("x", [b"!"], 8)
    assert content(backend, "x") == b"12345678!"


def test_the_length_must_be_as_said(backend: Backend) -> None:
    backend.append("x", [b"12345"], 0)
    for at in (3, 8):
        with pytest.raises(StoreFailed, match=f"expected {at}, found 5"):
            backend.append("x", [b"more"], at)
    with pytest.raises(StoreFailed, match="there already"):
        backend.append("x", [b"more"], 0)
    with pytest.raises(StoreFailed, match="vanished") as caught:
        backend.append("y", [b"more"], 4)
    assert not isinstance(caught.value, Missing)
    assert content(backend, "x") == b"12345"
    assert [entry.name for entry in backend.list("")] == ["x"]


def test_files_that_are_put_can_grow(backend: Backend) -> None:
    backend.put([NewFile("x", 3, [b"put"])])
    backend.append("x", [b"!"], 3)
    assert content(backend, "x") == b"put!"


def test_names_that_lead_out_are_refused(backend: Backend) -> None:
    for name in ("../x", "/x", "a/../../x", ""):
        with pytest.raises(StoreFailed):
            backend.append(name, [b"x"], 0)


@pytest.mark.parametrize("at", [0, 4])
def test_links_folders_and_pipes_are_not_written(backend: Backend, tmp_path: Path, at: int) -> None:
    (tmp_path / "target").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe"):
        with pytest.raises(StoreFailed):
            backend.append(name, [b"more"], at)
    assert (tmp_path / "target").read_bytes() == b"1234"


def test_a_reader_sees_what_was_there_before(backend: Backend) -> None:
    """Whoever reads meanwhile: the first bytes are there and stay."""
    backend.append("x", [b"0" * 1000], 0)
    stop, wrong = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            size = backend.size("x")
            data = bytearray(size)
            backend.read("x", memoryview(data), 0)
            if bytes(data) != b"".join(b"%d" % (i % 10) * 1000 for i in range(50))[:size]:
                wrong.append(size)

    reader = threading.Thread(target=look)
    reader.start()
    for index in range(1, 50):
        backend.append("x", [b"%d" % (index % 10) * 1000], 1000 * index)
    stop.set()
    reader.join()
    assert wrong == []
    until(lambda: not reader.is_alive(), 60, "the reader to end")
