"""What the replica writes where only a part of the state changes."""

from __future__ import annotations

import shutil

import torch

import everystep
from benchmarks.common import Setting, bytes_of, settle, tensors_of
from benchmarks.figures import Figure, median_of
from benchmarks.loop import Everystep

INTERVALS = 12
EVERY = 2
SHARES = {"two fifths change": 0.4, "everything changes": 1.0}


class Rows:
    """A large embedding of which each interval trains other rows, as recommenders do, by SGD with
    momentum: what no gradient reaches stays as it is."""

    def __init__(self, quick: bool, share: float) -> None:
        rows, width = (40_000, 256) if quick else (200_000, 512)
        self.model = torch.nn.Sequential(torch.nn.Embedding(rows, width))
        self.weight = self.model[0].weight
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._rows, self._share = rows, share

    def step(self, interval: int) -> None:
        """One step on rows of an interval."""
        count = int(self._rows * self._share)
        first = interval * 7919 % (self._rows - count + 1)
        self.weight.grad = torch.zeros_like(self.weight)
        self.weight.grad[first : first + count] = 1.0
        self.optimizer.step()


def measure_persist(setting: Setting) -> list[Figure]:
    """All of this part."""
    figures = []
    for name, share in SHARES.items():
        rows, run = Rows(setting.quick, share), setting.directory / "persist"
        settle(setting.settle_s)
        subject = Everystep(
            run, rows.model, rows.optimizer, everystep.Replica(persist_every=EVERY), warm_after=1
        )
        nbytes = bytes_of(tensors_of(rows.model, rows.optimizer))
        for step in range(INTERVALS * EVERY):
            rows.step(step // EVERY)
            subject.step()
            if step % EVERY == EVERY - 1:
                subject.finish()
        written = [one.written_bytes for one in subject.ck.stats if one.durable][1:]
        subject.close()
        shutil.rmtree(run)
        each = [one / nbytes for one in written]
        reach = 0.6 if share < 0.5 else 1.05
        head = f"persisted, {name}: "
        figures += [
            median_of(head + "the state", [nbytes / 1e6], "MB"),
            median_of(head + "written / the state", each, "x", reach=reach),
            median_of(head + "most written / the state", [max(each)], "x", reach=1.05),
        ]
    return figures
