"""For tests that compare bits step by step: what is done or said where a machine is slow for a
moment, such as leaving a step out, has tests of its own, and must not change what these find."""

from __future__ import annotations

from concurrent.futures import wait

import pytest

from everystep.agent import client
from everystep.engine import offload
from everystep.engine.layerwise import Early

LONG_S = 100.0


def until_copied(early: Early) -> None:
    """In the place of `Early.settle`, as on a machine with a core to spare: what was begun is
    copied in time."""
    wait(early._running)
    early._running = []


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Steps wait for staging memory, and agents that stand still are not complained of."""
    patch.setattr(offload, "_SKIP_WAIT_S", LONG_S)
    patch.setattr(client, "SILENT_S", LONG_S)
    patch.setattr(client, "REPLACE_S", LONG_S)
