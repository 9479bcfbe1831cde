"""Small real runs of every kind, made once and copied for each test, and the command line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from everystep.cli.main import run as run_cli
from everystep.store.local import LocalBackend
from everystep.store.run import Run
from small_runs import Job, Said, two_ranks


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Runs one command in this process."""

    def call(*words: object) -> Said:
        capsys.readouterr()
        status = run_cli([str(word) for word in words])
        out, err = capsys.readouterr()
        return Said(status, out, err)

    return call


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs that tests copy."""
    place = tmp_path_factory.mktemp("runs")
    Job().run(place / "healthy", 3)
    shutil.copytree(place / "healthy", place / "forked")
    job = Job()
    job.run(place / "forked", 5)
    job.run(place / "forked", 6, start=3)
    Run.open_or_create(LocalBackend(_made(place / "fresh")))
    two_ranks(_made(place / "two_ranks"))
    return place


def _made(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.fixture
def healthy(templates: Path, tmp_path: Path) -> Path:
    """Steps main:1 to main:3 of one rank."""
    return Path(shutil.copytree(templates / "healthy", tmp_path / "healthy"))


@pytest.fixture
def forked(templates: Path, tmp_path: Path) -> Path:
    """main:1 to main:5, and from main:3 on main@3:4 to main@3:6, which are current."""
    return Path(shutil.copytree(templates / "forked", tmp_path / "forked"))


@pytest.fixture
def fresh(templates: Path, tmp_path: Path) -> Path:
    """A run in which no step was stored yet."""
    return Path(shutil.copytree(templates / "fresh", tmp_path / "fresh"))


@pytest.fixture
def two(templates: Path, tmp_path: Path) -> Path:
    """Two ranks, main:1 and main:2; see `two_ranks`."""
    return Path(shutil.copytree(templates / "two_ranks", tmp_path / "two_ranks"))
