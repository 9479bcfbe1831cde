"""The trainer's part in shadows at a restart: has them write what they hold, and gets that."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.shadow_link import connected, in_words
from everystep.agent.shadow_store import PIECE_BYTES, restorable, session_of
from everystep.errors import Missing, NotARun, StoreFailed
from everystep.store import format as fmt
from everystep.store.addresses import read_secret
from everystep.store.backend import Backend, NewFile
from everystep.store.logformat import parse_log_path
from everystep.store.run import Run
from everystep.types import StepRef

_log = logging.getLogger("everystep")

WRITES_S = 600.0
"""For so long a restart waits for each shadow to write what it holds."""

_LOOK_S = 0.05


def fetch(backend: Backend, plan: p.ShadowPlan, step: int | StepRef | None = None) -> None:
    """Have the newest step of the shadows in the trainer's store, if it is newer than what is
    there. Call it on one rank, when all have stopped training, and before the run is opened: a
    directory that is empty becomes the shadows' run. Where there is no shadow, that is said.

    Args:
        step: have this one, too, if it is not there.

    Raises:
        StoreError: the store refuses.
        StoreFailed: the shadows hold another run.
    """
    token = read_secret(Path(plan.token_file))
    with contextlib.ExitStack() as stack:
        wires: list[tuple[str, w.Wire]] = []
        for place in plan.places:
            with _said(in_words(place)):
                wire = connected(place, token)
                stack.callback(wire.close)
                wire.send(w.Rescue())  # all at once: they wait for each other
                wires.append((in_words(place), wire))
        for name, wire in _settled(wires):  # they have one directory: any gives all
            with _said(name):
                _get(wire, backend, w.ListSteps())
                if isinstance(step, StepRef):
                    _get(wire, backend, w.ListSteps(step.step, step.timeline))
                elif step is not None:
                    _get(wire, backend, w.ListSteps(step))
                return


@contextlib.contextmanager
def _said(name: str) -> Iterator[None]:
    """What ends the talk with a shadow is said."""
    try:
        yield
    except (OSError, EOFError) as error:
        _log.error("%s gives nothing: %r", name, error)


def _settled(wires: list[tuple[str, w.Wire]]) -> list[tuple[str, w.Wire]]:
    """Those that have written what they hold; the last one first, which has just been heard."""
    found: list[tuple[str, w.Wire]] = []
    ends_s = time.monotonic() + WRITES_S
    while wires:
        for name, wire in list(wires):
            with _said(name):
                if wire.has_come(_LOOK_S):
                    wires.remove((name, wire))
                    _expect(wire, w.Rescued)
                    found.insert(0, (name, wire))
                elif time.monotonic() > ends_s:
                    wires.remove((name, wire))
                    raise EOFError("it has not written what it holds")
    return found


def _get(wire: w.Wire, backend: Backend, asked: w.ListSteps) -> None:
    wire.send(asked)
    found = _expect(wire, w.StoredStep)
    if found.step is None or not _is_wanted(backend, asked, found):
        return
    timeline, step, _ = found.step
    started_s = time.monotonic()
    total = 0
    for name, nbytes in found.files:
        if not _is_of_a_run(name):
            raise EOFError(f"{name!r} is no file of a run")
        if _has(backend, name, nbytes):
            continue
        wire.send(w.GiveFile(name))
        if _expect(wire, w.File).nbytes != nbytes:
            raise EOFError(f"{name} has changed meanwhile")
        backend.put([NewFile(name, nbytes, _pieces(wire, nbytes))])
        total += nbytes
    _log.warning(
        "step %s of %s was had from the shadow: %s bytes in %.2f s",
        step, timeline, f"{total:,}", time.monotonic() - started_s,
    )  # fmt: skip


def _is_wanted(backend: Backend, asked: w.ListSteps, found: w.StoredStep) -> bool:
    """Whether the step is newer than all that are there; one that was asked for: whether it is not
    there.

    Raises:
        StoreFailed: it is of another run.
    """
    try:
        run = Run.open(backend.abilities.location)
    except NotARun:
        return True
    if run.id != found.run:
        raise StoreFailed(
            "the shadow holds another run than the one that is to be restored",
            expected=run.id,
            found=found.run,
            hint="start the shadow with an empty directory, or give the run's own",
        )
    chain = restorable(run, asked.step, asked.timeline)
    if chain is None or found.step is None or asked.step is not None:
        return chain is None
    return (found.step[2], found.step[1]) > (session_of(chain), chain.ref.step)


def _is_of_a_run(name: str) -> bool:
    kinds = (fmt.parse_step_path, parse_log_path)
    return fmt.is_identity(name) or any(kind(name) is not None for kind in kinds)


def _has(backend: Backend, name: str, nbytes: int) -> bool:
    with contextlib.suppress(Missing):
        return backend.size(name) == nbytes
    return False


def _pieces(wire: w.Wire, nbytes: int) -> Iterator[memoryview]:
    for at in range(0, nbytes, PIECE_BYTES):
        piece = memoryview(bytearray(min(PIECE_BYTES, nbytes - at)))
        wire.receive_into(piece)
        yield piece


def _expect(wire: w.Wire, kind: type[Any]) -> Any:
    """The next message but for signs of life."""
    message = wire.receive()
    while isinstance(message, w.Alive):
        message = wire.receive()
    if not isinstance(message, kind):
        raise EOFError(f"{type(message).__name__} came out of turn")
    return message
