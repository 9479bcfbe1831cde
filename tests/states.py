"""Training states, compared bit for bit."""

from __future__ import annotations

import collections
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer


class FrozenTensor:
    """A copy of a tensor's bits, taken without any arithmetic."""

    def __init__(self, tensor: torch.Tensor) -> None:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        plain = local.detach().resolve_conj().resolve_neg().cpu()
        self.dtype, self.shape = local.dtype, tuple(local.shape)
        self.stride = _dense_stride(local)
        size = plain.element_size()
        as_bytes = plain.contiguous() if size == 16 else _as_integers(plain, size).contiguous()
        flat = as_bytes.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
        self.items: np.ndarray[Any, Any] = flat.copy().reshape(-1, size)

    def difference(self, other: FrozenTensor) -> str | None:
        """The first thing in which they differ; None if they are one."""
        for what in ("dtype", "shape", "stride"):
            one, two = getattr(self, what), getattr(other, what)
            if one != two:
                return f"{what} {one} / {two}"
        unequal = np.nonzero((self.items != other.items).any(axis=1))[0]
        if not len(unequal):
            return None
        first = int(unequal[0])
        one, two = (x.items[first][::-1].tobytes().hex() for x in (self, other))
        return f"differs first at element {first}: {one} / {two}"


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """None where the order of elements is row-major, or memory is not dense."""
    kept = torch.empty_like(tensor, device="meta").stride()  # torch keeps those of dense tensors
    if tensor.is_contiguous() or kept != tensor.stride():
        return None
    return tuple(step if n != 1 else 0 for step, n in zip(kept, tensor.shape, strict=True))


def _as_integers(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


class Frozen:
    """What `frozen` has made of a value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def frozen(value: Any) -> Frozen:
    """A deep copy in which tensors and arrays are bits. Two places that hold one tensor object (or
    one memory) hold one `FrozenTensor`."""
    return value if isinstance(value, Frozen) else Frozen(_frozen(value, {}))


class _Leaf(NamedTuple):
    kind: str
    value: Any


class _Items(NamedTuple):
    kind: str
    entries: dict[Any, Any]
    more: Any = None


def _key(key: Any) -> _Leaf:
    return _Leaf(type(key).__name__, key if isinstance(key, str) else repr(key))


def _frozen(value: Any, seen: dict[Any, FrozenTensor]) -> Any:
    if isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo:
        parts = {"indices": value._indices(), "values": value._values()}
        frozen_parts = {_key(name): _frozen(part, seen) for name, part in parts.items()}
        return _Items("sparse", frozen_parts, (value.shape, value.is_coalesced()))
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        where = (local.data_ptr(), local.dtype, local.shape, local.stride(), local.is_conj())
        return seen.setdefault(where if local.numel() else id(value), FrozenTensor(value))
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return _Leaf(f"array {value.dtype.str} {value.shape}", value.tobytes())
    if isinstance(value, np.generic):
        return _Leaf(f"scalar {value.dtype.str}", value.tobytes())
    if isinstance(value, Mapping):
        entries = {_key(k): _frozen(v, seen) for k, v in value.items()}
        return _Items(kind, entries, getattr(value, "_metadata", None))
    if isinstance(value, (list, tuple, collections.deque)):
        entries = {_key(i): _frozen(item, seen) for i, item in enumerate(value)}
        return _Items(kind, entries, getattr(value, "maxlen", None))
    if isinstance(value, (float, complex)):
        return _Leaf(kind, np.complex128(value).tobytes().hex() if value != value else repr(value))
    return _Leaf(kind, value.copy() if isinstance(value, set) else value)


_MOST_SHOWN = 1000
"""Characters: a random state has thousands."""


def assert_same_state(one: Any, other: Any) -> None:
    """Fail, naming the first place that differs: types, tree, dtype, shape, strides of dense
    tensors, bits (NaN payloads too), and which places are one tensor."""
    line = difference(one, other)
    if line is not None:
        raise AssertionError(line[:_MOST_SHOWN])


def difference(one: Any, other: Any) -> str | None:
    """The first difference in words, such as `optimizer.slots.fc.weight.exp_avg differs first at
    element 17: 3f800000 / 3f800001`; None where there is none."""
    ties: dict[int, FrozenTensor] = {}
    back: dict[int, FrozenTensor] = {}
    return _difference(frozen(one).value, frozen(other).value, "", ties, back)


def _difference(a: Any, b: Any, at: str, ties: dict[int, Any], back: dict[int, Any]) -> str | None:
    place = at.lstrip(".") or "the state"
    if isinstance(a, FrozenTensor) and isinstance(b, FrozenTensor):
        line = a.difference(b)
        if line is not None:
            return f"{place} {line}"
        tied = ties.setdefault(id(a), b) is b and back.setdefault(id(b), a) is a
        return None if tied else f"{place} is tied to another tensor in one of the two"
    if isinstance(a, _Items) and isinstance(b, _Items):
        if (a.kind, a.more, list(a.entries)) != (b.kind, b.more, list(b.entries)):
            return f"{place}: {_told(a)} / {_told(b)}"
        pairs = ((key, a.entries[key], b.entries[key]) for key in a.entries)
        lines = (_difference(x, y, f"{at}.{_told(k)}", ties, back) for k, x, y in pairs)
        return next((line for line in lines if line), None)
    return None if a == b else f"{place}: {_told(a, True)} / {_told(b, True)}"


def _told(value: Any, with_kind: bool = False) -> str:
    if isinstance(value, FrozenTensor):
        return f"a tensor {value.shape}"
    if isinstance(value, _Items):
        keys = ", ".join(map(_told, value.entries))
        return f"{value.kind}({keys[:200]}) {'' if value.more is None else value.more}"
    return f"{value.value} ({value.kind})" if with_kind else str(value.value)


def names_of_parameters(models: Mapping[str, nn.Module]) -> dict[nn.Parameter, str]:
    """torch's own names of all parameters (a tied one by its first)."""
    named: dict[nn.Parameter, str] = {}
    for label, model in models.items():
        for name, parameter in model.named_parameters():
            named.setdefault(parameter, f"{label}.{name}")
    return named


def state_of(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    extras: Mapping[str, Any] | None = None,
) -> Frozen:
    """Everything that goes on from here, as frozen bits: models, optimizers (slots by name,
    groups), extras, the global random number generators. Draws nothing, makes no slot."""
    models = dict(model) if isinstance(model, Mapping) else {"model": model}
    optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}
    names = names_of_parameters(models)
    return frozen(
        {
            "models": {label: _model_state(m) for label, m in models.items()},
            "optimizers": {
                label: _optimizer_state(o, names) for label, o in optimizers.items() if o
            },
            "extras": {name: _extra_state(extra) for name, extra in (extras or {}).items()},
            "rng": rng_state(),
        }
    )


def _model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False)]
    return dict([*named, *model.named_buffers(remove_duplicate=False)])


def _optimizer_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    state: dict[Any, Any] = optimizer.state
    return {
        "slots": {
            names.get(p, p) if isinstance(p, nn.Parameter) else p: s for p, s in state.items()
        },
        "groups": [
            {o: v if o != "params" else [names[p] for p in v] for o, v in sorted(group.items())}
            for group in optimizer.param_groups
        ],
    }


def _extra_state(extra: Any) -> Any:
    if isinstance(extra, random.Random):
        return extra.getstate()
    if isinstance(extra, np.random.Generator):
        return extra.bit_generator.state
    if isinstance(extra, np.random.RandomState):
        return extra.get_state(legacy=False)
    if isinstance(extra, torch.Generator):
        return extra.get_state()
    return extra if type(extra) is dict else extra.state_dict()


def rng_state() -> dict[str, Any]:
    """The global random number generators of the host."""
    numpy_state = np.random.get_state(legacy=False)
    version, words, gauss = random.getstate()
    python_state = (version, np.array(words), gauss)  # 625 words: quicker as one array
    return {"python": python_state, "numpy": numpy_state, "torch": torch.get_rng_state()}
