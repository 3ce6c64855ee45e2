"""The sections of an audit for a terminal of any width, or a text file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group, RenderableType

from blr_analysis.audit.sections import Section
from blr_analysis.terminal import grid, note, section

MAX_ROWS = 20


def in_text(*sections: Section, max_rows: int = MAX_ROWS) -> RenderableType:
    """The sections, one below the other, with the first ``max_rows`` rows of their tables."""
    return Group(*(section(part.title, part.lead, *_body(part, max_rows)) for part in sections))


def _body(part: Section, max_rows: int) -> Iterable[RenderableType]:
    """The table of a section and its notes."""
    if part.columns:
        yield grid({name: list(values)[:max_rows] for name, values in part.columns.items()})
        if len(part.rows) > max_rows:
            yield note(f"The {max_rows} largest of {len(part.rows)}; the table has them all.")
    yield from map(note, (*part.notes, *part.details))


def written(folder: Path, files: Iterable[Path]) -> RenderableType:
    """The names of the files that were written."""
    names = ", ".join(dict.fromkeys(path.name for path in files))
    return section("Written", f"{folder}: {names}")
