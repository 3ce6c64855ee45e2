"""Writing a file or folder beside its target, then renaming it, by one run at a time.

A run that is killed leaves the old file or folder, or none, and never a half. The next run that
writes the target removes the draft of the killed one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from blr_analysis.checks import path_of
from blr_analysis.errors import StorageError

_WRITTEN_NOW: set[tuple[Path, int]] = set()  # targets, each with the thread that writes it


@contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """A path for a new file or folder, which replaces ``target`` if the block ends without error.

    A file is replaced in one step. A folder is replaced in two: the old one is moved away, then the
    new one moved in. A run that is killed between the two leaves no folder, and a run that fails
    there puts the old one back. Missing parents of ``target`` are made.

    Raises:
        StorageError: another run writes the target, or it cannot be written; the old one stays.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with drafted(Path(folder, "new", "notes.txt")) as draft:
    ...         _ = draft.write_text("all of it")
    ...     print(*(str(p.relative_to(folder)) for p in Path(folder).rglob("*")))
    new new/notes.txt
    """
    target = Path(os.path.realpath(target))
    with (
        held(target) as beside,
        _worded(target),
        tempfile.TemporaryDirectory(dir=beside, ignore_cleanup_errors=True) as folder,
    ):
        draft = Path(folder, "new")
        old = Path(folder, "old")
        yield draft
        _flush(draft)
        if draft.is_dir() and target.exists():
            os.rename(target, old)
        elif not draft.is_dir():
            check_file(target)
        try:
            os.replace(draft, target)
        except BaseException:
            if old.exists():
                os.rename(old, target)
            raise


def _flush(draft: Path) -> None:
    """Make the system write a file, or all files of a folder, to the disk."""
    for path in (draft, *draft.rglob("*")):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())


@contextmanager
def held(target: Path) -> Iterator[Path]:
    """Inside, no other run can write ``target``; for long work before the writing.

    Yields:
        A hidden folder beside ``target``, which is removed at the end.

    Raises:
        StorageError: another run writes it, or the place cannot be written.
    """
    target = Path(os.path.realpath(target))
    beside = target.parent / f".{target.name[:100]}.unfinished"
    key = (target, threading.get_ident())
    if key in _WRITTEN_NOW:
        yield beside
        return
    with ExitStack() as at_the_end:
        with _worded(target):
            beside.mkdir(parents=True, exist_ok=True)
            if not _locked(beside, at_the_end):
                raise StorageError(
                    f"another run is writing {str(target)!r} just now: wait, or name another place."
                )
            at_the_end.callback(shutil.rmtree, beside, ignore_errors=True)
            for leftover in beside.iterdir():  # of a run that was killed
                shutil.rmtree(leftover)
        _WRITTEN_NOW.add(key)
        at_the_end.callback(_WRITTEN_NOW.remove, key)
        yield beside


@contextmanager
def folder_for(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder for several files, made if need be; no other run writes it until the block ends.

    A folder that cannot be written is refused before the block begins. A folder that was made here
    is removed again if it stays empty.

    Raises:
        StorageError: it cannot be made or written, is a file, or another run writes to it.
    """
    folder = Path(path_of(path)).expanduser()
    existed = folder.exists()
    try:
        with held(folder / "files"):
            yield folder
    finally:
        if not existed:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def check_free(out: Path) -> None:
    """Raise :class:`StorageError` unless ``out`` is new, or an empty folder."""
    with _worded(out):
        if not out.is_dir():
            if os.path.lexists(out):
                raise StorageError(f"{str(out)!r} is there already: name a new one.")
            return
        names = sorted(path.name for path in out.iterdir())
    if names:
        raise StorageError(f"{str(out)!r} is not empty (it holds {names[0]!r}): name a new one.")


def check_file(target: Path) -> None:
    """Raise :class:`StorageError` where a folder stands in the place of a file."""
    if target.is_dir():
        raise StorageError(f"{str(target)!r} is a folder: name a file.")


def check_room(out: Path, needed: int) -> None:
    """Raise :class:`StorageError` unless the disk of ``out`` has ``needed`` bytes free."""
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"the disk of {str(out)!r} has {free:,} of {needed:,} bytes free: make room."
        )


def _locked(folder: Path, at_the_end: ExitStack) -> bool:
    """Lock the folder for this run, and say whether no other run has it.

    The lock is released when ``at_the_end`` closes. Systems and disks without locks say True.
    """
    try:
        import fcntl

        lock = os.open(folder, os.O_RDONLY)
        at_the_end.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The run that had the lock before removed its folder: another one may be there now.
        return os.path.samestat(os.fstat(lock), os.stat(folder))
    except (ImportError, OSError) as error:
        return not isinstance(error, BlockingIOError)


@contextmanager
def _worded(target: Path) -> Iterator[None]:
    """Inside, an error of the system becomes a :class:`StorageError` about the target."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write {str(target)!r}: {error}. Name a place with room; what was there stays."
        ) from error
