"""The files that a merged model takes over, and the folder that appears only when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from blr_analysis.errors import StorageError
from blr_analysis.files.placing import flush

# What tells a model how to run, or its user what it is allowed to do.
CONFIG = (
    "config.json",
    "generation_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
PARTIAL = ".merging"


def copy_files(
    reference: Path, tokenizer: Path, target: Path, dtype: torch.dtype | None
) -> dict[str, str]:
    """Copy configuration, tokenizer and chat template; the fate of every file comes back.

    Weights, indices of weights, cards, optimizer states and whatever else a folder holds stay
    where they are. ``dtype``, where given, is written into the copied configuration.

    Raises:
        StorageError: a file cannot be copied.
    """
    fates: dict[str, str] = {}
    try:
        for folder, patterns in ((reference, CONFIG), (tokenizer, TOKENIZER)):
            if not folder.is_dir():
                continue
            for path in sorted(folder.iterdir()):
                if any(fnmatch(path.name, p) for p in patterns):
                    _copy(path, target / path.name)
                    fates[path.name] = f"copied from {str(folder)!r}"
                elif folder == reference and not any(fnmatch(path.name, p) for p in TOKENIZER):
                    fates.setdefault(path.name, "left where it is")
        config = target / "config.json"
        if dtype is not None and config.is_file():
            _set_dtype(config, dtype)
    except OSError as error:
        raise StorageError(f"cannot copy the files beside the weights: {error}") from error
    return fates


@contextmanager
def draft_of(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` to write into, renamed to ``out`` if all went well, else removed.

    What a killed merge left there is removed first; another merge that is still at work is not
    disturbed.

    Raises:
        StorageError: ``out`` holds something already, another merge is writing it, or the place
            cannot be written.
    """
    check_free(out)
    draft = out.parent / f".{out.name[:100]}{PARTIAL}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _claim(draft, out)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write {str(out)!r}: {error.strerror or error}. Name another place."
        ) from error
    try:
        yield draft
        try:
            for path in sorted(draft.rglob("*")):
                if path.is_file():
                    flush(path)
            if out.exists():
                out.rmdir()
            os.rename(draft, out)
        except OSError as error:
            raise StorageError(f"cannot finish {str(out)!r}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def check_free(out: Path) -> None:
    """Raise :class:`StorageError` unless ``out`` is new, or an empty folder."""
    try:
        there = out.is_dir()
    except OSError as error:
        raise StorageError(f"{str(out)!r:.80} cannot be written: {error.strerror}.") from error
    if there:
        held = sorted(p.name for p in out.iterdir())
        if held:
            raise StorageError(
                f"the folder {str(out)!r} is not empty (it holds {held[0]!r}): name a new one, and "
                "nothing that is there is lost."
            )
    elif out.exists() or out.is_symlink():
        raise StorageError(f"{str(out)!r} is there already and is no folder: name a new one.")


def _claim(draft: Path, out: Path) -> int | None:
    """Make the draft folder and hold it; the descriptor comes back where the system has locks."""
    draft.mkdir(exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        shutil.rmtree(draft)
        draft.mkdir()
        return None
    lock = os.open(draft, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StorageError(f"another merge is writing {str(out)!r} just now.") from error
    for path in draft.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return lock


def _copy(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copyfile(path, target)  # follows links, as a hub's cache is made of them


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    document: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in document else "dtype"
    document[key] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
