"""Deleted files whose space is kept, to be written over by later ones."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import threading
from pathlib import Path

from everystep.store import durable

_MOST_SPARES = 4
_MOST_SLACK = 1.25
"""A spare is overwritten by a file that needs all of it but a fifth."""


class Spares:
    """Files that were deleted and are kept to be overwritten, which spares the file system the
    freeing and the allocation of their space. They are temporary files in the root.

    They are at most four, and together no larger than the largest `put` so far: so a run takes
    the space of one step more than it keeps.
    """

    def __init__(self, root: Path, tag: str, calls: durable.SystemCalls) -> None:
        self._root, self._tag, self._calls = root, tag, calls
        self._guard = threading.Lock()
        self._numbers = itertools.count()
        self._kept: list[tuple[int, Path]] = []  # length and place, oldest first
        self.most_bytes = 0
        """How much the largest `put` was to write."""

    def keep(self, path: Path) -> bool:
        """Make a spare of a file, whose name is then durably gone; False: it is not fit for one.

        Raises:
            OSError: the file is gone from its place, but perhaps not durably; it is no spare.
        """
        found = os.lstat(path)
        linked = not stat.S_ISREG(found.st_mode) or found.st_nlink > 1
        if linked or not durable.DIRECT_FROM_BYTES <= found.st_size <= self.most_bytes:
            return False
        spare = self._root / f".spare-{next(self._numbers)}.{self._tag}{durable.TEMPORARY_SUFFIX}"
        try:
            self._calls.rename(path, spare)
        except OSError:
            return False
        try:
            for directory in (path.parent, self._root):  # before a byte of it may change
                self._calls.sync_directory(directory)
        except BaseException:
            with contextlib.suppress(OSError):
                self._calls.unlink(spare)
            raise
        with self._guard:
            self._kept.append((found.st_size, spare))
        self.release(_MOST_SPARES, self.most_bytes)
        return True

    def take(self, nbytes: int) -> Path | None:
        """The smallest spare that a file of this length can overwrite; it is the caller's now.
        Where there is none, and no space for a new file, all spares go."""
        with self._guard:
            fits = [s for s in self._kept if nbytes <= s[0] <= _MOST_SLACK * nbytes]
            if fits and nbytes >= durable.DIRECT_FROM_BYTES:
                self._kept.remove(min(fits))
                return min(fits)[1]
        if self._kept and shutil.disk_usage(self._root).free < nbytes:
            self.release()
        return None

    def release(self, count: int = 0, nbytes: int = 0) -> None:
        """Remove the oldest until so many, of so many bytes together, are left."""
        with self._guard:
            gone = []
            while len(self._kept) > count or sum(s[0] for s in self._kept) > nbytes:
                gone.append(self._kept.pop(0)[1])
        for spare in gone:
            with contextlib.suppress(OSError):
                self._calls.unlink(spare)
