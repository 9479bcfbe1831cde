"""Several hosts, one of which is lost: what it had is had again, bit for bit, from another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from peers.hosts import DEADLINE_S, Host, hosts, missing
from waiting import until
from zygote import Zygote

ENDLESS = 1_000_000
FEW = 30
"""Steps, before a host is lost and after the restart."""

MOST_BEHIND = 12
"""Steps that some rank had ended, and not all had elsewhere: those on their way to the agents."""

_BAD = "Traceback"

MOST = 4
"""Hosts of one job."""


class Jobs:
    """Starts all ranks of a job on some hosts, and reads what they say."""

    def __init__(self, run: Path, said: Path) -> None:
        self.run, self.said, self._started = run, said, 0

    def start(self, where: Sequence[Host], steps: int, **options: object) -> list[Path]:
        """Rank r on the r-th host; returns where each says what it does."""
        self._started += 1
        outs = [self.said / f"{self._started}-{rank}" for rank in range(len(where))]
        for rank, (host, out) in enumerate(zip(where, outs, strict=True)):
            host.start(
                "peers.job.train", out, run=str(self.run), rank=rank, world_size=len(where),
                master=where[0].address, port=29500 + self._started, steps=steps, **options,
            )  # fmt: skip
        return outs


def told(out: Path, what: str = "step|restored") -> dict[int, str]:
    """The digest of each step that a rank has done or restored."""
    said = out.read_text() if out.exists() else ""
    return {int(n): digest for n, digest in re.findall(rf"^(?:{what}) (\d+) (\w+)$", said, re.M)}


def until_said(outs: Sequence[Path], words: str) -> None:
    """All ranks have said so."""

    def all_there() -> bool:
        said = [out.read_text() if out.exists() else "" for out in outs]
        broken = [text[max(0, text.index(_BAD) - 500) :] for text in said if _BAD in text]
        assert not broken, "\n".join(text[:4000] for text in broken)
        return all(re.search(words, text, re.M) for text in said)

    until(all_there, DEADLINE_S, f"{words!r} in {[out.name for out in outs]}")


@pytest.fixture(scope="module")
def all_hosts(zygote: Zygote) -> Iterator[list[Host]]:
    """Those of the largest job, and one more."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with hosts(MOST + 1, zygote) as found:
        yield found


@pytest.fixture
def fresh_hosts(all_hosts: list[Host]) -> Iterator[list[Host]]:
    """With nothing on them, and all in reach of each other."""
    yield all_hosts
    for host in all_hosts:
        host.come_back()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "gone", "how"),
    [
        (2, 0, "killed with all trainers"),
        (2, 1, "cut off, and all trainers killed"),
        (4, 0, "killed"),
    ],
)
def test_a_lost_host_costs_no_step_that_all_had(
    count: int, gone: int, how: str, fresh_hosts: list[Host], quick_path: Path
) -> None:
    jobs = Jobs(quick_path / "run", quick_path)
    outs = jobs.start(fresh_hosts[:count], ENDLESS)
    until_said(outs, "holds a copy of rank")
    copied = max(max(told(out)) for out in outs)
    until_said(outs, rf"^step {copied + FEW} ")
    left = [host for n, host in enumerate(fresh_hosts[: count + 1]) if n != gone]
    newest = lose(fresh_hosts[gone], how, left, outs)
    again = jobs.start(left, newest + FEW, reference=True)
    until_said(again, "^done$")
    step = the_restored(again)
    assert newest - MOST_BEHIND <= step <= newest
    for lost, after in zip(outs, again, strict=True):
        reference = told(after, "reference")
        assert told(lost)[step] == reference[step]
        assert told(after) == {n: reference[n] for n in range(step, newest + FEW + 1)}


def lose(host: Host, how: str, left: Sequence[Host], outs: Sequence[Path]) -> int:
    """A host is gone, and with it training; returns the newest step that any rank has ended."""
    if how.startswith("cut off"):
        host.cut_off()
    else:
        host.kill()
    for other in [host, *left]:
        for child in other.started:
            if how.endswith(("all trainers", "all trainers killed")):  # else they notice
                child.kill()
            child.wait(DEADLINE_S)
        other.started.clear()
    return max(max(told(out)) for out in outs)


def the_restored(outs: Sequence[Path]) -> int:
    """The step that all ranks have restored."""
    (step,) = {step for out in outs for step in told(out, "restored")}
    return step
