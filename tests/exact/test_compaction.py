"""`Deltas(compact=True)` over optimizers, formats and trainings: fulls that the agent (here
in a thread) has made from the log are those of training, bit for bit, and so is every step around
them."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from everystep import compacting
from everystep.agent import client, mirror
from everystep.agent import protocol as p
from everystep.agent.client import Agent
from everystep.agent.handover import seal_of
from everystep.agent.image import Image
from everystep.agent.sink import Room, Sealed
from everystep.errors import CannotRestore
from everystep.state.objects import Objects
from everystep.strategies import Deltas
from everystep.types import StepRef
from exact.logged import ALL, STORED, TRAINED, Make, fulls, prove_steps, states_of
from exact.matrix import Case
from exact.scenes import Scene, build
from exact.test_deltas_stories import EXACT, Script, WritesBehind, WritesOnce, made
from states import assert_same_state
from waiting import until

pytestmark = pytest.mark.usefixtures("in_threads")

COMPACTED = Deltas(full_every=3, batch=2, compact=True, slices=2)
FULLS = [1, 3, 6]
"""What training stages, and what the agent makes."""

CASES = [
    *(Case(o, "fp32", "plain") for o in ("AdamW/loop", "AdamW/foreach", "Adam/fused")),
    *(Case("SGD+momentum/loop", f, "plain") for f in ("fp32", "bf16", "mixed", "master")),
    *(Case("Adam/fused", "fp32", m) for m in ("batchnorm", "gan", "tied")),
    Case("AdamW/foreach", "bf16", "tied"),
    Case("AdamW/loop", "fp32", "complex"),
    Case("Adafactor/loop", "fp32", "plain"),
]


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that training has staged whole."""
    found: list[int] = []

    def noted(sealed: Sealed) -> p.Seal:
        found.append(sealed.step)
        return seal_of(sealed)

    monkeypatch.setattr(client, "seal_of", noted)
    return found


def compact(
    make: Make,
    run: Path,
    expected: Sequence[int] = FULLS,
    steps: int = STORED,
    strategy: Deltas = COMPACTED,
) -> Scene:
    """A life that ends when the agent has made the full checkpoints that it should."""
    scene = make(1)
    with scene.checkpointer(run, strategy=strategy, retention=ALL) as ck:
        for t in range(ck.restore(), steps):
            scene.step(t)
            ck.step()
            if t + 1 in expected:
                until(lambda: t + 1 in fulls(run), 60, f"a full of {t + 1}")  # noqa: B023
    assert fulls(run) == list(expected)
    return scene


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_around_what_the_agent_has_made(
    case: Case, run_dir: Path, staged: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def make(seed: int) -> Scene:
        return build(*case, seed=seed)

    states = states_of(make, 11)
    stored = compact(make, run_dir)
    assert_same_state(states[STORED], stored.state())
    assert staged == [1]
    again = compact(make, run_dir, [*FULLS, 8, 9], 10)
    assert_same_state(states[10], again.state())
    assert staged == [1, 8], "one in each process"
    assert not caplog.records, "nothing to complain of"
    between = random.Random(str(case)).sample([2, 4, 5, 7], 2)
    scene = prove_steps(make, run_dir, states, [3, *between, 6, 8, 9, 10])
    assert_same_state(states[11], scene.steps(10, 11).state())


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
def test_trainings_as_they_are(
    kind: type[Script], run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = states_of(made(kind))
    compact(made(kind), run_dir)
    scene = prove_steps(made(kind), run_dir, states, range(1, STORED + 1))
    assert_same_state(states[TRAINED], scene.steps(STORED, TRAINED).state())
    assert not caplog.records


def test_back_in_time_and_on_in_one_process(run_dir: Path) -> None:
    states = states_of(made(Script))
    scene = made(Script)(1)
    with scene.checkpointer(run_dir, strategy=COMPACTED, retention=ALL) as ck:
        done = ck.restore()
        for last, back in ((5, 4), (7, None), (8, 2)):
            for t in range(done, last):
                scene.step(t)
                ck.step()
            assert_same_state(states[last], scene.state())
            done = ck.restore(None if back is None else StepRef("main", back))
            assert_same_state(states[done], scene.state())
    prove_steps(made(Script), run_dir, states, [1, 2])


# ------------------------------------------------------------ what cannot be done again


def test_weights_changed_by_hand_once(
    run_dir: Path, staged: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """That step comes whole, the copy begins anew from it, and the agent goes on."""
    states = states_of(made(WritesOnce))
    compact(made(WritesOnce), run_dir, [1, 3, 4, 6])
    assert staged == [1, 4]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    prove_steps(made(WritesOnce), run_dir, states, range(1, STORED + 1))


def has_been_told(session: Any) -> bool:
    """Whether the agent has said that it makes no more fulls; the session may have acted on it."""
    return session._not_folded or session.given_up or not session._compacts


def store_and_wait(make: Make, run: Path, step: int, total: int) -> None:
    """A life that waits for the first full that the agent makes, and after a step until it has said
    that it makes no more."""
    scene = make(1)
    with scene.checkpointer(run, strategy=COMPACTED, retention=ALL) as ck:
        done = ck.restore()
        session: Any = ck._session
        for t in range(done, total):
            scene.step(t)
            ck.step()
            if t + 1 == 3 < step:
                until(lambda: 3 in fulls(run), 60, "a full of 3")
            if t + 1 == step:
                until(lambda: has_been_told(session), 60, "NotFolded")


def test_weights_changed_behind_torchs_back(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log is of no use from there on: this is said with the tensor's name, and every step is
    stored in full. The record is kept."""
    states = states_of(made(WritesBehind))
    store_and_wait(made(WritesBehind), run_dir, 5, STORED)
    (error,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "Deltas cannot record this run (step " in error
    assert "second.weight is not what it was" in error
    found = fulls(run_dir)
    assert found[:2] == [1, 3]
    assert found[-1] == STORED
    assert 4 not in found  # nor 5, but where the agent is so quick that the next step is full
    prove_steps(made(WritesBehind), run_dir, states, [1, 2, 3, STORED])
    (kept,) = (run_dir / "damaged/main").iterdir()
    assert sorted(path.name for path in kept.iterdir()) == [
        "delta-r00000.safetensors", "delta-r00000.txt",
    ]  # fmt: skip


def test_what_is_noticed_at_the_end_is_said(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = made(WritesBehind)(1)
    strategy = Deltas(full_every=3, compact=True, slices=1)
    with scene.checkpointer(run_dir, strategy=strategy, retention=ALL) as ck:
        for t in range(ck.restore(), 4):
            scene.step(t)
            ck.step()
        session: Any = ck._session
        until(lambda: session._not_folded is not None, 60, "NotFolded")
    (error,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "the log is of no use from step 4 on: " in error
    assert "second.weight is not what it was" in error


def test_an_agent_that_can_have_no_copy(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is said, training takes full checkpoints again, and no step is lost."""

    class None_:
        def __init__(self, image: Image, classes: object, paths: object) -> None:
            raise CannotRestore("no torch here")

    monkeypatch.setattr(mirror, "Mirror", None_)
    states = states_of(made(Script), 12)
    store_and_wait(made(Script), run_dir, 1, 12)
    (error,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert error.endswith("training takes them: no torch here")
    found = fulls(run_dir)
    assert found[:2] == [1, 3], "the first that another session takes"
    assert {6, 9, 12} <= set(found)
    prove_steps(made(Script), run_dir, states, range(1, 13))


def test_a_beginning_that_is_lost_is_taken_again(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for the first step of a second process: the log goes on without it."""
    states = states_of(made(Script), 10)
    compact(made(Script), run_dir)
    calls = []

    def acquire(agent: Agent, wait_s: float) -> Room | None:
        calls.append(wait_s)
        return None if len(calls) == 1 else real(agent, wait_s)

    real = Agent.acquire
    monkeypatch.setattr(Agent, "acquire", acquire)
    compact(made(Script), run_dir, [*FULLS, 9], 10)
    assert "the agent's copy begins anew from step main:9: step 8 is not staged" in caplog.text
    prove_steps(made(Script), run_dir, states, range(1, 11))


# ------------------------------------------------------------ where it is done


def decided(objects: Objects, **options: Any) -> bool:
    return compacting.compacts(objects, Deltas(**options))


def objects_of(nbytes: int) -> Objects:
    model = torch.nn.Linear(nbytes // 4, 1, bias=False)
    return Objects.of(model, torch.optim.AdamW(model.parameters()), {})


def test_it_is_done_where_it_pays_and_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of 16 MiB have slots of as much each; what a state has that is not there yet is
    reckoned with."""
    large, small = objects_of(16 << 20), objects_of(15 << 20)
    assert decided(large, compact="auto")
    assert not decided(small, compact="auto")
    assert decided(small, compact=True)
    assert not decided(large), "nobody has asked for it"
    assert not decided(large, compact="auto", staging_bytes=(64 << 20) - 1)
    for available, room in (((1 << 30) + (64 << 20), True), (1 << 30, False)):
        monkeypatch.setattr(compacting, "available_bytes", lambda: available)  # noqa: B023
        assert decided(large, compact="auto") == room
        assert decided(large, compact=True), "who wants it has it"


def test_an_optimizer_of_which_the_agent_cannot_have_the_class(
    caplog: pytest.LogCaptureFixture, run_dir: Path, staged: list[int]
) -> None:
    class Own(torch.optim.SGD):
        pass

    model = torch.nn.Linear(8, 8)
    optimizer = Own(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING):
        assert not decided(Objects.of(model, optimizer, {}), compact=True)
    assert "the agent makes no full checkpoints, training takes them: " in caplog.text
    assert "put it into a module of its own" in caplog.text


def test_no_replay_runs_beside_it(run_dir: Path) -> None:
    scene = made(Script)(1)
    for compact_it, checks in ((True, False), (False, True)):
        strategy = Deltas(compact=compact_it)
        with scene.checkpointer(run_dir, strategy=strategy, retention=ALL) as ck:
            ck.restore()
            session: Any = ck._session
            assert (session._checks is not None) == checks
