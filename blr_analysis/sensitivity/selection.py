"""Selections of examples: a mask, indices, a query string, or a function of a table's row."""

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

from blr_analysis.checks import did_you_mean
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError, told_as
from blr_analysis.sensitivity.slips import ASSIGNMENT, QUOTED, why_nothing, why_unreadable

Selection = Any  # boolean mask [N] | indices | query string | (row) -> bool
CHEAP = ("index", "target", "prediction", "loss")  # columns that take only forward passes
RESERVED = (*CHEAP, "error", "variance", "deviation", "self_influence", "leverage", "tokens")
RESERVED_PREFIXES = ("target_", "prediction_")  # of columns for several numbers per example


class Columns:
    """The columns of a subject's scores' table by name, computed when they are first needed.

    Metadata columns need no computation, unless the table renames some of them because a name is
    reserved.
    """

    def __init__(self, subject: Any) -> None:
        self._subject = subject
        self._metadata: Mapping[str, Sequence[Any]] = {}
        if not any(is_reserved(name) for name in subject.metadata):
            self._metadata = subject.metadata

    def __getitem__(self, name: str) -> Sequence[Any]:
        if name in self._metadata:
            return self._metadata[name]
        if name in CHEAP and name in self._cheap:
            return self._cheap[name]
        if name not in self._all:
            names = ", ".join(self.names())
            remedy = did_you_mean(name, self.names())
            raise InputError(f"the table has no column {name!r}; it has {names}{remedy}")
        return self._all[name]

    def names(self) -> list[str]:
        """Every column of the table."""
        return list(self._all)

    @cached_property
    def table(self) -> Any:
        """The scores' table, a DataFrame."""
        return self._subject.scores().table

    @cached_property
    def _all(self) -> dict[str, Sequence[Any]]:
        return {str(name): self.table[name].tolist() for name in self.table}

    @cached_property
    def _cheap(self) -> dict[str, Sequence[Any]]:
        """The columns that take only forward passes, with one number per example."""
        columns: dict[str, Sequence[Any]] = {}
        for name, values in self._subject.cheap_columns().items():
            is_column_vector = values.ndim == 2 and values.shape[-1] == 1
            if is_column_vector:
                values = values.squeeze(-1)
            if values.ndim == 1:
                columns[name] = values.tolist()
        return columns


def is_reserved(name: str) -> bool:
    """Whether the scores' table has this name for a column of its own."""
    return name in RESERVED or name.startswith(RESERVED_PREFIXES)


class ExampleRow(Mapping[str, Any]):
    """One row of the scores' table: ``row.target`` or ``row["target"]``."""

    def __init__(self, columns: Columns, index: int) -> None:
        self._columns = columns
        self._index = index

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
    """The sorted indices of a selection, ``[M]``.

    Args:
        selection: a mask, indices, a query string, or a function of a row.
        subject: has the examples.
        name: the argument's name in errors.
        labels: names of rows, which a pandas Index may use.

    Raises:
        InputError: the mask has another length, indices repeat or lie outside of the data, the
            query cannot be read, the function does not answer True or False, or the selection is
            empty.
    """
    n = subject.n
    if isinstance(selection, str):
        chosen = _chosen_by_query(selection, Columns(subject), name)
    elif callable(selection):
        chosen = _chosen_by_function(selection, Columns(subject), n, name)
    else:
        chosen = chosen_indices(selection, n, name, labels)
    return each_once(chosen, n, name)


def each_once(chosen: Sequence[int], n: int, name: str) -> Tensor:
    """These indices as a sorted tensor.

    Raises:
        InputError: there are none, or one repeats.
    """
    if len(chosen) == 0:
        raise InputError(f"{name} selects none of the {n} examples")
    indices = torch.tensor(sorted(chosen))
    repeated = indices[1:][indices.diff() == 0]
    if len(repeated) > 0:
        twice = int(repeated[0])
        raise InputError(f"{name} names example {twice} more than once; name each example once")
    return indices


def _chosen_by_function(
    question: Callable[[ExampleRow], Any], columns: Columns, n: int, name: str
) -> list[int]:
    """The indices of the rows for which the user's function answers True."""
    chosen = []
    for i in range(n):
        with told_as(InputError, f"the function {name} failed on the row of example {i}"):
            answer = question(ExampleRow(columns, i))
        if _as_bool(answer, i, name):
            chosen.append(i)
    return chosen


def check_comparison(question: str, name: str) -> None:
    """Raise :class:`InputError` where a query would set a value: ``annotator = 'eve'``."""
    if ASSIGNMENT.search(QUOTED.sub("", question)):
        raise InputError(f"{name}={question!r} sets a value: compare with ==")


def _chosen_by_query(question: str, columns: Columns, name: str) -> list[int]:
    """The indices of the rows that a query selects, as pandas' ``DataFrame.query`` reads it."""
    check_comparison(question, name)
    table = columns.table
    values = {str(column): table[column].tolist() for column in table}
    return rows_of_query(question, table, values, name)["index"].tolist()


@contextmanager
def meant(refused: str, question: str, values: Mapping[str, Sequence[Any]]) -> Iterator[None]:
    """Around the evaluation of a query: an error for an unknown name suggests the right one."""
    try:
        yield
    except Exception:
        remedy = why_unreadable(question, values)
        if remedy:
            raise InputError(f"{refused}: {remedy}") from None  # the query says it all
        raise


def check_answer(answer: Any, n: int, refused: str) -> None:
    """Raise :class:`InputError` unless a query answered True or False for each of n rows."""
    is_for_each_row = getattr(answer, "shape", ()) == (n,)
    if not is_for_each_row or answer.dtype.kind != "b":
        raise InputError(f"{refused}: compare a column with a value, as in target == 3")


def rows_of_query(
    question: str, table: Any, values: Mapping[str, Sequence[Any]], name: str = "remove"
) -> Any:
    """The rows of a DataFrame that a query selects.

    Args:
        values: the values of columns that an error may show.

    Raises:
        InputError: the query cannot be read or selects nothing; it says what was probably meant.
    """
    refused = f"{name}={question!r} is no query of these data"
    with told_as(InputError, refused), meant(refused, question, values):
        is_chosen = table.eval(question)
        check_answer(is_chosen, len(table), refused)
        rows = table[is_chosen]
    if len(rows) == 0:
        reason = why_nothing(question, values)
        selects = f"{name}={question!r} selects none of the {len(table)} examples"
        raise InputError(f"{selects}: {reason}" if reason else selects)
    return rows


def _as_bool(answer: Any, index: int, name: str) -> bool:
    """The answer of the user's function as a bool, or an InputError."""
    is_array = isinstance(answer, (Tensor, np.ndarray, np.generic))
    value = answer.item() if is_array and math.prod(answer.shape) == 1 else answer
    if isinstance(value, Integral) and value in (0, 1):  # True and False are integers
        return bool(value)
    raise InputError(
        f"the function {name} must answer True or False for a row, got {answer!r} for example "
        f"{index}"
    )


def groups_by(by: str, subject: Any) -> dict[Any, Tensor]:
    """The indices of the examples that share a value of a column, by value in sorted order.

    Missing values (NaN) make one group, which comes last.

    Raises:
        InputError: there is no such column, or it has several values per example.
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
        if _is_missing(value):
            missing.append(i)
        else:
            members.setdefault(value, []).append(i)
    try:
        keys = sorted(members)
    except TypeError:
        keys = sorted(members, key=str)
    groups = {key: torch.tensor(members[key]) for key in keys}
    if missing:
        groups[math.nan] = torch.tensor(missing)
    return groups


def _is_missing(value: Any) -> bool:
    """Whether this is NaN or pandas.NA, which do not equal themselves."""
    try:
        return bool(value != value)
    except TypeError:  # pandas.NA compares as NA
        return True
