"""A record that could not be folded, put aside with what was wrong."""

from __future__ import annotations

import contextlib

from everystep.agent.protocol import Begin
from everystep.errors import EverystepError, StoreError
from everystep.store import format as fmt
from everystep.store.backend import Backend, NewFile
from everystep.store.run import SET_ASIDE
from everystep.types import StepRef


def in_words(error: Exception) -> str:
    """What an error says."""
    return error.headline() if isinstance(error, EverystepError) else repr(error)


def keep(backend: Backend, begin: Begin, step: int, record: memoryview, error: Exception) -> None:
    """Put a record aside, if the store takes it.

    Args:
        begin: the session that it is of.
        step: that it leads to.
    """
    place = fmt.step_directory(StepRef(begin.timeline, step)).removeprefix("steps/")
    stem = f"{SET_ASIDE}/{place}/delta-r{begin.rank:05d}"
    words = f"{in_words(error)}\n".encode()
    with contextlib.suppress(StoreError):
        backend.put(
            [
                NewFile(f"{stem}.safetensors", len(record), [record]),
                NewFile(f"{stem}.txt", len(words), [words]),
            ]
        )
