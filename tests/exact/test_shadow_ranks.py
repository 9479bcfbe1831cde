"""Two ranks whose gradients their agents send to a shadow: it has every bit at every step, and
gives the last one back when all trainers and their agents are gone. They leave it together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from everystep.store import addresses as at
from netns.said import folded, last, proved, stored, told, trained
from waiting import until
from zygote import Child, Zygote

SIZE, FEW, DEADLINE_S = 2, 20, 60.0


class Scene:
    """A run of two ranks on one host, and its shadow."""

    def __init__(self, zygote: Zygote, run_dir: Path, tmp_path: Path) -> None:
        self._zygote, self._run, self._folder = zygote, run_dir, tmp_path
        self._token = str(tmp_path / "token")
        at.make_secret(Path(self._token))
        self.shadow = zygote.start(
            "netns.job.shadow", tmp_path / "shadow.out", folder=str(tmp_path / "shadow"),
            address="127.0.0.1", port=0, token_file=self._token, persist_every=30, deltas=True,
            keep_last=99,
        )  # fmt: skip
        until(lambda: told(tmp_path / "shadow.out", "listens"), DEADLINE_S, "the shadow to listen")
        self._port = told(tmp_path / "shadow.out", "listens")[0]["step"]

    def start(self, life: int, steps: int, **of_the_last: object) -> list[Child]:
        return [
            self._zygote.start(
                "netns.job.train",
                self._folder / f"{life}-{rank}",
                run=str(self._run),
                rank=rank,
                world_size=SIZE,
                rendezvous=f"file://{self._folder}/rendezvous-{life}",
                steps=steps,
                address=f"127.0.0.1:{self._port}",
                token_file=self._token,
                tap="software",
                pace_s=0.02,
                **(of_the_last if rank == SIZE - 1 else {}),
            )
            for rank in range(SIZE)
        ]

    def end(self) -> None:
        self.shadow.kill(signal.SIGTERM)
        assert self.shadow.wait(DEADLINE_S) == 0, self.shadow.said()


def test_a_run_is_had_again_from_a_shadow(zygote: Zygote, run_dir: Path, tmp_path: Path) -> None:
    scene = Scene(zygote, run_dir, tmp_path)
    first = scene.start(1, 10**6)

    def all_there() -> bool:
        steps = [last(tmp_path / f"1-{rank}") for rank in range(SIZE)]
        return all((its.get("in_shadow") or 0) > FEW for its in steps)

    until(all_there, DEADLINE_S, "steps in the shadow")
    agents = [pid for child in first for pid in _children_of(child.pid)]
    assert len(agents) == SIZE
    for pid in [*[child.pid for child in first], *agents]:
        os.kill(pid, signal.SIGKILL)
    for child in first:
        child.wait(DEADLINE_S)
    second = scene.start(2, FEW + 60)
    for child in second:
        assert child.wait(DEADLINE_S) == 0, child.said()
    scene.end()
    for rank in range(SIZE):
        (restored,) = told(tmp_path / f"2-{rank}", "restored")
        before = {one["step"]: one["whole"] for one in told(tmp_path / f"1-{rank}", "step")}
        assert restored["step"] > FEW
        assert restored["whole"] == before[restored["step"]]
    lives = [trained(tmp_path / f"1-{r}") | trained(tmp_path / f"2-{r}") for r in range(SIZE)]
    had = folded(tmp_path / "shadow.out")
    assert proved(had, lives) > FEW
    logged = stored(tmp_path / "shadow", SIZE)
    first = min(step for step, parts in had.items() if len(parts) == SIZE)
    assert logged.keys() >= set(range(first + 10, restored["step"] + 1))
    assert proved(logged, lives) > FEW


def test_ranks_end_together(zygote: Zygote, run_dir: Path, tmp_path: Path) -> None:
    """A step of which one rank's part is in the shadow and another's on the store is of no use."""
    scene, steps = Scene(zygote, run_dir, tmp_path), 3 * FEW
    for child in scene.start(1, steps, leaves_at=5):
        assert child.wait(DEADLINE_S) == 0, child.said()
    scene.end()
    for rank in range(SIZE):
        using = {one["step"]: one["strategy"] for one in told(tmp_path / f"1-{rank}", "step")}
        assert [step for step, name in using.items() if name == "Full"] == [*range(17, steps + 1)]
        assert "one rank says so" in (tmp_path / f"1-{rank}").read_text()
    found = stored(run_dir, SIZE)
    assert max(found) == steps
    assert proved(found, [trained(tmp_path / f"1-{r}") for r in range(SIZE)]) > 0


def _children_of(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
