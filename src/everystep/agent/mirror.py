"""A state in a slot of staging memory that deltas are folded onto: the part of a replica that needs
torch."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from everystep.agent.image import Image
from everystep.deltas.delta import Delta, Layout
from everystep.deltas.packing import unpack, unpack_layout
from everystep.errors import StoreFailed
from everystep.recovery.classes import imported
from everystep.recovery.fold import Folding
from everystep.recovery.proof import Step
from everystep.state import raw
from everystep.state.fingerprint import Rota
from everystep.store import format as fmt
from everystep.types import Json, TensorSpec, item_bytes, spoken


class Mirror:
    """The state of an image, folded where it lies.

    Args:
        image: sealed, and not being written.
        classes: (module, name in it) of optimizers that are not torch's, by full name.
        paths: where to look for their modules.

    Raises:
        Damaged: the image is no state of a training.
        CannotRestore: an optimizer cannot be built here, or its class is not to be had.
    """

    def __init__(
        self, image: Image, classes: Mapping[str, tuple[str, str]], paths: Sequence[str]
    ) -> None:
        self._image = image
        self._metrics: dict[str, Json] = dict(image.seal.metrics)
        self._layout: tuple[bytes, Layout] | None = None
        self._memory = image.memory()
        specs = {spec.key: spec for spec in image.specs}
        tensors = {key: _over(view, specs[key]) for key, view in self._memory.items()}
        rest = {spec.key for spec in image.seal.rest}
        for key in rest:  # its place is filled anew with every image
            tensors[key] = tensors[key].clone()
        self._folding = Folding(
            image.tree,
            specs,
            tensors,
            classes=imported(classes, paths),
            partial=tensors.keys() != specs.keys(),
        )
        self.step = image.ref.step
        self._is_shared = image.begin.world_size > 1 and any(s.replicated for s in image.specs)
        self._shared: collections.deque[bytes] = collections.deque()
        """What the ranks must have in common: of each of the newest steps as many fingerprints as
        cover all replicated tensors."""
        self._slices = 1
        self._rota: tuple[Layout, Rota, npt.NDArray[np.bool_]] | None = None

    def fold(self, payload: memoryview, layout: bytes) -> None:
        """Take the state one step further.

        Args:
            payload: of the next step's record; nothing of it is kept.
            layout: of the records; another object where it was told anew, since tensors may have
                got other sizes then, which their names do not say.

        Raises:
            Damaged: the step does not give what it gave in training; names the first tensor.
            CannotRestore: an optimizer refuses to step.
        """
        if self._layout is None or self._layout[0] is not layout:
            self._layout = layout, unpack_layout(layout)
            torch.set_num_threads(self._layout[1].threads)
        known = self._layout[1]
        delta = unpack(payload, known)
        self._folding.advance(Step(delta.step, [(known, delta)], known.rank))
        self._agree(known, delta)
        self._metrics, self.step = delta.metrics, delta.step

    def _agree(self, layout: Layout, delta: Delta) -> None:
        """Take in what the ranks must have in common: they all hash the same slices of replicated
        tensors."""
        if not self._is_shared:
            return
        if self._rota is None or self._rota[0] is not layout:
            its = [self._folding.specs[key] for key in layout.state]
            widths = [item_bytes(spec.dtype) or 0 for spec in its]
            rota = Rota([spec.elements for spec in its], widths, layout.slices)
            self._rota = layout, rota, np.array([spec.replicated for spec in its], np.bool_)
        _, rota, replicated = self._rota
        due = rota.turns(delta.step).position
        self._slices = layout.slices
        self._shared.append(delta.fingerprint[replicated[due]].tobytes())
        while len(self._shared) > self._slices:
            self._shared.popleft()

    def _agreement(self) -> str:
        """See `Part.agreement`. Other ranks may have begun with another step."""
        if len(self._shared) < self._slices:
            return fmt.UNKNOWN
        return fmt.digest(b"".join([str(self.step).encode(), *self._shared]))

    def image(self) -> Image:
        """The state as a sealed step in its slot.

        Raises:
            StoreFailed: it does not fit there any more.
        """
        folded = self._folding.result()
        rest: list[TensorSpec] = []
        for key, spec in folded.specs.items():
            tensor = folded.tensors.get(key)
            if tensor is None:
                continue
            if not self._image.is_fixed(spec):
                rest.append(spec)
            elif tensor.nbytes and tensor.data_ptr() != _address(self._memory[key]):
                _write(tensor, self._memory[key])
        missing = self._image.fixed_keys() - folded.specs.keys()
        if missing:
            raise StoreFailed(f"{spoken(min(missing))} is not there any more", step=self.step)
        chunks = [raw.bits_of(folded.tensors, spec.key) for spec in rest]
        self._image = self._image.resealed(
            self.step, rest, b"".join(chunks), msgspec.json.encode(folded.tree), self._metrics
        )
        if self._is_shared:
            self._image.agreement = self._agreement()
        return self._image


def _over(view: memoryview, spec: TensorSpec) -> torch.Tensor:
    return raw.over(view, spec) if len(view) else raw.empty_for(spec)[0]


def _address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def _write(tensor: torch.Tensor, into: memoryview) -> None:
    at = 0
    for chunk in raw.host_chunks(tensor, 0, tensor.numel()):
        into[at : at + len(chunk)] = chunk
        at += len(chunk)
