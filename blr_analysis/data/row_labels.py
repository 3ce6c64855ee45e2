"""Which examples a user means: row labels of pandas objects, masks, indices; and their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blr_analysis.data.batches import describe
from blr_analysis.errors import InputError, told_as


def row_labels(parts: Mapping[str, Any], n_data: int) -> tuple[Any, ...] | None:
    """The one index that the pandas objects among the data's parts have; None without any.

    An index 0 … N − 1 only counts rows. It goes with any other labels, unless these are the numbers
    0 … N − 1 in another order.

    Raises:
        InputError: the indexes differ.
    """
    indexes = {tuple(part.index) for part in parts.values() if hasattr(part, "reindex")}
    places = tuple(range(n_data))
    labels = indexes - {places}
    is_reordered = any(set(index) == set(places) for index in labels)
    if len(labels) > 1 or (is_reordered and places in indexes):
        raise InputError(
            "the row labels of X and y differ; if both are in the same order, pass .to_numpy()"
        )
    return next(iter(labels or indexes), None)


def labels_beside(
    columns: Mapping[str, Any], n_data: int, labels: tuple[Any, ...] | None
) -> tuple[Any, ...] | None:
    """The row labels of a task: those of its data, which its metadata and weights must have too.

    Data without ``labels`` have rows 0 … N − 1. An index 0 … N − 1 only counts rows: it goes with
    any other labels, unless these are the numbers 0 … N − 1 in another order.

    Args:
        columns: metadata and weights, by the name that a message gives them.

    Raises:
        InputError: a pandas object with another index.
    """
    places = tuple(range(n_data))
    is_reordered = labels is not None and labels != places and set(labels) == set(places)
    for name, column in columns.items():
        if not hasattr(column, "reindex"):
            continue
        index = tuple(column.index)
        only_counts = index == places and not is_reordered
        if not only_counts and index != labels:
            raise InputError(
                f"{name} has another row index than the data; if both are in the same order, "
                "pass it after reset_index(drop=True)"
            )
        labels = labels or places
    return labels


def chosen_indices(
    indices: Any, n_data: int, name: str = "indices", labels: Sequence[Any] | None = None
) -> list[int]:
    """Indices, a slice or a boolean mask as a checked list, in the order of the argument.

    A mask that is a pandas Series is read by its index, which must be 0 … N − 1 or hold the
    ``labels`` of the examples; a pandas Index holds labels. Numbers in anything else are places.

    Raises:
        InputError: a mask of another length or index, an index out of range, or something else.

    >>> chosen_indices(torch.tensor([False, True, True]), n_data=3)
    [1, 2]
    """
    is_table = hasattr(indices, "columns")
    if is_table:
        raise InputError(f"{name} is a table; give its row labels, {name}=table.index")
    if isinstance(indices, slice):
        with told_as(InputError, f"{name} is no slice of {n_data} examples"):
            return list(range(*indices.indices(n_data)))
    is_pandas_index = hasattr(indices, "get_indexer")
    if is_pandas_index:
        return _places_of_labels(indices, name, labels)
    is_mask_with_labels = hasattr(indices, "reindex") and indices.dtype.kind == "b"
    if is_mask_with_labels:
        indices = _in_order_of_examples(indices, n_data, name, labels)
    values = _as_vector(indices, name)
    if values.dtype == torch.bool:
        if len(values) != n_data:
            raise InputError(f"the mask {name} has {len(values)} entries for {n_data} examples")
        return values.nonzero().flatten().tolist()
    chosen = [int(index) for index in values.tolist()]
    missing = [index for index in chosen if not 0 <= index < n_data]
    if missing:
        raise InputError(
            f"{name} names example {missing[0]}, but the examples are 0 … {n_data - 1}"
        )
    return chosen


def _as_vector(indices: Any, name: str) -> Tensor:
    """The indices or the mask as a tensor of one dimension."""
    with told_as(InputError, f"{name} must be a boolean mask or integer indices"):
        if hasattr(indices, "to_numpy"):
            indices = indices.to_numpy()
        if isinstance(indices, range | set):
            indices = list(indices)
        values = indices if isinstance(indices, Tensor) else torch.tensor(indices)
    values = torch.atleast_1d(values)
    are_fractions = values.is_floating_point() or values.is_complex()
    if values.ndim != 1 or (len(values) and are_fractions):
        raise InputError(f"{name} must hold booleans or integer indices, got {describe(values)}")
    return values


def _in_order_of_examples(mask: Any, n_data: int, name: str, labels: Sequence[Any] | None) -> Any:
    """A boolean Series in the order of the examples.

    A Series whose index is that of the examples, or only counts rows, is in their order already.

    Raises:
        InputError: it is not certain which entry belongs to which example.
    """
    mask_labels = list(mask.index)
    places = list(range(n_data))
    example_labels = places if labels is None else list(labels)
    may_be_places = set(example_labels) == set(places)
    only_counts = mask_labels == places and not may_be_places
    if mask_labels == example_labels or len(mask_labels) != n_data or only_counts:
        return mask
    is_reordered = mask.index.is_unique and set(mask_labels) == set(example_labels)
    if may_be_places or not is_reordered:
        raise InputError(f"the index of {name} is not that of the examples; pass {name}.to_numpy()")
    return mask.reindex(example_labels)


def _places_of_labels(index: Any, name: str, labels: Sequence[Any] | None) -> list[int]:
    """The places of the examples with the labels in a pandas Index."""
    places = {label: place for place, label in enumerate(labels or ())}
    are_unique = labels is not None and len(places) == len(labels)
    if not are_unique or not {*index} <= places.keys():
        raise InputError(
            f"{name} has row labels of no example, or of several; pass mask.to_numpy()"
        )
    return [places[label] for label in index]


def read_metadata(metadata: Any, n_data: int) -> dict[str, list[Any]]:
    """Columns by name, one value for each example, from a mapping, a DataFrame or None.

    Raises:
        InputError: something else, or a column of another length.
    """
    if metadata is None:
        return {}
    if not hasattr(metadata, "keys"):
        kind = type(metadata).__name__
        raise InputError(f"metadata must be columns by name, {{'source': [...]}}, got {kind}")
    with told_as(InputError, "metadata must be columns by name, {'source': [...]}"):
        by_name = {str(name): metadata[name] for name in metadata}
    columns: dict[str, list[Any]] = {}
    for name, column in by_name.items():
        with told_as(InputError, f"metadata column {name!r} must be one value per example"):
            columns[name] = list(column.tolist() if isinstance(column, Tensor) else column)
        if isinstance(column, str) or len(columns[name]) != n_data:
            raise InputError(f"metadata column {name!r} must hold {n_data} values, one per example")
    return columns
