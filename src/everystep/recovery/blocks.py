"""Many steps folded onto one block of elements after the other, each while it is in the cache.

Blocks are cut only where no bit depends on where they are: `can_be_cut` says for which optimizers,
dtypes and options that was measured (docs/exactness.md). Each block is stepped by the optimizer's
own code, or by a compiled loop with its bits (`adam`), in several threads that each use one.
"""

from __future__ import annotations

import collections
import inspect
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import xxhash
from torch.optim import Optimizer

from everystep.errors import CannotRestore
from everystep.recovery import adam
from everystep.recovery.gradients import Gradient, in_order_of
from everystep.recovery.proof import Expected
from everystep.recovery.replay import Call, Replay, replace_options, scaled, set_gradient
from everystep.recovery.threads import intra_op_threads
from everystep.state import raw
from everystep.state.fingerprint import CUT_ELEMENTS, LARGE_BYTES
from everystep.state.optimizers import ELEMENTWISE
from everystep.types import spoken

BLOCK_ELEMENTS = 1 << 17
"""Where several steps are folded onto each."""
_ALONE = 4
"""Blocks are so many times larger for one step, which finds none of them in the cache."""

_SINGLE = (torch.float32, torch.float64)


def can_be_cut(kind: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether a step over any blocks gives the bits of a step over whole tensors, with whatever
    number of threads: blocks begin at multiples of 64 elements."""
    if kind not in ELEMENTWISE or options.get("capturable") or options.get("differentiable"):
        return False
    if dtype in _SINGLE:
        return True
    # in bf16 the last elements of a thread's share are rounded another way by add(alpha=)
    return (
        dtype == torch.bfloat16
        and not options.get("fused")
        and (kind is torch.optim.AdamW or (kind is torch.optim.Adam and _adds_nothing(options)))
    )


def _adds_nothing(options: Mapping[str, Any]) -> bool:
    return options.get("weight_decay") == 0 or bool(options.get("decoupled_weight_decay"))


def pays(replays: Collection[Replay]) -> bool:
    """Whether to cut for one step alone. Most of torch's make temporary tensors as large as
    parameters, whose memory costs more to get than their arithmetic; SGD and fused ones do not."""
    groups = [group for replay in replays for group in replay.groups]
    elements = sum(parameter.numel() for group in groups for parameter in group["params"])
    return (
        elements >= _ALONE * BLOCK_ELEMENTS
        and not any(group.get("fused") for group in groups)
        and not any(type(replay.optimizer) is torch.optim.SGD for replay in replays)
    )


def has_all_slots(replay: Replay, parameter: torch.Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a step makes no new slots for a parameter."""
    slot = replay.optimizer.state.get(parameter)
    if not slot:
        stateless = type(replay.optimizer) is torch.optim.SGD and not group["momentum"]
        return stateless and not group.get("fused")
    return not any(value is None or isinstance(value, dict | list) for value in slot.values())


class Work(NamedTuple):
    """What is folded at once."""

    calls: list[dict[str, list[Call]]]
    """Of each step, by optimizer."""
    expected: list[dict[str, Expected]]
    """What fingerprints tell after each step, by key."""
    slices: int
    """Steps in a round of fingerprints."""


class _Portion(NamedTuple):
    """A range of elements of one parameter."""

    position: int
    """Of the parameter in the optimizer."""
    start: int
    stop: int
    whole: bool


_Task = list[list[_Portion]]
"""Portions that are stepped together; one such list after the other."""

_Watched = tuple[str, torch.Tensor, int]
"""Key, memory, and number of its first element in the whole."""

Found = list[tuple[int, str, int]]
"""(index of the step, key, hash)"""


def fold_blocks(
    replays: Mapping[str, Replay],
    work: Work,
    slots: Mapping[str, Mapping[int, Mapping[str, str]]],
    threads: int,
) -> Found:
    """Fold some steps onto all optimizers.

    Args:
        slots: of each optimizer, of each parameter by position, keys of its slots by name.
        threads: how many blocks are folded at the same time.

    Returns:
        the hashes that were asked for of parameters and slots.

    Raises:
        CannotRestore, Damaged: a step cannot be done again, or a hash was not taken.
    """
    size = BLOCK_ELEMENTS * (_ALONE if len(work.calls) == 1 else 1)
    tasks = [(r, task) for r in replays.values() for task in _tasks(r, work.slices, size)]
    tasks.sort(key=lambda pair: -_elements(pair[1]))
    found: Found = []
    with intra_op_threads(1), ThreadPoolExecutor(threads, "everystep-fold") as pool:
        distinct = {id(g): g for calls in work.calls for of in calls.values() for c in of
                    for g in c.gradients}  # fmt: skip
        list(pool.map(Gradient.prepare, distinct.values()))
        plans = {
            name: adam.Plan(replay, [calls.get(name, []) for calls in work.calls])
            for name, replay in replays.items()
        }
        jobs = [
            pool.submit(_Fold(replay, work, slots[replay.name], plans[replay.name]).run, task)
            for replay, task in tasks
        ]
        try:
            results = [job.result() for job in jobs]
        finally:
            for job in jobs:
                job.cancel()
    for (replay, _), (hashes, rest) in zip(tasks, results, strict=True):
        found += hashes
        for position, slot in rest:
            _write_back(replay, position, slot)
    hashed = {(index, key) for index, key, _ in found}
    for key in moved(replays, slots):
        for index, told in enumerate(work.expected):
            if key in told and (index, key) not in hashed:
                raise CannotRestore(f"{spoken(key)} was not proved")
    for name, replay in replays.items():
        last = [c.options for calls in work.calls for c in calls.get(name, []) if c.options]
        if last:
            replay.set_options(last[-1])
    return found


def moved(
    replays: Mapping[str, Replay], slots: Mapping[str, Mapping[int, Mapping[str, str]]]
) -> set[str]:
    """The keys of all tensors that steps change."""
    keys = {key for replay in replays.values() for key in replay.keys}
    return keys.union(*(named.values() for by in slots.values() for named in by.values()))


def _elements(task: _Task) -> int:
    return sum(portion.stop - portion.start for block in task for portion in block)


def _tasks(replay: Replay, slices: int, size: int) -> Iterator[_Task]:
    small: list[_Portion] = []
    room = size
    for position, parameter in enumerate(replay.parameters):
        elements = parameter.numel()
        if elements <= size or not _is_flat(replay, parameter):
            if small and elements > room:
                yield [small]
                small, room = [], size
            small.append(_Portion(position, 0, elements, True))
            room -= elements
            continue
        length = elements
        if elements >= LARGE_BYTES:  # what is hashed at one step stays in one task
            share = -(-elements // slices)
            length = -(-share // CUT_ELEMENTS) * CUT_ELEMENTS
            length *= max(1, size // length)
        for first in range(0, elements, length):
            last = min(first + length, elements)
            cuts = range(first, last, size)
            yield [[_Portion(position, start, min(start + size, last), False)] for start in cuts]
    if small:
        yield [small]


def _is_flat(replay: Replay, parameter: torch.Tensor) -> bool:
    """Whether parameter and slots all lie in row-major order."""
    slot = replay.optimizer.state.get(parameter) or {}
    return parameter.is_contiguous() and all(
        value.is_contiguous() for value in slot.values() if isinstance(value, torch.Tensor)
    )


def _write_back(replay: Replay, position: int, slot: Mapping[str, Any]) -> None:
    """What a parameter has once, however it was cut."""
    held = replay.optimizer.state[replay.parameters[position]]
    for name, value in slot.items():
        if isinstance(value, torch.Tensor):
            raw.write_into(held[name], value)
        else:
            held[name] = value


class _Fold:
    """Folds steps onto the blocks of one task."""

    def __init__(
        self, replay: Replay, work: Work, slots: Mapping[int, Mapping[str, str]], plan: adam.Plan
    ) -> None:
        self._replay, self._work, self._slots, self._plan = replay, work, slots, plan
        self._step: Any = inspect.unwrap(type(replay.optimizer).step)
        self._open: dict[tuple[int, str], Any] = {}
        self._found: Found = []
        self._once: list[tuple[int, dict[str, Any]]] = []

    def run(self, task: _Task) -> tuple[Found, list[tuple[int, dict[str, Any]]]]:
        """The hashes, and what each parameter of which the first element is here has once."""
        torch.set_num_threads(1)  # in this thread too
        with torch.no_grad():
            for block in task:
                rest = []
                for portion in block:
                    if self._plan.takes(portion.position):
                        self._fold_compiled(portion)
                    else:
                        rest.append(portion)
                if rest:
                    self._fold(rest)
        return self._found, self._once

    def _fold_compiled(self, portion: _Portion) -> None:
        position, start, stop, _ = portion
        held = self._replay.parameters[position]
        slot = self._replay.optimizer.state[held]
        own = {name: _cut(v, portion) if _is_cut(v, held) else v for name, v in slot.items()}
        watched = self._watched(portion, _cut(held.detach(), portion), own)
        since, steps = 0, len(self._work.calls)
        for until in range(1, steps + 1):
            due = [one for one in watched if self._due(until - 1, *one) is not None]
            if due or until == steps:
                self._plan.fold(position, start, stop, since, until)
                if start == 0:
                    self._plan.count(position, until)
                for one in due:
                    self._hash(until - 1, *one)
                since = until

    def _fold(self, block: list[_Portion]) -> None:
        optimizer, parameters, groups = self._optimizer_of(block)
        buffers = [torch.empty(0)] * len(block)
        pairs = list(zip(block, parameters, strict=True))
        watched = [one for portion, p in pairs
                   for one in self._watched(portion, p.detach(), optimizer.state[p])]  # fmt: skip
        for index, calls in enumerate(self._work.calls):
            for call in calls.get(self._replay.name, ()):
                if call.options is not None:
                    for number, group in groups.items():
                        replace_options(group, call.options[number])
                for place, (portion, parameter) in enumerate(pairs):
                    gradient = call.gradients[portion.position]
                    buffers[place] = _put(gradient, portion, parameter, buffers[place])
                with scaled(optimizer, call.scale, parameters):
                    self._step(optimizer)
            for one in watched:
                self._hash(index, *one)
        for portion, parameter in pairs:
            if not portion.whole:
                self._keep(portion, optimizer.state.get(parameter, {}))

    def _optimizer_of(
        self, block: list[_Portion]
    ) -> tuple[Any, list[torch.nn.Parameter], dict[int, dict[str, Any]]]:
        """An optimizer of these portions, its parameters, and its groups by their number."""
        master = self._replay.optimizer
        optimizer: Any = object.__new__(type(master))
        vars(optimizer).update(vars(master))
        optimizer.state = collections.defaultdict(dict)
        numbers = [n for n, group in enumerate(master.param_groups) for _ in group["params"]]
        groups: dict[int, dict[str, Any]] = {}
        parameters = []
        for portion in block:
            held = self._replay.parameters[portion.position]
            slot = master.state.get(held)
            parameter = held
            if not portion.whole:
                parameter = torch.nn.Parameter(_cut(held.detach(), portion))
            if slot is not None:
                optimizer.state[parameter] = slot if portion.whole else {
                    name: _cut_slot(value, held, portion) for name, value in slot.items()
                }  # fmt: skip
            number = numbers[portion.position]
            if number not in groups:
                groups[number] = {**master.param_groups[number], "params": []}
            groups[number]["params"].append(parameter)
            parameters.append(parameter)
        optimizer.param_groups = list(groups.values())
        return optimizer, parameters, groups

    def _watched(
        self, portion: _Portion, parameter: torch.Tensor, slot: Mapping[str, Any]
    ) -> list[_Watched]:
        """What of a portion may have to be hashed."""
        found = [(self._replay.keys[portion.position], parameter, portion.start)]
        held = self._replay.parameters[portion.position]
        for name, key in self._slots.get(portion.position, {}).items():
            cut = not portion.whole and _is_cut(self._replay.optimizer.state[held][name], held)
            if portion.start == 0 or cut:
                found.append((key, slot[name], portion.start if cut else 0))
        return found

    def _due(
        self, index: int, key: str, tensor: torch.Tensor, start: int
    ) -> tuple[int, int] | None:
        """Which elements of a tensor are asked for after a step."""
        expected = self._work.expected[index].get(key)
        if expected is None:
            return None
        first = max(expected.start, start)
        last = min(expected.stop, start + tensor.numel())
        return (first, last) if first < last else None

    def _hash(self, index: int, key: str, tensor: torch.Tensor, start: int) -> None:
        """Hash what of a tensor is asked for after a step; it may go on in the next block."""
        due = self._due(index, key, tensor, start)
        if due is None:
            return
        first, last = due
        state = self._open.setdefault((index, key), xxhash.xxh3_64())
        for chunk in raw.host_chunks(tensor, first - start, last - start):
            state.update(chunk)
        if last == self._work.expected[index][key].stop:
            self._found.append((index, key, self._open.pop((index, key)).intdigest()))

    def _keep(self, portion: _Portion, slot: dict[str, Any]) -> None:
        held = self._replay.parameters[portion.position]
        master = self._replay.optimizer.state.get(held, {})
        for name, value in slot.items():
            if _is_cut(master[name], held):
                target = _cut(master[name], portion)
                if value.data_ptr() != target.data_ptr():  # the step has put another in its place
                    target.copy_(value)
        if portion.start == 0 and slot:
            once = {name: v for name, v in slot.items() if not _is_cut(master[name], held)}
            self._once.append((portion.position, once))


def _is_cut(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == parameter.numel()


def _cut(tensor: torch.Tensor, portion: _Portion) -> torch.Tensor:
    return tensor.view(-1)[portion.start : portion.stop]


def _cut_slot(value: Any, parameter: torch.Tensor, portion: _Portion) -> Any:
    if _is_cut(value, parameter):
        return _cut(value, portion)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _put(
    gradient: Gradient, portion: _Portion, parameter: torch.nn.Parameter, buffer: torch.Tensor
) -> torch.Tensor:
    """Set a portion's gradient; the memory to use for the next one."""
    if gradient.absent:
        parameter.grad = None
        return buffer
    length = portion.stop - portion.start
    if buffer.numel() != length or buffer.dtype != parameter.dtype:
        buffer = torch.empty(length, dtype=parameter.dtype)
    gradient.fill(buffer, portion.start)
    set_gradient(parameter, in_order_of(parameter.detach(), buffer))
    return buffer
