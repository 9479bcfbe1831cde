"""Hashes that are taken of a state at every step are those of the bytes that are there then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from everystep.recovery.proof import Expected, Hasher
from everystep.state.fingerprint import digest

START, STOP = 64, 200


def _in_place(tensor: torch.Tensor) -> torch.Tensor:
    tensor[START] += 1
    return tensor


def _another(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = tensor + 1  # the same object with other memory, as some optimizers do
    return tensor


@pytest.mark.parametrize("change", [_in_place, _another, _elsewhere])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("turned", [False, True])
def test_whatever_has_become_of_a_tensor(
    change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, turned: bool
) -> None:
    values = torch.arange(300).to(dtype)
    tensor = torch.stack([values, values], 1)[:, 0] if turned else values
    hasher, expected = Hasher(), {"key": Expected(START, STOP, [])}
    found = []
    for _ in range(3):
        ((key, value),) = hasher.hashes({"key": tensor}, expected)
        assert (key, value) == ("key", digest(tensor, START, STOP))
        found.append(value)
        tensor = change(tensor)
    assert len(set(found)) == 3
