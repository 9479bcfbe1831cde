"""NCCL over RoCE: the public captures against their ground truth, whole and with packets lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everystep.cli.tap_report import Reader
from everystep.cli.tap_words import arrays
from everystep.errors import UsageError
from everystep.tap import capture, cts, roce
from everystep.tap.nccl import Decoder, Options
from everystep.tap.packets import Parser
from everystep.tap.pieces import Announced, Frames, Packets, Piece
from everystep.tap.rings import Doubt
from everystep.tap.schedule import Shape, interleaved, sends, wire_bytes
from tap import generator

CAPTURES = Path(__file__).parents[2].parent / "shared" / "captures"
NAMES = sorted(path.stem for path in CAPTURES.glob("*.json")) or ["absent"]
needs_captures = pytest.mark.skipif(not CAPTURES.is_dir(), reason="the captures are not here")

Loaded = list[Packets]


def truth_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CAPTURES / f"{name}.json").read_text(encoding="utf-8"))
    return found


def load(path: Path) -> Loaded:
    """All packets of a capture, its data copied."""
    parser = Parser()
    found = []
    with capture.open(path) as file:
        for frames in file:
            kept = Frames(frames.data.copy(), frames.table.copy(), frames.first)
            found.append(Packets(kept, parser.parse(frames).table.copy()))
    return found


def without(loaded: Loaded, lost: set[int]) -> Loaded:
    """The packets of all frames but those with these numbers."""
    found = []
    for packets in loaded:
        kept = [packets.frames.first + int(row) not in lost for row in packets.table["frame"]]
        found.append(Packets(packets.frames, np.ascontiguousarray(packets.table[kept])))
    return found


def in_batches(loaded: Loaded, size: int | None) -> Iterator[Packets]:
    for packets in loaded:
        step = size or max(1, len(packets.table))
        for at in range(0, len(packets.table), step):
            yield Packets(packets.frames, np.ascontiguousarray(packets.table[at : at + step]))


Bits = dict[int, dict[int, int]]
"""By all-reduce and byte of its buffer: what the pieces hold."""


def decoded(
    loaded: Loaded,
    counts: Sequence[int] | None = None,
    *,
    batch: int | None = None,
    ranks: int = 2,
    element_bytes: int = 4,
    added_step: bool | None = None,
) -> tuple[Decoder, Bits, dict[int, int]]:
    """Everything up to the first doubt; a byte that is given twice must be the same twice."""
    tracker = roce.Tracker(check_icrc=False)
    options = Options(ranks=ranks, element_bytes=element_bytes, record=True, added_step=added_step)
    decoder = Decoder(tracker, options)
    if counts is not None:
        decoder.expect(0, counts)
    held: Bits = {}
    sizes: dict[int, int] = {}
    is_lost = False

    def take(events: Sequence[object]) -> None:
        nonlocal is_lost
        for event in events:
            is_lost |= isinstance(event, Doubt)
            if isinstance(event, Announced) and not is_lost:
                sizes[event.collective] = event.nbytes
            if isinstance(event, Piece) and not is_lost:
                own = held.setdefault(event.collective, {})
                for at, value in enumerate(event.data.tolist(), event.start):
                    assert own.setdefault(at, value) == value

    for packets in in_batches(loaded, batch):
        for messages in tracker.feed(packets):
            take(decoder.feed(messages))
    take(decoder.feed(tracker.flush()))
    take(decoder.finish())
    return decoder, held, sizes


# ---------------------------------------------------------------- the public captures


@needs_captures
@pytest.mark.parametrize("name", NAMES)
def test_a_capture_decodes_to_its_ground_truth(name: str) -> None:
    truth = truth_of(name)
    dtype = truth["reduced"][0]["dtype"]
    reader = Reader(Options(ranks=2, element_bytes=4, record=True), dtype, check_icrc=True)
    found = reader.read(CAPTURES / f"{name}.pcapng")
    for key in ("frames", "roce_frames", "packet_kinds", "path_mtu", "world_size", "ranks",
                "directions", "connections", "messages", "collectives", "reduced"):  # fmt: skip
        assert getattr(found, key) == truth[key], key
    assert (found.doubts, found.mismatches, found.contradicted) == ([], [], 0)
    expected = np.load(CAPTURES / f"{name}.reduced.npy")
    values = arrays(reader.buffers, dtype)
    assert (values.shape, values.dtype) == (expected.shape, expected.dtype)
    assert values.tobytes() == expected.tobytes()


@needs_captures
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 7])
def test_how_packets_are_batched_does_not_matter(name: str, batch: int) -> None:
    truth = truth_of(name)
    expected = np.load(CAPTURES / f"{name}.reduced.npy").reshape(len(truth["reduced"]), -1)
    _, held, sizes = decoded(load(CAPTURES / f"{name}.pcapng"), batch=batch)
    assert sizes == {n: row.nbytes for n, row in enumerate(expected)}
    for number, row in enumerate(expected):
        assert bytes(held[number][at] for at in range(row.nbytes)) == row.tobytes()


def frames_of(loaded: Loaded) -> dict[int, tuple[int, int]]:
    """Queue pair and PSN of each frame that carries a packet of a write."""
    found = {}
    for packets in loaded:
        for row in packets.table[packets.table["destination_port"] == 4791]:
            at = int(row["at"])
            head = packets.frames.data[at : at + 12].tobytes()
            if head[0] in range(6, 12) and not head[1] & 15:
                number = packets.frames.first + int(row["frame"])
                found[number] = int.from_bytes(head[5:8], "big"), int.from_bytes(head[9:12], "big")
    return found


def seen_bytes(truth: dict[str, Any], frames: dict[int, tuple[int, int]]) -> dict[int, set[int]]:
    """The bytes of each reduced buffer that are in the packets of these frames."""
    there = set(frames.values())
    mtu = truth["path_mtu"]
    number_of = {one["id"]: one.get("index") for one in truth["collectives"]}
    found: dict[int, set[int]] = {}
    for message in truth["messages"]:
        if not message.get("reduced"):
            continue
        nbytes = 4 * (message["stop"] - message["start"])
        for i in range(-(-message["length"] // mtu)):
            if (message["qp"], message["psn"] + i) in there:
                ends = (i * mtu, min((i + 1) * mtu, message["length"]))
                start, stop = (end // 2 if message["kind"] == "LL" else end for end in ends)
                own = found.setdefault(number_of[message["collective"]], set())
                first = 4 * message["start"]
                own |= set(range(first + start, first + min(stop, nbytes)))
    return found


def exact(name: str, lost: set[int], held: Bits, loaded: Loaded) -> bool:
    """Whether the pieces are all that is left; they must never be anything else."""
    truth = truth_of(name)
    rows = np.load(CAPTURES / f"{name}.reduced.npy").reshape(len(truth["reduced"]), -1)
    left = {number: at for number, at in frames_of(loaded).items() if number not in lost}
    seen = seen_bytes(truth, left)
    for number, own in held.items():
        row = rows[number].tobytes()
        assert all(row[at] == value for at, value in own.items())
        assert own.keys() <= seen.get(number, set())
    return {n: set(own) for n, own in held.items()} == {n: own for n, own in seen.items() if own}


@needs_captures
@pytest.mark.parametrize("name", NAMES)
def test_one_lost_packet_of_data_is_exactly_what_is_missing(name: str) -> None:
    loaded = load(CAPTURES / f"{name}.pcapng")
    truth = truth_of(name)
    draw = random.Random(name)
    long = [m for m in truth["messages"] if m["packets"] > 2 and "ring_step" in m]
    by_packet = {place: number for number, place in frames_of(loaded).items()}
    for message in draw.sample(long, min(3, len(long))):
        for i in (0, 1, draw.randrange(message["packets"]), -(-message["length"] // 1024) - 1):
            frame = by_packet.get((message["qp"], message["psn"] + i % message["packets"]))
            if frame is None:
                continue
            _, held, _ = decoded(without(loaded, {frame}), [truth["reduced"][0]["count"]])
            assert exact(name, {frame}, held, loaded), frame


@needs_captures
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("told", [True, False])
def test_whatever_is_lost_nothing_is_invented(name: str, told: bool) -> None:
    loaded = load(CAPTURES / f"{name}.pcapng")
    counts = [truth_of(name)["reduced"][0]["count"]] if told else None
    draw = random.Random(f"{name} {told}")
    frames = sorted(frames_of(loaded))
    exactly = 0
    for _ in range(6):
        if draw.random() < 0.4:
            first = draw.choice(frames)
            lost = {n for n in frames if first <= n < first + draw.choice([3, 30, 200])}
        else:
            rate = draw.choice([0.002, 0.02, 0.2, 0.6])
            lost = {n for n in frames if draw.random() < rate}
        batch = draw.choice([None, 1, 13])
        _, held, _ = decoded(without(loaded, lost), counts, batch=batch)
        exactly += exact(name, lost, held, loaded)
    assert exactly


# ---------------------------------------------------------------- made-up traffic


@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
@pytest.mark.parametrize("version", [19, 22, 30])
@pytest.mark.parametrize(("ranks", "channels"), [(2, 1), (3, 2), (5, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rings_of_any_size_protocol_and_version(
    protocol: str, version: int, ranks: int, channels: int, dtype: str, tmp_path: Path
) -> None:
    if protocol == "LL128" and version > 19:
        pytest.skip("LL128 hides how long a channel's part is")
    wire = generator.Wire(
        ranks=ranks, channels=channels, protocol=protocol, version=version, dtype=dtype,
        check_sums=False,
    )  # fmt: skip
    job = generator.Job(wire, seed=1)
    counts = [20_000 * ranks, 6_000 * ranks]
    for number, count in enumerate(counts * 2):
        job.all_reduce(generator.random_inputs(wire, count, number))
    path = tmp_path / "made.pcap"
    generator.write(path, generator.mirrored(job.packets, 0))
    loaded = load(path)
    e = generator.SIZES[dtype]
    decoder, held, sizes = decoded(loaded, counts, ranks=ranks, element_bytes=e)
    assert (decoder.doubts, decoder.contradicted) == ([], 0)
    for number, one in enumerate(job.reductions):
        assert sizes[number] == len(one.reduced)
        whole = bytes(held[number][at] for at in range(len(one.reduced)))
        assert whole == one.reduced.tobytes()


def test_one_link_lacks_the_chunk_that_its_rank_does_not_send_on(tmp_path: Path) -> None:
    wire = generator.Wire(ranks=3, check_sums=False)
    job = generator.Job(wire)
    job.all_reduce(generator.random_inputs(wire, 9_000, 0))
    path = tmp_path / "made.pcap"
    generator.write(path, generator.mirrored(job.packets, 1, "out"))
    _, held, _ = decoded(load(path), [9_000], ranks=3)
    (schedule,) = interleaved(Shape(3, 4), "LL", 9_000, 1, 32_768)
    ((start, stop),) = schedule.missing_chunk(1)
    assert set(range(36_000)) - held[0].keys() == set(range(4 * start, 4 * stop))


# ---------------------------------------------------------------- small parts


def test_the_worked_example_of_a_schedule() -> None:
    (schedule,) = interleaved(Shape(2, 4), "LL", 5_000, 1, 32_768)
    sent = sends(schedule, 0, 0)
    assert [(s.ring_step, s.chunk, s.start, s.stop, s.reduced) for s in sent] == [
        (0, 1, 3072, 5000, False),
        (1, 0, 0, 3072, True),
    ]
    assert [wire_bytes("LL", 4 * (s.stop - s.start)) for s in sent] == [15424, 24576]


@pytest.mark.parametrize(
    ("version", "payload"),
    [
        ("up to 2.19", "0010000000000000 00000100 07000000 01000000 03000000 0900000000000000"),
        (
            "2.20 to 2.23",
            "0010000000000000 00000100 07000000 00000000 01000000 03000000 00000000"
            "0900000000000000" + "00" * 24,
        ),
        (
            "2.24 to 2.29",
            "0010000000000000 0000010000000000 07000000" + "00000000" * 3 + "01000000 03000000"
            "0900000000000000" + "00" * 16,
        ),
        (
            "2.30",
            "0010000000000000 0000010000000000 07000000" + "00000000" * 7 + "01000000 03000000"
            "0900000000000000",
        ),
    ],
)
def test_clear_to_send_records_of_all_versions(version: str, payload: str) -> None:
    found = cts.parse(bytes.fromhex(payload))
    assert found is not None
    layout, records = found
    assert layout.nccl == version
    assert records == (cts.ClearToSend(0x1000, 65536, 7, 1, 3, 9),)
    assert cts.parse(bytes.fromhex(payload), layout) == found


@pytest.mark.parametrize("size", [0, 1, 31, 33, 512, 4096])
def test_other_bytes_are_no_clear_to_send_record(size: int) -> None:
    assert cts.parse(bytes(size)) is None
    assert cts.parse(b"\xff" * size) is None


@pytest.mark.parametrize("options", [{"ranks": 1}, {"ranks": 3, "ring": (0, 1)}])
def test_options_that_name_no_ring_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Decoder(roce.Tracker(), Options(element_bytes=4, **options))
