"""Small runs of full checkpoints and deltas, written by hand while a training is recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

import byte_logs
import byte_runs
from everystep.deltas.packing import pack, pack_layout
from everystep.recovery.proof import Step
from everystep.saving import encoded_metrics
from everystep.state.fingerprint import fingerprint
from everystep.store.log import NewRecord
from everystep.store.run import Run
from everystep.types import StepRef
from folding import Bag, Full, Recording, random_gradients


class Trained(NamedTuple):
    """What a training has written down, and the states it went through."""

    run: Run
    path: Path
    states: dict[int, Full]
    """After each step, as a full checkpoint of it would be."""

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """The state after a step, by key."""
        return self.states[step].tensors()


def losses(upto: int, spike: int | None = None) -> dict[int, float]:
    """A loss that falls, and from `spike` on is high."""
    return {s: 1 / s + (0 if spike is None or s < spike else 5.0) for s in range(1, upto + 1)}


def train_run(
    path: Path,
    upto: int = 12,
    fulls: Collection[int] = (2, 6),
    *,
    ranks: int = 1,
    metrics: Mapping[int, float] | None = None,
    left_out: Collection[int] = (),
    wrong: Collection[int] = (),
    altered: Mapping[int, str] | None = None,
    ends: Mapping[int, int] | None = None,
    fork: int | None = None,
) -> Trained:
    """Train, and write the run: full checkpoints of some steps, and a delta of every step after the
    first of them, with a fingerprint of all of the state.

    Args:
        metrics: the loss of each step.
        left_out: steps whose deltas are not written.
        wrong: steps whose deltas have the gradients of the step before.
        altered: keys of tensors that have another bit in the full checkpoint of a step.
        ends: the last steps of ranks whose logs end before the others'.
        fork: a second session went back to this step, and did the same again as `main@STEP`.
    """
    torch.manual_seed(3)
    model = Bag([torch.randn(3, 5), torch.randn(7)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    recording = Recording(model, optimizer, ranks=ranks)
    states: dict[int, Full] = {0: recording.full}
    for step in range(1, upto + 1):
        random_gradients(optimizer, generator, lambda elements: 0.5)
        optimizer.param_groups[0]["lr"] = 1e-2 / step
        optimizer.step()
        recording.end_step()
        states[step] = recording._full(recording._state())
    recording.close()
    recorded = {s: encoded_metrics({"loss": m}) for s, m in (metrics or losses(upto)).items()}
    run = byte_runs.new_run(path, ranks, byte_runs.NoSync())
    for step in fulls:
        write_full(run, step, states[step], ranks, recorded[step], (altered or {}).get(step))
    steps = [
        _all_hashed(step, states)
        if step.step not in wrong
        else _all_hashed(_with_updates_of(step, recording.steps[step.step - 2]), states)
        for step in recording.steps
        if step.step > min(fulls) and step.step not in left_out
    ]
    write_deltas(run, steps, min(fulls), recorded, ends or {})
    if fork is not None:
        left = StepRef("main", fork)
        byte_runs.begin(run, 2, f"main@{fork}", world_size=ranks, parent=left, restored=left)
        again = [step for step in steps if step.step > fork]
        write_deltas(run, again, fork, recorded, {}, f"main@{fork}", 2)
    return Trained(Run.open(path), path, states)


def _all_hashed(step: Step, states: Mapping[int, Full]) -> Step:
    """A step whose fingerprints cover all of the state."""
    parts = []
    for layout, delta in step.parts:
        tensors = states[step.step].tensors()
        prints = fingerprint([tensors[key] for key in layout.state], step.step, 1)
        layout = msgspec.structs.replace(layout, slices=1)
        parts.append((layout, delta._replace(fingerprint=prints)))
    return step._replace(parts=parts)


def _with_updates_of(step: Step, other: Step) -> Step:
    parts = [
        (layout, delta._replace(updates=before.updates))
        for (layout, delta), (_, before) in zip(step.parts, other.parts, strict=True)
    ]
    return step._replace(parts=parts)


def write_full(
    run: Run, step: int, state: Full, ranks: int, metrics: Mapping[str, Any], altered: str | None
) -> None:
    """A full checkpoint of all ranks."""
    data = dict(state.data)
    if altered is not None:
        data[altered] = bytes([data[altered][0] ^ 1]) + data[altered][1:]
    tensors = [
        byte_runs.Tensor(key, spec.dtype, spec.shape, data[key], spec.replicated)
        for key, spec in state.specs.items()
    ]
    for rank in range(ranks):
        byte_runs.write_part(
            run, StepRef("main", step), tensors, rank=rank, world_size=ranks, tree=state.tree,
            metrics=metrics,
        )  # fmt: skip


def write_deltas(
    run: Run,
    steps: Sequence[Step],
    base: int,
    metrics: Mapping[int, dict[str, Any]],
    ends: Mapping[int, int],
    timeline: str = "main",
    session: int = 1,
) -> None:
    """The deltas of all ranks after a step; each rank's log may end with a step of its own."""
    for position, (layout, _) in enumerate(steps[0].parts):
        log = byte_logs.new_log(
            run.backend, run.id, timeline, session, layout.rank, layout.world_size
        )
        log.begin(base, pack_layout(layout))
        for step in steps:
            if step.step <= ends.get(layout.rank, step.step):
                delta = step.parts[position][1]._replace(metrics=metrics[step.step])
                log.append([NewRecord(step.step, *pack(delta))])


def record_of(trained: Trained, step: int, rank: int = 0) -> tuple[str, int, int]:
    """Where the delta of a step lies: path of its segment, first byte of its payload, length."""
    (found,) = [
        (scanned.segment.name, record.payload_offset, record.nbytes)
        for scanned in trained.run.segments(trained.run.listing())
        for record in scanned.records
        if (record.step, scanned.segment.rank) == (step, rank)
    ]
    return found
