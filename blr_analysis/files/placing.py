"""Written beside its target, then renamed into place: a killed run leaves no half of anything."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A fresh folder next to ``target``, on the same file system, that is gone afterwards.

    Write a draft into it and hand that to :func:`place`. Missing parents of ``target`` are made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name[:100]}.{uuid.uuid4().hex}.tmp"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place(draft: Path, target: Path) -> None:
    """Put ``draft``, a file or a folder made in :func:`beside`, where ``target`` is.

    A file is replaced in one step. A folder takes two (the old one away, the new one in): a run
    killed between them leaves none, and one that fails there puts the old one back.
    """
    for file in (p for p in (draft, *draft.rglob("*")) if p.is_file()):
        flush(file)
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


def flush(path: Path) -> None:
    """Let the disk have what was written to a file."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
