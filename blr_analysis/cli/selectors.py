"""Which examples are meant: ``target=3``, ``source == 'web' and loss > 2.5``, or ``3,17``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import pandas as pd
import torch
from pandas.errors import UndefinedVariableError
from torch import Tensor

from blr_analysis.audit import investigate
from blr_analysis.audit.findings import JUDGED
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError
from blr_analysis.posterior import Posterior
from blr_analysis.sensitivity import sensitivity
from blr_analysis.sensitivity.selection import CHEAP, Columns
from blr_analysis.task import Task

# Names that metadata do not keep in the audit's table.
RESERVED = (*CHEAP, "error", "variance", "deviation", "self_influence", "leverage", "region")
RESERVED += (*JUDGED, "left_out_prediction", "left_out_loss")
HOW = "write COLUMN=VALUE, a pandas query such as \"loss > 2 and source == 'web'\", or 3,17"
_INDICES = re.compile(r"\s*\d+(\s*,\s*\d+)*\s*,?\s*")
_EQUALS = re.compile(r"\s*([^=<>!]+?)\s*=\s*([^=].*?)\s*", re.DOTALL)


def check(text: str) -> None:
    """Refuse what is no selection, before any work: calls, attributes and ``@`` among it.

    Raises:
        InputError: neither indices nor ``COLUMN=VALUE`` nor an expression of columns.
    """
    if _INDICES.fullmatch(text) or _EQUALS.fullmatch(text):
        return
    try:
        tree = ast.parse(re.sub("`[^`]*`", "_", text).strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise InputError(f"cannot read the selection {text!r}: {HOW}") from None
    if any(isinstance(node, ast.Call | ast.Attribute) for node in ast.walk(tree)):
        raise InputError(f"the selection {text!r} may compare columns, not call functions: {HOW}")


def selected(texts: Sequence[str], task: Task, posterior: Posterior) -> Tensor:
    """A mask ``[N]`` of the examples that any of the selections means.

    Raises:
        InputError: no such column or index, a value of another kind, or nothing selected.
    """

    @cache
    def whole() -> pd.DataFrame:
        if task.likelihood.is_sequence:
            return sensitivity(task, posterior).table
        return investigate(task, posterior, by=None).table

    mask = torch.zeros(task.n_data, dtype=torch.bool)
    for text in texts:
        check(text)
        if _INDICES.fullmatch(text):
            indices = [int(part) for part in text.split(",") if part.strip()]
            mask[chosen_indices(indices, task.n_data, text)] = True
            continue
        rows = _rows(text, _quick(text, task, posterior), whole)
        if not rows.any():
            raise InputError(f"{text!r} selects none of the {task.n_data:,} examples")
        mask |= torch.tensor(rows.to_numpy(dtype=bool))
    return mask


def matches(text: str, table: pd.DataFrame) -> pd.Series:
    """For each row whether the selection holds.

    >>> matches("source=web", pd.DataFrame({"source": ["web", "book"]})).tolist()
    [True, False]
    >>> matches("target > 1 or target == 0", pd.DataFrame({"target": [0, 1, 2]})).tolist()
    [True, False, True]
    >>> table = pd.DataFrame({"when": pd.date_range("2020-01-04", periods=2)})
    >>> matches("when=2020-01-05", table).tolist(), matches("when != '2020-01-05'", table).tolist()
    ([False, True], [True, False])

    Raises:
        UndefinedVariableError: a name that is no column.
        InputError: a value of another kind than the column's, or no true-or-false answer.
    """
    simple = _EQUALS.fullmatch(text)
    query = text if simple is None else f"`{simple[1]}` == {_literal(table, *simple.groups())}"
    query, dates = _dated(query, table)
    try:
        rows = table.eval(query, engine="python", local_dict=dates, global_dict={})
    except UndefinedVariableError:
        raise
    except Exception as error:  # whatever pandas makes of the user's expression
        raise InputError(f"the selection {text!r} cannot be answered: {error}") from error
    if not isinstance(rows, pd.Series) or not pd.api.types.is_bool_dtype(rows):
        raise InputError(f"cannot read the selection {text!r}: {HOW}")
    return rows


def _dated(query: str, table: pd.DataFrame) -> tuple[str, dict[str, Any]]:
    """The query with the words that a column of dates shall equal as dates: pandas compares them
    as words, which no date equals."""
    dates: dict[str, Any] = {}
    for column in (c for c in table if pd.api.types.is_datetime64_any_dtype(table[c])):

        def date(found: re.Match[str], column: Any = column) -> str:
            try:
                day = pd.Timestamp(found[2][1:-1])
            except ValueError:
                raise InputError(f"column {column!r} holds dates, not {found[2]}") from None
            zone = table[column].dt.tz
            name = f"date_{len(dates)}"
            dates[name] = day.tz_localize(zone) if zone and day.tzinfo is None else day
            return f"{found[1]}@{name}"

        name = re.escape(str(column))
        words = "'[^']*'|\"[^\"]*\""
        query = re.sub(rf"((?:`{name}`|(?<![\w`]){name})\s*[=!]=\s*)({words})", date, query)
    return query, dates


def _literal(table: pd.DataFrame, column: str, value: str) -> str:
    """The value as the column's kind writes it: a number, True or False, or a word."""
    kind = pd.api.types.infer_dtype(table[column], skipna=True) if column in table else "string"
    if kind == "boolean":
        words = {"true": "True", "yes": "True", "1": "True"}
        words |= {"false": "False", "no": "False", "0": "False"}
        if value.lower() not in words:
            raise InputError(f"column {column!r} holds true and false, not {value!r}")
        return words[value.lower()]
    if kind in ("integer", "floating", "mixed-integer-float"):
        try:
            return repr(float(value))
        except ValueError:
            raise InputError(f"column {column!r} holds numbers, and {value!r} is none") from None
    return repr(value)


def _rows(text: str, quick: pd.DataFrame, whole: Callable[[], pd.DataFrame]) -> pd.Series:
    """The analyses run only where the text names a column that needs them."""
    with suppress(UndefinedVariableError):
        return matches(text, quick)
    try:
        return matches(text, whole())
    except UndefinedVariableError as error:
        known = ", ".join(map(str, whole().columns))
        raise InputError(
            f"{text!r}: {error}; words stand in quotes, the columns are {known}"
        ) from None


def _quick(text: str, task: Task, posterior: Posterior) -> pd.DataFrame:
    """The metadata, and the columns that the text names and forward passes alone give."""
    columns = Columns(task, posterior.on(task))
    table = {str(k): list(v) for k, v in task.metadata.items() if k not in RESERVED}
    for name in CHEAP:
        if name in text and not task.likelihood.is_sequence:
            with suppress(InputError):  # several per example have names of their own
                table[name] = list(columns[name])
    return pd.DataFrame(table)
