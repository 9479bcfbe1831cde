"""Compressed gradients under DDP on two and three ranks, against plain NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from deltas.compression import ALL
from deltas.hook_ranks import MODES, scenes
from zygote import Zygote

SIZES = (2, 3)
DEADLINE_S = 400

Reports = list[dict[str, Any]]
"""By rank: what was said of each scene."""


@pytest.fixture(scope="module")
def reports(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Reports]:
    """What the ranks of a job of some size say; each job runs once."""
    known: dict[int, Reports] = {}

    def of(size: int) -> Reports:
        if size not in known:
            folder = tmp_path_factory.mktemp(f"ranks{size}")
            zygote.run_ranks("deltas.hook_ranks.main", folder, size, DEADLINE_S)
            texts = [(folder / f"report-{rank}.json").read_text() for rank in range(size)]
            known[size] = [json.loads(text) for text in texts]
        return known[size]

    return of


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in SIZES for name in scenes(size)]
)
def test_scene(size: int, name: str, reports: Callable[[int], Reports]) -> None:
    first = reports(size)[0][name]
    for report in reports(size):
        assert not report[name].startswith("WRONG"), report[name]
        assert report[name] == first, "the ranks went apart"


@pytest.mark.parametrize("size", SIZES)
def test_an_error_in_the_hook_comes_out_of_backward(
    size: int, reports: Callable[[int], Reports]
) -> None:
    assert "this exchange is broken" in reports(size)[0]["failing"]


def test_three_ranks_go_through_every_compressor_and_every_mode() -> None:
    names = [name for name in scenes(3) if name.startswith("exact")]
    for mode in MODES:
        assert len([name for name in names if name.startswith(f"exact {mode} ")]) >= 3, mode
    for options in ALL:
        assert len([name for name in names if name.endswith(f" {options}")]) == 3, options
