"""What a training must show whose steps are logged as deltas: any of them can be had again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from everystep import Retention
from everystep.store.run import Run
from everystep.strategies import Deltas
from everystep.types import StepRef
from exact.scenes import Scene
from states import Frozen, assert_same_state

ALL = Retention(keep_last=None)

LOGGED = Deltas(full_every=1000, batch=3, check=False)
"""One full checkpoint, of the first step; the last batch stays incomplete where a run ends."""

STORED, TRAINED = 7, 9
"""Steps that are stored, and those that the training has."""

Make = Callable[[int], Scene]
"""Fresh objects, made after seeding everything with a number."""


def states_of(make: Make, steps: int = TRAINED) -> list[Frozen]:
    """The state after each number of steps of a training without any checkpointer."""
    scene = make(1)
    states = [scene.state()]
    for t in range(steps):
        scene.step(t)
        states.append(scene.state())
    return states


def store(make: Make, run: Path, steps: int = STORED, strategy: Deltas = LOGGED) -> Scene:
    """A first life that stores every step."""
    scene = make(1)
    with scene.checkpointer(run, strategy=strategy, retention=ALL) as ck:
        for t in range(ck.restore(), steps):
            scene.step(t)
            ck.step()
    return scene


def fulls(run: Path, timeline: str = "main") -> list[int]:
    """The steps of which there is a full checkpoint."""
    listing = Run.open(run).listing()
    return [entry.ref.step for entry in listing.steps if entry.ref.timeline == timeline]


def prove_steps(make: Make, run: Path, states: Sequence[Frozen], steps: Sequence[int]) -> Scene:
    """Fresh objects are brought to each of these steps in turn, without an agent, and are as they
    were, bit for bit."""
    scene = make(2)
    with scene.checkpointer(run, retention=ALL) as ck:
        for step in steps:
            assert ck.restore(StepRef("main", step)) == step
            assert_same_state(states[step], scene.state())
    return scene


def prove(
    make: Make,
    run: Path,
    seed: int | str,
    *,
    expected_fulls: Sequence[int] | None = (1,),
    ends_alike: bool = True,
    strategy: Deltas = LOGGED,
) -> None:
    """Prove that storing changes nothing, that steps between full checkpoints can be had, and that
    training goes on from there as if it had never been interrupted.

    Args:
        seed: which steps are looked at.
        expected_fulls: steps that are stored in full; None: as many as the store could take, and
            the last.
        ends_alike: False: torch itself gives other bits each time, so that only what is stored
            can be compared.
    """
    states = states_of(make)
    stored = store(make, run, strategy=strategy)
    found = fulls(run)
    if expected_fulls is None:
        assert found[0] == 1 and found[-1] == STORED, found
    else:
        assert found == list(expected_fulls), found
    if ends_alike:
        assert_same_state(states[STORED], stored.state())
    else:
        states = [*states[:STORED], stored.state()]
    inner = found[1:-1] if expected_fulls is None else range(2, STORED)
    between = random.Random(seed).sample(inner, min(2, len(inner))) if ends_alike else []
    scene = prove_steps(make, run, states, [*between, STORED])
    if ends_alike:
        assert_same_state(states[TRAINED], scene.steps(STORED, TRAINED).state())
