"""A shadow that is shown a damaged mirror of a real run: it has a step exactly, or knows that it
has not, and is exact again by itself.

A thousand patterns, seeded: packets lost, doubled, late, cut and changed, with checksums that show
it or do not, in one or both directions, singly or in bursts, at rates from 1e-4 to 1e-1; holes, and
captures that begin in the middle. More of it by hand, with the first seed and how many:
`PYTHONPATH=tests python tests/netns/test_damage.py 1000 5000`
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from everystep.store import addresses as at
from netns import mirror
from netns.cable import acknowledging, summed
from netns.damage import pattern
from netns.recorded import Recording
from netns.replayed import Outcome, Replay
from netns.said import told, trained
from peers import hosts as network
from peers.hosts import Host, hosts
from places import quick_folder
from waiting import until
from zygote import Zygote

pytestmark = [pytest.mark.root, pytest.mark.slow]

DEADLINE_S = 400.0
"""Of a recording, which begins again where something is lost."""

PORT = 7700

SEEDS = 1000
PARTS = 10
"""Tests that share them, of each ring."""

MOST_LATE = 4
"""Steps that are lacking behind the damage: the one in which a stream shows to be astray, and those
in which it is found again."""


def recorded(found: list[Host], folder: Path) -> Replay:
    """A run of all hosts but the last, which sees the port of the first."""
    *training, watching = found
    token, out = folder / "token", folder / "shadow.out"
    at.make_secret(token)
    with mirror.mirrored(training[0], watching):
        shadow = watching.start(
            "netns.recorded.shadow", out, folder=str(folder), address=watching.address, port=PORT,
            token_file=str(token), interface=mirror.INTERFACE,
        )  # fmt: skip
        until(lambda: told(out, "listens"), DEADLINE_S, "the shadow to listen")
        for rank, host in enumerate(training):
            host.start(
                "netns.job.train", folder / f"{rank}.out", rank=rank,
                world_size=len(training), rendezvous=f"tcp://{training[0].address}:29500",
                run=str(folder / "run"), address=f"{watching.address}:{PORT}",
                token_file=str(token), tap="wire", steps=1 << 30, pace_s=0.05, small=True,
            )  # fmt: skip
        assert shadow.wait(DEADLINE_S) == 0, shadow.said()
    data = (folder / "recording").read_bytes()
    lives = [trained(folder / f"{rank}.out") for rank in range(len(training))]
    return Replay(msgspec.msgpack.decode(data, type=Recording), lives)


def made(ranks: int, zygote: Zygote) -> Replay:
    with quick_folder() as folder, hosts(ranks + 1, zygote) as found:
        return recorded(found, folder)


@pytest.fixture(scope="module", params=[2, 3])
def replay(request: pytest.FixtureRequest, zygote: Zygote) -> Replay:
    reason = network.missing() or mirror.missing()
    if reason is not None:
        pytest.skip(reason)
    return made(request.param, zygote)


def check(replay: Replay, seed: int) -> tuple[Outcome, bool]:
    """That no step of this pattern is wrong, and that steps are right again behind it; and whether
    all were, soon after it. Every twentieth is folded throughout."""
    shown = pattern(replay, seed)
    found = replay.run(shown.packets, lag=shown.lag, pause=shown.pause, folds=seed % 20 == 0)
    is_soon = True
    for rank in replay.ranks:
        assert sorted([*found.exact[rank], *found.lacking[rank]]) == [*replay.steps]
        assert any(step in shown.sound for step in found.exact[rank]), (seed, found)
        late = [step for step, why in found.lacking[rank].items() if step in shown.sound and why]
        is_soon &= len(late) <= MOST_LATE
    return found, is_soon


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_is_damaged_no_step_is_wrong(replay: Replay, part: int) -> None:
    outcomes = [check(replay, seed) for seed in range(part, SEEDS // 2, PARTS)]
    assert sum(len(found.exact[0]) for found, _ in outcomes) > 100  # else nothing was compared
    assert sum(len(found.lacking[0]) for found, _ in outcomes) > 100
    assert [is_soon for _, is_soon in outcomes].count(False) <= 2, "two in 11,800, by hand"


@pytest.mark.parametrize("ahead", [1 << 16, 1 << 20, 3 << 20])
def test_a_stream_that_was_led_astray_is_found_again(replay: Replay, ahead: int) -> None:
    """An acknowledgement of what is still to be sent: all of that was taken to be lost."""
    step = replay.steps[len(replay.steps) // 2]
    packets = [
        replace(one, data=acknowledging(one.data, ahead))
        if replay.ends[step - 1] <= one.at < replay.ends[step]
        else one
        for one in replay.wired
    ]
    found = replay.run(packets, lag=0, pause=0, folds=False)
    for rank in replay.ranks:
        lacking = [late for late in found.lacking[rank] if late >= step]
        assert 1 <= len(lacking) <= MOST_LATE
        assert found.exact[rank][-1] == replay.steps[-1]


def test_without_damage_every_step_is_had(replay: Replay) -> None:
    for packets in (replay.packets, replay.wired):
        found = replay.run(packets, lag=0, pause=0, folds=True)
        for rank in replay.ranks:  # at first, the buckets are not certain
            assert sorted([*found.exact[rank], *found.lacking[rank]]) == [*replay.steps]
            assert {*found.lacking[rank]} <= {*replay.steps[:5]}


def test_what_checksums_do_not_show_the_proof_does(replay: Replay) -> None:
    """One bit of a gradient is another, in a segment whose checksum is right: the step is not had,
    or it was none of the bits that count. The one after the next state is."""
    step = replay.steps[len(replay.steps) // 2]
    refuted = 0
    large = [
        i
        for i, one in enumerate(replay.wired)
        if len(one.data) > 1000 and replay.ends[step - 1] <= one.at < replay.ends[step]
    ]
    for i in large[::2]:
        one = replay.wired[i]
        packets, data = [*replay.wired], bytearray(one.data)
        data[len(data) // 2] ^= 0x10
        packets[i] = replace(one, data=summed(data))
        found = replay.run(packets, lag=0, pause=0, folds=False)
        assert len([late for late in found.lacking[0] if late > replay.steps[5]]) <= 1
        refuted += found.refuted
    assert refuted > 0


def main(first: int, count: int) -> None:
    with Zygote() as zygote:
        replays = [made(ranks, zygote) for ranks in (2, 3)]
    exact, lacking, refuted, slow, wrong = 0, 0, 0, 0, list[tuple[int, int]]()
    for seed in range(first, first + count):
        replay = replays[seed % 2]
        try:
            found, is_soon = check(replay, seed)
        except AssertionError as error:
            wrong.append((len(replay.ranks), seed))
            print(f"{len(replay.ranks)} ranks, seed {seed}: {error!s:.300}")
            continue
        exact += len(found.exact[0])
        lacking += len(found.lacking[0])
        refuted += found.refuted
        if not is_soon:
            slow += 1
            print(f"{len(replay.ranks)} ranks, seed {seed}: slowly, {found}")
    print(
        f"{count:,} patterns: {exact:,} steps exact, {lacking:,} lacking, {refuted} refuted by "
        f"their proof; {slow} came back slowly; wrong: {wrong}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
