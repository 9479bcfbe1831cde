"""An agent's process, driven through `Agent`: it starts, stores, answers, and ends."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.scenes import (
    DEADLINE_S,
    Trainer,
    agent_is_there,
    assert_stored,
    begin_of,
    run_at,
    state,
    stored_steps,
)
from byte_runs import read_back, tensor
from everystep.agent import protocol as p
from everystep.agent.client import Agent
from everystep.agent.memory import Overlay
from everystep.errors import RunBusy, StoreFailed
from everystep.store.local import LocalBackend
from everystep.store.measured import Measure, read_measures
from everystep.store.run import Run
from everystep.types import StepRef
from waiting import until


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def run(run_dir: Path) -> Run:
    return run_at(run_dir)


@pytest.fixture
def agent(run: Run, run_dir: Path) -> Iterator[Agent]:
    agent = Agent(run_dir, run.id, 0)
    yield agent
    agent.close()


def measure(step: int) -> Measure:
    return Measure(
        timeline="main", step=step, begun_s=1.0, took_s=2.0, stall_s=0.0, snapshot_s=0.0,
        staging_s=0.0, bookkeeping_s=0.0, forward_s=0.0, backward_s=0.0, update_s=0.0,
        state_bytes=1, copied_bytes=1, written_bytes=0,
    )  # fmt: skip


def test_it_starts_quickly_and_is_small(run: Run, run_dir: Path) -> None:
    agent = Agent(run_dir, run.id, 0)
    stat = Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()
    took_s = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    status = Path(f"/proc/{agent.pid}/status").read_text()
    maps = Path(f"/proc/{agent.pid}/maps").read_text()
    agent.close()
    assert took_s < 1, "of the processor's time; some 0.15 s as a rule"
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    assert int(resident.split()[1]) < 60 << 10
    assert "libc.so" in maps
    assert "torch" not in maps


def test_it_gives_way_to_training(agent: Agent) -> None:
    def nice_of(pid: int) -> set[int]:
        threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
        return {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}

    own = os.getpriority(os.PRIO_PROCESS, 0)
    until(lambda: nice_of(agent.pid) == {min(19, own + 5)}, 20, "all of its threads to be nice")


def test_what_is_staged_is_stored(agent: Agent, run: Run) -> None:
    trainer = Trainer(agent, run)
    for step in range(1, 6):
        trainer.stage(step)
    assert agent.settle() == []
    assert stored_steps(run) == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        assert_stored(run, step)
        told = trainer.until_told(p.Stored, step)
        assert told.written_bytes > 40_000
        assert told.at_s <= time.monotonic()
    # at the end, where several wait, the newest is written first
    assert sorted(m.step for m in trainer.heard) == [1, 2, 3, 4, 5]


def test_what_changes_its_form_and_what_is_described_again(agent: Agent, run: Run) -> None:
    trainer = Trainer(agent, run)
    rest = [tensor("/extras/a", "int8", 3), tensor("/extras/b", "float64", 2, 2)]
    first, second = state(1), [*state(2, 400_000), tensor("/models/model/new", "bool", 7)]
    trainer.describe(first)
    room = trainer.acquire()
    trainer.fill(room, first, rest)
    trainer.seal(room, 1, rest)
    trainer.describe(second)  # larger: other memory, once step 1 is durable
    assert stored_steps(run) == [1]
    room = trainer.acquire()
    trainer.fill(room, second)
    trainer.seal(room, 2)
    trainer.describe(state(3))  # smaller: the same memory
    trainer.stage(3)
    assert agent.settle() == []
    assert_stored(run, 1, [*first, *rest])
    assert_stored(run, 2, second)
    assert_stored(run, 3)


def test_a_slot_that_is_not_filled_comes_back(agent: Agent, run: Run) -> None:
    trainer = Trainer(agent, run)
    trainer.describe(state(1))
    first = trainer.acquire()
    assert agent.acquire(0.0) is None  # one at a time
    agent.release(first.slot)
    agent.release(first.slot)
    trainer.stage(1)
    assert agent.settle() == []
    assert_stored(run, 1)


@pytest.mark.parametrize("hostile", ["a tree that is no JSON", "a layout from yesterday"])
def test_a_step_that_makes_no_sense_is_told_and_costs_no_slot(
    agent: Agent, run: Run, hostile: str
) -> None:
    trainer = Trainer(agent, run)
    place = trainer.describe(state(1))
    room = trainer.acquire()
    if hostile == "a layout from yesterday":
        trainer._place = place._replace(layout=place.layout - 1)
        trainer.seal(room, 1)
        trainer._place = place
    else:
        trainer.seal(room, 1, tree=b"{")
    assert trainer.until_told(p.NotStored, 1).error[0] in ("StoreFailed", "Damaged")
    trainer.stage(2)
    trainer.stage(3)
    trainer.until_told(p.Stored, 3)
    assert_stored(run, 2)


def test_memory_that_is_not_to_be_had_is_told_with_a_hint(agent: Agent, run: Run) -> None:
    trainer = Trainer(agent, run, staging_bytes=1 << 20)
    with pytest.raises(StoreFailed, match="no room for two checkpoints") as caught:
        trainer.describe([tensor("/models/model/weight", "uint8", 600_000)])
    assert "larger number" in (caught.value.hint or "")
    trainer.stage(1)  # what fits is taken
    assert agent.settle() == []
    assert_stored(run, 1)


def test_a_state_that_no_file_can_hold_is_told(agent: Agent, run: Run) -> None:
    trainer = Trainer(agent, run)
    with pytest.raises(StoreFailed, match="shape"):
        trainer.describe([tensor("/models/model/x", "uint8", *[1] * 65)])
    trainer.describe(state(1))
    trainer.stage(1)  # what can be stored is
    assert agent.settle() == []
    assert_stored(run, 1)


def test_messages_larger_than_the_sockets_buffers_are_on_their_way_at_once(
    agent: Agent, run: Run
) -> None:
    trainer = Trainer(agent, run)
    trainer.describe(state(1))
    room = trainer.acquire()
    trainer.fill(room, state(1))
    tree = b'{"models":{"model":{"aliases":{},"frozen":[],"extra_state":{}}},"optimizers":{},'
    tree += b'"extras":{"x":"' + b"y" * 3_000_000 + b'"},"loaders":{},"rng":{}}'
    trainer.seal(room, 1, tree=tree)
    assert not agent._channel.pending
    assert agent.settle() == []
    assert_stored(run, 1)


def test_more_descriptors_than_select_can_count(run: Run, run_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("so many descriptors are not allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    agent = Agent(run_dir, run.id, 0)
    try:
        pid = agent.pid
        trainer = Trainer(agent, run)
        trainer.stage(1)
        assert agent.settle() == []
        assert_stored(run, 1)
        assert agent.pid == pid
        overlay = Overlay(LocalBackend(run_dir), run.id, [0])
        assert overlay.names
        overlay.close()
    finally:
        agent.close()
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_has_one_agent_and_it_one_owner(agent: Agent, run: Run, run_dir: Path) -> None:
    for attempt in (Agent, Agent.left_behind):
        with pytest.raises(RunBusy, match="has an owner"):
            attempt(run_dir, run.id, 0)
    other = Agent(run_dir, run.id, 1)
    assert other.pid != agent.pid
    other.close()
    Trainer(agent, run).stage(1)
    assert agent.settle() == []


def test_where_there_is_none_none_is_left_behind(run: Run, run_dir: Path) -> None:
    assert Agent.left_behind(run_dir, run.id, 0) is None


def test_an_agent_that_cannot_start_says_why(run: Run, run_dir: Path) -> None:
    (run_dir / "owner.lock").mkdir()
    with pytest.raises(StoreFailed, match=r"no agent could start: .*owner\.lock"):
        Agent(run_dir, run.id, 0)


def test_what_others_ask_is_answered_while_the_trainer_goes_on(
    agent: Agent, run: Run, run_dir: Path
) -> None:
    trainer = Trainer(agent, run)
    rest = [tensor("/extras/large", "uint8", 100_000)]
    trainer.describe(state(1), 200_000)
    room = trainer.acquire()
    trainer.fill(room, state(1), rest)
    trainer.seal(room, 1, rest)
    trainer.until_told(p.Stored, 1)
    overlay = Overlay(LocalBackend(run_dir), run.id, [0])
    directory = run_dir / "steps" / "main" / f"{1:012d}"
    assert sorted(overlay.names) == sorted(f"steps/main/{1:012d}/{f.name}"
                                           for f in directory.iterdir())  # fmt: skip
    for name in overlay.names:
        data = bytearray(overlay.size(name))
        overlay.read(name, memoryview(data), 0)
        assert bytes(data) == (run_dir / name).read_bytes()
    overlay.close()
    trainer.stage(2)


def test_an_answer_larger_than_the_sockets_buffers_reaches_whoever_asked(
    agent: Agent, run: Run, run_dir: Path
) -> None:
    trainer = Trainer(agent, run)
    rest = [tensor("/extras/large", "uint8", 3_000_000)]
    trainer.describe([], 4_000_000)
    room = trainer.acquire()
    trainer.fill(room, [], rest)
    trainer.seal(room, 1, rest)
    overlay = Overlay(LocalBackend(run_dir), run.id, [0])
    assert sum(overlay.size(name) for name in overlay.names) > 3_000_000
    overlay.close()


def test_ending_it_leaves_nothing(run: Run, run_dir: Path) -> None:
    agent = Agent(run_dir, run.id, 0)
    pid = agent.pid
    trainer = Trainer(agent, run)
    trainer.stage(1)
    trainer.stage(2)
    agent.measured(measure(2))
    assert agent_is_there(run)
    agent.close()
    agent.close()
    assert stored_steps(run) == [1, 2]
    assert not Path(f"/proc/{pid}").exists()
    assert not agent_is_there(run)
    assert [m.step for found in read_measures(run.backend).values() for m in found] == [2]
    assert not any(path.name.endswith(".tmp") for path in run_dir.rglob("*"))
    assert agent.acquire(0.0) is None
    with pytest.raises(StoreFailed, match="no agent"):
        agent.describe([], [], 0)


def test_a_session_follows_another_in_the_same_process(agent: Agent, run: Run) -> None:
    for session, policy in ((1, "block"), (2, "skip"), (3, "block")):
        trainer = Trainer(agent, run, session=session, policy=policy)
        trainer.stage(session)
        assert agent.settle() == []
        assert_stored(run, session)


def test_the_budget_of_a_later_session_is_kept(agent: Agent, run: Run) -> None:
    def arena_bytes() -> int:
        maps = Path(f"/proc/{agent.pid}/maps").read_text().splitlines()
        spans = [line.split()[0].split("-") for line in maps if "everystep-staging" in line]
        return sum(int(stop, 16) - int(start, 16) for start, stop in spans)

    Trainer(agent, run, policy="skip").describe(state(1))
    assert arena_bytes() > 130_000
    trainer = Trainer(agent, run, session=2, policy="skip", staging_bytes=120_000)
    trainer.stage(1)
    until(lambda: arena_bytes() <= 120_000, DEADLINE_S, "the budget to be kept")


def test_settling_without_anything_is_nothing(agent: Agent, run: Run) -> None:
    assert agent.settle() == []
    Trainer(agent, run)
    assert agent.settle() == []


def test_any_thread_may_seal(agent: Agent, run: Run) -> None:
    trainer = Trainer(agent, run)
    trainer.describe(state(1))
    for step in range(1, 4):
        room = trainer.acquire()
        trainer.fill(room, state(step))
        thread = threading.Thread(target=trainer.seal, args=(room, step))
        thread.start()
        thread.join()
    assert agent.settle() == []
    assert read_back(run, StepRef("main", 3), 0)
    assert begin_of(run).run == run.id
