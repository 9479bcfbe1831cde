"""What a rank's record must satisfy beyond the types of its fields.

A hash shows that a record is what somebody wrote, not that it makes sense. What is checked here,
everything that reads a record further on may rely on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from everystep.store import format as fmt
from everystep.store.format import RankRecord, StoredPiece
from everystep.types import Shard, TensorSpec

MAX_DIMENSIONS = 64
"""torch's own limit."""

_PLACEMENT = re.compile(r"R|S\(([0-9]{1,2})\)")


def complaints(record: RankRecord, stem: str) -> Iterator[str]:
    """What is wrong with a record, in words; nothing if it is fine. Pure.

    Args:
        record: as decoded.
        stem: what the names of all files of its part begin with.
    """
    yield from _wrong_in_files(record, stem)
    specs = {tensor.spec.key: tensor.spec for tensor in record.tensors}
    if len(specs) != len(record.tensors):
        yield "it describes a tensor twice"
    for spec in specs.values():
        problem = _wrong_in_spec(spec)
        if problem is not None:
            yield f"{spec.key[:200]}: {problem}"
    for stored in record.pieces:
        problem = _wrong_in_piece(stored, specs, len(record.files))
        if problem is not None:
            yield f"{stored.piece.key[:200]}: {problem}"


def _wrong_in_files(record: RankRecord, stem: str) -> Iterator[str]:
    names = {file.name for file in record.files}
    if len(names) != len(record.files):
        yield "it names a file twice"
    for file in record.files:
        if fmt.owner_of(file.name) != stem or not file.name.endswith(".safetensors"):
            yield f"it names {file.name[:200]!r}, which is not a data file of its part"
        if not 8 <= file.header_bytes <= file.nbytes:
            yield f"{file.name}: {file.header_bytes} bytes of header in {file.nbytes}"


def _wrong_in_piece(
    stored: StoredPiece, specs: Mapping[str, TensorSpec], file_count: int
) -> str | None:
    piece = stored.piece
    if piece.key not in specs:
        return "stored, and not described"
    elements = specs[piece.key].elements
    if not 0 <= piece.start <= piece.stop <= elements:
        return f"elements {piece.start} to {piece.stop} of {elements} are stored"
    if not 0 <= stored.file < file_count:
        return f"stored in file {stored.file} of {file_count}"
    return None


def _wrong_in_spec(spec: TensorSpec) -> str | None:
    if not spec.key.startswith("/"):
        return "the key is no JSON pointer"
    if len(spec.shape) > MAX_DIMENSIONS or any(length < 0 for length in spec.shape):
        return f"shape {spec.shape}"
    stride = spec.stride
    if stride is not None and (len(stride) != len(spec.shape) or any(s < 0 for s in stride)):
        return f"stride {stride}"
    if spec.shard is not None and not _lies_inside(spec.shape, spec.shard):
        return f"shard {spec.shard} of shape {spec.shape}"
    return None


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
