"""The ring's arithmetic against a ring that is walked hop by hop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.tap import gloo_schedule
from tap.gloo_wire import ring

COUNTS = [1, 2, 5, 10, 17, 63, 1000, 262144 * 4 + 3, 262144 * 6]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("count", COUNTS)
def test_every_message_is_where_the_walk_has_it(ranks: int, count: int) -> None:
    inputs = [np.arange(count, dtype=np.float32) + 1000 * rank for rank in range(ranks)]
    sent, reduced = ring(inputs)
    for rank, messages in enumerate(sent):
        fit = gloo_schedule.sends(4 * count, ranks, 4, rank)
        assert [message.length for message in fit.sent] == [len(data) for data in messages]
        for message, data in zip(fit.sent, messages, strict=True):
            if message.is_reduced:
                assert reduced.tobytes()[message.start : message.stop] == data


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_each_reduced_byte_is_sent_by_every_rank_but_one(ranks: int) -> None:
    covered = np.zeros(4003, int)
    for rank in range(ranks):
        for message in gloo_schedule.sends(4003, ranks, 1, rank).sent:
            if message.is_reduced:
                covered[message.start : message.stop] += 1
    assert (covered == ranks - 1).all()


@given(st.integers(1, 3000), st.integers(2, 6), st.integers(0, 5), st.booleans(), st.booleans())
@settings(max_examples=300)
def test_a_size_that_is_told_by_lengths_is_the_right_one(
    count: int, ranks: int, rank: int, is_over: bool, is_known: bool
) -> None:
    rank %= ranks
    fit = gloo_schedule.sends(4 * count, ranks, 4, rank)
    lengths = [message.length for message in fit.sent]
    senders = [rank] if is_known else list(range(ranks))
    for seen in range(1, len(lengths) + 1):
        found = gloo_schedule.unsized(
            lengths[:seen], ranks=ranks, item_bytes=4, senders=senders, is_over=False
        )
        assert len(found) != 1 or (seen == len(lengths) and found == [fit])
    if lengths and is_over:
        found = gloo_schedule.unsized(
            lengths, ranks=ranks, item_bytes=4, senders=senders, is_over=True
        )
        assert fit in found
        assert {other.nbytes for other in found} == {4 * count} or count <= 4 * ranks**2


def test_large_buffers_wait_for_their_end_unless_the_short_segment_tells() -> None:
    fit = gloo_schedule.sends(25 << 20, 2, 4, 0)
    lengths = [message.length for message in fit.sent]
    for senders, is_told in (([0], True), ([0, 1], False)):
        found = gloo_schedule.unsized(
            lengths, ranks=2, item_bytes=4, senders=senders, is_over=False
        )
        assert (found == [fit]) == is_told
    assert gloo_schedule.unsized(lengths, ranks=2, item_bytes=4, senders=[0, 1], is_over=True) == [
        fit
    ]
