"""The safetensors format: the header in both directions.

A file is an 8-byte little-endian length N, N bytes of JSON, then the tensors' bytes (the format's
own specification, version 1 of safetensors). We write the header padded with spaces so that data
begins at a multiple of 64. Reading trusts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from everystep.errors import Damaged
from everystep.types import element_count, item_bytes

MAX_HEADER_BYTES = 100_000_000
"""The cap of the safetensors library."""

_ALIGNMENT = 64
_LENGTH_BYTES = 8
_MAX_LENGTH = (1 << 63) - 1
_MAX_DIMENSIONS = 64
"""torch's own limit."""

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Dtypes that every release of the safetensors library reads."""

_PARTS = {"complex128": ("F64", 2), "complex64": ("F32", 2), "complex32": ("F16", 2)}
"""Complex numbers as pairs (real, imaginary) in a last dimension."""

_CODE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


class Slot(NamedTuple):
    """One tensor of a file: what it is called, and where its bytes are."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    """In bytes, from the end of the header."""
    stop: int


class _Described(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_LENGTH)]]
    data_offsets: tuple[int, int]


def stored_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """How a tensor is declared in the file: safetensors dtype and shape.

    Complex numbers become pairs; what the safetensors library cannot say becomes raw bytes, with
    the true dtype in our sidecar only.
    """
    if dtype in _CODES:
        return _CODES[dtype], shape
    if dtype in _PARTS:
        code, parts = _PARTS[dtype]
        return code, (*shape, parts)
    size = item_bytes(dtype) or 1
    return "U8", shape if size == 1 else (*shape, size)


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[Slot]:
    """Place tensors (name, torch dtype, shape) one after the other: by item size, largest first
    (so that all are aligned), then by name. The same tensors in any order give the same file."""
    ordered = sorted(tensors, key=lambda t: (-(item_bytes(t[1]) or 1), t[0]))
    slots, offset = [], 0
    for name, dtype, shape in ordered:
        code, form = stored_form(dtype, shape)
        end = offset + element_count(form) * _CODE_BYTES[code]
        slots.append(Slot(name, code, form, offset, end))
        offset = end
    return slots


def encode_header(slots: Sequence[Slot], metadata: dict[str, str]) -> bytes:
    """The bytes before the first tensor."""
    described: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    for slot in slots:
        described[slot.name] = _Described(slot.code, list(slot.shape), (slot.start, slot.stop))
    text = msgspec.json.encode(described)
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def header_length(first: bytes, file_bytes: int, path: object) -> int:
    """How many bytes come before the first tensor, from the first 8 bytes of a file.

    Raises:
        Damaged: the length is beyond the cap or the end of the file.
    """
    if len(first) != _LENGTH_BYTES:
        raise Damaged("is too short for a safetensors file", path=path, at=0, found=file_bytes)
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES or _LENGTH_BYTES + length > file_bytes:
        limit = min(MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES)
        raise Damaged("header length", path=path, at=0, expected=f"<= {limit:,}", found=length)
    return _LENGTH_BYTES + length


def decode_header(header: bytes, file_bytes: int, path: object) -> list[Slot]:
    """Read and check everything before the first tensor.

    Args:
        header: the first `header_length` bytes of the file.
        file_bytes: length of the whole file.
        path: for messages.

    Raises:
        Damaged: duplicate names, unknown dtypes, a shape that does not fit its bytes, overlaps,
            holes, or data beyond the end of the file.
    """
    try:
        entries = json.loads(
            header[_LENGTH_BYTES:].decode("utf-8"), object_pairs_hook=_without_repeats
        )
        entries.pop("__metadata__", None)
        described = msgspec.convert(entries, dict[str, _Described])
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"header: {error}", path=path, at=_LENGTH_BYTES) from error
    slots = [
        Slot(name, entry.dtype, tuple(entry.shape), *entry.data_offsets)
        for name, entry in described.items()
    ]
    slots.sort(key=lambda slot: (slot.start, slot.stop))
    end = 0
    for slot in slots:
        _check_slot(slot, end, path)
        end = slot.stop
    if len(header) + end != file_bytes:
        raise Damaged("length", path=path, expected=len(header) + end, found=file_bytes)
    return slots


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name stands twice")
    return entries


def _check_slot(slot: Slot, end: int, path: object) -> None:
    size = _CODE_BYTES.get(slot.code)
    if size is None:
        raise Damaged(f"{slot.name!r}: unknown dtype {slot.code!r}", path=path)
    if slot.start != end or slot.stop < slot.start:
        raise Damaged(
            f"{slot.name!r}: hole, overlap or negative length", path=path, expected=end,
            found=slot.start,
        )  # fmt: skip
    if (
        len(slot.shape) > _MAX_DIMENSIONS
        or slot.stop - slot.start != element_count(slot.shape) * size
    ):
        raise Damaged(f"{slot.name!r}: shape and length differ", path=path)
