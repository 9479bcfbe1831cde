"""What the agents of two hosts, a trainer and a shadow, and two shadows say to each other."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from everystep.agent import protocol as p

NONCE_BYTES = 32
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class Challenge(Struct, tag=True):
    """Listener: show that you know the secret, by this number."""

    nonce: _Nonce


class Answer(Struct, tag=True):
    """Caller: so. And so do you, by this one."""

    nonce: _Nonce
    proof: bytes


class Welcome(Struct, tag=True):
    """Listener: so."""

    proof: bytes


class Keep(Struct, tag=True):
    """Owner: keep copies of my state."""

    begin: p.Begin


class Base(Struct, tag=True, kw_only=True):
    """Owner: this is the state, `nbytes` of it; what went before is of no use any more."""

    describe: p.Describe
    seal: p.Seal
    nbytes: _Count


class Next(Struct, tag=True, kw_only=True):
    """Owner: this is the record of the next step, `nbytes` of it."""

    record: p.Record
    nbytes: _Count


class Ended(Struct, tag=True):
    """Owner: all is durable; forget me."""


class Kept(Struct, tag=True):
    """Holder: I have what takes the state to this step."""

    step: int


class NotKept(Struct, tag=True):
    """Holder: I have no copy."""

    reason: str
    lasting: bool = False
    """Another one would come to the same end: gradients are not what is read off the network."""


class Share(Struct, tag=True):
    """Agent of a rank, to that of rank 0: my holders have what takes my state to this step."""

    rank: Annotated[int, Meta(ge=0, le=99_999)]
    step: int


class Shared(Struct, tag=True):
    """Agent of rank 0: and all ranks' to this one."""

    step: int


class Standing(Struct, tag=True, kw_only=True):
    """Shadow, to the first one of its run: so are the copies that I hold."""

    session: int
    number: Annotated[int, Meta(ge=0, le=99_999)]
    """Which shadow of the run it is."""
    mark: str
    """The newest of yours that I have found; before, nothing else of this holds."""
    begun: _Count
    """So many states have come."""
    copies: _Count
    """So many ranks have one."""
    least: int
    most: int
    """The steps to which these go."""
    over: bool
    """The agents of all of them are gone."""


class Agreed(Struct, tag=True, kw_only=True):
    """First shadow: and so are all."""

    mark: str
    """A file of this name is in my directory, so in yours; empty: I know of no such session."""
    complete: bool
    """All shadows are there."""
    write_at: int
    """Each state is to be written at this step, too."""
    least: int
    over: bool


class Rescue(Struct, tag=True):
    """Trainer: all ranks have stopped. Write the parts of those whose agents are gone."""


class Rescued(Struct, tag=True):
    """Holder: done. Of these ranks a copy was there, and no agent any more."""

    ranks: list[int]


class ListSteps(Struct, tag=True):
    """Trainer: in which files do you have the newest step, or this one?"""

    step: _Count | None = None
    timeline: str | None = None
    """Of the step; None: the one that goes on."""


class StoredStep(Struct, tag=True, kw_only=True):
    """Shadow: this one. None: there is none."""

    run: str
    step: tuple[str, int, int] | None
    """Its timeline and number, and the session that wrote it."""
    files: list[tuple[str, _Count]]
    """Names and lengths of all that it takes: first of what it belongs to, last of what makes it
    valid."""


class GiveFile(Struct, tag=True):
    """Trainer: give me this one."""

    name: str


class File(Struct, tag=True):
    """Shadow: here it is, `nbytes` of it."""

    nbytes: _Count


class Alive(Struct, tag=True):
    """Either: I am here."""


Message = (
    Challenge | Answer | Welcome | Keep | Base | Next | p.OpenLog | Ended | Kept | NotKept
    | Share | Shared | Standing | Agreed | Rescue | Rescued | ListSteps | StoredStep | GiveFile
    | File | Alive
)  # fmt: skip

decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)
