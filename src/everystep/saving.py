"""Make a captured state durable as one rank's part of a step."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from everystep.errors import UsageError
from everystep.planning.partition import pieces_of
from everystep.state import raw
from everystep.state.capture import State
from everystep.state.ranks import Ranks
from everystep.state.tree import Encoder, Held
from everystep.store.backend import Backend
from everystep.store.full import Part, Source, write_full
from everystep.store.run import now
from everystep.types import (
    VERSION,
    Json,
    StepRef,
    join_key,
)


class Writer(NamedTuple):
    """Who writes."""

    run: str
    session: int
    ranks: Ranks
    share_replicas: bool
    """Whether ranks divide what they hold alike among them; else each stores all of its own."""


def save(
    backend: Backend, writer: Writer, ref: StepRef, state: State, metrics: dict[str, Json]
) -> int:
    """Store this rank's part of a step; returns how many bytes of tensors it has written.

    Raises:
        StoreError: it is not stored.
    """
    ranks = writer.ranks
    part = Part(
        ref=ref,
        run=writer.run,
        session=writer.session,
        rank=ranks.rank,
        world_size=ranks.world_size,
        tree=state.tree,
        metrics=metrics,
        created=now(),
        versions=versions(),
    )
    shared = writer.share_replicas and ranks.world_size > 1
    sources = [source_of(held, shared=shared) for held in state.held.values()]
    pieces = pieces_of([source.spec for source in sources], ranks.rank, ranks.world_size)
    record = write_full(backend, part, sources, pieces)
    return sum(file.nbytes for file in record.files)


def source_of(held: Held, *, shared: bool) -> Source:
    """A tensor as the store takes it.

    Args:
        shared: whether ranks divide what they hold alike.
    """
    spec = held.spec
    if spec.replicated and not shared:
        spec = msgspec.structs.replace(spec, replicated=False)
    return Source(spec, lambda start, stop: raw.host_chunks(held.tensor, start, stop))


def encoded_metrics(metrics: Mapping[str, Any]) -> dict[str, Json]:
    """Metrics as JSON.

    Raises:
        UsageError: a value that is not a number, string or one-element tensor.
    """
    encoder = Encoder()
    encoded = {}
    for name, value in metrics.items():
        elements = 0
        if isinstance(value, torch.Tensor):
            elements = value.numel()
        elif isinstance(value, np.ndarray | np.generic):
            elements = value.size
        plain = value.item() if elements == 1 else value
        if type(plain) not in (float, int, str, bool):
            raise UsageError(f"step({name}={value!r}): not a number, string or one-element tensor")
        encoded[name] = encoder.encode(plain, join_key("metrics", name))
    return encoded


def versions() -> dict[str, str]:
    """What wrote a step, for people."""
    return {
        "everystep": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
