"""What each rank does in tests/exact/test_layerwise_ranks.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from agent.replica_scenes import agents_in_threads
from everystep import Replica
from everystep.engine import layerwise
from everystep.engine.reduced import reduced_of
from exact import logged_ranks
from exact.logged_ranks import SCENES, compressed
from exact.matrix import STAGED
from exact.ranks import Digests, difference, join, leave
from exact.scenes import Scene, batch, seed_all
from exact.zoo import Plain
from patience import until_copied

CHOSEN = {
    **{name: SCENES[name] for name in ("views", "top-k views", str(STAGED[0]))},
    "views, unused": compressed(None, gradient_as_bucket_view=True, find_unused_parameters=True),
}


def quick_to_begin() -> None:
    """Every gradient is large enough, and copied during backward from the third step on."""
    layerwise.LEAST_BYTES, layerwise._SEEN_FIRST, layerwise._COMPARED = 1, 1, 1


def main(phase: str, folder: str, rank: int, world_size: int) -> None:
    """Run one phase of the scenes."""
    quick_to_begin()
    every: Any = Replica(persist_every=1, slices=2, layerwise=True)
    logged_ranks.LOGGED = every
    logged_ranks.SCENES = CHOSEN
    logged_ranks.main(phase, folder, rank, world_size)


WAYS: dict[str, dict[str, Any]] = {
    "copied": {"gradient_as_bucket_view": False},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


def hooked(phase: str, folder: str, rank: int, world_size: int) -> None:
    """Digests of gradients with DDP's own reduction and with ours, and whether ours was set."""
    join(phase, Path(folder), rank, world_size)
    told: dict[str, Any] = {}
    for way, options in WAYS.items():
        for dtype in (torch.float32, torch.bfloat16):
            plain, _ = _gradients(options, dtype, ours=False)
            its, problem = _gradients(options, dtype, ours=True)
            told[f"{way} {dtype}"] = [problem, difference(plain, its)]
    Path(folder, f"{phase}-{rank}.json").write_text(json.dumps(told))
    leave()


def _gradients(
    options: dict[str, Any], dtype: torch.dtype, *, ours: bool
) -> tuple[Digests, str | None]:
    seed_all(1)
    net = Plain(norm=True).to(dtype)
    model = DistributedDataParallel(net, bucket_cap_mb=1e-4, **options)
    found, problem = reduced_of([model]) if ours else ([], None)
    assert bool(found) == (ours and problem is None)
    seed_all(100 + dist.get_rank())
    told: Digests = {}
    for t in range(5):
        model.zero_grad(set_to_none=t % 2 == 0)
        with model.no_sync():
            _backward(model, 10 * t, dtype)
        _backward(model, 10 * t + 1, dtype)
        for name, p in net.named_parameters():
            assert p.grad is not None
            told[f"{t} {name}"] = p.grad.float().numpy().tobytes().hex()
    return told, problem


def _backward(model: DistributedDataParallel, t: int, dtype: torch.dtype) -> None:
    x, y = batch(t)
    F.mse_loss(model(x.to(dtype)).float(), y).backward()


def order(phase: str, folder: str, rank: int, world_size: int) -> None:
    """What is told of the gradients that were copied during backward: bytes; and why not."""
    quick_to_begin()
    join(phase, Path(folder), rank, world_size)
    told = _life(Path(folder, "run"))
    Path(folder, f"{phase}-{rank}.json").write_text(json.dumps(told))
    leave()


def _life(run: Path) -> dict[str, Any]:
    made: Scene = compressed(None, gradient_as_bucket_view=True)(1)
    model = made.models["net"]
    optimizer = made.optimizers["optimizer"]
    strategy = Replica(persist_every=1, layerwise=True)
    layerwise.Early.settle = until_copied  # type: ignore[method-assign]
    with agents_in_threads(), made.checkpointer(run, strategy=strategy, on_error="raise") as ck:
        ck.restore()
        for t in range(8):
            optimizer.zero_grad(set_to_none=False)
            x, y = batch(t)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            ck.step()
        session: Any = ck._session
        (copies,) = session._recorder._copies.values()
        return {"bytes": copies.early.used_bytes, "given up": copies.early.given_up}
