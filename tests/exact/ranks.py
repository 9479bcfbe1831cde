"""One rank of a distributed job of the matrix, which reports in JSON.

`train` trains every case twice, without and with a checkpointer, and leaves runs and digests
behind; `resume`, in new processes, restores each run and trains on. The test compares.
"""

from __future__ import annotations

import gc
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from agent.replica_scenes import agents_in_threads
from everystep import Full
from exact.matrix import (
    RANKED,
    STAGED,
    STORED,
    TRAINED,
    Case,
    depends_on_neighbours,
    inexact,
    refused,
)
from exact.scenes import Scene, build, seed_all
from patience import be_patient
from states import Frozen, FrozenTensor
from trips import BLOCKING

Digests = dict[str, str]
"""What is at each place of a state: its type and shape, and a hash of its bits."""


def digests(state: Any, at: str = "") -> Digests:
    """A state for comparison by another process."""
    if isinstance(state, Frozen):
        return digests(state.value, at)
    if isinstance(state, FrozenTensor):
        bits = hashlib.sha256(state.items.tobytes()).hexdigest()[:16]
        return {at: f"{state.dtype} {state.shape} {state.stride} {bits}"}
    found = {at: type(state).__name__}
    if isinstance(state, tuple):
        for index, item in enumerate(state):
            found |= digests(item, f"{at}.{index}")
    elif isinstance(state, dict):
        found[at] = f"entries {list(state)}"
        for (_, key), item in state.items():
            found |= digests(item, f"{at}.{key}")
    elif isinstance(state, (str, bytes, int, float, type(None))):
        found[at] = repr(state)
    else:
        raise TypeError(f"{at}: {state!r} may be told in another way by another process")
    return found


def difference(one: Digests, other: Digests) -> str | None:
    """The first place where two states differ; None where there is none."""
    for place in [*one, *other]:
        if one.get(place) != other.get(place):
            return f"{place}: {one.get(place)} / {other.get(place)}"
    return None


def wrapped(net: nn.Module, fmt: str, model: str) -> nn.Module:
    """The model under DDP with many small buckets, or under FSDP2 with a group per layer."""
    if model == "ddp":
        return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-4)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if fmt == "mixed" else MixedPrecisionPolicy()
    fully_shard(net.get_submodule("first"), mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    return net


def made(case: Case, seed: int) -> Scene:
    """Fresh objects; each rank draws numbers of its own afterwards."""
    scene = build(*case, seed, lambda net, fmt: wrapped(net, fmt, case.model))
    seed_all(100 * seed + dist.get_rank())
    return scene


def train(case: Case, run: Path, strategy: Full) -> dict[str, Any]:
    """The first life of a case: stored after every step up to one, and then trained on."""
    first = made(case, 1)
    # replicas that differ are noticed some steps later, and each rank stores its own from then on
    last = STORED + (3 if inexact(case) else 0)
    on_error = "report" if inexact(case) else "raise"
    stored = {}
    with first.checkpointer(run, strategy=strategy, on_error=on_error) as ck:
        ck.restore()
        for t in range(last):
            first.step(t)
            ck.step()
            if inexact(case) or t + 1 == last:
                stored[str(t + 1)] = digests(first.state())
    if inexact(case):
        assert depends_on_neighbours(first), "torch has become exact here: see docs/exactness.md"
    end = digests(first.steps(last, TRAINED).state())
    changed = None
    if case.format == "fp32":  # that storing changes nothing is tested with one process as well
        changed = difference(digests(made(case, 1).steps(0, TRAINED).state()), end)
    return {"changed by storing": changed, "last": last, "stored": stored, "end": end}


def resume(case: Case, run: Path, strategy: Full, before: dict[str, Any]) -> dict[str, Any]:
    """The second life of a case."""
    second = made(case, 2)
    with second.checkpointer(run, strategy=strategy, on_error="raise") as ck:
        done = ck.restore()
        restored = digests(second.state())
        second.steps(done, TRAINED)
    end = difference(before["end"], digests(second.state()))
    # where torch is not exact, it is chance which step is the last that both replicas share, or
    # that each rank has stored by itself
    known = str(done) in before["stored"]
    return {
        "another step": None if known else f"{done} / {before['last']}",
        "changed by storing": before["changed by storing"],
        "changed by restoring": difference(before["stored"].get(str(done), {}), restored),
        "changed afterwards": None if inexact(case) else end,
    }


def refusal(case: Case) -> str:
    """What is said to a case that cannot be trained."""
    try:
        made(case, 1).steps(0, 1)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        return f"{type(error).__name__}: {error}"
    return "nothing"


def join(phase: str, folder: Path, rank: int, world_size: int) -> None:
    """Join the group of a phase; from here on a warning is an error, and slowness is none."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
    be_patient(pytest.MonkeyPatch())
    store = dist.FileStore(str(folder / f"rendezvous-{phase}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def leave() -> None:
    """End the group. The caller has let go of its DDP models.

    The destructor of a DDP model that has the last hold on the group waits, with the interpreter's
    lock, for threads of gloo, and one of these may want that lock to drop its last work: then
    neither goes on (torch 2.13; seen at one end in two).
    """
    gc.collect()
    dist.destroy_process_group()


WAYS: dict[str, tuple[Full, list[Case]]] = {
    "blocking": (BLOCKING, RANKED),
    "staged": (Full(every=1, policy="block"), STAGED),
}
"""How steps are stored, and which cases are: `staged` is with an agent for each rank."""


def main(phase: str, folder: str, rank: int, world_size: int) -> None:
    """Run one phase of all cases in all ways.

    Args:
        phase: `train` or `resume`.
        folder: shared by all ranks and phases.
    """
    place = Path(folder)
    join(phase, place, rank, world_size)
    trained = place / f"train-{rank}.json"
    before = json.loads(trained.read_text()) if phase == "resume" else {}
    report: dict[str, dict[str, Any]] = {way: {} for way in WAYS}
    with agents_in_threads():
        for way, (strategy, chosen) in WAYS.items():
            for case in chosen:
                run = place / way / str(case).replace("/", ".")
                if refused(case):
                    said = refusal(case) if phase == "train" else before[way][str(case)]
                elif phase == "train":
                    said = train(case, run, strategy)
                else:
                    said = resume(case, run, strategy, before[way][str(case)])
                report[way][str(case)] = said
    (place / f"{phase}-{rank}.json").write_text(json.dumps(report))
    leave()
