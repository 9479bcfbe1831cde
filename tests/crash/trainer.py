"""What the forked processes of these tests do: a small training whose every state has a digest."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import random
import resource
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from everystep import Checkpointer, Full, Retention, SaveOnSignal, load
from faults import Faults, installed
from trips import BLOCKING
from waiting import until


class Board:
    """Numbers in a shared file, which a killed process cannot take with it."""

    FIELDS = ("restored", "returned", "staged", "durable", "place", "calls", "go", "limit")
    NOWHERE, RESTORING, TRAINING, SAVING, ENDING = range(5)

    def __init__(self, path: str | Path) -> None:
        if not Path(path).exists():
            Path(path).write_bytes(bytes(8 * len(self.FIELDS)))
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def __getitem__(self, field: str) -> int:
        number: int = struct.unpack_from("q", self._map, 8 * self.FIELDS.index(field))[0]
        return number

    def __setitem__(self, field: str, number: int) -> None:
        struct.pack_into("q", self._map, 8 * self.FIELDS.index(field), number)

    def clear(self) -> None:
        """For the next life."""
        for field in self.FIELDS:
            self[field] = 0 if field in ("place", "calls", "go", "limit") else -1

    def await_leave(self, more: int) -> None:
        """Stand still before so many steps of a life are more than the test lets it have (0: any),
        so that a test that is late does not find a life at its end."""
        until(lambda: self["limit"] == 0 or more <= self["limit"], 10, "leave to go on")

    def close(self) -> None:
        """Give the map up."""
        self._map.close()


class Counted(Faults):
    """Tells the board how many calls there have been."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board

    def _before(self, name: str, path: Path | None = None) -> None:
        self._board["calls"] += 1
        super()._before(name, path)


class Loader:
    """What a data loader is to a checkpoint: a position in a shuffled epoch."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []
        self._at = 0

    def next(self) -> torch.Tensor:
        """A batch."""
        if self._at == len(self._order):
            self._order = torch.randperm(7, generator=self._generator).tolist()
            self._at = 0
        index = self._order[self._at]
        self._at += 1
        return torch.linspace(-1, index, 32).reshape(4, 8) + random.random()

    def state_dict(self) -> dict[str, Any]:
        """Everything."""
        generator = self._generator.get_state()
        return {"generator": generator, "order": list(self._order), "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._generator.set_state(state["generator"])
        self._order, self._at = list(state["order"]), state["at"]


class Job:
    """A model with dropout, AdamW, a schedule, a loader and all generators in use."""

    def __init__(self, rank: int = 0, world_size: int = 1, width: int = 16) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 4)
        )
        if world_size > 1:
            self.model = DistributedDataParallel(self.model)
        torch.manual_seed(1 + rank)
        random.seed(rank)
        np.random.seed(rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.loader = Loader(rank)

    def checkpointer(self, run: str, **options: Any) -> Checkpointer:
        """Everything in it, handed over."""
        options.setdefault("strategy", BLOCKING)
        options.setdefault("retention", Retention(keep_last=2))
        extras = {"schedule": self.schedule, "loader": self.loader}
        return Checkpointer(
            run, model=self.model, optimizer=self.optimizer, extras=extras, **options
        )

    def step(self, loops: int = 3) -> None:
        """A training step of a few milliseconds."""
        self.optimizer.zero_grad()
        for _ in range(loops):
            loss = self.model(self.loader.next()).square().mean() * float(np.random.rand())
            loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def digest(self) -> str:
        """Of every bit of the state, without any help from the library."""
        found = hashlib.sha256()

        def add(thing: object) -> None:
            if isinstance(thing, torch.Tensor):
                found.update(f"{thing.dtype}{tuple(thing.shape)}".encode())
                found.update(thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            elif isinstance(thing, np.ndarray):
                found.update(thing.tobytes())
            elif isinstance(thing, dict):
                for key in sorted(thing, key=repr):
                    found.update(repr(key).encode())
                    add(thing[key])
            elif isinstance(thing, list | tuple):
                for item in thing:
                    add(item)
            else:
                found.update(repr(thing).encode())

        state = self.model.state_dict()
        add({name.removeprefix("module."): tensor for name, tensor in state.items()})
        add(self.optimizer.state_dict())
        add(self.schedule.state_dict())
        add(self.loader.state_dict())
        add([torch.get_rng_state(), random.getstate(), np.random.get_state()])
        return found.hexdigest()


def _join(rank: int, world_size: int, meet: str) -> None:
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size
        )


def warm_up(run: str) -> None:
    """Use everything once."""
    job = Job()
    for done in range(2):
        with job.checkpointer(run) as ck:
            ck.restore(required=done > 0)
            job.step()
            ck.step()


def reference(total: int, rank: int = 0, world_size: int = 1, meet: str = "") -> None:
    """Train without this library; print the digest of every step."""
    _join(rank, world_size, meet)
    job = Job(rank, world_size)
    for step in range(total + 1):
        if step:
            job.step()
        print(job.digest())


def train(
    run: str,
    total: int,
    board: str,
    rank: int = 0,
    world_size: int = 1,
    meet: str = "",
    kill_at: int = 0,
) -> None:
    """Train from what there is to `total` steps; print the digest of what was restored, and of the
    end. `kill_at`: die before that system call of the store, counted from the start."""
    progress = Board(board)
    faults = Counted(progress)
    if kill_at:
        faults.kill_at(kill_at)
    _join(rank, world_size, meet)
    progress["place"] = Board.RESTORING
    job = Job(rank, world_size)
    with installed(faults), job.checkpointer(run) as ck:
        done = ck.restore()
        print("restored", done, job.digest(), flush=True)
        progress["restored"] = done
        for step in range(done + 1, total + 1):
            progress["place"] = Board.TRAINING
            job.step()
            progress["place"] = Board.SAVING
            ck.step()
            progress["returned"] = step
        progress["place"] = Board.ENDING
    print("end", total, job.digest(), flush=True)


def _block_in_c() -> None:
    """Wait for ever in a C library, as for another rank: no Python handler can run."""
    library = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def hold_signals(
    run: str,
    board: str,
    total: int = 5,
    long_step: int = 3,
    how: str = "",
    before: str = "",
    deadline_s: float | None = 60,
    send_at: int = 0,
    blocking: bool = True,
) -> None:
    """Train with SaveOnSignal; one step is long: it ends when the test says `go`.

    Args:
        how: what the long step does: wait for the test in calls or (`spin`) without any; after
            that, for ever in C (`c`); or nothing at all (`none`).
        before: which handler the user had installed: none, "note", "exit" or "ignore".
        deadline_s: of SaveOnSignal; None: no SaveOnSignal.
        send_at: send SIGTERM to this process before that system call of the long step's save.
        blocking: or through an agent.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    progress = Board(board)
    faults = Counted(progress)
    job = Job()
    with installed(faults):
        if before:
            signal.signal(signal.SIGTERM, _user_handler(before, run))
        mine = signal.getsignal(signal.SIGTERM)
        on_signal = None if deadline_s is None else SaveOnSignal(deadline_s=deadline_s)
        strategy = BLOCKING if blocking else Full(every=1, policy="block", linger_s=1)
        ck = job.checkpointer(run, on_signal=on_signal, strategy=strategy)
        done = ck.restore()
        print("restored", done, job.digest(), flush=True)
        for step in range(done + 1, done + total + 1):
            job.step()
            if step == done + long_step:
                progress["place"] = Board.TRAINING
                while not progress["go"] and how != "none":
                    if how != "spin":
                        select.select([], [], [], 0.01)
                if how == "c":
                    _block_in_c()
                if send_at:
                    faults.call_at(send_at, lambda: os.kill(os.getpid(), signal.SIGTERM))
            progress["place"] = Board.SAVING
            ck.step()
            progress["returned"] = step
        progress["place"] = Board.ENDING
        if how == "none" and not send_at:
            until(lambda: progress["go"], 60, "the test")
        ck.close()
        assert signal.getsignal(signal.SIGTERM) == mine
    print("end", flush=True)


def _user_handler(kind: str, run: str) -> Callable[[int, FrameType | None], None] | signal.Handlers:
    def handle(number: int, frame: FrameType | None) -> None:
        print("handled", number, load(run).step, flush=True)
        if kind == "exit":
            sys.exit(7)

    return signal.SIG_IGN if kind == "ignore" else handle


def hold_signals_with_a_child(run: str, board: str) -> None:
    """A process that this one forks, as a loader's worker, is ended by SIGTERM as ever."""
    job = Job()
    with job.checkpointer(run, on_signal=SaveOnSignal()) as ck:
        ck.restore()
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(tell, b"!")
            until(lambda: False, 60, "the signal")
            os._exit(0)
        os.read(ready, 1)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        print("child", os.waitstatus_to_exitcode(status))
        job.step()
        ck.step()
        pid = os.fork()
        if pid == 0:
            ck.close()  # must not reach into its parent
            os._exit(0)
        os.waitpid(pid, 0)
        worker = threading.Thread(target=_step_and_signal, args=(job, ck))
        worker.start()
        worker.join()
        until(lambda: False, 60, "the signal")


def _step_and_signal(job: Job, ck: Checkpointer) -> None:
    """In another thread than the main one."""
    job.step()
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: ck._signal is not None and ck._signal._held, 60, "the handler to have run")
    ck.step()


def _memory_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) << 10


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class _Large(nn.Module):
    """Tensors large and small, in row-major order and not."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        side = 1024
        rows = nbytes // 4 // side // 4
        self.one = nn.Parameter(torch.ones(2 * rows, side))
        self.turned = nn.Parameter(torch.ones(side, rows).t())
        small = [torch.ones(rows, side // 100) for _ in range(100)]
        self.many = nn.ParameterList(small)


def save_large(run: str, nbytes: int, saves: int) -> None:
    """Print by how much each save of a state raises the peak of resident memory, and the state's
    own size."""
    model = _Large(nbytes)
    held = sum(p.numel() * 4 for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(
        run,
        model=model,
        optimizer=optimizer,
        strategy=BLOCKING,
        retention=Retention(keep_last=1),
    ) as ck:
        ck.restore()
        print(held)
        for _ in range(saves):
            before = _memory_bytes("VmRSS")
            _reset_peak()
            ck.step()
            print(_memory_bytes("VmHWM") - before, flush=True)


def save_often(run: str, nbytes: int, saves: int, open_files: int) -> None:
    """Print resident memory, descriptors and threads after each save, under a low limit on open
    files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    model = _Large(nbytes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(run, model=model, optimizer=optimizer, strategy=BLOCKING) as ck:
        ck.restore()
        for _ in range(saves):
            ck.step()
            fds, tasks = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
            print(_memory_bytes("VmRSS"), fds, tasks, flush=True)
        assert all(s.durable for s in ck.stats)
