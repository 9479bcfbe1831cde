"""What is sealed for a step is the state at the end of that step, bit for bit, whatever copying
meets on its way."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adam, AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

import strategies
from engine.harness import COPIER, HeldDevice, Run, Truth, assert_is
from engine.sinks import MemorySink, Step
from everystep.engine import capture as capture_module
from everystep.engine import offload
from everystep.engine.device import CpuDevice
from everystep.errors import StoreFailed
from everystep.planning.hiding import PATIENCE
from everystep.state.ranks import Ranks
from everystep.types import Piece
from exact.matrix import Case, cases, refused
from exact.scenes import FORMATS, Scene, build
from exact.zoo import OPTIMIZERS, Plain
from state.test_zoo import _Zoo
from trips import Holder
from waiting import until

MODES: dict[str, tuple[Callable[[], CpuDevice], int | None]] = {
    "direct": (CpuDevice, None),
    "held": (lambda: HeldDevice(ahead=1), None),
    "snapshots": (lambda: HeldDevice(snapshots=True), None),
    "some snapshots": (lambda: HeldDevice(snapshots=True, ahead=1), 400),
}
"""How a step's copies meet the optimizer: freely; waiting and running; snapshotted; in part."""


def train(scene: Scene, device: CpuDevice, steps: int, **options: Any) -> None:
    """Train, with a checkpoint at every step, and prove each of them."""
    run = Run(scene.models, scene.optimizers, scene.extras, device=device, **options)
    with run:
        for t in range(steps):
            scene.step(t)
            run.step(t=t)
        run.engine.settle()
        run.check()
        assert {n: step.metrics for n, step in run.sink.steps.items()} == {
            n: {"t": n - 1} for n in run.sink.sealed
        }


# ---------------------------------------------------------------- exactness


ALL = [
    Case(name, FORMATS[(at + nth) % len(FORMATS)], model)
    for nth, model in enumerate(("plain", "tied", "frozen", "sparse", "batchnorm", "gan"))
    for at, name in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize("case", [case for case in ALL if not refused(case)], ids=str)
def test_over_the_matrix(case: Case) -> None:
    mode = list(MODES)[ALL.index(case) % len(MODES)]
    make, budget_bytes = MODES[mode]
    scene = build(case.optimizer, case.format, case.model, seed=1)
    train(scene, make(), 3, snapshot_bytes=budget_bytes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["batchnorm", "complex", "gan"])
def test_every_way_to_meet_the_optimizer(model: str, mode: str) -> None:
    make, budget_bytes = MODES[mode]
    train(build("AdamW/foreach", "fp32", model, seed=2), make(), 4, snapshot_bytes=budget_bytes)


def test_the_matrix_is_whole() -> None:
    assert {case.optimizer for case in ALL if not refused(case)} == set(OPTIMIZERS)
    assert {case.format for case in ALL} == set(FORMATS)
    assert set(ALL) <= {*cases(*{case.model for case in ALL})}


class _Forms(nn.Module):
    """Large and small tensors in every order of elements, as parameters and as buffers."""

    def __init__(self) -> None:
        super().__init__()
        large = torch.randn(8, 16, 32, 33)
        forms = {
            "large": torch.randn(300, 333),
            "channels_last": large.to(memory_format=torch.channels_last),
            "permuted": torch.randn(257, 301).t(),
            "strided": torch.randn(300, 600)[:, ::2],
            "conjugated": torch.randn(200, 200, dtype=torch.complex64).conj(),
            "small_conjugated": torch.randn(3, dtype=torch.complex64).conj(),
            "negated": torch.randn(200, 201, dtype=torch.complex64).conj().imag,
            "halves": torch.randn(400, 401).bfloat16(),
            "eighths": torch.randn(600, 601).to(torch.float8_e4m3fn),
            "wide": torch.randn(200, 201, dtype=torch.complex128),
            "flags": torch.rand(600, 601) > 0.5,
            "zero_dim": torch.randn(()),
            "empty": torch.empty(0, 3),
            "expanded": torch.randn(1, 3).expand(5, 3),
            "one": torch.randn(10)[::7][:1],
        }
        for name, form in forms.items():
            self.register_buffer(name, form)
            if form.dtype.is_floating_point and form.element_size() > 1 and name != "expanded":
                self.register_parameter(f"{name}_trained", nn.Parameter(form.clone()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [Ranks(0, 1), Ranks(0, 2), Ranks(1, 2)], ids=str)
def test_every_form(mode: str, ranks: Ranks) -> None:
    make, budget_bytes = MODES[mode]
    model, device = _Forms(), make()
    trained = [p for p in model.parameters() if p.numel()]
    optimizer = SGD(trained, lr=0.1, momentum=0.9)
    with Run(model, optimizer, device=device, snapshot_bytes=budget_bytes, ranks=ranks) as run:
        for _ in range(3):
            for parameter in trained:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            run.step()
        run.engine.settle()
        run.check()


def test_the_zoo() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zoo = _Zoo(1, hollow=False)
    with Run(zoo.models, zoo.optimizers, zoo.extras, device=HeldDevice(ahead=2)) as run:
        for _ in range(3):
            zoo.train(1)
            run.step()
        run.engine.settle()
        run.check()


@settings(max_examples=25)
@given(
    st.lists(strategies.tensors(), min_size=1, max_size=8),
    strategies.trees(),
    st.sampled_from(list(MODES)),
    st.integers(0, 1),
)
def test_any_tensors(tensors: list[torch.Tensor], tree: Any, mode: str, rank: int) -> None:
    make, budget_bytes = MODES[mode]
    model, device = nn.Linear(3, 3), make()
    for number, tensor in enumerate(tensors):
        model.register_buffer(f"b{number}", tensor)
    optimizer = Adam(model.parameters())
    extra = Holder(tree)
    with Run(model, optimizer, {"x": extra}, device=device, snapshot_bytes=budget_bytes) as run:
        for number in range(2):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            extra.state = [tree] * number
            run.step()
        run.engine.settle()
        run.check()


class _Twins:
    """Two models with three optimizers, and everything that loops do with them."""

    def __init__(self) -> None:
        self.models = {"a": Plain(norm=True), "b": Plain()}
        a, b = (list(model.parameters()) for model in self.models.values())
        self.optimizers = {
            "a": AdamW(a, lr=0.01),
            "b1": SGD(b[:2], lr=0.1, momentum=0.9),
            "b2": Adam(b[2:], lr=0.01, foreach=True),
        }
        self.extra = Holder({"seen": 0})

    def act(self, what: str) -> None:
        if what in self.optimizers:
            self.optimizers[what].step()
        else:
            getattr(self, f"_{what}")()

    def _grad(self) -> None:
        for model in self.models.values():
            model(torch.randn(4, 6)).square().sum().backward()

    def _zero(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def _draw(self) -> None:
        torch.rand(1)
        np.random.rand()

    def _extra(self) -> None:
        self.extra.state = {"seen": [torch.randn(3), self.extra.state["seen"]]}

    def _rate(self) -> None:
        self.optimizers["a"].param_groups[0]["lr"] *= 0.5

    def _freeze(self) -> None:
        for parameter in self.models["b"].parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                return

    def _move(self) -> None:
        weight: Any = self.models["b"].get_submodule("first").weight
        weight.data = weight.data.clone()

    def _group(self) -> None:
        extra = nn.Parameter(torch.randn(3))
        extra.grad = torch.ones(3)
        self.models["a"].register_parameter(f"p{len(list(self.models['a'].parameters()))}", extra)
        self.optimizers["a"].add_param_group({"params": [extra]})


_ACTIONS = ("grad", "a", "b1", "b2", "a", "b1", "zero", "draw", "extra", "rate", "freeze", "move",
            "group", "step", "step", "settle")  # fmt: skip


@settings(max_examples=30)
@given(st.lists(st.sampled_from(_ACTIONS), max_size=25), st.sampled_from(list(MODES)))
def test_any_loop(actions: list[str], mode: str) -> None:
    make, budget_bytes = MODES[mode]
    twins, device = _Twins(), make()
    with Run(
        twins.models, twins.optimizers, {"x": twins.extra}, device=device,
        snapshot_bytes=budget_bytes,
    ) as run:  # fmt: skip
        for action in ["grad", *actions, "step"]:
            if action == "step":
                run.step()
            elif action == "settle":
                run.engine.settle()
            else:
                twins.act(action)
        run.engine.settle()
        run.check(moves=actions.count("freeze") + actions.count("move"))


# ---------------------------------------------------------------- writes behind the engine's back


def _small(**options: Any) -> tuple[nn.Linear, SGD, HeldDevice, Run]:
    model = nn.Linear(300, 300)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    device = HeldDevice()
    return model, optimizer, device, Run(model, optimizer, device=device, **options)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()


def test_a_write_in_the_window_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, device, run = _small()
    with run, caplog.at_level(logging.ERROR, "everystep"):
        for number in range(1, 5):
            _train(model, optimizer)
            run.step()
            if number == 2:
                until(lambda: device.reads_any([model.weight]), 60, "the weight to be read")
                with torch.no_grad():
                    model.weight.add_(1)
        run.check(1, 3, 4)
        assert run.costs[1].error == "models.model.weight was written while it was copied"
        assert "step 2 is not staged" in caplog.text
        assert run.sink.released == 1


def test_a_write_before_anything_was_looked_at_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _, run = _small()
    written = threading.Event()
    look = capture_module.versions_of

    def late(tensors: Any) -> list[int]:
        if threading.current_thread().name == COPIER:
            assert written.wait(60)
        return look(tensors)

    written.set()
    monkeypatch.setattr(capture_module, "versions_of", late)
    with run:
        for number in range(1, 4):
            _train(model, optimizer)
            if number == 2:
                written.clear()
            run.step()
            if number == 2:
                with torch.no_grad():
                    model.weight.add_(1)
                written.set()
        run.engine.settle()
        for number in run.sink.sealed:
            assert_is(run.sink.steps[number], run.truth[number], {}, number)


def test_a_write_while_it_is_snapshotted_is_told() -> None:
    model = nn.Linear(300, 300)
    optimizer = SGD(model.parameters(), lr=0.1)
    device = HeldDevice(snapshots=True)
    with Run(model, optimizer, device=device) as run:
        for number in range(1, 5):
            _train(model, optimizer)
            run.step()
            if number == 2:
                until(lambda: device.reads_any([model.weight]), 60, "the weight to be read")
                with torch.no_grad():
                    model.weight.add_(1)
        run.check(1, 3, 4)  # nothing of the snapshots of step 2 is left to step 3
        assert run.costs[1].error is not None


def test_what_a_given_up_step_kept_is_not_the_next_one_s() -> None:
    """The bias is snapshotted before it is seen that the weight was written."""
    model = nn.Linear(300, 300)
    first, second = SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.1)
    device = HeldDevice(snapshots=True)
    with Run(model, {"first": first, "second": second}, device=device) as run:
        model(torch.randn(2, 300)).sum().backward()
        first.step(), second.step()
        run.step()
        run.step()
        until(lambda: device.reads_any([model.weight]), 60, "the copying thread to be held there")
        second.step()
        with torch.no_grad():
            model.weight.add_(1)
        first.step()
        run.step()
        run.check(1, 3)


def test_through_data_nothing_can_be_seen() -> None:
    """A limit, stated in docs: what is written through `.data` in the window, to a tensor that an
    optimizer writes, is sealed as it was found."""
    model, optimizer, _, run = _small()
    with run:
        _train(model, optimizer)
        run.step()
        _train(model, optimizer)
        run.step()
        model.weight.data.add_(1)
        run.engine.settle()
        assert run.sink.sealed == [1, 2]
        key = "/models/model/weight"
        sealed, true = run.sink.steps[2].tensors[key], run.truth[2].tensors[key]
        assert sealed != true


def test_after_many_torn_steps_they_are_copied_at_once() -> None:
    model, optimizer, device, run = _small()
    with run:
        for _ in range(1 + offload._MOST_TORN + 3):
            _train(model, optimizer)
            if run.step().staged_at_s is None:
                until(lambda: device.reads_any([model.weight]), 60, "the weight to be read")
            with torch.no_grad():
                model.weight.add_(1)
        run.engine.settle()
        torn = offload._MOST_TORN
        run.check(1, *range(torn + 2, torn + 5))


def test_a_form_that_changes_and_changes_back_is_told() -> None:
    model, optimizer, device, run = _small()
    with run:
        for number in range(1, 4):
            _train(model, optimizer)
            if number == 2:
                model.bias.requires_grad_(False)
            run.step()
            if number == 2:
                until(lambda: device.waiting, 60, "the copying thread to be held")
                model.bias.requires_grad_(True)
        run.engine.settle()
        for number in run.sink.sealed:
            assert_is(run.sink.steps[number], run.truth[number], {}, number)


# ---------------------------------------------------------------- when, and whether


def test_only_the_first_step_is_staged_at_once() -> None:
    model, optimizer, _, run = _small()
    with run:
        _train(model, optimizer)
        assert run.step().staged_at_s is not None and run.sink.sealed == [1]
        _train(model, optimizer)
        cost = run.step()  # nothing is let: it returns, and copies nothing
        assert cost.staged_at_s is None and run.sink.sealed == [1]
        run.engine.settle()
        assert cost.staged_at_s is not None and run.sink.sealed == [1, 2]
        run.check()


def test_every_third_step() -> None:
    model, optimizer, _, run = _small(every=3)
    with run:
        for _ in range(10):
            _train(model, optimizer)
            run.step()
        run.check(1, 3, 6, 9)  # the first is taken whatever its number
        assert [cost.due for cost in run.costs] == [n in (1, 3, 6, 9) for n in range(1, 11)]
        assert {cost.every for cost in run.costs} == {3}


def test_without_room_a_step_is_skipped() -> None:
    model, optimizer, _, run = _small()
    with run:
        for number in range(1, 4):
            run.sink.hold_back(number == 2)
            _train(model, optimizer)
            run.step()
        run.check(1, 3)
        assert run.costs[1].error == "there was no room in staging memory"
        assert run.costs[1].due and run.costs[1].staging_s >= offload._SKIP_WAIT_S
        assert run.sink.waits_s[1] == offload._SKIP_WAIT_S


def test_copying_gives_way_to_training() -> None:
    """Where both want a processor; the training thread is as it was."""

    def nice_of(thread: int) -> int:
        return os.getpriority(os.PRIO_PROCESS, thread)

    own = nice_of(threading.get_native_id())
    model, optimizer, _, run = _small()
    with run:
        _train(model, optimizer)
        run.step()
        copier = next(t for t in threading.enumerate() if t.name == COPIER)
        until(lambda: nice_of(copier.native_id or 0) == min(19, own + 5), 20, "it to be nice")
        assert nice_of(threading.get_native_id()) == own


def test_without_room_training_waits_where_it_is_to_block() -> None:
    model, optimizer, _, run = _small(policy="block")
    me = threading.current_thread()
    with run:
        _train(model, optimizer)
        run.step()
        run.sink.hold_back()
        _train(model, optimizer)

        def give() -> None:
            until(lambda: len(run.sink.waits_s) == 2, 60, "the engine to ask for a slot")
            assert me.is_alive()
            run.sink.hold_back(False)

        giver = threading.Thread(target=give)
        giver.start()
        run.step()
        giver.join()
        run.check(1, 2)
        assert run.sink.waits_s[1] > 60 and run.costs[1].staging_s > 0


def _busy(seconds: float) -> None:
    """Stands for work of that length."""
    over_s = time.monotonic() + seconds
    until(lambda: time.monotonic() >= over_s, 60, "the work to be over")


class _SlowLink(CpuDevice):
    """A device whose link has a rate that a test sets."""

    bytes_per_s = float("inf")

    def copy(self, source: Any, target: Any, hashes: Any) -> None:
        """Copy, and be busy for as long as the link needs."""
        super().copy(source, target, hashes)
        _busy(source.nbytes / self.bytes_per_s)

    def digest(self, source: Any, target: Any) -> str:
        """The same, with the hash."""
        found = CpuDevice().digest(source, target)
        _busy(source.nbytes / self.bytes_per_s)
        return found


@pytest.mark.parametrize("snapshots", [False, True])
def test_auto_takes_fewer_when_the_link_is_slow_and_returns(
    snapshots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "give_way", lambda: None)  # to others who want the processors
    model = nn.ParameterList(nn.Parameter(torch.randn(300, 300)) for _ in range(4))
    optimizer = SGD(model.parameters(), lr=0.1)
    device = _SlowLink(snapshots)
    with Run(model, optimizer, device=device, every="auto", truth=False) as run:

        def every_after(steps: int) -> int:
            for _ in range(steps):
                for parameter in model:
                    parameter.grad = torch.ones_like(parameter)
                _busy(0.005)  # forward and backward
                optimizer.step()
                run.step()
            return run.costs[-1].every

        every_after(4)
        device.bytes_per_s = 4 * 360_000 / 0.03
        slow = every_after(5)
        assert slow >= 2
        device.bytes_per_s = float("inf")
        taken = [slow]
        while taken[-1] > 1 and len(taken) < 40 * PATIENCE:
            taken.append(every_after(1))
        assert taken[-1] == 1 and len(taken) > PATIENCE
        falls = [(a, b) for a, b in itertools.pairwise(taken) if a > b]
        assert all(a == 2 * b for a, b in falls)  # others may have had the processors in between


# ---------------------------------------------------------------- ranks


@contextlib.contextmanager
def _rank_of_two(rank: int) -> Iterator[Scene]:
    """A training as one rank of two sees it, whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        yield build("AdamW/loop", "fp32", "batchnorm", 3, lambda model, _: DDP(model))
    finally:
        dist.destroy_process_group()


def _train_alike(scene: Scene, step: int) -> None:
    """An update that is the same on both ranks."""
    generator = torch.Generator().manual_seed(step)
    for parameter in scene.models["net"].parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in scene.optimizers.values():
        optimizer.step()


def _sealed_of(rank: int, device: CpuDevice, budget_bytes: int | None) -> tuple[Step, Truth]:
    with _rank_of_two(rank) as scene, Run(
        scene.models, scene.optimizers, scene.extras, device=device, ranks=Ranks(rank, 2),
        snapshot_bytes=budget_bytes,
    ) as run:  # fmt: skip
        for t in range(3):
            _train_alike(scene, t)
            run.step()
        run.engine.settle()
        assert run.sink.sealed == [1, 2, 3]
        return run.sink.steps[3], run.truth[3]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_make_the_whole(mode: str) -> None:
    make, budget_bytes = MODES[mode]
    sealed, truths = zip(*(_sealed_of(rank, make(), budget_bytes) for rank in (0, 1)), strict=True)
    split = 0
    for key, spec in truths[0].specs.items():
        if not spec.replicated:
            for step, truth in zip(sealed, truths, strict=True):
                assert step.tensors[key] == truth.tensors[key], key
            continue
        data = truths[0].tensors[key]
        assert truths[1].tensors[key] == data  # or nothing is proved
        pieces = [(p, d) for step in sealed for p, d in step.pieces.items() if p.key == key]
        assert b"".join(d for _, d in sorted(pieces, key=lambda each: each[0].start)) == data
        split += len(pieces) > 1
        whole = xxhash.xxh3_128(data).hexdigest()
        for step in sealed:
            all_of_it = Piece(key, 0, spec.elements) in step.pieces
            assert step.whole.get(key) == (None if all_of_it else whole), key
    assert split
    shares = [sum(len(d) for p, d in s.pieces.items() if s.specs[p.key].replicated) for s in sealed]
    assert min(shares) > 0 and abs(shares[0] - shares[1]) <= 16


def test_replicas_can_be_stored_whole() -> None:
    with _rank_of_two(1) as scene, Run(
        scene.models, scene.optimizers, scene.extras, ranks=Ranks(1, 2)
    ) as run:  # fmt: skip
        for t in range(3):
            run.engine.share_replicas = t == 0
            _train_alike(scene, t)
            run.step()
        run.engine.settle()
        assert run.sink.steps[1].whole and set(run.sink.steps[1].tensors) < set(
            run.truth[1].tensors
        )
        for number in (2, 3):
            assert not run.sink.steps[number].whole
            assert run.sink.steps[number].tensors == run.truth[number].tensors


def test_a_single_element_of_an_odd_stride_is_hashed() -> None:
    with _rank_of_two(1) as scene:
        model = DDP(_One())
        with Run(model, ranks=Ranks(1, 2)) as run:
            assert run.step().error is None
            run.engine.settle()
            step, truth = run.sink.steps[1], run.truth[1]
        (key,) = (key for key in truth.specs if key.endswith("one"))
        assert step.whole[key] == xxhash.xxh3_128(truth.tensors[key]).hexdigest()
        assert scene.models


class _One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(40)[::7][:1])
        self.rest = nn.Parameter(torch.randn(9))


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("no luck"), MemoryError("no luck"), OSError("no luck"),
              ValueError("no luck")], ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_a_copy_that_fails_costs_its_step(error: Exception, snapshots: bool) -> None:
    model = nn.Linear(300, 300)
    optimizer = SGD(model.parameters(), lr=0.1)
    device = HeldDevice(snapshots)
    with Run(model, optimizer, device=device) as run:
        for number in range(1, 5):
            _train(model, optimizer)
            run.step()
            device.refuse = error if number == 2 else None
        run.check(1, 3, 4)
        assert "no luck" in str(run.costs[1].error) and run.sink.released == 1


def test_a_sink_that_refuses_costs_its_step() -> None:
    model, optimizer, _, run = _small()
    with run:
        for number in range(1, 5):
            run.sink.fail_seal = StoreFailed("the agent is gone") if number == 3 else None
            _train(model, optimizer)
            run.step()  # seals the step before
        run.check(1, 3, 4)
        assert "the agent is gone" in str(run.costs[1].error)


def test_an_interrupt_in_the_hook_seals_nothing_half_copied() -> None:
    model, optimizer, device, run = _small()
    with run:
        _train(model, optimizer)
        run.step()
        _train(model, optimizer)
        run.step()
        until(lambda: device.waiting, 60, "the copying thread to be held")

        def interrupted(*_: object) -> None:
            device.copy, device.digest = copy, digest  # type: ignore[method-assign]
            device.copy_group = group  # type: ignore[method-assign]
            raise KeyboardInterrupt

        copy, digest, group = device.copy, device.digest, device.copy_group
        device.copy = device.digest = interrupted  # type: ignore[method-assign,assignment]
        device.copy_group = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        run.step()
        run.check(1, 3)
        assert "interrupted" in str(run.costs[1].error)


def test_a_snapshot_for_which_there_is_no_room_is_copied() -> None:
    class Full(HeldDevice):
        refused = 0

        def snapshot(self, sources: Any) -> Any:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    model, device = nn.Linear(300, 300), Full(snapshots=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    with Run(model, optimizer, device=device) as run:
        for _ in range(3):
            _train(model, optimizer)
            run.step()
        run.check()
    assert device.refused


def test_a_state_that_cannot_be_stored_gives_its_slot_back() -> None:
    class Broken(HeldDevice):
        broken = False

        def stable(self) -> None:
            if self.broken:
                raise RuntimeError("a device error")

    model, device = nn.Linear(300, 300), Broken()
    optimizer = SGD(model.parameters(), lr=0.1)
    with Run(model, optimizer, device=device) as run:
        _train(model, optimizer)
        run.step()
        device.broken = True
        with pytest.raises(RuntimeError, match="a device error"):
            run.step()
        device.broken = False
        _train(model, optimizer)
        run.step()
        run.engine.settle()
        assert run.sink.released == 1 and run.sink.sealed == [1, 2]


# ---------------------------------------------------------------- threads and memory


def test_close_leaves_no_thread_no_hook_and_no_reference() -> None:
    model, optimizer, device, run = _small()
    with run:
        _train(model, optimizer)
        run.step()
        _train(model, optimizer)
        device.allow(float("inf"))
        run.step()
        assert any(thread.name == COPIER for thread in threading.enumerate())
    assert not any(thread.name == COPIER for thread in threading.enumerate())
    assert run.sink.sealed == [1, 2]  # what was under way is staged
    hooks: Any = optimizer
    assert not hooks._optimizer_step_pre_hooks and not hooks._optimizer_step_post_hooks
    seen = weakref.ref(model)
    del model, optimizer, hooks, run, device
    gc.collect()
    assert seen() is None


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    ("steps", "snapshots"),
    [(900, False), (3_000, True)],
)
def test_many_steps_take_no_more_memory(steps: int, snapshots: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sink = MemorySink(keep=False)
    run = Run(model, optimizer, sink=sink, device=CpuDevice(snapshots), truth=False)

    def train(first: int, last: int) -> tuple[int, int]:
        for number in range(first, last + 1):
            optimizer.step()
            run.engine.step(number, {"loss": 1.0})
        gc.collect()
        return _resident_bytes(), len(gc.get_objects())

    with run:
        bytes_then, objects_then = train(1, steps // 3)
        bytes_now, objects_now = train(steps // 3 + 1, steps)
        run.engine.settle()
    assert len(sink.sealed) == steps
    assert objects_now - objects_then < 200
    assert bytes_now - bytes_then < 8 << 20
