"""The zoo of field-reports.md, section Z: one run that holds every shape that went wrong somewhere,
through a run directory."""

from __future__ import annotations

import collections
import copy
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel

import everystep
from everystep.state import raw, rng
from states import FrozenTensor, assert_same_state, rng_state, state_of
from trips import Holder, restore_run, save_run

_ODD_FLOATS = [0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 0x00000001, 0x807FFFFF]
"""A signalling NaN, a NaN with a payload, both infinities, -0, the least subnormal, the greatest
negative one."""


def _bits(patterns: list[int]) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


class _Shapes(nn.Module):
    """Parameters and buffers of every form. With `hollow` they have other values."""

    def __init__(self, *, hollow: bool) -> None:
        super().__init__()
        big = torch.randn(1000, 4)
        forms = {
            "zero_dim": torch.randn(()),
            "one": torch.randn(1),
            "empty": torch.empty(0),
            "empty_rows": torch.empty(0, 3),
            "row": torch.randn(1, 7),
            "transposed": torch.randn(5, 3).t(),
            "slice": big[:10],
            "strided": big[10:30:3, ::2],
            "single_strided": big[40:41, ::4][0],
            "expanded": torch.randn(3, 1).expand(3, 4),
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "overlapping": big[50:60],
            "overlapping_too": big[55:65],
            "odd_floats": _bits(_ODD_FLOATS),
        }
        for name, value in forms.items():
            if name.startswith(("expanded", "overlapping")):
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))
            if hollow and value.numel():
                (value[:, :1] if name == "expanded" else value.detach()).zero_()
        for dtype in sorted(
            {d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str
        ):
            if "quint" not in str(dtype) and "qint" not in str(dtype):
                size = dtype.itemsize
                data = torch.randint(0, 2 if dtype == torch.bool else 256, (3 * size,))
                carrier = torch.zeros(3 * size) if hollow else data
                value = carrier.to(torch.uint8).view(raw._CARRIERS[size]).view(dtype)
                self.register_buffer(f"of_{raw.dtype_name(dtype)}", value)


class _Names(nn.Module):
    """Real names that look like a wrapper's, or are awkward in a file."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("module", "_orig_mod", "größe/ü", "trailing ", "__metadata__", "a~1b", "日本"):
            self.register_parameter(name, nn.Parameter(torch.randn(2)))
        self.add_module("_fsdp_wrapped_module", nn.Linear(1, 1))
        self.add_module("model", nn.Linear(1, 1))


class _Net(nn.Module):
    def __init__(self, *, hollow: bool) -> None:
        super().__init__()
        self.shapes, self.names = _Shapes(hollow=hollow), _Names()
        self.emb, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.head.weight = self.emb.weight
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
        self.lower = nn.Linear(2, 2).bfloat16()
        self.frozen_always, self.frozen_later = nn.Linear(1, 1), nn.Linear(2, 2)
        self.frozen_always.requires_grad_(False)
        self.never, self.late = nn.Linear(1, 1), nn.Linear(2, 2)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen_later(self.body(self.emb(index))) + self.late(self.emb(index))
        other = self.lower(hidden.bfloat16()).float()
        return self.head(hidden + other).square().sum()


class _Mixed(Optimizer):
    """Moments and masters of full precision for parameters of less."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                slot, gradient = self.state[parameter], parameter.grad.float()
                if not slot:
                    slot["master"] = parameter.detach().float()
                    slot["moment"] = torch.zeros_like(gradient)
                slot["moment"].lerp_(gradient, 0.1)
                slot["master"].sub_(slot["moment"], alpha=group["lr"])
                parameter.data.copy_(slot["master"])


def _values() -> Any:
    tied = torch.randn(3)
    nested: Any = "bottom"
    for _ in range(50):
        nested = [nested]
    return {
        "big int": -(1 << 100), "empty str": "", "empty dict": {}, "nested": nested, "none": None,
        "bytes": b"\x00\xff", "tied": tied, "tied too": [tied], "nan": float("nan"),
        "sparse": torch.eye(3).to_sparse(), "array": np.arange(6.0).reshape(2, 3),
        "tuple": (1, (2,)), "set": {1, "a"}, "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2], maxlen=3), "$tensor": "a lie", "size": torch.Size([1]),
        1: torch.zeros(1), "1": torch.ones(1), "a/b~c.d": torch.ones(2), "inf": float("-inf"),
        "scalar": np.float32(0.1), "dtype": torch.float16, "parameter": nn.Parameter(torch.ones(1)),
        "overlap": [tied[:2], tied[1:]], "long": torch.zeros(100_000)[:2],
    }  # fmt: skip


class _Zoo:
    def __init__(self, seed: int, *, hollow: bool) -> None:
        torch.manual_seed(seed)
        self.net, self.critic = _Net(hollow=hollow), nn.Linear(2, 1)
        net = self.net
        shared_rate, own_rate = torch.tensor(0.05 + seed), torch.tensor(0.02 + seed)
        embedding = [net.emb.weight] if hollow else [net.head.weight]
        modules = (net.shapes, net.names, net.frozen_always, net.never)
        others = [parameter for module in modules for parameter in module.parameters()]
        self.optimizers: dict[str, Optimizer] = {
            "main.one/x": AdamW(
                [
                    {"params": embedding, "lr": 0.01 * (seed + 1), "count": seed},
                    {"params": list(net.body.parameters()), "lr": shared_rate},
                    {"params": list(net.frozen_later.parameters()), "lr": shared_rate},
                    {"params": list(net.late.parameters()), "lr": own_rate},
                    {"params": []},
                    {"params": others},
                ]
            ),
            "critic": SGD(self.critic.parameters(), lr=0.1, momentum=0.9),
            "mixed": _Mixed(net.lower.parameters()),
        }
        main, critic = self.optimizers["main.one/x"], self.optimizers["critic"]
        self.average = AveragedModel(self.critic)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        s = lr_scheduler
        self.extras: dict[str, Any] = {
            "main schedule": s.LambdaLR(main, lambda step: 1.0 / (step + 1)),
            "chained": s.ChainedScheduler(
                [s.ExponentialLR(critic, 0.9), s.MultiStepLR(critic, [1, 1])]
            ),
            "average": self.average,
            "scaler": self.scaler,
            "random": random.Random(seed),
            "numpy": np.random.default_rng(seed),
            "old numpy": np.random.RandomState(seed),
            "torch": torch.Generator().manual_seed(seed),
            "values": _values() if not hollow else {"other": 1},
            "stateful.ü": Holder(_values() if not hollow else None),
        }
        if hollow:  # what was in one order comes back in another
            self.extras = dict(reversed(self.extras.items()))
            self.optimizers = dict(reversed(self.optimizers.items()))

    @property
    def models(self) -> dict[str, nn.Module]:
        return {"net": self.net, "critic/λ": self.critic}

    def train(self, steps: int) -> None:
        main, critic = self.optimizers["main.one/x"], self.optimizers["critic"]
        for _ in range(steps):
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
            loss = self.net(torch.randint(4, (5,))) + self.critic(torch.randn(3, 2)).sum()
            self.scaler.scale(loss).backward()
            for optimizer in (main, critic, self.optimizers["mixed"]):
                self.scaler.step(optimizer)
            self.scaler.update()
            self.extras["main schedule"].step()
            self.extras["chained"].step()
            self.average.update_parameters(self.critic)
            random.random(), np.random.randn(), torch.randn(1)
            self.extras["numpy"].random(), self.extras["random"].random()

    def state(self) -> Any:
        extras = dict(sorted(self.extras.items()))
        optimizers = dict(sorted(self.optimizers.items()))
        return state_of(self.models, optimizers, extras)


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_the_zoo_comes_back(run_dir: Path) -> None:
    zoo = _Zoo(0, hollow=False)
    zoo.train(2)
    zoo.net.frozen_later.requires_grad_(False)
    zoo.train(1)
    save_run(run_dir, zoo.models, zoo.optimizers, zoo.extras)
    before = zoo.state()

    again = _Zoo(1, hollow=True)
    again.net.frozen_later.requires_grad_(False)
    assert restore_run(run_dir, again.models, again.optimizers, again.extras) == 1
    assert_same_state(again.state(), before)
    assert again.net.head.weight is again.net.emb.weight
    values = again.extras["values"]
    assert values["tied"] is values["tied too"][0]
    assert values["long"].untyped_storage().nbytes() == 8

    generators = rng.global_state()
    zoo.train(2)
    rng.set_global_state(generators)
    again.train(2)
    assert_same_state(again.state(), zoo.state())


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_the_zoo_is_read_without_objects(run_dir: Path) -> None:
    zoo = _Zoo(0, hollow=False)
    zoo.train(2)
    save_run(run_dir, zoo.models, zoo.optimizers, zoo.extras)
    loaded = everystep.load(run_dir)
    for label, model in zoo.models.items():
        expected = model.state_dict()
        assert loaded.models[label].keys() == expected.keys()
        for name, value in expected.items():
            line = FrozenTensor(loaded.models[label][name]).difference(FrozenTensor(value))
            assert line is None, f"{name}: {line}"
    assert_same_state(loaded.extra("values"), zoo.extras["values"])
    assert_same_state(loaded.extra("main schedule"), zoo.extras["main schedule"].state_dict())
    main = loaded.optimizer("main.one/x")
    assert main["param_groups"][1]["lr"] is main["param_groups"][2]["lr"]
    assert_same_state(
        loaded.optimizer("mixed")["state"]["net.lower.weight"],
        zoo.optimizers["mixed"].state[zoo.net.lower.weight],
    )


def test_the_late_group_comes_back(run_dir: Path) -> None:
    model, again = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), None
    optimizer = Adam(model[0].parameters())
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.3})
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    save_run(run_dir, model, optimizer)
    again = copy.deepcopy(model)
    restarted = Adam(again[0].parameters())
    restore_run(run_dir, again, restarted)
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


def _seconds_for(count: int, run: Path) -> float:
    model = nn.ParameterList([nn.Parameter(torch.full((2,), float(i))) for i in range(count)])
    again = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(count)])
    started = time.process_time()
    save_run(run, model)
    restore_run(run, again)
    took_s = time.process_time() - started
    assert_same_state(torch.stack(list(again)), torch.stack(list(model)))
    return took_s


def test_ten_thousand_tiny_tensors(tmp_path: Path) -> None:
    _seconds_for(10, tmp_path / "warm")
    few_s = _seconds_for(1_000, tmp_path / "few")
    many_s = _seconds_for(10_000, tmp_path / "many")
    assert many_s < 3 * 10 * few_s, "ten times as many must not take much more than ten times"
    assert many_s < 30


def test_the_zoo_does_not_move(run_dir: Path) -> None:
    """A checkpoint draws nothing and changes nothing."""
    zoo = _Zoo(0, hollow=False)
    zoo.train(1)
    before, generators = zoo.state(), rng_state()
    save_run(run_dir, zoo.models, zoo.optimizers, zoo.extras)
    assert_same_state(rng_state(), generators)
    assert_same_state(zoo.state(), before)
