"""Queries of a command line, checked before there is a posterior, and their labels."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from blr_analysis.errors import InputError, told_as

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.posterior import Posterior
    from blr_analysis.task import Task

WORD = re.compile(r"[^\W\d]\w*")


def check_queries(remove: str | None, relabel: list[str], task: Task) -> None:
    """Raise :class:`InputError` where a query cannot be answered, before anything is fitted."""
    if remove is not None:
        check_query(remove, task)
    for text in relabel:
        check_query(query_and_label(text)[0], task, name="relabel")


def query_and_label(text: str) -> tuple[str, str]:
    """The parts of ``QUERY:LABEL``.

    Raises:
        InputError: no colon.

    >>> query_and_label("annotator == 'eve': 2")
    ("annotator == 'eve'", '2')
    """
    query, colon, word = (part.strip() for part in text.rpartition(":"))
    if not colon:
        raise InputError(f"--relabel {text!r} has no label: write QUERY:LABEL")
    return query, word


def relabelled(texts: list[str], task: Task, posterior: Posterior) -> dict[int, Any]:
    """Index → label of ``QUERY:LABEL``; a number where it reads as one, else a class by its word.

    Raises:
        InputError: no colon, or a query that cannot be answered.
    """
    from blr_analysis.sensitivity.subjects import subject_of

    subject = subject_of(task, posterior)
    labels: dict[int, Any] = {}
    for query, word in map(query_and_label, texts):
        label: Any = word
        with suppress(ValueError):
            label = int(word) if word.lstrip("-").isdigit() else float(word)
        labels |= dict.fromkeys(subject.select(query, "relabel").tolist(), label)
    return labels


def check_query(question: str, task: Task, *, name: str = "remove") -> None:
    """Raise :class:`InputError` where a query cannot be answered: the task's metadata stand in the
    table as they are, every column of the scores as zeros."""
    import pandas as pd

    from blr_analysis.sensitivity.selection import RESERVED, SEVERAL, check_comparison

    check_comparison(question, name)
    if any(n in RESERVED or n.startswith(SEVERAL) for n in task.metadata):
        return  # such metadata have another name in the table, which only it knows
    computed = {*RESERVED} - {"index"}
    scores = {w for w in WORD.findall(question) if w in computed or w.startswith(SEVERAL)}
    zeros = dict.fromkeys({*RESERVED, *scores}, 0.0)
    table = pd.DataFrame({**task.metadata, **zeros, "index": range(task.n_data)})
    columns = [*RESERVED, *task.metadata]
    with told_as(InputError, f"{name}={question!r} is no query of {columns}"):
        chosen = table.query(question)
    if not len(chosen) and not scores:
        raise InputError(f"{name} selects none of the {task.n_data} examples")
