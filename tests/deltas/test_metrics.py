"""The metrics of a delta, from the beginning of its bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.deltas.delta import Delta
from everystep.deltas.metrics import LENGTH_BYTES, header_bytes, metrics_of
from everystep.deltas.packing import pack
from everystep.errors import Damaged

METRICS: dict[str, Any] = {"loss": 0.5, "word": "a", "odd": {"$float": "7ff8000000000000"}}


def packed(metrics: dict[str, Any]) -> bytes:
    delta = Delta(7, [], [], {"extras": {"metrics": 1}}, metrics, np.arange(3, dtype=np.uint64))
    return b"".join(bytes(part) for part in pack(delta)[1])


def test_the_header_is_enough() -> None:
    blob = packed(METRICS)
    length = header_bytes(blob[:LENGTH_BYTES])
    assert length < len(blob)
    assert metrics_of(blob[:length]) == METRICS
    assert metrics_of(memoryview(blob)) == METRICS


@pytest.mark.parametrize("length", [0, 5, 8, 100])
def test_less_is_refused(length: int) -> None:
    with pytest.raises(Damaged):
        metrics_of(packed(METRICS)[:length])


@given(at=st.integers(0, 2000), bit=st.integers(0, 7))
def test_whatever_is_flipped_nothing_else_is_raised(at: int, bit: int) -> None:
    blob = bytearray(packed(METRICS))
    blob[at % len(blob)] ^= 1 << bit
    try:
        assert isinstance(metrics_of(blob), dict)
    except Damaged as error:
        assert "header" in error.message
