"""One rank of a distributed job whose steps are logged as deltas, which reports in JSON.

`train` trains every scene and stores some steps; `resume`, in new processes, restores steps between
full checkpoints, trains on, stores more, and goes back once more. The test compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from agent.replica_scenes import agents_in_threads
from everystep.deltas.compressors import RandomK, TopK
from everystep.deltas.hooks import compress
from everystep.errors import EverystepError
from everystep.store.run import Run
from everystep.types import StepRef
from exact.logged import ALL, LOGGED, fulls
from exact.matrix import STAGED
from exact.ranks import difference, digests, join, leave, made
from exact.scenes import Scene, batch, seed_all
from exact.zoo import Plain
from waiting import until

STORED, TRAINED = 6, 8

AWAITED: tuple[int, ...] = ()
"""Steps of which a full checkpoint is waited for in the first life."""


def compressed(compressor: Any, **options: Any) -> Callable[[int], Scene]:
    """DDP with a compression hook, accumulated gradients that are clipped in some steps, and
    gradients that are views of buckets, or are not."""

    def make(seed: int) -> Scene:
        seed_all(seed)
        net = Plain(norm=True)
        model = DistributedDataParallel(net, bucket_cap_mb=1e-4, **options)
        hook = None if compressor is None else compress(model, compressor)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        seed_all(100 * seed + dist.get_rank())

        def step(t: int) -> None:
            optimizer.zero_grad(set_to_none=t % 4 != 3)
            with model.no_sync():
                x, y = batch(10 * t)
                F.mse_loss(model(x), y).backward()
            x, y = batch(10 * t + 1)
            F.mse_loss(model(x), y).backward()
            if t % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()

        extras = {} if hook is None else {"hook": hook}
        return Scene({"net": model}, {"optimizer": optimizer}, extras, step)

    return make


SCENES: dict[str, Callable[[int], Scene]] = {
    **{str(case): lambda seed, case=case: made(case, seed) for case in STAGED},  # type: ignore[misc]
    "top-k": compressed(TopK(density=0.1, error_feedback=False)),
    "random-k": compressed(RandomK(density=0.2, seed=3, error_feedback=False)),
    "top-k views": compressed(
        TopK(density=0.1, error_feedback=False), gradient_as_bucket_view=True
    ),
    "views": compressed(None, gradient_as_bucket_view=True),
}


def train(make: Callable[[int], Scene], run: Path) -> dict[str, Any]:
    """The first life: digests of the state after each step."""
    scene = make(1)
    found = {}
    with scene.checkpointer(run, strategy=LOGGED, retention=ALL, on_error="raise") as ck:
        ck.restore()
        for t in range(STORED):
            scene.step(t)
            ck.step()
            found[t + 1] = digests(scene.state())
            if t + 1 in AWAITED:
                until(lambda: StepRef("main", t + 1) in complete(run), 60, f"a full of {t + 1}")  # noqa: B023
    for t in range(STORED, TRAINED):
        scene.step(t)
        found[t + 1] = digests(scene.state())
    return found


def complete(run: Path) -> set[StepRef]:
    """The steps of which every rank has written its part of a full checkpoint."""
    return set(Run.open(run).listing().complete())


def resume(make: Callable[[int], Scene], run: Path, before: dict[str, Any]) -> dict[str, Any]:
    """The second life: where it differs from the first, by step."""
    scene = make(2)
    found: dict[str, Any] = {"fulls": fulls(run)}

    def look(what: str, step: int) -> None:
        found[f"{what} {step}"] = difference(before[str(step)], digests(scene.state()))

    dist.barrier()  # until all have looked
    with scene.checkpointer(run, strategy=LOGGED, retention=ALL, on_error="raise") as ck:
        for step in (2, 5, STORED):
            ck.restore(StepRef("main", step))
            look("restored", step)
        for t in range(STORED, TRAINED):
            scene.step(t)
            ck.step()
            look("trained on", t + 1)
        for step in (TRAINED, 4):
            ck.restore(StepRef("main", step))
            look("restored again", step)
    found["fulls afterwards"] = fulls(run)
    return found


def main(phase: str, folder: str, rank: int, world_size: int) -> None:
    """Run one phase of all scenes, with agents in threads.

    Args:
        phase: `train` or `resume`.
        folder: shared by all ranks and phases.
    """
    place = Path(folder)
    join(phase, place, rank, world_size)
    trained = place / f"train-{rank}.json"
    before = json.loads(trained.read_text()) if phase == "resume" else {}
    report: dict[str, Any] = {}
    with agents_in_threads():
        for number, (name, make) in enumerate(SCENES.items()):
            run, is_first = place / f"run-{number}", phase == "train"
            try:
                report[name] = train(make, run) if is_first else resume(make, run, before[name])
            except EverystepError as error:  # raised on every rank
                report[name] = str(error)
    (place / f"{phase}-{rank}.json").write_text(json.dumps(report))
    leave()
