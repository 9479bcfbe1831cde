"""Deltas folded onto a full checkpoint: each step done again with the optimizers' own arithmetic.

After each step the fingerprint is proved. Where no bit depends on how tensors are divided, steps
are folded block by block (`blocks`), many at once if they are there; otherwise one after the other,
over whole tensors and with as many threads as training used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch.optim import Optimizer

from everystep.deltas.delta import Stored
from everystep.errors import Damaged
from everystep.recovery.blocks import Work, can_be_cut, fold_blocks, has_all_slots, moved, pays
from everystep.recovery.joined import Ready, is_beside, join, tensor_of
from everystep.recovery.proof import Expected, Hasher, Prover, Step
from everystep.recovery.replay import Call, Options, Replay, parameter_over
from everystep.recovery.stored import keys_of, placed, plain, references, row_major
from everystep.recovery.threads import intra_op_threads
from everystep.state import raw
from everystep.state.tree import Decoder
from everystep.types import Json, TensorSpec, join_key, spoken

__all__ = ["Folded", "Folding", "Step", "fold"]

BUDGET_BYTES = 1 << 30
"""Of gradients, decoded as far as blocks need them, that are held at a time."""

_NOTHING = torch.empty(0)
"""Stands for a parameter that is somebody else's: it has no gradient, so that no step is taken."""


class Folded(NamedTuple):
    """A state, in the form of a full checkpoint that was read."""

    tree: Json
    specs: dict[str, TensorSpec]
    tensors: dict[str, torch.Tensor]
    """By key, row-major, in host memory."""


def fold(
    tree: Json,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    deltas: Iterable[Step],
    *,
    classes: Mapping[str, type[Optimizer]],
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Folded:
    """Take a state to the step of the last delta.

    Args:
        tree: of a full checkpoint.
        specs: of its tensors.
        tensors: their values in host memory, row-major; they are overwritten.
        deltas: one step after the other, the first of them the one after the full checkpoint.
        classes: optimizers that are not torch's, by full name.
        threads: how many blocks are folded at a time; None: one for each processor.
        progress: called with the number of steps that have just been folded and proved.

    Returns:
        What reading a full checkpoint of the last step would give.

    Raises:
        Damaged: a delta is not what was written, or a step does not give what it gave in training;
            names the step and the first tensor.
        CannotRestore: an optimizer cannot be built, or refuses to step.
    """
    folding = Folding(tree, specs, tensors, classes=classes, threads=threads)
    waiting: list[Ready] = []
    held_bytes = 0
    for step in deltas:
        ready = folding.ready(step)
        if not folding.cuttable(ready):
            folding.fold_together(waiting, progress)
            waiting, held_bytes = [], 0
            folding.fold_alone(ready)
            _report(progress, 1)
            continue
        if waiting and waiting[0].layout.slices != ready.layout.slices:
            folding.fold_together(waiting, progress)
            waiting, held_bytes = [], 0
        waiting.append(ready)
        held_bytes += ready.nbytes
        if held_bytes > BUDGET_BYTES:
            folding.fold_together(waiting, progress)
            waiting, held_bytes = [], 0
    folding.fold_together(waiting, progress)
    return folding.result()


def _report(progress: Callable[[int], None] | None, steps: int) -> None:
    if progress is not None and steps:
        progress(steps)


class Folding:
    """A state that steps are folded onto; see `fold`.

    Args:
        tensors: where some are left out, `partial` must be set. Those that are row-major and in
            host memory are overwritten where they lie.
        partial: parameters that are left out, and their slots, are somebody else's: they are
            neither folded nor proved.

    Raises:
        Damaged: the state does not hold what its optimizers name.
        CannotRestore: an optimizer cannot be built.
    """

    def __init__(
        self,
        tree: Json,
        specs: Mapping[str, TensorSpec],
        tensors: Mapping[str, torch.Tensor],
        *,
        classes: Mapping[str, type[Optimizer]],
        threads: int | None = None,
        partial: bool = False,
    ) -> None:
        self.tree: Json = msgspec.json.decode(msgspec.json.encode(tree))
        self.specs, self._threads = dict(specs), threads or os.cpu_count() or 1
        self.is_partial = partial
        self.tensors = {
            key: placed(tensors[key], spec) for key, spec in specs.items() if key in tensors
        }
        self._prover, self._hasher = Prover(), Hasher()
        self._last: int | None = None
        self._next_options: dict[str, Options] = {}
        """By optimizer: what was set after its last update, and not used yet."""
        keys = {name: keys_of(self.tree, saved) for name, saved in self._optimizers()}
        used = {key for owners in keys.values() for key in owners.values()}
        missing = next((key for key in used if key not in self.tensors), None)
        if missing is not None and not partial:
            raise Damaged(f"an optimizer has {spoken(missing)}, which is not stored")
        parameters = {
            key: parameter_over(self.tensors.get(key, _NOTHING), key) for key in sorted(used)
        }
        decoder = Decoder(self.tensors)
        self._replays = {}
        for name, saved in self._optimizers():
            owners = keys[name]
            groups = [[owners[m, f] for m, f in g["parameters"]] for g in saved["groups"]]
            self._replays[name] = Replay(
                name,
                saved,
                parameters,
                groups,
                owners,
                decoder,
                classes,
                used - self.tensors.keys(),
            )
        every = [key for replay in self._replays.values() for key in replay.keys]
        self._shared = len(set(every)) < len(every)
        self._in_models: dict[object, str] = {
            place: key
            for key, tensor in self.tensors.items()
            if key.startswith("/models/") and (place := raw.same_memory(tensor)) is not None
        }
        self._slot_keys: dict[str, set[str]] = {name: set() for name in self._replays}
        for name in self._replays:
            prefix = join_key("optimizers", name, "state") + "/"
            self._slot_keys[name] = {key for key in self.tensors if key.startswith(prefix)}
            self._renew_slots(name)

    def _optimizers(self) -> Iterator[tuple[str, Json]]:
        yield from self.tree["optimizers"].items()

    # ------------------------------------------------------------ getting ready

    def ready(self, step: Step) -> Ready:
        """Put the pieces of a step's gradients together.

        Raises:
            Damaged: a step is left out, or the ranks' parts do not fit each other or the state.
        """
        if self._last is not None and step.step != self._last + 1:
            raise Damaged("a delta is missing", expected=self._last + 1, found=step.step)
        self._last = step.step
        ready = join(step, self._replays, self.specs, self.tensors)
        calls = [self._with_options(call) for call in ready.calls]
        beside = {stored.spec.key: tensor_of(stored) for stored in ready.delta.tensors}
        for name, options in ready.delta.tree.get("options", {}).items():
            decoded = Decoder({**self.tensors, **beside}).decode(plain(options))
            self._next_options[name] = decoded
        return ready._replace(calls=calls)

    def _with_options(self, call: Call) -> Call:
        since = self._next_options.pop(call.optimizer, None)
        return call if call.options is not None else call._replace(options=since)

    def cuttable(self, ready: Ready) -> bool:
        """Whether a step may be folded block by block."""
        if self._shared or any(self._is_moved(s.spec.key) for s in ready.delta.tensors):
            return False
        return all(self._call_is_cuttable(call) for call in ready.calls)

    def _is_moved(self, key: str) -> bool:
        return any(key in r.keys or key in self._slot_keys[n] for n, r in self._replays.items())

    def _call_is_cuttable(self, call: Call) -> bool:
        replay = self._replays[call.optimizer]
        kind = type(replay.optimizer)
        position = 0
        for number, group in enumerate(replay.groups):
            options = group if call.options is None else call.options[number]
            if _turned_on(group, options):
                return False
            for parameter in group["params"]:
                gradient = call.gradients[position]
                position += 1
                if parameter.device.type != "cpu" or gradient.is_coo:
                    return False
                if not can_be_cut(kind, options, parameter.dtype):
                    return False
                if gradient.absent:
                    continue
                if gradient.dtype != raw.dtype_name(parameter.dtype):
                    return False
                if not has_all_slots(replay, parameter, options):
                    return False
        return True

    # ------------------------------------------------------------ folding

    def advance(self, step: Step) -> None:
        """Fold one step, and prove it.

        Raises:
            Damaged, CannotRestore: see `fold`; the state is of no use any more.
        """
        ready = self.ready(step)
        if pays(self._replays.values()) and self.cuttable(ready):
            self.fold_together([ready], None)
        else:
            self.fold_alone(ready)

    def fold_alone(self, ready: Ready) -> None:
        """Fold one step over whole tensors, and prove it."""
        with intra_op_threads(ready.layout.threads):
            for call in ready.calls:
                self._replays[call.optimizer].step(call)
                self._renew_slots(call.optimizer)
        self._take_over(ready)
        expected = self._told(ready)
        found = self._hasher.hashes(self.tensors, expected)
        wrong = self._prover.differing(ready.step, expected, found)
        if wrong:
            raise min(wrong).error()

    def _told(self, ready: Ready) -> dict[str, Expected]:
        """What the fingerprint of a step tells of what is here."""
        told = self._prover.expected(ready.step, self.specs)
        return {key: one for key, one in told.items() if key in self.tensors}

    def fold_together(self, waiting: list[Ready], progress: Callable[[int], None] | None) -> None:
        """Fold some steps block by block, and prove each."""
        if not waiting:
            return
        slots = {name: self._slots_by_position(name) for name in self._replays}
        in_blocks = moved(self._replays, slots)
        expected = []
        wrong = []
        for ready in waiting:
            self._take_over(ready)
            told = self._told(ready)
            still = {key: one for key, one in told.items() if key not in in_blocks}
            found = self._hasher.hashes(self.tensors, still)
            wrong += self._prover.differing(ready.step, told, found)
            expected.append(told)
        calls: list[dict[str, list[Call]]] = []
        for ready in waiting:
            by_name: dict[str, list[Call]] = {}
            for call in ready.calls:
                by_name.setdefault(call.optimizer, []).append(call)
            calls.append(by_name)
        work = Work(calls, expected, waiting[0].layout.slices)
        for index, key, value in fold_blocks(self._replays, work, slots, self._threads):
            step = waiting[index].step
            wrong += self._prover.differing(step, expected[index], [(key, value)])
        if wrong:
            raise min(wrong).error()
        for name in self._replays:
            self._renew_slots(name)
        _report(progress, len(waiting))

    def _renew_slots(self, name: str) -> None:
        """Look for slots that an optimizer has made or replaced."""
        replay = self._replays[name]
        if not replay.slots_replaced():
            return
        json, found = replay.encode_slots(self._in_models, self.specs)
        for key in self._slot_keys[name] - found.keys():
            self.tensors.pop(key, None)
            self.specs.pop(key, None)
        self._slot_keys[name] = set(found)
        for key, (tensor, spec) in found.items():
            self.tensors[key], self.specs[key] = tensor, spec
        self.tree["optimizers"][name]["slots"] = json

    def _slots_by_position(self, name: str) -> dict[int, dict[str, str]]:
        """Keys of the tensors in each parameter's slot, by the names there."""
        replay = self._replays[name]
        at = {key: position for position, key in enumerate(replay.keys)}
        owners = keys_of(self.tree, self.tree["optimizers"][name])
        return {
            at[owners[owner[0], owner[1]]]: {
                part: value["$tensor"]
                for part, value in slot.items()
                if isinstance(value, dict) and value["$tensor"] in self._slot_keys[name]
            }
            for owner, slot in self.tree["optimizers"][name]["slots"]
            if owners[owner[0], owner[1]] in at
        }

    # ------------------------------------------------------------ what stands beside

    def _take_over(self, ready: Ready) -> None:
        """All of a delta but the gradients."""
        for stored in ready.delta.tensors:
            if not is_beside(stored):
                self._replace(stored)
        for update in ready.delta.updates:
            if update.options is not None:
                self._set_options(update.optimizer, update.options)
        for part, value in ready.delta.tree.items():
            self._replace_part(part, plain(value), ready.step.step)

    def _replace_part(self, part: str, value: Json, step: int) -> None:
        if part in ("extras", "loaders", "rng"):
            self.tree[part] = value
        elif part == "extra_state":
            for model, whole in value.items():
                self.tree["models"][model]["extra_state"] = whole
        elif part == "options":
            for name, options in value.items():
                self._set_options(name, options)
        else:
            raise Damaged(f"a delta with {part!r} in its tree", step=step)

    def _set_options(self, name: str, options: Json) -> None:
        groups = self.tree["optimizers"][name]["groups"]
        for group, its in zip(groups, plain(options), strict=True):
            group["options"] = its

    def _replace(self, stored: Stored) -> None:
        key = stored.spec.key
        new, held = placed(tensor_of(stored), stored.spec), self.tensors.get(key)
        self.specs[key] = stored.spec
        if held is not None and (held.shape, held.dtype) == (new.shape, new.dtype):
            raw.write_into(held, new)
        else:
            self.tensors[key] = new

    # ------------------------------------------------------------ the end

    def result(self) -> Folded:
        """The state as a full checkpoint of it would be read."""
        kept: set[str] = {k for k in self.specs if k.startswith("/models/") and k.count("/") == 3}
        references(self.tree, kept)
        known = self.specs if self.is_partial else self.tensors
        missing = next((key for key in kept if key not in known), None)
        if missing is not None:
            raise Damaged(f"the tree refers to {spoken(missing)}, which is not there")
        specs = {key: spec for key, spec in self.specs.items() if key in kept}
        tensors = {key: row_major(self.tensors[key]) for key in specs if key in self.tensors}
        return Folded(self.tree, specs, tensors)


def _turned_on(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether options differ in more than numbers, or one of them begins or ends to be zero: then
    slots may be made, and other code run."""
    if before is after:
        return False
    names = (before.keys() | after.keys()) - {"params"}
    return any(_kind(before.get(name)) != _kind(after.get(name)) for name in names)


def _kind(value: Any) -> object:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return "number", value == 0
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    return "tensor" if isinstance(value, torch.Tensor) else value
