"""Several ranks: one that fails, lags or differs costs no more than it must, and never hangs the
others."""

from __future__ import annotations

import errno
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from crash.rank_scenes import told
from crash.trainer import Board, Job
from everystep.errors import RunBusy
from everystep.store.run import Run
from everystep.types import StepRef
from waiting import until
from zygote import Child, Zygote


class Pair:
    """Two ranks of one run, again and again."""

    def __init__(self, zygote: Zygote, where: Path) -> None:
        self._zygote, self._where = zygote, where
        self.run_dir = where / "run"
        self._starts = 0

    def start(self, scene: str, world_size: int = 2, **arguments: object) -> list[Child]:
        """Fork a process per rank."""
        self._starts += 1
        arguments.setdefault("run", str(self.run_dir))
        return [
            self._zygote.start(
                f"crash.rank_scenes.{scene}",
                self._where / f"log{self._starts}.{rank}",
                rank=rank,
                world_size=world_size,
                meet=str(self._where / f"meet{self._starts}"),
                **arguments,
            )
            for rank in range(world_size)
        ]

    def run(
        self, scene: str, world_size: int = 2, **arguments: object
    ) -> tuple[list[list[dict[str, Any]]], list[str]]:
        """What each rank told, and all that it said."""
        children = self.start(scene, world_size, **arguments)
        statuses = [child.wait() for child in children]
        said = [child.said() for child in children]
        assert statuses == [0] * world_size, "\n".join(said)
        return [told(text) for text in said], said

    def complete(self) -> list[int]:
        """The steps that can be restored."""
        return sorted(ref.step for ref in Run.open(self.run_dir).listing().complete())


@pytest.fixture
def pair(zygote: Zygote, quick_path: Path) -> Pair:
    return Pair(zygote, quick_path)


@pytest.mark.parametrize(
    ("call", "number"),
    [("write_at", errno.ENOSPC), ("rename", errno.EIO), ("sync_directory", errno.EIO)],
)
def test_a_step_that_one_rank_cannot_write(pair: Pair, call: str, number: int) -> None:
    """That step is never complete, and the next one is."""
    (first, second), said = pair.run("write_fails", call=call, number=number)
    assert first == [{"fired": 0, "failed": []}]
    assert second == [{"fired": 1, "failed": [3]}]
    assert "ERROR step main:3 is not stored" in said[1]
    assert pair.complete() == [1, 2, 4, 5]
    after, _ = pair.run("plain", steps=1)
    assert [lines[0]["restored"] for lines in after] == [5, 5]
    assert pair.complete() == [5, 6]
    assert not Run.open(pair.run_dir).entries(StepRef("main", 3))


def test_replicas_that_differ(pair: Pair) -> None:
    """Both ranks say so; from then on each stores its own, also after a restart."""
    before, said = pair.run("diverge")
    for text in said:
        assert text.count("ERROR") == 1
        assert re.search(r"ERROR step main:[34]: ranks hold different bits", text)
    complete = pair.complete()
    assert complete[:2] == [1, 2]
    assert 3 not in complete
    assert complete[-2:] == [5, 6]
    for lines in before:
        written = lines[0]["written"]
        assert written[-1] > written[0], "each stores all of its own"
    after, said = pair.run("plain", steps=2)
    assert [lines[0]["restored"] for lines in after] == [6, 6]
    for was, now in zip(before, after, strict=True):
        assert now[0]["digest"] == was[0]["digest"]
    assert after[0][0]["digest"] != after[1][0]["digest"]
    assert pair.complete()[-2:] == [7, 8]
    assert "different bits" not in said[0] + said[1]


def test_a_slow_rank_does_not_hold_up_the_other(pair: Pair, quick_path: Path) -> None:
    board = Board(quick_path / "board")
    (first, second), said = pair.run("slow", board=str(quick_path / "board"))
    board.close()
    assert second[0]["fired"] == 1
    assert "step main:2 is not complete: nothing of rank 1 yet" in said[0]
    assert "not complete" not in said[1]
    assert pair.complete()[-1] == 21
    after, _ = pair.run("plain", steps=0)
    assert [lines[0]["restored"] for lines in after] == [21, 21]
    assert [lines[0]["digest"] for lines in after] == [first[0]["digest"], second[0]["digest"]]


def test_step_on_rank_0_only(pair: Pair) -> None:
    """Explained, not hung."""
    ranks, said = pair.run("only_rank_0")
    for lines in ranks:
        assert lines[0]["raised"] == "NotRestored"
        assert "call restore() on every rank" in lines[0]["text"]
        assert lines[1] == {"steps": []}
    assert "nothing of rank 1 yet; does every rank call step()?" in said[0]
    assert said[0].count("WARNING") <= 6


def test_ranks_that_disagree(pair: Pair, quick_path: Path) -> None:
    """All of them are told, whichever it was; and the run is none the worse."""
    ranks, _ = pair.run("disagree", other=str(quick_path / "other"))
    for lines in ranks:
        kinds = [line.get("raised", line.get("result")) for line in lines]
        disagreed, nothing = "RanksDisagree", "NothingToRestore"
        assert kinds == [disagreed] * 3 + [nothing, 0, disagreed, 0]
        assert "not the same directory" in lines[5]["text"]


def test_a_file_of_one_rank_is_damaged(pair: Pair) -> None:
    """Both ranks take the same older step, and say which and why."""
    before, _ = pair.run("plain", steps=2)
    pair.run("plain", steps=1)
    data = next((pair.run_dir / "steps/main/000000000003").glob("*-r00001of*.rest.safetensors"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    after, said = pair.run("plain", steps=1)
    assert [lines[0]["restored"] for lines in after] == [2, 2]
    assert [lines[0]["digest"] for lines in after] == [lines[1]["digest"] for lines in before]
    assert "step main:3 is set aside" in said[0]
    assert "rank 1" in said[0]
    assert data.name in said[0]
    assert pair.complete()[-1] == 3


def test_another_number_of_ranks(pair: Pair) -> None:
    pair.run("plain", steps=2)
    ((alone,),), _ = pair.run("plain", steps=1, world_size=1)
    assert alone["raised"] == "LayoutMismatch"
    assert "start 2 processes" in alone["text"]
    assert pair.complete() == [1, 2]
    after, _ = pair.run("plain", steps=1)
    assert [lines[0]["restored"] for lines in after] == [2, 2]


def test_a_run_that_is_in_use(pair: Pair, quick_path: Path) -> None:
    """Refused while the other lives, with its identity; free once it is dead."""
    board = Board(quick_path / "board")
    board.clear()
    owner = pair._zygote.start(
        "crash.trainer.hold_signals",
        quick_path / "log",
        run=str(pair.run_dir),
        board=str(quick_path / "board"),
    )
    until(lambda: board["place"] == Board.TRAINING, 60, "the owner to train")
    ((refused,),), _ = pair.run("busy", world_size=1)
    assert refused["raised"] == "RunBusy"
    assert f"process {owner.pid} is using this run" in refused["text"]
    assert owner.kill()
    assert owner.wait() == -signal.SIGKILL
    ((free,),), _ = pair.run("busy", world_size=1)
    assert free == {"result": None}
    board.close()


def test_a_second_checkpointer_in_one_process(run_dir: Path) -> None:
    with Job().checkpointer(str(run_dir)) as ck:
        with pytest.raises(RunBusy, match="this process already has"):
            Job().checkpointer(str(run_dir))
        ck.restore()
        ck.step()
    with Job().checkpointer(str(run_dir)) as ck:
        assert ck.restore() == 1
