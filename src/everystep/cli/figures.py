"""Figures of a plan: read from options, or from what a run measured, and said in words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import median

import typer

from everystep.errors import NothingToRestore, UsageError
from everystep.store.measured import Measure, read_measures
from everystep.store.run import Run

_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)(/s)?\s*")


def quantity(name: str, words: str, metavar: str) -> typer.models.OptionInfo:
    """An option that is a text with a unit."""
    found: typer.models.OptionInfo = typer.Option(name, help=words, metavar=metavar)
    return found


def _quantity(option: str, text: str, units: Mapping[str, float], per_s: bool) -> float:
    match = _QUANTITY.fullmatch(text)
    kind = "rate" if per_s else "time" if "ms" in units else "size"
    example = {"rate": "25GB/s", "time": "0.4 or 400ms", "size": "26GB or 24GiB"}[kind]
    if match is None or bool(match[3]) != per_s or match[2] not in units:
        raise UsageError(f"{option} {text!r} is not a {kind}", hint=f"{option} {example}")
    value = float(match[1]) * units[match[2]]
    if not math.isfinite(value) or value > 1e30:
        raise UsageError(f"{option} {text!r} is too large")
    return value


def read_size(option: str, text: str | None) -> int | None:
    """Bytes, of an option such as `26GB`; None where it is not given.

    Raises:
        UsageError: it is no size.
    """
    units = {"": 1, "kB": 1000, **_UNITS}
    return None if text is None else round(_quantity(option, text, units, False))


def read_rate(option: str, text: str | None) -> float | None:
    """Bytes per second, of an option such as `25GB/s`; None where it is not given.

    Raises:
        UsageError: it is no rate.
    """
    units = {"kB": 1000, **_UNITS}
    return None if text is None else _quantity(option, text, units, True)


def read_seconds(option: str, text: str | None) -> float | None:
    """Seconds, of an option such as `0.4`, `400ms` or `3h`; None where it is not given.

    Raises:
        UsageError: it is no time.
    """
    units = {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6, "min": 60, "h": 3600}
    return None if text is None else _quantity(option, text, units, False)


def spoken_time(seconds: float) -> str:
    """A length of time for people: `2.5 h`, `40 min`, `1.5 s`, `20 ms`."""
    if seconds >= 3 * 3600:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 60:
        return f"{seconds / 60:.3g} min"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


# ---------------------------------------------------------------- from a run


def newest_measures(run: Run, rank: int) -> list[Measure]:
    """What the newest session of a rank measured.

    Raises:
        NothingToRestore: the run has no such measurements.
    """
    found = [measures for _, measures in sorted(read_measures(run.backend, rank).items())]
    kept = next((measures for measures in reversed(found) if measures), None)
    if kept is None:
        raise NothingToRestore(
            "the run has no measurements", rank=rank,
            hint="they come with strategy=Full(); without, give the figures as options",
        )  # fmt: skip
    return kept


def medians(measures: list[Measure]) -> dict[str, float | None]:
    """The median of each figure over the steps that have it; of the state the newest size."""
    names = (
        *("forward_s", "backward_s", "update_s"),
        *("offload_bytes_per_s", "snapshot_bytes_per_s", "write_bytes_per_s"),
    )
    found: dict[str, float | None] = {"state_bytes": measures[-1].state_bytes}
    for name in names:
        values = [value for m in measures if (value := getattr(m, name)) is not None]
        found[name] = median(values) if values else None
    return found
