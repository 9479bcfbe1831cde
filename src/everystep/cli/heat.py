"""A quantity over two numbers as rows of characters, darker where it is larger, without colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everystep.cli.output import Line

_RAMP = ((1.05, "·"), (1.25, "░"), (2.0, "▒"), (4.0, "▓"))
_MORE, _NONE, _CHOSEN = "█", "x", "O"
_CELL = 2
"""Characters of a column."""


def draw_heat(
    columns: Sequence[int],
    rows: Sequence[int],
    values: Sequence[Sequence[float | None]],
    chosen: tuple[int, int],
) -> Iterator[Line]:
    """One row of characters per row of values, the last on top, and an axis below.

    Args:
        columns: what each column stands for, rising.
        rows: what each row stands for, rising.
        values: by row, then by column; positive; None: not possible.
        chosen: column and row of the place to mark.
    """
    least = min(value for row in values for value in row if value is not None)
    margin = len(f"{rows[-1]:,}")
    for place in range(len(rows) - 1, -1, -1):
        cells = [
            _CHOSEN if chosen == (column, rows[place]) else _shade(value, least)
            for column, value in zip(columns, values[place], strict=True)
        ]
        text = "".join(cell.ljust(_CELL) if cell in (_CHOSEN, _NONE) else cell * _CELL
                       for cell in cells)  # fmt: skip
        yield Line(f"{rows[place]:>{margin},} |{text}".rstrip())
    axis, labels = "", ""
    for at, column in enumerate(columns):
        label = f"{column:,}"
        if at * _CELL >= len(labels) + (at > 0):
            labels = labels.ljust(at * _CELL) + label
            axis = axis.ljust(at * _CELL, "-") + "+"
    yield Line(" " * (margin + 1) + "+" + axis.ljust(_CELL * len(columns), "-"))
    yield Line(" " * (margin + 2) + labels)
    shades = ", ".join(f"{char} to {limit:g}" for limit, char in _RAMP)
    yield Line(f"times the least: {shades}, {_MORE} more; {_NONE} not possible, {_CHOSEN} chosen")


def _shade(value: float | None, least: float) -> str:
    if value is None:
        return _NONE
    return next((char for limit, char in _RAMP if value <= limit * least), _MORE)
