"""What the tests of the replica share: agents in threads of this process, and a mirror of plain
bytes, whose state after a step is known."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.scenes import DEADLINE_S, Trainer, state
from byte_runs import TREE, NoSync
from everystep.agent import client, mirror, process
from everystep.agent import protocol as p
from everystep.agent.client import Agent
from everystep.agent.image import Image, SlotLayout
from everystep.agent.process import Options, Process, is_there
from everystep.agent.replica import Replica
from everystep.agent.server import Server
from everystep.errors import CannotRestore, Damaged
from everystep.planning.partition import pieces_of
from everystep.store.durable import SystemCalls
from everystep.store.run import Run
from faults import installed
from waiting import until


class Agents:
    """Agents in threads, which are started where a trainer would start a process."""

    def __init__(self, calls: SystemCalls) -> None:
        self._calls = calls
        self.servers: list[Server] = []
        self._threads: list[threading.Thread] = []

    def started(self, path: Path, run: str, rank: int) -> tuple[Process, Any]:
        """In the place of `process.started`."""
        self.join()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with installed(self._calls):
            options = Options(path=str(path), run=run, rank=rank, fd=theirs.detach())
            self.servers.append(Server(options))
        thread = threading.Thread(target=self.servers[-1].serve, daemon=True)
        thread.start()
        self._threads.append(thread)
        until(lambda: is_there(run, rank), DEADLINE_S, "the agent to listen")
        ours.close()
        found = process.adopted(path, run, rank)
        assert found is not None
        return found

    def join(self) -> None:
        """Wait for those that are about to end."""
        for server, thread in zip(self.servers, self._threads, strict=True):
            if server._told_bye:
                thread.join(DEADLINE_S)

    def end(self, process: Process, wait_s: float) -> None:
        """In the place of `Process.end`, which would kill this process."""
        assert process.pid == os.getpid()
        self.join()
        process.forget()

    def close(self) -> None:
        for server in self.servers:
            server.hurry()
        for thread in self._threads:
            thread.join(2 * DEADLINE_S)
            assert not thread.is_alive()


@contextlib.contextmanager
def agents_in_threads(calls: SystemCalls | None = None) -> Iterator[Agents]:
    """Trainers of this process have agents in threads of it, with these system calls."""
    agents = Agents(NoSync() if calls is None else calls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "started", agents.started)
        patch.setattr(Process, "end", lambda self, wait_s: agents.end(self, wait_s))
        try:
            yield agents
        finally:
            agents.close()


class ByteMirror:
    """In the place of `Mirror`: a record says which step it is of, and of which layout."""

    gate = threading.Event()
    """Clear: folding stands still."""
    begins = threading.Event()
    folded: list[int] = []  # noqa: RUF012 - cleared for every test
    unfit: str | None = None
    nbytes = 40_000
    """Of the large parameter."""

    def __init__(self, image: Image, classes: object, paths: object) -> None:
        if self.unfit is not None:
            raise CannotRestore(self.unfit)
        self._image, self.step = image, image.ref.step
        assert contents(image) == {one.key: one.data for one in state(self.step, self.nbytes)}

    def fold(self, payload: memoryview, layout: bytes) -> None:
        text = bytes(payload).rstrip(b".").decode()
        step, its_layout, what = text.split(" ")
        assert its_layout.encode() == layout
        assert int(step) == self.step + 1
        self.begins.set()
        self.gate.wait(60)
        if what == "wrong":
            raise Damaged("model.weight is not what it was", step=int(step))
        self.step += 1
        tensors = {one.key: one.data for one in state(self.step, self.nbytes)}
        for key, view in self._image.memory().items():
            view[:] = tensors[key]
        self.folded.append(self.step)

    def image(self) -> Image:
        tree = msgspec.json.encode(TREE)
        self._image = self._image.resealed(self.step, [], b"", tree, {"at": self.step})
        return self._image


def image_of(begin: p.Begin, step: int) -> Image:
    """A staged step of plain bytes."""
    tensors = state(step)
    specs = [one.spec for one in tensors]
    layout = SlotLayout(1, specs, pieces_of(specs, 0, 1), 4096)
    slot = memoryview(bytearray(layout.slot_bytes + 4096))  # an arena may be larger
    layout.write_headers(slot)
    seal = p.Seal(
        slot=0, layout=1, step=step, created="", hashes={}, whole={}, rest=[], still=False,
        tree=msgspec.json.encode(TREE), metrics={"at": step},
    )  # fmt: skip
    image = Image(begin, layout, seal, None, slot)
    data = {one.key: one.data for one in tensors}
    for key, view in image.memory().items():
        view[:] = data[key]
    return image


def contents(image: Image) -> dict[str, bytes]:
    return {key: bytes(view) for key, view in image.memory().items()}


@contextlib.contextmanager
def byte_mirrors() -> Iterator[type[ByteMirror]]:
    """Replicas fold plain bytes."""
    ByteMirror.gate.set()
    ByteMirror.begins.clear()
    ByteMirror.folded.clear()
    ByteMirror.unfit, ByteMirror.nbytes = None, 40_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror, "Mirror", ByteMirror)
        try:
            yield ByteMirror
        finally:
            ByteMirror.gate.set()


class Mirrored(Trainer):
    """A trainer that stages some steps, and hands over records of the others."""

    def __init__(self, path: Path, run: Run, rank: int = 0, **changes: Any) -> None:
        self.layout = b"A"
        self.rank = rank
        facts: dict[str, Any] = {"replica": True, "rank": rank}
        super().__init__(Agent(path, run.id, rank), run, **facts | changes)
        self.log = self.agent.log

    def open(self, base: int, layout: bytes = b"A") -> None:
        self.layout = layout
        self.log.open_log(base, layout)

    def record(
        self, *steps: int, what: str = "right", nbytes: int = 0, safe: int | None = None
    ) -> None:
        for step in steps:
            data = f"{step} {self.layout.decode()} {what}".encode().ljust(nbytes, b".")
            view = self.log.reserve(len(data), DEADLINE_S)
            assert view is not None
            view[:] = data
            view.release()
            self.log.publish(step, safe)

    def die(self) -> None:
        """Without a word."""
        agent = self.agent
        with agent._changed:
            agent._closing = True
            agent._changed.notify_all()
        agent._thread.join()
        agent._process.forget()
        agent._channel.close()
        agent._drop_arena()
        self.log.close()

    def folds(self) -> list[int]:
        """The steps whose records are not needed any more."""
        return [m.step for m in list(self.heard) if isinstance(m, p.Folded)]

    def until_folded(self, step: int) -> None:
        until(lambda: step in self.folds(), DEADLINE_S, f"step {step} to be folded")


def replica_of(agents: Agents, number: int = -1) -> Replica:
    records = agents.servers[number]._records
    assert records is not None
    assert records.replica is not None
    return records.replica
