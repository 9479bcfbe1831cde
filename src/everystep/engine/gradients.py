"""What optimizers consume, seen at the moment at which they do."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from everystep.deltas.hooks import known_now
from everystep.deltas.known import Known
from everystep.engine.capture import versions_of
from everystep.engine.taken import Taken, as_taken, owns_memory
from everystep.state import raw
from everystep.state.optimizers import capture_options
from everystep.state.shards import is_dtensor, shard_of
from everystep.state.slots import is_immutable
from everystep.state.tree import Encoder
from everystep.state.uncompiled import uncompiled
from everystep.state.watch import same_objects
from everystep.types import Json, join_key

_LOOKED_AT = 64
"""Elements of a gradient, to see whether an optimizer writes it."""

_params = operator.itemgetter("params")
_gradient = operator.attrgetter("grad")


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Its parameters, group after group."""
    return list(chain.from_iterable(map(_params, optimizer.param_groups)))


class Apart(Encoder):
    """Holds tensors of an update's options under keys that no state has, as they are now."""

    def __init__(self, update: int) -> None:
        super().__init__()
        self._prefix = join_key("updates", str(update))

    def tensor(self, value: torch.Tensor, key: str, *, replicated: bool = False) -> str:
        """As in `Encoder`; copied."""
        return super().tensor(value.detach().clone(), self._prefix + key)


class Options:
    """The hyperparameters of one optimizer, and whether they have changed."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self._name, self._optimizer = name, optimizer
        self._values: list[dict[str, Any]] = []
        self._seen: list[object] = []
        """Names and values, as they were last, where none of them can change by itself."""

    def changed(self, encoder: Encoder) -> Json | None:
        """A list of every group's options as in the tree of a full checkpoint; None: they are as
        they were when this was asked last."""
        groups = self._optimizer.param_groups
        seen = list(chain.from_iterable((*group, *group.values()) for group in groups))
        if len(seen) == len(self._seen) and same_objects(seen, self._seen):
            return None
        values = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        immutable = all(is_immutable(v) for group in values for v in group.values())
        self._seen = seen if immutable else []
        plain = not any(
            isinstance(v, torch.Tensor | list | dict) for g in values for v in g.values()
        )
        if plain and values == self._values:
            return None
        self._values = values if plain else []
        return [
            capture_options(self._name, index, group, encoder) for index, group in enumerate(groups)
        ]


class Source:
    """One optimizer whose gradients are recorded.

    Args:
        take: called in the training thread with each call of `step()`, before it.
        done: called after it.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        take: Callable[[Source, str | None], None],
        done: Callable[[Source], None],
    ) -> None:
        self.name, self.optimizer = name, optimizer
        self.parameters = parameters_of(optimizer)
        self._sharded = any(map(is_dtensor, self.parameters))
        self.options = Options(name, optimizer)
        self._take, self._done = take, done
        self._last: list[weakref.ref[torch.Tensor]] = []
        self._last_ids: set[int] = set()
        self._last_versions: list[int] = []
        self._sample: tuple[torch.Tensor, int] | None = None
        self._looks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._replaced = 0
        self._distrusted = False
        self._owned = False
        self._depth = 0
        self._versions: list[int] = []
        self._places: list[int] = []
        # torch's own optimizers write to the memory that is there
        self._moves = not type(optimizer).__module__.startswith("torch.optim.")
        self.note(places=True)
        self._handles = [
            optimizer.register_step_pre_hook(self._pre),
            optimizer.register_step_post_hook(self._post),
        ]

    @uncompiled
    def _pre(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:  # a subclass calls the step() that it overrides
            return
        problem = None
        given = [*args[1:], *kwargs.values()]  # the first is the optimizer
        if any(thing is not None for thing in given):
            problem = "step() was given a closure, which computes other gradients"
        elif not self._is_last():
            problem = "a hook that was registered later may have changed the gradients"
        elif not self.same_parameters():
            problem = "the optimizer has got other parameters"
        self._take(self, problem)

    @uncompiled
    def _post(self, *_: object) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._look_again()
            self._done(self)

    def _is_last(self) -> bool:
        hooks: Any = self.optimizer._optimizer_step_pre_hooks
        return bool(next(reversed(hooks)) == self._handles[0].id)

    def come_last(self) -> None:
        """Have our hook called after all others. Not while hooks are being called."""
        hooks: Any = self.optimizer._optimizer_step_pre_hooks
        if not self._is_last():
            hooks.move_to_end(self._handles[0].id)

    def unfinished(self) -> str | None:
        """Which call of `step()` has not come to its end, in words; it is forgotten."""
        depth, self._depth = self._depth, 0
        return f"step() of {self.name} failed" if depth else None

    def same_parameters(self) -> bool:
        """Whether the optimizer updates the parameters that it did."""
        now = parameters_of(self.optimizer)
        return len(now) == len(self.parameters) and same_objects(now, self.parameters)

    def renew(self) -> None:
        """It updates other parameters from now on."""
        self.parameters = parameters_of(self.optimizer)
        self._sharded = any(map(is_dtensor, self.parameters))
        self._last, self._last_ids, self._last_versions = [], set(), []
        self._replaced, self._owned = 0, False
        self.note(places=True)

    def taken(self) -> Taken:
        """The gradients of all parameters, and what is known of some of them."""
        whole = list(map(_gradient, self.parameters))
        present = [gradient for gradient in whole if gradient is not None]
        scale = self.scale()
        lasting = self._lasting(present) and scale is None  # fused kernels unscale in place
        known: Mapping[Any, Known] = known_now()
        if not lasting:
            known = self._confirmed(known)
        local, versions = whole, self._last_versions
        if set(map(type, present)) != {torch.Tensor}:
            local = [None if grad is None else _local(grad) for grad in whole]
            versions = versions_of(grad for grad in local if grad is not None)
        return Taken(
            self.name, self.parameters, local, versions, known, lasting, self.distrust, scale=scale
        )

    def _confirmed(self, told: Mapping[Any, Known]) -> dict[Any, Known]:
        """What still holds, with the values that are there now."""
        found = {}
        for parameter in self.parameters if told else ():
            its, gradient = told.get(parameter), parameter.grad
            if its is not None and gradient is not None and its.holds(gradient):
                # a write through .data is seen in the values alone
                values = torch.take(gradient.detach(), its.indices.long())
                found[parameter] = its._replace(values=values)
        return found

    def _lasting(self, present: Sequence[torch.Tensor]) -> bool:
        ids = set(map(id, present))
        again = False
        if not ids.isdisjoint(self._last_ids):  # or the address is another tensor's by now
            again = any(id(grad) in ids for ref in self._last if (grad := ref()) is not None)
        self._replaced = 0 if again or not self._last else self._replaced + 1
        self._last, self._last_ids = list(map(weakref.ref, present)), ids
        self._last_versions = versions_of(present)
        if self._sample is not None and self._sample[0]._version != self._sample[1]:
            self._distrusted = True
        stay = self._replaced >= 2 and not self._distrusted
        self._sample, self._looks = None, []
        if present and not stay:  # the others are gone when this is looked at
            least = min(present, key=torch.Tensor.numel)
            self._sample = least, least._version
            self._looks = [(grad, _look(grad)) for grad in map(_local, present)]
        if stay and not self._owned:  # later on it is looked at beside training
            self._owned = all(map(owns_memory, present))
        return stay and self._owned

    def _look_again(self) -> None:
        """Whether the optimizer itself writes gradients, be it through `.data`."""
        looks, self._looks = self._looks, []
        if not all(torch.equal(_look(gradient), before) for gradient, before in looks):
            self._distrusted = True

    def used_gradients_written(self, taken: Sequence[Taken]) -> bool:
        """Whether gradients were written after the optimizer had used them, as the backward pass
        of another model's loss does: they are copied from now on.

        Args:
            taken: of this step.

        Returns:
            whether it matters, since they have not been copied.
        """
        if taken and all(one.lasting for one in taken):
            written = not all(map(as_taken, taken))
        else:
            then = zip([ref() for ref in self._last], self._last_versions, strict=True)
            written = any(its is not None and its._version != version for its, version in then)
        self._distrusted = self._distrusted or written
        return written and any(one.lasting for one in taken)

    def distrust(self) -> None:
        """Gradients do not stay as they are: copy them from now on."""
        self._distrusted = True

    def note(self, *, places: bool = False) -> bool:
        """Whatever was written until now is accounted for.

        Args:
            places: and so is other memory that parameters have been given; else only where the
                optimizer may have done that.

        Returns:
            Whether it was.
        """
        self._versions = versions_of(self.parameters)
        if not (places or self._moves):
            return False
        before, self._places = self._places, self._addresses()
        return before != self._places

    def written_beside(self, *, places: bool = True) -> str | None:
        """Which parameter was written, or given other memory, since, in words; writes through
        `.data` are not seen.

        Args:
            places: False: do not look for other memory now.
        """
        now = versions_of(self.parameters)
        here = self._addresses() if places else self._places
        if now == self._versions and here == self._places:
            return None
        before = zip(self._versions, self._places, strict=True)
        pairs = zip(zip(now, here, strict=True), before, strict=False)
        position = next((n for n, (one, other) in enumerate(pairs) if one != other), len(now))
        return f"parameter {position} of {self.name} was changed outside of the optimizer"

    def _addresses(self) -> list[int]:
        """Of the parameters, or their local parts."""
        local: Iterable[torch.Tensor] = self.parameters
        if self._sharded:
            local = [getattr(tensor, "_local_tensor", tensor) for tensor in local]
        return list(map(torch.Tensor.data_ptr, local))

    def scale(self) -> Json | None:
        """What a gradient scaler has left for a fused kernel: float32 bits."""
        found = [getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf")]
        if all(value is None for value in found):
            return None
        return [None if value is None else _bits(value) for value in found]

    def close(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()


def _local(gradient: torch.Tensor) -> torch.Tensor:
    if type(gradient) is torch.Tensor and not gradient.requires_grad:  # as nearly all are
        return gradient
    return shard_of(gradient)[0].detach()


def _look(gradient: torch.Tensor) -> torch.Tensor:
    """The bits of some elements."""
    values = gradient._values() if gradient.layout == torch.sparse_coo else gradient
    if values.layout != torch.strided:
        return torch.empty(0)
    flat = values.detach().reshape(-1)
    return raw.plain_bits(flat[:: max(1, flat.numel() // _LOOKED_AT)].clone())


def _bits(value: torch.Tensor) -> int:
    return int(value.detach().float().cpu().reshape(1).view(torch.int32)) & 0xFFFFFFFF
