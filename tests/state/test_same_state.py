"""The comparison that all other tests rely on must itself be able to fail."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam

from states import assert_same_state, difference, frozen, state_of

_ZERO = torch.zeros(3)
_TIED = torch.ones(2)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (_ZERO, torch.tensor([0.0, 1.0, 0.0]), "differs first at element 1: 00000000 / 3f800000"),
        (_ZERO, -_ZERO, "differs first at element 0: 00000000 / 80000000"),
        (_ZERO, _ZERO.double(), "dtype torch.float32 / torch.float64"),
        (_ZERO, torch.zeros(3, 1), "shape (3,) / (3, 1)"),
        (torch.zeros(2, 3).t(), torch.zeros(3, 2), "stride (1, 3) / None"),
        ({"a": [_ZERO, 1]}, {"a": [_ZERO, 2]}, "a.1: 1 (int) / 2 (int)"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "dict(a, b)  / dict(b, a)"),
        (1, True, "the state: 1 (int) / True (bool)"),
        (1, 1.0, "int"),
        (0.0, -0.0, "0.0 (float) / -0.0 (float)"),
        ((1,), [1], "tuple"),
        ({}, collections.OrderedDict(), "OrderedDict"),
        (np.zeros(2), np.zeros(2, dtype=np.float32), "<f8"),
        ([_TIED, _TIED], [_TIED, _TIED.clone()], "is tied to another tensor"),
        ([_TIED, _TIED.clone()], [_TIED, _TIED], "is tied to another tensor"),
        (_ZERO, None, "a tensor (3,)"),
    ],
)
def test_differences_are_told(one: Any, other: Any, told: str) -> None:
    assert told in str(difference(one, other))
    with pytest.raises(AssertionError):
        assert_same_state(one, other)


def test_payloads_of_nan_count() -> None:
    nan = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    assert_same_state(nan, nan.clone())
    assert "7fc00001 / 7fc00002" in str(difference(nan[:1], nan[1:]))


def test_a_frozen_state_does_not_follow_training() -> None:
    model = nn.Linear(1, 1)
    optimizer = Adam(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    before = state_of(model, optimizer)
    optimizer.step()
    told = str(difference(before, state_of(model, optimizer)))
    assert "models.model.weight differs first at element 0" in told
    assert frozen(before) is before
