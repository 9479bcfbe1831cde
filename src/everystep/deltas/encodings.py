"""Exact encodings of gradients: the smallest one that gives back every bit.

A value counts as zero only if all its bits are zero, so -0.0 is kept, as is every NaN payload.
SPARSE forms hold the values that are not zero and the gaps between them (`loops` says how); COO
holds, where others hold gaps, what `coo` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from everystep.deltas import coo, loops
from everystep.deltas.delta import Bytes, Coded, Form
from everystep.errors import Damaged, Unsupported, UsageError
from everystep.state import raw
from everystep.types import TensorSpec, element_count, item_bytes

try:
    from everystep.deltas import _codec
except ImportError:  # it was built without a compiler
    codec: Any = loops
else:
    codec = _codec

_Places = npt.NDArray[np.int64] | npt.NDArray[np.int32]

Indices = _Places | torch.Tensor

# tuples of numbers: the hash of an enum member is slow
_SPARSE_FORMS = (Form.SPARSE, Form.SPARSE_BFLOAT16, Form.SPARSE_FLOAT16)
_HALF_FORMS = (Form.FLOAT16, Form.SPARSE_FLOAT16)
NARROW_FORMS = (Form.BFLOAT16, Form.SPARSE_BFLOAT16, *_HALF_FORMS)
_NUMPY_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.complex64, torch.complex128}
)
_name = functools.cache(raw.dtype_name)
_NOTHING: Bytes = np.empty(0, np.uint8)


def encode(
    gradient: torch.Tensor | None,
    start: int,
    stop: int,
    *,
    indices: Indices | None = None,
    plain: bool = False,
) -> Coded:
    """Encode elements `start` to `stop` (row-major order) of a gradient.

    Args:
        gradient: a host tensor, strided (any strides) or sparse COO (then all of it); None: absent.
        start: the first element.
        stop: the end, exclusive.
        indices: int64 or int32, 1-d, ascending without repeats, of the whole flat tensor: the
            caller knows that the bits of all other elements are zero, and the tensor is not
            searched.
        plain: a strided tensor is taken as it is, and no smaller form is looked for.

    Returns:
        what gives back every bit. Its values may alias the gradient, so use or copy them before
        anybody writes to it.

    Raises:
        UsageError: the range or the indices do not fit the tensor, or another thread is writing it.
        Unsupported: a dtype or layout that cannot be stored.
    """
    if gradient is None:
        return Coded(Form.ABSENT, "", 0, _NOTHING, _NOTHING)
    if not 0 <= start <= stop <= gradient.numel():
        raise UsageError(f"elements {start} to {stop} of {gradient.numel()}")
    dtype = _name(gradient.dtype)
    width = item_bytes(dtype)
    if width is None:
        raise Unsupported(f"a gradient of dtype {dtype}")
    if gradient.layout == torch.sparse_coo:
        return _whole_coo(gradient, dtype, start, stop)
    if gradient.layout != torch.strided:
        raise Unsupported(f"a gradient of layout {gradient.layout}")
    if indices is not None:
        places = _flat_indices(indices)
        places = places[_inside(places, start, stop)]
        return _known(places, _at(gradient, places), dtype, start, stop)
    data = _bytes_of(gradient, start, stop)
    if plain and len(data):
        return Coded(Form.DENSE, dtype, stop - start, _NOTHING, data)
    return _smallest(data, dtype, width, stop - start)


def _smallest(data: Bytes, dtype: str, width: int, length: int) -> Coded:
    """The bytes of a strided gradient in the form that takes least."""
    count, seen = codec.survey(data, width)
    if not count:
        return Coded(Form.ZERO, dtype, 0, _NOTHING, _NOTHING)
    if count >= (length - count) * width:  # a gap takes a byte at least
        return _dense(data, dtype, length, seen)
    gaps, values = _empty(loops.gap_room(count, length)), _empty(count * width)
    used = codec.extract(data, width, gaps, values)
    if used < 0:
        raise UsageError("a gradient was written while it was read")
    return _smaller(gaps[:used], values, seen, dtype, length, lambda: data)


def encode_known(
    indices: Indices, values: torch.Tensor, dtype: str, start: int, stop: int
) -> Coded:
    """Encode elements `start` to `stop` (row-major order) of a gradient known to be sparse.

    Args:
        indices: int64 or int32, 1-d, ascending without repeats, of the whole flat gradient.
        values: host tensor, 1-d, parallel to `indices`; all other elements have zero bits.
        dtype: torch's name of the gradient's dtype, which is that of `values`.
        start: the first element.
        stop: the end, exclusive.

    Returns:
        the same as `encode` of the dense gradient. Its values may alias `values`.

    Raises:
        UsageError: lengths, dtypes, order or range of the arguments do not fit.
        Unsupported: a dtype that cannot be stored.
    """
    if dtype != _name(values.dtype):
        raise UsageError(f"values are of dtype {_name(values.dtype)}, not {dtype}")
    if item_bytes(dtype) is None:
        raise Unsupported(f"a gradient of dtype {dtype}")
    places = _flat_indices(indices)
    if not 0 <= start <= stop or values.shape != places.shape:
        raise UsageError(f"{len(places)} indices, values {tuple(values.shape)}, {start} to {stop}")
    inside = _inside(places, start, stop)
    return _known(places[inside], _bytes_of(values, inside.start, inside.stop), dtype, start, stop)


def decode(coded: Coded, out: torch.Tensor) -> None:
    """Overwrite all of `out` with the elements.

    Args:
        coded: any form but ABSENT and COO.
        out: 1-d, contiguous, in host memory, of the piece's length and the gradient's dtype.

    Raises:
        Damaged: the bytes do not fit the form, the dtype or the length. `out` holds anything.
        UsageError: `out` is not of the gradient's dtype, or the form has no elements.
    """
    if _name(out.dtype) != coded.dtype or not out.is_contiguous() or out.dim() != 1:
        raise UsageError(f"{coded.form.name} of {coded.dtype} cannot be decoded into {out.dtype}")
    width, length = out.element_size(), out.numel()
    target = _view_bytes(out)
    check(coded, length)
    if coded.form == Form.ZERO:
        target.fill(0)
    elif coded.form == Form.DENSE:
        target[:] = coded.values
    elif coded.form in (Form.BFLOAT16, Form.FLOAT16):
        codec.widen(coded.values, coded.form == Form.FLOAT16, target)
    elif coded.form in _SPARSE_FORMS:
        values = coded.values
        if coded.form in NARROW_FORMS:
            values = _empty(coded.count * width)
            codec.widen(coded.values, coded.form in _HALF_FORMS, values)
        if not codec.scatter(coded.gaps, values, width, target):
            raise Damaged("the gaps of a sparse gradient do not fit its elements")
    else:
        raise UsageError(f"{coded.form.name} has no elements to decode")


def positions(coded: Coded) -> npt.NDArray[np.int64]:
    """Where the values of a SPARSE form are: ascending, counted from the piece's start.

    Raises:
        Damaged: the gaps are cut, or not those of so many values.
        UsageError: another form.
    """
    if coded.form not in _SPARSE_FORMS:
        raise UsageError(f"{coded.form.name} has no positions")
    check(coded, coo.MOST_ELEMENTS)
    found = np.empty(coded.count, np.int64)
    if not codec.positions(coded.gaps, coo.MOST_ELEMENTS, found):
        raise Damaged("the gaps of a sparse gradient are not well formed")
    return found


def check(coded: Coded, length: int) -> None:
    """Check what was read against the number of elements of its piece: all but where gaps lead.

    Raises:
        Damaged: form, dtype, count, bytes and length do not fit each other.
    """
    form, dtype, count, gaps, values = coded
    least, most = (0, 0)
    if form == Form.COO:
        most = coo.MOST_ELEMENTS
    elif form in _SPARSE_FORMS:
        most = length
    elif form > Form.ZERO:
        least = most = length
    width = item_bytes(dtype) or 0
    if form in NARROW_FORMS:
        width = 2 if dtype == "float32" else 0
    if (
        form == Form.ON_WIRE
        or (width == 0) != (form == Form.ABSENT)
        or (dtype == "") != (form == Form.ABSENT)
        or not least <= count <= most
        or len(values) != count * width
        or (len(gaps) < count if form in _SPARSE_FORMS else len(gaps) and form != Form.COO)
    ):
        raise Damaged(
            f"a gradient of form {form.name} and dtype {dtype!r}, {count:,} values in "
            f"{len(values):,} bytes, {len(gaps):,} bytes of gaps, does not fit {length:,} elements"
        )
    if form == Form.COO and element_count(coo.parts_of(coded).size) != length:
        raise Damaged("the size of a sparse COO gradient", expected=f"{length:,} elements")


def decode_coo(coded: Coded) -> torch.Tensor:
    """The sparse tensor as it was: indices and values in their order, coalesced or not.

    Raises:
        Damaged: the bytes do not describe one.
        UsageError: another form.
    """
    if coded.form != Form.COO:
        raise UsageError(f"{coded.form.name} is not a sparse tensor")
    parts = coo.parts_of(coded)
    check(coded, element_count(parts.size))
    values, view = raw.empty_for(TensorSpec(key="", dtype=coded.dtype, shape=(coded.count,)))
    np.frombuffer(view, np.uint8)[:] = coded.values
    return torch.sparse_coo_tensor(
        torch.from_numpy(parts.indices),
        values.view(parts.indices.shape[1], *parts.size[len(parts.indices) :]),
        parts.size,
        check_invariants=False,  # parts_of has checked them
        is_coalesced=parts.coalesced,
    )


# ---------------------------------------------------------------- choosing


def _at(gradient: torch.Tensor, places: _Places) -> Bytes:
    """The values there."""
    if not gradient.is_contiguous():
        at = torch.unravel_index(torch.from_numpy(places.astype(np.int64)), gradient.shape)
        return _view_bytes(raw.plain_bits(gradient)[at])
    width = gradient.element_size()
    values = _empty(len(places) * width)
    data = _view_bytes(gradient)
    if not codec.gather(data, width, places.view(np.uint8), places.itemsize, values):
        raise UsageError("an index lies outside the gradient")
    return values


def _known(places: _Places, values: Bytes, dtype: str, start: int, stop: int) -> Coded:
    length, width = stop - start, item_bytes(dtype) or 0
    count, seen = codec.survey(values, width)
    if not count:
        return Coded(Form.ZERO, dtype, 0, _NOTHING, _NOTHING)
    if count < len(places):
        kept = values.reshape(-1, width).any(axis=1)
        places, values = places[kept], values.reshape(-1, width)[kept].reshape(-1)
    gaps = _empty(loops.gap_room(count, length))
    used = codec.gaps(places.view(np.uint8), places.itemsize, start, stop, gaps)
    if used < 0:
        raise UsageError("the indices of a sparse gradient do not ascend, or repeat")

    def dense() -> Bytes:
        data = _empty(length * width)
        codec.scatter(gaps[:used], values, width, data)
        return data

    return _smaller(gaps[:used], values, seen, dtype, length, dense)


def _smaller(
    gaps: Bytes, values: Bytes, seen: int, dtype: str, length: int, dense: Callable[[], Bytes]
) -> Coded:
    """SPARSE, or what holds all elements, whichever takes fewer bytes."""
    count = len(values) // (item_bytes(dtype) or 1)
    half, narrowed = _narrowed(values, dtype, seen)
    stored = values if narrowed is None else narrowed
    if len(gaps) >= (length - count) * (len(stored) // count):
        return _dense(dense(), dtype, length, seen)
    form = Form.SPARSE
    if narrowed is not None:
        form = Form.SPARSE_FLOAT16 if half else Form.SPARSE_BFLOAT16
    return Coded(form, dtype, count, gaps, stored)


def _whole_coo(gradient: torch.Tensor, dtype: str, start: int, stop: int) -> Coded:
    if (start, stop) != (0, gradient.numel()):
        raise UsageError("a piece of a sparse COO gradient", expected="all of it")
    values = gradient._values()
    data = _bytes_of(values, 0, values.numel())
    return Coded(Form.COO, dtype, values.numel(), coo.numbers_of(gradient), data)


def _dense(data: Bytes, dtype: str, length: int, seen: int) -> Coded:
    half, narrowed = _narrowed(data, dtype, seen)
    if narrowed is None:
        return Coded(Form.DENSE, dtype, length, _NOTHING, data)
    return Coded(Form.FLOAT16 if half else Form.BFLOAT16, dtype, length, _NOTHING, narrowed)


def _narrowed(values: Bytes, dtype: str, seen: int) -> tuple[bool, Bytes | None]:
    """Whether float16 (else bfloat16) was tried, and float32 values in 16 bits if all fit.

    Args:
        values: of the elements.
        dtype: of the elements.
        seen: the union of their bits.
    """
    half = seen & 0xFFFF != 0
    if dtype != "float32" or seen & 0x1FFF:  # both kinds are zero there
        return half, None
    narrowed = _empty(len(values) // 2)
    return half, narrowed if codec.narrow(values, half, narrowed) else None


# ---------------------------------------------------------------- bytes and indices


def _empty(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def _view_bytes(tensor: torch.Tensor) -> Bytes:
    """A contiguous host tensor's bytes, without a copy."""
    if tensor.dtype not in _NUMPY_DTYPES or tensor.is_conj() or tensor.is_neg():
        tensor = raw.plain_bits(tensor)
    view: Bytes = tensor.detach().numpy().reshape(-1).view(np.uint8)
    return view


def _bytes_of(tensor: torch.Tensor, start: int, stop: int) -> Bytes:
    """The bytes of elements `start` to `stop` in row-major order; a view where they lie so."""
    width = tensor.element_size()
    if tensor.is_contiguous():
        return _view_bytes(tensor)[start * width : stop * width]
    gathered = _empty((stop - start) * width)
    at = 0
    for chunk in raw.host_chunks(tensor, start, stop):
        gathered[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)
    return gathered


def _flat_indices(indices: Indices) -> _Places:
    array = indices.numpy() if isinstance(indices, torch.Tensor) else indices
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise UsageError(f"indices of dtype {array.dtype} and shape {array.shape}")
    places: _Places = np.ascontiguousarray(array)
    return places


def _inside(places: _Places, start: int, stop: int) -> slice:
    """Which of the ascending indices lie from `start` to `stop`."""
    if len(places) and start <= places[0] and places[-1] < stop:
        return slice(0, len(places))
    first, last = np.searchsorted(places, [start, stop])
    return slice(int(first), int(last))
