"""Tensors and sequences as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from blr_analysis.errors import DataError


def array_of(values: Any) -> Any:
    """A NumPy array of a tensor or sequence; None stays None."""
    if not isinstance(values, Tensor):
        return None if values is None else np.asarray(values)
    values = values.detach().cpu()
    small = values.is_floating_point() and values.element_size() < 4
    return (values.float() if small else values).numpy()


def spread(name: str, values: Any) -> dict[str, np.ndarray]:
    """One column, or ``name_0`` … ``name_{C−1}`` where each example has C > 1 values."""
    array = array_of(values)
    if array.ndim == 1:
        return {name: array}
    array = array.reshape(len(array), -1)
    if array.shape[1] == 1:
        return {name: array[:, 0]}
    return {f"{name}_{c}": array[:, c] for c in range(array.shape[1])}


def frame_of(columns: dict[str, Any], metadata: Mapping[str, Sequence[Any]] | None) -> pd.DataFrame:
    n = len(columns["index"])
    columns = {k: np.full(n, np.nan) if v is None else v for k, v in columns.items()}
    for name, values in (metadata or {}).items():
        if len(values) != n:
            raise DataError(f"metadata {name!r} holds {len(values)} values for {n} examples")
        columns[free_name(str(name), set(columns))] = _plain(values)
    return pd.DataFrame(columns)


def _plain(values: Sequence[Any]) -> Any:
    """A metadata column as pandas takes it: numbers out of tensors, rows of a matrix as lists."""
    if isinstance(values, Tensor | np.ndarray):
        array = array_of(values)
        return array if array.ndim == 1 else array.tolist()
    return [array_of(v).tolist() if isinstance(v, Tensor) else v for v in values]


def free_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_metadata"
    return name
