"""What ranks tell each other before they decide: nobody misses a round, and nothing hurts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from everystep.store.backend import NewFile
from everystep.store.ballots import Ballot, Ballots
from everystep.store.local import LocalBackend
from everystep.store.newest import is_ours, parse_ballot

NAME = "agents/ballot-s000003-r00001of00002.json"


def ballot(number: int, heard: int = 0, **more: Any) -> Ballot:
    return Ballot(round=number, host="a", facts={"x": number}, heard=heard, step=0, **more)


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend.made(tmp_path / "run")


@pytest.fixture
def both(backend: LocalBackend) -> list[Ballots]:
    return [Ballots(backend, 3, rank, 2) for rank in (0, 1)]


def test_a_round_is_begun_when_all_have_told(both: list[Ballots]) -> None:
    first, second = both
    first.cast(ballot(1))
    assert first.begun(1) is second.begun(1) is None
    second.cast(ballot(1, available_bytes=5, held_bytes=2))
    for one in both:
        assert one.begun(1) == [ballot(1), ballot(1, available_bytes=5, held_bytes=2)]
        assert one.begun(2) is one.heard(1) is None


def test_a_round_has_been_heard_when_all_say_so(both: list[Ballots]) -> None:
    first, second = both
    for one in both:
        one.cast(ballot(1))
    assert first.begun(1) and second.begun(1)
    first.cast(ballot(1, heard=1))
    assert first.heard(1) is second.heard(1) is None
    second.cast(ballot(1, heard=1))
    second.cast(ballot(2, heard=1))  # it goes on at once: the first one has read what it needs
    found = first.heard(1)
    assert found is not None and [one.heard for one in found] == [1, 1]
    assert first.begun(2) is None, "the first one has not told its own"


def test_files_that_are_no_ballots(both: list[Ballots], backend: LocalBackend) -> None:
    both[0].cast(ballot(1))
    good = msgspec.json.encode(ballot(1))
    for data in (b"", good[:-1], b"{}", b'{"round":"1"}', b"[" * 100_000, good + b" " * (64 << 10)):
        backend.put([NewFile(NAME, len(data), [data])])
        assert both[0].begun(1) is None
    backend.put([NewFile(NAME, len(good), [good])])
    assert both[0].begun(1) == [ballot(1), ballot(1)]


def test_they_are_forgotten(both: list[Ballots], backend: LocalBackend) -> None:
    earlier, later = Ballots(backend, 2, 1, 2), Ballots(backend, 4, 1, 2)
    for one in (*both, earlier, later):
        one.cast(ballot(1))
    both[1].forget()
    left = sorted(entry.name for entry in backend.list("agents"))
    assert left == [
        "agents/ballot-s000003-r00000of00002.json", "agents/ballot-s000004-r00001of00002.json",
    ]  # fmt: skip


def test_their_names_are_known() -> None:
    assert parse_ballot(NAME) == (3, 1)
    assert is_ours(NAME)
    for other in ("agents/ballot-s3-r00001of00002.json", NAME + "x", NAME[7:]):
        assert parse_ballot(other) is None
        assert not is_ours(other)
