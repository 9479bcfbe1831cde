"""The replay beside training: what it finds, what it leaves alone, and what the run does then."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from crash.trainer import Job
from everystep import Deltas, Retention, checking
from everystep.checking import Checks
from everystep.recovery import check as module
from everystep.recovery.check import Order, Verdict, check
from everystep.store.run import Run
from everystep.types import StepRef
from recovery.own_optimizer import Halving
from trips import BLOCKING
from waiting import until

pytestmark = pytest.mark.usefixtures("patience")

KEEP_ALL = Retention(keep_last=None)
STRATEGY = Deltas(full_every=4, batch=1, check=False, linger_s=1)
DEADLINE_S = 60.0


def job_with(kind: type[torch.optim.Optimizer]) -> Job:
    job = Job()
    job.optimizer = kind(job.model.parameters(), lr=0.01)  # type: ignore[assignment, call-arg]
    job.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, T_max=50)
    return job


def tamper(job: Job) -> None:
    """Change a weight where no version counter sees it."""
    weight = next(job.model.parameters())
    weight.data[0] += 1


def train(run: Path, job: Job, upto: int = 8, tamper_at: int = 0) -> None:
    with job.checkpointer(str(run), strategy=STRATEGY, retention=KEEP_ALL) as ck:
        for step in range(ck.restore() + 1, upto + 1):
            job.step(1)
            if step == tamper_at:
                tamper(job)
            ck.step()


def fulls(run: Path) -> list[int]:
    return [entry.ref.step for entry in Run.open(run).listing().steps if entry.complete]


def order(run: Path, step: int, **changes: Any) -> Order:
    facts: dict[str, Any] = {"path": str(run), "step": StepRef("main", step), "rank": 0}
    return Order(**facts | {"classes": {}} | changes)


# ---------------------------------------------------------------- what it finds


def test_a_fine_run_passes(run_dir: Path) -> None:
    train(run_dir, Job())
    assert fulls(run_dir) == [1, 4, 8]
    for step, before in ((4, 1), (8, 4)):
        verdict = check(order(run_dir, step))
        assert (verdict.problem, verdict.skipped) == (None, None)
        assert verdict.steps == step - before
        assert verdict.took_s > 0


@pytest.mark.parametrize("at", [2, 3, 4])
def test_weights_that_were_changed_by_hand_are_found(run_dir: Path, at: int) -> None:
    """Before the next full checkpoint, or with it; the stretch after it is fine again."""
    train(run_dir, Job(), tamper_at=at)
    verdict = check(order(run_dir, 4))
    assert verdict.problem is not None
    assert check(order(run_dir, 8)).problem is None


def test_where_there_is_nothing_to_compare_nothing_is_said(run_dir: Path) -> None:
    train(run_dir, Job())
    for step in (1, 3, 99):
        verdict = check(order(run_dir, step))
        assert verdict.problem is None
        assert verdict.skipped is not None


def remove_logs(run: Path) -> None:
    shutil.rmtree(run / "logs")


def remove_full(run: Path) -> None:
    shutil.rmtree(run / "steps" / "main" / f"{1:012}")


def remove_next_full(run: Path) -> None:
    shutil.rmtree(run / "steps" / "main" / f"{4:012}")


@pytest.mark.parametrize("remove", [remove_logs, remove_full, remove_next_full, shutil.rmtree])
def test_files_that_retention_removes_meanwhile_are_no_problem(
    run_dir: Path,
    remove: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(run_dir, Job(), upto=5)
    plan_chains = module.plan_chains

    def planned(*arguments: Any) -> Any:
        chains = plan_chains(*arguments)
        remove(run_dir)
        return chains

    monkeypatch.setattr(module, "plan_chains", planned)
    monkeypatch.setattr(module.os, "nice", lambda more: None)
    monkeypatch.setattr(sys, "argv", ["check", msgspec.json.encode(order(run_dir, 4)).decode()])
    threads = torch.get_num_threads()
    module.main()
    torch.set_num_threads(threads)
    verdict = msgspec.json.decode(capsys.readouterr().out, type=Verdict)
    assert verdict.problem is None
    assert verdict.skipped is not None


# ---------------------------------------------------------------- the process


@contextlib.contextmanager
def checks_of(run: Path, job: Job) -> Iterator[Checks]:
    checks = Checks(run, 0, {"optimizer": job.optimizer})
    yield checks
    checks.close()


def verdict_of(checks: Checks) -> Verdict:
    found: list[tuple[StepRef, Verdict]] = []

    def look() -> bool:
        result = checks.result()
        found.extend([] if result is None else [result])
        return bool(found)

    until(look, DEADLINE_S, "a verdict")
    return found[0][1]


def test_an_optimizer_of_the_user_in_a_module_is_replayed(run_dir: Path) -> None:
    job = job_with(Halving)
    train(run_dir, job, upto=4)
    with checks_of(run_dir, job) as checks:
        assert checks.start(StepRef("main", 4), 1000)
        verdict = verdict_of(checks)
        assert verdict == Verdict(steps=3, took_s=verdict.took_s)
        assert not checks.start(StepRef("main", 4), 1000), "not more than a share of the time"


def test_one_that_nobody_can_import_is_not_checked(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Inside(Halving):
        pass

    monkeypatch.setattr(Halving, "__module__", "__main__")
    for kind in (Halving, Inside):
        checks = Checks(run_dir, 0, {"optimizer": job_with(kind).optimizer})
        assert "module of its own" in (checks.unfit or "")
        assert not checks.start(StepRef("main", 4), 1000)
    job = job_with(Halving)
    strategy = msgspec.structs.replace(STRATEGY, check=True)
    with job.checkpointer(str(run_dir), strategy=strategy, retention=KEEP_ALL) as ck:
        ck.restore()
        for _ in range(5):
            job.step(1)
            ck.step()
    assert caplog.text.count("no stretch is replayed beside training: Halving is defined in") == 1
    assert fulls(run_dir) == [1, 4]


def test_a_check_that_fails_in_itself_is_skipped(run_dir: Path) -> None:
    with checks_of(run_dir / "nothing there", Job()) as checks:
        assert checks.start(StepRef("main", 4), 1000)
        verdict = verdict_of(checks)
        assert verdict.problem is None
        assert verdict.skipped is not None


def test_without_memory_for_it_there_is_none(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "available_bytes", lambda: 2999)
    with checks_of(run_dir, Job()) as checks:
        assert not checks.start(StepRef("main", 4), 1000)


def test_closing_ends_a_check_that_is_running(run_dir: Path) -> None:
    train(run_dir, Job(), upto=4)
    with checks_of(run_dir, Job()) as checks:
        assert checks.start(StepRef("main", 4), 1000)
        assert checks._process is not None
        pid = checks._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ---------------------------------------------------------------- in training


def train_until_checked(job: Job, ck: Any, *, tampered: bool) -> None:
    """Steps until a replay has begun; its end; and the step that hears of it."""
    ck.restore()
    checks: Checks | None = None

    def step() -> bool:
        nonlocal checks
        job.step(1)
        if tampered and len(ck.stats) == 1:
            tamper(job)
        ck.step()
        until(lambda: ck.stats[-1].durable, DEADLINE_S, "a durable step")
        checks = ck._session._checks
        return checks is not None and checks._process is not None

    until(step, DEADLINE_S, "a replay")
    assert checks is not None
    process = checks._process
    assert process is not None
    until(lambda: process.poll() is not None, DEADLINE_S, "its end")
    step()


def test_training_hears_of_it_and_goes_on_with_full_checkpoints(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    strategy = msgspec.structs.replace(STRATEGY, check=True)
    with job.checkpointer(str(run_dir), strategy=strategy, retention=KEEP_ALL) as ck:
        train_until_checked(job, ck, tampered=True)
        assert "Deltas cannot record this run" in caplog.text
        assert "a replay up to step main:4 gives another state" in caplog.text
        found = len(ck.stats)
        for _ in range(3):
            job.step(1)
            ck.step()
            until(lambda: ck.stats[-1].durable, DEADLINE_S, "a durable step")
        end = job.digest()
    assert fulls(run_dir)[-3:] == [found + 1, found + 2, found + 3]
    job = Job()
    with job.checkpointer(str(run_dir), strategy=BLOCKING, retention=KEEP_ALL) as ck:
        assert ck.restore() == found + 3
        assert job.digest() == end


def test_training_hears_that_all_is_well(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    strategy = msgspec.structs.replace(STRATEGY, check=True)
    with job.checkpointer(str(run_dir), strategy=strategy, retention=KEEP_ALL) as ck:
        train_until_checked(job, ck, tampered=False)
        session: Any = ck._session
        assert session._recorder is not None
        assert session._pace.replays
        assert all(0 < took_s / steps < 10 for steps, took_s in session._pace.replays)
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []
