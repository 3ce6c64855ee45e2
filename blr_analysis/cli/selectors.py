"""Which examples are meant: ``target=3``, ``loss>2.5``, ``source!=web``, or ``3,17``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from blr_analysis.audit import investigate
from blr_analysis.audit.findings import JUDGED
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError
from blr_analysis.posterior import Posterior
from blr_analysis.sensitivity.selection import Columns
from blr_analysis.task import Task

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
CHEAP = ("index", "target", "prediction", "loss")  # forward passes are enough for these
RESERVED = (*CHEAP, "error", "variance", "deviation", "self_influence", "leverage", "region")
RESERVED += (*JUDGED, "left_out_prediction", "left_out_loss")  # names that metadata do not keep
ORDERED = (">", ">=", "<", "<=")
_ASKED = re.compile(r"\s*([^=<>!]+?)\s*(==|!=|>=|<=|=|>|<)\s*(.*?)\s*", re.DOTALL)
_LISTED = re.compile(r"\s*\d+(\s*,\s*\d+)*\s*,?\s*")


@dataclass(frozen=True)
class Question:
    """A comparison of a column with a value, as it was typed."""

    column: str
    comparison: str
    value: str


def parse(text: str) -> Question | list[int]:
    """A comparison, or indices.

    >>> parse("loss>=2.5")
    Question(column='loss', comparison='>=', value='2.5')
    >>> parse("3, 17")
    [3, 17]

    Raises:
        InputError: neither.
    """
    if _LISTED.fullmatch(text):
        return [int(part) for part in text.split(",") if part.strip()]
    if asked := _ASKED.fullmatch(text):
        return Question(*asked.groups())
    raise InputError(
        f"cannot read the selection {text!r}: expected COLUMN=VALUE, COLUMN>VALUE (also !=, >=, "
        "<, <=; in quotes, so that the shell does not redirect), or indices such as 3,17"
    )


def selected(texts: Sequence[str], task: Task, posterior: Posterior) -> Tensor:
    """A mask ``[N]`` of the examples that any of the selections means.

    Raises:
        InputError: no such column or index, a value of another kind, or nothing selected.
    """
    column = columns_of(task, posterior)
    mask = torch.zeros(task.n_data, dtype=torch.bool)
    for text in texts:
        question = parse(text)
        if isinstance(question, Question):
            found = answers(column(question.column), question)
            if not any(found):
                raise InputError(f"{text!r} selects none of the {task.n_data:,} examples")
            mask |= torch.tensor(found)
        else:
            mask[chosen_indices(question, task.n_data, text)] = True
    return mask


def columns_of(task: Task, posterior: Posterior) -> Callable[[str], Sequence[Any]]:
    """The columns of the audit's table by name; the analyses run only where they are asked for."""
    plain = Columns(task, posterior.on(task))

    @cache
    def table() -> Any:
        return investigate(task, posterior, by=None).table

    def column(name: str) -> Sequence[Any]:
        if name in CHEAP or (name in task.metadata and name not in RESERVED):
            return plain[name]
        if name not in table():
            known = ", ".join(map(str, table().columns))
            raise InputError(f"there is no column {name!r}; there are {known}")
        return table()[name].tolist()

    return column


def answers(column: Sequence[Any], question: Question) -> list[bool]:
    """For each value of the column whether the comparison holds; missing values never do.

    >>> answers([1, 2, 3], Question("target", ">", "1.5"))
    [False, True, True]
    >>> answers(["web", "book"], Question("source", "!=", "web"))
    [False, True]

    Raises:
        InputError: a column of numbers against a word, or an order asked of words.
    """
    compare = COMPARISONS[question.comparison]
    column = [value.item() if hasattr(value, "item") else value for value in column]
    known = [value for value in column if not _missing(value)]
    if known and all(isinstance(value, bool) for value in known):
        wanted: Any = _yes_or_no(question)
    elif known and all(isinstance(value, Number) for value in known):
        wanted = _number(question)
    elif question.comparison in ORDERED:
        raise InputError(
            f"column {question.column!r} holds words, which {question.comparison!r} cannot "
            "compare; use = or !="
        )
    else:
        wanted = question.value
        return [not _missing(value) and compare(str(value), wanted) for value in column]
    return [not _missing(value) and bool(compare(value, wanted)) for value in column]


def _number(question: Question) -> float:
    try:
        return float(question.value)
    except ValueError:
        raise InputError(
            f"column {question.column!r} holds numbers, and {question.value!r} is none"
        ) from None


def _yes_or_no(question: Question) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if question.value.lower() not in words or question.comparison in ORDERED:
        raise InputError(
            f"column {question.column!r} holds true and false; select with "
            f"{question.column}=true or {question.column}=false"
        )
    return words[question.value.lower()]


def _missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError, RuntimeError):  # pandas.NA, arrays
        return False
