"""Whole trainings with all that trainings have, interrupted, sent back in time and forked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from everystep import Retention
from everystep.store.run import Run
from everystep.types import StepRef
from exact.scenes import Scene, batch, build, seed_all
from exact.zoo import Plain
from states import Frozen, assert_same_state

STEPS = 9
OVERFLOW = 4
ALL = Retention(keep_last=None)


def everything(seed: int, shift: int = 0) -> Scene:
    """Dropout, a norm, two groups, a schedule, a scaler that overflows once, accumulated and
    clipped gradients, an average of the weights, generators of the user's own, and a plain dict.

    Args:
        shift: another number means other batches.
    """
    seed_all(seed)
    net = Plain(norm=True)
    groups = [{"params": net.first.parameters()}, {"params": net.second.parameters(), "lr": 0.02}]
    groups.append({"params": net.norm.parameters()})
    optimizer = torch.optim.AdamW(groups, lr=0.05, amsgrad=True)
    schedule = OneCycleLR(optimizer, max_lr=[0.1, 0.05, 0.1], total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    python, numpy, own = random.Random(seed), np.random.default_rng(seed), torch.Generator()
    own.manual_seed(seed)
    counted: dict[str, Any] = {"losses": [], "best": float("inf")}

    def step(t: int) -> None:
        optimizer.zero_grad()
        for micro in range(3):
            x, y = batch(10 * t + micro + shift)
            x = x + 0.01 * torch.randn(x.shape, generator=own) + 0.01 * numpy.standard_normal()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(net(x * (1 + 0.01 * python.gauss(0, 1))).float(), y) / 3
            if t == OVERFLOW:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            counted["losses"].append(float(loss.detach()))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        average.update_parameters(net)
        counted["best"] = min(counted["best"], counted["losses"][-1])

    extras = {
        "schedule": schedule, "scaler": scaler, "average": average, "python": python,
        "numpy": numpy, "torch": own, "counted": counted,
    }  # fmt: skip
    return Scene({"net": net}, {"optimizer": optimizer}, extras, step)


@pytest.fixture(scope="module")
def uninterrupted() -> list[Frozen]:
    """The state after each number of steps, without any checkpointer."""
    scene = everything(1)
    states = [scene.state()]
    for t in range(STEPS):
        scene.step(t)
        states.append(scene.state())
    return states


def train_stored(scene: Scene, ck: Any, first: int, last: int) -> None:
    """Train and store steps `first` to `last - 1`."""
    for t in range(first, last):
        scene.step(t)
        ck.step()


def test_the_training_does_all_it_claims() -> None:
    scene = everything(1)
    scales = []
    for t in range(STEPS):
        before = [p.detach().clone() for p in scene.models["net"].parameters()]
        scene.step(t)
        scales.append(scene.extras["scaler"].get_scale())
        moved = [
            not torch.equal(p, b)
            for p, b in zip(scene.models["net"].parameters(), before, strict=True)
        ]
        assert all(moved) == (t != OVERFLOW) == any(moved)
    assert max(scales) > 64.0, "it grew"
    assert scales[OVERFLOW] < scales[OVERFLOW - 1], "it backed off"


@pytest.mark.parametrize("stored", range(1, STEPS))
def test_every_step_is_a_place_to_go_on_from(
    stored: int, run_dir: Path, uninterrupted: list[Frozen]
) -> None:
    first = everything(1)
    with first.checkpointer(run_dir) as ck:
        train_stored(first, ck, ck.restore(), stored)
    second = everything(2)
    with second.checkpointer(run_dir) as ck:
        assert ck.restore() == stored
        assert_same_state(uninterrupted[stored], second.state())
        train_stored(second, ck, stored, STEPS)
    assert_same_state(uninterrupted[STEPS], second.state())


def test_interrupted_five_times(run_dir: Path, uninterrupted: list[Frozen]) -> None:
    lives = 0
    for seed, (wanted, lost) in enumerate([(1, 0), (3, 2), (4, 0), (6, 1), (7, 2), (STEPS, 0)], 1):
        scene = everything(seed)
        with scene.checkpointer(run_dir) as ck:
            done = ck.restore()
            assert_same_state(uninterrupted[done], scene.state())
            train_stored(scene, ck, done, wanted)
            scene.steps(wanted, wanted + lost)  # steps that were done and not stored
        lives += 1
    assert lives == 6
    assert_same_state(uninterrupted[STEPS], scene.state())


@pytest.mark.parametrize("seed", range(3))
def test_time_machine(seed: int, run_dir: Path, uninterrupted: list[Frozen]) -> None:
    """The same live objects go back to earlier steps, time and again."""
    scene = everything(1)
    with scene.checkpointer(run_dir, retention=ALL) as ck:
        train_stored(scene, ck, ck.restore(), STEPS)
        steps = random.Random(seed)
        for _ in range(4):
            back = steps.randrange(1, STEPS)
            assert ck.restore(step=back) == back
            assert_same_state(uninterrupted[back], scene.state())
            train_stored(scene, ck, back, STEPS)
            assert_same_state(uninterrupted[STEPS], scene.state())
            assert ck.steps() == list(range(1, STEPS + 1))


def test_fork(run_dir: Path, uninterrupted: list[Frozen]) -> None:
    """Another future from step 3 on; the first one stays, and both go on exactly."""
    scene = everything(1)
    with scene.checkpointer(run_dir, retention=ALL) as ck:
        train_stored(scene, ck, ck.restore(), 6)
    other = everything(2, shift=1000)
    with other.checkpointer(run_dir, retention=ALL) as ck:
        assert ck.restore(step=3) == 3
        assert_same_state(uninterrupted[3], other.state())
        train_stored(other, ck, 3, 6)
    forked = other.state()
    with pytest.raises(AssertionError):
        assert_same_state(uninterrupted[6], forked)
    (name,) = set(Run.open(run_dir).listing().timelines) - {"main"}

    again = everything(3)
    with again.checkpointer(run_dir, retention=ALL) as ck:
        assert ck.restore() == 6
        assert_same_state(forked, again.state())
        assert ck.restore(step=StepRef("main", 6)) == 6
        assert_same_state(uninterrupted[6], again.state())
        train_stored(again, ck, 6, STEPS)
        assert_same_state(uninterrupted[STEPS], again.state())
        assert ck.restore(step=StepRef(name, 6)) == 6
        assert_same_state(forked, again.state())


# ------------------------------------------------------------------------------ data loaders


def with_loader(seed: int, workers: int) -> tuple[Scene, Callable[[], Iterator[Any]]]:
    """A training over shuffled data, 5 batches an epoch; its step takes what the loader gives."""
    seed_all(seed)
    net = Plain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    numbers = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(18, 6, generator=numbers), torch.randn(18, 3, generator=numbers)
    )
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    seen: dict[str, Any] = {"epoch": 0, "sums": []}

    def batches() -> Iterator[Any]:
        while True:
            yield from loader
            seen["epoch"] += 1

    flowing: list[Iterator[Any]] = []

    def step(t: int) -> None:
        if not flowing:
            flowing.append(batches())
        x, y = next(flowing[0])
        seen["sums"].append(float(x.double().sum()))
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()

    extras = {"loader": loader, "seen": seen}
    return Scene({"net": net}, {"optimizer": optimizer}, extras, step), batches


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stored", [2, 5, 8])
def test_data_loader_within_and_between_epochs(workers: int, stored: int, run_dir: Path) -> None:
    reference, _ = with_loader(1, workers)
    reference.steps(0, 12)
    first, _ = with_loader(1, workers)
    with first.checkpointer(run_dir) as ck:
        train_stored(first, ck, ck.restore(), stored)
    second, _ = with_loader(2, workers)
    with second.checkpointer(run_dir) as ck:
        assert ck.restore() == stored
        second.steps(stored, 12)
    assert second.extras["seen"] == reference.extras["seen"]
    for scene in (reference, second):
        del scene.extras["loader"]  # its state says in which process it was made
    assert_same_state(reference.state(), second.state())


# ------------------------------------------------------------------------------ optimizers


class WithMasters(torch.optim.Optimizer):
    """Momentum over fp32 copies of bf16 parameters that the optimizer keeps to itself, stepped
    with noise from a generator that it keeps as well; with a state that belongs to no parameter,
    and a `state_dict` with more in it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                slot = self.state[p]
                if not slot:
                    slot["master"] = p.float()
                    slot["momentum"] = torch.zeros_like(slot["master"])
                    slot["generator"] = torch.Generator().manual_seed(p.numel()).get_state()
                dice = torch.Generator()
                dice.set_state(slot["generator"])
                noise = torch.randn(p.shape, generator=dice) * 1e-3
                slot["generator"] = dice.get_state()
                slot["momentum"].mul_(0.9).add_(p.grad.float() + noise)
                slot["master"].sub_(slot["momentum"], alpha=group["lr"] / self.calls)
                p.copy_(slot["master"]).mul_(1 - 0.01 * self.state.get("clock", 0.0))
        self.state["clock"] = self.state.get("clock", 0.0) + 0.5

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "calls"})


def with_masters(seed: int) -> Scene:
    """A bf16 model under an optimizer that holds its fp32 masters."""
    seed_all(seed)
    net = Plain().bfloat16()
    optimizer = WithMasters(net.parameters(), lr=1e-3)  # below the resolution of bf16

    def step(t: int) -> None:
        x, y = batch(t)
        net.zero_grad()
        F.mse_loss(net(x.bfloat16()).float(), y).backward()
        optimizer.step()

    return Scene({"net": net}, {"optimizer": optimizer}, {}, step)


def test_masters_inside_the_optimizer(run_dir: Path) -> None:
    prove(with_masters, run_dir)


def inductor(seed: int) -> Scene:
    """A model compiled to machine code."""
    scene = build("AdamW/loop", "fp32", "plain", seed)
    scene.models["net"].compile(fullgraph=True)
    return scene


@pytest.mark.slow
def test_compiled_to_machine_code(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(run_dir.parent / "cache"))
    with inductor_config.patch(compile_threads=1):  # no pool of processes that outlives the test
        prove(inductor, run_dir)
    assert list((run_dir.parent / "cache").rglob("*.so")), "it was compiled"


def prove(make: Callable[[int], Scene], run: Path) -> None:
    """Stored after 3 steps, restored into fresh objects, and 3 more."""
    end = make(1).steps(0, 6).state()
    first = make(1)
    with first.checkpointer(run) as ck:
        train_stored(first, ck, ck.restore(), 3)
    second = make(2)
    with second.checkpointer(run) as ck:
        assert ck.restore() == 3
        assert_same_state(first.state(), second.state())
        train_stored(second, ck, 3, 6)
    assert_same_state(end, second.state())
