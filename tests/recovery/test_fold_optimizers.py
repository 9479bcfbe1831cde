from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import optim

from everystep.recovery import blocks
from folding import Bag, Recording, random_gradients

SIZES = [0, 1, 63, 64, 65, 1000, 40_003]
"""torch divides the last among two threads: it is above 32,768."""

_PLAIN: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.NAdam, {"weight_decay": 0.1}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {"weight_decay": 0.1}),
    (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Rprop, {}),
    (optim.ASGD, {"weight_decay": 0.1, "t0": 3.0}),
]

_FUSED: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.Adam, {"amsgrad": True, "fused": True}),
    (optim.AdamW, {"fused": True}),
    (optim.Adagrad, {"fused": True}),
]

_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


def _cases() -> Iterator[Any]:
    for dtype in _DTYPES:
        for kind, options in _PLAIN:
            for foreach in (None, True) if dtype in (torch.float32, torch.bfloat16) else (None,):
                yield kind, options | {"foreach": foreach}, dtype
        for kind, options in _FUSED:
            if not dtype.is_complex and (dtype, kind) != (torch.bfloat16, optim.SGD):
                yield kind, options, dtype


def _label(value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(f"{name}={v}" for name, v in value.items() if v is not None) or "default"
    return getattr(value, "__name__", str(value))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 4096)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def record(
    kind: type[optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    steps: int,
) -> Recording:
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in SIZES]
    model = Bag(tensors)
    optimizer = kind(model.parameters(), lr=0.01, **options)  # type: ignore[call-arg]
    random_gradients(optimizer, generator)
    optimizer.step()
    recording = Recording(model, optimizer, step=1)
    for _ in range(steps):
        random_gradients(optimizer, generator)
        optimizer.step()
        recording.end_step()
    recording.close()
    return recording


@pytest.mark.parametrize(("kind", "options", "dtype"), list(_cases()), ids=_label)
def test_every_optimizer_of_torch(
    kind: type[optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    recording = record(kind, options, dtype, 3)
    recording.assert_folds(threads=2)
    recording.assert_folds(threads=2, at_once=False)
    assert torch.get_num_threads() == 2
