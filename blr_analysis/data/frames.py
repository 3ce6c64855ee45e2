"""Data of pandas and of Hugging Face's ``datasets``: which columns are inputs, label, metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from blr_analysis.checks import some
from blr_analysis.data.examples import has_transform
from blr_analysis.data.reading import read_data
from blr_analysis.errors import DataError, InputError
from blr_analysis.padding import Padding, aside

NUMBER_KINDS = "biuf"  # kinds of numpy's dtypes: booleans, integers, floats
# Beginnings of the names of Arrow's dtypes that cannot become tensors.
NO_NUMBERS = ("string", "large", "null", "time", "date", "duration", "decimal", "binary")
LABEL_NAMES = ("labels", "label")  # which column of a datasets.Dataset is the label without target=


class Opened(NamedTuple):
    """What the columns of a table are.

    Attributes:
        data: inputs and labels, as :func:`read_data` takes them.
        metadata: columns that describe the examples, as a DataFrame or by name; None: no columns.
    """

    data: Any
    metadata: Any


def open_data(
    data: Any,
    target: str | None,
    dtype: torch.dtype,
    model: nn.Module | None = None,
    padding: Padding | None = None,
) -> Opened:
    """A DataFrame or a ``datasets.Dataset`` as examples and metadata; other data as they are.

    Args:
        target: the column to predict.
        dtype: the model's; numbers of a DataFrame are read in it.
        model: its forward pass takes the columns of a ``datasets.Dataset`` by their names; None: a
            function of the user's takes them.
        padding: fills up rows of unequal length.

    Raises:
        DataError: a DataFrame without target=, no column of numbers, a row without a label.
        InputError: no such column, two of one name, or target= with other data.
    """
    is_hub_dataset = hasattr(data, "column_names") and hasattr(data, "features")
    is_frame = hasattr(data, "infer_objects")
    names: list[Any] = []
    if is_hub_dataset:
        names = list(data.column_names)
    elif is_frame:
        names = list(data.columns)
    if target is not None and target not in names:
        raise InputError(f"target={target!r} is no column of the data; write one of {some(names)}")
    if is_hub_dataset:
        return _open_hub_dataset(data, target, model, padding)
    if is_frame:
        return _open_pandas(data, target, dtype)
    return Opened(data, metadata=None)


def _open_pandas(frame: Any, target: str | None, dtype: torch.dtype) -> Opened:
    """Columns of numbers are the inputs, all others but the target are metadata."""
    if target is None:
        raise DataError(
            "a DataFrame needs target=, the column to predict; without labels give its to_numpy()"
        )
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InputError(f"two columns of the DataFrame are called {twice!r}; rename one")
    frame = frame.infer_objects()  # columns of objects that are all numbers become numbers
    features = frame.drop(columns=target)
    are_numbers = [column_type.kind in NUMBER_KINDS for column_type in features.dtypes]
    inputs = features.loc[:, are_numbers]
    if not len(inputs.columns):
        raise DataError("the DataFrame has no column of numbers to predict from")
    real = np.float64 if dtype == torch.float64 else np.float32
    y, classes = _read_labels(frame[target], real)
    examples = replace(
        read_data((inputs.to_numpy(dtype=real, copy=True), y)),
        columns=tuple(map(str, inputs)),
        classes=classes,
        labels=tuple(frame.index),
    )
    return Opened(examples, metadata=features.drop(columns=list(inputs)))


def _read_labels(column: Any, real: Any) -> tuple[Tensor, tuple[str, ...]]:
    """The labels of a column as numbers, and the words of the classes, if they were words."""
    missing = column.index[column.isna()]
    if len(missing):
        raise DataError(f"row {missing[0]!r} has no {column.name}; drop it")
    kind = column.dtype.kind
    if kind in NUMBER_KINDS:
        dtype = real if kind == "f" else np.int64
        return torch.from_numpy(column.to_numpy(dtype=dtype, copy=True)), ()
    coded = column
    if not hasattr(column, "cat"):
        coded = column.astype(str).astype("category")
    numbers = coded.cat.codes.to_numpy(dtype=np.int64, copy=True)
    return torch.from_numpy(numbers), tuple(map(str, coded.cat.categories))


def _open_hub_dataset(
    data: Any, target: str | None, model: nn.Module | None, padding: Padding | None
) -> Opened:
    """The label and all columns that the model takes become tensors; all others are metadata.

    A data set with a transform gives what its transform makes of each row, and no metadata.
    """
    if has_transform(data):
        if target is not None:
            raise InputError(f"the transform makes the examples: leave target={target!r} out")
        return Opened(read_data(data, padding), metadata=None)
    label = target or next((name for name in LABEL_NAMES if name in data.column_names), None)
    metadata_names = _metadata_names(data, label, target, model)
    is_words = label is not None and not _is_of_numbers(data.features[label])
    rows = data
    if is_words:
        words = list(data[label])
        if None in words:
            raise DataError(f"row {words.index(None)} has no {label}; drop it")
        rows = data.class_encode_column(label)
    classes = getattr(rows.features.get(label), "names", None)
    rows = rows.remove_columns(metadata_names)
    if label not in (None, "labels"):
        rows = rows.rename_column(label, "labels")
    examples = read_data(rows.with_format("torch"), padding)
    if classes is not None:
        examples = replace(examples, classes=tuple(classes))
    return Opened(examples, metadata={name: list(data[name]) for name in metadata_names})


def _metadata_names(
    data: Any, label: str | None, target: str | None, model: nn.Module | None
) -> list[str]:
    """The columns that do not go to the model: words, times, and names that it does not take.

    Raises:
        DataError: no column would go to the model.
    """
    names: Sequence[str] = list(data.column_names)
    not_inputs = {name for name in names if not _is_of_numbers(data.features[name])}
    if model is not None:
        not_inputs |= set(aside(model, names))
    if target is not None:
        not_inputs.add("labels")
    metadata_names = [name for name in names if name in not_inputs and name != label]
    if not set(names) - {label, *metadata_names}:
        raise DataError(f"no column of {some(names)} goes to the model; tokenise the texts")
    return metadata_names


def _is_of_numbers(feature: Any) -> bool:
    """Whether a column of this kind can become tensors: numbers, lists of them, images."""
    while isinstance(feature, list | tuple) or hasattr(feature, "feature"):
        feature = feature[0] if isinstance(feature, list | tuple) else feature.feature
    return not str(getattr(feature, "dtype", "")).startswith(NO_NUMBERS)
