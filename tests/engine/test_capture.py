"""The hook before an optimizer's step: nothing that it writes is read any more when it writes."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from engine.harness import HeldDevice, Run
from everystep.engine.device import CpuDevice
from exact.zoo import Codes, Plain
from waiting import until

MODES: dict[str, Callable[[], HeldDevice]] = {
    "waiting": HeldDevice,
    "some done": lambda: HeldDevice(ahead=1),
    "done": lambda: HeldDevice(ahead=1 << 30),
    "snapshots": lambda: HeldDevice(snapshots=True),
}
"""How far copying has come when the optimizer is about to write."""


@pytest.fixture(params=MODES)
def device(request: pytest.FixtureRequest) -> HeldDevice:
    return MODES[request.param]()


class Witness:
    """Sees to it, right before each optimizer writes, that nothing of its own is being read. Made
    after the engine, so that its hooks come after those of the engine."""

    def __init__(self, run: Run, device: HeldDevice) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        for name, optimizer in run.objects.optimizers.items():
            optimizer.register_step_pre_hook(self._hook(name, device))

    def _hook(self, name: str, device: HeldDevice) -> Callable[..., None]:
        def hook(optimizer: Any, *_: Any) -> None:
            self.calls[name] += 1
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            mine += [
                slot
                for slots in optimizer.state.values()
                for slot in slots.values()
                if isinstance(slot, torch.Tensor)
            ]
            assert not device.reads_any(mine), f"{name} writes what is being read"

        return hook


def _loss(model: nn.Module) -> torch.Tensor:
    return F.mse_loss(model(torch.randn(8, 6)), torch.randn(8, 3))


def _run(model: Any, optimizer: Any, device: HeldDevice, extras: Any = None) -> Run:
    return Run(model, optimizer, extras, device=device)


# ---------------------------------------------------------------- what is read while it is written


def test_an_optimizer_waits_for_its_own(device: HeldDevice) -> None:
    model = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 300), nn.Linear(300, 3))
    optimizer = Adam(model.parameters())
    with _run(model, optimizer, device) as run:
        witness = Witness(run, device)
        for _ in range(4):
            _loss(model).backward()
            optimizer.step()
            run.step()
        run.check()
        assert witness.calls["optimizer"] == 4


def test_the_witness_can_see() -> None:
    """A hook that came before the engine's would see a read that is under way."""
    model, device = nn.Linear(300, 300), HeldDevice()
    optimizer = SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(device.reads_any([model.weight])))
    with _run(model, optimizer, device) as run:
        model.weight.grad = torch.ones_like(model.weight)
        run.step()
        run.step()
        until(lambda: device.reads_any([model.weight]), 60, "the weight to be read")
        optimizer.step()
        assert not device.reads_any([model.weight])
    assert seen == [True]


def test_what_another_optimizer_writes_goes_on_being_copied() -> None:
    """While one optimizer writes, the copy of the other's tensor is still under way."""
    model, device = nn.ParameterDict(), HeldDevice()
    model["first"] = nn.Parameter(torch.randn(300, 300))
    model["second"] = nn.Parameter(torch.randn(300, 300))
    optimizers = {name: SGD([model[name]], lr=0.1) for name in ("first", "second")}
    with _run(model, optimizers, device) as run:
        for parameter in model.values():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers.values():
            optimizer.step()  # first before second: so they are copied in this order
        run.step()
        run.step()
        until(lambda: device.reads_any([model["first"]]), 60, "the first to be read")
        optimizers["second"].step()
        assert device.reads_any([model["first"]])  # the second did not wait for it
        optimizers["first"].step()
        assert not device.reads_any([model["first"]])
        run.step()
        run.check()


def test_a_parameter_of_two_optimizers(device: HeldDevice) -> None:
    """Whichever of them comes first."""
    model = Plain()
    everything = list(model.parameters())
    optimizers = {"one": Adam(everything), "two": SGD(everything[1:], lr=0.1, momentum=0.9)}
    with _run(model, optimizers, device) as run:
        Witness(run, device)
        for order in (["one", "two"], ["two", "one"], ["two"], ["one"], ["two", "two"]):
            _loss(model).backward()
            for name in order:
                optimizers[name].step()
            run.step()
        run.check()
        assert [cost.error for cost in run.costs] == [None] * 5


def test_optimizers_in_the_backward(device: HeldDevice) -> None:
    """Each parameter is updated as soon as its gradient is there, and the gradient freed."""
    model = Plain(norm=True)
    optimizers: dict[str, Optimizer] = {
        name: AdamW([parameter], lr=0.01) for name, parameter in model.named_parameters()
    }
    names = {parameter: name for name, parameter in model.named_parameters()}

    def update(parameter: torch.Tensor) -> None:
        mine = optimizers[names[parameter]]  # type: ignore[index]
        mine.step()
        mine.zero_grad()

    with _run(model, optimizers, device) as run:
        witness = Witness(run, device)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(4):
            _loss(model).backward()
            run.step()
        run.check()
        assert set(witness.calls.values()) == {4} and len(witness.calls) == len(optimizers)


@pytest.mark.parametrize("updates", [0, 1, 3])
def test_several_updates_for_one_checkpoint(device: HeldDevice, updates: int) -> None:
    model = Plain(norm=True)
    optimizer = Adam(model.parameters())
    with _run(model, optimizer, device) as run:
        witness = Witness(run, device)
        for _ in range(4):
            for _ in range(updates):
                _loss(model).backward()
                optimizer.step()
            run.step()
        run.check()
        assert witness.calls["optimizer"] == 4 * updates


def test_accumulated_gradients(device: HeldDevice) -> None:
    """Several checkpoints for one update, and forwards that change buffers between them."""
    model = Plain(norm=True)
    optimizer = Adam(model.parameters())
    with _run(model, optimizer, device) as run:
        for micro in range(7):
            _loss(model).backward()
            if micro % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            run.step()
        run.check()


def test_a_skipped_update(device: HeldDevice) -> None:
    """A GradScaler leaves the optimizer out when a gradient is infinite."""
    model = Plain()
    optimizer = Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    with _run(model, optimizer, device, {"scaler": scaler}) as run:
        witness = Witness(run, device)
        for number in range(5):
            optimizer.zero_grad()
            scaler.scale(_loss(model)).backward()
            if number == 2:
                next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            run.step()
        run.check()
        assert witness.calls["optimizer"] == 4


def test_an_optimizer_that_evaluates_the_model(device: HeldDevice) -> None:
    """LBFGS writes parameters, and forwards write buffers, between its closures."""
    model = Plain(norm=True)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        return loss

    with _run(model, optimizer, device) as run:
        witness = Witness(run, device)
        for _ in range(4):
            optimizer.step(closure)
            run.step()
        run.check()
        assert witness.calls["optimizer"] == 4


def test_sparse_gradients(device: HeldDevice) -> None:
    model = Codes(sparse=True)
    table, *dense = model.parameters()
    optimizers = {"sparse": torch.optim.SparseAdam([table], lr=0.1), "dense": Adam(dense)}
    with torch.sparse.check_sparse_tensor_invariants(), _run(model, optimizers, device) as run:
        Witness(run, device)
        for _ in range(4):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            model(torch.randn(8, 6)).square().sum().backward()
            for optimizer in optimizers.values():
                optimizer.step()
            run.step()
        run.check()


@pytest.fixture(scope="session")
def zero() -> Any:
    """Importing it runs into deprecations of torch's own, and opens an event loop for good."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_around_another(zero: Any, device: HeldDevice) -> None:
    """One that is told of a step by its wrapper."""
    model = Plain()
    optimizer = zero(model.parameters(), optimizer_class=Adam, lr=0.01)
    with _run(model, optimizer, device) as run:
        witness = Witness(run, device)
        for _ in range(4):
            _loss(model).backward()
            optimizer.step()
            run.step()
        run.check()
        assert witness.calls["optimizer"] == 4


@pytest.mark.slow
def test_a_compiled_update() -> None:
    model, device = Plain(), HeldDevice(ahead=1 << 30)
    optimizer = Adam(model.parameters(), lr=torch.tensor(0.01))
    update = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    with _run(model, optimizer, device) as run:
        witness = Witness(run, device)
        for _ in range(4):
            optimizer.zero_grad()
            _loss(model).backward()
            update()
            run.step()
        run.check()
        assert witness.calls["optimizer"] == 4


@pytest.mark.parametrize("way", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_writes_of_an_unhooked_optimizer_are_seen(way: dict[str, bool]) -> None:
    """What an optimizer writes that the engine was not told of is noticed, but for fused kernels:
    they write as `.data` does, unseen by torch. (The hook does not depend on it.)"""
    model, device = nn.Linear(300, 300), HeldDevice()
    known, unknown = SGD(model.parameters(), lr=0.1), Adam(model.parameters(), **way)
    with _run(model, known, device) as run:
        for number in range(1, 5):
            model(torch.randn(2, 300)).sum().backward()
            known.step()
            run.step()
            if number == 2:
                until(lambda: device.reads_any([model.weight]), 60, "the weight to be read")
                version = model.weight._version
                unknown.step()
                seen = model.weight._version != version
        run.engine.settle()
        assert seen == ("fused" not in way)
        assert (2 in run.sink.sealed) != seen
        if seen:
            run.check(1, 3, 4)
            assert "was written while it was copied" in str(run.costs[1].error)


# ---------------------------------------------------------------- snapshots


@pytest.mark.parametrize("budget", [0, 1, 2, 3, None])
def test_a_budget_of_snapshots_is_kept(budget: int | None) -> None:
    """Of three tensors as many as fit are snapshotted, and the others copied in the hook."""
    size = 1100 * 1100 * 4  # too large for two to be one task

    class Counting(HeldDevice):
        snapshotted = 0

        def snapshot(self, sources: Any) -> Any:
            self.snapshotted += sum(source.nbytes for source in sources)
            return super().snapshot(sources)

    device = Counting(snapshots=True)
    model = nn.ParameterList(nn.Parameter(torch.randn(1100, 1100)) for _ in range(3))
    other = nn.Parameter(torch.randn(1100, 1101))  # held before all of them
    model.append(other)
    optimizers = {"other": SGD([other], lr=0.1), "three": SGD(list(model)[:3], lr=0.1)}
    limit = None if budget is None else budget * size
    with Run(model, optimizers, device=device, snapshot_bytes=limit) as run:
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers.values():
            optimizer.step()
        run.step()
        run.step()
        until(lambda: device.reads_any([other]), 60, "the first to be read")
        device.snapshotted = 0
        optimizers["three"].step()
        assert device.snapshotted == size * (3 if budget is None else budget)
        run.step()
        run.check()


def test_a_snapshot_counts_all_that_it_takes() -> None:
    """Of a tensor of which a rank stores a part, all is snapshotted for the hash of the whole."""
    from everystep.engine.tasks import Large, Member, Owned
    from everystep.state.tree import Held
    from everystep.types import Piece, TensorSpec

    tensor = torch.randn(100)
    spec = TensorSpec(key="/t", dtype="float32", shape=(100,), replicated=True)
    member = Member(Held(tensor, spec), Owned(Piece("/t", 0, 10), 0, 0), whole=True)
    task = Large([member], None)
    assert (task.nbytes, task.kept_bytes) == (40, 400)
    device = CpuDevice(snapshots=True)
    task.snapshot(device)
    assert sum(kept.nbytes for kept in task._kept or []) == task.kept_bytes
    task.forget()
    assert task._kept is None
