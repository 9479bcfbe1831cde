"""Ranks whose gradients their agents send to a shadow, or to two: these have every bit at every
step, and give the last one back when all trainers and their agents are gone. All leave together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from everystep.agent.shadow_store import restorable
from everystep.errors import EverystepError
from everystep.store import addresses as at
from everystep.store.run import Run
from netns.said import folded, last, proved, stored, told, trained
from waiting import until
from zygote import Child, Zygote

SIZE, FEW, DEADLINE_S = 2, 20, 240.0


class Scene:
    """A run of some ranks on one host, and its shadows."""

    def __init__(
        self, zygote: Zygote, run_dir: Path, tmp_path: Path, size: int = SIZE, shadows: int = 1
    ) -> None:
        self._zygote, self._run, self._folder, self.size = zygote, run_dir, tmp_path, size
        self._token = str(tmp_path / "token")
        at.make_secret(Path(self._token))
        self._outs = [tmp_path / f"shadow-{number}.out" for number in range(shadows)]
        self.shadows = [
            zygote.start(
                "netns.job.shadow", out, folder=str(tmp_path / "shadow"), address="127.0.0.1",
                port=0, token_file=self._token, persist_every=30, deltas=True, keep_last=99,
            )
            for out in self._outs
        ]  # fmt: skip
        for out in self._outs:
            until(lambda out=out: told(out, "listens"), DEADLINE_S, "the shadow to listen")
        ports = [told(out, "listens")[0]["step"] for out in self._outs]
        self._address = ",".join(f"127.0.0.1:{port}" for port in ports)

    def start(self, life: int, steps: int, **of_the_last: object) -> list[Child]:
        return [
            self._zygote.start(
                "netns.job.train",
                self._folder / f"{life}-{rank}",
                run=str(self._run),
                rank=rank,
                world_size=self.size,
                rendezvous=f"file://{self._folder}/rendezvous-{life}",
                steps=steps,
                address=self._address,
                token_file=self._token,
                tap="software",
                pace_s=0.02,
                **(of_the_last if rank == self.size - 1 else {}),
            )
            for rank in range(self.size)
        ]

    def end(self) -> None:
        for shadow in self.shadows:
            shadow.kill(signal.SIGTERM)
        for shadow in self.shadows:
            assert shadow.wait(DEADLINE_S) == 0, shadow.said()

    def newest(self) -> int:
        """What a restart would have now from the store of its shadows."""
        try:
            chain = restorable(Run.open(self._folder / "shadow"))
        except EverystepError:
            return 0  # it is being written
        return 0 if chain is None else chain.ref.step

    def folded(self, upto: int) -> dict[int, dict[int, dict[str, str]]]:
        """What all shadows have folded up to this step."""
        found: dict[int, dict[int, dict[str, str]]] = {}
        for out in self._outs:
            for step, parts in folded(out).items():
                found.setdefault(step, {}).update(parts)
        return {step: parts for step, parts in found.items() if step <= upto}


@pytest.mark.parametrize(("size", "shadows"), [(2, 1), (4, 2)])
def test_a_run_is_had_again_from_its_shadows(
    size: int, shadows: int, zygote: Zygote, run_dir: Path, tmp_path: Path
) -> None:
    scene = Scene(zygote, run_dir, tmp_path, size, shadows)
    first = scene.start(1, 10**6)

    def all_there() -> bool:
        steps = [last(tmp_path / f"1-{rank}") for rank in range(size)]
        are_told = all((its.get("in_shadow") or 0) > FEW for its in steps)
        return are_told and scene.newest() > FEW

    until(all_there, DEADLINE_S, "steps in the shadow")
    agents = [pid for child in first for pid in _children_of(child.pid)]
    assert len(agents) == size
    for pid in [*[child.pid for child in first], *agents]:
        os.kill(pid, signal.SIGKILL)
    for child in first:
        child.wait(DEADLINE_S)
    for child in scene.start(2, FEW + 60):
        assert child.wait(DEADLINE_S) == 0, child.said()
    scene.end()
    for rank in range(size):
        (restored,) = told(tmp_path / f"2-{rank}", "restored")
        before = {one["step"]: one["whole"] for one in told(tmp_path / f"1-{rank}", "step")}
        assert restored["step"] > FEW
        assert restored["whole"] == before[restored["step"]]
    lives = [trained(tmp_path / f"1-{r}") | trained(tmp_path / f"2-{r}") for r in range(size)]
    # more than two ranks may go on with other buckets, so to other bits than before
    had = scene.folded(upto=restored["step"] if size > 2 else 10**6)
    assert proved(had, lives) > (0 if shadows > 1 else FEW)
    logged = stored(tmp_path / "shadow", size, every=8 if shadows > 1 else 1)
    assert restored["step"] in logged
    assert proved(logged, lives) > (0 if shadows > 1 else FEW)
    if shadows == 1:
        begun = min(step for step, parts in had.items() if len(parts) == size)
        assert logged.keys() >= set(range(begun + 10, restored["step"] + 1))


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
