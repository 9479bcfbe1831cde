from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from everystep.deltas.delta import Coded
from everystep.errors import CannotRestore, Damaged
from everystep.recovery import adam, blocks
from everystep.recovery.proof import Step
from folding import Bag, Recording, random_gradients


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def _small_blocks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if request.param == "torch":
        monkeypatch.setattr(adam, "kernel", None)
        monkeypatch.setattr(adam, "_variant", lambda foreach: None)
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _trained(
    optimizer: Any, model: Any, steps: int, *, warm: bool = True, ranks: int = 1, slices: int = 16
) -> Recording:
    generator = torch.Generator().manual_seed(3)
    if warm:
        random_gradients(optimizer, generator)
        optimizer.step()
    recording = Recording(model, optimizer, ranks=ranks, slices=slices)
    for _ in range(steps):
        random_gradients(optimizer, generator)
        optimizer.step()
        recording.end_step()
    recording.close()
    return recording


def _bag(*sizes: int) -> Bag:
    torch.manual_seed(0)
    return Bag([torch.randn(size) for size in sizes])


def _flipped(recording: Recording, index: int, position: int) -> None:
    """Flip a bit of the first value of one gradient."""
    step = recording.steps[index]
    [(layout, delta)] = step.parts
    [update] = delta.updates
    coded: Coded = update.gradients[position]
    values = coded.values.copy()
    values[coded.values.nbytes // 2] ^= 0x40
    gradients = list(update.gradients)
    gradients[position] = coded._replace(values=values)
    delta = delta._replace(updates=[update._replace(gradients=gradients)])
    recording.steps[index] = Step(step.step, [(layout, delta)], 0)


def test_slots_that_training_makes_later_are_there() -> None:
    model = _bag(5, 40_000)
    _trained(optim.AdamW(model.parameters()), model, 4, warm=False).assert_folds()
    model = _bag(5, 40_000)
    _trained(optim.SGD(model.parameters(), momentum=0.9), model, 4, warm=False).assert_folds()


@pytest.mark.parametrize("slices", [1, 3])
def test_rounds_of_other_lengths(slices: int) -> None:
    model = _bag(5, 20_000, 70_001, 200)
    optimizer = optim.AdamW(model.parameters())
    recording = _trained(optimizer, model, 7, slices=slices)
    recording.assert_folds()
    _flipped(recording, 0, 2)
    with pytest.raises(Damaged, match=r"is not what it was in training"):
        recording.folded()


def test_a_session_with_another_round_goes_on() -> None:
    model = _bag(5, 70_001)
    optimizer = optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(3)
    random_gradients(optimizer, generator)
    optimizer.step()
    recording = Recording(model, optimizer)
    for slices in (16, 3, 3, 3, 1, 40):
        recording.begin_session(slices)
        for _ in range(2):
            random_gradients(optimizer, generator)
            optimizer.step()
            recording.end_step()
    recording.close()
    recording.assert_folds()


def test_what_no_fingerprint_proved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _bag(5, 70_001)
    recording = _trained(optim.AdamW(model.parameters()), model, 3)
    monkeypatch.setattr(blocks._Fold, "_hash", lambda *_: None)
    with pytest.raises(CannotRestore, match="was not proved"):
        recording.folded()


def test_ranks_share_out_a_gradient() -> None:
    model = _bag(5, 40_001, 1)
    _trained(optim.AdamW(model.parameters()), model, 5, ranks=3).assert_folds()


@pytest.mark.parametrize("size", [300, 40_000])
@pytest.mark.parametrize("warm", [True, False])
def test_a_flipped_bit_of_a_gradient_is_found_within_a_round_and_named(
    size: int, warm: bool
) -> None:
    model = _bag(7, size, 9)
    recording = _trained(optim.AdamW(model.parameters()), model, 18, warm=warm)
    recording.assert_folds()
    _flipped(recording, 1, 1)
    with pytest.raises(Damaged, match=r"is not what it was in training") as caught:
        recording.folded()
    assert ".p.1" in caught.value.message
    assert isinstance(caught.value.step, int) and 2 <= caught.value.step <= 17


def test_a_missing_delta_is_never_bridged() -> None:
    model = _bag(7)
    recording = _trained(optim.AdamW(model.parameters()), model, 4)
    del recording.steps[2]
    with pytest.raises(Damaged, match="a delta is missing"):
        recording.folded()


def test_a_class_that_nobody_hands_over_is_never_looked_for() -> None:
    class Mine(optim.SGD):
        pass

    model = _bag(7)
    recording = _trained(Mine(model.parameters(), lr=0.1), model, 3)
    with pytest.raises(CannotRestore, match="which is not here"):
        recording.folded()
    name = f"{Mine.__module__}.{Mine.__qualname__}"
    recording.assert_folds(classes={name: Mine})


def test_a_schedule_several_groups_and_tensor_rates() -> None:
    model = _bag(7, 30_000, 64)
    groups = [
        {"params": [model.p[0]], "lr": torch.tensor(0.1), "weight_decay": 0.0},
        {"params": [model.p[1], model.p[2]]},
    ]
    optimizer = optim.AdamW(groups, lr=0.01)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    generator = torch.Generator().manual_seed(3)
    recording = Recording(model, optimizer, {"schedule": schedule})
    for _ in range(6):
        random_gradients(optimizer, generator)
        optimizer.step()
        schedule.step()
        recording.end_step()
    recording.close()
    recording.assert_folds()


def test_absent_gradients_skipped_steps_and_two_optimizers() -> None:
    model = _bag(7, 30_000, 64, 2_000)
    optimizers = {
        "a": optim.AdamW([model.p[0], model.p[1]]),
        "b": optim.SGD([model.p[2], model.p[3]], lr=0.1, momentum=0.9),
    }
    generator = torch.Generator().manual_seed(3)
    recording = Recording(model, optimizers)
    for step in range(8):
        for name, optimizer in optimizers.items():
            random_gradients(optimizer, generator)
            if step % 3 == 1:
                model.p[1].grad = None
            if step != 4 and not (step == 6 and name == "b"):
                optimizer.step()
            if step == 5:
                optimizer.step()
        recording.end_step()
    recording.close()
    recording.assert_folds()


def test_sparse_coo_gradients() -> None:
    model = nn.Embedding(50, 8, sparse=True)
    optimizer = optim.SparseAdam(model.parameters())
    recording = Recording(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.tensor([step, 7, 7, 3])).square().sum().backward()
        optimizer.step()
        recording.end_step()
    recording.close()
    recording.assert_folds()


@pytest.mark.parametrize("inf", [0.0, 1.0])
def test_a_fused_optimizer_that_unscales(inf: float) -> None:
    model = _bag(7, 30_000)
    optimizer: Any = optim.AdamW(model.parameters(), fused=True)
    generator = torch.Generator().manual_seed(3)
    random_gradients(optimizer, generator)
    optimizer.step()
    recording = Recording(model, optimizer)
    for step in range(4):
        random_gradients(optimizer, generator)
        optimizer.grad_scale = torch.tensor(1024.0)
        optimizer.found_inf = torch.tensor(inf if step == 1 else 0.0)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        recording.end_step()
    recording.close()
    recording.assert_folds()


def test_memory_order_is_kept() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 40, 50).to(memory_format=torch.channels_last)
    model = Bag([torch.randn(5, 3).t(), images, torch.randn(30_000)])
    _trained(optim.AdamW(model.parameters()), model, 4).assert_folds()
