"""The trainer's end of the log: where records wait, how long, and what a new agent is told."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.log_scenes import Pair, Quick
from agent.scenes import DEADLINE_S, run_at
from everystep.agent import logger, tail
from everystep.agent import protocol as p
from everystep.errors import StoreFailed
from waiting import until

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "LEAST_RING_BYTES", 8 * PAGE)
    monkeypatch.setattr(logger, "RETRY_S", 0.02)


@pytest.fixture
def quick() -> Quick:
    return Quick()


@pytest.fixture
def pair(run_dir: Path, quick: Quick, request: pytest.FixtureRequest) -> Iterator[Pair]:
    budget = getattr(request, "param", None)
    made = Pair(run_at(run_dir), quick, buffer_bytes=budget)
    yield made
    quick.go.set()
    made.close()


def rings(pair: Pair) -> list[int]:
    return [len(ring.arena) for ring in pair.tail._rings]


def memfds() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "everystep-staging" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found


def hold(pair: Pair, quick: Quick, step: int, nbytes: int = 40) -> None:
    """The store stands still, and the agent with it, inside the append of a step."""
    quick.waits.clear()
    quick.go.clear()
    pair.log(step, nbytes=nbytes)
    assert quick.waits.wait(DEADLINE_S)


# ---------------------------------------------------------------- room


def test_a_step_is_reserved_filled_and_published(pair: Pair) -> None:
    pair.open(base=1)
    pair.log(2, 3)
    pair.until_logged(3)
    assert pair.tail.unsaved() == []
    assert pair.offered() == [1, 2, 3]
    assert pair.until_sent == 2


def test_what_is_withdrawn_leaves_no_trace(pair: Pair) -> None:
    pair.open(base=1)
    for _ in range(100):
        assert pair.tail.reserve(3 * PAGE, 0.0) is not None
        pair.tail.withdraw()
    pair.tail.withdraw()
    pair.log(2)
    pair.until_logged(2)
    assert pair.offered() == [1, 2]
    assert len(pair.tail._rings) == 1


def test_nothing_is_published_that_was_not_reserved(pair: Pair) -> None:
    pair.open(base=1)
    with pytest.raises(StoreFailed, match="lost while it was filled"):
        pair.tail.publish(2)
    view = pair.tail.reserve(10, 0.0)
    assert view is not None
    view.release()
    with pair.guard:
        pair.tail.begin(None)
    with pytest.raises(StoreFailed, match="lost while it was filled"):
        pair.tail.publish(2)


def test_a_full_ring_hurries_the_agent_and_waits(pair: Pair) -> None:
    """Though the batch is not whole."""
    pair.open(base=1)
    pair.log(2, nbytes=3 * PAGE)
    pair.tail.set_batch(100)
    for step in range(3, 40):
        pair.log(step, nbytes=3 * PAGE)
    assert len([m for m in pair.sent if isinstance(m, p.Flush)]) > 3
    with pair.guard:
        pair.logger.drain(on=True)
    pair.until_logged(39)
    assert pair.offered() == list(range(1, 40))


def test_waiting_ends_at_its_deadline_and_when_room_comes(pair: Pair, quick: Quick) -> None:
    pair.open(base=1)
    hold(pair, quick, 2, 4 * PAGE)
    size = rings(pair)[-1]
    for step in range(3, 3 + size // (4 * PAGE) - 1):
        pair.log(step, nbytes=4 * PAGE)
    assert pair.tail.reserve(4 * PAGE, 0.0) is None
    assert pair.tail.reserve(4 * PAGE, 0.05) is None
    had: list[Any] = []
    waiting = threading.Thread(target=lambda: had.append(pair.tail.reserve(4 * PAGE, DEADLINE_S)))
    waiting.start()
    quick.go.set()
    waiting.join(DEADLINE_S)
    assert had[0] is not None
    had.pop().release()
    pair.tail.withdraw()


def test_nobody_waits_where_there_is_no_agent_or_the_store_refuses(
    pair: Pair, quick: Quick
) -> None:
    pair.open(base=1)
    quick.at("any", 1, errno.ENOSPC, times=1 << 30)
    step = 2
    while (view := pair.tail.reserve(4 * PAGE, DEADLINE_S)) is not None:
        view.release()
        pair.tail.publish(step)
        step += 1
    assert pair.told_of(p.NotLogged)
    assert pair.tail.unsaved() == list(range(2, step))
    quick.watch()
    pair.until_logged(step - 1)
    assert pair.tail.unsaved() == []
    hold(pair, quick, step, 4 * PAGE)
    pair.alone = True
    while (view := pair.tail.reserve(4 * PAGE, DEADLINE_S)) is not None:
        view.release()
        pair.tail.publish(step := step + 1)
    assert step > 4


# ---------------------------------------------------------------- rings


def test_records_that_grow_get_a_larger_ring_and_the_old_one_goes(pair: Pair) -> None:
    pair.open(base=1, batch=2)
    step = 1
    for nbytes in (100, 5 * PAGE, 50 * PAGE, 100, 400 * PAGE):
        for _ in range(4):
            pair.log(step := step + 1, nbytes=nbytes)
    pair.until_logged(step)
    assert len(pair.tail._rings) == pair.rings == 1
    assert rings(pair)[0] >= 8 * 400 * PAGE
    assert memfds() == 2, "one at each end"
    assert pair.offered() == list(range(1, step + 1))


@pytest.mark.parametrize("pair", [40 * PAGE], indirect=True)
def test_all_rings_together_stay_within_the_budget(pair: Pair, quick: Quick) -> None:
    pair.open(base=1, batch=1)
    hold(pair, quick, 2, 10)
    assert sum(rings(pair)) <= 40 * PAGE
    most, step = 0, 2
    for nbytes in (6 * PAGE, 6 * PAGE, 9 * PAGE, 17 * PAGE, 19 * PAGE, 20 * PAGE, 100):
        quick.go.set()
        for _ in range(5):
            pair.log(step := step + 1, nbytes=nbytes)
            most = max(most, sum(rings(pair)))
    assert 0 < most <= 40 * PAGE
    pair.until_logged(step)
    assert pair.offered() == list(range(1, step + 1))
    with pytest.raises(StoreFailed, match="two records do not fit") as caught:
        pair.tail.reserve(41 * PAGE, 0.0)
    assert "buffer_bytes" in (caught.value.hint or "")
    pair.log(step + 1, nbytes=30 * PAGE)  # one fits the ring that is there


@pytest.mark.parametrize("pair", [40 * PAGE], indirect=True)
def test_a_larger_ring_waits_for_the_old_one_to_be_empty(pair: Pair, quick: Quick) -> None:
    pair.open(base=1, batch=1)
    hold(pair, quick, 2, 2 * PAGE)
    assert rings(pair) == [16 * PAGE]
    assert pair.tail.reserve(18 * PAGE, 0.0) is None
    quick.go.set()
    pair.log(3, nbytes=18 * PAGE)
    assert rings(pair) == [40 * PAGE - 40 % 18 * PAGE]


def test_a_session_begins_with_nothing_of_the_one_before(pair: Pair, quick: Quick) -> None:
    """The batch is told anew: its agent's logger is another."""
    pair.open(base=1)
    hold(pair, quick, 2)
    pair.tail.set_batch(5)
    pair.log(3)
    quick.go.set()
    pair.records.close()
    with pair.guard:
        pair.tail.begin(None)
        pair.begin_anew(quick)
    assert pair.tail.unsaved() == []
    assert pair.tail._rings == []
    pair.sent.clear()
    pair.open(base=3, batch=5)
    pair.log(4)
    kinds = [type(m) for m in pair.sent]
    assert kinds == [p.Batch, p.OpenLog, p.OpenRing, p.Record]
    assert pair.logger._batch == 5


# ---------------------------------------------------------------- another agent


def test_what_a_new_agent_is_told(pair: Pair, quick: Quick) -> None:
    pair.open(base=1)
    hold(pair, quick, 2)
    pair.tail.set_batch(3)
    pair.log(3)
    pair.tail.open_log(3, b"another")
    pair.log(4, nbytes=9 * PAGE)
    pair.tail.open_log(4, b"a third")
    with pair.guard:
        told = list(pair.tail.handed_over())
    kinds = [type(message).__name__ for message, _ in told]
    assert kinds == [
        *("OpenRing", "OpenRing", "Batch", "OpenLog", "Record", "Record", "OpenLog", "Record"),
        *("OpenLog", "Rebase", "Flush"),
    ]
    assert [m.layout for m, _ in told if isinstance(m, p.OpenLog)][1:] == [b"another", b"a third"]
    assert [m.step for m, _ in told if isinstance(m, p.Record)] == [2, 3, 4]
    assert all((fd is not None) == isinstance(message, p.OpenRing) for message, fd in told)


def test_the_trainer_waits_for_room_when_the_agent_dies(pair: Pair, quick: Quick) -> None:
    """The new one is told that somebody waits, though no batch is whole."""
    pair.open(base=1)
    hold(pair, quick, 2, 4 * PAGE)
    pair.deaf = True
    pair.tail.set_batch(1000)
    step = 2
    while (view := pair.tail.reserve(4 * PAGE, 0.0)) is not None:
        view.release()
        pair.tail.publish(step := step + 1)
    had: list[Any] = []
    waiting = threading.Thread(target=lambda: had.append(pair.tail.reserve(4 * PAGE, DEADLINE_S)))
    waiting.start()
    until(lambda: isinstance(pair.sent[-1], p.Flush), DEADLINE_S, "it to wait")
    quick.go.set()
    pair.kill()
    waiting.join(DEADLINE_S)
    assert had[0] is not None
    had.pop().release()
    pair.tail.withdraw()
    pair.until_logged(step)
