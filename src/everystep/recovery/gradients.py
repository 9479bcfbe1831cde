"""The gradient of one parameter put together from the pieces that the ranks have written down."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from everystep.deltas.delta import Coded, Form
from everystep.deltas.encodings import check, decode, decode_coo, positions
from everystep.errors import Damaged
from everystep.state import raw
from everystep.types import item_bytes, spoken

_SPARSE = (Form.SPARSE, Form.SPARSE_BFLOAT16, Form.SPARSE_FLOAT16)
_NARROW = {Form.SPARSE_BFLOAT16: Form.BFLOAT16, Form.SPARSE_FLOAT16: Form.FLOAT16}
_NOTHING = np.empty(0, np.uint8)


class Piece(NamedTuple):
    """What one rank has of it."""

    start: int
    stop: int
    coded: Coded


class Places(NamedTuple):
    """Where a gradient or a piece of it is not zero."""

    at: npt.NDArray[np.int64]
    """Elements of the whole gradient, ascending."""
    bits: npt.NDArray[Any]
    """Their values, as integers of their width."""

    def fill(self, out: torch.Tensor, start: int, stop: int) -> None:
        """Overwrite `out` with elements `start` to `stop`."""
        low, high = np.searchsorted(self.at, (start, stop))
        target = raw.plain_bits(out)
        target.zero_()
        target.numpy()[self.at[low:high] - start] = self.bits[low:high]


class Gradient:
    """One gradient, of which parts can be read in any order and from several threads.

    Args:
        key: of the parameter, for messages.
        elements: of the parameter.
        pieces: in any order; those without elements only say whether there is a gradient.

    Raises:
        Damaged: the pieces do not make up one gradient.
    """

    def __init__(self, key: str, elements: int, pieces: Iterable[Piece]) -> None:
        given = list(pieces)
        self._pieces = sorted((p for p in given if p.start < p.stop), key=lambda p: p.start)
        told = self._pieces or given[:1]
        absent = {piece.coded.form == Form.ABSENT for piece in told}
        dtypes = {piece.coded.dtype for piece in told}
        at = 0
        for piece in self._pieces:
            if piece.start != at:
                at = -1
                break
            at = piece.stop
        if at != elements or len(absent) != 1 or len(dtypes) != 1:
            raise Damaged(f"{spoken(key)}: the ranks' pieces do not make one gradient")
        self.absent = absent.pop()
        self.dtype = dtypes.pop()
        self._coo = [p.coded for p in told if p.coded.form == Form.COO]
        if self._coo and len(told) > 1:
            raise Damaged(f"{spoken(key)}: a piece of a sparse tensor")
        for piece in told:
            check(piece.coded, piece.stop - piece.start)
        self._places: dict[int, Places] = {}
        self.sparse: Places | None = None
        """All values that are not zero, once prepared, where only they are written down."""

    @property
    def is_coo(self) -> bool:
        """Whether it is a sparse tensor, which optimizers take another way."""
        return bool(self._coo)

    @property
    def nbytes(self) -> int:
        """What holding it takes, decoded as far as `prepare` does."""
        width = item_bytes(self.dtype) or 0
        total = sum(p.coded.gaps.nbytes + p.coded.values.nbytes for p in self._pieces)
        sparse = sum(p.coded.count for p in self._pieces if p.coded.form in _SPARSE)
        return total + sparse * (8 + width)

    def prepare(self) -> None:
        """Decode where the values of sparse pieces are: once, before `fill`.

        Raises:
            Damaged: a piece is not what an encoder makes.
        """
        if self.sparse is not None or self._places or self.absent:
            return
        for number, piece in enumerate(self._pieces):
            if piece.coded.form in _SPARSE:
                self._places[number] = _decoded(piece)
        if len(self._places) == sum(p.coded.form != Form.ZERO for p in self._pieces):
            self.sparse = _joined(list(self._places.values()), self.dtype)
            self._places = {}

    def fill(self, out: torch.Tensor, start: int) -> None:
        """Overwrite `out` with the elements from `start` on.

        Args:
            out: 1-d, contiguous, in host memory, of the gradient's dtype.
            start: first element, in row-major order.

        Raises:
            Damaged: a piece is not what an encoder makes.
        """
        stop = start + out.numel()
        if self.sparse is not None:
            self.sparse.fill(out, start, stop)
            return
        for number, piece in enumerate(self._pieces):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first >= last:
                continue
            part, coded = out[first - start : last - start], piece.coded
            places = self._places.get(number)
            if places is not None:
                places.fill(part, first, last)
            elif (first, last) == (piece.start, piece.stop) or coded.form == Form.ZERO:
                decode(coded, part)
            else:
                width = coded.values.nbytes // coded.count
                window = slice((first - piece.start) * width, (last - piece.start) * width)
                decode(coded._replace(count=last - first, values=coded.values[window]), part)

    def whole(self, like: torch.Tensor) -> torch.Tensor | None:
        """All of it, in the shape and memory order of `like`; None if there is none. It may lie in
        the memory of the delta.

        Raises:
            Damaged: a piece is not what an encoder makes.
        """
        if self.absent:
            return None
        if self._coo:
            return decode_coo(self._coo[0])
        flat = self._lent()
        if flat is None:
            flat = torch.empty(like.numel(), dtype=raw.dtype_of(self.dtype))
            self.fill(flat, 0)
        return in_order_of(like, flat)

    def _lent(self) -> torch.Tensor | None:
        """All elements where they lie, if they lie there as they are. Some optimizers write to
        their gradients: what was read for one step is of no use for another."""
        if len(self._pieces) != 1 or self._pieces[0].coded.form != Form.DENSE:
            return None
        data, dtype = self._pieces[0].coded.values, raw.dtype_of(self.dtype)
        if not data.flags.writeable or data.ctypes.data % dtype.itemsize:
            return None
        return torch.from_numpy(data).view(dtype)


def in_order_of(like: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """The elements, in row-major order in `flat`, in the shape and memory order of `like`."""
    shaped = flat.view(like.shape)
    if like.is_contiguous():
        return shaped
    ordered = torch.empty_like(like, dtype=flat.dtype)
    raw.plain_bits(ordered).copy_(raw.plain_bits(shaped))
    return ordered


def _decoded(piece: Piece) -> Places:
    coded = piece.coded
    at = positions(coded)
    if len(at) and at[-1] >= piece.stop - piece.start:
        raise Damaged("a position of a sparse gradient lies outside of it")
    values = torch.empty(coded.count, dtype=raw.dtype_of(coded.dtype))
    form = _NARROW.get(coded.form, Form.DENSE)
    decode(Coded(form, coded.dtype, coded.count, _NOTHING, coded.values), values)
    return Places(at + piece.start, raw.plain_bits(values).numpy())


def _joined(places: list[Places], dtype: str) -> Places:
    if len(places) == 1:
        return places[0]
    nothing = raw.plain_bits(torch.empty(0, dtype=raw.dtype_of(dtype))).numpy()
    return Places(
        np.concatenate([np.empty(0, np.int64), *(p.at for p in places)]),
        np.concatenate([nothing, *(p.bits for p in places)]),
    )
