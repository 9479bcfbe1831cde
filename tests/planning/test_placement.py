"""Copies are on other hosts, as many as were asked for, and evenly spread."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everystep.planning.placement import placement

JOBS = st.tuples(
    st.lists(st.integers(0, 6).map("host{}".format), min_size=1, max_size=16), st.integers(2, 4)
)


@given(JOBS)
def test_any_hosts_but_one_of_those_with_a_copy_may_die(job: tuple[list[str], int]) -> None:
    hosts, copies = job
    held = placement(hosts, copies)
    there = set(hosts)
    least = min(copies, len(there))
    for dead in itertools.combinations(sorted(there), least - 1):
        for rank, holders in enumerate(held):
            with_state = {hosts[rank], *(hosts[holder] for holder in holders)}
            assert with_state - set(dead), (rank, dead)


@given(JOBS)
def test_a_copy_is_never_on_the_host_of_its_owner(job: tuple[list[str], int]) -> None:
    hosts, copies = job
    for rank, holders in enumerate(placement(hosts, copies)):
        where = [hosts[holder] for holder in holders]
        assert hosts[rank] not in where
        assert len(where) == len(set(where)) == min(copies, len(set(hosts))) - 1


@given(st.integers(1, 24), st.integers(1, 4), st.integers(2, 5))
def test_no_rank_holds_more_than_its_share(count: int, per_host: int, copies: int) -> None:
    hosts = [f"host{n}" for n in range(count) for _ in range(per_host)]
    found = Counter(holder for holders in placement(hosts, copies) for holder in holders)
    share = min(copies, count) - 1
    assert all(found[rank] == share for rank in range(len(hosts)))


def test_groups_and_the_ring_of_those_that_fill_none() -> None:
    assert placement(list("abcd"), 2) == [(1,), (0,), (3,), (2,)]
    assert placement(list("abcde"), 2) == [(1,), (0,), (3,), (4,), (2,)]
    assert placement(list("abc"), 2) == [(1,), (2,), (0,)]
    assert placement(list("ab"), 3) == [(1,), (0,)]
    assert placement(list("aabb"), 2) == [(2,), (3,), (0,), (1,)]
    assert placement(list("aab"), 2) == [(2,), (2,), (0,)]
    assert placement(["a", "a"], 2) == [(), ()]
