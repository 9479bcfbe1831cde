"""A shadow that logs each step: every one that it had is had again, bit for bit, from its own run,
and over the network; and its log holds up nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everystep
from agent.shadow_scenes import DEADLINE_S, EVERY, Scene
from crash.trainer import Job
from everystep.agent import shadow_log
from everystep.agent.shadow_store import restorable
from everystep.errors import NothingToRestore, StoreFull
from everystep.store.chains import plan_chains
from everystep.store.log import Log
from everystep.store.logformat import LOGS
from everystep.store.run import Run
from everystep.types import StepRef
from waiting import until


@pytest.fixture
def scene(quick_path: Path) -> Iterator[Scene]:
    made = Scene(quick_path, deltas=True, keep_last=99)
    yield made
    made.shadow.close()


def steps_of(path: Path, timeline: str = "main") -> list[int]:
    """All that can be had of a run."""
    run = Run.open(path)
    listing = run.listing()
    return [ref.step for ref in plan_chains(listing, run.segments(listing), timeline).refs]


def digest_at(path: Path, step: int, scratch: Path) -> str:
    """Of the state that a training begins with which is given this step of a run."""
    copy = scratch / f"copy-{step}"
    shutil.copytree(path, copy)
    job = Job(0, 1)
    with job.checkpointer(str(copy)) as ck:
        assert ck.restore(step) == step
    return job.digest()


def test_every_step_that_it_had_is_in_its_run(scene: Scene, run_dir: Path, tmp_path: Path) -> None:
    scene.train(run_dir, 10, scene.strategy())
    scene.shadow.close()
    path = scene.folder / "shadow"
    had = steps_of(path)
    assert had == list(range(had[0], 11)) and had[0] <= 4
    fulls = [entry.ref.step for entry in Run.open(path).listing().steps]
    assert len(fulls) < len(had)
    for step in had:
        assert digest_at(path, step, tmp_path) == scene.digests[step]


def test_a_shadow_that_is_killed_has_each_step_that_it_logged(
    scene: Scene, run_dir: Path, tmp_path: Path
) -> None:
    path, killed = scene.folder / "shadow", scene.folder / "killed"
    seen: list[int] = []

    def kill(ck: everystep.Checkpointer) -> None:
        """What is on the disk at an instant at which nothing of it was told to end."""
        real(ck)
        if ck._done != 2 * EVERY + 2:
            return

        def is_logged() -> bool:
            chain = restorable(Run.open(path))
            return chain is not None and chain.ref.step == ck._done and bool(chain.links)

        until(is_logged, DEADLINE_S, "the step to be logged")
        shutil.copytree(path, killed)
        seen.append(ck._done)

    real = scene.until_in_shadow
    scene.until_in_shadow = kill  # type: ignore[method-assign]
    scene.train(run_dir, 2 * EVERY + 3, scene.strategy())
    digests, (at,) = scene.digests, seen
    scene.shadow.close()
    scene.until_in_shadow = real  # type: ignore[method-assign]
    scene.shadow = scene.started("killed")
    done, before, _ = scene.train(tmp_path / "other", 1, scene.strategy())
    assert (done, before) == (at, digests[at])


def test_an_older_step_is_had_over_the_network(scene: Scene, run_dir: Path, tmp_path: Path) -> None:
    scene.train(run_dir, 11, scene.strategy())
    digests, other = scene.digests, tmp_path / "other"
    for step in (10, StepRef("main", 9)):
        number = step if isinstance(step, int) else step.step
        done, before, _ = scene.train(other, 1, scene.strategy(), step)
        assert (done, before) == (number, digests[number])
    run = Run.open(other)
    assert {"main", "main@9", "main@10"} <= run.listing().timelines.keys()
    assert steps_of(other)[-1] == 11  # the newest came along, and stays
    with pytest.raises(NothingToRestore):
        scene.train(tmp_path / "third", 1, scene.strategy(), 99)


def test_its_log_goes_with_the_full_checkpoints_that_it_leads_on_from(
    run_dir: Path, quick_path: Path
) -> None:
    scene = Scene(quick_path, deltas=True, keep_last=2)
    scene.train(run_dir, 8 * EVERY, scene.strategy())
    scene.shadow.close()
    path = scene.folder / "shadow"
    assert len(list((path / LOGS).rglob("*.log"))) <= 4
    had = steps_of(path)
    assert had == list(range(had[0], 8 * EVERY + 1))
    assert had[0] >= 5 * EVERY


def test_what_the_store_refuses_is_left_out_and_holds_up_nothing(
    scene: Scene, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the full checkpoint after it on, all steps can be had again."""
    real, refused = Log.append, []

    def append(self: Log, records: Any) -> int:
        if any(record.step == EVERY + 2 for record in records):
            refused.append([record.step for record in records])
            raise StoreFull("no space left")
        return real(self, records)

    monkeypatch.setattr(Log, "append", append)
    scene.train(run_dir, 3 * EVERY, scene.strategy())
    scene.shadow.close()
    assert len(refused) == 1
    said = [text for text in scene.said if "not logged" in text]
    assert len(said) == 1 and "no space left" in said[0]
    path = scene.folder / "shadow"
    had = steps_of(path)
    assert had == [s for s in range(had[0], 3 * EVERY + 1) if not EVERY + 2 <= s < 2 * EVERY]
    for step in had:
        assert digest_at(path, step, tmp_path) == scene.digests[step]


def test_a_store_that_stands_still_holds_up_nothing(
    scene: Scene, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for what waits is bounded: what would be more is left out."""
    real, gate, reached = Log.append, threading.Event(), threading.Event()

    def append(self: Log, records: Any) -> int:
        reached.set()
        assert gate.wait(DEADLINE_S)
        return real(self, records)

    def go_on(ck: everystep.Checkpointer) -> None:
        in_shadow(ck)  # each step is, while the log stands still
        if ck._done == 2 * EVERY + 2:
            assert reached.is_set()
            gate.set()
            copy: Any = scene.shadow._copies[0]
            until(lambda: copy._log._waiting_bytes == 0, DEADLINE_S, "all that waits to be written")

    monkeypatch.setattr(Log, "append", append)
    monkeypatch.setattr(shadow_log, "LEAST_BYTES", 1)  # four records
    in_shadow = scene.until_in_shadow
    scene.until_in_shadow = go_on  # type: ignore[method-assign]
    scene.train(run_dir, 4 * EVERY, scene.strategy())
    scene.shadow.close()
    assert any("slower than steps come" in text for text in scene.said)
    path = scene.folder / "shadow"
    had = steps_of(path)
    assert set(range(3 * EVERY, 4 * EVERY + 1)) <= set(had)
    assert EVERY + 3 not in had
    for step in had:
        assert digest_at(path, step, tmp_path) == scene.digests[step]
