"""The file formats that texts are read from: which columns a file has, and what is in them.

A format is two functions: ``names(path)`` and ``columns(path, chosen)``, which returns the chosen
columns and each row's number, as an editor counts lines. One more format is one more row of
:data:`READERS`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from blr_analysis.checks import some
from blr_analysis.errors import DataError, StorageError

Columns = tuple[dict[str, list[Any]], list[int]]
Names = Callable[[Path], list[str]]
Read = Callable[[Path, Sequence[str]], Columns]

ENCODING = "utf-8-sig"  # with or without the mark that spreadsheets put first


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, encoding=ENCODING) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"line {number} of {str(path)!r} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(
                    f"line {number} of {str(path)!r} is a {type(row).__name__}: expected an "
                    'object such as {"text": …, "label": …}'
                )
            yield number, row


def _json_names(path: Path) -> list[str]:
    return next((list(row) for _, row in _json_rows(path)), [])


def _json_columns(path: Path, chosen: Sequence[str]) -> Columns:
    found, numbers = _empty(chosen)
    for number, row in _json_rows(path):
        missing = [name for name in chosen if name not in row]
        if missing:
            raise DataError(f"line {number} of {str(path)!r} has no {some(missing)}")
        for name in chosen:
            found[name].append(row[name])
        numbers.append(number)
    return found, numbers


def _table_rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    quoting = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
    with open(path, encoding=ENCODING, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, quoting=quoting, strict=True)
        start = 1
        for row in reader:
            if row:
                yield start, row
            start = reader.line_num + 1


def _table_names(delimiter: str, path: Path) -> list[str]:
    names = next((row for _, row in _table_rows(path, delimiter)), [])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"the header of {str(path)!r} names {some(twice)} twice")
    return names


def _table_columns(delimiter: str, path: Path, chosen: Sequence[str]) -> Columns:
    names = _table_names(delimiter, path)
    places = [names.index(name) for name in chosen]
    found, numbers = _empty(chosen)
    rows = _table_rows(path, delimiter)
    next(rows)
    for number, row in rows:
        if len(row) != len(names):
            raise DataError(
                f"line {number} of {str(path)!r} has {len(row)} fields, the header {len(names)}"
            )
        for name, place in zip(chosen, places, strict=True):
            found[name].append(row[place])
        numbers.append(number)
    return found, numbers


def _parquet_names(path: Path) -> list[str]:
    from pyarrow import parquet

    return list(parquet.read_schema(path).names)


def _parquet_columns(path: Path, chosen: Sequence[str]) -> Columns:
    from pyarrow import parquet

    table = parquet.read_table(path, columns=list(chosen))
    return {n: table.column(n).to_pylist() for n in chosen}, list(range(1, table.num_rows + 1))


def _lines(path: Path, chosen: Sequence[str]) -> Columns:
    found, numbers = _empty(chosen)
    with open(path, encoding=ENCODING) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                found[chosen[0]].append(line.rstrip("\n"))
                numbers.append(number)
    return found, numbers


def _empty(chosen: Sequence[str]) -> Columns:
    return {name: [] for name in chosen}, []


READERS: dict[str, tuple[Names, Read]] = {
    ".jsonl": (_json_names, _json_columns),
    ".csv": (partial(_table_names, ","), partial(_table_columns, ",")),
    ".tsv": (partial(_table_names, "\t"), partial(_table_columns, "\t")),
    ".parquet": (_parquet_names, _parquet_columns),
    ".txt": (lambda path: ["text"], _lines),
}


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever goes wrong in reading, as an error that names the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (DataError, StorageError):
        raise
    except UnicodeDecodeError as error:
        raise DataError(
            f"{str(path)!r} is not in UTF-8 ({error.reason}); convert it first: iconv -f LATIN1 "
            f"-t UTF-8 {path.name}"
        ) from error
    except csv.Error as error:
        raise DataError(
            f"{str(path)!r} is no clean table ({error}); mend it, or write .jsonl"
        ) from error
    except ArrowException as error:
        said = " ".join(str(error).split())[:200]
        raise DataError(f"{str(path)!r} is no Parquet file that can be read: {said}") from error
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
