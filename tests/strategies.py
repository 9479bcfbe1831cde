"""Hypothesis strategies that make tensors and state trees."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype and bits, 0 to 3 dimensions, row-major or not, dense or not."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape, dtype=int))
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    kind = draw(st.sampled_from(["plain", "permuted", "strided", "expanded"]))
    if kind == "permuted":
        return tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if kind == "strided" and tensor.dim():
        return tensor[..., ::2]
    return tensor.unsqueeze(0).expand(2, *shape) if kind == "expanded" else tensor


def scalars() -> st.SearchStrategy[Any]:
    """Values without parts."""
    numpy_scalars = st.sampled_from([np.float32("nan"), np.int16(-3), np.float64(0.1), np.bool_(1)])
    return st.one_of(
        st.none(), st.booleans(), st.integers(), st.integers(1 << 60, 1 << 200), st.floats(),
        st.text(st.characters(), max_size=5), st.binary(max_size=5),
        st.complex_numbers(), numpy_scalars,
        st.sampled_from([torch.float32, torch.device("cpu"), "$tensor", "\ud800", ""]),
    )  # fmt: skip


def trees(leaves: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    """Nested plain values with tensors in them."""
    names = st.text(max_size=4) | st.integers(0, 3) | st.sampled_from(["$int", "a/b", "~", "1", ""])
    keys = names | st.tuples(st.integers(0, 2), st.text(max_size=2))

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 5)),
            st.dictionaries(keys, inner, max_size=4),
            st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
            st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter),
            st.frozensets(st.integers() | st.text(max_size=2), max_size=3).map(set),
        )

    return st.recursive(leaves or (scalars() | tensors()), grow, max_leaves=12)
