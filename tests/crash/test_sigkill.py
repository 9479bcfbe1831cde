"""SIGKILL at any instant: what is restored is what an uninterrupted training had at that step, and
no step whose step() had returned is lost."""

from __future__ import annotations

import random
import select
import signal
import time
from pathlib import Path

from crash.trainer import Board
from waiting import until
from zygote import Child, Zygote

SEED = 20260612
KILLS = 100
KILLS_OF_TWO_RANKS = 10


class Lives:
    """One rank's lives, one after the other: each is checked against the reference and against what
    the one before is known to have stored."""

    def __init__(self, zygote: Zygote, where: Path, reference: list[str], rank: int = 0) -> None:
        self._zygote, self._where, self._reference, self.rank = zygote, where, reference, rank
        self.board = Board(where / f"board{rank}")
        self.returned = 0
        """The last step whose step() is known to have returned."""
        self.places: list[tuple[int, int]] = []
        """(place, calls before it) of each death."""
        self.restored: list[int] = []
        self._births = 0
        self.child: Child | None = None

    def begin(self, total: int, **options: object) -> Child:
        self.board.clear()
        self._births += 1
        self.child = self._zygote.start(
            "crash.trainer.train",
            self._where / f"log{self.rank}.{self._births}",
            run=str(self._where / "run"),
            total=total,
            board=str(self._where / f"board{self.rank}"),
            **options,
        )
        return self.child

    def check(self) -> None:
        """After a death: what was restored in that life is right; note what it has stored."""
        assert self.child is not None
        said = self.child.said().split()
        self.places.append((self.board["place"], self.board["calls"]))
        if said[:1] == ["restored"]:
            step, digest = int(said[1]), said[2]
            assert digest == self._reference[step], f"step {step}: {self.child.said()}"
            assert self.returned <= step <= self.returned + 1
            self.restored.append(step)
            self.returned = max(step, self.board["returned"])
        else:
            assert self.board["restored"] == -1

    def finish(self, total: int) -> None:
        """The last life ends by itself."""
        assert self.child is not None
        assert self.child.wait() == 0, self.child.said()
        self.check()
        assert self.child.said().split()[-3:] == ["end", str(total), self._reference[total]]


def at_an_instant(delay_s: float) -> None:
    """An instant is no state that could be waited for."""
    select.select([], [], [], delay_s)


def step_s(lives: Lives) -> float:
    """How long a step takes here and now."""
    child = lives.begin(total=8)
    until(lambda: lives.board["returned"] >= 2, 60, "two steps")
    started, first = time.monotonic(), lives.board["returned"]
    assert child.wait() == 0, child.said()
    took = (time.monotonic() - started) / max(1, 8 - first)
    lives.check()
    return took


def test_killed_at_random_instants(zygote: Zygote, quick_path: Path) -> None:
    total = 1500
    reference = zygote.run("crash.trainer.reference", quick_path / "reference", total=total).split()
    lives = Lives(zygote, quick_path, reference)
    one_s = step_s(lives)
    rng = random.Random(SEED)
    print(f"seed {SEED}, a step takes {one_s * 1e3:.1f} ms")
    kills = 0
    while kills < KILLS:
        child = lives.begin(total)
        wanted = rng.randrange(5)  # 0: while it starts
        if wanted:
            until(lambda: lives.board["restored"] >= 0, 60, "a restored state")
            target = lives.board["restored"] + wanted - 1
            until(lambda: lives.board["returned"] >= target or wanted == 1, 60, "steps")  # noqa: B023
        at_an_instant(rng.uniform(0, 2 * one_s))
        assert child.kill()
        assert child.wait() == -signal.SIGKILL
        kills += 1
        lives.check()
    assert lives.returned < total - 3, "the reference is too short for this machine"
    last = lives.returned + 3
    lives.begin(last)
    lives.finish(last)
    inside = [calls for place, calls in lives.places if place == Board.SAVING]
    outside = [place for place, _ in lives.places if place == Board.TRAINING]
    starting = [place for place, _ in lives.places if place == Board.RESTORING]
    print(f"{len(inside)} inside step(), {len(outside)} outside, {len(starting)} at the start")
    assert len(inside) >= 25
    assert len(outside) + len(starting) >= 10
    assert len(set(inside)) >= 15, "different places within the save"
    assert len(set(lives.restored)) >= KILLS // 3


def test_killed_before_each_system_call(zygote: Zygote, quick_path: Path) -> None:
    """Placed, not awaited: the start of a session, a step, and the removal of an old one."""
    reference = zygote.run("crash.trainer.reference", quick_path / "reference", total=200).split()
    lives = Lives(zygote, quick_path, reference)
    lives.begin(total=4)
    lives.finish(4)
    for call in range(1, 66):
        child = lives.begin(total=200, kill_at=call)
        assert child.wait() == -signal.SIGKILL, child.said()
        assert lives.board["calls"] == call
        lives.check()
    last = lives.returned + 2
    lives.begin(last)
    lives.finish(last)
    assert len(set(lives.restored)) > 20


def test_killed_in_the_first_session(zygote: Zygote, quick_path: Path) -> None:
    """While the run itself is being made, and in its first step."""
    reference = zygote.run("crash.trainer.reference", quick_path / "reference", total=10).split()
    for call in range(1, 60, 2):
        (quick_path / f"{call}").mkdir()
        lives = Lives(zygote, quick_path / f"{call}", reference)
        child = lives.begin(total=10, kill_at=call)
        assert child.wait() == -signal.SIGKILL, child.said()
        lives.check()
        lives.begin(2)
        lives.finish(2)
        lives.board.close()


def test_two_ranks_killed_at_random_instants(zygote: Zygote, quick_path: Path) -> None:
    total = 400
    meet = quick_path / "meet"
    logs = [quick_path / f"reference{rank}" for rank in range(2)]
    group: dict[str, object] = {"world_size": 2, "meet": str(meet)}
    both = [
        zygote.start("crash.trainer.reference", log, total=total, rank=r, **group)
        for r, log in enumerate(logs)
    ]
    assert [child.wait() for child in both] == [0, 0], both[0].said()
    ranks = [Lives(zygote, quick_path, child.said().split(), r) for r, child in enumerate(both)]
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    kills = 0
    for life in range(KILLS_OF_TWO_RANKS + 1):
        group["meet"] = f"{meet}{life}"
        last = life == KILLS_OF_TWO_RANKS
        end = ranks[0].returned + 3 if last else total
        for lives in ranks:
            lives.begin(end, rank=lives.rank, **group)
        if last:
            for lives in ranks:
                lives.finish(end)
            break
        until(lambda: all(lives.board["restored"] >= 0 for lives in ranks), 60, "both to restore")
        target = ranks[0].board["restored"] + rng.randrange(1, 4)
        until(lambda: ranks[0].board["returned"] >= target, 60, "steps")  # noqa: B023
        at_an_instant(rng.uniform(0, 0.08))
        victim = rng.randrange(2)
        killed, other = ranks[victim].child, ranks[1 - victim].child
        assert killed is not None
        assert other is not None
        kills += killed.kill()
        assert killed.wait() == -signal.SIGKILL
        assert other.wait() not in (0, -signal.SIGKILL), "it ends by itself when its peer is gone"
        for lives in ranks:
            lives.check()
        assert len({lives.restored[-1] for lives in ranks}) == 1
        stored = min(lives.returned for lives in ranks)  # when step() has returned on both
        for lives in ranks:
            lives.returned = stored
    assert kills == KILLS_OF_TWO_RANKS
    assert len(set(ranks[0].restored)) > KILLS_OF_TWO_RANKS // 2
    for lives in ranks:
        lives.board.close()
