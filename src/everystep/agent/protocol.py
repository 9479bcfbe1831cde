"""The messages between trainer and agent, each a struct that is tagged with its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from everystep.store.measured import Measure
from everystep.store.retention import Retention
from everystep.store.run import StepEntry
from everystep.types import Json, Piece, StepRef, TensorSpec

_Index = Annotated[int, Meta(ge=0, le=1 << 31)]


class Hello(Struct, tag=True):
    """Trainer: I am the owner of this rank's agent, or (`owner=False`) somebody who reads."""

    pid: int
    owner: bool


class Ready(Struct, tag=True):
    """Agent: here I am. Sent for every `Hello`; `problem` says why the owner is refused."""

    pid: int
    problem: str | None = None


class PeerPlan(Struct, kw_only=True):
    """How the agents of a session hold copies of each other's states."""

    hosts: list[str]
    """The host of each rank."""
    copies: int
    bytes_per_s: float | None
    """The most that this agent sends."""
    address: str
    """The IP address on which it listens."""


class ShadowPlan(Struct, kw_only=True):
    """Where shadows listen."""

    places: list[tuple[str, int]]
    """Of rank r it is number r modulo their count."""
    token_file: str
    """The path of the file with the secret by which all know each other."""
    tap: Literal["wire", "software"]
    """Whether the shadow reads gradients off the network, or records hold them."""
    hosts: list[str] = []
    """The IP address of each rank in its process group, where each has its own."""


class Begin(Struct, tag=True, kw_only=True):
    """Trainer: a session begins; from now on steps of it come."""

    run: str
    session: int
    timeline: str
    rank: int
    world_size: int
    policy: Literal["block", "skip"]
    staging_bytes: int | None
    buffer_bytes: int | None = None
    """The most memory for records of the log that wait."""
    replica: bool = False
    """Fold the records as they come (`Rebase`, `Persist`, `Folded`); one slot is enough."""
    logs: bool = False
    """Append the records to the log."""
    compacts: bool = False
    """With `replica` and `logs`: fold what is in the log, and write full checkpoints of it."""
    again: bool = False
    """An agent before this one is gone, with whatever it was told and had not stored."""
    classes: dict[str, tuple[str, str]] = {}
    """Optimizers that are not torch's, for a replica: (module, name in it) by full name."""
    paths: list[str] = []
    """Where their modules may be found."""
    peers: PeerPlan | None = None
    """Whose copies to hold, for a replica; None: nobody's, and no port is opened."""
    shadow: ShadowPlan | None = None
    """Hand states and records on to this one, and fold nothing here."""
    linger_s: float
    retention: Retention
    known: list[StepEntry]
    pinned: list[StepRef]
    versions: dict[str, str]
    identity: list[tuple[str, bytes]]
    """Files to write again should the directory lose them: name and bytes."""


class Began(Struct, tag=True):
    """Agent: the session has begun. What was told of steps before this is of an earlier one."""

    session: int


class Describe(Struct, tag=True, kw_only=True):
    """Trainer: what every step will hold from now on, apart from `Seal.rest` and `Still`."""

    layout: int
    """The number of this description; a seal says which one it follows."""
    specs: list[TensorSpec]
    pieces: list[Piece]
    rest_bytes: int
    """How much room to leave for `Seal.rest`."""
    arena: tuple[int, int] | None = None
    """(slots, bytes of one): a descriptor of staging memory comes along, which an agent that has
    died has left."""
    taken: list[int] = []
    """Slots of it that the trainer is filling, or whose seals follow."""


class Places(Struct, tag=True):
    """Agent: where in a slot each piece is to lie, in the order of `Describe.pieces`, and, if
    `arena` is set, new staging memory, whose descriptor comes along."""

    layout: int
    offsets: list[int]
    rest_offset: int
    """From there to the end of the slot is room for `Seal.rest`."""
    arena: tuple[int, int] | None = None
    problem: str | None = None
    """Why there is no place, and what to do about it."""
    hint: str | None = None


class Grant(Struct, tag=True):
    """Agent: this slot may be filled next."""

    slot: int


class Release(Struct, tag=True):
    """Trainer: this slot was granted and was not filled."""

    slot: int


class Still(Struct, tag=True, kw_only=True):
    """Tensors that do not change, as a file that a step has stored."""

    step: StepRef
    session: int
    specs: list[TensorSpec]
    pieces: list[Piece]
    hashes: list[str]
    """Of the pieces."""
    whole: dict[str, str]
    """Of whole tensors by key, where the file holds less of them."""


class Seal(Struct, tag=True, kw_only=True):
    """Trainer: this slot holds all of a step now."""

    slot: _Index
    layout: int
    step: int
    created: str
    hashes: dict[int, str]
    """Of pieces (by their number in `Describe.pieces`) that the trainer has hashed already."""
    whole: dict[str, str]
    """Of whole replicated tensors by key."""
    rest: list[TensorSpec]
    """Whole tensors whose form may change with every step. Their bytes lie one after the other
    from `Places.rest_offset` on."""
    still: bool
    """Whether the tensors of the last `Still` belong to it."""
    tree: bytes
    """JSON."""
    metrics: dict[str, Json]
    every: int = 1
    """The trainer was taking a checkpoint at every so many steps."""
    owed: bool = False
    """The log goes on from this one only: it must become durable."""


class Measured(Struct, tag=True):
    """Trainer: what a step cost, but for what the agent knows."""

    measure: Measure


class Stored(Struct, tag=True, kw_only=True):
    """Agent: a step is durable."""

    step: int
    written_bytes: int
    took_s: float
    at_s: float
    """When, on the host's monotonic clock."""


class NotStored(Struct, tag=True, kw_only=True):
    """Agent: a step could not be stored (`error`), or a later one took its place."""

    step: int
    error: tuple[str, str, str | None] | None
    """Class, headline and hint of an `EverystepError`."""


class Notice(Struct, tag=True):
    """Agent: something to tell the user, by way of the trainer's log."""

    level: int
    text: str


class Diverged(Struct, tag=True):
    """Agent: ranks hold different bits of what they must hold alike."""

    step: StepRef


class OpenLog(Struct, tag=True, kw_only=True):
    """Trainer: the records that follow are of steps after `base`, and of this layout."""

    base: int
    layout: bytes
    stale: bool = False
    """The agent that had the state after `base` is gone, and the state with it."""


class OpenRing(Struct, tag=True):
    """Trainer: shared memory in which records will lie; its descriptor comes along."""

    ring: int
    arena: tuple[int, int]
    """Its bytes are the product."""


class Record(Struct, tag=True, kw_only=True):
    """Trainer: a record is there, to be appended to the log."""

    number: int
    """Counts up by one from record to record of a session."""
    step: int
    ring: int
    offset: Annotated[int, Meta(ge=0)]
    nbytes: Annotated[int, Meta(ge=0)]
    safe: int = 0
    """Every rank has handed over its record of this step: none need go back before it."""


class Batch(Struct, tag=True):
    """Trainer: append so many records at once."""

    records: int


class Flush(Struct, tag=True):
    """Trainer: append what is there now: room is needed."""


class Logged(Struct, tag=True, kw_only=True):
    """Agent: the records up to and with this number are durable."""

    number: int
    step: int
    """Of that record."""
    written_bytes: int
    took_s: float
    at_s: float
    """When, on the host's monotonic clock."""


class NotLogged(Struct, tag=True, kw_only=True):
    """Agent: records from this step on could not be appended; it tries again."""

    step: int
    error: tuple[str, str, str | None]
    """Class, headline and hint of an `EverystepError`."""


class Persist(Struct, tag=True):
    """Trainer: write the replica after every so many steps, and let a segment of the log end there;
    0: do not, from here on."""

    steps: int


class Rebase(Struct, tag=True):
    """Trainer: this step comes whole, and the replica begins anew from it: give the slot back."""

    step: int


class Mirrored(Struct, tag=True, kw_only=True):
    """Agent: the replica has begun from this step."""

    step: int
    took_s: float


class Folded(Struct, tag=True, kw_only=True):
    """Agent: the records up to and with this number are folded, or of no use."""

    number: int
    step: int
    """Of that record."""
    took_s: float
    at_s: float
    """When, on the host's monotonic clock."""


class NotFolded(Struct, tag=True, kw_only=True):
    """Agent: there is no replica any more: this step could not be folded, or not as it was."""

    step: int
    reason: str
    differs: bool = False
    """The records of this step do not give what training had: a restart could not use them."""


class StateWanted(Struct, tag=True, kw_only=True):
    """Agent: the shadow has no state that the next record could lead on from."""

    reason: str
    lasting: bool = False
    """Gradients are not what it reads off the network: that does not pass by itself."""


class InShadow(Struct, tag=True, kw_only=True):
    """Agent: the shadow has what takes this rank's state to this step."""

    step: int
    led: bool
    """By a record; else it was given the state."""


class Settle(Struct, tag=True):
    """Trainer: make everything durable that you hold, then answer."""


class Settled(Struct, tag=True):
    """Agent: done, or tried; these steps are in memory only."""

    unsaved: list[StepRef]


class ListFiles(Struct, tag=True):
    """Anybody: which files do you hold in memory?"""


class InMemory(Struct, tag=True):
    """One file that the agent holds: `data`, or a stretch of staging memory."""

    name: str
    nbytes: int
    offset: int
    data: bytes | None = None


class Files(Struct, tag=True):
    """Agent: these. A descriptor of staging memory comes along if `arena` is set."""

    files: list[InMemory]
    arena: tuple[int, int] | None = None


class Ping(Struct, tag=True):
    """Trainer: are you there?"""

    number: int


class Pong(Struct, tag=True):
    """Agent: yes."""

    number: int


class Bye(Struct, tag=True):
    """Trainer: nothing more will come; finish and end."""


Message = (
    Hello | Ready | Begin | Began | Describe | Places | Grant | Release | Still | Seal | Measured
    | Stored | NotStored | Notice | Diverged | OpenLog | OpenRing | Record | Batch | Flush | Logged
    | NotLogged | Persist | Rebase | Mirrored | Folded | NotFolded | StateWanted | InShadow | Settle
    | Settled | ListFiles | Files | Ping | Pong | Bye
)  # fmt: skip

OF_STEPS = (
    Grant | Stored | NotStored | Logged | NotLogged | Mirrored | Folded | NotFolded | StateWanted
    | InShadow | Diverged
)  # fmt: skip
"""Of a session's steps: those of an earlier session mean nothing to the next."""

TOLD = (
    Stored | NotStored | Logged | NotLogged | Mirrored | Folded | NotFolded | StateWanted | InShadow
    | Notice | Diverged
)  # fmt: skip
"""What a session is told."""


decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)
