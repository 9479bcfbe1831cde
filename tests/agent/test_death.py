"""What dies, and what goes on: the agent killed or stopped, and its trainer killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.scenes import (
    DEADLINE_S,
    Trainer,
    agent_is_there,
    assert_stored,
    begin_of,
    put_still,
    run_at,
    state,
    still_of,
    stored_steps,
)
from byte_runs import tensor
from everystep.agent import client
from everystep.agent import protocol as p
from everystep.agent.client import Agent
from everystep.agent.memory import Overlay
from everystep.agent.process import started
from everystep.agent.server import LOCK_SLOT
from everystep.errors import RunBusy, StoreFailed
from everystep.store import format as fmt
from everystep.store import local
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from waiting import until

LAYOUT_OF_ALL = state(1)


@pytest.fixture
def run(run_dir: Path) -> Run:
    return run_at(run_dir)


@pytest.fixture
def agent(run: Run, run_dir: Path) -> Iterator[Agent]:
    agent = Agent(run_dir, run.id, 0)
    yield agent
    agent.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 60, "it to stand still")


def until_replaced(agent: Agent, pid: int) -> None:
    until(lambda: agent.pid != pid, DEADLINE_S, "another agent")


# ---------------------------------------------------------------- the agent is killed


def test_an_agent_that_is_killed_is_replaced_and_loses_nothing(
    agent: Agent, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(agent, run)
    trainer.stage(1)
    trainer.until_told(p.Stored, 1)
    room = trainer.acquire()
    trainer.fill(room, state(2))
    pid = agent.pid
    stop(pid)  # so that it cannot even read the seal
    trainer.seal(room, 2)
    os.kill(pid, signal.SIGKILL)
    until(lambda: "has died" in caplog.text, 60, "the death to be noticed")
    assert agent.settle() == []
    assert agent.pid != pid
    assert not is_alive(pid)
    assert stored_steps(run) == [1, 2]
    assert_stored(run, 2)
    trainer.stage(3)
    assert agent.settle() == []
    assert_stored(run, 3)


def test_a_slot_that_is_being_filled_survives(agent: Agent, run: Run) -> None:
    trainer = Trainer(agent, run)
    trainer.describe(LAYOUT_OF_ALL)
    room = trainer.acquire()
    room.view[:100] = b"x" * 100
    pid = agent.pid
    os.kill(pid, signal.SIGKILL)
    until_replaced(agent, pid)
    assert agent.acquire(0.1) is None  # it is the trainer's still
    trainer.fill(room, state(1))
    trainer.seal(room, 1)
    assert agent.settle() == []
    assert_stored(run, 1)


def test_what_was_sealed_is_handed_on_with_what_it_refers_to(agent: Agent, run: Run) -> None:
    """The layout and the tensors that do not change are others by the time the agent dies."""
    begin = begin_of(run)
    kept = {n: [tensor("/models/model/frozen", "float32", 40, seed=n)] for n in (1, 2)}
    stills = {n: still_of(begin, kept[n], n) for n in (1, 2)}
    trainer = Trainer(agent, run)
    put_still(run, begin, stills[1], kept[1])
    agent.keep(stills[1])
    trainer.describe(state(1))
    room = trainer.acquire()
    trainer.fill(room, state(1))
    pid = agent.pid
    stop(pid)
    trainer.seal(room, 1, still=True)
    put_still(run, begin, stills[2], kept[2])
    agent.keep(stills[2])
    larger = [*state(2, 90_000), tensor("/models/model/new", "int8", 9)]
    thread = threading.Thread(target=trainer.describe, args=(larger,))
    thread.start()  # has no answer while the agent stands still
    until(lambda: agent._described is not None and agent._described.layout == 2, 60, "the question")
    os.kill(pid, signal.SIGKILL)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    room = trainer.acquire()
    trainer.fill(room, larger)
    trainer.seal(room, 2, still=True)
    assert agent.settle() == []
    assert_stored(run, 1, [*state(1), *kept[1]])
    assert_stored(run, 2, [*larger, *kept[2]])


def test_deaths_that_follow_each_other_at_once(agent: Agent, run: Run) -> None:
    trainer = Trainer(agent, run)
    for step in range(1, 4):
        trainer.stage(step)
        with contextlib.suppress(ProcessLookupError):  # the next one is being started just now
            os.kill(agent.pid, signal.SIGKILL)
    assert agent.settle() == []
    assert stored_steps(run) == [1, 2, 3]


def test_while_no_agent_can_be_had_nobody_waits_for_ever(
    run: Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "GIVE_UP_S", 0.3)
    monkeypatch.setattr(client, "_RETRY_S", 0.05)

    def refused(path: Path, run: str, rank: int) -> Any:
        raise StoreFailed("no process can be had")

    agent = Agent(run_dir, run.id, 0)
    trainer = Trainer(agent, run)
    trainer.describe(state(1))
    room = trainer.acquire()
    trainer.fill(room, state(1))
    stop(agent.pid)
    trainer.seal(room, 1)
    monkeypatch.setattr(client, "started", refused)
    os.kill(agent.pid, signal.SIGKILL)
    assert [ref.step for ref in agent.settle()] == [1]
    assert agent.acquire(60) is None
    with pytest.raises(StoreFailed, match="no agent"):
        trainer.describe(state(2))
    agent.close()
    assert "no process can be had; trying again" in caplog.text
    assert "step main:1 is lost" in caplog.text


def test_the_lock_of_a_killed_agent_is_free(run: Run, run_dir: Path) -> None:
    process, channel = started(run_dir, run.id, 0)
    assert not lock_is_free(run_dir)
    os.kill(process.pid, signal.SIGKILL)
    process.end(5.0)
    assert lock_is_free(run_dir)
    channel.close()


def lock_of(backend: LocalBackend) -> contextlib.AbstractContextManager[None]:
    return backend.lock(fmt.LOCK_FILE, LOCK_SLOT)


# ---------------------------------------------------------------- the agent stands still


def test_an_agent_that_stands_still_is_waited_for(
    agent: Agent, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(agent, run)
    trainer.describe(state(1))
    room = trainer.acquire()
    trainer.fill(room, state(1))
    pid = agent.pid
    started_s = time.monotonic()
    stop(pid)
    trainer.seal(room, 1)
    assert agent.acquire(0.05) is None
    until(lambda: "does not answer" in caplog.text, 60, "a word about it")
    assert time.monotonic() - started_s > client.SILENT_S / 2
    os.kill(pid, signal.SIGCONT)
    trainer.stage(2)
    assert agent.settle() == []
    assert agent.pid == pid
    assert stored_steps(run) == [1, 2]
    assert caplog.text.count("does not answer") == 1


def test_an_agent_that_stands_still_for_too_long_is_replaced(
    agent: Agent, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(agent, run)
    trainer.describe(state(1))
    room = trainer.acquire()
    trainer.fill(room, state(1))
    pid = agent.pid
    stop(pid)
    trainer.seal(room, 1)
    monkeypatch.setattr(client, "REPLACE_S", 0.6)
    trainer.stage(2)
    assert agent.settle() == []
    assert agent.pid != pid
    assert not is_alive(pid)
    assert "has not answered" in caplog.text
    assert stored_steps(run) == [1, 2]


def test_a_trainer_that_stood_still_itself_blames_nobody(
    agent: Agent, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0
    looks: list[float] = []
    look = agent._check_silence

    def seen(more_s: float) -> None:
        looks.append(more_s)
        look(more_s)

    monkeypatch.setattr(agent, "_check_silence", seen)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr(client, "time", clock)
    pid = agent.pid
    for _ in range(3):
        ahead_s += 1000.0
        count = len(looks)
        until(lambda count=count: len(looks) >= count + 2, 60, "the thread to look")
    assert max(looks) == 2 * client.PING_S
    Trainer(agent, run).stage(1)
    assert agent.settle() == []
    assert agent.pid == pid


# ---------------------------------------------------------------- the trainer dies


class Child:
    """A trainer in a process of its own."""

    def __init__(self, path: Path, linger_s: float, steps: int = 2, how: str = "wait") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agent.trainer", str(path), str(linger_s), str(steps), how],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        self.process.stdout.close()
        self.agent, self.child = map(int, said.split()[1:])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_child(self) -> None:
        if self.child:
            os.kill(self.child, signal.SIGKILL)
            self.child = 0


@pytest.fixture
def child(run: Run, run_dir: Path) -> Iterator[Callable[..., Child]]:
    """Starts trainers; all that they leave behind is ended with the test."""
    found: list[Child] = []

    def start(*arguments: Any, **named: Any) -> Child:
        found.append(Child(run_dir, *arguments, **named))
        return found[-1]

    yield start
    for each in found:
        each.kill()
        each.kill_child()
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.agent, signal.SIGKILL)


def until_gone(pid: int, run: Run) -> None:
    until(lambda: not is_alive(pid), DEADLINE_S, "the agent to end")
    until(lambda: not agent_is_there(run), 60, "its socket to be gone")


def lock_is_free(path: Path) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "LOCK_PATIENCE_S", 0.0)
        try:
            with lock_of(LocalBackend(path)):
                return True
        except RunBusy:
            return False


@pytest.mark.parametrize("how", ["wait", "fork"])
def test_what_a_killed_trainer_has_staged_is_kept_and_handed_to_the_next(
    run: Run, run_dir: Path, child: Callable[..., Child], how: str
) -> None:
    dead = child(60.0, how=how)
    assert not lock_is_free(run_dir)
    dead.kill()
    until(lambda: stored_steps(run) == [1, 2], DEADLINE_S, "all to be durable")
    until(lambda: lock_is_free(run_dir), 60, "the lock to be given back")
    with contextlib.closing(Overlay(LocalBackend(run_dir), run.id, [0])) as overlay:
        assert {name.split("/")[2] for name in overlay.names} >= {f"{2:012d}"}
        for name in overlay.names:
            data = bytearray(overlay.size(name))
            overlay.read(name, memoryview(data), 0)
            assert bytes(data) == (run_dir / name).read_bytes()
    agent = Agent.left_behind(run_dir, run.id, 0)
    assert agent is not None
    assert agent.pid == dead.agent
    assert not lock_is_free(run_dir)
    trainer = Trainer(agent, run, session=2)
    trainer.stage(3)
    if how == "fork":
        dead.kill_child()
    agent.close()
    assert stored_steps(run) == [1, 2, 3]
    until_gone(dead.agent, run)
    assert lock_is_free(run_dir)


def test_an_agent_that_nobody_takes_ends_by_itself(
    run: Run, run_dir: Path, child: Callable[..., Child]
) -> None:
    dead = child(0.2)
    dead.kill()
    until_gone(dead.agent, run)
    assert stored_steps(run) == [1, 2]
    assert Agent.left_behind(run_dir, run.id, 0) is None


def test_sigterm_ends_the_lingering(run: Run, run_dir: Path, child: Callable[..., Child]) -> None:
    dead = child(600.0)
    os.kill(dead.agent, signal.SIGTERM)  # while the trainer lives, it stays
    os.kill(dead.agent, signal.SIGINT)
    assert is_alive(dead.agent)
    assert agent_is_there(run)
    dead.kill()
    until_gone(dead.agent, run)
    assert stored_steps(run) == [1, 2]


def test_sigterm_ends_an_agent_that_lingers_already(
    run: Run, run_dir: Path, child: Callable[..., Child]
) -> None:
    dead = child(600.0)
    dead.kill()
    until(lambda: lock_is_free(run_dir), DEADLINE_S, "it to linger")
    assert is_alive(dead.agent)
    os.kill(dead.agent, signal.SIGTERM)
    until_gone(dead.agent, run)


def test_a_trainer_that_ends_well_leaves_no_agent(
    run: Run, run_dir: Path, child: Callable[..., Child]
) -> None:
    done = child(600.0, how="close")
    assert done.process.wait(DEADLINE_S) == 0
    done.kill()
    assert not is_alive(done.agent)
    assert not agent_is_there(run)
    assert stored_steps(run) == [1, 2]


def test_an_adopted_agent_that_dies_or_stands_still_is_replaced_too(
    run: Run,
    run_dir: Path,
    child: Callable[..., Child],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(client, "REPLACE_S", 0.6)
    dead = child(60.0)
    dead.kill()
    agent = Agent(run_dir, run.id, 0)
    assert agent.pid == dead.agent
    trainer = Trainer(agent, run, session=2)
    trainer.stage(3)
    stop(agent.pid)
    trainer.stage(4)
    assert agent.settle() == []
    assert agent.pid != dead.agent
    assert not is_alive(dead.agent)
    assert stored_steps(run) == [1, 2, 3, 4]
    agent.close()


def test_the_last_step_of_a_trainer_whose_children_hold_its_socket(
    run: Run, run_dir: Path, child: Callable[..., Child]
) -> None:
    """Its seal may still lie in the socket when its death is seen."""
    dead = child(0.0, steps=1, how="fork")
    stop(dead.agent)
    dead.kill()
    os.kill(dead.agent, signal.SIGCONT)
    until_gone(dead.agent, run)
    dead.kill_child()
    assert stored_steps(run) == [1]


def test_an_agent_that_ends_at_once_when_it_is_told_to_has_not_died(
    run: Run, run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is seen before the one that told it goes on."""
    agent = Agent(run_dir, run.id, 0)
    Trainer(agent, run).stage(1)
    pid, sent = agent.pid, agent._until_sent
    looked: list[int] = []

    def slowly() -> None:
        sent()
        until(lambda: not agent._thread.is_alive() or agent.pid != pid, DEADLINE_S, "the end")
        looked.append(agent.pid)

    monkeypatch.setattr(agent, "_until_sent", slowly)
    agent.close()
    assert looked == [pid]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert stored_steps(run) == [1]


def test_an_agent_that_comes_when_none_is_needed_any_more_is_ended(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close()` has told the dead one to end, and would wait for the new one in vain."""
    came: list[int] = []

    def late(*whose: Any) -> Any:
        found = started(*whose)
        came.append(found[0].pid)
        agent._parting = True
        return found

    monkeypatch.setattr(client, "started", late)
    os.kill(agent.pid, signal.SIGKILL)
    agent._thread.join(DEADLINE_S)
    assert not agent._thread.is_alive()
    assert len(came) == 1 and not Path(f"/proc/{came[0]}").exists()


def test_whoever_comes_while_the_old_agent_ends_is_served(
    run: Run, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By that one or by a new one: it is a race which the trainer does not see."""
    for step in (1, 3):
        agent = Agent(run_dir, run.id, 0)
        Trainer(agent, run).stage(step)
        agent._send(p.Bye())  # it ends at once, and the next may still meet its socket
        agent._closing = True
        agent._thread.join()
        agent._channel.close()
        successor = Agent(run_dir, run.id, 0)
        successor.settle()
        Trainer(successor, run).stage(step + 1)
        successor.close()
        agent._process.end(5.0)
        agent._drop_arena()
    assert stored_steps(run) == [1, 2, 3, 4]
    assert "has died" not in caplog.text
