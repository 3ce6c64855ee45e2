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
from blr_analysis.errors import DataError, StorageError, told_as

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
LABEL_NAMES = (("label",), ("labels",), ("target",), ("class",))


def read_rows(data: Any) -> tuple[pd.DataFrame, str]:
    """The rows of a file, of a folder that ``datasets`` saved, or of a ``datasets.Dataset``, and
    what to call them. The index says "line" or "row", from 1.

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
        where, kind = repr(str(place)), "folder" if place.is_dir() else place.suffix.lower()
        if kind not in READERS:
            raise DataError(f"{where} is none of {', '.join(READERS)}: convert it")
        if not place.exists():
            raise StorageError(f"there is no file {where}.")
        with told_as(DataError, f"{where} is no {kind} that can be read", "is it in UTF-8?"):
            table = READERS[kind](place)
    if not len(table):
        raise DataError(f"{where} holds no examples")
    if table.index.name != "line":
        table = table.set_axis(pd.RangeIndex(1, len(table) + 1, name="row"))
    return table, where


def places_of(table: pd.DataFrame, where: str) -> list[str]:
    """Where each row stands: its line, as an editor counts them; of other files the row, from 1
    and without a header."""
    return [f"{table.index.name} {number} of {where}" for number in table.index]


def text_columns(
    table: pd.DataFrame, where: str, text: str | Sequence[str] | None
) -> tuple[str, ...]:
    """The column of the texts, or the two of pairs: those named, or those of a usual name."""
    named = (text,) if isinstance(text, str) else text
    if named is not None and not 1 <= len(named) <= 2:
        raise DataError(f"a text has one column, or two for a pair, got {list(named)}")
    return _chosen(table, where, named, TEXT_NAMES, "text")


def label_column(table: pd.DataFrame, where: str, label: str | None) -> str:
    """The column of the labels: that named, or that of a usual name."""
    return _chosen(table, where, None if label is None else [label], LABEL_NAMES, "label")[0]


def _chosen(
    table: pd.DataFrame,
    where: str,
    named: Sequence[str] | None,
    usual: Sequence[tuple[str, ...]],
    what: str,
) -> tuple[str, ...]:
    tried = usual if named is None else [tuple(named)]
    fits = [names for names in tried if set(names) <= set(table)]
    # A pair that contains a lone name (question + sentence) is what is meant.
    fits = [names for names in fits if not any(set(names) < set(other) for other in fits)]
    if len(fits) != 1:
        unknown = "a usual name" if named is None else f"the name {some(named)}"
        said = "several columns that could be" if fits else f"no column of {unknown} for"
        held = some(list(table), 12)
        raise DataError(f"{where} has {said} the {what}; of {held} name it: {what}= (--{what})")
    return fits[0]


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
            known = some(list(label2id))
            wanted = f"expected 0 … {classes - 1} or one of {known}"
            raise DataError(f"{place} has the label {label!r}: {wanted}")
    return indices


def _class_index(label: Any, label2id: Mapping[str, int]) -> int:
    """The class; −1 for none."""
    if isinstance(label, str):
        text = label.strip()
        return label2id.get(label, int(text) if text.isascii() and text.isdigit() else -1)
    number = isinstance(label, int | float) and not isinstance(label, bool)
    return int(label) if number and float(label).is_integer() else -1


def _saved(place: Path) -> pd.DataFrame:
    from datasets import load_from_disk

    saved: Any = load_from_disk(str(place))
    if isinstance(saved, dict):
        raise DataError(
            f"{str(place)!r} holds several splits: name one, {str(place / next(iter(saved)))!r}"
        )
    return saved.to_pandas()


def _separated(path: Path, **dialect: Any) -> pd.DataFrame:
    """A table with a header, every field as text, every row of its length."""
    with open(path, encoding=ENCODING, newline="") as file:
        rows = [row for row in csv.reader(file, strict=True, **dialect) if row]
    header = rows.pop(0) if rows else []
    if len(set(header)) < len(header):
        raise ValueError(f"its header {header} names a column twice")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} fields, its header {len(header)}")
    return pd.DataFrame(rows, columns=header)


def _lines(path: Path, read: Callable[[str], Any]) -> pd.DataFrame:
    """A row of every line that is not blank; the index counts from 1 with those that are."""
    rows = {}
    with open(path, encoding=ENCODING) as file:
        for number, line in enumerate(file, 1):
            try:
                rows |= {number: dict(read(line))} if line.strip() else {}
            except (ValueError, TypeError) as error:
                raise ValueError(f"line {number} is no JSON object: {error}") from error
    return pd.DataFrame(list(rows.values()), index=pd.Index(list(rows), name="line"))


READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".jsonl": partial(_lines, read=json.loads),
    ".json": lambda path: pd.DataFrame(json.loads(path.read_text(encoding=ENCODING))),
    ".csv": partial(_separated, delimiter=","),
    ".tsv": partial(_separated, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".parquet": lambda path: pd.read_parquet(path).reset_index(drop=True),
    ".txt": partial(_lines, read=lambda line: {"text": line.rstrip("\n")}),
    "folder": _saved,
}
