"""Assembly: every byte once or more often, in any order; gaps and twins told exactly."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.errors import UsageError
from everystep.tap.pieces import Announced, Piece, Reduced, Source
from everystep.tap.ring import SCATTERED, Assembler, Refused, Scattered

TEXT = np.random.default_rng(5).integers(0, 256, 4000, np.uint8)


def piece(start: int, stop: int, *, number: int = 0, stream: int = 0, frame: int = 1) -> Piece:
    return Piece(number, start, TEXT[start:stop].copy(), stream, frame)


@given(st.data())
@settings(max_examples=200)
def test_any_pieces_in_any_order(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 700))
    cuts = data.draw(
        st.lists(st.tuples(st.integers(0, length), st.integers(0, length)), max_size=30)
    )
    pieces = [piece(min(cut), max(cut), stream=i % 2, frame=i) for i, cut in enumerate(cuts)]
    announce_at = data.draw(st.integers(0, len(pieces)))
    assembler, there, given_out = Assembler(), np.zeros(length, bool), list[Reduced]()
    for i, one in enumerate(pieces):
        if i == announce_at:
            given_out += assembler.add(Announced(0, length))
        given_out += assembler.add(one)
        there[one.start : one.start + len(one.data)] = True
    if announce_at == len(pieces):
        given_out += assembler.add(Announced(0, length))
    assert len(given_out) == there.all()
    given_out += assembler.give_up()
    (buffer,) = given_out
    said = np.zeros(length, bool)
    for start, stop in buffer.present:
        assert (buffer.data[start:stop] == TEXT[start:stop]).all()
        said[start:stop] = True
    assert (said == there).all()
    for start, stop in buffer.missing:
        assert (buffer.data[start:stop] == 0xFF).all()
        assert not said[start:stop].any()
    assert buffer.mismatches == ()
    assert assembler.alarms == []
    assert assembler.left_out == 0


def test_large_buffers_in_parts_of_every_length_and_alignment() -> None:
    whole = np.resize(TEXT, 5_000_000)
    rng = np.random.default_rng(3)
    edges = np.unique(np.r_[0, rng.integers(0, len(whole), 5000), len(whole)])
    order = rng.permutation(len(edges) - 1)
    assembler = Assembler()
    assembler.add(Announced(0, len(whole)))
    rows = [(edges[i], edges[i], edges[i + 1] - edges[i], 1, 0, 0, 0) for i in order]
    (buffer,) = assembler.add(Scattered(np.array(rows, SCATTERED), whole))
    assert (buffer.data == whole).all()
    assert buffer.missing == ()


def test_sources_tell_which_stream_gave_which_range() -> None:
    assembler = Assembler()
    assembler.add(Announced(3, 300))
    assembler.add(piece(0, 200, number=3, stream=7, frame=40))
    (buffer,) = assembler.add(piece(150, 300, number=3, stream=8, frame=50))
    assert buffer.sources == (Source(0, 200, 7, 40), Source(150, 300, 8, 50))


def test_twins_that_differ_are_an_alarm_and_their_range_is_missing() -> None:
    assembler = Assembler()
    assembler.add(Announced(0, 100))
    assembler.add(piece(0, 60, stream=1, frame=11))
    other = piece(40, 60, stream=2, frame=12)
    other.data[5] ^= 1
    assembler.add(other)
    (buffer,) = assembler.add(piece(60, 100, stream=2, frame=13))
    (mismatch,) = buffer.mismatches
    assert (mismatch.at, mismatch.stop) == (45, 60)
    assert (mismatch.streams, mismatch.frames) == ((1, 2), (11, 12))
    assert buffer.missing == ((45, 60),)
    assert (buffer.data[45:60] == 0xFF).all()
    assert assembler.alarms == [mismatch]


def test_a_twin_that_comes_after_the_buffer_was_whole_is_compared_too() -> None:
    assembler = Assembler()
    assembler.add(Announced(0, 100))
    assert len(assembler.add(piece(0, 100, stream=1))) == 1
    assert assembler.add(piece(0, 50, stream=2)) == []
    assert assembler.alarms == []
    late = piece(50, 100, stream=2)
    late.data[:] ^= 1
    assembler.add(late)
    assert [(alarm.at, alarm.stop) for alarm in assembler.alarms] == [(50, 100)]


def test_buffers_are_given_up_in_order_when_enough_later_ones_are_whole() -> None:
    assembler = Assembler(behind=2)
    for number in range(4):
        assembler.add(Announced(number, 100))
    assembler.add(piece(0, 50, number=1))
    assembler.add(piece(50, 100, number=0))
    assert [b.collective for b in assembler.add(piece(0, 100, number=2))] == [2]
    given_out = assembler.add(piece(0, 100, number=3))
    assert [b.collective for b in given_out] == [0, 1, 3]
    assert [b.missing for b in given_out] == [((0, 50),), ((50, 100),), ()]
    assert assembler.add(piece(50, 100, number=1)) == []
    assert assembler.left_out == 1


def test_what_is_given_out_is_not_kept() -> None:
    assembler, seen = Assembler(), []
    for number in range(20):
        assembler.add(Announced(number, len(TEXT)))
        rows = [(0, 0, 2000, 1, number, 0, 0), (2000, 2000, 2000, 2, number, 0, 0)]
        rows.append((0, 0, 1000, 3, number + 1, 0, 0))  # of the next one, in the same call
        (buffer,) = assembler.add(Scattered(np.array(rows, SCATTERED), TEXT))
        assert (buffer.data == TEXT).all()
        seen.append(weakref.ref(buffer.data.base))
    del buffer
    assert len([1 for found in seen if found() is not None]) <= 3  # two wait for their twins


def test_a_stale_byte_never_shows() -> None:
    assembler = Assembler()
    for number in range(12):
        assembler.add(Announced(number, 500))
        assembler.add(piece(0, 500, number=number))
    assembler.add(Announced(99, 500))
    assembler.add(piece(100, 200, number=99))
    (buffer,) = assembler.give_up(99)
    assert buffer.missing == ((0, 100), (200, 500))
    assert (buffer.data[200:] == 0xFF).all()


def test_what_is_refused_has_nothing_present() -> None:
    assembler = Assembler()
    assembler.add(Announced(0, 100))
    assembler.add(piece(0, 90))
    (buffer,) = assembler.add(Refused(0))
    assert buffer.present == ()
    assert buffer.missing == ((0, 100),)
    assert assembler.add(piece(90, 100)) == []


def test_memory_is_bounded() -> None:
    assembler = Assembler(largest_bytes=1000, total_bytes=2500)
    assembler.add(Piece(0, 900, TEXT[:200].copy(), 0, 1))
    assembler.add(Announced(0, 5000))
    assembler.add(Piece(0, (1 << 63) - 1, TEXT[:200].copy(), 0, 1))
    assert assembler.left_out == 3
    given_out = []
    for number in range(1, 6):
        given_out += assembler.add(Announced(number, 1000))
    assert [buffer.collective for buffer in given_out] == [1, 2, 3]
    assert all(buffer.missing == ((0, 1000),) for buffer in given_out)


def test_bounds_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError):
        Assembler(behind=0)
