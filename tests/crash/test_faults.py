"""A store that fails: training goes on, loudly; what was stored stays; the next step succeeds."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from crash.training import Training, is_whole, leftovers
from everystep import Retention
from everystep.errors import (
    RunBusy,
    StoreError,
    StoreFailed,
    StoreFull,
    TooManyFailedSteps,
)
from everystep.store import durable
from everystep.store.backend import NewFile
from everystep.store.local import LocalBackend
from faults import NAMES, Faults, installed


@pytest.fixture
def faults() -> Iterator[Faults]:
    calls = Faults()
    with installed(calls):
        yield calls


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]


STEP_CALLS = [
    ("create", 1, errno.ENOSPC, StoreFull),
    ("create", 2, errno.EDQUOT, StoreFull),
    ("create", 3, errno.EROFS, StoreFailed),
    ("create", 1, errno.EACCES, StoreFailed),
    ("create", 1, errno.EMFILE, StoreFailed),
    ("write_at", 1, errno.EIO, StoreFailed),
    ("write_at", 2, errno.ENOSPC, StoreFull),
    ("write_at", 3, errno.EFBIG, StoreFull),
    ("sync", 1, errno.EIO, StoreFailed),
    ("sync", 2, errno.ENOSPC, StoreFull),
    ("sync", 3, errno.EIO, StoreFailed),
    ("close", 1, errno.EIO, StoreFailed),
    ("close", 3, errno.EDQUOT, StoreFull),
    ("rename", 1, errno.EIO, StoreFailed),
    ("rename", 2, errno.EXDEV, StoreFailed),
    ("rename", 3, errno.EROFS, StoreFailed),
    ("make_directory", 1, errno.ENOSPC, StoreFull),
    ("make_directory", 1, errno.ENOENT, StoreError),
    ("sync_directory", 1, errno.EIO, StoreFailed),
    ("sync_directory", 2, errno.EIO, StoreFailed),
    ("sync_directory", 3, errno.EIO, StoreFailed),
]


@pytest.mark.parametrize(("call", "nth", "number", "kind"), STEP_CALLS)
def test_a_call_fails(
    run_dir: Path,
    faults: Faults,
    caplog: pytest.LogCaptureFixture,
    call: str,
    nth: int,
    number: int,
    kind: type[StoreError],
) -> None:
    with Training(run_dir) as training:
        training.step()
        training.step()
        faults.at(call, nth, number, within=run_dir / "steps" if call not in _ON_FILES else None)
        training.step()
        assert faults.fired == 1, faults.calls
        assert training.ck.steps() == [1, 2]
        assert is_whole(run_dir, 2)
        (line,) = errors(caplog)
        assert "main:3" in line
        assert os.strerror(number).lower() in line or "vanished" in line
        last = training.ck.stats[-1]
        assert (last.step, last.durable, last.written_bytes) == (3, False, 0)
        assert last.error is not None
        assert last.error in line
        assert leftovers(run_dir) == []
        training.step()
        assert training.ck.stats[-1].durable
        assert training.ck.stats[-1].error is None
        assert is_whole(run_dir, 4)
    assert leftovers(run_dir) == []
    with pytest.raises(kind), Training(run_dir, on_error="raise") as training:
        assert training.steps == 4
        faults.at(call, nth, number, within=run_dir / "steps" if call not in _ON_FILES else None)
        training.step()
    assert faults.fired == 2


_ON_FILES = ("write_at", "sync", "close")


def test_a_fault_at_each_call_of_a_step(run_dir: Path, faults: Faults) -> None:
    """Whatever call it is, one failure costs at most its step."""
    with Training(run_dir) as training:
        for _ in range(4):
            training.step()
        training.ck._session._upkeep.finish_removal()  # type: ignore[union-attr]
        faults.watch()
        training.step()
        training.ck._session._upkeep.finish_removal()  # type: ignore[union-attr]
        calls = len(faults.calls)
        for nth in range(1, calls + 1):
            for _ in range(3):  # a step after a removal that failed does not begin another
                faults.at("any", nth, errno.EIO)
                training.step()
                with contextlib.suppress(StoreError):
                    training.ck._session._upkeep.finish_removal()  # type: ignore[union-attr]
                if faults.fired == nth:
                    break
            durable_steps = [s.step for s in training.ck.stats if s.durable]
            assert max(training.ck.steps()) == durable_steps[-1]
            assert is_whole(run_dir, durable_steps[-1])
        assert faults.fired == calls > 20
        faults.watch()
        training.step()
        assert training.ck.stats[-1].durable
        failed = [s.step for s in training.ck.stats if not s.durable]
        assert len(failed) > 10
        last = training.steps
    assert leftovers(run_dir) == []
    with Training(run_dir) as training:
        assert training.steps == last


def test_the_disk_is_full_at_every_byte(run_dir: Path, faults: Faults) -> None:
    with Training(run_dir, elements=3) as training:
        training.step()
        nbytes = sum(path.stat().st_size for path in (run_dir / "steps").rglob("*.*"))
        cuts = [*range(0, nbytes, nbytes // 40), nbytes - 1]
        for cut in cuts:
            faults.full_after(cut)
            training.step()
            assert not training.ck.stats[-1].durable
            assert "no space" in str(training.ck.stats[-1].error)
            assert training.ck.steps() == [1]
        assert leftovers(run_dir) == []
        assert faults.fired >= len(cuts) > 40
        faults.watch()
        training.step()
        assert training.ck.stats[-1].durable
        assert is_whole(run_dir, training.steps)


@pytest.mark.parametrize("call", ["create", "write_at", "sync", "truncate"])
def test_direct_writes_fail(
    run_dir: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Files of several buffers, written by a thread; the fault is in the middle."""
    monkeypatch.setattr(durable, "DIRECT_FROM_BYTES", 1 << 16)
    monkeypatch.setattr(durable, "_BUFFER_BYTES", 1 << 16)
    with Training(run_dir, elements=1 << 17) as training:
        training.step()
        threads, fds = threading.active_count(), os.listdir("/proc/self/fd")
        faults.at(call, 4 if call == "write_at" else 1, errno.ENOSPC)
        training.step()
        assert faults.fired == 1
        assert not training.ck.stats[-1].durable
        assert leftovers(run_dir) == []
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == len(fds)
        training.step()
        assert is_whole(run_dir, 3)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_fault_at_each_call_of_writing_files_over(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Whatever call it is, what can be read is whole, and the next try succeeds."""
    monkeypatch.setattr(durable, "DIRECT_FROM_BYTES", 1)
    held = {name: name.encode() * 3000 for name in ("old/a", "old/b", "old/c", "new/a", "new/b")}

    def put(*names: str) -> None:
        backend.put([NewFile(name, len(held[name]), [held[name]]) for name in names])

    calls = 0
    while faults.fired == calls:
        calls += 1
        backend = LocalBackend.made(tmp_path / str(calls))
        put("old/a", "old/b", "old/c")
        if interrupted:
            faults.call_at(calls, interrupt)
        else:
            faults.at("any", calls, errno.EIO)
        with contextlib.suppress(StoreError, KeyboardInterrupt):
            backend.delete("old/a", reuse=True)
            backend.delete("old/b", reuse=True)
            put("new/a", "new/b")
        faults.watch()
        visible = [(name, tmp_path / str(calls) / name) for name in held]
        for name, path in visible:
            assert not path.exists() or path.read_bytes() == held[name]
        backend.delete("old/a", reuse=True)
        backend.delete("old/b", reuse=True)
        put("new/a", "new/b")
        backend.release_spares()
        assert [name for name, path in visible if path.exists()] == ["old/c", "new/a", "new/b"]
        assert all(path.read_bytes() == held[name] for name, path in visible[2:])
        assert list(durable.temporaries(tmp_path)) == []
    assert calls > 18


def test_a_writing_thread_that_breaks_is_an_error(
    run_dir: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything but an OSError in the thread: the bytes are missing, and the step must not count."""
    monkeypatch.setattr(durable, "DIRECT_FROM_BYTES", 1 << 16)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with Training(run_dir, elements=1 << 17) as training:
        training.step()

        def broken(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(durable, "_write_direct_all", broken)
        training.step()
        assert not training.ck.stats[-1].durable
        monkeypatch.undo()
        assert training.ck.steps() == [1]
        assert leftovers(run_dir) == []


def test_no_thread_can_be_started(
    run_dir: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "DIRECT_FROM_BYTES", 1 << 16)
    with Training(run_dir, elements=1 << 17) as training:
        training.step()

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            training.step()
        assert not training.ck.stats[-1].durable
        assert "temporarily unavailable" in str(training.ck.stats[-1].error)
        training.step()
        assert is_whole(run_dir, 3)


def test_failures_in_a_row_have_a_limit(run_dir: Path, faults: Faults) -> None:
    with Training(run_dir, max_failed_steps=3) as training:
        training.step()
        faults.at("write_at", 1, errno.EIO, times=1000)
        training.step()
        training.step()
        faults.watch()
        training.step()  # a good one: counted from zero again
        faults.at("write_at", 1, errno.EIO, times=1000)
        training.step()
        training.step()
        with pytest.raises(TooManyFailedSteps, match="3 steps in a row") as caught:
            training.step()
        assert isinstance(caught.value.__cause__, StoreFailed)
        assert faults.fired == 5
        assert is_whole(run_dir, 4)


def test_many_failures_leak_nothing(run_dir: Path, faults: Faults) -> None:
    with Training(run_dir, elements=1000) as training:
        training.step()
        threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
        large = ("reopen", "truncate", "write_parts_at")
        names = [n for n in NAMES if n not in (*large, "unlink", "remove_directory")]
        for turn in range(40):
            faults.at(names[turn % len(names)], 1 + turn % 2, errno.EIO)
            training.step()
        assert faults.fired >= 30
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == fds
        files = [path.name for path in run_dir.rglob("*") if path.is_file()]
        assert len(files) < 20
    assert leftovers(run_dir) == []


def test_a_failed_step_keeps_no_memory(run_dir: Path, faults: Faults) -> None:
    """No cycle through a traceback keeps the step's buffers until some later collection."""
    import gc
    import weakref

    class Chunk(bytearray):
        pass

    kept: list[weakref.ref[Chunk]] = []
    with Training(run_dir) as training:
        training.step()

        def in_one(file: NewFile) -> Iterator[memoryview]:
            chunk = Chunk(b"".join(bytes(part) for part in file.parts))
            kept.append(weakref.ref(chunk))
            yield memoryview(chunk)

        def put(self: LocalBackend, files: Sequence[NewFile]) -> None:
            original(self, [file._replace(parts=in_one(file)) for file in files])

        original = LocalBackend.put

        gc.collect()
        gc.disable()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LocalBackend, "put", put)
                faults.at("write_at", 2, errno.EIO)
                training.step()
        finally:
            gc.enable()
        assert faults.fired == 1
        assert len(kept) == 2
        assert [ref() for ref in kept] == [None, None]


def test_the_directory_vanishes_and_comes_back(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Training(run_dir) as training:
        training.step()
        run_dir.rename(tmp_path / "elsewhere")
        training.step()
        training.step()
        assert [s.durable for s in training.ck.stats] == [True, False, False]
        assert len(errors(caplog)) == 2
        (tmp_path / "elsewhere").rename(run_dir)
        training.step()
        assert training.ck.stats[-1].durable
        assert is_whole(run_dir, 4)
    assert leftovers(run_dir) == []


def test_the_directory_is_emptied(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps written into it afterwards can be restored, and the loss is in the log."""
    with Training(run_dir, retention=Retention(keep_last=None)) as training:
        for _ in range(3):
            training.step()
        training.ck.restore(2)
        training.steps = 2
        training.step()
        subprocess.run(["find", str(run_dir), "-mindepth", "1", "-delete"], check=True)
        training.step()
        assert training.ck.stats[-1].durable
        assert "run.json is gone" in caplog.text
        assert training.ck.steps() == [4]
    assert is_whole(run_dir, 4)
    with Training(run_dir) as training:
        assert training.steps == 4
        training.step()


def test_old_steps_cannot_be_removed(
    run_dir: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    with Training(run_dir) as training:
        training.step()
        training.step()
        faults.at("unlink", 1, errno.EIO, times=1000)
        training.step()
        training.step()
        training.step()
        assert faults.fired >= 1
        assert all(s.durable for s in training.ck.stats)
        assert any("could not be removed" in line for line in errors(caplog))
        faults.watch()
        training.step()
        training.step()
    with Training(run_dir) as training:
        assert training.ck.steps() == [6, 7]


@pytest.mark.parametrize("nth", range(1, 16))
def test_interrupted_by_the_user_at_each_call(run_dir: Path, faults: Faults, nth: int) -> None:
    """SIGINT raises KeyboardInterrupt anywhere in the save."""
    with Training(run_dir) as training:
        training.step()
        faults.call_at(nth, interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.step()
        assert faults.fired == 1
        assert list(durable.temporaries(run_dir)) == []
        assert is_whole(run_dir, 1)
        faults.watch()
        training.step()
        assert is_whole(run_dir, 3)


def test_a_run_cannot_be_begun_on_a_disk_that_refuses(run_dir: Path, faults: Faults) -> None:
    """At the start there is nothing to protect: it fails, and a second try succeeds."""
    for call, number, kind in [
        ("make_directory", errno.EROFS, StoreFailed),
        ("create", errno.ENOSPC, StoreFull),
        ("rename", errno.EIO, StoreFailed),
        ("sync_directory", errno.EIO, StoreFailed),
    ]:
        faults.at(call, 1, number)
        with pytest.raises(kind), Training(run_dir):
            pass
    assert faults.fired == 4
    faults.watch()
    for _ in range(2):
        with Training(run_dir) as training:
            training.step()
    assert is_whole(run_dir, 2)


def test_a_refused_start_leaves_the_run_free(run_dir: Path, faults: Faults) -> None:
    with Training(run_dir), pytest.raises(RunBusy):
        Training(run_dir)
    with Training(run_dir) as training:
        training.step()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of half a megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs root, and the right to mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.root
def test_a_real_disk_is_full(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = small_disk / "run"
    with Training(run, elements=20_000) as training:
        training.step()
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        training.step()
        training.step()
        assert [s.durable for s in training.ck.stats] == [True, False, False]
        assert "no space left" in str(training.ck.stats[-1].error)
        assert is_whole(run, 1)
        ballast.unlink()
        training.step()
        assert training.ck.stats[-1].durable
        assert is_whole(run, 4)
    assert leftovers(run) == []
    assert len(errors(caplog)) == 2


@pytest.mark.root
def test_a_real_disk_that_is_read_only(small_disk: Path) -> None:
    run = small_disk / "run"
    with Training(run, elements=1000) as training:
        training.step()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreFailed, match="read-only"), Training(run, elements=1000):
        pass
    assert is_whole(run, 1)
