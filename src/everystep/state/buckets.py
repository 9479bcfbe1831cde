"""DDP wrappers that will reduce their first step in other buckets than the run they continue."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_COMMUTES_UP_TO_RANKS = 2
"""A sum of two terms has the same bits in either order; of three it may not."""


def cold_wrappers(models: Iterable[nn.Module]) -> list[str]:
    """Names of DistributedDataParallel modules of more than two ranks that have not run yet.

    DDP arranges its buckets anew after its first backward, and the order in which ranks are
    summed depends on the place in the bucket (measured with gloo; see docs/exactness.md). With
    `find_unused_parameters` it never does.
    """
    return [
        name or "the model"
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, nn.parallel.DistributedDataParallel)
        and module.process_group.size() > _COMMUTES_UP_TO_RANKS
        and not module.find_unused_parameters
        and not getattr(module, "_lazy_init_ran", True)
    ]
