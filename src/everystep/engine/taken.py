"""The gradients that an optimizer has consumed, until they are written down in a record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from everystep.agent.sink import RecordSink
from everystep.deltas.delta import Coded, Delta, Form, Layout, Parameter, Stored
from everystep.deltas.encodings import encode, encode_known
from everystep.deltas.known import Known
from everystep.deltas.packing import pack
from everystep.engine.capture import versions_of
from everystep.engine.device import Device
from everystep.engine.meter import Cost
from everystep.errors import StoreFailed
from everystep.state import raw
from everystep.state.fingerprint import Rota, fingerprint
from everystep.state.tree import Held
from everystep.types import Json

ABSENT = Coded(Form.ABSENT, "", 0, np.empty(0, np.uint8), np.empty(0, np.uint8))


@dataclass
class Taken:
    """One call of an optimizer's `step()`, as it begins."""

    optimizer: str
    parameters: Sequence[torch.Tensor]
    gradients: list[torch.Tensor | None]
    """Parallel to the parameters; local parts where sharded."""
    versions: list[int]
    """Of those that are there, in order."""
    known: Mapping[Any, Known]
    """By parameter, what a compression hook knew of the gradient; where it is `lasting`, whether
    that still holds is to be asked."""
    lasting: bool
    """Whether the gradients stay as they are when training goes on: twice already it made new ones
    (`zero_grad` sets them to None), nobody has written old ones, and they have memory of their
    own."""
    distrust: Callable[[], None]
    """Have gradients copied from now on: they do not stay as they are."""
    options: Json | None = None
    tensors: list[Held] = field(default_factory=list)
    """In the options."""
    scale: Json | None = None
    coded: Future[list[Coded]] | None = None
    kept: list[torch.Tensor | None] | None = None
    """Copies of the gradients that nobody writes, where they do not last: of each, the elements
    that this rank records."""
    returned: Callable[[], None] = lambda: None
    """To be called when `kept` is not read any more."""


@dataclass
class Step:
    """A step whose delta is being made."""

    number: int
    layout: Layout
    taken: list[Taken]
    tensors: list[Stored]
    tree: dict[str, Json]
    metrics: Mapping[str, Json]
    state: list[torch.Tensor]
    rota: Rota | None
    cost: Cost
    prints: Future[npt.NDArray[np.uint64]] = field(default_factory=Future)
    """Done when the state is not read any more."""


class Watched(Protocol):
    """An optimizer's parameters."""

    def written_beside(self) -> str | None:
        """Which of them anybody else has written, in words."""
        ...


def owns_memory(gradient: torch.Tensor) -> bool:
    """Whether no other tensor can lie in its memory."""
    if gradient.layout is not torch.strided:
        return True
    return bool(gradient.untyped_storage().nbytes() == gradient.nbytes)


def code(
    taken: Taken, parameters: Sequence[Parameter], device: Device | None, *, plain: bool = False
) -> list[Coded]:
    """Write down the gradients. Those that are going to stay as they are, or their copies, may be
    referred to by what is returned, until `unwritten` has looked once more; others are let go of.

    Args:
        parameters: parallel to the gradients.
        device: how bytes leave the device, where it is not the host.
        plain: see `encode`.

    Raises:
        StoreFailed: gradients that were to stay as they are may be written unseen.
    """
    if taken.lasting and not all(grad is None or owns_memory(grad) for grad in taken.gradients):
        taken.distrust()
        raise StoreFailed("gradients share memory with other tensors, and did not before")
    gradients = taken.gradients if taken.kept is None else taken.kept
    stays = taken.lasting or taken.kept is not None
    coded = []
    for whose, gradient, one in zip(taken.parameters, gradients, parameters, strict=True):
        known = taken.known.get(whose)
        if gradient is None:
            coded.append(ABSENT)
        elif known is not None and not stays:
            places, values = known.indices.cpu(), known.values.cpu()
            dtype = raw.dtype_name(gradient.dtype)
            coded.append(encode_known(places, values, dtype, one.start, one.stop))
        else:
            # a write through .data leaves no trace but the values themselves
            sure = known is not None and known.holds(gradient)
            indices = known.indices.cpu() if known is not None and sure else None
            host = _on_host(gradient.detach() if gradient.requires_grad else gradient, device)
            coded.append(encode(host, one.start, one.stop, indices=indices, plain=plain))
    if not stays:
        taken.gradients = []
        coded = [
            one._replace(gaps=one.gaps.copy(), values=one.values.copy())
            if one.form in (Form.DENSE, Form.COO)
            else one
            for one in coded
        ]
    taken.known, taken.parameters = {}, ()
    return coded


def as_taken(taken: Taken) -> bool:
    """Whether nobody has written the gradients since."""
    present = [gradient for gradient in taken.gradients if gradient is not None]
    return versions_of(present) == taken.versions


def unwritten(taken: Taken) -> bool:
    """Whether gradients that were to stay as they are have; they are let go of."""
    stayed = not taken.lasting or as_taken(taken)
    taken.gradients, taken.kept = [], None
    taken.returned()
    if not stayed:
        taken.distrust()
    return stayed


def write_record(
    sink: RecordSink, delta: Delta, taken: Sequence[Taken], wait_s: float
) -> int | None:
    """Put a delta into the sink's memory, where it waits for `publish`.

    Args:
        taken: what it refers to, and is let go of.
        wait_s: for room.

    Returns:
        Its bytes; None: there was no room.

    Raises:
        StoreFailed: a gradient was written meanwhile; the sink has its memory back.
    """
    nbytes, parts = pack(delta)
    view = sink.reserve(nbytes, wait_s)
    if view is None:
        return None
    try:
        at = 0
        for part in parts:
            view[at : at + len(part)] = part.data
            at += len(part)
        if not all([unwritten(one) for one in taken]):
            raise StoreFailed("a gradient was written while it was read")
    except BaseException:
        sink.withdraw()
        raise
    finally:
        view.release()
    return nbytes


def print_of(
    one: Step, device: Device | None, sources: Sequence[Watched]
) -> npt.NDArray[np.uint64]:
    """The fingerprint of the state after a step, which is let go of.

    Args:
        sources: the optimizers.

    Raises:
        StoreFailed: somebody else has written parameters meanwhile.
    """
    state, one.state = one.state, []
    before = [source.written_beside() for source in sources]
    with contextlib.ExitStack() as reading:
        if device is not None and state:
            reading.enter_context(device.reading(state[0]))
        prints = fingerprint(state, one.number, rota=one.rota)
    # an optimizer waits for this; anybody else may have written meanwhile
    problems = [*before, *(source.written_beside() for source in sources)]
    problem = next((problem for problem in problems if problem), None)
    if problem is not None:
        raise StoreFailed(problem)
    return prints


def _on_host(gradient: torch.Tensor, device: Device | None) -> torch.Tensor:
    if gradient.device.type == "cpu" or device is None:
        return gradient
    with device.reading(gradient):
        return gradient.cpu()
