"""Several hosts, one of which is lost: what it had is had again, bit for bit, from another."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from peers.hosts import DEADLINE_S, Host, hosts, missing
from waiting import until

ROOT = Path(__file__).parents[2]
ENDLESS = 1_000_000
FEW = 30
"""Steps, before a host is lost and after the restart."""

MOST_BEHIND = 12
"""Steps that some rank had ended, and not all had elsewhere: those on their way to the agents."""


class Jobs:
    """Starts all ranks of a job on some hosts, and reads what they say."""

    def __init__(self, run: Path, said: Path) -> None:
        self.run, self.said, self._started = run, said, 0

    def start(self, where: Sequence[Host], steps: int, kind: str) -> list[Path]:
        """Rank r on the r-th host; returns where each says what it does."""
        self._started += 1
        outs = []
        for rank, host in enumerate(where):
            out = self.said / f"{kind}-{self._started}-{rank}"
            port = 29500 + self._started
            facts = [self.run, rank, len(where), where[0].address, port, steps, kind]
            words = [str(fact) for fact in facts]
            env = {
                "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
                "MASTER_ADDR": where[0].address,
                "OMP_NUM_THREADS": "1",
            }
            host.start([sys.executable, "-m", "peers.job", *words], out, env)
            outs.append(out)
        return outs


def told(out: Path) -> dict[int, str]:
    """The digest of each step that a rank has done or restored."""
    found = re.findall(r"^(?:step|restored) (\d+) (\w+)$", out.read_text(), re.M)
    return {int(step): digest for step, digest in found}


def until_step(outs: Sequence[Path], step: int) -> None:
    def all_there() -> bool:
        broken = [out.read_text() for out in outs if "Traceback" in out.read_text()]
        assert not broken, "\n".join(broken)
        return all(max(told(out), default=0) >= step for out in outs)

    until(all_there, DEADLINE_S, f"step {step} of {[out.name for out in outs]}")


def until_copied(outs: Sequence[Path]) -> None:
    """Each rank has a copy elsewhere."""
    words = "holds a copy of rank"
    until(lambda: all(words in out.read_text() for out in outs), DEADLINE_S, "copies of all ranks")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("count", "gone", "how"),
    [
        (2, 0, "killed with all trainers"),
        (2, 1, "cut off"),
        (4, 0, "killed"),
    ],
)
def test_a_lost_host_costs_no_step_that_all_had(
    count: int, gone: int, how: str, tmp_path: Path
) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with hosts(count + 1) as all_hosts:
        jobs = Jobs(tmp_path / "run", tmp_path)
        outs = jobs.start(all_hosts[:count], ENDLESS, "peers")
        until_copied(outs)
        until_step(outs, max(max(told(out)) for out in outs) + FEW)
        left = [host for n, host in enumerate(all_hosts) if n != gone]
        newest = lose(all_hosts[gone], how, left, outs)
        again = jobs.start(left, newest + FEW, "peers")
        until_step(again, newest + FEW)
        step = the_restored(again)
        assert newest - MOST_BEHIND <= step <= newest
        plain = jobs.start(left, newest + FEW, "plain")
        until_step(plain, newest + FEW)
        for before, after in zip(plain, again, strict=True):
            expected = told(before)
            assert told(after) == {n: expected[n] for n in range(step, newest + FEW + 1)}


def lose(host: Host, how: str, left: Sequence[Host], outs: Sequence[Path]) -> int:
    """A host is gone, and with it training; returns the newest step that any rank has ended."""
    if how == "cut off":
        host.cut_off()
    else:
        host.kill()
    for other in left:
        for process in other.started:
            if how == "killed with all trainers":
                process.kill()
            process.wait(DEADLINE_S)
        other.started.clear()
    return max(max(told(out)) for out in outs)


def the_restored(outs: Sequence[Path]) -> int:
    """The step that all ranks have restored."""
    found = {re.findall(r"^restored (\d+) ", out.read_text(), re.M)[0] for out in outs}
    (step,) = found
    return int(step)
