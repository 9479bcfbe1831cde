"""`everystep plan deltas`: how often a full, how many deltas per write, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct

from everystep.cli.figures import (
    medians,
    newest_measures,
    quantity,
    read_rate,
    read_seconds,
    read_size,
    spoken_time,
)
from everystep.cli.heat import draw_heat
from everystep.cli.output import Block, Line, Output, counted, size
from everystep.cli.target import AsJson, path_text
from everystep.errors import UsageError
from everystep.planning import lowdiff
from everystep.planning.closed_form import first_order
from everystep.planning.failures import Mtbf, estimate_mtbf
from everystep.planning.intervals import (
    LONGEST_CHAIN,
    Choice,
    Costs,
    Limits,
    Waste,
    broken,
    choose,
    predict,
    rhythm,
)
from everystep.store.restarts import restarts_of
from everystep.store.run import Run

EXAMPLE = (
    "Example: everystep plan deltas --state 1.5GB --step 0.5 --write 1GB/s --replay 0.05 "
    "--delta 6MB --mtbf 3h --full-stall 20ms --batch-stall 2ms"
)


class Grid(Struct, frozen=True, kw_only=True):
    """The wasted share of time over both numbers."""

    full_every: list[int]
    batch: list[int]
    wasted_share: list[list[float | None]]
    """By batch, then by full_every; null where a limit is broken."""


class PaperChoice(Struct, frozen=True, kw_only=True):
    """What LowDiff's own model would choose, with as long a merge as a replayed step."""

    full_every_steps: float
    batch_steps: float


class DeltasPlan(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    run: str | None
    """Whose measurements were used."""
    measured_steps: int
    restarts: int | None
    """From which the mean time between failures was estimated; null: it was given."""
    mtbf: Mtbf | None
    costs: Costs
    limits: Limits
    assumed: list[str]
    """Figures that were neither given nor measured."""
    fixed: list[str]
    """Of `full_every` and `batch` those that were given."""
    choice: Choice
    waste: Waste
    full_every_optimum_steps: float | None
    """By the closed form, without limits; null: the more the better."""
    batch_optimum_steps: float | None
    paper: PaperChoice | None
    """null where a replay takes no time."""
    grid: Grid


_State = Annotated[str | None, quantity("--state", "Of one rank.", "SIZE")]
_Step = Annotated[str | None, quantity("--step", "Length of a step.", "TIME")]
_Write = Annotated[str | None, quantity("--write", "To the store.", "RATE")]
_Replay = Annotated[str | None, quantity("--replay", "Of one step, at a restore.", "TIME")]
_Delta = Annotated[str | None, quantity("--delta", "Of one step.", "SIZE")]
_Mtbf = Annotated[str | None, quantity("--mtbf", "Between failures.", "TIME")]
_Load = Annotated[str | None, quantity("--load", "Of a full. Default: as its write.", "TIME")]
_Restart = Annotated[str | None, quantity("--restart", "Until processes run again.", "TIME")]
_Sync = Annotated[str | None, quantity("--sync", "Of each write, besides its bytes.", "TIME")]
_FullStall = Annotated[str | None, quantity("--full-stall", "Stall of a full.", "TIME")]
_BatchStall = Annotated[str | None, quantity("--batch-stall", "Stall of a write.", "TIME")]
_RecordStall = Annotated[str | None, quantity("--record-stall", "Stall of a capture.", "TIME")]
_Fold = Annotated[str | None, quantity("--fold", "Of a step, where the agent makes fulls.", "TIME")]
_HostShare = Annotated[float, typer.Option(help="Failures that take the host.", min=0, max=1)]
_StorageBudget = Annotated[
    str | None, quantity("--storage-budget", "Room for two fulls with deltas.", "SIZE")
]
_MemoryBudget = Annotated[str | None, quantity("--memory-budget", "Room for two batches.", "SIZE")]
_DiskShare = Annotated[float, typer.Option(help="Of the time of storage, the most to take.")]
_FullEvery = Annotated[int | None, typer.Option(help="Steps per full.", metavar="N", min=1)]
_Batch = Annotated[int | None, typer.Option(help="Deltas per write.", metavar="N", min=1)]
_FromRun = Annotated[Path | None, typer.Option(help="Take what this run measured.", metavar="RUN")]
_Rank = Annotated[int, typer.Option(help="Whose measurements.", min=0)]


def deltas(
    state: _State = None,
    step: _Step = None,
    write: _Write = None,
    replay: _Replay = None,
    delta: _Delta = None,
    mtbf: _Mtbf = None,
    load: _Load = None,
    restart: _Restart = None,
    sync: _Sync = None,
    full_stall: _FullStall = None,
    batch_stall: _BatchStall = None,
    record_stall: _RecordStall = None,
    fold: _Fold = None,
    host_share: _HostShare = 1.0,
    storage_budget: _StorageBudget = None,
    memory_budget: _MemoryBudget = None,
    disk_share: _DiskShare = 0.9,
    full_every: _FullEvery = None,
    batch: _Batch = None,
    from_run: _FromRun = None,
    rank: _Rank = 0,
    as_json: AsJson = False,
) -> None:
    """Deltas: how often a full, and how many deltas per write, waste the least time.

    Sizes such as 26GB or 24GiB, rates such as 25GB/s, times such as 0.4, 400ms or 3h. Options that
    are given count more than what a run measured.
    """
    given: dict[str, float | None] = {
        "state_bytes": read_size("--state", state), "step_s": read_seconds("--step", step),
        "write_bytes_per_s": read_rate("--write", write),
        "replay_s": read_seconds("--replay", replay), "delta_bytes": read_size("--delta", delta),
        "mtbf_s": read_seconds("--mtbf", mtbf), "load_s": read_seconds("--load", load),
        "restart_s": read_seconds("--restart", restart), "sync_s": read_seconds("--sync", sync),
        "full_stall_s": read_seconds("--full-stall", full_stall),
        "batch_stall_s": read_seconds("--batch-stall", batch_stall),
        "record_stall_s": read_seconds("--record-stall", record_stall),
        "host_share": host_share, "fold_s": read_seconds("--fold", fold),
    }  # fmt: skip
    limits = Limits(
        disk_share=disk_share, storage_bytes=read_size("--storage-budget", storage_budget),
        memory_bytes=read_size("--memory-budget", memory_budget),
    )  # fmt: skip
    measured = _measured(from_run, rank) if from_run is not None else _Measured()
    if fold is not None:  # a full that the agent makes stalls nothing
        measured.known["full_stall_s"] = 0.0
    given = {k: measured.known.get(k) if v is None else v for k, v in given.items()}
    record = _plan(given, limits, measured, full_every, batch)
    Output(as_json).show(record, blocks(record))


# ---------------------------------------------------------------- figures


class _Measured(Struct, frozen=True, kw_only=True):
    run: str | None = None
    steps: int = 0
    known: dict[str, float | None] = {}
    restarts: int = 0
    observed_s: float = 0.0


_NEEDED = {
    "state_bytes": "--state", "step_s": "--step", "write_bytes_per_s": "--write",
    "replay_s": "--replay", "delta_bytes": "--delta",
}  # fmt: skip

_ASSUMED = {
    "mtbf_s": "one failure a day (--mtbf)",
    "load_s": "a full is read as fast as it is written (--load)",
    "restart_s": "processes start at once (--restart)",
    "sync_s": "a write takes no longer than its bytes (--sync)",
    "full_stall_s": "fulls hide whole (--full-stall)",
    "batch_stall_s": "writes hide whole (--batch-stall)",
    "record_stall_s": "capture hides whole (--record-stall)",
}


def _measured(path: Path, rank: int) -> _Measured:
    """What a run measured of its steps, and how often it was started again."""
    run = Run.open(path)
    measures = newest_measures(run, rank)
    known = medians(measures)
    known["step_s"] = sum(
        known.pop(name) or 0.0 for name in ("forward_s", "backward_s", "update_s")
    )
    known["full_stall_s"] = sum((m.snapshot_s + m.staging_s) * m.every for m in measures) / len(
        measures
    )
    restarts, observed_s = restarts_of(run, rank)
    return _Measured(
        run=path_text(path), steps=len(measures), known=known, restarts=restarts,
        observed_s=observed_s,
    )  # fmt: skip


def _plan(
    given: dict[str, float | None],
    limits: Limits,
    measured: _Measured,
    full_every: int | None,
    batch: int | None,
) -> DeltasPlan:
    missing = [option for key, option in _NEEDED.items() if given[key] is None]
    if missing:
        raise UsageError(
            f"not known: {', '.join(missing)}",
            hint="everystep plan deltas --help, or --from-run RUN for some of them",
        )
    assumed = [key for key in _ASSUMED if given[key] is None]
    mtbf = None
    if given["mtbf_s"] is None:
        mtbf = estimate_mtbf(measured.restarts, measured.observed_s)
        given["mtbf_s"] = mtbf.mean_s
        if measured.run is not None:
            assumed.remove("mtbf_s")
    write_s = (given["state_bytes"] or 0) / (given["write_bytes_per_s"] or 1)
    filled = {k: (write_s if k == "load_s" else 0.0) if v is None else v for k, v in given.items()}
    costs = Costs(**{**filled, "fold_s": given["fold_s"]})  # type: ignore[arg-type]  # it checks them itself
    choice = choose(costs, limits, full_every=full_every, batch=batch)
    numbers = {"full_every": full_every, "batch": batch}
    fixed = [name for name, number in numbers.items() if number is not None]
    free = first_order(costs)
    return DeltasPlan(
        run=measured.run, measured_steps=measured.steps,
        restarts=measured.restarts if mtbf is not None and measured.run is not None else None,
        mtbf=mtbf, costs=costs, limits=limits, assumed=assumed, fixed=fixed, choice=choice,
        waste=predict(costs, choice.full_every, choice.batch),
        full_every_optimum_steps=_finite(free.full_every_steps),
        batch_optimum_steps=_finite(free.batch_steps),
        paper=_paper(costs), grid=_grid(costs, limits, choice),
    )  # fmt: skip


def _finite(steps: float) -> float | None:
    return steps if steps < math.inf else None


def _paper(costs: Costs) -> PaperChoice | None:
    if costs.replay_s == 0:
        return None
    found = lowdiff.optimum(
        costs.state_bytes, costs.write_bytes_per_s, costs.replay_s, costs.mtbf_s
    )
    return PaperChoice(
        full_every_steps=1 / (found.fulls_per_s * costs.step_s),
        batch_steps=found.batch_s / costs.step_s,
    )


def _grid(costs: Costs, limits: Limits, choice: Choice) -> Grid:
    """The surroundings of the choice, in equal ratios."""
    full_every = _around(choice.full_every, 16, math.sqrt(2))
    batch = [b for b in _around(max(choice.batch, 8), 6, 2.0) if b <= full_every[-1]]
    batch = sorted({*batch, choice.batch})

    def share(f: int, b: int) -> float | None:
        if b > f or broken(costs, limits, f, b) is not None:
            return None
        return predict(costs, f, b).share

    table = [[share(f, b) for f in full_every] for b in batch]
    return Grid(full_every=full_every, batch=batch, wasted_share=table)


def _around(middle: int, places: int, ratio: float) -> list[int]:
    near = {round(middle * ratio**place) for place in range(-places, places + 1)}
    return sorted(n for n in near if 1 <= n <= LONGEST_CHAIN)


# ---------------------------------------------------------------- words


def blocks(record: DeltasPlan) -> Iterator[Block]:
    """The record for people."""
    c, choice = record.costs, record.choice
    if record.run is not None:
        steps = counted(record.measured_steps, "step")
        yield Line(f"from the medians of {steps} that {record.run} measured")
    full_s, batch_s = (spoken_time(n * c.step_s) for n in (choice.full_every, choice.batch))
    fulls = f"a full every {counted(choice.full_every, 'step')} ({full_s})"
    yield Line(f"{fulls}, {counted(choice.batch, 'delta')} per write ({batch_s})", "bold")
    yield from _waste_words(record.waste)
    yield from _why_words(record)
    yield from _failure_words(record)
    yield from _load_words(record)
    if (paper := record.paper) is not None:
        yield Line(
            f"LowDiff's own model (no full hides, batches are merged): a full every "
            f"{paper.full_every_steps:,.0f} steps, {paper.batch_steps:,.0f} deltas per write"
        )
    for name in record.assumed:
        yield Line(f"assumed: {_ASSUMED[name]}", "yellow")
    yield Line("wasted time by deltas per write (up) and steps from full to full (right):")
    grid = record.grid
    chosen = (choice.full_every, choice.batch)
    yield from draw_heat(grid.full_every, grid.batch, grid.wasted_share, chosen)


def _waste_words(w: Waste) -> Iterator[Line]:
    parts = {
        "visible": w.visible_share, "lost work": w.lost_share, "restart": w.restart_share,
        "load": w.load_share, "replay": w.replay_share,
    }  # fmt: skip
    told = ", ".join(f"{what} {share:.3%}" for what, share in parts.items())
    yield Line(f"wasted: {w.share:.3%} of all time ({told})", "green")


def _why_words(record: DeltasPlan) -> Iterator[Line]:
    c, f, b = record.costs, record.choice.full_every, record.choice.batch
    yield Line(_why_fulls(record, f, b))
    yield Line(_why_writes(record, f, b))
    if c.replay_s >= c.step_s:
        yield Line(
            "a replayed step takes no less than a trained one: deltas save no time", "yellow"
        )


def _why_fulls(record: DeltasPlan, f: int, b: int) -> str:
    c, limits = record.costs, record.limits
    if "full_every" in record.fixed:
        return "fulls: as given"
    fewer = f - b if f > b else f - 1
    if fewer and broken(c, limits, fewer, b) == "disk":
        return f"fulls: more often would be more than {limits.disk_share:.0%} of storage's time"
    if fewer and broken(c, limits, fewer, b) == "agent":
        return "fulls: as often as the agent that makes them can fold and write (--fold)"
    if broken(c, limits, f + b, b) == "storage":
        return "fulls: less often, two of them and their deltas would not fit (--storage-budget)"
    if f + b > LONGEST_CHAIN:
        return "fulls: as seldom as may be; a replay takes almost nothing"
    stall, replay = spoken_time(c.full_stall_s), spoken_time(c.replay_s)
    best = _steps(record.full_every_optimum_steps)
    return f"fulls: each costs {stall}, each step since {replay} of replay; closed form: {best}"


def _why_writes(record: DeltasPlan, f: int, b: int) -> str:
    c = record.costs
    if "batch" in record.fixed:
        return "writes: as given"
    if broken(c, record.limits, max(f, b + 1), b + 1) == "memory":
        return "writes: two larger batches would not fit (--memory-budget)"
    if c.batch_stall_s == 0:
        return "writes: they hide, so only a slow store asks for batches"
    if c.host_share == 0:
        return "writes: no failure takes the host, so large batches cost nothing"
    stall, best = spoken_time(c.batch_stall_s), _steps(record.batch_optimum_steps)
    return f"writes: each costs {stall}, half a batch is lost with the host; closed form: {best}"


def _steps(steps: float | None) -> str:
    return "the more the better" if steps is None else f"{steps:,.1f} steps"


def _failure_words(record: DeltasPlan) -> Iterator[Line]:
    c, choice = record.costs, record.choice
    beat = rhythm(c, choice.full_every, choice.batch)
    step_s = beat.cycle_s / choice.full_every
    lost = (beat.batch_steps * step_s / 2 + beat.batch_lag_s) / step_s
    most = math.ceil(min(choice.batch, choice.full_every) + beat.batch_lag_s / step_s)
    recovery_s = c.restart_s + c.load_s + (choice.full_every - 1) / 2 * c.replay_s
    yield Line(
        f"a failure: {spoken_time(recovery_s)} to be back on the mean; with the host "
        f"{lost:.3g} steps are lost on the mean, {most:,} at most"
    )
    mean = spoken_time(c.mtbf_s)
    m = record.mtbf
    if m is None:
        yield Line(f"one every {mean}; {c.host_share:.0%} of them take the host")
        return
    told = f" ({counted(record.restarts, 'restart')} seen)" if record.restarts is not None else ""
    between = f"90 % between {spoken_time(m.low_s)} and {spoken_time(m.high_s)}"
    yield Line(f"one every {mean}, {between}{told}; {c.host_share:.0%} of them take the host")


def _load_words(record: DeltasPlan) -> Iterator[Line]:
    c, w = record.costs, record.waste
    rate = size(math.ceil(c.delta_bytes / c.step_s))
    yield Line(f"storage: busy for {w.disk_share:.1%} of time, deltas {rate}/s")
    kept, memory = size(w.storage_bytes), size(w.memory_bytes)
    yield Line(f"two fulls and their deltas: {kept}; two batches in memory: {memory}")
