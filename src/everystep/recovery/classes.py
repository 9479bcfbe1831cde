"""What another process needs to do this one's steps again: optimizer classes that are not torch's,
by module and name, and parameters whose arithmetic is the host's."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from everystep.errors import CannotRestore

Names = dict[str, tuple[str, str]]
"""(module, name in it) by full name."""


def names_of(kinds: Iterable[type[Optimizer]]) -> Names:
    """The names of those that are not torch's."""
    return {
        f"{kind.__module__}.{kind.__qualname__}": (kind.__module__, kind.__qualname__)
        for kind in kinds
        if not kind.__module__.startswith("torch.")
    }


def search_paths() -> list[str]:
    """Where this process finds modules."""
    return [os.path.abspath(path) for path in sys.path]


def elsewhere(parameters: Iterable[torch.Tensor]) -> str | None:
    """Why the host would not come to the same bits; None: it would."""
    kind = next((p.device.type for p in parameters if p.device.type != "cpu"), None)
    if kind is None:
        return None
    return f"kernels on {kind} give other bits than the host's, where steps are done again"


def unfit(kinds: Iterable[type[Optimizer]]) -> str | None:
    """Why another process cannot have one of them; None: it can have all."""
    for kind in kinds:
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            return (
                f"{kind.__qualname__} is defined in {kind.__module__}, which another process "
                "cannot import; put it into a module of its own"
            )
    return None


def imported(
    names: Mapping[str, tuple[str, str]], paths: Sequence[str] = ()
) -> dict[str, type[Optimizer]]:
    """The classes by full name. Only a trainer may name them: nothing that was read from a file is
    imported.

    Args:
        paths: where modules are looked for, after `sys.path`.

    Raises:
        CannotRestore: one cannot be imported.
    """
    if names:
        sys.path += [path for path in paths if path not in sys.path]
    found = {}
    for full_name, (module, name) in names.items():
        try:
            kind: Any = importlib.import_module(module)
            for part in name.split("."):
                kind = getattr(kind, part)
        except (Exception, SystemExit) as error:
            raise CannotRestore(
                f"{full_name} cannot be imported by another process: {error!r}",
                hint="put it into a module that does nothing else",
            ) from error
        found[full_name] = kind
    return found
