"""One rank of a job under DDP with compressed gradients, which reports in JSON.

Every scene trains a few steps, compares each gradient with the reference, and leaves a digest by
which the test compares the ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deltas.compression import ALL, Reference
from everystep.deltas.compressors import (
    Compressor,
    Quantize8,
    RandomK,
    SignScale,
    Threshold,
    TopK,
)
from everystep.deltas.hooks import CompressionHook, compress
from exact.ranks import leave

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "accumulated": {},
    "accumulated views": {"gradient_as_bucket_view": True},
    "twice": {},
}
STEPS = 4
SPARSE = (TopK, RandomK, Threshold)


class Net(nn.Module):
    """A convolution in channels_last, and a layer that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first = nn.Linear(8, 24)
        self.second = nn.Linear(24, 24)
        self.last = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.first(self.conv(x).amax((2, 3))).relu()
        out: torch.Tensor = self.last(x if skip else self.second(x).relu())
        return out


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def wrapped(net: Net, mode: str) -> DistributedDataParallel:
    return DistributedDataParallel(net, bucket_cap_mb=2e-3, **MODES[mode])


def batch(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
    return torch.randn(4, 3, 6, 6, generator=generator)


def memory(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a dense tensor in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).clone().numpy()


def of_all_ranks(values: np.ndarray) -> list[np.ndarray]:
    own = torch.from_numpy(values)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [part.numpy() for part in parts]


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def backward(
    model: nn.Module, mode: str, step: int, sync: Callable[[], Any] = contextlib.nullcontext
) -> None:
    """The passes of one step."""
    skip = mode.startswith("unused") and step % 2 == 1
    parts = 2 if mode.startswith("accumulated") else 1
    for part in range(parts):
        with sync() if part < parts - 1 else contextlib.nullcontext():
            model(batch(step, part), skip).square().mean().backward()


def check_step(
    net: Net, local: Net, hook: CompressionHook, reference: Reference, left_out: bool
) -> None:
    """Compare every gradient with the reference, and what is known with the gradient."""
    known = hook.known()
    expect(hook.known() == {}, "what was taken is still there")
    expect(bool(known) == isinstance(reference.options, SPARSE), "known() of a dense compressor")
    for number, (name, parameter) in enumerate(net.named_parameters()):
        own = dict(local.named_parameters())[name].grad
        if left_out and name.startswith("second"):
            expect(parameter not in known, f"{name} was not written, and is known")
            # DDP reduces what was not used too, and then does not write it
            own = torch.zeros_like(parameter) if own is None else own
        expect(own is not None, f"{name} has no gradient")
        mean = reference.mean(number, of_all_ranks(memory(own)))  # type: ignore[arg-type]
        if left_out and name.startswith("second"):
            continue
        grad = parameter.grad
        expect(grad is not None and same(memory(grad), mean), f"{name}: not the reference")
        if known:
            check_known(name, grad, known[parameter])  # type: ignore[arg-type]
    reference.steps += 1


def check_known(name: str, grad: torch.Tensor, its: Any) -> None:
    expect(its.holds(grad), f"{name}: nobody has changed it")
    dense = torch.zeros(grad.numel())
    dense[its.indices.long()] = its.values
    expect(same(dense.numpy(), grad.contiguous().view(-1).numpy()), f"{name}: known wrongly")
    expect(bool((its.indices.diff() > 0).all()), f"{name}: not ascending")


def digest(net: Net, hook: CompressionHook | None = None) -> str:
    found = hashlib.sha256()
    tensors = [*net.parameters(), *(p.grad for p in net.parameters() if p.grad is not None)]
    if hook is not None:
        tensors += hook.state_dict()["residuals"].values()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def scene_exact(options: Compressor, mode: str) -> str:
    net, local = made(), made()
    ddp = wrapped(net, mode)
    hook = compress(ddp, options)
    reference = Reference(options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    kept: list[tuple[Any, bytes]] = []
    for step in range(STEPS):
        local.load_state_dict(net.state_dict())
        optimizer.zero_grad()
        local.zero_grad()
        if mode == "twice":  # every pass is exchanged, as DDP does without no_sync
            backward(ddp, mode, step)
            reference_pass(net, local, reference, step)
            for own, theirs in zip(local.parameters(), net.parameters(), strict=True):
                own.grad.copy_(theirs.grad)  # type: ignore[union-attr, arg-type]
            backward(ddp, mode, step + 50)
            backward(local, mode, step + 50)
        else:
            backward(ddp, mode, step, hook.no_sync)
            backward(local, mode, step)
        taken = dict(hook._known)
        check_step(net, local, hook, reference, mode.startswith("unused") and step % 2 == 1)
        expect(all(its.values.numpy().tobytes() == b for its, b in kept), "overwritten later")
        kept = [(its, its.values.numpy().tobytes()) for its in taken.values()]
        optimizer.step()
    return digest(net)


def reference_pass(net: Net, local: Net, reference: Reference, step: int) -> None:
    backward(local, "twice", step)
    for number, parameter in enumerate(local.parameters()):
        reference.mean(number, of_all_ranks(memory(parameter.grad)))  # type: ignore[arg-type]
    reference.steps += 1


def scene_resumed(options: Compressor, mode: str) -> str:
    """What goes on in a new DDP, which has not laid its buckets out anew, goes on exactly."""
    net = made()
    ddp = wrapped(net, mode)
    hook = compress(ddp, options)
    second: tuple[Net, DistributedDataParallel, CompressionHook] | None = None
    for step in range(6):
        if step == 3:
            other = made(1)
            other.load_state_dict(net.state_dict())
            it = wrapped(other, mode)
            second = other, it, compress(it, options)
            second[2].load_state_dict(hook.state_dict())
        for each in [(net, ddp, hook), *([second] if second else [])]:
            each[0].zero_grad()
            backward(each[1], mode, step, each[2].no_sync)
            with torch.no_grad():
                for parameter in each[0].parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    expect(second is not None and digest(second[0], second[2]) == digest(net, hook), "another way")
    return digest(net)


def scene_touched(options: Compressor, mode: str) -> str:
    """Whatever the user does to a gradient, it is noticed."""
    net = made()
    ddp = wrapped(net, mode)
    hook = compress(ddp, options)
    changes: dict[str, Callable[[nn.Parameter], Any]] = {
        "scaled": lambda p: p.grad.mul_(0.5),  # type: ignore[union-attr]
        "replaced": lambda p: setattr(p, "grad", p.grad.clone()),  # type: ignore[union-attr]
        "dropped": lambda p: setattr(p, "grad", None),
        "noise behind torch's back": lambda p: p.grad.data.add_(1.0),  # type: ignore[union-attr]
        "negated behind torch's back": lambda p: p.grad.data.neg_(),  # type: ignore[union-attr]
    }
    for step, (what, change) in enumerate(changes.items()):
        net.zero_grad()
        backward(ddp, mode, step)
        known = hook.known()
        parameter = net.first.weight
        expect(known[parameter].holds(parameter.grad), "not held before")
        change(parameter)
        expect(not known[parameter].holds(parameter.grad), f"{what}, and not noticed")
    net.zero_grad()
    backward(ddp, mode, 9)
    known = hook.known()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-6)
    expect(not any(its.holds(p.grad) for p, its in known.items()), "clipped, and not noticed")
    return digest(net)


def scene_overflow(options: Compressor, mode: str) -> str:
    """NaN and infinity are seen by all, once, and do not come back."""
    net = made()
    ddp = wrapped(net, mode)
    compress(ddp, options)
    for step in range(3):
        net.zero_grad()
        loss = ddp(batch(step, 0)).square().mean()
        (loss * (float("inf") if step == 1 and dist.get_rank() == 0 else 1.0)).backward()
        finite = all(bool(torch.isfinite(p.grad).all()) for p in net.parameters())  # type: ignore[arg-type]
        expect(finite == (step != 1), f"step {step}: finite is {finite}")
    return digest(net)


def scene_failing(options: Compressor, mode: str) -> str:
    """An error inside the hook comes out of `backward`."""
    from everystep.deltas import exchange
    from everystep.errors import EverystepError

    ddp = wrapped(made(), mode)
    compress(ddp, options)

    def broken(*_: Any) -> None:
        raise EverystepError("this exchange is broken")

    kept, exchange._chosen = exchange._chosen, broken  # type: ignore[assignment]
    try:
        backward(ddp, mode, 0)
    except EverystepError as error:
        return str(error)
    finally:
        exchange._chosen = kept
    raise ValueError("nothing was raised")


def scenes(world_size: int) -> dict[str, Callable[[], str]]:
    """By name. Two ranks go through the product of compressors and modes; more of them through
    three modes a compressor, in turn."""
    found: dict[str, Callable[[], str]] = {}
    for number, options in enumerate(ALL):
        for turn, mode in enumerate(MODES):
            if world_size == 2 or turn % 3 == number % 3:
                name = f"exact {mode} {options}"
                found[name] = lambda options=options, mode=mode: scene_exact(options, mode)  # type: ignore[misc]
        found[f"resumed {options}"] = lambda options=options: scene_resumed(options, "plain")  # type: ignore[misc]
    for mode in ("plain", "views", "static"):
        found[f"touched {mode}"] = lambda mode=mode: scene_touched(TopK(density=0.01), mode)  # type: ignore[misc]
    for options in (TopK(), Threshold(threshold=0.01), Quantize8(), SignScale()):
        found[f"overflow {options}"] = lambda options=options: scene_overflow(options, "plain")  # type: ignore[misc]
    found["failing"] = lambda: scene_failing(TopK(), "plain")
    return found


def main(folder: str, rank: int, world_size: int) -> None:
    """Run all scenes."""
    warnings.simplefilter("error")
    store = dist.FileStore(str(Path(folder, "rendezvous")), world_size)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    report = {}
    for name, scene in scenes(world_size).items():
        try:
            report[name] = scene()
        except ValueError:
            report[name] = f"WRONG: {traceback.format_exc(limit=-2)}"
        dist.barrier()
    Path(folder, f"report-{rank}.json").write_text(json.dumps(report))
    leave()
