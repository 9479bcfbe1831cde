"""Gradients by parameter and step out of gloo's packets: exact, or said to be lacking."""

from __future__ import annotations

import functools
import random

import numpy as np
import numpy.typing as npt
import pytest

from everystep.errors import UsageError
from everystep.tap.buckets import Bucket, missing
from everystep.tap.gradients import MOST_CANDIDATES, Lacking
from everystep.tap.matching import runs
from everystep.tap.tcp import Reassembler
from tap.decoding import HARMLESS, Decoded, corrupt
from tap.gloo_wire import Group
from tap.reading import Told, Truth, followed, gradients_of, tell
from tap.recording import frames_of

Floats = npt.NDArray[np.float32]

FIRST = [Bucket(("a", "b", "c", "d"), (300, 7, 41, 901), "float32")]
REBUILT = [Bucket(("d", "c"), (901, 41), "float32"), Bucket(("b", "a"), (7, 300), "float32")]


def sum_of(group: Group, count: int, seed: int) -> tuple[int, Floats]:
    """One all-reduce of numbers that nobody else has."""
    return group.all_reduce(inputs(group.ranks, count, seed))[0]


def inputs(ranks: int, count: int, seed: int) -> list[Floats]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(count, dtype=np.float32) for _ in range(ranks)]


def backward(group: Group, buckets: list[Bucket], seed: int) -> tuple[int, dict[str, Floats]]:
    """All buckets at the same time; the last one's number, and the gradients."""
    sums = group.all_reduce(
        *(inputs(group.ranks, sum(b.sizes), seed + i) for i, b in enumerate(buckets))
    )
    found: dict[str, Floats] = {}
    for bucket, (_, values) in zip(buckets, sums, strict=True):
        edges = np.cumsum(bucket.sizes)[:-1]
        found |= dict(zip(bucket.names, np.split(values, edges), strict=True))
    return sums[-1][0], found


def job(
    ranks: int, steps: int = 12, *, seed: int = 0, mtu: int = 700
) -> tuple[list[bytes], Told, Truth]:
    """A run as DDP makes it: broadcasts before it, other buckets in the first step, a bitmap behind
    each backward, a loss and a metric as large as a bucket in between; every fifth step reduces
    twice."""
    group, rng = Group(ranks, mtu=mtu, seed=seed), random.Random(seed)
    group.other()
    told: Told = {}
    truth: Truth = {}
    for step in range(steps):
        buckets = REBUILT if step else FIRST
        number = 10_000 * seed + 100 * step
        passes = 2 if step % 5 == 4 else 1
        for i in range(passes):
            through, truth[step] = backward(group, buckets, number + 10 * i)
        if rng.random() < 0.5:
            through, _ = sum_of(group, 4, number + 50)
        told[step] = [buckets] * passes, through
        if step == 0 or rng.random() < 0.3:
            group.other()
        sum_of(group, 1, number + 51)
        if rng.random() < 0.3:
            sum_of(group, 307, number + 52)
    group.close()
    return group.packets, told, truth


kept_job = functools.cache(job)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "not counted"])
@pytest.mark.parametrize("batch", [16, 100_000])
def test_every_step_is_exact(ranks: int, is_counted: bool, batch: int) -> None:
    packets, told, truth = job(ranks)
    gradients = gradients_of(ranks)
    found = followed(gradients, packets, told, truth, is_counted=is_counted, batch=batch)
    assert found.exact == [*truth]
    assert gradients.counts()["dropped"] == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_capture_that_begins_in_the_middle(ranks: int) -> None:
    packets, told, truth = job(ranks)
    for start in range(40, len(packets), len(packets) // 9):
        gradients = gradients_of(ranks)
        gradients.expect(0, told[0][0][0], through=told[0][1])
        gradients.forget(0)  # a full state of that step
        gradients.tell(REBUILT)
        rest = {step: told[step] for step in [*told][1:]}
        found = followed(gradients, packets[start:], rest, truth)
        first = found.exact[0] if found.exact else len(told)
        assert found.exact == [*range(first, len(told))]
        assert [*found.lacking] == [*range(1, first)]
        assert first <= 2 + len(told) * start / len(packets)


@pytest.mark.parametrize("part", range(10))
def test_damage_costs_steps_and_never_gives_a_wrong_one(part: int) -> None:
    """300 seeds: what is given is compared bit for bit in `reading`."""
    exact = lacking = wrong = 0
    for seed in range(30 * part, 30 * part + 30):
        rng = random.Random(seed)
        ranks = rng.choice([2, 3, 4])
        packets, told, truth = kept_job(ranks, 6, seed=seed % 4)
        share = 10 ** rng.uniform(-3, -1)
        damage = rng.choice([*HARMLESS.values()])
        damaged, lengths = damage(packets, rng, share)
        gradients = gradients_of(ranks)
        if rng.random() < 0.5:
            gradients.tell([*FIRST, *REBUILT])
        found = followed(gradients, damaged, told, truth, lengths=lengths)
        assert sorted([*found.exact, *found.lacking]) == [*truth]
        exact, lacking = exact + len(found.exact), lacking + len(found.lacking)
        wrong += found.wrong
    assert exact > 30
    assert lacking > 5
    assert wrong < 15


def test_what_is_missing_is_told_by_parameter() -> None:
    group = Group(2, mtu=700)
    through, truth = backward(group, REBUILT, 0)
    group.close()
    costs = 0
    for lost in range(len(group.packets)):
        packets = [*group.packets[:lost], *group.packets[lost + 1 :]]
        gradients = gradients_of(2, sizes=[bucket.nbytes for bucket in REBUILT])
        found = followed(gradients, packets, {0: ([REBUILT], through)}, {0: truth})
        buffers = Decoded(ranks=2, sizes=[bucket.nbytes for bucket in REBUILT]).feed(packets)
        buffers.settle(through).end()
        expected = {}
        for number, bucket in enumerate(REBUILT):
            buffer = buffers.buffers.get(number)
            is_lost = np.ones(sum(bucket.sizes), bool)
            for start, stop in () if buffer is None else buffer.present:
                is_lost[start // 4 : stop // 4] = False
            parts = np.split(is_lost, np.cumsum(bucket.sizes)[:-1])
            expected |= {n: p for n, p in zip(bucket.names, parts, strict=True) if p.any()}
        ranges = found.lacking[0].ranges if found.lacking else {}
        assert ranges.keys() == expected.keys()
        for name, is_lost in expected.items():
            told = np.zeros(len(is_lost), bool)
            for start, stop in ranges[name]:
                told[start:stop] = True
            assert (told == is_lost).all()
        costs += bool(ranges)
    assert costs > 4


def test_missing_bytes_are_elements_of_parameters() -> None:
    bucket = Bucket(("a", "b", "c"), (3, 2, 5), "float16")
    assert missing(bucket, []) == {}
    assert missing(bucket, [(5, 7)]) == {"a": ((2, 3),), "b": ((0, 1),)}
    assert missing(bucket, [(18, 20), (10, 11)]) == {"c": ((0, 1), (4, 5))}
    assert missing(bucket, [(0, 20)]) == {"a": ((0, 3),), "b": ((0, 2),), "c": ((0, 5),)}


def test_runs_leave_out_only_what_is_known_to_be_another() -> None:
    sizes = {0: 4, 1: 8, 2: 4, 4: 4, 6: 8}
    expected = [(5, 6), (4, 5), (3, 5), (2, 3), (0, 1)]
    assert [*runs([4, 8], -1, 6, sizes.get)] == expected
    assert [*runs([4, 8], 0, 5, sizes.get)] == expected[1:4]
    assert [*runs([4, 8, 4], -1, 2, sizes.get)] == [(0, 1, 2)]
    assert [*runs([8], -1, 0, sizes.get)] == []


def test_wrong_candidates_are_tried_and_then_it_is_lacking() -> None:
    group = Group(2)
    for i in range(MOST_CANDIDATES + 3):
        last, _ = sum_of(group, 41, i)
    group.close()
    gradients = gradients_of(2)
    gradients.feed(frames_of(group.packets))
    gradients.expect(5, [Bucket(("a",), (41,), "float32")], through=last)
    seen = []
    for found in gradients.candidates(5):
        taken = gradients.take(5)
        assert isinstance(taken, dict)
        assert taken["a"].tobytes() == found["a"].tobytes()
        seen.append(taken["a"].tobytes())
        gradients.wrong(5)
    assert len(set(seen)) == len(seen) == MOST_CANDIDATES
    lacking = gradients.take(5)
    assert isinstance(lacking, Lacking)
    assert (lacking.step, lacking.ranges, lacking.is_wrong) == (5, {}, True)
    assert gradients.candidates(5) == []


@pytest.mark.parametrize("lost", [0, 1])
def test_it_is_wrong_only_where_the_likeliest_was_there(lost: int) -> None:
    """One of two all-reduces of a size has lost packets, and the other is not it. Where the last
    one was whole, it is not what the optimizer was given; else it may have been."""
    group = Group(2, mtu=700)
    sum_of(group, 901, 0)
    begins = len(group.packets)
    last, _ = sum_of(group, 901, 1)
    group.close()
    middle = begins // 2 if lost == 0 else (begins + len(group.packets)) // 2
    gradients = gradients_of(2, sizes=[3604])
    gradients.feed(frames_of([*group.packets[: middle - 7], *group.packets[middle + 7 :]]))
    gradients.expect(5, [Bucket(("a",), (901,), "float32")], through=last)
    gradients.flush()
    (found,) = gradients.candidates(5)
    assert found["a"].size == 901
    gradients.wrong(5)
    lacking = gradients.take(5, is_over=True)
    assert isinstance(lacking, Lacking)
    assert lacking.is_wrong == (lost == 0)
    assert bool(lacking.ranges) == (lost == 1)


def test_unclaimed_buffers_stay_within_the_budget_and_are_counted() -> None:
    packets, told, truth = job(2, 8)
    nbytes = sum(bucket.nbytes for bucket in REBUILT)
    gradients = gradients_of(2, budget_bytes=3 * nbytes)
    for at in range(0, len(packets), 8):
        gradients.feed(frames_of(packets[at : at + 8], at + 1))
        assert gradients.counts()["waiting_bytes"] <= 3 * nbytes
    gradients.end()
    assert gradients.counts()["dropped"] > 10
    for step in told:
        tell(gradients, step, told, is_counted=True)
    lost = gradients.take(1)
    assert isinstance(lost, Lacking)
    assert "room" in lost.what
    assert lost.ranges.keys() == truth[1].keys()
    gradients.forget(6)
    kept = gradients.take(7)
    assert isinstance(kept, dict)
    assert all(kept[name].tobytes() == values.tobytes() for name, values in truth[7].items())


def test_a_lost_step_is_left_behind_after_a_full_one() -> None:
    packets, told, truth = job(3, 10)
    third = len(packets) // 3
    gradients = gradients_of(3)
    gradients.feed(frames_of(packets[:third]))
    gradients.feed(frames_of(packets[third + 30 :], third + 31))  # a pause of the mirror
    gradients.end()
    for step in told:
        tell(gradients, step, told, is_counted=True)
    lacking = []
    for step in told:
        taken = gradients.take(step, is_over=True)
        if isinstance(taken, Lacking):
            lacking.append(step)
            gradients.forget(step)
        else:
            assert taken is not None
            assert all(taken[n].tobytes() == v.tobytes() for n, v in truth[step].items())
    assert 1 <= len(lacking) <= 3
    gradients.forget(9)
    assert gradients.counts()["waiting"] <= 2  # what came after the last step


def test_buckets_become_certain_though_every_step_is_lost_and_forgotten() -> None:
    gradients = gradients_of(2)
    for step in range(4):
        assert not gradients.are_buckets_certain
        gradients.expect(step, REBUILT, through=10 * step)
        assert isinstance(gradients.take(step, is_over=True), Lacking)
        gradients.forget(step)
    assert gradients.are_buckets_certain


def test_wrong_checksums_are_told_as_the_reason() -> None:
    packets, told, truth = job(2, 3)
    wrong = [packet[:-1] + bytes([packet[-1] ^ 1]) for packet in packets]
    gradients = gradients_of(2, reassembler=Reassembler(checksums=True))
    found = followed(gradients, wrong, told, truth)
    assert all("wrong TCP checksum" in lacking.what for lacking in found.lacking.values())
    assert [*found.lacking] == [*truth]


def test_flipped_bits_are_found_by_twins_or_left_to_the_caller() -> None:
    """Where TCP checksums are checked, a flipped bit is a lost packet."""
    for seed in range(20):
        packets, told, truth = job(2, 5, seed=seed)
        damaged, _ = corrupt(packets, random.Random(seed), 0.01)
        gradients = gradients_of(2, reassembler=Reassembler(checksums=True))
        found = followed(gradients, damaged, told, truth)
        assert sorted([*found.exact, *found.lacking]) == [*truth]


def test_several_models_are_joined() -> None:
    group = Group(2)
    other = [Bucket(("x", "y"), (50, 61), "float32")]
    gradients, told, truth = gradients_of(2), Told(), Truth()
    for step in range(5):
        _, first = backward(group, REBUILT, 100 * step)
        through, second = backward(group, other, 100 * step + 10)
        told[step], truth[step] = ([REBUILT, other], through), first | second
    group.close()
    assert followed(gradients, group.packets, told, truth).exact == [*truth]


def test_wrong_use_is_named() -> None:
    gradients = gradients_of(2)
    with pytest.raises(UsageError, match="nothing was told of step 3"):
        gradients.take(3)
    with pytest.raises(UsageError, match="at least one bucket"):
        gradients.expect(3, [])
    with pytest.raises(UsageError, match="float16"):
        gradients.expect(3, [Bucket(("a",), (1,), "complex64")])
    with pytest.raises(UsageError, match="negative"):
        gradients_of(2, budget_bytes=-1)
    gradients.expect(3, FIRST)
    assert gradients.take(3) is None
    lacking = gradients.take(3, is_over=True)
    assert isinstance(lacking, Lacking)
    assert lacking.ranges == {
        n: ((0, s),) for n, s in zip(FIRST[0].names, FIRST[0].sizes, strict=True)
    }


def test_ranks_that_cannot_be_known_are_said_to_be_the_reason() -> None:
    group = Group(2)
    buckets = [Bucket(("a",), (400,), "float32")]
    through, truth = backward(group, buckets, 0)
    group.close()
    told: Told = {0: ([buckets], through)}
    found = followed(gradients_of(2), group.packets, told, {0: truth})
    assert "hosts" in found.lacking[0].what
    hosts = {"10.0.0.1": 0, "10.0.0.2": 1}
    assert followed(gradients_of(2, hosts=hosts), group.packets, told, {0: truth}).exact == [0]
