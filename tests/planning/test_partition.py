"""Who stores what: contiguous, disjoint, everything, and fair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.planning.partition import Extent, share_of

TENSORS = st.lists(st.tuples(st.integers(0, 50), st.sampled_from([1, 2, 4, 8, 16])), max_size=12)


@given(tensors=TENSORS, world_size=st.integers(1, 9))
def test_shares_cover_everything_once_in_order_and_fairly(
    tensors: list[tuple[int, int]], world_size: int
) -> None:
    elements = [n for n, _ in tensors]
    sizes = [size for _, size in tensors]
    shares = [share_of(elements, sizes, rank, world_size) for rank in range(world_size)]
    joined = [extent for share in shares for extent in share if extent.stop > extent.start]
    assert joined == sorted(joined), "contiguous stretches in the order of ranks"
    covered = [
        (extent.position, element)
        for extent in joined
        for element in range(extent.start, extent.stop)
    ]
    assert covered == [(i, element) for i, n in enumerate(elements) for element in range(n)]
    total = sum(n * size for n, size in tensors)
    for share in shares:
        nbytes = sum((e.stop - e.start) * sizes[e.position] for e in share)
        assert abs(nbytes - total / world_size) < max(sizes, default=1) + 1
    empty = [extent for share in shares for extent in share if extent.stop == extent.start]
    assert empty == [Extent(i, 0, 0) for i, n in enumerate(elements) if n == 0]
    assert [e for e in shares[0] if e.stop == e.start] == empty, "rank 0 has the empty ones"


def test_a_tensor_is_cut_where_its_bytes_are() -> None:
    assert share_of([10, 3], [4, 8], 0, 2) == [Extent(0, 0, 8)]
    assert share_of([10, 3], [4, 8], 1, 2) == [Extent(0, 8, 10), Extent(1, 0, 3)]


def test_one_rank_stores_all() -> None:
    assert share_of([2, 0, 3], [4, 1, 2], 0, 1) == [
        Extent(0, 0, 2),
        Extent(1, 0, 0),
        Extent(2, 0, 3),
    ]


def test_more_ranks_than_elements() -> None:
    shares = [share_of([2], [4], rank, 5) for rank in range(5)]
    assert sum(len(share) for share in shares) == 2


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        share_of([1, 2], [4], 0, 1)
