"""A loaded state in the forms that torch's own loaders take: by position, and by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.errors import Unsupported
from everystep.recovery.load import LoadedState
from everystep.state.tree import Decoder


def models_form(state: LoadedState) -> Any:
    """What `load_state_dict` takes: of the one model, or by the models' names."""
    return _one_or_all(state.models)


def indexed_form(state: LoadedState) -> dict[str, Any]:
    """What `export --to x.pt` writes: optimizers as `torch.optim.Optimizer.state_dict` gives them,
    with parameters by position in the groups; `optimizer_parameters` names the positions."""
    optimizers, names = {}, {}
    for name, saved in state.tree["optimizers"].items():
        order = [tuple(owner) for group in saved["groups"] for owner in group["parameters"]]
        optimizers[name] = _indexed(state, saved, {owner: i for i, owner in enumerate(order)})
        names[name] = [_names(saved)[owner] for owner in order]
    form = {"model": models_form(state)}
    if optimizers:
        form |= {
            "optimizer": _one_or_all(optimizers),
            "optimizer_parameters": _one_or_all(names),
        }
    return form | {"step": state.step, "metrics": state.metrics}


def _indexed(state: LoadedState, saved: Any, index: dict[Any, int]) -> dict[str, Any]:
    decoder = Decoder(state.tensors)
    slots: dict[Any, Any] = {
        index[tuple(owner)]: decoder.decode(slot)
        for owner, slot in saved["slots"]
        if tuple(owner) in index
    }
    slots.update(decoder.decode(saved["others"]))
    return {
        **decoder.decode(saved["more"]),
        "state": slots,
        "param_groups": _groups(saved, decoder, index),
    }


def named_form(state: LoadedState) -> dict[str, Any]:
    """What `export --to DIR` writes: optimizers as torch's `get_optimizer_state_dict` gives them,
    with parameters by FQN (with `MODEL.` before it where an optimizer serves several models).

    Raises:
        Unsupported: an optimizer keeps more than slots and groups, which has no FQN.
    """
    optimizers = {}
    decoder = Decoder(state.tensors)
    for name, saved in state.tree["optimizers"].items():
        if saved["others"] or saved["more"]:
            raise Unsupported(
                f"optimizers.{name} ({saved['class']}) keeps more than slots and groups",
                hint="export to a .pt file, which has a place for it",
            )
        names = _names(saved)
        slots = {names[tuple(o)]: decoder.decode(slot) for o, slot in saved["slots"]}
        optimizers[name] = {"state": slots, "param_groups": _groups(saved, decoder, names)}
    form = {"model": models_form(state)}
    if optimizers:
        form["optimizer"] = _one_or_all(optimizers)
    return form | {"step": state.step, "metrics": state.metrics}


def _groups(saved: Any, decoder: Decoder, called: Mapping[Any, Any]) -> list[dict[str, Any]]:
    return [
        {
            **decoder.decode(group["options"]),
            "params": [called[tuple(owner)] for owner in group["parameters"]],
        }
        for group in saved["groups"]
    ]


def _names(saved: Any) -> dict[tuple[str, ...], str]:
    """Each parameter's name: its FQN alone where the optimizer serves one model."""
    owners = [tuple(owner) for group in saved["groups"] for owner in group["parameters"]]
    owners += [tuple(owner) for owner, _ in saved["slots"]]
    alone = len({model for model, _ in owners}) == 1
    return {owner: owner[1] if alone else ".".join(owner) for owner in owners}


def _one_or_all(by_name: dict[str, Any]) -> Any:
    return next(iter(by_name.values())) if len(by_name) == 1 else by_name
