"""The optimizers, number formats and models of the exactness matrix, all tiny."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytorch_optimizer
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

# ------------------------------------------------------------------------------ optimizers


@dataclass(frozen=True)
class Kind:
    """One optimizer of the matrix: how to make it, and what it wants."""

    make: Callable[..., Optimizer]
    options: dict[str, Any]
    one_group: bool = False
    """It takes no more than one group of parameters."""
    matrices_only: bool = False
    """It refuses parameters that are not 2-dimensional; AdamW trains those beside it."""
    closure: bool = False
    """Its step evaluates the loss itself."""


def _variants(name: str, *, fused: bool = False, **options: Any) -> dict[str, Kind]:
    make = getattr(torch.optim, name)
    label = name + "".join(f"+{option}" for option, value in options.items() if option[0] != "l")
    kinds = {
        f"{label}/loop": Kind(make, {**options, "foreach": False}),
        f"{label}/foreach": Kind(make, {**options, "foreach": True}),
    }
    if fused:
        kinds[f"{label}/fused"] = Kind(make, {**options, "fused": True})
    return kinds


OPTIMIZERS: dict[str, Kind] = {
    **_variants("SGD", lr=0.05, fused=True),
    **_variants("SGD", lr=0.05, momentum=0.9, fused=True),
    **_variants("SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    **_variants("Adam", lr=0.02, fused=True),
    **_variants("Adam", lr=0.02, amsgrad=True, weight_decay=0.01, fused=True),
    **_variants("AdamW", lr=0.02),
    # a learning rate that is a tensor, which foreach does not take
    "AdamW+lr/loop": Kind(torch.optim.AdamW, {"lr": torch.tensor(0.02), "foreach": False}),
    "AdamW+lr/fused": Kind(torch.optim.AdamW, {"lr": torch.tensor(0.02), "fused": True}),
    **_variants("Adagrad", lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1, fused=True),
    **_variants("Adadelta", lr=0.5),
    **_variants("Adamax", lr=0.02),
    **_variants("ASGD", lr=0.05, t0=2),
    **_variants("NAdam", lr=0.02),
    **_variants("NAdam", lr=0.02, decoupled_weight_decay=True, weight_decay=0.01),
    **_variants("RAdam", lr=0.02, weight_decay=0.01),
    **_variants("RMSprop", lr=0.01),
    **_variants("RMSprop", lr=0.01, centered=True, momentum=0.9),
    **_variants("Rprop", lr=0.01),
    **_variants("Adafactor", lr=0.05),
    "SparseAdam": Kind(torch.optim.SparseAdam, {"lr": 0.02}),
    "LBFGS": Kind(
        torch.optim.LBFGS, {"lr": 0.3, "max_iter": 2}, one_group=True, closure=True
    ),
    "LBFGS+strong_wolfe": Kind(
        torch.optim.LBFGS,
        {"lr": 0.3, "max_iter": 2, "history_size": 2, "line_search_fn": "strong_wolfe"},
        one_group=True,
        closure=True,
    ),
    "Muon": Kind(torch.optim.Muon, {"lr": 0.02}, matrices_only=True),
    # lists of tensors and empty lists as slots
    "SOAP": Kind(pytorch_optimizer.SOAP, {"lr": 0.02, "precondition_frequency": 2}),
    # a dict with floats as keys as a slot
    "AggMo": Kind(pytorch_optimizer.AggMo, {"lr": 0.02}),
    # a deque of gradients as a slot
    "AdaShift": Kind(pytorch_optimizer.AdaShift, {"lr": 0.02, "keep_num": 3}),
}


def optimizers_for(
    kind: Kind, parameters: list[nn.Parameter], lr_of_vectors: float = 0.5
) -> dict[str, Optimizer]:
    """The optimizer in question, and AdamW for what it refuses."""
    mine = [p for p in parameters if p.dim() == 2 or not kind.matrices_only]
    rest = [p for p in parameters if p.dim() != 2 and kind.matrices_only]
    groups: list[Any] = [{"params": mine}]
    vectors = [p for p in mine if p.dim() < 2]
    if vectors and not kind.one_group:
        lr = kind.options["lr"] * lr_of_vectors
        groups = [
            {"params": [p for p in mine if p.dim() >= 2]},
            {"params": vectors, "lr": lr},
        ]
    options = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in kind.options.items()
    }
    made = {"optimizer": kind.make(groups, **options)}
    if rest:
        made["rest"] = torch.optim.AdamW(rest, lr=0.02)
    return made


# ------------------------------------------------------------------------------ models


class Plain(nn.Module):
    """Two layers with dropout between them: the model of most cases."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 17)
        self.norm = nn.BatchNorm1d(17) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(17, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(F.gelu(self.norm(self.first(x)))))


class Tied(nn.Module):
    """An embedding whose weight is also the weight of the head."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 9, sparse=sparse)
        self.drop = nn.Dropout(0.3)
        self.body = nn.Linear(9, 9)
        self.head = nn.Linear(9, 24, bias=False)
        if not sparse:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = (x.float() * 8).long().abs() % 24
        return self.head(self.drop(torch.tanh(self.body(self.table(codes).mean(1)))))


class Complex(nn.Module):
    """A complex matrix and vector between real layers; they stay complex64 in every format."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.drop = nn.Dropout(0.3)
        self.matrix = nn.Parameter(torch.randn(5, 7, dtype=torch.complex64))
        self.vector = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.second = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.first(x))
        z = torch.view_as_complex(hidden.float().reshape(-1, 5, 2))
        real = (z @ self.matrix + self.vector).abs()
        return self.second(real.to(self.second.weight.dtype))


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Real floating parameters to `dtype`; complex ones and buffers stay."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)
                module._parameters[name] = parameter
    return model


