"""Plain Python values as JSON plus named tensors, and back, exactly; anything else is refused.

A JSON object with the single key `$…` stands for what JSON cannot say; the table is in
docs/format.md. Nothing is ever pickled, imported or evaluated.
"""

from __future__ import annotations

import base64
import collections
import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from everystep.errors import Damaged, Unsupported
from everystep.state import raw
from everystep.state.shards import shard_of
from everystep.types import Json, Shard, TensorSpec, join_key, spoken

MAX_DEPTH = 100
"""Nesting beyond this is refused in both directions (a cycle ends here too)."""

_SAFE_INT = 1 << 53
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
_DICTS = {
    "$dict": dict,
    "$ordered": collections.OrderedDict,
    "$counter": collections.Counter,
}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$size": torch.Size,
}


_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    OverflowError,
    struct.error,
)
_TENSOR_TAGS = ("$tensor", "$leaf", "$parameter", "$frozen")


class Held:
    """One tensor of the state: where its (local) memory is, and its description."""

    __slots__ = ("spec", "tensor")

    def __init__(self, tensor: torch.Tensor, spec: TensorSpec) -> None:
        self.tensor = tensor
        self.spec = spec


class Encoder:
    """Collects tensors under their keys while it turns values into JSON.

    Tensors that are one and the same memory are held once, and both places refer to it. The
    encoder keeps every tensor alive, so that an address cannot be used twice.
    """

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self._by_memory: dict[object, str] = {}

    def new_section(self, known: Mapping[object, str] | None = None) -> None:
        """Forget what was seen: equal memory is only looked for within one section.

        Args:
            known: memory to start the section with, from `seen`.
        """
        self._by_memory = dict(known or {})

    @property
    def seen(self) -> Mapping[object, str]:
        """Which memory this section holds, and under which key."""
        return self._by_memory

    def tensor(self, value: torch.Tensor, key: str, *, replicated: bool = False) -> str:
        """Hold a tensor under `key`; return the key under which its memory is already held."""
        local, shard = shard_of(value)
        raw.check_storable(local, key)
        memory = raw.same_memory(local)
        if memory is not None:
            known = self._by_memory.get(memory)
            if known is not None:
                return known
        key = self._unused(key)
        if memory is not None:
            self._by_memory[memory] = key
        self.held[key] = Held(local.detach(), _spec_of(local, key, shard, replicated))
        return key

    def _unused(self, key: str) -> str:
        """The key, or that and a number: a dict may have both 1 and "1"."""
        free, number = key, 2
        while free in self.held:
            free, number = f"{key}#{number}", number + 1
        return free

    def encode(self, value: object, key: str, *, replicated: bool = False, depth: int = 0) -> Json:
        """Turn a value into JSON; `key` is its place.

        Raises:
            Unsupported: the value, or one inside it, is not plain; the message says which.
        """
        if depth > MAX_DEPTH:
            raise Unsupported(f"{spoken(key)[:200]}…: nested more than {MAX_DEPTH} deep")
        if isinstance(value, torch.Tensor):
            if value.layout == torch.sparse_coo and not value.is_quantized:
                return self._sparse(value, key, replicated)
            return {_tensor_tag(value): self.tensor(value, key, replicated=replicated)}
        scalar = _encode_scalar(value)
        if scalar is not None or value is None:
            return scalar
        return self._container(value, key, replicated, depth + 1)

    def _container(self, value: object, key: str, replicated: bool, depth: int) -> Json:
        def inner(item: object, place: object) -> Json:
            inside = key + join_key(_utf8(str(place)))
            return self.encode(item, inside, replicated=replicated, depth=depth)

        kind: type[Any] = type(value)
        content: Any = value
        if kind is list:
            return [inner(item, i) for i, item in enumerate(content)]
        for tag, sequence in _SEQUENCES.items():
            if kind is sequence:
                ordered = sorted(content, key=repr) if "set" in tag else content
                return {tag: [inner(item, i) for i, item in enumerate(ordered)]}
        if kind is collections.deque:
            return {"$deque": [[inner(v, i) for i, v in enumerate(content)], content.maxlen]}
        if kind is np.ndarray:
            return self._array(content, key)
        if kind is collections.OrderedDict and vars(content):
            return self._module_state(content, key, inner)
        for tag, mapping in _DICTS.items():
            if kind is mapping:
                return _encode_dict(content, tag, key, inner)
        raise Unsupported(
            f"{spoken(key)}: {_described(value)}",
            hint="keep only numbers, strings, tensors, arrays, lists, tuples, sets and dicts in it",
        )

    def _module_state(
        self,
        value: collections.OrderedDict[object, object],
        key: str,
        inner: Callable[[object, object], Json],
    ) -> Json:
        """What `nn.Module.state_dict` returns: versions of modules stand in an attribute."""
        if set(vars(value)) != {"_metadata"}:
            raise Unsupported(
                f"{spoken(key)}: an OrderedDict with attributes {sorted(vars(value))}"
            )
        pairs = _encode_dict(value, "$ordered", key, inner)["$ordered"]
        return {"$module": [pairs, inner(vars(value)["_metadata"], "_metadata")]}

    def _array(self, value: np.ndarray[Any, Any], key: str) -> Json:
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise Unsupported(f"{spoken(key)}: a NumPy array of dtype {value.dtype}")
        flat = np.array(value, order="C", copy=True).reshape(-1).view(np.uint8)
        return {
            "$array": [self.tensor(torch.from_numpy(flat), key), value.dtype.str, list(value.shape)]
        }

    def _sparse(self, value: torch.Tensor, key: str, replicated: bool) -> Json:
        parts = [
            self.tensor(part, f"{key}/{name}", replicated=replicated)
            for name, part in (("indices", value._indices()), ("values", value._values()))
        ]
        return {"$coo": [*parts, list(value.shape), value.is_coalesced()]}


def _tensor_tag(value: torch.Tensor) -> str:
    if isinstance(value, torch.nn.Parameter):
        return "$parameter" if value.requires_grad else "$frozen"
    return "$leaf" if value.requires_grad and value.is_leaf else "$tensor"


def _utf8(text: str) -> str:
    """The text with lone surrogates (from undecodable file names) escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _spec_of(local: torch.Tensor, key: str, shard: Shard | None, replicated: bool) -> TensorSpec:
    return TensorSpec(
        key=key,
        dtype=raw.dtype_name(local.dtype),
        shape=tuple(local.shape),
        stride=raw.kept_stride(local),
        device=local.device.type,
        shard=shard,
        replicated=replicated and shard is None,
    )


def _encode_scalar(value: object) -> Json:
    """JSON of a value without parts; None if it is not one (None itself is its own JSON)."""
    kind = type(value)
    if kind is bool:
        return value
    if isinstance(value, str) and kind is str:
        return _encode_text(value)
    if isinstance(value, int) and kind is int:
        return value if abs(value) < _SAFE_INT else {"$int": hex(value)}
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, complex) and kind is complex:
        return {"$complex": [_encode_scalar(value.real), _encode_scalar(value.imag)]}
    if isinstance(value, bytes) and kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.dtype):
        return {"$dtype": raw.dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, np.generic) and _NUMPY_DTYPE.fullmatch(value.dtype.str):
        return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
    return None


def _encode_text(value: str) -> Json:
    if value.isascii() or _utf8(value) == value:
        return value
    data = value.encode("utf-8", "surrogatepass")
    return {"$text": base64.b64encode(data).decode("ascii")}


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and type(name) is str and name[:1] != "$" and _utf8(name) == name


def _encode_dict(
    value: Mapping[object, object], tag: str, key: str, inner: Callable[[object, object], Json]
) -> Json:
    if tag == "$dict" and all(map(_is_plain_name, value)):
        return {str(name): inner(item, name) for name, item in value.items()}
    pairs = []
    for name, item in value.items():
        if isinstance(name, torch.Tensor):
            raise Unsupported(f"{spoken(key)}: a dict with a tensor as key")
        pairs.append([inner(name, f"key {name!r}"), inner(item, name)])
    return {tag: pairs}


def _described(value: object) -> str:
    kind = type(value)
    if callable(value) and hasattr(value, "__name__"):
        return f"a function or class ({value.__name__})"
    return f"an object of type {kind.__module__}.{kind.__qualname__}"


class Decoder:
    """Turns the JSON of an `Encoder` back into values, given the tensors by key.

    Both places that referred to one tensor get the same tensor object. What is not well formed is
    a `Damaged`, since a hash has already shown that it is what somebody wrote.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[tuple[str, str], torch.Tensor] = {}

    def decode(self, value: Json, depth: int = 0) -> Any:
        """The value that was encoded.

        Raises:
            Damaged: the JSON is not what an encoder writes, or names a tensor that is not there.
        """
        if depth > 2 * MAX_DEPTH:
            raise Damaged("state is nested too deep")
        if isinstance(value, list):
            return [self.decode(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((tag, content),) = value.items()
            if tag in _TENSOR_TAGS:
                return self._tensor(tag, content)
            if tag.startswith("$"):
                try:
                    return self._tagged(tag, content, depth + 1)
                except _MALFORMED as error:
                    raise Damaged(f"state holds a malformed {tag}: {error}") from error
        return {name: self.decode(item, depth + 1) for name, item in value.items()}

    def _tagged(self, tag: str, content: Json, depth: int) -> Any:
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.decode(item, depth) for item in content)
        if tag in _DICTS:
            pairs = ((self.decode(k, depth), self.decode(v, depth)) for k, v in content)
            return _DICTS[tag](dict(pairs))
        if tag == "$deque":
            return collections.deque((self.decode(v, depth) for v in content[0]), content[1])
        if tag == "$module":
            state = collections.OrderedDict(self.decode({"$ordered": content[0]}, depth))
            vars(state)["_metadata"] = self.decode(content[1], depth)
            return state
        if tag == "$coo":
            return self._sparse(*content)
        if tag == "$array":
            return self._array(*content)
        return _decode_scalar(tag, content)

    def _tensor(self, tag: str, key: Json) -> torch.Tensor:
        if not isinstance(key, str) or key not in self._tensors:
            raise Damaged(f"state refers to a tensor that is not there: {key!r:.200}")
        tensor = self._tensors[key]
        if tag == "$tensor":
            return tensor
        if tag != "$frozen" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise Damaged(f"state holds a malformed {tag}: {key} has no gradient")
        if (tag, key) not in self._made:
            made = tensor.detach() if tag == "$leaf" else torch.nn.Parameter(tensor, False)
            self._made[tag, key] = made.requires_grad_(tag != "$frozen")
        return self._made[tag, key]

    def _sparse(self, indices: str, values: str, shape: list[int], coalesced: bool) -> torch.Tensor:
        built = torch.sparse_coo_tensor(
            self._tensors[indices], self._tensors[values], tuple(shape), check_invariants=True
        )
        return built._coalesced_(coalesced)

    def _array(self, key: str, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
        if not _NUMPY_DTYPE.fullmatch(dtype):
            raise ValueError(dtype)
        flat = self._tensors[key].contiguous().view(torch.uint8).reshape(-1).numpy()
        array: np.ndarray[Any, Any] = flat.view(np.dtype(dtype)).reshape(shape).copy()
        return array


def _decode_scalar(tag: str, content: Json) -> Any:
    if tag == "$int":
        return int(content, 16)
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if tag == "$complex":
        real, imag = (
            float(part) if not isinstance(part, dict) else _decode_scalar("$float", part["$float"])
            for part in content
        )
        return complex(real, imag)
    if tag == "$bytes":
        return base64.b64decode(content, validate=True)
    if tag == "$text":
        return base64.b64decode(content, validate=True).decode("utf-8", "surrogatepass")
    if tag == "$dtype":
        return raw.dtype_of(content)
    if tag == "$device":
        return torch.device(content)
    if tag == "$scalar":
        dtype, text = content
        if not _NUMPY_DTYPE.fullmatch(dtype):
            raise ValueError(dtype)
        return np.frombuffer(bytes.fromhex(text), dtype=np.dtype(dtype))[0]
    raise ValueError("unknown tag")
