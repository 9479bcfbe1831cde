"""`everystep tap`: gradients read off a network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from everystep.cli.output import Output
from everystep.cli.tap_stats import EXAMPLE as STATS_EXAMPLE
from everystep.cli.tap_stats import read_numbers, stats
from everystep.cli.target import AsJson

EXAMPLE = "Example: everystep tap decode port7.pcapng --reduced gradients.npy"

tap = typer.Typer()


@tap.callback(invoke_without_command=True)
def _tap(context: typer.Context) -> None:
    """Read a training run off a mirrored port."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit(2)


tap.command(epilog=STATS_EXAMPLE)(stats)


@tap.command(epilog=EXAMPLE)
def decode(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A pcap or pcapng file.")],
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks in the ring.")] = 2,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "int32"],
        typer.Option("--dtype", help="Of the gradients: it is not on the wire."),
    ] = "float32",
    counts: Annotated[
        str | None,
        typer.Option(
            "--counts",
            metavar="N[,N...]",
            help="Elements of the buckets of an iteration, in order. Default: found out.",
        ),
    ] = None,
    reduced: Annotated[
        Path | None,
        typer.Option(
            "--reduced",
            metavar="OUT.npy",
            help="Write the reduced buffers; missing: NaN, or -2^31.",
        ),
    ] = None,
    icrc: Annotated[
        bool, typer.Option("--icrc/--no-icrc", help="Drop packets whose invariant CRC is wrong.")
    ] = True,
    as_json: AsJson = False,
) -> int:
    """Decode a capture of NCCL's ring all-reduce over RoCEv2: messages, collectives, gradients.

    Exit status 1 where buffers have gaps, copies differ, or loss made numbers uncertain.
    """
    # loaded when it is called: the help of all commands must not wait for NumPy
    from everystep.cli.tap_report import DTYPES, Reader
    from everystep.cli.tap_words import blocks, is_whole, save
    from everystep.tap.nccl import Options

    reader = Reader(
        Options(ranks=ranks, element_bytes=DTYPES[dtype], record=True), dtype, check_icrc=icrc
    )
    if counts is not None:
        reader.decoder.expect(0, read_numbers("--counts", counts))
    record = reader.read(file)
    if reduced is not None:
        save(reduced, reader.buffers, dtype)
    Output(as_json).show(record, blocks(record))
    return 0 if is_whole(record) else 1
