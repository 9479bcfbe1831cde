from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import optim

from everystep.recovery import adam, blocks
from folding import Bag, Recording, random_gradients

if adam.kernel is None:
    pytest.skip(
        "it was not compiled, or the processor has no such instructions", allow_module_level=True
    )


class Counted:
    """The compiled loop, with a count of the training steps that were done by it."""

    def __init__(self) -> None:
        self.steps = 0

    def fold(self, p: int, m: int, v: int, start: int, length: int, rows: Any, *how: int) -> None:
        self.steps += len(rows)
        kernel.fold(p, m, v, start, length, rows, *how)


kernel = adam.kernel


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    for foreach in (False, True):  # after the trial, which would be counted too
        assert adam._variant(foreach) is not None
    made = Counted()
    monkeypatch.setattr(adam, "kernel", made)
    return made


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 4096)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _recorded(kind: Any, sizes: list[int], steps: int, **options: Any) -> Recording:
    generator = torch.Generator().manual_seed(3)
    ranks, slices = options.pop("ranks", 1), options.pop("slices", 16)
    model = Bag([torch.randn(size, generator=generator) for size in sizes])
    optimizer = kind(model.parameters(), **options)
    random_gradients(optimizer, generator)
    optimizer.step()
    recording = Recording(model, optimizer, ranks=ranks, slices=slices)
    for step in range(steps):
        random_gradients(optimizer, generator)
        if step % 5 == 1:
            model.p[-1].grad = None
        if step % 5 == 2:
            model.p[-1].grad = torch.randn(sizes[-1], generator=generator)
        if step % 5 == 3:
            model.p[-1].grad = torch.randn(sizes[-1], generator=generator).bfloat16().float()
        if step % 5 == 4:
            model.p[-1].grad = torch.zeros(sizes[-1])
        optimizer.step()
        recording.end_step()
    recording.close()
    return recording


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("size", [1, 7, 64, 65, 1023, 100_003])
@pytest.mark.parametrize("foreach", [False, True])
def test_bits_of_torch_at_any_size(kind: Any, size: int, foreach: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(4, size, generator=generator)
    values *= torch.exp(20 * torch.randn(4, size, generator=generator))
    values[2] = values[2].square()
    variant = adam._variant(foreach)
    assert variant is not None
    options = {"lr": 0.1, "weight_decay": 0.0, "foreach": foreach}
    assert adam.agrees(kind, options, 41.0, values, variant)


@pytest.mark.parametrize("foreach", [False, True])
def test_the_trial_notices_another_rounding(foreach: bool) -> None:
    variant = adam._variant(foreach)
    assert variant is not None
    assert all(adam._trials(variant, foreach))
    for other in (variant._replace(fused=variant.fused ^ bit) for bit in (1, 2)):
        assert not any(adam._trials(other, foreach))
    if variant.root:
        assert not any(adam._trials(variant._replace(root=0), foreach))


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("slices", [1, 3, 16, 1024])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_forms_of_gradients_in_the_compiled_loop(
    slices: int, ranks: int, foreach: bool, at_once: bool, counted: Counted
) -> None:
    sizes = [1, 5, 5000, 100_003, 70_001]
    recording = _recorded(optim.AdamW, sizes, 12, slices=slices, ranks=ranks, foreach=foreach)
    recording.assert_folds(threads=2, at_once=at_once)
    assert counted.steps >= 12 * len(sizes) - 3


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True}, {"maximize": True}, {"fused": True},
        {"betas": (0.5, 0.999)}, {"betas": (0.0, 0.999)}, {"lr": torch.tensor(0.1)},
        {"weight_decay": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_what_was_not_tried_is_left_to_torch(options: dict[str, Any], counted: Counted) -> None:
    _recorded(optim.Adam, [7, 9000], 4, **options).assert_folds(threads=2)
    assert counted.steps == 0


def test_options_that_change_and_a_step_that_counts_far(counted: Counted) -> None:
    generator = torch.Generator().manual_seed(3)
    model = Bag([torch.randn(70_000, generator=generator), torch.randn(9)])
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(model.p, (0.1, 0.0), strict=True)]
    optimizer = optim.AdamW(groups, lr=0.01)
    random_gradients(optimizer, generator)
    optimizer.step()
    for slot in optimizer.state.values():
        slot["step"] += 2**24 - 4.0  # float32 counts no further than 2**24
    recording = Recording(model, optimizer)
    for step in range(9):
        optimizer.param_groups[step % 2].update(lr=0.1 / (step + 1), betas=(0.8, 0.9 + 0.01 * step))
        random_gradients(optimizer, generator)
        for _ in range(1 + step % 2):
            optimizer.step()
        recording.end_step()
    recording.close()
    got = recording.assert_folds(threads=2)
    counts = collections.Counter(
        tensor.item() for key, tensor in got.tensors.items() if key.endswith("/step")
    )
    assert counts == {float(2**24): 2}
    assert counted.steps >= 2 * 13
