"""The decisions about suspicious examples that a reader exports from the page as a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from blr_analysis.audit.findings import all_targets
from blr_analysis.errors import InputError, told_as
from blr_analysis.sensitivity.objective import with_labels
from blr_analysis.task import Task

ACTIONS = ("keep", "relabel", "drop")


def read_decisions(path: str | Path) -> dict[str, Any]:
    """The choices of a page's gallery, as ``blr.what_if(task, posterior, **choices)`` takes them.

    Args:
        path: the CSV that the page exports, columns ``index``, ``action`` (keep, relabel or drop)
            and ``label`` (the new one).

    Returns:
        ``remove``: indices to drop; ``relabel``: the new label by index. None where there are none.

    Raises:
        InputError: no such file, other columns, a row that says something else, or an example with
            two rows.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "decisions.csv")
        ...     _ = path.write_text("index,action,label\\n3,drop,\\n5,relabel,8\\n6,keep,\\n")
        ...     read_decisions(path)
        {'remove': [3], 'relabel': {5: 8}}
    """
    if not Path(path).is_file():
        raise InputError(f"there is no file {str(path)!r}: save decisions.csv on the page")
    with told_as(InputError, f"cannot read decisions from {str(path)!r}"):
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        rows = table[["index", "action", "label"]].to_numpy()
    remove: list[int] = []
    relabel: dict[int, int | float] = {}
    decided: set[int] = set()
    for line, (index, action, label) in enumerate(rows, 2):  # the first line has the names
        fault = (
            f"line {line} of {str(path)!r} is no decision: {index!r}, {action!r}, {label!r}; "
            "write an index, keep, drop or relabel, and for relabel the number of a class"
        )
        if action not in ACTIONS:
            raise InputError(fault)
        try:
            example = int(index)
            if action == "relabel":
                relabel[example] = _target(label)
        except ValueError:
            raise InputError(fault) from None
        if example in decided:
            raise InputError(
                f"{str(path)!r} decides on example {example} twice; keep one line of it"
            )
        decided.add(example)
        if action == "drop":
            remove.append(example)
    if not remove and not relabel:
        raise InputError(f"{str(path)!r} keeps every example: nothing to ask")
    return {"remove": remove or None, "relabel": relabel or None}


def cleaned(task: Task, path: str | Path) -> pd.DataFrame:
    """The data set with the decisions applied: a row for each example that stays.

    Columns are ``index`` (the row in the task's data), ``target`` (with the new labels) and the
    metadata. In a loader of your own, ``Subset(data, table["index"])`` are the examples that stay.

    Raises:
        InputError: as :func:`read_decisions`; a row that the task does not have.
        DataError: a label that the task cannot have.
    """
    decisions = read_decisions(path)
    dropped = decisions["remove"] or []
    relabelled = decisions["relabel"] or {}
    unknown = [index for index in [*dropped, *relabelled] if not 0 <= index < task.n_data]
    if unknown:
        raise InputError(f"{str(path)!r} names example {unknown[0]} of {task.n_data}")
    if relabelled:
        all_targets(with_labels(task, relabelled))  # refuses targets that the loss does not take
    targets = all_targets(task).reshape(task.n_data, -1).squeeze(1)  # a regression has [N, 1]
    columns: dict[str, Any] = {"index": range(task.n_data), "target": targets.tolist()}
    metadata = {name: values for name, values in task.metadata.items() if name not in columns}
    table = pd.DataFrame({**columns, **metadata})
    for example, label in relabelled.items():
        table.loc[example, "target"] = label
    return table.drop(index=dropped).reset_index(drop=True)


def _target(label: str) -> int | float:
    """A new label as a number."""
    is_class = label.lstrip("-").isdigit()
    return int(label) if is_class else float(label)
