"""Capture files of every variant, cut and damaged ones, and packets of every kind."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from everystep.errors import NotACapture, Unsupported
from everystep.tap import capture, live, packets, roce
from everystep.tap.packets import Parser
from everystep.tap.pieces import FRAME, Frames
from tap import frames as f

SOME = [f.ethernet(bytes([i]) * (40 + i), 0x88CC) for i in range(5)]


def read(data: bytes) -> tuple[list[bytes], list[int], list[int], capture.File]:
    """Frames as captured, their times, their lengths on the wire."""
    file = capture.File(np.frombuffer(data, np.uint8), "made.up")
    taken: list[bytes] = []
    times: list[int] = []
    lengths: list[int] = []
    for batch in file:
        assert batch.first == len(taken) + 1
        for row in batch.table:
            taken.append(batch.data[row["at"] : row["at"] + row["captured"]].tobytes())
            times.append(int(row["time_ns"]))
            lengths.append(int(row["length"]))
    return taken, times, lengths, file


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("ns", [False, True])
def test_pcap(big: bool, ns: bool) -> None:
    ticks = [(1_700_000_000 + i, 7 * i + 3) for i in range(5)]
    taken, times, lengths, file = read(f.pcap(SOME, big=big, ns=ns, ticks=ticks, cut=42))
    assert taken == [frame[:42] for frame in SOME]
    assert lengths == [len(frame) for frame in SOME]
    assert times == [s * 10**9 + part * (1 if ns else 1000) for s, part in ticks]
    assert not file.is_cut and not file.is_pcapng


def test_frames_that_are_not_ethernet_keep_their_number() -> None:
    taken, _, lengths, _ = read(f.pcap(SOME, link=113))
    assert taken == [b""] * 5
    assert lengths == [len(frame) for frame in SOME]
    one, other = f.enhanced(SOME[0], 0), f.enhanced(SOME[1], 0, number=1)
    taken, _, _, _ = read(f.section() + f.interface(link=113) + f.interface() + one + other)
    assert taken == [b"", SOME[1]]


@pytest.mark.parametrize("big", [False, True])
def test_pcapng_with_several_clocks(big: bool) -> None:
    ticks = 1_700_000_000_123_456
    data = f.section(big=big) + f.interface(big=big) + f.enhanced(SOME[0], ticks, big=big)
    data += f.interface(big=big, resolution=9) + f.interface(big=big, resolution=0x80 | 10)
    data += f.interface(big=big, resolution=3, offset_s=-100) + f.block(0x0BAD, b"?" * 9, big=big)
    data += f.enhanced(SOME[1], ticks, number=1, big=big)
    data += f.enhanced(SOME[2], 3 * 1024 + 512, number=2, big=big)
    data += f.obsolete(SOME[3], 105_250, number=3, big=big)
    data += f.simple(SOME[4], big=big)
    taken, times, lengths, file = read(data)
    assert taken == SOME
    assert lengths == [len(frame) for frame in SOME]
    assert times == [ticks * 1000, ticks, 3_500_000_000, 5_250_000_000, 0]
    assert file.is_pcapng and not file.is_cut


def test_a_new_section_has_its_own_byte_order_and_interfaces() -> None:
    data = f.section() + f.interface(resolution=9) + f.enhanced(SOME[0], 5)
    data += f.section(big=True) + f.interface(big=True) + f.enhanced(SOME[1], 5, big=True)
    taken, times, _, _ = read(data)
    assert taken == SOME[:2]
    assert times == [5, 5000]


def test_a_clock_too_fine_for_64_bits_tells_no_time() -> None:
    _, times, _, _ = read(f.section() + f.interface(resolution=30) + f.enhanced(SOME[0], 5))
    assert times == [0]


def test_the_snap_length_cuts_simple_packets() -> None:
    data = f.section() + f.interface(snap=20) + f.simple(SOME[0], snap=20)
    taken, _, lengths, _ = read(data)
    assert taken == [SOME[0][:20]]
    assert lengths == [len(SOME[0])]


def test_more_frames_than_a_batch_holds() -> None:
    many = [f.ethernet(struct.pack(">I", i), 0x88CC) for i in range(2 * capture.BATCH_FRAMES + 3)]
    assert read(f.pcap(many))[0] == many
    data = f.section() + f.interface() + b"".join(f.enhanced(frame, 0) for frame in many)
    assert read(data)[0] == many


@pytest.mark.parametrize("form", ["pcap", "pcapng"])
def test_a_file_cut_anywhere_gives_the_whole_frames_before(form: str) -> None:
    parts = [f.pcap([])] if form == "pcap" else [f.section() + f.interface()]
    for frame in SOME:
        parts.append(f.pcap([frame])[24:] if form == "pcap" else f.enhanced(frame, 0))
    ends = np.cumsum([len(part) for part in parts]).tolist()
    data = b"".join(parts)
    for stop in range(ends[0], len(data) + 1):
        taken, _, _, file = read(data[:stop])
        assert taken == SOME[: sum(end <= stop for end in ends[1:])]
        assert file.is_cut == (stop not in ends)


@pytest.mark.parametrize(
    "data",
    [
        b"\xd4\xc3\xb2\xa1",
        b"PK\x03\x04" + b"\0" * 40,
        f.block(0x0A0D0D0A, struct.pack("<IHHq", 0x12345678, 1, 0, -1)),
        f.section() + struct.pack("<II", 6, 8) + b"\0" * 40,
        f.section() + struct.pack("<II", 6, 33) + b"\0" * 40,
        f.section() + f.enhanced(SOME[0], 0),
        f.section() + f.interface() + f.enhanced(SOME[0], 0, number=1),
        f.section() + f.interface() + f.enhanced(SOME[0], 0)[:-4] + b"\0\0\0\0",
        f.section() + f.interface() + f.block(6, struct.pack("<IIIII", 0, 0, 0, 99, 99)),
        f.section() + f.interface() + f.block(6, b"\0" * 16),
        f.section() + f.interface()[:-4] + b"\1\0\0\0",
        f.section() + struct.pack("<II", 1, 16) + b"\0" * 4 + struct.pack("<I", 16),
        f.section() + f.interface() * 257,
        f.pcap([]) + struct.pack("<IIII", 0, 0, 0x7FFFFFFF, 1) + b"\0" * 99,
    ],
)
def test_what_contradicts_itself_is_refused(data: bytes) -> None:
    with pytest.raises(NotACapture, match=r"made\.up"):
        read(data)


def test_the_frames_before_the_damage_are_given() -> None:
    data = f.section() + f.interface() + f.enhanced(SOME[0], 0) + b"\6\0\0\0" + b"\1" * 50
    file = capture.File(np.frombuffer(data, np.uint8), "made.up")
    given = iter(file)
    assert len(next(given).table) == 1
    with pytest.raises(NotACapture, match="byte"):
        next(given)


def test_files_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.pcap"
    path.write_bytes(f.pcap(SOME))
    with capture.open(path) as file:
        assert sum(len(batch.table) for batch in file) == 5
    (tmp_path / "empty").write_bytes(b"")
    for bad in (tmp_path / "empty", tmp_path / "missing", tmp_path):
        with pytest.raises(NotACapture):
            capture.open(bad)


def test_without_the_compiled_loops_nothing_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module, name in (
        (capture, "_packets"),
        (live, "_packets"),
        (packets, "_packets"),
        (roce, "_roce"),
    ):
        monkeypatch.setattr(module, name, None)
    path = tmp_path / "a.pcap"
    path.write_bytes(f.pcap(SOME))
    uses: list[Callable[[], object]] = [
        lambda: capture.open(path),
        lambda: live.Live("lo"),
        Parser,
        roce.Tracker,
    ]
    for use in uses:
        with pytest.raises(Unsupported, match="try: install a C compiler"):
            use()
    with pytest.raises(Unsupported):
        roce.unpack(0, np.zeros(0, np.uint8), np.zeros(0, np.uint8))


# ---------------------------------------------------------------- packets


def test_udp_over_every_ip_and_tag() -> None:
    inner = f.udp(b"payload", source=9, destination=10)
    hop = bytes([60, 0]) + b"\0" * 6
    options = bytes([17, 1]) + b"\0" * 14
    atomic = bytes([17, 0, 0, 0]) + b"\0" * 4
    sent = [
        f.ethernet(f.ip4(inner, 17), 0x0800),
        f.ethernet(f.ip4(inner, 17, options=b"\1" * 8), 0x0800, tags=[0x8100]),
        f.ethernet(f.ip6(inner, 17), 0x86DD, tags=[0x88A8, 0x8100]),
        f.ethernet(f.ip6(inner, 0, extensions=hop + options), 0x86DD),
        f.ethernet(f.ip6(inner, 44, extensions=atomic), 0x86DD),
        f.ethernet(f.ip4(inner, 17) + b"padding", 0x0800),
    ]
    parser = Parser()
    frames = f.batch(sent)
    table = parser.parse(frames).table
    assert table["frame"].tolist() == list(range(6))
    for row in table:
        assert frames.data[row["at"] : row["at"] + row["length"]].tobytes() == b"payload"
        assert (row["source_port"], row["destination_port"], row["protocol"]) == (9, 10, 17)
        assert row["captured"] == 7
    assert table["header"].tolist() == [28, 36, 48, 72, 56, 28]
    ends = [parser.address(int(i)).ip for i in table["source"]]
    assert ends == [f.IP4_A, f.IP4_A, f.IP6_A, f.IP6_A, f.IP6_A, f.IP4_A]
    assert parser.address(int(table["destination"][2])) == parser.address(3)
    assert parser.address(3).mac == "0a:00:00:00:00:02"
    assert not any(parser.skipped().values())


def test_tcp_headers() -> None:
    sent = f.tcp(b"data!", sequence=5, acknowledgement=6, flags=18, options=b"\1" * 12)
    row = Parser().parse(f.batch([f.ethernet(f.ip4(sent, 6), 0x0800)])).table[0]
    assert (row["sequence"], row["acknowledgement"], row["flags"]) == (5, 6, 18)
    assert (row["length"], row["window"], row["header"]) == (5, 512, 52)


def test_an_address_is_told_by_what_it_sends() -> None:
    parser = Parser()
    back = bytes.fromhex("0a0000000009")
    there = f.ethernet(f.ip4(f.udp(b""), 17), 0x0800)
    answer = f.MAC_A + back + there[12:14] + f.ip4(f.udp(b""), 17, a=f.IP4_B, b=f.IP4_A)
    row = parser.parse(f.batch([there])).table[0]
    assert parser.address(int(row["destination"])).mac == f.MAC_B.hex(":")
    parser.parse(f.batch([answer, there]))
    assert parser.address(int(row["destination"])).mac == back.hex(":")
    assert parser.address_count == 2
    with pytest.raises(IndexError):
        parser.address(2)


def test_what_is_skipped_is_counted() -> None:
    inner = f.udp(b"payload")
    bad_udp = inner[:4] + struct.pack(">H", 99) + inner[6:]
    sent = [
        b"short",
        f.ethernet(b"\0" * 3, 0x86DD),
        f.ethernet(b"?", 0x0806),
        f.ethernet(f.ip4(inner, 17, fragment=0x2000), 0x0800),
        f.ethernet(f.ip4(inner, 17, fragment=5), 0x0800),
        f.ethernet(f.ip6(inner, 44, extensions=bytes([17, 0, 0, 1]) + b"\0" * 4), 0x86DD),
        f.ethernet(f.ip4(b"", 1), 0x0800),
        f.ethernet(f.ip4(bad_udp, 17), 0x0800),
        f.ethernet(f.ip6(inner, 60, extensions=bytes([17, 9]) + b"\0" * 6), 0x86DD),
        f.ethernet(f.ip6(b"", 0x11), 0x86DD),
        f.ethernet(b"\x51" + f.ip4(inner, 17)[1:], 0x0800),
    ]
    parser = Parser()
    assert len(parser.parse(f.batch(sent)).table) == 0
    assert parser.skipped() == {
        "shorter than its headers": 2,
        "not IP": 1,
        "fragment": 3,
        "neither UDP nor TCP": 1,
        "malformed": 4,
        "too many addresses": 0,
    }


def test_a_frame_cut_at_every_byte_gives_what_is_there() -> None:
    frame = f.ethernet(f.ip6(f.udp(b"payload"), 17), 0x86DD, tags=[0x8100])
    for size in range(len(frame) + 1):
        parser = Parser()
        table = parser.parse(f.batch([frame], cut=size)).table
        payload = len(frame) - 7
        assert len(table) == (size >= payload)
        if len(table):
            assert (table[0]["length"], table[0]["captured"]) == (7, size - payload)
            assert parser.cut == (size < len(frame))
        else:
            assert parser.skipped()["shorter than its headers"] == 1


def test_the_table_of_addresses_is_bounded() -> None:
    parser = Parser()
    given = 0
    for start in range(0, 70_000, 10_000):
        sent = [
            f.ethernet(f.ip4(f.udp(b""), 17, a=f"11.{i >> 16}.{i >> 8 & 255}.{i & 255}"), 0x0800)
            for i in range(start, start + 10_000)
        ]
        given += len(parser.parse(f.batch(sent)).table)
    assert parser.address_count <= 65_536
    assert given == parser.address_count - 1
    assert parser.skipped()["too many addresses"] == 70_000 - given


def test_a_table_that_lies_about_its_data_is_refused() -> None:
    table = np.zeros(1, FRAME)
    table["captured"] = 11
    with pytest.raises(ValueError, match="outside"):
        Parser().parse(Frames(np.zeros(10, np.uint8), table, 1))
