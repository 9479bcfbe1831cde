"""Steps on their way to the log: trainers, agents, both, or one of two ranks die, stop or find the
disk full with batches in flight. What is restored is right, and no older than it must be."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.staged_scenes import agents_of, sockets_of
from crash.test_sigkill import at_an_instant
from crash.test_staged import AHEAD, Lives, kill_agents, nothing_is_left
from crash.test_staged_faults import (
    _ALL,
    _NOTHING,
    SLACK_BYTES,
    agent_may_write,
)
from everystep import stats
from everystep.store.chains import plan_chains
from everystep.store.measured import KEPT_STEPS
from everystep.store.run import Run
from waiting import until
from zygote import Zygote

SEED = 20261130
KILLS = 10
TOTAL = 400
BATCH = 4
SOAK_STEPS = 2000
TRAINER_KEEPS_BYTES, AGENT_KEEPS_BYTES = 1_000, 5_000
"""Per step, for statistics of the newest steps."""


@pytest.fixture(scope="module")
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    log = tmp_path_factory.mktemp("reference") / "log"
    return zygote.run("crash.logged_scenes.reference", log, total=TOTAL).split()


class LoggedLives(Lives):
    """Lives of which every step is compared, not only the one that was restored."""

    def check(self, told: str = "staged") -> None:
        super().check(told)
        assert self.child is not None
        for line in self.child.said().splitlines():
            words = line.split()
            if len(words) == 3 and words[0] == "at" and len(words[2]) == 64:
                assert words[2] == self._reference[int(words[1])], f"{line}: {self.child.said()}"


def lives_at(zygote: Zygote, where: Path, reference: list[str], rank: int = 0) -> Lives:
    where.mkdir(exist_ok=True)
    made = LoggedLives(zygote, where, reference, rank, "crash.logged_scenes.train")
    made.unwanted = {"damage"}  # a segment that nobody has sealed is worth a note
    return made


@pytest.fixture
def lives(zygote: Zygote, quick_path: Path, reference: list[str]) -> Iterator[Lives]:
    made = lives_at(zygote, quick_path, reference)
    yield made
    made.board.close()


def test_the_trainer_is_killed_at_random_instants(lives: Lives) -> None:
    """No step whose delta was handed over is lost, though its batch was not whole."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    for number in range(KILLS):
        child = lives.begin(policy="block" if number % 2 else "skip", batch=rng.choice([1, 4, 50]))
        lives.reach(rng.randrange(14))
        at_an_instant(rng.uniform(0, 0.02))
        assert child.kill()
        assert child.wait() == -signal.SIGKILL
        lives.check()
    assert len(set(lives.restored)) > KILLS // 2
    assert any(step % 12 not in (0, 1) for step in lives.restored), "between full checkpoints"
    last = lives.floor + 8  # some were under way
    lives.begin(last)
    lives.finish(last)


PLACES = [
    *((f"Tail.{verb}", n, after) for verb in ("reserve", "publish") for n in (1, 6)
      for after in (False, True)),
    *(("Tail.open_log", n, True) for n in (1, 2)),
    ("Tail.heard", 1, False),
    ("Tail.heard", 2, True),
]  # fmt: skip
"""Before memory is there, while it is filled, between its end and the message, …"""


def test_the_trainer_is_killed_inside(lives: Lives) -> None:
    """Placed, not awaited."""
    for place in PLACES:
        child = lives.begin(die=place)
        assert child.wait() == -signal.SIGKILL, f"{place}: {child.said()}"
        lives.check()
    assert len(set(lives.restored)) > len(PLACES) // 3
    last = lives.floor + 8
    lives.begin(last)
    lives.finish(last)


def test_the_agent_is_killed(lives: Lives) -> None:
    """Training goes on with another one, and every step becomes durable all the same."""
    rng = random.Random(SEED)
    child = lives.begin(total=118, limit=AHEAD)
    for upto in (3, 40, 80):
        lives.board["limit"] = upto + AHEAD
        until(lambda: lives.board["returned"] >= upto or child.status(), 60, "steps")  # noqa: B023
        until(lambda: agents_of(lives.run), 60, "the next agent")
        at_an_instant(rng.uniform(0, 0.02))
        assert kill_agents(lives.run) == 1
    lives.board["limit"] = 0
    rows = lives.finish(118)
    said = child.said()  # one that is killed while it starts has not died yet
    assert said.count("has died: starting another") + said.count("did not start") == 3
    assert [row for row in rows if not row[2]] == []
    assert "not as a delta" not in said


def test_trainer_and_agent_are_killed(lives: Lives) -> None:
    """What the trainer had been told is durable is there: a batch is lost, and no more."""
    rng = random.Random(SEED)
    for _ in range(KILLS // 2):
        child = lives.begin(batch=BATCH)
        lives.reach(rng.randrange(1, 16))
        at_an_instant(rng.uniform(0, 0.02))
        assert child.kill()
        assert kill_agents(lives.run) == 1
        assert child.wait() == -signal.SIGKILL
        lives.check("durable")
    last = lives.newest(Run.open(lives.run)) + 3  # may be more than the trainer had been told
    lives.begin(last)
    lives.finish(last)


def test_nobody_comes_back(lives: Lives) -> None:
    """The last batch, which was not whole, is durable when the agent has drained."""
    child = lives.begin(batch=500)
    lives.reach(9)
    assert child.kill()
    assert child.wait() == -signal.SIGKILL
    lives.check()
    until(lambda: lives.newest(Run.open(lives.run)) >= lives.floor, 60, "the agent to drain")
    assert lives.floor >= 7  # two steps may have been on their way
    for agent in agents_of(lives.run):
        os.kill(agent, signal.SIGTERM)
    nothing_is_left(lives.run)
    last = lives.floor + 8
    lives.begin(last)
    lives.finish(last)


def test_an_agent_that_stops_answering(
    zygote: Zygote, quick_path: Path, reference: list[str]
) -> None:
    """Training goes on while there is memory, whatever the policy, and nothing is lost, or is said
    to be. There is memory for two batches."""
    both: dict[str, Lives] = {}
    stopped: dict[str, tuple[int, int]] = {}
    for policy in ("skip", "block"):
        both[policy] = lives_at(zygote, quick_path / policy, reference)
        both[policy].begin(TOTAL, policy=policy, full_every=10_000, batch=TOTAL)
    for policy, lives in both.items():
        lives.reach(5)
        (agent,) = agents_of(lives.run)
        os.kill(agent, signal.SIGSTOP)
        stopped[policy] = agent, lives.board["returned"]
    for policy, lives in both.items():
        agent, before = stopped[policy]
        child = lives.child
        assert child is not None
        until(lambda: "does not answer" in child.said(), 60, "a word about it")  # noqa: B023
        until(lambda: lives.board["returned"] - before > 20, 60, "more steps")  # noqa: B023
        os.kill(agent, signal.SIGCONT)
    for policy, lives in both.items():
        rows = lives.finish(TOTAL)
        lost = [row for row in rows if not row[2]]
        assert len(lost) == 0 if policy == "block" else all(row[3] for row in lost), lost
        assert len(lost) < TOTAL / 4, "what may be given up where training stands still itself"
        lives.board.close()


def test_a_full_disk_stops_nothing_and_is_caught_up_with(lives: Lives) -> None:
    child = lives.begin(total=300)
    lives.reach(20)
    until(lambda: lives.board["durable"] >= 10, 60, "durable steps")
    agent_may_write(lives.run, _NOTHING)
    at = lives.board["returned"]
    until(lambda: lives.board["returned"] >= min(at + 40, 300), 60, "training to go on")
    until(lambda: "is not stored" in child.said() or child.status(), 60, "a word about it")
    assert "file too large" in child.said()
    if agents_of(lives.run):
        agent_may_write(lives.run, _ALL)
    rows = lives.finish(300)
    assert rows[-1][2], "the newest step is durable"
    assert "every step is stored in full instead" not in child.said()


def test_killed_while_the_disk_is_full(lives: Lives) -> None:
    """The agent goes on trying; when there is room again, all that was handed over is there."""
    child = lives.begin(TOTAL, batch=3)
    lives.reach(10)
    until(lambda: lives.board["durable"] >= 5, 60, "durable steps")
    agent = agent_may_write(lives.run, _NOTHING)
    at = lives.board["returned"]
    until(lambda: lives.board["staged"] >= at + 8, 60, "training to go on")
    assert child.kill()
    assert child.wait() == -signal.SIGKILL
    lives.check()
    at_an_instant(0.5)
    assert agents_of(lives.run) == [agent]
    agent_may_write(lives.run, _ALL)
    until(lambda: lives.newest(Run.open(lives.run)) >= lives.floor, 60, "the agent to drain")
    last = lives.floor + 8
    lives.begin(last)
    lives.finish(last)


def test_one_of_two_ranks_is_killed(zygote: Zygote, quick_path: Path) -> None:
    """And at last the log of one is gone: no step is offered that only the other has."""
    group: dict[str, object] = {"world_size": 2, "meet": str(quick_path / "meet")}
    logs = [quick_path / f"reference{rank}" for rank in range(2)]
    start = "crash.logged_scenes.reference"
    both = [zygote.start(start, log, total=100, rank=r, **group) for r, log in enumerate(logs)]
    assert [child.wait() for child in both] == [0, 0], both[0].said()
    ranks = [lives_at(zygote, quick_path, child.said().split(), r) for r, child in enumerate(both)]
    rng = random.Random(SEED)
    for life in range(4):
        group["meet"] = f"{quick_path / 'meet'}{life}"
        for lives in ranks:
            lives.begin(rank=lives.rank, full_every=1000, keep_all=True, **group)
        for lives in ranks:
            lives.reach(rng.randrange(3, 7))
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
    for agent in agents_of(ranks[0].run):
        os.kill(agent, signal.SIGTERM)
    nothing_is_left(ranks[0].run)
    newest = max((quick_path / "run").rglob("*r00001of00002*.log"), key=lambda path: path.name)
    session = int(newest.name[1:7])
    before = plan(quick_path / "run")
    newest.unlink()
    after = plan(quick_path / "run")
    assert before[-1] > after[-1] == int(newest.name.split("-")[2].split(".")[0]), session
    end = after[-1] + 3
    group["meet"] = str(quick_path / "last")
    for lives in ranks:
        lives.floor = after[-1]
        lives.begin(end, rank=lives.rank, keep_all=True, **group)
    for lives in ranks:
        assert lives.child is not None
        assert lives.child.wait() == 0, lives.child.said()
    for lives in ranks:
        lives.finish(end)
        lives.board.close()


def plan(path: Path) -> list[int]:
    run = Run.open(path)
    listing = run.listing()
    return [ref.step for ref in plan_chains(listing, run.segments(listing), "main").refs]


@pytest.mark.slow
def test_two_thousand_steps_leave_nothing_behind(zygote: Zygote, quick_path: Path) -> None:
    run = quick_path / "run"
    child = zygote.start(
        "crash.logged_scenes.many_steps", quick_path / "log", run=str(run), steps=SOAK_STEPS
    )
    assert child.wait(800) == 0, child.said()
    said = [line for line in child.said().splitlines() if line[:1] == "[" or line.isdigit()]
    *rows, left = map(json.loads, said)
    print(*rows, sep="\n")
    first, *_, last = [row for row in rows if row[0] >= 300]
    for at, most in ((1, TRAINER_KEEPS_BYTES), (4, AGENT_KEEPS_BYTES)):
        grown = last[at] - first[at]
        kept = min(last[0] - first[0], KEPT_STEPS if at == 4 else stats.KEPT_STEPS)
        assert grown < most * kept + SLACK_BYTES, f"{grown:,} bytes"
    for at in (2, 3, 5, 6):  # descriptors and threads
        assert min(row[at] for row in rows[-8:]) <= max(row[at] for row in rows[1:8])
    for at in (7, 8):  # bytes and files of the log
        late, early = [row[at] for row in rows[-8:]], max(row[at] for row in rows[2:8])
        assert min(late) <= 1.5 * early and max(late) <= 4 * early, "the agent may be behind"
    assert left <= rows[0][2]
    assert agents_of(run) == []
    assert sockets_of(Run.open(run).id) == []
    assert min(plan(run)) >= SOAK_STEPS - 3 * 50 - 8
