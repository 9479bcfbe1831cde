"""What steps cost, as the lines of the file that it will be, until that is written.

A line takes a fraction of the memory of what it is made from, and is made once: a file of so many
steps is written every few seconds.
"""

from __future__ import annotations

import msgspec

from everystep.agent.protocol import Stored
from everystep.store.measured import KEPT_STEPS, Measure, Span, line_of

_LATEST = 64
"""Of so many steps the last part, from the store, may be on its way."""


class Measures:
    """Takes what the trainer and the store have to say of a step, in either order."""

    def __init__(self, kept: int = KEPT_STEPS) -> None:
        self._kept = kept
        self._told: dict[int, Measure] = {}
        self._stored: dict[int, tuple[Stored, list[Span]]] = {}
        self._lines: dict[int, bytes] = {}

    def measured(self, measure: Measure) -> None:
        """Take what the trainer has measured of a step."""
        stored = self._stored.pop(measure.step, None)
        if stored is not None:
            measure = _with_writing(measure, *stored)
        else:
            self._told[measure.step] = measure
            while len(self._told) > _LATEST:
                del self._told[next(iter(self._told))]
        self._lines[measure.step] = line_of(measure)
        while len(self._lines) > self._kept:
            del self._lines[next(iter(self._lines))]

    def stored(self, stored: Stored, spans: list[Span]) -> None:
        """Take what it took to make a step durable."""
        measure = self._told.pop(stored.step, None)
        if measure is not None and stored.step in self._lines:
            self._lines[stored.step] = line_of(_with_writing(measure, stored, spans))
            return
        self._stored[stored.step] = (stored, spans)
        while len(self._stored) > min(_LATEST, self._kept):
            del self._stored[next(iter(self._stored))]

    def lines(self) -> list[bytes]:
        """Those of the newest steps, oldest first."""
        return list(self._lines.values())


def _with_writing(measure: Measure, stored: Stored, spans: list[Span]) -> Measure:
    ended_s = measure.begun_s + measure.took_s
    shifted = [Span(s.lane, s.start_s - measure.begun_s, s.stop_s - measure.begun_s) for s in spans]
    rate = stored.written_bytes / stored.took_s if stored.took_s > 0 else None
    changes = {
        "written_bytes": stored.written_bytes,
        "write_bytes_per_s": rate,
        "durable_s": stored.at_s - ended_s,
        "spans": [*measure.spans, *shifted],
    }
    return msgspec.structs.replace(measure, **changes)
