"""The agent's server and writer with a store that is slow, full or broken, in this process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.scenes import (
    DEADLINE_S,
    Held,
    Trainer,
    assert_stored,
    run_at,
    served,
    state,
    stored_steps,
)
from byte_logs import LAYOUT
from everystep.agent import protocol as p
from everystep.agent import writer
from everystep.agent.channel import Channel, address
from everystep.agent.client import Agent
from everystep.agent.memory import Overlay
from everystep.agent.server import Server
from everystep.planning.hiding import Interval
from everystep.store.durable import SystemCalls
from everystep.store.format import RunRecord
from everystep.store.local import LocalBackend
from everystep.store.retention import Retention
from everystep.store.run import Run
from faults import Faults
from waiting import until


@pytest.fixture
def run(run_dir: Path) -> Run:
    return run_at(run_dir)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_S", 0.02)


# ---------------------------------------------------------------- a slow store


def test_block_makes_every_step_durable_and_lets_training_wait(run: Run, run_dir: Path) -> None:
    store = Held()
    with served(run, run_dir, store) as agent:
        trainer = Trainer(agent, run, policy="block")
        store.hold()
        trainer.stage(1)
        assert store.waits.wait(DEADLINE_S)
        trainer.stage(2)
        assert agent.acquire(0.1) is None  # two slots, and neither may go
        store.go_on()
        trainer.stage(3)
        assert agent.settle() == []
        assert stored_steps(run) == [1, 2, 3]
        assert trainer.told(p.NotStored, 1) == trainer.told(p.NotStored, 2) == []
        # at the end, where both wait, the newest is written first
        assert sorted(m.step for m in trainer.heard) == [1, 2, 3]


def test_skip_never_waits_and_tells_what_was_superseded(run: Run, run_dir: Path) -> None:
    store = Held()
    with served(run, run_dir, store) as agent:
        trainer = Trainer(agent, run, policy="skip")
        store.hold()
        trainer.stage(1)
        assert store.waits.wait(DEADLINE_S)
        for step in range(2, 8):
            trainer.stage(step)
        for step in range(2, 6):  # 6 gave its slot up for nobody yet, and 7 is the newest
            assert trainer.until_told(p.NotStored, step).error is None
        store.go_on()
        assert agent.settle() == []
        assert stored_steps(run)[0] == 1
        assert stored_steps(run)[-1] == 7
        assert not set(stored_steps(run)) & {2, 3, 4, 5}
        assert_stored(run, 7)


def test_all_is_told_before_that_nothing_is_left(
    run: Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what a thread has told just now, when the agent looked whether it is idle."""
    real, heard_at_the_end = Server._is_idle, []

    def is_idle(self: Server) -> bool:
        if self._settling:
            self._tell(p.Notice(30, "told last"))
        return real(self)

    monkeypatch.setattr(Server, "_is_idle", is_idle)
    with served(run, run_dir, Held()) as agent:
        trainer = Trainer(agent, run, policy="block")
        agent.listen(lambda message: heard_at_the_end.append((message, agent._settled is None)))
        trainer.stage(1)
        assert agent.settle() == []
    said = [before for message, before in heard_at_the_end if isinstance(message, p.Notice)]
    assert said and all(said)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_the_log_goes_on_from_is_not_superseded(
    run: Run, run_dir: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor left out since other ranks do not want that step."""
    monkeypatch.setattr(writer, "Interval", lambda: Interval(steps=1 << 20))
    monkeypatch.setattr(Interval, "observe", lambda self, *_: self)
    store = Held()
    with served(run, run_dir, store) as agent:
        trainer = Trainer(agent, run, policy="skip", world_size=world_size)
        store.hold()
        trainer.stage(1)
        assert store.waits.wait(DEADLINE_S)
        trainer.stage(2, owed=True)
        trainer.stage(3)
        assert agent.acquire(0.1) is None, "there is room for three, and none may go"
        store.go_on()
        trainer.until_told(p.Stored, 2)
        assert not trainer.told(p.NotStored, 2)


def test_one_between_deltas_gives_way_to_none_that_is_not_taken_yet(
    run: Run, run_dir: Path
) -> None:
    """They are far apart: by the time of the next one there is room again."""
    store = Held()
    with served(run, run_dir, store) as agent:
        trainer = Trainer(agent, run, policy="skip", logs=True)
        store.hold()
        trainer.stage(1)
        assert store.waits.wait(DEADLINE_S)
        trainer.stage(2)
        trainer.stage(3)
        assert agent.acquire(0.1) is None
        store.go_on()
        assert agent.settle() == []
        for step in (1, 2, 3):
            trainer.until_told(p.Stored, step)


def test_what_is_told_of_an_earlier_session_is_not_taken_for_the_next(
    run: Run, run_dir: Path
) -> None:
    """Both have a step 2: the first one's becomes durable when the second has begun."""
    store = Held()
    with served(run, run_dir, store) as agent:
        first = Trainer(agent, run)
        store.hold()
        first.stage(1)
        assert store.waits.wait(DEADLINE_S)
        first.stage(2)
        second = Trainer(agent, run, session=2)
        assert not agent._began
        store.go_on()
        second.stage(2)
        second.stage(3)
        assert agent.settle() == []
        # where both wait, the newest is written first
        assert sorted(m.step for m in second.heard if isinstance(m, p.Stored)) == [2, 3]
        assert [m.step for m in first.heard if isinstance(m, p.Stored)] == []
        stored = [(e.session, e.ref.step) for e in run.listing().steps if e.complete]
        assert sorted(stored) == [(1, 1), (1, 2), (2, 2), (2, 3)]


def test_why_a_record_is_lost_at_the_end_is_logged(
    run: Run, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Refusing()
    with served(run, run_dir, faults) as agent:
        Trainer(agent, run, logs=True)
        faults.at("create", 1, errno.EROFS, times=1 << 30)
        agent.log.open_log(1, LAYOUT)
        for step in (2, 3):
            view = agent.log.reserve(8, DEADLINE_S)
            assert view is not None
            view.release()
            agent.log.publish(step)
        agent.close()
    assert agent.log.refusal is not None
    for step in (2, 3):
        assert f"step main:{step} is lost: {agent.log.refusal}" in caplog.text


def test_with_several_ranks_the_same_steps_are_wanted(
    run: Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever steps a rank has missed, or it could never agree with the others again."""
    monkeypatch.setattr(writer, "Interval", lambda: Interval(steps=4))
    monkeypatch.setattr(Interval, "observe", lambda self, *_: self)
    with served(run, run_dir, Held()) as agent:
        trainer = Trainer(agent, run, policy="skip", world_size=2)
        for step in (1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 13):
            trainer.stage(step)
            if step in (1, 8, 12):
                trainer.until_told(p.Stored, step)
        assert [m.step for m in trainer.heard if isinstance(m, p.Stored)] == [1, 8, 12]


def test_the_newest_steps_are_served_while_the_store_stands_still(run: Run, run_dir: Path) -> None:
    store = Held()
    with served(run, run_dir, store) as agent:
        trainer = Trainer(agent, run, policy="skip")
        store.hold()
        trainer.stage(1)
        assert store.waits.wait(DEADLINE_S)
        trainer.stage(2)
        with contextlib.closing(Overlay(LocalBackend(run_dir), run.id, [0])) as overlay:
            seen = Run(overlay, RunRecord(run=run.id, created=""))
            for step in (1, 2):
                assert_stored(seen, step)
        store.go_on()


# ---------------------------------------------------------------- a store that refuses


class Refusing(Faults):
    """Faults without the waiting for the disk."""

    def sync(self, fd: int) -> None:
        self._before("sync")

    def sync_directory(self, path: Path) -> None:
        self._before("sync_directory", path)


@pytest.mark.parametrize("policy", ["block", "skip"])
def test_a_full_disk_is_told_each_time_and_tried_again(
    run: Run, run_dir: Path, policy: str
) -> None:
    faults = Refusing()
    with served(run, run_dir, faults) as agent:
        trainer = Trainer(agent, run, policy=policy)
        trainer.stage(1)
        trainer.until_told(p.Stored, 1)
        faults.full_after(1000)
        trainer.stage(2)
        until(lambda: len(trainer.told(p.NotStored, 2)) >= 3, DEADLINE_S, "three refusals")
        kind, headline, hint = trainer.told(p.NotStored, 2)[0].error
        assert kind == "StoreFull"
        assert "no space" in headline
        assert "free some space" in hint
        for step in range(3, 6):  # training goes on
            trainer.stage(step)
        trainer.until_told(p.NotStored, 5)
        assert faults.fired > 3
        faults.watch()
        trainer.until_told(p.Stored, 5)
        assert agent.settle() == []
        assert {1, 5} <= set(stored_steps(run))
        assert_stored(run, 5)


def test_settling_ends_where_the_store_refuses(run: Run, run_dir: Path) -> None:
    faults = Refusing()
    with served(run, run_dir, faults) as agent:
        trainer = Trainer(agent, run)
        faults.at("create", 1, errno.EIO, times=1 << 30)
        trainer.stage(1)
        assert [ref.step for ref in agent.settle()] == [1]
        assert trainer.told(p.NotStored, 1)[0].error[0] == "StoreFailed"
        faults.watch()
        trainer.until_told(p.Stored, 1)  # goes on trying all the same
        assert agent.settle() == []


def test_what_is_lost_at_the_end_is_logged(
    run: Run, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Refusing()
    with served(run, run_dir, faults) as agent:
        trainer = Trainer(agent, run)
        faults.at("create", 1, errno.EROFS, times=1 << 30)
        trainer.stage(1)
        agent.close()
    assert "step main:1 is lost" in caplog.text
    assert "read-only file system" in caplog.text
    assert stored_steps(run) == []


@pytest.mark.parametrize("call", ["create", "write_at", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_fault_at_any_call_is_overcome(run: Run, run_dir: Path, call: str, nth: int) -> None:
    faults = Refusing()
    with served(run, run_dir, faults) as agent:
        trainer = Trainer(agent, run)
        faults.at(call, nth, errno.EIO)
        for step in (1, 2):
            trainer.stage(step)
            trainer.until_told(p.Stored, step)
        assert faults.fired == 1
        assert agent.settle() == []
        assert stored_steps(run) == [1, 2]
        assert_stored(run, 1)
        assert_stored(run, 2)


def test_a_run_that_somebody_has_emptied_is_one_again(run: Run, run_dir: Path) -> None:
    with served(run, run_dir, SystemCalls()) as agent:
        trainer = Trainer(agent, run)
        trainer.stage(1)
        trainer.until_told(p.Stored, 1)
        for path in sorted(run_dir.rglob("*"), reverse=True):
            if path.name != "owner.lock":
                path.rmdir() if path.is_dir() else path.unlink()
        trainer.stage(2)
        trainer.until_told(p.Stored, 2)
        assert any("written again" in m.text for m in trainer.heard if isinstance(m, p.Notice))
        assert Run.open(run_dir).id == run.id
        assert_stored(run, 2)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(mount)],
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        run = run_at(mount)
        agent = Agent(mount, run.id, 0)
        trainer = Trainer(agent, run)
        (mount / "ballast").write_bytes(bytes(1_500_000))
        trainer.stage(1, state(1, 800_000))
        assert trainer.until_told(p.NotStored, 1).error[0] == "StoreFull"
        (mount / "ballast").unlink()
        trainer.until_told(p.Stored, 1)
        assert_stored(run, 1, state(1, 800_000))
        agent.close()
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


# ---------------------------------------------------------------- retention, and what others send


def test_old_steps_go(run: Run, run_dir: Path) -> None:
    with served(run, run_dir, Held()) as agent:
        trainer = Trainer(agent, run, retention=Retention(keep_last=2))
        for step in range(1, 7):
            trainer.stage(step)
            trainer.until_told(p.Stored, step)
        agent.close()
    assert stored_steps(run) == [5, 6]


@pytest.fixture
def stranger(run: Run, run_dir: Path) -> Iterator[tuple[Trainer, Channel]]:
    """A trainer with a step under way, and another connection of the same user."""
    with served(run, run_dir, Held()) as agent:
        trainer = Trainer(agent, run)
        trainer.stage(1)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address(run.id, 0))
        channel = Channel(connection)
        yield trainer, channel
        channel.close()
        trainer.stage(2)
        assert agent.settle() == []
    assert stored_steps(run) == [1, 2]


@pytest.mark.parametrize(
    "message",
    [p.Bye(), p.Settle(), p.Grant(0), p.Release(0), p.Ping(1), p.Stored(step=1, written_bytes=1,
     took_s=1.0, at_s=1.0), p.Places(1, [], 0, (2, 4096))],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_what_only_the_owner_may_say_is_not_listened_to_from_others(
    stranger: tuple[Trainer, Channel], message: Any
) -> None:
    _, channel = stranger
    fd = os.memfd_create("test") if isinstance(message, p.Places) else None
    channel.send(message, fd)
    if fd is not None:
        os.close(fd)


@pytest.mark.parametrize("noise", [b"\xff" * 20, b"\x01" + bytes(7) + b"\xc1", b"x"])
def test_whoever_sends_garbage_is_alone_with_it(
    stranger: tuple[Trainer, Channel], noise: bytes
) -> None:
    _, channel = stranger
    channel._socket.send(noise)
    channel._socket.shutdown(socket.SHUT_WR)
    assert channel.wait(DEADLINE_S)
    with pytest.raises(EOFError):
        channel.receive()


@pytest.mark.parametrize(
    "message",
    [p.Release(-1), p.Release(99), p.Release(0), p.Pong(1), p.Settled([]), p.ListFiles()],
    ids=lambda message: type(message).__name__ + str(getattr(message, "slot", "")),
)
def test_an_owner_that_errs_costs_nothing(run: Run, run_dir: Path, message: Any) -> None:
    with served(run, run_dir, Held()) as agent:
        trainer = Trainer(agent, run)
        trainer.stage(1)
        trainer.until_told(p.Stored, 1)
        agent._send(message)
        assert agent.settle() == []
        with contextlib.closing(Overlay(LocalBackend(run_dir), run.id, [0])) as overlay:
            assert len(overlay.names) == 3  # the step is still in memory
        trainer.stage(2)
        assert agent.settle() == []
        assert stored_steps(run) == [1, 2]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="takes the name of another user")
def test_another_user_gets_no_answer(run: Run, run_dir: Path) -> None:
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
        "s.connect('\\0' + sys.argv[1])\n"
        "try: answer = s.recv(1)\n"
        "except ConnectionResetError: answer = b''\n"
        "sys.exit(7 if answer == b'' else 1)"
    )
    with served(run, run_dir, Held()) as agent:
        name = address(run.id, 0).removeprefix("\0")
        done = subprocess.run([sys.executable, "-c", program, name], timeout=60, check=False)
        assert done.returncode == 7
        trainer = Trainer(agent, run)
        trainer.stage(1)
        assert agent.settle() == []
