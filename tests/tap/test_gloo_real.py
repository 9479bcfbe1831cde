"""Real gloo: what PyTorch's ranks send over loopback, recorded, gives what torch holds."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from peers.hosts import missing, network
from tap.decoding import HARMLESS, Decoded
from tap.recording import Recorder
from zygote import Zygote

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: packets are captured"),
]

COUNTS = [10, 11, 1000, 7777, 100_001, 10, 300_000, 1_500_000, 11]


def _record(
    zygote: Zygote, folder: Path, ranks: int, function: str, **arguments: object
) -> list[bytes]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with network() as name, Recorder(name) as recorder:
        zygote.run_ranks(
            f"tap.gloo_ranks.{function}", folder, ranks, 60.0, network=name, **arguments
        )
    return recorder.packets


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("together", [False, True], ids=["in turn", "at a time"])
def test_all_reduces(zygote: Zygote, quick_path: Path, ranks: int, together: bool) -> None:
    packets = _record(zygote, quick_path, ranks, "all_reduces", counts=COUNTS, together=together)
    truth = {i: np.load(quick_path / f"reduced-{i}.npy") for i in range(len(COUNTS))}
    for sizes in ([4 * count for count in COUNTS], None):
        decoded = Decoded(ranks=ranks, sizes=sizes).feed(packets)
        decoded.settle(len(COUNTS) - 1).end()
        assert decoded.check(truth) == len(COUNTS)
        assert decoded.assembler.alarms == []
    whole = 0
    for seed, damage in enumerate(HARMLESS.values()):
        damaged, lengths = damage(packets, random.Random(seed), 0.01)
        decoded = Decoded(ranks=ranks, sizes=[4 * count for count in COUNTS])
        decoded.feed(damaged, lengths=lengths).settle(len(COUNTS) - 1).end()
        whole += decoded.check(truth)
        assert decoded.assembler.alarms == []
    assert whole > len(COUNTS) * len(HARMLESS) / 4


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_under_ddp(zygote: Zygote, quick_path: Path, ranks: int) -> None:
    packets = _record(zygote, quick_path, ranks, "train", iterations=6)
    decoded = Decoded(ranks=ranks).feed(packets).settle(1 << 20).end()
    buckets: list[npt.NDArray[np.float32]] = []
    for i in range(6):
        with np.load(quick_path / f"gradients-{i}.npz") as file:
            gradients = list(file.values())
        # one bucket in the order of the parameters, at first; then in reverse, cut in two
        order = [gradients] if i == 0 else [gradients[:1:-1], gradients[1::-1]]
        buckets += [np.concatenate(bucket) for bucket in order]
    numbers = sorted(decoded.buffers)
    assert len(numbers) == len(buckets) == 11
    assert decoded.check(dict(zip(numbers, buckets, strict=True))) == 11
