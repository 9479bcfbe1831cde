"""RoCE messages out of hand-made packets: every opcode, order, loss, repetition and form."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec import Struct

from everystep.errors import UsageError
from everystep.tap import _roce
from everystep.tap.packets import Parser
from everystep.tap.pieces import (
    LL,
    LL128,
    PSN_COUNT,
    RAW,
    READ_REQUEST,
    READ_RESPONSE,
    SEND,
    WRITE,
    Frames,
    Messages,
    Table,
)
from everystep.tap.roce import Tracker, unpack
from tap import frames as f


class Got(Struct, eq=False):
    """One message, copied out of its batch."""

    row: Table
    payload: bytes
    present: list[tuple[int, int]]


class Reader:
    """Packets in, messages out; offsets in frames count on."""

    def __init__(self, **options: bool | int) -> None:
        self.parser = Parser()
        self.tracker = Tracker(**options)  # type: ignore[arg-type]
        self.opened: list[Table] = []
        self.closed: list[int] = []
        self.acks: list[Table] = []
        self.frames = 0

    def feed(self, frames: Sequence[bytes], *, cut: int | None = None) -> list[Got]:
        return self.take(f.batch(frames, first=self.frames + 1, cut=cut))

    def take(self, frames: Frames) -> list[Got]:
        self.frames += len(frames.table)
        got = []
        for messages in self.tracker.feed(self.parser.parse(frames)):
            got += self._copy(messages)
        return got

    def flush(self) -> list[Got]:
        return self._copy(self.tracker.flush())

    def _copy(self, messages: Messages) -> list[Got]:
        self.opened += list(messages.opened)
        self.closed += messages.closed.tolist()
        self.acks += list(messages.acks)
        return [
            Got(
                row.copy(),
                messages.data[row["at"] : row["at"] + row["nbytes"]].tobytes(),
                [
                    (int(a), int(b))
                    for a, b in messages.ranges[row["range_at"] : row["range_at"] + row["ranges"]]
                ],
            )
            for row in messages.table
        ]

    def count(self, what: str) -> int:
        return self.tracker.counts()[what]


def data_of(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def lines(nbytes: int, flag: int, seed: int = 0) -> bytes:
    """LL lines that carry `nbytes` of data; what data: `data_of(nbytes, seed)`."""
    words = np.frombuffer(data_of(nbytes, seed), "<u4").reshape(-1, 2)
    out = np.full((len(words), 4), flag, "<u4")
    out[:, 0::2] = words
    return out.tobytes()


# ---------------------------------------------------------------- whole messages


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("nbytes", [0, 3, 1024, 1025, 5000, 100_003])
def test_a_write(family: int, nbytes: int) -> None:
    data = data_of(nbytes)
    reader = Reader()
    sent = f.write(9, data, va=1 << 50, rkey=6, family=family)
    (got,) = reader.feed(sent)
    row, count = got.row, max(1, -(-nbytes // 1024))
    assert got.payload == data
    assert got.present == ([(0, nbytes)] if nbytes else [])
    assert (row["va"], row["rkey"], row["length"]) == (1 << 50, 6, nbytes)
    assert (row["psn"], row["packets"], row["span"]) == (9, count, count)
    assert (row["frame"], row["last_frame"]) == (1, count)
    assert row["time_ns"] == count * 1000
    assert (row["immediate"], row["has_immediate"]) == (nbytes, 1)
    assert (row["operation"], row["form"], row["complete"], row["has_head"]) == (WRITE, RAW, 1, 1)
    assert row["mtu"] == (1024 if nbytes > 1024 else 0)
    assert not (row["is_split"] or row["is_chain"] or row["given_up"])
    (stream,) = reader.opened
    assert (stream["qp"], stream["source_port"], stream["is_response"]) == (77, 50000, 0)
    assert reader.parser.address(int(stream["source"])).ip == (f.IP4_A if family == 4 else f.IP6_A)
    assert not reader.flush()
    assert reader.count("requests") == count


@pytest.mark.parametrize("mtu", [256, 512, 1024, 2048, 4096])
def test_every_mtu(mtu: int) -> None:
    data = data_of(3 * mtu + 5)
    (got,) = Reader().feed(f.write(0, data, mtu=mtu))
    assert got.payload == data
    assert (got.row["mtu"], got.row["span"]) == (mtu, 4)


def test_every_opcode() -> None:
    tail = struct.pack(">I", 0x01020304)
    body = [data_of(256, i) for i in range(3)]
    last = body[2][:9]
    a = f.aeth(0, 1)
    inv = b"\0\0\0\7"
    sent = [
        f.roce(f.SEND_FIRST, 0, body[0]),
        f.roce(f.SEND_MIDDLE, 1, body[1]),
        f.roce(f.SEND_LAST, 2, last),
        f.roce(f.SEND_FIRST, 3, body[0]),
        f.roce(f.SEND_LAST_IMM, 4, last, headers=tail),
        f.roce(f.SEND_ONLY, 5, last),
        f.roce(f.SEND_ONLY_IMM, 6, last, headers=tail),
        f.roce(f.SEND_ONLY_INVALIDATE, 7, last, headers=inv),
        f.roce(f.WRITE_ONLY, 8, last, headers=f.reth(1, 2, 9)),
        f.roce(f.READ_REQUEST, 9, headers=f.reth(3, 4, 600)),
        f.roce(f.READ_FIRST, 9, body[0], headers=a, back=True, qp=78),
        f.roce(f.READ_MIDDLE, 10, body[1], back=True, qp=78),
        f.roce(f.READ_LAST, 11, body[2][:88], headers=a, back=True, qp=78),
        f.roce(f.READ_REQUEST, 12, headers=f.reth(3, 4, 9)),
        f.roce(f.READ_ONLY, 12, last, headers=a, back=True, qp=78),
        f.roce(f.COMPARE_SWAP, 13, b"", headers=b"\0" * 28),
        f.roce(18, 13, b"", headers=b"\0" * 12, back=True, qp=78),
        f.roce(f.ACKNOWLEDGE, 13, headers=f.aeth(0x1F, 9), back=True, qp=78),
        f.roce(f.SEND_ONLY, 14, b""),
    ]
    reader = Reader()
    got = reader.feed(sent)
    assert [g.payload for g in got] == [
        *(body[0] + body[1] + last, body[0] + last, last, last, last, last, b""),
        *(body[0] + body[1] + body[2][:88], b"", last, b""),
    ]
    operations = [int(g.row["operation"]) for g in got]
    assert operations == [
        *([SEND] * 5),
        *(WRITE, READ_REQUEST, READ_RESPONSE, READ_REQUEST, READ_RESPONSE, SEND),
    ]
    assert all(g.row["complete"] and g.row["has_head"] for g in got)
    # 04 03 02 01 on the wire of a machine that keeps the lowest byte first
    assert [int(g.row["immediate"]) for g in got if g.row["has_immediate"]] == [0x04030201] * 2
    assert [(int(g.row["psn"]), int(g.row["span"])) for g in got] == [
        *((0, 3), (3, 2), (5, 1), (6, 1), (7, 1), (8, 1), (9, 3), (9, 3), (12, 1), (12, 1), (14, 1))
    ]
    request = got[6].row
    assert (request["va"], request["rkey"], request["length"], request["ranges"]) == (3, 4, 600, 0)
    assert [int(s["is_response"]) for s in reader.opened] == [0, 1]
    (ack,) = reader.acks
    assert (ack["psn"], ack["syndrome"], ack["count"], ack["qp"]) == (13, 0x1F, 9, 78)
    assert (ack["frame"], ack["time_ns"], ack["source_port"]) == (18, 18_000, 50000)
    assert reader.count("atomic") == 2
    assert not reader.flush()


def test_streams_are_told_apart() -> None:
    sent = []
    texts = [data_of(3000, i) for i in range(3)]
    first = f.write(0, texts[0], qp=1)
    second = f.write(0, texts[1], qp=2)
    third = f.write(0, texts[2], qp=1, back=True)
    for triple in zip(first, second, third, strict=True):
        sent += triple
    reader = Reader()
    assert [g.payload for g in reader.feed(sent)] == texts
    assert [int(s["number"]) for s in reader.opened] == [0, 1, 2]


def test_behind_vlan_tags_options_and_with_a_trailer() -> None:
    hop = bytes([17, 0]) + b"\0" * 6
    sent = [
        f.roce(f.SEND_ONLY, 0, b"0123", tags=[0x8100], trailer=b"frame check"),
        f.roce(f.SEND_ONLY, 1, b"0123", extensions=hop, protocol=0),
        f.roce(f.SEND_ONLY, 0, b"0123", family=4, extensions=b"\1" * 4, tags=[0x88A8, 0x8100]),
    ]
    reader = Reader()
    assert [g.payload for g in reader.feed(sent)] == [b"0123"] * 3
    assert reader.count("wrong ICRC") == reader.count("ICRC cannot be checked") == 0


# ---------------------------------------------------------------- order, loss, repetition


def shuffled(sent: list[bytes], seed: int, *, width: int) -> list[bytes]:
    rng = random.Random(seed)
    keys = [(i + rng.random() * width, frame) for i, frame in enumerate(sent)]
    return [frame for _, frame in sorted(keys)]


@pytest.mark.parametrize("start", [0, PSN_COUNT - 20])
@pytest.mark.parametrize("seed", range(10))
def test_reordered_and_repeated_packets_change_nothing(start: int, seed: int) -> None:
    rng = random.Random(seed)
    texts = [data_of(rng.choice([0, 100, 1024, 5000, 17_000]), i) for i in range(12)]
    sent: list[bytes] = []
    psn = start
    for i, text in enumerate(texts):
        new = f.write(psn, text, va=0x10000 * i)
        psn = (psn + len(new)) % PSN_COUNT
        sent += new
    doubled = [frame for frame in sent for _ in range(rng.choice([1, 1, 2]))]
    reader = Reader()
    got = reader.feed(shuffled(doubled, seed, width=6)) + reader.flush()
    got.sort(key=lambda g: int(g.row["va"]))
    assert [g.payload for g in got] == texts
    assert all(g.row["complete"] for g in got)
    assert reader.count("duplicate") == len(doubled) - len(sent)
    assert len(reader.opened) == 1


@pytest.mark.parametrize("start", [0, PSN_COUNT - 3])
def test_go_back_n_fills_the_gap(start: int) -> None:
    texts = [data_of(5000, i) for i in range(3)]
    sent: list[bytes] = []
    for i, text in enumerate(texts):
        sent += f.write((start + 5 * i) % PSN_COUNT, text, va=0x10000 * i)
    again = sent[:7] + sent[8:] + sent[7:]
    reader = Reader()
    got = reader.feed(again)
    assert sorted(g.payload for g in got) == sorted(texts)
    assert reader.count("duplicate") == len(sent) - 8


def expected_ranges(lost: set[int], count: int, nbytes: int) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for i in range(count):
        start, stop = 1024 * i, min(1024 * (i + 1), nbytes)
        if i in lost:
            continue
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges


@pytest.mark.parametrize("seed", range(20))
def test_what_is_lost_is_known_and_nothing_is_invented(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([2, 6, 700])
    text = data_of(1024 * count - rng.randrange(1024), seed)
    sent = f.write(5, text)
    lost = {i for i in range(1, count) if rng.random() < 0.3} | {count - 1}
    reader = Reader()
    assert not reader.feed([frame for i, frame in enumerate(sent) if i not in lost])
    (got,) = reader.flush()
    assert not got.row["complete"] and got.row["given_up"] and got.row["has_head"]
    assert got.present == expected_ranges(lost, count, len(text))
    for start, stop in got.present:
        assert got.payload[start:stop] == text[start:stop]
    assert got.row["packets"] == count - len(lost)
    assert (got.row["length"], got.row["span"]) == (len(text), count)


def test_a_lost_beginning_leaves_runs() -> None:
    first, second = f.write(0, data_of(3000, 1)), f.write(3, data_of(6000, 2))
    reader = Reader()
    got = reader.feed(first + [second[i] for i in (1, 2, 4, 5)]) + reader.flush()
    assert [int(g.row["psn"]) for g in got] == [0, 4, 7]
    assert [int(g.row["has_head"]) for g in got] == [1, 0, 0]
    text = data_of(6000, 2)
    assert [g.payload for g in got[1:]] == [text[1024:3072], text[4096:]]
    assert [g.present for g in got[1:]] == [[(0, 2048)], [(0, 1904)]]
    assert not any(g.row["complete"] or g.row["span"] or g.row["va"] for g in got[1:])
    assert got[2].row["immediate"] == 6000


def test_a_beginning_that_comes_late_takes_over_the_runs() -> None:
    text = data_of(6000, 2)
    sent = f.write(3, text)
    reader = Reader()
    (got,) = reader.feed([sent[i] for i in (1, 2, 4, 5, 0, 3)])
    assert got.payload == text and got.row["complete"]
    assert (got.row["frame"], got.row["last_frame"], got.row["packets"]) == (1, 6, 6)


def test_what_does_not_come_is_given_up_after_a_while() -> None:
    broken = f.write(0, data_of(5000))
    del broken[2]
    after = [frame for i in range(1100) for frame in f.write(5 + i, b"abcd", va=i)]
    reader = Reader()
    got = reader.feed(broken + after)
    assert len(got) == 1101
    (lost,) = [g for g in got if not g.row["complete"]]
    assert lost.present == [(0, 2048), (3072, 5000)]
    assert not reader.flush()


def test_at_most_sixteen_messages_of_a_stream_stay_open() -> None:
    reader = Reader()
    got = []
    for i in range(20):
        got += reader.feed(f.write(2 * i, data_of(2000, i), va=i)[:1])
    assert [int(g.row["va"]) for g in got] == [0, 1, 2, 3]
    assert len(reader.flush()) == 16


def test_flush_can_spare_what_is_young() -> None:
    reader = Reader()
    reader.feed(f.write(0, data_of(2000), qp=1)[:1])
    reader.feed(f.write(0, data_of(2000), qp=2)[:1])
    assert len(reader.tracker.flush(before_ns=2000).table) == 1
    assert len(reader.flush()) == 1


def test_a_restarted_run_is_a_new_stream() -> None:
    reader = Reader()
    sent = [frame for i in range(50) for frame in f.write(2 * i, data_of(2000, i), va=i)]
    got = reader.feed(sent)
    again = [
        frame for i in range(50) for frame in f.write(2 * i, data_of(2000, 99 + i), va=i, rkey=8)
    ]
    got += reader.feed(again)
    assert [g.payload for g in got] == [data_of(2000, i) for i in (*range(50), *range(99, 149))]
    assert [int(s["number"]) for s in reader.opened] == [0, 1]
    assert reader.closed == [0]
    assert {int(g.row["stream"]) for g in got[50:]} == {1}
    assert reader.count("restarted streams") == 1


def test_a_restart_soon_after_the_beginning_is_seen_too() -> None:
    reader = Reader()
    reader.feed(f.write(0, data_of(2000, 0)) + f.write(2, data_of(2000, 1), va=2))
    (got,) = reader.feed(f.write(0, data_of(2000, 2), rkey=8))
    assert got.payload == data_of(2000, 2)
    assert reader.closed == [0]


def test_after_a_restart_the_first_number_is_the_new_one() -> None:
    reader = Reader()
    reader.feed([frame for i in range(40) for frame in f.write(1000 + i, b"abcd", va=i)])
    sent = f.write(0, b"abcd", rkey=8) + f.write(2, b"abcd", rkey=8) + f.write(1, b"late", rkey=8)
    assert len(reader.feed(sent)) == 3
    assert [int(s["number"]) for s in reader.opened] == [0, 1]


def test_two_whole_messages_lost_leave_a_gap_of_numbers() -> None:
    reader = Reader()
    got = reader.feed(f.write(0, b"abcd") + f.write(7, b"efgh", va=3))
    assert [int(g.row["psn"]) for g in got] == [0, 7]
    (late,) = reader.feed(f.write(4, b"late", va=2))
    assert late.payload == b"late"
    assert len(reader.opened) == 1


# ---------------------------------------------------------------- adaptive routing


def closing(psn: int, value: int) -> bytes:
    headers = f.reth(0, 0, 0) + f.immediate(value)
    return f.roce(f.WRITE_ONLY_IMM, psn, headers=headers)


def chain(psn: int, text: bytes, *, va: int = 0x1000) -> list[bytes]:
    parts = [text[i : i + 1024] for i in range(0, len(text), 1024)]
    return [
        f.roce(f.WRITE_ONLY, psn + i, part, headers=f.reth(va + 1024 * i, 5, len(part)))
        for i, part in enumerate(parts)
    ]


@pytest.mark.parametrize("nbytes", [1024, 4096, 5000, 200_000])
@pytest.mark.parametrize("as_chain", [False, True])
def test_a_write_and_its_closing_immediate_are_one(nbytes: int, as_chain: bool) -> None:
    text = data_of(nbytes)
    sent = chain(3, text) if as_chain else f.write(3, text, imm=False)
    reader = Reader()
    (got,) = reader.feed([*sent, closing(3 + len(sent), nbytes)])
    row = got.row
    assert got.payload == text and got.present == [(0, nbytes)]
    assert row["complete"] and row["is_split"]
    assert row["is_chain"] == (as_chain and nbytes > 1024)
    assert (row["packets"], row["span"]) == (len(sent) + 1, len(sent) + 1)
    assert (row["immediate"], row["immediate_frame"]) == (nbytes, len(sent) + 1)
    assert (row["va"], row["length"], row["psn"]) == (0x1000, nbytes, 3)


def test_an_immediate_in_network_order_closes_too() -> None:
    text = data_of(5000)
    swapped = int.from_bytes((5000).to_bytes(4, "little"), "big")
    (got,) = Reader().feed([*f.write(0, text, imm=False), closing(5, swapped)])
    assert got.row["is_split"] and got.row["immediate"] == swapped


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_in_any_order(seed: int) -> None:
    text = data_of(70_000, seed)
    sent = chain(0, text)
    sent.append(closing(len(sent), len(text)))
    order = shuffled(sent, seed, width=8) if seed else sent[::-1]
    reader = Reader()
    got = reader.feed(order) + reader.flush()
    if order[0] == sent[-1]:  # it had nothing to close
        assert [int(g.row["length"]) for g in got] == [0, 70_000 % 1024, 70_000 // 1024 * 1024]
        assert got[2].payload == text[: 70_000 // 1024 * 1024]
        assert not got[2].row["complete"]
    else:
        (only,) = got
        assert only.payload == text and only.row["complete"] and only.row["is_split"]


@pytest.mark.parametrize("lost", [0, 1, 3, 6])
def test_a_chain_with_a_lost_packet(lost: int) -> None:
    text = data_of(7000)
    sent = chain(0, text)
    reader = Reader()
    del sent[lost]
    (got,) = reader.feed([*sent, closing(7, 7000)]) + reader.flush()
    assert not got.row["complete"] and got.row["is_split"]
    assert (got.row["va"], got.row["length"], got.row["psn"]) == (0x1000, 7000, 0)
    assert got.present == expected_ranges({lost}, 7, 7000)
    for start, stop in got.present:
        assert got.payload[start:stop] == text[start:stop]


def test_a_chain_whose_end_was_lost_is_not_complete() -> None:
    reader = Reader()
    got = reader.feed([*chain(0, data_of(7000))[:4], *f.write(8, b"next", va=9)])
    got += reader.flush()
    assert [int(g.row["complete"]) for g in got] == [1, 0]
    assert got[1].row["is_chain"] and not got[1].row["is_split"]


def test_clear_to_send_records_are_not_chained() -> None:
    sent = [
        f.roce(f.WRITE_ONLY, i, data_of(256, i), headers=f.reth(0x1000 + 256 * i, 5, 256))
        for i in range(5)
    ]
    got = Reader().feed(sent)
    assert [g.payload for g in got] == [data_of(256, i) for i in range(5)]
    assert all(g.row["complete"] for g in got)


def test_an_empty_chunk_closes_nothing() -> None:
    text = data_of(5000)
    sent = f.write(0, text, imm=False) + f.write(5, b"", va=0x9000, rkey=5)
    got = Reader().feed(sent)
    assert [int(g.row["length"]) for g in got] == [5000, 0]
    assert not got[0].row["is_split"]


# ---------------------------------------------------------------- forms


@pytest.mark.parametrize("mtu", [256, 1024, 4096])
def test_ll_flags_are_checked_and_left_out(mtu: int) -> None:
    reader = Reader()
    (raw,) = reader.feed(f.write(0, lines(10_000, 1), mtu=mtu))
    assert raw.row["form"] == RAW
    assert reader.tracker.place(int(reader.opened[0]["number"]), 5, LL)
    psn = int(raw.row["span"])
    got = reader.feed(f.write(psn, lines(10_000, 2, seed=1), mtu=mtu))
    got += reader.feed(f.write(2 * psn, lines(8, 3, seed=2), mtu=mtu))
    got += reader.feed(f.write(2 * psn + 1, b"", mtu=mtu))
    assert [g.payload for g in got] == [data_of(10_000, 1), data_of(8, 2), b""]
    assert [int(g.row["flag"]) for g in got] == [2, 3, 0]
    assert all(g.row["form"] == LL and g.row["complete"] for g in got)
    assert got[0].present == [(0, 20_000)]
    (other,) = reader.feed(f.write(2 * psn + 2, lines(16, 4), rkey=6, mtu=mtu))
    assert other.row["form"] == RAW and other.payload == lines(16, 4)


@pytest.mark.parametrize("line", [0, 1, 30, 63])
@pytest.mark.parametrize("word", [1, 3])
def test_a_packet_with_wrong_flags_is_not_taken(line: int, word: int) -> None:
    reader = Reader()
    reader.feed(f.write(0, b"open"))
    reader.tracker.place(0, 5, LL)
    whole = np.frombuffer(lines(2048, 7), "<u4").copy()
    whole[4 * (64 + line) + word] = 8
    assert not reader.feed(f.write(1, whole.tobytes()))
    (got,) = reader.flush()
    assert got.present == [(0, 1024), (2048, 4096)]
    assert got.row["flag"] == 7 and got.row["flag_errors"] == 1
    assert reader.count("wrong flags") == 1


def test_cut_lines_are_not_taken() -> None:
    reader = Reader()
    reader.feed(f.write(0, b"open"))
    reader.tracker.place(0, 5, LL)
    assert not reader.feed(f.write(1, lines(2048, 7)[:-8]))
    (got,) = reader.flush()
    assert got.present == [(0, 3072)]


def test_ll_in_chains_and_late_beginnings() -> None:
    reader = Reader()
    reader.feed(f.write(0, b"open", mtu=1024))
    reader.tracker.place(0, 5, LL)
    wire = lines(4096, 9)
    sent = chain(1, wire)
    (got,) = reader.feed([*sent[3:], *sent[:3], closing(9, len(wire))])
    assert got.payload == data_of(4096) and got.row["flag"] == 9
    late = f.write(10, lines(4096, 10, seed=3))
    (got,) = reader.feed([*late[2:], *late[:2]])
    assert got.payload == data_of(4096, 3) and got.row["flag"] == 10


def ll128_wire(data: bytes, flag: int) -> bytes:
    """By the rule of the slices, word by word."""
    out = b""
    for at in range(0, len(data), 1920):
        words = [data[at + i : at + i + 8].ljust(8, b"\0") for i in range(0, 1920, 8)]
        for w in range(256):
            g, lane, b = w // 64, w // 2 % 32, w % 2
            if lane % 8 == 7 and b == 1:
                out += struct.pack("<Q", flag)
            elif lane % 8 == 7:
                out += words[2 * (30 * g + lane) if g % 2 == 0 else 2 * (30 * (g - 1) + lane) + 1]
            elif g % 2 == 0:
                out += words[2 * (30 * g + lane) + b]
            else:
                out += words[2 * (30 * (g - 1) + 32 + lane - lane // 8) + b]
    return out


@pytest.mark.parametrize("mtu", [256, 1024, 4096])
def test_ll128_slices(mtu: int) -> None:
    data = data_of(1920 * 5)
    wire = ll128_wire(data, (1 << 40) + 1)
    reader = Reader()
    reader.feed(f.write(0, b"open"))
    reader.tracker.place(0, 5, LL128)
    sent = f.write(1, wire, mtu=mtu)
    (got,) = reader.feed(sent[:1] + sent[:0:-1])
    assert got.payload == data
    assert (got.row["form"], got.row["flag"]) == (LL128, (1 << 40) + 1)
    broken = bytearray(wire)
    broken[2048 + 127] ^= 1
    assert not reader.feed(f.write(1 + len(sent), bytes(broken), mtu=mtu))
    (got,) = reader.flush()
    assert got.row["flag_errors"] == 1
    lost = (2048 + 127) // mtu * mtu
    assert got.present == [(a, b) for a, b in ((0, lost), (lost + mtu, len(wire))) if a < b]


def test_unpack_does_the_same() -> None:
    to = np.zeros(1024, np.uint8)
    wire = np.frombuffer(lines(1024, 5), np.uint8)
    assert unpack(LL, wire[512:], to, 512) == (5, True)
    assert to.tobytes() == b"\0" * 256 + data_of(1024)[256:]
    assert unpack(LL, wire[:512], to) == (5, True)
    assert to.tobytes() == data_of(1024)
    assert not unpack(LL, wire[:24], to)[1]
    slices = np.zeros(3840, np.uint8)
    raw = np.frombuffer(ll128_wire(data_of(3840), 6), np.uint8)
    for start in range(0, 4096, 256):
        assert unpack(LL128, raw[start : start + 256], slices, start) == (6, True)
    assert slices.tobytes() == data_of(3840)
    for form, raw_bytes in ((LL, 4096), (LL128, 4096), (RAW, 1025), (9, 8)):
        with pytest.raises(UsageError):
            unpack(form, np.zeros(raw_bytes, np.uint8), np.zeros(1024, np.uint8), 0)


def test_place_knows_its_streams_and_forms() -> None:
    reader = Reader()
    assert not reader.tracker.place(0, 5, LL)
    reader.feed(f.write(0, b"open"))
    assert reader.tracker.place(0, 5, LL)
    with pytest.raises(UsageError):
        reader.tracker.place(0, 5, 3)
    for key in range(100, 108):
        assert reader.tracker.place(0, key, LL)
    (forgotten,) = reader.feed(f.write(1, lines(8, 1)))
    assert forgotten.row["form"] == RAW


# ---------------------------------------------------------------- ICRC and damage


@pytest.mark.parametrize("family", [4, 6])
def test_a_wrong_icrc_is_dropped(family: int) -> None:
    (frame,) = f.write(0, data_of(1000), family=family)
    size = len(frame)
    ip = 14
    free = (
        {ip + 1, ip + 8, ip + 10, ip + 11, ip + 20 + 6, ip + 20 + 7, ip + 28 + 4}
        if family == 4
        else {ip + 1, ip + 2, ip + 3, ip + 7, ip + 40 + 6, ip + 40 + 7, ip + 48 + 4}
    )
    for at in [*range(ip, ip + 80), *range(ip + 80, size, 97), size - 1]:
        damaged = bytearray(frame)
        damaged[at] ^= 0x10
        reader = Reader()
        got = reader.feed([bytes(damaged)])
        if at == ip and family == 6:
            continue  # half of the traffic class, which is free; the version is not
        assert bool(got) == (at in free), at
        if reader.count("requests"):
            assert at in free
    reader = Reader(check_icrc=False)
    (got_anyway,) = reader.feed([frame[:-1] + b"?"])
    assert got_anyway.payload == data_of(1000)


def test_crc32_by_every_means() -> None:
    rng = random.Random(0)
    for _ in range(500):
        head = rng.randbytes(16 * rng.randrange(9) if rng.random() < 0.7 else rng.randrange(99))
        body = rng.randbytes(rng.randrange(rng.choice([20, 200, 5000])))
        for how in (0, 1, 2):
            assert _roce.crc32(head, body, how) == zlib.crc32(head + body)


def test_look_alikes_are_counted() -> None:
    reader = Reader(check_icrc=False)
    sent = [
        f.roce(f.SEND_ONLY, 0, b"abcd", version=10),
        f.ethernet(f.ip6(f.udp(b"short"), 17), 0x86DD),
        f.roce(100, 0, b"\0" * 8),
        f.roce(0x81, 0, b"\0" * 16),
        f.roce(24, 0, b"abcd"),
        f.roce(f.WRITE_ONLY, 0, b"", headers=b"\0" * 8),
        f.roce(f.WRITE_ONLY, 0, b"abcd", headers=f.reth(0, 0, 5)),
        f.roce(f.WRITE_FIRST, 0, b"abcd" * 64, headers=f.reth(0, 0, 256)),
        f.roce(f.WRITE_FIRST, 0, b"abcd" * 64, headers=f.reth(0, 0, 0xFFFFFFFF)),
        f.roce(f.WRITE_FIRST, 0, b"abcd" * 65, headers=f.reth(0, 0, 1000)),
        f.roce(f.WRITE_LAST, 0, b""),
        f.roce(f.READ_REQUEST, 0, b"abcd", headers=f.reth(0, 0, 4)),
    ]
    assert reader.feed(sent) == []
    assert reader.flush() == []
    assert reader.count("not RoCE") == 2
    assert reader.count("other transport") == 2
    assert reader.count("malformed") == 8


def test_what_contradicts_an_open_message_is_not_taken() -> None:
    reader = Reader()
    sent = f.write(0, data_of(5000))
    wrong = [
        f.roce(f.WRITE_LAST, 1, b"abcd"),
        f.roce(f.WRITE_MIDDLE, 4, data_of(1024)),
        f.roce(f.SEND_MIDDLE, 2, data_of(1024)),
        f.roce(f.WRITE_MIDDLE, 2, data_of(512)),
    ]
    (got,) = reader.feed(sent[:1] + wrong + sent[1:])
    assert got.payload == data_of(5000)
    assert reader.count("contradiction") == 4
    reader.feed(sent[:0] + f.write(10, data_of(5000), va=1)[:1])
    got_two = reader.feed(f.write(12, b"abcd", va=2))
    assert [int(g.row["complete"]) for g in got_two] == [0, 1]


def test_cut_payload_is_missing() -> None:
    strict = Reader()
    assert strict.feed(f.write(0, data_of(3000)), cut=128) + strict.flush() == []
    assert strict.count("ICRC cannot be checked") == 3
    reader = Reader(check_icrc=False)
    assert reader.feed(f.write(0, data_of(3000)), cut=128) == []
    (got,) = reader.flush()
    assert (got.row["length"], got.row["va"], got.present) == (3000, 0x1000, [])
    assert reader.count("payload not captured") == 3


# ---------------------------------------------------------------- memory


def test_a_small_arena_gives_more_batches() -> None:
    reader = Reader(max_message_bytes=16 << 10, arena_bytes=64 << 10)
    texts = [data_of(10_000, i) for i in range(40)]
    sent = [frame for i, text in enumerate(texts) for frame in f.write(10 * i, text, va=i)]
    packets = reader.parser.parse(f.batch(sent))
    got, batches = [], 0
    for messages in reader.tracker.feed(packets):
        batches += 1
        got += reader._copy(messages)
    assert batches > 10
    assert [g.payload for g in got] == texts


def test_open_messages_make_room_when_there_is_none() -> None:
    reader = Reader(max_message_bytes=16 << 10, arena_bytes=64 << 10)
    sent = [f.write(0, data_of(10_000), qp=qp)[0] for qp in range(40)]
    got = reader.feed(sent) + reader.flush()
    assert len(got) == 40
    assert all(g.present == [(0, 1024)] and g.row["given_up"] for g in got)
    assert all(g.payload[:1024] == data_of(10_000)[:1024] for g in got)


def test_sizes_must_fit() -> None:
    for arena, longest in ((65536 - 1024, 1024), (65536, 32768), (0, 1024), (1000, 1)):
        with pytest.raises(UsageError, match="arena"):
            Tracker(arena_bytes=arena, max_message_bytes=longest)


def test_the_streams_are_bounded() -> None:
    reader = Reader()
    for start in range(0, 6000, 1000):
        reader.feed([f.write(0, b"abcd", qp=qp)[0] for qp in range(start, start + 1000)])
    assert len(reader.opened) == 6000
    assert len(reader.closed) == 6000 - 4096
    (again,) = reader.feed(f.write(1, b"more", qp=5999))
    assert again.row["stream"] == 5999 and len(reader.opened) == 6000
    reader.feed(f.write(1, b"more", qp=0))
    assert len(reader.opened) == 6001


def test_a_run_grows_until_it_is_too_long() -> None:
    reader = Reader(max_message_bytes=1 << 20, arena_bytes=4 << 20)
    text = data_of(300 * 4096)
    sent = [
        f.roce(f.SEND_FIRST if i == 0 else f.SEND_MIDDLE, i, text[4096 * i : 4096 * (i + 1)])
        for i in range(300)
    ]
    got = reader.feed(sent) + reader.flush()
    assert b"".join(g.payload for g in got)[: 1 << 20] == text[: 1 << 20]
    assert got[0].row["length"] == 1 << 20 and not got[0].row["complete"]
    assert reader.count("no room") >= 1
