"""Other ways to take a checkpoint at every step, each in the best configuration we know.

All write the whole state over two places in turn, so that none holds more than two checkpoints, and
fsync it (but for DLRover, which does not). Those that go on in the background wait for the
checkpoint before, since every step is to become durable. DLRover's flash checkpoint is measured
where it is installed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.loop import DEADLINE_S, Subject

# that places are overwritten, and that there is no process group, is meant; threads are told, too
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")


class _Peer:
    """What all have: the state, two places, and the checkpoint that is under way."""

    warm = True

    def __init__(
        self, directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._directory, self._model, self._optimizer = directory, model, optimizer
        self._directory.mkdir()
        self._turn = 0
        self._under_way: concurrent.futures.Future[Any] | None = None

    def _place(self) -> Path:
        self._turn += 1
        return self._directory / str(self._turn % 2)

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def step(self) -> None:
        """See `Subject.step`."""
        raise NotImplementedError

    def finish(self) -> None:
        """See `Subject.finish`."""
        if self._under_way is not None:
            self._under_way.result()

    def close(self) -> None:
        """See `Subject.close`."""
        self.finish()


def _save(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


class TorchSave(_Peer):
    """`torch.save` to a file, while training waits."""

    def step(self) -> None:
        """See `Subject.step`."""
        _save(self._state(), self._place())


class TorchSaveThread(_Peer):
    """A copy of the state in memory that is kept for it, saved with `torch.save` by a thread."""

    def __init__(
        self, directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(directory, model, optimizer)
        self._executor = concurrent.futures.ThreadPoolExecutor(1)
        self._cache: dict[int, torch.Tensor] = {}

    def _copied(self, found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            if found.data_ptr() not in self._cache:
                self._cache[found.data_ptr()] = torch.empty_like(found)
            return self._cache[found.data_ptr()].copy_(found.detach())
        if isinstance(found, dict):
            return {name: self._copied(value) for name, value in found.items()}
        return found

    def step(self) -> None:
        """See `Subject.step`."""
        self.finish()
        self._under_way = self._executor.submit(_save, self._copied(self._state()), self._place())

    def close(self) -> None:
        """See `Subject.close`."""
        super().close()
        self._executor.shutdown()
        self._cache.clear()


class DcpSave(_Peer):
    """`torch.distributed.checkpoint.save`, while training waits."""

    def step(self) -> None:
        """See `Subject.step`."""
        dcp.save(self._state(), storage_writer=_writer(self._place()), no_dist=True)


class DcpAsyncSave(_Peer):
    """`async_save` from a thread; the memory that it stages to is reused."""

    kind = AsyncCheckpointerType.THREAD

    def __init__(
        self, directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(directory, model, optimizer)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.kind is AsyncCheckpointerType.PROCESS,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def step(self) -> None:
        """See `Subject.step`."""
        self.finish()
        response: Any = dcp.async_save(
            self._state(),
            storage_writer=_writer(self._place()),
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
            no_dist=True,
        )
        self._under_way = getattr(response, "upload_completion", response)

    def close(self) -> None:
        """See `Subject.close`."""
        super().close()
        self._stager.close()


class DcpAsyncSaveProcess(DcpAsyncSave):
    """The same from a process, which shares the memory."""

    kind = AsyncCheckpointerType.PROCESS

    def __init__(
        self, directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(directory, model, optimizer)
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(quiet_errors())  # the process logs every request
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        dist.init_process_group(
            "gloo", init_method=f"file://{directory / 'rendezvous'}", rank=0, world_size=1
        )

    def close(self) -> None:
        """See `Subject.close`. The process that torch would keep is ended, too."""
        super().close()
        _async_process_executor._CHECKPOINT_PROCESS = None
        dist.destroy_process_group()
        del os.environ["MASTER_ADDR"]
        self._quiet.close()


@contextlib.contextmanager
def quiet_errors() -> Iterator[None]:
    """Let standard error go nowhere, also that of processes that are started meanwhile."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _writer(place: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(place, sync_files=True, overwrite=True)


class FlashCheckpoint(_Peer):
    """DLRover's flash checkpoint: shared memory, persisted by a process of its own."""

    def __init__(
        self, directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(directory, model, optimizer)
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(quiet_errors())  # it logs every step
        from dlrover.python.common.constants import CheckpointConstant
        from dlrover.trainer.torch.flash_checkpoint import ddp
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        self._disk = StorageType.DISK
        self._tracker = directory / CheckpointConstant.TRACER_FILE_NAME
        self._checkpointer = ddp.DdpCheckpointer(str(directory))

    def step(self) -> None:
        """See `Subject.step`."""
        self.finish()
        path = str(self._place())
        self._checkpointer.save_checkpoint(self._turn, self._state(), path, storage_type=self._disk)

    def finish(self) -> None:
        """See `Subject.finish`. Its own way to wait looks only every three seconds."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self._turn and self._persisted() != self._turn:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"DLRover did not persist step {self._turn}")
            time.sleep(0.005)

    def _persisted(self) -> int:
        try:
            return int(self._tracker.read_text())
        except (FileNotFoundError, ValueError):  # not there yet, or being written
            return 0

    def close(self) -> None:
        """See `Subject.close`. The process that saves would otherwise live as long as this one."""
        super().close()
        saver = self._checkpointer._engine.saver_proc
        self._checkpointer._engine.close()
        if saver is not None:
            saver.terminate()
            saver.join()
        self._quiet.close()


PEERS: dict[str, Callable[[Path, torch.nn.Module, torch.optim.Optimizer], Subject]] = {
    "torch.save": TorchSave,
    "torch.save of a copy, in a thread": TorchSaveThread,
    "DCP save": DcpSave,
    "DCP async_save, thread": DcpAsyncSave,
    "DCP async_save, process": DcpAsyncSaveProcess,
}
"""By name."""

BLOCKING = {"torch.save", "DCP save"}
"""Those that keep training waiting: for as long however long a step is."""

if importlib.util.find_spec("dlrover") is not None:
    PEERS["DLRover flash checkpoint"] = FlashCheckpoint
