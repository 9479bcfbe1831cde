"""Runs of the matrix are kept in memory where that is possible: their durability is tested
elsewhere, and there are many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from places import quick_folder


@pytest.fixture(autouse=True)
def _patience(patience: None) -> None:
    """Every step is there, however slow the machine is."""


@pytest.fixture
def run_dir(quick_path: Path) -> Path:
    """Where a run may be put; the folder does not exist yet."""
    return quick_path / "run"


@pytest.fixture(scope="module")
def runs_dir() -> Iterator[Path]:
    """Where the runs of a whole file may be put."""
    with quick_folder() as folder:
        yield folder
