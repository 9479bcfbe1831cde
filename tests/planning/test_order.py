"""Chunks on one link: the order of deadlines leaves the fewest bytes behind."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import chain, combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.errors import UsageError
from everystep.planning.order import Chunk, by_deadline

CHUNKS = st.lists(
    st.builds(
        lambda nbytes, stable, span: Chunk(
            nbytes=nbytes, stable_s=float(stable), written_s=float(stable + span)
        ),
        st.integers(0, 12),
        st.integers(0, 10),
        st.integers(0, 10),
    ),
    max_size=6,
)


def least_late_by_cuts(chunks: list[Chunk], rate: int) -> Fraction:
    """By max-flow min-cut: of any set of chunks, no more leaves than the link carries while at
    least one of them may leave; the tightest set decides."""
    tightest = Fraction(0)
    places = range(len(chunks))
    for chosen in chain.from_iterable(combinations(places, n) for n in range(len(chunks) + 1)):
        total = sum(chunks[i].nbytes for i in chosen)
        tightest = max(tightest, total - rate * union([chunks[i] for i in chosen]))
    return tightest


def union(chunks: list[Chunk]) -> Fraction:
    """Seconds in which at least one chunk may leave."""
    covered, reached = Fraction(0), Fraction(-1)
    for chunk in sorted(chunks, key=lambda chunk: chunk.stable_s):
        start, stop = max(Fraction(chunk.stable_s), reached), Fraction(chunk.written_s)
        covered += max(stop - start, Fraction(0))
        reached = max(reached, stop)
    return covered


def late_by_slots(chunks: list[Chunk], priority: tuple[int, ...], rate: int) -> int:
    """Byte by byte: in each slot the first chunk of the priority that may leave has the link."""
    left = [chunk.nbytes for chunk in chunks]
    for slot in range(21 * rate):
        for i in priority:
            may = chunks[i].stable_s * rate <= slot < chunks[i].written_s * rate
            if may and left[i]:
                left[i] -= 1
                break
    return sum(left)


@given(chunks=CHUNKS, rate=st.integers(1, 4))
def test_no_schedule_leaves_fewer_bytes(chunks: list[Chunk], rate: int) -> None:
    late = sum(by_deadline(chunks, float(rate)).late_bytes)
    assert late == least_late_by_cuts(chunks, rate)


@given(chunks=CHUNKS.filter(lambda chunks: len(chunks) <= 4), rate=st.integers(1, 2))
def test_no_order_of_chunks_is_better(chunks: list[Chunk], rate: int) -> None:
    orders = permutations(range(len(chunks)))
    best = min(late_by_slots(chunks, order, rate) for order in orders)
    late = sum(by_deadline(chunks, float(rate)).late_bytes)
    assert late <= best
    assert late == late_by_slots(
        chunks, tuple(sorted(range(len(chunks)), key=lambda i: chunks[i].written_s)), rate
    )


@given(
    chunks=st.lists(
        st.builds(
            lambda nbytes, stable, span: Chunk(
                nbytes=nbytes, stable_s=stable, written_s=stable + span
            ),
            st.integers(0, 10**9),
            st.floats(0, 10),
            st.floats(0, 10),
        ),
        max_size=8,
    ),
    rate=st.floats(1, 1e9),
)
def test_what_a_schedule_keeps_to(chunks: list[Chunk], rate: float) -> None:
    schedule = by_deadline(chunks, rate)
    clock = -math.inf
    moved = [0.0] * len(chunks)
    for piece in schedule.slices:
        chunk = chunks[piece.chunk]
        assert clock <= piece.start_s <= piece.stop_s
        assert chunk.stable_s <= piece.start_s and piece.stop_s <= chunk.written_s
        moved[piece.chunk] += rate * (piece.stop_s - piece.start_s)
        clock = piece.stop_s
    for chunk, out, late in zip(chunks, moved, schedule.late_bytes, strict=True):
        assert 0 <= late <= chunk.nbytes
        assert abs(out + late - chunk.nbytes) < 1 + 1e-6 * (rate + chunk.nbytes)


def test_the_one_that_is_written_next_interrupts() -> None:
    long = Chunk(nbytes=8, stable_s=0.0, written_s=10.0)
    urgent = Chunk(nbytes=2, stable_s=3.0, written_s=5.0)
    schedule = by_deadline([long, urgent], 1.0)
    assert [(s.chunk, s.start_s, s.stop_s) for s in schedule.slices] == [
        (0, 0.0, 3.0), (1, 3.0, 5.0), (0, 5.0, 10.0),
    ]  # fmt: skip
    assert schedule.late_bytes == (0, 0)


def test_what_cannot_be_in_time_is_cut_in_favour_of_later_ones() -> None:
    hopeless = Chunk(nbytes=10, stable_s=0.0, written_s=4.0)
    later = Chunk(nbytes=5, stable_s=0.0, written_s=9.0)
    assert by_deadline([hopeless, later], 1.0).late_bytes == (6, 0)


def test_chunks_that_are_moved_whole_or_not_at_all_are_another_problem() -> None:
    """By deadline, all-or-nothing moves 5 bytes here; the other order moves 9."""
    chunks = [
        Chunk(nbytes=5, stable_s=0.0, written_s=5.0),
        Chunk(nbytes=9, stable_s=0.0, written_s=9.0),
    ]
    assert by_deadline(chunks, 1.0).late_bytes == (0, 5), "cut at the byte, 9 bytes are moved"


def test_equal_deadlines_go_in_the_given_order() -> None:
    chunks = [Chunk(nbytes=4, stable_s=0.0, written_s=6.0) for _ in range(3)]
    assert by_deadline(chunks, 1.0).late_bytes == (0, 2, 4)


def test_nothing_to_move_and_no_link() -> None:
    assert by_deadline([], 1.0).slices == ()
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError):
            by_deadline([], rate)
