"""The sections of an audit for a terminal of any width, or a text file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group, RenderableType

from blr_analysis.audit.sections import Section
from blr_analysis.terminal import grid, note, section

MOST_ROWS = 20


def in_text(*sections: Section, most: int = MOST_ROWS) -> RenderableType:
    """One below the other; of long tables the first rows."""
    return Group(*(section(s.title, s.lead, *_parts(s, most)) for s in sections))


def _parts(part: Section, most: int) -> Iterable[RenderableType]:
    if part.columns:
        yield grid({name: list(values)[:most] for name, values in part.columns.items()})
        if len(part.rows) > most:
            yield note(f"The {most} largest of {len(part.rows)}; the table has them all.")
    yield from map(note, part.notes)


def written(folder: Path, files: Iterable[Path]) -> RenderableType:
    """What was written, by name."""
    names = ", ".join(dict.fromkeys(path.name for path in files))
    return section("Written", f"{folder}: {names}")
