"""A process that has imported torch, from which trainers and ranks are forked in milliseconds.

It has one thread when it forks, and so have they when they begin. It alone reaps them: a process
identity is not reused before its status has been asked for, so that a test kills the process that
it means.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import until

_START_S = 120.0
_END_S = 150.0
_TELL_S = 10.0


class Child:
    """A forked process."""

    def __init__(self, zygote: Zygote, pid: int, log: Path) -> None:
        self._zygote, self.pid, self.log = zygote, pid, log
        self._status: int | None = None

    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives."""
        if self._status is None:
            self._status = self._zygote.ask({"poll": self.pid})["status"]
        return self._status

    def kill(self, number: int = signal.SIGKILL) -> bool:
        """Send a signal; whether it was there to get it."""
        if self.status() is not None:
            return False
        os.kill(self.pid, number)
        return True

    def wait(self, deadline_s: float = _END_S) -> int:
        """Wait for its end; returns its status.

        Raises: TimeoutError when it is still there after `deadline_s` seconds, with what it said
            and where each of its threads stood.
        """
        try:
            until(lambda: self.status() is not None, deadline_s, f"{self.pid} to end")
        except TimeoutError as late:
            self.kill(signal.SIGABRT)  # it tells where its threads stand, and ends
            with contextlib.suppress(TimeoutError):
                until(lambda: self.status() is not None, _TELL_S, f"{self.pid} to tell")
            self.kill()
            raise TimeoutError(f"{late}: {self.said()}") from None
        status = self.status()
        assert status is not None
        return status

    def said(self) -> str:
        """What it has printed and logged."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Zygote:
    """The test's end of the process. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        assert self.ask({"threads": True}) == {"threads": 1}

    def ask(self, request: dict[str, object]) -> dict[str, int | None]:
        """One question, one answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, int | None] = json.loads(self._process.stdout.readline())
        return answer

    def start(self, function: str, log: Path, **arguments: object) -> Child:
        """Fork, and call `function(**arguments)`, such as `crash.trainer.train`; what it prints
        goes to `log`. Its module is imported before the fork, once for all."""
        request = {"start": function, "log": str(log), "arguments": arguments}
        pid = self.ask(request)["pid"]
        assert pid is not None
        return Child(self, pid, log)

    def run(self, function: str, log: Path, **arguments: object) -> str:
        """Start, wait for a good end, and return what it printed."""
        child = self.start(function, log, **arguments)
        status = child.wait()
        assert status == 0, f"{status}: {child.said()}"
        return child.said()

    def run_ranks(
        self, function: str, folder: Path, size: int, deadline_s: float, **arguments: object
    ) -> None:
        """Start a job of `size` ranks, `function(rank=…, world_size=…, folder=…, **arguments)`
        each, and wait for a good end of all."""
        logs = [folder / f"log-{rank}" for rank in range(size)]
        shared: dict[str, object] = {"world_size": size, "folder": str(folder), **arguments}
        ranks = [self.start(function, log, rank=rank, **shared) for rank, log in enumerate(logs)]
        try:
            statuses = [child.wait(deadline_s) for child in ranks]
        finally:
            for child in ranks:
                child.kill()
                child.wait()
        assert statuses == [0] * size, "\n".join(child.said()[-3000:] for child in ranks)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_START_S)
        self._process.stdout.close()


def _serve() -> None:
    import torch
    import torch.distributed
    import torch.nn.parallel

    from crash import trainer

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as run:  # what torch loads late is loaded before the fork
        trainer.warm_up(run)
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page of all modules
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            called = _find(request["start"])
            pid = os.fork()
            if pid == 0:
                _become(called, request)
            children.add(pid)
            answer = {"pid": pid}
        elif "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            children.discard(pid)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            answer = {"threads": _threads()}
        print(json.dumps(answer), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)  # tidying up torch takes seconds


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _find(function: str) -> Callable[..., Any]:
    """The function of that name; its module must not start threads."""
    module, _, name = function.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    assert _threads() == 1, f"{module} has started threads"
    return found


def _become(called: Callable[..., Any], request: dict[str, Any]) -> None:
    """In the child: the function, and then the end, whatever happens."""
    status = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        faulthandler.enable()
        called(**request["arguments"])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - told to the test by the log and the status
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
