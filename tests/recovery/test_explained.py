"""Gradients off a network: multiplied as training did, or not taken at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from everystep.deltas.delta import Delta, Form, Layout, Parameter, Update
from everystep.deltas.packing import pack, unpack
from everystep.deltas.samples import SAMPLES, sample_counts, sample_places
from everystep.engine.sampled import samples_of
from everystep.errors import Damaged
from everystep.recovery.explained import explained

SIZES = [(300, 7), (5,), (), (2_000,)]
KEYS = [f"/models/m/{n}" for n in range(len(SIZES))]
PIECES = [
    Parameter(key, shape, 0, int(np.prod(shape))) for key, shape in zip(KEYS, SIZES, strict=True)
]
STEP = 17


def layout() -> Layout:
    return Layout(
        rank=0, world_size=2, optimizers={"o": PIECES}, state=KEYS, threads=1, versions={}
    )


def gradients(seed: int) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    found = [nn.Parameter(torch.zeros(shape)) for shape in SIZES]
    for parameter in found:
        parameter.grad = torch.randn(parameter.shape)
    return found


def delta_of(parameters: list[nn.Parameter]) -> Delta:
    coded = samples_of([p.grad for p in parameters], PIECES, STEP, 0)
    delta = Delta(STEP, [Update("o", None, coded)], [], {}, {}, np.empty(0, np.uint64))
    data = b"".join(part.tobytes() for part in pack(delta)[1])
    return unpack(memoryview(data), layout(), on_wire=True)


def flat(parameters: list[nn.Parameter]) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {
        key: p.grad.reshape(-1).numpy().copy()
        for key, p in zip(KEYS, parameters, strict=True)
        if p.grad is not None
    }


@pytest.mark.parametrize("clip", [None, 0.5, 1e-3])
def test_what_clipping_made_of_them(clip: float | None) -> None:
    parameters = gradients(1)
    reduced = flat(parameters)
    for array in reduced.values():
        array.flags.writeable = False
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip)
    found = explained(delta_of(parameters), layout(), reduced)
    assert found is not None
    for coded, parameter in zip(found.updates[0].gradients, parameters, strict=True):
        assert parameter.grad is not None
        assert coded.form == Form.DENSE
        assert coded.values.tobytes() == parameter.grad.numpy().tobytes()


def test_one_that_is_not_there_stays_away() -> None:
    parameters = gradients(1)
    parameters[1].grad = None
    found = explained(delta_of(parameters), layout(), flat(parameters))
    assert found is not None
    assert [coded.form for coded in found.updates[0].gradients] == [
        Form.DENSE, Form.ABSENT, Form.DENSE, Form.DENSE,
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["noise", "other", "lacking", "shorter", "one of them"])
def test_what_is_not_explained_is_not_taken(what: str) -> None:
    parameters = gradients(1)
    reduced = flat(parameters)
    if what == "noise":
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad += 1e-3 * torch.randn(parameter.shape)
    elif what == "other":
        reduced = flat(gradients(2))
    elif what == "lacking":
        del reduced[KEYS[1]]
    elif what == "shorter":
        reduced[KEYS[0]] = reduced[KEYS[0]][:-1]
    else:  # each parameter has samples of its own
        assert parameters[1].grad is not None
        parameters[1].grad *= 2
    assert explained(delta_of(parameters), layout(), reduced) is None


def test_samples_are_spread_and_other_ones_with_each_step() -> None:
    counts = sample_counts(PIECES)
    assert counts[1:3] == [2, 1]
    assert SAMPLES <= sum(counts) <= SAMPLES + 2 * len(PIECES)
    first, again, next_ = (sample_places(step, 0, PIECES) for step in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, next_, strict=True))
    for piece, places in zip(PIECES, first, strict=True):
        assert (np.diff(places) > 0).all()
        assert piece.start <= places.min() <= places.max() < piece.stop


def test_nobody_but_a_shadow_reads_such_a_record() -> None:
    delta = delta_of(gradients(1))
    data = b"".join(part.tobytes() for part in pack(delta)[1])
    with pytest.raises(Damaged, match="ON_WIRE"):
        unpack(memoryview(data), layout())


def test_another_number_of_samples_is_damage() -> None:
    coded = samples_of([p.grad for p in gradients(1)], PIECES, STEP, 0)
    short = coded[0]._replace(count=coded[0].count - 1, values=coded[0].values[:-4])
    delta = Delta(STEP, [Update("o", None, [short, *coded[1:]])], [], {}, {}, np.empty(0, "u8"))
    data = b"".join(part.tobytes() for part in pack(delta)[1])
    with pytest.raises(Damaged, match="samples"):
        unpack(memoryview(data), layout(), on_wire=True)
