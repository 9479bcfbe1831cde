"""docs/cli.md: its examples are run in order, and its tables name every key that is printed."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from small_runs import Said

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"
BLOCK = re.compile(r"^```(python|py|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = ("ls", "show", "verify", "diff", "bisect", "export", "prune")


def normal(text: str) -> list[str]:
    """Lines without what another machine or moment has: numbers, hashes, host, spaces, rules."""
    text = re.sub(r"\bon \S+ \(pid \d+\)", "on HOST", text)
    text = re.sub(r"\b[0-9a-f]{8,32}\b|-?\d[\d.,]*(e[+-]\d+)?\S*", "#", text)
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]


def test_numbers_do_not_matter_and_words_do() -> None:
    assert normal("a  1.5 kB 0af31be2 on vm (pid 12)") == normal("a 27 kB ffffffff on x (pid 1)")
    assert normal("a 1 kB") != normal("b 1 kB")
    assert normal("a\nb") != normal("a")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_examples_give_what_the_document_shows(
    cli: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for kind, body in BLOCK.findall(DOCUMENT.read_text(encoding="utf-8")):
        if kind != "console":
            exec(compile(body, str(DOCUMENT), "exec"), names)
            continue
        for example in body.split("$ everystep ")[1:]:
            command, _, shown = example.partition("\n")
            said = cli(*shlex.split(command))
            assert normal(said.out + said.err) == normal(shown), command
            ran += 1
    assert ran >= len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_is_documented(command: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.partition(f"| `{command}` | |\n")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`(\w+)`", section))
    module = importlib.import_module(f"everystep.cli.{command}")
    records = [
        thing
        for thing in vars(module).values()
        if inspect.isclass(thing) and issubclass(thing, msgspec.Struct) and thing.__doc__
        and thing.__module__.startswith("everystep.cli")
    ]  # fmt: skip
    keys = {name for record in records for name in record.__struct_fields__}
    if command == "diff":
        compare = importlib.import_module("everystep.recovery.compare")
        for record in (compare.TensorDifference, compare.FormDifference):
            keys |= set(record.__struct_fields__)
    assert keys
    assert keys - documented == set()
