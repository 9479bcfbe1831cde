"""Training on gradients that were compressed beforehand, as an accelerator would have done it."""

from __future__ import annotations

import io

import torch
from torch import nn

import everystep
from benchmarks.common import make_state
from everystep.deltas.known import Known

DENSITY = 0.01
"""Share of elements that top-k keeps."""

SETS = 3


class Prepared:
    """A model, its optimizer, and some sets of gradients, each compressed by the real hook, that
    are put in place in turn: to select elements is not what a checkpoint costs."""

    def __init__(self, quick: bool, *, fused: bool = False) -> None:
        """
        Args:
            fused: AdamW's fused kernel, which makes the update short; else its default.
        """
        self.model = make_state(quick)[0]
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, fused=fused or None)
        topk = everystep.compressors.TopK(density=DENSITY, error_feedback=False)
        self._hook = everystep.compress(self.model, topk)
        self._sets = [self._compressed() for _ in range(SETS)]
        self._turn = 0
        self.put_next()
        self.optimizer.step()  # makes its slots

    def _compressed(self) -> tuple[list[torch.Tensor | None], dict[nn.Parameter, Known]]:
        self.optimizer.zero_grad()
        noise = [torch.randn_like(parameter) for parameter in self.parameters]
        torch.autograd.backward(self.parameters, noise)
        return [parameter.grad for parameter in self.parameters], self._hook.known()

    def put_next(self) -> None:
        """What a backward pass would leave: the next set of gradients, and what the hook knows."""
        self._turn += 1
        gradients, known = self._sets[self._turn % SETS]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._hook._known = dict(known)

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def kept(self) -> int:
        """Elements that a step keeps."""
        return sum(its.indices.numel() for its in self._sets[0][1].values())

    def pairs_bytes(self) -> int:
        """Of a file with the int32 indices and the values of each gradient, by `torch.save`."""
        known = self._sets[0][1]
        file = io.BytesIO()
        torch.save([(its.indices.int(), its.values.clone()) for its in known.values()], file)
        return file.tell()
