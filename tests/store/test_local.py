"""A directory as a backend: its laws, its names, its links, its errors, its locks."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import everystep
from everystep.errors import Damaged, Missing, RunBusy, StoreError, StoreFailed, StoreFull
from everystep.store import durable, local
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


# ---------------------------------------------------------------- files that are written over


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of any size are written directly, and may be written over."""
    monkeypatch.setattr(durable, "DIRECT_FROM_BYTES", 1)


def spares(root: Path) -> list[int]:
    """The lengths of what is kept for reuse, oldest first."""
    found = sorted(root.glob(".spare-*.tmp"), key=lambda path: path.name)
    assert all(durable.is_temporary(path.name) for path in found)
    return [path.stat().st_size for path in found]


@pytest.mark.usefixtures("all_large")
def test_a_file_takes_the_space_of_a_deleted_one(tmp_path: Path) -> None:
    seen: list[str] = []

    class Log(SystemCalls):
        def rename(self, source: Path, target: Path) -> None:
            seen.append(f"rename {source.name[:7]} {target.name[:7]}")
            super().rename(source, target)

        def sync_directory(self, path: Path) -> None:
            seen.append(f"directory {path.relative_to(tmp_path)}")
            super().sync_directory(path)

        def create(self, path: Path, flags: int) -> int:
            seen.append(f"create {path.name}")
            return super().create(path, flags)

        def reopen(self, path: Path) -> int:
            seen.append(f"reopen {path.name[:7]}")
            return super().reopen(path)

    backend = LocalBackend(tmp_path, Log())
    put(backend, "d/old", b"0123456789")
    put(backend, "d/other")
    inode = (tmp_path / "d/old").stat().st_ino
    seen.clear()
    backend.delete("d/old", reuse=True)
    assert seen == ["rename old .spare-", "directory d", "directory ."]
    assert spares(tmp_path) == [10]
    with pytest.raises(Missing):
        backend.size("d/old")
    seen.clear()
    put(backend, "d/new", b"abcdefghi")
    assert seen == ["directory .", "reopen .spare-", "rename .spare- new", "directory d"]
    assert (tmp_path / "d/new").stat().st_ino == inode
    assert read(backend, "d/new") == b"abcdefghi"
    assert spares(tmp_path) == []


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize(("length", "taken"), [(7, 0), (8, 1), (10, 1), (11, 0)])
def test_a_spare_fits_files_of_about_its_size(tmp_path: Path, length: int, taken: int) -> None:
    backend = LocalBackend(tmp_path)
    put(backend, "old", bytes(10))
    backend.delete("old", reuse=True)
    put(backend, "new", bytes(length))
    assert len(spares(tmp_path)) == 1 - taken


@pytest.mark.usefixtures("all_large")
def test_spares_are_few_and_no_larger_than_a_put(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    for size in (10, 11, 12, 13, 14):
        put(backend, str(size), bytes(size))
    for size in (10, 11, 12):
        backend.delete(str(size), reuse=True)
        assert spares(tmp_path) == [size]  # the oldest goes: two are more than the largest put
    backend.put([NewFile(f"p{n}", 100, [bytes(100)]) for n in range(2)])
    backend.delete("13", reuse=True)
    backend.delete("p0", reuse=True)
    assert spares(tmp_path) == [12, 13, 100]
    backend.put([NewFile(f"q{n}", 10, [bytes(10)]) for n in range(4)])
    assert spares(tmp_path) == [13, 100]
    for n in range(4):
        backend.delete(f"q{n}", reuse=True)
    assert spares(tmp_path) == [10, 10, 10, 10]  # at most four


@pytest.mark.usefixtures("all_large")
def test_what_may_not_be_written_over_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    backend = LocalBackend(tmp_path / "run")
    put(backend, "linked", b"kept by somebody")
    os.link(tmp_path / "run/linked", tmp_path / "kept")
    (tmp_path / "run/link").symlink_to(tmp_path / "kept")
    os.mkfifo(tmp_path / "run/pipe")
    monkeypatch.setattr(durable, "DIRECT_FROM_BYTES", 5)
    put(backend, "small")
    for name in ("linked", "link", "pipe", "small", "nothing"):
        backend.delete(name, reuse=True)
    put(LocalBackend(tmp_path / "run"), "before")
    LocalBackend(tmp_path / "run").delete("before", reuse=True)  # nothing was put: no bound known
    assert os.listdir(tmp_path / "run") == []
    assert (tmp_path / "kept").read_bytes() == b"kept by somebody"


@pytest.mark.usefixtures("all_large")
def test_a_file_that_was_linked_after_it_was_deleted_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()

    class Racing(SystemCalls):
        def rename(self, source: Path, target: Path) -> None:
            if source.name == "a":
                os.link(source, tmp_path / "kept")
            super().rename(source, target)

    backend = LocalBackend(tmp_path / "run", Racing())
    put(backend, "a", b"first")
    backend.delete("a", reuse=True)
    put(backend, "b", b"later")
    assert (tmp_path / "kept").read_bytes() == b"first"
    assert os.listdir(tmp_path / "run") == ["b"]


@pytest.mark.usefixtures("all_large")
def test_a_file_whose_name_may_come_back_is_not_written_over(tmp_path: Path) -> None:
    fail: list[str] = []

    class Failing(SystemCalls):
        def sync_directory(self, path: Path) -> None:
            if path.name in fail:
                raise OSError(errno.EIO, "no")
            super().sync_directory(path)

    backend = LocalBackend(tmp_path, Failing())
    for directory in ("d", tmp_path.name):
        put(backend, "d/stays")
        put(backend, "d/a")
        fail[:] = [directory]
        with pytest.raises(StoreFailed):
            backend.delete("d/a", reuse=True)
        fail.clear()
        assert os.listdir(tmp_path) == ["d"]
        assert os.listdir(tmp_path / "d") == ["stays"]


@pytest.mark.usefixtures("all_large")
def test_a_directory_on_another_disk(tmp_path: Path) -> None:
    class Mounted(SystemCalls):
        def rename(self, source: Path, target: Path) -> None:
            if source.parent != target.parent:
                raise OSError(errno.EXDEV, "across disks")
            super().rename(source, target)

    backend = LocalBackend(tmp_path, Mounted())
    put(backend, "d/a")
    backend.delete("d/a", reuse=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("all_large")
def test_spares_go_when_there_is_no_space_for_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(tmp_path)
    free = [100]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free[0]))
    put(backend, "a", bytes(50))
    backend.delete("a", reuse=True)
    put(backend, "b", bytes(100))
    assert spares(tmp_path) == [50]
    free[0] = 99
    put(backend, "c", bytes(40))  # takes it
    backend.delete("c", reuse=True)
    assert spares(tmp_path) == [40]
    put(backend, "d", bytes(100))
    assert spares(tmp_path) == []


@pytest.mark.usefixtures("all_large")
def test_spares_go_when_a_put_finds_no_space(tmp_path: Path) -> None:
    calls = SystemCalls()
    backend = LocalBackend(tmp_path, calls)
    put(backend, "a", bytes(50))
    put(backend, "b", bytes(50))
    backend.delete("a", reuse=True)

    def full(path: Path) -> None:
        raise OSError(errno.EDQUOT, "no more")

    calls.make_directory = full  # type: ignore[method-assign]
    with pytest.raises(StoreFull):
        put(backend, "d/c", bytes(50))
    assert spares(tmp_path) == []


@pytest.mark.usefixtures("all_large")
def test_spares_are_released_by_their_owner_or_swept_by_the_next(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    for end in (backend.release_spares, LocalBackend(tmp_path).sweep):
        put(backend, "a")
        backend.delete("a", reuse=True)
        backend.sweep()
        assert spares(tmp_path) == [4]
        end()
        assert os.listdir(tmp_path) == []
    put(backend, "a", b"others")  # the spare that was swept is not missed
    assert read(backend, "a") == b"others"


class Careless(SystemCalls):
    """Writes over files that somebody has open."""

    reopened = 0

    def reopen(self, path: Path) -> int:
        self.reopened += 1
        return os.open(path, os.O_WRONLY | os.O_DIRECT)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("name", ["b", "a"])
def test_what_was_written_over_while_it_was_read_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its space is now that of another file, or of another of the same name."""
    calls = Careless()
    backend = LocalBackend(tmp_path, calls)
    put(backend, "a", b"12345678")
    reader = LocalBackend(tmp_path)
    preadv = os.preadv

    def half(fd: int, buffers: list[memoryview], offset: int) -> int:
        taken = preadv(fd, [buffers[0][:4]], offset)
        if offset == 0:
            backend.delete("a", reuse=True)
            put(backend, name, b"abcdefgh")
        return taken

    monkeypatch.setattr(local.os, "preadv", half)
    into = bytearray(8)
    with pytest.raises(Missing):
        reader.read("a", memoryview(into), 0)
    assert calls.reopened == 1
    assert into == b"1234efgh"


@pytest.mark.usefixtures("all_large")
def test_a_file_that_is_appended_to_while_it_is_read(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first bytes stay, however large it is."""
    backend.append("a", [b"12345678"], 0)
    preadv, calls = os.preadv, []

    def longer(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        backend.append("a", [b"more"], 4 + 4 * len(calls))
        return preadv(fd, [buffers[0][:4]], offset)

    monkeypatch.setattr(local.os, "preadv", longer)
    assert read(backend, "a") == b"12345678"
    assert calls == [0, 4]


def test_a_small_file_that_is_replaced_while_it_is_read(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of the file that was opened: it is never written over."""
    put(backend, "a", b"before")
    preadv = os.preadv

    def replaced(fd: int, buffers: list[memoryview], offset: int) -> int:
        put(backend, "a", b"behind")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(local.os, "preadv", replaced)
    assert read(backend, "a") == b"before"


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
