"""What every test shares: run directories, a zygote, and the check that nothing is left open."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch  # noqa: F401  (before the first baseline: importing it starts and opens things once)
from hypothesis import HealthCheck, settings

from agent.replica_scenes import agents_in_threads
from patience import be_patient
from places import quick_folder
from waiting import until
from zygote import Zygote

_DEADLINE_S = 30.0

# a slow machine makes no property wrong
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")


def _descriptors() -> set[str]:
    """Open descriptors as "number -> what it leads to"."""
    tracker_fd = getattr(resource_tracker._resource_tracker, "_fd", None)
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of this very listing, or one that has just been closed
        # multiprocessing keeps one tracker for the life of the process: its pipe has no other owner
        if int(name) == tracker_fd:
            continue
        # a CUDA context lasts as long as the process: nothing can close the driver's descriptors
        if target.startswith("/dev/nvidia"):
            continue
        found.add(f"descriptor {name} -> {target}")
    return found


def _threads() -> set[str]:
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        # a dummy stands for a native thread (torch's autograd) that once called into Python: it was
        # not started from Python and cannot be joined from it
        if not isinstance(thread, threading._DummyThread)
    }


def _processes() -> list[str]:
    """Processes of which some may be children of this one: just these, where the kernel tells
    them. To look at all there are takes milliseconds, before and after each of thousands of tests.
    """
    found: list[str] = []
    for thread in os.listdir("/proc/self/task"):
        try:
            found += Path("/proc/self/task", thread, "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return [name for name in os.listdir("/proc") if name.isdigit()]
    return found


def _children() -> set[str]:
    """Child processes, dead ones that nobody has waited for included."""
    tracker_pid = getattr(resource_tracker._resource_tracker, "_pid", None)
    found = set()
    for name in _processes():
        try:
            stat = Path("/proc", name, "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since the listing
        command, _, rest = stat.partition("(")[2].rpartition(")")
        if int(rest.split()[1]) == os.getpid() and int(name) != tracker_pid:
            found.add(f"process {name} ({command})")
    return found


def _open_things() -> set[str]:
    return _descriptors() | _threads() | _children()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail a test after which a descriptor, a thread or a child process is there that was not."""
    before = _open_things()
    yield
    if not _open_things() - before:
        return
    gc.collect()  # foreign iterators (a DataLoader's workers) end when they are collected
    try:
        until(lambda: not _open_things() - before, _DEADLINE_S, "what the test opened to be closed")
    except TimeoutError:
        pytest.fail("left open: " + "; ".join(sorted(_open_things() - before)), pytrace=False)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Started once per test process, where a test wants it."""
    with Zygote() as started:
        yield started


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """`tmp_path` in memory. What a killed process leaves does not depend on the disk."""
    with quick_folder() as folder:
        yield folder


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `patience`."""
    be_patient(monkeypatch)


@pytest.fixture
def in_threads() -> Iterator[None]:
    """Agents are threads of the test's process: they are there at once."""
    with agents_in_threads():
        yield


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where a run may be put; the folder does not exist yet."""
    return tmp_path / "run"
