"""The agents of several ranks when training stops: they make the same step durable, if they can
hear of each other, and none waits for ever if not."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.replica_scenes import (
    Agents,
    ByteMirror,
    Mirrored,
    agents_in_threads,
    byte_mirrors,
    replica_of,
)
from agent.scenes import DEADLINE_S, run_at, stored_steps
from byte_runs import NoSync
from everystep.agent import common
from everystep.agent import protocol as p
from everystep.store.durable import SystemCalls
from everystep.store.newest import FOLDER, Newest
from faults import Faults
from waiting import until


class Pair:
    """Two ranks of one run, each with an agent in a thread."""

    def __init__(self, path: Path, agents: Agents) -> None:
        self.path, self.agents, self.run = path, agents, run_at(path)
        facts = {"world_size": 2, "linger_s": 60.0}
        self.ranks = [Mirrored(path, self.run, rank, **facts) for rank in range(2)]
        self.alive = {0, 1}

    def train(self, upto: tuple[int, int], safe: int) -> None:
        """Both hand over records, one more than the other; these are folded up to a step."""
        for trainer, last in zip(self.ranks, upto, strict=True):
            trainer.stage(1)
            trainer.until_told(p.Mirrored, 1)
            trainer.open(1)
            for step in range(2, last + 1):
                trainer.record(step, safe=min(step, safe))
            if safe > 1:
                trainer.until_folded(min(last, safe))

    def die(self, rank: int) -> None:
        self.alive.discard(rank)
        self.ranks[rank].die()

    def settle(self, rank: int) -> threading.Thread:
        thread = threading.Thread(target=self.ranks[rank].agent.settle)
        thread.start()
        return thread

    def stored(self, rank: int) -> list[int]:
        """The steps of which there is this rank's part."""
        found = [
            entry.ref.step
            for entry in self.run.listing().steps
            if any(part.rank == rank for part in entry.parts)
        ]
        return sorted(found)

    def told(self) -> list[str]:
        return sorted(path.name for path in (self.path / FOLDER).glob("*.json"))

    def close(self) -> None:
        threads = [threading.Thread(target=self.ranks[r].agent.close) for r in sorted(self.alive)]
        for thread in threads:  # each waits for the other
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE_S)


Begin = Callable[..., Pair]


@pytest.fixture
def mirror() -> Iterator[type[ByteMirror]]:
    with byte_mirrors() as mirror:
        yield mirror


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda wait_s: monkeypatch.setattr(common, "PATIENCE_S", wait_s)


@pytest.fixture
def begin(
    run_dir: Path, mirror: type[ByteMirror], patience: Callable[[float], None]
) -> Iterator[Begin]:
    with contextlib.ExitStack() as stack:

        def begin(calls: SystemCalls | None = None, patience_s: float = 1e9) -> Pair:
            patience(patience_s)
            pair = Pair(run_dir, stack.enter_context(agents_in_threads(calls)))
            stack.callback(pair.close)
            stack.callback(patience, 0.5)
            return pair

        yield begin


def test_none_goes_further_than_all_can(begin: Begin, mirror: type[ByteMirror]) -> None:
    """While training goes on, a step is folded when it is known that every rank has its record."""
    pair = begin()
    pair.train((9, 9), safe=5)
    for number in range(2):
        agent = replica_of(pair.agents, number)
        assert agent._step == 5
        assert len(agent._waiting) == 4


def test_agents_whose_trainers_die_agree(begin: Begin) -> None:
    """On the newest step that both can reach; neither waits longer than it must."""
    pair = begin()
    pair.train((9, 7), safe=5)
    pair.die(0)
    pair.die(1)
    for rank in range(2):
        until(lambda: pair.stored(rank)[-1:] == [7], DEADLINE_S, "step 7")  # noqa: B023
    assert stored_steps(pair.run) == [1, 7]
    assert pair.stored(0) == pair.stored(1) == [1, 7]


def test_one_that_has_agreed_waits_until_the_other_has(begin: Begin) -> None:
    """What it has told stays until it was heard, however quick it is, and no longer."""
    pair = begin()
    pair.train((6, 6), safe=4)
    for first, second in ((0, 1), (1, 0)):
        early = pair.settle(first)
        until(lambda: pair.told(), DEADLINE_S, "it to tell")
        late = pair.settle(second)
        early.join(DEADLINE_S)
        late.join(DEADLINE_S)
        assert not early.is_alive()
        assert not late.is_alive()
        last = pair.stored(first)[-1]
        assert pair.stored(second)[-1] == last
        assert pair.told() == []
        for trainer in pair.ranks:  # training goes on
            trainer.record(last + 1, last + 2, safe=last)
    assert pair.stored(0) == [1, 6, 8]


def test_one_trainer_dies_and_the_other_ends(begin: Begin) -> None:
    pair = begin()
    pair.train((5, 6), safe=3)
    pair.die(0)
    ends = pair.settle(1)
    ends.join(DEADLINE_S)
    assert not ends.is_alive()
    assert pair.stored(0) == pair.stored(1) == [1, 5]


def test_a_rank_that_never_tells(begin: Begin) -> None:
    """The other one makes durable what every rank has been known to have."""
    pair = begin(patience_s=0.3)
    pair.train((9, 9), safe=5)
    pair.die(0)
    until(lambda: pair.stored(0)[-1:] == [5], DEADLINE_S, "its patience to end")
    agent = replica_of(pair.agents, 0)
    until(lambda: agent.idle, DEADLINE_S, "it to be done")
    assert [ref.step for ref in agent.unsaved()] == [6, 7, 8, 9], "in memory as long as it lingers"
    pair.die(1)  # late, but the first one is still there
    for rank in range(2):
        until(lambda: pair.stored(rank)[-1:] == [9], DEADLINE_S, "step 9")  # noqa: B023


def test_patience_ends_while_both_trainers_live(begin: Begin) -> None:
    """As where a signal has reached one of them: training goes on, and nothing is lost."""
    pair = begin(patience_s=0.3)
    pair.train((6, 6), safe=4)
    alone = pair.settle(0)
    alone.join(DEADLINE_S)
    assert not alone.is_alive()
    assert pair.stored(0) == [1, 4]
    assert pair.told() == []
    for trainer in pair.ranks:
        trainer.record(7, 8, safe=6)
    threads = [pair.settle(rank) for rank in range(2)]
    for thread in threads:
        thread.join(DEADLINE_S)
    assert pair.stored(0)[-1] == pair.stored(1)[-1] == 8


def test_a_rank_that_stores_its_steps_itself(begin: Begin) -> None:
    """Nobody waits for it, nor gives up a step for its sake."""
    pair = begin()
    pair.train((9, 5), safe=5)
    Newest(pair.run.backend, 1, 1, 2).stand_back()
    ends = pair.settle(0)
    ends.join(DEADLINE_S)
    assert not ends.is_alive()
    assert pair.stored(0) == [1, 9]


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_without_any_state(ends: bool, begin: Begin) -> None:
    """It says so, and nobody waits for it; not even where it is gone before the other has asked."""
    pair = begin()
    if ends:
        pair.alive.discard(1)
        pair.ranks[1].agent.close()
        assert len(pair.told()) == 1
    trainer = pair.ranks[0]
    trainer.stage(1)
    trainer.until_told(p.Mirrored, 1)
    trainer.open(1)
    trainer.record(2, 3, safe=2)
    trainer.until_folded(2)
    if not ends:
        pair.die(1)
    pair.die(0)
    until(lambda: pair.stored(0)[-1:] == [2], DEADLINE_S, "step 2")


class Unwritable(NoSync):
    """A store that takes everything but what agents tell each other."""

    def __init__(self) -> None:
        self.refused = 0

    def create(self, path: Path, flags: int) -> int:
        if FOLDER in path.parts:
            self.refused += 1
            raise OSError(errno.EROFS, "read-only")
        return super().create(path, flags)


def test_what_is_told_cannot_be_written(begin: Begin) -> None:
    calls = Unwritable()
    pair = begin(calls, patience_s=0.3)
    pair.train((7, 8), safe=5)
    pair.die(0)
    pair.die(1)
    for rank in range(2):
        until(lambda: pair.stored(rank)[-1:] == [5], DEADLINE_S, "step 5")  # noqa: B023
    assert calls.refused
    assert stored_steps(pair.run) == [1, 5]


def test_a_store_that_fails_at_that_moment(begin: Begin) -> None:
    """It is asked again until it takes what there is."""
    faults = Faults()
    pair = begin(faults)
    pair.train((7, 8), safe=5)
    faults.at("create", 1, errno.EIO, times=6)
    pair.die(0)
    pair.die(1)
    for rank in range(2):
        until(lambda: pair.stored(rank)[-1:] == [7], DEADLINE_S, "step 7")  # noqa: B023
    assert faults.fired


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"newest": "7"}', b"\xff" * 5000])
def test_what_others_tell_is_not_trusted(run_dir: Path, data: bytes) -> None:
    run = run_at(run_dir)
    mine, other = (Newest(run.backend, 1, rank, 2) for rank in range(2))
    mine.tell(5)
    other.tell(4)
    name = run_dir / FOLDER / "s000001-r00001of00002.json"
    name.write_bytes(data)
    assert mine.common() is None
    other.withdraw()
    other.tell(4)
    assert mine.common() == 4


def test_nothing_is_heard_of_another_session(run_dir: Path) -> None:
    run = run_at(run_dir)
    for session in (1, 2):
        facts: list[Any] = [Newest(run.backend, session, rank, 2) for rank in range(2)]
        for rank, one in enumerate(facts):
            one.forget_earlier()
            one.tell(10 * session + rank)
        assert [one.common() for one in facts] == [10 * session] * 2
        assert not facts[0].all_agreed
        assert facts[0].common() == 10 * session
        assert facts[0].all_agreed
    names = sorted(path.name for path in (run_dir / FOLDER).iterdir())
    assert names == ["s000002-r00000of00002.json", "s000002-r00001of00002.json"]


def test_who_has_been_heard_and_is_gone_has_agreed(run_dir: Path) -> None:
    run = run_at(run_dir)
    mine, other = (Newest(run.backend, 1, rank, 2) for rank in range(2))
    other.tell(4)
    mine.tell(5)
    assert mine.common() == 4
    assert not mine.all_agreed
    assert other.common() == 4
    other.withdraw()
    assert mine.common() == 4
    assert mine.all_agreed
