"""What the crash tests share: one process that has imported torch, to fork trainers from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crash.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Started once per test process."""
    with Zygote() as started:
        yield started
