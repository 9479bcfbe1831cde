"""A record as a table on a terminal, as plain text in a pipe, or as JSON."""

from __future__ import annotations

import contextlib
import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from everystep.errors import EverystepError
from everystep.types import Json, StepRef

_IN_TENSORS = ("$tensor", "$leaf", "$parameter", "$frozen", "$array", "$coo")

Progress = Callable[[int], None]
"""Called with the number of bytes just read, or of steps just done."""

Unit = Literal["bytes", "steps"]


class ReaderGone(EverystepError):
    """The other end of the pipe was closed, as `| head` does: no failure of ours."""

    exit_code = 141  # 128 plus the number of SIGPIPE, as shells say it


class Cell(NamedTuple):
    """A text with a style, which only a terminal shows."""

    text: str
    style: str = ""


class Line(NamedTuple):
    """One line of text."""

    text: str
    style: str = ""


class Column(NamedTuple):
    """How a column of a table is headed and aligned."""

    title: str
    right: bool = False


class Table(NamedTuple):
    """Rows under a head; a column without a text in any row is not shown."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Cell]]

    def filled(self) -> tuple[list[Column], list[list[Cell]]]:
        """The columns that have something to show, and their cells, safe to print."""
        cells = [[_cell(item) for item in row] for row in self.rows]
        kept = [i for i in range(len(self.columns)) if any(row[i].text for row in cells)]
        return [self.columns[i] for i in kept], [[row[i] for i in kept] for row in cells]


def _cell(item: str | Cell) -> Cell:
    cell = item if isinstance(item, Cell) else Cell(item)
    return Cell(clean(cell.text), cell.style)


Block = Line | Table


class Output:
    """Where a command's record goes: one JSON object, or blocks as the terminal can show them."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def show(self, record: Struct, blocks: Iterable[Block]) -> None:
        """Print the record; `blocks` say the same for people."""
        if self._as_json:
            _write(msgspec.json.encode(record).decode() + "\n")
        elif sys.stdout.isatty():
            _show_rich(blocks)
        else:
            for block in blocks:
                _write(as_text(block))

    @contextlib.contextmanager
    def progress(self, what: str, total: int, unit: Unit = "bytes") -> Iterator[Progress]:
        """A bar with rate and time left on standard error, where that is a terminal."""
        if not sys.stderr.isatty():
            yield lambda nbytes: None
            return
        from rich import progress as bars
        from rich.console import Console
        from rich.text import Text

        class StepsPerSecond(bars.ProgressColumn):
            def render(self, task: bars.Task) -> Text:
                return Text("" if task.speed is None else f"{task.speed:,.1f} steps/s")

        amounts: dict[Unit, tuple[bars.ProgressColumn, bars.ProgressColumn]] = {
            "bytes": (bars.DownloadColumn(), bars.TransferSpeedColumn()),
            "steps": (bars.MofNCompleteColumn(), StepsPerSecond()),
        }
        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            *amounts[unit],
            bars.TimeRemainingColumn(),
        )
        console = Console(stderr=True, highlight=False)
        with bars.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(clean(what), total=total)
            yield lambda number: bar.advance(task, number)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone("nobody reads standard output any more") from None


def _show_rich(blocks: Iterable[Block]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    for block in blocks:
        if isinstance(block, Line):
            console.print(Text(clean(block.text), block.style))
            continue
        table = RichTable(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        columns, rows = block.filled()
        for column in columns:
            justify = "right" if column.right else "left"
            table.add_column(column.title, justify=justify, overflow="fold")  # type: ignore[arg-type]  # rich wants a Literal
        for row in rows:
            table.add_row(*(Text(cell.text, cell.style) for cell in row))
        console.print(table)


def as_text(block: Block) -> str:
    """A block as lines without styles; a table is as wide as its content, surrounded by nothing."""
    if isinstance(block, Line):
        return clean(block.text) + "\n"
    columns, rows = block.filled()
    texts = [[column.title for column in columns], *([cell.text for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for row_texts in texts:
        aligned = [
            text.rjust(width) if column.right else text.ljust(width)
            for text, width, column in zip(row_texts, widths, columns, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip() + "\n")
    return "".join(lines)


def clean(text: str) -> str:
    """Text that cannot command a terminal: names come from files, and files are hostile."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def tell(text: str) -> None:
    """One line for people on standard error: it is no part of the record."""
    sys.stderr.write(clean(text) + "\n")


def size(nbytes: int) -> str:
    """A length for people: `987 B`, `1.2 kB`, `345.6 MB`."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 999.95 or unit == "PB":
            return f"{value:,.1f} {unit}"
    return f"{nbytes} B"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`, `1,024 steps`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def plain(value: Json) -> Json:
    """A value as it is stored (docs/format.md) in plain JSON, for people and scripts.

    Numbers that are not finite become the strings `nan`, `inf` and `-inf`; tuples and sets become
    lists, dicts with other keys lists of pairs, and what lies in a tensor `tensor KEY`.
    """
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag.startswith("$"):
            return _plain_tagged(tag, content)
    return {name: plain(item) for name, item in value.items()}


def _plain_tagged(tag: str, content: Json) -> Json:
    try:
        if tag == "$int":
            return int(content, 16)
        if tag == "$float":
            return number(struct.unpack(">d", bytes.fromhex(content))[0])
        if tag in _IN_TENSORS:
            return f"tensor {content if isinstance(content, str) else content[0]}"
    except (ValueError, TypeError, IndexError, struct.error):
        return {tag: content}
    if tag in ("$dtype", "$device") and isinstance(content, str):
        return content
    return plain(content)


def number(value: float) -> float | str:
    """A float for JSON, which has no word for those that are not finite."""
    return value if math.isfinite(value) else str(value)


def spoken_value(value: Json, width: int | None = None) -> str:
    """A plain value on one line; cut to `width` characters where that is given."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = msgspec.json.encode(value).decode()
    return text if width is None or len(text) <= width else text[: width - 1] + "…"


def ranges(steps: list[str]) -> str:
    """Steps on one line, neighbours drawn together: `main:1 to 3, main@2:3`."""
    texts: list[str] = []
    first: StepRef | None = None
    last: StepRef | None = None
    for ref in [*map(StepRef.parse, steps), None]:
        if ref and last and ref.timeline == last.timeline and ref.step == last.step + 1:
            last = ref
            continue
        if first and last:
            texts.append(str(first) if first == last else f"{first} to {last.step}")
        first = last = ref
    return ", ".join(texts)
