"""The newest step that each rank's agent holds in memory, told to the agents of the other ranks
through small files when training has stopped: they make the same step durable.

Such a file is no part of any state, and is lost without harm.
"""

from __future__ import annotations

import contextlib
import re
import secrets

import msgspec
from msgspec import Struct

from everystep.errors import Damaged, Missing, StoreError
from everystep.store.backend import Backend, NewFile
from everystep.store.format import LAST_STEP

FOLDER = "agents"
"""Of these files, below the run."""

_NAME = re.compile(rf"{FOLDER}/s([0-9]{{6,9}})-r([0-9]{{5}})of([0-9]{{5}})\.json")
_ADDRESS = re.compile(rf"{FOLDER}/address-s([0-9]{{6,9}})-r([0-9]{{5}})\.json")
_TOKEN = re.compile(rf"{FOLDER}/token-s([0-9]{{6,9}})")
"""See `addresses`."""
_BALLOT = re.compile(rf"{FOLDER}/ballot-s([0-9]{{6,9}})-r([0-9]{{5}})of([0-9]{{5}})\.json")
"""See `ballots`."""
_MARK = re.compile(rf"{FOLDER}/shadow-[0-9a-f]{{32}}")
"""By which shadows of one run know that they share a directory."""
_MAX_BYTES = 1 << 10


class _Told(Struct):
    newest: int
    agreed: bool = False
    """It has read what all others have told."""


def is_ours(name: str) -> bool:
    """Whether a file of this name is one of those that agents leave for each other."""
    found = _NAME.fullmatch(name) or parse_address(name) or parse_token(name) or parse_ballot(name)
    return found is not None or is_mark(name)


def is_mark(name: str) -> bool:
    """Whether a file of this name is the mark of a shadow."""
    return _MARK.fullmatch(name) is not None


def new_mark() -> str:
    """The name of a mark that nobody has made."""
    return f"{FOLDER}/shadow-{secrets.token_hex(16)}"


def parse_ballot(name: str) -> tuple[int, int] | None:
    """The session and rank whose ballot is in this file; None: it is no such file."""
    match = _BALLOT.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def parse_address(name: str) -> tuple[int, int] | None:
    """The session and rank of the agent whose address is in this file; None: it is no such file."""
    match = _ADDRESS.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))


def parse_token(name: str) -> int | None:
    """The session whose secret is in this file; None: it is no such file."""
    match = _TOKEN.fullmatch(name)
    return None if match is None else int(match[1])


def _name(session: int, rank: int, world_size: int) -> str:
    return f"{FOLDER}/s{session:06d}-r{rank:05d}of{world_size:05d}.json"


class Newest:
    """What the ranks of one session tell each other, each time that training has stopped.

    Whoever has heard all others says so, and leaves what it has told until all have said so or have
    taken theirs back: nobody can miss it.

    Args:
        backend: of the run.
    """

    def __init__(self, backend: Backend, session: int, rank: int, world_size: int) -> None:
        self._backend = backend
        self._names = [_name(session, other, world_size) for other in range(world_size)]
        self._own = self._names[rank]
        self._session, self._rank = session, rank
        self._told: _Told | None = None
        self._heard: dict[str, int] = {}
        self._done: set[str] = set()

    def tell(self, newest: int) -> None:
        """This rank holds what takes it to this step; nothing is said where the store refuses.

        One that holds nothing (0) needs to hear nobody.
        """
        has_heard = self._told is not None and self._told.agreed
        self._put(_Told(newest, agreed=has_heard or not newest))

    @property
    def has_nothing(self) -> bool:
        """Whether this rank has told that it holds nothing."""
        return self._told is not None and self._told.newest == 0

    def stand_back(self) -> None:
        """This rank has every step that others may come to: it stores them itself."""
        self._put(_Told(LAST_STEP, agreed=True))

    def _put(self, told: _Told) -> None:
        if told == self._told:
            return
        data = msgspec.json.encode(told)
        with contextlib.suppress(StoreError):
            self._backend.put([NewFile(self._own, len(data), [data])])
            self._told = told

    def common(self) -> int | None:
        """The newest step that all ranks hold; None: some have not told yet."""
        for name in self._names:
            told = self._told if name == self._own else self._read(name)
            if told is not None:
                self._heard[name] = told.newest
            if name in self._heard and (told is None or told.agreed):
                self._done.add(name)
        if len(self._heard) < len(self._names):
            return None
        common = min(self._heard.values())
        if self._told is not None:
            self._put(_Told(self._told.newest, agreed=True))
        return common

    @property
    def all_agreed(self) -> bool:
        """Whether all other ranks have heard this one, as `common` has found."""
        return self._done >= {name for name in self._names if name != self._own}

    def _read(self, name: str) -> _Told | None:
        try:
            nbytes = self._backend.size(name)
            if nbytes > _MAX_BYTES:
                return None
            data = bytearray(nbytes)
            self._backend.read(name, memoryview(data), 0)
            return msgspec.json.decode(data, type=_Told)
        except (Missing, Damaged, StoreError, msgspec.MsgspecError):
            return None

    def withdraw(self) -> None:
        """What was told is not so any more."""
        self._heard.clear()
        self._done.clear()
        if self._told is not None:
            self._told = None
            with contextlib.suppress(StoreError):
                self._backend.delete(self._own)

    def forget_own(self) -> None:
        """Remove what this rank has told in this session, through another object."""
        with contextlib.suppress(StoreError):
            self._backend.delete(self._own)

    def forget_earlier(self) -> None:
        """Remove what this rank has told before, in this session or earlier ones."""
        with contextlib.suppress(StoreError):
            for entry in list(self._backend.list(FOLDER)):
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    continue
                session, rank = int(match[1]), int(match[2])
                if session <= self._session and rank == self._rank:
                    self._backend.delete(entry.name)
