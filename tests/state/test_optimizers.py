from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from everystep.errors import LayoutMismatch, Unsupported
from states import assert_same_state, state_of
from trips import misfit, restore, stored

Maker = Callable[[Any], Any]


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))


def _train(model: nn.Module, optimizer: Any, steps: int, *, dtype: Any = torch.float32) -> None:
    for _ in range(steps):
        inputs = torch.randn(5, 3).to(dtype)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).float().square().sum()
            loss.backward(create_graph=type(optimizer).__name__ == "AdaHessian")
            return loss

        if "closure" in type(optimizer).__name__ or isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _exact(make: Maker, *, steps: int = 3, dtype: Any = torch.float32) -> None:
    """n + m steps are n steps, a restore into fresh objects, and m steps; and looking at the state
    in between, from the very beginning, changes nothing."""
    model, unwatched = _net().to(dtype), _net().to(dtype)
    optimizer, free = make(model), make(unwatched)
    torch.manual_seed(1)
    _train(unwatched, free, 2 * steps, dtype=dtype)
    torch.manual_seed(1)
    for _ in range(steps):
        stored(model, optimizer)
        _train(model, optimizer, 1, dtype=dtype)
    state = stored(model, optimizer)
    _train(model, optimizer, steps, dtype=dtype)
    assert_same_state(state_of(model, optimizer), state_of(unwatched, free))

    again = _net(seed=7).to(dtype)
    restarted = make(again)
    restore(state, again, restarted)
    _train(again, restarted, steps, dtype=dtype)
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


def _tensor_lr(parameters: Any) -> Adam:
    return Adam(parameters, lr=torch.tensor(1e-2))


_TORCH: dict[str, Maker] = {
    "Adam": lambda m: Adam(m.parameters(), lr=1e-2),
    "AdamW amsgrad": lambda m: AdamW(m.parameters(), amsgrad=True, weight_decay=0.1),
    "AdamW foreach": lambda m: AdamW(m.parameters(), foreach=True),
    "Adam fused": lambda m: Adam(m.parameters(), fused=True),
    "Adam lr tensor": lambda m: _tensor_lr(m.parameters()),
    "Adam betas tensor": lambda m: Adam(
        m.parameters(), lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)),
        capturable=False, foreach=False,
    ),
    "SGD": lambda m: SGD(m.parameters(), lr=0.1),
    "SGD momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop centered": lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.1),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), decoupled_weight_decay=True),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "LBFGS": lambda m: torch.optim.LBFGS(
        m.parameters(), max_iter=3, history_size=2, line_search_fn="strong_wolfe"
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", _TORCH.values(), ids=_TORCH)
def test_optimizers_of_torch_go_on_bit_for_bit(make: Maker) -> None:
    _exact(make)


_OTHERS: dict[str, Maker] = {
    "SOAP": lambda m: pytorch_optimizer.SOAP(m.parameters(), precondition_frequency=2),
    "Shampoo": lambda m: pytorch_optimizer.Shampoo(m.parameters()),
    "Lion": lambda m: pytorch_optimizer.Lion(m.parameters()),
    "AdaBelief": lambda m: pytorch_optimizer.AdaBelief(m.parameters()),
    "Prodigy": lambda m: pytorch_optimizer.Prodigy(m.parameters()),
    "CAME": lambda m: pytorch_optimizer.CAME(m.parameters()),
    "ScheduleFreeAdamW": lambda m: pytorch_optimizer.ScheduleFreeAdamW(m.parameters()),
    "Ranger21": lambda m: pytorch_optimizer.Ranger21(m.parameters(), num_iterations=20),
    "Lookahead": lambda m: pytorch_optimizer.Lookahead(AdamW(m.parameters()), k=2),
    "ADOPT": lambda m: pytorch_optimizer.ADOPT(m.parameters()),
}


@pytest.mark.parametrize("make", _OTHERS.values(), ids=_OTHERS)
def test_other_optimizers_go_on_bit_for_bit(make: Maker) -> None:
    _exact(make)


def test_state_that_is_an_object_is_refused_by_its_path() -> None:
    model = _net()
    optimizer = pytorch_optimizer.ScalableShampoo(model.parameters(), start_preconditioning_step=1)
    _train(model, optimizer, 1)
    with pytest.raises(
        Unsupported, match=r"optimizers\.optimizer\.state\.model\.0\.weight\.pre_co"
    ):
        stored(model, optimizer)


def test_a_wrapper_that_casts_is_found_out() -> None:
    """Lookahead hands the inner state to torch's load_state_dict, which casts moments."""
    model = _net().bfloat16()

    def fp32_moments(m: nn.Module) -> Any:
        lookahead = pytorch_optimizer.Lookahead(AdamW(m.parameters()), k=2)
        return lookahead

    optimizer = fp32_moments(model)
    _train(model, optimizer, 1, dtype=torch.bfloat16)
    for slot in optimizer.optimizer.state.values():
        slot["exp_avg"] = slot["exp_avg"].float()
    again = _net().bfloat16()
    with pytest.raises(LayoutMismatch, match=r"load_state_dict changed .*exp_avg"):
        restore(stored(model, optimizer), again, fp32_moments(again))


class _Swapped(nn.Module):
    """The same parameters, made in another order."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(2, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for name in "abc":
            inputs = getattr(self, name)(inputs)
        return inputs


def test_slots_go_by_name_and_not_by_position() -> None:  # O01
    model, again = _Swapped("abc"), _Swapped("cab")
    optimizer, restarted = Adam(model.parameters()), Adam(again.parameters())
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    restore(stored(model, optimizer), again, restarted)
    for name, parameter in model.named_parameters():
        live = again.get_parameter(name)
        assert_same_state(restarted.state[live], optimizer.state[parameter])
    order = [id(again.get_parameter(name)) for name, _ in model.named_parameters()]
    assert [id(p) for p in restarted.param_groups[0]["params"]] == order
    assert [id(p) for p in restarted.state] == order


def test_looking_makes_no_slot_and_moves_no_counter() -> None:  # O02, C11
    model = _net()
    optimizer = AdamW(model.parameters(), weight_decay=0.5)
    before = state_of(model, optimizer)
    state = stored(model, optimizer)
    assert not optimizer.state and not any(p.grad is not None for p in model.parameters())
    restore(state, model, optimizer)  # O10: no hidden step
    assert not optimizer.state
    assert_same_state(state_of(model, optimizer), before)


def test_a_parameter_that_is_frozen_later_keeps_its_moments() -> None:  # O03
    model, again = _net(), _net(1)
    optimizer, restarted = Adam(model.parameters()), Adam(again.parameters())
    _train(model, optimizer, 2)
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None
    _train(model, optimizer, 1)
    again[0].weight.requires_grad_(False)
    restore(stored(model, optimizer), again, restarted)
    assert restarted.state[again[0].weight]["step"] == 2
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


def test_frozen_and_unused_parameters_have_no_state() -> None:  # O23
    def make() -> tuple[nn.Module, Adam]:
        model = nn.ModuleDict({"used": _net(), "unused": nn.Linear(1, 1), "cold": nn.Linear(1, 1)})
        model["cold"].requires_grad_(False)
        return model, Adam(model.parameters())

    (model, optimizer), (again, restarted) = make(), make()
    _train(model["used"], optimizer, 2)
    restore(stored(model, optimizer), again, restarted)
    assert len(restarted.state) == 6
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


@pytest.mark.parametrize(("params", "moments"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_moments_keep_their_dtype(params: str, moments: str) -> None:  # O05, O06
    model, again = (_net().to(getattr(torch, params)) for _ in range(2))
    optimizer, restarted = Adam(model.parameters()), Adam(again.parameters())
    _train(model, optimizer, 1, dtype=getattr(torch, params))
    for slot in optimizer.state.values():
        slot["exp_avg"] = torch.rand_like(slot["exp_avg"], dtype=getattr(torch, moments))
    restore(stored(model, optimizer), again, restarted)
    assert restarted.state[again[0].weight]["exp_avg"].dtype == getattr(torch, moments)
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


class _Masters(SGD):
    """Full-precision masters beside low-precision parameters; of a float32 one, itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter in ((g, p) for g in self.param_groups for p in g["params"]):
            slot = self.state[parameter]
            master = slot.setdefault("master", parameter.detach().float())
            master.sub_(parameter.grad.float(), alpha=group["lr"])
            parameter.data.copy_(master)


def test_masters_are_state_and_may_be_the_parameter_itself() -> None:  # O21
    def make() -> tuple[nn.Sequential, _Masters]:
        model = _net()
        model[2].bfloat16()
        return model, _Masters(model.parameters(), lr=0.01)

    (model, optimizer), (again, restarted) = make(), make()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.3)
    optimizer.step()
    state = stored(model, optimizer)
    assert "/optimizers/optimizer/state/model/0.weight/master" not in state.specs
    restore(state, again, restarted)
    weight = again[0].weight
    assert restarted.state[weight]["master"].data_ptr() == weight.data_ptr()
    assert restarted.state[again[2].weight]["master"].dtype == torch.float32
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


def _two_groups(lr: Any, other: Any) -> tuple[nn.Sequential, Adam]:
    model = _net()
    groups = [
        {"params": list(model[0].parameters()), "lr": lr},
        {"params": list(model[2].parameters()), "lr": other},
    ]
    return model, Adam(groups)


@pytest.mark.parametrize(
    ("was", "now"), list(itertools.product(["float", "tensor", "own", "shared"], repeat=2))
)
def test_learning_rates_of_all_kinds(was: str, now: str) -> None:  # O07, O09
    def make(kind: str, value: float) -> tuple[nn.Sequential, Adam]:
        shared = torch.tensor(value)
        if kind == "float":
            return _two_groups(value, value / 2)
        if kind == "tensor":
            return _two_groups(shared, value)
        return _two_groups(shared, shared if kind == "shared" else torch.tensor(value / 2))

    (model, optimizer), (again, restarted) = make(was, 0.5), make(now, 0.25)
    live = [group["lr"] for group in restarted.param_groups]
    restore(stored(model, optimizer), again, restarted)
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))
    rates = [group["lr"] for group in restarted.param_groups]
    assert (rates[0] is rates[1]) == (was == "shared")
    if was in ("shared", "own", "tensor") and now in ("shared", "own", "tensor"):
        assert rates[0] is live[0], "whoever holds the tensor too must see the change"


def test_tied_parameters_in_groups() -> None:  # O13
    def make() -> tuple[nn.ModuleDict, Adam]:
        model = nn.ModuleDict({"emb": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
        model["head"].weight = model["emb"].weight
        return model, Adam(model.parameters())

    (model, optimizer), (again, restarted) = make(), make()
    model["head"](model["emb"](torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    state = stored(model, optimizer)
    assert [key for key in state.specs if key.startswith("/models")] == ["/models/model/emb.weight"]
    restore(state, again, restarted)
    assert again["head"].weight is again["emb"].weight
    assert len(restarted.state) == 1
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


def test_tied_parameters_in_modules_of_another_order() -> None:
    def make(order: list[str]) -> tuple[nn.ModuleDict, Adam]:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in order})
        model[order[1]].weight = model[order[0]].weight
        return model, Adam(model.parameters())

    (model, optimizer), (again, restarted) = make(["a", "b"]), make(["b", "a"])
    model["a"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    restore(stored(model, optimizer), again, restarted)
    assert_same_state(again["b"].weight, model["a"].weight)
    assert_same_state(restarted.state[again["b"].weight], optimizer.state[model["a"].weight])


def test_two_parameters_on_one_memory_have_slots_each() -> None:
    def make() -> tuple[nn.Sequential, Adam]:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = nn.Parameter(model[0].weight.data)
        return model, Adam(model.parameters())

    (model, optimizer), (again, restarted) = make(), make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = stored(model, optimizer)
    restore(state, again, restarted)
    assert len(restarted.state) == 2
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))
    again[1].weight = again[0].weight
    joined = Adam(again.parameters())
    assert "parameters of group 0 are one here" in misfit(state, again, joined).mismatched[0]


@pytest.mark.parametrize("was_tensor", [True, False])
def test_step_as_number_and_as_tensor(was_tensor: bool) -> None:  # O14
    model, again = _net(), _net(1)
    optimizer, restarted = Adam(model.parameters()), Adam(again.parameters())
    _train(model, optimizer, 3)
    if not was_tensor:
        for slot in optimizer.state.values():
            slot["step"] = 3
    restore(stored(model, optimizer), again, restarted)
    _train(again, restarted, 1)
    assert {float(slot["step"]) for slot in restarted.state.values()} == {4.0}


def test_a_step_of_one_dimension_keeps_it() -> None:  # O15
    model, again = _net(), _net(1)
    optimizer, restarted = Adam(model.parameters()), Adam(again.parameters())
    _train(model, optimizer, 1)
    for slot in optimizer.state.values():
        slot["step"] = slot["step"].reshape(1)
    restore(stored(model, optimizer), again, restarted)
    assert restarted.state[again[0].weight]["step"].shape == (1,)


def test_every_parameter_has_a_step_of_its_own() -> None:  # O18
    model, again = _net(), _net(1)
    optimizer, restarted = Adam(model.parameters()), Adam(again.parameters())
    _train(model, optimizer, 1)
    restore(stored(model, optimizer), again, restarted)
    assert len({slot["step"].data_ptr() for slot in restarted.state.values()}) == 6
    shared = torch.tensor(1.0)
    for slot in optimizer.state.values():
        slot["step"] = shared
    restore(stored(model, optimizer), again, restarted)
    assert len({id(slot["step"]) for slot in restarted.state.values()}) == 1


def test_several_optimizers_over_one_model() -> None:  # O22
    def make() -> tuple[nn.Sequential, dict[str, Optimizer]]:
        model = _net()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        return model, {"muon": torch.optim.Muon(matrices), "a.b/c": AdamW(rest)}

    (model, optimizers), (again, restarted) = make(), make()
    model(torch.randn(2, 3)).square().sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    restore(stored(model, optimizers), again, restarted)
    assert_same_state(state_of(again, restarted), state_of(model, optimizers))


def test_a_generator_state_inside_optimizer_state_is_not_cast() -> None:  # O25
    model, again = _net().bfloat16(), _net().bfloat16()
    optimizer, restarted = Adam(model.parameters()), Adam(again.parameters())
    optimizer.state[model[0].weight] = {"rng": torch.Generator().manual_seed(3).get_state()}
    optimizer.state["generator"] = torch.Generator().get_state()  # type: ignore[index]
    restore(stored(model, optimizer), again, restarted)
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


def test_sparse_slots() -> None:  # C10
    model, again = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    restarted = torch.optim.SparseAdam(again.parameters())
    model(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None and model.weight.grad.is_sparse
    optimizer.state[model.weight]["last"] = model.weight.grad.clone()
    restore(stored(model, optimizer), again, restarted)
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


def test_groups_added_later_and_empty_groups() -> None:
    def make(late: bool) -> tuple[nn.Sequential, Adam]:
        model = _net()
        optimizer = Adam([{"params": [], "lr": 3.0}, {"params": list(model[0].parameters())}])
        if late:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5, "n": 3})
        return model, optimizer

    (model, optimizer), (again, restarted) = make(True), make(False)
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    restore(stored(model, optimizer), again, restarted)
    assert [len(group["params"]) for group in restarted.param_groups] == [0, 2, 2]
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


def test_groups_in_another_order_take_the_stored_one() -> None:
    model, optimizer = _two_groups(0.1, 0.2)
    again, restarted = _two_groups(0.3, 0.4)
    restarted.param_groups.reverse()
    restarted.param_groups[0]["params"].reverse()
    restore(stored(model, optimizer), again, restarted)
    assert_same_state(state_of(again, restarted), state_of(model, optimizer))


class _Younger(Adam):
    """An Adam with an option that older versions did not have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.defaults["fresh"] = 7
        self.param_groups[0]["fresh"] = 7


def test_counters_in_groups_and_options_that_only_one_side_has() -> None:
    model, again = _net(), _net(1)
    optimizer, restarted = _Younger(model.parameters()), _Younger(again.parameters())
    optimizer.param_groups[0]["count"] = 3
    del optimizer.param_groups[0]["fresh"]
    restarted.param_groups[0]["stale"] = 1
    restore(stored(model, optimizer), again, restarted)
    (group,) = restarted.param_groups
    assert group["count"] == 3 and group["fresh"] == 7
    assert "stale" not in group


def test_restoring_back_in_time_in_one_process_forgets_what_came_later() -> None:
    model = _net()
    optimizer = Adam(model.parameters())
    before = state_of(model, optimizer)
    state = stored(model, optimizer)
    _train(model, optimizer, 2)
    restore(state, model, optimizer)
    assert_same_state(state_of(model, optimizer), before)


def test_stateless_sgd() -> None:  # O11
    model, again = _net(), _net(1)
    optimizer, restarted = SGD(model.parameters(), lr=0.5), SGD(again.parameters(), lr=0.25)
    state = stored(model, optimizer)
    again[0].weight.grad = torch.ones_like(again[0].weight)
    restore(state, again, restarted)
    assert not restarted.state and restarted.param_groups[0]["lr"] == 0.5
    assert again[0].weight.grad.eq(1).all()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: SGD(m.parameters()), "stored from torch.optim.adam.Adam, here is torch"),
        (lambda m: Adam(m[0].parameters()), "stored group 0 is not here: model.2.weight is not in"),
        (
            lambda m: Adam([{"params": m[0].parameters()}, {"params": m[2].parameters()}]),
            "stored group 0 is not here: it is divided differently",
        ),
        (
            lambda m: Adam([*m[0].parameters(), *m[2].parameters(), *m[3].parameters()]),
            "model.3.bias is in a group here and was not when stored",
        ),
    ],
    ids=["class", "fewer", "divided", "more"],
)
def test_what_does_not_fit_is_told(change: Maker, told: str) -> None:
    model, again = _net(), _net()
    optimizer = Adam([*model[0].parameters(), *model[2].parameters()])
    state = stored(model, optimizer)
    fit = misfit(state, again, change(again))
    assert told in "\n".join(fit.mismatched)
    with pytest.raises(LayoutMismatch):
        fit.raise_if(strict=False)


def test_the_same_class_from_another_file_fits() -> None:
    model = _net()
    optimizer = Adam(model.parameters())
    state = stored(model, optimizer)
    state.json = state.json.replace(b"torch.optim.adam.Adam", b"torch.optim._moved.Adam")
    assert misfit(state, model, optimizer).mismatched == []
    state.json = state.json.replace(b"torch.optim._moved.Adam", b"bitsandbytes.Adam")
    assert "stored from bitsandbytes.Adam" in misfit(state, model, optimizer).mismatched[0]


def test_a_parameter_of_no_model_is_refused() -> None:
    model, other = _net(), nn.Linear(1, 1)
    optimizer = Adam([*model.parameters(), *other.parameters()])
    with pytest.raises(
        Unsupported, match=r"optimizers.optimizer: parameter 6 of group 0.*\(1, 1\)"
    ):
        stored(model, optimizer)
    stored({"model": model, "other": other}, optimizer)


def test_a_copy_of_the_stored_tree_is_not_needed() -> None:
    """Restoring twice from one reading gives two independent states."""
    model = _net()
    optimizer = _tensor_lr(model.parameters())
    _train(model, optimizer, 1)
    state = stored(model, optimizer)
    first, second = _net(1), _net(2)
    for again in (first, second):
        restarted = _tensor_lr(again.parameters())
        restore(state, again, restarted)
        _train(again, restarted, 1)
    third = copy.deepcopy(model)
    restore(state, third, _tensor_lr(third.parameters()))


@pytest.fixture(scope="session")
def zero() -> Any:
    """Importing it runs into deprecations of torch's own, and opens an event loop for good."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_zero_redundancy_optimizer(zero: Any, group: None) -> None:
    def make(model: nn.Module) -> Any:
        return zero(model.parameters(), optimizer_class=Adam, lr=0.01)

    model, again = _net(), _net(1)
    optimizer, restarted = make(model), make(again)
    _train(model, optimizer, 2)
    for one in (*optimizer.param_groups, *optimizer.optim.param_groups):
        one["lr"] = 0.5
    state = stored(model, optimizer)
    _train(model, optimizer, 2)
    restore(state, again, restarted)
    assert len(restarted.optim.state) == 6 and restarted.optim.param_groups[0]["lr"] == 0.5
    _train(again, restarted, 2)
    assert_same_state(state_of(again, restarted.optim), state_of(model, optimizer.optim))
