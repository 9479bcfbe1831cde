"""The one way in which files come to be: order of the calls, lengths, faults, refusals."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byte_runs import noise
from everystep.errors import StoreFailed
from everystep.store import durable
from everystep.store.durable import SystemCalls, make_directories, write_new
from everystep.types import Buffer
from waiting import until

BLOCK = 4096
BUFFER = 2 * BLOCK


class Recorder(SystemCalls):
    """Notes every call; may fail at the n-th of them."""

    def __init__(self, fail_at: int | None = None, number: int = errno.EIO) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.fail_at, self.number = fail_at, number
        self.fired = 0
        self.paths: dict[int, str] = {}

    def note(self, call: str, what: Any) -> None:
        self.seen.append((call, what))
        if self.fail_at is not None and len(self.seen) - 1 == self.fail_at:
            self.fired += 1
            raise OSError(self.number, os.strerror(self.number))

    @property
    def order(self) -> list[str]:
        """The calls, with repeats of one after the other as one."""
        names = [call for call, _ in self.seen]
        return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]

    def create(self, path: Path, flags: int) -> int:
        self.note("create", path.name)
        fd = super().create(path, flags)
        self.paths[fd] = path.name
        return fd

    def reopen(self, path: Path) -> int:
        self.note("reopen", path.name)
        fd = super().reopen(path)
        self.paths[fd] = path.name
        return fd

    def write_at(self, fd: int, data: Buffer, offset: int) -> int:
        self.note("write", (offset, len(data)))
        return super().write_at(fd, data, offset)

    def truncate(self, fd: int, nbytes: int) -> None:
        self.note("truncate", nbytes)
        super().truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        self.note("sync", self.paths[fd])
        super().sync(fd)

    def close(self, fd: int) -> None:
        super().close(fd)
        self.note("close", self.paths[fd])

    def sync_directory(self, path: Path) -> None:
        self.note("sync_directory", path.name)
        super().sync_directory(path)

    def make_directory(self, path: Path) -> None:
        self.note("make_directory", path.name)
        super().make_directory(path)

    def unlink(self, path: Path) -> None:
        self.seen.append(("unlink", path.name))  # the clean-up itself is never made to fail
        super().unlink(path)


@pytest.fixture(params=["buffered", "direct"])
def small_buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either way of writing, with buffers of two blocks, so that few bytes pass many bounds."""
    monkeypatch.setattr(durable, "_BUFFER_BYTES", BUFFER)
    monkeypatch.setattr(durable, "DIRECT_FROM_BYTES", 1 if request.param == "direct" else 1 << 60)
    kind: str = request.param
    return kind


def cut(data: bytes, sizes: int) -> Iterator[bytes]:
    for start in range(0, len(data), sizes):
        yield data[start : start + sizes]


def test_the_order_of_the_calls(tmp_path: Path, small_buffers: str) -> None:
    calls = Recorder()
    data = noise(3 * BUFFER + 5)
    temporary = write_new(tmp_path / "a", len(data), cut(data, 1000), "tag", calls)
    assert temporary.read_bytes() == data
    expected = ["create", "write", "truncate", "sync", "close"]
    if small_buffers == "buffered":
        expected.remove("truncate")
    assert calls.order == expected
    assert sorted(os.listdir(tmp_path)) == [".a.tag.tmp"]
    assert durable.is_temporary(str(temporary))


@pytest.mark.parametrize(
    "length",
    [0, 1, BLOCK - 1, BLOCK, BLOCK + 1] + [n * BUFFER + d for n in (1, 2, 5) for d in (-1, 0, 1)],
)
@pytest.mark.parametrize("parts", [999, BLOCK, 3 * BUFFER])
def test_every_length_around_a_bound(
    tmp_path: Path, small_buffers: str, length: int, parts: int
) -> None:
    data = noise(length)
    written = write_new(tmp_path / "a", length, cut(data, parts), "tag", SystemCalls())
    assert written.read_bytes() == data


def test_a_part_may_be_reused_once_the_next_is_asked_for(
    tmp_path: Path, small_buffers: str
) -> None:
    data = noise(5 * BUFFER + 3)
    one = bytearray(700)

    def parts() -> Iterator[memoryview]:
        for chunk in cut(data, len(one)):
            one[: len(chunk)] = chunk
            yield memoryview(one)[: len(chunk)]

    written = write_new(tmp_path / "a", len(data), parts(), "tag", SystemCalls())
    assert written.read_bytes() == data


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_fault_at_any_call_leaves_nothing(
    tmp_path: Path, small_buffers: str, number: int
) -> None:
    data = noise(3 * BUFFER + 5)
    rehearsal = Recorder()
    write_new(tmp_path / "a", len(data), [data], "tag", rehearsal).unlink()
    for call in range(len(rehearsal.seen)):
        calls = Recorder(fail_at=call, number=number)
        with pytest.raises(OSError) as raised:
            write_new(tmp_path / "a", len(data), [data], "tag", calls)
        assert (calls.fired, raised.value.errno) == (1, number)
        assert os.listdir(tmp_path) == [], f"call {call} of {rehearsal.seen}"


@pytest.mark.parametrize("length", [4, 6])
def test_another_length_than_announced_is_refused(
    tmp_path: Path, small_buffers: str, length: int
) -> None:
    with pytest.raises(StoreFailed, match="another length"):
        write_new(tmp_path / "a", 5, [bytes(length)], "tag", SystemCalls())
    assert os.listdir(tmp_path) == []


def test_a_source_that_fails_leaves_nothing(tmp_path: Path, small_buffers: str) -> None:
    def parts() -> Iterator[bytes]:
        yield noise(3 * BUFFER)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_new(tmp_path / "a", 4 * BUFFER, parts(), "tag", SystemCalls())
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- parts that last


class Addresses(SystemCalls):
    """Notes from where in memory what is written comes, and how much anonymous memory there is."""

    def __init__(self) -> None:
        self.sources: list[tuple[int, int, int]] = []
        self.anonymous_bytes = 0

    def write_at(self, fd: int, data: Buffer, offset: int) -> int:
        self.sources.append((address_of(data), len(data), offset))
        self.anonymous_bytes = max(self.anonymous_bytes, anonymous_bytes())
        return super().write_at(fd, data, offset)


def address_of(data: Buffer) -> int:
    found: int = np.frombuffer(data, np.uint8).ctypes.data
    return found


def anonymous_bytes() -> int:
    """What this process has of memory that is in no file."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise LookupError("RssAnon")


@contextlib.contextmanager
def image(data: bytes) -> Iterator[memoryview]:
    """Shared memory that holds these bytes, page-aligned. At the end nobody may have a view of
    it, or it could not be closed."""
    fd = os.memfd_create("image")
    try:
        os.write(fd, data)
        with mmap.mmap(fd, len(data)) as memory, memoryview(memory) as view:
            yield view
    finally:
        os.close(fd)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_BUFFER_BYTES", BUFFER)
    monkeypatch.setattr(durable, "DIRECT_FROM_BYTES", 1)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("length", [1, BLOCK, BUFFER + 1, 5 * BUFFER - 1, 5 * BUFFER + BLOCK + 7])
@pytest.mark.parametrize("sizes", [1 << 30, 3 * BUFFER, BLOCK, BLOCK + 8, 1000])
def test_what_is_aligned_is_written_from_where_it_lies(
    tmp_path: Path, length: int, sizes: int
) -> None:
    data = noise(length)
    calls = Addresses()
    with image(data) as view:
        start = address_of(view)
        parts = (view[at : at + sizes] for at in range(0, length, sizes))
        written = write_new(tmp_path / "a", length, parts, "tag", calls, lasting=True)
        del parts
    assert written.read_bytes() == data
    assert all(nbytes <= BUFFER for _, nbytes, _ in calls.sources)
    in_place = {at // BLOCK for at, nbytes, to in calls.sources if at - start == to
                for at in range(to, to + nbytes, BLOCK)}  # fmt: skip
    within = {
        block
        for part in range(0, length, sizes)
        for block in range(-(-part // BLOCK), min(part + sizes, length) // BLOCK)
    }
    assert in_place == within


@pytest.mark.usefixtures("direct")
def test_what_is_not_aligned_as_in_the_file_is_copied(tmp_path: Path) -> None:
    data = noise(3 * BUFFER)
    calls = Addresses()
    with image(b"123" + data) as view:
        write_new(tmp_path / "a", len(data), [view[3:]], "tag", calls, lasting=True)
        inside = range(address_of(view), address_of(view) + len(view))
        assert not any(at in inside for at, _, _ in calls.sources)
    assert (tmp_path / ".a.tag.tmp").read_bytes() == data


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("lasting", [False, True])
def test_parts_that_do_not_last_or_are_read_only_are_copied(tmp_path: Path, lasting: bool) -> None:
    data = noise(BUFFER)
    calls = Addresses()
    with image(data) as view, view.toreadonly() as fixed:
        part = fixed if lasting else view
        written = write_new(tmp_path / "a", BUFFER, [part], "tag", calls, lasting=lasting)
        assert address_of(view) not in [at for at, _, _ in calls.sources]
    assert written.read_bytes() == data


@pytest.mark.usefixtures("direct")
def test_parts_are_asked_for_while_others_are_written(tmp_path: Path) -> None:
    """The next piece is made while two are under way, and no more than these."""
    asked: list[int] = []
    go_on = threading.Event()

    class Waits(SystemCalls):
        def write_at(self, fd: int, data: Buffer, offset: int) -> int:
            assert go_on.wait(60)
            return super().write_at(fd, data, offset)

    def parts(view: memoryview) -> Iterator[memoryview]:
        for at in range(0, len(view), BUFFER):
            asked.append(at // BUFFER)
            yield view[at : at + BUFFER]

    with image(noise(6 * BUFFER)) as view:
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(
                write_new, tmp_path / "a", len(view), parts(view), "t", Waits(), lasting=True
            )
            try:
                until(lambda: len(asked) >= 3, 60, "the third piece to be asked for")
                assert not writing.done()
                assert asked == [0, 1, 2]  # it is held back until the first is written
            finally:
                go_on.set()
            written = writing.result()
        assert written.read_bytes() == bytes(view)
        del writing
    assert asked == [0, 1, 2, 3, 4, 5]


def test_an_aligned_file_takes_no_memory(tmp_path: Path) -> None:
    nbytes = (40 << 20) + 5
    calls = Addresses()
    with image(bytes(nbytes)) as view:
        before = anonymous_bytes()
        write_new(tmp_path / "a", nbytes, [view], "tag", calls, lasting=True)
    assert len(calls.sources) == 4
    assert calls.anonymous_bytes - before < 2 << 20


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_fault_in_the_middle_of_lasting_parts(tmp_path: Path, number: int) -> None:
    with image(noise(6 * BUFFER + 5)) as view:
        for call in range(1, 8):
            calls = Recorder(fail_at=call, number=number)
            with pytest.raises(OSError) as raised:
                write_new(tmp_path / "a", len(view), [view], "tag", calls, lasting=True)
            assert (calls.fired, raised.value.errno) == (1, number)
            assert os.listdir(tmp_path) == []
            del raised


# ---------------------------------------------------------------- files that are written over


@pytest.fixture
def spare(tmp_path: Path) -> Path:
    path = tmp_path / ".spare.tmp"
    path.write_bytes(noise(4 * BUFFER, "old"))
    return path


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("length", [4 * BUFFER, 4 * BUFFER - 1, 3 * BUFFER + 5])
def test_a_spare_is_written_over_and_cut(tmp_path: Path, spare: Path, length: int) -> None:
    inode = spare.stat().st_ino
    calls = Recorder()
    data = noise(length, "new")
    written = write_new(tmp_path / "a", length, [data], "tag", calls, spare=spare)
    assert calls.order == ["reopen", "write", "truncate", "sync", "close"]
    assert (written, written.stat().st_ino) == (spare, inode)
    assert written.read_bytes() == data


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("in_use", ["another name", "open", "mapped", "a link", "gone"])
def test_a_spare_that_somebody_can_still_see_is_left_as_it_is(
    tmp_path: Path, spare: Path, in_use: str
) -> None:
    old = spare.read_bytes()
    with contextlib.ExitStack() as stack:
        kept = tmp_path / "kept"
        if in_use == "a link":
            spare.rename(kept)
            spare.symlink_to(kept)
        elif in_use == "another name":
            os.link(spare, kept)
        elif in_use == "gone":
            spare.unlink()
        else:
            file = stack.enter_context(spare.open("rb"))
            if in_use == "mapped":
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                stack.enter_context(memory)
                file.close()
        data = noise(4 * BUFFER, "new")
        written = write_new(tmp_path / "a", len(data), [data], "tag", SystemCalls(), spare=spare)
        if in_use == "open":
            assert file.read() == old
        elif in_use == "mapped":
            assert memory[:] == old
        elif in_use != "gone":
            assert kept.read_bytes() == old
    assert written.name == ".a.tag.tmp"
    assert written.read_bytes() == data
    assert not os.path.lexists(spare)


@pytest.mark.usefixtures("direct")
def test_a_fault_while_a_spare_is_written_over_leaves_nothing(tmp_path: Path) -> None:
    fired = 0
    for call in range(9):
        spare = tmp_path / ".spare.tmp"
        spare.write_bytes(noise(4 * BUFFER, "old"))
        calls = Recorder(fail_at=call)
        data = noise(4 * BUFFER, "new")
        try:
            write_new(tmp_path / "a", len(data), [data], "tag", calls, spare=spare).unlink()
            assert call == 0 or not calls.fired  # where it cannot be opened, a new file is made
        except OSError:
            assert calls.fired == 1
        fired += calls.fired
        assert os.listdir(tmp_path) == [], f"call {call} of {calls.seen}"
    assert fired == 8


# ---------------------------------------------------------------- refusals


class NoDirect(SystemCalls):
    """A file system that refuses direct writes when the file is opened."""

    refused = 0

    def create(self, path: Path, flags: int) -> int:
        fd = super().create(path, flags & ~os.O_DIRECT)
        if flags & os.O_DIRECT:
            os.close(fd)  # the kernel leaves the file behind, too
            self.refused += 1
            raise OSError(errno.EINVAL, "no direct writes here")
        return fd


class LateNoDirect(SystemCalls):
    """One that refuses them only when they come."""

    refused = 0

    def __init__(self, from_offset: int) -> None:
        self.from_offset = from_offset
        self.direct = True

    def write_at(self, fd: int, data: Buffer, offset: int) -> int:
        if self.direct and offset >= self.from_offset:
            self.refused += 1
            raise OSError(errno.EINVAL, "no direct writes here")
        return super().write_at(fd, data, offset)

    def write_through_cache(self, fd: int) -> None:
        self.direct = False
        super().write_through_cache(fd)


class ShortWrites(SystemCalls):
    """A disk that takes a few bytes at a time: the rest of a direct write is not aligned."""

    refused = 0

    def write_at(self, fd: int, data: Buffer, offset: int) -> int:
        self.refused += 1
        return super().write_at(fd, memoryview(data)[: max(1, len(data) - 1)], offset)


@pytest.mark.parametrize(
    "make",
    [NoDirect, lambda: LateNoDirect(0), lambda: LateNoDirect(BUFFER), ShortWrites],
    ids=["when opened", "at the first write", "later", "short writes"],
)
def test_a_file_system_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    monkeypatch.setattr(durable, "_BUFFER_BYTES", BUFFER)
    monkeypatch.setattr(durable, "DIRECT_FROM_BYTES", 1)
    calls = make()
    data = noise(3 * BUFFER + 17)
    written = write_new(tmp_path / "a", len(data), [data], "tag", calls)
    assert calls.refused >= 1
    assert written.read_bytes() == data


def test_a_write_that_takes_nothing_ends(tmp_path: Path, small_buffers: str) -> None:
    class Full(SystemCalls):
        def write_at(self, fd: int, data: Buffer, offset: int) -> int:
            return 0

    with pytest.raises(OSError) as raised:
        write_new(tmp_path / "a", 5, [b"12345"], "tag", Full())
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_large_files_are_written_directly(tmp_path: Path) -> None:
    asked: dict[str, int] = {}

    class Flags(SystemCalls):
        def create(self, path: Path, flags: int) -> int:
            asked[path.name] = flags
            return super().create(path, flags)

    for length in (durable.DIRECT_FROM_BYTES - 1, durable.DIRECT_FROM_BYTES):
        write_new(tmp_path / str(length), length, [bytes(length)], "tag", Flags())
    assert list(asked.values()) == [0, os.O_DIRECT]


def test_the_name_of_a_temporary_must_be_free(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"mine")
    (tmp_path / ".a.tag.tmp").symlink_to("elsewhere")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", 1, [b"x"], "tag", SystemCalls())
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"


def test_each_new_directory_is_made_durable_in_its_parent(tmp_path: Path) -> None:
    calls = Recorder()
    anchored: set[Path] = set()
    make_directories(tmp_path, tmp_path / "a" / "b" / "c", anchored, calls)
    assert calls.seen == [
        *[("make_directory", "a"), ("sync_directory", tmp_path.name)],
        *[("make_directory", "b"), ("sync_directory", "a")],
        *[("make_directory", "c"), ("sync_directory", "b")],
    ]
    again = Recorder()
    make_directories(tmp_path, tmp_path / "a" / "b" / "c", anchored, again)
    assert again.seen == []
    (tmp_path / "a" / "b" / "c").rmdir()  # by another process
    make_directories(tmp_path, tmp_path / "a" / "b" / "c", anchored, again)
    assert again.seen == [("make_directory", "c"), ("sync_directory", "b")]


def test_a_directory_that_a_dead_process_made_is_made_durable_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    calls = Recorder()
    anchored: set[Path] = set()
    for _ in range(2):
        make_directories(tmp_path, tmp_path / "a", anchored, calls)
    assert [call for call, _ in calls.seen] == ["make_directory", "sync_directory"]


def test_a_directory_that_another_rank_made_meanwhile(tmp_path: Path) -> None:
    class Late(SystemCalls):
        def make_directory(self, path: Path) -> None:
            super().make_directory(path)
            super().make_directory(path)  # raises FileExistsError, as for the slower rank

    make_directories(tmp_path, tmp_path / "a" / "b", set(), Late())
    assert (tmp_path / "a" / "b").is_dir()


def test_temporaries_are_found_and_links_not_followed(tmp_path: Path) -> None:
    inside = tmp_path / "run" / "steps"
    inside.mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    for directory in (inside, outside):
        (directory / ".x.json.1-2.tmp").write_bytes(b"")
        (directory / "x.json").write_bytes(b"")
    (inside / "link").symlink_to(outside)
    assert list(durable.temporaries(tmp_path / "run")) == [inside / ".x.json.1-2.tmp"]
