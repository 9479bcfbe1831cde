"""The process of an agent, as its trainer starts it, comes upon it, and ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from everystep.agent import protocol as p
from everystep.agent.channel import Channel, address, peer_pid, same_user
from everystep.errors import RunBusy, StoreFailed

_log = logging.getLogger("everystep")

START_S = 30.0
"""How long an agent may take to start, or to end."""

LOCK_SLOT = 1 << 20
"""The agent of rank r holds slot LOCK_SLOT + r of the run's lock file; the trainer holds slot r."""

_ADOPT_S = 5.0


class Options(Struct, kw_only=True):
    """How an agent is started."""

    path: str
    """Of the run; absolute."""
    run: str
    rank: int
    fd: int
    """A connected socket to the trainer."""


class Process:
    """An agent's process: a child, or one that an earlier trainer has left.

    Args:
        pid: its number.
        child: it, where it was started here.
        said: a file with what it has said, which is closed in the end.
    """

    def __init__(
        self, pid: int, child: subprocess.Popen[bytes] | None = None, said: int | None = None
    ) -> None:
        self.pid, self._child, self._said = pid, child, said
        self._watched: int | None = None
        if child is None:
            with contextlib.suppress(OSError):  # it has ended just now: the socket says so
                self._watched = os.pidfd_open(pid)

    def end(self, wait_s: float) -> None:
        """Wait for its end; after that time, end it. What it has said is logged."""
        if not self._has_ended(wait_s):
            if self._child is not None:
                self._child.kill()
            elif self._watched is not None:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(self._watched, signal.SIGKILL)
            self._has_ended(None)
        self.forget()

    def _has_ended(self, wait_s: float | None) -> bool:
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(wait_s)
            return self._child.returncode is not None
        if self._watched is None:
            return True
        poll = select.poll()
        poll.register(self._watched, select.POLLIN)
        return bool(poll.poll(None if wait_s is None else wait_s * 1000))

    def forget(self) -> None:
        """Leave it alone from now on; a child that has ended is gone altogether."""
        if self._watched is not None:
            os.close(self._watched)
            self._watched = None
        if self._said is not None:
            words = os.pread(self._said, 1 << 20, 0).decode(errors="replace").strip()
            os.close(self._said)
            self._said = None
            if words:
                _log.error("the agent's last words: %s", words)


def _connected(run: str, rank: int) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        connection.connect(address(run, rank))
        if same_user(connection):
            return connection
    connection.close()
    return None


def is_there(run: str, rank: int) -> bool:
    """Whether an agent of this rank is there."""
    connection = _connected(run, rank)
    if connection is not None:
        connection.close()
    return connection is not None


def adopted(path: Path, run: str, rank: int) -> tuple[Process, Channel] | None:
    """The agent that an earlier process of this rank has left; None: there is none.

    Raises:
        RunBusy: another process owns it, or it does not answer.
    """
    connection = _connected(run, rank)
    if connection is None:
        return None
    process, channel = Process(peer_pid(connection)), Channel(connection)
    try:
        problem = _introduce(channel, _ADOPT_S)
    except EOFError:  # it was about to end, and has done so
        channel.close()
        process.forget()
        return None
    except StoreFailed as error:
        problem = error.headline()
    if problem is None:
        return process, channel
    channel.close()
    process.forget()
    raise RunBusy(
        problem,
        path=path,
        rank=rank,
        hint="wait until it ends, stop it, or use another directory",
    )


def started(path: Path, run: str, rank: int) -> tuple[Process, Channel]:
    """A new agent.

    Raises:
        StoreFailed: it cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    options = Options(path=str(path), run=run, rank=rank, fd=theirs.fileno())
    said = os.memfd_create("everystep-agent-errors", os.MFD_CLOEXEC)
    home = str(Path(__file__).resolve().parents[2])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    text = msgspec.json.encode(options).decode()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "everystep.agent.server", text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        os.close(said)
        raise StoreFailed(f"the agent cannot be started: {error}", rank=rank) from error
    finally:
        theirs.close()
    process, channel = Process(child.pid, child, said), Channel(ours)
    try:
        problem = _introduce(channel, START_S)
    except EOFError:
        problem = "the agent did not start"
    except StoreFailed as error:
        problem = error.headline()
    if problem is None:
        return process, channel
    channel.close()
    process.end(1.0)
    raise StoreFailed(problem, path=path, rank=rank)


def _introduce(channel: Channel, wait_s: float) -> str | None:
    """Ask an agent to take this process for its trainer; returns why it does not.

    Raises:
        EOFError: it has gone away.
        StoreFailed: it does not speak our language.
    """
    deadline_s = time.monotonic() + wait_s
    try:
        channel.send(p.Hello(os.getpid(), owner=True))
        while (left_s := deadline_s - time.monotonic()) > 0:
            channel.wait(left_s)
            channel.flush()
            for message, _ in channel.receive():
                if isinstance(message, p.Ready):
                    return message.problem
    except OSError as error:
        raise EOFError from error
    return "an agent of this rank does not answer"
