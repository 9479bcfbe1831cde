"""A live mirror: two hosts all-reduce over gloo as fast as they can, a third follows one's port.

Hosts are network namespaces of this machine, joined by a bridge. What passes the port of the first
is mirrored (`tc … action mirred egress mirror`, both directions) to that of the third, where the
tap decodes. All share this machine's cores: the ranks send as fast as they can beside the tap.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from benchmarks.common import HOME, Setting
from benchmarks.figures import Figure, median_of
from benchmarks.tap_decode import BUCKET
from everystep.tap.gloo import Gloo
from everystep.tap.live import Live
from everystep.tap.packets import Parser
from everystep.tap.ring import Assembler

RANKS = 2
LIVE_S, QUICK_LIVE_S = 10.0, 4.0
SILENCE_S = 1.0
"""Without a frame, after which all have come."""

DEADLINE_S = 60.0
RING_BLOCKS = 256
"""Of 1 MiB: the tap may be off its core for so long as it takes to send them."""


def reduce(host: str, rank: int, master: str, seconds: float) -> None:
    """One rank: all-reduces of a bucket until the time is over; prints how many, and a sum of what
    each gave.

    Args:
        host: where.
        master: the address of rank 0's host.
    """
    from peers.hosts import move_to

    move_to(host)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{master}:29400", rank=rank, world_size=RANKS
    )
    own = torch.randn(BUCKET, generator=torch.Generator().manual_seed(rank))
    stop = torch.zeros(1)
    started_s = time.perf_counter()
    done = 0
    while not stop.item():
        buffer = own + done
        dist.all_reduce(buffer)
        print("sum", _sum(buffer.numpy()), flush=True)
        done += 1
        stop[0] = float(rank == 0 and time.perf_counter() - started_s > seconds)
        dist.broadcast(stop, 0)
    print("took", time.perf_counter() - started_s, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def follow(host: str) -> None:
    """The tap: decodes until nothing more comes, and prints what it has found."""
    from peers.hosts import move_to

    move_to(host)
    parser = Parser()
    gloo, assembler = Gloo(parser, ranks=RANKS, sizes=[4 * BUCKET]), Assembler()
    wire_bytes = frames_seen = 0
    quiet_s = 0.0
    with Live("eth0", roce=False, tcp_ports=None, blocks=RING_BLOCKS) as live:
        print("ready", flush=True)
        while not wire_bytes or quiet_s < SILENCE_S:
            frames = live.next(0.1)
            events = gloo.flush() if frames is None else gloo.feed(parser.parse(frames))
            quiet_s = quiet_s + 0.1 if frames is None else 0.0
            if frames is not None:
                wire_bytes += int(frames.table["length"].sum())
                frames_seen += len(frames.table)
            for event in events:
                for reduced in assembler.add(event):
                    state = "whole" if not (reduced.missing or reduced.mismatches) else "gaps"
                    print("sum", _sum(reduced.data.view(np.float32)), state, flush=True)
        drops = live.drops()
    print("seen", wire_bytes, frames_seen, drops.dropped, time.process_time(), flush=True)


def _sum(values: npt.NDArray[np.float32]) -> int:
    """Of the bits, so that order does not matter and a wrong one shows."""
    return int(values.view(np.uint32).sum(dtype=np.uint64))


# ---------------------------------------------------------------- figures


def measure_live(setting: Setting) -> list[Figure]:
    """All of this part; nothing where there can be no such hosts."""
    sys.path.insert(0, str(HOME / "tests"))
    from peers.hosts import hosts, missing
    from waiting import until
    from zygote import Zygote

    reason = missing()
    if reason is not None:
        print(f"live: skipped: {reason}", file=sys.stderr)
        return []
    outs = [setting.directory / f"said-{n}" for n in range(RANKS + 1)]
    seconds = QUICK_LIVE_S if setting.quick else LIVE_S
    with Zygote() as zygote, hosts(RANKS + 1, zygote) as found:
        _mirror(found[0].name)
        tap = found[RANKS].start("benchmarks.tap_live.follow", outs[RANKS])
        until(lambda: "ready" in tap.said(), DEADLINE_S, "the tap to begin")
        ranks = [
            host.start(
                "benchmarks.tap_live.reduce", out, rank=rank, master=found[0].address,
                seconds=seconds,
            )
            for rank, (host, out) in enumerate(zip(found[:RANKS], outs, strict=False))
        ]  # fmt: skip
        for child in (*ranks, tap):
            if child.wait(DEADLINE_S):
                raise ValueError(f"live: {child.said()[-2000:]}")
        return _figures(ranks[0].said(), tap.said())


def _mirror(host: str) -> None:
    """What passes the port of host 0 of a switch also goes to that of the last host."""
    switch = host.rpartition("h")[0] + "s"
    commands = ["qdisc add dev port0 clsact"] + [
        f"filter add dev port0 {way} protocol all u32 match u32 0 0 "
        f"action mirred egress mirror dev port{RANKS}"
        for way in ("ingress", "egress")
    ]
    for command in commands:
        subprocess.run(["tc", "-n", switch, *command.split()], check=True)


def _figures(rank: str, tap: str) -> list[Figure]:
    """From what a rank and the tap have printed."""
    sent = re.findall(r"^sum (\d+)$", rank, re.M)
    got = re.findall(r"^sum (\d+) (\w+)$", tap, re.M)
    (took_s,) = re.findall(r"^took (\S+)$", rank, re.M)
    ((wire_bytes, frames, dropped, cpu_s),) = re.findall(
        r"^seen (\d+) (\d+) (\d+) (\S+)$", tap, re.M
    )
    if [number for number, state in got if state == "whole"] != sent and not int(dropped):
        raise ValueError("live: the tap has other buffers than the ranks, and nothing was dropped")
    exact = sum(state == "whole" for _, state in got) / len(sent)
    rows = (
        ("sent and mirrored", int(wire_bytes) / float(took_s) / 1e9, "GB/s"),
        ("frames", int(frames) / float(took_s) / 1e3, "thousand/s"),
        ("the tap's share of a core", float(cpu_s) / float(took_s), "cores"),
    )
    return [
        median_of("live: dropped by the kernel", [int(dropped)], "frames", reach=0),
        median_of("live: all-reduces decoded exactly", [exact], "share", 1.0, at_least=True),
        *(median_of(f"live: {name}", [value], unit) for name, value, unit in rows),
    ]
