"""The simulation against the closed form: equal up to what one chunk takes.

A chunk that would not be out before the update is not begun, so c bytes per chunk make three
differences, for B <= D: between X and less than X + c bytes are snapshotted; the link rests for
less than c/B before the update, and for at most c/D until the first snapshot is there; a chunk in
flight is held whole, on both sides of the link.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everystep.errors import UsageError
from everystep.planning.hiding import Figures, Policy, Verdict, least_interval, verdict
from everystep.planning.simulate import Simulation, simulate

EIGHTHS = st.integers(0, 40).map(lambda n: n / 8)
"""Exact in binary, so that cases on a limit occur."""


PARTS = st.sampled_from([1, 2, 3, 7, 12])
"""Chunks of a state."""


@st.composite
def all_figures(draw: st.DrawFn) -> Figures:
    offload = draw(st.integers(1, 50))
    forward_s, backward_s = draw(EIGHTHS.filter(bool)), draw(EIGHTHS)
    update_s = draw(EIGHTHS)
    in_a_step = offload * (forward_s + backward_s + update_s)
    return Figures(
        state_bytes=draw(st.integers(1, max(2, math.floor(3 * in_a_step)))),
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        offload_bytes_per_s=float(offload),
        snapshot_bytes_per_s=float(offload * draw(st.integers(1, 50))),
        write_bytes_per_s=float(draw(st.integers(1, 200))),
        activation_bytes=draw(st.sampled_from([0, 0, 10, 100, 1000])),
        on_device=draw(st.booleans()),
    )


class Closed(NamedTuple):
    """The quantities of the closed form in exact fractions."""

    verdict: Verdict
    left: Fraction
    """X."""
    period: Fraction
    """From one checkpoint to the next, without a wait for storage."""
    written: Fraction
    """S / W."""
    per_link: Fraction
    """c / B."""
    per_copy: Fraction
    """c / D."""
    state_on_link: Fraction
    """S / B."""


def closed(f: Figures, chunk_bytes: int, every: int | None = None) -> Closed:
    found = verdict(f, every=every)
    b, d = Fraction(f.offload_bytes_per_s), Fraction(f.snapshot_bytes_per_s)
    window = Fraction(f.forward_s) + Fraction(f.backward_s)
    left = max(f.state_bytes - b * window, Fraction(0))
    period = found.every * (window + Fraction(f.update_s)) + left / d
    written = f.state_bytes / Fraction(f.write_bytes_per_s)
    return Closed(found, left, period, written, chunk_bytes / b, chunk_bytes / d, f.state_bytes / b)


def sure(c: Closed, f: Figures) -> bool:
    """Whether the link has a chunk's time to spare, so that no checkpoint meets another's rest."""
    return not f.on_device or c.state_on_link + c.per_link + c.per_copy <= c.period


def run(
    f: Figures, steps: int, chunk_bytes: int, every: int, policy: Policy = "skip"
) -> Simulation:
    return simulate(f, steps, chunk_bytes=chunk_bytes, every=every, policy=policy)


def begun(ran: Simulation, every: int, checkpoints: int) -> list[Fraction]:
    """When the first checkpoints began: the ends of their steps."""
    return [Fraction(ran.steps[every * n - 1].end_s) for n in range(1, checkpoints + 1)]


@given(f=all_figures(), parts=PARTS)
def test_snapshots_and_stalls_are_those_of_the_closed_form(f: Figures, parts: int) -> None:
    chunk = -(-f.state_bytes // parts)
    c = closed(f, chunk)
    assume(sure(c, f))
    n = c.verdict.every
    ran = run(f, 4 * n + 1, chunk, n)
    for step in ran.steps:
        if step.step % n or step.step == 1:
            after = step.step > 1 and (step.step - 1) % n == 0
            assert after or step.stall_s == 0
        if step.step > 1 and (step.step - 1) % n == 0:
            extra = 0 if c.left == 0 else chunk
            assert math.ceil(c.left) <= step.snapshot_bytes <= c.left + extra
            assert float(c.left) / f.snapshot_bytes_per_s <= step.snapshot_s
            assert step.snapshot_s <= float((c.left + extra) / Fraction(f.snapshot_bytes_per_s))
            assert (step.snapshot_s == 0) == c.verdict.hidden
        assert step.staging_s == 0
        assert (step.staged_s is not None) == (step.step % n == 0)


@given(f=all_figures(), parts=PARTS, steps=st.integers(1, 6))
def test_no_stall_at_all_exactly_where_the_state_fits_the_window(
    f: Figures, parts: int, steps: int
) -> None:
    chunk = -(-f.state_bytes // parts)
    ran = run(f, steps, chunk, 1)
    assert all(step.stall_s >= 0 for step in ran.steps)
    fits = f.state_bytes <= Fraction(f.offload_bytes_per_s) * Fraction(f.forward_s + f.backward_s)
    assert (sum(step.stall_s for step in ran.steps) == 0) == (fits or steps == 1)


@given(f=all_figures(), parts=PARTS)
def test_a_checkpoint_has_left_before_the_next_exactly_where_the_link_can_carry_them(
    f: Figures, parts: int
) -> None:
    chunk = -(-f.state_bytes // parts)
    assume(f.on_device)
    least = least_interval(f)
    for n in (least, least - 1):
        if n == 0:
            continue
        c = closed(f, chunk, max(n, least))
        period = c.period - (c.verdict.every - n) * Fraction(
            f.forward_s + f.backward_s + f.update_s
        )
        ran = run(f, 2 * n, chunk, n)
        first, second = begun(ran, n, 2)
        staged = Fraction(ran.steps[n - 1].staged_s or 0)
        tiny = Fraction(1, 10**9)
        assert c.state_on_link - tiny <= staged - first
        assert staged - first <= c.state_on_link + c.per_link + c.per_copy + tiny
        if n < least:
            assert c.state_on_link > period
            assert staged > second - c.per_copy - tiny
        elif sure(c, f):
            assert staged <= second + tiny


@given(f=all_figures(), parts=PARTS)
def test_extra_memory_is_that_of_the_closed_form(f: Figures, parts: int) -> None:
    chunk = -(-f.state_bytes // parts)
    c = closed(f, chunk)
    assume(sure(c, f))
    n = c.verdict.every
    ran = run(f, 3 * n + 1, chunk, n)
    most = max(step.extra_peak_bytes for step in ran.steps)
    assert c.verdict.extra_peak_bytes - chunk - 1 <= most
    assert most <= c.verdict.extra_peak_bytes + 3 * chunk + 1
    if not f.on_device or c.left == 0:
        assert most == 0


@given(
    offload=st.integers(8, 50),
    snapshot=st.integers(1, 50),
    times=st.tuples(*[EIGHTHS.filter(bool)] * 3),
    parts=PARTS,
)
def test_the_peak_is_not_raised_where_the_paper_says_so(
    offload: int, snapshot: int, times: tuple[float, float, float], parts: int
) -> None:
    """X <= A, and all has left when the update ends: to a chunk, in both."""
    window, update_s = times[0] + times[1], times[2] + 0.5
    state = math.floor(offload * (window + update_s / 2))
    chunk = math.ceil(offload * update_s / 4 / parts)
    f = Figures(
        state_bytes=state,
        forward_s=times[0],
        backward_s=times[1],
        update_s=update_s,
        offload_bytes_per_s=float(offload),
        snapshot_bytes_per_s=float(offload * snapshot),
        write_bytes_per_s=1.0,
    )
    c = closed(f, chunk)
    assert c.left > 0
    assume(sure(c, f))
    roomy = Figures(**{**as_dict(f), "activation_bytes": math.ceil(c.left) + chunk})  # type: ignore[arg-type]
    assert {step.extra_peak_bytes for step in run(roomy, 5, chunk, 1).steps} == {0}
    assert max(step.extra_peak_bytes for step in run(f, 5, chunk, 1).steps) > 0


def as_dict(f: Figures) -> dict[str, float]:
    return {name: getattr(f, name) for name in f.__struct_fields__}


@given(
    f=all_figures(),
    parts=PARTS,
    factor=st.integers(1, 20),
    name=st.sampled_from(["offload_bytes_per_s", "snapshot_bytes_per_s", "write_bytes_per_s"]),
)
def test_a_faster_path_never_stalls_more(f: Figures, parts: int, factor: int, name: str) -> None:
    chunk = -(-f.state_bytes // parts)
    n = verdict(f).every
    faster = Figures(**{**as_dict(f), name: getattr(f, name) * factor})
    assume(sure(closed(f, chunk, n), f) and sure(closed(faster, chunk, n), faster))
    slow_run, fast_run = (run(g, 3 * n + 1, chunk, n) for g in (f, faster))
    for slow, fast in zip(slow_run.steps, fast_run.steps, strict=True):
        assert fast.stall_s <= slow.stall_s
    assert verdict(faster, every=n).snapshot_s <= verdict(f, every=n).snapshot_s
    ends = [run(g, 6 * n, chunk, n, "block").steps[-1].end_s for g in (f, faster)]
    assert ends[1] <= ends[0] + 1e-9


@given(f=all_figures(), parts=PARTS)
def test_skip_makes_the_steps_durable_that_storage_has_time_for(f: Figures, parts: int) -> None:
    chunk = -(-f.state_bytes // parts)
    c = closed(f, chunk)
    assume(sure(c, f))
    n, checkpoints = c.verdict.every, 12
    ran = run(f, checkpoints * n + 1, chunk, n)
    left = next(s.snapshot_bytes for s in ran.steps if s.step == n + 1)
    real = c.period + (left - c.left) / Fraction(f.snapshot_bytes_per_s)
    taken = [s for s in ran.steps if s.step % n == 0][:-1]  # the last one ends with the training
    durable = [place for place, s in enumerate(taken) if s.durable_s is not None]
    if c.written > real:
        expected = [math.floor(i * c.written / real) for i in range(checkpoints)]
        sure_ones = range(len(taken) - 1)  # storage may find the last one late
        assert [p for p in durable if p in sure_ones] == [p for p in expected if p in sure_ones]
    else:
        assert durable == list(range(len(taken)))
    gaps = [b - a for a, b in pairwise(durable)]
    assert all(n * gap <= c.verdict.durable_gap_steps for gap in gaps)
    lost = [(taken[b].durable_s or 0) - taken[a].end_s for a, b in pairwise(durable)]
    bound = Fraction(c.verdict.host_loss_s) + c.per_link + 2 * c.per_copy
    assert all(one <= bound + Fraction(1, 10**9) for one in lost)


@given(f=all_figures(), parts=PARTS)
def test_block_makes_every_checkpoint_durable_and_steps_as_long_as_storage_needs(
    f: Figures, parts: int
) -> None:
    chunk = -(-f.state_bytes // parts)
    c = closed(f, chunk)
    assume(sure(c, f))
    n = c.verdict.every
    ran = run(f, 24 * n, chunk, n, "block")
    assert all((s.durable_s is not None) == (s.step % n == 0) for s in ran.steps)
    ends = begun(ran, n, 24)
    planned = Fraction(verdict(f, "block", n).step_s) * n
    # training may be ahead of storage by what staging holds, and then keeps its pace
    assert ends[-1] - ends[0] >= (23 - 3) * planned
    assert ends[-1] - ends[0] <= 23 * (planned + c.per_copy + c.per_link) + Fraction(1, 10**9)
    assert planned == pytest.approx(float(max(c.period, c.written)), rel=1e-12)


def test_a_timeline_by_hand() -> None:
    f = Figures(
        state_bytes=30, forward_s=1.0, backward_s=1.0, update_s=1.0, offload_bytes_per_s=10.0,
        snapshot_bytes_per_s=20.0, write_bytes_per_s=10.0,
    )  # fmt: skip
    ran = simulate(f, 2, chunk_bytes=5)
    first, second = ran.steps
    assert (first.start_s, first.end_s, first.stall_s) == (0, 3, 0)
    assert (first.staged_s, first.durable_s) == (6.25, 9.25)
    assert (second.start_s, second.end_s) == (3, 6.5)
    assert (second.snapshot_s, second.staging_s, second.snapshot_bytes) == (0.5, 0, 10)
    assert second.extra_peak_bytes == 10
    assert (second.staged_s, second.durable_s) == (9.5, 12.5)
    assert {tuple(span) for span in ran.spans} == {
        ("forward", 0, 1), ("backward", 1, 2), ("update", 2, 3),
        ("forward", 3, 4), ("backward", 4, 5), ("stall", 5, 5.5), ("update", 5.5, 6.5),
        ("offload", 3, 5), ("snapshot", 5, 5.5), ("offload", 5.25, 6.25), ("offload", 6.5, 9.5),
        ("write", 6.25, 9.25), ("write", 9.5, 12.5),
    }  # fmt: skip


def test_skip_without_room_takes_none_and_block_waits() -> None:
    f = Figures(
        state_bytes=10, forward_s=1.0, backward_s=0.0, update_s=0.0, offload_bytes_per_s=10.0,
        snapshot_bytes_per_s=100.0, write_bytes_per_s=2.0,
    )  # fmt: skip
    skipped = simulate(f, 12, chunk_bytes=1, staging_slots=2)
    assert [s.step for s in skipped.steps if s.staged_s is not None] == [1, 2, 7, 12]
    assert [s.durable_s for s in skipped.steps if s.durable_s is not None] == [7, 12, 17, 22]
    roomy = simulate(f, 12, chunk_bytes=1)
    assert all(s.staged_s is not None for s in roomy.steps)
    assert [s.step for s in roomy.steps if s.durable_s is not None] == [1, 6, 11, 12]
    blocked = simulate(f, 6, chunk_bytes=1, policy="block")
    assert [s.durable_s for s in blocked.steps] == [7, 12, 17, 22, 27, 32]
    assert sum(s.staging_s for s in blocked.steps) > 0


@given(f=all_figures(), parts=PARTS, policy=st.sampled_from(["skip", "block"]))
def test_what_every_timeline_keeps_to(f: Figures, parts: int, policy: Policy) -> None:
    chunk = -(-f.state_bytes // parts)
    ran = simulate(f, 8, chunk_bytes=chunk, policy=policy)
    assert ran == simulate(f, 8, chunk_bytes=chunk, policy=policy)
    for lane in ("forward", "backward", "update", "stall", "offload", "snapshot", "write"):
        spans = [span for span in ran.spans if span.lane == lane]
        assert all(span.start_s < span.stop_s for span in spans)
        assert all(a.stop_s <= b.start_s for a, b in pairwise(spans))
    for step, after in pairwise(ran.steps):
        assert step.end_s == after.start_s
    for step in ran.steps:
        assert step.staged_s is None or step.staged_s > step.end_s
        assert step.durable_s is None or step.durable_s > (step.staged_s or math.inf)
    most = f.state_bytes * 3
    assert all(step.extra_peak_bytes <= most for step in ran.steps)


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"chunk_bytes": 0}, {"every": 0}, {"staging_slots": 1}]
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    f = Figures(
        state_bytes=1, forward_s=1.0, backward_s=0.0, update_s=0.0, offload_bytes_per_s=1.0,
        snapshot_bytes_per_s=1.0, write_bytes_per_s=1.0,
    )  # fmt: skip
    with pytest.raises(UsageError, match="nothing to simulate"):
        simulate(f, **{"steps": 1, "chunk_bytes": 1, **wrong})  # type: ignore[arg-type]
