"""Adam and AdamW of float32 parameters, many steps at once in a compiled loop, with torch's bits.

The loop is used only where a trial against torch, made once in each process, gave equal bits. Part
of what a build of torch decides is its square root: MKL's, where it has MKL, which is not correctly
rounded and is called here too.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from everystep.recovery.gradients import Gradient
from everystep.recovery.replay import Call, Options, Replay
from everystep.state import raw

try:
    from everystep.recovery import _adam
except ImportError:  # it was built without a compiler, or the processor has no such instructions
    kernel: Any = None
else:
    kernel = _adam

_KINDS = (torch.optim.Adam, torch.optim.AdamW)
_FLAGS = ("amsgrad", "maximize", "fused", "capturable", "differentiable")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = np.dtype([("at", "u8"), ("values", "u8"), ("count", "i8"), ("numbers", "f4", 8)])
"""As in _adam.c."""


class _Variant(NamedTuple):
    """What a build of torch decides, as in _adam.c."""

    fused: int
    root: int


class _Rows(NamedTuple):
    """The steps of one parameter."""

    rows: npt.NDArray[Any]
    ends: list[int]
    """How many of the rows belong to the first 0, 1, … training steps."""
    counts: list[float]
    """What the optimizer has counted after so many training steps."""
    full: dict[int, Gradient]
    """By row: those of which not only some values are given."""


class Plan:
    """Some training steps of one optimizer, ready for the compiled loop.

    Args:
        replay: the optimizer.
        calls: of each training step, with decoded positions (`Gradient.prepare`).
    """

    def __init__(self, replay: Replay, calls: Sequence[Sequence[Call]]) -> None:
        self._replay, self._variant = replay, _Variant(0, 0)
        self._rows: dict[int, _Rows] = {}
        if type(replay.optimizer) not in _KINDS:
            return
        paired: list[list[tuple[Call, Options]]] = []
        options = replay.groups
        for of_step in calls:
            paired.append([])
            for call in of_step:
                options = options if call.options is None else call.options
                if call.scale is not None or not all(map(self._is_plain, options)):
                    return
                paired[-1].append((call, options))
        groups = [group for of_step in paired for _, its in of_step for group in its]
        ways = {bool(group.get("foreach")) for group in groups}
        found = _variant(ways.pop()) if len(ways) == 1 else None
        if found is None:
            return
        self._variant = found
        numbers = [n for n, group in enumerate(replay.groups) for _ in group["params"]]
        for position, parameter in enumerate(replay.parameters):
            slot = replay.optimizer.state.get(parameter)
            if slot and _is_usual(parameter, slot):
                self._rows[position] = _rows_of(position, numbers[position], slot["step"], paired)

    def _is_plain(self, group: Mapping[str, Any]) -> bool:
        numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        is_adamw = type(self._replay.optimizer) is torch.optim.AdamW
        return (
            not any(group.get(flag) for flag in _FLAGS)
            and all(type(number) in (float, int) and abs(number) < 1e30 for number in numbers)
            and 0.51 < group["betas"][0] < 1  # else lerp is computed in another way
            and 0 <= group["betas"][1] < 1
            and (is_adamw or not group["weight_decay"] or bool(group.get("decoupled_weight_decay")))
        )

    def takes(self, position: int) -> bool:
        """Whether the parameter there can be folded here."""
        return position in self._rows

    def fold(self, position: int, start: int, stop: int, since: int, until: int) -> None:
        """Do some of the training steps, from number `since` to `until` (exclusive, from 0 on), on
        elements `start` to `stop` of a parameter and its moments.

        Raises:
            Damaged: a gradient is not what an encoder makes.
        """
        rows, ends, _, full = self._rows[position]
        parameter = self._replay.parameters[position]
        slot = self._replay.optimizer.state[parameter]
        at = [tensor.data_ptr() + 4 * start for tensor in (parameter, *(slot[n] for n in _MOMENTS))]
        first, end = ends[since], ends[until]
        while first < end:
            last = first
            while last < end and last not in full:
                last += 1
            some = rows[first:last]
            if first == last:
                values = torch.empty(stop - start)
                full[first].fill(values, start)
                last, some = first + 1, rows[first : first + 1].copy()
                some["values"] = values.data_ptr()
            kernel.fold(*at, start, stop - start, some, *self._variant)
            first = last

    def count(self, position: int, until: int) -> None:
        """Let a parameter's slot say how many steps were done before training step `until`."""
        slot = self._replay.optimizer.state[self._replay.parameters[position]]
        slot["step"].fill_(self._rows[position].counts[until])


def _is_usual(parameter: torch.Tensor, slot: Mapping[str, Any]) -> bool:
    count, *moments = (slot.get(name) for name in ("step", *_MOMENTS))
    return (
        slot.keys() == {"step", *_MOMENTS}
        and isinstance(count, torch.Tensor)
        and count.dtype == torch.float32
        and count.numel() == 1
        and bool(count >= 0)
        and all(
            isinstance(tensor, torch.Tensor)
            and tensor.dtype == torch.float32
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and tensor.shape == parameter.shape
            for tensor in (parameter, *moments)
        )
    )


def _rows_of(
    position: int, group: int, count: torch.Tensor, calls: list[list[tuple[Call, Options]]]
) -> _Rows:
    rows: list[Any] = []
    found = _Rows(np.empty(0, _STEP), [0], [count.item()], {})
    count = count.clone()
    for of_step in calls:
        for call, options in of_step:
            gradient = call.gradients[position]
            if gradient.absent:
                continue
            count += 1
            sparse = gradient.sparse
            if sparse is None:
                found.full[len(rows)] = gradient
                where = (0, 0, -1)
            else:
                where = (_address(sparse.at), _address(sparse.bits), len(sparse.at))
            rows.append((*where, _numbers(options[group], count.item())))
        found.ends.append(len(rows))
        found.counts.append(count.item())
    return found._replace(rows=np.array(rows, _STEP))


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _numbers(group: Mapping[str, Any], count: float) -> tuple[float, ...]:
    """As torch computes them, in float64."""
    rate, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    return (
        1 - beta1, beta2, 1 - beta2, 1 - rate * decay if decay else 1.0,
        (1 - beta2**count) ** 0.5, group["eps"], -(rate / (1 - beta1**count)), 0.0,
    )  # fmt: skip


# ---------------------------------------------------------------- the trial

_ODD = [0, 1, 1 - 2**31, -(2**31), 0x7F7FFFFF, 0x7F800000, -0x800000, 0x7F800001, 0x7FC12345]
"""Bits of zeros, denormals, the greatest number, infinities, and NaNs with a payload."""

_OPTIONS: list[dict[str, Any]] = [
    {"lr": 1e-3, "weight_decay": 0.0},
    {"lr": 0.3, "betas": (0.9, 0.95), "weight_decay": 0.1},
    {"lr": 3e-5, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.01},
    {"lr": 2.0, "betas": (0.95, 0.5), "eps": 0.0, "weight_decay": 0.0},
]
_COUNTS = (0.0, 6.0, 12_345.0, 3e6)


@functools.cache
def _variant(foreach: bool) -> _Variant | None:
    """The one that has torch's bits in this process; None: not one.

    Args:
        foreach: of many tensors in one call, or of one after the other.
    """
    if kernel is None:
        return None
    roots = dict.fromkeys((_root_of_mkl() or 0, 0))
    variants = itertools.starmap(_Variant, itertools.product((3, 0, 1, 2), roots))
    return next((one for one in variants if all(_trials(one, foreach))), None)


def _root_of_mkl() -> int | None:
    """The address of MKL's vmsSqrt in the torch at hand."""
    try:
        found = ctypes.CDLL(torch._C.__file__).vmsSqrt
    except (AttributeError, OSError):
        return None
    return ctypes.cast(found, ctypes.c_void_p).value


def _trials(variant: _Variant, foreach: bool) -> Iterator[bool]:
    for number, (options, count) in enumerate(zip(_OPTIONS, _COUNTS, strict=True)):
        values, options = _values(number), options | {"foreach": foreach}
        yield agrees(torch.optim.AdamW, options, count, values, variant)
        yield agrees(torch.optim.Adam, options | {"weight_decay": 0.0}, count, values, variant)


def _values(seed: int) -> torch.Tensor:
    """float32 (4, n): parameters, moments and gradients of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    usual = torch.randn(4, 20_003, generator=generator)
    wide = usual * torch.exp(20 * torch.randn(usual.shape, generator=generator))
    usual[:, ::7] = 0
    usual[0, ::3] = 0  # there the last bit of an update is seen
    wide[0, ::3] = 0
    odd = torch.tensor(_ODD).to(torch.int32).view(torch.float32)
    odd = torch.cartesian_prod(odd, odd, odd, odd).T
    values = torch.cat([usual, wide, odd], 1)
    values[2] = values[2].square()
    return values


def agrees(
    kind: Any, options: Mapping[str, Any], count: float, values: torch.Tensor, variant: _Variant
) -> bool:
    """Whether three steps give the same bits in the compiled loop and in torch.

    Args:
        kind: Adam or AdamW.
        options: to build it with.
        count: of the steps before.
        values: float32 (4, n): parameter, moments, gradient.
        variant: of the loop.
    """
    parameter, first, second, gradient = (row.clone() for row in values)
    theirs = torch.nn.Parameter(parameter.clone())
    optimizer = kind([theirs], **options)
    slot = {"step": torch.tensor(count), "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    optimizer.state[theirs] = slot
    theirs.grad = gradient
    step: Any = inspect.unwrap(kind.step)
    rows = np.zeros(3, _STEP)
    rows["count"], rows["values"] = -1, gradient.data_ptr()
    with torch.no_grad():
        for row in rows:
            step(optimizer)
            row["numbers"] = _numbers(optimizer.param_groups[0], slot["step"].item())
    kernel.fold(
        parameter.data_ptr(), first.data_ptr(), second.data_ptr(), 0, len(gradient), rows, *variant
    )
    pairs = [(parameter, theirs), (first, slot["exp_avg"]), (second, slot["exp_avg_sq"])]
    return all(raw.same_bits(one, other.detach()) for one, other in pairs)
