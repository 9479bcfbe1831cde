"""What a rank's record must satisfy beyond the types of its fields.

A hash shows that a record is what somebody wrote, not that it makes sense. What is checked here,
everything that reads a record further on may rely on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from everystep.errors import Damaged
from everystep.store import format as fmt
from everystep.store.format import DataFile, PartName, RankRecord, StoredPiece
from everystep.types import Shard, StepRef, TensorSpec

MAX_DIMENSIONS = 64
MAX_LENGTH = (1 << 63) - 1
"""torch's own limits."""

_REMEMBERED = 1 << 16
"""Descriptions that have been looked at; a run has the same ones at every step."""

_PLACEMENT = re.compile(r"R|S\(([0-9]{1,2})\)")


def require_wellformed(
    record: RankRecord, run: str, ref: StepRef, part: PartName, path: str
) -> None:
    """Check that a record is of this run, step and rank, and makes sense.

    Raises:
        Damaged: it is not, or does not.
    """
    replica = (record.replica_xxh3_128 or "")[:16]
    found_part = PartName(record.session, record.rank, record.world_size, replica)
    expected = (run, ref, part)
    found = (record.run, StepRef(record.timeline, record.step), found_part)
    if found != expected:
        raise Damaged("belongs elsewhere", path=path, expected=expected, found=found)
    for complaint in complaints(record, part.stem):
        raise Damaged(complaint, path=path, at=fmt.FRAME_BYTES, step=ref, rank=part.rank)


def complaints(record: RankRecord, stem: str) -> Iterator[str]:
    """What is wrong with a record, in words; nothing if it is fine. Pure.

    Args:
        record: as decoded.
        stem: what the names of all files of its part begin with.
    """
    yield from _wrong_in_files(record, stem)
    elements: dict[str, int] = {}
    for tensor in record.tensors:
        spec = tensor.spec
        elements[spec.key], problem = checked(spec)
        if problem is not None:
            yield f"{spec.key[:200]}: {problem}"
    if len(elements) != len(record.tensors):
        yield "it describes a tensor twice"
    for stored in record.pieces:
        problem = _wrong_in_piece(stored, elements, len(record.files))
        if problem is not None:
            yield f"{stored.piece.key[:200]}: {problem}"


def _wrong_in_files(record: RankRecord, stem: str) -> Iterator[str]:
    if len({(file.name, file.step) for file in record.files}) != len(record.files):
        yield "it names a file twice"
    for file in record.files:
        named = f"it names {file.name[:200]!r}"
        if file.step is not None:
            problem = _wrong_in_reference(record, stem, file, file.step)
            if problem is not None:
                yield f"{named} of step {str(file.step)[:200]}, {problem}"
        elif fmt.owner_of(file.name) != stem or not file.name.endswith(".safetensors"):
            yield f"{named}, which is not a data file of its part"
        if not 8 <= file.header_bytes <= file.nbytes:
            yield f"{file.name}: {file.header_bytes} bytes of header in {file.nbytes}"


def _wrong_in_reference(record: RankRecord, stem: str, file: DataFile, step: StepRef) -> str | None:
    """A file of another step is of an earlier one, and of the same rank of as many."""
    if fmt.parse_step_path(f"{fmt.step_directory(step)}/{file.name}") != (step, file.name):
        return "which is no place for a file"
    own, other = fmt.part_of(stem), fmt.part_of(fmt.owner_of(file.name) or "")
    is_data = file.name.endswith(".safetensors")
    if own is None or other is None or own[1:3] != other[1:3] or not is_data:
        return "which is not a data file of its rank"
    if other.session > own.session:
        return "which a later session wrote"
    if step.timeline == record.timeline and step.step >= record.step:
        return "which is no earlier step"
    return None


def _wrong_in_piece(
    stored: StoredPiece, elements: Mapping[str, int], file_count: int
) -> str | None:
    piece = stored.piece
    whole = elements.get(piece.key)
    if whole is None:
        return "stored, and not described"
    if not 0 <= piece.start <= piece.stop <= whole:
        return f"elements {piece.start} to {piece.stop} of {whole} are stored"
    if not 0 <= stored.file < file_count:
        return f"stored in file {stored.file} of {file_count}"
    return None


class Checked(NamedTuple):
    """What a look at the description of a tensor has shown."""

    elements: int
    problem: str | None
    """What is wrong with it, in words."""


@functools.lru_cache(_REMEMBERED)
def checked(spec: TensorSpec) -> Checked:
    """Look at a description, once where it comes again. Pure."""
    return Checked(spec.elements, _wrong_in_spec(spec))


def _wrong_in_spec(spec: TensorSpec) -> str | None:
    if not spec.key.startswith("/"):
        return "the key is no JSON pointer"
    lengths = spec.shape + (spec.shard.global_shape if spec.shard else ())
    if len(spec.shape) > MAX_DIMENSIONS or not all(0 <= n <= MAX_LENGTH for n in lengths):
        return f"shape {spec.shape[:9]}"
    stride = spec.stride
    if stride is not None and (len(stride) != len(spec.shape) or any(s < 0 for s in stride)):
        return f"stride {stride[:9]}"
    if spec.shard is not None and not _lies_inside(spec.shape, spec.shard):
        return "its shard does not lie in the whole tensor"
    return None


Region = tuple[tuple[int, int], ...]
"""(offset, length) in each dimension."""


def tiles(regions: Collection[Region], shape: tuple[int, ...]) -> bool:
    """Whether distinct regions are the cells of a grid over the whole shape: no hole, no overlap.

    Sharding makes grids only, and for a grid it is enough to look at each dimension by itself.
    """
    if 0 in shape:
        return True
    cells = 1
    for dim, length in enumerate(shape):
        intervals = sorted({region[dim] for region in regions})
        end = 0
        for offset, extent in intervals:
            if offset != end:
                return False
            end += extent
        if end != length:
            return False
        cells *= len(intervals)
    return len(set(regions)) == cells


def torn_shards(records: Iterable[RankRecord]) -> list[str]:
    """Keys of tensors whose shards do not make the whole, over the records of all ranks. Pure."""
    shards: dict[str, set[Region]] = {}
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for record in records:
        for spec in (tensor.spec for tensor in record.tensors):
            if spec.shard is not None:
                shapes.setdefault(spec.key, set()).add(spec.shard.global_shape)
                if spec.elements:
                    region = tuple(zip(spec.shard.offsets, spec.shape, strict=True))
                    shards.setdefault(spec.key, set()).add(region)
    return [
        key
        for key, known in shapes.items()
        if len(known) > 1 or not tiles(shards.get(key, ()), next(iter(known)))
    ]


def _lies_inside(shape: tuple[int, ...], shard: Shard) -> bool:
    whole, offsets = shard.global_shape, shard.offsets
    if not len(shape) == len(whole) == len(offsets):
        return False
    if len(shard.mesh_shape) != len(shard.placements):
        return False
    if shard.mesh_dim_names is not None and len(shard.mesh_dim_names) != len(shard.mesh_shape):
        return False
    for placement in shard.placements:
        match = _PLACEMENT.fullmatch(placement)
        if match is None or (match.group(1) is not None and int(match.group(1)) >= len(whole)):
            return False
    return all(
        min(offset, length) >= 0 and offset + length <= limit
        for offset, length, limit in zip(offsets, shape, whole, strict=True)
    )
