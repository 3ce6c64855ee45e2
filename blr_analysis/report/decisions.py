"""What somebody decided about suspicious examples on the page: a CSV file, read back here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from blr_analysis.errors import InputError

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
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        said = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read decisions from {str(path)!r}: {said}") from error
    if not {"index", "action", "label"} <= set(table):
        raise InputError(f"{str(path)!r} needs columns index, action, label; it has {list(table)}")
    remove: list[int] = []
    relabel: dict[int, int | float] = {}
    for row, (index, action, label) in enumerate(
        zip(table["index"], table["action"], table["label"], strict=True)
    ):
        if not index.isdigit() or action not in ACTIONS:
            raise InputError(f"row {row} of {str(path)!r} is no decision: {index!r}, {action!r}")
        if action == "drop":
            remove.append(int(index))
        elif action == "relabel":
            relabel[int(index)] = _number(label, row, path)
    if not remove and not relabel:
        raise InputError(f"{str(path)!r} keeps every example: nothing to ask")
    return {"remove": remove or None, "relabel": relabel or None}


def _number(label: str, row: int, path: str | Path) -> int | float:
    try:
        return int(label)
    except ValueError:
        try:
            return float(label)
        except ValueError:
            raise InputError(f"row {row} of {str(path)!r}: {label!r} is no label") from None
