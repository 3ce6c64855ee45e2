"""Examples from a dataset, a loader over one, a pair of tensors, or inputs alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.utils.data as tud
from torch import Tensor

from blr_analysis.data.examples import Examples, content_of, evenly_spread
from blr_analysis.data.row_labels import row_labels
from blr_analysis.errors import DataError, told_as
from blr_analysis.padding import Padding

REREAD_EXAMPLES = 32  # that are read twice to see whether the data stay the same


def read_data(data: Any, padding: Padding | None = None) -> Examples:
    """Examples from a map-style dataset, a loader over one, or a pair (X, y).

    Args:
        padding: makes batches of rows that torch's default collate function would make.

    Raises:
        DataError: empty or iterable-style data, samplers that subset, reorder or reweight,
            tensors that are no pair, data that change from one visit to the next.

    >>> len(read_data((torch.zeros(4, 2), torch.arange(4))))
    4
    """
    if isinstance(data, Examples):
        return data
    examples = _examples(data)
    if padding is not None and examples.is_rows:
        examples = replace(examples, collate=padding)
    if len(examples) == 0:
        raise DataError("the data hold no examples; a task needs at least one")
    if not examples.is_tensors:
        _check_same_when_reread(examples)
    return examples


def _check_same_when_reread(examples: Examples) -> None:
    """Raise :class:`DataError` where an example differs when it is read again."""

    def differs(indices: Tensor) -> bool:
        first_reading = content_of(examples.batch(indices))
        return content_of(examples.batch(indices)) != first_reading

    probe = evenly_spread(len(examples), REREAD_EXAMPLES)
    if not differs(probe):
        return
    changing = [int(index) for index in probe if differs(index.reshape(1))]
    fault = f"example {changing[0]} differs" if changing else "the same examples differ"
    raise DataError(
        f"{fault} when read again (augmentation? random masks?): give the Task data without "
        "randomness, and put the random part into Recipe(augment=) or your own Recipe(train=)"
    )


def _examples(data: Any) -> Examples:
    """The examples of any kind of data, before they are read."""
    if isinstance(data, tud.DataLoader):
        dataset = _examples(data.dataset).dataset
        _check_sampler(data)
        return Examples(dataset, data.collate_fn)
    may_be_pair = isinstance(data, tuple) or (isinstance(data, list) and len(data) == 2)
    if may_be_pair and any(hasattr(part, "__array__") for part in data):
        return _pair(data)
    if may_be_pair and all(type(part) is list for part in data):
        raise DataError("X and y are lists; give tensors or arrays: torch.tensor(X)")
    if isinstance(data, Tensor | np.ndarray):  # inputs without labels
        return Examples(tud.TensorDataset(_tensor("X", data)))
    _check_dataset(data)
    return Examples(data)


def _check_sampler(loader: tud.DataLoader[Any]) -> None:
    """Raise :class:`DataError` where a loader does not draw every example once."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    dataset: Any = loader.dataset
    is_ordinary = isinstance(sampler, tud.SequentialSampler | tud.RandomSampler)
    draws_each_once = is_ordinary and len(sampler) == len(dataset)
    if not draws_each_once or getattr(sampler, "replacement", False):
        raise DataError(f"the DataLoader draws by {sampler}; pass the dataset itself")


def _check_dataset(data: Any) -> None:
    """Raise :class:`DataError` where the data have no index, or a Subset has a mask for indices."""
    inner = data
    while isinstance(inner, tud.Subset):
        if np.asarray(inner.indices).dtype == bool:
            raise DataError("the Subset has a mask for indices; give mask.nonzero().flatten()")
        inner = inner.dataset
    is_no_dataset = isinstance(data, (tud.IterableDataset, Mapping, str, bytes))
    has_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_no_dataset or not has_index:
        raise DataError(
            "data must be a Dataset, DataLoader, list, or (X, y), one split, got "
            f"{type(data).__name__}"
        )


def _pair(data: Sequence[Any]) -> Examples:
    """The examples of a pair (X, y) of tensors, arrays or pandas objects."""
    if len(data) != 2:
        raise DataError(f"data must be a pair (X, y), got {len(data)} arrays; see forward=")
    parts = dict(zip("Xy", data, strict=True))
    for name, part in parts.items():
        _check_rows(f"{name} of (X, y)", part)
        if _are_words(part):
            remedy = f"number them: pd.Categorical({name}).codes"
            raise DataError(f"{name} of (X, y) cannot become a tensor: it holds words; {remedy}")
    x = _tensor("X of (X, y)", parts["X"])
    y = _tensor("y of (X, y)", parts["y"])
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise DataError(f"X and y must have the same length, got {[*x.shape]} and {[*y.shape]}")
    _warn_of_labels(*data)
    return Examples(tud.TensorDataset(x, y), labels=row_labels(parts, len(x)))


def _check_rows(name: str, part: Any) -> None:
    """Raise :class:`DataError` unless the part is a tensor, an array, a pandas object or a list."""
    if not (isinstance(part, Sequence) or hasattr(part, "__array__")):
        remedy = "give a tensor, an array or a list"
        if isinstance(part, Mapping):
            remedy = "of named inputs give a list of dicts, one per example, with 'labels'"
        raise DataError(f"{name} is a {type(part).__name__}; {remedy}")


def _are_words(part: Any) -> bool:
    """Whether the first value is a word, such as the name of a class."""
    if isinstance(part, Tensor):
        return False
    first = np.ravel(np.asarray(part[:1], dtype=object))
    return len(first) > 0 and isinstance(first[0], str)


def _tensor(name: str, values: Any) -> Tensor:
    """The values as a tensor that may be written to.

    Raises:
        DataError: no numbers, masked ones, or a tensor that is sparse, nested or of device "meta".
    """
    if isinstance(values, Tensor):
        _check_dense(name, values)
        return values
    if np.ma.is_masked(values):
        raise DataError(f"{name} holds masked numbers; drop these rows or fill them: .filled(0)")
    with told_as(DataError, f"{name} cannot become a tensor", "give numbers"):
        return torch.as_tensor(_as_torch_reads(np.require(values, requirements="W")))


def _check_dense(name: str, values: Tensor) -> None:
    """Raise :class:`DataError` unless the tensor has its numbers in rows."""
    if values.layout != torch.strided or values.is_nested:
        raise DataError(f"{name} is a sparse or nested tensor; give a dense one: .to_dense()")
    if values.is_meta:
        raise DataError(f'{name} is on the device "meta", without numbers; load them first')


def _as_torch_reads(array: np.ndarray) -> np.ndarray:
    """The same numbers in a dtype, byte order and memory layout of which torch makes a tensor."""
    dtype = array.dtype.newbyteorder("=")
    if dtype == np.longdouble:
        dtype = np.dtype(np.float64)
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    return array.astype(dtype, copy=False)


def _warn_of_labels(x: Any, y: Any) -> None:
    """Warn where y has row labels other than 0 … N − 1, and X has none to compare them with."""
    has_labels = hasattr(y, "reindex") and tuple(y.index) != tuple(range(len(y)))
    if has_labels and not hasattr(x, "reindex"):
        warnings.warn(
            "y has row labels and X has none: if both are in the same order, pass y.to_numpy(); "
            "if not, pass X as a DataFrame",
            stacklevel=7,  # the line that makes the Task
        )
