"""An agent that holds a copy for another: it writes it when its owner is lost, and only then."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.replica_scenes import ByteMirror, byte_mirrors, image_of
from agent.scenes import begin_of, run_at, state
from byte_runs import read_back, write_part
from everystep import Peers as Options
from everystep.agent import holder, link, pace
from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.hosts import host, plan, rescue
from everystep.agent.link import Link
from everystep.agent.pace import Pace
from everystep.agent.peers import Peers
from everystep.agent.process import LOCK_SLOT
from everystep.agent.relay import Bound, Relay
from everystep.agent.rings import Queued
from everystep.errors import StoreFailed, UsageError
from everystep.store import addresses as at
from everystep.store import local
from everystep.store.format import LAST_STEP, LOCK_FILE
from everystep.store.newest import Newest
from everystep.store.run import Run
from everystep.types import StepRef
from waiting import until

DEADLINE_S = 60.0


class Owner:
    """The agent of rank 1, as the one of rank 0 sees it."""

    def __init__(self, path: Path, run: Run) -> None:
        self.begin = begin_of(run, rank=1, world_size=2, replica=True)
        self.token = at.read_token(path, 1)
        self.guard = threading.Condition()
        self.said: list[str] = []
        self.is_cut = self._closed = False
        self._backend = run.backend
        self._opened = p.OpenLog(base=1, layout=b"A")
        self.relay = Relay(
            self.begin, [0], self._connect, Pace(None), self.guard,
            lambda level, text: self.said.append(text), lambda: None,
        )  # fmt: skip

    def _connect(self, rank: int) -> w.Wire:
        address = at.read_address(self._backend, 1, rank)
        if address is None or self.is_cut:
            raise ConnectionRefusedError
        return w.connected(address, self.token)

    @property
    def link(self) -> Link:
        return self.relay._links[0]

    def give(self, step: int) -> None:
        def lacks() -> bool:
            with self.guard:
                return self.relay.due(step, [], is_still=True) is True

        until(lacks, DEADLINE_S, "a state to be wanted")
        self.relay.give(image_of(self.begin, step))

    def forward(self, *steps: int, what: str = "right", safe: int | None = None) -> None:
        for step in steps:
            data = f"{step} A {what}".encode()
            record = p.Record(
                number=step, step=step, ring=0, offset=0, nbytes=len(data),
                safe=step if safe is None else safe,
            )  # fmt: skip
            queued = Queued(record, self._opened)
            with self.guard:
                assert self.relay.due(step - 1, [queued], is_still=True) is queued
            self.relay.forward(queued, memoryview(data))

    def until_kept(self, step: int) -> None:
        until(lambda: self.link.kept == step, DEADLINE_S, f"step {step} to be kept")

    def lose(self) -> None:
        """The agent is gone, without a word."""
        self.is_cut = True
        wire = self.link._wire
        if wire is not None:
            wire.interrupt()
        until(lambda: not self.link.is_there, DEADLINE_S, "the connection to end")

    def close(self) -> None:
        """Twice is no error."""
        if not self._closed:
            self._closed = True
            self.relay.close()


class Scene:
    """A run with the agent of rank 0, which holds a copy for rank 1."""

    def __init__(self, path: Path) -> None:
        self.path, self.run = path, run_at(path)
        self.notices: list[Any] = []
        self.guard = threading.Condition()
        at.make_token(path, 1)
        self.begin = begin_of(self.run, rank=0, world_size=2, replica=True)
        plan = p.PeerPlan(hosts=["a", "b"], copies=2, bytes_per_s=None, address="127.0.0.1")
        self.holder = Peers(path, self.begin, plan, self.guard, self.notices.append)
        self.owner = Owner(path, self.run)

    def ready(self, upto: int = 9, safe: int | None = None) -> None:
        """There is a copy that has come so far."""
        self.owner.give(1)
        self.owner.until_kept(1)
        self.owner.forward(*range(2, upto + 1), safe=safe)
        self.owner.until_kept(upto)

    def tell(self, newest: int) -> None:
        """What the agent of rank 0 has itself."""
        Newest(self.run.backend, 1, 0, 2).tell(newest)

    def stop_training(self) -> None:
        with self.guard:
            self.holder.drain(on=True)

    def is_idle(self) -> bool:
        with self.guard:
            return self.holder.idle

    def written(self) -> list[int]:
        """Steps of which there is a part of rank 1."""
        steps = self.run.listing().steps
        return [e.ref.step for e in steps if any(part.rank == 1 for part in e.parts)]

    def assert_restorable(self, step: int) -> None:
        """With what the agent of rank 0 has written, it is the state of this step."""
        ref = StepRef("main", step)
        write_part(self.run, ref, state(step), rank=0, world_size=2, session=1)
        assert read_back(self.run, ref, 1) == {one.key: one.data for one in state(step)}

    def close(self) -> None:
        self.owner.close()
        self.holder.close()


@pytest.fixture
def mirror() -> Iterator[type[ByteMirror]]:
    with byte_mirrors() as mirror:
        yield mirror


@pytest.fixture
def scene(
    run_dir: Path, mirror: type[ByteMirror], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    monkeypatch.setattr(local, "LOCK_PATIENCE_S", 0.1)
    monkeypatch.setattr(holder, "PATIENCE_S", 0.2)
    with contextlib.closing(Scene(run_dir)) as scene:
        yield scene


# ---------------------------------------------------------------- a lost owner


def test_the_holder_writes_what_the_lost_agent_would_have(scene: Scene) -> None:
    scene.ready(safe=6)
    scene.owner.lose()
    scene.stop_training()
    until(lambda: not scene.is_idle(), DEADLINE_S, "the loss to be seen")
    scene.tell(8)  # rank 0 has not come further
    until(scene.is_idle, DEADLINE_S, "the part to be written")
    assert scene.written() == [8]
    scene.assert_restorable(8)


def test_a_restart_asks_and_need_not_be_patient(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "PATIENCE_S", 1e9)
    scene.ready()
    scene.owner.lose()
    scene.tell(20)
    assert rescue(scene.run.backend, scene.path) == [1]
    assert scene.written() == [9]
    scene.assert_restorable(9)
    assert rescue(scene.run.backend, scene.path) == []


def test_a_state_alone_is_enough(scene: Scene) -> None:
    scene.ready(upto=1)
    scene.owner.lose()
    scene.tell(1)
    assert rescue(scene.run.backend, scene.path) == [1]
    scene.assert_restorable(1)


def test_nothing_is_written_while_the_owner_lives(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(w, "ALIVE_S", 0.1)
    scene.ready()
    scene.stop_training()
    scene.tell(9)
    assert scene.is_idle()
    assert rescue(scene.run.backend, scene.path) == []
    assert scene.written() == []


def test_nothing_is_written_while_training_goes_on(scene: Scene) -> None:
    scene.ready()
    scene.owner.lose()
    scene.tell(9)
    assert scene.is_idle()
    assert scene.written() == []


def test_nothing_is_written_where_another_agent_of_the_rank_is_there(scene: Scene) -> None:
    """One that is cut off, or has been started again."""
    scene.ready()
    scene.owner.lose()
    scene.tell(9)
    with scene.run.backend.lock(LOCK_FILE, LOCK_SLOT + 1):
        assert rescue(scene.run.backend, scene.path) == []
    assert scene.written() == []


def test_an_owner_that_has_ended_well_is_forgotten(scene: Scene) -> None:
    scene.ready()
    scene.owner.close()
    until(lambda: not scene.holder._copies, DEADLINE_S, "the copy to be forgotten")
    scene.tell(9)
    assert rescue(scene.run.backend, scene.path) == []
    assert scene.written() == []


def test_an_owner_that_comes_again_gives_a_new_state(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "PATIENCE_S", 1e9)
    scene.ready()
    scene.owner.lose()
    scene.owner.is_cut = False
    scene.owner.give(20)
    scene.owner.until_kept(20)
    scene.owner.forward(21)
    scene.owner.until_kept(21)
    scene.owner.lose()
    scene.tell(21)
    assert rescue(scene.run.backend, scene.path) == [1]
    scene.assert_restorable(21)


# ---------------------------------------------------------------- copies that cannot be


def test_a_copy_that_cannot_be_folded_is_made_anew(scene: Scene) -> None:
    scene.ready()
    scene.owner.forward(10, what="wrong")
    until(lambda: scene.owner.link.next_step is None, DEADLINE_S, "the copy to be given up")
    assert any("step 10: model.weight is not" in text for text in scene.owner.said)
    scene.owner.give(12)
    scene.owner.until_kept(12)


def test_a_holder_that_is_too_far_behind_is_dropped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LEAST_BYTES", 100)
    scene.owner.give(1)
    scene.owner.until_kept(1)
    with scene.owner.guard:
        scene.owner.link._most_bytes = 100
        scene.owner.link._queue.extend([link._Item(w.Alive())] * 3)
        scene.owner.link._queued_bytes = 99
        queued = Queued(
            p.Record(number=2, step=2, ring=0, offset=0, nbytes=20), p.OpenLog(base=1, layout=b"A")
        )
        scene.owner.link.give_record(queued, memoryview(bytes(20)))
        assert scene.owner.link.next_step is None
        assert scene.owner.link.kept is None
    assert any("119 bytes behind" in text for text in scene.owner.said)
    assert scene.owner.relay._kept() == LAST_STEP  # it holds back nobody


def test_a_copy_for_which_there_is_no_memory(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    from everystep.agent import arena

    monkeypatch.setattr(arena, "available_bytes", lambda: 1000)
    scene.owner.give(1)
    until(lambda: scene.owner.said, DEADLINE_S, "the refusal")
    assert "not enough memory" in scene.owner.said[0]


def test_a_holder_that_says_nothing_while_a_state_is_sent_is_not_silent(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(w, "SILENT_S", 1.0)
    monkeypatch.setattr(w, "_SLICE_BYTES", 4096)
    scene.owner.link._pace = Pace(20_000.0)
    scene.owner.give(1)
    scene.owner.until_kept(1)
    assert len(scene.owner.said) == 1  # not that it was given up


# ---------------------------------------------------------------- how far


def test_no_replica_goes_further_than_the_copies(scene: Scene) -> None:
    assert scene.holder.relay.limit(5) == LAST_STEP  # there is no copy yet
    scene.ready(upto=7)
    for relay in (scene.owner.relay, scene.holder.relay):
        until(lambda relay=relay: relay.limit(9) == 7, DEADLINE_S, "what rank 1 has told")
    scene.owner.forward(8)
    until(lambda: scene.holder.relay.limit(9) == 8, DEADLINE_S, "what rank 1 has told")


def test_what_was_said_last_holds_until_training_goes_on_without() -> None:
    def refused() -> w.Wire:
        raise ConnectionRefusedError

    bound = Bound(1, 2, refused, lambda: 0, lambda: None)
    bound.close()
    bound._step, bound._is_alone = 7, False
    assert bound.step(9) == 7
    bound._is_alone = True
    assert [bound.step(newest) for newest in (10, 11, 14)] == [7, 7, 7]
    assert bound.step(15) == LAST_STEP


def test_the_rate_holds_for_all_connections_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now_s[0])
    waited: list[float] = []

    def rest(wait_s: float) -> None:
        waited.append(wait_s)
        now_s[0] += wait_s

    monkeypatch.setattr(pace.time, "sleep", rest)
    limited = Pace(1000.0)
    for _ in range(20):
        limited.take(500)
    assert 9.4 <= sum(waited) <= 9.5  # the last need not wait for its end
    Pace(None).take(1 << 40)
    assert len(waited) < 20


# ---------------------------------------------------------------- who may join


def test_an_address_that_is_not_of_this_host(scene: Scene) -> None:
    plan = p.PeerPlan(hosts=["a", "b"], copies=2, bytes_per_s=None, address="192.0.2.1")
    with pytest.raises(StoreFailed, match=r"192\.0\.2\.1: nobody could connect"):
        Peers(scene.path, scene.begin, plan, scene.guard, scene.notices.append)


def test_a_copy_that_was_meant_for_another_is_refused(scene: Scene) -> None:
    address = at.read_address(scene.run.backend, 1, 0)
    assert address is not None
    for changes in ({"session": 2}, {"rank": 0}):
        wire = w.connected(address, scene.owner.token)
        wire.send(w.Keep(msgspec.structs.replace(scene.owner.begin, **changes)))
        with pytest.raises((EOFError, OSError)):
            wire.receive()
        wire.close()


@pytest.mark.parametrize(
    "options",
    [{"copies": 1}, {"copies": 2.0}, {"bytes_per_s": 0}, {"bytes_per_s": -1}, {"address": "eth0"}],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Options(**options)


# ---------------------------------------------------------------- the trainer's part


class Told:
    """Two ranks, as rank 0 sees them."""

    rank, world_size = 0, 2

    def __init__(self, *others: Any) -> None:
        self._others = list(others)

    def gather(self, value: Any) -> list[Any]:
        return [value, self._others.pop(0) if self._others else value]

    def from_first(self, value: Any) -> Any:
        return value


def planned(path: Path, options: Options | None, *others: Any) -> p.PeerPlan | None:
    return plan(path, 1, Told(*others), options)  # type: ignore[arg-type]


def test_ranks_of_several_hosts_have_a_plan_and_a_secret(scene: Scene) -> None:
    options = Options(copies=2, bytes_per_s=5.0, address="192.0.2.1")
    at_first = at.read_token(scene.path, 1)
    found = planned(scene.path, options, ["other", "192.0.2.2", True])
    assert found == p.PeerPlan(
        hosts=[host(), "other"], copies=2, bytes_per_s=5.0, address="192.0.2.1"
    )
    assert at.read_token(scene.path, 1) != at_first


def test_without_peers_or_with_one_host_there_is_no_plan(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    assert planned(scene.path, None) is None
    assert not caplog.records
    assert planned(scene.path, Options()) is None
    assert "all ranks are on one host" in caplog.text


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (["other", "127.0.0.1", True], "rank 1 has no address that other hosts reach"),
        (["other", "192.0.2.2", False], "rank 1 cannot make a certificate"),
    ],
)
def test_a_host_that_cannot_take_part(scene: Scene, other: list[Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(scene.path, Options(address="192.0.2.1"), other)


def test_giving_up_one_lock_keeps_the_others(scene: Scene) -> None:
    """An agent that writes for another one holds two locks of one file."""
    program = (
        "import sys; from pathlib import Path; from everystep.store import local\n"
        "local.LOCK_PATIENCE_S = 0.0\n"
        "with local.LocalBackend(Path(sys.argv[1])).lock('owner.lock', int(sys.argv[2])): pass\n"
    )

    def is_free(slot: int) -> bool:
        command = [sys.executable, "-c", program, str(scene.path), str(slot)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 or "RunBusy" in done.stderr, done.stderr
        return done.returncode == 0

    backend = scene.run.backend
    with backend.lock(LOCK_FILE, 0):
        with backend.lock(LOCK_FILE, 1):
            assert not is_free(0) and not is_free(1)
        assert not is_free(0)
        assert is_free(1)
    assert is_free(0)
