"""A check of every file below a path against its checksum.

These have checksums: posteriors and merge precisions (a file, or a folder with its record),
indexes, the checkpoints of :class:`blr_analysis.Checkpoints`, the record of a run, and merges by
recipe. Files of other programs are only listed, and JSON files among them must be valid.
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

DRAFT_ENDING = ".unfinished"  # of the names of drafts, of a running or a killed run


@dataclass(frozen=True)
class Verified:
    """The files that :func:`verify` read.

    Attributes:
        whole: files that are as they were saved, to the bit.
        nbytes: their size.
        unknown: files without a checksum; other programs wrote them.
    """

    whole: list[Path]
    nbytes: int
    unknown: list[Path]


def verify(path: str | os.PathLike[str], *, progress: bool | None = None) -> Verified:
    """Read every file at ``path``, a file or a folder and all below it.

    Args:
        path: files of this package.
        progress: a bar; None: on a terminal when it takes long.

    Raises:
        StorageError: no files, no file with a checksum, a missing file or record, or damaged files,
            which are named.

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
        raise StorageError(f"no file at {str(path)!r} has a checksum, so none can be compared.")
    nbytes = sum(file.stat().st_size for file in intact)
    unknown = set(files) - intact
    return Verified(sorted(intact), nbytes, sorted(unknown))


def files_at(path: Path) -> list[Path]:
    """A file, or all files below a folder, without drafts.

    Raises:
        StorageError: there are no files.
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
    """Check a safetensors file: its header, then each tensor.

    Returns:
        The file, if it has checksums.
    """
    source = Folder.open(file)
    for name in source.specs:
        source.tensor(name)
    record = source.metadata.get(RECORD)
    if record is not None:
        _check_listed(file, record)
    has_checksums = bool(source.headers[file].checksum)
    return {file} if has_checksums else set()


def _check_listed(file: Path, record: str) -> None:
    """Raise :class:`StorageError` if the record beside a file is missing, or does not list it."""
    place = file.parent / record
    if not place.is_file():
        raise StorageError(
            f"{str(file.parent)!r} lacks {record!r}, the record of its files: copy the whole folder"
            " again."
        )
    if file.name not in read_json(place).get(FILES, ()):
        raise StorageError(f"{str(place)!r} does not list {file.name!r}, which is beside it.")


def _check_record(file: Path) -> set[Path]:
    """Check a JSON file, and the files beside it whose checksums it holds.

    Returns:
        These files, if it has a checksum.
    """
    record = read_json(file)
    if CHECKSUM not in record:
        return set()
    checksums = {file.parent / name: checksum for name, checksum in record[FILES].items()}
    for neighbour, checksum in checksums.items():
        check_file_beside(neighbour, checksum)
    return {file, *checksums}


def _check_nothing(file: Path) -> set[Path]:
    """Files of other kinds have no checksums."""
    return set()


CHECKS: dict[str, Callable[[Path], set[Path]]] = {
    ".safetensors": _check_tensors,
    ".json": _check_record,
}
