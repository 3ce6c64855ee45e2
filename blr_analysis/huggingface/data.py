"""Rows of texts and labels: from .jsonl, .json, .csv, .tsv, .parquet and .txt files, and datasets.

    train.jsonl                        a file
    train.jsonl:train[:500]            some of its rows, as ``datasets`` writes a split
    ./saved:train                      a split of ``Dataset.save_to_disk``, or of a folder of files
    org/dataset:train[:50000]          of the Hub, where that is allowed

Columns that the user does not name are found by their usual names. If several columns or none have
such a name, the error lists the columns of the data.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

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
# The usual names of columns; each is a tuple of the columns that belong together.
TEXT_NAMES = (("text",), ("sentence",), ("content",), ("review",), ("document",), *PAIRS)
LABEL_NAMES = (("label",), ("labels",), ("target",), ("class",))

SPLIT = r"[\w.]+(?:\[[^\]]*\])?"
ADDRESS = re.compile(rf"(?P<place>.+?):(?P<split>{SPLIT}(?:\+{SPLIT})*)")
STRETCH = re.compile(r"(?P<name>[\w.]+)\[(?P<first>\d*):(?P<last>\d+)\]")  # counted in rows
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SAVED = ("dataset_dict.json", "state.json")  # files of Dataset.save_to_disk
OF_A_FILE = "train"  # the one split of a file, as datasets calls it


def read_rows(data: Any, *, online: bool = False) -> tuple[pd.DataFrame, str]:
    """The rows of a file, of a folder that ``datasets`` saved, or of a ``datasets.Dataset``.

    All files are in UTF-8. ``.jsonl`` has an object per line, and ``.json`` a list of objects.
    ``.csv`` has a header, commas, and double quotes around fields; ``.tsv`` has a header, tabs and
    no quotes; fields of both are text. ``.txt`` has a text per line, and no labels; blank lines are
    skipped. A split may follow behind a colon. If it is a stretch ``train[a:b]``, counted in rows,
    only these rows are read or fetched.

    Args:
        online: fetch a data set from the Hub if no file or folder has its name.

    Returns:
        The table, whose index "line" or "row" counts from 1; and a name of the data for messages.

    Raises:
        DataError: no rows can be read, or the data have several splits and none is named.
        StorageError: the data do not exist.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write('sentence,label\\n"a, b",pos\\nc,neg\\n')
        ...     file.flush()
        ...     read_rows(file.name)[0].to_dict("list")
        {'sentence': ['a, b', 'c'], 'label': ['pos', 'neg']}
    """
    if hasattr(data, "to_pandas"):
        place = "the dataset"
        table = data.to_pandas()
    else:
        place = repr(str(path_of(data)))
        table = _table_at(*parts_of_address(data), place, online=online)
    if not len(table):
        raise DataError(f"{place} holds no examples")
    if table.index.name is None:
        table = table.set_axis(pd.RangeIndex(1, len(table) + 1, name="row"))
    return table, place


def parts_of_address(data: str | os.PathLike[str]) -> tuple[str, str]:
    """The place and the split of an address; the split is "" where none is named.

    >>> parts_of_address("org/dataset:train[:50]"), parts_of_address("train.jsonl")
    (('org/dataset', 'train[:50]'), ('train.jsonl', ''))
    """
    text = str(path_of(data))
    match = ADDRESS.fullmatch(text)
    if match is None or Path(text).expanduser().exists():
        return text, ""
    return match["place"], match["split"]


def absolute_address(data: str | os.PathLike[str]) -> str:
    """The same address, with an absolute path if it is a file or folder."""
    name, split = parts_of_address(data)
    place = Path(name).expanduser()
    if place.exists():
        name = str(place.absolute())
    return f"{name}:{split}" if split else name


def _table_at(name: str, split: str, described: str, *, online: bool) -> pd.DataFrame:
    """The rows at a place, which messages call ``described``."""
    place = Path(name).expanduser()
    kind = "folder" if place.is_dir() else place.suffix.lower()
    is_on_the_hub = not place.exists() and kind not in READERS and HUB_NAME.fullmatch(name)
    if is_on_the_hub and not online:
        raise StorageError(
            f"{described} is no file or folder here: fetch it from the Hub with online=True "
            "(--online)"
        )
    if is_on_the_hub:
        with told_as(DataError, f"the Hub gives no rows of {described}"):
            return _of_datasets(name, split)
    if name.endswith("]") and "[" in name:
        file, _, part = name.partition("[")
        raise DataError(f"{described}: write a part of the data as '{file}:train[{part}'")
    if kind not in (*READERS, "folder"):
        raise DataError(f"{described} is none of {', '.join([*READERS, 'folder'])}: convert it")
    if not place.exists():
        raise StorageError(f"there is no file {described}.")
    with told_as(DataError, f"{described} is no {kind} that can be read", "is it in UTF-8?"):
        if kind == "folder":
            return _of_folder(place, split)
        table = READERS[kind](place)
    return _of_splits({OF_A_FILE: table}, split) if split else table


def places_of(table: pd.DataFrame, place: str) -> list[str]:
    """A name of each row for messages: "line 3 of 'a.jsonl'", or "row 3" of other formats.

    Rows count from 1; a header is not counted.
    """
    return [f"{table.index.name} {number} of {place}" for number in table.index]


def text_columns(
    table: pd.DataFrame, place: str, text: str | Sequence[str] | None
) -> tuple[str, ...]:
    """The column of the texts, or the two columns of pairs.

    Args:
        text: the names that the user gives; None: they are found by their usual names.
    """
    names = (text,) if isinstance(text, str) else text
    if names is not None and not 1 <= len(names) <= 2:
        raise DataError(f"a text has one column, or two for a pair, got {list(names)}")
    return _chosen(table, place, names, TEXT_NAMES, "text")


def label_column(table: pd.DataFrame, place: str, label: str | None) -> str:
    """The column of the labels: ``label``, or for None the one with a usual name."""
    names = None if label is None else [label]
    return _chosen(table, place, names, LABEL_NAMES, "label")[0]


def _chosen(
    table: pd.DataFrame,
    place: str,
    names: Sequence[str] | None,
    usual: Sequence[tuple[str, ...]],
    role: str,
) -> tuple[str, ...]:
    """The columns of a role ("text", "label"): ``names``, or for None those with usual names."""
    candidates = usual if names is None else [tuple(names)]
    present = [columns for columns in candidates if set(columns) <= set(table)]
    # A single column may be part of a pair (question + sentence): the pair is meant then.
    matches = [
        columns for columns in present if not any(set(columns) < set(pair) for pair in present)
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        fault = "several columns that could be"
    elif names is None:
        fault = "no column of a usual name for"
    else:
        fault = f"no column of the name {some(names)} for"
    all_columns = some(list(table), 12)
    raise DataError(
        f"{place} has {fault} the {role}; name one of {all_columns} by {role}= (--{role})"
    )


def class_indices(
    labels: Sequence[Any], places: Sequence[str], label2id: Mapping[str, int], classes: int
) -> list[int]:
    """Each label as a class of the model: a name that it knows, or a number 0 … classes − 1.

    Raises:
        DataError: a label is neither; the message names its row and the model's classes.
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
    """The number of a label's class; −1 where it has none."""
    if isinstance(label, str) and label in label2id:
        return label2id[label]
    if isinstance(label, str):
        text = label.strip()
        return int(text) if text.isascii() and text.isdigit() else -1
    is_number = isinstance(label, int | float) and not isinstance(label, bool)
    return int(label) if is_number and float(label).is_integer() else -1


# Readers


def _of_folder(place: Path, split: str) -> pd.DataFrame:
    """The rows of ``Dataset.save_to_disk``, or of a folder of files that ``datasets`` reads."""
    if not any((place / name).is_file() for name in SAVED):
        return _of_datasets(str(place), split)
    from datasets import load_from_disk

    saved: Any = load_from_disk(str(place))
    if not isinstance(saved, dict):
        return _of_splits({OF_A_FILE: saved}, split) if split else saved.to_pandas()
    if not split:
        _refuse_several(str(place), list(saved))
    return _of_splits(saved, split)


def _of_datasets(name: str, split: str) -> pd.DataFrame:
    """The rows that ``datasets`` loads; of a stretch ``train[a:b]``, only its rows are read."""
    from datasets import load_dataset

    stretch = STRETCH.fullmatch(split)
    if stretch is not None:
        stream = load_dataset(name, split=stretch["name"], streaming=True)
        first = int(stretch["first"] or 0)
        return pd.DataFrame(list(islice(stream, first, int(stretch["last"]))))
    loaded: Any = load_dataset(name, split=split or None)
    if isinstance(loaded, dict):
        if len(loaded) > 1:
            _refuse_several(name, list(loaded))
        loaded = next(iter(loaded.values()))
    return loaded.to_pandas()


def _refuse_several(name: str, splits: Sequence[str]) -> NoReturn:
    """Raise: the user must name one of the splits."""
    raise DataError(f"{name!r} holds several splits: name one, '{name}:{splits[0]}'")


def _of_splits(splits: Mapping[str, Any], split: str) -> pd.DataFrame:
    """The rows of an address such as ``train[:100]+test``.

    Args:
        splits: tables or data sets, by the names of the splits.
        split: the address.
    """
    from datasets import ReadInstruction

    lengths = {name: len(rows) for name, rows in splits.items()}
    with told_as(DataError, f"{split!r} names no rows", f"the splits are {some(list(splits))}"):
        stretches = ReadInstruction.from_spec(split).to_absolute(lengths)
    tables = []
    for stretch in stretches:
        rows = splits[stretch.splitname]
        first = stretch.from_ or 0
        last = lengths[stretch.splitname] if stretch.to is None else stretch.to
        is_table = isinstance(rows, pd.DataFrame)
        part = rows.iloc[first:last] if is_table else rows.select(range(first, last)).to_pandas()
        tables.append(part)
    return pd.concat(tables)


def _separated(path: Path, **dialect: Any) -> pd.DataFrame:
    """A table with a header; every field is text, and every row is as long as the header."""
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
    """A row for every line that is not blank; the index counts all lines from 1.

    Args:
        read: from a line to a mapping.
    """
    rows: dict[int, dict[str, Any]] = {}
    with open(path, encoding=ENCODING) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                rows[number] = dict(read(line))
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
}
