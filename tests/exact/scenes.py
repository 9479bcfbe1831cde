"""A training as the matrix runs it: fresh objects, one step, and a picture of all that it holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from exact.zoo import OPTIMIZERS, Complex, Kind, Plain, Tied, cast, optimizers_for

FORMATS = ("fp32", "bf16", "mixed", "master")
"""All in fp32; all in bf16; autocast to bf16 over fp32 parameters; bf16 parameters, and fp32 copies
of them that the optimizer moves."""

MODELS = ("plain", "tied", "frozen", "sparse", "batchnorm", "complex", "gan", "compiled")
WRAPPERS = ("ddp", "fsdp2")

Wrap = Callable[[nn.Module, str], nn.Module]
"""What is made of a model before its optimizer is: (model, format) → model."""


@dataclass
class Scene:
    """Live objects of one training."""

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    extras: dict[str, Any]
    step: Callable[[int], None]
    """Train step number t (from 0)."""
    losses: list[torch.Tensor] = field(default_factory=list)


def seed_all(seed: int) -> None:
    """Seed all global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def batch(step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step is trained on: the same for every run, without the global generators."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def build(
    optimizer: str, fmt: str, model: str, seed: int, wrap: Wrap = lambda m, fmt: m, shift: int = 0
) -> Scene:
    """Fresh objects of one case.

    Args:
        shift: which batches: ranks see different ones.
    """
    seed_all(seed)
    kind = OPTIMIZERS[optimizer]
    if model == "gan":
        return _gan(kind, fmt)
    net = _net(model)
    if fmt in ("bf16", "master"):
        cast(net, torch.bfloat16)
    net = wrap(net, fmt)
    if model == "compiled":
        net = torch.compile(net, backend="aot_eager")
    models = {"net": net}
    trained = list(net.parameters())
    if fmt == "master":
        models["masters"] = masters = _masters(trained)
        trained = list(masters)
    if model == "sparse":
        optimizers = optimizers_for(kind, trained[:1])
        optimizers["dense"] = torch.optim.SGD(trained[1:], lr=0.05, momentum=0.9)
    else:
        optimizers = optimizers_for(kind, trained)
    extras = {
        name: torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for name, each in optimizers.items()
    }
    scene = Scene(models, optimizers, extras, step=lambda t: None)
    low = fmt == "bf16" or fmt == "master"

    def loss_of(t: int) -> torch.Tensor:
        x, y = batch(t, shift)
        x = x + 0.01 * random.random() + 0.01 * float(np.random.rand())
        with _autocast(fmt):
            out = net(x.bfloat16() if low else x)
        target = y if out.shape == y.shape else F.pad(y, (0, out.shape[1] - y.shape[1]))
        return F.mse_loss(out.float(), target)

    def step(t: int) -> None:
        if model == "frozen" and t >= 2:
            _inner(net).second.bias.requires_grad_(False)
        _train(scene, kind, lambda: loss_of(t))
        for schedule in scene.extras.values():
            schedule.step()

    scene.step = step
    return scene


def _net(model: str) -> nn.Module:
    if model in ("tied", "sparse"):
        return Tied(sparse=model == "sparse")
    if model == "complex":
        return Complex()
    net = Plain(norm=model == "batchnorm")
    if model == "frozen":
        net.first.weight.requires_grad_(False)
    return net


def _inner(net: nn.Module) -> Any:
    return getattr(net, "_orig_mod", getattr(net, "module", net))


def _autocast(fmt: str) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if fmt == "mixed" else nullcontext()


def _masters(parameters: list[nn.Parameter]) -> nn.ParameterList:
    wide = [p.detach().float() if p.dtype == torch.bfloat16 else p.detach() for p in parameters]
    return nn.ParameterList([nn.Parameter(w.clone(), p.requires_grad) for w, p in zip(wide, parameters, strict=True)])


def _train(scene: Scene, kind: Kind, loss_of: Callable[[], torch.Tensor]) -> None:
    net, masters = scene.models["net"], scene.models.get("masters")

    def closure() -> torch.Tensor:
        if masters is not None:
            _give_back(net, masters)  # a line search has moved them
        net.zero_grad()
        loss = loss_of()
        loss.backward()
        if masters is not None:
            for wide, narrow in zip(masters, net.parameters(), strict=True):
                wide.grad = None if narrow.grad is None else narrow.grad.to(wide.dtype)
        return loss.detach()

    if kind.closure:
        scene.losses.append(scene.optimizers["optimizer"].step(closure))
        for name, optimizer in scene.optimizers.items():
            if name != "optimizer":
                optimizer.step()
    else:
        scene.losses.append(closure())
        for optimizer in scene.optimizers.values():
            optimizer.step()
    if masters is not None:
        _give_back(net, masters)


def _give_back(net: nn.Module, masters: Any) -> None:
    with torch.no_grad():
        for wide, narrow in zip(masters, net.parameters(), strict=True):
            narrow.copy_(wide)


def _gan(kind: Kind, fmt: str) -> Scene:
    """Two models, each with optimizers of its own, that train each other."""
    models: dict[str, nn.Module] = {"G": Plain(), "D": Plain(norm=True)}
    if fmt in ("bf16", "master"):
        for each in models.values():
            cast(each, torch.bfloat16)
    optimizers: dict[str, Optimizer] = {}
    masters: dict[str, Any] = {}
    for name, each in list(models.items()):
        trained = list(each.parameters())
        if fmt == "master":
            masters[name] = models[f"{name}-masters"] = _masters(trained)
            trained = list(masters[name])
        for part, made in optimizers_for(kind, trained).items():
            optimizers[f"{name}/{part}"] = made
    schedules = {n: torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for n, o in optimizers.items()}
    scene = Scene(models, optimizers, dict(schedules), step=lambda t: None)
    low = fmt == "bf16" or fmt == "master"

    def loss_of(name: str, t: int) -> torch.Tensor:
        x, y = batch(t)
        x = x + 0.01 * random.random() + 0.01 * float(np.random.rand())
        with _autocast(fmt):
            made = models["G"](x.bfloat16() if low else x)
            judged = models["D"](torch.cat([made, made * 0.5], 1))
        return F.mse_loss(judged.float(), y if name == "D" else -y)

    def step(t: int) -> None:
        for name in ("D", "G"):
            net = models[name]
            only = Scene(
                {"net": net, **({"masters": masters[name]} if masters else {})},
                {part.partition("/")[2]: o for part, o in optimizers.items() if part[0] == name},
                {},
                scene.step,
                scene.losses,
            )
            _train(only, kind, lambda name=name: loss_of(name, t))
        for schedule in schedules.values():
            schedule.step()

    scene.step = step
    return scene


# ------------------------------------------------------------------------------ pictures

Picture = dict[str, tuple[str, str]]
"""Everything by place: what it is, and its bytes in hexadecimal. It survives JSON."""


def picture(scene: Scene) -> Picture:
    """All that a training holds, seen without the library: by torch's own state dicts and names."""
    seen: Picture = {}
    for name, model in scene.models.items():
        for fqn, tensor in model.named_parameters(remove_duplicate=False):
            _see(seen, f"{name}.{fqn}", tensor)
        for fqn, tensor in model.named_buffers(remove_duplicate=False):
            _see(seen, f"{name}.{fqn}", tensor)
    for name, optimizer in scene.optimizers.items():
        _see(seen, f"{name}.state", optimizer.state_dict())
    for name, extra in scene.extras.items():
        own = extra if isinstance(extra, dict) else getattr(extra, "state_dict", lambda: None)()
        _see(seen, f"extras.{name}", own)
    _see(seen, "rng.torch", torch.get_rng_state())
    _see(seen, "rng.numpy", np.random.get_state(legacy=False))
    _see(seen, "rng.python", random.getstate())
    return seen


def _see(seen: Picture, place: str, value: Any) -> None:
    if hasattr(value, "to_local"):
        seen[place + "#global"] = (f"{value.placements} {tuple(value.shape)}", "")
        value = value.to_local()
    if isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo:
        _see(seen, place + "#indices", value._indices())
        _see(seen, place + "#values", value._values())
    elif isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        strides = value.stride() if value.numel() else ()
        what = f"{value.dtype} {tuple(value.shape)} {strides} {value.device}"
        seen[place] = (what, flat.numpy().tobytes().hex())
    elif isinstance(value, np.ndarray):
        seen[place] = (f"{value.dtype} {value.shape}", value.tobytes().hex())
    elif isinstance(value, Mapping):
        seen[place] = (f"{type(value).__name__} of {len(value)}", "")
        for key, item in value.items():
            _see(seen, f"{place}[{key!r}]", item)
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        seen[place] = (f"{type(value).__name__} of {len(value)}", "")
        if all(type(item) is int for item in value):
            seen[place] = (seen[place][0] + f": {list(value)}", "")
            return
        for index, item in enumerate(value):
            _see(seen, f"{place}[{index}]", item)
    elif type(value) is float:
        seen[place] = ("float", value.hex())
    else:
        seen[place] = (f"{type(value).__name__} {value!r}", "")


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first place where two pictures differ, with the bytes; None if they are the same."""
    for place in [*one, *(place for place in other if place not in one)]:
        a, b = one.get(place), other.get(place)
        if a is None or b is None:
            return f"{place}: only in the {'second' if a is None else 'first'}"
        if a[0] != b[0]:
            return f"{place}: {a[0]} / {b[0]}"
        if a[1] != b[1]:
            at = next(i for i in range(len(a[1])) if a[1][i] != b[1][i]) // 2
            return f"{place} ({a[0]}) differs first at byte {at}: {a[1][2 * at :][:16]} / {b[1][2 * at :][:16]}"
    return None
