"""Which strategy wastes the least time: `Full`, `Deltas` or `Replica`, from what a run measures.

The parts are those of `hiding` (stalls of fulls), `intervals` (deltas, and what a failure costs)
and `persisting`'s replica; docs/cost-model.md says how they are put together. Everything is a
function of its arguments, so that ranks with the same facts choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from everystep.errors import UsageError
from everystep.planning.facts import Facts
from everystep.planning.hiding import least_interval, power_of_two, verdict
from everystep.planning.intervals import LONGEST_CHAIN, Choice, Costs, Limits, predict, rhythm
from everystep.planning.intervals import choose as choose_deltas

Name = Literal["full", "deltas", "replica"]

NAMES: tuple[Name, ...] = ("full", "replica", "deltas")
"""Of equally good ones the first: the one that does the least."""

MARGIN = 0.1
"""Share of its waste that another strategy must save before the one in use is left."""

LEAST = 1e-4
"""Share of all time that it must save besides: nine seconds a day."""

_AT_ONCE = 1e30
"""Bytes per second of storage that takes no time."""

_MOMENTS = 89
"""Of a replica's period, over which a mean is taken."""

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples fall evenly into any number of steps."""


class Prediction(Struct, frozen=True, kw_only=True):
    """What a strategy wastes in the long run, at the settings that waste the least."""

    wasted_share: float
    """Of all time, the sum of the next three; infinite: the strategy is not possible."""
    visible_share: float = 0.0
    """Training waits for checkpoints."""
    process_share: float = 0.0
    """Failures of the training process: work done again, restart, load, replay."""
    host_share: float = 0.0
    """The same of failures that take the host."""
    every: int | None = None
    """Steps from one full, or one written copy of a replica, to the next."""
    batch: int | None = None
    """Deltas per write."""
    buffer_records: int | None = None
    """Records of steps for which host memory has room."""
    memory_bytes: int = 0
    """Host memory that this takes."""
    host_loss_s: float = 0.0
    """Training time that is lost with the host, on the mean."""
    impossible: str | None = None
    """Why it is not possible."""


class Verdict(Struct, frozen=True, kw_only=True):
    """Which strategy to use, and why."""

    strategy: Name
    reason: str
    """One line for a log."""
    predicted: dict[Name, Prediction]

    @property
    def wasted(self) -> dict[Name, float]:
        """Share of all time that each strategy would waste; infinite: it is not possible."""
        return {name: found.wasted_share for name, found in self.predicted.items()}


def choose(facts: Facts, now: Name | None = None) -> Verdict:
    """The strategy that wastes the least time.

    Args:
        facts: of the slowest rank (`slowest`), so that all ranks choose alike.
        now: the strategy in use. It is left only where it has become impossible, or where
            another saves the share `MARGIN` of its waste, and `LEAST` of all time.

    Raises:
        UsageError: host memory has no room for any of them.
    """
    predicted: dict[Name, Prediction] = {
        name: _impossible(facts.excluded[name]) if name in facts.excluded else find(facts)
        for name, find in _FOUND_BY.items()
    }
    best = min(NAMES, key=lambda name: predicted[name].wasted_share)
    if predicted[best].impossible is not None:
        problem = f"no strategy is possible: {predicted['full'].impossible}"
        raise UsageError(problem, hint="more host memory, or Full(blocking=True)")
    chosen = best
    if now is not None and predicted[now].impossible is None:
        saved = predicted[now].wasted_share - predicted[best].wasted_share
        if saved <= max(MARGIN * predicted[now].wasted_share, LEAST):
            chosen = now
    reason = _reason(chosen, best, predicted)
    return Verdict(strategy=chosen, reason=reason, predicted=predicted)


# ---------------------------------------------------------------- the three


class _Kept(NamedTuple):
    """Which states are to be had after a failure, and what it takes."""

    period_s: float
    """From one such state to the next."""
    gone_s: float
    """From the end of a step until its state is such a one, and from the failure until training
    goes on."""


def _predict(facts: Facts, step_s: float, process: _Kept, host: _Kept, loss_s: float) -> Prediction:
    """What steps of this length waste, each kind of failure by itself."""
    share = facts.host_share
    useful = facts.step_s / step_s
    wasted = [1 - useful]
    for kept, often in ((process, 1 - share), (host, share)):
        mtbf_s = facts.mtbf_s / often if often else math.inf
        lost = _lost_share(kept, mtbf_s)
        wasted.append(useful * lost)
        useful *= 1 - lost
    visible, by_process, by_host = wasted
    return Prediction(
        wasted_share=1 - useful, visible_share=visible, process_share=by_process,
        host_share=by_host, host_loss_s=loss_s,
    )  # fmt: skip


def _lost_share(kept: _Kept, mtbf_s: float) -> float:
    """Of all time, what failures take: `intervals.predict` for steps as long as the period, each
    of them stored at once. A state that comes later by so much is so much more work to be done
    again, which costs what a recovery longer by so much does."""
    costs = Costs(
        step_s=kept.period_s, state_bytes=1, delta_bytes=1, write_bytes_per_s=_AT_ONCE,
        replay_s=0.0, mtbf_s=mtbf_s, load_s=kept.gone_s,
    )  # fmt: skip
    return predict(costs, 1, 1).share


def _impossible(why: str) -> Prediction:
    return Prediction(wasted_share=math.inf, impossible=why)


def _no_room(facts: Facts, what: str, nbytes: int) -> Prediction | None:
    have = facts.host_memory_bytes
    if have is None or nbytes <= have:
        return None
    return _impossible(f"{what} need {_size(nbytes)} of host memory, there are {_size(have)}")


def _slots(facts: Facts, more_bytes: int = 0) -> int:
    """States that staging memory has room for: three, so that staging never waits, or two."""
    have = facts.host_memory_bytes
    return 3 if have is None or 3 * facts.state_bytes + more_bytes <= have else 2


def _full(facts: Facts) -> Prediction:
    short = _no_room(facts, "two states", 2 * facts.state_bytes)
    if short is not None:
        return short
    slots = _slots(facts)
    every = verdict(facts.figures()).every
    if slots == 2:  # the next is staged where the last but one was, once that is written
        every = max(every, power_of_two(math.ceil(facts.write_s / facts.step_s)))
    found = [full_at(facts, n, slots) for n in (every << k for k in range(17))]
    return min(found, key=lambda one: one.wasted_share)


def full_at(facts: Facts, every: int, slots: int) -> Prediction:
    """What a state at every so many steps wastes.

    The newest staged state is half a period old on the mean, and by the time it took to leave; the
    newest durable one by half of the time between two, and by the time to be written besides.

    Args:
        facts: of the run.
        every: steps from one to the next.
        slots: states that staging memory has room for; said in the prediction, and not looked at.

    Raises:
        UsageError: the link cannot carry a state at every so many steps.
    """
    v = verdict(facts.figures(), every=every)
    period_s = every * v.step_s
    durable_s = max(period_s, facts.write_s)
    # storage that is slower than checkpoints come takes the newest: half a period old on the mean
    lag_s = v.staged_s + facts.write_s + (period_s / 2 if facts.write_s > period_s else 0.0)
    process = _Kept(period_s, v.staged_s + facts.restart_s + facts.reload_s)
    host = _Kept(durable_s, lag_s + facts.restart_s + facts.read_s)
    found = _predict(facts, v.step_s, process, host, durable_s / 2 + lag_s)
    return replace(found, every=every, memory_bytes=slots * facts.state_bytes)


def _deltas(facts: Facts) -> Prediction:
    record, state = facts.record_bytes, facts.state_bytes
    short = _no_room(facts, "two states and two records", 2 * (state + record))
    if short is not None:
        return short
    slots = _slots(facts, 2 * record)
    have = facts.host_memory_bytes
    limits = Limits(memory_bytes=None if have is None else have - slots * state)
    costs = facts.costs()
    try:
        choice = _settle(facts, costs, limits)
    except UsageError as error:
        return _impossible(error.headline())
    every, batch = choice.full_every, min(choice.batch, choice.full_every)
    waste = predict(costs, every, batch)
    process_share = 0.0
    if facts.host_share < 1:
        alone = replace(costs, host_share=0.0, mtbf_s=facts.mtbf_s / (1 - facts.host_share))
        without = predict(alone, every, batch)
        process_share = without.share - without.visible_share
    host_share = max(0.0, waste.share - waste.visible_share - process_share)
    beat = rhythm(costs, every, batch)
    return Prediction(
        wasted_share=waste.share,
        visible_share=max(0.0, waste.share - process_share - host_share),
        process_share=process_share,
        host_share=host_share,
        every=every,
        batch=batch,
        buffer_records=2 * batch,
        memory_bytes=slots * state + 2 * batch * record,
        host_loss_s=beat.batch_steps * beat.cycle_s / every / 2 + beat.batch_lag_s,
    )


def _settle(facts: Facts, costs: Costs, limits: Limits) -> Choice:
    """The choice of `intervals`, where fulls are no more often than the link can carry them, and
    with several ranks at a power of two."""
    choice = choose_deltas(costs, limits)
    every = max(choice.full_every, least_interval(facts.figures(facts.record_bytes)))
    if facts.world_size > 1 and every & (every - 1):
        above = power_of_two(every)
        found = []
        for power in (above // 2, above):
            try:
                found.append(choose_deltas(costs, limits, full_every=power))
            except UsageError:
                continue
        return min(
            found, key=lambda one: predict(costs, one.full_every, one.batch).share, default=choice
        )
    if every == choice.full_every:
        return choice
    return choose_deltas(costs, limits, full_every=every)


def _replica(facts: Facts) -> Prediction:
    facts = facts.mirrored()
    record, state = facts.record_bytes, facts.state_bytes
    short = _no_room(facts, "the state and two steps' gradients", state + 2 * record)
    if short is not None:
        return short
    # what comes while the copy is written waits
    own_s = facts.step_s + facts.record_s
    records = max(2, math.ceil(_standstill_s(facts) / own_s))
    if facts.host_memory_bytes is not None:
        records = min(records, (facts.host_memory_bytes - state) // record)
    found = [replica_at(facts, n, records) for n in _every()]
    return min(found, key=lambda one: one.wasted_share)


def replica_at(facts: Facts, every: int, records: int) -> Prediction:
    """What a replica wastes that is written after every so many steps.

    While it is, nothing is folded and records wait; training does once their memory is full, and
    throughout where folding is slower than steps come.

    Args:
        facts: of the run.
        every: steps from one written copy to the next.
        records: of steps for which memory has room.
    """
    facts = facts.mirrored()
    write_s, fold_s, own_s = facts.write_s, facts.refold_s, facts.step_s + facts.record_s
    held_s = max(0.0, _standstill_s(facts) - (records + 1) * own_s)
    step_s = max(own_s + held_s / every, fold_s + write_s / every)
    period_s = every * step_s
    if write_s > Limits().disk_share * period_s:
        return _impossible("storage is too slow")
    behind_s = _behind_s(facts, step_s, every, records)
    lag_s = facts.handover_s + fold_s + write_s
    # a new process begins with a copy that is written
    back_s = facts.restart_s + max(0.0, write_s + fold_s - (records + 1) * own_s)
    process = _Kept(step_s, facts.handover_s + behind_s + back_s + facts.reload_s)
    host = _Kept(period_s, lag_s + back_s + facts.read_s)
    found = _predict(facts, step_s, process, host, period_s / 2 + lag_s)
    memory_bytes = facts.state_bytes + records * facts.record_bytes
    return replace(found, every=every, buffer_records=records, memory_bytes=memory_bytes)


def _standstill_s(facts: Facts) -> float:
    """From the end of the step after which the copy is written until the next is folded, and the
    memory of its record free."""
    return facts.handover_s + 2 * facts.refold_s + facts.write_s


def _behind_s(facts: Facts, step_s: float, every: int, records: int) -> float:
    """How long after the restart an agent still folds, on the mean over the moments at which a
    process may die: since a copy began to be written, it has had to write it and to fold what has
    come, and has done so all the time; or else it is at work on the newest."""
    write_s, fold_s, own_s = facts.write_s, facts.refold_s, facts.step_s + facts.record_s
    period_s = 1 / (1 / (every * step_s) + 1 / facts.mtbf_s)  # each process begins with a write
    total_s = 0.0
    for moment in range(1, _MOMENTS + 1):
        at_s = moment * _GOLDEN % 1 * period_s
        come = int((at_s + fold_s) / own_s)
        if fold_s:
            come = min(come, records + max(0, int((at_s - write_s) / fold_s)))
        work_s = max(write_s + come * fold_s - at_s, fold_s - (at_s + fold_s) % own_s)
        total_s += max(0.0, work_s - facts.restart_s)
    return total_s / _MOMENTS


def _every() -> Iterator[int]:
    """Numbers of steps to try, for the written copy of a replica: a fifth more each time."""
    steps = 1
    while steps <= LONGEST_CHAIN:
        yield steps
        steps = max(steps + 1, steps * 6 // 5)


_FOUND_BY: dict[Name, Callable[[Facts], Prediction]] = {
    "full": _full,
    "deltas": _deltas,
    "replica": _replica,
}


# ---------------------------------------------------------------- words


def _reason(chosen: Name, best: Name, predicted: dict[Name, Prediction]) -> str:
    """What was chosen and why, in one line."""
    told = [f"{chosen}, {_settings(chosen, predicted[chosen])}: {_share_words(predicted[chosen])}"]
    if best != chosen:
        told.append(f"{best} would save too little")
    others = [name for name in predicted if name != chosen]
    others.sort(key=lambda name: predicted[name].wasted_share)
    for name in others:
        why = predicted[name].impossible
        words = _share_words(predicted[name]) if why is None else f"not possible, {why}"
        told.append(f"{name}: {words}")
    return "; ".join(told)


def _settings(name: Name, found: Prediction) -> str:
    every = "at every step" if found.every == 1 else f"at every {found.every:,} steps"
    if name == "full":
        return every
    if name == "replica":
        return f"written {every}"
    return f"a full {every}, {found.batch:,} per write"


def _share_words(found: Prediction) -> str:
    """How much is wasted, and the most of it by what."""
    if found.wasted_share == 0:
        return "wastes no time"
    parts = {
        "training waits": found.visible_share,
        "processes fail": found.process_share,
        "hosts fail": found.host_share,
    }
    most = max(parts, key=lambda words: parts[words])
    return f"wastes {found.wasted_share:.3%} of time, most of it as {most}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.3g} MB"
