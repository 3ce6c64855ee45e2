"""The queries of a command line: checked before a posterior is fitted, and turned into labels."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from blr_analysis.errors import InputError, told_as

if TYPE_CHECKING:  # torch is loaded by the commands that compute, not by --help
    from blr_analysis.posterior import Posterior
    from blr_analysis.task import Task

TARGET = "target"
NAME = re.compile(r"[^\W\d]\w*")  # letters, digits and underscores; no digit comes first


def count_before_scores(remove: str | None, relabel: list[str], task: Task) -> int | None:
    """The number of examples that leave or get another label.

    Returns:
        None where a query asks for scores, which are not computed yet.

    Raises:
        InputError: one of the queries cannot be answered.
    """
    selections = []
    if remove is not None:
        selections.append([rows_before_scores(remove, task)])
    queries = [query_and_label(text)[0] for text in relabel]
    selections.append([rows_before_scores(query, task, name="relabel") for query in queries])
    count = 0
    for rows_of_queries in selections:
        rows: set[int] = set()
        for chosen in rows_of_queries:
            if chosen is None:
                return None
            rows |= chosen
        count += len(rows)
    return count


def query_and_label(text: str) -> tuple[str, str]:
    """The query and the label of ``QUERY:LABEL``; the last colon separates them.

    Raises:
        InputError: the text has no colon.

    >>> query_and_label("annotator == 'eve': 2")
    ("annotator == 'eve'", '2')
    """
    query, colon, label = text.rpartition(":")
    if not colon:
        raise InputError(f"--relabel {text!r} has no label: write QUERY:LABEL")
    return query.strip(), label.strip()


def new_labels(texts: list[str], task: Task, posterior: Posterior) -> dict[int, Any]:
    """The new label of every example that a ``QUERY:LABEL`` selects, by the example's index.

    Where two queries select an example, the later one decides.

    Raises:
        InputError: a text has no colon, or its query cannot be answered.
    """
    from blr_analysis.sensitivity.subjects import subject_of

    subject = subject_of(task, posterior)
    labels: dict[int, Any] = {}
    for text in texts:
        query, label_text = query_and_label(text)
        label = number_or_name(label_text)
        for index in subject.select(query, "relabel").tolist():
            labels[index] = label
    return labels


def number_or_name(text: str) -> int | float | str:
    """A number where the text reads as one; else the text, which names a class.

    >>> [number_or_name(text) for text in ("2", "-0.5", "cat", "--2", "2²", "1_2")]
    [2, -0.5, 'cat', '--2', '2²', '1_2']
    """
    if "_" in text:  # Python would read 1_2 as 12
        return text
    for number_type in (int, float):
        with suppress(ValueError):
            return number_type(text)
    return text


def rows_before_scores(query: str, task: Task, *, name: str = "remove") -> set[int] | None:
    """The indices of the examples that a query selects; None where it asks for scores.

    The scores are not computed yet. A query of metadata and targets is answered; a query of scores
    is tried on a table in which every score is 0, so that only its names and its grammar are
    checked.

    Raises:
        InputError: the query cannot be answered.
    """
    from blr_analysis.sensitivity.selection import (
        check_answer,
        check_comparison,
        is_reserved,
        meant,
        rows_of_query,
    )

    check_comparison(query, name)
    if any(is_reserved(column) for column in task.metadata):
        return (
            None  # the scores' table will give these columns other names, which are unknown so far
        )
    score_columns = _score_columns(query)
    table = _table_before_scores(task, score_columns)
    if score_columns == {TARGET}:
        targets = _single_targets(task)
        if targets is not None:
            table[TARGET] = targets
            score_columns = set()
    values = {column: table[column].tolist() for column in table}
    if not score_columns:
        return set(rows_of_query(query, table, values, name)["index"])
    failure = f"{name}={query!r} is no query of these data"
    with told_as(InputError, failure), meant(failure, query, values):
        answer = table.eval(query)
    check_answer(answer, len(table), failure)
    return None


def _score_columns(query: str) -> set[str]:
    """The names in a query that belong to columns of scores."""
    from blr_analysis.sensitivity.selection import is_reserved

    return {word for word in NAME.findall(query) if is_reserved(word) and word != "index"}


def _table_before_scores(task: Task, score_columns: set[str]) -> Any:
    """A DataFrame of the task's metadata and indices, with 0 for every score."""
    import pandas as pd

    from blr_analysis.sensitivity.selection import RESERVED

    scores = dict.fromkeys([*RESERVED, *score_columns], 0.0)
    return pd.DataFrame({**task.metadata, **scores, "index": range(task.n_data)})


def _single_targets(task: Task) -> list[Any] | None:
    """The target of every example; None where examples have several."""
    from blr_analysis.audit.findings import all_targets

    if task.likelihood.is_sequence:
        return None
    targets = all_targets(task)
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    return targets.tolist() if targets.ndim == 1 else None
