"""Written beside its target, then renamed into place, by one run at a time.

A run that is killed leaves the old file or folder, or none, and never a half; what it left of its
draft is removed when the target is written next.
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

_HELD: set[tuple[Path, int]] = set()  # what each thread of this process writes just now


@contextmanager
def drafted(target: Path) -> Iterator[Path]:
    """A name to write a file or a folder to, which takes ``target``'s place if all goes well.

    A file is replaced in one step. A folder takes two (the old one away, the new one in): a run
    killed between them leaves none, and one that fails there puts the old one back. Missing
    parents of ``target`` are made.

    Raises:
        StorageError: another run writes it, or it cannot be written; what was there stays.

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
        draft, old = Path(folder, "new"), Path(folder, "old")
        yield draft
        for file in (p for p in (draft, *draft.rglob("*")) if p.is_file()):
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
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


@contextmanager
def held(target: Path) -> Iterator[Path]:
    """Until the block ends no other run writes ``target``: for work that is long before it writes.

    What comes back is a hidden folder beside ``target``, gone afterwards.

    Raises:
        StorageError: another run writes it, or the place cannot be written.
    """
    target = Path(os.path.realpath(target))
    beside = target.parent / f".{target.name[:100]}.unfinished"
    key = (target, threading.get_ident())
    if key in _HELD:
        yield beside
        return
    with ExitStack() as held:
        with _worded(target):
            beside.mkdir(parents=True, exist_ok=True)
            if not _locked(beside, held):
                raise StorageError(
                    f"another run is writing {str(target)!r} just now: wait, or name another place."
                )
            held.callback(shutil.rmtree, beside, ignore_errors=True)
            for left in beside.iterdir():  # by a run that was killed
                shutil.rmtree(left)
        _HELD.add(key)
        held.callback(_HELD.remove, key)
        yield beside


@contextmanager
def folder_for(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder for several files, made if need be, and ours until the block ends.

    It is known to be writable before anything long begins. A folder made here, into which nothing
    was written, is removed again.

    Raises:
        StorageError: it cannot be made or written, is a file, or another run writes to it.
    """
    folder = Path(path_of(path)).expanduser()
    there = folder.exists()
    try:
        with held(folder / "files"):
            yield folder
    finally:
        with suppress(OSError):
            if not there:
                folder.rmdir()


def check_free(out: Path) -> None:
    """Raise :class:`StorageError` unless ``out`` is new, or an empty folder."""
    with _worded(out):
        inside = sorted(p.name for p in out.iterdir()) if out.is_dir() else []
        if inside or (os.path.lexists(out) and not out.is_dir()):
            what = f"is not empty (it holds {inside[0]!r})" if inside else "is there already"
            raise StorageError(f"{str(out)!r} {what}: name a new one.")


def check_file(target: Path) -> None:
    """Raise :class:`StorageError` where a folder stands in the place of a file."""
    if target.is_dir():
        raise StorageError(f"{str(target)!r} is a folder: name a file.")


def check_room(out: Path, needed: int) -> None:
    """Raise :class:`StorageError` unless the disk of ``out`` has ``needed`` bytes free."""
    place = next(p for p in out.absolute().parents if p.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise StorageError(
            f"the disk of {str(out)!r} has {free:,} of {needed:,} bytes free: make room."
        )


def _locked(folder: Path, held: ExitStack) -> bool:
    """Whether no other run has the folder, until ``held`` ends; as far as system and disk know."""
    try:
        import fcntl

        lock = os.open(folder, os.O_RDONLY)
        held.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), os.stat(folder))  # its last holder removes it
    except (ImportError, OSError) as error:
        return not isinstance(error, BlockingIOError)


@contextmanager
def _worded(target: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write {str(target)!r}: {error}. Name a place with room; what was there stays."
        ) from error
