"""The sections of an audit for a terminal of any width, or a text file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group, RenderableType

from blr_analysis.audit.sections import Section
from blr_analysis.terminal import grid, note, section

MOST_ROWS = 20


def in_text(*sections: Section, most: int = MOST_ROWS) -> RenderableType:
    """The sections, one below the other; of long tables the first ``most`` rows."""
    return Group(*(section(part.title, part.lead, *_body(part, most)) for part in sections))


def _body(part: Section, most: int) -> Iterable[RenderableType]:
    """The table of a section and its notes."""
    if part.columns:
        yield grid({name: list(values)[:most] for name, values in part.columns.items()})
        if len(part.rows) > most:
            yield note(f"The {most} largest of {len(part.rows)}; the table has them all.")
    yield from map(note, (*part.notes, *part.details))


def written(folder: Path, files: Iterable[Path]) -> RenderableType:
    """The names of the files that were written."""
    names = ", ".join(dict.fromkeys(path.name for path in files))
    return section("Written", f"{folder}: {names}")
