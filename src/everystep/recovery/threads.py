"""How many threads torch uses within one operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads within an operation, in this thread and those started in it."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)
