"""Texts and labels from a file: .jsonl, .json, .csv, .tsv, .parquet, .txt, and nothing guessed.

Columns that are not named are looked for under the names that datasets commonly give them; where
several or none are there, the error says which columns the file has.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from blr_analysis.checks import path_of, some
from blr_analysis.errors import DataError, StorageError

LINE = "line of the file"  # what the index of a table holds whose rows are lines
ENCODING = "utf-8-sig"  # with or without the mark that spreadsheets put first
TEXT_NAMES = (
    ("text",),
    ("sentence",),
    ("content",),
    ("review",),
    ("document",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
LABEL_NAMES = ("label", "labels", "target", "class")


@dataclass(frozen=True)
class Texts:
    """What a file says.

    Attributes:
        path: the file.
        texts: one text, or a pair, per example.
        labels: as they stand in the file; None where none were asked for.
        columns: the names of the text columns and, where asked for, of the label.
        places: where each example stands.
    """

    path: Path
    texts: list[tuple[str, ...]]
    labels: list[Any] | None
    columns: tuple[str, ...]
    places: list[str]

    def __len__(self) -> int:
        return len(self.texts)


def read_texts(
    path: str | os.PathLike[str],
    *,
    text: str | Sequence[str] | None = None,
    label: str | None = None,
    labelled: bool = False,
) -> Texts:
    """The texts of a file in UTF-8, and their labels if ``labelled``.

    ``.jsonl``: an object per line. ``.json``: a list of them. ``.csv``: a header, commas, double
    quotes around fields.
    ``.tsv``: a header, tabs, no quotes. ``.parquet``. ``.txt``: a text per line, without labels;
    blank lines are passed over.

    Args:
        text: the text's column, or the two columns of a pair; None: by its usual names.
        label: the label's column; None: by its usual names.
        labelled: whether labels are needed.

    Raises:
        StorageError: the file is not there or cannot be read.
        DataError: another ending, no examples, no such column or several that could be meant,
            something that is not text, broken rows, other encodings than UTF-8.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write('sentence,label\\n"a, b",pos\\nc,neg\\n')
        ...     file.flush()
        ...     read = read_texts(file.name, labelled=True)
        >>> read.texts, read.labels
        ([('a, b',), ('c',)], ['pos', 'neg'])
    """
    place = Path(path_of(path)).expanduser()
    table = read_file(place)
    if not len(table):
        raise DataError(f"{str(place)!r} holds no examples")
    columns = text_columns(table, repr(str(place)), text)
    labels = None
    if labelled:
        label = _label_column(place, table, label)
        labels = table[label].tolist()
    values = [table[name].tolist() for name in columns]
    texts = Texts(
        place,
        list(zip(*values, strict=True)),
        labels,
        columns if label is None or not labelled else (*columns, label),
        places_of(table, repr(str(place))),
    )
    for at, row in zip(texts.places, texts.texts, strict=True):
        for name, value in zip(columns, row, strict=True):
            if not isinstance(value, str):
                empty = value is None or value != value
                raise DataError(
                    f"{at} has {f'no {name}' if empty else f'{value!r} for its {name}'}"
                )
    return texts


def places_of(table: pd.DataFrame, where: str) -> list[str]:
    """Where each row stands: its line, as an editor counts them; of other files the row, from 1
    and without a header.

    >>> places_of(pd.DataFrame({"text": ["a"]}), "the dataset")
    ['row 1 of the dataset']
    """
    if table.index.name == LINE:
        return [f"line {number} of {where}" for number in table.index]
    return [f"row {i + 1} of {where}" for i in table.index]


def class_indices(texts: Texts, label2id: Mapping[str, int], classes: int) -> list[int]:
    """Each label as a class of the model: a name that it knows, or a number 0 … classes − 1.

    Raises:
        DataError: a label that is neither; the row and the names that the model knows are said.
    """
    indices = []
    for i, label in enumerate(texts.labels or []):
        index = _class_index(label, label2id)
        if index is None or not 0 <= index < classes:
            raise DataError(
                f"{texts.places[i]} has the label {label!r}: expected 0 … {classes - 1} or one of "
                f"{some(list(label2id))}"
            )
        indices.append(index)
    return indices


def _class_index(label: Any, label2id: Mapping[str, int]) -> int | None:
    if isinstance(label, str):
        if label in label2id:
            return int(label2id[label])
        text = label.strip()
        return int(text) if text.isascii() and text.isdigit() else None
    if isinstance(label, bool) or not isinstance(label, int | float):
        return None
    return int(label) if float(label).is_integer() else None


def _separated(path: Path, sep: str, quoting: int) -> pd.DataFrame:
    """A table with a header, every field as text; read without one, so that names stay as they
    stand and rows that are too long are faults."""
    try:
        table = pd.read_csv(
            path,
            sep=sep,
            quoting=quoting,  # type: ignore[arg-type]
            header=None,
            dtype=str,
            keep_default_na=False,
            engine="python",  # which tells a field that is missing from an empty one
            encoding=ENCODING,
        )
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
    names, rows = table.iloc[0].tolist(), table.iloc[1:]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"the header of {str(path)!r} names {some(twice)} twice")
    short = rows.isna().any(axis=1).to_numpy()
    if short.any():
        row = int(short.argmax()) + 1
        raise DataError(f"row {row} of {str(path)!r} has fewer fields than its header")
    return rows.set_axis(names, axis=1).reset_index(drop=True)


def _jsonl(path: Path) -> pd.DataFrame:
    rows: dict[int, dict[str, Any]] = {}
    for number, line in _numbered(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            said = f"{error.msg}, column {error.colno}"
            raise DataError(f"line {number} of {str(path)!r} is no JSON: {said}") from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of {str(path)!r} is no object: {{name: value, ...}}")
        rows[number] = row
    return pd.DataFrame(list(rows.values()), index=pd.Index(list(rows), name=LINE))


def _json(path: Path) -> pd.DataFrame:
    content = json.loads(path.read_text(encoding=ENCODING))
    return pd.DataFrame(content).reset_index(drop=True)


def _lines(path: Path) -> pd.DataFrame:
    rows = dict(_numbered(path))
    index = pd.Index(list(rows), name=LINE)
    return pd.DataFrame({"text": [line.rstrip("\n") for line in rows.values()]}, index=index)


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, counted from 1 with those that are."""
    with open(path, encoding=ENCODING) as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _not_in_utf8(path: Path) -> int:
    """The first line that cannot be decoded."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": partial(_separated, sep=",", quoting=csv.QUOTE_MINIMAL),
    ".tsv": partial(_separated, sep="\t", quoting=csv.QUOTE_NONE),
    ".parquet": lambda path: pd.read_parquet(path).reset_index(drop=True),
    ".txt": _lines,
}


def read_rows(data: Any) -> tuple[pd.DataFrame, str]:
    """The rows of a file, of a folder that ``datasets`` saved, or of a ``datasets.Dataset``, and
    what to call them.

    Raises:
        DataError: no rows can be read from it, or several splits at once.
        StorageError: it is not there.
    """
    if hasattr(data, "to_pandas"):
        return data.to_pandas(), "the dataset"
    place = Path(path_of(data)).expanduser()
    if not place.is_dir():
        return read_file(place), repr(str(place))
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(place))
    except (OSError, ValueError) as error:
        raise DataError(f"{str(place)!r} is no folder of Dataset.save_to_disk: {error}") from error
    if isinstance(saved, DatasetDict):
        first = place / str(next(iter(saved)))
        raise DataError(f"{str(place)!r} holds several splits: name one, {str(first)!r}")
    table: Any = saved.to_pandas()
    return table, repr(str(place))


def read_file(path: Path) -> pd.DataFrame:
    """The file as pandas reads it; whatever goes wrong names the file."""
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise DataError(f"{str(path)!r} ends in none of {', '.join(READERS)}: convert it")
    try:
        return read(path)
    except UnicodeDecodeError as error:
        raise DataError(
            f"line {_not_in_utf8(path)} of {str(path)!r} is not in UTF-8 ({error.reason}); convert "
            "it: iconv -f LATIN1 -t UTF-8"
        ) from error
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    except DataError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError) as error:  # pandas', pyarrow's
        said = " ".join(str(error).split())[:200]
        raise DataError(f"{str(path)!r} is no {path.suffix} that can be read: {said}") from error


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


def _label_column(path: Path, table: pd.DataFrame, label: str | None) -> str:
    if path.suffix.lower() == ".txt":
        raise DataError(f"{str(path)!r} is plain text without labels: use .jsonl, or kind='mc'")
    if label is not None:
        return _held(repr(str(path)), table, (label,))[0]
    matches = [name for name in LABEL_NAMES if name in table]
    return _only(matches, repr(str(path)), table, "label", "label= (--label)")


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
