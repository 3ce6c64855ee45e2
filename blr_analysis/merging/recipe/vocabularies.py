"""Do two models mean the same token by the same row of their embeddings?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blr_analysis.errors import StorageError

FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
Vocabulary = Mapping[str, int]


def renumbered(one: Path, other: Path) -> dict[str, tuple[int, int]]:
    """The tokens that both models know, under other numbers; empty where a vocabulary is unknown.

    A token that only one of them has is no contradiction: a fine-tune may use a row that the
    base keeps in reserve.

    Raises:
        StorageError: a file of a tokenizer cannot be read.
    """
    mine, theirs = _file(one), _file(other)
    if mine is None or theirs is None:
        return {}
    if mine.name == theirs.name and _same_bytes(mine, theirs):
        return {}
    known, found = vocabulary(one) or {}, vocabulary(other) or {}
    return {t: (known[t], n) for t, n in found.items() if t in known and known[t] != n}


def vocabulary(model: Path) -> Vocabulary | None:
    """The number of every token of a model's folder; None where no readable file has them.

    Raises:
        StorageError: the file that should have them cannot be read.
    """
    file = _file(model)
    if file is None:
        return None
    try:
        text = file.read_text("utf-8")
        if file.suffix == ".txt":
            return {token: n for n, token in enumerate(text.splitlines())}
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as fault:
        raise StorageError(f"the tokenizer {str(file)!r} cannot be read: {fault}") from fault
    if file.name == "vocab.json":
        return _numbers(found)
    inside = found.get("model") if isinstance(found, dict) else None
    listed = inside.get("vocab") if isinstance(inside, dict) else None
    if isinstance(listed, list):  # of tokens and their scores
        tokens = [item[0] if isinstance(item, list) and item else None for item in listed]
        listed = {token: n for n, token in enumerate(tokens)}
    added = found.get("added_tokens") if isinstance(found, dict) else None
    more = [a for a in added if isinstance(a, dict)] if isinstance(added, list) else []
    return {**_numbers(listed), **_numbers({a.get("content"): a.get("id") for a in more})}


def _numbers(found: Any) -> dict[str, int]:
    if not isinstance(found, dict):
        return {}
    return {t: n for t, n in found.items() if isinstance(t, str) and isinstance(n, int)}


def _file(model: Path) -> Path | None:
    return next((model / name for name in FILES if (model / name).is_file()), None)


def _same_bytes(one: Path, other: Path) -> bool:
    try:
        if one.stat().st_size != other.stat().st_size:
            return False
        return one.read_bytes() == other.read_bytes()
    except OSError as fault:
        raise StorageError(f"a tokenizer cannot be read: {fault}") from fault
