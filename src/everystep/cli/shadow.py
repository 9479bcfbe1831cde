"""`everystep shadow`: hold another host's training run, state by state."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from everystep.cli.output import Block, Line, Output, tell
from everystep.cli.target import AsJson
from everystep.errors import UsageError

if TYPE_CHECKING:
    from everystep.agent.shadow_copy import GradientSource, Keeping

EXAMPLE = "everystep shadow runs/copy --listen 10.0.0.9:7700 --token-file token --tap eth1"


_Capture = Annotated[
    Path | None,
    typer.Option(
        "--capture",
        metavar="FILE",
        help="In place of --tap: a pcap or pcapng file that another program writes what is mirrored"
        " to, or a pipe. It is read from its beginning, and followed.",
    ),
]

_Deltas = Annotated[
    bool,
    typer.Option(
        "--deltas",
        help="Write the gradients of each step, too: four bytes per parameter and step as a rule."
        " Then every step since the oldest that is kept can be restored.",
    ),
]


class Held(Struct):
    """What a shadow had when it was ended."""

    run: str
    steps: dict[str, int]
    """The step to which each rank's state could go."""


def shadow(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A directory of its own: the states go there. Shadows that split a run share one.",
        ),
    ],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="An IP address of this host.")
    ],
    token_file: Annotated[
        Path,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="The secret that the trainers have, too; made where it is not there.",
        ),
    ],
    tap: Annotated[
        str | None,
        typer.Option(
            "--tap",
            metavar="IFACE",
            help="The interface on which the port of one training host is mirrored. Default: none;"
            ' gradients are sent (Shadow(tap="software")).',
        ),
    ] = None,
    capture: _Capture = None,
    persist_every: Annotated[
        int, typer.Option("--persist-every", metavar="N", help="Steps between two writings.", min=1)
    ] = 100,
    keep_last: Annotated[
        int, typer.Option("--keep-last", metavar="N", help="Steps kept on the store.", min=1)
    ] = 2,
    deltas: _Deltas = False,
    as_json: AsJson = False,
) -> int:
    """Be the shadow of a run that trains with `everystep.Shadow`, until a signal ends it.

    It holds the state of each rank in memory, does each step again from the gradients that it sees
    on the network, compares, writes the state now and then, and gives it to a trainer that
    restarts. SIGINT or SIGTERM: it writes the newest step first.
    """
    # loaded when it is called: the help of all commands must not wait for torch
    from everystep.agent.shadow_copy import Keeping

    keeping = Keeping(path=run, persist_every=persist_every, keep_last=keep_last, deltas=deltas)
    record = _hold(keeping, listen, token_file, tap, capture)
    lines = [Line(f"rank {rank}: step {step}") for rank, step in record.steps.items()]
    blocks: list[Block] = [*lines] or [Line("nothing was held")]
    Output(as_json).show(record, blocks)
    return 0


def _hold(
    keeping: Keeping, listen: str, token_file: Path, tap: str | None, capture: Path | None
) -> Held:
    """Until a signal; returns what was held then."""
    from everystep.agent.shadow import Shadow
    from everystep.store import addresses as at
    from everystep.strategies import parse_place

    host, port = parse_place("--listen", listen)
    if not token_file.exists():
        at.make_secret(token_file)
        tell(f"{token_file} is new: give each training host a copy that only its user may read")
    token = at.read_secret(token_file)
    source = _source(tap, capture)
    try:
        one = Shadow(keeping, host, port, token, source, _say)
    except BaseException:
        if source is not None:
            source.close()
        raise
    with _Signals() as ended:
        tell(f"listening on {host}:{port}")
        ended.wait()
        steps = {str(rank): step for rank, step in one.kept.items()}
        record = Held(run=str(keeping.path), steps=steps)
        one.close()
    return record


def _source(tap: str | None, capture: Path | None) -> GradientSource | None:
    """Where gradients are read that are not sent."""
    if tap is None and capture is None:
        return None
    if tap is not None and capture is not None:
        raise UsageError("--tap and --capture: gradients are read in one place")
    from everystep.agent.shadow_wire import WireSource
    from everystep.tap.following import Followed
    from everystep.tap.live import Live

    if capture is not None:
        return WireSource(Followed(capture), _say)
    return WireSource(Live(tap or "", roce=False, tcp_ports=None), _say)


def _say(level: int, text: str) -> None:
    tell(text)


class _Signals:
    """Within it, SIGINT and SIGTERM are waited for."""

    def __enter__(self) -> _Signals:
        self._reader, self._writer = os.pipe()
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        os.write(self._writer, b"!")

    def wait(self) -> None:
        select.select([self._reader], [], [])

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)
