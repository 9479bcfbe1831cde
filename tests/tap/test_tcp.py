"""TCP streams from segments: any order, any damage; every byte exact, or its loss told exactly."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.errors import Unsupported, UsageError
from everystep.tap import ring, tcp
from everystep.tap.packets import Parser
from everystep.tap.tcp import BROKEN, DATA, ENDED, LOST, SPILLED, Extents, Reassembler
from tap.gloo_wire import ACK, FIN, SYN, segment
from tap.recording import frames_of

HOSTS, PORTS = (1, 2), (40000, 5000)
START = 0xFFFFFFC0  # wraps after 64 bytes


def data_segment(at: int, data: bytes, flags: int = ACK, start: int = START) -> bytes:
    return segment(HOSTS, PORTS, start + at, 77, flags, data)


def acknowledgement(at: int) -> bytes:
    return segment(HOSTS[::-1], PORTS[::-1], 77, START + at, ACK, b"")


class Reader:
    """Feeds a reassembler, and keeps what the stream of the first host gives."""

    def __init__(self, **bounds: int) -> None:
        self.reassembler, self.parser = Reassembler(**bounds), Parser()
        self.streams: dict[int, bytearray] = {}
        self.lost: dict[int, list[tuple[int, int]]] = {}
        self.kinds: list[int] = []
        self.opened: list[tuple[int, bool]] = []
        self._frames = 0

    def feed(self, *packets: bytes, lengths: list[int] | None = None) -> Reader:
        frames = frames_of(list(packets), self._frames + 1, lengths)
        self._frames += len(packets)
        self._take(self.reassembler.feed(self.parser.parse(frames)))
        return self

    def flush(self, *, final: bool) -> Reader:
        self._take(self.reassembler.flush(final=final))
        return self

    def _take(self, extents: Extents) -> None:
        for row in extents.opened:
            if row["source_port"] == PORTS[0]:
                self.opened.append((int(row["stream"]), bool(row["from_start"])))
        for number, first, stop in extents.streams:
            stream = self.streams.setdefault(number, bytearray())
            for row in extents.table[first:stop]:
                assert row["stream"] == number
                assert row["position"] == len(stream)
                at, length, kind = int(row["at"]), int(row["length"]), int(row["kind"])
                self.kinds.append(kind)
                if kind == LOST:
                    self.lost.setdefault(number, []).append((len(stream), len(stream) + length))
                    stream += b"\0" * length
                elif kind in (DATA, SPILLED):
                    source = extents.data if kind == DATA else extents.spill
                    stream += source[at : at + length].tobytes()
                else:
                    assert length == 0

    @property
    def stream(self) -> bytes:
        return bytes(self.streams.get(self.opened[-1][0], b""))

    @property
    def holes(self) -> list[tuple[int, int]]:
        return self.lost.get(self.opened[-1][0], [])


TEXT = bytes(random.Random(1).randbytes(1000))


def test_segments_in_any_order_twice_and_overlapping_over_the_wrap() -> None:
    parts = [(at, TEXT[at : at + 90]) for at in range(0, 1000, 60)]  # each overlaps the next
    order = parts * 2
    random.Random(3).shuffle(order)
    reader = Reader().feed(segment(HOSTS, PORTS, START - 1, 0, SYN, b""))
    reader.feed(*(data_segment(at, data) for at, data in order))
    assert reader.opened == [(0, True)]
    assert reader.stream == TEXT
    assert reader.holes == []
    assert SPILLED in reader.kinds


def test_a_capture_that_begins_in_the_middle() -> None:
    reader = Reader().feed(data_segment(100, TEXT[100:200]), data_segment(200, TEXT[200:300]))
    reader.feed(data_segment(0, TEXT[:100]))  # from before the first: cannot be told
    assert reader.opened == [(0, False)]
    assert reader.stream == TEXT[100:300]


def test_the_other_side_tells_where_a_stream_is() -> None:
    reader = Reader(patience=0).feed(acknowledgement(100), data_segment(150, TEXT[150:200]))
    assert reader.stream == b""
    reader.feed(acknowledgement(200))
    assert reader.holes == [(0, 50)]
    assert reader.stream[50:] == TEXT[150:200]


def test_what_was_acknowledged_and_not_seen_is_lost_after_some_patience() -> None:
    reader = Reader(patience=3).feed(data_segment(0, TEXT[:100]), data_segment(200, TEXT[200:300]))
    reader.feed(acknowledgement(300), acknowledgement(300), acknowledgement(300))
    assert reader.stream == TEXT[:100]
    reader.feed(acknowledgement(300))
    assert reader.holes == [(100, 200)]
    assert reader.stream[200:] == TEXT[200:300]


def test_what_is_only_late_is_not_lost() -> None:
    reader = Reader(patience=3).feed(data_segment(0, TEXT[:100]), data_segment(200, TEXT[200:300]))
    reader.feed(acknowledgement(300), data_segment(100, TEXT[100:200]), *[acknowledgement(300)] * 9)
    assert reader.stream == TEXT[:300]
    assert reader.holes == []


def test_a_lost_end_is_told_by_its_acknowledgement() -> None:
    reader = Reader(patience=0).feed(data_segment(0, TEXT[:100]), acknowledgement(400))
    assert reader.holes == [(100, 400)]


def test_without_acknowledgements_a_hole_lasts_until_enough_waits_behind_it() -> None:
    reader = Reader(stream_bytes=300).feed(data_segment(0, TEXT[:100]))
    reader.feed(*(data_segment(at, TEXT[at : at + 50]) for at in range(200, 400, 50)))
    assert reader.stream == TEXT[:100]
    reader.feed(data_segment(400, TEXT[400:450]))
    assert reader.holes == [(100, 200)]
    assert reader.stream[200:] == TEXT[200:450]


def test_what_waits_is_bounded_over_all_connections() -> None:
    reassembler, parser = Reassembler(total_bytes=5_000), Parser()
    packets = []
    for port in range(2000, 2100):
        packets += [
            segment(HOSTS, (port, 5000), 0, 0, ACK, b"x"),
            segment(HOSTS, (port, 5000), 100, 0, ACK, b"y" * 100),
        ]
    extents = reassembler.feed(parser.parse(frames_of(packets)))
    lost = extents.table[extents.table["kind"] == LOST]
    assert len(lost) == 50  # of a hundred, fifty had room
    assert set(lost["length"].tolist()) == {99}


def test_the_end_of_a_capture_ends_all_waiting() -> None:
    reader = Reader().feed(data_segment(0, TEXT[:100]), data_segment(150, TEXT[150:200]))
    assert reader.flush(final=False).stream == TEXT[:100]
    assert reader.flush(final=True).holes == [(100, 150)]
    assert reader.stream[150:] == TEXT[150:200]


def test_a_frame_that_was_cut_leaves_a_hole_unless_it_is_sent_again() -> None:
    frame = data_segment(0, TEXT[:100])
    reader = Reader(patience=0).feed(frame[:-40], lengths=[len(frame)])
    reader.feed(data_segment(100, TEXT[100:200]))
    assert reader.stream == TEXT[:60]
    reader.feed(data_segment(0, TEXT[:100]))
    assert reader.stream == TEXT[:200]
    reader.feed(data_segment(200, TEXT[200:300])[:-30], lengths=[len(frame)])
    reader.feed(acknowledgement(300))
    assert reader.holes == [(270, 300)]
    assert reader.reassembler.counts()["cut"] == 2


def test_a_new_connection_between_the_same_ports_is_another_stream() -> None:
    reader = Reader().feed(segment(HOSTS, PORTS, START - 1, 0, SYN, b""), data_segment(0, b"old"))
    reader.feed(segment(HOSTS, PORTS, START - 1, 0, SYN, b""))  # the same again
    assert len(reader.opened) == 1
    reader.feed(segment(HOSTS, PORTS, 5, 0, SYN, b""), data_segment(0, b"new", start=6))
    assert len(reader.opened) == 2
    assert reader.streams[reader.opened[0][0]] == b"old"
    assert reader.stream == b"new"


def test_the_end_of_a_stream_is_told_once_and_not_before_its_data() -> None:
    reader = Reader().feed(data_segment(0, TEXT[:50]))
    reader.feed(data_segment(100, b"", FIN | ACK))
    assert ENDED not in reader.kinds
    reader.feed(data_segment(50, TEXT[50:100]), data_segment(100, b"", FIN | ACK))
    assert reader.stream == TEXT[:100]
    assert reader.kinds.count(ENDED) == 1


def test_one_strange_number_breaks_nothing_and_three_in_a_row_are_believed() -> None:
    reader = Reader().feed(data_segment(0, TEXT[:100]))
    reader.feed(data_segment(0x50000000, b"strange"), data_segment(100, TEXT[100:200]))
    assert reader.stream == TEXT[:200]
    assert BROKEN not in reader.kinds
    reader.feed(*(data_segment(0x70000000 + at, TEXT[at : at + 10]) for at in (0, 10, 20, 30)))
    assert BROKEN in reader.kinds
    assert reader.stream == TEXT[:200] + TEXT[20:40]
    assert reader.reassembler.counts()["strange"] == 4


def test_checksums_are_checked_where_asked() -> None:
    good, bad = data_segment(0, TEXT[:99]), bytearray(data_segment(0, TEXT[:99]))
    bad[-1] ^= 1
    assert Reader(checksums=True).feed(good).stream == TEXT[:99]
    reader = Reader(checksums=True).feed(bytes(bad), good)
    assert reader.stream == TEXT[:99]
    assert reader.reassembler.counts()["bad_checksums"] == 1


def test_a_checksum_that_is_not_filled_in_yet_is_none_that_is_wrong() -> None:
    """On a virtual interface the sum of the pseudo-header stands in its place."""
    frame = bytearray(data_segment(0, TEXT[:99]))
    tcp = bytes(frame[34:])
    pseudo = sum(struct.unpack(">6H", frame[26:34] + struct.pack(">HH", 6, len(tcp))))
    frame[50:52] = struct.pack(">H", pseudo % 0xFFFF)
    assert Reader(checksums=True).feed(bytes(frame)).stream == TEXT[:99]
    frame[51] ^= 1
    reader = Reader(checksums=True).feed(bytes(frame))
    assert reader.opened == []
    assert reader.reassembler.counts()["bad_checksums"] == 1


def test_checksums_of_ipv6_behind_extension_headers() -> None:
    source, destination = bytes(15) + b"\1", bytes(15) + b"\2"
    tcp = struct.pack(">HHIIBBHHH", *PORTS, START, 0, 0x50, ACK, 512, 0, 0) + b"abc"
    pseudo = source + destination + struct.pack(">II", len(tcp), 6) + tcp + b"\0"
    total = sum(struct.unpack(f">{len(pseudo) // 2}H", pseudo))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    tcp = tcp[:16] + struct.pack(">H", ~total & 0xFFFF) + tcp[18:]
    options = bytes([6, 0, 1, 4, 0, 0, 0, 0])  # a hop-by-hop header of padding
    ip = struct.pack(">IHBB", 6 << 28, len(options) + len(tcp), 0, 64) + source + destination
    frame = bytes(12) + b"\x86\xdd" + ip + options + tcp
    assert Reader(checksums=True).feed(frame).stream == b"abc"
    assert Reader(checksums=True).feed(frame[:-1] + b"d").opened == []


def test_an_ignored_stream_gives_nothing_and_idle_connections_make_room() -> None:
    reader = Reader(connections=2).feed(data_segment(0, b"abc"))
    reader.reassembler.ignore(reader.opened[0][0])
    reader.feed(data_segment(3, b"def"))
    assert reader.stream == b"abc"
    parser = Parser()
    for port in range(1000, 1010):
        packets = parser.parse(frames_of([segment(HOSTS, (port, 5000), 0, 0, ACK, b"x")]))
        assert reader.reassembler.feed(packets).table["length"].tolist() == [1]
    assert reader.reassembler.counts()["forgotten"] == 9


def test_bounds_out_of_range_are_refused() -> None:
    for bounds in ({"connections": 0}, {"stream_bytes": -1}, {"patience": -1}):
        with pytest.raises(UsageError):
            Reassembler(**bounds)


def test_without_the_compiled_loops_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_tcp", None)
    monkeypatch.setattr(ring, "_tcp", None)
    for made in (Reassembler, ring.Assembler):
        with pytest.raises(Unsupported, match="compiled loops"):
            made()


@given(st.data())
@settings(max_examples=150)
def test_whatever_happens_on_the_way_bytes_are_right_or_told_lost(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    loss, repeat, shuffle = (data.draw(st.floats(0, 0.5)) for _ in range(3))
    segments, at = [], 0
    while at < len(TEXT):
        length = rng.randint(1, 80)
        segments.append((at, TEXT[at : at + length]))
        at += length
    sent = []
    for start, part in segments:
        copies = (rng.random() >= loss) + (rng.random() < repeat)
        sent += [data_segment(start, part)] * copies + [acknowledgement(start + len(part))]
    for i in range(len(sent) - 1):
        if rng.random() < shuffle:
            sent[i], sent[i + 1] = sent[i + 1], sent[i]
    bound = rng.choice([0, 100, 2000])
    reader = Reader(patience=rng.randint(0, 20), stream_bytes=bound)
    reader.feed(segment(HOSTS, PORTS, START - 1, 0, SYN, b""))
    while sent:
        batch = rng.randint(1, 30)
        reader.feed(*sent[:batch])
        del sent[:batch]
    reader.flush(final=True)
    lost = {i for start, stop in reader.holes for i in range(start, stop)}
    if bound > len(TEXT):  # else what was lost at the end may be too much to be believed
        assert len(reader.stream) == len(TEXT)
    for i, byte in enumerate(reader.stream):
        assert i in lost or byte == TEXT[i]
