"""A shadow on a host that sees one mirrored port: it has every bit at every step, and gives the
last one back when all hosts that trained are gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from everystep.store import addresses as at
from netns import mirror
from netns.said import folded, last, proved, stored, told, trained
from peers import hosts as network
from peers.hosts import Host, hosts
from waiting import until
from zygote import Child, Zygote

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(500)]

MOST = 4
"""Hosts that train."""

STEPS = 200
"""That the shadow has, one after the other."""

_MOST_TRIES = 5

SOON = 60
"""Steps before it has begun."""
LATER = 10

DEADLINE_S = 150.0
"""On a machine that others use, too."""

PORT = 7700
ENDLESS = 10**6


@pytest.fixture(scope="module")
def all_hosts(zygote: Zygote) -> Iterator[list[Host]]:
    """Those that train, and the shadow's, which sees the port of the first."""
    reason = network.missing() or mirror.missing()
    if reason is not None:
        pytest.skip(reason)
    with hosts(MOST + 1, zygote) as found, mirror.mirrored(found[0], found[-1]):
        yield found


@pytest.fixture(autouse=True)
def _nothing_goes_on(all_hosts: list[Host]) -> Iterator[None]:
    """A test that fails leaves no process to the next one."""
    yield
    for host in all_hosts:
        host.kill()


class Scene:
    """A run of some hosts, and its shadow."""

    def __init__(self, all_hosts: list[Host], size: int, run: Path, folder: Path) -> None:
        self.training, self.watching = all_hosts[:size], all_hosts[-1]
        self._addresses: list[str] = []
        self._run, self._folder = run, folder
        self._token = folder / "token"
        at.make_secret(self._token)
        self.shadow_out = folder / "shadow.out"
        self.shadow: Child | None = None

    def out(self, life: int, rank: int) -> Path:
        return self._folder / f"{life}-{rank}"

    def watch(self, **options: object) -> None:
        self.shadow = self.watch_by(self.watching, self.shadow_out, **options)

    def watch_by(self, host: Host, out: Path, **options: object) -> Child:
        """One more shadow of the run."""
        shadow = host.start(
            "netns.job.shadow", out, folder=str(self._folder / "shadow"),
            address=host.address, port=PORT, token_file=str(self._token),
            **{"persist_every": 50, "interface": mirror.INTERFACE} | options,
        )  # fmt: skip
        self._addresses.append(f"{host.address}:{PORT}")
        until(lambda: told(out, "listens"), DEADLINE_S, "the shadow to listen")
        return shadow

    def train(self, life: int, steps: int, **options: object) -> list[Child]:
        return [
            host.start(
                "netns.job.train",
                self.out(life, rank),
                run=str(self._run),
                rank=rank,
                world_size=len(self.training),
                steps=steps,
                tap="wire",
                rendezvous=f"tcp://{self.training[0].address}:{29500 + life}",
                address=",".join(self._addresses),
                token_file=str(self._token),
                **options,
            )
            for rank, host in enumerate(self.training)
        ]

    def until_in_shadow(self, step: int, deadline_s: float) -> None:
        """Every rank knows that its state is in the shadow so far."""

        def is_there() -> bool:
            steps = [last(self.out(1, rank)) for rank in range(len(self.training))]
            return all((its.get("in_shadow") or 0) >= step for its in steps)

        until(is_there, deadline_s, f"step {step} to be in the shadow")

    def not_seen(self) -> int:
        """How many times the shadow has said that it lacks a step."""
        return self.shadow_out.read_text().count("not seen")

    def bytes(self) -> tuple[int, int]:
        """What all training hosts have sent, and what the shadow has been told and has said."""
        sent = sum(map(mirror.sent_bytes, self.training))
        return sent, mirror.passed_bytes(self.watching)

    def passed(self) -> tuple[int, int]:
        """`bytes` of `STEPS` steps in a row; of the first in which nothing was lost, since a state
        that is sent again is no part of what a step costs, and a host may stand still for long."""
        for _ in range(_MOST_TRIES):
            lacked, ranks = self.not_seen(), range(len(self.training))
            newest = max(last(self.out(1, rank))["step"] for rank in ranks)
            self.until_in_shadow(newest + 1, DEADLINE_S)  # a state for what it lacked has come
            before = self.bytes()
            begun = min(last(self.out(1, rank))["in_shadow"] for rank in ranks)
            self.until_in_shadow(begun + STEPS, DEADLINE_S)
            after = self.bytes()
            if self.not_seen() == lacked:
                return after[0] - before[0], after[1] - before[1]
        raise AssertionError(f"something was lost in each of {_MOST_TRIES} times {STEPS} steps")

    def disturb(self, whoever: Child, steps: int) -> None:
        """Have it damage what is mirrored, until the shadow has lacked so many steps of it."""
        before = self.not_seen()
        whoever.kill(signal.SIGUSR1)
        until(lambda: self.not_seen() >= before + steps, DEADLINE_S, "something to be lost")
        whoever.kill(signal.SIGUSR1)

    def assert_it_comes_back(self) -> None:
        """With a new state, and from there off the wire; and it never had a wrong step."""
        for more in (0, 20):
            self.until_in_shadow(last(self.out(1, 0))["step"] + more, DEADLINE_S)
        self.kill()
        self.end()
        assert proved(folded(self.shadow_out), self.lives()) > 20
        assert last(self.out(1, 0))["strategy"] == "Shadow"

    def kill(self) -> None:
        """All hosts that train are gone at once."""
        for host in self.training:
            for child in host.started:
                with contextlib.suppress(ProcessLookupError):  # it missed another already
                    os.kill(child.pid, signal.SIGKILL)
        for host in self.training:
            host.kill()

    def end(self) -> None:
        assert self.shadow is not None
        self.shadow.kill(signal.SIGTERM)
        assert self.shadow.wait(DEADLINE_S) == 0, self.shadow.said()

    def lives(self) -> list[dict[int, dict[str, str]]]:
        ranks = range(len(self.training))
        return [trained(self.out(1, rank)) | trained(self.out(2, rank)) for rank in ranks]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_step_is_had_off_the_wire(
    size: int, all_hosts: list[Host], run_dir: Path, tmp_path: Path
) -> None:
    scene = Scene(all_hosts, size, run_dir, tmp_path)
    scene.watch()
    scene.train(1, ENDLESS)
    scene.until_in_shadow(SOON, DEADLINE_S)
    trained_bytes, told_bytes = scene.passed()
    assert told_bytes < 0.01 * (trained_bytes - told_bytes)
    scene.kill()
    for child in scene.train(2, LATER, further=True):
        assert child.wait(DEADLINE_S) == 0, child.said()
    scene.end()
    for rank in range(size):
        (restored,) = told(scene.out(2, rank), "restored")
        before = {one["step"]: one["whole"] for one in told(scene.out(1, rank), "step")}
        assert restored["step"] >= SOON + STEPS
        assert restored["whole"] == before[restored["step"]]
    had = folded(scene.shadow_out)
    first = min(step for step, parts in had.items() if len(parts) == size)
    assert first <= SOON
    assert all(len(had[step]) == size for step in range(first, restored["step"] + 1))
    assert proved(had, scene.lives()) >= STEPS


@pytest.mark.parametrize("loss", [1e-4, 1e-3, 1e-2, 1e-1])
def test_what_the_mirror_loses_is_asked_for(
    loss: float, all_hosts: list[Host], run_dir: Path, tmp_path: Path
) -> None:
    """The shadow has a step exactly or not at all, and it comes back by itself."""
    scene = Scene(all_hosts, 2, run_dir, tmp_path)
    scene.watch(loss=loss)
    scene.train(1, ENDLESS)
    scene.until_in_shadow(SOON, DEADLINE_S)
    assert scene.shadow is not None
    scene.disturb(scene.shadow, 1)
    scene.assert_it_comes_back()


def test_a_damaged_mirror_costs_steps_and_never_gives_a_wrong_one(
    all_hosts: list[Host], run_dir: Path, tmp_path: Path
) -> None:
    """Packets come twice, late, cut, changed or not at all, by way of a pipe; then they do not, and
    the shadow is exact again by itself."""
    scene, pipe = Scene(all_hosts, 2, run_dir, tmp_path), tmp_path / "pipe"
    os.mkfifo(pipe)
    between = scene.watching.start(
        "netns.damage.stand_between", tmp_path / "between", interface=mirror.INTERFACE,
        path=str(pipe), seed=1,
    )  # fmt: skip
    scene.watch(interface=None, capture=str(pipe))
    scene.train(1, ENDLESS, small=True, pace_s=0.05)
    scene.until_in_shadow(SOON, DEADLINE_S)
    scene.disturb(between, 2)
    scene.assert_it_comes_back()


def test_steps_are_had_out_of_a_capture_that_is_being_written(
    all_hosts: list[Host], run_dir: Path, tmp_path: Path
) -> None:
    """Another program captures; the shadow reads its file, has every bit, and logs it."""
    if shutil.which("dumpcap") is None:
        pytest.skip("needs the command dumpcap")
    scene = Scene(all_hosts, 2, run_dir, tmp_path)
    captured, folder = tmp_path / "port.pcapng", tmp_path / "dumpcap"
    dumpcap = scene.watching.start(
        "netns.job.capture", folder, interface=mirror.INTERFACE, path=str(captured)
    )
    until(captured.exists, DEADLINE_S, "the capture to begin")
    scene.watch(interface=None, capture=str(captured), deltas=True, keep_last=99)
    scene.train(1, ENDLESS)
    scene.until_in_shadow(SOON, DEADLINE_S)
    scene.until_in_shadow(SOON + 50, DEADLINE_S)  # it has begun by now, on any machine
    scene.kill()
    scene.end()
    dumpcap.kill(signal.SIGTERM)
    dumpcap.wait(DEADLINE_S)
    assert proved(folded(scene.shadow_out), scene.lives()) > 30
    logged = stored(tmp_path / "shadow", 2, every=5)
    assert proved(logged, scene.lives()) > 30 // 5  # of what it has written, too


def test_two_shadows_that_see_a_port_each_split_a_run(
    all_hosts: list[Host], run_dir: Path, tmp_path: Path
) -> None:
    """Each reads all gradients off its own mirror, and has the state of its rank at every step; a
    restart gets the last step of both."""
    scene, other, other_out = Scene(all_hosts, 2, run_dir, tmp_path), all_hosts[-2], tmp_path / "2"
    with mirror.mirrored(all_hosts[1], other):
        scene.watch()
        second = scene.watch_by(other, other_out)
        scene.train(1, ENDLESS)
        scene.until_in_shadow(SOON, DEADLINE_S)
        scene.until_in_shadow(SOON + 50, DEADLINE_S)
        scene.kill()
        for child in scene.train(2, LATER, further=True):
            assert child.wait(DEADLINE_S) == 0, child.said()
        second.kill(signal.SIGTERM)
        scene.end()
        assert second.wait(DEADLINE_S) == 0, second.said()
    (had, others), lives = (folded(scene.shadow_out), folded(other_out)), scene.lives()
    assert all({*parts} == {0} for parts in had.values())
    assert all({*parts} == {1} for parts in others.values())
    both = {step: had[step] | others[step] for step in had.keys() & others.keys()}
    assert proved(both, lives) > 50
    for rank in range(2):
        (restored,) = told(scene.out(2, rank), "restored")
        before = {one["step"]: one["whole"] for one in told(scene.out(1, rank), "step")}
        assert restored["step"] in both
        assert restored["whole"] == before[restored["step"]]


def test_noise_on_gradients_ends_in_full_checkpoints(
    all_hosts: list[Host], run_dir: Path, tmp_path: Path
) -> None:
    """No number explains them: that is said, and every step is stored in full."""
    scene = Scene(all_hosts, 2, run_dir, tmp_path)
    scene.watch()
    scene.train(1, ENDLESS, noisy_from=SOON)
    scene.until_in_shadow(SOON - 1, DEADLINE_S)

    def is_full() -> bool:
        return all(last(scene.out(1, rank))["strategy"] == "Full" for rank in range(2))

    until(is_full, DEADLINE_S, "every step to be stored in full")
    scene.kill()
    scene.end()
    assert "every step is stored in full instead" in scene.out(1, 0).read_text()
    steps = [
        [t["step"] for t in told(out, "step") if t["strategy"] == "Full"]
        for out in (scene.out(1, 0), scene.out(1, 1))
    ]
    assert steps[0][0] == steps[1][0], "all ranks at the same step"
    proved(folded(scene.shadow_out), scene.lives())
