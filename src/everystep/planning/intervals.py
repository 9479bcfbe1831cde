"""How often a full is taken, and how many deltas go into one write, to waste the least time.

The idea, to add up what failures and what writing cost, is that of LowDiff (SC 2025; its own form
is `lowdiff`); the sum here is that of what everystep does. docs/cost-model.md derives it. Letters,
as there: t step time, F steps from one full to the next, B deltas per write, S and D bytes of a
full and of a delta, W write rate, M mean time between failures, R replay of one step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from everystep.errors import UsageError
from everystep.planning.persisting import DISK_SHARE

LONGEST_CHAIN = 100_000
"""Steps from one full to the next are never more."""

GAIN = 0.05
"""Share of the waste that another choice must save to be worth a change."""

PATIENCE = 3
"""Observations in a row that must call for it."""


class Costs(Struct, frozen=True, kw_only=True):
    """What a run with deltas does and pays, measured or assumed. Per rank; the slowest decides.

    Raises:
        UsageError: a figure that makes no sense.
    """

    step_s: float
    """t: a step without checkpoints."""
    state_bytes: int
    """S: of a full."""
    delta_bytes: int
    """D: of one step's record."""
    write_bytes_per_s: float
    """W: to the store."""
    replay_s: float
    """R: one step is read and folded, at a restore."""
    mtbf_s: float
    """M: mean time between failures; may be infinite."""
    load_s: float = 0.0
    """R_F: a full is read, checked, and put where it belongs."""
    restart_s: float = 0.0
    """From the failure until the new processes begin to restore."""
    host_share: float = 1.0
    """Of failures, those that take the host. The others take the training process, and its agent
    goes on: nothing is lost but the step that was in progress."""
    sync_s: float = 0.0
    """Time of storage that each write takes besides its bytes: fsync."""
    batch_stall_s: float = 0.0
    """By how much a write of a batch holds up training, however many deltas are in it."""
    record_stall_s: float = 0.0
    """By how much each delta does: capture. `c(B) = batch_stall_s + B record_stall_s`."""
    full_stall_s: float = 0.0
    """By how much a full does; 0: it hides whole."""
    fold_s: float | None = None
    """The agent folds a step that is durable, and so makes the fulls, which hold up nothing. None:
    training takes them."""

    def __post_init__(self) -> None:
        if self.fold_s is not None and self.full_stall_s:
            raise UsageError("fold_s and full_stall_s: a full that the agent makes stalls nothing")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None:
                continue
            positive = name in ("step_s", "state_bytes", "delta_bytes", "write_bytes_per_s")
            least_ok = value > 0 if positive or name == "mtbf_s" else value >= 0
            finite = value < math.inf or (name == "mtbf_s" and value == math.inf)
            if not (least_ok and finite) or (name == "host_share" and value > 1):
                raise UsageError(f"{name}={value!r} makes no sense")


class Limits(Struct, frozen=True, kw_only=True):
    """What a choice must respect.

    Raises:
        UsageError: a value that makes no sense.
    """

    disk_share: float = 0.9
    """Most of storage's time that fulls and deltas may take: not all, since rates vary."""
    storage_bytes: int | None = None
    """The two newest fulls and all deltas since the older one must fit. None: no limit."""
    memory_bytes: int | None = None
    """Two batches must fit: one fills while the other is written. None: no limit."""

    def __post_init__(self) -> None:
        if not 0 < self.disk_share <= 1:
            raise UsageError(f"disk_share={self.disk_share!r} is not above 0 and at most 1")
        for name in ("storage_bytes", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name}={value!r} makes no sense")


class Waste(Struct, frozen=True, kw_only=True):
    """Shares of all time that are no training, and what the choice takes."""

    share: float
    """The sum of the next five."""
    visible_share: float
    """Training stands still for a full, a batch or a capture."""
    lost_share: float
    """Training that is done again."""
    restart_share: float
    load_share: float
    replay_share: float
    disk_share: float
    """Of storage's time."""
    storage_bytes: int
    memory_bytes: int


class Rhythm(NamedTuple):
    """What repeats from one full to the next, with nothing failing. A full ends its batch, so that
    the log is durable up to it before it is."""

    cycle_s: float
    """F steps with their stalls."""
    batch_steps: float
    """Mean length of the batch that a step is in: B, where B divides F."""
    batch_lag_s: float
    """From the end of a batch until it is durable, as a step meets it on the mean."""
    full_lag_s: float
    """The same of a full, which is written when no batch waits; by the agent, when it has folded
    the step."""


def rhythm(costs: Costs, full_every: int, batch: int) -> Rhythm:
    """What repeats from one full to the next.

    Raises:
        UsageError: fewer than one step, or more than storage can take.
    """
    if min(full_every, batch) < 1:
        raise UsageError(f"full_every={full_every}, batch={batch}: fewer than one step")
    if disk_load(costs, full_every, batch) > 1:
        raise UsageError(f"full_every={full_every}, batch={batch}: more than storage can take")
    whole, rest = divmod(full_every, batch)
    writes = whole + (rest > 0)
    stalls_s = full_every * costs.record_stall_s + writes * costs.batch_stall_s
    cycle_s = full_every * costs.step_s + stalls_s + costs.full_stall_s
    steps = (whole * batch**2 + rest**2) / full_every
    delta_s = costs.delta_bytes / costs.write_bytes_per_s
    idle_share = 1 - (writes * costs.sync_s + full_every * delta_s) / cycle_s
    alone_s = costs.state_bytes / costs.write_bytes_per_s / idle_share
    batch_lag_s = costs.sync_s + min(batch, full_every) * delta_s
    full_lag_s = max(alone_s, batch_lag_s)
    if costs.fold_s is not None:
        full_lag_s = batch_lag_s + costs.fold_s + alone_s
    return Rhythm(cycle_s, steps, costs.sync_s + steps * delta_s, full_lag_s)


def disk_load(costs: Costs, full_every: int, batch: int) -> float:
    """Share of storage's time that fulls and deltas take; stalls do not count as time for it."""
    writes = -(-full_every // batch)
    nbytes = full_every * costs.delta_bytes + costs.state_bytes
    busy_s = writes * costs.sync_s + nbytes / costs.write_bytes_per_s
    return busy_s / (full_every * costs.step_s)


def predict(costs: Costs, full_every: int, batch: int) -> Waste:
    """What a full at every F steps and batches of B deltas waste in the long run.

    Training takes t' = cycle / F seconds a step. A failure in training finds it at any moment of
    the cycle alike.

    - Lost: with the process t'/2 on the mean, the step in progress; with the host the age of the
      newest durable step, `B t'/2` and the lag of its write. That much trained time is lost per
      failure; where a failure also strikes while work is done again, the kept share is
      `x / (e^x - 1)` with x the time between two durable states over the mean time between such
      failures, and `e^-y` for a lag.
    - Recovery takes `Y = restart + R_F + n R` seconds, n the steps from the newest full to the
      newest step: 0 to F - 1 with the process. With the host both must be durable, so
      `(F - B) / 2 + (lag of the full - lag of the batch) / t'` on the mean.
    - A recovery that fails begins again: it takes `(e^(Y/M) - 1) M` seconds on the mean.

    To first order in 1/M the waste is `visible per step / t + (lost + Y) / M`. `failures.simulate`
    knows the rules and none of this; the tests hold the two together.

    Raises:
        UsageError: fewer than one step, or more than storage can take.
    """
    beat = rhythm(costs, full_every, batch)
    step_s = beat.cycle_s / full_every
    rate, host = 1 / costs.mtbf_s, costs.host_share
    kept = _kept(rate * (1 - host) * step_s) * _kept(rate * host * beat.batch_steps * step_s)
    kept *= math.exp(-rate * host * beat.batch_lag_s)
    further = (1 - beat.batch_steps) / 2 + (beat.full_lag_s - beat.batch_lag_s) / step_s
    steps = (full_every - 1) / 2 + host * further
    once = costs.restart_s + costs.load_s
    mean = _mean_exp(rate * costs.replay_s, full_every)
    again = 1 - host + host * _exp(rate * costs.replay_s * further)
    recovering = _exp(rate * once) * mean * again - 1  # per second of training
    trained = 1 / (1 + recovering)
    useful = trained * kept * costs.step_s / step_s
    replay_s = steps * costs.replay_s
    each = (1 - trained) / (once + replay_s) if once + replay_s else 0.0
    return Waste(
        share=1 - useful,
        visible_share=trained * kept - useful,
        lost_share=trained * (1 - kept),
        restart_share=each * costs.restart_s,
        load_share=each * costs.load_s,
        replay_share=each * replay_s,
        disk_share=disk_load(costs, full_every, batch),
        storage_bytes=2 * (costs.state_bytes + full_every * costs.delta_bytes),
        memory_bytes=2 * min(batch, full_every) * costs.delta_bytes,
    )


def _kept(x: float) -> float:
    """Share of work that is kept where a stretch of x mean times between failures is all or
    nothing."""
    return x / math.expm1(x) if 1e-12 < x < 700 else float(x <= 1e-12)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _mean_exp(x: float, count: int) -> float:
    """Mean of e^(n x) over n = 0 … count - 1."""
    if x * count < 1e-9:
        return 1.0
    return math.expm1(x * count) / (count * math.expm1(x)) if x * count < 700 else math.inf


# ---------------------------------------------------------------- the choice


class Choice(Struct, frozen=True):
    """A full at every so many steps and so many deltas per write, as measurements change."""

    full_every: int
    batch: int
    calm: int = 0
    """Observations in a row by which another choice would have been worth the change."""

    def observe(
        self,
        costs: Costs,
        limits: Limits | None = None,
        *,
        full_every: int | None = None,
        batch: int | None = None,
    ) -> Choice:
        """The choice after the costs were measured again.

        It changes at once when it breaks a limit; else only after `PATIENCE` observations in a row
        by which the best would save at least the share `GAIN` of the waste.

        Args:
            costs: of the run.
            limits: to be respected; None: the defaults.
            full_every: F, where it is given.
            batch: B, where it is given.

        Raises:
            UsageError: no choice respects the limits.
        """
        best = choose(costs, limits, full_every=full_every, batch=batch)
        if broken(costs, limits, self.full_every, self.batch) is not None:
            return best
        now = predict(costs, self.full_every, self.batch).share
        if predict(costs, best.full_every, best.batch).share > (1 - GAIN) * now:
            return replace(self, calm=0)
        return best if self.calm + 1 >= PATIENCE else replace(self, calm=self.calm + 1)


def broken(costs: Costs, limits: Limits | None, full_every: int, batch: int) -> str | None:
    """The limit that a choice does not respect: `disk`, `storage`, `memory` or `agent`; None: it
    does. See `least_by_agent` for the last."""
    limits = limits or Limits()
    batch = min(batch, full_every)
    if disk_load(costs, full_every, batch) > limits.disk_share:
        return "disk"
    if full_every < least_by_agent(costs):
        return "agent"
    kept_bytes = 2 * (costs.state_bytes + full_every * costs.delta_bytes)
    if limits.storage_bytes is not None and kept_bytes > limits.storage_bytes:
        return "storage"
    if limits.memory_bytes is not None and 2 * batch * costs.delta_bytes > limits.memory_bytes:
        return "memory"
    return None


def least_by_agent(costs: Costs) -> float:
    """The fewest steps from one full to the next that an agent can keep to which makes them.

    As for a replica (`persisting`): writing its copy must not keep storage busy for more than
    `DISK_SHARE` of the time, and in half of the time that folding F steps leaves, F (t - f), it
    must be written, S / W, since it stands still meanwhile. Infinite: folding takes longer than
    training.
    """
    if costs.fold_s is None:
        return 0.0
    write_s = costs.state_bytes / costs.write_bytes_per_s
    spare_s = costs.step_s - costs.fold_s
    behind = 2 * write_s / spare_s if spare_s > 0 else math.inf
    return max(write_s / (DISK_SHARE * costs.step_s), behind)


def choose(
    costs: Costs,
    limits: Limits | None = None,
    *,
    full_every: int | None = None,
    batch: int | None = None,
) -> Choice:
    """The choice that wastes the least, by `predict`, of those that respect the limits.

    F is a multiple of B where neither is given, so that no batch is cut. For each B the waste is
    unimodal in F: its parts are `F^k` times positive numbers, so its logarithm is convex in log F.
    Hence a binary search for F, for every B up to 32 and in steps of 10 % beyond. Of equal ones the
    smaller F, then the smaller B.

    Args:
        costs: of the run.
        limits: to be respected; None: the defaults.
        full_every: F, where it is given.
        batch: B, where it is given.

    Raises:
        UsageError: no choice respects the limits; the message says which.
    """
    limits = limits or Limits()
    found: list[tuple[float, int, int]] = []
    for b in _batches(full_every or LONGEST_CHAIN) if batch is None else [batch]:
        f = _best_full_every(costs, limits, b) if full_every is None else full_every
        if f is not None and broken(costs, limits, f, b) is None:
            found.append((predict(costs, f, b).share, f, b))
    if not found:
        raise _impossible(costs, limits, full_every, batch)
    _, f, b = min(found)
    return Choice(f, b)


def _batches(most: int) -> list[int]:
    found = [b for b in range(1, 33) if b <= most]
    while found[-1] >= 32 and found[-1] * 11 // 10 <= most:
        found.append(found[-1] * 11 // 10)
    return found


def _best_full_every(costs: Costs, limits: Limits, batch: int) -> int | None:
    """The best multiple of a batch; None: none respects the limits."""
    write = costs.write_bytes_per_s
    idle_s = limits.disk_share * costs.step_s - costs.sync_s / batch - costs.delta_bytes / write
    least = costs.state_bytes / write / idle_s if idle_s > 0 else math.inf
    least = max(least, least_by_agent(costs))
    most = LONGEST_CHAIN
    if limits.storage_bytes is not None:
        most = min(most, (limits.storage_bytes // 2 - costs.state_bytes) // costs.delta_bytes)
    if not least <= most:
        return None
    low, high = max(math.ceil(least / batch), 1), most // batch
    if low > high:
        return None
    if broken(costs, limits, low * batch, batch) in ("disk", "agent") and low < high:
        low += 1  # the quotient was rounded
    while low < high:
        middle = (low + high) // 2
        here, there = (predict(costs, q * batch, batch).share for q in (middle, middle + 1))
        low, high = (low, middle) if here <= there else (middle + 1, high)
    return low * batch


def _impossible(
    costs: Costs, limits: Limits, full_every: int | None, batch: int | None
) -> UsageError:
    """Which limit leaves no choice: that of the choice that asks least of the disk."""
    most_bytes = limits.memory_bytes
    fits = LONGEST_CHAIN if most_bytes is None else most_bytes // (2 * costs.delta_bytes)
    b = batch or max(1, min(fits, full_every or LONGEST_CHAIN))
    f = full_every or LONGEST_CHAIN
    why = broken(costs, limits, f, b)
    if why == "storage" and full_every is None:
        f = max(b, (limits.storage_bytes or 0) // (2 * costs.delta_bytes))
    words = {
        "disk": ("storage is too slow", "fewer or smaller deltas, or faster storage"),
        "storage": ("the storage budget is too small for two fulls and their deltas", "more of it"),
        "memory": ("two batches do not fit into memory", "smaller batches, or more memory"),
        "agent": ("the agent folds or writes too slowly", "fulls that training takes"),
    }
    problem, hint = words[why or "disk"]
    return UsageError(f"no choice respects the limits: {problem}", hint=hint)
