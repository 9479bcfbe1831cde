"""`everystep tap`: gradients read off a network."""

from __future__ import annotations

import re
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

import typer

from everystep.cli.output import Output
from everystep.cli.tap_stats import EXAMPLE as STATS_EXAMPLE
from everystep.cli.tap_stats import read_numbers, stats
from everystep.cli.target import AsJson
from everystep.errors import UsageError

EXAMPLE = "Example: everystep tap decode port7.pcapng --reduced gradients.npy"

NcclVersion = Annotated[
    str | None,
    typer.Option(
        "--nccl",
        metavar="2.N",
        help="NCCL's version: it tells how buffers are cut, which over TCP nothing else does.",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="IP[,IP...]",
        help="Of the ranks, in their order: over TCP nothing else names them.",
    ),
]
Checksums = Annotated[
    bool,
    typer.Option("--checksums/--no-checksums", help="Drop TCP segments whose checksum is wrong."),
]

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
    nccl: NcclVersion = None,
    hosts: Hosts = None,
    checksums: Checksums = False,
    as_json: AsJson = False,
) -> int:
    """Decode a capture of NCCL's ring all-reduce, over RoCEv2 or TCP: messages, gradients.

    Exit status 1 where buffers have gaps, copies differ, or loss made numbers uncertain.
    """
    # loaded when it is called: the help of all commands must not wait for NumPy
    from everystep.cli.tap_report import DTYPES, Reader
    from everystep.cli.tap_words import blocks, is_whole, save
    from everystep.tap.nccl import Options

    minor = None if nccl is None else _read_minor(nccl)
    reader = Reader(
        Options(ranks=ranks, element_bytes=DTYPES[dtype], minor=minor, record=True),
        dtype,
        check_icrc=icrc,
        check_tcp=checksums,
        hosts=() if hosts is None else _read_hosts(hosts, ranks),
    )
    if counts is not None:
        reader.decoder.expect(0, read_numbers("--counts", counts))
    record = reader.read(file)
    if reduced is not None:
        save(reduced, reader.buffers, dtype)
    Output(as_json).show(record, blocks(record))
    return 0 if is_whole(record) else 1


def _read_minor(text: str) -> int:
    """N of 2.N or 2.N.M."""
    found = re.fullmatch(r"2\.(\d{1,3})(\.\d+)?", text, re.ASCII)
    if found is None:
        raise UsageError(f"--nccl takes a version, not {text!r}", hint="--nccl 2.27")
    return int(found[1])


def _read_hosts(text: str, ranks: int) -> list[str]:
    """An address for each rank."""
    hosts = text.split(",")
    try:
        known = {str(ip_address(host)) for host in hosts}
    except ValueError as error:
        raise UsageError(f"--hosts: {error}", hint="--hosts 10.0.0.1,10.0.0.2") from error
    if len(known) != ranks or len(hosts) != ranks:
        raise UsageError(f"--hosts takes one address for each of {ranks} ranks, not {text!r}")
    return hosts
