"""Stretches of time as rows of characters: one lane per row, readable without colour."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from everystep.cli.output import Line

WIDTH = 78
"""Characters of a row, the lane's name included."""

_STYLES = {
    "forward": "green", "backward": "green", "update": "green", "stall": "bold red",
    "offload": "cyan", "snapshot": "yellow", "hash": "cyan", "write": "blue",
}  # fmt: skip
"""The order of rows, too."""

_FULL, _SOME = "█", "▏"


def draw_lanes(
    spans: Iterable[tuple[str, float, float]],
    start_s: float,
    stop_s: float,
    *,
    marks_s: Sequence[float] = (),
    width: int = WIDTH,
    spoken: Callable[[float], str] | None = None,
) -> Iterator[Line]:
    """Rows for the lanes that have something between two moments, and an axis below.

    `█` is a character that its lane fills to at least a half, `▏` one in which it does anything at
    all, so that nothing is too short to be seen; the axis has `|` at the marks.

    Args:
        spans: lane, start and stop in seconds, in any order.
        start_s: left end.
        stop_s: right end, later than the left.
        marks_s: moments to mark, such as ends of steps.
        width: of a row.
        spoken: says a length of time for the axis; None: in seconds.
    """
    kept = [(lane, a, b) for lane, a, b in spans if b > start_s and a < stop_s and b > a]
    found = {lane for lane, _, _ in kept}
    lanes = [lane for lane in _STYLES if lane in found] + sorted(found - _STYLES.keys())
    margin = max(map(len, lanes), default=0) + 2
    cells = max(width - margin, 10)
    per_cell_s = (stop_s - start_s) / cells
    for lane in lanes:
        busy = [0.0] * cells
        for _, a, b in (span for span in kept if span[0] == lane):
            _fill(busy, (a - start_s) / per_cell_s, (b - start_s) / per_cell_s)
        row = "".join(_FULL if share >= 0.5 else _SOME if share else " " for share in busy)
        yield Line(f"{lane:{margin}}{row}".rstrip(), _STYLES.get(lane, ""))
    axis = ["·"] * cells
    for mark_s in marks_s:
        axis[min(max(round((mark_s - start_s) / per_cell_s), 0), cells - 1)] = "|"
    yield Line(" " * margin + "".join(axis))
    say = spoken or "{:.3g} s".format
    length = say(stop_s - start_s)
    yield Line(" " * margin + "0" + length.rjust(cells - 1))


def _fill(busy: list[float], first: float, last: float) -> None:
    """Add to each cell the share of it that lies between two places."""
    for cell in range(max(int(first), 0), min(int(last) + 1, len(busy))):
        busy[cell] += max(min(last, cell + 1) - max(first, cell), 0.0)
