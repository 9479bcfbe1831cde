from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import Adam

import everystep
from everystep.errors import LayoutMismatch, Unsupported
from everystep.state.shards import Meshes, is_dtensor, shard_of
from everystep.types import Shard as Facts
from states import assert_same_state, state_of
from trips import misfit, restore, restore_run, save_run, stored


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One for all tests: DTensor's caches keep a process group, and its descriptors, for good."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_plain_tensors_have_no_shard() -> None:
    tensor = torch.zeros(2)
    assert shard_of(tensor) == (tensor, None) and not is_dtensor(tensor)


@pytest.mark.parametrize(
    ("placements", "told"),
    [([Shard(0), Shard(1)], ("S(0)", "S(1)")), ([Replicate(), Shard(1)], ("R", "S(1)"))],
)
def test_facts_of_a_shard_and_back(
    mesh: DeviceMesh, placements: list[Any], told: tuple[str, ...]
) -> None:
    whole = distribute_tensor(torch.randn(3, 4), mesh, placements)
    local, facts = shard_of(whole)
    assert facts == Facts(
        global_shape=(3, 4),
        offsets=(0, 0),
        mesh_shape=(1, 1),
        mesh_dim_names=("dp", "tp"),
        placements=told,
    )
    again = Meshes([torch.zeros(1), whole]).rebuild(local.clone(), facts, "/a")
    assert isinstance(again, DTensor)
    assert again.placements == whole.placements and again.device_mesh == mesh
    assert again.shape == whole.shape and again.stride() == whole.stride()
    assert_same_state(again, whole)


def test_a_pending_sum_is_refused(mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])
    with pytest.raises(Unsupported, match="placement"):
        shard_of(partial)


def test_a_mesh_that_is_not_here(mesh: DeviceMesh) -> None:
    _, facts = shard_of(distribute_tensor(torch.ones(2), mesh, [Shard(0), Replicate()]))
    assert facts is not None
    with pytest.raises(LayoutMismatch, match=r"/a was stored on a device mesh of shape \(1, 1\)"):
        Meshes([]).rebuild(torch.ones(2), facts, "/a")


def _net(seed: int) -> tuple[nn.Module, Adam]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(model[0])
    fully_shard(model)
    return model, Adam(model.parameters())


def _train(model: nn.Module, optimizer: Adam, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()


def test_fsdp2_goes_on(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, optimizer = _net(0)
    _train(model, optimizer, 2)
    save_run(tmp_path / "a", model, optimizer)
    again, restarted = _net(1)
    restore_run(tmp_path / "a", again, restarted)
    slot = restarted.state[again[0].weight]
    assert isinstance(slot["exp_avg"], DTensor) and not isinstance(slot["step"], DTensor)
    _train(model, optimizer, 2)
    _train(again, restarted, 2)
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))
    loaded = everystep.load(tmp_path / "a")
    assert loaded.models["model"]["0.weight"].shape == (5, 3)


def test_sharded_and_not_sharded_do_not_fit(mesh: DeviceMesh) -> None:
    sharded, _ = _net(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    lines = misfit(stored(sharded), plain).mismatched
    assert len(lines) == 4 and "0.weight: shard" in lines[0]
    with pytest.raises(LayoutMismatch):
        restore(stored(plain), sharded)
