"""Every optimizer and number format on two ranks, under DDP and FSDP2, restarted as new processes.

The ranks go through all cases in one job a life, and each case is looked at here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import everystep
from exact.matrix import STAGED, WRAPPERS, Case, cases, inexact, refused
from exact.scenes import FORMATS
from exact.zoo import OPTIMIZERS

pytestmark = pytest.mark.timeout(600)

ALL = cases(*WRAPPERS)
SIZE = 2
DEADLINE_S = 280

Reports = list[dict[str, Any]]
"""By rank: what was said of each case."""


def run_job(folder: Path, phase: str, *options: str, program: str = "exact.ranks") -> None:
    """Run a job of a program to its end; fails with the words of the ranks if one fails."""
    paths = [str(Path(everystep.__file__).parents[1]), str(Path(__file__).parents[1])]
    here = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(SIZE)}
    command = [sys.executable, "-m", program, phase, str(folder), *options]
    ranks, logs = [], [folder / f"log-{rank}" for rank in range(SIZE)]
    try:
        for rank, log in enumerate(logs):
            environment = {**os.environ, **here, "RANK": str(rank)}
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
    assert codes == [0] * SIZE, told


def run_jobs(folder: Path, *options: str, program: str = "exact.ranks") -> Reports:
    """What all ranks say after both lives."""
    for phase in ("train", "resume"):
        run_job(folder, phase, *options, program=program)
    texts = [(folder / f"resume-{rank}.json").read_text() for rank in range(SIZE)]
    return [json.loads(text) for text in texts]


@pytest.fixture(scope="module")
def reports(runs_dir: Path) -> Reports:
    return run_jobs(runs_dir, "blocking")


def test_copied_beside_training(run_dir: Path) -> None:
    """With an agent for each rank."""
    run_dir.mkdir()
    reports = run_jobs(run_dir, "staged")
    for report in reports:
        assert list(report) == list(map(str, STAGED))
        for case, found in report.items():
            assert {what: wrong for what, wrong in found.items() if wrong} == {}, case


@pytest.mark.parametrize("case", [case for case in ALL if not refused(case)], ids=str)
def test_restored_goes_on_exactly(case: Case, reports: Reports) -> None:
    for report in reports:
        assert {what: wrong for what, wrong in report[str(case)].items() if wrong} == {}


@pytest.mark.parametrize("case", [case for case in ALL if refused(case)], ids=str)
def test_torch_refuses(case: Case, reports: Reports) -> None:
    for report in reports:
        assert re.search(str(refused(case)), report[str(case)])


def test_the_product_is_whole(reports: Reports) -> None:
    assert [set(report) for report in reports] == [set(map(str, ALL))] * SIZE
    assert len(ALL) == (2 * len(FORMATS) - 1) * len(OPTIMIZERS) == len(set(ALL))
    out = [case for case in ALL if refused(case)]
    assert len(out) == len(FORMATS) * 1 + (len(FORMATS) - 1) * 12
    assert sum(map(inexact, ALL)) - sum(map(inexact, out)) == 2
