"""Steps on their way through an agent: trainers, agents, both, or one of two ranks die or stop at
any instant. What is restored is right, and no older than what the trainer had been told."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crash.staged_scenes import agents_of, sockets_of
from crash.test_sigkill import at_an_instant
from crash.trainer import Board
from everystep.store.chains import plan_chains
from everystep.store.run import Run
from everystep.store.verify import verify_run
from waiting import until
from zygote import Child, Zygote

SEED = 20261129
KILLS = 16
TOTAL = 250
AHEAD, AT_FIRST = 20, 60
"""Steps that a life may have which the test has not waited for; and before it has waited."""


class Lives:
    """One rank's lives, one after the other, each checked against the reference."""

    def __init__(
        self,
        zygote: Zygote,
        where: Path,
        reference: list[str],
        rank: int = 0,
        train: str = "crash.staged_scenes.train",
    ) -> None:
        self._train = train
        self._zygote, self._where, self._reference, self.rank = zygote, where, reference, rank
        self.run = where / "run"
        self.board = Board(where / f"board{rank}")
        self.floor = 0
        """The step that must not be lost."""
        self.restored: list[int] = []
        self.unwanted = {"damage", "note"}
        """What `verify` must not find at a good end."""
        self._births = 0
        self.child: Child | None = None

    def begin(self, total: int | None = None, limit: int = 0, **options: object) -> Child:
        """A life of so many steps; None: it does not end by itself.

        Args:
            limit: so many steps until the board says otherwise; 0: any.
        """
        self.board.clear()
        ends = total is not None or "die" in options
        self.board["limit"] = limit if ends else AT_FIRST
        self._births += 1
        self.child = self._zygote.start(
            self._train,
            self._where / f"log{self.rank}.{self._births}",
            run=str(self.run),
            total=len(self._reference) - 1 if total is None else total,
            board=str(self._where / f"board{self.rank}"),
            **options,
        )
        return self.child

    def reach(self, more: int) -> None:
        """Wait until a state is restored and so many steps are done."""
        assert self.child is not None
        child = self.child
        if self.board["limit"]:
            self.board["limit"] = more + AHEAD
        until(lambda: self.board["restored"] >= 0 or child.status(), 60, "a restored state")
        target = self.board["restored"] + more
        done = lambda: self.board["returned"] >= target or more == 0  # noqa: E731
        until(lambda: done() or child.status(), 60, "steps")
        assert child.status() is None, child.said()

    def check(self, told: str = "staged") -> None:
        """After a death: what was restored in that life is right; note what must be there now."""
        assert self.child is not None
        said = self.child.said().split()
        if "restored" in said:
            at = said.index("restored")
            step, digest = int(said[at + 1]), said[at + 2]
            assert digest == self._reference[step], f"step {step}: {self.child.said()}"
            assert step >= self.floor, f"{step} < {self.floor}: {self.child.said()}"
            self.restored.append(step)
            self.floor = max(step if told == "staged" else self.floor, self.board[told])
        else:
            assert self.board["restored"] == -1

    def finish(self, total: int) -> list[list[Any]]:
        """A life that ends by itself, and leaves a whole run; returns its statistics."""
        assert self.child is not None
        assert self.child.wait() == 0, self.child.said()
        self.check()
        said = self.child.said()
        assert said.split()[-3:] == ["end", str(total), self._reference[total]]
        run = Run.open(self.run)
        listing = run.listing()
        assert [f.what for f in verify_run(run, listing) if f.level in self.unwanted] == []
        nothing_is_left(self.run)
        rows: list[list[Any]] = json.loads(said.split("stats ")[1].splitlines()[0])
        assert self.newest(run) == max(row[0] for row in rows if row[1])
        return rows

    def newest(self, run: Run) -> int:
        """The newest step that can be had; 0: none yet."""
        listing = run.listing()
        chains = plan_chains(listing, run.segments(listing), listing.current_timeline())
        return chains.refs[-1].step if chains.refs else 0


def nothing_is_left(run: Path) -> None:
    """No process, and no name in the abstract namespace."""
    until(lambda: not agents_of(run), 60, "agents to end")
    assert sockets_of(Run.open(run).id) == []


@pytest.fixture(scope="module")
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    log = tmp_path_factory.mktemp("reference") / "log"
    return zygote.run("crash.staged_scenes.reference", log, total=TOTAL).split()


@pytest.fixture
def lives(zygote: Zygote, quick_path: Path, reference: list[str]) -> Iterator[Lives]:
    made = Lives(zygote, quick_path, reference)
    yield made
    made.board.close()


def kill_agents(run: Path) -> int:
    """How many were there."""
    found = agents_of(run)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return len(found)


def test_the_trainer_is_killed_at_random_instants(lives: Lives) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    for number in range(KILLS):
        child = lives.begin(policy="block" if number % 2 else "skip")
        lives.reach(rng.randrange(6))
        at_an_instant(rng.uniform(0, 0.03))
        assert child.kill()
        assert child.wait() == -signal.SIGKILL
        lives.check()
    assert len(set(lives.restored)) > KILLS // 2
    last = lives.floor + 3
    lives.begin(last)
    lives.finish(last)


PLACES = [
    *(("Capture.before_update", n, after) for n in (1, 2, 4) for after in (False, True)),
    *(("Capture._run", n, after) for n in (1, 3, 14, 40) for after in (False, True)),
    *(("Capture._finish", n, False) for n in (2, 5)),
    *(("Agent.seal", n, after) for n in (1, 2, 3) for after in (False, True)),
    *((f"Agent.{verb}", 1, after) for verb in ("begin", "describe") for after in (False, True)),
    *(("Agent.acquire", n, after) for n in (1, 3) for after in (False, True)),
    ("Agent.settle", 1, False),
]
"""In the optimizer's pre-step hook, between two tasks of a copy, before and after a seal, …"""


def test_the_trainer_is_killed_inside(lives: Lives) -> None:
    """Placed, not awaited."""
    for place in PLACES:
        child = lives.begin(die=place)
        assert child.wait() == -signal.SIGKILL, f"{place}: {child.said()}"
        lives.check()
    assert len(set(lives.restored)) > len(PLACES) // 3
    last = lives.floor + 2
    lives.begin(last)
    lives.finish(last)


def test_the_agent_is_killed(lives: Lives) -> None:
    """Training goes on with another one, and every step becomes durable all the same."""
    rng = random.Random(SEED)
    child = lives.begin(total=60, limit=AHEAD)
    for upto in (2, 15, 30):
        lives.board["limit"] = upto + AHEAD
        until(lambda: lives.board["returned"] >= upto or child.status(), 60, "steps")  # noqa: B023
        until(lambda: agents_of(lives.run), 60, "the next agent")
        at_an_instant(rng.uniform(0, 0.02))
        assert kill_agents(lives.run) == 1
    lives.board["limit"] = 0
    lives.unwanted = {"damage"}  # what the dead left stays till the next session
    rows = lives.finish(60)
    said = child.said()  # one that is killed while it starts has not died yet
    assert said.count("has died: starting another") + said.count("did not start") == 3
    assert [row for row in rows if not (row[1] and row[2]) or row[3]] == []


def test_trainer_and_agent_are_killed(lives: Lives) -> None:
    """What the trainer had been told is durable is there."""
    rng = random.Random(SEED)
    for _ in range(KILLS // 2):
        child = lives.begin()
        lives.reach(rng.randrange(1, 6))
        at_an_instant(rng.uniform(0, 0.02))
        assert child.kill()
        assert kill_agents(lives.run) == 1
        assert child.wait() == -signal.SIGKILL
        lives.check("durable")
    last = lives.newest(Run.open(lives.run)) + 3  # more may be durable than the trainer had heard
    lives.begin(last)
    lives.finish(last)


def test_nobody_comes_back(lives: Lives) -> None:
    """What was staged is durable when the agent has lingered, and nothing is left of it."""
    child = lives.begin(linger_s=0.5)
    lives.reach(3)
    assert child.kill()
    assert child.wait() == -signal.SIGKILL
    lives.check()
    nothing_is_left(lives.run)
    assert Run.open(lives.run).listing().line("main")[-1].ref.step >= lives.floor > 0
    lives.begin(lives.floor + 3)
    lives.finish(lives.floor + 3)


def test_an_agent_that_stops_answering(
    zygote: Zygote, quick_path: Path, reference: list[str]
) -> None:
    """Some seconds: with `skip` training goes on, with `block` it waits and loses nothing."""
    both: dict[str, Lives] = {}
    stopped: dict[str, tuple[int, int]] = {}
    for policy in ("skip", "block"):
        (quick_path / policy).mkdir()
        both[policy] = Lives(zygote, quick_path / policy, reference)
        both[policy].begin(TOTAL, policy=policy)
    for policy, lives in both.items():
        lives.reach(5)
        (agent,) = agents_of(lives.run)
        os.kill(agent, signal.SIGSTOP)
        stopped[policy] = agent, lives.board["returned"]
    for policy, lives in both.items():
        child, before = lives.child, stopped[policy][1]
        assert child is not None
        until(lambda: "does not answer" in child.said(), 60, "a word about it")  # noqa: B023
        if policy == "skip":
            until(lambda: lives.board["returned"] - before > 20, 60, "more steps")  # noqa: B023
    at_an_instant(2)
    for policy, lives in both.items():
        agent, before = stopped[policy]
        assert policy == "skip" or lives.board["returned"] - before <= 4
        os.kill(agent, signal.SIGCONT)
    for policy, lives in both.items():
        assert lives.child is not None
        rows = lives.finish(TOTAL)
        if policy == "block":
            assert [row for row in rows if not row[2]] == []
            assert max(row[4] for row in rows) > 1
        else:
            assert sum(row[4] > 1 for row in rows) <= 1, "the whole machine may stand still"
        assert max(row[0] for row in rows if row[2]) == max(row[0] for row in rows if row[1])
        lives.board.close()


def test_one_of_two_ranks_is_killed(zygote: Zygote, quick_path: Path) -> None:
    group: dict[str, object] = {"world_size": 2, "meet": str(quick_path / "meet")}
    logs = [quick_path / f"reference{rank}" for rank in range(2)]
    start = "crash.staged_scenes.reference"
    both = [zygote.start(start, log, total=100, rank=r, **group) for r, log in enumerate(logs)]
    assert [child.wait() for child in both] == [0, 0], both[0].said()
    ranks = [Lives(zygote, quick_path, child.said().split(), r) for r, child in enumerate(both)]
    rng = random.Random(SEED)
    for life in range(5):
        group["meet"] = f"{quick_path / 'meet'}{life}"
        end = ranks[0].floor + 3 if life == 4 else None
        for lives in ranks:
            lives.begin(end, rank=lives.rank, **group)
        if life == 4:
            break
        for lives in ranks:
            lives.reach(rng.randrange(1, 5))
        at_an_instant(rng.uniform(0, 0.03))
        victim = rng.randrange(2)
        killed, other = ranks[victim].child, ranks[1 - victim].child
        assert killed is not None
        assert other is not None
        assert killed.kill()
        assert killed.wait() == -signal.SIGKILL
        assert other.wait() not in (0, -signal.SIGKILL), "it ends by itself when its peer is gone"
        for lives in ranks:
            lives.check()
        assert len({lives.restored[-1] for lives in ranks}) == 1
        staged = min(lives.floor for lives in ranks)
        for lives in ranks:
            lives.floor = staged
    assert end is not None
    for lives in ranks:  # before one is looked at: a step is whole when both have stored it
        assert lives.child is not None
        assert lives.child.wait() == 0, lives.child.said()
    for lives in ranks:
        # a rank that has looked for the last time before the other's newest step was durable leaves
        # its part of an old one to the next start
        lives.unwanted = {"damage"}
        lives.finish(end)
        lives.board.close()
    assert len(set(ranks[0].restored)) >= 3


def test_a_signal_goes_on_when_the_step_is_durable(zygote: Zygote, quick_path: Path) -> None:
    board = Board(quick_path / "board")
    board.clear()
    child = zygote.start(
        "crash.trainer.hold_signals", quick_path / "log", run=str(quick_path / "run"),
        board=str(quick_path / "board"), before="note", blocking=False,
    )  # fmt: skip
    until(lambda: board["place"] == Board.TRAINING or child.status(), 60, "the long step")
    assert child.kill(signal.SIGTERM)
    until(lambda: "it goes on once this step is durable" in child.said(), 60, "it to be held")
    board["go"] = 1
    assert child.wait() == 0, child.said()
    board.close()
    assert f"handled {int(signal.SIGTERM)} 3" in child.said()
    nothing_is_left(quick_path / "run")
