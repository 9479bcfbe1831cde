"""A log in which every byte may be another: what is damaged is named, and costs what it must."""

from __future__ import annotations

import contextlib
import os
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from byte_logs import LAYOUT, new_log, payload, record, write_log
from byte_runs import NoSync, begin, new_run, write_step
from everystep.errors import Damaged, StoreError
from everystep.store import logformat as lf
from everystep.store.backend import Entry
from everystep.store.chains import Excluded, plan_chains
from everystep.store.local import LocalBackend
from everystep.store.logformat import Kind, Segment
from everystep.store.run import Run
from everystep.store.segments import Found, Scanned, read, scan
from everystep.store.verify import Finding, verify_run
from everystep.types import StepRef

STEPS = [1, 2, 3, 4]
SEGMENT = Segment("main", session=1, rank=0, world_size=1, number=1, base=0)


class OneFile(LocalBackend):
    """A run whose segment reads otherwise than it is: faster than to write each change."""

    def __init__(self, root: Path, data: bytes | bytearray) -> None:
        super().__init__(root, NoSync())
        self.data = data

    def read(self, name: str, into: memoryview, offset: int) -> None:
        if name != SEGMENT.name:
            return super().read(name, into, offset)
        found = self.data[offset : offset + len(into)]
        if len(found) < len(into):
            raise Damaged("the file ends too early", path=name, at=offset)
        into[:] = found
        return None

    def size(self, name: str) -> int:
        return len(self.data) if name == SEGMENT.name else super().size(name)

    def list(self, prefix: str) -> Iterator[Entry]:
        for entry in super().list(prefix):
            yield entry._replace(nbytes=self.size(entry.name))


class Made:
    """A run with a full checkpoint of step 0 and deltas after it."""

    def __init__(self, root: Path, *, seal: bool) -> None:
        run = new_run(root, calls=NoSync())
        write_step(run, StepRef("main", 0))
        self.root, self.run_id = root, run.id
        log = new_log(run.backend, run.id)
        log.begin(0, LAYOUT)
        log.append([record(step) for step in STEPS])
        if seal:
            log.seal()
        self.data = (root / SEGMENT.name).read_bytes()
        self.scanned = scan(run.backend, SEGMENT.name, run.id)
        self.ends = {0: self.scanned.records[0].offset}
        for found in self.scanned.records:
            self.ends[found.step] = found.payload_offset + lf.padded(found.nbytes)
        self.listing = Run.open(root).listing()

    def backend(self, data: bytes | bytearray) -> OneFile:
        return OneFile(self.root, data)

    def had(self, data: bytes | bytearray) -> tuple[list[int], list[Damaged]]:
        """Which steps recovery gets to, and what it says of the others: what cannot be read is
        planned around."""
        backend = self.backend(data)
        scanned = scan(backend, SEGMENT.name, self.run_id)
        said = [scanned.torn] if scanned.torn else []
        bad: set[tuple[str, int]] = set()
        for found in scanned.records:
            try:
                assert bytes(read(backend, SEGMENT.name, found)) == payload(found.step)
            except Damaged as damage:
                bad.add((SEGMENT.name, found.offset))
                said.append(damage)
        chains = plan_chains(self.listing, [scanned], "main", Excluded(deltas=bad))
        return [ref.step for ref in chains.refs], said

    def findings(self, data: bytes | bytearray) -> list[Finding]:
        run = Run.open(self.root)
        run.backend = self.backend(data)
        return list(verify_run(run, run.listing()))


@pytest.fixture(params=[False, True], ids=["open", "sealed"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    return Made(tmp_path / "run", seal=request.param)


def test_nothing_is_wrong_at_first(made: Made) -> None:
    assert made.had(made.data) == ([0, *STEPS], [])
    assert made.findings(made.data) == []


def test_every_byte_that_is_flipped_is_found_and_named(made: Made) -> None:
    """Of an open segment it costs the record that it is in and those after it; of a sealed one,
    where the heads are at hand, a head costs nothing."""
    last = max(STEPS)
    for at in range(len(made.data)):
        data = bytearray(made.data)
        data[at] ^= 1 << at % 8
        had, said = made.had(data)
        inside = next((n for n, end in made.ends.items() if at < end), last + 1)
        head = inside > 0 and any(0 <= at - f.offset < 88 for f in made.scanned.records)
        kept = inside == last + 1 or (head and made.scanned.sealed)
        assert had == ([0, *STEPS] if kept else list(range(max(inside, 1)))), at
        found = made.findings(data)
        assert found, at
        assert all(finding.path in (SEGMENT.name, None) for finding in found)
        if not kept:
            assert said and said[0].path == SEGMENT.name and said[0].at is not None
            assert said[0].at <= at, "it is at or behind the place that is named"
            assert said[0].expected is not None and said[0].found is not None
            named = [f for f in found if f.level == "damage"]
            assert any(f.at == said[0].at for f in named)
            assert {f.step for f in named} == {StepRef("main", max(inside, 1))}


def test_every_length_that_a_segment_is_cut_to(made: Made) -> None:
    for length in range(len(made.data)):
        data = made.data[:length]
        had, said = made.had(data)
        whole = [step for step, end in made.ends.items() if step and end <= length]
        assert had == [0, *whole], length
        ended = length in made.ends.values() and length >= made.ends[0]
        assert bool(said) != ended
        findings = made.findings(data)
        assert [f.level for f in findings] == [] if ended else ["note"]
        assert all("cut off" in f.what and f.path == SEGMENT.name for f in findings)


@pytest.mark.parametrize("nbytes", [1, 7, 8, 100, 20_000])
def test_a_tail_of_zeros(tmp_path: Path, nbytes: int) -> None:
    """The length had been made durable, and the bytes had not."""
    made = Made(tmp_path / "run", seal=False)
    data = made.data + bytes(nbytes)
    had, said = made.had(data)
    assert had == [0, *STEPS]
    assert said[0].at == len(made.data)
    (finding,) = made.findings(data)
    assert finding.level == "note" and "cut off" in finding.what


def test_zeros_in_place_of_the_last_payload(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", seal=False)
    last = made.scanned.records[-1]
    data = made.data[: last.payload_offset] + bytes(len(made.data) - last.payload_offset)
    had, said = made.had(data)
    assert had == [0, *STEPS[:-1]]
    assert "delta of step 4: hash of bytes" in str(said[0])


def test_a_record_that_is_taken_out_or_doubled(made: Made) -> None:
    starts = [f.offset for f in made.scanned.records]
    data = made.data
    for step, (start, stop) in enumerate(zip(starts, [*starts[1:], made.ends[4]], strict=True), 1):
        without, twice = data[:start] + data[stop:], data[:stop] + data[start:]
        expected = [0, *range(1, step)]
        assert made.had(without)[0] == expected
        assert made.had(twice)[0] == [*expected, step]
        assert any(f.level == "damage" for f in made.findings(twice))


def test_a_record_of_another_log_is_not_taken(made: Made, tmp_path: Path) -> None:
    """Of another run, session or timeline, at the very same place and of the same length."""
    others = [
        ("f" * 32, "main", 1),
        (made.run_id, "other", 1),
        (made.run_id, "main", 2),
    ]
    for number, (run, timeline, session) in enumerate(others):
        elsewhere = LocalBackend(tmp_path, NoSync())
        log = new_log(elsewhere, run, timeline, session, rank=number, world_size=9)
        log = new_log(elsewhere, run, timeline, session)
        log.begin(0, LAYOUT)
        log.append([record(step) for step in STEPS])
        assert log.segment is not None
        other = (tmp_path / log.segment.name).read_bytes()
        third = made.scanned.records[2].offset
        shift = len(other) - made.ends[4]
        data = made.data[:third] + other[third + shift :]
        had, said = made.had(data)
        assert had == [0, 1, 2]
        assert said[0].at == third
        assert made.had(other)[0] == [0]
        elsewhere.delete(log.segment.name)


def test_a_delta_is_missing_in_the_middle(tmp_path: Path) -> None:
    """The steps before the gap are offered, and nothing bridges it."""
    run = new_run(tmp_path, world_size=2, calls=NoSync())
    write_step(run, StepRef("main", 0), 2)
    write_log(run.backend, [1, 2, 3, 4, 5, 6], run=run.id, ranks=[0], world_size=2)
    write_log(run.backend, [1, 2, 4, 5, 6], run=run.id, ranks=[1], world_size=2)
    listing = run.listing()
    chains = plan_chains(listing, run.segments(listing), "main")
    assert [ref.step for ref in chains.refs] == [0, 1, 2]
    (finding,) = list(verify_run(run, listing))
    assert finding.step == StepRef("main", 3)
    assert finding.what == (
        "the step, and those to step 6, cannot be had by deltas: there is no delta of rank 1"
    )
    write_step(run, StepRef("main", 4), 2)
    listing = run.listing()
    chains = plan_chains(listing, run.segments(listing), "main")
    assert [ref.step for ref in chains.refs] == [0, 1, 2, 4, 5, 6]


def test_a_session_that_was_killed_leaves_a_note_and_no_damage(tmp_path: Path) -> None:
    run = new_run(tmp_path, calls=NoSync())
    write_step(run, StepRef("main", 0))
    write_log(run.backend, [1, 2, 3], run=run.id)
    path = tmp_path / SEGMENT.name
    path.write_bytes(path.read_bytes()[:-5])
    begin(run, 2, restored=StepRef("main", 2))
    write_log(run.backend, [3, 4], base=2, run=run.id, session=2)
    findings = list(verify_run(run, run.listing()))
    assert [(f.level, f.path) for f in findings] == [("note", SEGMENT.name)]
    listing = run.listing()
    chains = plan_chains(listing, run.segments(listing), "main")
    assert [ref.step for ref in chains.refs] == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------- whose hashes are right


@contextlib.contextmanager
def frugal(limit_bytes: int) -> Iterator[None]:
    """Fail if more than so many bytes are held at once, or ten seconds are computed."""
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes, f"{peak:,} bytes"
    assert time.process_time() - started < 10


def forged_head(kind: int, nbytes: int, digest: bytes = bytes(16), **changes: int) -> bytes:
    fields = {"version": 1, "rank": 0, "step": 0, "session": 1, "zero": 0} | changes
    start = struct.pack(
        "<8sHHIQIIQ16s16s", lf.MAGIC, fields["version"], kind, fields["rank"], fields["step"],
        fields["session"], fields["zero"], nbytes, digest, bytes(16),
    )  # fmt: skip
    return start + lf.raw_digest(start)


DEEP = (100_000).to_bytes(8, "little") + b"[" * 100_000
LONG = b"\xff" * 8

HOSTILE = {
    "a layout of exabytes": forged_head(Kind.BEGIN, 2**63),
    "a layout of all there is": forged_head(Kind.BEGIN, 2**64 - 1),
    "an unknown kind": forged_head(9, 0),
    "no kind": forged_head(0, 0),
    "version 0": forged_head(Kind.BEGIN, 0, version=0),
    "not zero": forged_head(Kind.BEGIN, 0, zero=1),
    "a delta first": forged_head(Kind.DELTA, 0, lf.raw_digest(b""), step=1),
    "a seal first": forged_head(Kind.SEAL, 0, lf.raw_digest(b"")),
    "no JSON": forged_head(Kind.BEGIN, 0, lf.raw_digest(b"")),
    "a length beyond the payload": forged_head(Kind.BEGIN, 8, lf.raw_digest(LONG)) + LONG,
    "deep JSON": forged_head(Kind.BEGIN, len(DEEP), lf.raw_digest(DEEP)) + DEEP,
    "only an end": lf.END.pack(0, lf.END_MAGIC) * 20,
    "nothing": b"",
    "text": b"steps log" * 100,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_beginning(tmp_path: Path, data: bytes) -> None:
    backend = OneFile(tmp_path, data + bytes(4096))
    with frugal(5_000_000):
        scanned = scan(backend, SEGMENT.name, "0" * 32)
    assert scanned.records == [] and scanned.layout == b""
    assert scanned.torn is not None and scanned.torn.path == SEGMENT.name


def test_a_payload_of_exabytes_is_not_believed(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", seal=False)
    before = made.scanned.records[-1].digest
    start = forged_head(Kind.DELTA, 2**62, step=9)[:56] + before
    data = made.data + start + lf.raw_digest(start) + bytes(1000)
    with frugal(5_000_000):
        had, said = made.had(data)
    assert had == [0, *STEPS]
    assert "ends inside the record of step 9" in str(said[0])


def test_an_index_of_another_segment_is_not_believed(tmp_path: Path) -> None:
    """Heads that are right by themselves, and not those of the records before it."""
    made = Made(tmp_path / "a", seal=True)
    other = Made(tmp_path / "b", seal=True)
    end = made.ends[4]
    data = made.data[:end] + other.data[other.ends[4] :]
    had, said = made.had(data)
    assert had == [0, *STEPS]
    assert said and said[0].path == SEGMENT.name


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file(tmp_path: Path, kind: str) -> None:
    run = new_run(tmp_path, calls=NoSync())
    path = tmp_path / SEGMENT.name
    path.parent.mkdir(parents=True)
    if kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
        (path / "x").write_bytes(b"x")
    with frugal(5_000_000):
        findings = list(verify_run(run, run.listing()))
    assert len(findings) == 1


def test_a_found_that_leads_outside(tmp_path: Path) -> None:
    backend = OneFile(tmp_path, b"x" * 100)
    with pytest.raises(StoreError):
        read(backend, SEGMENT.name, Found(1, 50, 64, bytes(16), bytes(16), bytes(16)))


def test_the_scan_of_nothing_is_a_scan(made: Made) -> None:
    scanned = scan(made.backend(b""), SEGMENT.name, made.run_id)
    assert isinstance(scanned, Scanned) and scanned.cut
