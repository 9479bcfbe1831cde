"""`everystep plan shadow`: how often a mirrored step lacks something, and what follows a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, Literal, get_args

import typer
from msgspec import Struct

from everystep.cli.figures import quantity, read_rate, read_seconds, read_size, spoken_time
from everystep.cli.output import Block, Column, Line, Output, Table, size
from everystep.cli.target import AsJson
from everystep.errors import UsageError
from everystep.planning.loss import (
    Host,
    Links,
    Loss,
    Mirror,
    Protocol,
    Sizing,
    Traffic,
    predict,
)
from everystep.planning.loss import size as size_of

EXAMPLE = (
    "Example: everystep plan shadow --parameters 7B --ranks 8 --loss 1e-6 --step 3 "
    "--links both --protocol ll128 --line 25GB/s"
)

SLOTS = {"sgd": 0, "momentum": 1, "adam": 2}
"""Tensors of a parameter's shape that an optimizer keeps."""

KINDS: tuple[Links, ...] = get_args(Links)


class ShadowPlan(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    mirror: Mirror
    traffic: Traffic
    loss_share: float
    step_s: float
    copies: list[int]
    """Of each chunk."""
    loss: Loss
    sizing: Sizing
    others: dict[str, Loss]
    """What other ways to mirror would give, with and without the added step."""


_Count = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][0-9]+)?)\s*([kMBGT]?)\s*")


def shadow(
    parameters: Annotated[str, typer.Option(help="How many.", metavar="COUNT")],
    ranks: Annotated[int, typer.Option(help="In a ring.", metavar="N", min=2)],
    step: Annotated[str, quantity("--step", "Length of a step.", "TIME")],
    loss: Annotated[float, typer.Option(help="Packets that the mirror loses.", min=0, max=1)] = 0,
    links: Annotated[Links, typer.Option(help="What is mirrored.")] = "both",
    added_step: Annotated[
        bool, typer.Option("--added-step", help="The chunk that a link lacks is sent, too.")
    ] = False,
    protocol: Annotated[Protocol, typer.Option(help="Of the collectives.")] = "ll",
    mtu: Annotated[int, typer.Option(help="Payload bytes of a packet.", min=1)] = 4096,
    element: Annotated[int, typer.Option(help="Bytes of a gradient's element.", min=1)] = 4,
    optimizer: Annotated[
        Literal["sgd", "momentum", "adam"], typer.Option(help="For the size of its state.")
    ] = "adam",
    line: Annotated[str, quantity("--line", "Of a training host's port.", "RATE")] = "12.5GB/s",
    port: Annotated[str | None, quantity("--port", "Of a shadow's. As --line.", "RATE")] = None,
    cores: Annotated[int, typer.Option(help="Of a shadow's host.", min=1)] = 32,
    memory: Annotated[str, quantity("--memory", "Of a shadow's host.", "SIZE")] = "256GB",
    decode: Annotated[str, quantity("--decode", "On one core.", "RATE")] = "3GB/s",
    fold: Annotated[str, quantity("--fold", "State, on one core.", "RATE")] = "4GB/s",
    as_json: AsJson = False,
) -> None:
    """How often a step lacks something when packets are lost, and the hosts that follow a run.

    Counts such as 124M or 7B, sizes such as 256GB, rates such as 25GB/s, times such as 1.5 or
    400ms. Loss is per packet and link, each for itself: bursts take copies together.
    """
    count, step_s = read_count("--parameters", parameters), read_seconds("--step", step) or 0.0
    line_rate = read_rate("--line", line) or 0.0
    mirror = Mirror.of(ranks, links, added_step=added_step)
    traffic = Traffic(gradient_bytes=count * element, payload_bytes=mtu, protocol=protocol)
    host = Host(
        cores=cores,
        memory_bytes=read_size("--memory", memory) or 0,
        port_bytes_per_s=read_rate("--port", port) or line_rate,
        decode_bytes_per_s=read_rate("--decode", decode) or 0.0,
        fold_bytes_per_s=read_rate("--fold", fold) or 0.0,
    )
    sizing = size_of(
        mirror,
        traffic,
        state_bytes=4 * count * (1 + SLOTS[optimizer]),
        step_s=step_s,
        link_bytes_per_s=line_rate,
        host=host,
    )
    record = ShadowPlan(
        mirror=mirror,
        traffic=traffic,
        loss_share=loss,
        step_s=step_s,
        copies=mirror.copies,
        loss=predict(mirror, traffic, loss),
        sizing=sizing,
        others=dict(_others(ranks, traffic, loss)),
    )
    Output(as_json).show(record, blocks(record))


def read_count(option: str, text: str) -> int:
    """A number such as `124M` or `7B`.

    Raises:
        UsageError: it is none.
    """
    match = _Count.fullmatch(text)
    units = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
    count = 0.0 if match is None else float(match[1]) * units[match[2]]
    if not 1 <= count <= 1e15:
        raise UsageError(f"{option} {text!r} is not a count", hint=f"{option} 124M")
    return round(count)


def _others(ranks: int, traffic: Traffic, loss: float) -> Iterator[tuple[str, Loss]]:
    for kind in KINDS:
        for added in (False, True):
            if kind == "two-ports" and ranks < 4:
                continue
            name = f"{kind} + added step" if added else kind
            yield name, predict(Mirror.of(ranks, kind, added_step=added), traffic, loss)


# ---------------------------------------------------------------- words


def blocks(record: ShadowPlan) -> Iterator[Block]:
    """The record for people."""
    found = record.loss
    if found.remedy_probability == 0:
        yield Line("the mirror alone shows every step whole", "bold")
    elif found.remedy_probability == 1:
        yield Line("no step is whole from the mirror alone: something must be asked for", "bold")
    else:
        often = f"{found.steps_between:,.3g} steps, {_how_long(found, record.step_s)}"
        yield Line(f"one step in {often}, must be asked for", "bold")
    thin = min(record.copies)
    chunks = sum(copies == thin for copies in record.copies)
    yield Line(f"{chunks} of {record.mirror.ranks} chunks of a step are seen {_times(thin)}")
    rows = [
        [name, f"{other.remedy_probability:.3g}", f"{other.steps_between:,.3g}"]
        for name, other in record.others.items()
    ]
    yield Table(_COLUMNS, rows)
    s = record.sizing
    yield Line(
        f"mirrored per step: {size(round(s.wire_bytes))}, by {s.ports} "
        f"port{'s' if s.ports > 1 else ''} at the shadow"
    )
    yield Line(
        f"{s.decode_cores + s.fold_cores} cores ({s.decode_cores} decode, {s.fold_cores} fold), "
        f"{size(s.memory_bytes)} of memory: {s.hosts} host{'s' if s.hosts > 1 else ''}"
    )


_COLUMNS = [
    Column("mirrored"),
    Column("steps that lack something", right=True),
    Column("one in", right=True),
]


def _how_long(loss: Loss, step_s: float) -> str:
    seconds = loss.steps_between * step_s
    return "never in practice" if not math.isfinite(seconds) else f"once in {spoken_time(seconds)}"


def _times(copies: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(copies, f"{copies} times")
