"""A shadow's end of gradients off the wire: what it is told, what it has, what it checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from everystep.tap.buckets import Bucket, ByParameter
from everystep.tap.gloo import Gloo
from everystep.tap.gradients import Gradients, Lacking
from everystep.tap.packets import Parser
from everystep.tap.reduced import Reader
from tap.recording import frames_of

Told = dict[int, tuple[list[list[Bucket]], int | None]]
"""By step: the buckets of each backward, and the number of its last collective."""

Truth = dict[int, Mapping[str, npt.NDArray[Any]]]
"""By step and parameter."""

SAMPLES = 256


class Found(Struct):
    """How it went."""

    exact: list[int]
    lacking: dict[int, Lacking]
    wrong: int
    """Candidates that the samples have shown to be wrong."""


def gradients_of(ranks: int, *, budget_bytes: int = 1 << 30, **options: Any) -> Gradients:
    """Of a process group of gloo."""
    parser = Parser()
    reader = Reader(parser, Gloo(parser, ranks=ranks, **options))
    return Gradients(reader, budget_bytes=budget_bytes)


def agrees(found: ByParameter, truth: Mapping[str, npt.NDArray[Any]], step: int) -> bool:
    """Whether so many elements, drawn by the step, are what the trainer has told."""
    names = sorted(truth)
    edges = np.cumsum([truth[name].size for name in names])
    for at in np.random.default_rng(step).integers(edges[-1], size=SAMPLES).tolist():
        which = int(np.searchsorted(edges, at, side="right"))
        name, back = names[which], at - int(edges[which])  # from its end
        if found[name][back] != truth[name][back]:
            return False
    return True


def settled(gradients: Gradients, step: int, truth: Truth, found: Found, *, is_over: bool) -> bool:
    """Take a step, as far as it goes now; whether that is its end."""
    while True:
        taken = gradients.take(step, is_over=is_over)
        if taken is None:
            return False
        if isinstance(taken, Lacking):
            found.lacking[step] = taken
            return True
        if agrees(taken, truth[step], step):
            for name, values in truth[step].items():
                assert taken[name].tobytes() == values.tobytes(), (step, name)
            for name in taken.keys() - truth[step].keys():
                assert not taken[name].any()  # never used: `grad` is None
            found.exact.append(step)
            return True
        gradients.wrong(step)
        found.wrong += 1


def followed(
    gradients: Gradients,
    packets: list[bytes],
    told: Told,
    truth: Truth,
    *,
    is_counted: bool = True,
    lengths: list[int] | None = None,
    batch: int = 64,
) -> Found:
    """Packets and records as they come, a batch after the other; the record of a step comes some
    time after its packets. Every step that is had is exact, or this fails."""
    found = Found([], {}, 0)
    waiting = [*told]
    per_step = max(1, len(packets) // (len(told) + 1))
    expected = 0
    for at in range(0, len(packets), batch):
        cut = None if lengths is None else lengths[at : at + batch]
        gradients.feed(frames_of(packets[at : at + batch], at + 1, cut))
        while expected < min(len(told), at // per_step):
            tell(gradients, [*told][expected], told, is_counted=is_counted)
            expected += 1
        while waiting and waiting[0] in [*told][:expected]:
            if not settled(gradients, waiting[0], truth, found, is_over=False):
                break
            waiting.pop(0)
    for step in [*told][expected:]:
        tell(gradients, step, told, is_counted=is_counted)
    gradients.end()
    for step in waiting:
        assert settled(gradients, step, truth, found, is_over=True)
    return found


def tell(gradients: Gradients, step: int, told: Told, *, is_counted: bool) -> None:
    """The record of a step."""
    backwards, through = told[step]
    for buckets in backwards:
        gradients.expect(step, buckets, through=through if is_counted else None)
