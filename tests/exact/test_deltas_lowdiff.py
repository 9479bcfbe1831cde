"""What the code published with LowDiff gets wrong, or leaves out, and is right here.

Learning rates that change, accumulated gradients and the restore of every rank are elsewhere: in
the stories, and in the jobs of several ranks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from everystep import Checkpointer, load
from everystep.agent.tail import Tail
from everystep.engine import taken
from everystep.errors import StoreFailed
from everystep.store.chains import plan_chains
from everystep.store.run import Run
from everystep.strategies import Deltas
from everystep.types import StepRef
from exact.logged import ALL, LOGGED, fulls, prove_steps, states_of, store
from exact.scenes import Scene, batch, build, seed_all
from exact.test_deltas_stories import Script, made
from exact.zoo import Plain
from states import assert_same_state, difference


def normed(seed: int) -> Scene:
    """Batch norm under AdamW."""
    return build("AdamW/loop", "fp32", "batchnorm", seed)


def test_buffers_are_restored(run_dir: Path) -> None:
    states = states_of(normed)
    store(normed, run_dir)
    assert fulls(run_dir) == [1]
    norms = []
    for step in (1, 5):
        scene = prove_steps(normed, run_dir, states, [step])
        norms.append(scene.models["net"].get_submodule("norm"))
    assert [norm.num_batches_tracked.item() for norm in norms] == [1, 5]
    assert not torch.equal(norms[0].running_mean, norms[1].running_mean)


def test_the_newest_full_is_the_base_and_each_later_delta_is_applied_once(run_dir: Path) -> None:
    """The delta that made it is not applied again, and the last one is not forgotten."""
    states = states_of(normed)
    store(normed, run_dir, 8, Deltas(full_every=3, batch=2, check=False))
    assert fulls(run_dir) == [1, 3, 6]
    run = Run.open(run_dir)
    listing = run.listing()
    chains = plan_chains(listing, run.segments(listing), "main")
    ways = {}
    for step in range(1, 9):
        chain = chains.to(step)
        assert chain is not None
        ways[step] = (chain.full.ref.step, [link.ref.step for link in chain.links])
    assert ways == {
        1: (1, []), 2: (1, [2]), 3: (3, []), 4: (3, [4]), 5: (3, [4, 5]),
        6: (6, []), 7: (6, [7]), 8: (6, [7, 8]),
    }  # fmt: skip
    prove_steps(normed, run_dir, states, range(1, 9))


def test_a_full_is_what_the_deltas_before_it_give(run_dir: Path) -> None:
    """Deltas are logged for steps that have a full checkpoint too: without it, the chain holds."""
    states = states_of(normed)
    store(normed, run_dir, 8, Deltas(full_every=3, batch=2, check=False))
    for step in (3, 6):
        for file in (run_dir / f"steps/main/{step:012d}").iterdir():
            file.unlink()
    prove_steps(normed, run_dir, states, range(1, 9))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, t: int) -> None:
    generator = torch.Generator().manual_seed(t)
    optimizer.zero_grad()
    F.mse_loss(model(torch.randn(4, 6, generator=generator)), torch.ones(4, 3)).backward()
    optimizer.step()


@pytest.mark.usefixtures("alone")
def test_deltas_taken_under_wrappers_are_found_by_the_bare_model(run_dir: Path) -> None:
    seed_all(1)
    bare = Plain(norm=True)
    model: Any = torch.compile(DistributedDataParallel(bare), backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    states = []
    with Checkpointer(
        run_dir, model=model, optimizer=optimizer, strategy=LOGGED, retention=ALL
    ) as ck:
        ck.restore()
        for t in range(6):
            _step(model, optimizer, t)
            ck.step()
            states.append({name: value.clone() for name, value in bare.state_dict().items()})
    assert fulls(run_dir) == [1]
    seed_all(2)
    other = Plain(norm=True)
    second = torch.optim.Adam(other.parameters(), lr=0.05)
    with Checkpointer(run_dir, model=other, optimizer=second, retention=ALL) as ck:
        for step in (4, 6):
            assert ck.restore(StepRef("main", step)) == step
            assert_same_state(states[step - 1], dict(other.state_dict()))
            assert difference(states[0], dict(other.state_dict())), "the base was not returned"


class Stopped:
    """The log takes nothing while `open` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.waiting = threading.Event(), threading.Event()
        reserve = Tail.reserve

        def slow(tail: Tail, nbytes: int, wait_s: float) -> memoryview | None:
            self.waiting.set()
            assert self.open.wait(60)
            return reserve(tail, nbytes, wait_s)

        monkeypatch.setattr(Tail, "reserve", slow)


class Garbles(Script):
    """Gradients are overwritten as soon as they have been used."""

    to_none = False

    def step(self, t: int) -> None:
        self.optimizer.zero_grad(set_to_none=self.to_none)
        self.backward(t)
        self.optimizer.step()
        if not self.to_none:
            for p in self.net.parameters():
                assert p.grad is not None
                p.grad.data.fill_(float("nan"))


class LetsGo(Garbles):
    """Gradients are new ones each time."""

    to_none = True


@pytest.mark.parametrize("kind", [Garbles, LetsGo])
def test_a_delta_in_flight_is_not_overwritten_by_the_next_step(
    kind: type[Script], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = states_of(made(kind))
    scene = kind(1).scene()
    with scene.checkpointer(run_dir, strategy=LOGGED, retention=ALL) as ck:
        for t in range(ck.restore(), 5):
            scene.step(t)
            ck.step()
        ck._session._recorder.settle()  # type: ignore[union-attr]
        log = Stopped(monkeypatch)
        for t in (5, 6):  # both are waiting to be handed over
            scene.step(t)
            ck.step()
        assert log.waiting.wait(60)
        scene.optimizers["optimizer"].zero_grad()
        log.open.set()
    assert fulls(run_dir) == [1]
    prove_steps(made(kind), run_dir, states, [5, 6, 7])


def test_used_gradients_do_not_pile_up(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the log takes nothing, those of the two steps that wait are kept, and no others; once
    it does, none."""
    script = Script(1)
    used: list[StorageWeakRef] = []

    def train(ck: Any, first: int, last: int) -> None:
        for t in range(first, last):
            script.backward(t)
            gradient = script.net.first.weight.grad
            assert gradient is not None
            used.append(StorageWeakRef(gradient.untyped_storage()))  # type: ignore[no-untyped-call]
            del gradient
            script.optimizer.step()
            script.optimizer.zero_grad()
            ck.step()

    def alive() -> list[int]:
        return [t for t, ref in enumerate(used) if not ref.expired()]  # type: ignore[no-untyped-call]

    gc.collect()
    gc.disable()
    try:
        with script.scene().checkpointer(run_dir, strategy=LOGGED, retention=ALL) as ck:
            train(ck, ck.restore(), 6)
            ck._session._recorder.settle()  # type: ignore[union-attr]
            assert alive() == []
            log = Stopped(monkeypatch)
            train(ck, 6, 8)
            assert log.waiting.wait(60)
            assert alive() == [6, 7]
            log.open.set()
            ck._session._recorder.settle()  # type: ignore[union-attr]
            assert alive() == []
    finally:
        gc.enable()


def test_the_last_batch_is_not_lost_though_it_is_not_full(run_dir: Path) -> None:
    states = states_of(normed)
    store(normed, run_dir, 7, Deltas(full_every=1000, batch=100, check=False))
    scene = prove_steps(normed, run_dir, states, [7])
    with scene.checkpointer(run_dir, retention=ALL) as ck:
        assert ck.restore() == 7


def _shifted(shift: int) -> Callable[[int], Scene]:
    """The same training on other data from step 4 on."""

    class Shifted(Script):
        def backward(self, t: int, part: int = 0) -> None:
            x, y = batch(10 * t + part)
            F.mse_loss(self.net(x), y + shift * (t >= 4)).backward()

    return made(Shifted)


def test_deltas_of_another_timeline_are_not_mixed_in(run_dir: Path) -> None:
    """Train, go back, train on other data to the same step, and further."""
    one, two = _shifted(0), _shifted(1)
    before, after = states_of(one), states_of(two)
    store(one, run_dir, 7)
    scene = two(2)
    with scene.checkpointer(run_dir, strategy=LOGGED, retention=ALL) as ck:
        assert ck.restore(4) == 4
        for t in range(4, 9):
            scene.step(t)
            ck.step()
    (fork,) = set(Run.open(run_dir).listing().timelines) - {"main"}
    prove_steps(one, run_dir, before, [7, 5, 6])
    scene = two(3)
    with scene.checkpointer(run_dir, retention=ALL) as ck:
        assert ck.restore(StepRef(fork, 9)) == 9
        assert_same_state(after[9], scene.state())
        for step in (3, 5, 7, 9):
            assert ck.restore(StepRef(fork, step)) == step
            assert_same_state(after[step], scene.state())


def test_deltas_of_a_session_that_was_left_behind_are_not_mixed_in(run_dir: Path) -> None:
    """A delta is damaged; the run goes on from the step before it, on other data."""
    one, two = _shifted(0), _shifted(1)
    before, after = states_of(one), states_of(two)
    store(one, run_dir, 7)
    run = Run.open(run_dir)
    (scanned,) = run.segments(run.listing())
    found = next(found for found in scanned.records if found.step == 5)
    path = run_dir / scanned.segment.name
    data = bytearray(path.read_bytes())
    data[found.payload_offset + found.nbytes // 2] ^= 1
    path.write_bytes(data)
    scene = two(2)
    with scene.checkpointer(run_dir, strategy=LOGGED, retention=ALL) as ck:
        assert ck.restore() == 4
        assert_same_state(before[4], scene.state())
        for t in range(4, 8):
            scene.step(t)
            ck.step()
    assert_same_state(after[8], scene.state())
    for step in (8, 6):
        other = two(3)
        with other.checkpointer(run_dir, retention=ALL) as ck:
            assert ck.restore(step) == step
        assert_same_state(after[step], other.state())


def test_a_failure_beside_training_is_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A delta that cannot be written is a gap: said, and followed by a full checkpoint."""
    states = states_of(normed)
    scene = normed(1)
    pack = taken.pack

    def fails(delta: Any) -> Any:
        if delta.step == 4:
            raise StoreFailed("no space left on device")
        return pack(delta)

    monkeypatch.setattr(taken, "pack", fails)
    with scene.checkpointer(run_dir, strategy=LOGGED, retention=ALL) as ck:
        for t in range(ck.restore(), 7):
            scene.step(t)
            ck.step()
            ck._session._recorder.settle()  # type: ignore[union-attr]
        found = ck.steps()
    assert "the delta of step 4 is lost: no space left on device" in caplog.text
    assert fulls(run_dir) == [1, 5]
    assert 4 not in found
    prove_steps(normed, run_dir, states, [3, 5, 7])
    assert load(run_dir).step == 7


def test_a_mistake_beside_training_ends_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not a failure of the store is raised where the user sees it."""

    def mistaken(delta: Any) -> Any:
        raise KeyError("a mistake of ours")

    scene = normed(1)
    monkeypatch.setattr(taken, "pack", mistaken)
    with scene.checkpointer(run_dir, strategy=LOGGED, retention=ALL) as ck:
        with pytest.raises(KeyError, match="a mistake of ours"):
            for t in range(ck.restore(), 7):
                scene.step(t)
                ck.step()
        monkeypatch.undo()
