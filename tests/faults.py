"""System calls that fail where a test says: (name, nth, errno), counted, so that a test in which
nothing failed proves nothing and says so."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from everystep.store import durable
from everystep.store.durable import SystemCalls
from everystep.types import Buffer

NAMES = (
    *(
        "create",
        "reopen",
        "write_at",
        "write_parts_at",
        "truncate",
        "sync",
        "close",
        "rename",
        "sync_directory",
    ),
    *("make_directory", "unlink", "remove_directory"),
)
"""The calls of a store, each a place for a fault."""


class Faults(SystemCalls):
    """Performs all calls but those that are to fail. Calls are counted from the moment of `at`."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._act: Callable[[str, Path | None], None] | None = None
        self._full_after_bytes: int | None = None
        self.fired = 0
        """How many faults have happened."""
        self.calls: list[str] = []
        """The names of all calls since the last `at` or `watch`."""

    def watch(self) -> None:
        """Count from here, and let nothing fail."""
        self._act, self._full_after_bytes = None, None
        self.calls.clear()

    def at(
        self, name: str, nth: int, number: int, times: int = 1, within: Path | None = None
    ) -> None:
        """Let the nth call (from 1) of that name, and the `times - 1` after it, fail with an errno;
        those below `within` alone, where it is given. `name` "any" counts all calls."""
        seen = 0

        def act(called: str, path: Path | None) -> None:
            nonlocal seen
            outside = within is not None and (path is None or within not in path.parents)
            if (name not in ("any", called)) or outside:
                return
            seen += 1
            if nth <= seen < nth + times:
                self.fired += 1
                raise OSError(number, os.strerror(number), None if path is None else str(path))

        self.watch()
        self._act = act

    def call_at(self, nth: int, act: Callable[[], object]) -> None:
        """Call `act` before the nth call of any name."""
        seen = 0

        def count(called: str, path: Path | None) -> None:
            nonlocal seen
            seen += 1
            if seen == nth:
                self.fired += 1
                act()

        self.watch()
        self._act = count

    def kill_at(self, nth: int) -> None:
        """Kill this process, as SIGKILL does, before the nth call of any name."""
        self.call_at(nth, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def full_after(self, nbytes: int) -> None:
        """Let the disk be full once so many more bytes have been written: like a real one, it takes
        what still fits, and then says ENOSPC until `watch` is called."""
        self.watch()
        self._full_after_bytes = nbytes

    def _before(self, name: str, path: Path | None = None) -> None:
        with self._guard:
            self.calls.append(name)
            act = self._act
        if act is not None:
            act(name, path)

    def create(self, path: Path, flags: int) -> int:
        """Perform or fail."""
        self._before("create", path)
        return super().create(path, flags)

    def reopen(self, path: Path) -> int:
        """Perform or fail."""
        self._before("reopen", path)
        return super().reopen(path)

    def write_at(self, fd: int, data: Buffer, offset: int) -> int:
        """Perform, in part where the disk is nearly full, or fail."""
        self._before("write_at")
        if self._full_after_bytes is not None:
            data = data[: self._full_after_bytes]
            if not data:
                self.fired += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._full_after_bytes -= len(data)
        return super().write_at(fd, data, offset)

    def write_parts_at(self, fd: int, parts: Sequence[Buffer], offset: int) -> int:
        """Perform, in part where the disk is nearly full, or fail."""
        self._before("write_parts_at")
        if self._full_after_bytes is None:
            return super().write_parts_at(fd, parts, offset)
        data = b"".join(parts)[: self._full_after_bytes]
        if not data:
            self.fired += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._full_after_bytes -= len(data)
        return super().write_parts_at(fd, [data], offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Perform or fail."""
        self._before("truncate")
        super().truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """Perform or fail."""
        self._before("sync")
        super().sync(fd)

    def close(self, fd: int) -> None:
        """Perform, and fail then: a descriptor is gone even where close says no."""
        super().close(fd)
        self._before("close")

    def rename(self, source: Path, target: Path) -> None:
        """Perform or fail."""
        self._before("rename", target)
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        """Perform or fail."""
        self._before("sync_directory", path)
        super().sync_directory(path)

    def make_directory(self, path: Path) -> None:
        """Perform or fail."""
        self._before("make_directory", path)
        super().make_directory(path)

    def unlink(self, path: Path) -> None:
        """Perform or fail."""
        self._before("unlink", path)
        super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Perform or fail."""
        self._before("remove_directory", path)
        super().remove_directory(path)


@contextlib.contextmanager
def installed(faults: SystemCalls) -> Iterator[None]:
    """Stores that are opened in this context use these system calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "SystemCalls", lambda: faults)
        yield
