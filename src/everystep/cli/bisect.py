"""`everystep bisect`: find the first bad step, by running a command on exported states."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from msgspec import Struct

from everystep.cli.export import Format, Order, write
from everystep.cli.ls import metrics_of_step
from everystep.cli.output import (
    Block,
    Column,
    Line,
    Output,
    Table,
    counted,
    number,
    plain,
    spoken_value,
    tell,
)
from everystep.cli.target import AsJson, RunPath, parse_step, path_text
from everystep.errors import (
    Damaged,
    EverystepError,
    Missing,
    NothingToRestore,
    ReplicasDiffer,
    StoreError,
    UsageError,
)
from everystep.recovery.plan import plan_restore
from everystep.store.chains import Chain, Chains, plan_chains
from everystep.store.run import Run
from everystep.types import StepRef

SKIP = 125
"""The exit status that says nothing about a step, as for `git bisect run`."""

LAST_BAD = 127
"""A greater one, or a signal, ends the search."""

Said = Literal["good", "bad", "skip"]

_CONDITION = re.compile(r"\s*(.+?)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*")

_SUFFIXES: dict[Format, str] = {"safetensors": ".safetensors", "pt": ".pt", "dcp": ""}


class Trial(Struct, frozen=True, kw_only=True):
    """One step that was looked at."""

    step: str
    result: Said
    status: int | None
    """Of the command; null: a metric was looked at, or the step is damaged."""
    value: float | str | None
    """Of the metric; null: a command was run, or the step has no such number."""


class Bisected(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    path: str
    good: str
    bad: str
    steps: int
    """That can be had, after the good one and up to the bad one."""
    first_bad: str | None
    """null: skipped steps hide it."""
    candidates: list[str]
    """The steps of which one is the first bad one; one, where it was found."""
    trials: list[Trial]
    """In order."""


Judge = Callable[[Chain], Trial]


class _Range(NamedTuple):
    """Where to search."""

    chains: Chains
    good: StepRef
    refs: list[StepRef]
    """Every step that can be had after the good one, up to the bad one."""

    def chain(self, ref: StepRef) -> Chain:
        """How a step is had.

        Raises:
            NothingToRestore: it is not.
        """
        chain = self.chains.to(ref.step)
        if chain is None:
            raise NothingToRestore(f"step {ref} cannot be had")
        return chain


def bisect(
    run: RunPath,
    good: Annotated[str, typer.Option("--good", metavar="A", help="A step that is good.")],
    bad: Annotated[str, typer.Option("--bad", metavar="B", help="A later step that is bad.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            help="Run on each step; {} in it becomes the path (else the path is appended).",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="CONDITION",
            help="Instead of a command: bad is where it holds, as in 'loss>3.5', or is no number.",
        ),
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="In which form a step is exported.")
    ] = "safetensors",
    check: Annotated[
        bool, typer.Option("--check", help="Look at A and B first, and refuse if they are not so.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find the first bad step by halves, as git bisect does.

    The command is run with the path of an exported step, and EVERYSTEP_STEP in its environment.
    Its exit status says: 0 good; 1 to 124, 126 and 127 bad; 125 skip this step; anything else ends
    the search. Exit status: 0 if the first bad step was found, 1 if skipped steps hide it.
    """
    if (not command) == (metric is None):
        raise UsageError(
            "give either a command or --metric",
            hint="everystep bisect RUN --good A --bad B -- COMMAND",
        )
    judged = _by_command(command or [], form, as_json) if metric is None else _by_metric(metric)
    opened = Run.open(run)
    where = _range(opened, good, bad)

    def judge(chain: Chain) -> Trial:
        return judged(opened, chain)

    trials = _check(where, judge) if check else []
    found = search(where, judge, trials)
    report = Bisected(
        path=path_text(run),
        good=str(where.good),
        bad=str(where.refs[-1]),
        steps=len(where.refs),
        first_bad=str(found[0]) if len(found) == 1 else None,
        candidates=[str(ref) for ref in found],
        trials=trials,
    )
    Output(as_json).show(report, blocks(report))
    raise typer.Exit(0 if report.first_bad is not None else 1)


# ---------------------------------------------------------------- the search


def _range(run: Run, good: str, bad: str) -> _Range:
    """The steps to search, on the line that leads to the bad one.

    Raises:
        NothingToRestore: one of both cannot be had.
        UsageError: the good one is not before the bad one.
    """
    listing = run.listing()
    segments = run.segments(listing)
    last = plan_restore(listing, segments, parse_step(bad)).chain
    wanted = parse_step(good)
    if last is None:
        raise NothingToRestore(f"step {bad} cannot be had")
    name = bad.rpartition(":")[0] or listing.current_timeline()
    chains = plan_chains(listing, segments, name)
    if isinstance(wanted, StepRef):
        first = next((ref for ref in chains.refs if ref == wanted), None)
    else:
        first = next((ref for ref in chains.refs if ref.step == wanted), None)
    if first is None:
        plan_restore(listing, segments, wanted)  # raises, if it cannot be had at all
        raise UsageError(f"step {good} is not on the line that leads to {last.ref}")
    if first.step >= last.ref.step:
        raise UsageError(
            f"step {first} is not before {last.ref}", hint="--good must be the earlier step"
        )
    refs = [ref for ref in chains.refs if first.step < ref.step <= last.ref.step]
    return _Range(chains, first, refs)


def search(where: _Range, judge: Judge, trials: list[Trial]) -> list[StepRef]:
    """Find the first bad step; of n steps in at most `ceil(log2(n))` trials, besides skipped ones.

    Args:
        where: the steps; the last of them is bad, and the one before the first is good.
        judge: looks at a step.
        trials: what was looked at is appended.

    Returns:
        The steps of which one is the first bad one: one, unless those before it were skipped.
    """
    candidates = list(where.refs)  # the first bad one is among them; the last of them is bad
    skipped: set[StepRef] = set()
    while True:
        untried = [i for i, ref in enumerate(candidates[:-1]) if ref not in skipped]
        if not untried:
            return candidates
        middle = untried[len(untried) // 2]
        trial = judge(where.chain(candidates[middle]))
        trials.append(trial)
        if sys.stderr.isatty():
            tell(f"{trial.step}: {trial.result} ({_left(candidates, middle, trial)})")
        if trial.result == "skip":
            skipped.add(candidates[middle])
        elif trial.result == "bad":
            candidates = candidates[: middle + 1]
        else:
            candidates = candidates[middle + 1 :]


def _left(candidates: Sequence[StepRef], middle: int, trial: Trial) -> str:
    kept = {"bad": middle + 1, "good": len(candidates) - middle - 1, "skip": len(candidates)}
    return f"{counted(kept[trial.result], 'step')} left"


def _check(where: _Range, judge: Judge) -> list[Trial]:
    """Look at both ends.

    Raises:
        UsageError: one is not what it is said to be.
    """
    trials: list[Trial] = []
    for ref, expected in ((where.good, "good"), (where.refs[-1], "bad")):
        trial = judge(where.chain(ref))
        trials.append(trial)
        if trial.result != expected:
            raise UsageError(f"step {ref} is not {expected}", expected=expected, found=trial.result)
    return trials


# ---------------------------------------------------------------- looking at a step


def _by_command(
    command: Sequence[str], form: Format, as_json: bool
) -> Callable[[Run, Chain], Trial]:
    """Run a command on the exported step; one that is damaged is skipped."""

    def judge(run: Run, chain: Chain) -> Trial:
        ref = chain.ref
        with tempfile.TemporaryDirectory(prefix="everystep-bisect-") as place:
            target = Path(place) / f"step{ref.step}{_SUFFIXES[form]}"
            try:
                write(Order(run, chain, 0, lambda nbytes: None), form, target)
            except (Damaged, Missing, ReplicasDiffer) as error:
                tell(f"{ref} cannot be used: {error.headline()}")
                return Trial(step=str(ref), result="skip", status=None, value=None)
            status = _status(command, target, ref, as_json)
        result: Said = "good" if status == 0 else "skip" if status == SKIP else "bad"
        return Trial(step=str(ref), result=result, status=status, value=None)

    return judge


def _status(command: Sequence[str], target: Path, ref: StepRef, as_json: bool) -> int:
    """Run the command; returns an exit status that says something.

    Raises:
        UsageError: it cannot be run.
        EverystepError: it ended in a way that says nothing about the step.
    """
    words = [word.replace("{}", str(target)) for word in command]
    if words == list(command):
        words.append(str(target))
    environment = os.environ | {"EVERYSTEP_STEP": str(ref)}
    try:  # with --json standard output is for the one object
        done = subprocess.run(words, env=environment, stdout=2 if as_json else None, check=False)
    except OSError as error:
        raise UsageError(f"cannot run {words[0]!r}: {error.strerror}") from error
    status = done.returncode
    if not 0 <= status <= LAST_BAD:
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        raise EverystepError(
            f"the command ended with {how}, which says nothing about the step", step=ref,
            hint=f"0: good; 1 to {LAST_BAD}: bad; {SKIP}: skip",
        )  # fmt: skip
    return status


def _by_metric(condition: str) -> Callable[[Run, Chain], Trial]:
    """Look at what was recorded with a step.

    Raises:
        UsageError: it is no condition.
    """
    match = _CONDITION.fullmatch(condition)
    limit = None
    if match is not None:
        with suppress(ValueError):
            limit = float(match[3])
    if match is None or limit is None:
        raise UsageError(f"--metric {condition!r} is no condition", hint="--metric 'loss>3.5'")
    name, operator, bound = match[1], match[2], limit
    holds: dict[str, Callable[[float], bool]] = {
        ">": lambda value: value > bound,
        "<": lambda value: value < bound,
        ">=": lambda value: value >= bound,
        "<=": lambda value: value <= bound,
    }

    def judge(run: Run, chain: Chain) -> Trial:
        try:
            recorded = plain(metrics_of_step(run, chain)).get(name)
            value = float(recorded) if not isinstance(recorded, bool) else None
        except (StoreError, TypeError, ValueError, OverflowError):
            value = None
        result: Said = "skip"
        if value is not None:
            result = "bad" if math.isnan(value) or holds[operator](value) else "good"
        shown = None if value is None else number(value)
        return Trial(step=str(chain.ref), result=result, status=None, value=shown)

    return judge


# ---------------------------------------------------------------- words


def blocks(report: Bisected) -> Iterator[Block]:
    """The record for people."""
    columns = [Column("step"), Column("result"), Column("status", True), Column("value", True)]
    rows = [
        [
            trial.step,
            trial.result,
            "" if trial.status is None else str(trial.status),
            "" if trial.value is None else spoken_value(trial.value),
        ]
        for trial in report.trials
    ]
    if rows:
        yield Table(columns, rows)
    looked = f"{counted(len(report.trials), 'run')} for {counted(report.steps, 'step')}"
    if report.first_bad is not None:
        yield Line(f"{report.first_bad} is the first bad step ({looked})", "bold green")
        return
    yield Line(
        f"the first bad step is one of {', '.join(report.candidates)} ({looked})", "bold red"
    )
