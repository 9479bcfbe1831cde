"""What each rank has measured of itself, told to the others through small files, and since when all
of them know it: how ranks come to one decision with none of them waiting.

Such a file is no part of any state, and is lost without harm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from everystep.errors import StoreError
from everystep.store.backend import Backend, NewFile
from everystep.store.newest import FOLDER, parse_ballot
from everystep.types import Json

_MAX_BYTES = 64 << 10


class Ballot(Struct, frozen=True, kw_only=True):
    """What one rank tells."""

    round: int
    """Of which decision it is, counted from 1."""
    host: str
    facts: dict[str, Json]
    """As it has measured them."""
    available_bytes: int | None = None
    """Of the host's memory, for all its ranks; None: it is not known."""
    held_bytes: int = 0
    """What its agent holds of it."""
    heard: int
    """The newest round of which it has read the ballots of all ranks."""
    step: int
    """The newest that it had done by then."""


class Ballots:
    """The ballots of one session.

    A rank begins a round only when all have heard the one before: no ballot is replaced that
    somebody still has to read.

    Args:
        backend: of the run.
    """

    def __init__(self, backend: Backend, session: int, rank: int, world_size: int) -> None:
        self._backend, self._session, self._rank = backend, session, rank
        self._names = [_name(session, other, world_size) for other in range(world_size)]
        self._read: dict[int, Ballot] = {}

    def cast(self, ballot: Ballot) -> None:
        """Tell the others.

        Raises:
            StoreError: the store refuses.
        """
        data = msgspec.json.encode(ballot)
        self._backend.put([NewFile(self._names[self._rank], len(data), [data])])
        self._read[self._rank] = ballot

    def begun(self, number: int) -> Sequence[Ballot] | None:
        """The ballots of a round, by rank; None: some ranks have not cast theirs yet."""
        return self._all(lambda ballot: ballot.round >= number)

    def heard(self, number: int) -> Sequence[Ballot] | None:
        """The same, once all ranks have read all of them."""
        return self._all(lambda ballot: ballot.heard >= number)

    def _all(self, fits: Callable[[Ballot], bool]) -> Sequence[Ballot] | None:
        for rank, name in enumerate(self._names):
            known = self._read.get(rank)
            if known is None or not fits(known):
                known = self._look(name)
                if known is None or not fits(known):
                    return None
                self._read[rank] = known
        return [self._read[rank] for rank in range(len(self._names))]

    def _look(self, name: str) -> Ballot | None:
        with contextlib.suppress(StoreError, msgspec.MsgspecError):
            nbytes = self._backend.size(name)
            if nbytes <= _MAX_BYTES:
                data = bytearray(nbytes)
                self._backend.read(name, memoryview(data), 0)
                return msgspec.json.decode(data, type=Ballot)
        return None

    def forget(self) -> None:
        """Remove what this rank has told, in this session or earlier ones."""
        with contextlib.suppress(StoreError):
            for entry in list(self._backend.list(FOLDER)):
                place = parse_ballot(entry.name)
                if place is not None and place[0] <= self._session and place[1] == self._rank:
                    self._backend.delete(entry.name)


def _name(session: int, rank: int, world_size: int) -> str:
    return f"{FOLDER}/ballot-s{session:06d}-r{rank:05d}of{world_size:05d}.json"
