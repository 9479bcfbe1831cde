"""A process with torch from which agents are forked in milliseconds, since one that folds takes
seconds to import it; and system calls in the middle of which such an agent dies."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everystep.agent import client, process
from everystep.agent.channel import Channel
from everystep.agent.process import START_S, Options, Process
from everystep.agent.server import Server
from everystep.store.durable import SystemCalls
from everystep.store.format import parse_marker
from faults import Faults, installed

Calls = Callable[[int], SystemCalls]
"""The system calls of an agent, by its number."""


class Nursery:
    """Make it while the process has one thread.

    Args:
        calls: what each agent's store uses.
    """

    def __init__(self, calls: Calls) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._socket.close()
            try:
                _serve(theirs, calls)
            finally:
                os._exit(0)
        theirs.close()

    def started(self, path: Path, run: str, rank: int) -> tuple[Process, Channel]:
        """In the place of `process.started`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        facts = {"path": str(path), "run": run, "rank": rank}
        socket.send_fds(self._socket, [json.dumps(facts).encode()], [theirs.fileno()])
        theirs.close()
        made, channel = Process(int(self._socket.recv(100))), Channel(ours)
        problem = process._introduce(channel, START_S)
        assert problem is None, problem
        return made, channel


def _serve(requests: socket.socket, calls: Calls) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    number = 0
    while True:
        data, fds, _, _ = socket.recv_fds(requests, 1 << 16, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            os.setsid()
            _be_agent(json.loads(data), fds[0], calls(number))
        os.close(fds[0])
        requests.send(str(pid).encode())
        number += 1


def _be_agent(facts: dict[str, Any], fd: int, calls: SystemCalls) -> None:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with installed(calls):
            server = Server(Options(fd=fd, **facts))
        server.serve()
        status = 0
    finally:
        os._exit(status)


@contextlib.contextmanager
def agents_from_nursery(calls: Calls = lambda number: SystemCalls()) -> Iterator[None]:
    """Trainers of this process, which has one thread yet, have forked agents."""
    nursery = Nursery(calls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "started", nursery.started)
        yield


class Dying(Faults):
    """SIGKILL before the n-th call since the second step began to be written: with such calls it
    and later ones are made durable, and what retention lets go is removed.

    Args:
        nth: from 1 on; 0: never.
        deaths: the file to which the name of that call is appended.
    """

    def __init__(self, nth: int, deaths: Path) -> None:
        super().__init__()
        self._left, self._deaths = nth, deaths
        self._first: Path | None = None
        self._begun = False

    def _before(self, name: str, path: Path | None = None) -> None:
        thread = threading.current_thread().name
        writes = thread.startswith("everystep-write")
        if not writes and not thread.startswith("everystep-remove"):
            return
        if path is not None and name == "rename" and self._first is None:
            if parse_marker(path.name) is not None:
                self._first = path.parent
        elif self._first is not None and self._has_begun(writes, path, self._first):
            self._left -= 1
            if self._left == 0:
                with self._deaths.open("a") as file:
                    file.write(f"{name}\n")
                os.kill(os.getpid(), signal.SIGKILL)

    def _has_begun(self, writes: bool, path: Path | None, first: Path) -> bool:
        """Whether anything of another step has been written."""
        if writes and path is not None and "steps" in path.parts:
            self._begun = self._begun or first not in (path, path.parent)
        return self._begun


def at_any_call(seed: int, most: int, deaths: Path, kills: int) -> Calls:
    """Each of the first agents dies at one of so many calls; those after them do not."""

    def calls(number: int) -> SystemCalls:
        nth = random.Random(f"{seed} {number}").randint(1, most)
        return Dying(nth if number < kills else 0, deaths)

    return calls
