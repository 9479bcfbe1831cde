"""What the tests of the agent share: a trainer that stages plain bytes, and servers in threads."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from byte_runs import TREE, NoSync, Tensor, new_run, read_back, tensor
from everystep.agent import protocol as p
from everystep.agent.client import Agent
from everystep.agent.image import STILL_SECTION, still_file
from everystep.agent.process import Options, is_there
from everystep.agent.server import Server
from everystep.agent.sink import Place, Room, Sealed
from everystep.planning.partition import pieces_of
from everystep.store import format as fmt
from everystep.store.backend import NewFile
from everystep.store.durable import SystemCalls
from everystep.store.full import lay_out_file, streamed
from everystep.store.retention import Retention
from everystep.store.run import Run
from everystep.types import Piece, StepRef, item_bytes
from faults import installed
from waiting import until

DEADLINE_S = 60.0
"""For what takes milliseconds where the machine has nothing else to do."""


def run_at(path: Path) -> Run:
    """A run with its first session, written without waiting for the disk."""
    return new_run(path, calls=NoSync())


def begin_of(run: Run, **changes: Any) -> p.Begin:
    """A session of one rank that keeps all its steps."""
    facts: dict[str, Any] = {
        "run": run.id,
        "session": 1,
        "timeline": "main",
        "rank": 0,
        "world_size": 1,
        "policy": "block",
        "staging_bytes": None,
        "linger_s": 0.0,
        "retention": Retention(keep_last=None),
        "known": [],
        "pinned": [],
        "versions": {},
        "identity": run.identity(1),
    }
    return p.Begin(**facts | changes)


def state(step: int, nbytes: int = 40_000) -> list[Tensor]:
    """What a rank holds at a step: a large parameter, a small one, an empty one and a slot."""
    return [
        tensor("/models/model/weight", "uint8", nbytes, seed=step),
        tensor("/models/model/bias", "float32", 3, seed=step),
        tensor("/models/model/none", "float32", 0, 4),
        tensor("/optimizers/optimizer/state/exp", "float64", 5, seed=step),
    ]


def bytes_of(one: Tensor, piece: Piece) -> bytes:
    size = item_bytes(one.dtype) or 1
    return one.data[piece.start * size : piece.stop * size]


def whole_of(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> dict[str, str]:
    sizes = {t.key: t.spec.elements for t in tensors}
    stored = {piece.key for piece in pieces if piece.stop - piece.start == sizes[piece.key]}
    return {t.key: fmt.digest(t.data) for t in tensors if t.key not in stored}


def still_of(begin: p.Begin, tensors: Sequence[Tensor], step: int) -> p.Still:
    specs = [t.spec for t in tensors]
    pieces = pieces_of(specs, begin.rank, begin.world_size)
    by_key = {t.key: t for t in tensors}
    return p.Still(
        step=StepRef("main", step),
        session=begin.session,
        specs=specs,
        pieces=pieces,
        hashes=[fmt.digest(bytes_of(by_key[piece.key], piece)) for piece in pieces],
        whole=whole_of(tensors, pieces),
    )


def put_still(run: Run, begin: p.Begin, still: p.Still, tensors: Sequence[Tensor]) -> None:
    """What the trainer writes before the first step that refers to it."""
    layout = lay_out_file(STILL_SECTION, {s.key: s for s in still.specs}, still.pieces)
    content = streamed(layout, {t.key: t.source() for t in tensors})
    file = still_file(still, begin, still.step)
    name = f"{fmt.step_directory(still.step)}/{file.name}"
    run.backend.put([NewFile(name, file.nbytes, content.parts)])


class Trainer:
    """Stages steps as the engine does, and hears what becomes of them."""

    def __init__(self, agent: Agent, run: Run, **changes: Any) -> None:
        self.agent, self.run = agent, run
        self.heard: list[Any] = []
        self._place: Place | None = None
        agent.listen(self.heard.append)
        agent.begin(begin_of(run, **changes))

    def describe(self, tensors: Sequence[Tensor], rest_bytes: int = 4096) -> Place:
        self._pieces = pieces_of([t.spec for t in tensors], 0, 1)
        self._place = self.agent.describe([t.spec for t in tensors], self._pieces, rest_bytes)
        return self._place

    def acquire(self, wait_s: float = DEADLINE_S) -> Room:
        room = self.agent.acquire(wait_s)
        assert room is not None
        return room

    def fill(self, room: Room, tensors: Sequence[Tensor], rest: Sequence[Tensor] = ()) -> None:
        """Copy a state to a slot."""
        assert self._place is not None
        by_key = {t.key: t.data for t in tensors}
        for piece, offset in zip(self._pieces, self._place.offsets, strict=True):
            data = by_key[piece.key]
            room.view[offset : offset + len(data)] = data
        joined = b"".join(t.data for t in rest)
        first = self._place.rest_offset
        room.view[first : first + len(joined)] = joined

    def seal(
        self,
        room: Room,
        step: int,
        rest: Sequence[Tensor] = (),
        *,
        still: bool = False,
        tree: bytes | None = None,
        owed: bool = False,
    ) -> None:
        assert self._place is not None
        self.agent.seal(
            Sealed(
                slot=room.slot,
                layout=self._place.layout,
                step=step,
                hashes={},
                whole={},
                rest=[t.spec for t in rest],
                still=still,
                tree=msgspec.json.encode(TREE) if tree is None else tree,
                metrics={"at": step},
                owed=owed,
            )
        )

    def stage(
        self, step: int, tensors: Sequence[Tensor] | None = None, *, owed: bool = False
    ) -> None:
        """A whole step."""
        tensors = state(step) if tensors is None else tensors
        if self._place is None:
            self.describe(tensors)
        room = self.acquire()
        self.fill(room, tensors)
        self.seal(room, step, owed=owed)

    def told(self, kind: type, step: int) -> list[Any]:
        return [m for m in list(self.heard) if isinstance(m, kind) and m.step == step]

    def until_told(self, kind: type, step: int) -> Any:
        until(lambda: self.told(kind, step), DEADLINE_S, f"{kind.__name__} of step {step}")
        return self.told(kind, step)[-1]


def assert_stored(run: Run, step: int, tensors: Sequence[Tensor] | None = None) -> None:
    """A step is complete, and holds these bytes."""
    found = read_back(run, StepRef("main", step), 0)
    expected = state(step) if tensors is None else tensors
    assert found == {t.key: t.data for t in expected}


def stored_steps(run: Run) -> list[int]:
    return sorted(entry.ref.step for entry in run.listing().steps if entry.complete)


class Held(NoSync):
    """A store that stands still while it is held, in the middle of the record of a step."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._go.set()
        self.waits = threading.Event()

    def hold(self) -> None:
        self.waits.clear()
        self._go.clear()

    def go_on(self) -> None:
        self._go.set()

    def rename(self, source: Path, target: Path) -> None:
        if "/steps/" in str(target) and fmt.parse_marker(target.name) is not None:
            self.waits.set()
            self._go.wait(60)
        super().rename(source, target)


@contextlib.contextmanager
def served(run: Run, path: Path, calls: SystemCalls) -> Iterator[Agent]:
    """An agent whose server is a thread of this process, with these system calls."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with installed(calls):
        server = Server(Options(path=str(path), run=run.id, rank=0, fd=theirs.detach()))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    until(lambda: _is_listening(run), DEADLINE_S, "the server to listen")
    ours.close()
    agent = Agent(path, run.id, 0)
    assert agent.pid == os.getpid()
    agent._process.end = lambda wait_s: agent._process.forget()  # type: ignore[method-assign]
    try:
        yield agent
    finally:
        agent.close()
        server.hurry()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def _is_listening(run: Run) -> bool:
    return is_there(run.id, 0)


def agent_is_there(run: Run) -> bool:
    """Whether an agent of the run has its socket."""
    return _is_listening(run)
