"""The folder that an audit writes: checked before the work, every file whole or absent."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from blr_analysis.audit.findings import Findings
from blr_analysis.audit.pictures import pictures
from blr_analysis.errors import StorageError
from blr_analysis.tables import write_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def folder_for(path: str | Path) -> Iterator[Path]:
    """The folder, made if need be and known to be writable, before anything long begins.

    Where the body raises and nothing was written, a folder made here is removed again.

    Raises:
        StorageError: it cannot be made or written, or is a file.
    """
    folder = Path(path).expanduser()
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as fault:
        _remove_empty(made)
        reason = "it is a file" if folder.is_file() else fault.strerror or str(fault)
        raise StorageError(
            f"the output folder {str(folder)!r} cannot be written: {reason}; name another one"
        ) from fault
    try:
        yield folder
    except BaseException:
        _remove_empty(made)
        raise


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def write(
    findings: Findings, folder: Path, *, say: Callable[[str], None] | None = None
) -> list[Path]:
    """Write tables, posterior and pictures; the paths come back in the order of reading.

    Raises:
        StorageError: a file cannot be written; what was there before stays.
    """
    if say is not None:
        say(f"writing tables and pictures to {folder}")
    files = [*write_table(findings.table, folder, "table")]
    files += write_table(findings.loo.table, folder, "leave_one_out")
    if findings.removals is not None:
        files += write_table(findings.removals, folder, "removals")
    posterior = folder / "posterior.safetensors"
    findings.posterior.save(posterior)
    files.append(posterior)
    files += [write_picture(figure, folder, stem) for stem, figure in pictures(findings)]
    return files


def write_picture(figure: Figure, folder: Path, stem: str) -> Path:
    """Write ``folder/stem.png`` beside its place and move it there.

    Raises:
        StorageError: it cannot be written.
    """
    return _placed(folder, f"{stem}.png", lambda path: figure.savefig(path, dpi=150))


def write_text(text: str, folder: Path, name: str) -> Path:
    """Write a text file beside its place and move it there.

    Raises:
        StorageError: it cannot be written.
    """
    return _placed(folder, name, lambda path: Path(path).write_text(text, encoding="utf-8"))


def _placed(folder: Path, name: str, make: Callable[[str], object]) -> Path:
    target = folder / name
    try:
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as beside:
            draft = os.path.join(beside, name)
            make(draft)
            os.replace(draft, target)
    except OSError as fault:
        raise StorageError(
            f"{str(target)!r} cannot be written: {fault.strerror or fault}; free some space or "
            "name another folder"
        ) from fault
    return target
