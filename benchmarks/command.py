"""The command line of a benchmark that is made of parts, each of which can be run alone."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Setting
from benchmarks.figures import Figure, finish

Parts = dict[str, Callable[[Setting], list[Figure]]]
"""By name, in the order in which they are run."""


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    parts: Parts
    quick: bool
    as_json: bool
    directory: Path
    runs: int

    @staticmethod
    def parse(description: str, parts: Parts) -> Asked:
        """Read the command line.

        Args:
            description: its first paragraph is shown with `--help`.
            parts: all there are.
        """
        parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
        parser.add_argument("--quick", action="store_true", help="a smaller state, shorter steps")
        parser.add_argument("--json", action="store_true", help="one JSON object per line")
        parser.add_argument(
            "--dir", type=Path, default=Path("."), help="on which disk (default: .)"
        )
        parser.add_argument(
            "--runs", type=int, help="how many (default: 5, quick: 3; steps: 5 or more)"
        )
        parser.add_argument("--only", help=f"some of: {','.join(parts)}")
        options = parser.parse_args()
        names = options.only.split(",") if options.only else list(parts)
        unknown = [name for name in names if name not in parts]
        if unknown:
            parser.error(f"no part is called {unknown[0]}; there are {', '.join(parts)}")
        return Asked(
            parts={name: parts[name] for name in names},
            quick=options.quick,
            as_json=options.json,
            directory=options.dir,
            runs=options.runs or (3 if options.quick else 5),
        )

    def run(self) -> None:
        """Measure, print, and exit with the status that the figures imply."""
        figures: list[Figure] = []
        with tempfile.TemporaryDirectory(dir=self.directory, prefix="benchmark-") as directory:
            setting = Setting(Path(directory).absolute(), self.quick, self.runs)
            for name, measure in self.parts.items():
                started_s = time.monotonic()
                figures += measure(setting)
                print(f"{name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
        finish(figures, as_json=self.as_json)
