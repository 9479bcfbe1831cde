"""Every optimizer and every format on two ranks, under DDP and FSDP2, and in new processes.

The ranks go through all cases in one job a life, and each case is looked at here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from exact.matrix import RANKED, STAGED, WRAPPERS, Case, cases, inexact, refused
from exact.ranks import WAYS
from exact.zoo import OPTIMIZERS
from zygote import Zygote

SIZE = 2
DEADLINE_S = 400

Reports = list[dict[str, Any]]
"""By rank: what was said, of each case."""


def run_jobs(zygote: Zygote, function: str, folder: Path) -> Reports:
    """What all ranks say after both lives."""
    for phase in ("train", "resume"):
        zygote.run_ranks(function, folder, SIZE, DEADLINE_S, phase=phase)
    texts = [(folder / f"resume-{rank}.json").read_text() for rank in range(SIZE)]
    return [json.loads(text) for text in texts]


@pytest.fixture(scope="module")
def reports(zygote: Zygote, runs_dir: Path) -> dict[str, Reports]:
    """By the way in which steps are stored."""
    both = run_jobs(zygote, "exact.ranks.main", runs_dir)
    return {way: [report[way] for report in both] for way in WAYS}


@pytest.mark.parametrize("case", STAGED, ids=str)
def test_copied_beside_training(case: Case, reports: dict[str, Reports]) -> None:
    """With an agent for each rank."""
    for report in reports["staged"]:
        assert {what: wrong for what, wrong in report[str(case)].items() if wrong} == {}


@pytest.mark.parametrize("case", [case for case in RANKED if not refused(case)], ids=str)
def test_restored_goes_on_exactly(case: Case, reports: dict[str, Reports]) -> None:
    for report in reports["blocking"]:
        assert {what: wrong for what, wrong in report[str(case)].items() if wrong} == {}


@pytest.mark.parametrize("case", [case for case in RANKED if refused(case)], ids=str)
def test_torch_refuses(case: Case, reports: dict[str, Reports]) -> None:
    for report in reports["blocking"]:
        assert re.search(str(refused(case)), report[str(case)])


def test_every_pair_takes_part(reports: dict[str, Reports]) -> None:
    """Of optimizer and wrapper, and of format and wrapper."""
    for way, cases_of_it in (("blocking", RANKED), ("staged", STAGED)):
        assert [set(report) for report in reports[way]] == [set(map(str, cases_of_it))] * SIZE
    assert len(RANKED) == len(set(RANKED)) >= len(WRAPPERS) * len(OPTIMIZERS) + 5
    every = cases(*WRAPPERS)
    for pair in (lambda c: (c.optimizer, c.model), lambda c: (c.format, c.model)):
        assert set(map(pair, RANKED)) == set(map(pair, every))
    out = [case for case in RANKED if refused(case)]
    assert {(c.optimizer, c.model) for c in out} == {
        (c.optimizer, c.model) for c in every if refused(c)
    }
    assert len(out) == 13
    assert len([case for case in RANKED if inexact(case) and not refused(case)]) == 2
