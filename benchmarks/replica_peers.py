"""Copies on other hosts: what they send, and how soon a lost host's state is had from its peer.

Hosts are network namespaces of this machine, as in tests/peers, each with one rank of a job under
DDP. One host is killed, with all trainers, and the job starts again on the others and a new one.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

import everystep
from benchmarks.common import HOME, Setting, tensors_of
from benchmarks.figures import Figure, median_of

WIDTH, QUICK_WIDTH = 1024, 512
LAYERS = 4
STEP_S = 0.1
BARE, COPIED = 5, 10
"""Steps without and with copies over which the bytes that are sent are counted."""

LOST = {2: (0, 1), 4: (0,)}
"""By the number of hosts: which are lost, one after the other."""

DEADLINE_S = 60.0


def train(
    host: str, run: str, rank: int, world_size: int, master: str, port: int, width: int
) -> None:
    """What a rank does until it is killed: it tells the hash of its state and the bytes that its
    host has sent, at each step.

    Args:
        host: where.
        master: the address of rank 0's host.
    """
    from peers.hosts import move_to

    move_to(host)
    os.environ["MASTER_ADDR"] = master
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    dist.init_process_group(
        "gloo", init_method=f"tcp://{master}:{port}", rank=rank, world_size=world_size
    )
    job = _Job(width)
    before = _sent_bytes()
    for _ in range(BARE):
        job.step()
    print("bare", (_sent_bytes() - before) // BARE, flush=True)
    strategy = everystep.Replica(persist_every=100_000, peers=everystep.Peers(copies=2))
    ck = everystep.Checkpointer(run, model=job.model, optimizer=job.optimizer, strategy=strategy)
    started_s = time.perf_counter()
    done = ck.restore()
    took_s = time.perf_counter() - started_s
    print("restored", done, job.hash(), took_s, flush=True)
    for step in range(done + 1, 1_000_000):
        time.sleep(STEP_S)
        job.step()
        ck.step()
        print("step", step, job.hash(), _sent_bytes(), flush=True)


class _Job:
    """Linear layers under DDP, and random gradients, which all-reduce makes alike on all ranks."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(7)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._width = width

    def step(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.model(torch.randn(4, self._width)).square().mean().backward()
        self.optimizer.step()

    def hash(self) -> str:
        """Of everything that a restore must bring back."""
        state = xxhash.xxh3_128(torch.get_rng_state().numpy())
        for tensor in tensors_of(self.model, self.optimizer):
            state.update(tensor.numpy())
        return state.hexdigest()


def _sent_bytes() -> int:
    """What this host's network has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise KeyError("eth0")


class _Seen(NamedTuple):
    """What the loss of one host has shown."""

    restore_s: float
    """Of the slowest rank."""
    sent_bytes: float
    """By a host in a step, for copies."""
    exact: float
    """Share of the ranks whose state was what they had at that step."""
    behind: int
    """Steps that all ranks had ended, and that are lost."""


def measure_peers(setting: Setting) -> list[Figure]:
    """All of this part; nothing where there can be no such hosts."""
    sys.path.insert(0, str(HOME / "tests"))
    from peers.hosts import hosts, missing
    from zygote import Zygote

    reason = missing()
    if reason is not None:
        print(f"peers: skipped: {reason}", file=sys.stderr)
        return []
    width = QUICK_WIDTH if setting.quick else WIDTH
    gradient_bytes = LAYERS * width * width * 4
    figures = []
    with Zygote() as zygote, hosts(max(LOST) + 1, zygote) as found:
        for count, every in LOST.items():
            lost = every[:1] if setting.quick else every
            seen = _lose(found[: count + 1], lost, setting.directory / f"hosts{count}", width)
            figures += _figures(count, gradient_bytes / count, seen)
            for host in found:
                host.come_back()
    return figures


def _figures(count: int, own_bytes: float, seen: list[_Seen]) -> list[Figure]:
    """
    Args:
        own_bytes: of a rank's share of the gradients.
    """
    head = f"{count} hosts, one lost: "
    return [
        median_of(head + "state of a rank", [3 * own_bytes / 1e6], "MB"),
        median_of(head + "restore", [one.restore_s for one in seen], "s"),
        median_of(
            head + "ranks restored bit for bit", [one.exact for one in seen], "share",
            reach=1.0, at_least=True,
        ),
        median_of(head + "steps that all had ended, lost", [one.behind for one in seen], ""),
        median_of(
            head + "sent for copies / a rank's gradients",
            [one.sent_bytes / own_bytes for one in seen], "x",
        ),
    ]  # fmt: skip


class _Told:
    """What the ranks of one life of the job have said."""

    def __init__(self, outs: Sequence[Path]) -> None:
        self._outs = outs

    def said(self, pattern: str) -> list[list[tuple[str, ...]]]:
        """By rank: the groups of a pattern, wherever a line begins with it."""
        texts = [out.read_text() if out.exists() else "" for out in self._outs]
        broken = [text for text in texts if "Traceback" in text]
        if broken:
            raise ChildProcessError("\n".join(text[-3000:] for text in broken))
        return [
            [found.groups() for found in re.finditer(f"^{pattern}", text, re.M)] for text in texts
        ]

    def until_all(self, pattern: str, what: str) -> None:
        """Wait until each rank has said something."""
        from waiting import until

        until(lambda: all(self.said(pattern)), DEADLINE_S, what)

    def hashes(self) -> list[dict[int, str]]:
        """By rank and step."""
        told = self.said(r"(?:step|restored) (\d+) (\w+) ")
        return [{int(step): found for step, found in one} for one in told]

    def newest(self) -> int:
        """The step that all ranks have ended."""
        return min(max(one, default=0) for one in self.hashes())

    def sent_bytes(self) -> float:
        """By the median host in a step, beyond what it sends without copies."""
        found = []
        told = self.said(r"step (\d+) \w+ (\d+)$")
        for steps, ((bare,),) in zip(told, self.said(r"bare (\d+)"), strict=True):
            (first, before), (last, after) = steps[-COPIED - 1], steps[-1]
            found.append((int(after) - int(before)) / (int(last) - int(first)) - int(bare))
        return sorted(found)[len(found) // 2]


def _lose(all_hosts: list[Any], lost: Sequence[int], directory: Path, width: int) -> list[_Seen]:
    """Let a job lose one host after the other.

    Args:
        all_hosts: those of the job, and a spare one.
        lost: the ranks on the hosts that are lost.
    """
    directory.mkdir()
    seen = []
    *where, spare = all_hosts
    told = _start(where, directory, 0, width)
    for life, rank in enumerate(lost, 1):
        told.until_all(".*holds a copy of rank", "copies of all ranks")
        last = told.newest() + COPIED + 1
        told.until_all(f"step {last} ", "some steps more")
        sent_bytes = told.sent_bytes()
        gone = where[rank]
        for child in [child for host in where for child in host.started]:
            child.kill()
        gone.kill()
        for host in where:
            for child in host.started:
                child.wait()
            host.started.clear()
        where = [*(host for host in where if host is not gone), spare]
        again = _start(where, directory, life, width)
        again.until_all(r"restored \d+ \w+ \S+$", "the restored state")
        seen.append(_compared(told, again, sent_bytes))
        told, spare = again, gone
    return seen


def _compared(told: _Told, again: _Told, sent_bytes: float) -> _Seen:
    """One life of the job, and the next."""
    found = again.said(r"restored (\d+) (\w+) (\S+)$")
    step = int(found[0][0][0])
    exact = [
        int(restored) == step and before.get(step) == its_hash
        for before, ((restored, its_hash, _),) in zip(told.hashes(), found, strict=True)
    ]
    return _Seen(
        restore_s=max(float(took_s) for ((_, _, took_s),) in found),
        sent_bytes=sent_bytes,
        exact=sum(exact) / len(exact),
        behind=max(0, told.newest() - step),
    )


def _start(where: Sequence[Any], directory: Path, life: int, width: int) -> _Told:
    outs = [directory / f"said-{life}-{rank}" for rank in range(len(where))]
    for rank, (host, out) in enumerate(zip(where, outs, strict=True)):
        host.start(
            "benchmarks.replica_peers.train", out, run=str(directory / "run"), rank=rank,
            world_size=len(where), master=where[0].address, port=29400 + life, width=width,
        )  # fmt: skip
    return _Told(outs)
