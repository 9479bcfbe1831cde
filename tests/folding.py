"""A training written down as a full checkpoint and deltas, for tests of the fold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from everystep.deltas.delta import Delta, Layout, Parameter, Stored, Update
from everystep.deltas.encodings import encode
from everystep.recovery.fold import Folded, Folding, fold
from everystep.recovery.proof import Step
from everystep.state import capture, raw
from everystep.state.capture import State
from everystep.state.fingerprint import fingerprint
from everystep.state.objects import Objects
from everystep.state.tree import Encoder
from everystep.types import Json, TensorSpec, join_key


class Full:
    """What a full checkpoint holds: JSON and bytes, copied out of the live state."""

    def __init__(self, state: State) -> None:
        self.tree: Json = msgspec.json.decode(msgspec.json.encode(state.tree))
        self.specs: dict[str, TensorSpec] = {key: h.spec for key, h in state.held.items()}
        self.data = {key: _bytes(h.tensor).tobytes() for key, h in state.held.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Fresh tensors with these bytes."""
        tensors = {}
        for key, spec in self.specs.items():
            tensors[key], view = raw.empty_for(spec)
            view[:] = self.data[key]
        return tensors


class Bag(nn.Module):
    """Parameters of given sizes or values."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.p = nn.ParameterList([nn.Parameter(t) for t in tensors])


class Recording:
    """Writes down what a training does, as a trainer would.

    Args:
        ranks: how many ranks share out the gradients (of which this process plays all).
        slices: steps in a round of fingerprints.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        extras: Any = None,
        *,
        step: int = 0,
        ranks: int = 1,
        slices: int = 16,
    ) -> None:
        self.objects = Objects.of(model, optimizer, extras)
        self.step, self.ranks, self.slices = step, ranks, slices
        self.steps: list[Step] = []
        self._updates: list[list[Update]] = [[] for _ in range(ranks)]
        self._tensors: list[Stored] = []
        self._layouts: list[Layout] = []
        self._options: dict[str, Json] = {}
        self.full = self._full(self._state())
        self._before = self.full
        self._handles = [
            one.register_step_pre_hook(lambda opt, *_, name=name: self._take(name, opt))
            for name, one in self.objects.optimizers.items()
        ]

    def begin_session(self, slices: int) -> None:
        """What follows is written down with another round of fingerprints."""
        self.slices, self._layouts = slices, []

    def _state(self) -> State:
        return capture.capture(self.objects, self.ranks)

    def _full(self, state: State) -> Full:
        full = Full(state)
        if self.ranks > 1:
            full.specs = {
                key: msgspec.structs.replace(spec, replicated=not key.startswith(("/rng", "/ext")))
                for key, spec in full.specs.items()
            }
        return full

    def _keys(self, optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
        names = {
            id(p): join_key("models", name, fqn)
            for name, model in reversed(self.objects.models.items())
            for fqn, p in model.named_parameters()
        }
        return [(names[id(p)], p) for g in optimizer.param_groups for p in g["params"]]

    def _piece(self, rank: int, tensor: torch.Tensor) -> tuple[int, int]:
        if tensor.grad is not None and tensor.grad.layout != torch.strided:
            return (0, tensor.numel()) if rank == 0 else (0, 0)
        share = -(-tensor.numel() // self.ranks)
        start = min(rank * share, tensor.numel())
        return start, min(start + share, tensor.numel())

    def _take(self, name: str, optimizer: Optimizer) -> None:
        encoder = Encoder()
        options = [
            encoder.encode(
                {k: v for k, v in group.items() if k != "params"},
                f"/updates/{len(self._updates[0])}{join_key('optimizers', name, 'groups', str(i))}",
            )
            for i, group in enumerate(optimizer.param_groups)
        ]
        self._tensors += [Stored(held.spec, _bytes(held.tensor)) for held in encoder.held.values()]
        given = options if encoder.held or self._options.get(name) != options else None
        self._options[name] = options
        scale = [getattr(optimizer, n, None) for n in ("grad_scale", "found_inf")]
        bits = None if scale == [None, None] else [
            None if s is None else int(s.reshape(1).view(torch.int32)) & 0xFFFFFFFF for s in scale
        ]  # fmt: skip
        for rank in range(self.ranks):
            coded = [
                encode(p.grad, *self._piece(rank, p))
                if p.grad is None or p.grad.layout == torch.strided or rank == 0
                else encode(torch.zeros(0, dtype=p.dtype), 0, 0)
                for _, p in self._keys(optimizer)
            ]
            self._updates[rank].append(Update(name, given, coded, bits))

    def end_step(self) -> None:
        """The step is over: its delta is made."""
        self.step += 1
        state = self._state()
        now = self._full(state)
        state_keys = list(state.held)
        prints = fingerprint([state.held[key].tensor for key in state_keys], self.step, self.slices)
        if not self._layouts or self._layouts[0].state != state_keys:
            self._layouts = [self._layout(rank, state_keys) for rank in range(self.ranks)]
        for key, data in now.data.items():
            moved = key.startswith(("/models/model/p.", "/optimizers/"))
            is_option = "/groups/" in key
            if (not moved or is_option) and self._before.data.get(key) != data:
                self._tensors.append(Stored(now.specs[key], np.frombuffer(data, np.uint8)))
        parts = []
        for rank in range(self.ranks):
            delta = Delta(
                self.step, self._updates[rank], self._tensors, self._changed(now), {}, prints
            )
            parts.append((self._layouts[rank], delta))
        self.steps.append(Step(self.step, parts, rank=0))
        self._updates, self._tensors = [[] for _ in range(self.ranks)], []
        self._before = now

    def _changed(self, now: Full) -> dict[str, Json]:
        before, after = self._before.tree, now.tree
        tree = {
            part: after[part]
            for part in ("extras", "loaders", "rng")
            if after[part] != before[part]
        }
        options = {
            name: [group["options"] for group in its["groups"]]
            for name, its in after["optimizers"].items()
        }
        changed = {n: given for n, given in options.items() if given != self._options.get(n)}
        self._options.update(changed)
        return tree | ({"options": changed} if changed else {})

    def _layout(self, rank: int, state: list[str]) -> Layout:
        optimizers = {
            name: [
                Parameter(key, tuple(p.shape), *self._piece(rank, p))
                for key, p in self._keys(optimizer)
            ]
            for name, optimizer in self.objects.optimizers.items()
        }
        return Layout(
            rank=rank, world_size=self.ranks, optimizers=optimizers, state=state,
            threads=torch.get_num_threads(), versions={}, slices=self.slices,
        )  # fmt: skip

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def folded(
        self,
        classes: Mapping[str, type[Optimizer]] | None = None,
        *,
        at_once: bool = True,
        **kwargs: Any,
    ) -> Folded:
        """The full checkpoint and all deltas, folded as a restore does.

        Args:
            at_once: False: one after the other, as a replica does.
        """
        start = self.full.tree, self.full.specs, self.full.tensors()
        if at_once:
            return fold(*start, self.steps, classes=classes or {}, **kwargs)
        folding = Folding(*start, classes=classes or {}, **kwargs)
        for step in self.steps:
            folding.advance(step)
        return folding.result()

    def assert_folds(self, **kwargs: Any) -> Folded:
        """The fold gives what a full checkpoint of now would be read as."""
        now, got = self._full(self._state()), self.folded(**kwargs)
        assert got.tree == now.tree
        assert got.specs == now.specs
        assert got.tensors.keys() == now.specs.keys()
        for key, data in now.data.items():
            assert _bytes(got.tensors[key]).tobytes() == data, key
        return got


def _bytes(tensor: torch.Tensor) -> Any:
    return np.frombuffer(b"".join(raw.host_chunks(tensor, 0, tensor.numel())), np.uint8)


def random_gradients(
    optimizer: Optimizer, generator: torch.Generator, kept: Callable[[int], float] = lambda n: 0.1
) -> None:
    """Give every parameter a gradient of which a share is not zero."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            real = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
            grad = torch.randn(real.shape, generator=generator)
            grad *= torch.rand(real.shape, generator=generator) < kept(p.numel())
            grad = grad.to(real.dtype)
            p.grad = torch.view_as_complex(grad) if p.is_complex() else grad
