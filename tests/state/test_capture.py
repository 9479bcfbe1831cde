from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from everystep import Checkpointer
from everystep.errors import Damaged, LayoutMismatch, Unsupported
from everystep.state.capture import quiet_differences
from everystep.state.form import check_form
from everystep.state.objects import Objects
from states import assert_same_state, rng_state, state_of
from trips import BLOCKING, misfit, restore, restore_run, save_run, stored


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))


def _step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(6, 3)).sum().backward()
    optimizer.step()


def test_checkpoints_change_nothing(tmp_path: Path) -> None:  # O02, O10, C11
    free, watched = _net(), _net()
    plain, optimizer = Adam(free.parameters()), Adam(watched.parameters())
    torch.manual_seed(5)
    for _ in range(4):
        _step(free, plain)
    expected = state_of(free, plain)
    torch.manual_seed(5)
    with Checkpointer(tmp_path / "a", model=watched, optimizer=optimizer, strategy=BLOCKING) as ck:
        assert ck.restore() == 0
        for _ in range(4):
            _step(watched, optimizer)
            ck.step()
    assert_same_state(state_of(watched, optimizer), expected)


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:  # R07, R14, W14
    model = _net()
    optimizer = Adam(model.parameters())
    for _ in range(2):
        _step(model, optimizer)
    save_run(tmp_path / "a", model, optimizer)
    again = _net(9)
    restarted = Adam(again.parameters())
    assert restore_run(tmp_path / "a", again, restarted) == 1
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))
    save_run(tmp_path / "b", again, restarted)  # at once, without a step
    third = _net(3)
    restore_run(tmp_path / "b", third, last := Adam(third.parameters()))
    random_state = torch.get_rng_state()
    for one, its in ((model, optimizer), (third, last)):
        torch.set_rng_state(random_state)
        for _ in range(2):
            _step(one, its)
    assert_same_state(state_of(third, last), state_of(model, optimizer))


def test_buffers_are_restored_in_place() -> None:  # W15
    model, again = _net(), _net(1)
    model(torch.randn(6, 3))
    mean = again[1].running_mean
    restore(stored(model), again)
    assert again[1].running_mean is mean
    assert again[1].num_batches_tracked == 1
    assert_same_state(state_of(again), state_of(model))


def test_an_extra_that_draws_while_it_is_asked_or_told(tmp_path: Path) -> None:  # T11
    class Drawing:
        def state_dict(self) -> dict[str, float]:
            return {"drawn": torch.rand(1).item()}

        def load_state_dict(self, state: dict[str, float]) -> None:
            torch.rand(3)

    model = _net()
    before = rng_state()
    state = stored(model, extras={"drawing": Drawing()})
    assert_same_state(rng_state(), before)
    torch.manual_seed(3)
    restore(state, model, extras={"drawing": Drawing()})
    assert_same_state(rng_state(), before)


class _Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.count: Any = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count, "table": torch.full((2, 2), float(self.count)).t()}

    def set_extra_state(self, state: Any) -> None:
        self.count, self.table = state["count"], state["table"]


def test_extra_state_of_modules() -> None:
    model, again = nn.Sequential(_Counting(), _Counting()), nn.Sequential(_Counting(), _Counting())
    model[0].count, model[1].count = 3, 1 << 70
    restore(stored(model), again)
    assert [again[0].count, again[1].count] == [3, 1 << 70]
    assert_same_state(again[0].table, torch.full((2, 2), 3.0).t())
    fit = misfit(stored(model), nn.Sequential(_Counting(), nn.Linear(1, 1)))
    assert fit.unexpected == ["model.1._extra_state"]


# what does not fit


def _with(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(modules)


def test_missing_and_unexpected_tensors_are_named() -> None:  # W19
    state = stored(_with(a=nn.Linear(1, 1), b=nn.Linear(1, 1)))
    other = _with(b=nn.Linear(1, 1), c=nn.Linear(1, 1, bias=False))
    fit = misfit(state, other)
    assert fit.missing == ["model.c.weight"]
    assert fit.unexpected == ["model.a.weight", "model.a.bias"]
    with pytest.raises(LayoutMismatch) as caught:
        fit.raise_if(strict=True)
    assert "model.c.weight: here, and not stored" in str(caught.value)
    assert "model.a.bias: stored, and not here" in str(caught.value)
    assert "strict=False" in str(caught.value)
    before = other["c"].weight.detach().clone()
    restore(state, other, strict=False)
    assert_same_state(other["c"].weight.detach(), before)
    assert_same_state(dict(other["b"].named_parameters()).keys(), {"weight": 0, "bias": 0}.keys())


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        (nn.Linear(2, 3), nn.Linear(3, 2), "model.it.weight: shape (3, 2) stored, (2, 3) here"),
        (
            nn.Linear(2, 3),
            nn.Linear(2, 3).bfloat16(),
            "model.it.bias: dtype float32 stored, bfloat16 here",
        ),
        (
            nn.ParameterDict({"it": torch.zeros(2).to(torch.float8_e4m3fn)}),
            nn.ParameterDict({"it": torch.zeros(2).to(torch.float8_e5m2)}),
            "model.it.it: dtype float8_e4m3fn stored, float8_e5m2 here",
        ),
    ],
    ids=["shape", "dtype", "same bytes, other meaning"],
)
def test_shapes_and_dtypes_are_told_exactly(was: nn.Module, now: nn.Module, told: str) -> None:
    state = stored(_with(it=was))  # W07
    fit = misfit(state, _with(it=now))
    assert told in fit.mismatched
    before = state_of(_with(it=now))
    with pytest.raises(LayoutMismatch):
        restore(state, _with(it=now), strict=False)
    assert_same_state(state_of(_with(it=now)), before)


def _tied(*pairs: tuple[str, str], names: str = "abc") -> nn.ModuleDict:
    model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})
    for first, second in pairs:
        model[second].weight = model[first].weight
    return model


def test_ties_are_told_exactly() -> None:  # W01, C07
    tied, apart = _tied(("a", "b")), _tied()
    fit = misfit(stored(tied), apart)
    assert fit.mismatched == ["model.b.weight: tied to a.weight when stored, and not here"]
    fit = misfit(stored(apart), tied)
    assert fit.mismatched == ["model.b.weight: tied to a.weight here, and not when stored"]
    fit = misfit(stored(tied), _tied(("b", "c")))
    assert len(fit.mismatched) == 2 and not fit.missing and not fit.unexpected
    assert misfit(stored(tied), _tied(("b", "a"), names="cba")) == misfit(stored(tied), tied)


def test_an_alias_that_only_one_side_has() -> None:
    three, two = _tied(("a", "b"), ("a", "c")), _tied(("a", "b"), names="ab")
    assert misfit(stored(three), two).unexpected == ["model.c.weight"]
    assert misfit(stored(two), three).missing == ["model.c.weight"]
    only = _tied(names="b")
    restore(stored(two), only, strict=False)
    assert_same_state(only["b"].weight, two["a"].weight)


def test_models_optimizers_and_extras_that_only_one_side_has() -> None:
    model = _net()
    state = stored({"g": model}, {"x": Adam(model.parameters())}, {"e": {}})
    fit = misfit(state, {"h": model}, {"y": Adam(model.parameters())}, {"f": {}})
    assert fit.missing == ["models.h", "optimizers.y", "extras.f"]
    assert fit.unexpected == ["models.g", "optimizers.x", "extras.e"]


def test_many_differences_are_counted() -> None:
    state = stored(nn.Sequential(*[nn.Linear(1, 1) for _ in range(20)]))
    with pytest.raises(LayoutMismatch, match=r"and 20 more"):
        restore(state, nn.Sequential(nn.Identity()))


def test_a_misfit_leaves_everything_as_it_was(tmp_path: Path) -> None:
    model = _net()
    save_run(tmp_path / "a", model, Adam(model.parameters()), {"e": {"a": 1}})
    other, extras = _net(4).bfloat16(), {"e": {"a": 2}}
    optimizer = Adam(other.parameters(), lr=3.0)
    before = state_of(other, optimizer, extras)
    with pytest.raises(LayoutMismatch):
        restore_run(tmp_path / "a", other, optimizer, extras)
    assert_same_state(state_of(other, optimizer, extras), before)


class _Views(nn.Module):
    def __init__(self, overlap: bool) -> None:
        super().__init__()
        big = torch.arange(10.0)
        self.register_buffer("first", big[:6])
        self.register_buffer("second", big[3:9] if overlap else big[3:9].clone())


def test_overlapping_views() -> None:
    model, again = _Views(True), _Views(True)
    model.first.add_(1)
    restore(stored(model), again)
    assert_same_state(state_of(again), state_of(model))
    apart = _Views(False)
    apart.first.fill_(5)
    # whichever of the two is written first
    with pytest.raises(LayoutMismatch, match=r"models.model.(first|second) overlaps another here"):
        restore(stored(apart), again)


def test_models_that_share_a_parameter() -> None:
    def make(shared: bool) -> dict[str, nn.Module]:
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
        two.weight = one.weight if shared else two.weight
        return {"one": one, "two": two}

    models, again = make(True), make(True)
    optimizer = Adam([*models["one"].parameters(), models["two"].bias])
    models["two"](models["one"](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    state = stored(models, optimizer)
    restarted = Adam([*again["one"].parameters(), again["two"].bias])
    restore(state, again, restarted)
    assert_same_state(state_of(again, restarted), state_of(models, optimizer))
    with pytest.raises(LayoutMismatch, match="overlaps another here"):
        restore(stored(make(False)), make(True))


def test_an_expanded_parameter() -> None:
    class Expanded(nn.Module):
        def __init__(self, expanded: bool) -> None:
            super().__init__()
            value = torch.zeros(1, 3).expand(2, 3)
            self.register_buffer("it", value if expanded else value.clone())

    apart = Expanded(False)
    restore(stored(apart), Expanded(True))
    apart.it[1] = 1
    with pytest.raises(LayoutMismatch, match="is expanded here"):
        restore(stored(apart), Expanded(True))


def test_quiet_differences(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Conv2d(2, 3, 2)
    save_run(tmp_path / "a", model)
    other = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    other.bias.requires_grad_(False)
    with caplog.at_level(logging.WARNING, "everystep"):
        restore_run(tmp_path / "a", other)
    assert "model.weight has another order in memory than when stored" in caplog.text
    assert "model.bias is frozen here and was not" in caplog.text
    assert_same_state(other.weight.contiguous(), model.weight)
    state = stored(other)
    objects = Objects.of(model, None, None)
    assert "model.bias was frozen and is not here" in quiet_differences(
        objects, state.tree, state.specs, 1
    )


@pytest.mark.parametrize(
    ("objects", "told"),
    [
        ({"model": 3}, "model=int: not a Module"),
        ({"model": {"a": 3}}, "model=int: not a Module"),
        ({"model": {"": nn.Linear(1, 1)}}, "not a Module"),
        ({"model": nn.Linear(1, 1), "optimizer": nn.Linear(1, 1)}, "not a Optimizer"),
        ({"model": nn.Linear(1, 1), "extras": {"a": 3}}, "extras.a: an object of type int"),
        ({"model": nn.Linear(1, 1), "extras": {3: {}}}, "extras: 3 is not a string"),
        (
            {"model": nn.Linear(1, 1), "extras": {"o": torch.optim.SGD([torch.ones(1)])}},
            "extras.o: an optimizer",
        ),
        ({"model": nn.Linear(1, 1), "extras": {"a": {"b": [0, len]}}}, "extras.a.b.1: a function"),
        ({"model": nn.Linear(1, 1, device="meta")}, "models.model.weight: a tensor on the meta"),
        (
            {"model": nn.ParameterList([torch.zeros(2, 2).to_sparse()])},
            "models.model.0: a sparse tensor as parameter or buffer",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_when_it_is_handed_over(
    objects: dict[str, Any], told: str, run_dir: Path
) -> None:
    with pytest.raises(Unsupported) as caught:
        Checkpointer(run_dir, **objects)
    assert told in str(caught.value)
    assert not run_dir.exists()


def test_a_tensor_subclass_is_refused() -> None:  # O26
    class Odd(torch.Tensor):
        pass

    model = nn.Linear(1, 1)
    model.register_buffer("it", torch.zeros(2).as_subclass(Odd))
    with pytest.raises(Unsupported, match=r"models.model.it: a tensor subclass \(.*Odd\)"):
        stored(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("models"),
        lambda t: t.pop("rng"),
        lambda t: t["models"].update(model=3),
        lambda t: t["models"]["model"].pop("aliases"),
        lambda t: t["models"]["model"].update(frozen=[3]),
        lambda t: t["models"]["model"]["aliases"].update(a="nowhere"),
        lambda t: t["optimizers"]["optimizer"].update(groups={}),
        lambda t: t["optimizers"]["optimizer"]["groups"][0].update(parameters=[["model"]]),
        lambda t: t["optimizers"]["optimizer"]["groups"][0].update(options=3),
        lambda t: t["optimizers"]["optimizer"].update(slots=[[["model", "w"]]]),
        lambda t: t["optimizers"]["optimizer"].update(more=None),
        lambda t: t.update(loaders={"a": {}}),
        lambda t: t.update(rng=[]),
    ],
)
def test_a_malformed_tree_is_damage(change: Any) -> None:
    model = nn.Linear(1, 1)
    state = stored(model, Adam(model.parameters()))
    tree = state.tree
    check_form(tree, state.specs)
    change(tree)
    with pytest.raises(Damaged):
        check_form(tree, state.specs)


@pytest.mark.parametrize(
    "generators", [{}, {"python": 1, "numpy": 2, "torch": 3}, {"torch": {"$tensor": "/nowhere"}}]
)
def test_malformed_random_state_is_damage(generators: Any) -> None:
    model = nn.Linear(1, 1)
    state = stored(model)
    tree = state.tree
    tree["rng"] = generators
    state.json = __import__("msgspec").json.encode(tree)
    before = rng_state()
    with pytest.raises(Damaged):
        restore(state, model)
    assert_same_state(rng_state(), before)
