"""Images of a replica that are written in part: what has changed, and where the rest lies.

An image is cut into units. One whose bytes are those of the image before is not written: the record
refers to the file that holds it. So a unit has to lie in a file by itself, as a tensor of its own.

While a step is kept, so are all steps to whose files its record refers, and those to which these
refer: nothing before the newest image that refers to none can be needed. So an image is written
whole when those since the last whole one have become too many, or too large; `plan_image` decides.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from everystep.store import format as fmt
from everystep.store.format import DataFile
from everystep.store.full import PIECES_SECTION, Content, FileLayout, Place, lay_out_file
from everystep.types import Buffer, Piece, StepRef, TensorSpec, item_bytes

UNIT_BYTES = 4 << 20
"""Of a larger tensor each unit has so many bytes: large enough for a disk, and for what a record
says of it to be next to nothing; small enough for a part that changes to be told from the rest."""

MOST_FILE_BYTES = 2.0
"""A whole image and all that was written since hold at most so many times the bytes of an image.

Where a share c changes from one to the next, n = 1 + 1 / c of them do, for which two images' bytes
are written: 2 c / (1 + c) of an image each, and at most half of what they hold is out of date."""

MOST_IMAGES = 16
"""And they are at most so many: a damaged file costs all that refer to it, a restore opens all of
them, and what a whole image costs more is a sixteenth of an image each by then."""

DENSE_SHARE = 0.9
"""Where as much has to be written, all is: it ends what is kept for the sake of the rest."""


class Unit(NamedTuple):
    """Elements of one tensor that are written, or not, together."""

    piece: Piece
    dtype: str
    shape: tuple[int, ...]
    """As it stands in a file: of the tensor, or [elements]."""

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        return (self.piece.stop - self.piece.start) * (item_bytes(self.dtype) or 1)


def units_of(spec: TensorSpec, piece: Piece) -> list[Unit]:
    """Cut a piece of a tensor, at multiples of `UNIT_BYTES` from the tensor's beginning. Pure."""
    size = item_bytes(spec.dtype) or 1
    step = UNIT_BYTES // size
    count = piece.stop - piece.start
    cuts: Sequence[int] = ()
    if count > step:
        cuts = range((piece.start // step + 1) * step, piece.stop, step)
    bounds = [piece.start, *cuts, piece.stop]
    whole = count == spec.elements and not cuts
    return [
        Unit(Piece(piece.key, start, stop), spec.dtype, spec.shape if whole else (stop - start,))
        for start, stop in itertools.pairwise(bounds)
    ]


class Durable(NamedTuple):
    """An image that is on the store."""

    hashes: Mapping[Unit, str]
    tensors: Mapping[Piece, str]
    """Hashes of what was cut."""
    places: Mapping[Unit, tuple[int, Place]]
    """Index into `files` and place there, of units that lie by themselves."""
    files: Sequence[tuple[DataFile, FileLayout]]
    """Each with its `step`."""
    images: int
    """Since the last that refers to no other, and with it."""
    nbytes: int
    """That were written for these."""

    @property
    def used_files(self) -> list[DataFile]:
        """Those that hold a unit."""
        return [
            self.files[index][0] for index in sorted({file for file, _ in self.places.values()})
        ]


class Cut:
    """What an image holds, in units.

    Args:
        last: the image before it, whose hashes of whole pieces hold where nothing has changed.
    """

    def __init__(self, last: Durable | None) -> None:
        self._last = last
        self.hashes: dict[Unit, str] = {}
        self.views: dict[Unit, memoryview] = {}
        """Their bytes."""
        self.tensors: dict[Piece, str] = {}
        """Hashes of pieces that are more than one unit."""

    def add(self, spec: TensorSpec, piece: Piece, view: memoryview, known: str | None) -> str:
        """Cut and hash a piece of a tensor; returns the hash of all of it.

        Args:
            view: its bytes, which stay as they are until the image is written.
            known: its hash, if somebody has taken it.
        """
        units = units_of(spec, piece)
        if len(units) == 1:
            found = known or fmt.digest(view)
            self.hashes[units[0]], self.views[units[0]] = found, view
            return found
        before = None if self._last is None else self._last.tensors.get(piece)
        state, done = None, 0
        for unit in units:
            data = view[done : done + unit.nbytes]
            self.views[unit], self.hashes[unit] = data, fmt.digest(data)
            if known is None and state is None and (before is None or self._is_new(unit)):
                state = xxhash.xxh3_128(view[:done])
            if state is not None:
                state.update(data)  # while the processor has it at hand
            done += unit.nbytes
        found = known or (before or "" if state is None else state.hexdigest())
        self.tensors[piece] = found
        return found

    def _is_new(self, unit: Unit) -> bool:
        return self._last is None or self._last.hashes.get(unit) != self.hashes[unit]


class Plan(NamedTuple):
    """What is to be done with each unit of an image."""

    write: Sequence[Unit]
    refer: Sequence[Unit]
    """They are where they were; none: the image is written whole."""
    is_dense: bool
    """Nearly all has changed, and so it will the next time: nothing is gained by cutting."""


def plan_image(hashes: Mapping[Unit, str], last: Durable | None) -> Plan:
    """Decide which units of an image to write. Pure.

    Args:
        hashes: of all its units.
        last: the image before it; None: there is none to which it could refer.
    """
    if last is None:
        return Plan(list(hashes), [], is_dense=False)
    same = [unit for unit, found in hashes.items() if last.hashes.get(unit) == found]
    refer = [unit for unit in same if unit in last.places]
    total = _bytes_of(hashes)
    written = total - _bytes_of(refer)
    if (
        written >= DENSE_SHARE * total
        or last.nbytes + written > MOST_FILE_BYTES * total
        or last.images >= MOST_IMAGES
    ):
        dense = total - _bytes_of(same) >= DENSE_SHARE * total
        return Plan(list(hashes), [], is_dense=dense)
    known = set(refer)
    return Plan([unit for unit in hashes if unit not in known], refer, is_dense=False)


def _bytes_of(units: Sequence[Unit] | Mapping[Unit, str]) -> int:
    return sum(unit.nbytes for unit in units)


class Increment(NamedTuple):
    """An image as it is written."""

    plan: Plan
    cut: Cut
    contents: Sequence[Content]

    @property
    def refers_to(self) -> set[StepRef]:
        """The steps in whose files a part of it lies."""
        earlier = [content.earlier for content in self.contents]
        return {file.step for file in earlier if file is not None and file.step is not None}

    def stored(self, ref: StepRef, files: Sequence[DataFile], last: Durable | None) -> Durable:
        """What is known of it when it is durable.

        Args:
            ref: its step.
            files: those of its record.
            last: the image before it.
        """
        units = {unit.piece: unit for unit in self.cut.hashes}
        places = {
            units[place.piece]: (index, place)
            for index, content in enumerate(self.contents)
            for place in content.layout.places
            if place.piece in units
        }
        lying = [msgspec.structs.replace(file, step=file.step or ref) for file in files]
        layouts = [content.layout for content in self.contents]
        images, nbytes = 1, _bytes_of(self.plan.write)
        if last is not None and self.plan.refer:
            images, nbytes = images + last.images, nbytes + last.nbytes
        together = list(zip(lying, layouts, strict=True))
        return Durable(self.cut.hashes, self.cut.tensors, places, together, images, nbytes)


def contents_of(
    plan: Plan, cut: Cut, specs: Mapping[str, TensorSpec], last: Durable | None
) -> list[Content]:
    """The data files of an image: a new one, where there is something to write, and earlier ones.

    Args:
        plan: what to write.
        cut: all of the image.
        specs: the tensors by key.
        last: the image that `plan` was made with.

    Raises:
        Damaged: a header would not be read as what it is.
    """
    found = []
    if plan.write:
        units = {unit.piece: unit for unit in plan.write}
        layout = lay_out_file(PIECES_SECTION, specs, list(units))
        written = [units[place.piece] for place in layout.places]
        parts: list[Buffer] = [layout.header, *(cut.views[unit] for unit in written)]
        found.append(Content(layout, [cut.hashes[unit] for unit in written], parts))
    if last is None:
        return found
    by_file: dict[int, list[Unit]] = {}
    for unit in plan.refer:
        by_file.setdefault(last.places[unit][0], []).append(unit)
    for index, units_there in sorted(by_file.items()):
        file, layout = last.files[index]
        used = dataclasses.replace(layout, places=tuple(last.places[u][1] for u in units_there))
        found.append(Content(used, [cut.hashes[u] for u in units_there], earlier=file))
    return found
