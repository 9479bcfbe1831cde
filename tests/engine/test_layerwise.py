"""Copies of gradients that do not stay as they are: when they are made, and when made again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine.test_recorder import Rig
from everystep.deltas.encodings import decode
from everystep.engine import layerwise
from everystep.engine.layerwise import NONE_CAME, UNSEEN, WRITTEN, Early
from waiting import until

WARM = 1 + layerwise._SEEN_FIRST
"""Steps before gradients are copied early: the first is a gap, of which none are taken."""


class Layer(torch.autograd.Function):
    """The identity, whose backward calls something."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, called: Callable[[], None]) -> torch.Tensor:
        ctx.called = called
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.called()
        return gradient, None


class Net(nn.Module):
    """Two layers; between the backward passes of the second and the first one something is
    called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(Layer.apply(self.first(x), lambda: self.between()))
        return out


class Kept(Rig):
    """Gradients that are zeroed in place, so that they do not stay."""

    def __init__(self, **options: Any) -> None:
        self.net = Net()
        super().__init__(
            lambda p: torch.optim.SGD(p, lr=1e-3),  # so small that nothing overflows
            model=self.net, **{"plain": True, "layerwise": True, **options},
        )  # fmt: skip
        self.used: list[list[torch.Tensor]] = []
        """What the optimizer consumed, by step."""

    def backward(self) -> None:
        self.net(torch.randn(7, 6)).square().sum().backward()

    def train(self, change: Callable[[], None] = lambda: None, passes: int = 1) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        for _ in range(passes):
            self.backward()
        change()
        self.used.append([p.grad.clone() for p in self.gradients()])
        self.optimizer.step()

    def gradients(self) -> list[Any]:
        return list(self.net.parameters())

    def one(self, change: Callable[[], None] = lambda: None, passes: int = 1) -> str | None:
        self.train(change, passes)
        return self.end()

    def warm(self, passes: int = 1) -> None:
        for _ in range(WARM):
            self.one(passes=passes)

    @property
    def early(self) -> Early:
        found = self.recorder._copies["optimizer"].early
        assert found is not None
        return found

    def copied(self) -> None:
        """Wait until what backward has handed over is copied."""
        running = self.early._running
        until(lambda: all(future.done() for future in running), 60, "the copies are made")

    def prove(self) -> None:
        """The newest record holds what was consumed, bit for bit."""
        (update,) = self.delta().updates
        for coded, then in zip(update.gradients, self.used[-1], strict=True):
            out = torch.empty(then.numel())
            decode(coded, out)
            assert torch.equal(out.view(torch.int32), then.reshape(-1).view(torch.int32))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kept]]:
    monkeypatch.setattr(layerwise, "LEAST_BYTES", 1)
    made: list[Kept] = []

    def make(**options: Any) -> Kept:
        made.append(Kept(**options))
        return made[-1]

    yield make
    for one in made:
        one.recorder.close()
        for p in one.net.parameters():
            assert not p._post_accumulate_grad_hooks, "hooks are taken away"


Make = Callable[..., Kept]


def test_a_gradient_is_copied_while_backward_goes_on(kept: Make) -> None:
    rig = kept()
    rig.warm()
    seen = []

    def between() -> None:
        """The second layer's backward is over, the first one's is not."""
        number = 2  # second.weight
        until(lambda: number in rig.early._copies, 60, "the copy begins")
        chunks = rig.early._copies[number].chunks
        until(lambda: all(chunk.done.done() for chunk in chunks), 60, "the copy is made")
        copy = rig.recorder._copies["optimizer"]._buffers[number]
        seen.append(torch.equal(copy, rig.net.second.weight.grad.reshape(-1)))  # type: ignore[union-attr]
        assert 0 not in rig.early._copies

    rig.net.between = between
    assert rig.one() is None
    assert seen == [True]
    rig.prove()
    assert rig.early.used_bytes > 0


def test_nothing_is_copied_early_unless_it_is_asked_for(kept: Make) -> None:
    rig = kept(layerwise=False)
    for _ in range(WARM + 2):
        rig.one()
    assert rig.recorder._copies["optimizer"].early is None
    assert not any(p._post_accumulate_grad_hooks for p in rig.net.parameters())
    rig.prove()


def test_a_gradient_that_changes_after_its_copy_is_taken_again(kept: Make) -> None:
    """Scaled in place, replaced, or set to another memory; the others' copies are used."""

    def replaced() -> None:
        rig.net.first.weight.grad = rig.net.first.weight.grad * 3  # type: ignore[operator]

    def scaled() -> None:
        rig.net.second.bias.grad.mul_(0.5)  # type: ignore[union-attr]

    def elsewhere() -> None:
        weight: Any = rig.net.second.weight
        weight.grad.data = weight.grad.data + 1

    rig = kept()
    rig.warm()
    for change in (replaced, scaled, elsewhere):
        assert rig.one(change) is None
        rig.prove()
        assert rig.early.given_up is None


def test_accumulated_gradients_are_copied_at_their_last_addition(kept: Make) -> None:
    rig = kept()
    rig.warm(passes=3)
    begun: list[int] = []
    real = rig.early._begin

    def begin(number: int, flat: torch.Tensor) -> Any:
        begun.append(number)
        return real(number, flat)

    rig.early._begin = begin  # type: ignore[method-assign]
    assert rig.one(passes=3) is None
    assert sorted(begun) == [0, 1, 2, 3]
    rig.prove()
    assert rig.one(passes=4) is None, "one more than before"
    rig.prove()
    begun.clear()
    assert rig.one(passes=2) is None, "fewer than before"
    assert not begun
    rig.prove()


def test_clipping_ends_it_and_this_is_told_once(kept: Make) -> None:
    rig = kept()

    def clip() -> None:
        nn.utils.clip_grad_norm_(rig.net.parameters(), 0.1)

    told = []
    for _ in range(WARM + layerwise._PATIENCE + 2):
        rig.one(clip)
        told.append(rig.recorder.not_early())
        if rig.done > 1:
            rig.prove()
    assert [why for why in told if why is not None] == [WRITTEN]
    assert not any(p._post_accumulate_grad_hooks for p in rig.net.parameters())


def test_writes_that_torch_does_not_see_are_found_and_end_it(kept: Make) -> None:
    """One element, far from all those that would be looked at later on."""
    rig = kept()
    rig.warm()

    def write() -> None:
        rig.copied()
        rig.net.second.weight.grad.data[1, 1] += 1  # type: ignore[union-attr, index]

    assert rig.one(write) is None
    assert rig.recorder.not_early() == UNSEEN
    rig.prove()


def test_later_ones_are_found_in_samples(kept: Make) -> None:
    rig = kept()
    rig.warm()
    for _ in range(layerwise._COMPARED):
        rig.one()

    def write() -> None:
        rig.copied()
        rig.net.first.weight.grad.data.mul_(0.5)  # type: ignore[union-attr]

    assert rig.one(write) is None
    assert rig.recorder.not_early() == UNSEEN
    rig.prove()


def test_gradients_that_stay_are_not_copied(kept: Make) -> None:
    rig = kept()
    for _ in range(WARM + 3):
        rig.optimizer.zero_grad()
        rig.backward()
        assert not rig.early._copies
        rig.optimizer.step()
        rig.end()
    assert rig.early.given_up is None
    assert rig.early.used_bytes == 0


def test_parameters_of_which_nothing_comes_any_more(kept: Make) -> None:
    """A layer that is left out: its gradient stays what zeroing left."""
    rig = kept()
    rig.warm()
    rig.net.first.forward = lambda x: x[:, :5]  # type: ignore[method-assign, assignment]
    for _ in range(4):
        assert rig.one() is None
        rig.prove()
    assert rig.early.given_up is None, "the other layer is still copied"


def test_passes_that_differ_from_step_to_step(kept: Make) -> None:
    rig = kept()
    rig.warm()
    for passes in (2, 1, 3, 1, 2, 1, 3, 1):
        assert rig.one(passes=passes) is None
        rig.prove()
    assert rig.early.given_up in (WRITTEN, NONE_CAME)


def test_memory_is_used_again(kept: Make) -> None:
    """However many steps there are, there is one copy of the gradients, as long as each record is
    handed over before the next backward."""
    rig = kept()
    for _ in range(WARM):
        rig.one()
        rig.recorder.settle()
    copies = rig.recorder._copies["optimizer"]
    places = set()
    for _ in range(6):
        rig.one()
        rig.recorder.settle()
        assert not copies._buffers
        (held,) = copies._shelf
        places.add(tuple(buffer.data_ptr() for buffer in held.values()))
        assert sum(b.nbytes for b in held.values()) == sum(p.nbytes for p in rig.gradients())
    assert len(places) == 1
    rig.prove()


def test_chunks_that_were_not_begun_are_copied_at_the_step(
    kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerwise, "CHUNK_BYTES", 16)
    rig = kept()
    rig.warm()
    real, number = rig.early._thread.submit, itertools.count()

    def submit(*args: Any) -> Future[None]:
        """The thread comes to every second one only."""
        if next(number) % 2 == 0:
            return Future()
        future = real(*args)
        wait([future])
        return future

    rig.early._thread.submit = submit  # type: ignore[method-assign]
    used = rig.early.used_bytes
    assert rig.one() is None
    rig.prove()
    early = rig.early.used_bytes - used
    assert 0 < early < sum(p.nbytes for p in rig.gradients())


def test_bits_that_are_no_numbers(kept: Make) -> None:
    """NaN payloads and signs of zeros."""
    rig = kept()
    rig.warm()
    odd = np.array([0x7FC00001, 0x80000000, 0xFF800000, 1], np.uint32).view(np.float32)

    def between() -> None:
        rig.net.second.bias.grad.copy_(torch.from_numpy(odd))  # type: ignore[union-attr]

    rig.net.between = between
    assert rig.one() is None
    rig.prove()
    assert rig.early.given_up is None
