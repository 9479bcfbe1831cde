"""Two ranks whose gradients their agents send to a shadow: it has every bit at every step, and
gives the last one back when all trainers and their agents are gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from everystep.store import addresses as at
from netns.said import folded, last, proved, stored, told, trained
from waiting import until
from zygote import Child, Zygote

SIZE, FEW, DEADLINE_S = 2, 20, 60.0


def test_a_run_is_had_again_from_a_shadow(zygote: Zygote, run_dir: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    at.make_secret(token)
    shadow = zygote.start(
        "netns.job.shadow", tmp_path / "shadow.out", folder=str(tmp_path / "shadow"),
        address="127.0.0.1", port=0, token_file=str(token), persist_every=30, deltas=True,
        keep_last=99,
    )  # fmt: skip
    until(lambda: told(tmp_path / "shadow.out", "listens"), DEADLINE_S, "the shadow to listen")
    port = told(tmp_path / "shadow.out", "listens")[0]["step"]

    def start(life: int, steps: int) -> list[Child]:
        return [
            zygote.start(
                "netns.job.train",
                tmp_path / f"{life}-{rank}",
                run=str(run_dir),
                rank=rank,
                world_size=SIZE,
                rendezvous=f"file://{tmp_path}/rendezvous-{life}",
                steps=steps,
                address=f"127.0.0.1:{port}",
                token_file=str(token),
                tap="software",
                pace_s=0.02,
            )
            for rank in range(SIZE)
        ]

    first = start(1, 10**6)

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
    second = start(2, FEW + 60)
    for child in second:
        assert child.wait(DEADLINE_S) == 0, child.said()
    shadow.kill(signal.SIGTERM)
    assert shadow.wait(DEADLINE_S) == 0, shadow.said()
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


def _children_of(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
