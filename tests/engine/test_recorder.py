"""The recorder, its hooks and its comparisons, with a log in memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everystep.deltas.delta import Delta, Form, Layout
from everystep.deltas.encodings import decode
from everystep.deltas.packing import unpack, unpack_layout
from everystep.engine import taken
from everystep.engine.meter import Cost
from everystep.engine.recorder import Recorder
from everystep.errors import Unsupported
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks


class MemoryLog:
    """A `RecordSink` that keeps everything."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, Layout]] = []
        self.records: dict[int, bytes] = {}
        self.layouts: dict[int, Layout] = {}
        self.withdrawn = 0
        self.refuses = False
        self.may_go = threading.Event()
        self.may_go.set()
        self._memory: bytearray | None = None

    def open_log(self, base: int, layout: bytes) -> None:
        self.opened.append((base, unpack_layout(layout)))

    def set_batch(self, records: int) -> None:
        raise AssertionError("the recorder does not decide this")

    def reserve(self, nbytes: int, wait_s: float) -> memoryview | None:
        assert self.may_go.wait(60)
        if self.refuses:
            return None
        self._memory = bytearray(nbytes)
        return memoryview(self._memory)

    def publish(self, step: int, safe: int | None = None) -> None:
        assert self._memory is not None
        assert not self.records or step > max(self.records)
        self.records[step], self._memory = bytes(self._memory), None
        self.layouts[step] = self.opened[-1][1]

    def withdraw(self) -> None:
        self.withdrawn += 1
        self._memory = None

    def delta(self, step: int) -> Delta:
        return unpack(memoryview(self.records[step]), self.layouts[step])


class Rig:
    """A recorder over a small model, and its steps.

    Args:
        make: the optimizer over the model's parameters.
        model: None: a small one.
        options: of the recorder.
    """

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
        extras: Any = None,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        small = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.model = model or small
        self.optimizer = make(self.model.parameters())
        self.log, self.done = MemoryLog(), options.get("chained") or 0
        self.told: list[tuple[int, int]] = []
        objects = Objects.of(self.model, self.optimizer, extras)
        asked = {"policy": "block", "share_replicas": True, "chained": None, "slices": 1}
        self.recorder = Recorder(
            objects, Ranks.here(), self.log, versions={"torch": "x"},
            told=lambda step, nbytes: self.told.append((step, nbytes)), **{**asked, **options},
        )  # fmt: skip

    def backward(self) -> None:
        self.model(torch.randn(5, 3)).square().sum().backward()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def end(self, **metrics: Any) -> str | None:
        """End a step; why it is a gap."""
        self.done += 1
        return self.recorder.step(self.done, metrics, Cost(step=self.done, begun_s=0.0))

    def steps(self, count: int) -> list[str | None]:
        """Train and end so many steps."""
        found = []
        for _ in range(count):
            self.train()
            found.append(self.end())
        return found

    def delta(self) -> Delta:
        """Of the newest step."""
        self.recorder.settle()
        return self.log.delta(self.done)


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **options: Any) -> Rig:
        made.append(Rig(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.log.may_go.set()
        one.recorder.close()
        assert not one.optimizer._optimizer_step_pre_hooks, "hooks are taken away"
        assert not one.optimizer._optimizer_step_post_hooks


Make = Callable[..., Rig]

NO_STATE = "there is no state yet that a delta could begin from"


def test_the_first_step_of_a_fresh_run_is_a_gap_and_the_chain_begins_after_it(rig: Make) -> None:
    r = rig()
    assert r.steps(3) == [NO_STATE, None, None]
    r.recorder.settle()
    assert [base for base, _ in r.log.opened] == [1]
    assert list(r.log.records) == [2, 3]
    assert r.told == [(step, len(data)) for step, data in r.log.records.items()]


def test_after_a_restore_the_first_step_is_a_delta(rig: Make) -> None:
    r = rig(chained=7)
    assert r.steps(1) == [None]
    r.recorder.settle()
    assert [base for base, _ in r.log.opened] == [7]
    assert list(r.log.records) == [8]


def test_a_full_begins_a_new_segment_and_the_chain_goes_through(rig: Make) -> None:
    r = rig(chained=2)
    r.steps(2)
    r.recorder.full_stored(4)
    r.steps(2)
    r.recorder.settle()
    assert [base for base, _ in r.log.opened] == [2, 4]
    assert list(r.log.records) == [3, 4, 5, 6]


def test_absent_and_zero_gradients_are_told_apart(rig: Make) -> None:
    r = rig(chained=1)
    r.optimizer.zero_grad()
    r.backward()
    first, last = r.model[0], r.model[2]
    first.weight.grad = None
    last.weight.grad.zero_()
    r.optimizer.step()
    assert r.end() is None
    (update,) = r.delta().updates
    forms = [coded.form for coded in update.gradients]
    assert (forms[0], forms[4]) == (Form.ABSENT, Form.ZERO)
    assert not {forms[1], forms[5]} & {Form.ABSENT, Form.ZERO}


def test_updates_are_told_in_their_order_and_none_where_none_was(rig: Make) -> None:
    r = rig(chained=1)
    r.backward()
    assert r.end() is None
    assert r.delta().updates == []
    r.train()
    r.train()
    assert r.end() is None
    assert len(r.delta().updates) == 2


def test_options_are_told_where_they_have_changed(rig: Make) -> None:
    r = rig(chained=1)
    r.steps(1)
    assert r.delta().updates[0].options is None
    r.optimizer.param_groups[0]["lr"] = 0.05
    r.train()
    r.optimizer.param_groups[0]["lr"] = 0.02
    r.end()
    delta = r.delta()
    assert delta.updates[0].options is not None
    assert "0.05" in str(delta.updates[0].options)
    assert "0.02" in str(delta.tree["options"]["optimizer"])
    r.steps(1)
    assert r.delta().updates[0].options is None
    assert "options" not in r.delta().tree


def test_a_learning_rate_that_is_a_tensor_is_told_as_it_was(rig: Make) -> None:
    """Though it is written in place once the step is over."""
    r = rig(lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), foreach=False), chained=1)
    r.train()
    with torch.no_grad():
        r.optimizer.param_groups[0]["lr"].fill_(0.25)
    r.end()
    (rate,) = [s for s in r.delta().tensors if s.spec.key.startswith("/updates/0/")]
    assert np.frombuffer(rate.data, np.float32).tolist() == [np.float32(0.1)]


def test_buffers_and_extras_are_told_where_they_have_changed(rig: Make) -> None:
    counted = {"seen": 0}
    r = rig(extras={"counted": counted}, chained=1)
    counted["seen"] = 3
    r.steps(1)
    delta = r.delta()
    keys = {stored.spec.key for stored in delta.tensors}
    assert {"/models/model/1.running_mean", "/models/model/1.num_batches_tracked"} <= keys
    assert "counted" in delta.tree["extras"]
    r.model.eval()
    r.steps(1)
    delta = r.delta()
    assert not [s for s in delta.tensors if s.spec.key.startswith("/models/")]
    assert "extras" not in delta.tree


def test_metrics_are_told(rig: Make) -> None:
    r = rig(chained=1)
    r.train()
    r.end(loss=0.5, word="a")
    assert r.delta().metrics == {"loss": 0.5, "word": "a"}


# ------------------------------------------------------------ gaps


def test_a_closure_is_a_gap(rig: Make) -> None:
    r = rig(chained=1)
    r.optimizer.step(lambda: torch.tensor(0.0))  # type: ignore[arg-type,return-value]
    assert "closure" in str(r.end())
    assert r.steps(1) == [None]
    r.recorder.settle()
    assert list(r.log.records) == [3]


def test_a_later_hook_is_a_gap_once(rig: Make) -> None:
    r = rig(chained=1)
    handle = r.optimizer.register_step_pre_hook(lambda *_: None)
    found = r.steps(2)
    handle.remove()
    assert "a hook that was registered later" in str(found[0])
    assert found[1] is None


def test_a_step_of_a_subclass_is_one_update(rig: Make) -> None:
    class Heir(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step()

    r = rig(lambda p: Heir(p, lr=0.1), chained=1)
    assert r.steps(2) == [None, None]
    assert len(r.delta().updates) == 1


def test_a_step_that_fails_does_not_hide_the_next(rig: Make) -> None:
    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ValueError("no")
            return super().step()

    r = rig(lambda p: Fails(p, lr=0.1), chained=1)
    r.optimizer.fails = True
    with pytest.raises(ValueError, match="no"):
        r.train()
    r.optimizer.fails = False
    r.train()
    assert r.end() is not None, "what the failed call has done is not known"
    assert r.steps(1) == [None]
    assert len(r.delta().updates) == 1


OUTSIDE = "was changed outside of the optimizer"


@pytest.mark.parametrize("place", ["before", "after", "moved"])
def test_parameters_written_by_others_are_a_gap(place: str, rig: Make) -> None:
    r = rig(chained=1)
    weight = r.model[2].weight

    def write() -> None:
        with torch.no_grad():
            weight.mul_(0.5)
        if place == "moved":
            weight.data = weight.data.clone()

    if place == "before":
        write()  # after a restore, before the first step
    r.train()
    if place != "before":
        write()
    problem = r.end()
    assert problem == f"parameter 4 of optimizer {OUTSIDE}"
    assert r.steps(2) == [None, None]


def test_parameters_frozen_or_added_are_a_gap(rig: Make) -> None:
    r = rig(chained=1)
    r.steps(1)
    r.model[0].bias.requires_grad_(False)
    assert "parameters were frozen" in str(r.steps(1)[0])
    assert r.steps(1) == [None]
    r.model.add_module("more", nn.Linear(2, 2))
    assert r.steps(1) == [None], "nobody trains it"
    r.optimizer.add_param_group({"params": list(r.model.get_submodule("more").parameters())})
    assert "has got other parameters" in str(r.steps(1)[0])
    assert r.steps(1) == [None]


class Draws(torch.optim.SGD):
    """Draws with each update."""

    draw: Callable[[], Any]

    def step(self, closure: Any = None) -> Any:
        self.draw()
        return super().step()


OWN = torch.Generator()
OWN_NUMPY = np.random.default_rng(0)


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        np.random.rand,
        lambda: torch.rand(1),
        lambda: torch.rand(1, generator=OWN),
        OWN_NUMPY.random,
    ],
)
def test_an_optimizer_that_draws_random_numbers_is_a_gap(
    draw: Callable[[], Any], rig: Make
) -> None:
    r = rig(lambda p: Draws(p, lr=0.1), {"own": OWN, "numpy": OWN_NUMPY}, chained=1)
    r.optimizer.draw = draw
    assert r.steps(2) == ["optimizer has drawn random numbers"] * 2
    r.optimizer.draw = lambda: None
    assert r.steps(1) == [None], "forward passes and users may draw"


def test_what_torch_itself_does_not_repeat_is_refused() -> None:
    with pytest.raises(Unsupported, match="fused SGD with momentum"):
        _refused(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), torch.bfloat16)


def _refused(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2).to(dtype)
    Recorder(
        Objects.of(model, make(model.parameters()), None), Ranks.here(), MemoryLog(),
        policy="block", share_replicas=True, chained=1, slices=1, versions={},
        told=lambda step, nbytes: None,
    )  # fmt: skip


def test_what_cannot_be_encoded_is_a_gap(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise Unsupported("a gradient of dtype float6")

    r = rig(chained=1)
    monkeypatch.setattr(taken, "encode", refuses)
    assert r.steps(1) == ["a gradient of dtype float6"]
    monkeypatch.undo()
    assert r.steps(1) == [None]


# ------------------------------------------------------------ gradients that are referred to


def _gradients(r: Rig, step: int) -> list[bytes]:
    found = []
    for coded, p in zip(r.log.delta(step).updates[0].gradients, r.model.parameters(), strict=True):
        out = torch.empty(p.numel())
        decode(coded, out)
        found.append(out.numpy().tobytes())
    return found


def test_gradients_that_are_zeroed_in_place_are_copied(rig: Make) -> None:
    r = rig(chained=1)
    r.log.may_go.clear()
    expected = []
    for _ in range(2):
        r.optimizer.zero_grad(set_to_none=False)
        r.backward()
        r.optimizer.step()
        assert r.end() is None
        expected.append([p.grad.numpy().tobytes() for p in r.model.parameters()])  # type: ignore[union-attr]
        for p in r.model.parameters():
            p.grad.data.fill_(7)  # type: ignore[union-attr]
    r.log.may_go.set()
    r.recorder.settle()
    assert [_gradients(r, step) for step in (2, 3)] == expected


def test_new_gradients_are_referred_to_and_a_write_is_noticed(rig: Make) -> None:
    r = rig(chained=1)
    assert r.steps(3) == [None] * 3
    r.recorder.settle()
    r.log.may_go.clear()
    r.train()
    used = r.model[2].weight.grad
    assert used is not None
    assert r.end() is None
    r.optimizer.zero_grad()
    used.zero_()  # somebody has kept it
    r.log.may_go.set()
    r.recorder.settle()
    assert r.log.withdrawn == 1
    assert r.steps(1) == ["the delta of step 5 is lost: a gradient was written while it was read"]
    assert r.steps(3) == [None] * 3, "they are copied from now on"
    assert 5 not in r.log.records and 6 not in r.log.records


def test_gradients_written_before_the_step_ends_make_it_a_gap_at_once(rig: Make) -> None:
    r = rig(chained=1)
    assert r.steps(3) == [None] * 3
    r.train()
    r.model[0].weight.grad.zero_()
    assert r.end() == "gradients of optimizer were written after their use"
    for _ in range(2):
        r.train()
        r.model[0].weight.grad.zero_()
        assert r.end() is None, "they are copied from now on"


def test_gradients_that_come_to_share_memory_cost_one_delta(rig: Make) -> None:
    """As views of a bucket do: what writes the bucket does not count as writing them."""
    r = rig(chained=1)
    assert r.steps(4) == [None] * 4
    r.recorder.settle()

    def share() -> None:
        weight = r.model[2].weight
        assert weight.grad is not None
        bucket = torch.cat([weight.grad.reshape(-1), torch.zeros(3)])
        weight.grad = bucket[: weight.numel()].view_as(weight)

    for expected in (None, "share memory with other tensors", None, None):
        r.optimizer.zero_grad()
        r.backward()
        share()
        r.optimizer.step()
        assert (expected or "None") in str(r.end())
        r.recorder.settle()
    assert list(r.log.records) == [2, 3, 4, 5, 8, 9]


def test_gradients_that_another_loss_adds_to_are_copied_from_the_beginning(rig: Make) -> None:
    """Its backward pass comes before they are set to None, in the next step of training."""
    r = rig(chained=1)
    for _ in range(6):
        r.backward()
        r.train()
        assert r.end() is None
        r.recorder.settle()
    assert not r.recorder._sources[0]._lasting(
        [p.grad for p in r.model.parameters() if p.grad is not None]
    )
    assert list(r.log.records) == list(range(2, 8))


# ------------------------------------------------------------ a log that does not take them


def test_a_log_without_room_is_a_gap(rig: Make) -> None:
    r = rig(chained=1, policy="skip")
    r.log.refuses = True
    assert r.steps(1) == [None]
    r.recorder.settle()
    r.log.refuses = False
    (problem,) = r.steps(1)
    assert "the delta of step 2 is lost: there was no room for it" in str(problem)
    assert r.steps(1) == [None]
    r.recorder.settle()
    assert [base for base, _ in r.log.opened] == [1, 3]


def test_a_slow_log_is_waited_for_or_not_as_the_policy_says(rig: Make) -> None:
    r = rig(chained=1, policy="skip")
    r.log.may_go.clear()
    assert r.steps(3) == [None, None, "the log has fallen behind"]
    r.log.may_go.set()
    r.recorder.settle()
    assert list(r.log.records) == [2, 3]

    r = rig(chained=1, policy="block")
    r.log.may_go.clear()
    threading.Timer(0.1, r.log.may_go.set).start()
    assert r.steps(6) == [None] * 6
    r.recorder.settle()
    assert list(r.log.records) == list(range(2, 8))


def test_the_newest_loss_is_told_at_the_end(rig: Make) -> None:
    r = rig(chained=1, policy="skip")
    r.log.refuses = True
    r.steps(1)
    assert "the delta of step 2 is lost" in str(r.recorder.close())
    assert r.recorder.close() is None


def test_a_mistake_is_raised_once(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(delta: Any) -> Any:
        raise KeyError("a mistake of ours")

    r = rig(chained=1)
    monkeypatch.setattr(taken, "pack", mistaken)
    assert r.steps(1) == [None]
    r.recorder.settle()
    with pytest.raises(KeyError, match="a mistake of ours"):
        r.steps(1)
    assert r.recorder.close() is None
