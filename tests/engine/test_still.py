"""Tensors that do not change are stored once, and never trusted without proof."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from engine.harness import MOVED, HeldDevice, Run
from everystep.engine.still import LEAST_BYTES, WORTH_BYTES, Still
from everystep.state.tree import Held
from everystep.types import TensorSpec

SIDE = 600
assert 4 * SIDE * SIDE >= WORTH_BYTES


class _Adapter(nn.Module):
    """A frozen base, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(SIDE, SIDE), requires_grad=False)
        self.other = nn.Parameter(torch.randn(SIDE, SIDE), requires_grad=False)
        self.tiny = nn.Parameter(torch.randn(3), requires_grad=False)
        self.adapter = nn.Linear(SIDE, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, SIDE) to (batch, 8)."""
        out: torch.Tensor = self.adapter(x @ self.base @ self.other / SIDE)
        return out


BASE, OTHER = "/models/model/base", "/models/model/other"


class Scene:
    """A run with a frozen base."""

    def __init__(self, device: HeldDevice | None = None) -> None:
        torch.manual_seed(1)
        self.model: Any = _Adapter()
        self.optimizer = Adam([p for p in self.model.parameters() if p.requires_grad])
        self.device = device or HeldDevice()
        self.run = Run(self.model, self.optimizer, device=self.device, still=True)

    def step(self, times: int = 1) -> None:
        """Train and end a step."""
        for _ in range(times):
            self.optimizer.zero_grad()
            self.model(torch.randn(2, SIDE)).square().sum().backward()
            self.optimizer.step()
            self.run.step()


def test_what_nobody_writes_is_stored_once() -> None:
    scene = Scene()
    with scene.run as run:
        scene.step(4)
        run.check()
        assert run.still_writes == [(1, {BASE, OTHER})]  # not the tiny one
        for step in run.sink.steps.values():
            assert step.still and not {BASE, OTHER} & set(step.tensors)
        assert {cost.copied_bytes for cost in run.costs[1:]} == {run.costs[1].state_bytes}
        assert run.costs[1].state_bytes < 4 * SIDE * SIDE


def test_without_a_way_to_store_them_all_is_copied() -> None:
    model: Any = _Adapter()
    optimizer = Adam(model.adapter.parameters())
    with Run(model, optimizer) as run:
        run.step()
        run.check()
        step = run.sink.steps[1]
        assert not step.still and {BASE, OTHER} <= set(step.tensors)


def _held(name: str, nbytes: int) -> Held:
    spec = TensorSpec(key=f"/{name}", dtype="uint8", shape=(nbytes,))
    return Held(torch.zeros(nbytes, dtype=torch.uint8), spec)


@pytest.mark.parametrize(
    ("sizes", "writers", "chosen"),
    [
        ([WORTH_BYTES], [None], {"/0"}),
        ([WORTH_BYTES - 1], [None], set()),
        ([WORTH_BYTES, WORTH_BYTES], ["optimizer", None], {"/1"}),
        ([WORTH_BYTES, WORTH_BYTES], ["optimizer", "optimizer"], set()),
        ([WORTH_BYTES - LEAST_BYTES, LEAST_BYTES], [None, None], {"/0", "/1"}),
        ([WORTH_BYTES - LEAST_BYTES + 1, LEAST_BYTES - 1], [None, None], set()),
        ([WORTH_BYTES, LEAST_BYTES - 1], [None, None], {"/0"}),
    ],
)
def test_what_is_worth_it(sizes: list[int], writers: list[str | None], chosen: set[str]) -> None:
    fixed = [_held(str(number), nbytes) for number, nbytes in enumerate(sizes)]
    assert Still().chosen(fixed, writers) == chosen


def test_a_visible_change_is_stored_from_then_on() -> None:
    scene = Scene()
    with scene.run as run:
        scene.step(2)
        run.engine.settle()  # the step before is proved while it is still true
        with torch.no_grad():
            scene.model.base.mul_(2)
        scene.step(2)
        run.check()
        assert run.still_writes == [(1, {BASE, OTHER}), (3, {OTHER})]
        assert BASE in run.sink.steps[3].tensors and BASE in run.sink.steps[4].tensors
        run.engine.settle()
        with torch.no_grad():
            scene.model.other.mul_(2)
        scene.step()
        run.check()
        assert not run.sink.steps[5].still and len(run.still_writes) == 2
        assert {BASE, OTHER} <= set(run.sink.steps[5].tensors)


def test_a_change_in_the_window_is_not_lost() -> None:
    """The step before it is given up, or sealed as it was: the proof comes at its end."""
    scene = Scene()
    with scene.run as run:
        scene.step(2)
        with torch.no_grad():
            scene.model.base.mul_(2)
        scene.step(2)
        run.engine.settle()
        assert run.sink.sealed in ([1, 3, 4], [1, 2, 3, 4])
        assert (2 in run.sink.sealed) == (run.costs[1].error is None)
        run.check(*run.sink.sealed)
        assert BASE in run.sink.steps[3].tensors


def test_a_hidden_change_is_loud_and_stored_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    with scene.run as run, caplog.at_level(logging.ERROR, "everystep"):
        scene.step(2)
        run.engine.settle()
        scene.model.base.data.mul_(2)
        scene.step(3)
        run.check(1, 2, 4, 5)
        assert "models.model.base was written behind torch's back" in str(run.costs[2].error)
        assert "step 3 is not staged" in caplog.text
        assert BASE in run.sink.steps[4].tensors and run.sink.steps[4].still
        assert run.still_writes[1:] == [(4, {OTHER})]


def test_hidden_changes_of_many_cost_one_step() -> None:
    scene = Scene()
    with scene.run as run:
        scene.step(2)
        run.engine.settle()
        for tensor in (scene.model.base, scene.model.other):
            tensor.data.mul_(2)
        scene.step(2)
        run.check(1, 2, 4)
        assert "and 1 more was written" in str(run.costs[2].error)


def test_one_flipped_bit_is_seen() -> None:
    scene = Scene()
    with scene.run as run:
        scene.step(1)
        scene.model.other.data.view(torch.int32)[-1, -1] ^= 1 << 31
        scene.step(1)
        run.engine.settle()
        assert run.sink.sealed == [1]


def test_unfreezing() -> None:
    """What an optimizer begins to write is copied from then on."""
    scene = Scene()
    with scene.run as run:
        scene.step(2)
        scene.model.base.requires_grad_(True)
        scene.optimizer.add_param_group({"params": [scene.model.base]})
        scene.step(3)
        run.check()
        for number in run.sink.sealed:
            assert (BASE in run.sink.steps[number].tensors) == (number > 2)
        assert run.sink.sealed[-2:] == [4, 5]
        assert all((cost.error or MOVED).startswith(MOVED) for cost in run.costs)


def test_a_tensor_in_other_memory_is_stored_again() -> None:
    scene = Scene()
    with scene.run as run:
        scene.step(2)
        run.engine.settle()
        scene.model.base.data = scene.model.base.data * 2
        scene.step(3)
        run.check()
        assert run.sink.sealed[-2:] == [4, 5]


def test_frozen_parameters_within_an_optimizer() -> None:
    model: Any = _Adapter()
    optimizer = SGD(model.parameters(), lr=0.1)
    with Run(model, optimizer, still=True) as run:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, SIDE)).square().sum().backward()
            optimizer.step()
            run.step()
        run.check()
        assert run.still_writes == [(1, {BASE, OTHER})]


class _Order(HeldDevice):
    """Notes the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def stable(self) -> None:
        """Note it."""
        self.calls.append("stable")

    def fingerprint(self, source: torch.Tensor) -> str:
        """Note it."""
        self.calls.append("fingerprint")
        return super().fingerprint(source)


def test_what_was_asked_of_the_device_comes_before_the_first_fingerprint() -> None:
    """On an accelerator the values may not be there yet when they are asked for."""
    device = _Order()
    scene = Scene(device)
    with scene.run:
        scene.step()
    assert device.calls[:2] == ["stable", "fingerprint"]
