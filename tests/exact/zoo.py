"""The optimizers and models of the exactness matrix, all tiny."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytorch_optimizer
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer


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
    label = name + "".join(f"+{option}" for option in options if option != "lr")
    ways = ("foreach", "fused") if fused else ("foreach",)
    kinds = {f"{label}/loop": Kind(make, {**options, "foreach": False})}
    return kinds | {f"{label}/{way}": Kind(make, {**options, way: True}) for way in ways}


OPTIMIZERS: dict[str, Kind] = {
    **_variants("SGD", lr=0.05, fused=True),
    **_variants("SGD", lr=0.05, momentum=0.9, fused=True),
    **_variants("SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    **_variants("Adam", lr=0.02, fused=True),
    **_variants("Adam", lr=0.02, amsgrad=True, weight_decay=0.01, fused=True),
    **_variants("AdamW", lr=0.02),
    # a learning rate that is a tensor, which foreach does not take
    "AdamW+tensor/loop": Kind(torch.optim.AdamW, {"lr": torch.tensor(0.02), "foreach": False}),
    "AdamW+tensor/fused": Kind(torch.optim.AdamW, {"lr": torch.tensor(0.02), "fused": True}),
    **_variants("Adagrad", lr=0.05, lr_decay=0.1, fused=True),
    **_variants("Adadelta", lr=0.5),
    **_variants("Adamax", lr=0.02),
    **_variants("ASGD", lr=0.05, t0=1),
    **_variants("NAdam", lr=0.02),
    **_variants("NAdam", lr=0.02, decoupled_weight_decay=True, weight_decay=0.01),
    **_variants("RAdam", lr=0.02, weight_decay=0.01),
    **_variants("RMSprop", lr=0.01),
    **_variants("RMSprop", lr=0.01, centered=True, momentum=0.9),
    **_variants("Rprop", lr=0.01),
    **_variants("Adafactor", lr=0.05),
    "SparseAdam": Kind(torch.optim.SparseAdam, {"lr": 0.02}),
    "LBFGS": Kind(torch.optim.LBFGS, {"lr": 0.3, "max_iter": 2}, one_group=True, closure=True),
    "LBFGS+wolfe": Kind(
        torch.optim.LBFGS,
        {"lr": 0.3, "max_iter": 2, "history_size": 2, "line_search_fn": "strong_wolfe"},
        one_group=True,
        closure=True,
    ),
    # lists of tensors, some of them empty, as slots
    "SOAP": Kind(pytorch_optimizer.SOAP, {"lr": 0.02, "precondition_frequency": 2}),
    # a dict with floats as keys as a slot
    "AggMo": Kind(pytorch_optimizer.AggMo, {"lr": 0.02}),
    # a deque of gradients as a slot
    "AdaShift": Kind(pytorch_optimizer.AdaShift, {"lr": 0.02, "keep_num": 2}),
}
if hasattr(torch.optim, "Muon"):  # torch 2.9
    OPTIMIZERS["Muon"] = Kind(torch.optim.Muon, {"lr": 0.02}, matrices_only=True)


def optimizers_for(kind: Kind, parameters: list[nn.Parameter]) -> dict[str, Optimizer]:
    """The optimizer in question over two groups, and AdamW for what it refuses."""
    mine = [p for p in parameters if p.dim() == 2 or not kind.matrices_only]
    rest = [p for p in parameters if p.dim() != 2 and kind.matrices_only]
    groups: list[Any] = [{"params": mine}]
    vectors = [p for p in mine if p.dim() < 2]
    if vectors and not kind.one_group:
        matrices = [p for p in mine if p.dim() >= 2]
        groups = [{"params": matrices}, {"params": vectors, "lr": kind.options["lr"] * 0.5}]
    options = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in kind.options.items()
    }
    made = {"optimizer": kind.make(groups, **options)}
    if rest:
        made["rest"] = torch.optim.AdamW(rest, lr=0.02)
    return made


class Plain(nn.Module):
    """Two layers with dropout between them: the model of most cases."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 17)
        self.norm = nn.BatchNorm1d(17) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(17, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, 6) to (batch, 3)."""
        hidden = self.norm(self.first(x))
        out: torch.Tensor = self.second(self.drop(F.gelu(hidden)))
        return out


class Codes(nn.Module):
    """An embedding, and a head over its codes: tied to it, or with sparse gradients."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 9, sparse=sparse)
        self.drop = nn.Dropout(0.3)
        self.body = nn.Linear(9, 9)
        self.head = nn.Linear(9, 24, bias=False)
        if not sparse:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, n) to (batch, 24)."""
        codes = (x.float() * 8).long().abs() % 24
        out: torch.Tensor = self.head(self.drop(torch.tanh(self.body(self.table(codes).mean(1)))))
        return out


class Complex(nn.Module):
    """A complex matrix and vector between real layers; they are complex64 in every format."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.drop = nn.Dropout(0.3)
        self.matrix = nn.Parameter(torch.randn(5, 7, dtype=torch.complex64))
        self.vector = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.second = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, 6) to (batch, 3)."""
        hidden = self.drop(self.first(x))
        z = torch.view_as_complex(hidden.float().reshape(-1, 5, 2))
        real = (z @ self.matrix + self.vector).abs()
        out: torch.Tensor = self.second(real.to(self.second.weight.dtype))
        return out


def narrow(model: nn.Module) -> None:
    """Bring real floating parameters and buffers to bf16; complex ones stay as they are."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dtype == torch.float32:
            tensor.data = tensor.data.bfloat16()
