"""What an agent that takes another one's place is told of the steps in staging memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everystep.agent import protocol as p
from everystep.agent.arena import Arena
from everystep.agent.handover import Kept, handed_over
from everystep.types import StepRef


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.made(3, 4096)
    yield made
    made.close()


def described(number: int) -> p.Describe:
    return p.Describe(layout=number, specs=[], pieces=[], rest_bytes=0)


def still(step: int) -> p.Still:
    return p.Still(step=StepRef("main", step), session=1, specs=[], pieces=[], hashes=[], whole={})


def seal(slot: int, step: int) -> p.Seal:
    return p.Seal(
        slot=slot, layout=1, step=step, created="", hashes={}, whole={}, rest=[], still=False,
        tree=b"{}", metrics={},
    )  # fmt: skip


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert list(handed_over([], None, None, None, [])) == []


def test_what_a_seal_refers_to_comes_before_it_and_once(arena: Arena) -> None:
    d1, d2, s1, s2 = described(1), described(2), still(1), still(2)
    seals = [seal(0, 5), seal(2, 6), seal(1, 7)]
    kept = [Kept(seals[0], d1, s1), Kept(seals[1], d1, s1), Kept(seals[2], d2, s2)]
    told = list(handed_over(kept, s2, d2, arena, [0, 2, 1]))
    kinds = [type(message).__name__ for message, _ in told]
    assert kinds == ["Still", "Describe", "Seal", "Seal", "Still", "Describe", "Seal"]
    messages = [message for message, _ in told]
    assert [m for m in messages if isinstance(m, p.Seal)] == seals
    assert [m for m in messages if isinstance(m, p.Still)] == [s1, s2]
    assert [m.layout for m in messages if isinstance(m, p.Describe)] == [1, 2]


def test_the_memory_comes_with_the_first_description_and_what_is_taken_of_it(
    arena: Arena,
) -> None:
    kept = [Kept(seal(0, 5), described(1), None)]
    (first, fd), _, (second, none) = handed_over(kept, None, described(2), arena, [0, 2])
    assert isinstance(first, p.Describe)
    assert isinstance(second, p.Describe)
    assert (first.arena, first.taken, fd) == ((3, 4096), [0, 2], arena.fd)
    assert (second.arena, second.taken, none) == (None, [], None)


def test_the_newest_word_is_said_even_if_no_seal_refers_to_it(arena: Arena) -> None:
    told = [type(m).__name__ for m, _ in handed_over([], still(1), described(1), arena, [])]
    assert told == ["Still", "Describe"]
    told = [type(m).__name__ for m, _ in handed_over([], None, described(1), None, [])]
    assert told == ["Describe"]
