"""The sections of an audit for a terminal of any width, or a text file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group, RenderableType

from blr_analysis.audit.sections import Section
from blr_analysis.terminal import grid, note, section

MAX_ROWS = 20  # of each section's table


def in_text(*sections: Section, max_rows: int = MAX_ROWS) -> RenderableType:
    """The sections, one below the other, with the first ``max_rows`` rows of their tables."""
    parts = [section(part.title, part.lead, *_body(part, max_rows)) for part in sections]
    return Group(*parts)


def _body(part: Section, max_rows: int) -> Iterable[RenderableType]:
    """The table of a section and its notes."""
    if part.columns:
        yield grid({name: list(values)[:max_rows] for name, values in part.columns.items()})
        if len(part.rows) > max_rows:
            yield note(f"The {max_rows} largest of {len(part.rows)}; the table has them all.")
    for sentence in (*part.notes, *part.details):
        yield note(sentence)


def list_of_files(folder: Path, files: Iterable[Path]) -> RenderableType:
    """The section "Written": a folder, and the names of the files that were written there."""
    names = ", ".join(dict.fromkeys(path.name for path in files))
    return section("Written", f"{folder}: {names}")
