"""The queries of a command line: checked before a posterior is fitted, and turned into labels."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from blr_analysis.errors import InputError, told_as

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.posterior import Posterior
    from blr_analysis.task import Task

WORD = re.compile(r"[^\W\d]\w*")


def check_queries(remove: str | None, relabel: list[str], task: Task) -> None:
    """Raise :class:`InputError` where one of the queries cannot be answered."""
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


def labels_of(texts: list[str], task: Task, posterior: Posterior) -> dict[int, Any]:
    """The new label of each example, by index, that ``QUERY:LABEL`` texts ask for.

    Raises:
        InputError: no colon, or a query that cannot be answered.
    """
    from blr_analysis.sensitivity.subjects import subject_of

    subject = subject_of(task, posterior)
    labels: dict[int, Any] = {}
    for text in texts:
        query, word = query_and_label(text)
        indices = subject.select(query, "relabel").tolist()
        labels |= dict.fromkeys(indices, label_of(word))
    return labels


def label_of(word: str) -> int | float | str:
    """A number where the word reads as one; else the word, which names a class.

    >>> label_of("2"), label_of("0.5"), label_of("cat")
    (2, 0.5, 'cat')
    """
    if word.lstrip("-").isdigit():
        return int(word)
    try:
        return float(word)
    except ValueError:
        return word


def check_query(query: str, task: Task, *, name: str = "remove") -> None:
    """Raise :class:`InputError` where a query cannot be answered.

    The scores are not computed yet. The query is tried on a table of the task's metadata, with
    zeros in the columns of the scores.
    """
    import pandas as pd

    from blr_analysis.sensitivity.selection import (
        RESERVED,
        RESERVED_PREFIXES,
        check_comparison,
        meant,
        rows_of_query,
    )

    check_comparison(query, name)
    if any(column in RESERVED or column.startswith(RESERVED_PREFIXES) for column in task.metadata):
        return  # the scores' table renames these metadata; their names are not known yet
    computed = {*RESERVED} - {"index"}
    words = WORD.findall(query)
    score_columns = {
        word for word in words if word in computed or word.startswith(RESERVED_PREFIXES)
    }
    zeros = dict.fromkeys({*RESERVED, *score_columns}, 0.0)
    table = pd.DataFrame({**task.metadata, **zeros, "index": range(task.n_data)})
    values = {column: table[column].tolist() for column in table}
    refused = f"{name}={query!r} is no query of these data"
    with told_as(InputError, refused), meant(refused, query, values):
        table.query(query)
    if not score_columns:  # otherwise the rows depend on the scores, which are zeros so far
        rows_of_query(query, table, values, name)
