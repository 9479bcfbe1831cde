"""Images in part of a real training: large embeddings of which some rows are used, restored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from everystep import Checkpointer, Replica, Retention, load
from everystep.store import increments
from everystep.store.references import references_of
from everystep.store.run import Run
from everystep.store.verify import verify_step
from everystep.types import StepRef

ROWS, WIDTH, STEPS = 160_000, 32, 7
"""An embedding of five units."""


class Training:
    """An embedding whose rows at the end are not used, and a head."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.EmbeddingBag(ROWS, WIDTH, sparse=True), torch.nn.Linear(WIDTH, 4)
        )
        self.optimizers = {
            "sparse": torch.optim.SGD(self.model[0].parameters(), lr=0.1),
            "dense": torch.optim.AdamW(self.model[1].parameters(), lr=0.01),
        }

    def step(self) -> None:
        words = torch.randint(0, 1000, (16, 5))
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        self.model(words).square().sum().backward()
        for optimizer in self.optimizers.values():
            optimizer.step()

    def checkpointer(self, path: Path) -> Checkpointer:
        return Checkpointer(
            path,
            model=self.model,
            optimizer=self.optimizers,
            strategy=Replica(persist_every=2),
            retention=Retention(keep_last=None),
        )

    def state(self) -> dict[str, torch.Tensor]:
        return {key: value.clone() for key, value in self.model.state_dict().items()}


@pytest.fixture(scope="module")
def small_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_training_is_written_in_part_and_restored(run_dir: Path, small_threads: None) -> None:
    training = Training()
    states = {}
    with training.checkpointer(run_dir) as ck:
        ck.restore()
        for step in range(1, STEPS + 1):
            training.step()
            ck.step()
            states[step] = training.state()
    run = Run.open(run_dir)
    entries = run.listing().steps
    assert [f for entry in entries for f in verify_step(run, entry)] == []
    steps = [entry.ref.step for entry in entries]
    assert steps == [1, 2, 4, 6, 7]
    references = references_of(run, entries)
    assert sorted(references) == [StepRef("main", step) for step in steps[1:]]
    for step in steps:
        found = load(run_dir, step).models["model"]
        assert all(torch.equal(found[key], value) for key, value in states[step].items())
    written = {
        step: sum(f.nbytes for f in run.record(entry, 0).files if f.step is None)
        for step, entry in zip(steps, entries, strict=True)
    }
    assert written[1] > ROWS * WIDTH * 4
    assert all(written[step] <= increments.UNIT_BYTES + 50_000 for step in steps[1:])
    other = Training()
    with other.checkpointer(run_dir) as ck:
        assert ck.restore() == STEPS
        assert all(torch.equal(other.state()[k], v) for k, v in states[STEPS].items())
        rng = torch.get_rng_state()
        other.step()
        torch.set_rng_state(rng)
        training.step()
        ck.step()
    assert all(torch.equal(other.state()[k], v) for k, v in training.state().items())
