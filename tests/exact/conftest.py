"""Runs of the matrix are kept in memory where that is possible: their durability is tested
elsewhere, and there are many."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def _memory() -> str | None:
    shared = "/dev/shm"
    return shared if os.access(shared, os.W_OK | os.X_OK) else None


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Where a run may be put; the folder does not exist yet."""
    with tempfile.TemporaryDirectory(dir=_memory(), prefix="everystep-exact-") as folder:
        yield Path(folder, "run")


@pytest.fixture(scope="module")
def runs_dir() -> Iterator[Path]:
    """Where the runs of a whole file may be put."""
    with tempfile.TemporaryDirectory(dir=_memory(), prefix="everystep-exact-") as folder:
        yield Path(folder)
