"""Scores of other methods, from memory or from a file: one number a_ij for each pair of a training
and a test example, larger where training on i lowers the loss of j more."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blr_analysis.checks import instance
from blr_analysis.errors import InputError, StorageError, told_as


def score_matrices(scores: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    """The matrices ``[N_train, N_test]`` of methods by name, checked, in float64.

    Args:
        scores: a mapping from names to tensors, arrays, DataFrames or files; None: no method.
        shape: N_train and N_test.

    Raises:
        InputError: no mapping, another shape, entries that are not finite.
        StorageError: a file that cannot be read.
    """
    if scores is None:
        return {}
    instance("scores", scores, Mapping, 'a dict such as {"bm25": matrix}')
    return {str(name): score_matrix(str(name), values, shape) for name, values in scores.items()}


def score_matrix(name: str, values: Any, shape: tuple[int, int]) -> Tensor:
    """The matrix of one method."""
    if isinstance(values, str | os.PathLike):
        values = read_matrix(Path(values).expanduser())
    with told_as(InputError, f"scores of {name!r} are no matrix of numbers"):
        if isinstance(values, Tensor):
            matrix = values.detach().cpu().double()
        else:
            matrix = torch.from_numpy(np.array(values, dtype=np.float64))
    if tuple(matrix.shape) != shape:
        is_transposed = tuple(matrix.shape) == shape[::-1]
        remedy = "transpose them" if is_transposed else "one row for each training example"
        raise InputError(
            f"scores of {name!r} must be [N_train, N_test] = {list(shape)}, "
            f"got {list(matrix.shape)}: {remedy}"
        )
    n_undefined = int((~matrix.isfinite()).sum())
    if n_undefined:
        raise InputError(f"scores of {name!r} have {n_undefined} NaN or infinite entries")
    return matrix


def read_matrix(path: Path) -> Any:
    """The numbers of a ``.npy`` or ``.parquet`` file, one row for each training example.

    Raises:
        InputError: another kind of file. StorageError: one that cannot be read.
    """
    readers = {".npy": _read_npy, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise InputError(f"scores must be a .npy or .parquet file, got {str(path)!r}")
    with told_as(StorageError, f"{str(path)!r} cannot be read as {path.suffix[1:]}"):
        return readers[path.suffix](path)


def _read_npy(path: Path) -> np.ndarray:
    return np.load(path, allow_pickle=False)


def _read_parquet(path: Path) -> np.ndarray:
    """One column for each test example, in their order; an index of pandas is left out."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    described_by_pandas = table.schema.pandas_metadata or {}
    index_columns = described_by_pandas.get("index_columns", [])
    table = table.drop_columns([name for name in index_columns if isinstance(name, str)])
    return np.column_stack([column.to_numpy().astype(np.float64) for column in table.columns])
