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
from contextlib import contextmanager, suppress
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
        draft = Path(folder, "new")
        yield draft
        _place(draft, target)


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
    with _worded(target):
        beside.mkdir(parents=True, exist_ok=True)
        lock = _lock(beside, target)
        for left in beside.iterdir():  # by a run that was killed
            shutil.rmtree(left)
    _HELD.add(key)
    try:
        yield beside
    finally:
        _HELD.remove(key)
        shutil.rmtree(beside, ignore_errors=True)
        _release(lock)


@contextmanager
def folder_for(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder for several files, made if need be, and ours until the block ends.

    It is known to be writable before anything long begins. Where the body raises and nothing was
    written, a folder made here is removed again.

    Raises:
        StorageError: it cannot be made or written, is a file, or another run writes to it.
    """
    folder = Path(path_of(path)).expanduser()
    there, lock = folder.exists(), None
    try:
        with _worded(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                lock = _lock(folder, folder)
        yield folder
    except BaseException:
        with suppress(OSError):
            if not there:
                folder.rmdir()  # where nothing was written
        raise
    finally:
        _release(lock)


def check_free(out: Path) -> None:
    """Raise :class:`StorageError` unless ``out`` is new, or an empty folder."""
    with _worded(out):
        first = min((p.name for p in out.iterdir()), default=None) if out.is_dir() else None
        if first is not None:
            raise StorageError(
                f"the folder {str(out)!r} is not empty (it holds {first!r}): name a new one."
            )
        if not out.is_dir() and (out.exists() or out.is_symlink()):
            raise StorageError(f"{str(out)!r} is there already and is no folder: name a new one.")


def check_file(target: Path) -> None:
    """Raise :class:`StorageError` where a folder stands in the place of a file."""
    if target.is_dir():
        raise StorageError(f"{str(target)!r} is a folder: name a file.")


def check_room(out: Path, needed: int) -> None:
    """Raise :class:`StorageError` unless the disk of ``out`` has ``needed`` bytes free."""
    place = next(p for p in out.absolute().parents if p.exists())
    if not os.access(place, os.W_OK):
        raise StorageError(f"{str(place)!r} is read-only: name another place.")
    free = shutil.disk_usage(place).free
    if free < needed:
        raise StorageError(
            f"the disk of {str(out)!r} has {free:,} of {needed:,} bytes free: make room."
        )


def _lock(folder: Path, target: Path) -> int | None:
    """The descriptor that holds a folder; None where the system or the disk knows no locks."""
    try:
        import fcntl
    except ImportError:
        return None
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = os.path.samestat(os.fstat(lock), os.stat(folder))  # its last holder removes it
    except BlockingIOError:
        ours = False
    except OSError:
        os.close(lock)
        return None
    if not ours:
        os.close(lock)
        raise StorageError(
            f"another run is writing {str(target)!r} just now: wait, or name another place."
        )
    return lock


def _release(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _place(draft: Path, target: Path) -> None:
    if not draft.is_dir():
        check_file(target)
    for file in (p for p in (draft, *draft.rglob("*")) if p.is_file()):
        with open(file, "rb+") as written:
            os.fsync(written.fileno())
    if not (draft.is_dir() and target.exists()):
        os.replace(draft, target)
        return
    old = draft.with_name("old")
    os.rename(target, old)
    try:
        os.rename(draft, target)
    except BaseException:
        os.rename(old, target)
        raise


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
