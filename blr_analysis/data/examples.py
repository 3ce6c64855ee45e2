"""Examples by index: a dataset, and the function that makes a batch of its items."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data as tud
from torch import Tensor
from torch.utils._pytree import tree_leaves

from blr_analysis.checks import some
from blr_analysis.data.batches import describe, to_device
from blr_analysis.errors import DataError, InputError, told_as
from blr_analysis.padding import Padding

ROWS_HASHED = 4096  # rows of tensors that are hashed at a time
MAX_UNNAMED_COLUMNS = 16  # of a matrix; a table of results shows no wider one


class TensorRows(NamedTuple):
    """Rows of tensors.

    Attributes:
        tensors: whole tensors, which share their first dimension.
        rows: the numbers of the rows that are meant; None: all rows, in order.
    """

    tensors: tud.TensorDataset
    rows: Tensor | None


@dataclass(frozen=True)
class Examples:
    """A map-style dataset and the function that makes a batch of its items.

    Attributes:
        dataset: gives an example for every index 0 … N − 1.
        collate: makes a batch of a list of examples.
        columns: the names of the inputs, where they are columns of a DataFrame.
        classes: the words of the classes, in the order of their numbers, where labels were words.
        labels: the row labels of pandas objects.

    >>> examples = Examples(tud.TensorDataset(torch.arange(8).reshape(4, 2), torch.arange(4)))
    >>> examples.batch(torch.tensor([2, 0]))[1]
    tensor([2, 0])
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] = tud.default_collate
    columns: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    labels: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor) -> Any:
        """The collated batch of these examples.

        Raises:
            DataError: the dataset or the collate function raises; the index is named.
        """
        if self._tensor_rows is None:
            return self._collated(indices.tolist())
        tensors, rows = self._tensor_rows
        if rows is not None:
            indices = rows[indices]
        are_consecutive = len(indices) > 0 and bool((indices.diff() == 1).all())
        if are_consecutive:  # a slice copies nothing
            return tensors[int(indices[0]) : int(indices[-1]) + 1]
        return tensors[indices]

    def _collated(self, order: list[int]) -> Any:
        """The batch of items that are read one by one."""
        items: list[Any] = []

        def fault() -> str:
            return f"the dataset failed on example {order[len(items)]} of {len(self)}"

        with told_as(DataError, fault, f"each index 0 … {len(self) - 1} must give an example"):
            for index in order:
                items.append(self.dataset[index])
        with told_as(DataError, f"the collate function failed on examples {some(order)}"):
            return self.collate(items)

    def sha256(self, metadata: Mapping[str, Sequence[Any]]) -> str:
        """The hash of the metadata and of every example, as hexadecimal digits.

        It is the same for tensors, whose rows are hashed many at a time, and for a list of the same
        examples, which are read one by one.
        """
        digest = hashlib.sha256(content_of(dict(sorted(metadata.items()))))
        rows_at_a_time = ROWS_HASHED if self.is_tensors else 1
        for indices in torch.arange(len(self)).split(rows_at_a_time):
            batch = self.batch(indices)
            digest.update(content_of_rows(batch) if self.is_tensors else content_of(batch))
        return digest.hexdigest()

    def mark(self, metadata: Mapping[str, Sequence[Any]]) -> str | None:
        """What tells these examples and metadata from others, where no example need be read.

        It rests on the ``mark`` of texts that this package read from a file, and on the
        fingerprint of a ``datasets.Dataset`` with the sizes and times of its files. None for other
        data, and where a transform or collate function of the user makes the examples.
        """
        mark = mark_of(self.dataset)
        is_datasets_own = getattr(self.collate, "__self__", None) is self.dataset
        is_known = is_datasets_own or isinstance(self.collate, Padding)
        if mark is None or not (is_known or self.collate is tud.default_collate):
            return None
        content = content_of(dict(sorted(metadata.items())))
        return hashlib.sha256(f"{mark};{len(self)};".encode() + content).hexdigest()

    def lengths(self, indices: Tensor) -> Tensor | None:
        """How long each of these examples is, such as in tokens; None where the dataset does not
        tell: by a method ``length_of_example`` of an index."""
        dataset = self.dataset
        places = indices.tolist()
        while type(dataset) is tud.Subset:
            places = [dataset.indices[place] for place in places]
            dataset = dataset.dataset
        length_of = getattr(dataset, "length_of_example", None)
        if length_of is None:
            return None
        return torch.tensor([length_of(place) for place in places])

    def subset(self, indices: Sequence[int]) -> Examples:
        """The examples at these indices, in their order."""
        labels = None
        if self.labels is not None:
            labels = tuple(self.labels[index] for index in indices)
        return replace(self, dataset=tud.Subset(self.dataset, list(indices)), labels=labels)

    def check_coded_as(self, examples: Examples) -> None:
        """Raise :class:`InputError` where a column or a class has another number there."""
        if _differ(self.columns, examples.columns):
            raise InputError(
                "the columns of the two tasks differ; give both the same, in one order"
            )
        if _differ(self.classes, examples.classes):
            raise InputError("the classes of the two tasks differ; give both one Categorical")

    def row(self, index: int) -> dict[str, Any]:
        """The inputs of an example by column; empty where they are no row of a table."""
        if self._tensor_rows is None:
            return {}
        inputs = self.batch(torch.tensor([index]))[0]
        names = self.columns
        is_matrix = inputs.ndim == 2 and inputs.is_floating_point()
        if not names and is_matrix and inputs.shape[1] <= MAX_UNNAMED_COLUMNS:
            names = tuple(f"input {column}" for column in range(inputs.shape[1]))
        if not names:
            return {}
        return dict(zip(names, inputs[0].tolist(), strict=True))

    @property
    def is_tensors(self) -> bool:
        """Whether batches are slices of tensors."""
        return self._tensor_rows is not None

    @property
    def is_rows(self) -> bool:
        """Whether torch's default collate function makes a batch of single items."""
        return self.collate is tud.default_collate and not self.is_tensors

    @cached_property
    def _tensor_rows(self) -> TensorRows | None:
        """The rows of tensors that the data are; None where a batch is no slice of tensors."""
        dataset = self.dataset
        rows = None
        while type(dataset) is tud.Subset:
            indices = torch.as_tensor(dataset.indices)
            rows = indices if rows is None else indices[rows]
            dataset = dataset.dataset
        if not isinstance(dataset, tud.TensorDataset) or self.collate is not tud.default_collate:
            return None
        if rows is not None and len(rows):
            rows = torch.where(rows < 0, rows + len(dataset), rows)
            all_exist = int(rows.min()) >= 0 and int(rows.max()) < len(dataset)
            if not all_exist:
                return None  # examples are then read one by one, and the missing one is named
        return TensorRows(dataset, rows)


def _differ(names: Sequence[str] | None, other_names: Sequence[str] | None) -> bool:
    """Whether both have names, and these differ or stand in another order."""
    if names is None or other_names is None:
        return False
    return names != other_names


def evenly_spread(n_data: int, count: int) -> Tensor:
    """Sorted indices of at most ``count`` of n_data examples, from the first to the last.

    >>> evenly_spread(101, 5)
    tensor([  0,  25,  50,  75, 100])
    """
    last = n_data - 1
    places = torch.linspace(0, last, min(count, n_data)).long()
    return places.clamp_max(last).unique()  # float32 may round an index above 2**24 upwards


def mark_of(dataset: Any) -> str | None:
    """What tells a dataset from others without a look at its examples; None without it."""
    mark = getattr(dataset, "mark", None)
    if isinstance(mark, str):
        return mark
    fingerprint = getattr(dataset, "_fingerprint", None)  # of a datasets.Dataset
    if not isinstance(fingerprint, str) or has_transform(dataset):
        return None
    files = [Path(file["filename"]).stat() for file in getattr(dataset, "cache_files", ())]
    return f"{fingerprint} {[(file.st_size, file.st_mtime_ns) for file in files]}"


def has_transform(dataset: Any) -> bool:
    """Whether a function of the user makes the examples of a ``datasets.Dataset``.

    What the function does may change, and the data set's fingerprint does not show it.
    """
    return dataset.format["type"] == "custom"


def content_of_rows(batch: Sequence[Tensor]) -> bytes:
    """What :func:`content_of` returns for each row of these tensors, one row after the other."""
    n_rows = len(batch[0])
    head = describe(tuple(tensor[:1] for tensor in batch)).encode()
    columns = [np.tile(np.frombuffer(head, np.uint8), (n_rows, 1))]
    for tensor in batch:
        rows = _dense(tensor).reshape(n_rows, tensor[0].numel())
        columns.append(rows.view(torch.uint8).numpy())
    return np.concatenate(columns, axis=1).tobytes()


def content_of(batch: Any) -> bytes:
    """The content of a batch of any kind as bytes: names, shapes, numbers and texts."""
    parts = [describe(batch).encode()]
    for leaf in tree_leaves(to_device(batch, torch.device("cpu"))):
        if isinstance(leaf, Tensor):
            parts.append(_dense(leaf).view(-1).view(torch.uint8).numpy().tobytes())  # of any dtype
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            parts.append(leaf.tobytes())
        elif isinstance(leaf, str | bytes | bool | int | float | np.generic | None):
            parts.append(f"{leaf!r};".encode())
    return b"".join(parts)


def _dense(tensor: Tensor) -> Tensor:
    """A copy in the CPU's memory, without gaps."""
    return tensor.to_dense().detach().cpu().clone(memory_format=torch.contiguous_format)
