"""A recorder for a shadow that reads gradients off the network: of each it takes a few elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from msgspec import to_builtins
from torch.nn.parallel import DistributedDataParallel

from everystep.deltas.delta import Coded, Form, Layout, Parameter
from everystep.deltas.samples import DTYPES, ON_WIRE, Reduced, sample_places
from everystep.engine import bucket_layout
from everystep.engine.bucket_layout import BucketLayout, last_collective
from everystep.engine.gradients import Apart, Source
from everystep.engine.meter import Cost
from everystep.engine.recorder import Recorder
from everystep.engine.taken import ABSENT, Step
from everystep.errors import StoreFailed, Unsupported
from everystep.state import raw
from everystep.state.names import ModelNames, names_of
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.types import Json, join_key

_NOTHING = np.empty(0, np.uint8)


class _Wrapped(NamedTuple):
    """The model whose gradients are reduced."""

    name: str
    ddp: DistributedDataParallel
    names: ModelNames


def _wrapped(objects: Objects, ranks: Ranks) -> list[_Wrapped]:
    return [
        _Wrapped(name, module, names_of(model, ranks.world_size))
        for name, model in objects.models.items()
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    ]


def unseen(objects: Objects, ranks: Ranks) -> str | None:
    """Why no network shows the gradients; None: it may."""
    hint = "use everystep.Shadow(tap='software')"
    if ranks.world_size == 1:
        return f"a single rank sends no gradients; {hint}"
    wrapped = _wrapped(objects, ranks)
    if len(wrapped) != 1:
        return f"{len(wrapped)} modules under DistributedDataParallel, not one; {hint}"
    try:
        buckets = bucket_layout.layout(wrapped[0].ddp, wrapped[0].names)
    except Unsupported as error:
        return f"{error.headline()}; {hint}"
    if last_collective(wrapped[0].ddp) is None:
        return f"gradients are read off the wire of gloo only; {hint}"
    other = next((bucket.dtype for bucket in buckets if bucket.dtype != "float32"), None)
    if other is not None:
        return f"gradients of {other} are not read off the wire, only of float32; {hint}"
    return None


class SampledRecorder(Recorder):
    """See `Recorder`. Gradients are not copied; what the all-reduces of a step were is told with
    it, whenever that has changed."""

    _model: _Wrapped | None = None
    _buckets: tuple[BucketLayout, ...] = ()
    _last_told: tuple[BucketLayout, ...] = ()
    _through = 0

    def _take_gradients(self, source: Source, layout: Layout) -> None:
        taken = source.taken()
        encoder = Apart(len(self._taken))
        taken.options = source.options.changed(encoder)
        taken.tensors = list(encoder.held.values())
        taken.lasting = False
        step = 0 if self._chained is None else self._chained + 1
        parameters = layout.optimizers[source.name]
        taken.coded = Future()
        taken.coded.set_result(samples_of(taken.gradients, parameters, step, len(self._taken)))
        taken.gradients, taken.known = [], {}
        self._taken.append(taken)
        self._look()

    def _look(self) -> None:
        """What was reduced up to now."""
        if self._model is None:
            (self._model,) = _wrapped(self._objects, self._ranks)
        self._buckets = bucket_layout.layout(self._model.ddp, self._model.names)
        self._through = last_collective(self._model.ddp) or 0

    def _put_together(
        self, step: int, metrics: Mapping[str, Json], cost: Cost
    ) -> tuple[str | None, Step | None]:
        problem, one = super()._put_together(step, metrics, cost)
        if one is not None and one.taken and self._model is not None:
            told = Reduced(through=self._through)
            if self._buckets != self._last_told or not self._opened:
                self._last_told = self._buckets
                name = self._model.name
                told.buckets = [
                    ([join_key("models", name, fqn) for fqn in b.names], list(b.sizes), b.dtype)
                    for b in self._buckets
                ]
            one.tree = {**one.tree, ON_WIRE: to_builtins(told)}
        return problem, one


def samples_of(
    gradients: Sequence[torch.Tensor | None],
    parameters: Sequence[Parameter],
    step: int,
    update: int,
) -> list[Coded]:
    """The elements of gradients at `sample_places`.

    Args:
        gradients: of any shape, dense, of one of `samples.DTYPES`.
        parameters: parallel to them.
        step: which one.
        update: the number of the update in it.

    Raises:
        StoreFailed: a gradient is of a kind that no all-reduce carries.
    """
    coded = []
    places = sample_places(step, update, parameters)
    for gradient, one, at in zip(gradients, parameters, places, strict=True):
        if gradient is None:
            coded.append(ABSENT)
            continue
        dtype = raw.dtype_name(gradient.dtype)
        if gradient.layout is not torch.strided or dtype not in DTYPES:
            raise StoreFailed(
                f"the gradient of {one.key} is not read off a network",
                found=f"{dtype}, {gradient.layout}",
            )
        if one.start == one.stop:
            coded.append(Coded(Form.ZERO, dtype, 0, _NOTHING, _NOTHING))
            continue
        values = torch.take(gradient.detach(), torch.from_numpy(at).to(gradient.device)).cpu()
        data = raw.plain_bits(values).numpy().view(np.uint8)
        coded.append(Coded(Form.ON_WIRE, dtype, len(at), _NOTHING, data))
    return coded
