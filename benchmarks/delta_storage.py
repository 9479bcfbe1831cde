"""What a run of 1,000 steps with top-k takes on the disk, beside a full state at every step."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import everystep
from benchmarks.common import Setting, bytes_of, tensors_of
from benchmarks.delta_sets import DENSITY
from benchmarks.figures import Figure, median_of
from benchmarks.loop import Everystep
from everystep.store.run import Run

STEPS = 1000
WIDTH = 1024


def measure_storage(setting: Setting) -> list[Figure]:
    """All of this part."""
    given = everystep.Deltas(full_every=100, batch=16)
    figures = []
    chosen = [] if setting.quick else [("auto", everystep.Deltas())]
    for name, strategy in [("full every 100", given), *chosen]:
        steps = STEPS if strategy is given and not setting.quick else STEPS // 5
        torch.manual_seed(1)
        model, optimizer, subject = _train(setting.directory / "run", strategy, steps)
        state_bytes = bytes_of(tensors_of(model, optimizer))
        used = _on_disk(setting.directory / "run")
        fulls = _fulls(setting.directory / "run")
        choice = subject.choice
        shutil.rmtree(setting.directory / "run")
        head = f"storage, {steps} steps, {name}: "
        figures += [
            median_of(
                head + "per step / a full state",
                [used / steps / state_bytes],
                "x",
                reach=1 / 20 if strategy is given else None,
            ),
            median_of(head + "all", [used / 1e6], "MB"),
            median_of(head + "full states", [fulls], ""),
        ]
        if strategy is not given:
            figures += [
                median_of(head + "a full at every so many steps, at the end", [choice[0]], "steps"),
                median_of(head + "deltas per write, at the end", [choice[1]], "steps"),
            ]
    return figures


class _Kept(Everystep):
    """It remembers what it chose."""

    choice = (0, 0)

    def close(self) -> None:
        """See `Subject.close`."""
        session = self.ck._session
        self.choice = session._choice.full_every, session._choice.batch
        super().close()


def _train(
    run: Path, strategy: everystep.Deltas, steps: int
) -> tuple[torch.nn.Module, torch.optim.Optimizer, _Kept]:
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH // 2, WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(WIDTH, WIDTH // 2),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    hook = everystep.compress(model, everystep.compressors.TopK(density=DENSITY))
    subject = _Kept(
        run,
        model,
        optimizer,
        strategy,
        everystep.Retention(keep_last=None),
        extras={"compressor": hook},
        idle_s=2.0,
    )
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            data = torch.randn(8, WIDTH // 2)
            (model(data) - data.sin()).square().mean().backward()
            optimizer.step()
            subject.step()
        subject.finish()
    finally:
        subject.close()
    return model, optimizer, subject


def _on_disk(run: Path) -> int:
    """Bytes that the run's files take."""
    return sum(path.stat().st_blocks * 512 for path in run.rglob("*") if path.is_file())


def _fulls(run: Path) -> int:
    opened = Run.open(run)
    return len([entry for entry in opened.listing().steps if entry.complete])
