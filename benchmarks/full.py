"""Full checkpoints at every step: what they cost training, beside peers and physical limits.

    python -m benchmarks.full [--quick] [--json] [--dir DIR] [--runs N] [--only NAME,…]

The parts, each of which can be run alone:

- `emulated`: 124 M fp32 parameters with AdamW, 1.5 GB of state. Forward and backward are a wait
  of T seconds in which the host is idle, as beside an accelerator; the update is real and in place.
  Where storage keeps up (hidden), where a part of the state is left when the update begins, and
  where storage is the bottleneck (saturated). Peers take a checkpoint at every step, too.
- `job`: two ranks under DDP on this CPU, where checkpoints have no idle host to hide behind.
- `durable`: what the agent writes per second, beside a plain write by as many threads: of a new
  file beside a new one, over an old file beside over an old one.
- `killed`: restore from the agent's memory after SIGKILL, beside the same files cold.
- `small`: 10,000 tensors of 4 KB.
- `adapter`: 50 M parameters, of which 99 % are frozen.

All ratios are of one run. `--quick` takes a fifth of the state, shorter steps and one peer; it
leaves out a step of 1 s, and the saturated disk with `skip`. Peers are measured in three steps
each, and what has no reach in fewer runs than the rest: each figure says in how many. What it does
not show: the link of a real accelerator and its snapshots (a GPU's copies cost the host
less, and its training more), other disks, a store over a network, many ranks, days of training.
DLRover is measured where it is installed. CPU time is a difference of two loops, and so is as noisy
as they.
"""

from __future__ import annotations

import shutil
import sys
import time

import torch

import everystep
from benchmarks.command import Asked, Parts
from benchmarks.common import (
    Setting,
    bytes_of,
    make_state,
    page_aligned,
    plain_write,
    settle,
    tensors_of,
)
from benchmarks.emulated import measure_emulated
from benchmarks.figures import Figure, median_of
from benchmarks.killed import measure_killed
from benchmarks.loop import Everystep
from benchmarks.peers import PEERS
from benchmarks.small_job import measure_small_job

RECYCLED_AFTER = 6
"""So many durable steps make sure that the next one overwrites an old file."""


def measure_durable(setting: Setting) -> list[Figure]:
    """The agent's writing beside plain writing, in turns."""
    model, optimizer = make_state(setting.quick)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    data = page_aligned(bytes_of(tensors_of(model, optimizer)), large=True)
    figures = []
    for overwrite in (True, False):
        what = "over an old file" if overwrite else "new file"
        retention = everystep.Retention() if overwrite else everystep.Retention(keep_last=None)
        settle(setting.settle_s)
        run, plain = setting.directory / "run", setting.directory / "plain"
        plain.mkdir()
        subject = Everystep(run, model, optimizer, everystep.Full(every=1), retention)
        rates = []
        try:
            for _ in range(RECYCLED_AFTER if overwrite else 1):
                _durable_step(optimizer, subject)
            plain_write(plain / "0", data, direct=True)
            for turn in range(setting.runs):
                _durable_step(optimizer, subject)
                path = plain / ("0" if overwrite else str(turn + 1))
                took_s = plain_write(path, data, direct=True, overwrite=overwrite)
                rates.append(len(data) / took_s)
        finally:
            subject.close()
        ours = [measure.write_bytes_per_s or 0.0 for measure in subject.measures()[-setting.runs :]]
        ratios = [mine / theirs for mine, theirs in zip(ours, rates, strict=True)]
        head = f"durable, {what}: "
        figures += [
            median_of(head + "the agent", [rate / 1e9 for rate in ours], "GB/s"),
            median_of(head + "plain O_DIRECT write", [rate / 1e9 for rate in rates], "GB/s"),
            median_of(head + "the agent / plain", ratios, "x", reach=0.9, at_least=True),
        ]
        shutil.rmtree(run)
        shutil.rmtree(plain)
    return figures


def _durable_step(optimizer: torch.optim.Optimizer, subject: Everystep) -> None:
    optimizer.step()
    subject.step()
    subject.finish()


def measure_small(setting: Setting) -> list[Figure]:
    """10,000 tensors of 4 KB: what the training thread is made to do beside copying."""
    parameters = [torch.nn.Parameter(torch.zeros(1024)) for _ in range(2500)]
    model = torch.nn.ParameterList(parameters)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stats = _stats_of(model, optimizer, setting, compute_s=0.3)
    head = "10,000 small tensors: "
    return [
        median_of(head + "bookkeeping", [s.bookkeeping_s for s in stats], "s", reach=0.005),
        median_of(head + "snapshot", [s.snapshot_s for s in stats], "s"),
        median_of(head + "stall", [s.stall_s for s in stats], "s"),
    ]


def measure_adapter(setting: Setting) -> list[Figure]:
    """99 % of the parameters frozen: what moves beside what has changed."""
    width, layers = 1024, 48
    frozen = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
    adapters = [
        torch.nn.Sequential(torch.nn.Linear(width, 5, bias=False), torch.nn.Linear(5, width))
        for _ in range(layers)
    ]
    for layer in frozen:
        layer.requires_grad_(False)
    model = torch.nn.ModuleDict(
        {"frozen": torch.nn.ModuleList(frozen), "adapters": torch.nn.ModuleList(adapters)}
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    slots = [v for slot in optimizer.state.values() for v in slot.values()]
    changed = bytes_of([*trained, *slots])
    share = sum(p.numel() for p in trained) / sum(p.numel() for p in model.parameters())
    stats = _stats_of(model, optimizer, setting, compute_s=0.2)
    head = "adapter run: "
    written = [s.written_bytes / changed for s in stats if s.durable]
    return [
        median_of(head + "trainable", [100 * share], "% of parameters"),
        median_of(head + "changed per step", [changed / 1e6], "MB"),
        median_of(head + "copied / changed", [s.copied_bytes / changed for s in stats], "x", 1.1),
        median_of(head + "written / changed", written, "x", 1.1),
    ]


def _stats_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, compute_s: float
) -> list[everystep.StepStats]:
    """Of some steps with a checkpoint each, after some that are not counted."""
    run, steps = setting.directory / "run", setting.steps
    subject = Everystep(run, model, optimizer, everystep.Full(every=1))
    try:
        for _ in range(4 + steps):
            time.sleep(compute_s)
            optimizer.step()
            subject.step()
        subject.finish()
        return list(subject.ck.stats[-steps:])
    finally:
        subject.close()
        shutil.rmtree(run)


PARTS: Parts = {
    "emulated": measure_emulated,
    "job": measure_small_job,
    "durable": measure_durable,
    "killed": measure_killed,
    "small": measure_small,
    "adapter": measure_adapter,
}
"""By name, in the order in which they are run."""


def main() -> None:
    """Parse the command line, measure, print."""
    asked = Asked.parse(__doc__ or "", PARTS)
    if "DLRover flash checkpoint" not in PEERS and "emulated" in asked.parts:
        print("DLRover flash checkpoint: not installed, not measured", file=sys.stderr)
    asked.run()


if __name__ == "__main__":
    main()
