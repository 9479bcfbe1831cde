"""`auto` by itself: what it measures, when it chooses, when it changes, and what it never takes."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep import automatic, sessions
from everystep.agent import protocol
from everystep.automatic import Automatic, _facts_of
from everystep.engine.meter import Cost
from everystep.errors import UsageError
from everystep.logged import Logged
from everystep.observed import Observed
from everystep.planning.choosing import Name, Verdict
from everystep.planning.facts import Facts
from everystep.staged import Given
from everystep.state.objects import Objects
from everystep.state.ranks import Ranks
from everystep.stats import StepLog
from everystep.store.ballots import Ballot
from planted import at_once, in_turn
from waiting import until

FACTS = Facts(
    state_bytes=100, gradient_bytes=30, window_s=0.5, update_s=0.5, offload_bytes_per_s=1e3,
    snapshot_bytes_per_s=1e4, write_bytes_per_s=1e2, mtbf_s=1e4,
)  # fmt: skip


def _objects(*, foreach: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, ck: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 20)).square().sum().backward()
        optimizer.step()
        ck.step()


def _name(ck: everystep.Checkpointer) -> str:
    return type(ck.strategy).__name__


# ---------------------------------------------------------------- in a run


@pytest.mark.usefixtures("in_threads")
def test_it_begins_as_full(run_dir: Path) -> None:
    model, optimizer = _objects()
    with everystep.Checkpointer(run_dir, model=model, optimizer=optimizer) as ck:
        assert ck.strategy == everystep.Full()


@pytest.mark.usefixtures("in_threads", "patience")
def test_it_changes_as_it_chooses_and_says_why(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_once(monkeypatch, in_turn)
    caplog.set_level(logging.INFO, "everystep")
    model, optimizer = _objects()
    seen = ["Full"]
    with everystep.Checkpointer(run_dir, model=model, optimizer=optimizer) as ck:
        assert ck.strategy == automatic.STRATEGIES["full"]
        ck.restore()

        def has_changed() -> bool:
            _train(model, optimizer, ck)
            if _name(ck) != seen[-1]:
                seen.append(_name(ck))
            return len(seen) == 5

        until(has_changed, 60, "four changes")
        assert not any(s.error for s in ck.stats)
        assert ck.strategy == everystep.Deltas()
    assert seen == ["Full", "Deltas", "Replica", "Full", "Deltas"]
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("auto: ")]
    names = [words.split()[1].rstrip(":") for words in said]
    assert names[:4] == ["deltas", "replica", "full", "deltas"]
    assert not [r for r in caplog.records if r.levelno > logging.INFO]
    assert not list((run_dir / "agents").glob("ballot*")), "what it has told is taken back"
    other, its = _objects()
    with everystep.Checkpointer(run_dir, model=other, optimizer=its) as ck:
        assert ck.restore() == len(ck.stats) + ck.steps()[-1]
        assert _name(ck) == "Full", "a restart measures anew"
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)


class SlowToBegin(Logged):
    """A session that takes so many seconds before it is there."""

    takes_s = 0.2

    def __init__(self, given: Given, options: everystep.Deltas) -> None:
        threading.Event().wait(self.takes_s)
        super().__init__(given, options)


def test_a_change_is_counted_as_a_stall(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch, in_turn)
    monkeypatch.setattr(sessions, "Logged", SlowToBegin)
    model, optimizer = _objects()
    with everystep.Checkpointer(run_dir, model=model, optimizer=optimizer) as ck:

        def has_changed() -> bool:
            _train(model, optimizer, ck)
            return _name(ck) == "Deltas"

        until(has_changed, 60, "a change")
        _train(model, optimizer, ck, 3)
        changed = len(ck.stats) - 4
        assert ck.stats[changed].staging_s >= SlowToBegin.takes_s
        cost = ck._session._costs[0][0] if ck._session._costs else None  # type: ignore[union-attr]
        assert cost is None or cost.ended_s - cost.begun_s >= cost.stall_s


def test_what_has_given_up_is_not_chosen_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, facts = automatic.choose, []

    def choose(found: Facts, now: Name) -> Verdict:
        facts.append(found)
        if found.excluded:
            return real(found, now)
        return in_turn(found, now) if now == "full" else Verdict(now, "stays", {})

    at_once(monkeypatch, choose)
    model, optimizer = _objects()
    with everystep.Checkpointer(run_dir, model=model, optimizer=optimizer) as ck:

        def use(name: str) -> None:
            def is_used() -> bool:
                _train(model, optimizer, ck)
                return _name(ck) == name

            until(is_used, 60, name)

        use("Deltas")
        ck._session._fall_back("a test wants it")  # type: ignore[union-attr]
        assert ck.strategy == everystep.Full(every=1)
        rounds = len(facts)

        def is_told() -> bool:
            _train(model, optimizer, ck)
            return len(facts) >= rounds + 3

        until(is_told, 60, "more rounds")
        assert facts[-1].excluded == {"deltas": "a test wants it"}
        assert _name(ck) == "Full"
        ck.restore()
        _train(model, optimizer, ck, 3)
        assert ck._sessions._automatic._excluded == facts[-1].excluded  # type: ignore[union-attr]


def test_a_store_that_fails_is_waited_for(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory only would be given up by a change."""
    one = Automatic(*_alone())
    one._observed = SimpleNamespace(step=lambda cost: None)  # type: ignore[assignment]
    calls: list[str] = []
    session: Any = SimpleNamespace(
        cost=None, flush=lambda: calls.append("flush"), refresh=lambda: None
    )
    monkeypatch.setattr(automatic, "LEAD_STEPS", 5)
    one._change, one._answers = automatic._Change("deltas", 7), None  # type: ignore[assignment]
    entry = one._log.begin(7, 0)
    entry.staged = True
    assert [one.due(session, done) for done in (6, 7, 8, 11)] == [None] * 4
    assert calls == ["flush"]
    entry.durable = True
    one._answers = automatic.collections.deque()
    assert one.due(session, 12) == everystep.Deltas()
    assert calls == ["flush", "flush"]


# ---------------------------------------------------------------- when


def _alone(rank: int = 0, world_size: int = 1) -> tuple[Objects, Ranks, StepLog]:
    model, optimizer = _objects()
    return Objects.of(model, optimizer, {}), Ranks(rank, world_size), StepLog()


class Rounds:
    """Rounds of one rank, whose answers are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int = 1) -> None:
        self.one = Automatic(*_alone(0, world_size))
        self.one._answers = automatic.collections.deque(maxlen=automatic.ALIKE)
        self.one._now, self.one._change = "full", None
        self.given: Any = None
        self.number = 0
        monkeypatch.setattr(automatic, "choose", self._choose)

    def _choose(self, facts: Facts, now: Name) -> Verdict:
        if isinstance(self.given, Exception):
            raise self.given
        return Verdict(strategy=self.given, reason=f"{self.given}: because", predicted={})

    def answer(self, given: Any, step: int = 0, **facts: Any) -> automatic._Change | None:
        """One more round; the change that follows."""
        self.given = given
        self.number += 1
        ballot = _ballot(round=self.number, **facts)
        self.one._ballot = ballot
        self.one._choose([ballot], step)
        return self.one._change


def _ballot(*, round: int = 1, **facts: Any) -> Ballot:
    told = {**automatic.msgspec.to_builtins(FACTS), **facts}
    return Ballot(round=round, host="a", facts=told, heard=0, step=0)


def test_the_first_choice_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Rounds(monkeypatch).answer("deltas", 9) == ("deltas", 9)


def test_later_ones_must_come_to_the_same_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch)
    others = ["full", "deltas", "deltas", "full", "deltas", "replica", "deltas", "deltas"]
    assert [rounds.answer(name) for name in others] == [None] * len(others)
    assert rounds.answer("deltas", 33) == ("deltas", 33)


def test_what_does_not_work_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch)
    rounds.one._now = "replica"
    assert rounds.answer("replica") is None
    assert rounds.answer("full", 5, excluded={"replica": "it fell back"}) == ("full", 5)


def test_where_nothing_fits_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "everystep")
    rounds = Rounds(monkeypatch)
    for _ in range(4):
        assert rounds.answer(UsageError("no strategy is possible: no room")) is None
    assert [r.getMessage() for r in caplog.records] == [
        "auto: full goes on: no strategy is possible: no room"
    ]


def test_ranks_change_at_a_step_that_all_have_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch, world_size=2)
    monkeypatch.setattr(automatic, "LEAD_S", 30.0)
    assert rounds.answer("deltas", 65) == ("deltas", 192)  # 64 steps later at least
    rounds = Rounds(monkeypatch, world_size=2)
    assert rounds.answer("deltas", 65, window_s=0.1, update_s=0.0) == ("deltas", 384)  # 30 s


def test_ranks_of_a_host_share_its_memory() -> None:
    one = Ballot(
        round=1, host="a", facts=automatic.msgspec.to_builtins(FACTS), heard=0, step=0,
        available_bytes=1000, held_bytes=50,
    )  # fmt: skip
    other = automatic.msgspec.structs.replace(one, host="b")
    assert _facts_of(one, [one, other]).host_memory_bytes == 50 + 800
    assert _facts_of(one, [one, other, one]).host_memory_bytes == 50 + 400
    unknown = automatic.msgspec.structs.replace(one, available_bytes=None)
    assert _facts_of(unknown, [unknown]) == FACTS


# ---------------------------------------------------------------- what


class Foreign(torch.optim.SGD):
    """As users define them in the script that they run."""


def test_what_a_run_cannot_have_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Automatic(*_alone())._excluded == {}
    Foreign.__module__ = "__main__"
    model, _ = _objects()
    objects = Objects.of(model, Foreign(model.parameters(), lr=0.1), {})
    found = automatic._unsuited(objects)
    assert found.keys() == {"replica"} and "cannot import" in found["replica"]
    half = nn.Linear(3, 3).bfloat16()
    fused = torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9, fused=True)
    found = automatic._unsuited(Objects.of(half, fused, {}))
    assert found.keys() == {"deltas", "replica"} and "bfloat16" in found["deltas"]


def _cost(step: int, **more: Any) -> Cost:
    """A step of 2 s, of which 1.25 s are the window and 0.25 s a stall."""
    facts = {
        "forward_s": 0.5, "backward_s": 0.75, "bookkeeping_s": 0.25, "state_bytes": 4000,
        "offload_bytes": 1000, "offload_s": 0.5, "ended_s": 2.0,
    }  # fmt: skip
    return Cost(step=step, begun_s=0.0, **{**facts, **more})


def test_facts_are_medians_of_what_was_seen() -> None:
    objects, ranks, _ = _alone()
    seen = Observed(objects, ranks)
    keywords: Any = {"mtbf_s": 77.0, "sync_s": 0.5, "deltas": False, "excluded": {"x": "y"}}
    for step in range(10):
        seen.step(_cost(step, offload_s=99.0 if step == 4 else 0.5))
    assert seen.is_ready
    assert seen.facts(**keywords) is None, "neither gradients nor writes were seen"
    optimizer = objects.optimizers["optimizer"]
    seen.look_at_gradients()
    for _ in range(2):
        assert not seen.has_looked()
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert seen.has_looked()
    assert seen.facts(**keywords) is None
    for nbytes, took_s in ((1000, 2.5), (1000, 2.5), (1000, 0.6)):
        seen.heard(protocol.Stored(step=1, written_bytes=nbytes, took_s=took_s, at_s=0.0))
    elements = sum(p.numel() for p in objects.models["model"].parameters())
    nbytes = 4 * elements
    share = 4000 / (3 * nbytes + 4 * 4)  # four parameters have a count of steps
    found = seen.facts(**keywords)
    assert found == Facts(
        state_bytes=4000, gradient_bytes=round(share * nbytes),
        delta_bytes=round(share * nbytes + (8 << 10)), window_s=1.25, update_s=0.5,
        offload_bytes_per_s=2000.0, snapshot_bytes_per_s=2000.0, write_bytes_per_s=500.0,
        sync_s=0.5, mtbf_s=77.0, fold_s=share * 0.5, record_stall_s=0.0, on_device=False,
        excluded={"x": "y"},
    )  # fmt: skip
    # another strategy makes no copies: what was known of them still is
    seen.begin_again()
    assert not seen.is_ready
    for step in range(10):
        seen.step(_cost(step, state_bytes=0, offload_s=0.0, logged_bytes=123, ended_s=3.0))
    again = seen.facts(**{**keywords, "deltas": True})
    assert again is not None
    assert (again.state_bytes, again.offload_bytes_per_s) == (4000, 2000.0)
    assert (again.delta_bytes, again.update_s) == (123, 1.5)
    seen.close()
