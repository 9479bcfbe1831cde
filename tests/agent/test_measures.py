"""What steps cost, from the trainer and from the store, in either order and within bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.agent.measures import Measures
from everystep.agent.protocol import Stored
from everystep.store.measured import Measure, Span


def measure(step: int, **changes: Any) -> Measure:
    names = ("begun", "took", "stall", "snapshot", "staging", "bookkeeping", "forward", "backward")
    plain: dict[str, Any] = {f"{name}_s": 0.0 for name in (*names, "update")}
    sizes = {"state_bytes": 8, "copied_bytes": 8, "written_bytes": 0}
    return Measure(**{"timeline": "main", "step": step, **plain, **sizes, **changes})


def stored(step: int) -> Stored:
    return Stored(step=step, written_bytes=100 * step, took_s=0.5, at_s=20.0)


def told(measures: Measures) -> dict[int, Measure]:
    decoded = [msgspec.json.decode(line, type=Measure) for line in measures.lines()]
    assert all(line.endswith(b"\n") for line in measures.lines())
    return {one.step: one for one in decoded}


@pytest.mark.parametrize("first", ["trainer", "store"])
def test_both_parts_of_a_step(first: str) -> None:
    measures = Measures()
    from_trainer = measure(7, begun_s=10.0, took_s=2.0, spans=[Span("update", 0.0, 1.0)])
    if first == "trainer":
        measures.measured(from_trainer)
        assert told(measures)[7] == from_trainer
    measures.stored(stored(7), [Span("write", 19.5, 20.0)])
    if first == "store":
        assert told(measures) == {}
        measures.measured(from_trainer)
    found = told(measures)[7]
    assert (found.written_bytes, found.write_bytes_per_s, found.durable_s) == (700, 1400.0, 8.0)
    assert found.spans == [Span("update", 0.0, 1.0), Span("write", 9.5, 10.0)]


@given(st.lists(st.booleans(), min_size=200, max_size=300), st.integers(1, 50))
def test_what_is_remembered_is_bounded(durable: list[bool], kept: int) -> None:
    measures = Measures(kept)
    for step, is_stored in enumerate(durable):
        measures.measured(measure(step))
        if is_stored and step >= 2:
            measures.stored(stored(step - 2), [])
        measures.stored(stored(10_000 + step), [])  # of which no word of the trainer comes
        sizes = {name: len(held) for name, held in vars(measures).items() if name != "_kept"}
        assert max(sizes.values()) <= max(64, kept)
    assert list(told(measures)) == list(range(len(durable)))[-kept:]
