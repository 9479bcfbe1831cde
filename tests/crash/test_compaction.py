"""Full checkpoints that the agent makes from the log: agents die in the middle of them, trainers,
or both. What is restored is right, and nothing is lost that the log had."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.compaction_scenes import KEPT_FULLS
from crash.staged_scenes import sockets_of
from crash.test_deltas import (
    AGENT_KEEPS_BYTES,
    TRAINER_KEEPS_BYTES,
    LoggedLives,
    reference,  # noqa: F401 - a fixture
)
from crash.test_sigkill import at_an_instant
from crash.test_staged_faults import SLACK_BYTES
from everystep import stats
from everystep.store.measured import KEPT_STEPS
from everystep.store.run import Run
from everystep.store.verify import verify_run
from waiting import until
from zygote import Zygote

SEED = 20261130
KILLS = 100
CALLS = 24
"""With so many a state this small is written, and an old one removed."""

SOAK_STEPS = 10_000


@pytest.fixture
def lives(
    zygote: Zygote,
    quick_path: Path,
    reference: list[str],  # noqa: F811
) -> Iterator[LoggedLives]:
    made = LoggedLives(zygote, quick_path, reference, 0, "crash.compaction_scenes.train")
    made.unwanted = {"damage"}
    yield made
    made.board.close()


def test_a_hundred_agents_die_in_the_middle(zygote: Zygote, quick_path: Path) -> None:
    """Before any of the calls with which a full is written and an old one removed, one trainer
    going on through all of it."""
    run, log = quick_path / "run", quick_path / "log"
    child = zygote.start(
        "crash.compaction_scenes.agents_die", log, run=str(run), kills=KILLS, calls=CALLS, seed=SEED
    )
    assert child.wait(800) == 0, child.said()[-3000:]
    said = child.said()
    assert said.count("killed ") == said.count("has died: starting another") == KILLS
    deaths = (quick_path / "deaths").read_text().split()
    assert len(deaths) == KILLS
    assert {"sync", "rename", "sync_directory"} <= set(deaths)
    assert len(set(deaths)) >= 6, "before any kind of call"
    _, step, most_bytes, end = said.splitlines()[-1].split()
    opened = Run.open(run)
    found = verify_run(opened, opened.listing())
    assert [finding.what for finding in found if finding.level == "damage"] == []
    zygote.run(
        "crash.compaction_scenes.train", quick_path / "log2", run=str(run), total=int(step) + 11,
        board=str(quick_path / "board"), catch_up_every=1,
    )  # fmt: skip
    (restored,) = [
        line for line in (quick_path / "log2").read_text().splitlines() if "restored" in line
    ]
    assert restored.split()[-2:] == [step, end]
    listing = opened.listing()
    assert not listing.loose
    fulls = [entry for entry in listing.steps if entry.complete]
    assert len(fulls) <= KEPT_FULLS + 1 + 16, "those that the newest refer to included"
    left = sum(path.stat().st_size for path in run.rglob("*.safetensors"))
    assert left < int(most_bytes), "what the dead have left is gone"


def test_the_trainer_is_killed_at_random_instants(lives: LoggedLives) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    for number in range(6):
        child = lives.begin(full_every=rng.choice([1, 3, 8]), batch=1 + number % 3)
        lives.reach(rng.choice([0, 3, 12, 30]))
        at_an_instant(rng.uniform(0, 0.02))
        assert child.kill()
        assert child.wait() == -signal.SIGKILL
        lives.check()
    assert len(set(lives.restored)) > 3
    last = lives.floor + 8
    lives.begin(last)
    rows = lives.finish(last)
    assert all(row[2] for row in rows), "every step is durable"


def test_trainer_and_agent_are_killed(lives: LoggedLives) -> None:
    """What the trainer had been told is durable is there."""
    rng = random.Random(SEED)
    for _ in range(4):
        child = lives.begin(full_every=3, batch=2, catch_up_every=6)
        lives.reach(rng.randrange(8, 30))
        at_an_instant(rng.uniform(0, 0.02))
        assert child.kill()
        os.kill(lives.board["go"], signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        lives.check("durable")
    assert lives.floor > 20
    last = lives.newest(Run.open(lives.run)) + 3
    lives.begin(last)
    lives.finish(last)


@pytest.mark.slow
def test_ten_thousand_steps_leave_nothing_behind(zygote: Zygote, quick_path: Path) -> None:
    run = quick_path / "run"
    child = zygote.start(
        "crash.compaction_scenes.many_steps", quick_path / "log", run=str(run), steps=SOAK_STEPS
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
    for at in (2, 3, 5, 6, 9):  # descriptors, threads, segments
        assert min(row[at] for row in rows[-8:]) <= max(row[at] for row in rows[1:8])
    for at in (7, 8):  # bytes of fulls and of the log
        late, early = [row[at] for row in rows[-8:]], max(row[at] for row in rows[2:8])
        assert min(late) <= 1.5 * early and max(late) <= 4 * early, "the agent may be behind"
    assert left <= rows[0][2]
    until(lambda: sockets_of(Run.open(run).id) == [], 60, "the agent to end")
    kept_fulls = [entry for entry in Run.open(run).listing().steps if entry.complete]
    assert len(kept_fulls) <= 3 + 16, "retention, and fulls that the newest ones refer to"
    assert kept_fulls[-1].ref.step >= SOAK_STEPS - 100
