from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)

from everystep.errors import Unsupported
from everystep.state.names import names_of


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def compiler() -> None:
    """torch's compiler opens an event loop when it is first used, for the life of the process."""
    torch.compile(nn.Linear(1, 1))


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def _all(model: nn.Module, world_size: int = 1) -> set[str]:
    names = names_of(model, world_size)
    return set(names.tensors) | set(names.aliases)


def test_names_are_torchs_names() -> None:
    assert list(names_of(_net(), 1).tensors) == list(_net().state_dict())


def test_wrappers_add_nothing(compiler: None, group: None) -> None:
    plain = _all(_net())
    assert _all(nn.parallel.DistributedDataParallel(_net())) == plain
    assert _all(nn.DataParallel(_net())) == plain
    assert _all(torch.compile(_net())) == plain
    inner = _net()
    inner[0] = torch.compile(checkpoint_wrapper(inner[0]))
    inner[2] = offload_wrapper(inner[2])
    wrapped = nn.parallel.DistributedDataParallel(torch.compile(inner))
    assert _all(wrapped) == plain
    compiled = _net()
    compiled.compile()
    assert _all(compiled) == plain


def test_real_names_that_look_like_wrappers() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)
            self._orig_mod = nn.Linear(1, 1)
            self._checkpoint_wrapped_module = nn.Linear(1, 1)

    class DataParallel(nn.Module):  # not torch's
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert _all(Odd()) == set(Odd().state_dict())
    assert _all(DataParallel()) == {"module.weight", "module.bias"}
    assert _all(nn.DataParallel(Odd())) == set(Odd().state_dict())


def test_ddp_parameters_are_replicated_and_buffers_are_not(group: None) -> None:
    model = nn.parallel.DistributedDataParallel(_net())
    assert names_of(model, 1).replicated == {"0.weight", "0.bias", "1.weight", "1.bias",
                                             "2.weight", "2.bias"}  # fmt: skip
    assert names_of(model, 2).replicated == set(), "the group does not span all ranks"
    assert names_of(_net(), 1).replicated == set()
    ignoring = _net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        ignoring, ["0.weight"]
    )
    ddp = nn.parallel.DistributedDataParallel(ignoring)
    assert "0.weight" not in names_of(ddp, 1).replicated
    assert "0.bias" in names_of(ddp, 1).replicated


def test_ties_across_modules() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["emb"].weight
    names = names_of(model, 1)
    assert list(names.tensors) == ["emb.weight"]
    assert names.aliases == {"head.weight": "emb.weight"}
    assert names.tied("head.weight") == "emb.weight" and names.tied("other") == "other"


def test_one_module_twice() -> None:
    layer = nn.Linear(2, 2)
    names = names_of(nn.Sequential(layer, layer), 1)
    assert names.aliases == {"1.weight": "0.weight", "1.bias": "0.bias"}


def test_two_parameters_on_one_memory_are_both_known() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    names = names_of(model, 1)
    assert names.aliases == {"1.weight": "0.weight"}
    assert names.parameters["1.weight"] is model[1].weight
    assert names.parameters["0.weight"] is model[0].weight


def test_a_buffer_before_its_parameter() -> None:
    class First(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("w", weight)

    layer = nn.Linear(2, 2, bias=False)
    names = names_of(nn.Sequential(First(layer.weight.detach()), layer), 1)
    assert names.aliases == {"1.weight": "0.w"}
    assert names.parameters == {"1.weight": layer.weight}


def test_tensors_without_elements_are_not_tied() -> None:
    model = nn.ParameterList([nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))])
    assert list(names_of(model, 1).tensors) == ["0", "1"]


def test_buffers_that_are_not_persistent_are_left_out() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.ones(1), persistent=False)
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("none", None)
    model.register_parameter("nothing", None)
    assert _all(model) == {"weight", "bias", "kept"}


def test_lazy_modules_are_refused_until_they_have_shapes() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(Unsupported, match=r"0.weight is a lazy parameter.*\n.*one forward pass"):
        names_of(lazy, 1)
    lazy(torch.ones(1, 2))
    assert _all(lazy) == {"0.weight", "0.bias"}
    with pytest.raises(Unsupported, match=r"0.running_mean is a lazy|0.weight is a lazy"):
        names_of(nn.Sequential(nn.LazyBatchNorm1d()), 1)


def test_fsdp1_is_refused(group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    fsdp = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(fsdp)
    with pytest.raises(Unsupported, match="FSDP2"):
        names_of(nn.Sequential(fsdp), 1)


def test_two_tensors_of_one_name_are_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model._parameters["0.weight"] = nn.Parameter(torch.ones(2))
    with pytest.raises(Unsupported, match=r"two parameters or buffers have the name 0.weight"):
        names_of(model, 1)


class _Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 3
        self.scale = nn.Parameter(torch.ones(1))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "count"] = self.count


def test_state_that_only_a_state_dict_shows_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"0.count is in the state_dict of a _Hiding"):
        names_of(nn.Sequential(_Hiding()), 1)


def test_a_save_to_state_dict_that_hides_nothing_is_fine() -> None:
    class Open(_Hiding):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)

    assert _all(Open()) == {"scale"}


def test_extra_state_is_found() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

    assert list(names_of(nn.Sequential(Counting(1, 1)), 1).extra_state) == ["0._extra_state"]
