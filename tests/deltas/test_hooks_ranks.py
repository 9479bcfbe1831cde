"""Compressed gradients under DDP on two and three ranks, against plain NumPy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import everystep
from deltas.hook_ranks import scenes

pytestmark = pytest.mark.timeout(300)

DEADLINE_S = 240


def run_job(folder: Path, size: int) -> list[dict[str, Any]]:
    """What each rank says of every scene; fails with their words if one fails."""
    paths = [str(Path(everystep.__file__).parents[1]), str(Path(__file__).parents[1])]
    here = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size)}
    ranks, logs = [], [folder / f"log-{rank}" for rank in range(size)]
    try:
        for rank, log in enumerate(logs):
            environment = {**os.environ, **here, "RANK": str(rank)}
            command = [sys.executable, "-m", "deltas.hook_ranks", str(folder)]
            with log.open("wb") as output:
                ranks.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                )
        codes = [process.wait(DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    told = "\n".join(log.read_text()[-3000:] for log in logs)
    assert codes == [0] * size, told
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module", params=[2, 3])
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return run_job(tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.parametrize("name", list(scenes()))
def test_scene(name: str, reports: list[dict[str, Any]]) -> None:
    first = reports[0][name]
    for report in reports:
        assert not report[name].startswith("WRONG"), report[name]
        assert report[name] == first, "the ranks went apart"


def test_an_error_in_the_hook_comes_out_of_backward(reports: list[dict[str, Any]]) -> None:
    assert "this exchange is broken" in reports[0]["failing"]
