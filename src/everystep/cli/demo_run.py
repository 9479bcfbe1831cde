"""One torchrun job of the demo: started, watched, shot at, and ended."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from everystep.errors import EverystepError

RANKS = 2
SILENCE_LIMIT_S = 90.0  # a job that reports nothing for this long hangs
END_LIMIT_S = 5.0
POLL_S = 0.004


class Event(msgspec.Struct, frozen=True):
    """One line of a rank's journal."""

    name: Literal["started", "restored", "trained", "saved", "ended"]
    step: int
    at_s: float
    life: int
    """0, and one more after each restart"""
    pid: int
    took_s: float = 0.0
    loss: float | None = None
    copied_bytes: int = 0
    live: str = ""
    """hash of the weights and moments in the memory of the rank"""


class Aim(msgspec.Struct, frozen=True):
    """Where a kill is to strike: this long after that event of that rank."""

    rank: int
    name: Literal["saved", "trained"]
    step: int
    delay_s: float


class Strike(msgspec.Struct, frozen=True):
    """A SIGKILL that was sent, and that ended the rank."""

    rank: int
    pid: int
    life: int
    at_s: float


def aims(steps: int, kills: int, seed: int, train_s: float, save_s: float) -> list[Aim]:
    """Draw random moments, one from each stretch of the run.

    Every second one is in a checkpoint; the others may fall anywhere in a step.
    """
    draw = random.Random(seed)
    plan: list[Aim] = []
    for i in range(kills):
        first, end = 1 + (steps - 2) * i // kills, 1 + (steps - 2) * (i + 1) // kills
        step = draw.randrange(first, end - 1)
        moment_s = draw.uniform(train_s if i % 2 else 0.0, train_s + save_s)
        rank = draw.randrange(RANKS)
        if moment_s < train_s:
            plan.append(Aim(rank, "saved", step, moment_s))
        else:
            plan.append(Aim(rank, "trained", step + 1, moment_s - train_s))
    return plan


class Job:
    """A torchrun job and what its ranks have reported; leaving the `with` ends it."""

    def __init__(self, folder: Path, steps: int, seed: int, restarts: int) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.log = folder / "torchrun.log"
        self.events: list[list[Event]] = [[] for _ in range(RANKS)]
        self._read_bytes = [0] * RANKS
        self._heard_s = time.monotonic()
        folder.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), "--max-restarts", str(restarts)]
        command += ["--local-addr", "127.0.0.1", "-m", "everystep.cli.demo_job"]
        command += [str(folder), "--steps", str(steps), "--seed", str(seed)]
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # Otherwise restarted ranks may find the addresses of the dead (pytorch issue 167288).
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with self.log.open("wb") as log:
            self._torchrun = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | settings,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        if self._torchrun.poll() is not None:
            return
        with ExitStack() as held:  # the handles are taken while the ranks are still its children
            pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
            handles = [held.enter_context(self._handle(pid)) for pid in pids]
            self._torchrun.terminate()  # which ends the ranks
            with suppress(subprocess.TimeoutExpired):
                self._torchrun.wait(END_LIMIT_S)
            self._torchrun.kill()
            self._torchrun.wait()
            for handle in handles:
                if handle is not None:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)

    def follow(
        self, plan: list[Aim], progress: Callable[[int, list[Strike]], None]
    ) -> list[Strike]:
        """Watch the job to its end, and kill as planned; tells `progress` the step and strikes."""
        strikes: list[Strike] = []
        while self._running():
            if len(strikes) < len(plan):
                aim = plan[len(strikes)]
                told = self.events[aim.rank]
                mark = next((e for e in told if (e.name, e.step) == (aim.name, aim.step)), None)
                if mark is not None:
                    time.sleep(max(0.0, mark.at_s + aim.delay_s - time.monotonic()))
                    strikes.append(self._kill(aim.rank))
            progress(min(newest_saved(told) for told in self.events), strikes)
            time.sleep(POLL_S)
        if len(strikes) < len(plan):
            raise self.failure(f"the job ended after {len(strikes)} of {len(plan)} kills")
        return strikes

    def failure(self, message: str) -> EverystepError:
        """An error with the end of the job's output."""
        lines = self.log.read_text(errors="replace").splitlines()
        raised = [line for line in lines if line.startswith("[rank")]
        return EverystepError("\n".join([message, *(raised or lines)[-30:]]), path=self.log)

    def _running(self) -> bool:
        """Whether the job goes on; what it has reported has been read."""
        going = self._torchrun.poll() is None
        if self._poll():
            self._heard_s = time.monotonic()
        if going and time.monotonic() - self._heard_s > SILENCE_LIMIT_S:
            raise self.failure(f"the job was silent for {SILENCE_LIMIT_S:.0f} s")
        if not going and self._torchrun.returncode != 0:
            raise self.failure(f"torchrun ended with status {self._torchrun.returncode}")
        return going

    def _poll(self) -> bool:
        """Read the whole lines that the ranks have appended; whether there were any."""
        before = list(self._read_bytes)
        for rank, told in enumerate(self.events):
            with suppress(FileNotFoundError), (self.folder / f"rank{rank}.jsonl").open("rb") as f:
                f.seek(self._read_bytes[rank])
                new = f.read()
                whole = new[: new.rfind(b"\n") + 1]
                self._read_bytes[rank] += len(whole)
                told += [msgspec.json.decode(line, type=Event) for line in whole.splitlines()]
        return before != self._read_bytes

    def _kill(self, rank: int) -> Strike:
        """Send SIGKILL to a rank and wait for its end."""
        last = self.events[rank][-1]
        with self._handle(last.pid) as handle:
            if handle is None:
                raise self.failure(f"rank {rank} was gone before it could be killed")
            at_s = time.monotonic()
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], END_LIMIT_S)  # readable once the process has ended
        self._poll()
        return Strike(rank, last.pid, last.life, at_s)

    @contextmanager
    def _handle(self, pid: int) -> Iterator[int | None]:
        """A handle that can only mean this process; None if it is not one of ours (any more)."""
        if not descends(pid, self._torchrun.pid):
            yield None
            return
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            yield None
            return
        try:  # asked again: the number may have passed to another process before it was opened
            yield handle if descends(pid, self._torchrun.pid) else None
        finally:
            os.close(handle)


def descends(pid: int, ancestor: int) -> bool:
    """Whether `ancestor` is `pid` or among its parents."""
    while pid > 1 and pid != ancestor:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        pid = int(status.rpartition(")")[2].split()[1])
    return pid == ancestor


def newest_saved(told: list[Event], before_s: float = float("inf")) -> int:
    """The newest step that a rank had completed at a time."""
    return max((e.step for e in told if e.name == "saved" and e.at_s <= before_s), default=0)
