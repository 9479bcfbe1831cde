"""Several shadows of one run: each holds some ranks, none goes beyond what all have, and what they
write together is one step."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.replica_scenes import byte_mirrors, image_of
from agent.scenes import begin_of, run_at, state
from byte_runs import read_back
from everystep.agent import common, holder, link, shadow_together
from everystep.agent import protocol as p
from everystep.agent import wire as w
from everystep.agent.link import Link
from everystep.agent.pace import Pace
from everystep.agent.rings import Queued
from everystep.agent.shadow import Shadow
from everystep.agent.shadow_copy import Keeping
from everystep.agent.shadow_fetch import fetch
from everystep.agent.shadow_link import connected
from everystep.errors import UsageError
from everystep.store import addresses as at
from everystep.store.format import LAST_STEP
from everystep.store.local import LocalBackend
from everystep.store.newest import new_mark
from everystep.store.run import Run
from everystep.strategies import Shadow as Options
from everystep.types import StepRef
from waiting import until

DEADLINE_S = 60.0
EVERY = 10
"""Steps between two full checkpoints."""


class Owner:
    """The agent of a rank, as its shadow sees it."""

    def __init__(self, scene: Scene, rank: int) -> None:
        self._plan, self._is_cut = scene.plan, False
        self.begin = begin_of(
            scene.run, rank=rank, world_size=scene.ranks, replica=True, shadow=scene.plan
        )
        self._token = at.read_secret(scene.token)
        self._guard = threading.Condition()
        self._opened = p.OpenLog(base=1, layout=b"A")
        self._place = scene.plan.places[rank % len(scene.plan.places)]
        self.link = Link(
            "its shadow", self.begin, self._connect, Pace(None), self._guard,
            lambda level, text: None, ends=False,
        )  # fmt: skip

    def _connect(self) -> w.Wire:
        if self._is_cut:
            raise ConnectionRefusedError
        return connected(self._place, self._token)

    def give(self, step: int) -> None:
        """The state, whenever it is wanted, until it is there."""
        link, image = self.link, image_of(self.begin, step)
        describe, nbytes = image.described()
        base = w.Base(describe=describe, seal=image.seal, nbytes=nbytes)

        def is_kept() -> bool:
            with self._guard:
                if link.is_there and link.next_step is None:
                    link.give_state(base, memoryview(bytes(image.slot[:nbytes])))
                return link.kept == step

        until(is_kept, DEADLINE_S, f"a state of step {step} to be kept")

    def forward(self, *steps: int, safe: int | None = None) -> None:
        for step in steps:
            data = f"{step} A right".encode()
            record = p.Record(
                number=step, step=step, ring=0, offset=0, nbytes=len(data),
                safe=step if safe is None else safe,
            )  # fmt: skip
            with self._guard:
                assert self.link.next_step == step
                self.link.give_record(Queued(record, self._opened), memoryview(data))
        self.until_kept(steps[-1])

    def until_kept(self, step: int) -> None:
        until(lambda: self.link.kept == step, DEADLINE_S, f"step {step} to be kept")

    def lose(self) -> None:
        """The agent is gone, without a word."""
        self._is_cut = True
        wire = self.link._wire
        if wire is not None:
            wire.interrupt()


class Scene:
    """A run of four ranks that some shadows hold."""

    ranks = 4

    def __init__(self, folder: Path, shadows: int = 2) -> None:
        self.folder, self.token = folder, folder / "token"
        at.make_secret(self.token)
        self.run = run_at(folder / "run")
        self.said: list[list[str]] = [[] for _ in range(shadows)]
        self.shadows = [self._started(number) for number in range(shadows)]
        self._alive = {*range(shadows)}
        self.plan = p.ShadowPlan(
            places=[("127.0.0.1", shadow.port) for shadow in self.shadows],
            token_file=str(self.token),
            tap="software",
        )
        self.owners: list[Owner] = []

    def _started(self, number: int, port: int = 0, name: str = "shadow") -> Shadow:
        keeping = Keeping(path=self.folder / name, persist_every=EVERY, keep_last=2)
        said = self.said[number]
        token = at.read_secret(self.token)
        return Shadow(keeping, "127.0.0.1", port, token, None, lambda _, text: said.append(text))

    def begin(self) -> None:
        """All ranks are there."""
        self.owners = [Owner(self, rank) for rank in range(self.ranks)]

    def of(self, number: int) -> list[Owner]:
        """The ranks that a shadow holds."""
        return self.owners[number :: len(self.shadows)]

    def others(self, number: int) -> list[Owner]:
        return [one for one in self.owners if one not in self.of(number)]

    def give(self, step: int) -> None:
        """Each shadow has states of this step, and has heard of the others'."""
        for owner in self.owners:
            owner.give(step)
        self.until_together()

    def until_together(self) -> None:
        def is_so() -> bool:
            them = [self.shadows[number]._together for number in self._alive]
            told = {one._write_at for one in them}
            told |= {
                word.write_at for one in them for word in one._words() if isinstance(word, w.Agreed)
            }
            return len(told) == 1 and 0 not in told and all(one._is_complete() for one in them)

        until(is_so, DEADLINE_S, "all shadows to hear of all states")

    def folded(self, owner: Owner) -> int:
        copy: Any = self.shadows[owner.begin.rank % len(self.shadows)]._copies[owner.begin.rank]
        return int(copy._replica._step)

    def until_folded(self, step: int) -> None:
        def is_so() -> bool:
            return all(self.folded(owner) == step for owner in self.owners)

        until(is_so, DEADLINE_S, f"step {step} in all copies")

    def lose(self) -> None:
        """All training is gone at once."""
        for owner in self.owners:
            owner.lose()

    def kill(self, number: int) -> None:
        """It is gone, and has written nothing more."""
        shadow = self.shadows[number]
        self._alive.discard(number)
        shadow._together._mark = ""  # nobody takes it back
        shadow._stop_listening()
        shadow._end()
        shadow._together.close()

    def start(self, number: int, name: str = "shadow") -> None:
        """Another in its place."""
        self.shadows[number] = self._started(number, self.plan.places[number][1], name)
        self._alive.add(number)

    def complete(self, path: Path | None = None) -> list[int]:
        steps = Run.open(path or self.folder / "shadow").listing().steps
        return sorted(entry.ref.step for entry in steps if entry.complete)

    def until_complete(self, step: int) -> None:
        until(lambda: step in self.complete(), DEADLINE_S, f"step {step} to be complete")

    def until_said(self, number: int, text: str) -> None:
        def is_so() -> bool:
            return any(text in one for one in self.said[number])

        until(is_so, DEADLINE_S, f"{text!r} to be said")

    def assert_exact(self, step: int, path: Path | None = None) -> None:
        """It is the newest, of all ranks, to the last bit."""
        run = Run.open(path or self.folder / "shadow")
        assert self.complete(path)[-1] == step
        expected = {one.key: one.data for one in state(step)}
        for rank in range(self.ranks):
            assert read_back(run, StepRef("main", step), rank) == expected

    def close(self) -> None:
        for owner in self.owners:
            owner.lose()
        for owner in self.owners:
            owner.link.close()
        for number in sorted(self._alive):
            self.kill(number)


@pytest.fixture(autouse=True)
def _slow_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stands still for a while loses no connection, and has lost nobody."""
    monkeypatch.setattr(w, "SILENT_S", DEADLINE_S)
    monkeypatch.setattr(w, "GREETING_S", DEADLINE_S)
    monkeypatch.setattr(shadow_together, "_HOLDS_S", 2 * DEADLINE_S)
    monkeypatch.setattr(common, "PATIENCE_S", 2 * DEADLINE_S)
    monkeypatch.setattr(holder, "PATIENCE_S", 1e9)
    monkeypatch.setattr(holder, "_COMPLAINS_S", 0.0)
    monkeypatch.setattr(link, "MOST_RETRY_S", 0.25)


@pytest.fixture
def made(quick_path: Path) -> Iterator[Callable[..., Scene]]:
    with byte_mirrors(), contextlib.ExitStack() as stack:

        def make(shadows: int = 2) -> Scene:
            return stack.enter_context(contextlib.closing(Scene(quick_path, shadows)))

        yield make


Made = Callable[..., Scene]

# ---------------------------------------------------------------- one step of all


@pytest.mark.parametrize("shadows", [2, 3])
def test_none_goes_beyond_what_all_have(shadows: int, made: Made) -> None:
    scene = made(shadows)
    scene.begin()
    scene.give(1)
    for owner in scene.others(1):
        owner.forward(*range(2, 10))
    assert all(scene.folded(owner) == 1 for owner in scene.owners)
    for owner in scene.of(1):
        owner.forward(*range(2, 8))
    scene.until_folded(7)
    for owner in scene.of(1):
        owner.forward(8, 9)
    scene.until_folded(9)


@pytest.mark.parametrize("shadows", [1, 2, 3])
@pytest.mark.parametrize("is_asked", [True, False])
def test_what_is_left_of_a_run_is_one_step(
    shadows: int, is_asked: bool, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All training is gone; some ranks' agents had sent more than others."""
    scene = made(shadows)
    scene.begin()
    scene.give(1)
    for rank, owner in enumerate(scene.owners):
        owner.forward(*range(2, 9 if rank == 1 else 10))
    scene.lose()
    if is_asked:
        other = LocalBackend.made(scene.folder / "other")
        fetch(other, scene.plan)
        scene.assert_exact(8, scene.folder / "other")
    else:
        monkeypatch.setattr(holder, "PATIENCE_S", 0.1)
        scene.until_complete(8)
    scene.assert_exact(8)


def test_nothing_is_written_while_another_shadows_ranks_train(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be about to hand over the step that would be complete."""
    monkeypatch.setattr(holder, "PATIENCE_S", 0.1)
    scene = made()
    scene.begin()
    scene.give(1)
    for owner in scene.owners:
        owner.forward(2, safe=1)
    for owner in scene.of(0):
        owner.lose()
    first = scene.shadows[0]
    until(lambda: first._together._standing().over, DEADLINE_S, "the loss to be seen")
    assert not first._must_rescue(list(first._copies.values()))
    for owner in scene.of(1):
        owner.forward(3, safe=1)
        owner.lose()
    scene.until_complete(2)
    scene.assert_exact(2)


@pytest.mark.parametrize("shadows", [1, 2])
def test_states_of_different_steps_are_soon_one(shadows: int, made: Made) -> None:
    scene = made(shadows)
    scene.begin()
    for rank, owner in enumerate(scene.owners):
        owner.give(1 + rank)
    scene.until_together()
    for rank, owner in enumerate(scene.owners):
        owner.forward(*range(2 + rank, EVERY))
    scene.until_folded(EVERY - 1)
    until(lambda: scene.complete(), DEADLINE_S, "a step to be complete")
    (step,) = scene.complete()
    assert 4 < step < EVERY
    scene.assert_exact(step)


# ---------------------------------------------------------------- one that is gone


@pytest.mark.parametrize("number", [0, 1])
def test_one_that_is_killed_comes_back(
    number: int, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on, write nothing that would be of no use, and say so."""
    scene = made()
    scene.begin()
    scene.give(1)
    for owner in scene.owners:
        owner.forward(*range(2, EVERY + 1))
    scene.until_complete(EVERY)
    scene.kill(number)
    monkeypatch.setattr(shadow_together, "_HOLDS_S", 0.2)
    scene.until_said(1 - number, "not all shadows of the run are there")
    for owner in scene.others(number):
        owner.forward(*range(EVERY + 1, 3 * EVERY + 3))
    other = scene.others(number)
    until(
        lambda: all(scene.folded(owner) == 3 * EVERY + 2 for owner in other),
        DEADLINE_S,
        "the others to go on",
    )
    listing = Run.open(scene.folder / "shadow").listing()
    assert {entry.ref.step for entry in listing.steps if entry.ref.step > EVERY} == set()
    scene.shadows[1 - number]._together._heard.clear()  # it does not hold again
    monkeypatch.setattr(shadow_together, "_HOLDS_S", 2 * DEADLINE_S)
    scene.start(number)
    for owner in scene.of(number):
        owner.give(3 * EVERY + 2)
    scene.until_together()
    said = scene.said[1 - number]
    until(lambda: "all shadows of the run are there" in said, DEADLINE_S, "it to be said")
    for owner in scene.owners:
        owner.forward(*range(3 * EVERY + 3, 4 * EVERY + 5))
    scene.until_complete(4 * EVERY)
    fetch(LocalBackend.made(scene.folder / "other"), scene.plan)
    scene.assert_exact(4 * EVERY + 4, scene.folder / "other")


def test_a_restart_gets_what_was_complete_where_one_is_gone(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = made()
    scene.begin()
    scene.give(1)
    for owner in scene.owners:
        owner.forward(*range(2, EVERY + 3))
    scene.until_complete(EVERY)
    scene.kill(1)
    monkeypatch.setattr(common, "PATIENCE_S", 0.1)
    scene.lose()
    fetch(LocalBackend.made(scene.folder / "other"), scene.plan)
    scene.assert_exact(EVERY, scene.folder / "other")
    (said,) = [one.message for one in caplog.records if "gives nothing" in one.message]
    assert str(scene.plan.places[1][1]) in said


def test_what_an_earlier_shadow_has_told_is_over(made: Made) -> None:
    """It was ended while training went on, and wrote the step of then."""
    scene = made(1)
    scene.begin()
    scene.give(1)
    for owner in scene.owners:
        owner.forward(*range(2, 6))
    scene.shadows[0].close()
    scene.assert_exact(5)
    scene.start(0)
    for owner in scene.owners:
        owner.give(6)
    for owner in scene.owners:
        owner.forward(*range(7, 10), safe=6)
    fetch(LocalBackend.made(scene.folder / "other"), scene.plan)
    scene.assert_exact(9)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("number", [0, 1])
def test_directories_that_are_not_one(number: int, made: Made) -> None:
    """Those that the second one holds are refused, until it is right."""
    scene = made()
    scene.kill(number)
    scene.start(number, "elsewhere")
    scene.begin()
    words = "is not the directory in which the shadow at 127.0.0.1:"

    def is_refused(owner: Owner) -> bool:
        refusal = owner.link.refusal
        return refusal is not None and words in refusal.reason

    for owner in scene.of(1):
        until(lambda owner=owner: is_refused(owner), DEADLINE_S, "a copy to be refused")
    scene.until_said(1, words)
    scene.kill(number)
    scene.start(number)
    first, second = (shadow._together for shadow in scene.shadows)
    until(lambda: first._mark and second._found == first._mark, DEADLINE_S, "one directory")
    scene.give(1)
    for owner in scene.owners:
        owner.forward(*range(2, EVERY + 1))
    scene.until_complete(EVERY)


NONSENSE = {
    "no address": [("127.0.0.1", 1), ("../evil", 1)],
    "a name": [("localhost", 1), ("127.0.0.1", 1)],
    "no port": [("127.0.0.1", 0), ("127.0.0.1", 1)],
    "a huge port": [("127.0.0.1", 1 << 40), ("127.0.0.1", 1)],
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_places_that_are_none(kind: str, made: Made) -> None:
    scene = made()
    plan = msgspec.structs.replace(scene.plan, places=NONSENSE[kind])
    begin = begin_of(scene.run, rank=0, world_size=4, replica=True, shadow=plan)
    with caller(scene) as wire:
        wire.send(w.Keep(begin))
        refused = wire.receive()
    assert isinstance(refused, w.NotKept) and "no sense" in refused.reason


def test_ranks_that_do_not_agree_on_their_shadows(made: Made) -> None:
    scene = made()
    scene.begin()
    for owner in scene.owners:
        owner.give(1)
    plan = msgspec.structs.replace(scene.plan, places=scene.plan.places[:1])
    begin = begin_of(scene.run, rank=2, world_size=4, replica=True, shadow=plan)
    with caller(scene) as wire:
        wire.send(w.Keep(begin))
        refused = wire.receive()
    assert isinstance(refused, w.NotKept) and "other shadows" in refused.reason


@contextlib.contextmanager
def caller(scene: Scene) -> Iterator[w.Wire]:
    with contextlib.closing(connected(scene.plan.places[0], at.read_secret(scene.token))) as wire:
        yield wire


def standing(**changes: Any) -> w.Standing:
    facts: dict[str, Any] = {
        "session": 1, "number": 1, "mark": "", "begun": 0, "copies": 2, "least": 3, "most": 3,
        "over": False,
    }  # fmt: skip
    return w.Standing(**facts | changes)


def test_words_that_count_for_nothing(made: Made) -> None:
    """Of another session, of nobody, and of one that has not found the directory."""
    scene = made()
    scene.kill(1)
    scene.begin()
    for owner in scene.of(0):
        owner.give(1)
    together = scene.shadows[0]._together
    with caller(scene) as wire:
        for changes in ({"session": 2}, {"number": 2}, {"number": 0}, {"number": 99_999}):
            wire.send(standing(mark=together._mark, **changes))
            assert wire.receive() == w.Agreed(
                mark="", complete=False, write_at=0, least=LAST_STEP, over=True
            )
        for mark in ("", "../evil", new_mark()):
            wire.send(standing(mark=mark))
            answer = wire.receive()
            assert (answer.mark, answer.complete) == (together._mark, False)
        assert together._heard == {}
        wire.send(standing(mark=together._mark, least=0))
        assert wire.receive().complete
    for owner in scene.of(0):
        owner.forward(2, 3)
    assert all(scene.folded(owner) == 1 for owner in scene.of(0))  # as it was told


def test_one_that_ends_answers_no_more(made: Made) -> None:
    """Another would ask for ever, and it would wait for that connection to end."""
    scene = made()
    with caller(scene) as wire:
        wire.send(standing())
        wire.receive()
        scene.shadows[0]._stop.set()
        with pytest.raises((EOFError, OSError)):
            for _ in range(3):
                wire.send(standing())
                wire.receive()


def framed(message: Any) -> bytes:
    content = msgspec.msgpack.encode(message)
    return struct.pack("<Q", len(content)) + content


GARBAGE = {
    "noise": (b"\xc1" * 4096, "too long"),
    "no message": (struct.pack("<Q", 16) + b"\xc1" * 16, "malformed"),
    "a huge length": (struct.pack("<Q", 1 << 61), "too long"),
    "no such shadow": (
        struct.pack("<Q", len(msgspec.msgpack.encode(standing(number=-1))))
        + msgspec.msgpack.encode(standing(number=-1)),
        "malformed",
    ),
    "another's turn": (
        struct.pack("<Q", len(msgspec.msgpack.encode(w.Kept(1))))
        + msgspec.msgpack.encode(w.Kept(1)),
        "out of turn",
    ),
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("to_first", [True, False])
def test_garbage_between_shadows(kind: str, to_first: bool, made: Made) -> None:
    """That connection ends, with a sentence; the copies stay."""
    data, said = GARBAGE[kind]
    scene = made()
    scene.kill(0 if not to_first else 1)
    if to_first:
        scene.begin()
        with caller(scene) as wire:
            wire.send(standing())
            wire.receive()
            wire._socket.sendall(data)
            with pytest.raises((EOFError, OSError)):
                wire.receive()
        scene.until_said(0, said)
        held = 0
    else:
        with liar(scene, data):
            scene.begin()
            scene.until_said(1, said)
        held = 1
    for owner in scene.of(held):
        owner.give(1)
        owner.forward(2)
    until(lambda: all(scene.folded(owner) == 2 for owner in scene.of(held)), DEADLINE_S, "copies")
    assert all(text.isprintable() and len(text) < 500 for text in scene.said[held])


@contextlib.contextmanager
def liar(scene: Scene, data: bytes) -> Iterator[None]:
    """In the place of the first shadow, one that knows the secret and answers this."""
    token = at.read_secret(scene.token)

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with contextlib.suppress(*w.Gone):
                wire = w.welcomed(connection, None, token)
                if isinstance(wire.receive(), w.Standing):
                    connection.sendall(data)
            connection.close()

    with socket.create_server(scene.plan.places[0]) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_addresses_of_several() -> None:
    several = Options(address="1.2.3.4:5,[::1]:6", token_file="token")
    assert several.places() == [("1.2.3.4", 5), ("::1", 6)]
    for wrong in ("1.2.3.4:5,", "1.2.3.4:5,1.2.3.4:5", "[::1]:6,[0::1]:6", ","):
        with pytest.raises(UsageError):
            Options(address=wrong, token_file="token")
