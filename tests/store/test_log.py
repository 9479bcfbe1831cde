"""The log: what is appended is read back, and nothing else is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from byte_logs import LAYOUT, RUN, new_log, payload, record, write_log
from byte_runs import NoSync, files_of
from everystep.errors import Damaged, Missing, StoreError, StoreFailed, StoreFull
from everystep.store import logformat as lf
from everystep.store.backend import Backend
from everystep.store.local import LocalBackend
from everystep.store.log import NewRecord
from everystep.store.logformat import Segment
from everystep.store.segments import Scanned, read, scan
from faults import Faults


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path, NoSync())


def names(backend: Backend) -> list[str]:
    return sorted(entry.name for entry in backend.list(""))


def only(backend: Backend) -> Scanned:
    (name,) = names(backend)
    return scan(backend, name, RUN)


def steps(scanned: Scanned) -> list[int]:
    return [found.step for found in scanned.records]


def held(backend: Backend, scanned: Scanned) -> dict[int, bytes]:
    name = scanned.segment.name
    return {found.step: bytes(read(backend, name, found)) for found in scanned.records}


# ---------------------------------------------------------------- names


def test_the_name_of_a_segment() -> None:
    segment = Segment("main@7", session=3, rank=1, world_size=4, number=2, base=900)
    assert segment.name == "logs/main@7/s000003-r00001of00004-000000000900.2.log"
    assert lf.parse_log_path(segment.name) == segment


@pytest.mark.parametrize(
    "name",
    [
        "logs/main/s000003-r00004of00004-000000000900.2.log",  # no such rank
        "logs/main/s000003-r00001of00004-000000000900.0.log",
        "logs/main/s000003-r00001of00004-000000000900.02.log",
        "logs/main/s000003-r00001of00004-900.2.log",
        "logs/main/s000003-r00001of00004-0123456789abcdef-000000000900.2.log",
        "logs/main/s000003-r00001of00004-000000000900.log",
        "logs/main/x/s000003-r00001of00004-000000000900.2.log",
        "logs/../s000003-r00001of00004-000000000900.2.log",
        "log/main/s000003-r00001of00004-000000000900.2.log",
        "logs/main/s000003-r00001of00004-000000000900.2.log\n",
        "logs/main/s000003-r00001of00004-00000000090\u0660.2.log",
    ],
)
def test_what_is_no_name_of_a_segment(backend: LocalBackend, name: str) -> None:
    assert lf.parse_log_path(name) is None
    with pytest.raises(Damaged, match="not the name of a segment"):
        scan(backend, name, RUN)


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("seal", [False, True])
def test_what_was_appended_is_read_back(backend: LocalBackend, seal: bool) -> None:
    log = new_log(backend)
    log.begin(4, LAYOUT)
    assert log.append([record(5), record(6), record(8)]) == backend.size(names(backend)[0])
    log.append([])
    log.append([record(9)])
    if seal:
        log.seal()
    scanned = only(backend)
    assert scanned.segment == Segment("main", 1, 0, 1, number=1, base=4)
    assert scanned.layout == LAYOUT
    assert scanned.torn is None
    assert scanned.sealed == seal
    assert held(backend, scanned) == {step: payload(step) for step in (5, 6, 8, 9)}
    assert scanned.records[-1].digest == log.last
    assert [f.previous for f in scanned.records[1:]] == [f.digest for f in scanned.records[:-1]]
    assert scanned.records[0].previous == lf.NO_DIGEST


@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 8, 5000, 40_000])
def test_payloads_of_any_length(backend: LocalBackend, nbytes: int, seal: bool) -> None:
    log = new_log(backend)
    log.begin(0, b"x" * nbytes)
    for step in range(1, 40):
        log.append([record(step, nbytes=nbytes)])
    if seal:
        log.seal()
    scanned = only(backend)
    assert scanned.layout == b"x" * nbytes
    assert held(backend, scanned) == {n: payload(n, nbytes=nbytes) for n in range(1, 40)}
    assert all(found.offset % 8 == 0 for found in scanned.records)


def test_a_sealed_segment_takes_few_reads(tmp_path: Path) -> None:
    class Counting(LocalBackend):
        reads = 0

        def read(self, name: str, into: memoryview, offset: int) -> None:
            self.reads += 1
            super().read(name, into, offset)

    backend = Counting(tmp_path, NoSync())
    log = new_log(backend)
    log.begin(0, LAYOUT)
    log.append([record(step, nbytes=20_000) for step in range(1, 101)])
    assert len(only(backend).records) == 100
    assert 100 <= backend.reads <= 110
    log.seal()
    backend.reads = 0
    assert len(only(backend).records) == 100
    assert backend.reads <= 3


def test_a_payload_can_be_read_into_memory_at_hand(backend: LocalBackend) -> None:
    write_log(backend, [1])
    memory = bytearray(100)
    (found,) = only(backend).records
    view = read(backend, names(backend)[0], found, memoryview(memory))
    assert view.obj is memory and bytes(view) == payload(1, 0, 1)


def test_a_payload_that_looks_like_an_end_is_none(backend: LocalBackend) -> None:
    for step, offset in enumerate([0, 88, 96, 10**15], 1):
        log = new_log(backend, rank=step, world_size=9)
        log.begin(0, LAYOUT)
        data = lf.END.pack(offset, lf.END_MAGIC)
        log.append([NewRecord(1, len(data), [data])])
    for name in names(backend):
        scanned = scan(backend, name, RUN)
        assert steps(scanned) == [1]
        assert scanned.torn is None and not scanned.sealed


def test_segments_of_a_session_are_chained(backend: LocalBackend) -> None:
    log = new_log(backend)
    log.begin(0, LAYOUT)
    log.append([record(1), record(2)])
    log.seal()
    assert log.segment is None
    log.seal()
    log.begin(2, b"another")
    log.append([record(3)])
    first, second = (scan(backend, name, RUN) for name in names(backend))
    assert (first.segment.number, second.segment.number) == (1, 2)
    assert (first.segment.base, second.segment.base) == (0, 2)
    assert second.layout == b"another"
    assert second.records[0].previous == first.records[-1].digest


def test_another_process_goes_on(backend: LocalBackend) -> None:
    """An agent has died; the next one takes another number, and says which record it follows."""
    write_log(backend, [1, 2])
    write_log(backend, [1], ranks=[1], world_size=2)
    last = scan(backend, names(backend)[0], RUN).records[-1].digest
    log = new_log(backend)
    log.begin(0, LAYOUT, after=last)
    log.append([record(3)])
    found = [scan(backend, name, RUN) for name in names(backend)]
    mine = [scanned for scanned in found if scanned.segment.world_size == 1]
    assert [scanned.segment.number for scanned in mine] == [1, 2]
    assert mine[1].records[0].previous == last


def test_a_segment_without_a_delta_is_no_file(backend: LocalBackend) -> None:
    log = new_log(backend)
    log.begin(0, LAYOUT)
    log.seal()
    log.begin(5, LAYOUT)
    assert names(backend) == []


# ---------------------------------------------------------------- refusals


def test_wrong_calls_write_nothing(backend: LocalBackend) -> None:
    log = new_log(backend)
    with pytest.raises(StoreFailed, match="before begin"):
        log.append([record(1)])
    log.begin(3, LAYOUT)
    for wrong in ([record(3)], [record(5), record(5)], [record(6), record(5)]):
        with pytest.raises(StoreFailed, match="do not ascend"):
            log.append(wrong)
    with pytest.raises(StoreFailed, match="another length than it says"):
        log.append([record(4), NewRecord(5, 4, [b"abc"])])
    with pytest.raises(StoreFailed, match="too many digits"):
        log.begin(10**12, LAYOUT)
    with pytest.raises(StoreFailed, match="too many digits"):
        new_log(backend, session=10**9).begin(0, LAYOUT)
    with pytest.raises(StoreFailed, match="too many digits"):
        new_log(backend, rank=2, world_size=2).begin(0, LAYOUT)
    assert names(backend) == []


@pytest.mark.parametrize(
    ("name", "number", "error"),
    [
        ("write_parts_at", errno.ENOSPC, StoreFull),
        ("write_parts_at", errno.EIO, StoreFailed),
        ("sync", errno.EIO, StoreFailed),
        ("sync", errno.EDQUOT, StoreFull),
        ("close", errno.EIO, StoreFailed),
    ],
)
def test_after_a_failure_the_next_append_begins_another_segment(
    tmp_path: Path, name: str, number: int, error: type[StoreError]
) -> None:
    faults = Faults()
    backend = LocalBackend(tmp_path, faults)
    log = new_log(backend)
    log.begin(0, LAYOUT)
    log.append([record(1)])
    before = log.last
    faults.at(name, 1, number)
    with pytest.raises(error):
        log.append([record(2), record(3)])
    assert faults.fired == 1
    assert log.segment is None and log.last == before
    log.append([record(2), record(3)])
    log.append([record(4)])
    first, second = (scan(backend, name, RUN) for name in names(backend))
    assert steps(first)[:1] == [1]
    assert steps(second) == [2, 3, 4]
    assert second.records[0].previous == before
    assert second.torn is None


@pytest.mark.parametrize("call", ["create", "write_parts_at", "sync", "close", "sync_directory"])
def test_a_segment_that_cannot_be_made_leaves_no_file(tmp_path: Path, call: str) -> None:
    faults = Faults()
    backend = LocalBackend(tmp_path, faults)
    log = new_log(backend)
    log.begin(0, LAYOUT)
    faults.at(call, 3 if call == "sync_directory" else 1, errno.ENOSPC, times=3)
    for _ in range(3):
        with pytest.raises(StoreFull):
            log.append([record(1)])
        assert files_of(tmp_path) == {}
    assert faults.fired == 3
    log.append([record(1)])
    assert steps(only(backend)) == [1]


def test_a_seal_that_fails_costs_nothing(tmp_path: Path) -> None:
    faults = Faults()
    backend = LocalBackend(tmp_path, faults)
    log = new_log(backend)
    log.begin(0, LAYOUT)
    log.append([record(1)])
    faults.at("sync", 1, errno.EIO)
    with pytest.raises(StoreFailed):
        log.seal()
    faults.watch()
    assert log.segment is None
    log.append([record(2)])
    assert [steps(scan(backend, name, RUN)) for name in names(backend)] == [[1], [2]]


def test_no_record_of_elsewhere_is_taken(backend: LocalBackend) -> None:
    """Whole segments that were copied: of another run, timeline, session, rank or place."""
    write_log(backend, [1, 2])
    mine = Segment("main", 1, 0, 1, number=1, base=0)
    others = [
        Segment("other", 1, 0, 1, number=1, base=0),
        Segment("main", 2, 0, 1, number=1, base=0),
        Segment("main", 1, 1, 2, number=1, base=0),
        Segment("main", 1, 0, 2, number=1, base=0),
        Segment("main", 1, 0, 1, number=2, base=0),
        Segment("main", 1, 0, 1, number=1, base=1),
    ]
    assert steps(scan(backend, mine.name, RUN)) == [1, 2]
    for other in others:
        backend.move(mine.name, other.name)
        scanned = scan(backend, other.name, RUN)
        assert scanned.records == [] and scanned.layout == b""
        assert "belongs" in str(scanned.torn)
        backend.move(other.name, mine.name)
    assert scan(backend, mine.name, "f" * 32).records == []


def test_a_newer_version_is_no_damage(backend: LocalBackend, tmp_path: Path) -> None:
    write_log(backend, [1])
    (name,) = names(backend)
    data = bytearray((tmp_path / name).read_bytes())
    data[8:10] = (lf.LOG_VERSION + 1).to_bytes(2, "little")
    data[72:88] = lf.raw_digest(bytes(data[:72]))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(StoreError, match="newer everystep") as caught:
        scan(backend, name, RUN)
    assert not isinstance(caught.value, Damaged)


def test_a_segment_that_is_gone(backend: LocalBackend) -> None:
    with pytest.raises(Missing):
        scan(backend, Segment("main", 1, 0, 1, number=1, base=0).name, RUN)
