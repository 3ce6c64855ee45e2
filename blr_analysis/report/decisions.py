"""The decisions about suspicious examples that a reader exports from the page as a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from blr_analysis.errors import InputError, told_as

ACTIONS = ("keep", "relabel", "drop")


def read_decisions(path: str | Path) -> dict[str, Any]:
    """The choices of a page's gallery, as ``blr.what_if(task, posterior, **choices)`` takes them.

    Args:
        path: the CSV that the page exports, columns ``index``, ``action`` (keep, relabel or drop)
            and ``label`` (the new one).

    Returns:
        ``remove``: indices to drop; ``relabel``: index → new label. What is empty is None.

    Raises:
        InputError: no such file, other columns, or a row that says something else.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "decisions.csv")
        ...     _ = path.write_text("index,action,label\\n3,drop,\\n5,relabel,8\\n6,keep,\\n")
        ...     read_decisions(path)
        {'remove': [3], 'relabel': {5: 8}}
    """
    with told_as(InputError, f"cannot read decisions from {str(path)!r}"):
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        rows = table[["index", "action", "label"]].to_numpy()
    remove: list[int] = []
    relabel: dict[int, int | float] = {}
    for row, (index, action, label) in enumerate(rows):
        try:
            ACTIONS.index(action)  # a ValueError where it is none of them
            example = int(index)
            if action == "relabel":
                relabel[example] = _target(label)
        except ValueError:
            decision = f"{index!r}, {action!r}, {label!r}"
            raise InputError(f"row {row} of {str(path)!r} is no decision: {decision}") from None
        if action == "drop":
            remove.append(example)
    if not remove and not relabel:
        raise InputError(f"{str(path)!r} keeps every example: nothing to ask")
    return {"remove": remove or None, "relabel": relabel or None}


def _target(label: str) -> int | float:
    """A new label as a number."""
    is_class = label.lstrip("-").isdigit()
    return int(label) if is_class else float(label)
