"""Which folder a recipe means, and what its tokenizer says.

Paths start at the recipe's own folder. Nothing is fetched here: a name such as ``org/model`` is
looked for in the Hugging Face cache on this machine, whose snapshots are folders of symbolic
links to the files themselves; they are followed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from blr_analysis.checks import install
from blr_analysis.errors import InputError, StorageError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")


def locate(text: str, folder: Path) -> Path:
    """The file or folder that a recipe in ``folder`` means by ``text``.

    Raises:
        InputError: there is none on this machine.
    """
    place = existing(text, folder)
    name, _, revision = text.partition("@")
    if place is None and HUB_NAME.fullmatch(name):
        place = _snapshot(name, revision or None)
        if place is None:
            more = f" --revision {revision}" if revision else ""
            raise InputError(
                f"{text!r} is no folder and not in the Hugging Face cache: run `huggingface-cli "
                f"download {name}{more}`"
            )
    if place is None:
        raise InputError(f"there is no {text!r} (paths start at the folder of the recipe)")
    return place


def existing(text: str, folder: Path) -> Path | None:
    """The path, from a folder; None where nothing is there."""
    try:
        place = folder / Path(text).expanduser()
        return place if place.exists() else None
    except RuntimeError as fault:
        raise InputError(f"{text!r}: no user of this name has a home folder here") from fault
    except (OSError, ValueError):  # a name longer than the file system takes
        return None


def hub_name(place: Path) -> str | None:
    """The name on the Hugging Face hub of a folder in its cache; None for any other.

    >>> hub_name(Path("/cache/hub/models--org--model/snapshots/0a1b"))
    'org/model'
    >>> hub_name(Path("/home/me/model")) is None
    True
    """
    match place.parts:
        case [*_, kept, "snapshots", _] if kept.startswith("models--"):
            return kept.removeprefix("models--").replace("--", "/")
    return None


def _snapshot(name: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError as fault:
        raise InputError(
            f"{name!r} is no folder; for the Hugging Face cache, {install('hf')}"
        ) from fault
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def renumbered(one: Path, other: Path) -> dict[str, tuple[int, int]]:
    """The tokens that both models know, under other numbers; empty where a vocabulary is unknown.

    A token that only one of them has is no contradiction: a fine-tune may use a row that the
    base keeps in reserve.

    Raises:
        StorageError: a file of a tokenizer cannot be read.
    """
    texts = _vocabulary_file(one), _vocabulary_file(other)
    if None in texts or texts[0] == texts[1]:
        return {}
    mine, theirs = vocabulary(one), vocabulary(other)
    return {t: (mine[t], n) for t, n in theirs.items() if mine.get(t, n) != n}


def vocabulary(model: Path) -> dict[str, int]:
    """The number of every token of a model's folder; empty where no file has them.

    Read from the file itself: no tokenizer is built, so that nothing but JSON is needed.

    Raises:
        StorageError: the file that should have them cannot be read.
    """
    file = _vocabulary_file(model)
    if file is None:
        return {}
    name, raw = file
    try:
        if name == "vocab.txt":
            return {token: n for n, token in enumerate(raw.decode().splitlines())}
        document = json.loads(raw)
    except (ValueError, RecursionError) as fault:
        raise StorageError(
            f"the tokenizer {str(model / name)!r} cannot be read: {fault}"
        ) from fault
    if name == "vocab.json":
        return _numbers(document)
    inside = _mapping(_mapping(document).get("model")).get("vocab")
    if isinstance(inside, list):  # of tokens and their scores
        inside = {item[0]: n for n, item in enumerate(inside) if isinstance(item, list) and item}
    added = _mapping(document).get("added_tokens")
    more = [_mapping(item) for item in added] if isinstance(added, list) else []
    return _numbers(inside) | _numbers({item.get("content"): item.get("id") for item in more})


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: Any) -> dict[str, int]:
    pairs = _mapping(value).items()
    return {t: n for t, n in pairs if isinstance(t, str) and isinstance(n, int)}


def _vocabulary_file(model: Path) -> tuple[str, bytes] | None:
    """The name and the bytes of the file that numbers the tokens."""
    file = next((model / name for name in VOCABULARIES if (model / name).is_file()), None)
    try:
        return None if file is None else (file.name, file.read_bytes())
    except OSError as fault:
        raise StorageError(f"the tokenizer {str(file)!r} cannot be read: {fault}") from fault
