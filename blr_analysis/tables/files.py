"""Tables on disk: CSV for eyes and spreadsheets, Parquet for programs."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import pandas as pd
import pyarrow
from pandas.api.types import is_object_dtype

from blr_analysis.errors import InputError, StorageError

__all__ = ["read_table", "write_table"]


def write_table(table: pd.DataFrame, folder: str | Path, stem: str) -> tuple[Path, Path]:
    """Write ``folder/stem.csv`` and ``folder/stem.parquet``, both whole or neither.

    Both are written beside their targets and renamed into place. Parquet keeps every dtype;
    CSV is for eyes and spreadsheets. A column of mixed types, which Parquet cannot hold, is
    written as text, with a warning.

    Returns:
        The two paths.

    Raises:
        StorageError: the folder cannot be made or written.
        InputError: ``stem`` is empty or contains a path.
    """
    if stem in ("", ".", "..") or Path(stem).name != stem:
        raise InputError(f"stem must be a file name without folder or suffix; got {stem!r}")
    folder = Path(folder)
    csv, parquet = folder / f"{stem}.csv", folder / f"{stem}.parquet"
    storable = _storable(table)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{stem}-", dir=folder) as beside:
            table.to_csv(os.path.join(beside, csv.name), index=False)
            storable.to_parquet(os.path.join(beside, parquet.name), index=False)
            for path in (csv, parquet):
                os.replace(os.path.join(beside, path.name), path)
    except OSError as fault:
        raise StorageError(
            f"the table {stem!r} cannot be written to {folder}: {fault.strerror or fault}; "
            "choose a folder that exists, or can be made, and has space"
        ) from fault
    return csv, parquet


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a table back, from ``.parquet`` (every dtype kept) or ``.csv`` (dtypes guessed).

    Raises:
        StorageError: no such file, not readable as its suffix says, or another suffix.
    """
    path = Path(path)
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        if path.suffix == ".csv":
            # Python's own parser reads back the very float that was written.
            return pd.read_csv(path, engine="python", keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as fault:  # pandas' and pyarrow's parse errors are ValueErrors
        raise StorageError(f"{path} cannot be read as a table: {fault}") from fault
    raise StorageError(f"{path} is no table of this package: expected .parquet or .csv")


def _storable(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the columns that Parquet cannot hold turned into text."""
    for name in filter(lambda name: is_object_dtype(table[name]), table.columns):
        try:
            pyarrow.array(table[name], from_pandas=True)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
            warnings.warn(
                f"column {name!r} mixes types that Parquet cannot hold: written as text",
                stacklevel=3,
            )
            table = table.assign(**{name: table[name].map(str)})
    return table
