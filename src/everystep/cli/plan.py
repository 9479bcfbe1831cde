"""`everystep plan`: what checkpoints will cost, from assumed or measured figures."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

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
from everystep.cli.lanes import WIDTH, draw_lanes
from everystep.cli.output import Block, Line, Output, counted, size
from everystep.cli.plan_auto import EXAMPLE as AUTO_EXAMPLE
from everystep.cli.plan_auto import auto
from everystep.cli.plan_deltas import EXAMPLE as DELTAS_EXAMPLE
from everystep.cli.plan_deltas import deltas
from everystep.cli.plan_shadow import EXAMPLE as SHADOW_EXAMPLE
from everystep.cli.plan_shadow import shadow
from everystep.cli.target import AsJson, path_text
from everystep.errors import StoreError, UsageError
from everystep.planning.hiding import Figures, Verdict, steps_between, verdict
from everystep.planning.simulate import Simulation, Span, simulate
from everystep.store.run import Run

CHUNKS = 200
"""Of a state in the timeline: fine enough to draw."""

DRAWN_STEPS = 256
"""Checkpoints that are farther apart are not simulated."""


class Timeline(Struct, frozen=True, kw_only=True):
    """Steady steps as they were simulated."""

    start_s: float
    stop_s: float
    step_ends_s: list[float]
    spans: list[Span]
    """Lane, start and stop in seconds since training began."""


class FullPlan(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    run: str | None
    """Whose measurements were used."""
    measured_steps: int
    figures: Figures
    assumed: list[str]
    """Figures that were neither given nor measured."""
    verdict: Verdict
    timeline: Timeline | None
    """None where checkpoints are more than `DRAWN_STEPS` apart."""


plan = typer.Typer()
plan.command("auto", epilog=AUTO_EXAMPLE)(auto)
plan.command("deltas", epilog=DELTAS_EXAMPLE)(deltas)
plan.command("shadow", epilog=SHADOW_EXAMPLE)(shadow)


@plan.callback(invoke_without_command=True)
def _plan(context: typer.Context) -> None:
    """Say what checkpoints will cost, from assumed figures or from those that a run measured."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit(2)


@plan.command(
    "full", epilog="Example: everystep plan full --state 26GB --forward 0.4 --backward 0.8 "
    "--update 0.05 --d2h 25GB/s --d2d 1.2TB/s --storage 2GB/s --activations 10GB"
)  # fmt: skip
def full(
    state: Annotated[str | None, quantity("--state", "State of one rank.", "SIZE")] = None,
    forward: Annotated[str | None, quantity("--forward", "Forward of a step.", "TIME")] = None,
    backward: Annotated[str | None, quantity("--backward", "Backward of a step.", "TIME")] = None,
    update: Annotated[str | None, quantity("--update", "Optimizer's step.", "TIME")] = None,
    d2h: Annotated[str | None, quantity("--d2h", "Device to host.", "RATE")] = None,
    d2d: Annotated[
        str | None, quantity("--d2d", "Within the device. Default: as --d2h.", "RATE")
    ] = None,
    storage: Annotated[str | None, quantity("--storage", "To the store.", "RATE")] = None,
    activations: Annotated[
        str | None, quantity("--activations", "Memory that backward frees. Default: 0.", "SIZE")
    ] = None,
    cpu: Annotated[
        bool | None, typer.Option("--cpu/--device", help="Train in host memory.")
    ] = None,
    policy: Annotated[
        Literal["skip", "block"], typer.Option(help="Where storage is too slow.")
    ] = "skip",
    every: Annotated[
        int | None, typer.Option(help="A checkpoint at every N steps.", metavar="N", min=1)
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option(help="Take what this run measured.", metavar="RUN")
    ] = None,
    rank: Annotated[int, typer.Option(help="Whose measurements.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Full checkpoints: what each step loses, which steps are durable, how much memory it takes.

    Sizes such as 26GB or 24GiB, rates such as 25GB/s, times such as 0.4, 0.4s or 400ms. Options
    that are given count more than what a run measured.
    """
    given: dict[str, float | None] = {
        "state_bytes": read_size("--state", state),
        "forward_s": read_seconds("--forward", forward),
        "backward_s": read_seconds("--backward", backward),
        "update_s": read_seconds("--update", update),
        "offload_bytes_per_s": read_rate("--d2h", d2h),
        "snapshot_bytes_per_s": read_rate("--d2d", d2d),
        "write_bytes_per_s": read_rate("--storage", storage),
        "activation_bytes": read_size("--activations", activations),
        "on_device": None if cpu is None else not cpu,
    }
    name, steps = None, 0
    if from_run is not None:
        name = path_text(from_run)
        run = Run.open(from_run)
        measures = newest_measures(run, rank)
        steps = len(measures)
        known = medians(measures) | {"on_device": _on_device(run, rank)}
        given = {key: known.get(key) if value is None else value for key, value in given.items()}
    figures, assumed = _figures(given)
    found = verdict(figures, policy, every)
    timeline = _steady(_simulate(figures, found), found) if found.every <= DRAWN_STEPS else None
    record = FullPlan(
        run=name, measured_steps=steps, figures=figures, assumed=assumed, verdict=found,
        timeline=timeline,
    )  # fmt: skip
    Output(as_json).show(record, blocks(record))


# ---------------------------------------------------------------- figures


_NEEDED = {
    "state_bytes": "--state", "forward_s": "--forward", "backward_s": "--backward",
    "update_s": "--update", "offload_bytes_per_s": "--d2h", "write_bytes_per_s": "--storage",
}  # fmt: skip


def _figures(given: dict[str, float | None]) -> tuple[Figures, list[str]]:
    """The figures, and the names of those that stand in for unknown ones."""
    missing = [option for key, option in _NEEDED.items() if given[key] is None]
    if missing:
        raise UsageError(
            f"not known: {', '.join(missing)}", hint="everystep plan full --help, or --from-run RUN"
        )
    stand_ins: dict[str, float | None] = {
        "on_device": True,
        "snapshot_bytes_per_s": given["offload_bytes_per_s"],
        "activation_bytes": 0,
    }
    assumed = [key for key in _ASSUMED if given[key] is None]
    filled = {key: stand_ins[key] if value is None else value for key, value in given.items()}
    return Figures(**filled), assumed  # type: ignore[arg-type]  # it checks them itself


def _on_device(run: Run, rank: int) -> bool | None:
    """Whether any tensor of the newest step lived outside host memory; None: no record says."""
    entries = [e for e in run.listing().complete().values() if rank < e.world_size]
    if not entries:
        return None
    newest = max(entries, key=lambda entry: (entry.session, entry.ref.step))
    try:
        tensors = run.record(newest, rank).tensors
    except StoreError:
        return None
    return any(stored.spec.device != "cpu" for stored in tensors)


# ---------------------------------------------------------------- the timeline


def _simulate(figures: Figures, found: Verdict) -> Simulation:
    steps = 6 * found.every + 2
    chunk_bytes = -(-figures.state_bytes // CHUNKS)
    return simulate(figures, steps, chunk_bytes=chunk_bytes, policy=found.policy, every=found.every)


def _steady(simulation: Simulation, found: Verdict) -> Timeline:
    """Two steps in the steady state, the first of them after a checkpoint."""
    first = 5 * found.every
    shown = simulation.steps[first : first + 2]
    start_s, stop_s = shown[0].start_s, shown[-1].end_s
    return Timeline(
        start_s=start_s,
        stop_s=stop_s,
        step_ends_s=[step.end_s for step in shown],
        spans=[s for s in simulation.spans if s.stop_s > start_s and s.start_s < stop_s],
    )


# ---------------------------------------------------------------- words


def _size(nbytes: float) -> str:
    return size(math.ceil(nbytes))


def _count(number: float, noun: str) -> str:
    return counted(int(number), noun) if number == int(number) else f"{number:.3g} {noun}s"


def _each(steps: float) -> str:
    return "every step" if steps == 1 else f"every {_count(steps, 'step')}"


def blocks(record: FullPlan) -> Iterator[Block]:
    """The record for people."""
    v, f = record.verdict, record.figures
    if record.run is not None:
        steps = counted(record.measured_steps, "step")
        yield Line(f"from the medians of {steps} that {record.run} measured")
    compute_s = f.forward_s + f.backward_s + f.update_s
    often = f"{_each(v.every)} of {spoken_time(compute_s)}"
    yield Line(f"a checkpoint of {_size(f.state_bytes)} {often}", "bold")
    yield from _stall_words(v, f)
    yield from _memory_words(v, f, record.assumed)
    yield from _durable_words(v, f)
    if record.assumed:
        yield Line(f"assumed: {', '.join(_ASSUMED[name] for name in record.assumed)}", "yellow")
    t = record.timeline
    if t is None:
        return
    width = WIDTH
    if sys.stdout.isatty():
        width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    yield Line("two steps in the steady state, each ends at |:")
    yield from draw_lanes(
        t.spans, t.start_s, t.stop_s, marks_s=t.step_ends_s, width=width, spoken=spoken_time
    )


_ASSUMED = {
    "snapshot_bytes_per_s": "the device copies no faster than the link (--d2d)",
    "activation_bytes": "backward frees nothing (--activations)",
}


def _stall_words(v: Verdict, f: Figures) -> Iterator[Line]:
    window_s = f.forward_s + f.backward_s
    compute_s = window_s + f.update_s
    needed = steps_between(f.state_bytes, compute_s, f.offload_bytes_per_s)
    lost = f"each step loses {spoken_time(v.stall_share * v.step_s)} ({v.stall_share:.2%})"
    if v.hidden:
        spare = window_s - v.hides_at_window_s
        used, window = spoken_time(v.hides_at_window_s), spoken_time(window_s)
        words = f"{used} of the {window} of forward and backward, {spoken_time(spare)} to spare"
        yield Line(f"hidden whole: it leaves in {words}", "green")
        yield Line("each step loses nothing")
        return
    parts = f"{spoken_time(v.snapshot_s)} to snapshot {_size(v.snapshot_bytes)}"
    if v.staging_s:
        parts += f", {spoken_time(v.staging_s)} waiting for storage"
    mean = " on the mean" if v.every > 1 else ""
    yield Line(f"{lost}{mean}: {parts}" + (" per checkpoint" if v.every > 1 else ""), "yellow")
    if v.staging_s == 0 or f.offload_bytes_per_s < v.hides_at_offload_bytes_per_s:
        yield Line(
            f"to hide whole: {spoken_time(v.hides_at_window_s)} of forward and backward "
            f"(now {spoken_time(window_s)}), or {_size(v.hides_at_offload_bytes_per_s)}/s to the "
            f"host (now {_size(f.offload_bytes_per_s)}/s)"
        )
    if needed > 1:
        yield Line(
            f"a checkpoint has the link to the host for as long as {needed:,} steps compute; "
            f"one is taken {_each(v.every)}"
        )


def _memory_words(v: Verdict, f: Figures, assumed: list[str]) -> Iterator[Line]:
    if not f.on_device:
        yield Line("extra device memory: none, training runs in host memory")
    elif v.hidden:
        yield Line("extra device memory: none")
    elif "snapshot_bytes_per_s" in assumed:
        yield Line(f"extra device memory: at most {_size(v.snapshot_bytes)}")
    elif v.extra_peak_bytes == 0:
        held = _size(v.snapshot_bytes)
        yield Line(f"extra device memory: none at the peak, {held} fit where activations were")
    else:
        unknown = ", less what backward frees" if "activation_bytes" in assumed else ""
        yield Line(f"extra device memory: {_size(v.extra_peak_bytes)} at the peak{unknown}")
    states = "three" if v.policy == "skip" else "two"
    yield Line(f"host memory for staging: {_size(v.staging_bytes)}, {states} states")


def _durable_words(v: Verdict, f: Figures) -> Iterator[Line]:
    yield Line(f"staged {spoken_time(v.staged_s)} after its step ends")
    steps = math.ceil(v.host_loss_s / v.step_s)
    loss = f"with the host at most {counted(steps, 'step')} are lost"
    if v.durable_every_steps == v.every:
        yield Line(f"durable: {_each(v.every)}; {loss}")
    else:
        mean = f"every {_count(v.durable_every_steps, 'step')} on the mean"
        if v.durable_every_steps == v.durable_gap_steps:
            mean = _each(v.durable_every_steps)
        yield Line(f"durable: {mean}, {v.durable_gap_steps:,} at most; {loss}", "yellow")
    if f.write_bytes_per_s < v.durable_at_write_bytes_per_s:
        what = "for every checkpoint to be durable" if v.policy == "skip" else "to wait for nothing"
        need, now = _size(v.durable_at_write_bytes_per_s), _size(f.write_bytes_per_s)
        yield Line(f"{what}: {need}/s to storage (now {now}/s)")
