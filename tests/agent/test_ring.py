"""The memory that records wait in: nothing overlaps, and what fits is taken."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.agent import arena
from everystep.agent.arena import Arena
from everystep.agent.ring import Ring, Stretches
from everystep.errors import StoreFailed

SIZE = 12


class Naive:
    """A byte of memory for each place, and a list of who came when."""

    def __init__(self) -> None:
        self.owners: list[int | None] = [None] * SIZE
        self.order: list[tuple[int, int]] = []

    def where(self, nbytes: int) -> int | None:
        """The next record lies behind the newest, or, where the end is too near, at the beginning:
        never anywhere else, so that what is freed is always in one piece."""
        if not self.order:
            return 0 if nbytes <= SIZE else None
        offset, length = self.order[-1]
        behind = offset + length
        if all(byte is None for byte in self.owners[behind : behind + nbytes]) and (
            behind + nbytes <= SIZE
        ):
            return behind
        wrapped = offset < self.order[0][0]
        fits = nbytes <= SIZE and all(byte is None for byte in self.owners[:nbytes])
        return 0 if fits and not wrapped else None

    def take(self, offset: int, nbytes: int, name: int) -> None:
        assert self.owners[offset : offset + nbytes] == [None] * nbytes, "they overlap"
        self.owners[offset : offset + nbytes] = [name] * nbytes
        self.order.append((offset, nbytes))

    def free(self, index: int) -> None:
        offset, nbytes = self.order.pop(index)
        self.owners[offset : offset + nbytes] = [None] * nbytes


@given(st.lists(st.one_of(st.integers(1, SIZE + 2), st.sampled_from(["free", "back"]))))
def test_as_a_naive_model(actions: list[int | str]) -> None:
    stretches, naive = Stretches(SIZE), Naive()
    for name, action in enumerate(actions):
        if isinstance(action, int):
            expected = naive.where(action)
            assert stretches.take(action) == expected
            if expected is not None:
                naive.take(expected, action, name)
        elif naive.order and action == "free":
            stretches.free()
            naive.free(0)
        elif naive.order:
            stretches.take_back()
            naive.free(-1)
        assert len(stretches) == len(naive.order)


@given(st.lists(st.integers(1, SIZE), min_size=1))
def test_one_at_a_time_always_fits(sizes: list[int]) -> None:
    stretches = Stretches(SIZE)
    for nbytes in sizes:
        assert stretches.take(nbytes) == 0
        stretches.free()


def test_a_ring_goes_round() -> None:
    stretches = Stretches(10)
    assert [stretches.take(4), stretches.take(4), stretches.take(4)] == [0, 4, None]
    stretches.free()
    assert [stretches.take(4), stretches.take(1)] == [0, None]
    stretches.free()
    assert [stretches.take(4), stretches.take(2), stretches.take(1)] == [4, 8, None]


def test_memory_is_rounded_to_pages_and_holds_two_records_at_least() -> None:
    ring = Ring(7, 5000, 1)
    assert ring.facts == (2, 2 * mmap.PAGESIZE)
    assert len(ring.arena) == ring.stretches.nbytes == 4 * mmap.PAGESIZE
    ring.arena.view(4 * mmap.PAGESIZE - 1, 1)[0] = 1
    ring.close()


def test_where_memory_is_short_a_smaller_one_is_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "available_bytes", lambda: 5 * mmap.PAGESIZE)
    ring = Ring(1, mmap.PAGESIZE, 100 * mmap.PAGESIZE)
    assert ring.facts == (5, mmap.PAGESIZE)
    other = Arena(ring.arena.fd, *ring.facts)
    ring.arena.view(3, 1)[0] = 9
    assert other.view(3, 1)[0] == 9
    other._view.release()
    ring.close()
    monkeypatch.setattr(arena, "available_bytes", lambda: mmap.PAGESIZE)
    with pytest.raises(StoreFailed, match="not enough memory"):
        Ring(1, mmap.PAGESIZE, 100 * mmap.PAGESIZE)
