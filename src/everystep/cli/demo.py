"""`everystep demo`: kill a training job with SIGKILL, and prove that it ends in the same bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from everystep.cli.demo_proof import Kill, Part, Price, compare, cost, price
from everystep.cli.demo_run import RANKS, Job, Strike, aims
from everystep.errors import EverystepError, UsageError

STEPS, QUICK_STEPS = 48, 24
KILLS, QUICK_KILLS = 4, 2
STEPS_PER_KILL = 5  # room for every kill to strike in steps of its own


class Outcome(msgspec.Struct, frozen=True):
    """The record that the command prints."""

    identical: bool
    steps: int
    ranks: int
    seed: int
    kills: list[Kill]
    checkpoints: Price
    parts: dict[str, Part]
    first_difference: str | None
    elapsed_s: float
    folder: str | None
    """where both runs were kept; None if they were removed"""


def demo(
    steps: Annotated[int | None, typer.Option(help="Steps of training.", min=1)] = None,
    kills: Annotated[int | None, typer.Option(help="How often to kill a rank.", min=1)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Fixes training and kills; drawn if not given.", min=0)
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keep both runs in this empty or new directory.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps and kills.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Kill a two-rank training job at random moments; compare it with one left in peace.

    The job trains a small GPT on the source of Python's standard library, with a checkpoint at
    every step. Exit status: 0 if both ended in the same bits, 1 if not.
    """
    if not hasattr(os, "pidfd_open"):
        raise UsageError("the demo needs Linux: it kills by process handles")
    steps = steps or (QUICK_STEPS if quick else STEPS)
    kills = kills or (QUICK_KILLS if quick else KILLS)
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    if steps < STEPS_PER_KILL * kills:
        hint = f"--steps {STEPS_PER_KILL * kills}, or fewer kills"
        raise UsageError(f"{kills} kills need more than {steps} steps", hint=hint)
    console = Console(stderr=as_json, highlight=False)
    with workplace(folder) as (place, keep), sigterm_is_an_exit():
        outcome = prove(place, steps, kills, seed, console)
        if folder is not None or not outcome.identical:
            keep()
            outcome = msgspec.structs.replace(outcome, folder=str(place))
    if as_json:
        sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
    else:
        report(outcome, console)
    raise typer.Exit(0 if outcome.identical else 1)


def prove(place: Path, steps: int, kills: int, seed: int, console: Console) -> Outcome:
    """Run the job in peace, run it again under fire, and compare."""
    began_s = time.monotonic()
    console.print(
        f"A small GPT on {RANKS} ranks, {steps} steps, a checkpoint at every step (seed {seed})."
    )
    with Show(console, steps) as show:
        show.begin("uninterrupted", 0)
        with Job(place / "uninterrupted", steps, seed, restarts=0) as reference:
            reference.follow([], show.at)
        checkpoints = price(reference.events)
        plan = aims(steps, kills, seed, checkpoints.train_s, checkpoints.checkpoint_s)
        show.begin("killed", kills)
        with Job(place / "killed", steps, seed, restarts=kills) as killed:
            strikes = killed.follow(plan, show.at)
    parts, first_difference = compare(reference, killed)
    return Outcome(
        identical=first_difference is None,
        steps=steps,
        ranks=RANKS,
        seed=seed,
        kills=[cost(strike, killed.events) for strike in strikes],
        checkpoints=checkpoints,
        parts=parts,
        first_difference=first_difference,
        elapsed_s=time.monotonic() - began_s,
        folder=None,
    )


@contextmanager
def workplace(folder: Path | None) -> Iterator[tuple[Path, Callable[[], object]]]:
    """A directory to work in, and what keeps it; it is also kept when something fails."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError("the directory is not empty", path=folder, hint="name a new one")
        yield folder.absolute(), lambda: None
        return
    with ExitStack() as cleanup:
        place = Path(tempfile.mkdtemp(prefix="everystep-demo-"))
        cleanup.callback(shutil.rmtree, place)
        try:
            yield place, cleanup.pop_all
        except EverystepError:
            cleanup.pop_all()
            raise


@contextmanager
def sigterm_is_an_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that what was started is ended."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Show:
    """Progress of the runs: bars on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._bars = Progress(
            TextColumn("{task.description:13}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[red]{task.fields[marks]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Show:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def begin(self, name: str, kills: int) -> None:
        """The next run begins."""
        self._name, self._kills, self._told = name, kills, (0, 0)
        self._task = self._bars.add_task(name, total=self._steps, marks="·" * kills)

    def at(self, step: int, strikes: list[Strike]) -> None:
        """All ranks have completed this step, and these kills have been made."""
        told_step, told_strikes = self._told
        if (step, len(strikes)) == self._told:
            return
        if len(strikes) > told_strikes:
            last = strikes[-1]
            self._console.print(
                f"{self._name}: SIGKILL to rank {last.rank} (pid {last.pid}) after step {step}"
            )
        marks = "×" * len(strikes) + "·" * (self._kills - len(strikes))
        self._bars.update(self._task, completed=step, marks=marks)
        quarter = 4 * step // self._steps
        if not self._console.is_terminal and quarter > 4 * told_step // self._steps:
            self._console.print(f"{self._name}: step {step} of {self._steps}")
        self._told = (step, len(strikes))


def report(outcome: Outcome, console: Console) -> None:
    """Print the record as tables and a verdict."""
    table = Table("kill", "rank", "struck while", "steps again", "running again", "of it restore")
    for i, kill in enumerate(outcome.kills, 1):
        table.add_row(
            str(i),
            str(kill.rank),
            f"{kill.phase} step {kill.step}",
            str(kill.repeated_steps),
            f"after {kill.resume_s:.1f} s",
            f"{kill.restore_s:.2f} s",
        )
    console.print(table)
    spent = outcome.checkpoints
    console.print(
        f"Checkpoints: {1e3 * spent.checkpoint_s:.0f} ms beside {1e3 * spent.train_s:.0f} ms of "
        f"training per step ({spent.share:.1%} of all step time), "
        f"{spent.copied_bytes / 1e6:.1f} MB per rank and step."
    )
    table = Table("at the end", "uninterrupted", "killed", "")
    for name, part in outcome.parts.items():
        verdict = "identical" if part.identical else "[red]DIFFERENT"
        table.add_row(name, part.uninterrupted[:16], part.killed[:16], verdict)
    console.print(table)
    kills = f"{len(outcome.kills)} kill{'s' if len(outcome.kills) > 1 else ''}"
    if outcome.identical:
        console.print(f"[bold green]Bit for bit the same after {kills}[/] ", end="")
    else:
        console.print(f"[bold red]Not the same after {kills}[/] ", end="")
        console.print(f"first difference: {outcome.first_difference} ", markup=False, end="")
    console.print(f"({outcome.elapsed_s:.0f} s, --seed {outcome.seed})")
    if outcome.folder is not None:
        console.print(f"Both runs are kept in {outcome.folder}", markup=False)
