"""Every file below a path read whole and compared with its checksum.

What carries checksums: posteriors and merge precisions (a file, or a folder with its record),
indexes, the checkpoints of :class:`blr_analysis.Checkpoints`, the record of a run, and merges by
recipe. Files that other programs wrote are listed and nothing is said of them, but that JSON can be
parsed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blr_analysis.checks import path_of, some
from blr_analysis.errors import StorageError
from blr_analysis.files.folder import Folder
from blr_analysis.files.headers import CHECKSUM, FILES, RECORD, read_json
from blr_analysis.files.storage import check_file_beside
from blr_analysis.progress import track

DRAFT_ENDING = ".unfinished"  # of names of files that a run writes, or left when it was killed


@dataclass(frozen=True)
class Verified:
    """What was read.

    Attributes:
        whole: files that are what was saved, to the bit.
        nbytes: their size.
        unknown: files without a checksum, which other programs wrote.
    """

    whole: list[Path]
    nbytes: int
    unknown: list[Path]


def verify(path: str | os.PathLike[str], *, progress: bool | None = None) -> Verified:
    """Read everything at ``path``, a file or a folder and all below it.

    Args:
        path: what this package wrote.
        progress: a bar; None: on a terminal when it takes long.

    Raises:
        StorageError: nothing there, nothing with a checksum, a file or the record of a folder that
            is missing, or damaged files, which are named.

    Example:
        >>> import tempfile, torch
        >>> from blr_analysis import Posterior
        >>> q = Posterior({"w": torch.zeros(2)}, {"w": torch.ones(2)}, prior_precision=1.0,
        ...               n_data=10)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     q.save(f"{folder}/q")
        ...     found = verify(folder)
        >>> len(found.whole), len(found.unknown)
        (3, 0)
    """
    place = Path(path_of(path)).expanduser()
    files = files_at(place)
    intact: set[Path] = set()
    damaged: dict[Path, StorageError] = {}
    for file in track(files, label="verify", show=progress):
        check = CHECKS.get(file.suffix, _check_nothing)
        try:
            intact |= check(file)
        except StorageError as error:
            damaged[file] = error
    if damaged:
        first = next(iter(damaged.values()))
        if len(damaged) == 1:
            raise first
        names = some([str(file.relative_to(place)) for file in damaged])
        raise StorageError(f"{len(damaged)} of {len(files)} files are damaged: {names}. {first}")
    if not intact:
        raise StorageError(f"nothing at {str(path)!r} has a checksum: other programs wrote it.")
    nbytes = sum(file.stat().st_size for file in intact)
    unknown = set(files) - intact
    return Verified(sorted(intact), nbytes, sorted(unknown))


def files_at(path: Path) -> list[Path]:
    """A file, or all below a folder but drafts.

    Raises:
        StorageError: there are none.
    """
    place = path.expanduser()
    files = []
    if place.is_file():
        files.append(place)
    for file in sorted(place.rglob("*")):
        is_draft = any(part.endswith(DRAFT_ENDING) for part in file.relative_to(place).parts)
        if file.is_file() and not is_draft:
            files.append(file)
    if not files:
        raise StorageError(f"nothing is stored at {str(path)!r}.")
    return files


def _check_tensors(file: Path) -> set[Path]:
    """A safetensors file: its header, then each tensor."""
    source = Folder.open(file)
    for name in source.specs:
        source.tensor(name)
    record = source.metadata.get(RECORD)
    if record is not None:
        _check_listed(file, record)
    has_checksums = bool(source.headers[file].checksum)
    return {file} if has_checksums else set()


def _check_listed(file: Path, record: str) -> None:
    """Raise :class:`StorageError` where the record beside a file is gone, or does not list it."""
    place = file.parent / record
    if not place.is_file():
        raise StorageError(
            f"{str(file.parent)!r} lacks {record!r}, the record of its files: copy the whole folder"
            " again."
        )
    if file.name not in read_json(place).get(FILES, ()):
        raise StorageError(f"{str(place)!r} does not list {file.name!r}, which is beside it.")


def _check_record(file: Path) -> set[Path]:
    """A JSON file, and the files beside it whose checksums it holds."""
    record = read_json(file)
    if CHECKSUM not in record:
        return set()
    checksums = {file.parent / name: checksum for name, checksum in record[FILES].items()}
    for neighbour, checksum in checksums.items():
        check_file_beside(neighbour, checksum)
    return {file, *checksums}


def _check_nothing(file: Path) -> set[Path]:
    return set()


CHECKS: dict[str, Callable[[Path], set[Path]]] = {
    ".safetensors": _check_tensors,
    ".json": _check_record,
}
