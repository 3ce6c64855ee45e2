"""Which examples are meant: a mask, indices, or a question asked of the table's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError, told_as
from blr_analysis.sensitivity.slips import ASSIGNMENT, QUOTED, why_nothing, why_unreadable

Selection = Any  # boolean mask [N] | indices | (row) -> bool
CHEAP = ("index", "target", "prediction", "loss")  # forward passes are enough for these
RESERVED = (*CHEAP, "error", "variance", "deviation", "self_influence", "leverage", "tokens")

SEVERAL = ("target_", "prediction_")


class Columns:
    """The columns of a subject's table, by their names there, computed when first asked for."""

    def __init__(self, subject: Any) -> None:
        self._subject = subject
        metadata = subject.metadata
        is_renamed = any(n in RESERVED or n.startswith(SEVERAL) for n in metadata)
        self._metadata: Mapping[str, Sequence[Any]] = {} if is_renamed else metadata

    def __getitem__(self, name: str) -> Sequence[Any]:
        if name in self._metadata:
            return self._metadata[name]
        if name in CHEAP and name in self._cheap:
            return self._cheap[name]
        if name not in self._all:
            raise InputError(f"the table has no column {name!r}; it has {self.names()}")
        return self._all[name]

    def names(self) -> list[str]:
        """Every column of the table."""
        return list(self._all)

    @cached_property
    def table(self) -> Any:
        """The scores' own."""
        return self._subject.scores().table

    @cached_property
    def _all(self) -> dict[str, Sequence[Any]]:
        return {str(name): self.table[name].tolist() for name in self.table}

    @cached_property
    def _cheap(self) -> dict[str, Sequence[Any]]:
        """What forward passes tell; several numbers per example have names of their own."""
        columns: dict[str, Sequence[Any]] = {}
        for name, values in self._subject.cheap_columns().items():
            is_one_number = values.ndim == 2 and values.shape[-1] == 1
            flat = values.squeeze(-1) if is_one_number else values
            if flat.ndim == 1:
                columns[name] = flat.tolist()
        return columns


class ExampleRow(Mapping[str, Any]):
    """One row of the table: ``row.target`` or ``row["target"]``."""

    def __init__(self, columns: Columns, index: int) -> None:
        self._columns, self._index = columns, index

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._columns[name][self._index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names())

    def __len__(self) -> int:
        return len(self._columns.names())


def select(
    selection: Selection, subject: Any, *, name: str = "remove", labels: Any = None
) -> Tensor:
    """The indices that are meant, sorted, ``[M]`` long.

    Args:
        subject: whose examples are meant.
        labels: names of rows, which a pandas Index may use.

    Raises:
        InputError: a mask of another length, indices that repeat or lie outside the data,
            something that is neither, a function that does not answer true or false, or a
            selection of nothing.
    """
    n = subject.n
    if isinstance(selection, str):
        chosen = _queried(selection, Columns(subject), name)
    elif callable(selection):
        chosen = _asked(selection, Columns(subject), n, name)
    else:
        chosen = chosen_indices(selection, n, name, labels)
    return each_once(chosen, n, name)


def each_once(chosen: Sequence[int], n: int, name: str) -> Tensor:
    """These indices as a sorted tensor.

    Raises:
        InputError: none, or one that repeats.
    """
    if not chosen:
        raise InputError(f"{name} selects none of the {n} examples")
    indices = torch.tensor(sorted(chosen))
    repeated = indices[1:][indices.diff() == 0]
    if len(repeated):
        twice = int(repeated[0])
        raise InputError(f"{name} names example {twice} more than once; name each example once")
    return indices


def _asked(question: Callable[[ExampleRow], Any], columns: Columns, n: int, name: str) -> list[int]:
    chosen = []
    for i in range(n):
        with told_as(InputError, f"the function {name} failed on the row of example {i}"):
            answer = question(ExampleRow(columns, i))
        if _yes(answer, i, name):
            chosen.append(i)
    return chosen


def check_comparison(question: str, name: str) -> None:
    """Raise :class:`InputError` where a query would set a value: ``annotator = 'eve'``."""
    if ASSIGNMENT.search(QUOTED.sub("", question)):
        raise InputError(f"{name}={question!r} sets a value: compare with ==")


def _queried(question: str, columns: Columns, name: str) -> list[int]:
    """The rows of a query, as pandas' ``DataFrame.query`` reads it."""
    check_comparison(question, name)
    table = columns.table
    values = {str(column): table[column].tolist() for column in table}
    return rows_of_query(question, table, values, name)["index"].tolist()


@contextmanager
def meant(refused: str, question: str, values: Mapping[str, Sequence[Any]]) -> Iterator[None]:
    """Around the reading of a query: where it fails by a name that is none, say which was meant."""
    try:
        yield
    except Exception as error:
        remedy = why_unreadable(question, values)
        if remedy:
            raise InputError(f"{refused}: {remedy}") from error
        raise


def rows_of_query(
    question: str, table: Any, values: Mapping[str, Sequence[Any]], name: str = "remove"
) -> Any:
    """The rows of a DataFrame that a query selects.

    Args:
        values: of the columns that a message may show.

    Raises:
        InputError: a query that cannot be read or selects nothing, with what was probably meant.
    """
    refused = f"{name}={question!r} is no query of these data"
    with told_as(InputError, refused), meant(refused, question, values):
        rows = table.query(question)
    if not len(rows):
        reason = why_nothing(question, values)
        selects = f"{name}={question!r} selects none of the {len(table)} examples"
        raise InputError(f"{selects}: {reason}" if reason else selects)
    return rows


def _yes(answer: Any, index: int, name: str) -> bool:
    arrays = isinstance(answer, (Tensor, np.ndarray, np.generic))
    value = answer.item() if arrays and math.prod(answer.shape) == 1 else answer
    if isinstance(value, Integral) and value in (0, 1):  # True and False are integers
        return bool(value)
    raise InputError(
        f"the function {name} must answer True or False for a row, got {answer!r} for example "
        f"{index}"
    )


def groups_by(by: str, subject: Any) -> dict[Any, Tensor]:
    """Indices of the examples that share a value of a column, by value in sorted order.

    Missing values (NaN) make one group, the last.

    Raises:
        InputError: no such column, or one that holds several values per example.
    """
    if not isinstance(by, str):
        raise InputError(f"by must be the name of a column, got {by!r}")
    members: dict[Any, list[int]] = {}
    missing: list[int] = []
    for i, value in enumerate(subject.column(by)):
        try:
            value = value.item() if hasattr(value, "item") else value
            hash(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"column {by!r} holds several values per example") from error
        group = missing if _is_missing(value) else members.setdefault(value, [])
        group.append(i)
    try:
        keys = sorted(members)
    except TypeError:
        keys = sorted(members, key=str)
    groups = {key: torch.tensor(members[key]) for key in keys}
    return {**groups, float("nan"): torch.tensor(missing)} if missing else groups


def _is_missing(value: Any) -> bool:
    try:
        return bool(value != value)
    except TypeError:  # pandas.NA compares as NA
        return True
