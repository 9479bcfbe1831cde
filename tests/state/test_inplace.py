"""Stored slots are written into live ones exactly where nothing else could tell."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import nn

from everystep.state import capture
from everystep.state.inplace import standing_slots
from everystep.state.objects import Objects
from trips import Holder, Stored, stored

WIDE = 200
"""Features of a layer whose slots are worth keeping."""


def trained(seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDE, WIDE, dtype=dtype), nn.Linear(2, 2, dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def standing(state: Stored, model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    return standing_slots(
        {"model": model}, {"optimizer": optimizer}, state.tree, state.specs, world_size=1
    )


def apply(state: Stored, model: Any, optimizer: Any, extras: Any = None) -> None:
    objects = Objects.of(model, optimizer, extras)
    found = standing(state, model, optimizer)
    assert found
    capture.apply(objects, state.tree, state.specs, state.tensors(), 1, found, copy=ctypes.memmove)


def test_large_slots_are_written_where_they_are_and_others_are_new() -> None:
    source, (model, optimizer) = trained(1), trained(2)
    state = stored(*source)
    weight = next(iter(model.parameters()))
    before = {name: slot.data_ptr() for name, slot in optimizer.state[weight].items()}
    found = standing(state, model, optimizer)
    assert sorted(key.rsplit("/", 1)[1] for key in found) == ["exp_avg", "exp_avg_sq"]
    apply(state, model, optimizer)
    after = {name: slot.data_ptr() for name, slot in optimizer.state[weight].items()}
    assert {name for name in before if before[name] == after[name]} == {"exp_avg", "exp_avg_sq"}
    assert stored(model, optimizer).data == state.data
    assert stored(model, optimizer).json == state.json


@pytest.mark.parametrize(
    "change",
    [
        lambda slot: None,
        lambda slot: slot.t(),
        lambda slot: slot.double(),
        lambda slot: slot[:, :-1],
        lambda slot: torch.zeros(WIDE, 2 * WIDE)[:, :WIDE],
        lambda slot: torch.zeros(WIDE * WIDE + 1)[1:].view(WIDE, WIDE),
        lambda slot: nn.Parameter(slot),
        lambda slot: slot.clone().requires_grad_(),
        lambda slot: slot.to("meta"),
        lambda slot: slot.to_sparse(),
    ],
    ids=[
        "none", "transposed", "dtype", "shape", "strided", "part", "parameter", "gradient", "meta",
        "sparse",
    ],
)  # fmt: skip
def test_a_slot_of_another_form_is_left_alone(change: Any) -> None:
    state, (model, optimizer) = stored(*trained(1)), trained(2)
    weight = next(iter(model.parameters()))
    optimizer.state[weight]["exp_avg"] = change(optimizer.state[weight]["exp_avg"])
    found = standing(state, model, optimizer)
    assert [key.rsplit("/", 1)[1] for key in found] == ["exp_avg_sq"]


def test_slots_that_share_memory_are_left_alone() -> None:
    state, (model, optimizer) = stored(*trained(1)), trained(2)
    weight = next(iter(model.parameters()))
    slots = optimizer.state[weight]
    slots["exp_avg"] = slots["exp_avg_sq"].view(WIDE, WIDE)
    assert standing(state, model, optimizer) == {}
    slots["exp_avg"] = weight.detach()
    assert [key.rsplit("/", 1)[1] for key in standing(state, model, optimizer)] == ["exp_avg_sq"]


def test_a_slot_without_a_name_or_of_no_parameter_is_left_alone() -> None:
    state, (model, optimizer) = stored(*trained(1)), trained(2)
    optimizer.state.clear()
    assert standing(state, model, optimizer) == {}
    assert standing_slots({"model": model}, {"other": optimizer}, state.tree, state.specs, 1) == {}


def test_a_slot_that_an_extra_has_written_is_not_used() -> None:
    """Here an extra holds the slot, too; when the state was stored, it did not."""

    class Writes(Holder):
        def load_state_dict(self, state: Any) -> None:
            self.state["held"].copy_(state["held"])

    extras = {"extra": Holder({"held": torch.ones(WIDE, WIDE)})}
    source, (model, optimizer) = trained(1), trained(2)
    state = stored(*source, extras)
    weight = next(iter(model.parameters()))
    held = optimizer.state[weight]["exp_avg"]
    apply(state, model, optimizer, {"extra": Writes({"held": held})})
    assert optimizer.state[weight]["exp_avg"] is not held
    assert held.eq(1).all()
    assert stored(model, optimizer, {"extra": Holder({"held": held})}).data == state.data
