"""What a step cost: the parts make the whole."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from engine.harness import HeldDevice, Run
from everystep.engine import meter
from everystep.engine.device import CpuDevice
from everystep.engine.meter import Cost, Lane, Plan
from exact.zoo import Plain
from waiting import until


class Clock:
    """Stands for the time of the host."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(meter, "time", made)
    return made


def test_stalls_are_counted_by_cause(clock: Clock) -> None:
    cost = Cost(step=1, begun_s=100.0)
    for cause, seconds in (("snapshot", 1.0), ("staging", 2.0), ("bookkeeping", 4.0)):
        for _ in range(2):
            with cost.stalled(cause):
                clock.now_s += seconds
            clock.now_s += 16
    assert (cost.snapshot_s, cost.staging_s, cost.bookkeeping_s) == (2.0, 4.0, 8.0)
    assert cost.stall_s == 14.0
    stalls = [lane for lane in cost.lanes if lane.name == "stall"]
    assert sum(lane.stop_s - lane.start_s for lane in stalls) == cost.stall_s
    assert [lane for lane in cost.lanes if lane.name == "snapshot"] == [
        Lane("snapshot", 100.0, 101.0), Lane("snapshot", 117.0, 118.0),
    ]  # fmt: skip


def test_a_stall_that_ends_in_an_error_is_counted(clock: Clock) -> None:
    cost = Cost(step=1, begun_s=100.0)
    with pytest.raises(ValueError, match="now"), cost.stalled("staging"):
        clock.now_s += 3
        raise ValueError("now")
    assert cost.staging_s == 3.0


def test_rates() -> None:
    cost = Cost(step=1, begun_s=0.0)
    assert cost.offload_bytes_per_s is None and cost.snapshot_bytes_per_s is None
    cost.offload_bytes, cost.offload_s = 100, 4.0
    cost.snapshot_bytes, cost.snapshot_s = 30, 2.0
    assert cost.offload_bytes_per_s == 25.0 and cost.snapshot_bytes_per_s == 15.0


def test_a_plan_is_made_of_the_newest_steps() -> None:
    plan = Plan()

    def told(forward_s: float) -> str | None:
        return plan.compare(Cost(step=1, begun_s=0.0, forward_s=forward_s, backward_s=1.0))

    assert [told(1.0) for _ in range(meter._REMEMBERED)] == [None] * meter._REMEMBERED
    assert told(1.1) is None
    assert told(2.0) == "forward 2 s, planned 1 s"
    for _ in range(meter._REMEMBERED):
        told(2.0)
    assert told(2.0) is None  # it is what is expected by now
    assert told(1.0) == "forward 1 s, planned 2 s"


# ---------------------------------------------------------------- in a run


def _trained(device: CpuDevice, steps: int = 6, *, waits: bool = False) -> Run:
    model = Plain(norm=True)
    model.add_module("wide", nn.Linear(300, 300))
    optimizers = {"a": Adam(model.parameters())}
    run = Run(model, optimizers, device=device, truth=False)
    with run:
        for _ in range(steps):
            model(torch.randn(8, 6)).sum().backward()
            for parameter in model.get_submodule("wide").parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizers["a"].step()
            run.step()
            if waits:
                run.step_of(len(run.costs))  # copied beside training, all of it
        run.last = run.engine._cost  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("ahead", [0, 1, 2, 1 << 30])
def test_every_byte_is_counted_once(ahead: int) -> None:
    """What was copied beside training, and what training waited for, in the step where it did."""
    run = _trained(HeldDevice(ahead=ahead), waits=ahead > 2)
    costs = [*run.costs, run.last]  # type: ignore[attr-defined]
    assert run.sink.sealed == [1, 2, 3, 4, 5, 6]
    copied = sum(cost.copied_bytes for cost in run.costs)
    assert copied == 6 * run.costs[0].copied_bytes > 0
    assert sum(cost.offload_bytes + cost.snapshot_bytes for cost in costs) == copied
    assert (sum(cost.offload_bytes for cost in costs) > 0) or ahead < 3
    assert run.costs[0].snapshot_bytes == run.costs[0].copied_bytes  # the first is taken at once


def test_of_what_was_snapshotted_every_byte_is_copied_later() -> None:
    run = _trained(HeldDevice(snapshots=True))
    costs = [*run.costs, run.last]  # type: ignore[attr-defined]
    copied = sum(cost.copied_bytes for cost in run.costs)
    assert all(cost.offload_bytes <= cost.copied_bytes for cost in run.costs)
    assert sum(cost.offload_bytes + cost.snapshot_bytes for cost in costs) >= copied


def test_lanes_lie_within_the_step() -> None:
    run = _trained(HeldDevice(ahead=1 << 30))
    for cost in run.costs[1:]:
        for lane in cost.lanes:
            assert cost.begun_s <= lane.start_s <= lane.stop_s
            if lane.name == "offload":  # of the state that the step left behind
                assert lane.start_s >= cost.begun_s
            else:
                assert lane.stop_s <= cost.ended_s, lane.name
        names = {lane.name for lane in cost.lanes}
        assert {"forward", "backward", "update", "stall"} <= names
        stalls = [lane for lane in cost.lanes if lane.name == "stall"]
        assert sum(lane.stop_s - lane.start_s for lane in stalls) <= cost.stall_s * (1 + 1e-9)
        assert 0 < cost.stall_s < cost.ended_s - cost.begun_s
        assert cost.forward_s + cost.backward_s + cost.update_s < cost.ended_s - cost.begun_s
    assert all(a.ended_s == b.begun_s for a, b in zip(run.costs, run.costs[1:], strict=False))


def test_forward_is_told_from_backward() -> None:
    """In one of the steps at least: a short backward may pass between two looks."""
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(4)))
    optimizer = SGD(model.parameters(), lr=0.1)
    with Run(model, optimizer, device=CpuDevice(), truth=False) as run:

        def is_told() -> bool:
            loss = model(torch.randn(600, 600)).sum()
            began_s = time.monotonic()
            loss.backward()
            was_seen = run.engine._window._forward_until_s is not None
            optimizer.step()
            cost = run.step()
            if was_seen and len(run.costs) > 1:
                assert cost.forward_s > 0 and cost.backward_s > 0
                assert cost.begun_s + cost.forward_s >= began_s
            return was_seen and len(run.costs) > 1

        until(is_told, 60, "a backward to be seen")
        assert threading.current_thread().ident == run.engine._window._training_thread
