"""What is printed: progress to standard error, findings to standard output, plain in a pipe."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from blr_analysis.checks import printable


class Teller:
    """Says on standard error what begins, and when; standard output is for what was found."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        seconds = time.monotonic() - self._start
        tqdm.write(f"{seconds:6.1f} s  {text}", file=sys.stderr)


def paper() -> Console:
    """Standard output: as wide as the terminal, plain text where it is none."""
    return Console(highlight=False, markup=False)


def section(title: str, lead: str, *parts: RenderableType) -> RenderableType:
    """A heading, a sentence, and what belongs to them."""
    head = Text(title, style="bold")
    return Padding(Group(head, Text(lead), *parts), (1, 0, 0, 0))


def note(text: str) -> RenderableType:
    return Text(text, style="italic")


def grid(columns: Mapping[str, Iterable[Any]]) -> Table:
    """A table without frame; words to the left, numbers to the right."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
    cells = {name: [printable(str(v)) for v in values] for name, values in columns.items()}
    for name, values in cells.items():
        words = any(v[:1].isalpha() for v in values)
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    for row in zip(*cells.values(), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table


def pairs(rows: Mapping[str, object]) -> None:
    """Print a name and a value a line, whole, so that a path can be copied."""
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        paper().print(f"{name:<{width}}{value}", soft_wrap=True)


def print_json(facts: Mapping[str, Any]) -> None:
    """Print facts as JSON; what is no finite number becomes null."""
    print(json.dumps(_finite(facts), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if hasattr(value, "item"):
        value = value.item()
    is_undefined = isinstance(value, float) and not math.isfinite(value)
    return None if is_undefined else value


def show(part: RenderableType, console: Console | None = None) -> None:
    """Print a section, to :func:`paper` unless it is elsewhere; lines keep no trailing blanks, so
    that a pipe gets plain text."""
    console = console or paper()
    text = as_text(part, console.width)
    if console.is_terminal and console.encoding.startswith("utf"):
        console.print(part)
    else:
        console.file.write(text if console.encoding.startswith("utf") else text.replace("─", "-"))


def as_text(part: RenderableType, width: int = 100) -> str:
    """The section as plain text."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, force_terminal=False).print(part)
    return "\n".join(printable(line.rstrip()) for line in file.getvalue().splitlines()) + "\n"
