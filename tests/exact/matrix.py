"""Which combinations there are, which of them torch refuses, and which it computes inexactly."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from exact.scenes import FORMATS, Scene
from exact.zoo import OPTIMIZERS

MODELS = ("plain", "tied", "frozen", "sparse", "batchnorm", "complex", "gan", "compiled")
WRAPPERS = ("ddp", "fsdp2")

STORED, TRAINED = 2, 4
"""Each case is stored after every step to the first, restored there, and trained to the second."""


class Case(NamedTuple):
    """One combination."""

    optimizer: str
    format: str
    model: str

    def __str__(self) -> str:
        return "-".join((self.model, self.format, self.optimizer))


def cases(*models: str) -> list[Case]:
    """All combinations with these models. FSDP2 in the format `mixed` holds fp32 masters itself:
    its `master` would be the same again."""
    made = [Case(o, f, m) for m in models for f in FORMATS for o in OPTIMIZERS]
    return [case for case in made if case[1:] != ("master", "fsdp2")]


def inexact(case: Case) -> bool:
    """Whether torch gives other bits from one run to the next (docs/exactness.md): fused SGD with
    momentum reads beyond the end of a momentum buffer in bf16, and computes with what lies there.
    """
    name, _, way = case.optimizer.partition("/")
    return name.startswith("SGD+momentum") and way == "fused" and case.format == "bf16"


def in_turn(model: str) -> list[Case]:
    """Each optimizer over a model, in one format, in turn: every pair of the three takes part, and
    each optimizer meets every format over some model."""
    formats = [case.format for case in cases(model) if case.optimizer == "SGD/loop"]
    shift = (MODELS + WRAPPERS).index(model)
    return [
        Case(optimizer, formats[(number + shift) % len(formats)], model)
        for number, optimizer in enumerate(OPTIMIZERS)
    ]


RANKED = [
    *dict.fromkeys(
        [
            *(case for wrapper in WRAPPERS for case in in_turn(wrapper)),
            *(case for case in cases(*WRAPPERS) if case.optimizer == "AdamW/foreach"),
            *(case for case in cases("ddp") if inexact(case)),
        ]
    )
]
"""What several ranks go through: every optimizer and every format under each wrapper. Every
optimizer in every format is tested with one process."""

STAGED = [
    *(Case("AdamW/foreach", f, m) for m in WRAPPERS for f in ("fp32", "mixed")),
    *(Case("Adam+amsgrad+weight_decay/loop", "bf16", m) for m in WRAPPERS),
    *(Case("Muon", "fp32", m) for m in WRAPPERS if hasattr(torch.optim, "Muon")),
]
"""What several ranks go through with an agent for each."""


def refused(case: Case) -> str | None:
    """What torch (or the optimizer's library) says when it does not take a combination, as a
    regular expression; None: it takes it."""
    name, _, way = case.optimizer.partition("/")
    if case.model == "sparse":
        return _refused_sparse(name, way)
    if name == "SparseAdam":
        return "SparseAdam does not support (dense gradients|complex parameters)"
    if case.model == "complex" and way == "fused":
        return "`fused=True` requires all the params to be floating point Tensors"
    if case.model == "complex" and name in ("Adafactor", "Muon", "SOAP", "AdaShift"):
        return f"{name} does not support complex parameter"
    return _refused_by_dtensor(name, way) if case.model == "fsdp2" else None


def _refused_by_dtensor(name: str, way: str) -> str | None:
    """What FSDP2 does not let an optimizer do with its sharded parameters (17 rows, 2 ranks)."""
    if way == "fused" and name.startswith(("SGD", "Adagrad")):
        return "_fused_.* does not have a sharding strategy"
    return {
        "LBFGS": "Cannot flatten unevenly sharded tensor",
        "LBFGS+wolfe": "Cannot flatten unevenly sharded tensor",
        "Adafactor": "in-place operations that require placement changes are not supported",
        "Rprop": "placement changes are not supported|does not have a sharding strategy",
        "SOAP": "got mixed torch.Tensor and DTensor",
    }.get(name)


def _refused_sparse(name: str, way: str) -> str | None:
    if name in ("SGD", "SGD+momentum", "Adagrad+lr_decay") and way != "fused":
        return None
    if name in ("SparseAdam", "LBFGS", "LBFGS+wolfe"):
        return None
    if name.startswith("SGD"):
        return "`_fused_sgd` does not support sparse" if way == "fused" else r"add\(sparse, dense\)"
    if name.startswith("Adagrad"):
        return "`fused` does not support sparse grad"
    own = name.split("+")[0].replace("AdamW", "Adam")
    return f"{own} does not support sparse gradient"


def _one_of_each() -> list[Case]:
    """Each optimizer in one format and over one model that torch lets it train, in turn."""
    found = []
    for number, optimizer in enumerate(OPTIMIZERS):
        turned = [MODELS[(number + offset) % len(MODELS)] for offset in range(len(MODELS))]
        cases = (Case(optimizer, FORMATS[number % len(FORMATS)], model) for model in turned)
        found.append(next(case for case in cases if not refused(case)))
    return found


LOGGED = [
    *dict.fromkeys(
        [
            *_one_of_each(),
            *(Case("AdamW/foreach", f, m) for f in ("fp32", "mixed") for m in MODELS[:3]),
            *(Case("Adam/fused", "fp32", m) for m in ("batchnorm", "gan")),
            *(Case("SGD+momentum/loop", f, "plain") for f in FORMATS),
            *(Case(o, "bf16", "sparse") for o in ("SGD/foreach", "SparseAdam")),
            Case("Adagrad+lr_decay/foreach", "fp32", "sparse"),
            Case("AdamW/loop", "fp32", "complex"),
            Case("SGD+momentum/fused", "bf16", "tied"),
        ]
    )
]
"""What is stored as deltas: every optimizer, format and model."""


def depends_on_neighbours(scene: Scene) -> bool:
    """Whether the same update of the same state gives other bits if other bytes lie behind the
    momentum in memory: a proof that the optimizer of `scene` cannot go on exactly."""
    optimizer = next(iter(scene.optimizers.values()))
    outcomes = [[_step_with(optimizer, p, behind) for p in optimizer.state] for behind in (0, 1e30)]
    return outcomes[0] != outcomes[1]


def _step_with(optimizer: torch.optim.Optimizer, parameter: Any, behind: float) -> bytes:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    momentum = optimizer.state[parameter]["momentum_buffer"]
    momentum = momentum.to_local() if hasattr(momentum, "to_local") else momentum
    memory = torch.full((momentum.numel() + 256,), behind, dtype=momentum.dtype)
    placed = memory[: momentum.numel()].view(momentum.shape)
    placed.copy_(momentum)
    twin = torch.nn.Parameter(local.detach().clone())
    twin.grad = torch.ones_like(twin)
    fused = torch.optim.SGD([twin], lr=0.05, momentum=0.9, fused=True)
    fused.state[twin]["momentum_buffer"] = placed
    fused.step()
    assert fused.state[twin]["momentum_buffer"].data_ptr() == memory.data_ptr()
    return placed.view(torch.uint8).numpy().tobytes()
