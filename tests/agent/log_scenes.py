"""What the tests of the log's way share: both ends of it in this process, without a socket."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from msgspec import Struct

from agent.scenes import DEADLINE_S, begin_of
from byte_logs import LAYOUT, payload
from byte_runs import NoSync, write_step
from everystep.agent import protocol as p
from everystep.agent.logger import Logger
from everystep.agent.records import Records
from everystep.agent.tail import Tail
from everystep.store.chains import Chains, plan_chains
from everystep.store.durable import SystemCalls
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from everystep.store.segments import read
from everystep.types import StepRef
from faults import Faults
from waiting import until


class Quick(Faults):
    """Faults without the waiting for the disk; can stand still before a write."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.waits = threading.Event()

    def write_parts_at(self, fd: int, parts: Any, offset: int) -> int:
        if not self.go.is_set():
            self.waits.set()
            self.go.wait(60)
        return super().write_parts_at(fd, parts, offset)

    def sync(self, fd: int) -> None:
        self._before("sync")

    def sync_directory(self, path: Path) -> None:
        self._before("sync_directory", path)


class Pair:
    """A trainer's `Tail` and an agent's `Logger`, one after the other, in the place of its process;
    steps of which step 1 has a full checkpoint."""

    def __init__(self, run: Run, calls: SystemCalls | None = None, **changes: Any) -> None:
        self.run, self.path = run, Path(run.backend.abilities.location)
        write_step(run, StepRef("main", 1))
        self.begin = begin_of(run, **{"logs": True} | changes)
        self.guard = threading.Condition()
        self.told: list[Any] = []
        self.sent: list[Struct] = []
        self.deaf = False
        """What the agent says does not reach the trainer."""
        self.alone = self._closed = False
        self.until_sent = 0
        self.tail = Tail(self.guard, self._send, self._sent, lambda: self.alone)
        with self.guard:
            self.tail.begin(self.begin.buffer_bytes)
        self.begin_anew(calls or NoSync())

    def begin_anew(self, calls: SystemCalls) -> None:
        """An agent that knows nothing yet."""
        backend = LocalBackend(self.path, calls)
        self.records = Records(backend, self.begin, self.guard, self._tell, lambda: None)
        with self.guard:
            self.records.take(p.Flush(), None)  # the first message makes the logger

    @property
    def logger(self) -> Logger:
        logger = self.records._logger
        assert logger is not None
        return logger

    @property
    def rings(self) -> int:
        """How many of the trainer's are mapped."""
        return len(self.records._rings._arenas)

    def _sent(self) -> None:
        assert not self.guard._is_owned()  # type: ignore[attr-defined]
        self.until_sent += 1

    def _send(self, message: Struct, fd: int | None) -> None:
        self.sent.append(message)
        self.records.take(message, None if fd is None else os.dup(fd))

    def _tell(self, message: Struct) -> None:
        with self.guard:
            self.told.append(message)
            if isinstance(message, p.Logged | p.NotLogged) and not self.deaf:
                self.tail.heard(message)
            self.guard.notify_all()

    def open(self, base: int = 1, batch: int = 1) -> Pair:
        self.tail.set_batch(batch)
        self.tail.open_log(base, LAYOUT)
        return self

    def log(self, *steps: int, nbytes: int | None = None, wait_s: float = DEADLINE_S) -> None:
        """Records of these steps."""
        for step in steps:
            data = payload(step, nbytes=nbytes)
            view = self.tail.reserve(len(data), wait_s)
            assert view is not None
            view[:] = data
            view.release()
            self.tail.publish(step)

    def told_of(self, kind: type) -> list[int]:
        return [m.step for m in list(self.told) if isinstance(m, kind)]

    def until_logged(self, step: int) -> None:
        until(lambda: step in self.told_of(p.Logged), DEADLINE_S, f"step {step} to be durable")

    def until_refused(self, times: int = 1) -> None:
        before = len(self.told_of(p.NotLogged))
        more = lambda: len(self.told_of(p.NotLogged)) >= before + times  # noqa: E731
        until(more, DEADLINE_S, "a refusal")

    def kill(self, calls: SystemCalls | None = None) -> None:
        """The agent dies, and another one is told all that it must know."""
        self.end(self.logger)
        self.begin_anew(calls or NoSync())
        self.deaf = False
        with self.guard:
            for message, fd in self.tail.handed_over():
                self._send(message, fd)

    def end(self, logger: Logger) -> None:
        """Without any of what a good end brings."""
        with self.guard:
            while logger._writing and logger.alive:
                self.guard.wait(0.1)
            logger._waiting.clear()
            logger._stop = True
            self.guard.notify_all()
        logger._thread.join()
        logger._rings.close()

    def close(self) -> None:
        """A good end; twice is no error."""
        if not self._closed:
            self._closed = True
            self.records.close()
            self.tail.close()

    # ------------------------------------------------------------ what is on the store

    def chains(self) -> Chains:
        run = Run.open(self.path)
        listing = run.listing()
        return plan_chains(listing, run.segments(listing), "main")

    def offered(self) -> list[int]:
        """The steps that can be had, all of which hold what was written."""
        run, chains = Run.open(self.path), self.chains()
        steps = [ref.step for ref in chains.refs]
        way = chains.to(steps[-1])
        assert way is not None
        for link in way.links:
            (place,) = link.places
            found = bytes(read(run.backend, place.name, place.found))
            assert found == payload(link.ref.step, nbytes=place.found.nbytes)
        return steps

    def segments(self) -> list[list[int]]:
        """The steps in each segment, in the order in which they were begun."""
        run = Run.open(self.path)
        scans = sorted(run.segments(run.listing()), key=lambda s: s.segment.number)
        return [[record.step for record in scanned.records] for scanned in scans]

    def appends(self) -> list[int]:
        """The last step of each append that the agent has told of."""
        return self.told_of(p.Logged)
