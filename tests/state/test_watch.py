from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from everystep.state import watch
from everystep.state.watch import DictWatch

pytestmark = pytest.mark.skipif(watch.compiled is None, reason="it was built without a compiler")

Dicts = list[dict[str, Any]]


def _dicts() -> Dicts:
    return [{}, {"a": object(), "b": object()}, defaultdict(list, c=object()), {}]


def _reorder(dicts: Dicts) -> None:
    dicts[1]["a"] = dicts[1].pop("a")


def _swap(dicts: Dicts) -> None:
    dicts[1]["a"], dicts[1]["b"] = dicts[1]["b"], dicts[1]["a"]


def _move(dicts: Dicts) -> None:
    dicts[2] |= {"c": dicts[2].pop("c"), "b": dicts[1].pop("b")}


CHANGES: dict[str, Callable[[Dicts], object]] = {
    "replaced": lambda dicts: dicts[1].update(a=object()),
    "an equal number": lambda dicts: dicts[2].update(c=float("1e9")),
    "gone": lambda dicts: dicts[1].pop("b"),
    "the last gone": lambda dicts: dicts[2].pop("c"),
    "more": lambda dicts: dicts[1].update(d=object()),
    "more in an empty one": lambda dicts: dicts[0].update(d=object()),
    "more in the last": lambda dicts: dicts[3].update(d=object()),
    "a dict in an empty one": lambda dicts: dicts[0].update(d=dicts[1]),
    "another order": _reorder,
    "swapped": _swap,
    "moved to the next": _move,
    "empty": lambda dicts: dicts[1].clear(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_a_dict_is_noticed(change: Callable[[Dicts], object]) -> None:
    dicts = _dicts()
    dicts[2]["c"] = float("1e9")
    watched = DictWatch(dicts)
    assert watched.surely_same()
    before = [list(one.items()) for one in dicts]
    change(dicts)
    assert not watched.surely_same()
    for one, items in zip(dicts, before, strict=True):
        one.clear()
        one.update(items)
    assert watched.surely_same()


def test_a_dict_with_an_order_of_its_own_is_never_sure() -> None:
    ordered = OrderedDict(a=1, b=2)
    assert not DictWatch([ordered]).surely_same()
    ordered.move_to_end("a")
    assert list(dict.items(ordered)) != list(ordered.items())  # what would be compared


def test_what_is_no_dict_is_never_sure() -> None:
    assert not DictWatch([{}, None]).surely_same()
    assert not DictWatch([{}, ["a"]]).surely_same()


def test_attributes_that_are_other_objects_or_gone() -> None:
    values: list[Any] = [{}, set(), {}, set()]
    attributes = [{"x": values[0], "y": values[1]}, {"y": values[3], "x": values[2], "z": 1}]
    same = watch.compiled.same_items
    assert same(attributes, ("x", "y"), values)
    attributes[1]["y"] = set()
    assert not same(attributes, ("x", "y"), values)
    del attributes[1]["y"]
    assert not same(attributes, ("x", "y"), values)
    attributes[1]["y"] = values[3]
    assert same(attributes, ("x", "y"), values)
    assert not same(attributes, ("x", "y"), values[:3])
    with pytest.raises(TypeError):
        same(attributes, ["x", "y"], values)  # type: ignore[arg-type]
