"""The session of `Deltas` by itself: what it leaves behind, whose turn it is, what it chooses."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep import logged, recorded
from everystep.agent import client
from everystep.agent import protocol as p
from everystep.agent.handover import seal_of
from everystep.agent.sink import Sealed
from everystep.engine.meter import Cost
from everystep.engine.recorder import Recorder
from everystep.logged import Logged
from everystep.pace import Pace
from everystep.planning.intervals import Choice, Costs, Limits, choose
from everystep.state.objects import Objects
from waiting import until


def _objects() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(5, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, ck: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        ck.step()


@pytest.mark.parametrize(
    "strategy", [everystep.Full(), everystep.Deltas(full_every=4, batch=1)], ids=["full", "deltas"]
)
def test_objects_end_without_the_garbage_collector(strategy: Any, run_dir: Path) -> None:
    """Worker processes of a data loader that ends there are never waited for by torch."""

    class Extra:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    model, optimizer = _objects()
    extra = Extra()
    gc.collect()
    gc.disable()
    try:
        with everystep.Checkpointer(
            run_dir, model=model, optimizer=optimizer, extras={"e": extra}, strategy=strategy
        ) as ck:
            ck.restore()
            _train(model, optimizer, ck, 6)
        ended = weakref.ref(extra)
        del ck, model, optimizer, extra
        assert ended() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("width", "slices"), [(64, 1), (1024, 16)])
def test_a_small_state_is_hashed_whole(width: int, slices: int) -> None:
    model = nn.Linear(width, width)
    objects = Objects.of(model, torch.optim.SGD(model.parameters()), {})
    assert recorded._slices(objects) == slices
    assert everystep.Deltas().slices is None


@pytest.mark.usefixtures("patience")
def test_a_full_that_the_log_goes_on_from_is_sealed_as_owed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owed: list[int] = []

    def noted(sealed: Sealed) -> p.Seal:
        message = seal_of(sealed)
        if message.owed:
            owed.append(message.step)
        return message

    monkeypatch.setattr(client, "seal_of", noted)
    model, optimizer = _objects()
    strategy = everystep.Deltas(full_every=3, batch=1, check=False)
    with everystep.Checkpointer(run_dir, model=model, optimizer=optimizer, strategy=strategy) as ck:
        ck.restore()
        _train(model, optimizer, ck, 4)
        ck._session._engine.owe()  # type: ignore[union-attr]
        _train(model, optimizer, ck, 3)
    assert owed == [1, 5]


@pytest.mark.usefixtures("patience")
def test_a_delta_may_be_durable_before_its_step_has_ended(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _objects()
    strategy = everystep.Deltas(full_every=100, batch=1, check=False)
    real = Recorder.step
    with everystep.Checkpointer(run_dir, model=model, optimizer=optimizer, strategy=strategy) as ck:
        ck.restore()
        _train(model, optimizer, ck, 1)
        chain = ck._session._chain  # type: ignore[union-attr]

        def step(recorder: Recorder, number: int, *rest: Any) -> str | None:
            problem = real(recorder, number, *rest)
            until(lambda: chain.newest_logged == number, 60, "the delta to be durable")
            return problem

        monkeypatch.setattr(Recorder, "step", step)
        _train(model, optimizer, ck, 3)
    assert [(s.step, s.durable, s.written_bytes > 0) for s in ck.stats] == [
        (step, True, True) for step in range(1, 5)
    ]


# ---------------------------------------------------------------- alone


def _session(strategy: everystep.Deltas, world_size: int = 1, rank: int = 0) -> Any:
    """A session of which only the choosing is there."""
    session: Any = Logged.__new__(Logged)
    session._options = strategy
    session._ranks = SimpleNamespace(world_size=world_size, rank=rank)
    session.obeyed = []
    session._engine = SimpleNamespace(set_every=session.obeyed.append, share_replicas=False)
    log = SimpleNamespace(set_batch=session.obeyed.append, persist_every=session.obeyed.append)
    session._agent = SimpleNamespace(log=log)
    session._compacts = False
    return session


def test_the_turns_follow_the_interval_that_is_obeyed() -> None:
    """The model asks for a full at every 100 steps, and ranks take one at every 64: with 100, fulls
    at 64, 128, … would make one rank's turn come twice in a row."""
    ranks = [_session(everystep.Deltas(), 2, rank) for rank in (0, 1)]
    for session in ranks:
        session._choice = Choice(100, 4)
        session._obey()
        assert session.obeyed == [64, 4]
    turns = [[session._turn(step) for session in ranks] for step in range(64, 64 * 9, 64)]
    assert turns == [[False, True], [True, False]] * 4


COSTS = Costs(
    step_s=0.5, state_bytes=1_500_000_000, delta_bytes=6_000_000, write_bytes_per_s=1e9,
    replay_s=0.05, mtbf_s=3 * 3600, full_stall_s=0.02, batch_stall_s=0.002,
)  # fmt: skip


@pytest.mark.parametrize("fixed", [{"full_every": 7}, {"batch": 50}, {}])
def test_what_is_left_free_is_chosen_for_what_is_set(fixed: dict[str, int]) -> None:
    options = everystep.Deltas(**fixed)  # type: ignore[arg-type]
    now = Choice(fixed.get("full_every", 32), fixed.get("batch", 1))
    for _ in range(4):
        now = logged._best(now, COSTS, Limits(), options)
    assert now == choose(COSTS, **fixed)  # type: ignore[arg-type]
    assert fixed.items() <= {"full_every": now.full_every, "batch": now.batch}.items()


def test_no_message_is_lost_that_comes_while_others_are_heard() -> None:
    """A refusal that comes in the middle of `hear` is acted on, then or at the next."""
    session = _session(everystep.Deltas())
    session._recorder = session._checks = None
    refused: list[int] = []
    late = p.NotLogged(step=9, error=("StoreFailed", "full", None))

    class Heard(list[Any]):
        """Another thread adds a message just when all that were there have been looked at."""

        def __init__(self) -> None:
            super().__init__([p.Diverged(step=None)])  # type: ignore[arg-type]
            self.extended = False

        def popleft(self) -> Any:
            if not self.extended:
                self.extended = True
                self.append(late)
            return self.pop(0)

    session._heard = Heard()
    session._refused = lambda step, error: refused.append(step)
    session.hear()
    assert refused == [9]


# ---------------------------------------------------------------- what is measured


def _pace(fulls: list[tuple[int, float]], writes: list[tuple[int, float]]) -> Pace:
    pace = Pace()
    pace.steps.extend(
        Cost(step=n, begun_s=n * 0.1, ended_s=n * 0.1 + 0.1, due=False) for n in range(10)
    )
    pace.fulls.extend(fulls)
    pace.writes.extend(writes)
    pace.deltas.extend([1000] * 10)
    return pace


def test_what_a_write_costs_besides_its_bytes() -> None:
    """Of some 2 ms, and a byte in some 1 ns, whatever the two sizes; in powers of two, so that
    nothing is rounded."""
    for sizes in ((10_000_000, 1000), (50_000, 40_000)):
        full, append = ((n, 2**-9 + n * 2**-30) for n in sizes)
        costs = _pace([full], [append]).costs(1000.0)
        assert costs is not None
        assert (costs.sync_s, costs.write_bytes_per_s) == (2**-9, 2**30)
    assert _pace([(1000, 1.0)], []).costs(1000.0) is None


def test_appends_as_long_as_fulls_give_a_rate_all_the_same() -> None:
    for writes in ([(2000, 0.004)], [(1000, 0.001)], [(500, 0.003)]):
        costs = _pace([(1000, 0.001)], writes).costs(1000.0)
        assert costs is not None and costs.write_bytes_per_s > 0 and costs.sync_s >= 0


def test_replay_is_that_of_the_longest_stretch_and_no_slower_than_training() -> None:
    pace = _pace([(10_000_000, 0.02)], [(1000, 0.002)])
    pace.replays.extend([(2, 0.5), (100, 1.0), (50, 2.0)])
    costs = pace.costs(86_400.0)
    assert costs is not None and costs.replay_s == 1.0 / 100
    pace.replays.extend([(200, 2000.0)])
    slow = pace.costs(86_400.0)
    assert slow is not None and slow.replay_s == slow.step_s
    assert choose(slow).batch < 10, "not the longest that there is room for"
