"""What each step cost: newest steps are kept, and what we have not written is passed over."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from byte_runs import NoSync, files_of, new_run
from everystep.errors import Damaged
from everystep.store import measured
from everystep.store.backend import Entry
from everystep.store.local import LocalBackend
from everystep.store.measured import (
    KEPT_STEPS,
    Measure,
    MeasuredBy,
    Span,
    parse_name,
    read_measures,
    write_measures,
)

BY = MeasuredBy(1, 0, 1)


def step(number: int, **changes: Any) -> Measure:
    plain = Measure(
        timeline="main", step=number, begun_s=float(number), took_s=0.25,
        stall_s=0.0, snapshot_s=0.0, staging_s=0.0, bookkeeping_s=0.0,
        forward_s=0.1, backward_s=0.1, update_s=0.05,
        state_bytes=100, copied_bytes=100, written_bytes=0,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path, NoSync())


def test_what_is_written_is_read_again(backend: LocalBackend) -> None:
    measures = [
        step(1),
        step(
            2, timeline="main@1", offload_bytes_per_s=1e9, snapshot_bytes_per_s=2.0,
            write_bytes_per_s=0.1, staged_s=0.3, durable_s=1 / 3, every=2, error="é\n</script>",
            deviation="\x00", spans=[Span("write", 0.1, 0.7), Span("a new lane", -0.5, 1e9)],
        ),
    ]  # fmt: skip
    write_measures(backend, BY, measures)
    assert read_measures(backend) == {BY: measures}
    write_measures(backend, BY, measures[:1])
    assert read_measures(backend) == {BY: measures[:1]}


def test_files_come_in_order_and_one_rank_can_be_asked_for(backend: LocalBackend) -> None:
    order = [MeasuredBy(1, 0, 2), MeasuredBy(1, 1, 2), MeasuredBy(2, 0, 1), MeasuredBy(10, 0, 1)]
    for by in reversed(order):
        write_measures(backend, by, [step(by.session)])
    assert list(read_measures(backend)) == order
    assert list(read_measures(backend, rank=0)) == [by for by in order if by.rank == 0]
    assert list(read_measures(backend, rank=7)) == []


def test_nothing_there_is_nothing_measured(backend: LocalBackend) -> None:
    assert read_measures(backend) == {}
    write_measures(backend, BY, [])
    assert read_measures(backend) == {BY: []}


def test_the_newest_steps_are_kept(backend: LocalBackend) -> None:
    write_measures(backend, BY, [step(n) for n in range(KEPT_STEPS + 3)])
    assert [m.step for m in read_measures(backend)[BY]] == list(range(3, KEPT_STEPS + 3))


def test_a_file_is_never_larger_than_what_is_read(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = len(msgspec.json.encode(step(10))) + 1
    for limit, kept in ((3 * line, [12, 13, 14]), (3 * line - 1, [13, 14]), (line - 1, [])):
        monkeypatch.setattr(measured, "MAX_FILE_BYTES", limit)
        write_measures(backend, BY, [step(n) for n in range(10, 15)])
        assert [m.step for m in read_measures(backend)[BY]] == kept
    (tmp_path / BY.name).write_bytes(msgspec.json.encode(step(10)) + b"\n")
    assert read_measures(backend) == {BY: []}
    monkeypatch.setattr(measured, "MAX_FILE_BYTES", line)
    assert read_measures(backend) == {BY: [step(10)]}


@pytest.mark.parametrize(
    "name",
    [
        "measured/s000001-r00000of00001.json",
        "measured/s1-r00000of00001.jsonl",
        "measured/x/s000001-r00000of00001.jsonl",
        "measured/s000001-r00000of00001.jsonl\n",
        "measured/.s000001-r00000of00001.jsonl.1-2.tmp",
        "s000001-r00000of00001.jsonl",
    ],
)
def test_other_names_are_none_of_ours(name: str) -> None:
    assert parse_name(name) is None


def test_a_name_says_whose_it_is() -> None:
    for by in (BY, MeasuredBy(1_234_567, 12_345, 99_999)):
        assert parse_name(by.name) == by


NOT_OURS = [
    b"",
    b"{}",
    b"[]",
    b"\xff\xfe",
    msgspec.json.encode(step(5))[:-1],
    msgspec.json.encode(step(5)).replace(b'"step":5', b'"step":"5"'),
    msgspec.json.encode(step(5)).replace(b'"took_s":0.25', b'"took_s":1e999'),
    msgspec.json.encode(step(5)).replace(b'"took_s":0.25', b'"took_s":null'),
    msgspec.json.encode(step(5)).replace(b'"spans":[]', b'"spans":[["write",1]]'),
    b'{"later":' + b"[" * 100_000,
]
"""Lines that are no measure."""


@pytest.mark.parametrize("line", NOT_OURS, ids=range(len(NOT_OURS)))
def test_lines_that_are_not_ours_are_passed_over(
    backend: LocalBackend, tmp_path: Path, line: bytes
) -> None:
    write_measures(backend, BY, [step(1)])
    good = (tmp_path / BY.name).read_bytes()
    (tmp_path / BY.name).write_bytes(good + line + b"\n" + good + line)
    assert read_measures(backend) == {BY: [step(1), step(1)]}


def test_a_field_of_a_later_version_does_no_harm(backend: LocalBackend, tmp_path: Path) -> None:
    write_measures(backend, BY, [step(1)])
    data = (tmp_path / BY.name).read_bytes()
    (tmp_path / BY.name).write_bytes(data.replace(b'{"', b'{"later":[1,{"a":2}],"', 1))
    assert read_measures(backend) == {BY: [step(1)]}


def test_text_that_is_no_unicode_can_be_written(backend: LocalBackend) -> None:
    # os.fsdecode gives such text for a path whose bytes are not UTF-8, and errors quote paths
    write_measures(backend, BY, [step(1, error="disk\udcff full"), step(2)])
    assert read_measures(backend) == {BY: [step(1, error="disk\\udcff full"), step(2)]}


def test_a_rate_that_is_not_finite_is_unknown(backend: LocalBackend) -> None:
    write_measures(backend, BY, [step(1, write_bytes_per_s=math.inf)])
    assert read_measures(backend) == {BY: [step(1, write_bytes_per_s=None)]}


def test_a_link_is_not_followed(backend: LocalBackend, tmp_path: Path) -> None:
    write_measures(backend, MeasuredBy(1, 1, 2), [step(1)])
    (tmp_path / BY.name).symlink_to(tmp_path / MeasuredBy(1, 1, 2).name)
    with pytest.raises(Damaged, match="is a link"):
        read_measures(backend)


class Meanwhile(LocalBackend):
    """Something happens to the files between the question for a length and the reading."""

    def __init__(self, root: Path, act: Callable[[], None], times: int) -> None:
        super().__init__(root, NoSync())
        self.act, self.times = act, times

    def size(self, name: str) -> int:
        found = super().size(name)
        if self.times:
            self.times -= 1
            self.act()
        return found


def test_a_file_that_is_replaced_while_it_is_read(backend: LocalBackend, tmp_path: Path) -> None:
    def replace_by(number: int, spans: list[Span]) -> Callable[[], None]:
        return lambda: write_measures(backend, BY, [step(number, spans=spans)])

    longer = [Span("write", 0.0, 1.0)] * 9
    replace_by(1, longer)()
    assert read_measures(Meanwhile(tmp_path, replace_by(2, []), 1)) == {BY: [step(2)]}
    # of a longer one the end is missing: its last line is no whole one
    assert read_measures(Meanwhile(tmp_path, replace_by(3, longer), 1)) == {BY: []}


def test_a_file_that_vanishes_while_it_is_read(backend: LocalBackend, tmp_path: Path) -> None:
    write_measures(backend, BY, [step(1)])
    path = tmp_path / BY.name
    assert read_measures(Meanwhile(tmp_path, path.unlink, 1)) == {BY: []}


def test_a_file_that_never_is_as_long_as_it_says(backend: LocalBackend, tmp_path: Path) -> None:
    write_measures(backend, BY, [step(1)])
    path = tmp_path / BY.name
    shrinking = Meanwhile(tmp_path, lambda: path.write_bytes(path.read_bytes()[:-1]), 9)
    with pytest.raises(Damaged, match="ends too early"):
        read_measures(shrinking)
    assert shrinking.times == 6


def test_the_files_are_a_known_part_of_a_run(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", calls=NoSync())
    before = run.listing()
    write_measures(run.backend, BY, [step(1)])
    assert BY.name in files_of(tmp_path / "run")
    assert Entry(BY.name, len(msgspec.json.encode(step(1))) + 1) in list(run.backend.list(""))
    assert run.listing() == before
