"""Every optimizer and number format on two ranks, under DDP and FSDP2, restarted as new processes.

The ranks of a wrapper go through all cases in one job, and each case is looked at here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everystep
from exact.matrix import WRAPPERS, Case, cases, inexact, refused
from exact.scenes import FORMATS
from exact.zoo import OPTIMIZERS

pytestmark = pytest.mark.timeout(400)

ALL = cases(*WRAPPERS)
SIZE = 2
DEADLINE_S = 180

Reports = list[dict[str, Any]]
"""By rank: what was said of each case."""


def run_job(folder: Path, *arguments: str) -> None:
    """Run a job of `exact.ranks` to its end; fails with the words of the first rank that failed."""
    paths = [str(Path(everystep.__file__).parents[1]), str(Path(__file__).parents[1])]
    here = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(SIZE)}
    ranks, logs = [], [folder / f"log-{rank}" for rank in range(SIZE)]
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            command = [sys.executable, "-m", "exact.ranks", *arguments, str(folder)]
            environment = {**os.environ, **here, "RANK": str(rank)}
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            )
    try:
        codes = [process.wait(DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    told = "\n".join(log.read_text()[-3000:] for log in logs)
    assert codes == [0] * SIZE, told


@pytest.fixture(scope="module")
def reports(runs_dir: Path) -> Callable[[str], Reports]:
    """What all ranks say of a wrapper; the job runs when it is first asked for."""
    known: dict[str, Reports] = {}

    def of(wrapper: str) -> Reports:
        if wrapper not in known:
            known[wrapper] = []
            folder = runs_dir / wrapper
            folder.mkdir()
            for phase in ("train", "resume"):
                run_job(folder, phase, wrapper)
            texts = [(folder / f"resume-{rank}.json").read_text() for rank in range(SIZE)]
            known[wrapper] = [json.loads(text) for text in texts]
        return known[wrapper]

    return of


@pytest.mark.parametrize("case", [case for case in ALL if not refused(case)], ids=str)
def test_restored_goes_on_exactly(case: Case, reports: Callable[[str], Reports]) -> None:
    for report in reports(case.model):
        assert {what: wrong for what, wrong in report[str(case)].items() if wrong} == {}


@pytest.mark.parametrize("case", [case for case in ALL if refused(case)], ids=str)
def test_torch_refuses(case: Case, reports: Callable[[str], Reports]) -> None:
    for report in reports(case.model):
        assert re.search(str(refused(case)), report[str(case)])


def test_the_product_is_whole(reports: Callable[[str], Reports]) -> None:
    for wrapper in WRAPPERS:
        for report in reports(wrapper):
            assert set(report) == set(map(str, cases(wrapper)))
    assert len(ALL) == 2 * len(FORMATS) * len(OPTIMIZERS) == len(set(ALL))
    out = [case for case in ALL if refused(case)]
    assert len(out) == len(FORMATS) * (1 + 12)
    assert sum(map(inexact, ALL)) - sum(map(inexact, out)) == 2
