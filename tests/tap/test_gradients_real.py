"""Gradients of real DDP runs over gloo, off the wire: bit for bit what torch holds."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from everystep.tap.gradients import Bucket
from peers.hosts import missing, network
from tap.decoding import HARMLESS
from tap.gloo_ranks import WAYS
from tap.reading import Told, Truth, followed, gradients_of
from tap.recording import Recorder
from zygote import Zygote

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: packets are captured"),
]

ITERATIONS = 8


def record(zygote: Zygote, folder: Path, ranks: int, way: str) -> tuple[list[bytes], Told, Truth]:
    """The packets of a run, what its trainer told, and its gradients."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with network() as name, Recorder(name) as recorder:
        zygote.run_ranks(
            "tap.gloo_ranks.train_and_tell",
            folder,
            ranks,
            60.0,
            network=name,
            iterations=ITERATIONS,
            way=way,
        )
    told: Told = {}
    truth: Truth = {}
    for step, (backwards, through) in enumerate(json.loads((folder / "told.json").read_text())):
        told[step] = (
            [[Bucket(tuple(n), tuple(s), d) for n, s, d in buckets] for buckets in backwards],
            through,
        )
        with np.load(folder / f"gradients-{step}.npz") as file:
            truth[step] = dict(file.items())
    return recorder.packets, told, truth


@pytest.mark.parametrize(
    ("ranks", "way"), [*itertools.product([2], WAYS), (3, "loss"), (4, "accumulated"), (4, "loss")]
)
def test_every_step_is_exact(zygote: Zygote, quick_path: Path, ranks: int, way: str) -> None:
    """With numbers, every one; without, but for the first at times."""
    packets, told, truth = record(zygote, quick_path, ranks, way)
    first, last = told[0][0][0], told[ITERATIONS - 1][0][-1]
    assert (first == last) == (way == "unused")
    assert len(last) > 1
    for is_counted in (True, False):
        found = followed(gradients_of(ranks), packets, told, truth, is_counted=is_counted)
        # which rank sends a stream shows by a segment that is shorter: if none of the first step's
        # comes early, an all-reduce that has none is given up before it is known to be over
        late = [] if is_counted else [*found.lacking]
        assert late in ([], [0])
        assert found.exact == [step for step in truth if step not in late]
        assert found.wrong <= (0 if is_counted else ITERATIONS)


@pytest.mark.parametrize("ranks", [2, 3])
def test_damage_and_a_start_in_the_middle(zygote: Zygote, quick_path: Path, ranks: int) -> None:
    packets, told, truth = record(zygote, quick_path, ranks, "loss")
    exact = 0
    for seed in range(40):
        rng = random.Random(seed)
        share = 10 ** rng.uniform(-3, -1)
        damaged, lengths = rng.choice([*HARMLESS.values()])(packets, rng, share)
        found = followed(gradients_of(ranks), damaged, told, truth, lengths=lengths)
        assert sorted([*found.exact, *found.lacking]) == [*truth]
        exact += len(found.exact)
    assert exact > 40
    for start in range(len(packets) // 3, len(packets), len(packets) // 8):
        gradients = gradients_of(ranks)
        gradients.tell(told[ITERATIONS - 1][0][0])
        rest = {step: told[step] for step in range(2, ITERATIONS)}
        found = followed(gradients, packets[start:], rest, truth)
        first = found.exact[0] if found.exact else ITERATIONS
        assert found.exact == [*range(first, ITERATIONS)]
        assert first <= 3 + ITERATIONS * start / len(packets)
