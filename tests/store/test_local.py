"""A directory as a backend: its laws, its names, its links, its errors, its locks."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import everystep
from everystep.errors import Damaged, Missing, RunBusy, StoreError, StoreFailed, StoreFull
from everystep.store import local
from everystep.store.backend import Entry, NewFile
from everystep.store.durable import SystemCalls
from everystep.store.local import LocalBackend, translated
from waiting import until

SRC = Path(everystep.__file__).parent.parent


def put(backend: LocalBackend, name: str, data: bytes = b"data") -> None:
    backend.put([NewFile(name, len(data), [data])])


def read(backend: LocalBackend, name: str) -> bytes:
    data = bytearray(backend.size(name))
    backend.read(name, memoryview(data), 0)
    return bytes(data)


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    (tmp_path / "run").mkdir()
    return LocalBackend(tmp_path / "run")


# ---------------------------------------------------------------- the verbs


def test_what_is_put_is_read_listed_moved_and_deleted(backend: LocalBackend) -> None:
    put(backend, "a/b/one", b"12345")
    put(backend, "two", b"")
    assert sorted(backend.list("")) == [Entry("a/b/one", 5), Entry("two", 0)]
    assert list(backend.list("a")) == [Entry("a/b/one", 5)]
    assert list(backend.list("nothing")) == []
    assert read(backend, "a/b/one") == b"12345"
    middle = bytearray(2)
    backend.read("a/b/one", memoryview(middle), 2)
    assert middle == b"34"
    put(backend, "a/b/one", b"other")
    backend.move("a/b/one", "c/d")
    assert sorted(backend.list("")) == [Entry("c/d", 5), Entry("two", 0)]
    backend.delete("c/d")
    backend.delete("c/d")  # what is not there is no error
    assert [entry.name for entry in backend.list("")] == ["two"]


def test_the_order_in_which_files_become_durable(tmp_path: Path) -> None:
    """All data is on the disk before any name is; names are before `put` returns."""
    seen: list[str] = []

    class Log(SystemCalls):
        def sync(self, fd: int) -> None:
            seen.append("sync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name.split(".")[1])
            super().sync(fd)

        def rename(self, source: Path, target: Path) -> None:
            seen.append(f"rename {target.name}")
            super().rename(source, target)

        def sync_directory(self, path: Path) -> None:
            seen.append(f"directory {path.name}")
            super().sync_directory(path)

    backend = LocalBackend(tmp_path, Log())
    backend.put([NewFile("d/one", 1, [b"1"]), NewFile("d/two", 1, [b"2"])])
    assert seen == [
        *[f"directory {tmp_path.name}", "sync one", "sync two"],
        *["rename one", "rename two", "directory d"],
    ]
    seen.clear()
    backend.delete("d/one")
    backend.move("d/two", "e/two")
    assert seen == [
        *["directory d", f"directory {tmp_path.name}", "rename two"],
        *["directory e", "directory d"],  # a crash in between leaves both names, not none
    ]


@pytest.mark.parametrize("call", ["create", "write_at", "sync", "rename", "sync_directory"])
def test_a_failed_put_leaves_no_temporary_and_no_half(tmp_path: Path, call: str) -> None:
    fired: list[str] = []

    def fail(*args: object) -> int:
        fired.append(call)
        raise OSError(errno.ENOSPC, "full")

    calls = SystemCalls()
    backend = LocalBackend(tmp_path, calls)
    put(backend, "d/one", b"old")
    setattr(calls, call, fail)
    with pytest.raises(StoreFull):
        backend.put([NewFile("d/one", 3, [b"new"]), NewFile("d/two", 3, [b"new"])])
    assert fired
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    if call == "sync_directory":  # all have their names; that these are durable is not promised
        assert left == {"d", "d/one", "d/two"}
    else:
        assert left == {"d", "d/one"}
        assert (tmp_path / "d" / "one").read_bytes() == b"old"


def test_a_put_into_a_directory_that_has_vanished(backend: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "run").rmdir()
    with pytest.raises(StoreFailed, match="vanished"):
        put(backend, "a/b")


def test_a_file_that_ends_too_early(backend: LocalBackend) -> None:
    put(backend, "a", b"123")
    with pytest.raises(Damaged, match="ends too early") as raised:
        backend.read("a", memoryview(bytearray(4)), 1)
    assert raised.value.at == 3
    with pytest.raises(Missing):
        backend.read("b", memoryview(bytearray(1)), 0)
    with pytest.raises(Missing):
        backend.size("b")
    with pytest.raises(Missing):
        backend.move("b", "c")


def test_deleting_beside_a_racing_writer(tmp_path: Path) -> None:
    """A file appears in the directory while it is about to be removed (G09)."""

    class Racing(SystemCalls):
        def remove_directory(self, path: Path) -> None:
            if path.name == "d" and not (path / "new").exists():
                (path / "new").write_bytes(b"racer")
            super().remove_directory(path)

    backend = LocalBackend(tmp_path, Racing())
    put(backend, "d/old")
    backend.delete("d/old")
    assert [entry.name for entry in backend.list("")] == ["d/new"]


def test_sweep_removes_what_dead_processes_left_and_not_its_own(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    put(backend, "d/file")
    (tmp_path / "d" / ".file.77-abc.tmp").write_bytes(b"half")
    own = tmp_path / "d" / f".file.{backend._tag}.tmp"
    own.write_bytes(b"being written")
    backend.sweep()
    assert sorted(os.listdir(tmp_path / "d")) == sorted([own.name, "file"])


# ---------------------------------------------------------------- names and links


@pytest.mark.parametrize(
    "name",
    [
        *["", ".", "..", "../x", "a/../x", "/etc/passwd", "a//b", "a/", "a\\b", "a b", "a\nb"],
        *[".hidden", "a/.b", "ä", "a\0b", "x" * 242, "~", "a:b"],
    ],
)
def test_names_that_could_lead_elsewhere_are_refused(
    backend: LocalBackend, tmp_path: Path, name: str
) -> None:
    (tmp_path / "x").write_bytes(b"outside")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreFailed, match="not a name"):
        put(backend, name)
    with pytest.raises(StoreFailed, match="not a name"):
        backend.read(name, memoryview(bytearray(1)), 0)
    with pytest.raises(StoreFailed, match="not a name"):
        backend.size(name)
    with pytest.raises(StoreFailed, match="not a name"):
        backend.delete(name)
    with pytest.raises(StoreFailed, match="not a name"):
        backend.move("a", name)
    assert sorted(tmp_path.rglob("*")) == before


def test_links_are_seen_and_never_followed(backend: LocalBackend, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    run = tmp_path / "run"
    (run / "file").symlink_to(outside / "secret")
    (run / "folder").symlink_to(outside)
    assert sorted(entry.name for entry in backend.list("")) == ["file", "folder"]
    assert list(backend.list("folder")) == []
    for name in ("file", "folder"):
        with pytest.raises(Damaged, match="link"):
            backend.size(name)
        with pytest.raises(Damaged, match="link"):
            backend.read(name, memoryview(bytearray(1)), 0)
    with pytest.raises(StoreFailed, match="link"):
        backend.read("folder/secret", memoryview(bytearray(1)), 0)
    with pytest.raises(StoreFailed, match="link"):
        put(backend, "folder/new")
    with pytest.raises(StoreFailed, match="link"):
        backend.delete("folder/secret")
    put(backend, "file", b"replaced")  # the link goes, not what it leads to
    backend.delete("folder")
    assert (run / "file").read_bytes() == b"replaced"
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"secret": b"secret"}


def test_the_run_directory_itself_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    put(LocalBackend(tmp_path / "link"), "a")
    assert (tmp_path / "real" / "a").read_bytes() == b"data"


def test_special_files_are_seen_and_never_opened(backend: LocalBackend, tmp_path: Path) -> None:
    """Opening a pipe for reading waits for a writer; it must not."""
    run = tmp_path / "run"
    os.mkfifo(run / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(run / "socket"))
    names = ["pipe", "socket"]
    assert sorted(entry.name for entry in backend.list("")) == names
    for name in names:
        with pytest.raises(Damaged, match="special"):
            backend.read(name, memoryview(bytearray(0)), 0)
        with pytest.raises(Damaged, match="special"):
            backend.size(name)
    with pytest.raises(Damaged, match="special"), backend.lock("pipe", 0):
        pass


def test_names_that_are_not_text_are_shown_and_reach_no_file(
    backend: LocalBackend, tmp_path: Path
) -> None:
    raw = os.fsencode(tmp_path / "run") + b"/\xff.json"
    Path(os.fsdecode(raw)).write_bytes(b"")
    assert [entry.name for entry in backend.list("")] == ["\\xff.json"]
    with pytest.raises(StoreFailed, match="not a name"):
        backend.size("\\xff.json")


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_errno_becomes_one_of_our_errors(number: int) -> None:
    with pytest.raises(StoreError) as raised, translated(Path("some", "file")):
        raise OSError(number, "as the system says")
    expected: type[StoreError] = StoreFailed
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        expected = StoreFull
    elif number == errno.ENOENT:
        expected = Missing
    assert type(raised.value) is expected
    assert isinstance(raised.value.__cause__, OSError)
    assert str(Path("some", "file")) in str(raised.value)


def test_an_error_without_a_number_is_translated_too() -> None:
    with pytest.raises(StoreFailed, match="odd"), translated(Path("file")):
        raise OSError("odd")


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreFailed, match="not a directory"):
        local.exists(tmp_path / "file")
    backend = LocalBackend(tmp_path)
    with pytest.raises(StoreFailed):
        put(backend, "file/inside")
    with pytest.raises(StoreFailed):
        list(backend.list("file"))


# ---------------------------------------------------------------- locks

HOLD = """
import os, sys
from pathlib import Path
from everystep.store.local import LocalBackend
with LocalBackend(Path(sys.argv[1])).lock("owner.lock", int(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(root: Path, slot: int) -> subprocess.Popen[str]:
    """A process that owns a slot until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root), str(slot)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LOCK_PATIENCE_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_another_process_holds_the_lock_until_it_is_killed(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(tmp_path / "run", 0) as process:
        with pytest.raises(RunBusy, match=f"process {process.pid}"), backend.lock("owner.lock", 0):
            pass
        with backend.lock("owner.lock", 1):  # another slot is free
            pass
        process.send_signal(signal.SIGKILL)
        monkeypatch.setattr(local, "LOCK_PATIENCE_S", 10.0)
        with backend.lock("owner.lock", 0):
            assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "run" / "owner.lock").read_bytes() == b""


def test_one_process_cannot_hold_a_slot_twice(backend: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("run")
    with backend.lock("owner.lock", 0):
        for path in (tmp_path / "run", tmp_path / "link"):
            with (
                pytest.raises(RunBusy, match="this process already"),
                LocalBackend(path).lock("owner.lock", 0),
            ):
                pass
        with LocalBackend(tmp_path / "run").lock("other.lock", 0):
            pass
    with backend.lock("owner.lock", 0):  # given up, and free again
        pass


@pytest.mark.usefixtures("impatient")
def test_a_forked_child_neither_has_the_lock_nor_ends_it(
    backend: LocalBackend, tmp_path: Path
) -> None:
    tries = (
        f"import sys; sys.path.insert(0, {str(SRC)!r})\n"
        "from pathlib import Path\n"
        "from everystep.errors import RunBusy\n"
        "from everystep.store import local\n"
        "local.LOCK_PATIENCE_S = 0.0\n"
        "try:\n"
        f"    with local.LocalBackend(Path({str(tmp_path / 'run')!r})).lock('owner.lock', 0):\n"
        "        sys.exit(3)\n"
        "except RunBusy as error:\n"
        "    sys.exit(0 if 'this process' not in str(error) else 4)\n"
    )
    program = (
        f"import os, sys; sys.path.insert(0, {str(SRC)!r})\n"
        "from pathlib import Path\n"
        "from everystep.errors import RunBusy\n"
        "from everystep.store import local\n"
        "local.LOCK_PATIENCE_S = 0.0\n"
        f"backend = local.LocalBackend(Path({str(tmp_path / 'run')!r}))\n"
        "with backend.lock('owner.lock', 0):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        try:\n"
        "            with backend.lock('owner.lock', 0): os._exit(3)\n"
        "        except RunBusy: pass\n"
        "        raise SystemExit(0)  # unwinds the context and closes its descriptor\n"
        "    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]): sys.exit(1)\n"
        "    print('child is gone', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "child is gone\n"
        other = subprocess.run([sys.executable, "-c", tries], timeout=60, check=False)
        assert other.returncode == 0
        process.kill()


def test_a_slot_is_waited_for(backend: LocalBackend, tmp_path: Path) -> None:
    """The process before may still be on its way out."""
    with holder(tmp_path / "run", 3) as process:
        assert process.stdin is not None
        waiting = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / "run"), "3"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        with waiting:
            locks = tmp_path / "run" / "owner.lock"
            until(
                lambda: any(
                    os.path.realpath(link) == str(locks)
                    for link in Path(f"/proc/{waiting.pid}/fd").glob("*")
                ),
                20,
                "the second process to want the lock",
            )
            process.stdin.close()
            assert waiting.communicate(timeout=20)[0] == "held\n"
            assert waiting.returncode == 0


def test_a_read_only_lock_file(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(local.os, "open", refuse)
    with pytest.raises(StoreFailed, match="permission"), backend.lock("owner.lock", 0):
        pass
    monkeypatch.undo()
    with backend.lock("owner.lock", 0):  # the failure is not remembered as an owner
        pass
