"""A store that takes nothing, beneath an agent: training goes on, the user is told as wished, and
nothing is lost while the agent lives. No agent leaks, however many steps it takes."""

from __future__ import annotations

import json
import re
import resource
import signal
from pathlib import Path

import pytest

from crash.staged_scenes import agents_of, sockets_of
from crash.test_staged import nothing_is_left
from crash.trainer import Board
from crash.training import Training, is_whole, leftovers
from everystep import Full
from everystep.errors import StoreFull, TooManyFailedSteps
from everystep.store.measured import KEPT_STEPS
from everystep.store.run import Run
from waiting import until
from zygote import Zygote

STRATEGY = Full(every=1, policy="block", linger_s=1)
SOAK_STEPS = 10_000
SLACK_BYTES = 3 << 20  # what is remembered of descriptions, too

_NOTHING, _ALL = 0, resource.RLIM_INFINITY


def agent_may_write(run: Path, nbytes: int) -> int:
    """Limit the size of the files that the agent of a run can write; returns its process."""
    (agent,) = agents_of(run)
    resource.prlimit(agent, resource.RLIMIT_FSIZE, (nbytes, _ALL))
    return agent


def test_training_goes_on_and_catches_up(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each step that is refused is told once; when there is room again, the next steps are
    durable."""
    with Training(run_dir, strategy=STRATEGY) as training:
        training.step()
        until(lambda: training.ck.stats[0].durable, 60, "the first step to be durable")
        agent_may_write(run_dir, _NOTHING)
        for _ in range(4):
            training.step()
            at = training.steps
            until(lambda: _told(training, caplog, at), 60, f"step {at} to be refused")  # noqa: B023
        refused = [s for s in training.ck.stats if s.error]
        assert [s.step for s in refused] == [2, 3, 4, 5]
        assert all("file too large" in str(s.error) for s in refused)
        assert [s.durable for s in training.ck.stats] == [True] + [False] * 4
        agent_may_write(run_dir, _ALL)
        training.step()
        until(lambda: training.ck.stats[-1].durable, 60, "the next step to be durable")
    assert leftovers(run_dir) == []
    assert is_whole(run_dir, 6)
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    steps = [found[1] for line in said if (found := re.match(r"step main:(\d+) is not", line))]
    assert sorted(steps) == ["2", "3", "4", "5"], said
    nothing_is_left(run_dir)


def _told(training: Training, caplog: pytest.LogCaptureFixture, step: int) -> bool:
    """Whether the training thread has heard that a step was refused. It hears at `step()`, or
    here."""
    training.ck._session.hear()  # type: ignore[union-attr]
    return f"step main:{step} is not stored" in caplog.text


def test_a_step_is_told_once_however_often_it_is_tried(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Training(run_dir, strategy=STRATEGY) as training:
        training.step()
        until(lambda: training.ck.stats[0].durable, 60, "the first step to be durable")
        agent_may_write(run_dir, _NOTHING)
        training.step()
        tries: list[object] = []
        note = training.ck._agent._heard  # type: ignore[union-attr]
        training.ck._agent.listen(lambda m: (tries.append(m), note(m)))  # type: ignore[union-attr, arg-type]
        until(lambda: sum(type(m).__name__ == "NotStored" for m in tries) >= 3, 60, "three tries")
        training.step()
        agent_may_write(run_dir, _ALL)
        training.step()
    assert caplog.text.count("step main:2 is not stored") == 1
    assert is_whole(run_dir, 4)


def test_raised_at_a_later_step(run_dir: Path) -> None:
    with (
        pytest.raises(StoreFull, match=r"000000000002.*file too large"),
        Training(run_dir, strategy=STRATEGY, on_error="raise") as training,
    ):
        training.step()
        until(lambda: training.ck.stats[0].durable, 60, "the first step to be durable")
        agent_may_write(run_dir, _NOTHING)
        until(lambda: training.step(), 60, "a failure")  # type: ignore[func-returns-value]
    nothing_is_left(run_dir)


def test_raised_at_the_end(run_dir: Path) -> None:
    training = Training(run_dir, strategy=STRATEGY, on_error="raise")
    training.step()
    until(lambda: training.ck.stats[0].durable, 60, "the first step to be durable")
    agent_may_write(run_dir, _NOTHING)
    training.step()
    with pytest.raises(StoreFull, match="file too large"):
        training.ck.close()
    nothing_is_left(run_dir)
    with Training(run_dir, strategy=STRATEGY) as training:
        assert training.steps == 1


def test_too_many(run_dir: Path) -> None:
    with (
        pytest.raises(TooManyFailedSteps, match="3 steps in a row"),
        Training(run_dir, strategy=STRATEGY, max_failed_steps=3) as training,
    ):
        training.step()
        until(lambda: training.ck.stats[0].durable, 60, "the first step to be durable")
        agent_may_write(run_dir, _NOTHING)
        until(lambda: training.step(), 60, "three failures")  # type: ignore[func-returns-value]
    nothing_is_left(run_dir)


def test_memory_is_the_last_resort(zygote: Zygote, quick_path: Path) -> None:
    """The trainer is killed while the store takes nothing: the newest step comes from memory."""
    run, board = quick_path / "run", Board(quick_path / "board")
    board.clear()
    digests = zygote.run(
        "crash.staged_scenes.reference", quick_path / "reference", total=60
    ).split()
    words: dict[str, object] = {"run": str(run), "total": 60, "board": str(quick_path / "board")}
    child = zygote.start("crash.staged_scenes.train", quick_path / "log1", **words)
    until(lambda: board["durable"] >= 1 or child.status(), 60, "a durable step")
    agent = agent_may_write(run, _NOTHING)
    until(lambda: board["staged"] >= board["durable"] + 6 or child.status(), 60, "steps in memory")
    assert child.kill()
    assert child.wait() == -signal.SIGKILL
    staged, durable = board["staged"], board["durable"]
    assert max(ref.step for ref in Run.open(run).listing().complete()) <= durable + 1 < staged
    again = zygote.start("crash.staged_scenes.train", quick_path / "log2", **words)
    until(lambda: "restored" in again.said() or again.status(), 60, "a restored state")
    assert agents_of(run) == [agent], "it was adopted"
    agent_may_write(run, _ALL)
    assert again.wait() == 0, again.said()
    said = again.said().split()
    step = int(said[said.index("restored") + 1])
    assert step >= staged
    assert said[said.index("restored") + 2] == digests[step]
    assert said[-1] == digests[60]
    board.close()
    nothing_is_left(run)


@pytest.mark.slow
def test_ten_thousand_steps_leave_nothing_behind(zygote: Zygote, quick_path: Path) -> None:
    """Statistics are kept of the newest `KEPT_STEPS`: once there are so many, nothing grows."""
    run = quick_path / "run"
    child = zygote.start(
        "crash.staged_scenes.many_steps",
        quick_path / "log",
        run=str(run),
        steps=SOAK_STEPS,
        kept=KEPT_STEPS,
    )
    assert child.wait(800) == 0, child.said()
    said = [line for line in child.said().splitlines() if line[:1] == "[" or line.isdigit()]
    *rows, left = map(json.loads, said)
    print(*rows, sep="\n")
    first, *_, last = [row for row in rows if row[0] >= SOAK_STEPS // 2]
    for at in (1, 4):  # of the trainer, of the agent
        assert last[at] - first[at] < SLACK_BYTES, f"{last[at] - first[at]:,} bytes"
    for at in (2, 3, 5, 6):  # descriptors and threads
        assert min(row[at] for row in rows[-8:]) <= max(row[at] for row in rows[1:8])
    assert left <= rows[0][2]
    assert agents_of(run) == []
    assert sockets_of(Run.open(run).id) == []
