"""What a shadow has stored, given away file by file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from everystep.agent import wire as w
from everystep.errors import EverystepError, NothingToRestore, StoreFailed
from everystep.recovery.plan import plan_restore
from everystep.store import format as fmt
from everystep.store.chains import Chain
from everystep.store.references import read_references
from everystep.store.run import Run, StepEntry
from everystep.types import StepRef

PIECE_BYTES = 1 << 20


class Offers:
    """What one caller has been offered, and may have.

    Args:
        path: of the shadow's run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nbytes: dict[str, int] = {}
        """Of each file."""

    def found(self, asked: w.ListSteps) -> w.StoredStep:
        """The step that a restore would take, and all files that it takes."""
        try:
            run = Run.open(self._path)
        except EverystepError:
            return w.StoredStep(run="", step=None, files=[])
        chain = restorable(run, asked.step, asked.timeline)
        if chain is None:
            return w.StoredStep(run=run.id, step=None, files=[])
        names = [*_identity(run), *_files_of(run, chain)]
        files = [(name, run.backend.size(name)) for name in names]
        self._nbytes |= files
        step = (chain.ref.timeline, chain.ref.step, session_of(chain))
        return w.StoredStep(run=run.id, step=step, files=files)

    def give(self, name: str, wire: w.Wire) -> None:
        """Send one file.

        Raises:
            StoreFailed: it was not offered, or cannot be read.
            OSError: the other end is gone.
        """
        nbytes = self._nbytes.get(name)
        if nbytes is None:
            raise StoreFailed("a file that was not offered", path=name)
        backend = Run.open(self._path).backend
        wire.send(w.File(nbytes))
        for at in range(0, nbytes, PIECE_BYTES):
            piece = memoryview(bytearray(min(PIECE_BYTES, nbytes - at)))
            backend.read(name, piece, at)
            wire.send_bytes(piece)


def restorable(run: Run, step: int | None = None, timeline: str | None = None) -> Chain | None:
    """How a step is had, without a look at what is in the files; None: it is not there.

    Args:
        step: None: the newest.
        timeline: of the step; None: the one that goes on.
    """
    listing = run.listing()
    asked = step if step is None or timeline is None else StepRef(timeline, step)
    try:
        return plan_restore(listing, run.segments(listing), asked).chain
    except NothingToRestore:
        return None


def session_of(chain: Chain) -> int:
    """The one that wrote the step."""
    return chain.links[-1].session if chain.links else chain.full.session


def _identity(run: Run) -> Iterator[str]:
    return filter(fmt.is_identity, [entry.name for entry in run.backend.list("")])


def _files_of(run: Run, chain: Chain) -> list[str]:
    """Those that records refer to, then data, then records; then the log."""
    names: set[str] = set()
    entry: StepEntry = chain.full
    for part in entry.parts:
        for ref, file in read_references(run, entry, part.rank):
            names.add(f"{fmt.step_directory(ref)}/{file}")
    own = [name for part in entry.parts for name in run.part_files(entry.ref, part.stem)]
    segments = {place.name for link in chain.links for place in link.places}
    return [
        *sorted(names),
        *sorted(own, key=lambda name: (name.endswith(".json"), name)),
        *sorted(segments),
    ]
