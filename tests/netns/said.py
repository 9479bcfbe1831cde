"""Reads what the processes of `netns.job` tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everystep.recovery.load import load_chain
from everystep.store.chains import plan_chains
from everystep.store.run import Run
from netns.job import digest

Told = list[dict[str, Any]]


def told(out: Path, what: str) -> Told:
    """All lines of one kind."""
    text = out.read_text(errors="replace") if out.exists() else ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    lines = [json.loads(line) for line in whole if line.startswith("{")]
    return [line for line in lines if line["what"] == what]


def last(out: Path) -> dict[str, Any]:
    """The last whole line; of a large file, only its end is read."""
    if not out.exists():
        return {}
    with out.open("rb") as file:
        file.seek(max(0, out.stat().st_size - 40_000))
        text = file.read().decode(errors="replace")
    found = text.find("Traceback")
    assert found < 0, text[found : found + 4000]
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    lines = [line for line in whole if line.startswith('{"what"')]
    return json.loads(lines[-1]) if lines else {}


def trained(out: Path) -> dict[int, dict[str, str]]:
    """The digests of each step that a trainer has told."""
    return {line["step"]: line["digests"] for line in told(out, "step")}


def folded(out: Path) -> dict[int, dict[int, dict[str, str]]]:
    """The digests that a shadow has told: by step, and by rank."""
    found: dict[int, dict[int, dict[str, str]]] = {}
    for line in told(out, "folded"):
        found.setdefault(line["step"], {})[line["rank"]] = line["digests"]
    return found


def stored(folder: Path, ranks: int, every: int = 1) -> dict[int, dict[int, dict[str, str]]]:
    """The same of all steps that can be had of a shadow's run; of most of them no digests, where
    only one in `every` is looked at."""
    run = Run.open(folder)
    listing = run.listing()
    chains = plan_chains(listing, run.segments(listing), listing.current_timeline())
    found: dict[int, dict[int, dict[str, str]]] = {ref.step: {} for ref in chains.refs}
    for ref in chains.refs[::every]:
        chain = chains.to(ref.step)
        assert chain is not None
        for rank in range(ranks):
            tensors = load_chain(run, chain, rank).tensors
            found[ref.step][rank] = {
                key: digest(tensor)
                for key, tensor in tensors.items()
                if key.startswith(("/models/", "/optimizers/"))
            }
    return found


def proved(
    shadow: dict[int, dict[int, dict[str, str]]], lives: Sequence[dict[int, dict[str, str]]]
) -> int:
    """How many steps the shadow had whole; each of their tensors is what its rank had.

    Args:
        shadow: as `folded` gives.
        lives: of each rank, as `trained` gives.
    """
    found = 0
    for step, parts in shadow.items():
        for rank, digests in parts.items():
            its = lives[rank].get(step)
            assert its is None or digests.items() <= its.items(), (step, rank)
        keys = {key for part in parts.values() for key in part}
        found += all(step in life and life[step].keys() == keys for life in lives)
    return found
