"""Rows of texts and labels: .jsonl, .json, .csv, .tsv, .parquet, .txt, datasets, nothing guessed.

Columns that are not named are looked for under the names that datasets commonly give them; where
several or none are there, the error says which columns the data have.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from blr_analysis.checks import path_of, some
from blr_analysis.errors import DataError, StorageError

LINE = "line of the file"  # what the index of a table holds whose rows are lines
ENCODING = "utf-8-sig"  # with or without the mark that spreadsheets put first
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
TEXT_NAMES = (*((n,) for n in ("text", "sentence", "content", "review", "document")), *PAIRS)
LABEL_NAMES = ("label", "labels", "target", "class")


def read_rows(data: Any) -> tuple[pd.DataFrame, str]:
    """The rows of a file, of a folder that ``datasets`` saved, or of a ``datasets.Dataset``, and
    what to call them.

    ``.jsonl``: an object per line. ``.json``: a list of them. ``.csv``: a header, commas, double
    quotes around fields. ``.tsv``: a header, tabs, no quotes. ``.txt``: a text per line, without
    labels; blank lines are passed over. All in UTF-8, and what is read of them is text.

    Raises:
        DataError: no rows can be read from it, or several splits at once.
        StorageError: it is not there.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write('sentence,label\\n"a, b",pos\\nc,neg\\n')
        ...     file.flush()
        ...     read_rows(file.name)[0].to_dict("list")
        {'sentence': ['a, b', 'c'], 'label': ['pos', 'neg']}
    """
    if hasattr(data, "to_pandas"):
        table, where = data.to_pandas(), "the dataset"
    else:
        place = Path(path_of(data)).expanduser()
        where = repr(str(place))
        table = _saved(place) if place.is_dir() else _file(place)
    if not len(table):
        raise DataError(f"{where} holds no examples")
    return table, where


def places_of(table: pd.DataFrame, where: str) -> list[str]:
    """Where each row stands: its line, as an editor counts them; of other files the row, from 1
    and without a header.

    >>> places_of(pd.DataFrame({"text": ["a"]}), "the dataset")
    ['row 1 of the dataset']
    """
    if table.index.name == LINE:
        return [f"line {number} of {where}" for number in table.index]
    return [f"row {i + 1} of {where}" for i in table.index]


def text_columns(
    table: pd.DataFrame, where: str, text: str | Sequence[str] | None
) -> tuple[str, ...]:
    """The column of the texts, or the two of pairs: those named, or those of a usual name."""
    if text is not None:
        named = (text,) if isinstance(text, str) else tuple(text)
        if not 1 <= len(named) <= 2:
            raise DataError(f"a text has one column, or two for a pair, got {list(named)}")
        return _held(where, table, named)
    matches = [names for names in TEXT_NAMES if set(names) <= set(table)]
    # A pair that contains a lone name (question + sentence) is what is meant.
    matches = [m for m in matches if not any(set(m) < set(other) for other in matches)]
    return _only(matches, where, table, "text", "text= (--text), two for a pair")


def label_column(table: pd.DataFrame, where: str, label: str | None) -> str:
    """The column of the labels: that named, or that of a usual name."""
    if label is not None:
        return _held(where, table, (label,))[0]
    matches = [name for name in LABEL_NAMES if name in table]
    return _only(matches, where, table, "label", "label= (--label)")


def class_indices(
    labels: Sequence[Any], places: Sequence[str], label2id: Mapping[str, int], classes: int
) -> list[int]:
    """Each label as a class of the model: a name that it knows, or a number 0 … classes − 1.

    Raises:
        DataError: a label that is neither; the row and the names that the model knows are said.
    """
    indices = [_class_index(label, label2id) for label in labels]
    for label, place, index in zip(labels, places, indices, strict=True):
        if not 0 <= index < classes:
            raise DataError(
                f"{place} has the label {label!r}: expected 0 … {classes - 1} or one of "
                f"{some(list(label2id))}"
            )
    return indices


def _class_index(label: Any, label2id: Mapping[str, int]) -> int:
    """The class; −1 for none."""
    if isinstance(label, str):
        text = label.strip()
        return label2id.get(label, int(text) if text.isascii() and text.isdigit() else -1)
    number = isinstance(label, int | float) and not isinstance(label, bool)
    return int(label) if number and float(label).is_integer() else -1


def _saved(place: Path) -> pd.DataFrame:
    from datasets import DatasetDict, load_from_disk

    try:
        saved: Any = load_from_disk(str(place))
    except (OSError, ValueError) as error:
        raise DataError(f"{str(place)!r} is no folder of Dataset.save_to_disk: {error}") from error
    if isinstance(saved, DatasetDict):
        first = place / str(next(iter(saved)))
        raise DataError(f"{str(place)!r} holds several splits: name one, {str(first)!r}")
    return saved.to_pandas()


def _separated(path: Path, **dialect: Any) -> pd.DataFrame:
    """A table with a header, every field as text, every row of its length."""
    with open(path, encoding=ENCODING, newline="") as file:
        rows = [row for row in csv.reader(file, strict=True, **dialect) if row]
    header, rows = (rows[0], rows[1:]) if rows else ([], [])
    if len(set(header)) < len(header):
        raise ValueError(f"its header {header} names a column twice")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} fields, its header {len(header)}")
    return pd.DataFrame(rows, columns=header)


def _jsonl(path: Path) -> pd.DataFrame:
    rows = {}
    for number, line in _numbered(path).items():
        try:
            rows[number] = dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} is no JSON object: {error}") from error
    return pd.DataFrame(list(rows.values()), index=pd.Index(list(rows), name=LINE))


def _texts(path: Path) -> pd.DataFrame:
    rows = _numbered(path)
    return pd.DataFrame({"text": list(rows.values())}, index=pd.Index(list(rows), name=LINE))


def _numbered(path: Path) -> dict[int, str]:
    """Lines that are not blank, counted from 1 with those that are."""
    with open(path, encoding=ENCODING) as file:
        return {k: line.rstrip("\n") for k, line in enumerate(file, 1) if line.strip()}


READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".jsonl": _jsonl,
    ".json": lambda path: pd.DataFrame(json.loads(path.read_text(encoding=ENCODING))),
    ".csv": partial(_separated, delimiter=","),
    ".tsv": partial(_separated, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".parquet": lambda path: pd.read_parquet(path).reset_index(drop=True),
    ".txt": _texts,
}


def _file(path: Path) -> pd.DataFrame:
    """The file as it is read; whatever goes wrong names the file."""
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise DataError(f"{str(path)!r} ends in none of {', '.join(READERS)}: convert it")
    try:
        return read(path)
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} is not in UTF-8: convert it, iconv -t UTF-8") from error
    except (ValueError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        said = " ".join(str(error).split())[:200]
        raise DataError(f"{str(path)!r} is no {path.suffix} that can be read: {said}") from error


def _only(matches: Sequence[Any], where: str, table: pd.DataFrame, what: str, how: str) -> Any:
    if len(matches) != 1:
        count = "several columns that could be" if matches else "no column of a usual name for"
        raise DataError(
            f"{where} has {count} the {what}; its columns are {some(list(table), 12)}: name "
            f"it with {how}"
        )
    return matches[0]


def _held(where: str, table: pd.DataFrame, asked: tuple[str, ...]) -> tuple[str, ...]:
    missing = [name for name in asked if name not in table]
    if missing:
        raise DataError(
            f"{where} has no column {some(missing)}; its columns are {some(list(table), 12)}"
        )
    return asked
