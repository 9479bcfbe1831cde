"""`Replica` over every optimizer, format and model, and over trainings that do with gradients and
weights what real ones do: done again by the agent (here in a thread), written, and had again, bit
for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from everystep import Replica
from everystep.agent import protocol as p
from everystep.agent.client import Agent
from everystep.agent.sink import Room
from everystep.agent.tail import Tail
from everystep.recovery import blocks
from everystep.strategies import Deltas
from everystep.types import StepRef
from exact.logged import ALL, STORED, TRAINED, Make, fulls, prove, prove_steps, states_of, store
from exact.matrix import LOGGED, Case, inexact
from exact.scenes import Scene, build, seed_all
from exact.test_deltas_stories import (
    EXACT,
    Script,
    WritesBehind,
    WritesOnce,
    WritesWeights,
    made,
)
from states import assert_same_state
from waiting import until

pytestmark = pytest.mark.usefixtures("in_threads")

EACH: Any = Replica(persist_every=1, slices=1)
"""Every step is proved whole, and written."""

FEW: Any = Replica(persist_every=3)

ALWAYS_FULL = ("LBFGS", "LBFGS+wolfe")

GROWS = Case("SGD+momentum/loop", "master", "sparse")
"""Its momentum is a sparse tensor, which has another form after each step."""


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def store_and_wait(make: Make, run: Path, strategy: Any, step: int) -> Scene:
    """A first life, which after a step waits until it has heard that it could not be folded."""
    scene = make(1)
    with scene.checkpointer(run, strategy=strategy, retention=ALL) as ck:
        for t in range(ck.restore(), STORED):
            scene.step(t)
            ck.step()
            if t + 1 == step:
                session: Any = ck._session
                until(lambda: session._unfoldable is not None, 60, "NotFolded")  # noqa: B023
    return scene


@pytest.mark.parametrize("case", [case for case in LOGGED if case != GROWS], ids=str)
def test_the_agent_does_every_step_again(
    case: Case, run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 64)  # what can be cut is folded block by block

    def make(seed: int) -> Scene:
        return build(*case, seed=seed)

    states = states_of(make)
    stored = store(make, run_dir, strategy=FEW)
    found, errors = fulls(run_dir), errors_in(caplog)
    if case.optimizer in ALWAYS_FULL or inexact(case):
        assert len(errors) == 1
        assert "Replica cannot record this run" in errors[0]
        assert found[-1] == STORED
    else:
        assert not errors
        assert found == ([1, 2, 3, 6, 7] if case.model == "frozen" else [1, 3, 6, 7])
    if inexact(case):
        return
    assert_same_state(states[STORED], stored.state())
    scene = prove_steps(make, run_dir, states, [found[1], STORED])
    assert_same_state(states[TRAINED], scene.steps(STORED, TRAINED).state())


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
def test_every_step_is_exact(
    kind: type[Script], run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    every = range(1, STORED + 1)
    prove(made(kind), run_dir, kind.__name__, strategy=EACH, expected_fulls=every)
    assert not caplog.records, "nothing to complain of"


def test_logged_as_well(run_dir: Path) -> None:
    """Any step can be had, and few are written whole."""
    strategy: Any = Replica(persist_every=4, log=True)
    prove(made(EXACT[0]), run_dir, "both", strategy=strategy, expected_fulls=(1, 4, 7))


# ------------------------------------------------------------ odd sizes, orders and types


class Odd(nn.Module):
    """Tensors whose numbers of elements leave nothing aligned, and one that is not row-major."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for elements in (1, 3, 17, 5, 1_000_003, 31):
            self.register_parameter(f"p{elements}", nn.Parameter(torch.randn(elements).to(dtype)))
        weight = torch.randn(5, 3, 3, 3).to(dtype, memory_format=torch.channels_last)
        self.conv = nn.Parameter(weight)
        self.turned = nn.Parameter(torch.randn(7, 3).to(dtype).t())
        self.none = nn.Parameter(torch.empty(0, 4).to(dtype))


class IsOdd(Script):
    """An odd model, trained by one of torch's ways."""

    options: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    dtype = torch.float32
    kind: Any = torch.optim.AdamW

    def __init__(self, seed: int) -> None:
        seed_all(seed)
        self.net: Any = Odd(self.dtype)
        self.optimizer = self.kind(self.net.parameters(), lr=0.05, **self.options)
        self.extras = {}

    def backward(self, t: int, part: int = 0) -> None:
        generator = torch.Generator().manual_seed(t)
        loss = torch.zeros((), dtype=torch.float32)
        for each in self.net.parameters():
            noise = torch.randn(each.shape, generator=generator)
            loss = loss + (each.float() * noise).sum() + F.softplus(each.float()).sum()
        loss.backward()


WAYS = {
    "loop": (torch.optim.AdamW, torch.float32, {"foreach": False}),
    "foreach": (torch.optim.AdamW, torch.float32, {"foreach": True}),
    "fused": (torch.optim.AdamW, torch.float32, {"fused": True, "amsgrad": True}),
    "bf16": (torch.optim.AdamW, torch.bfloat16, {"fused": True}),
    "bf16 loop": (torch.optim.SGD, torch.bfloat16, {"foreach": False, "momentum": 0.9}),
    "fp64": (torch.optim.Adam, torch.float64, {"foreach": True}),
    "sgd": (torch.optim.SGD, torch.float32, {"fused": True, "momentum": 0.9, "nesterov": True}),
    "fp16": (torch.optim.RMSprop, torch.float16, {"centered": True, "momentum": 0.5}),
}


@pytest.mark.parametrize("way", WAYS)
def test_tensors_that_are_aligned_nowhere(
    way: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the slot, not in the record."""
    kind, dtype, options = WAYS[way]
    script = type("Way", (IsOdd,), {"kind": kind, "dtype": dtype, "options": options})
    every: Any = Replica(persist_every=2, slices=1)
    states = states_of(made(script), STORED)
    store(made(script), run_dir, strategy=every)
    assert fulls(run_dir) == [1, 2, 4, 6, 7]
    assert not caplog.records
    prove_steps(made(script), run_dir, states, [2, STORED])


# ------------------------------------------------------------ gaps


class UnfreezesLater(Script):
    """A layer that is frozen for some steps, and whose slots are made then."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.net.first.requires_grad_(False)

    def step(self, t: int) -> None:
        if t == 3:
            self.net.first.requires_grad_(True)
        super().step(t)


class FreezesLater(Script):
    """A layer that has slots, and is not trained any more."""

    def step(self, t: int) -> None:
        if t == 3:
            self.net.second.requires_grad_(False)
        super().step(t)


def ready(kind: type[Script], t: int) -> Make:
    """Objects as they are at a step."""

    def make(seed: int) -> Scene:
        script = kind(seed)
        if kind is UnfreezesLater and t > 3:
            script.net.first.requires_grad_(True)
        if kind is FreezesLater and t > 3:
            script.net.second.requires_grad_(False)
        return script.scene()

    return make


@pytest.mark.parametrize("kind", [UnfreezesLater, FreezesLater])
def test_layers_that_are_frozen_or_thawed(kind: type[Script], run_dir: Path) -> None:
    states = states_of(made(kind))
    store(made(kind), run_dir, strategy=EACH)
    assert fulls(run_dir) == list(range(1, STORED + 1))
    prove_steps(ready(kind, 3), run_dir, states, [3])
    scene = prove_steps(ready(kind, STORED), run_dir, states, [4, STORED])
    assert_same_state(states[TRAINED], scene.steps(STORED, TRAINED).state())


class AddsLater(Script):
    """A layer that the optimizer is given in the fourth step."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.optimizer = torch.optim.AdamW(self.net.second.parameters(), lr=0.05)

    def add(self) -> None:
        rest = [*self.net.first.parameters(), *self.net.norm.parameters()]
        self.optimizer.add_param_group({"params": rest, "lr": 0.01})

    def step(self, t: int) -> None:
        if t == 3:
            self.add()
        self.net.zero_grad()
        super().step(t)


def test_parameters_that_are_added_later(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One step is taken whole; the copy goes on from there."""
    states = states_of(made(AddsLater))
    store(made(AddsLater), run_dir, strategy=FEW)
    assert fulls(run_dir) == [1, 3, 4, 6, 7]
    assert not errors_in(caplog)

    def make(seed: int) -> Scene:
        script = AddsLater(seed)
        script.add()
        return script.scene()

    prove_steps(made(AddsLater), run_dir, states, [3])
    prove_steps(make, run_dir, states, [4, STORED])


def test_weights_changed_by_hand_once(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was folded before is written, that step comes whole, and the copy goes on from it."""
    states = states_of(made(WritesOnce))
    store(made(WritesOnce), run_dir, strategy=Replica(persist_every=100))
    assert fulls(run_dir) == [1, 3, 4, 7]
    scene = prove_steps(made(WritesOnce), run_dir, states, [3, 4, 7])
    assert_same_state(states[TRAINED], scene.steps(STORED, TRAINED).state())
    assert not errors_in(caplog)


def test_the_copy_is_told_to_give_way_between_the_deltas_and_the_full(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly that goes: earlier, a delta would lead nowhere; later, the full would be taken
    for the copy that is to give way."""
    said: list[str] = []
    send, slowed = Agent._send, threading.Event()

    def noted(agent: Agent, message: Any, fd: int | None = None) -> None:
        if isinstance(message, p.Rebase | p.Describe | p.Seal | p.Record):
            said.append(f"{type(message).__name__} {getattr(message, 'step', '')}".strip())
        send(agent, message, fd)

    def slow(real: Callable[..., None]) -> Callable[..., None]:
        def call(*words: Any) -> None:
            slowed.wait(0.1)
            real(*words)

        return call

    monkeypatch.setattr(Agent, "_send", noted)
    monkeypatch.setattr(Tail, "publish", slow(Tail.publish))
    monkeypatch.setattr(Tail, "rebase", slow(Tail.rebase))
    store(made(WritesOnce), run_dir, strategy=Replica(persist_every=100))
    assert said == [
        *("Rebase 1", "Describe", "Seal 1", "Record 2", "Record 3"),
        *("Rebase 4", "Seal 4", "Record 5", "Record 6", "Record 7"),
    ]
    assert fulls(run_dir) == [1, 3, 4, 7]


def test_a_step_that_comes_whole_and_is_lost(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy could not begin with it: the next one comes whole, too, and nobody waits."""
    calls = []

    def acquire(agent: Agent, wait_s: float) -> Room | None:
        calls.append(wait_s)
        return None if len(calls) == 2 else real(agent, wait_s)

    real = Agent.acquire
    monkeypatch.setattr(Agent, "acquire", acquire)
    states = states_of(made(WritesOnce))
    store(made(WritesOnce), run_dir, strategy=Replica(persist_every=100))
    assert fulls(run_dir) == [1, 3, 5, 7]
    assert "the full that the copy begins with is lost" in caplog.text
    prove_steps(made(WritesOnce), run_dir, states, [3, 5, 7])


def test_a_slot_that_takes_another_form(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has no place in the copy's slot: this is said, and every step is stored in full."""

    def make(seed: int) -> Scene:
        return build(*GROWS, seed=seed)

    states = states_of(make, STORED)
    store_and_wait(make, run_dir, FEW, 3)
    (error,) = errors_in(caplog)
    assert "momentum_buffer.indices has got another form" in error
    found = fulls(run_dir)
    assert found[0] == 1
    assert found[-1] == STORED
    prove_steps(make, run_dir, states, found)


def test_weights_changed_by_hand_always(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every step is stored in full in the end, and this is said."""
    kind = WritesWeights
    states = states_of(made(kind))
    store(made(kind), run_dir, strategy=FEW)
    (error,) = errors_in(caplog)
    assert "Replica cannot record this run" in error
    prove_steps(made(kind), run_dir, states, [STORED])


def test_weights_changed_behind_torchs_back(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy is another one then, and this is seen at once, with the tensor's name; what is
    stored is what training had."""
    kind = WritesBehind
    states = states_of(made(kind), STORED)
    store_and_wait(made(kind), run_dir, EACH, 4)
    (error,) = errors_in(caplog)
    assert "Replica cannot record this run (step 4: " in error
    assert "second.weight is not what it was" in error
    found = fulls(run_dir)
    assert found[:3] == [1, 2, 3]
    assert found[3] == 5, "the step that it is noticed in is the first to be stored whole"
    assert found[-1] == STORED
    prove_steps(made(kind), run_dir, states, found)
    kept = sorted(path.name for path in (run_dir / "damaged/main/000000000004").iterdir())
    assert kept == ["delta-r00000.safetensors", "delta-r00000.txt"]


# ------------------------------------------------------------ back and forth


def test_what_is_noticed_at_the_end_is_said(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No step comes that could be stored whole."""
    scene = WritesBehind(1).scene()
    with scene.checkpointer(run_dir, strategy=EACH, retention=ALL) as ck:
        ck.restore()
        for t in range(4):
            scene.step(t)
            ck.step()
    (error,) = errors_in(caplog)
    assert "the newest steps are not stored: step 4: " in error
    assert "second.weight is not what it was" in error
    assert fulls(run_dir) == [1, 2, 3]


def test_back_in_time_and_on(run_dir: Path) -> None:
    """In one process: each restore begins the copy anew."""
    states = states_of(made(Script))
    scene = Script(1).scene()
    strategy: Any = Replica(persist_every=2)
    with scene.checkpointer(run_dir, strategy=strategy, retention=ALL) as ck:
        done = ck.restore()
        for last, back in ((5, 4), (7, None), (8, 2)):
            for t in range(done, last):
                scene.step(t)
                ck.step()
            assert_same_state(states[last], scene.state())
            done = ck.restore(None if back is None else StepRef("main", back))
            assert done == (last if back is None else back)
            assert_same_state(states[done], scene.state())
        for t in range(done, 4):
            scene.step(t)
            ck.step()
    other = Script(2).scene()
    with other.checkpointer(run_dir, strategy=Deltas(check=False), retention=ALL) as ck:
        assert ck.restore() == 4
    assert_same_state(states[4], other.state())
