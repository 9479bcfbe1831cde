"""A benchmark's figures: printed as a table or as JSON lines, with the exit status they imply."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 140


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    """The median of the runs."""
    unit: str
    runs: int
    spread: float
    """Largest minus smallest run, in the unit."""
    reach: float | None = None
    """What it must not exceed; None: shown for comparison."""
    at_least: bool = False
    """The reach is what it must not fall below."""

    @property
    def ok(self) -> bool:
        """Whether it is within its reach. What is not a number is not."""
        if self.reach is None:
            return True
        return self.value >= self.reach if self.at_least else self.value <= self.reach


def median_of(
    name: str,
    runs: Sequence[float],
    unit: str,
    reach: float | None = None,
    *,
    at_least: bool = False,
) -> Figure:
    """A figure from its runs."""
    spread = max(runs) - min(runs)
    return Figure(name, statistics.median(runs), unit, len(runs), spread, reach, at_least)


def finish(figures: Sequence[Figure], *, as_json: bool) -> None:
    """Print all figures and exit: 0 if every one is within its reach, else 1."""
    if as_json:
        for figure in figures:
            print(json.dumps({**asdict(figure), "ok": figure.ok}))
    else:
        table = Table("figure", "median", "unit", "runs", "spread", "reach", "")
        for figure in figures:
            sign = ">=" if figure.at_least else "<="
            reach = "" if figure.reach is None else f"{sign} {figure.reach:g}"
            verdict = "" if figure.reach is None else ("ok" if figure.ok else "MISSED")
            numbers = (f"{figure.value:.3f}", figure.unit, str(figure.runs), f"{figure.spread:.3f}")
            table.add_row(figure.name, *numbers, reach, verdict)
        Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH).print(table)
    sys.exit(0 if all(figure.ok for figure in figures) else 1)
