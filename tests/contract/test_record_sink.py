"""The laws of `RecordSink`, over what takes records in tests and over an agent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.scenes import Trainer, run_at
from byte_logs import LAYOUT, payload
from everystep.agent.client import Agent
from everystep.agent.sink import RecordSink
from everystep.errors import StoreFailed
from everystep.store.run import Run
from everystep.store.segments import read


class Listed:
    """A sink in memory: records by step, with the base and layout of each."""

    def __init__(self) -> None:
        self.records: dict[int, tuple[int, bytes, bytes]] = {}
        self._opened: tuple[int, bytes] | None = None
        self._reserved: bytearray | None = None

    def open_log(self, base: int, layout: bytes) -> None:
        self._opened = (base, layout)

    def set_batch(self, records: int) -> None:
        pass

    def reserve(self, nbytes: int, wait_s: float) -> memoryview | None:
        self._reserved = bytearray(nbytes)
        return memoryview(self._reserved)

    def publish(self, step: int, safe: int | None = None) -> None:
        if self._reserved is None or self._opened is None:
            raise StoreFailed("nothing was reserved")
        self.records[step] = (*self._opened, bytes(self._reserved))
        self._reserved = None

    def withdraw(self) -> None:
        self._reserved = None


class Case(NamedTuple):
    sink: RecordSink
    records: Callable[[], dict[int, tuple[int, bytes, bytes]]]
    """What was taken, once all is durable: by step, the base, the layout and the record."""


def listed(where: Path) -> Iterator[Case]:
    sink = Listed()
    yield Case(sink, lambda: sink.records)


def agents(where: Path) -> Iterator[Case]:
    run = run_at(where)
    agent = Agent(where, run.id, 0)
    Trainer(agent, run, logs=True)

    def records() -> dict[int, tuple[int, bytes, bytes]]:
        assert agent.settle() == []
        opened = Run.open(where)
        return {
            found.step: (
                scanned.segment.base,
                scanned.layout,
                bytes(read(opened.backend, scanned.segment.name, found)),
            )
            for scanned in opened.segments(opened.listing())
            for found in scanned.records
        }

    yield Case(agent.log, records)
    agent.close()


IMPLEMENTATIONS: dict[str, Callable[[Path], Iterator[Case]]] = {"list": listed, "agent": agents}


@pytest.fixture(params=IMPLEMENTATIONS)
def case(request: pytest.FixtureRequest, run_dir: Path) -> Iterator[Case]:
    with contextlib.contextmanager(IMPLEMENTATIONS[request.param])(run_dir) as made:
        yield made


def put(sink: RecordSink, step: int, nbytes: int | None = None) -> bytes:
    data = payload(step, nbytes=nbytes)
    view = sink.reserve(len(data), 20.0)
    assert view is not None
    assert (len(view), view.readonly, view.format) == (len(data), False, "B")
    view[:] = data
    view.release()
    sink.publish(step)
    return data


def test_what_is_published_is_taken_as_it_was(case: Case) -> None:
    case.sink.set_batch(3)
    case.sink.open_log(4, LAYOUT)
    sizes = [1, 37, 8, 300_000, 2, 5 << 20, 9]
    put_in = {step: put(case.sink, step, nbytes) for step, nbytes in enumerate(sizes, 5)}
    assert case.records() == {step: (4, LAYOUT, data) for step, data in put_in.items()}


def test_each_record_is_of_the_layout_that_was_said_last(case: Case) -> None:
    case.sink.set_batch(100)
    case.sink.open_log(0, LAYOUT)
    one = put(case.sink, 1)
    case.sink.open_log(1, b"never used")
    case.sink.open_log(1, b"other")
    two = put(case.sink, 2)
    case.sink.set_batch(1)
    three = put(case.sink, 3)
    assert case.records() == {
        1: (0, LAYOUT, one), 2: (1, b"other", two), 3: (1, b"other", three),
    }  # fmt: skip


def test_what_is_withdrawn_is_not_taken(case: Case) -> None:
    case.sink.open_log(0, LAYOUT)
    view = case.sink.reserve(100, 20.0)
    assert view is not None
    view[:] = bytes(100)
    view.release()
    case.sink.withdraw()
    case.sink.withdraw()
    data = put(case.sink, 1)
    assert case.records() == {1: (0, LAYOUT, data)}


def test_nothing_is_published_that_was_not_reserved(case: Case) -> None:
    case.sink.open_log(0, LAYOUT)
    with pytest.raises(StoreFailed):
        case.sink.publish(1)
    put(case.sink, 1)
    with pytest.raises(StoreFailed):
        case.sink.publish(2)
    assert set(case.records()) == {1}
