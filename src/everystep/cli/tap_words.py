"""What `everystep tap decode` found, for people and as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from everystep.cli.output import Block, Cell, Column, Line, Table, counted
from everystep.cli.tap_record import Capture
from everystep.cli.tap_report import DTYPES
from everystep.tap.pieces import Reduced


def is_whole(record: Capture) -> bool:
    """Whether nothing is missing or uncertain."""
    gaps = any(buffer["missing"] for buffer in record.reduced)
    return not (gaps or record.doubts or record.mismatches or record.contradicted)


def blocks(record: Capture) -> Iterator[Block]:
    """The record for people."""
    packets = ", ".join(f"{number:,} {name}" for name, number in record.packet_kinds.items())
    yield Line(f"{record.capture}: {counted(record.frames, 'frame')}; RoCE: {packets or 'none'}")
    yield from _sockets(record.sockets)
    columns = ("sender", "receiver", "rank", "qp", "role", "channel", "messages", "cts")
    yield Table(
        [
            Column(name, right=name in ("rank", "qp", "channel", "messages", "cts"))
            for name in columns
        ],
        [
            [
                str(c["sender"]),
                str(c["receiver"]),
                _said(c["sender_rank"]),
                _said(c["data_qp"]),
                str(c["role"]),
                _said(c["channel"]),
                f"{c['messages']:,}",
                f"{c['cts']:,}",
            ]
            for c in record.connections
        ],
    )
    kinds = [str(c["kind"]) for c in record.collectives]
    counts = ", ".join(f"{kinds.count(kind):,} {kind}" for kind in dict.fromkeys(kinds))
    yield Line(f"collectives: {counts or 'none'}")
    if record.reduced:
        yield Table(
            [
                Column("all-reduce", right=True),
                Column("elements", right=True),
                Column("missing"),
                Column("crc32"),
            ],
            [_buffer(buffer) for buffer in record.reduced],
        )
    yield from _alarms(record)


def _sockets(counts: dict[str, int]) -> Iterator[Line]:
    """What was read of NCCL's sockets, and what not."""
    if counts["messages"]:
        yield Line(f"TCP: {counted(counts['messages'], 'message')}")
    if counts["split"]:
        many = counted(counts["split"], "connection")
        yield Line(f"{many} not read: data is split over several sockets", "red")
    if counts["unordered"]:
        many = counted(counts["unordered"], "connection")
        yield Line(f"{many} not read: several channels, made before the capture began", "red")


def _said(value: object) -> str:
    return "" if value is None else str(value)


def _buffer(buffer: dict[str, Any]) -> list[str | Cell]:
    missing = ", ".join(f"{gap['start']:,} to {gap['stop']:,}" for gap in buffer["missing"])
    whole = not missing and len(buffer["present"]) == 1
    return [
        str(buffer["index"]),
        f"{buffer['count']:,}",
        Cell(missing or "nothing", "red" if missing else "green"),
        f"{buffer['present'][0]['crc32']:08x}" if whole else "",
    ]


def _alarms(record: Capture) -> Iterator[Line]:
    for number in record.doubts:
        yield Line(f"from all-reduce {number} on, numbers are uncertain: messages were lost", "red")
    for mismatch in record.mismatches:
        frames = " and ".join(map(str, mismatch["frames"]))
        yield Line(
            f"all-reduce {mismatch['index']}: copies differ at byte {mismatch['at']:,} "
            f"(frames {frames})",
            "red",
        )
    if record.contradicted:
        yield Line(f"{counted(record.contradicted, 'message')} did not fit and was not used", "red")


def arrays(buffers: dict[int, Reduced], dtype: str) -> npt.NDArray[Any]:
    """All buffers below each other, missing elements NaN or the least integer.

    Shape (N,) for one buffer, else (buffers, N): shorter ones are filled up as missing. bfloat16,
    which NumPy does not have, is widened to float32, which is exact.
    """
    kind = {"bfloat16": "<u2", "float32": "<u4", "float16": "<u2", "int32": "<u4"}[dtype]
    absent = {"bfloat16": 0x7FC0, "float32": 0x7FC00000, "float16": 0x7E00, "int32": 1 << 31}
    e = DTYPES[dtype]
    longest = max((len(reduced.data) // e for reduced in buffers.values()), default=0)
    bits = np.full((len(buffers), longest), absent[dtype], kind)
    for row, number in enumerate(sorted(buffers)):
        reduced = buffers[number]
        values = reduced.data[: len(reduced.data) // e * e].view(kind)
        for start, stop in reduced.present:
            bits[row, -(-start // e) : stop // e] = values[-(-start // e) : stop // e]
    if dtype == "bfloat16":
        values = (bits.astype("<u4") << 16).view("<f4")
    else:
        values = bits.view({"float32": "<f4", "float16": "<f2", "int32": "<i4"}[dtype])
    return values[0] if len(buffers) == 1 else values


def save(path: Path, buffers: dict[int, Reduced], dtype: str) -> None:
    """Write all buffers as one `.npy` file."""
    with path.open("wb") as out:
        np.save(out, arrays(buffers, dtype))
