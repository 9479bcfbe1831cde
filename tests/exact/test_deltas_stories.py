"""Trainings that do with gradients, weights and optimizers what real ones do, logged as deltas:
each step that can be had is exact, and what cannot be had is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from everystep.deltas.compressors import Quantize8, TopK
from everystep.deltas.hooks import compress
from everystep.errors import CannotRestore
from everystep.strategies import Deltas
from everystep.types import StepRef
from exact.logged import ALL, LOGGED, STORED, fulls, prove, prove_steps, states_of, store
from exact.scenes import Scene, batch, seed_all
from exact.test_stories import STEPS, everything, train_stored, with_loader
from exact.zoo import Plain
from states import Frozen, assert_same_state, state_of

pytestmark = pytest.mark.usefixtures("in_threads")

EVERY = Deltas(full_every=1000, batch=3, slices=1, check=False)
"""All of the state is hashed at every step."""


class Script:
    """A plain training, of which a test replaces parts."""

    def __init__(self, seed: int) -> None:
        seed_all(seed)
        self.net = Plain(norm=True)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.extras: dict[str, Any] = {}
        self.own = torch.Generator().manual_seed(3)

    def backward(self, t: int, part: int = 0) -> None:
        x, y = batch(10 * t + part)
        F.mse_loss(self.net(x), y).backward()

    def step(self, t: int) -> None:
        self.optimizer.zero_grad()
        self.backward(t)
        self.optimizer.step()

    def scene(self) -> Scene:
        return Scene({"net": self.net}, {"optimizer": self.optimizer}, self.extras, self.step)


def made(kind: type[Script]) -> Callable[[int], Scene]:
    return lambda seed: kind(seed).scene()


# ------------------------------------------------------------ what is exact


class AddsNoise(Script):
    """Noise on gradients, in place, in another tensor's stead, and through `.data`."""

    def step(self, t: int) -> None:
        self.optimizer.zero_grad()
        self.backward(t)
        for number, p in enumerate(self.net.parameters()):
            assert p.grad is not None
            noise = 0.01 * torch.randn(p.shape)
            if number % 3 == 0:
                p.grad.add_(noise)
            elif number % 3 == 1:
                p.grad = p.grad + noise
            else:
                p.grad.data.add_(noise)
        self.optimizer.step()


class Clips(Script):
    """Accumulated, clipped through `.data`, and zeroed in place."""

    def step(self, t: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        for part in range(3):
            self.backward(t, part)
        for p in self.net.parameters():
            assert p.grad is not None
            p.grad.data.mul_(0.3).clamp_(-0.01, 0.01)
        self.optimizer.step()


class ZeroesAfterwards(Clips):
    """In place, before the step of training ends."""

    def step(self, t: int) -> None:
        super().step(t)
        self.optimizer.zero_grad(set_to_none=t >= 5)


class Schedules(Script):
    """A learning rate that is a tensor, written in place by hand; the other group's is replaced."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        groups = [{"params": self.net.first.parameters()}, {"params": self.net.second.parameters()}]
        self.optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.05), capturable=False)

    def step(self, t: int) -> None:
        one, two = self.optimizer.param_groups
        with torch.no_grad():
            one["lr"].mul_(0.9)
        two["lr"] = torch.tensor(0.05 / (t + 1))
        super().step(t)
        one["weight_decay"] = 0.01 * (t % 3)


class StepsTwice(Script):
    """Two updates in one step of training, another optimizer between them, and none in step 4."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.optimizer = torch.optim.RMSprop(self.net.first.parameters(), lr=0.01)
        rest = [*self.net.norm.parameters(), *self.net.second.parameters()]
        self.other = torch.optim.SGD(rest, lr=0.05, momentum=0.9)

    def step(self, t: int) -> None:
        for part in range(2):
            self.net.zero_grad()
            self.backward(t, part)
            if t != 3:
                self.optimizer.step()
            if part == 0 and t != 3:
                self.other.step()

    def scene(self) -> Scene:
        optimizers = {"optimizer": self.optimizer, "other": self.other}
        return Scene({"net": self.net}, optimizers, self.extras, self.step)


class LeavesOut(Script):
    """A layer without gradients (None) in some steps, and with zeros in others: weight decay and
    momentum tell them apart."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1
        )

    def step(self, t: int) -> None:
        self.optimizer.zero_grad()
        self.backward(t)
        for p in self.net.first.parameters():
            if t % 3 == 1:
                p.grad = None
            elif t % 3 == 2:
                p.grad = torch.zeros_like(p)
        self.optimizer.step()


class Adversarial(Script):
    """Two losses over one model: the second one's backward pass adds to gradients that the first
    optimizer has used already, in the same step of training."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.optimizer = torch.optim.Adam(self.net.first.parameters(), lr=0.01)
        self.other = torch.optim.Adam(self.net.second.parameters(), lr=0.01)

    def step(self, t: int) -> None:
        for part, optimizer in enumerate((self.optimizer, self.other)):
            optimizer.zero_grad()
            self.backward(t, part)
            optimizer.step()

    def scene(self) -> Scene:
        optimizers = {"optimizer": self.optimizer, "other": self.other}
        return Scene({"net": self.net}, optimizers, self.extras, self.step)


class Compresses(Script):
    """Top-k of accumulated gradients, which go on as they are."""

    compressor: Any = TopK(density=0.1, error_feedback=False)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.hook = compress(self.net, self.compressor)
        self.extras = {"hook": self.hook}

    def step(self, t: int) -> None:
        self.optimizer.zero_grad()
        with self.hook.no_sync():
            self.backward(t, 0)
        self.backward(t, 1)
        self.between(t)
        self.optimizer.step()

    def between(self, t: int) -> None:
        """What happens to gradients before they are used."""


class Quantizes(Compresses):
    """Eight bits: dense."""

    compressor = Quantize8(error_feedback=False)


class CompressesAndClips(Compresses):
    """What the hook knew is not so any more, as torch sees it."""

    def between(self, t: int) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.01)


class CompressesAndScales(Compresses):
    """What the hook knew is not so any more, and torch does not see it."""

    def between(self, t: int) -> None:
        for p in self.net.parameters():
            assert p.grad is not None
            p.grad.data.mul_(0.5)


class CompressesAndScalesInPlace(CompressesAndScales):
    """The same, where gradients keep their memory."""

    def step(self, t: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        with self.hook.no_sync():
            self.backward(t, 0)
        self.backward(t, 1)
        self.between(t)
        self.optimizer.step()


class CompressesAndDecays(CompressesAndScalesInPlace):
    """Weight decay by hand, through `.data`: nothing is zero any more."""

    def between(self, t: int) -> None:
        for p in self.net.parameters():
            assert p.grad is not None
            p.grad.data.add_(p.data, alpha=0.01)


class Unscales(Script):
    """A gradient scaler that leaves the scale to a fused optimizer, and overflows once."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.extras = {"scaler": self.scaler}

    def step(self, t: int) -> None:
        self.optimizer.zero_grad()
        x, y = batch(t)
        loss = F.mse_loss(self.net(x), y) * (float("inf") if t == 3 else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class OldStyle(torch.optim.Optimizer):
    """Momentum as it was once written: through `.data`, with weight decay in the gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad.data
                gradient.add_(p.data, alpha=0.1)
                slot = self.state[p]
                slot.setdefault("momentum", torch.zeros_like(p.data)).mul_(0.9).add_(gradient)
                p.data.add_(slot["momentum"], alpha=-group["lr"])


class IsOld(Script):
    """An optimizer that writes gradients, weights and slots behind torch's back."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.optimizer = OldStyle(self.net.parameters())


class Inherits(torch.optim.SGD):
    """Its `step()` scales gradients in place, and calls the one that it overrides."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        super().step()


class HasHeir(Script):
    """An optimizer that inherits from another."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.optimizer = Inherits(self.net.parameters(), lr=0.1, momentum=0.9)


class HooksLate(Script):
    """A hook of the user's own that scales gradients, registered when training has begun."""

    registered = False

    def step(self, t: int) -> None:
        if t >= 1 and not self.registered:
            self.optimizer.register_step_pre_hook(self.scale)
            self.registered = True
        super().step(t)

    def scale(self, *_: object) -> None:
        for p in self.net.parameters():
            assert p.grad is not None
            p.grad.mul_(0.9)


EXACT = [
    AddsNoise, Clips, ZeroesAfterwards, Schedules, StepsTwice, LeavesOut, Adversarial, Compresses,
    Quantizes, CompressesAndClips, CompressesAndScales, CompressesAndScalesInPlace,
    CompressesAndDecays, Unscales, IsOld, HasHeir,
]  # fmt: skip


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
def test_every_step_is_exact(
    kind: type[Script], run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prove(made(kind), run_dir, kind.__name__, strategy=EVERY)
    assert not caplog.records, "nothing to complain of"


def test_a_hook_that_comes_later_is_a_gap_once(run_dir: Path) -> None:
    """The step is stored in full; from the next one on our hook is the last again."""
    prove(made(HooksLate), run_dir, "late", strategy=EVERY, expected_fulls=(1, 2))


def test_all_that_trainings_have(run_dir: Path) -> None:
    """A scaler, an average, generators, a schedule, accumulated and clipped gradients, a skipped
    update; back in time and on, in the same process and in another."""
    states = states_of(everything, STEPS)
    scene = everything(1)
    with scene.checkpointer(run_dir, strategy=LOGGED, retention=ALL) as ck:
        train_stored(scene, ck, ck.restore(), STEPS)
        for back in (3, 7, 5):
            assert ck.restore(StepRef("main", back)) == back
            assert_same_state(states[back], scene.state())
        train_stored(scene, ck, back, STEPS)
        assert_same_state(states[STEPS], scene.state())
    assert fulls(run_dir) == [1]
    other = everything(2)
    with other.checkpointer(run_dir, strategy=LOGGED, retention=ALL) as ck:
        assert ck.restore() == STEPS
    assert_same_state(states[STEPS], other.state())


def test_data_loader(run_dir: Path) -> None:
    workers = 0
    reference, _ = with_loader(1, workers)
    reference.steps(0, 9)
    first, _ = with_loader(1, workers)
    with first.checkpointer(run_dir, strategy=LOGGED, retention=ALL) as ck:
        train_stored(first, ck, ck.restore(), 7)
    assert fulls(run_dir) == [1]
    second, _ = with_loader(2, workers)
    with second.checkpointer(run_dir, retention=ALL) as ck:
        assert ck.restore(6) == 6
        second.steps(6, 9)
    assert second.extras["seen"] == reference.extras["seen"]
    for scene in (reference, second):
        del scene.extras["loader"]  # its state says in which process it was made
    assert_same_state(reference.state(), second.state())


class FeedsBack(Compresses):
    """The residual of error feedback is in full checkpoints only."""

    compressor = TopK(density=0.1)


def test_residuals_are_in_full_checkpoints_only(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is one, all goes on exactly; between them all but the residual is exact, which
    begins empty, and this is said."""
    make = made(FeedsBack)
    reference = make(1)
    states, residuals = [], []
    for t in range(STORED + 1):
        hook = reference.extras["hook"].state_dict()
        residuals.append({name: its.clone() for name, its in hook["residuals"].items()})
        states.append((_without_residual(reference), reference.state()))
        if t < STORED:
            reference.step(t)
    store(make, run_dir, strategy=Deltas(full_every=3, batch=2, slices=1, check=False))
    assert fulls(run_dir) == [1, 3, 6]
    for step in (2, 5, 6):
        caplog.clear()
        scene = make(2)
        with scene.checkpointer(run_dir, retention=ALL) as ck:
            assert ck.restore(StepRef("main", step)) == step
        assert_same_state(states[step][0], _without_residual(scene))
        kept = scene.extras["hook"].state_dict()["residuals"]
        if step == 6:
            assert_same_state(states[step][1], scene.state())
            scene.step(6)
            assert_same_state(states[STORED][1], scene.state())
        else:
            assert all(not bool(its.any()) for its in kept.values())
            assert any(bool(its.any()) for its in residuals[step].values())
            assert "hook.residuals is kept in full checkpoints only" in caplog.text


def _without_residual(scene: Scene) -> Frozen:
    kept = {k: v for k, v in scene.extras["hook"].state_dict().items() if k != "residuals"}
    return state_of(scene.models, scene.optimizers, {"hook": kept})


# ------------------------------------------------------------ what is refused, and exact


class WritesWeights(Script):
    """Weights that shrink after each update, in place."""

    def step(self, t: int) -> None:
        super().step(t)
        with torch.no_grad():
            self.net.first.weight.mul_(0.99)


class ReplacesWeights(Script):
    """Weights that are given other memory after each update."""

    def step(self, t: int) -> None:
        super().step(t)
        self.net.first.weight.data = self.net.first.weight.data * 0.99


class WritesBetweenSteps(Script):
    """Weights that shrink before each forward pass."""

    def step(self, t: int) -> None:
        with torch.no_grad():
            self.net.first.weight.mul_(0.99)
        super().step(t)


class Langevin(torch.optim.SGD):
    """Gradient descent with noise from the global generator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


class OwnDice(torch.optim.SGD):
    """Gradient descent with noise from a generator that the user stores beside it."""

    dice: torch.Generator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape, generator=self.dice), alpha=1e-3)


class IsStochastic(Script):
    """An optimizer that draws random numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.optimizer = Langevin(self.net.parameters(), lr=0.05)


class HasDice(Script):
    """One that draws from a generator of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        optimizer = OwnDice(self.net.parameters(), lr=0.05)
        optimizer.dice = self.own
        self.optimizer, self.extras = optimizer, {"dice": self.own}


REFUSED = {
    WritesWeights: "was changed outside of the optimizer",
    ReplacesWeights: "was changed outside of the optimizer",
    WritesBetweenSteps: "was changed outside of the optimizer",
    IsStochastic: "has drawn random numbers",
    HasDice: "has drawn random numbers",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_replayed_is_stored_in_full(
    kind: type[Script], run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the default of slices, so that nothing depends on whose turn it is."""
    prove(made(kind), run_dir, kind.__name__, expected_fulls=None)
    told = [record for record in caplog.records if REFUSED[kind] in record.getMessage()]
    levels = [record.levelname for record in told]
    assert levels == ["WARNING"] * 3 + ["ERROR"], "said, and then Full takes over"


class WritesOnce(Script):
    """Weights that are changed by hand in one step, in place."""

    def step(self, t: int) -> None:
        super().step(t)
        if t == 3:
            with torch.no_grad():
                self.net.second.weight[0] = 0.5


def test_weights_changed_once_cost_one_full(run_dir: Path) -> None:
    prove(made(WritesOnce), run_dir, "once", expected_fulls=(1, 4))


class WritesBehind(Script):
    """Weights that are changed in one step behind torch's back."""

    when: tuple[int, ...] = (3,)

    def step(self, t: int) -> None:
        super().step(t)
        if t in self.when:
            self.net.second.weight.data[0] += 0.5


class WritesBehindAlways(WritesBehind):
    """The same in every step."""

    when = tuple(range(100))


@pytest.mark.parametrize(("kind", "whole"), [(WritesBehind, 3), (WritesBehindAlways, 1)])
def test_weights_changed_behind_torchs_back_with_one_slice(
    kind: type[Script], whole: int, run_dir: Path
) -> None:
    """Nobody sees it in training. Every step's fingerprint is of all of the state: the steps up to
    it can be had, and no later one."""
    states = states_of(made(kind))
    store(made(kind), run_dir, strategy=EVERY)
    scene = prove_steps(made(kind), run_dir, states, range(1, whole + 1))
    untouched = scene.state()
    with scene.checkpointer(run_dir, retention=ALL) as ck:
        for step in range(whole + 1, STORED + 1):
            with pytest.raises(CannotRestore, match=r"second\.weight is not what it was"):
                ck.restore(StepRef("main", step))
            assert_same_state(untouched, scene.state())
        assert ck.restore() == whole, "the newest that can be proved"
        assert_same_state(states[whole], scene.state())


def test_weights_changed_behind_torchs_back_with_many_slices(run_dir: Path) -> None:
    """What `Deltas.slices` says: a tensor is proved at its turn, once in so many steps. Steps
    between the change and that turn are not proved, and nothing promises them; from the turn on
    none can be had."""
    kind = WritesBehind
    states = states_of(made(kind))
    store(made(kind), run_dir, strategy=Deltas(full_every=1000, batch=1, slices=3, check=False))
    scene = kind(2).scene()
    refused = []
    with scene.checkpointer(run_dir, retention=ALL) as ck:
        for step in range(1, STORED + 1):
            with contextlib.suppress(CannotRestore):
                ck.restore(StepRef("main", step))
                if step <= 3:
                    assert_same_state(states[step], scene.state())
                continue
            refused.append(step)
    assert refused == list(range(refused[0], STORED + 1))
    assert 4 <= refused[0] <= 3 + 3, "no later than a round after the change"
