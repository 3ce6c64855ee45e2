"""Data on disk are recognised by a mark, so that no text need be tokenized to compare them.

The mark is the sha256 of the files and of all that decides how their rows become ids.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blr_analysis.checks import package_version
from blr_analysis.data.examples import mark_of
from blr_analysis.huggingface.chats import Ids
from blr_analysis.huggingface.data import parts_of_address
from blr_analysis.huggingface.models import Pretrained

LIBRARIES = ("transformers", "tokenizers")  # whose versions may change the ids
Row = dict[str, Ids]


class RowsOnDemand(Sequence[Row]):
    """Rows of ids, each of which is made when it is first asked for.

    Args:
        count: the number of rows.
        encode: makes the row of an index.

    >>> rows = RowsOnDemand(2, lambda index: {"input_ids": [index]})
    >>> rows[-1]
    {'input_ids': [1]}
    """

    def __init__(self, count: int, encode: Callable[[int], Row]) -> None:
        self._numbers = range(count)
        self._encode = encode
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in self._numbers[index]]
        number = self._numbers[index]
        if number not in self._rows:
            self._rows[number] = self._encode(number)
        return self._rows[number]


def mark_of_texts(data: Any, loaded: Pretrained, **reading: Any) -> str | None:
    """The mark of data that are read as a language model's texts.

    Args:
        data: a file or folder with its split, or a ``datasets.Dataset``.
        reading: how the rows are read, as plain values.

    Returns:
        None where the data are not on this machine, or the tokenizer cannot be written down.
    """
    content = _mark_of_content(data)
    tokenizer = _description_of(loaded.tokenizer)
    if content is None or tokenizer is None:
        return None
    versions = [package_version(), *map(version, LIBRARIES)]
    facts = [content, tokenizer, loaded.closing, loaded.longest, loaded.inputs, versions, reading]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _mark_of_content(data: Any) -> list[str] | None:
    """The split, and the sha256 of each file with its name."""
    if hasattr(data, "to_pandas"):
        mark = mark_of(data)
        return None if mark is None else [mark]
    name, split = parts_of_address(data)
    place = Path(name).expanduser()
    if place.is_file():
        return [split, place.suffix, sha256_of(place)]
    if not place.is_dir():
        return None
    return [split, *(f"{file.relative_to(place)} {sha256_of(file)}" for file in _files_in(place))]


def _files_in(folder: Path) -> Iterator[Path]:
    return (Path(file) for file in sorted(folder.rglob("*")) if os.path.isfile(file))


def sha256_of(file: Path) -> str:
    """The sha256 of a file, as hexadecimal digits."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _description_of(tokenizer: Any) -> list[str] | None:
    """All that decides which ids a tokenizer makes; None where it is not written in one text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    settings = json.loads(backend.to_str())
    settings.pop("truncation", None)  # of the last call
    settings.pop("padding", None)
    template = getattr(tokenizer, "chat_template", None)
    return [json.dumps(settings), json.dumps(template), repr(tokenizer.special_tokens_map)]
