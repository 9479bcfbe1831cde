"""`everystep show`: everything that is recorded about one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from msgspec import Struct

from everystep.cli.output import Block, Column, Line, Output, Table, counted, plain, size
from everystep.cli.output import spoken_value as spoken
from everystep.cli.target import (
    STYLES,
    AsJson,
    RunPath,
    SessionRow,
    State,
    StepText,
    Stored,
    any_step,
    path_text,
    session_row,
    state_of,
)
from everystep.recovery.stretches import line_of
from everystep.state.form import check_form
from everystep.store import format as fmt
from everystep.store.chains import Chain, Link
from everystep.store.format import RankRecord, StoredTensor
from everystep.store.run import Listing, Run, StepEntry
from everystep.types import Json, Shard, StepRef, join_key


class FileRow(Struct, frozen=True, kw_only=True):
    """One file of the step."""

    path: str
    size_bytes: int
    rank: int


class TensorRow(Struct, frozen=True, kw_only=True):
    """One tensor as the rank holds it."""

    key: str
    dtype: str
    shape: list[int]
    """Of this rank's part, where it is sharded."""
    shard: Shard | None
    replicated: bool
    nbytes: int
    xxh3_128: str


class ModelRow(Struct, frozen=True, kw_only=True):
    """Parameters and buffers of one model, as the rank holds them."""

    model: str
    tensors: int
    elements: int
    size_bytes: int
    aliases: dict[str, str]
    """Further names of tied tensors."""
    frozen: list[str]


class GroupRow(Struct, frozen=True, kw_only=True):
    """One parameter group of an optimizer."""

    optimizer: str
    class_name: str
    group: int
    parameters: int
    options: dict[str, Json]
    """Hyperparameters."""


class StepReport(Struct, frozen=True, kw_only=True):
    """The record that the command prints."""

    path: str
    run: str
    step: str
    state: State
    stored: Stored
    folded_from: str | None
    """The full checkpoint on which the deltas up to this step are folded; null: it has its own."""
    deltas: int
    """How many steps are folded."""
    timeline: str
    parent: str | None
    """The step that the timeline was forked from."""
    rank: int
    world_size: int
    missing_ranks: list[int]
    created: str | None
    """null: deltas do not say."""
    metrics: dict[str, Json]
    versions: dict[str, str]
    session: int
    session_facts: SessionRow | None
    """None where its record is lost."""
    files: list[FileRow]
    models: list[ModelRow]
    groups: list[GroupRow]
    extras: list[str]
    rng: list[str]
    tensor_count: int
    tensor_bytes: int
    tensors: list[TensorRow] | None
    """With --tensors."""


def show(
    run: RunPath,
    step: StepText = None,
    rank: Annotated[int, typer.Option(help="Whose part of the step to show.", min=0)] = 0,
    tensors: Annotated[bool, typer.Option("--tensors", help="Show every tensor too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one step: its files, layout, metrics, hyperparameters and origin.

    A step that is stored as deltas is folded to see it.
    """
    opened = Run.open(run)
    listing = opened.listing()
    found = any_step(opened, listing, step)
    chain = found if isinstance(found, Chain) else None
    if chain is None or not chain.links:
        entry = found if isinstance(found, StepEntry) else found.full
        record = opened.record(entry, rank)
        check_form(record.tree, {stored.spec.key for stored in record.tensors})
    else:
        entry, record = chain.full, _fold(opened, chain, rank, Output(as_json))
    origin = _Origin(entry, chain, record)
    report = describe(opened, listing, origin, rank, run, tensors)
    Output(as_json).show(report, blocks(report))


class _Origin(NamedTuple):
    """Where a step is had from."""

    entry: StepEntry
    """Its full checkpoint, or the one before it."""
    chain: Chain | None
    """None: it cannot be had."""
    record: RankRecord
    """Of one rank, as read or folded."""


def _fold(run: Run, chain: Chain, rank: int, output: Output) -> RankRecord:
    from everystep.recovery.folded import FoldedStep
    from everystep.recovery.reach import How

    with output.progress("folding", len(chain.links), "steps") as progress:
        return FoldedStep(run, chain, rank, How(folded=progress)).record(rank)


def describe(
    run: Run, listing: Listing, origin: _Origin, rank: int, path: Path, tensors: bool
) -> StepReport:
    """Collect what is recorded about a step."""
    entry, chain, record = origin
    links = () if chain is None else chain.links
    ref = entry.ref if chain is None else chain.ref
    session = links[-1].session if links else entry.session
    timeline = listing.timelines.get(ref.timeline)
    sessions = {session.session: session_row(session) for session in listing.sessions}
    return StepReport(
        path=path_text(path),
        run=run.id,
        step=str(ref),
        state="complete" if links else state_of(entry, chain is not None),
        stored=_stored(run, listing, ref, bool(links)),
        folded_from=str(entry.ref) if links else None,
        deltas=len(links),
        timeline=ref.timeline,
        parent=None if timeline is None or timeline.parent is None else str(timeline.parent),
        rank=rank,
        world_size=entry.world_size,
        missing_ranks=entry.missing_ranks,
        created=None if links else record.created,
        metrics=plain(record.metrics),
        versions=record.versions,
        session=session,
        session_facts=sessions.get(session),
        files=[*_files(run, entry, path), *_segments(links, path)],
        models=_models(record),
        groups=_groups(record),
        extras=sorted(record.tree["extras"]),
        rng=sorted(record.tree["rng"]),
        tensor_count=len(record.tensors),
        tensor_bytes=sum(stored.spec.nbytes for stored in record.tensors),
        tensors=[_tensor(stored) for stored in record.tensors] if tensors else None,
    )


def _stored(run: Run, listing: Listing, ref: StepRef, folded: bool) -> Stored:
    if folded:
        return "delta"
    if not any(log.segment.timeline == ref.timeline for log in listing.logs):
        return "full"
    had = line_of(listing, run.segments(listing), ref.timeline).had.get(ref)
    return "full" if had is None or had.link is None else "both"


def _segments(links: Sequence[Link], path: Path) -> list[FileRow]:
    """The segments of the log that hold deltas on the way."""
    found = {place.name: place for link in links for place in link.places}
    return [
        FileRow(
            path=path_text(path / name),
            size_bytes=place.scanned.nbytes,
            rank=place.scanned.segment.rank,
        )
        for name, place in sorted(found.items())
    ]


def _files(run: Run, entry: StepEntry, path: Path) -> list[FileRow]:
    lengths = {e.name: e.nbytes for e in run.backend.list(fmt.step_directory(entry.ref))}
    return [
        FileRow(path=path_text(path / name), size_bytes=lengths.get(name, 0), rank=part.rank)
        for part in entry.parts
        for name in run.part_files(entry.ref, part.stem)
    ]


def _models(record: RankRecord) -> list[ModelRow]:
    rows = []
    for name, facts in record.tree["models"].items():
        prefix = join_key("models", name) + "/"
        specs = [stored.spec for stored in record.tensors if stored.spec.key.startswith(prefix)]
        rows.append(
            ModelRow(
                model=name,
                tensors=len(specs),
                elements=sum(spec.elements for spec in specs),
                size_bytes=sum(spec.nbytes for spec in specs),
                aliases=facts["aliases"],
                frozen=facts["frozen"],
            )
        )
    return rows


def _groups(record: RankRecord) -> list[GroupRow]:
    return [
        GroupRow(
            optimizer=name,
            class_name=saved["class"],
            group=index,
            parameters=len(group["parameters"]),
            options=plain(group["options"]),
        )
        for name, saved in record.tree["optimizers"].items()
        for index, group in enumerate(saved["groups"])
    ]


def _tensor(stored: StoredTensor) -> TensorRow:
    spec = stored.spec
    return TensorRow(
        key=spec.key,
        dtype=spec.dtype,
        shape=list(spec.shape),
        shard=spec.shard,
        replicated=spec.replicated,
        nbytes=spec.nbytes,
        xxh3_128=stored.xxh3_128,
    )


def blocks(report: StepReport) -> Iterator[Block]:
    """The record for people."""
    yield Line(f"step {report.step} of {report.path}, as rank {report.rank} holds it", "bold")
    missing = f", nothing of rank {', '.join(map(str, report.missing_ranks))}"
    missing = missing if report.missing_ranks else ""
    ranks = counted(report.world_size, "rank")
    yield Line(f"state      {report.state}, {ranks}{missing}", STYLES[report.state])
    fork = f", forked from {report.parent}" if report.parent else ""
    yield Line(f"timeline   {report.timeline}{fork}")
    created = f"{report.created} " if report.created else ""
    yield Line(f"stored     {created}by session {report.session}{_session(report)}")
    if report.folded_from is not None:
        yield Line(f"folded     {counted(report.deltas, 'delta')} onto {report.folded_from}")
    yield Line(f"versions   {_pairs(report.versions)}")
    if report.metrics:
        yield Line(f"metrics    {_pairs(report.metrics)}")
    for model in report.models:
        yield Line(f"model      {_model(model)}")
    for group in report.groups:
        count = counted(group.parameters, "parameter")
        name = f"{group.optimizer}, group {group.group}"
        yield Line(f"optimizer  {name}: {group.class_name}, {count}")
        yield Line(f"           {_pairs(group.options)}")
    if report.extras:
        yield Line(f"extras     {', '.join(report.extras)}")
    yield Line(f"random     {', '.join(report.rng)}")
    yield Line(f"tensors    {report.tensor_count:,}, {size(report.tensor_bytes)}")
    rows = [[str(f.rank), size(f.size_bytes), f.path] for f in report.files]
    yield Table([Column("rank", True), Column("size", True), Column("file")], rows)
    if report.tensors is not None:
        yield _layout(report.tensors)


def _session(report: StepReport) -> str:
    facts = report.session_facts
    if facts is None:
        return " (its record is lost)"
    origin = f"restored from {facts.restored}" if facts.restored else "a fresh start"
    return f", begun {facts.created} on {facts.host} (pid {facts.pid}), {origin}"


def _pairs(values: dict[str, Json] | dict[str, str]) -> str:
    return ", ".join(f"{name} {spoken(value, 60)}" for name, value in values.items())


def _model(model: ModelRow) -> str:
    text = f"{model.model}: {counted(model.tensors, 'tensor')}, {model.elements:,} elements, "
    text += size(model.size_bytes)
    if model.aliases:
        text += "; tied " + ", ".join(f"{a} = {b}" for a, b in model.aliases.items())
    if model.frozen:
        text += f"; {len(model.frozen):,} frozen"
    return text


def _layout(tensors: list[TensorRow]) -> Table:
    columns = [Column("tensor"), Column("dtype"), Column("shape"), Column("part of")]
    columns += [Column("bytes", True), Column("xxh3-128")]
    rows = [
        [t.key, t.dtype, spoken(t.shape), _part(t), f"{t.nbytes:,}", t.xxh3_128] for t in tensors
    ]
    return Table(columns, rows)


def _part(tensor: TensorRow) -> str:
    if tensor.shard is None:
        return "replicated" if tensor.replicated else ""
    shard = tensor.shard
    return f"{spoken(list(shard.global_shape))} at {spoken(list(shard.offsets))}"
