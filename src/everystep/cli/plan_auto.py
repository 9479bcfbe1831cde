"""`everystep plan auto`: which strategy wastes the least time, and why."""

from __future__ import annotations

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
from everystep.cli.output import Block, Column, Line, Output, Table, counted, size
from everystep.cli.target import AsJson, path_text
from everystep.errors import UsageError
from everystep.planning.choosing import LEAST, MARGIN, Name, Prediction, Verdict, choose
from everystep.planning.facts import FOLD_BYTES_PER_S, HOST_SHARE, Facts
from everystep.planning.failures import Mtbf, estimate_mtbf
from everystep.store.restarts import restarts_of
from everystep.store.run import Run

EXAMPLE = (
    "Example: everystep plan auto --state 26GB --step 1.2 --d2h 25GB/s --write 2GB/s "
    "--delta 90MB --fold 300ms --mtbf 3h"
)

UPDATE_SHARE = 0.05
"""Of a step, the optimizer's, where it is not known."""


class AutoPlan(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    run: str | None
    """Whose measurements were used."""
    measured_steps: int
    mtbf: Mtbf | None
    """Where it was estimated."""
    facts: Facts
    assumed: list[str]
    """Figures that were neither given nor measured."""
    verdict: Verdict


_State = Annotated[str | None, quantity("--state", "Of one rank.", "SIZE")]
_Step = Annotated[str | None, quantity("--step", "Length of a step.", "TIME")]
_Update = Annotated[str | None, quantity("--update", "Optimizer's step.", "TIME")]
_Gradients = Annotated[str | None, quantity("--gradients", "Of one step.", "SIZE")]
_Delta = Annotated[str | None, quantity("--delta", "Of one step, if compressed.", "SIZE")]
_D2h = Annotated[str | None, quantity("--d2h", "Device to host.", "RATE")]
_D2d = Annotated[str | None, quantity("--d2d", "Within the device. Default: as --d2h.", "RATE")]
_Write = Annotated[str | None, quantity("--write", "To the store.", "RATE")]
_Sync = Annotated[str | None, quantity("--sync", "Of each write, besides its bytes.", "TIME")]
_Fold = Annotated[str | None, quantity("--fold", "One step, from its gradients.", "TIME")]
_RecordStall = Annotated[str | None, quantity("--record-stall", "Stall of a capture.", "TIME")]
_Load = Annotated[str | None, quantity("--load", "Of a full. Default: as its write.", "TIME")]
_Restart = Annotated[str | None, quantity("--restart", "Until processes run again.", "TIME")]
_Mtbf = Annotated[str | None, quantity("--mtbf", "Between failures.", "TIME")]
_HostShare = Annotated[
    float | None, typer.Option(help="Failures that take the host.", min=0, max=1)
]
_Memory = Annotated[str | None, quantity("--memory", "Of the host, for one rank.", "SIZE")]
_Cpu = Annotated[bool, typer.Option("--cpu/--device", help="Train in host memory.")]
_Ranks = Annotated[int, typer.Option(help="How many.", metavar="N", min=1)]
_Unrepeatable = Annotated[
    str | None, typer.Option(help="Why steps cannot be done again.", metavar="WHY")
]
_Now = Annotated[str | None, typer.Option(help="The strategy in use.", metavar="STRATEGY")]
_FromRun = Annotated[Path | None, typer.Option(help="Take what this run measured.", metavar="RUN")]
_Rank = Annotated[int, typer.Option(help="Whose measurements.", min=0)]


def auto(
    state: _State = None,
    step: _Step = None,
    update: _Update = None,
    gradients: _Gradients = None,
    delta: _Delta = None,
    d2h: _D2h = None,
    d2d: _D2d = None,
    write: _Write = None,
    sync: _Sync = None,
    fold: _Fold = None,
    record_stall: _RecordStall = None,
    load: _Load = None,
    restart: _Restart = None,
    mtbf: _Mtbf = None,
    host_share: _HostShare = None,
    memory: _Memory = None,
    cpu: _Cpu = False,
    ranks: _Ranks = 1,
    unrepeatable: _Unrepeatable = None,
    now: _Now = None,
    from_run: _FromRun = None,
    rank: _Rank = 0,
    as_json: AsJson = False,
) -> None:
    """Which strategy wastes the least time: full checkpoints, deltas or a replica, and why.

    Sizes such as 26GB or 24GiB, rates such as 25GB/s, times such as 0.4, 400ms or 3h. Options that
    are given count more than what a run measured.
    """
    given: dict[str, float | None] = {
        "state_bytes": read_size("--state", state), "step_s": read_seconds("--step", step),
        "update_s": read_seconds("--update", update),
        "gradient_bytes": read_size("--gradients", gradients),
        "delta_bytes": read_size("--delta", delta),
        "offload_bytes_per_s": read_rate("--d2h", d2h),
        "snapshot_bytes_per_s": read_rate("--d2d", d2d),
        "write_bytes_per_s": read_rate("--write", write), "sync_s": read_seconds("--sync", sync),
        "fold_s": read_seconds("--fold", fold),
        "record_stall_s": read_seconds("--record-stall", record_stall),
        "load_s": read_seconds("--load", load), "restart_s": read_seconds("--restart", restart),
        "mtbf_s": read_seconds("--mtbf", mtbf), "host_share": host_share,
        "host_memory_bytes": read_size("--memory", memory),
    }  # fmt: skip
    name, steps, failed = None, 0, estimate_mtbf(0, 0.0)
    if from_run is not None:
        name, run = path_text(from_run), Run.open(from_run)
        measures = newest_measures(run, rank)
        steps, failed = len(measures), estimate_mtbf(*restarts_of(run, rank))
        given = _known(medians(measures), given)
    filled, assumed = _facts(given, failed, measured=name is not None)
    excluded = {} if unrepeatable is None else dict.fromkeys(("deltas", "replica"), unrepeatable)
    more = {"on_device": not cpu, "world_size": ranks, "excluded": excluded}
    facts = Facts(**filled, **more)  # type: ignore[arg-type]  # it checks them itself
    record = AutoPlan(
        run=name, measured_steps=steps, mtbf=failed if given["mtbf_s"] is None else None,
        facts=facts, assumed=assumed, verdict=choose(facts, _strategy(now)),
    )  # fmt: skip
    Output(as_json).show(record, blocks(record))


# ---------------------------------------------------------------- figures


_NEEDED = {
    "state_bytes": "--state", "step_s": "--step", "offload_bytes_per_s": "--d2h",
    "write_bytes_per_s": "--write",
}  # fmt: skip

_ASSUMED = {
    "mtbf_s": "one failure a day (--mtbf)",
    "host_share": f"{HOST_SHARE:.0%} of failures take the host (--host-share)",
    "gradient_bytes": "gradients are a third of the state, as with Adam (--gradients)",
    "update_s": f"{UPDATE_SHARE:.0%} of a step are the optimizer's (--update)",
    "snapshot_bytes_per_s": "the device copies no faster than the link (--d2d)",
    "fold_s": f"a step is done again at {FOLD_BYTES_PER_S / 1e9:g} GB/s of state (--fold)",
    "record_stall_s": "a record is copied within the device (--record-stall)",
    "load_s": "a full is read as fast as it is written (--load)",
    "restart_s": "processes start at once (--restart)",
    "sync_s": "a write takes no longer than its bytes (--sync)",
    "host_memory_bytes": "host memory has room for all (--memory)",
}


def _known(
    measured: dict[str, float | None], given: dict[str, float | None]
) -> dict[str, float | None]:
    """What was given and, where nothing was, measured."""
    parts = [measured.get(name) for name in ("forward_s", "backward_s", "update_s")]
    if None not in parts:
        measured["step_s"] = sum(part or 0.0 for part in parts)
    return {key: measured.get(key) if value is None else value for key, value in given.items()}


def _facts(
    given: dict[str, float | None], failed: Mtbf, *, measured: bool
) -> tuple[dict[str, float | None], list[str]]:
    """The figures, and the names of those that stand in for unknown ones."""
    missing = [option for key, option in _NEEDED.items() if given[key] is None]
    if missing:
        raise UsageError(
            f"not known: {', '.join(missing)}",
            hint="everystep plan auto --help, or --from-run RUN for some of them",
        )
    state, step_s = given["state_bytes"] or 0, given["step_s"] or 0
    stand_ins = {
        "mtbf_s": failed.mean_s, "host_share": HOST_SHARE, "gradient_bytes": -(-state // 3),
        "update_s": UPDATE_SHARE * step_s, "snapshot_bytes_per_s": given["offload_bytes_per_s"],
        "restart_s": 0.0, "sync_s": 0.0,
    }  # fmt: skip
    assumed = [key for key in _ASSUMED if given[key] is None]
    if measured and "mtbf_s" in assumed:
        assumed.remove("mtbf_s")
    filled = {k: stand_ins.get(k) if v is None else v for k, v in given.items() if k != "step_s"}
    filled["window_s"] = step_s - (filled["update_s"] or 0)
    return filled, assumed


def _strategy(now: str | None) -> Name | None:
    names: dict[str, Name] = {"full": "full", "deltas": "deltas", "replica": "replica"}
    if now is not None and now not in names:
        raise UsageError(f"--now {now!r} is no strategy", hint="--now full, deltas or replica")
    return None if now is None else names[now]


# ---------------------------------------------------------------- words


def blocks(record: AutoPlan) -> Iterator[Block]:
    """The record for people."""
    f, v = record.facts, record.verdict
    if record.run is not None:
        steps = counted(record.measured_steps, "step")
        yield Line(f"from the medians of {steps} that {record.run} measured")
    yield Line(v.reason, "bold")
    yield Table(_COLUMNS, [_row(name, found) for name, found in v.predicted.items()])
    for strategy, found in v.predicted.items():
        if found.impossible is not None:
            yield Line(f"{strategy} is not possible: {found.impossible}", "yellow")
    often = f"one failure every {spoken_time(f.mtbf_s)}"
    yield Line(f"{often}; {f.host_share:.0%} of them take the host")
    yield Line(
        f"a strategy in use is left where another saves {MARGIN:.0%} of its waste, and "
        f"{LEAST:.2%} of all time (--now)"
    )
    for name in record.assumed:
        yield Line(f"assumed: {_ASSUMED[name]}", "yellow")


_COLUMNS = [
    Column("strategy"), Column("wasted", right=True), Column("stalls", right=True),
    Column("processes fail", right=True), Column("hosts fail", right=True),
    Column("every", right=True), Column("per write", right=True),
    Column("host memory", right=True), Column("lost with the host", right=True),
]  # fmt: skip


def _row(name: Name, found: Prediction) -> list[str]:
    if found.impossible is not None:
        return [name, "not possible", *[""] * 7]
    shares = (
        found.wasted_share, found.visible_share, found.process_share, found.host_share,
    )  # fmt: skip
    return [
        name,
        *(f"{share:.3%}" for share in shares),
        counted(found.every or 1, "step"),
        "" if found.batch is None else counted(found.batch, "delta"),
        size(found.memory_bytes),
        spoken_time(found.host_loss_s),
    ]
