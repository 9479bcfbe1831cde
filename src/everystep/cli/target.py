"""Which run and which step a command is about: arguments that all commands share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec import Struct

from everystep.errors import NothingToRestore
from everystep.recovery.plan import plan_restore
from everystep.store import logformat as lf
from everystep.store.chains import Chain
from everystep.store.format import SessionRecord
from everystep.store.run import Listing, Run, StepEntry
from everystep.types import StepRef

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")]
StepText = Annotated[
    str | None,
    typer.Option(
        "--step",
        metavar="STEP",
        help="900 (on the current timeline) or main:900. Default: the newest step.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

State = Literal["complete", "incomplete", "diverged", "superseded", "damaged"]

Stored = Literal["full", "delta", "both"]
"""What there is of a step: a full checkpoint, what changed since the step before, or both."""

STYLES: dict[State, str] = {
    "complete": "green",
    "incomplete": "yellow",
    "diverged": "red",
    "superseded": "dim",
    "damaged": "red",
}


class SessionRow(Struct, frozen=True, kw_only=True):
    """One start of training."""

    session: int
    timeline: str
    restored: str | None
    """The step it began from."""
    world_size: int
    created: str
    host: str
    pid: int
    versions: dict[str, str]


def session_row(session: SessionRecord) -> SessionRow:
    """A session as commands print it."""
    return SessionRow(
        session=session.session,
        timeline=session.timeline,
        restored=None if session.restored is None else str(session.restored),
        world_size=session.world_size,
        created=session.created,
        host=session.host,
        pid=session.pid,
        versions=session.versions,
    )


def path_text(path: Path) -> str:
    """A path as text that JSON can hold, whatever its bytes are."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def state_of(entry: StepEntry, had: bool) -> State:
    """What the names of a step's files say about it.

    Args:
        had: whether this writing is the one that a restore of the step would take.
    """
    if entry.diverged:
        return "diverged"
    if not entry.complete:
        return "incomplete"
    return "complete" if had else "superseded"


def chain_bytes(chain: Chain) -> int:
    """How many bytes there are to read for a step."""
    deltas = [place.found.nbytes for link in chain.links for place in link.places]
    return chain.full.nbytes + sum(deltas)


def place_bytes(nbytes: int) -> int:
    """How many bytes of the log a delta of so many bytes takes."""
    return lf.HEAD_BYTES + lf.padded(nbytes)


def parse_step(text: str) -> int | StepRef:
    """Read `900` or `main:900`.

    Raises:
        UsageError: it is neither.
    """
    return int(text) if text.isascii() and text.isdigit() else StepRef.parse(text)


def restorable(run: Run, text: str | None) -> Chain:
    """How a step can be had: as `Checkpointer.restore` would take it.

    Args:
        run: the run.
        text: `900` or `main:900`; None: the newest.

    Raises:
        NothingToRestore: it is not there, or not complete; names its neighbours.
    """
    listing = run.listing()
    step = None if text is None else parse_step(text)
    chain = plan_restore(listing, run.segments(listing), step).chain
    if chain is None:
        raise NothingToRestore("the run has no complete step yet")
    return chain


def writings(listing: Listing, text: str) -> list[StepEntry]:
    """Everything that is there of one step, complete or not, the newest last.

    Raises:
        NothingToRestore: nothing is.
    """
    wanted = parse_step(text)
    if isinstance(wanted, StepRef):
        refs = [wanted]
    else:
        current = listing.current_timeline()
        line = listing.line(current) if current in listing.timelines else []
        refs = [entry.ref for entry in line if entry.ref.step == wanted]
        refs = refs or [StepRef(current, wanted)]
    found = [entry for entry in listing.steps if entry.ref == refs[-1]]
    if not found:
        raise NothingToRestore(
            f"nothing is there of step {refs[-1]}", hint="everystep ls RUN shows what is there"
        )
    return found


def any_step(run: Run, listing: Listing, text: str | None) -> Chain | StepEntry:
    """A step to look at: as it can be had, else whatever full checkpoint is there of it.

    Raises:
        NothingToRestore: nothing is.
    """
    try:
        return restorable(run, text)
    except NothingToRestore:
        if text is None:
            raise
        with contextlib.suppress(NothingToRestore):
            return writings(listing, text)[-1]
        raise
