"""Damaged captures: no error but ours, nothing outside its bounds, and never a wrong byte.

More of it by hand, with the number of mutated packets:
`PYTHONPATH=tests python tests/tap/test_roce_fuzz.py 1000000` (and the first seed)
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from everystep.errors import NotACapture
from everystep.tap import capture
from everystep.tap.packets import Parser
from everystep.tap.pieces import LL, LL128, PSN_COUNT, Frames, Messages, Table
from everystep.tap.roce import Tracker
from tap import frames as f

CAPTURES = Path(__file__).resolve().parents[3] / "shared" / "captures"

Key = tuple[str, str, int]
"""Source, destination, queue pair."""


class Original(Struct, eq=False):
    psn: int
    mtu: int
    length: int
    payload: bytes


class Got(Struct, eq=False):
    key: Key
    row: Table
    payload: bytes
    ranges: list[tuple[int, int]]


class Base(Struct, eq=False):
    """An undamaged capture, and what is in it."""

    file: bytes
    frames: Frames
    messages: dict[Key, list[Original]]


def handmade() -> bytes:
    rng = random.Random(0)
    sent: list[bytes] = []
    psn = PSN_COUNT - 60
    for i in range(40):
        text = rng.randbytes(rng.choice([0, 4, 1024, 3000, 9000]))

        new = f.write(psn, text, va=1 << 16 | i << 20)
        sent += new
        psn = (psn + len(new)) % PSN_COUNT
        sent.append(f.roce(f.ACKNOWLEDGE, i, headers=f.aeth(0, i), back=True))
        sent.append(f.roce(f.SEND_ONLY, i, rng.randbytes(99), family=4, qp=9))
    return f.pcap(sent)


def load(data: bytes) -> Base:
    (frames,) = capture.File(np.frombuffer(data, np.uint8))
    base = Base(data, frames, {})
    for got in decode(frames, Tracker()):
        row = got.row
        if row["has_head"]:
            mtu = int(row["mtu"]) or max(1, int(row["length"]))
            original = Original(int(row["psn"]), mtu, int(row["length"]), got.payload)
            base.messages.setdefault(got.key, []).append(original)
    return base


def bases() -> list[Base]:
    files = sorted(CAPTURES.glob("*.pcapng"))
    return [load(handmade()), *(load(path.read_bytes()) for path in files)]


def decode(frames: Frames, tracker: Tracker, *, place: int | None = None) -> list[Got]:
    """Every message; checks that all of it is in bounds."""
    parser = Parser()
    keys: dict[int, Key] = {}
    out: list[Got] = []

    def take(messages: Messages) -> None:
        for stream in messages.opened:
            a, b = (parser.address(int(stream[end])).ip for end in ("source", "destination"))
            keys[int(stream["number"])] = (a, b, int(stream["qp"]))
        for row in messages.table:
            check_bounds(messages, row)
            payload = messages.data[row["at"] : row["at"] + row["nbytes"]].tobytes()
            ranges = messages.ranges[row["range_at"] : row["range_at"] + row["ranges"]]
            spans = [(int(start), int(stop)) for start, stop in ranges]
            out.append(Got(keys[int(row["stream"])], row, payload, spans))
            if place is not None:
                tracker.place(int(row["stream"]), int(row["rkey"]), place)

    packets = parser.parse(frames)
    table = packets.table
    assert (table["captured"] <= table["length"]).all()
    assert (table["at"] + table["captured"] <= len(frames.data)).all()
    for messages in tracker.feed(packets):
        take(messages)
    take(tracker.flush())
    return out


def check_bounds(messages: Messages, row: Table) -> None:
    assert row["at"] + row["nbytes"] <= len(messages.data)
    assert row["range_at"] + row["ranges"] <= len(messages.ranges)
    ranges = messages.ranges[row["range_at"] : row["range_at"] + row["ranges"]].reshape(-1)
    # sorted, apart from each other, inside the message
    assert (np.diff(ranges) > 0).all()
    assert not len(ranges) or (ranges[0] >= 0 and ranges[-1] <= row["length"])
    assert row["psn"] < PSN_COUNT
    if row["complete"] and row["length"] and row["operation"] != 3:
        assert ranges.tolist() == [0, row["length"]]
    assert row["length"] <= 4 << 20 or row["operation"] == 3


BASES = bases()


def mutate(base: Base, seed: int) -> tuple[Frames, int]:
    """Bytes changed (headers most of all), frames cut, lost, doubled, swapped; and how many."""
    rng = np.random.default_rng(seed)
    data, table = base.frames.data.copy(), base.frames.table.copy()
    count = len(table)
    hit = np.flatnonzero(rng.random(count) < rng.choice([0.02, 0.2, 0.6]))
    sizes = table["captured"][hit].astype(np.int64)
    for _ in range(rng.choice([1, 2, 8])):
        reach = np.where(rng.random(len(hit)) < 0.9, np.minimum(sizes, 100), sizes)
        where = table["at"][hit].astype(np.int64) + (rng.random(len(hit)) * reach).astype(np.int64)
        telling = rng.choice([0, 1, 255, 10, 11, 6, 8], len(hit))
        any_byte = rng.integers(0, 256, len(hit))
        data[where] = np.where(rng.random(len(hit)) < 0.7, telling, any_byte)
        hit = hit[rng.random(len(hit)) < 0.7]
        sizes = table["captured"][hit].astype(np.int64)
    cut = np.flatnonzero(rng.random(count) < rng.choice([0, 0.1]))
    table["captured"][cut] = (rng.random(len(cut)) * table["captured"][cut]).astype(np.uint32)
    order = np.arange(count)
    if rng.random() < 0.7:
        order = order[rng.random(count) > 0.05]
        order = np.append(order, rng.choice(order, len(order) // 20))
        order = order[np.argsort(order + rng.random(len(order)) * rng.choice([1, 3, 30]))]
    changed = (data != base.frames.data).nonzero()[0]
    frames_hit = np.unique(np.searchsorted(table["at"], changed, side="right"))
    return Frames(data, table[order], 1), len(frames_hit) + len(cut)


def check_content(base: Base, got: Got) -> int:
    """That every byte said to be present is the one that was sent; gives how many."""
    count = 0
    for start, stop in got.ranges:
        payload = got.payload[start:stop]
        fits = []
        for original in base.messages[got.key]:
            offset = (int(got.row["psn"]) - original.psn) % PSN_COUNT * original.mtu + start
            if offset < original.length:
                fits.append(original.payload[offset : offset + len(payload)])
        assert payload in fits
        count += len(payload)
    return count


@given(st.integers(0, len(BASES) - 1), st.integers(0, 1 << 32))
@settings(max_examples=40)
def test_with_the_icrc_no_damage_gives_a_wrong_byte(which: int, seed: int) -> None:
    frames, _ = mutate(BASES[which], seed)
    for got in decode(frames, Tracker()):
        check_content(BASES[which], got)


@given(st.integers(0, len(BASES) - 1), st.integers(0, 1 << 32), st.sampled_from([None, LL, LL128]))
@settings(max_examples=40)
def test_without_the_icrc_everything_stays_in_bounds(
    which: int, seed: int, form: int | None
) -> None:
    small = random.Random(seed).random() < 0.3
    options = {"arena_bytes": 16 << 20} if small else {}
    frames, _ = mutate(BASES[which], seed)
    decode(frames, Tracker(check_icrc=False, **options), place=form)


@given(st.integers(0, len(BASES) - 1), st.integers(0, 1 << 32))
@settings(max_examples=100)
def test_a_damaged_file_is_read_or_refused(which: int, seed: int) -> None:
    fuzz_file(BASES[which], random.Random(seed))


def fuzz_file(base: Base, rng: random.Random) -> int:
    data = bytearray(base.file)
    changes = rng.choice([1, 3, 30])
    for _ in range(changes):
        at = rng.randrange(200) if rng.random() < 0.5 else rng.randrange(len(data))
        data[at] = rng.choice([0, 1, 255, rng.randrange(256)])
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    try:
        for frames in capture.File(np.frombuffer(bytes(data), np.uint8)):
            assert (frames.table["at"] + frames.table["captured"] <= len(data)).all()
            Parser().parse(frames)
    except NotACapture:
        pass
    return changes


@pytest.mark.parametrize("base", BASES)
def test_the_bases_hold_what_the_checks_need(base: Base) -> None:
    assert sum(check_content(base, got) for got in decode(base.frames, Tracker())) > 5000


def main(wanted: int, seed: int = 0) -> None:
    done, first, compared = 0, seed, 0
    while done < wanted:
        rng = random.Random(seed)
        base = BASES[seed % len(BASES)]
        frames, damaged = mutate(base, seed)
        if seed % 3 == 0:
            compared += sum(
                check_content(base, got) for got in decode(frames, Tracker(arena_bytes=16 << 20))
            )
        else:
            form = rng.choice([None, LL, LL128])
            decode(frames, Tracker(check_icrc=False, arena_bytes=16 << 20), place=form)
        done += damaged + fuzz_file(base, rng)
        seed += 1
    print(f"{done:,} mutated packets in {seed - first:,} captures; {compared:,} bytes compared")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
