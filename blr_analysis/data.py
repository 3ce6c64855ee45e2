"""How examples are reached: by index, in the dataset's own order, the same on every visit.

Datasets, loaders and tensors are read into :class:`Examples`; what cannot be addressed by index,
or is drawn anew on every visit, is refused here with a word on what to do. What a forward pass
makes of a batch is checked here too, before a likelihood sees it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
import torch.utils.data as tud
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from blr_analysis.checks import some
from blr_analysis.errors import BLRError, DataError, InputError, ModelError, told_as
from blr_analysis.half import HALF
from blr_analysis.likelihoods import Likelihood
from blr_analysis.likelihoods.tokens import pixels_as_tokens
from blr_analysis.padding import Padding, aside

Forward = Callable[[nn.Module, Any], tuple[Any, Tensor]]
MOST_UNNAMED = 16  # columns of a matrix whose values are shown
NO_NUMBERS = ("string", "large", "null", "time", "date", "duration", "decimal", "binary")
NOT_FINITE = "the model's outputs are NaN or inf {}; check weights and inputs"
NUMBERS = "biuf"  # kinds of numpy's dtypes: booleans, integers, floats
REPEATS = 32  # examples that are read twice to find out whether the data stand still


@dataclass(frozen=True)
class Examples:
    """A map-style dataset and the function that makes a batch of its items.

    Attributes:
        columns: the names of the inputs of a DataFrame.
        classes: the words of its classes, in the order of their numbers.
        labels: the row labels of pandas objects.

    >>> data = read_data((torch.arange(8).reshape(4, 2), torch.arange(4)))
    >>> data.batch(torch.tensor([2, 0]))[1]
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
        if self._tensors is not None:
            whole, rows = self._tensors
            indices = indices if rows is None else rows[indices]
            if len(indices) and bool((indices.diff() == 1).all()):
                return whole[int(indices[0]) : int(indices[-1]) + 1]
            return whole[indices]
        order = indices.tolist()
        items: list[Any] = []

        def failed() -> str:
            return f"the dataset failed on example {order[len(items)]} of {len(self)}"

        with told_as(DataError, failed, f"each index 0 … {len(self) - 1} must give an example"):
            for i in order:
                items.append(self.dataset[i])
        with told_as(DataError, f"the collate function failed on examples {some(order)}"):
            return self.collate(items)

    def sha256(self, metadata: Mapping[str, Sequence[Any]]) -> str:
        """The hash of the metadata and of every example, read one by one."""
        digest = hashlib.sha256(_bytes(dict(sorted(metadata.items()))))
        for i in range(len(self)):
            digest.update(_bytes(self.batch(torch.tensor([i]))))
        return digest.hexdigest()

    def subset(self, indices: Sequence[int]) -> Examples:
        """Some of the examples, in the order given."""
        labels = None if self.labels is None else tuple(self.labels[i] for i in indices)
        return replace(self, dataset=tud.Subset(self.dataset, list(indices)), labels=labels)

    def check_coded_as(self, others: Examples) -> None:
        """Raise :class:`InputError` where a column or a class has another number there."""
        if _differ(self.columns, others.columns):
            raise InputError(
                "the columns of the two tasks differ; give both the same, in one order"
            )
        if _differ(self.classes, others.classes):
            raise InputError("the classes of the two tasks differ; give both one Categorical")

    def row(self, index: int) -> dict[str, Any]:
        """An example that is a row of a table: its values by column; empty of any other."""
        if self._tensors is None:
            return {}
        x = self.batch(torch.tensor([index]))[0]
        names = self.columns
        is_small_matrix = x.ndim == 2 and x.is_floating_point() and x.shape[1] <= MOST_UNNAMED
        if not names and is_small_matrix:
            names = tuple(f"input {k}" for k in range(x.shape[1]))
        if not names:
            return {}
        return dict(zip(names, x[0].tolist(), strict=True))

    @property
    def is_tensors(self) -> bool:
        """Whether batches are slices of tensors."""
        return self._tensors is not None

    @property
    def is_rows(self) -> bool:
        """Whether torch's own collate function makes a batch of single items."""
        return self.collate is tud.default_collate and self._tensors is None

    @cached_property
    def _tensors(self) -> tuple[tud.TensorDataset, Tensor | None] | None:
        """The tensors that the data are made of, and which of their rows are meant (None: all of
        them); None where the data are no tensors."""
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
            are_there = int(rows.min()) >= 0 and int(rows.max()) < len(dataset)
            if not are_there:
                return None  # read one by one, so that the missing example is named
        return dataset, rows


def _differ(names: Sequence[str] | None, other_names: Sequence[str] | None) -> bool:
    """Whether both have names, and others or in another order."""
    if names is None or other_names is None:
        return False
    return names != other_names


def read_data(data: Any, padding: Padding | None = None) -> Examples:
    """Examples from a map-style dataset, a loader over one, or a pair (X, y).

    Args:
        padding: makes batches of rows that torch's own collate function would make.

    Raises:
        DataError: empty or iterable-style data, samplers that subset, reorder or reweight,
            tensors that are no pair, data that change from one visit to the next.
    """
    if isinstance(data, Examples):
        return data
    examples = _examples(data)
    if padding is not None and examples.is_rows:
        examples = replace(examples, collate=padding)
    if len(examples) == 0:
        raise DataError("the data hold no examples; a task needs at least one")
    if not examples.is_tensors:
        _check_stand_still(examples)
    return examples


def _check_stand_still(examples: Examples) -> None:
    """Raise :class:`DataError` where an example differs when it is read again."""

    def differs(indices: Tensor) -> bool:
        return _bytes(examples.batch(indices)) != _bytes(examples.batch(indices))

    n = len(examples)
    probe = torch.linspace(0, n - 1, min(n, REPEATS), dtype=torch.float64).long()
    if not differs(probe):
        return
    drawn = [int(index) for index in probe if differs(index.reshape(1))]
    fault = f"example {drawn[0]} differs" if drawn else "the same examples differ"
    raise DataError(
        f"{fault} when read again (augmentation? random masks?): give the Task the data without "
        "that, and Recipe(augment=) what training drew"
    )


def opened(
    data: Any,
    target: str | None,
    dtype: torch.dtype,
    model: nn.Module | None = None,
    padding: Padding | None = None,
) -> tuple[Any, Any]:
    """What pandas and ``datasets`` hand out, as data that can be read, and what describes them; the
    numbers of a DataFrame in the model's ``dtype``.

    Args:
        model: whose forward pass takes the columns of a ``datasets.Dataset`` by their names; None:
            a function of the user's takes them.
        padding: of rows of unequal length.

    Raises:
        DataError: a DataFrame without target=, no column of numbers, a row without a label.
        InputError: no such column, two of one name, or target= of other data.
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
        return _from_hub(data, target, model, padding)
    if is_frame:
        return _from_frame(data, target, dtype)
    return data, None


def _from_frame(frame: Any, target: str | None, dtype: torch.dtype) -> tuple[Examples, Any]:
    if target is None:
        raise DataError(
            "a DataFrame needs target=, the column to predict; without labels give its to_numpy()"
        )
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InputError(f"two columns of the DataFrame are called {twice!r}; rename one")
    frame = frame.infer_objects()  # columns of objects that are all numbers become numbers
    features = frame.drop(columns=target)
    inputs = features.loc[:, [column.kind in NUMBERS for column in features.dtypes]]
    if not len(inputs.columns):
        raise DataError("the DataFrame has no column of numbers to predict from")
    real = np.float64 if dtype == torch.float64 else np.float32
    y, classes = _labels(frame[target], real)
    examples = replace(
        read_data((inputs.to_numpy(dtype=real, copy=True), y)),
        columns=tuple(map(str, inputs)),
        classes=classes,
        labels=tuple(frame.index),
    )
    return examples, features.drop(columns=list(inputs))


def _labels(column: Any, real: Any) -> tuple[Tensor, tuple[str, ...]]:
    """A column to predict, words as the numbers of their classes, and the words."""
    missing = column.index[column.isna()]
    if len(missing):
        raise DataError(f"row {missing[0]!r} has no {column.name}; drop it")
    kind = column.dtype.kind
    if kind in NUMBERS:
        dtype = real if kind == "f" else np.int64
        return torch.from_numpy(column.to_numpy(dtype=dtype, copy=True)), ()
    coded = column if hasattr(column, "cat") else column.astype(str).astype("category")
    numbers = coded.cat.codes.to_numpy(dtype=np.int64, copy=True)
    return torch.from_numpy(numbers), tuple(map(str, coded.cat.categories))


def _from_hub(
    data: Any, target: str | None, model: nn.Module | None, padding: Padding | None
) -> tuple[Examples, dict[str, list[Any]]]:
    """Columns of words, times and nothing, and those that the model does not take, are metadata;
    the others go to the model, as tensors."""
    names = list(data.column_names)
    label = target or next((n for n in ("labels", "label") if n in names), None)
    words = [name for name in names if not _of_numbers(data.features[name])]
    not_inputs = set(words)
    if model is not None:
        not_inputs |= set(aside(model, names))
    if target is not None:
        not_inputs.add("labels")
    besides = [name for name in names if name != label and name in not_inputs]
    if not set(names) - {label, *besides}:
        raise DataError(f"no column of {some(names)} goes to the model; tokenise the texts")
    if label in words and None in list(data[label]):
        raise DataError(f"row {list(data[label]).index(None)} has no {label}; drop it")
    rows = data.class_encode_column(label) if label in words else data
    classes = getattr(rows.features.get(label), "names", None)
    rows = rows.remove_columns(besides)
    if label not in (None, "labels"):
        rows = rows.rename_column(label, "labels")
    examples = read_data(rows.with_format("torch"), padding)
    if classes is not None:
        examples = replace(examples, classes=tuple(classes))
    return examples, {name: list(data[name]) for name in besides}


def _of_numbers(feature: Any) -> bool:
    """Whether a column of this kind can become tensors: numbers, lists of them, images."""
    while isinstance(feature, list | tuple) or hasattr(feature, "feature"):
        feature = feature[0] if isinstance(feature, list | tuple) else feature.feature
    return not str(getattr(feature, "dtype", "")).startswith(NO_NUMBERS)


def _examples(data: Any) -> Examples:
    if isinstance(data, tud.DataLoader):
        inside = _examples(data.dataset).dataset
        _check_sampler(data)
        return Examples(inside, data.collate_fn)
    may_be_pair = isinstance(data, tuple) or (isinstance(data, list) and len(data) == 2)
    if may_be_pair and any(hasattr(part, "__array__") for part in data):
        pair = _pair(data)
        _warn_of_labels(*data)
        return Examples(pair, labels=row_labels(dict(zip("Xy", data, strict=True)), len(pair)))
    if may_be_pair and all(type(part) is list for part in data):
        raise DataError("X and y are lists; give tensors or arrays: torch.tensor(X)")
    if isinstance(data, Tensor | np.ndarray):  # inputs without labels
        return Examples(tud.TensorDataset(_tensor("X", data)))
    inner = data
    while isinstance(inner, tud.Subset):
        if np.asarray(inner.indices).dtype == bool:
            raise DataError("the Subset has a mask for indices; give mask.nonzero().flatten()")
        inner = inner.dataset
    unfit = isinstance(data, (tud.IterableDataset, Mapping, str, bytes))
    if unfit or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise DataError(
            "data must be a Dataset, DataLoader, list, or (X, y), one split, got "
            f"{type(data).__name__}"
        )
    return Examples(data)


def _are_words(part: Any) -> bool:
    """Whether these are words, such as the names of classes."""
    if isinstance(part, Tensor):
        return False
    first = np.ravel(np.asarray(part[:1], dtype=object))
    return len(first) > 0 and isinstance(first[0], str)


def _tensor(name: str, values: Any) -> Tensor:
    """A tensor, or an array that may be written to."""
    with told_as(DataError, f"{name} cannot become a tensor", "give numbers"):
        if isinstance(values, Tensor):
            return values
        return torch.as_tensor(np.require(values, requirements="W"))


def _pair(data: Sequence[Any]) -> tud.TensorDataset:
    if len(data) != 2:
        raise DataError(f"data must be a pair (X, y), got {len(data)} arrays; see forward=")
    tensors: list[Tensor] = []
    for name, part in zip("Xy", data, strict=True):
        if _are_words(part):
            remedy = f"number them: pd.Categorical({name}).codes"
            raise DataError(f"{name} of (X, y) cannot become a tensor: it holds words; {remedy}")
        tensors.append(_tensor(f"{name} of (X, y)", part))
    x, y = tensors
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise DataError(f"X and y must have the same length, got {[*x.shape]} and {[*y.shape]}")
    return tud.TensorDataset(x, y)


def _warn_of_labels(x: Any, y: Any) -> None:
    """Say where y is of pandas with rows that are not 0 … N − 1, and X has none to compare."""
    has_labels = hasattr(y, "reindex") and tuple(y.index) != tuple(range(len(y)))
    if has_labels and not hasattr(x, "reindex"):
        warnings.warn(
            "y has row labels and X has none: both are read in the order in which they stand; "
            "if that is theirs, pass y.to_numpy(), else X as a DataFrame",
            stacklevel=5,
        )


def _check_sampler(loader: tud.DataLoader[Any]) -> None:
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    ordinary = isinstance(sampler, tud.SequentialSampler | tud.RandomSampler)
    if not ordinary or len(sampler) != len(loader.dataset) or getattr(sampler, "replacement", 0):  # type: ignore[arg-type]
        raise DataError(f"the DataLoader draws by {sampler}; pass the dataset itself")


def _bytes(batch: Any) -> bytes:
    """What can be told of a batch without knowing it: names, shapes, numbers, texts."""
    parts = [describe(batch).encode()]
    for x in tree_leaves(moved(batch, torch.device("cpu"))):
        if isinstance(x, Tensor):
            x = x.to_dense().detach().clone(memory_format=torch.contiguous_format)
            parts.append(x.view(-1).view(torch.uint8).numpy().tobytes())  # of any dtype
        elif isinstance(x, np.ndarray) and x.dtype != object:
            parts.append(x.tobytes())
        elif isinstance(x, str | bytes | bool | int | float | np.generic | None):
            parts.append(f"{x!r};".encode())
    return b"".join(parts)


def row_labels(parts: Mapping[str, Any], n_data: int) -> tuple[Any, ...] | None:
    """The one index of the pandas objects that the data are made of; None where there are none.

    An index 0 … N − 1 only counts rows. It goes with any other labels, unless these are the numbers
    0 … N − 1 in another order.

    Raises:
        InputError: they differ.
    """
    indexes = {tuple(part.index) for part in parts.values() if hasattr(part, "reindex")}
    places = tuple(range(n_data))
    labels = indexes - {places}
    if len(labels) > 1:
        raise InputError("the row labels of X and y differ; pass .to_numpy()")
    is_reordered = any(set(index) == set(places) for index in labels)
    if is_reordered and places in indexes:
        raise InputError("the row labels of X and y differ; pass .to_numpy()")
    return next(iter(labels or indexes), None)


def labels_beside(
    columns: Mapping[str, Any], n_data: int, labels: tuple[Any, ...] | None
) -> tuple[Any, ...] | None:
    """The row labels of a task: those of its data, which its metadata and weights must have too.

    Data without ``labels`` have rows 0 … N − 1. An index that only counts rows has no labels: it
    goes with data of every kind, but not with labels that are other places.

    Raises:
        InputError: a pandas object with another index.
    """
    places = tuple(range(n_data))
    reordered = labels is not None and labels != places and set(labels) == set(places)
    for name, column in columns.items():
        if not hasattr(column, "reindex"):
            continue
        index = tuple(column.index)
        counts_rows = index == places and not reordered
        if counts_rows or index == labels:
            labels = labels or places
            continue
        raise InputError(
            f"{name} has another row index than the data; in their order: reset_index(drop=True)"
        )
    return labels


def chosen_indices(
    indices: Any, n_data: int, name: str = "indices", labels: Sequence[Any] | None = None
) -> list[int]:
    """Indices or a boolean mask as a list of indices, checked, in the order given.

    A mask that is a pandas Series is read by its own index, which must be 0 … N − 1 or hold the
    ``labels`` of the examples; a pandas Index holds labels. Numbers in anything else are places.

    Raises:
        InputError: a mask of another length or index, an index out of range, or something else.
    """
    if hasattr(indices, "columns"):
        raise InputError(f"{name} is a table; give its row labels, {name}=table.index")
    if hasattr(indices, "get_indexer"):
        return _labelled(indices, name, labels)
    if hasattr(indices, "reindex") and indices.dtype.kind == "b":
        indices = _by_label(indices, n_data, name, labels)
    with told_as(InputError, f"{name} must be a boolean mask or integer indices"):
        indices = indices.to_numpy() if hasattr(indices, "to_numpy") else indices
        indices = list(indices) if isinstance(indices, range | set) else indices
        values = indices if isinstance(indices, Tensor) else torch.tensor(indices)
    values = torch.atleast_1d(values)
    if values.ndim != 1 or (len(values) and (values.is_floating_point() or values.is_complex())):
        raise InputError(f"{name} must hold booleans or integer indices, got {describe(values)}")
    if values.dtype == torch.bool:
        if len(values) != n_data:
            raise InputError(f"the mask {name} has {len(values)} entries for {n_data} examples")
        return values.nonzero().flatten().tolist()
    chosen = [int(i) for i in values.tolist()]
    if bad := [i for i in chosen if not 0 <= i < n_data]:
        raise InputError(f"{name} names example {bad[0]}, but the examples are 0 … {n_data - 1}")
    return chosen


def _by_label(mask: Any, n_data: int, name: str, labels: Sequence[Any] | None) -> Any:
    """A boolean Series in the order of the examples, where it is certain."""
    of_mask = list(mask.index)
    places = list(range(n_data))
    of_examples = places if labels is None else list(labels)
    may_be_places = set(of_examples) == set(places)
    counts_rows = of_mask == places and not may_be_places
    if of_mask == of_examples or len(of_mask) != n_data or counts_rows:
        return mask
    is_reordered = mask.index.is_unique and set(of_mask) == set(of_examples)
    if may_be_places or not is_reordered:
        raise InputError(f"the index of {name} is not that of the examples; pass {name}.to_numpy()")
    return mask.reindex(of_examples)


def _labelled(chosen: Any, name: str, labels: Sequence[Any] | None) -> list[int]:
    """The places of a pandas Index of labels."""
    places = {label: i for i, label in enumerate(labels or ())}
    if labels is None or len(places) < len(labels) or not {*chosen} <= places.keys():
        raise InputError(f"{name} holds labels that no example, or several have: mask.to_numpy()")
    return [places[label] for label in chosen]


def read_metadata(metadata: Any, n_data: int) -> dict[str, list[Any]]:
    """Columns by name, one value per example, from a mapping or a DataFrame."""
    with told_as(InputError, "metadata must be columns by name, {'source': [...]}"):
        table = {} if metadata is None else metadata
        by_name = {str(name): table[name] for name in table}
    columns: dict[str, list[Any]] = {}
    for name, column in by_name.items():
        with told_as(InputError, f"metadata column {name!r} must be one value per example"):
            columns[name] = list(column.tolist() if isinstance(column, Tensor) else column)
        if isinstance(column, str) or len(columns[name]) != n_data:
            raise InputError(f"metadata column {name!r} must hold {n_data} values, one per example")
    return columns


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on a device: tensors inside lists, tuples and mappings, and what has ``.to``."""

    def send(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {k: moved(v, device) for k, v in x.items()}
        return x.to(device) if callable(getattr(x, "to", None)) else x

    return tree_map(send, batch, is_leaf=lambda x: isinstance(x, Mapping))


def padding(batch: Any) -> tuple[Tensor | None, Any]:
    """Which positions ``[B, T]`` of a batch are no padding, where it says so, and its labels."""
    parts = batch if isinstance(batch, tuple | list) else [batch]
    named = {name: x for p in parts if isinstance(p, Mapping) for name, x in p.items()}
    mask = named.get("attention_mask")
    labels = named.get("labels", parts[-1])
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None, labels


def padded_behind(batch: Any, ignored: int) -> Any:
    """The batch with padding moved from before a sequence to behind it, its labels ignored. A
    causal model then reads the sequence as it does alone, whatever shares its batch.

    >>> ids, mask = torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]])
    >>> moved_there = padded_behind({"labels": ids, "attention_mask": mask}, -100)
    >>> moved_there["labels"], moved_there["attention_mask"]
    (tensor([[   5,    6, -100]]), tensor([[1, 1, 0]]))
    """
    mask, labels = padding(batch)
    if mask is None or bool(mask[:, 0].all()):
        return batch
    before = mask.cumsum(1) == 0
    length = torch.arange(mask.shape[1], device=mask.device)
    order = (length + before.sum(1, keepdim=True)) % mask.shape[1]
    rows = torch.arange(len(mask), device=mask.device).unsqueeze(1)

    def turned(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape[:2] != mask.shape:
            return x
        return (x.masked_fill(before, ignored) if x is labels else x)[rows, order]

    return tree_map(turned, batch)


def describe(batch: Any) -> str:
    """Shapes and dtypes of a batch, for messages."""
    if isinstance(batch, Tensor):
        return f"{tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, (list, tuple)):
        return "(" + ", ".join(describe(v) for v in batch[:8]) + ")"
    return type(batch).__name__


def default_forward(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    """``(x, y)`` pairs, x a tensor or a dict of arguments, and dicts with ``labels``."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            refuse_unlabelled(batch)
        return model(**{k: v for k, v in batch.items() if k != "labels"}), batch["labels"]
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise DataError(f"no (x, y) and no dict, but {describe(batch)}; give forward=")
    x, y = batch
    return forward_of_inputs(model, x), y


def has_labels(batch: Any) -> bool:
    """Whether this is no batch of inputs alone: a tensor, a tuple of one, a dict without labels."""
    if isinstance(batch, Mapping):
        return "labels" in batch
    is_alone = isinstance(batch, tuple | list) and len(batch) == 1
    return not (is_alone or isinstance(batch, Tensor))


def refuse_unlabelled(batch: Any) -> NoReturn:
    """Raise :class:`DataError` of inputs without labels."""
    if isinstance(batch, Mapping):
        raise DataError(f"a dict batch needs 'labels', found {sorted(batch)}; see forward=")
    raise DataError(
        f"no labels, but inputs {describe(batch)}: posterior.predict and acquire alone do without"
    )


def forward_of_inputs(model: nn.Module, x: Any) -> Any:
    """The model's answer to inputs without labels, a tensor in its dtype."""
    if isinstance(x, tuple | list) and len(x) == 1:
        x = x[0]
    if isinstance(x, Mapping):
        return model(**x)
    if isinstance(x, Tensor) and x.is_floating_point():
        dtypes = dict.fromkeys(p.dtype for p in model.parameters() if p.is_floating_point())
        is_half_as_trained = x.dtype in dtypes and x.dtype in HALF
        if not is_half_as_trained:
            x = x.to(next(iter(dtypes), x.dtype))
    return model(x)


def check_inputs(batch: Any, indices: Tensor | None) -> None:
    """Refuse NaN and inf in the x of (x, y) pairs, which a saturated layer would hide."""
    x = batch[0] if isinstance(batch, tuple | list) and batch else None
    if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0:
        _check_finite(x, indices, DataError, "the inputs hold NaN or inf {}; drop or mend those")


def _check_finite(x: Tensor, indices: Tensor | None, error: type[BLRError], message: str) -> None:
    sum_is_finite = bool(torch.isfinite(x.sum()))  # the quicker question
    if not sum_is_finite:
        _refuse(~torch.isfinite(x).reshape(len(x), -1).all(1), indices, error, message)


def _refuse(bad: Tensor, indices: Tensor | None, error: type[BLRError], message: str) -> None:
    """Raise the error where there are bad rows, with the first of them."""
    rows = bad.nonzero().flatten().cpu()
    if not len(rows):
        return
    if indices is not None and len(indices) == len(bad):
        rows = indices.cpu()[rows]
    raise error(message.format(f"in {len(rows)} examples, the first at index {int(rows[0])}"))


def checked(
    outputs: Any, targets: Any, likelihood: Likelihood, indices: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What a forward pass returned as outputs ``[B, C]`` and targets, or an error saying why not.

    Raises:
        ModelError: no tensor of floats, not one row per example, NaN or inf.
        DataError: targets of another length, shape or dtype, out of range, or all ignored.
    """
    outputs = _real_outputs(outputs, likelihood)
    with told_as(DataError, "the targets must be a tensor of numbers"):
        targets = torch.as_tensor(targets, device=outputs.device)
    outputs, targets = likelihood.by_token(outputs, targets)
    likelihood.check_outputs(outputs)
    if indices is not None:
        check_rows(outputs, len(indices))
    if targets.ndim == 0 or len(targets) != len(outputs):
        raise DataError(f"targets {[*targets.shape]} for {len(outputs)} outputs; give one each")
    outputs, targets = likelihood.prepare(outputs, targets)
    counted = likelihood.counted(targets)
    if counted is not None:  # sequences without a token to score would have no loss at all
        message = "every label is ignored {}; drop those sequences"
        _refuse(~counted.any(-1), indices, DataError, message)
    _check_finite(outputs.detach(), indices, ModelError, NOT_FINITE)
    return outputs, targets


def checked_outputs(outputs: Any, likelihood: Likelihood, indices: Tensor | None) -> Tensor:
    """The outputs of inputs without labels; of images with a class per pixel ``[B, H·W, C]``.

    Raises:
        ModelError: as :func:`checked`.
    """
    outputs = _real_outputs(outputs, likelihood)
    if likelihood.is_sequence and outputs.ndim >= 4:
        outputs = pixels_as_tokens(outputs)
    likelihood.check_outputs(outputs)
    if indices is not None:
        check_rows(outputs, len(indices))
    _check_finite(outputs.detach(), indices, ModelError, NOT_FINITE)
    return outputs


def _real_outputs(outputs: Any, likelihood: Likelihood) -> Tensor:
    """The tensor among what a model returned, half precision as float32.

    Raises:
        ModelError: no tensor of floats.
    """
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = outputs["logits"]
    outputs = likelihood.join(getattr(outputs, "logits", outputs))
    if isinstance(outputs, Tensor) and outputs.dtype in HALF:
        outputs = outputs.float()
    if not isinstance(outputs, Tensor) or outputs.dtype not in (torch.float32, torch.float64):
        raise ModelError(f"the model must return real numbers, got {describe(outputs)}; forward=?")
    if outputs.ndim == 1 and not likelihood.integer_targets:
        outputs = outputs.unsqueeze(-1)
    return outputs


def check_rows(outputs: Tensor, size: int) -> None:
    """Raise :class:`ModelError` unless there is one row of outputs per example."""
    if len(outputs) != size:
        fault = f"the model returned {len(outputs)} rows of outputs for {size} examples"
        if len(outputs) == 1:
            fault += "; texts that are packed into one row are one example: pack them in the data"
        raise ModelError(fault)


def versions(batch: Any) -> list[int]:
    """A count for every tensor of a batch, which rises when the tensor is written to."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    return [-1 if x.is_inference() else x._version for x in tensors]
