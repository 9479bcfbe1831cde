"""What each step cost, as the run itself measured it: one file of JSON lines per rank and session.

It is no part of any state: it is lost without harm, and nothing is decided from it but by people
and by `everystep plan --from-run`. A file holds the newest `KEPT_STEPS` steps of its session.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from everystep.errors import Damaged, Missing
from everystep.store.backend import Backend, NewFile

MEASURED = "measured"
"""The folder of these files, below the run."""

KEPT_STEPS = 2_000

MAX_FILE_BYTES = 64 << 20
"""A larger file is not read."""

_NAME = re.compile(rf"{MEASURED}/s([0-9]{{6,9}})-r([0-9]{{5}})of([0-9]{{5}})\.jsonl")


class Span(NamedTuple):
    """A stretch of time in which one thing was going on."""

    lane: str
    """`forward`, `backward`, `update` and `stall` (the training thread); `offload` and `snapshot`
    (copies out of live tensors, and within the device); `hash` and `write` (the agent)."""
    start_s: float
    """Seconds since `Measure.begun_s`. What is done for a step goes on after its end."""
    stop_s: float


class Measure(Struct, frozen=True, kw_only=True):
    """One rank's figures of one step. Times are in seconds, rates in bytes per second; a rate is
    None where nothing was moved that way."""

    timeline: str
    step: int
    begun_s: float
    """When the step began (the end of the `step()` before it), on the host's monotonic clock."""
    took_s: float
    """From there to the end of this `step()`."""
    stall_s: float
    """By how much of it the library lengthened the step; the sum of the next three."""
    snapshot_s: float
    """Copying what was about to be overwritten."""
    staging_s: float
    """Waiting for room in staging memory."""
    bookkeeping_s: float
    """Everything else that the training thread was made to do."""
    forward_s: float
    backward_s: float
    update_s: float
    state_bytes: int
    """What this rank stores of a whole state."""
    copied_bytes: int
    """Brought to staging memory for this step."""
    written_bytes: int
    """Made durable for this step."""
    offload_bytes_per_s: float | None = None
    snapshot_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    staged_s: float | None = None
    """From the end of `step()` until the agent held the whole step; None: it never did."""
    durable_s: float | None = None
    """From the end of `step()` until the step was durable; None: it never became so."""
    every: int = 1
    """A checkpoint was being taken at every so many steps."""
    error: str | None = None
    deviation: str | None = None
    """Where reality was more than 20 % away from the plan, in words."""
    spans: list[Span] = []


class MeasuredBy(NamedTuple):
    """Whose figures a file holds."""

    session: int
    rank: int
    world_size: int

    @property
    def name(self) -> str:
        """The file."""
        return f"{MEASURED}/s{self.session:06d}-r{self.rank:05d}of{self.world_size:05d}.jsonl"


def parse_name(name: str) -> MeasuredBy | None:
    """Whose figures are in a file of this name; None if it is no such name."""
    match = _NAME.fullmatch(name)
    return MeasuredBy(*map(int, match.groups())) if match else None


def write_measures(backend: Backend, by: MeasuredBy, measures: Sequence[Measure]) -> None:
    """Replace a file by the newest of these; see `write_lines`.

    Raises:
        StoreError: as the backend says.
    """
    write_lines(backend, by, [line_of(measure) for measure in measures[-KEPT_STEPS:]])


def write_lines(backend: Backend, by: MeasuredBy, lines: Sequence[bytes]) -> None:
    """Replace a file by the newest of these lines; by fewer, where they would make a file that is
    too large to be read.

    Args:
        lines: as `line_of` makes them, oldest first.

    Raises:
        StoreError: as the backend says.
    """
    newest: list[bytes] = []
    nbytes = 0
    for line in reversed(lines):
        nbytes += len(line)
        if nbytes > MAX_FILE_BYTES:
            break
        newest.append(line)
    data = b"".join(reversed(newest))
    backend.put([NewFile(by.name, len(data), [data])])


def line_of(measure: Measure) -> bytes:
    """One line of a file."""
    try:
        return msgspec.json.encode(measure) + b"\n"
    except UnicodeEncodeError:  # a path in an error's text may hold bytes that are no UTF-8
        error = (measure.error or "").encode("utf-8", "backslashreplace").decode()
        return msgspec.json.encode(msgspec.structs.replace(measure, error=error)) + b"\n"


def read_measures(backend: Backend, rank: int | None = None) -> dict[MeasuredBy, list[Measure]]:
    """All that was measured, by file, in the order of sessions. Lines that are not what we write
    are passed over.

    Args:
        rank: of which rank; None: of all.

    Raises:
        Damaged: a file is a link or special file.
        StoreFailed: as the backend says.
    """
    found: dict[MeasuredBy, list[Measure]] = {}
    for by in sorted(filter(None, (parse_name(entry.name) for entry in backend.list(MEASURED)))):
        if rank in (None, by.rank):
            found[by] = _read(backend, by.name)
    return found


def _read(backend: Backend, name: str) -> list[Measure]:
    data = _bytes(backend, name)
    measures = []
    for line in data.splitlines():
        try:
            measures.append(msgspec.json.decode(line, type=Measure))
        except (msgspec.MsgspecError, RecursionError):  # the latter: nested without end
            continue
    return measures


def _bytes(backend: Backend, name: str) -> bytes:
    """All of a file, which its agent may replace by a shorter one between our two questions."""
    chances = 3
    while True:
        try:
            nbytes = backend.size(name)
            if nbytes > MAX_FILE_BYTES:
                return b""
            data = bytearray(nbytes)
            backend.read(name, memoryview(data), 0)
            return bytes(data)
        except Missing:
            return b""
        except Damaged:
            chances -= 1
            if not chances:
                raise
