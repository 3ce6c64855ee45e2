"""The files of an audit: tables, posterior, pictures, texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from blr_analysis.audit.findings import Findings
from blr_analysis.audit.pictures import pictures
from blr_analysis.files import drafted
from blr_analysis.tables import write_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# What only some audits find, by its files.
SOMETIMES = (
    *("removals.csv", "removals.parquet", "removals.png"),
    *("leave_one_out.png", "suspicious.png"),
)


def write(
    findings: Findings, folder: Path, *, say: Callable[[str], None] | None = None
) -> list[Path]:
    """Write tables, posterior and pictures; the paths come back in the order of reading. What an
    earlier audit wrote there, and this one did not find, is removed.

    Raises:
        StorageError: a file cannot be written; what was there before stays.
    """
    if say is not None:
        say(f"writing tables and pictures to {folder}")
    earlier = (folder / "table.parquet").is_file()
    files = [*write_table(findings.table, folder, "table")]
    files += write_table(findings.loo.table, folder, "leave_one_out")
    if findings.removals is not None:
        files += write_table(findings.removals, folder, "removals")
    posterior = folder / "posterior.safetensors"
    findings.posterior.save(posterior)
    files.append(posterior)
    files += [write_picture(figure, folder, stem) for stem, figure in pictures(findings)]
    if earlier:
        for name in set(SOMETIMES) - {file.name for file in files}:
            (folder / name).unlink(missing_ok=True)
    return files


def write_picture(figure: Figure, folder: Path, stem: str) -> Path:
    """Write ``folder/stem.png``, whole or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    target = folder / f"{stem}.png"
    with drafted(target) as draft:
        figure.savefig(draft, dpi=150, format="png")
    return target


def write_text(text: str, folder: Path, name: str) -> Path:
    """Write a text file, whole or not at all.

    Raises:
        StorageError: it cannot be written.
    """
    target = folder / name
    with drafted(target) as draft:
        draft.write_text(text, encoding="utf-8")
    return target
