"""An optimizer that is nobody's but the user's, in a module that another process can import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Halving(torch.optim.Optimizer):
    """Momentum that halves at each step."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(0.5).add_(parameter.grad)
                parameter.sub_(group["lr"] * state["momentum"])
