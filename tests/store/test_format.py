"""The bytes of the format, literally: a change of format cannot be an accident."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import everystep
from byte_runs import framed
from everystep.errors import Damaged, StoreError, StoreFailed
from everystep.store import format as fmt
from everystep.store.format import (
    PartName,
    RankRecord,
    RunRecord,
    SessionRecord,
    TimelineRecord,
    decode_record,
    encode_record,
)
from everystep.types import StepRef

RUN = RunRecord(run="0123456789abcdef0123456789abcdef", created="2026-01-01T00:00:00Z")
RUN_BYTES = (
    b'{"xxh3_128":"9f6bde535986316e201eb9782c0e9c45",\n'
    b'"content":{"format":2,"run":"0123456789abcdef0123456789abcdef",'
    b'"created":"2026-01-01T00:00:00Z"}}\n'
)
SESSION = SessionRecord(
    run="0123456789abcdef0123456789abcdef",
    session=2,
    timeline="main@5",
    world_size=1,
    restored=StepRef("main", 5),
    created="2026-01-01T00:00:00Z",
    host="here",
    pid=42,
    versions={"torch": "2.6.0"},
)
SESSION_BYTES = (
    b'{"xxh3_128":"42782b9a03a0ea3f896096b39ca62105",\n'
    b'"content":{"format":2,"run":"0123456789abcdef0123456789abcdef","session":2,'
    b'"timeline":"main@5","world_size":1,"restored":{"timeline":"main","step":5},'
    b'"created":"2026-01-01T00:00:00Z","host":"here","pid":42,"versions":{"torch":"2.6.0"}}}\n'
)
ARABIC_1 = "\u0660" * 5 + "\u0661"
"""Six characters that `int` takes for 1."""

TIMELINE = TimelineRecord(name="main", parent=None)
TIMELINE_BYTES = (
    b'{"xxh3_128":"5dd8659879957699b95cd674d399c946",\n'
    b'"content":{"format":2,"name":"main","parent":null}}\n'
)


@pytest.mark.parametrize(
    ("record", "expected"),
    [(RUN, RUN_BYTES), (SESSION, SESSION_BYTES), (TIMELINE, TIMELINE_BYTES)],
    ids=["run", "session", "timeline"],
)
def test_the_bytes_of_records(record: msgspec.Struct, expected: bytes) -> None:
    assert encode_record(record) == expected
    assert decode_record(expected, type(record), "path") == record  # type: ignore[type-var]


def test_the_hash_covers_all_after_it() -> None:
    assert RUN_BYTES.index(b"content") < fmt.FRAME_BYTES == RUN_BYTES.index(b'{"format"')
    covered = RUN_BYTES[RUN_BYTES.index(b"\n") :]
    assert xxhash.xxh3_128(covered, seed=0).hexdigest().encode() in RUN_BYTES
    assert msgspec.json.decode(RUN_BYTES)["content"]["format"] == 2  # a frame is plain JSON


@pytest.mark.parametrize("record", [RUN, TIMELINE], ids=["run", "timeline"])
def test_every_flip_and_every_cut_of_a_record_is_found(record: msgspec.Struct) -> None:
    data = encode_record(record)
    kind = type(record)
    for at in range(len(data)):
        for bit in (1, 0x20, 0x80):
            changed = bytearray(data)
            changed[at] ^= bit
            with pytest.raises(Damaged):
                decode_record(changed, kind, "path")  # type: ignore[type-var]
        with pytest.raises(Damaged):
            decode_record(data[:at], kind, "path")  # type: ignore[type-var]
    for longer in (data + b"\n", data + b" ", b" " + data, data + data):
        with pytest.raises(Damaged):
            decode_record(longer, kind, "path")  # type: ignore[type-var]


def test_another_record_with_a_valid_hash_is_not_taken_for_it() -> None:
    with pytest.raises(Damaged, match="is not a RankRecord"):
        decode_record(RUN_BYTES, RankRecord, "path")


@pytest.mark.parametrize(
    "content",
    [
        *[b"", b"null", b"[]", b"{}", b'{"format":1}', b'{"format":"1"}', b'{"format":1.5}'],
        *[b'{"format":true}', b'{"format":-1}', b'{"format":0,"run":"a","created":"b"}'],
        *[b'{"format":1,"run":1,"created":"b"}', b'{"format":1,"run":"\\ud800","created":""}'],
        *[b'{"format":1,"run":"\xff","created":"b"}', b"[" * 100_000],
        *[
            b'{"format":1,"run":"a","created":"b","x":' + b"[" * 100_000,
            b'{"format":' + b"9" * 9999,
        ],
        *[b'{"format":1,"run":"a","created":"b"}}', b'{"format":1,"run":"a"}'],
    ],
)
def test_content_that_makes_no_sense_is_damage(content: bytes) -> None:
    with pytest.raises(Damaged, match=r"RunRecord|format"):
        decode_record(framed(content), RunRecord, "path")


def test_a_newer_format_is_no_damage() -> None:
    """Nothing may be set aside, deleted or written over because a newer version wrote it."""
    with pytest.raises(StoreError, match="newer") as raised:
        decode_record(framed({"format": fmt.FORMAT + 1, "anything": "else"}), RunRecord, "path")
    assert type(raised.value) is StoreError
    assert "upgrade" in str(raised.value)


def test_a_record_that_no_reader_would_accept_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fmt, "MAX_RECORD_BYTES", len(RUN_BYTES))
    encode_record(RUN)
    monkeypatch.setattr(fmt, "MAX_RECORD_BYTES", len(RUN_BYTES) - 1)
    with pytest.raises(StoreFailed, match="too long"):
        encode_record(RUN)


def test_the_same_bytes_under_any_hash_seed(tmp_path: Path) -> None:
    """Records and data files, written by two processes that order their sets otherwise."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from byte_runs import *\n"
        "run = new_run(Path(sys.argv[1]), 2)\n"
        "run = Run(run.backend, fmt.RunRecord(run='0'*32, created=''))\n"
        "for rank in (0, 1):\n"
        "    write_part(run, StepRef('main', 1), small_state(rank), rank=rank, world_size=2)\n"
    )
    seen = []
    for seed in ("1", "2"):
        root = tmp_path / seed
        paths = [Path(everystep.__file__).parent.parent, Path(__file__).parent.parent]
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(map(str, paths))}
        subprocess.run([sys.executable, "-c", program, str(root)], env=env, check=True, timeout=60)
        files = {p.name: p.read_bytes() for p in (root / "steps").rglob("*") if p.is_file()}
        assert len(files) == 6
        seen.append(files)
    assert seen[0] == seen[1]


# ---------------------------------------------------------------- names


def test_the_names_of_files() -> None:
    part = PartName(12, 3, 8, "0123456789abcdef")
    assert part.stem == "s000012-r00003of00008"
    assert part.marker == "s000012-r00003of00008-0123456789abcdef.json"
    assert part._replace(replica="").marker == "s000012-r00003of00008.json"
    assert fmt.step_directory(StepRef("main@9.2", 1207)) == "steps/main@9.2/000000001207"
    assert fmt.timeline_file("main") == "timelines/main.json"
    assert fmt.session_file(1_000_000) == "sessions/1000000.json"


@given(
    session=st.integers(0, fmt.LAST_SESSION),
    ranks=st.integers(1, fmt.MOST_RANKS).flatmap(
        lambda n: st.tuples(st.integers(0, n - 1), st.just(n))
    ),
    replica=st.just("") | st.binary(min_size=8, max_size=8).map(bytes.hex),
    step=st.integers(0, fmt.LAST_STEP),
)
def test_names_are_read_back(session: int, ranks: tuple[int, int], replica: str, step: int) -> None:
    part = PartName(session, *ranks, replica)
    assert fmt.parse_marker(part.marker) == part
    assert fmt.owner_of(part.marker) == part.stem
    assert fmt.owner_of(f"{part.stem}.model.safetensors") == part.stem
    assert fmt.parse_session_file(fmt.session_file(session)) == session
    ref = StepRef("main@5", step)
    assert fmt.parse_step_path(f"{fmt.step_directory(ref)}/x") == (ref, "x")


@pytest.mark.parametrize(
    "name",
    [
        "s000001-r00001of00001.json",  # there is no rank 1 of 1
        "s000001-r00000of00000.json",
        "s0000001-r00000of00001.json",  # two spellings of one session
        "s00001-r00000of00001.json",
        "s1000000000-r00000of00001.json",
        "s000001-r00000of00001-0123456789ABCDEF.json",
        "s000001-r00000of00001-0123.json",
        "s000001-r00000of00001.json.tmp",
        f"s{ARABIC_1}-r00000of00001.json",  # digits, and not ASCII
        " s000001-r00000of00001.json",
        "s000001-r00000of00001.json\n",
        "s-00001-r00000of00001.json",
    ],
)
def test_names_that_are_no_marker(name: str) -> None:
    assert fmt.parse_marker(name) is None


@pytest.mark.parametrize(
    "name",
    [
        *["s000001-r00000of00001", "s000001-r00000of00001x.json", "s000001-r00000of00001.ä"],
        *["s0000001-r00000of00001.json", "s000001-r00000of00001.", "s000001-r00000of00001. "],
        *["s000001-r00000of00001." + "x" * 201, "x", "", "s000001-r00000of00001.a/b"],
    ],
)
def test_names_that_belong_to_no_part(name: str) -> None:
    assert fmt.owner_of(name) is None


@pytest.mark.parametrize(
    "name",
    [
        *["steps/main/1/x", "steps/main/000000000001", "steps/../000000000001/x"],
        *["steps/ma in/000000000001/x", f"steps/main/000000{ARABIC_1}/x", "x/main/000000000001/x"],
        *["steps/main/000000000001/x/y", "steps//000000000001/x", "steps/main/0000000000001/x"],
    ],
)
def test_paths_that_are_no_step(name: str) -> None:
    assert fmt.parse_step_path(name) is None


@pytest.mark.parametrize(
    ("name", "timeline", "session"),
    [
        ("timelines/main.json", "main", None),
        ("timelines/main@5.2.json", "main@5.2", None),
        ("timelines/...json", None, None),
        ("timelines/a b.json", None, None),
        ("timelines/a/b.json", None, None),
        ("timelines/.json", None, None),
        ("sessions/000001.json", None, 1),
        ("sessions/0000001.json", None, None),
        ("sessions/²²²²²².json", None, None),
        ("sessions/" + "9" * 200 + ".json", None, None),
        ("sessions/x.json", None, None),
    ],
)
def test_paths_of_timelines_and_sessions(
    name: str, timeline: str | None, session: int | None
) -> None:
    assert fmt.parse_timeline_file(name) == timeline
    assert fmt.parse_session_file(name) == session


@pytest.mark.parametrize(
    ("name", "parent"),
    [
        ("main", None),
        ("main@5", StepRef("main", 5)),
        ("main@5.3", StepRef("main", 5)),
        ("main@5@7", StepRef("main@5", 7)),
        ("main@x", None),
        ("@5", None),
        ("t.2", None),
    ],
)
def test_what_a_timelines_name_says(name: str, parent: StepRef | None) -> None:
    assert fmt.timeline_from_name(name) == TimelineRecord(name=name, parent=parent)


def test_labels_of_data_files() -> None:
    assert fmt.file_label("model") == "model"
    assert fmt.file_label("model.gen 1/ä") == "model%2Egen%201%2F%C3%A4"
    long = [fmt.file_label("model." + "ä" * n) for n in (60, 61)]
    assert [len(label) for label in long] == [100, 100]
    assert len(set(long)) == 2
    assert all(fmt.owner_of(f"s000001-r00000of00001.{label}.safetensors") for label in long)


@given(st.sets(st.text(min_size=1), min_size=2, max_size=2))
def test_labels_differ_where_sections_do(names: set[str]) -> None:
    one, other = map(fmt.file_label, names)
    assert one != other
