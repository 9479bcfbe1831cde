"""The command line's door: parsing, exit codes, and errors with their `try:` line.

A command's module is imported when the command is called, so that `everystep ls` starts fast.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from everystep import __version__
from everystep.cli.output import ReaderGone, tell
from everystep.errors import EverystepError

INTERRUPTED = 130
"""128 plus the number of SIGINT, as shells say it."""

_EXAMPLES = {
    "demo": "everystep demo --quick",
    "ls": "everystep ls runs/gpt",
    "show": "everystep show runs/gpt --step 900 --tensors",
    "verify": "everystep verify runs/gpt",
    "diff": "everystep diff runs/gpt 900 901",
    "bisect": "everystep bisect runs/gpt --good 800 --bad 900 -- python evaluate.py {}",
    "export": "everystep export runs/gpt --step 900 --to model.safetensors",
    "prune": "everystep prune runs/gpt --keep-last 5 --keep-every 1000 --dry-run",
    "plan": "everystep plan full --from-run runs/gpt",
    "report": "everystep report runs/gpt --trace trace.json",
    "shadow": "everystep shadow runs/copy --listen 10.0.0.9:7700 --token-file token --tap eth1",
    "tap": "everystep tap decode port7.pcapng --reduced gradients.npy",
}
"""One example of each command; each lives in the module of its name."""

_WrongUse: type[Exception] = typer.BadParameter.__mro__[2]
"""What the parser raises (click's ClickException, wherever this typer keeps it)."""


def main() -> None:
    """Run the command line and end the process."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="everystep: %(message)s", level=logging.WARNING)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Carry out one command; returns the exit status."""
    try:
        status = _app(arguments)(list(arguments), prog_name="everystep", standalone_mode=False)
    except ReaderGone as gone:
        # what is still in the buffer would fail again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return gone.exit_code
    except EverystepError as error:
        return _failed(error.headline(), error.hint, error.exit_code)
    except _WrongUse as error:
        words = getattr(error, "format_message", error.__str__)()
        return _failed(words, f"{_command_of(error)} --help", 2)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _failed(headline: str, hint: str | None, status: int) -> int:
    for number, line in enumerate(headline.splitlines()):
        tell(line if number else f"everystep: {line}")
    if hint:
        tell(f"  try: {hint}")
    return status


def _command_of(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return str(context.command_path) if context is not None else "everystep"


def _app(arguments: Sequence[str]) -> typer.Typer:
    """The parser, with the command that is called, or with all where that is not clear."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_everystep)
    called = next((word for word in arguments if not word.startswith("-")), None)
    if called is None and "--version" in arguments:
        called = "ls"  # any
    for name in [called] if called in _EXAMPLES else _EXAMPLES:
        function = getattr(importlib.import_module(f"everystep.cli.{name}"), str(name))
        epilog = f"Example: {_EXAMPLES[str(name)]}"
        if isinstance(function, typer.Typer):  # a group of commands
            app.add_typer(function, name=name, epilog=epilog)
        else:
            app.command(name, epilog=epilog)(function)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"everystep {__version__}\n")
        raise typer.Exit


def _everystep(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Checkpoint training at every step; look at, check and clean up what is stored."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit(2)


if __name__ == "__main__":
    main()
