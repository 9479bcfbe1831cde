"""A training as the matrix runs it: fresh objects of one case, and its step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import everystep
from exact.zoo import OPTIMIZERS, Codes, Complex, Kind, Plain, narrow, optimizers_for
from states import state_of
from trips import BLOCKING

FORMATS = ("fp32", "bf16", "mixed", "master")
"""All in fp32; all in bf16; bf16 arithmetic over fp32 parameters; bf16 parameters, and fp32 copies
of them that the optimizer moves."""

Wrap = Callable[[nn.Module, str], nn.Module]
"""(model, format) → what is trained in its place."""


@dataclass
class Scene:
    """Live objects of one training."""

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    extras: dict[str, Any]
    step: Callable[[int], None]
    """Train step number t, from 0."""

    def steps(self, first: int, last: int) -> Scene:
        """Train steps `first` to `last - 1`, storing nothing."""
        for t in range(first, last):
            self.step(t)
        return self

    def state(self) -> Any:
        """All that it holds, as bits, seen without the library."""
        return state_of(self.models, self.optimizers, self.extras)

    def checkpointer(self, run: Any, **options: Any) -> everystep.Checkpointer:
        """A checkpointer over all of it."""
        options.setdefault("strategy", BLOCKING)
        return everystep.Checkpointer(
            run, model=self.models, optimizer=self.optimizers, extras=self.extras, **options
        )


def seed_all(seed: int) -> None:
    """Seed all global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank is trained on in a step, the same in every run, and a noise from Python's and
    NumPy's global generators on it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    return x + 0.01 * random.random() + 0.01 * float(np.random.rand()), y


def build(
    optimizer: str, fmt: str, model: str, seed: int, wrap: Wrap = lambda model, fmt: model
) -> Scene:
    """Fresh objects of one case, made after seeding everything with `seed`."""
    seed_all(seed)
    kind = OPTIMIZERS[optimizer]
    if model == "gan":
        return _gan(kind, fmt)
    side = _Side(wrap(_net(model, fmt), fmt), fmt)
    optimizers = side.optimizers(kind, sparse=model == "sparse")

    def step(t: int) -> None:
        if model == "frozen" and t >= 1:  # it has slots by then, which must be kept
            side.net.get_submodule("second").bias.requires_grad_(False)
        x, y = batch(t)
        side.train(kind, optimizers, lambda: _loss(side(x), y))
        for schedule in schedules.values():
            schedule.step()

    schedules = {name: ExponentialLR(each, 0.9) for name, each in optimizers.items()}
    return Scene(side.models("net"), optimizers, dict(schedules), step)


def _net(model: str, fmt: str) -> nn.Module:
    net: nn.Module
    if model in ("tied", "sparse"):
        net = Codes(sparse=model == "sparse")
    elif model == "complex":
        net = Complex()
    else:
        net = Plain(norm=model in ("batchnorm", "gan", "ddp"))
    if model == "frozen":
        net.get_submodule("first").weight.requires_grad_(False)
    if fmt in ("bf16", "master"):
        narrow(net)
    if model == "compiled":
        net = torch.compile(net, backend="aot_eager", fullgraph=True)
    return net


def _loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out.float(), F.pad(y, (0, out.shape[1] - y.shape[1])))


class _Side:
    """A model, in a format, and what is trained of it."""

    def __init__(self, net: nn.Module, fmt: str) -> None:
        self.net, self.fmt = net, fmt
        self.trained = list(net.parameters())
        self.masters: nn.ParameterList | None = None
        if fmt == "master":
            self.masters = nn.ParameterList(
                nn.Parameter(_wide(p.detach()).clone(), p.requires_grad) for p in self.trained
            )
            self.trained = list(self.masters)

    def models(self, name: str) -> dict[str, nn.Module]:
        masters = {} if self.masters is None else {f"{name}-masters": self.masters}
        return {name: self.net, **masters}

    def optimizers(self, kind: Kind, *, sparse: bool = False) -> dict[str, Optimizer]:
        if not sparse:
            return optimizers_for(kind, self.trained)
        table, *dense = self.trained
        made = optimizers_for(kind, [table])
        return {**made, "dense": torch.optim.SGD(dense, lr=0.05, momentum=0.9)}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        low = self.fmt in ("bf16", "master")
        own = hasattr(self.net, "set_reduce_scatter_divide_factor")  # FSDP2 has its own way
        cast = self.fmt == "mixed" and not own
        with torch.autocast("cpu", torch.bfloat16) if cast else contextlib.nullcontext():
            out: torch.Tensor = self.net(x.bfloat16() if low else x)
        return out

    def train(
        self, kind: Kind, optimizers: dict[str, Optimizer], loss_of: Callable[[], torch.Tensor]
    ) -> None:
        def closure() -> torch.Tensor:
            self._give_back()  # a line search has moved the masters
            self.net.zero_grad()
            loss = loss_of()
            loss.backward()
            if self.masters is not None:
                for master, parameter in zip(self.masters, self.net.parameters(), strict=True):
                    gradient = parameter.grad
                    master.grad = None if gradient is None else _wide(gradient)
            seen = loss.detach()
            if dist.is_initialized():  # a line search must go alike on all ranks
                dist.all_reduce(seen)
            return seen

        if not kind.closure:
            closure()
        # sparse tensors are checked: torch warns where nobody has said whether they should be
        with torch.sparse.check_sparse_tensor_invariants():
            for name, optimizer in optimizers.items():
                optimizer.step(closure if kind.closure and name == "optimizer" else None)
        self._give_back()

    def _give_back(self) -> None:
        if self.masters is not None:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.net.parameters(), strict=True):
                    parameter.copy_(master)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _gan(kind: Kind, fmt: str) -> Scene:
    """Two models, each with an optimizer of its own, that train each other."""
    sides = {"D": _Side(_net("gan", fmt), fmt), "G": _Side(_net("plain", fmt), fmt)}
    made = {name: side.optimizers(kind) for name, side in sides.items()}
    optimizers = {f"{name}/{part}": o for name, parts in made.items() for part, o in parts.items()}
    schedules = {name: ExponentialLR(each, 0.9) for name, each in optimizers.items()}

    def step(t: int) -> None:
        x, y = batch(t)
        for name, sign in (("D", 1), ("G", -1)):

            def loss() -> torch.Tensor:
                drawn = sides["G"](x)
                return _loss(sides["D"](torch.cat([drawn, 0.5 * drawn], 1)), sign * y)  # noqa: B023

            sides[name].train(kind, made[name], loss)
        for schedule in schedules.values():
            schedule.step()

    models = {k: m for name, side in sides.items() for k, m in side.models(name).items()}
    return Scene(models, optimizers, dict(schedules), step)
