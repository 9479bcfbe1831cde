from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

from everystep import Checkpointer
from everystep.errors import LayoutMismatch
from everystep.state.loaders import is_loader
from states import assert_same_state, rng_state, state_of
from trips import BLOCKING, Holder, restore, restore_run, stored

S = lr_scheduler

_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: S.StepLR(o, 2),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 2, 4], 0.5),
    "ConstantLR": lambda o: S.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: S.LinearLR(o, total_iters=5),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 7, 2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.9**x),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.5, total_steps=12),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: S.ChainedScheduler(
        [S.ConstantLR(o, total_iters=3), S.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, total_iters=2), S.LambdaLR(o, lambda step: 0.8**step)], [3]
    ),
    "SWALR": lambda o: SWALR(o, 0.01, 3),
}


def test_all_schedules_of_torch_are_here() -> None:
    names = {name for name in lr_scheduler.__all__ if name != "LRScheduler"}
    assert names <= set(_SCHEDULES)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize("name", _SCHEDULES)
def test_schedules_go_on(name: str, rate: Any) -> None:  # O09, L01, L02, L03
    def make(seed: int) -> tuple[nn.Module, SGD, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}]
        optimizer = SGD(groups, lr=copy.deepcopy(rate), momentum=0.9)
        return model, optimizer, _SCHEDULES[name](optimizer)

    def train(model: nn.Module, optimizer: SGD, schedule: Any, steps: int) -> list[Any]:
        rates = []
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append([copy.deepcopy(group["lr"]) for group in optimizer.param_groups])
        return rates

    model, optimizer, schedule = make(0)
    train(model, optimizer, schedule, 4)
    state = stored(model, optimizer, {"schedule": schedule})
    again, restarted, rescheduled = make(1)
    restore(state, again, restarted, {"schedule": rescheduled})
    extras, other = {"schedule": schedule}, {"schedule": rescheduled}
    assert_same_state(state_of(again, restarted, other), state_of(model, optimizer, extras))
    expected = train(model, optimizer, schedule, 5)
    assert_same_state(train(again, restarted, rescheduled, 5), expected)
    assert_same_state(state_of(again, restarted, other), state_of(model, optimizer, extras))


def test_scalars_are_read_again_at_each_snapshot() -> None:  # T10
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.5)
    extras = {"counts": {"seen": 1}}
    stored(model, optimizer, extras)
    optimizer.param_groups[0]["lr"], extras["counts"]["seen"] = 0.25, 2
    again, restored = nn.Linear(1, 1), {"counts": {"other": 0}}
    restarted = SGD(again.parameters(), lr=1.0)
    restore(stored(model, optimizer, extras), again, restarted, restored)
    assert restarted.param_groups[0]["lr"] == 0.25 and restored["counts"] == {"seen": 2}


def test_a_scaler_goes_on() -> None:  # R09, R10
    model, again = nn.Linear(1, 1), nn.Linear(1, 1)

    def make(**options: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=3.3, growth_interval=3, **options)

    fresh = make()
    state = stored(model, extras={"scaler": fresh})
    assert fresh._scale is None, "looking must not make it"
    scaler, optimizer = make(), SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    state = stored(model, extras={"scaler": scaler})
    other = make()
    restore(state, again, extras={"scaler": other})
    assert other.get_scale() == scaler.get_scale() == torch.tensor(6.6).item()
    assert other._get_growth_tracker() == 1
    assert_same_state(other.state_dict(), scaler.state_dict())
    restore(stored(model, extras={"s": make(enabled=False)}), model,
            extras={"s": make(enabled=False)})  # fmt: skip
    with pytest.raises(LayoutMismatch, match=r"extras.scaler refused its state: RuntimeError"):
        restore(stored(model, extras={"scaler": make(enabled=False)}), model,
                extras={"scaler": make()})  # fmt: skip


def test_an_average_goes_on() -> None:
    def make(seed: int) -> tuple[nn.Module, AveragedModel]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).bfloat16()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        return model, average

    (model, average), (again, other) = make(0), make(1)
    average.update_parameters(model)
    average.update_parameters(model)
    with torch.no_grad():  # a payload that arithmetic would lose
        average.module[0].bias.view(torch.int16)[0] = 0x7FA1
    state = stored(model, extras={"ema": average})
    restore(state, again, extras={"ema": other})
    assert_same_state(
        state_of(again, None, {"ema": other}), state_of(model, None, {"ema": average})
    )
    assert other.n_averaged == 2
    with pytest.raises(LayoutMismatch, match=r"extras.ema refused.*dtype torch.bfloat16 stored"):
        restore(state, again, extras={"ema": make(2)[1].float()})


def test_a_state_dict_may_be_any_plain_value() -> None:
    for value in (None, 3, [], torch.ones(2).t(), ({"a": (1,)},)):
        one, other = Holder(value), Holder("other")
        restore(stored(nn.Linear(1, 1), extras={"it": one}), nn.Linear(1, 1), extras={"it": other})
        assert_same_state(other.state, value)


def test_what_was_restored_is_not_shared_with_what_was_stored() -> None:
    one, other, model = {"t": torch.zeros(2)}, {"t": torch.ones(2)}, nn.Linear(1, 1)
    restore(stored(model, extras={"a": one}), model, extras={"a": other})
    other["t"].fill_(7)
    assert one["t"].eq(0).all()


def test_generators_are_set_after_extras_that_draw_from_them() -> None:
    generator = torch.Generator().manual_seed(3)

    class Drawing(Holder):
        def load_state_dict(self, state: Any) -> None:
            torch.rand(3, generator=generator)

    extras = {"generator": generator, "drawing": Drawing(1)}
    model = nn.Linear(1, 1)
    before = generator.get_state()
    restore(stored(model, extras=extras), model, extras=extras)
    assert_same_state(generator.get_state(), before)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (random.Random(1), np.random.default_rng(1)),
        (np.random.Generator(np.random.MT19937(1)), np.random.default_rng(1)),
        ({"a": 1}, torch.Generator()),
        (torch.Generator(), random.Random()),
    ],
    ids=["random to NumPy", "another bit generator", "dict to torch", "torch to random"],
)
def test_generators_of_another_kind_refuse(was: Any, now: Any) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(LayoutMismatch, match=r"extras.g refused its state"):
        restore(stored(model, extras={"g": was}), model, extras={"g": now})


def test_system_random_is_refused() -> None:
    with pytest.raises(Exception, match=r"extras.g: an object of type SystemRandom"):
        stored(nn.Linear(1, 1), extras={"g": random.SystemRandom()})


# data loaders


class _Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Items with a random part, drawn where they are loaded."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(1).item()])


class _Run:
    """A training loop over epochs of three batches, which draws from the global generator."""

    def __init__(self, seed: int, workers: int, kind: str) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(1, 1)
        generator = torch.Generator().manual_seed(seed) if kind == "own generator" else None
        items: Any = range(10) if workers else _Noisy()
        self.loader: Any = StatefulDataLoader(
            items, batch_size=4, shuffle=True, num_workers=workers, generator=generator,
            multiprocessing_context="fork" if workers else None,
        )  # fmt: skip
        self.other: Any = StatefulDataLoader(range(3), shuffle=True)  # not begun in the first epoch
        self.extras = {"loader": self.loader, "other": self.other}

    def batches(self, epochs: int) -> Iterator[Any]:
        for _ in range(epochs):
            for batch in self.loader:
                yield batch, torch.rand(1), torch.randn(1)
            yield [item.clone() for item in self.other], torch.rand(1)

    def close(self) -> None:
        """torch has no call that ends workers: they go with their iterator."""
        self.loader._iterator = None


# the fourth is the work after the last batch of an epoch, the fifth the first of the next
_STOPS = [
    *[(0, kind, stop) for kind in ("shared generator", "own generator") for stop in range(1, 6)],
    *[(2, "shared generator", stop) for stop in range(1, 6)],
    *[(2, "own generator", 2), (2, "own generator", 4)],
]


@pytest.mark.parametrize(("workers", "kind", "stop"), _STOPS)
def test_a_loader_goes_on(workers: int, kind: str, stop: int, tmp_path: Path) -> None:
    uninterrupted = _Run(0, workers, kind)
    expected = list(uninterrupted.batches(3))
    end = rng_state()
    uninterrupted.close()

    first = _Run(0, workers, kind)
    steps = first.batches(3)
    with Checkpointer(
        tmp_path / "run", model=first.model, extras=first.extras, strategy=BLOCKING
    ) as ck:
        ck.restore()
        seen = []
        for _ in range(stop):
            seen.append(next(steps))
            ck.step()
    assert_same_state(seen, expected[:stop])
    rest = list(steps)
    assert_same_state(rest, expected[stop:])
    assert_same_state(rng_state(), end)
    first.close()

    second = _Run(99, workers, kind)
    restore_run(tmp_path / "run", second.model, extras=second.extras)
    epochs = 3 - stop // 4
    resumed = list(second.batches(epochs))
    if stop == 4:
        assert_same_state(resumed, expected[4:])
    else:
        assert_same_state(resumed, expected[stop:])
    assert_same_state(rng_state(), end)
    second.close()


def test_what_torchdata_does_not_keep(tmp_path: Path) -> None:
    """The generators inside worker processes begin again with their epoch's seed, so that random
    items of a resumed epoch differ; this test fails when torchdata learns to keep them."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return StatefulDataLoader(_Noisy(), num_workers=1, multiprocessing_context="fork")

    loader, other, model = make(0), make(1), nn.Linear(1, 1)
    batches = iter(loader)
    expected = [next(batches) for _ in range(2)]
    state = stored(model, extras={"loader": loader})
    expected += [next(batches) for _ in range(2)]
    restore(state, model, extras={"loader": other})
    resumed = iter(other)
    indices, noise = torch.cat([next(resumed) for _ in range(2)]).T
    assert indices.tolist() == [2.0, 3.0]
    whole = torch.cat(expected)[:, 1]
    assert_same_state(noise, whole[:2])
    assert noise[0] != whole[2]
    loader._iterator = other._iterator = None


def test_a_loader_that_has_not_begun_is_left_alone() -> None:
    loader, model = StatefulDataLoader(range(4), shuffle=True), nn.Linear(1, 1)
    before = rng_state()
    state = stored(model, extras={"loader": loader})
    assert loader._iterator is None
    assert_same_state(rng_state(), before)
    expected = [int(batch) for batch in loader]
    other = StatefulDataLoader(range(4), shuffle=True)
    next(iter(other))
    restore(state, nn.Linear(1, 1), extras={"loader": other})
    assert [int(batch) for batch in other] == expected


def test_a_loader_told_where_to_begin_keeps_it() -> None:
    loader, other = (StatefulDataLoader(range(4)) for _ in range(2))
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())
    state = stored(nn.Linear(1, 1), extras={"loader": other})
    third = StatefulDataLoader(range(4))
    restore(state, nn.Linear(1, 1), extras={"loader": third})
    assert [int(batch) for batch in third] == [1, 2, 3]


def test_plain_loaders_have_no_state_to_store(run_dir: Path) -> None:
    plain = torch.utils.data.DataLoader(range(3))
    assert not is_loader(plain)
    with pytest.raises(Exception, match=r"extras.loader: an object of type DataLoader"):
        Checkpointer(run_dir, model=nn.Linear(1, 1), extras={"loader": plain})


def test_a_loader_on_one_side_only() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(LayoutMismatch, match=r"extras.it: a data loader only here"):
        restore(
            stored(model, extras={"it": StatefulDataLoader(range(3))}), model, extras={"it": {}}
        )
