"""Steps that are copied beside training: a part of the matrix that shows what can differ from a
blocking save, and what only such a step can meet."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from crash.staged_scenes import agents_of
from everystep import Checkpointer, Full, load
from everystep.types import StepRef
from exact.matrix import Case
from exact.proof import prove
from exact.scenes import Scene, batch, seed_all
from exact.test_stories import ALL, STEPS, everything, train_stored, with_loader
from states import Frozen, assert_same_state
from waiting import until

EVERY = Full(every=1, policy="block")

CASES = [
    *(Case("AdamW/loop", "fp32", m) for m in ("plain", "tied", "frozen", "batchnorm", "gan")),
    *(Case("Adam+amsgrad+weight_decay/fused", f, "batchnorm") for f in ("bf16", "mixed", "master")),
    Case("AdamW/loop", "fp32", "complex"),
    Case("SparseAdam", "fp32", "sparse"),
    Case("AdamW/foreach", "mixed", "compiled"),
    Case("AdamW+tensor/fused", "fp32", "plain"),
    Case("LBFGS+wolfe", "fp32", "plain"),
    Case("SOAP", "fp32", "plain"),
    Case("AdaShift", "bf16", "tied"),
    Case("Muon", "master", "gan"),
]
"""All models and formats; slots that are lists, deques and tensors without a shape."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_restored_goes_on_exactly(case: Case, run_dir: Path) -> None:
    prove(case, run_dir, EVERY)


@pytest.fixture(scope="module")
def uninterrupted() -> list[Frozen]:
    """The state after each number of steps, without any checkpointer."""
    scene = everything(1)
    states = [scene.state()]
    for t in range(STEPS):
        scene.step(t)
        states.append(scene.state())
    return states


def test_every_step_is_a_place_to_go_on_from(run_dir: Path, uninterrupted: list[Frozen]) -> None:
    """With a scaler, an average, generators, a schedule and an overflow; the same live objects go
    back in time again and again, with the agent alive."""
    scene = everything(1)
    with scene.checkpointer(run_dir, strategy=EVERY, retention=ALL) as ck:
        train_stored(scene, ck, ck.restore(), STEPS)
        agents = agents_of(run_dir)
        for back in (*range(1, STEPS), 2):
            assert ck.restore(step=StepRef("main", back)) == back
            assert_same_state(uninterrupted[back], scene.state())
        train_stored(scene, ck, back, STEPS)
        assert agents_of(run_dir) == agents
        assert_same_state(uninterrupted[STEPS], scene.state())
    other = everything(2)
    with other.checkpointer(run_dir, strategy=EVERY, retention=ALL) as ck:
        assert ck.restore() == STEPS
        assert_same_state(uninterrupted[STEPS], other.state())


def test_after_an_agent_has_been_killed(run_dir: Path, uninterrupted: list[Frozen]) -> None:
    """Twice while training goes on, and just before a restore, which is of the newest step."""
    scene = everything(1)
    with scene.checkpointer(run_dir, strategy=EVERY) as ck:
        ck.restore()
        for t in range(STEPS - 1):
            scene.step(t)
            ck.step()
            if t in (0, 4, STEPS - 2):
                until(lambda: agents_of(run_dir), 60, "an agent to be there")
                os.kill(agents_of(run_dir)[0], signal.SIGKILL)
        assert ck.restore() == STEPS - 1
        assert_same_state(uninterrupted[STEPS - 1], scene.state())
        train_stored(scene, ck, STEPS - 1, STEPS)
    assert_same_state(uninterrupted[STEPS], scene.state())
    other = everything(2)
    with other.checkpointer(run_dir, strategy=EVERY) as ck:
        assert ck.restore() == STEPS
    assert_same_state(uninterrupted[STEPS], other.state())


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers: int, run_dir: Path) -> None:
    reference, _ = with_loader(1, workers)
    reference.steps(0, 9)
    first, _ = with_loader(1, workers)
    with first.checkpointer(run_dir, strategy=EVERY) as ck:
        train_stored(first, ck, ck.restore(), 6)
    second, _ = with_loader(2, workers)
    with second.checkpointer(run_dir, strategy=EVERY) as ck:
        assert ck.restore() == 6
        second.steps(6, 9)
    assert second.extras["seen"] == reference.extras["seen"]
    for scene in (reference, second):
        del scene.extras["loader"]  # its state says in which process it was made
    assert_same_state(reference.state(), second.state())


class Adapted(nn.Module):
    """Large frozen weights, in two memory formats, with a small trained detour around them, and
    buffers large and small that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(700, 700)
        self.turned = nn.Parameter(torch.randn(700, 600).t(), requires_grad=False)
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)
        self.down, self.up = nn.Linear(700, 4, bias=False), nn.Linear(4, 600, bias=False)
        self.norm = nn.BatchNorm1d(600)
        self.register_buffer("seen", torch.zeros(120_000))


def adapted(seed: int) -> Scene:
    """An adapter run: frozen weights that are stored once; buffers that change in forward."""
    seed_all(seed)
    net = Adapted()
    average: Any = nn.Module()
    average.register_buffer("mean", net.down.weight.detach().clone())
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.05)

    def step(t: int) -> None:
        x, y = batch(t)
        hidden = net.frozen(x.repeat(1, 117)[:, :700])
        net.seen.add_(x.sum())
        out = net.norm(hidden @ net.turned.t() + net.up(net.down(hidden)))
        optimizer.zero_grad()
        F.mse_loss(out[:, :3], y).backward()
        optimizer.step()
        average.mean.lerp_(net.down.weight.detach(), 0.1)

    return Scene({"net": net, "average": average}, {"optimizer": optimizer}, {}, step)


def test_frozen_weights_and_buffers_that_forward_changes(run_dir: Path) -> None:
    states = []
    reference = adapted(1)
    for t in range(6):
        states.append(reference.state())
        reference.step(t)
    scene = adapted(1)
    with scene.checkpointer(run_dir, strategy=EVERY, retention=ALL) as ck:
        train_stored(scene, ck, ck.restore(), 5)
    assert_same_state(states[5], scene.state())
    files = [list((run_dir / f"steps/main/{step:012d}").iterdir()) for step in (1, 5)]
    sizes = [sum(file.stat().st_size for file in found) for found in files]
    assert sizes[1] < sizes[0] / 2, "frozen weights are stored once"
    for step in (1, 3, 5):
        other = adapted(2)
        with other.checkpointer(run_dir, strategy=EVERY, retention=ALL) as ck:
            assert ck.restore(step=StepRef("main", step)) == step
        assert_same_state(states[step], other.state())
    other.step(5)
    assert_same_state(reference.state(), other.state())


def test_frozen_weights_that_are_written_after_all(run_dir: Path) -> None:
    scene = adapted(1)
    with scene.checkpointer(run_dir, strategy=EVERY, retention=ALL) as ck:
        train_stored(scene, ck, ck.restore(), 2)
        with torch.no_grad():
            scene.models["net"].turned[3] += 1
        train_stored(scene, ck, 2, 4)
    other = adapted(2)
    with other.checkpointer(run_dir, strategy=EVERY, retention=ALL) as ck:
        assert ck.restore() == 4
    assert_same_state(scene.state(), other.state())


def test_two_runs_one_after_the_other_in_one_process(tmp_path: Path) -> None:
    ends = []
    for name in ("a", "b"):
        scene = everything(1)
        with scene.checkpointer(tmp_path / name, strategy=EVERY) as ck:
            train_stored(scene, ck, ck.restore(), 2)
        ends.append(scene.state())
    assert_same_state(*ends)
    for name in ("a", "b"):
        other = everything(2)
        with other.checkpointer(tmp_path / name, strategy=EVERY) as ck:
            assert ck.restore() == 2
        assert_same_state(ends[0], other.state())


def test_no_step_at_all(run_dir: Path) -> None:
    scene = everything(1)
    scene.checkpointer(run_dir, strategy=EVERY).close()
    with scene.checkpointer(run_dir, strategy=EVERY) as ck:
        assert ck.restore() == 0
    with scene.checkpointer(run_dir, strategy=EVERY) as ck:
        assert ck.restore() == 0
        assert agents_of(run_dir)
    assert not agents_of(run_dir)


def test_a_fresh_run_without_restore_and_its_metrics(
    run_dir: Path, uninterrupted: list[Frozen]
) -> None:
    scene = everything(1)
    with scene.checkpointer(run_dir, strategy=EVERY) as ck:
        for t in range(3):
            scene.step(t)
            ck.step(loss=torch.tensor(0.5 * t), word="a", far=float("nan"))
    found = load(run_dir)
    assert (found.step, found.metrics["loss"], found.metrics["word"]) == (3, 1.0, "a")
    assert found.metrics["far"] != found.metrics["far"]
    other = everything(2)
    with other.checkpointer(run_dir, strategy=EVERY) as ck:
        assert ck.restore() == 3
    assert_same_state(uninterrupted[3], other.state())


def test_the_default_keeps_the_newest_that_it_stages(
    run_dir: Path, uninterrupted: list[Frozen]
) -> None:
    """`strategy="auto"`, which users have. On a busy machine it may leave steps out."""
    scene = everything(1)
    objects: dict[str, Any] = {"model": scene.models, "optimizer": scene.optimizers}
    with Checkpointer(run_dir, extras=scene.extras, **objects) as ck:
        train_stored(scene, ck, ck.restore(), STEPS)
    assert_same_state(uninterrupted[STEPS], scene.state())  # random numbers are of the process
    newest = max((s for s in ck.stats if s.staged), key=lambda s: s.step)
    assert newest.durable
    assert newest.step >= 1
    other = everything(2)
    with other.checkpointer(run_dir) as ck:
        assert ck.restore() == newest.step
    assert_same_state(uninterrupted[newest.step], other.state())


def test_nothing_is_kept_after_the_end(run_dir: Path) -> None:
    """Models and optimizers are freed at once, not when Python looks for circles."""
    gc.collect()
    gc.disable()
    try:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Checkpointer(run_dir, model=model, optimizer=optimizer, strategy=EVERY) as ck:
            for _ in range(ck.restore(), 3):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                ck.step()
        kept = weakref.ref(model.weight)
        del model, optimizer, ck
        assert kept() is None
    finally:
        gc.enable()
