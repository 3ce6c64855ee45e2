"""Printing: progress to standard error, findings to standard output, in a pipe as plain text."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import date
from datetime import time as time_of_day
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from blr_analysis.checks import printable


class Teller:
    """Prints on standard error which work begins, and after how many seconds."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        seconds = time.monotonic() - self._start
        tqdm.write(f"{seconds:6.1f} s  {text}", file=sys.stderr)


def paper() -> Console:
    """Standard output, as wide as the terminal; in a pipe it takes plain text."""
    return Console(highlight=False, markup=False)


def section(title: str, lead: str, *parts: RenderableType) -> RenderableType:
    """A heading, a sentence below it, and the parts that belong to them."""
    head = Text(title, style="bold")
    return Padding(Group(head, Text(lead), *parts), (1, 0, 0, 0))


def note(text: str) -> RenderableType:
    """A remark, in italics."""
    return Text(text, style="italic")


def grid(columns: Mapping[str, Iterable[Any]]) -> Table:
    """A table without frame; words to the left, numbers to the right."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
    texts_by_column = []
    for name, values in columns.items():
        texts = [printable(str(value)) for value in values]
        has_words = any(text[:1].isalpha() for text in texts)
        table.add_column(name, justify="left" if has_words else "right", overflow="fold")
        texts_by_column.append(texts)
    for row in zip(*texts_by_column, strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table


def pairs(rows: Mapping[str, object]) -> None:
    """Print a line for each name and value, unbroken, so that a path can be copied."""
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        paper().print(f"{name:<{width}}{value}", soft_wrap=True)


def print_json(facts: Mapping[str, Any]) -> None:
    """Print facts as one JSON object; missing and infinite values are null."""
    values = json_value(facts)
    print(json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False, default=str))


def json_value(value: Any) -> Any:
    """The value as JSON has it, with all its digits.

    Missing and infinite values become None, arrays lists, and dates text in ISO form.

    >>> json_value({1: float("nan"), "day": date(2026, 1, 2), "pair": (1, 2.5)})
    {'1': None, 'day': '2026-01-02', 'pair': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {str(name): json_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(part) for part in value]
    if hasattr(value, "tolist"):  # tensors, and arrays and numbers of NumPy
        return json_value(value.tolist())
    is_infinite = isinstance(value, float) and math.isinf(value)
    if value is None or is_infinite or _is_missing(value):
        return None
    return value.isoformat() if isinstance(value, date | time_of_day) else value


def _is_missing(value: Any) -> bool:
    """Whether this is NaN, NaT or pandas.NA, which do not equal themselves."""
    try:
        return bool(value != value)
    except (TypeError, ValueError):  # pandas.NA compares as NA
        return True


def show(part: RenderableType, console: Console | None = None) -> None:
    """Print a section on a console, by default on :func:`paper`.

    In a pipe it is plain text, without blanks at the ends of lines.
    """
    console = console or paper()
    knows_unicode = console.encoding.startswith("utf")
    if console.is_terminal and knows_unicode:
        console.print(part)
        return
    text = as_text(part, console.width)
    if not knows_unicode:
        text = text.replace("─", "-")
    console.file.write(text)


def as_text(part: RenderableType, width: int = 100) -> str:
    """The section as plain text, without blanks at the ends of lines."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, force_terminal=False).print(part)
    lines = [printable(line.rstrip()) for line in file.getvalue().splitlines()]
    return "\n".join(lines) + "\n"
