"""Folders in memory, for runs whose durability is not what a test is about."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MEMORY = "/dev/shm"


@contextlib.contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder that goes at the end: in memory, where that is possible; else on the disk."""
    place = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None
    # an agent that lingers may still write there
    with tempfile.TemporaryDirectory(
        dir=place, prefix="everystep-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)
