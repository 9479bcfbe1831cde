"""Live objects as named tensors plus JSON, and back: the training state in both directions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from everystep.errors import Damaged, LayoutMismatch
from everystep.state import raw, rng
from everystep.state.extras import apply_extra, capture_extras
from everystep.state.inplace import prove_shared
from everystep.state.loaders import apply_loader, capture_loader, is_loader
from everystep.state.names import ModelNames, names_of
from everystep.state.objects import Objects
from everystep.state.optimizers import (
    Owners,
    apply_optimizer,
    capture_optimizer,
    check_optimizer,
)
from everystep.state.shards import Meshes, shard_of
from everystep.state.tree import Decoder, Encoder, Held
from everystep.types import Json, TensorSpec, join_key, split_key


@dataclass(frozen=True)
class State:
    """A training state: tensors by key (live memory where it was captured), and all the rest."""

    held: dict[str, Held]
    tree: Json


@dataclass
class Misfit:
    """What does not fit between a stored state and live objects, in torch's two words and one."""

    missing: list[str] = field(default_factory=list)
    """Here, and not stored."""
    unexpected: list[str] = field(default_factory=list)
    """Stored, and not here."""
    mismatched: list[str] = field(default_factory=list)
    """In both, of another shape, dtype, shard, tie or optimizer: never passed over."""

    def raise_if(self, *, strict: bool) -> None:
        """Raise for what `strict` does not allow.

        Raises:
            LayoutMismatch: names the first of every kind.
        """
        lines = list(self.mismatched)
        if strict:
            lines += [f"{name}: here, and not stored" for name in self.missing]
            lines += [f"{name}: stored, and not here" for name in self.unexpected]
        if lines:
            shown = "".join(f"\n  {line}" for line in lines[:20])
            more = f"\n  … and {len(lines) - 20} more" if len(lines) > 20 else ""
            raise LayoutMismatch(
                f"the stored state does not fit:{shown}{more}",
                hint="make the objects as they were when the step was stored"
                + ("" if self.mismatched else ", or pass strict=False to go on without these"),
            )


def capture(objects: Objects, world_size: int) -> State:
    """The state of all objects and of the random number generators.

    Nothing is copied: the tensors alias live memory, and are to be read before training goes on.
    Training is not changed in any way: no slot is made, no counter moves, nothing is drawn.

    Raises:
        Unsupported: something in the state cannot be stored exactly; the message names it.
    """
    random_state = rng.global_state()
    encoder = Encoder()
    tree: dict[str, Json] = {"models": {}, "optimizers": {}}
    owners = Owners()
    in_models: dict[object, str] = {}
    for name, model in objects.models.items():
        encoder.new_section()
        names = names_of(model, world_size)
        owners.add(name, names)
        tree["models"][name] = _capture_model(name, names, encoder)
        in_models |= encoder.seen
    for name, optimizer in objects.optimizers.items():
        encoder.new_section(in_models)  # a slot may be the parameter itself
        tree["optimizers"][name] = capture_optimizer(name, optimizer, owners, encoder)
    tree |= capture_beside(objects, random_state, encoder, asked=True)
    return State(encoder.held, tree)


def capture_beside(
    objects: Objects, random_state: dict[str, Any], encoder: Encoder, *, asked: bool
) -> dict[str, Json]:
    """What belongs to no model and no optimizer: extras, loaders, random number generators.

    Args:
        random_state: of the global generators, before anything was asked for its state.
        asked: foreign code was, and may have drawn.
    """
    tree: dict[str, Json] = {"extras": capture_extras(objects.extras, encoder)}
    tree["loaders"] = {
        name: capture_loader(name, extra, encoder)
        for name, extra in objects.extras.items()
        if is_loader(extra)
    }
    if asked and not rng.same_global_state(random_state):
        rng.set_global_state(random_state)
    encoder.new_section()
    tree["rng"] = encoder.encode(random_state, join_key("rng"))
    return tree


def _capture_model(name: str, names: ModelNames, encoder: Encoder) -> Json:
    for fqn, tensor in names.tensors.items():
        key = join_key("models", name, fqn)
        encoder.tensor(tensor, key, replicated=fqn in names.replicated)
    return {
        "aliases": names.aliases,
        "frozen": _frozen(names),
        "extra_state": capture_extra_state(name, names, encoder),
    }


def capture_extra_state(name: str, names: ModelNames, encoder: Encoder) -> dict[str, Json]:
    """What the modules of one model give as their `get_extra_state`, by FQN."""
    base = join_key("models", name, "extra_state")
    return {
        fqn: encoder.encode(module.get_extra_state(), base + join_key(fqn))
        for fqn, module in names.extra_state.items()
    }


def _frozen(names: ModelNames) -> list[str]:
    return [fqn for fqn, tensor in names.parameters.items() if not tensor.requires_grad]


def check(objects: Objects, tree: Json, specs: Mapping[str, TensorSpec], world_size: int) -> Misfit:
    """Compare a stored state with live objects. Changes nothing.

    Args:
        specs: the stored tensors of this rank, by key.
    """
    misfit = Misfit()
    owners = Owners()
    for name, model in _pairs("models", objects.models, tree["models"], misfit):
        names = names_of(model, world_size)
        owners.add(name, names)
        _check_model(name, names, tree["models"][name], specs, misfit)
    for name, optimizer in _pairs("optimizers", objects.optimizers, tree["optimizers"], misfit):
        saved = tree["optimizers"][name]
        misfit.mismatched += check_optimizer(name, optimizer, saved, owners)
    for name, extra in _pairs("extras", objects.extras, tree["extras"], misfit):
        if is_loader(extra) != (name in tree["loaders"]):
            misfit.mismatched.append(f"extras.{name}: a data loader only here, or only when stored")
    devices = rng.check_devices(len(tree["rng"].get("cuda", [])))
    misfit.mismatched += [devices] if devices else []
    return misfit


def _pairs(
    kind: str, live: Mapping[str, Any], stored: Mapping[str, Any], misfit: Misfit
) -> list[tuple[str, Any]]:
    misfit.missing += [f"{kind}.{name}" for name in live if name not in stored]
    misfit.unexpected += [f"{kind}.{name}" for name in stored if name not in live]
    return [(name, thing) for name, thing in live.items() if name in stored]


def _check_model(
    name: str, names: ModelNames, saved: Json, specs: Mapping[str, TensorSpec], misfit: Misfit
) -> None:
    aliases: dict[str, str] = saved["aliases"]
    stored = {fqn: fqn for fqn in _stored_names(name, specs)} | aliases
    live = {fqn: fqn for fqn in names.tensors} | names.aliases
    misfit.missing += [f"{name}.{fqn}" for fqn in live if fqn not in stored]
    misfit.unexpected += [f"{name}.{fqn}" for fqn in stored if fqn not in live]
    both = [fqn for fqn in live if fqn in stored]
    misfit.mismatched += [f"{name}.{line}" for line in _untied(both, stored, live)]
    for fqn, tensor in names.tensors.items():
        if fqn in stored:
            problem = _difference(tensor, specs[join_key("models", name, stored[fqn])])
            if problem:
                misfit.mismatched.append(f"{name}.{fqn}: {problem}")
    extra_state = saved["extra_state"]
    misfit.missing += [f"{name}.{fqn}" for fqn in names.extra_state if fqn not in extra_state]
    misfit.unexpected += [f"{name}.{fqn}" for fqn in extra_state if fqn not in names.extra_state]


def _untied(
    both: Sequence[str], stored: Mapping[str, str], live: Mapping[str, str]
) -> Iterator[str]:
    """Names that are one tensor on one side and two on the other. Which name of a tied tensor
    comes first depends on the order of modules, and does not matter."""
    first_stored: dict[str, str] = {}
    first_live: dict[str, str] = {}
    for fqn in both:
        was = first_stored.setdefault(stored[fqn], fqn)
        now = first_live.setdefault(live[fqn], fqn)
        if was != now and was != fqn:
            yield f"{fqn}: tied to {was} when stored, and not here"
        elif was != now:
            yield f"{fqn}: tied to {now} here, and not when stored"


def _stored_names(name: str, specs: Mapping[str, TensorSpec]) -> list[str]:
    parts = (split_key(key) for key in specs)
    return [p[2] for p in parts if p[:2] == ["models", name] and len(p) == 3]


def _difference(live: torch.Tensor, spec: TensorSpec) -> str | None:
    local, shard = shard_of(live)
    if shard is None and spec.shard is None and tuple(local.shape) != spec.shape:
        return f"shape {spec.shape} stored, {tuple(local.shape)} here"
    if shard != spec.shard:
        return f"shard {spec.shard} stored, {shard} here"
    if raw.dtype_name(local.dtype) != spec.dtype:
        return f"dtype {spec.dtype} stored, {raw.dtype_name(local.dtype)} here"
    if tuple(local.shape) != spec.shape:
        return f"local shape {spec.shape} stored, {tuple(local.shape)} here"
    return None


def apply(
    objects: Objects,
    tree: Json,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    world_size: int,
    standing: Mapping[str, torch.Tensor] = MappingProxyType({}),
    copy: raw.Copy = ctypes.memmove,
) -> None:
    """Give live objects a stored state that `check` has compared with them.

    Models are written in place; slots and hyperparameters get new tensors, but for `standing`
    slots; random number generators are set last. What `strict=False` let pass is left as it is.

    Args:
        specs: the stored tensors of this rank, by key.
        tensors: their values in host memory, local parts where sharded.
        standing: slots to write in place, by key; see `standing_slots`.
        copy: how to copy memory.

    Raises:
        LayoutMismatch: an extra refuses its state, or a shard has no mesh here.
    """
    all_names = {name: names_of(model, world_size) for name, model in objects.models.items()}
    owners = Owners()
    for name, names in all_names.items():
        owners.add(name, names)
    meshes = Meshes(tensor for names in all_names.values() for tensor in names.tensors.values())
    rest = {key: _rebuilt(tensors[key], spec, meshes) for key, spec in specs.items()}
    versions = {key: live._version for key, live in standing.items()}
    _apply_extras(objects.extras, tree, rest, specs)
    written: dict[str, torch.Tensor] = {}
    for name, names in all_names.items():
        if name in tree["models"]:
            written |= _apply_model(name, names, tree["models"][name], rest, copy)
    prove_shared(written, tensors)
    for key, live in standing.items():  # an extra may hold it too, and have written it
        written[key] = live if live._version == versions[key] else torch.empty_like(live)
    raw.write_all([(written[key], tensors[key]) for key in standing], copy)
    rest |= written
    devices = {key: spec.device for key, spec in specs.items()}
    for name, optimizer in objects.optimizers.items():
        if name in tree["optimizers"]:
            saved = tree["optimizers"][name]
            apply_optimizer(name, optimizer, saved, rest, devices, owners)
    for name, extra in objects.extras.items():
        if name in tree["extras"] and rng.is_generator(extra):
            apply_extra(name, extra, Decoder(rest).decode(tree["extras"][name]))
    try:
        rng.set_global_state(Decoder(rest).decode(tree["rng"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Damaged(f"the state of a random number generator is malformed: {error}") from error


def _rebuilt(local: torch.Tensor, spec: TensorSpec, meshes: Meshes) -> torch.Tensor:
    parts = split_key(spec.key)
    if parts[0] == "models" and len(parts) == 3:
        return local  # it is written into what is there
    ordered = raw.restrided(local, spec)
    return ordered if spec.shard is None else meshes.rebuild(ordered, spec.shard, spec.key)


def _apply_extras(
    extras: Mapping[str, Any],
    tree: Json,
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, TensorSpec],
) -> None:
    """All but generators, which others may draw from while they load."""
    here = torch.accelerator.current_accelerator()
    placed = {
        key: tensor.to(here) if here is not None and specs[key].device == here.type else tensor
        for key, tensor in tensors.items()
        if key.startswith("/extras/")
    }
    for name, extra in extras.items():
        if name not in tree["extras"] or rng.is_generator(extra):
            continue
        state = Decoder(placed).decode(tree["extras"][name])
        if name in tree["loaders"]:
            apply_loader(extra, state, tree["loaders"][name], Decoder(tensors))
        else:
            apply_extra(name, extra, state)


def _apply_model(
    name: str,
    names: ModelNames,
    saved: Json,
    tensors: Mapping[str, torch.Tensor],
    copy: raw.Copy,
) -> dict[str, torch.Tensor]:
    """Write a model's tensors in place; return them (live) by the keys of what was stored."""
    written, fqns, pairs = {}, [], []
    for fqn, live in names.tensors.items():
        key = join_key("models", name, saved["aliases"].get(fqn, fqn))
        source = tensors.get(key)
        if source is None:
            continue
        written[key] = live.detach()
        fqns.append(fqn)
        pairs.append((shard_of(live)[0], source))
    for fqn, fitted in zip(fqns, raw.write_all(pairs, copy), strict=True):
        if not fitted:
            raise LayoutMismatch(f"{name}.{fqn} is expanded here, and was not when stored")
    decoder = Decoder(tensors)
    for fqn, module in names.extra_state.items():
        if fqn in saved["extra_state"]:
            module.set_extra_state(decoder.decode(saved["extra_state"][fqn]))
    return written


def quiet_differences(
    objects: Objects, tree: Json, specs: Mapping[str, TensorSpec], world_size: int
) -> list[str]:
    """What does not hinder a restore, and may lead training another way than before: what is
    frozen, and the order of elements in memory, by which kernels are chosen."""
    lines = []
    for name, model in objects.models.items():
        if name not in tree["models"]:
            continue
        names = names_of(model, world_size)
        was, now = set(tree["models"][name]["frozen"]), set(_frozen(names))
        lines += [f"{name}.{fqn} is frozen here and was not" for fqn in sorted(now - was)]
        lines += [f"{name}.{fqn} was frozen and is not here" for fqn in sorted(was - now)]
        for fqn, tensor in names.tensors.items():
            spec = specs.get(join_key("models", name, fqn))
            if spec is not None and spec.stride != raw.kept_stride(shard_of(tensor)[0]):
                lines.append(f"{name}.{fqn} has another order in memory than when stored")
    return lines
