"""Deltas as bytes: one safetensors blob each, with few tensors however many parameters there are.

The table has one row for each parameter of each update, in their order: `forms`, `dtypes` (index
into the list of names in the metadata), `counts` and `gap_bytes`. All gaps stand one after the
other in `gaps`, all values in `values` (count times the width that form and dtype give), whole
tensors in `tensors`. Everything else is JSON in the metadata. Reading trusts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from everystep.deltas import coo, encodings
from everystep.deltas.delta import Bytes, Coded, Delta, Form, Layout, Parameter, Stored, Update
from everystep.deltas.metrics import METADATA_KEY
from everystep.deltas.samples import check_samples, sample_counts
from everystep.errors import Damaged
from everystep.types import Json, TensorSpec, element_count, item_bytes

MAX_HEADER_BYTES = 100_000_000
"""The cap of the safetensors library."""

_LENGTH_BYTES = 8
_ALIGNMENT = 64
_SMALL_BYTES = 64 << 10
"""Parts below it are joined: a copy costs less than one more part."""

_FORMS = tuple(Form)
_WIDTHS = {"U8": 1, "I64": 8, "U64": 8}
_CODES = {
    "counts": "I64",
    "gap_bytes": "I64",
    "fingerprint": "U64",
    "values": "U8",
    "tensors": "U8",
    "gaps": "U8",
    "forms": "U8",
    "dtypes": "U8",
}
"""All tensors of a blob in their order: wide numbers first, and then gradients, so that they are
aligned."""

_Length = Annotated[int, msgspec.Meta(ge=0, le=coo.MOST_ELEMENTS)]


class _Described(Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Length]
    data_offsets: tuple[int, int]


class _Call(Struct, forbid_unknown_fields=True):
    optimizer: str
    options: Json
    scale: Json


class _Facts(Struct, forbid_unknown_fields=True):
    """The JSON of a blob."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    updates: list[_Call]
    dtypes: list[str]
    tensors: list[TensorSpec]
    tree: dict[str, Json]
    metrics: dict[str, Json]


def pack(delta: Delta) -> tuple[int, list[Bytes]]:
    """The bytes of a delta.

    Returns:
        their number, and the parts that make them up, which may alias the delta's arrays.
    """
    rows = [coded for update in delta.updates for coded in update.gradients]
    forms, dtypes, counts, gaps, values = zip(*rows, strict=True) if rows else ((),) * 5
    names = list(dict.fromkeys(dtypes))
    code_of = {name: code for code, name in enumerate(names)}
    columns: dict[str, list[Bytes]] = {
        "counts": [np.array(counts, np.int64).view(np.uint8)],
        "gap_bytes": [np.array([*map(len, gaps)], np.int64).view(np.uint8)],
        "fingerprint": [np.ascontiguousarray(delta.fingerprint).reshape(-1).view(np.uint8)],
        "values": _joined(values),
        "tensors": _joined([stored.data for stored in delta.tensors]),
        "gaps": _joined(gaps),
        "forms": [np.frombuffer(bytes(forms), np.uint8)],
        "dtypes": [np.frombuffer(bytes([code_of[name] for name in dtypes]), np.uint8)],
    }
    facts = _Facts(
        step=delta.step,
        updates=[_Call(u.optimizer, u.options, u.scale) for u in delta.updates],
        dtypes=names,
        tensors=[stored.spec for stored in delta.tensors],
        tree=delta.tree,
        metrics=delta.metrics,
    )
    lengths = {name: sum(map(len, parts)) for name, parts in columns.items()}
    header = _header(facts, lengths, delta.fingerprint.shape)
    parts = [header, *(part for column in columns.values() for part in column if len(part))]
    return len(header) + sum(lengths.values()), parts


def _joined(arrays: Sequence[Bytes]) -> list[Bytes]:
    """The arrays in order, with runs of small ones made one."""
    parts: list[Bytes] = []
    small: list[Bytes] = []
    for array in arrays:
        if len(array) < _SMALL_BYTES:
            small.append(array)
            continue
        if small:
            parts.append(_join(small))
            small = []
        parts.append(array)
    return [*parts, _join(small)] if small else parts


def _join(arrays: list[Bytes]) -> Bytes:
    return np.frombuffer(
        b"".join([a.data for a in arrays]), np.uint8
    )  # quicker than np.concatenate


def _header(facts: _Facts, lengths: dict[str, int], fingerprint_shape: tuple[int, ...]) -> Bytes:
    text = msgspec.json.encode(facts).decode()
    described: dict[str, object] = {"__metadata__": {METADATA_KEY: text}}
    start = 0
    for name, code in _CODES.items():
        stop = start + lengths[name]
        shape = [lengths[name] // _WIDTHS[code]]
        if name == "fingerprint":
            shape = list(fingerprint_shape)
        described[name] = _Described(code, shape, (start, stop))
        start = stop
    encoded = msgspec.json.encode(described)
    encoded += b" " * (-(_LENGTH_BYTES + len(encoded)) % _ALIGNMENT)
    return np.frombuffer(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded, np.uint8)


# ---------------------------------------------------------------- reading


def unpack(data: memoryview, layout: Layout, *, on_wire: bool = False) -> Delta:
    """Read the bytes of a delta.

    Args:
        data: flat; gradients and tensors of the result are views of it.
        layout: of the segment that it stands in.
        on_wire: gradients may be ON_WIRE, as on the way to a shadow.

    Raises:
        Damaged: they are not such bytes, or hold other parameters than the layout says, or more
            than its pieces have room for. Where gaps lead is checked only when they are decoded.
    """
    facts, columns, shape = _read_header(np.frombuffer(data, np.uint8))
    tensors = _tensors(facts.tensors, columns["tensors"])
    fingerprint = columns["fingerprint"].copy().view(np.uint64).reshape(shape)
    table = _table(facts, columns)
    updates = []
    at = 0
    for call in facts.updates:
        pieces = layout.optimizers.get(call.optimizer)
        if pieces is None:
            raise Damaged(f"an update of an optimizer {call.optimizer!r} that is not there")
        if len(pieces) > len(table) - at:
            raise Damaged("parameters", expected=at + len(pieces), found=len(table))
        gradients = table[at : at + len(pieces)]
        counts = sample_counts(pieces)
        for coded, piece, count in zip(gradients, pieces, counts, strict=True):
            if on_wire and coded.form == Form.ON_WIRE:
                check_samples(coded, count)
            else:
                encodings.check(coded, piece.stop - piece.start)
        at += len(pieces)
        updates.append(Update(call.optimizer, call.options, gradients, call.scale))
    if at != len(table):
        raise Damaged("parameters", expected=at, found=len(table))
    return Delta(facts.step, updates, tensors, facts.tree, facts.metrics, fingerprint)


class _Read(NamedTuple):
    facts: _Facts
    columns: dict[str, Bytes]
    fingerprint_shape: list[int]


def _read_header(data: Bytes) -> _Read:
    if len(data) < _LENGTH_BYTES:
        raise Damaged("is too short for a delta", expected=_LENGTH_BYTES, found=len(data))
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    limit = min(MAX_HEADER_BYTES, len(data) - _LENGTH_BYTES)
    if length > limit:
        raise Damaged("header length", expected=f"<= {limit:,}", found=length)
    body = data[_LENGTH_BYTES + length :]
    text = data[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(entries.pop("__metadata__", b""), type=dict[str, str])
        facts = msgspec.json.decode(metadata.get(METADATA_KEY, ""), type=_Facts)
        described = {
            name: msgspec.json.decode(entry, type=_Described) for name, entry in entries.items()
        }
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Damaged(f"header: {error}", at=_LENGTH_BYTES) from error
    if described.keys() != _CODES.keys():
        raise Damaged("tensors", expected=", ".join(_CODES), found=", ".join(described))
    columns, start = {}, 0
    for name, code in _CODES.items():
        entry = described[name]
        stop = start + element_count(tuple(entry.shape)) * _WIDTHS[code]
        if entry.dtype != code or entry.data_offsets != (start, stop) or stop > len(body):
            raise Damaged(f"the description of {name!r} does not fit the bytes")
        if len(entry.shape) != 1 and name != "fingerprint":
            raise Damaged(f"dimensions of {name!r}", expected=1, found=len(entry.shape))
        columns[name] = body[start:stop]
        start = stop
    if start != len(body):
        raise Damaged("length", expected=start, found=len(body))
    return _Read(facts, columns, described["fingerprint"].shape)


def _tensors(specs: list[TensorSpec], data: Bytes) -> list[Stored]:
    tensors, at = [], 0
    for spec in specs:
        width = item_bytes(spec.dtype)
        if width is None or any(length < 0 for length in spec.shape):
            raise Damaged(f"{spec.key}: dtype {spec.dtype!r} of shape {spec.shape}")
        stop = at + spec.nbytes
        if stop > len(data):
            break
        tensors.append(Stored(spec, data[at:stop]))
        at = stop
    if len(tensors) != len(specs) or at != len(data):
        raise Damaged("tensors are longer or shorter than their shapes say")
    return tensors


def _table(facts: _Facts, columns: dict[str, Bytes]) -> list[Coded]:
    """The rows; that their form, dtype, count and bytes fit each other is not checked here."""
    forms, dtypes = columns["forms"].tolist(), columns["dtypes"].tolist()
    counts, gap_bytes = (_numbers(columns[name]) for name in ("counts", "gap_bytes"))
    if not len(forms) == len(dtypes) == len(counts) == len(gap_bytes):
        raise Damaged("the columns of a table differ in length")
    names = facts.dtypes
    if any(name and item_bytes(name) is None for name in names):
        raise Damaged(f"an unknown dtype among {', '.join(names)}")
    if forms and (max(forms) >= len(_FORMS) or max(dtypes) >= len(names)):
        raise Damaged("an unknown form, or a dtype without a name")
    widths = [item_bytes(name) or 0 for name in names]
    gaps, values = columns["gaps"], columns["values"]
    rows, gap, value = [], 0, 0
    for form, dtype, count, length in zip(forms, dtypes, counts, gap_bytes, strict=True):
        width = 2 if form in encodings.NARROW_FORMS else widths[dtype]
        gap_end, value_end = gap + length, value + count * width
        if count < 0 or length < 0 or gap_end > len(gaps) or value_end > len(values):
            raise Damaged("a gradient that is longer than what is stored")
        rows.append(
            Coded(_FORMS[form], names[dtype], count, gaps[gap:gap_end], values[value:value_end])
        )
        gap, value = gap_end, value_end
    if gap != len(gaps) or value != len(values):
        raise Damaged(
            "gradients",
            expected=f"{gap:,} and {value:,} bytes",
            found=f"{len(gaps):,} and {len(values):,}",
        )
    return rows


def _numbers(column: Bytes) -> list[int]:
    numbers: npt.NDArray[np.int64] = column.copy().view(np.int64)
    listed: list[int] = numbers.tolist()
    return listed


# ---------------------------------------------------------------- layouts


def pack_layout(layout: Layout) -> bytes:
    """A layout as JSON."""
    return msgspec.json.encode(layout)


def unpack_layout(data: bytes | memoryview) -> Layout:
    """Read a layout.

    Raises:
        Damaged: it is not one, or has a piece outside its parameter.
    """
    try:
        layout = msgspec.json.decode(data, type=Layout)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Damaged(f"is not the layout of deltas: {error}") from error
    if not 0 <= layout.rank < layout.world_size:
        raise Damaged("rank", expected=f"0 to {layout.world_size - 1}", found=layout.rank)
    if not (1 <= layout.slices <= 1024 and 1 <= layout.threads <= 4096):
        raise Damaged("slices or threads", found=f"{layout.slices}, {layout.threads}")
    for name, pieces in layout.optimizers.items():
        for piece in pieces:
            if not _is_whole(piece):
                raise Damaged(
                    f"{name}: {piece.key} of shape {piece.shape} has no such piece",
                    found=f"{piece.start} to {piece.stop}",
                )
    return layout


def _is_whole(piece: Parameter) -> bool:
    """Whether it lies in its parameter, and that may exist."""
    count = element_count(piece.shape)
    return (
        min(piece.shape, default=0) >= 0
        and count <= coo.MOST_ELEMENTS
        and 0 <= piece.start <= piece.stop <= count
    )
