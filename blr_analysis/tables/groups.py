"""One row per group: the classes of an evaluation set, the groups taken out of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.tables._columns import array_of

__all__ = ["class_table", "each_table", "what_if_table"]


def what_if_table(result: Any) -> pd.DataFrame:
    """The evaluation set of a what-if, class by class; see :func:`class_table`."""
    before, after = result.before, result.after
    return class_table(result.targets, before.losses, after.losses, before.correct, after.correct)


def class_table(
    targets: Tensor,
    losses_before: Tensor,
    losses_after: Tensor,
    correct_before: Tensor | None = None,
    correct_after: Tensor | None = None,
) -> pd.DataFrame:
    """Mean loss and accuracy per class, before and after a perturbation.

    Columns: class, n, nll_before, nll_after (nats per example), accuracy_before,
    accuracy_after (NaN without ``correct_*``). All arguments are [M].

    Raises:
        InputError: the targets are not classes: several per example, or not whole numbers.
    """
    classes = array_of(targets)
    if classes.ndim == 2 and classes.shape[1] == 1:
        classes = classes[:, 0]
    if classes.ndim != 1 or not np.array_equal(classes, np.round(classes)):
        raise InputError(
            "a table by class needs one whole-number target per example; got targets of shape "
            f"{classes.shape} and dtype {classes.dtype}; use what_if_each(by=a metadata column)"
        )
    found, member, n = np.unique(classes, return_inverse=True, return_counts=True)

    def mean(values: Any) -> np.ndarray:
        if values is None:
            return np.full(len(found), np.nan)
        return np.bincount(member, array_of(values).astype(np.float64), len(found)) / n

    return pd.DataFrame(
        {
            "class": found.astype(np.int64),
            "n": n,
            "nll_before": mean(losses_before),
            "nll_after": mean(losses_after),
            "accuracy_before": mean(correct_before),
            "accuracy_after": mean(correct_after),
        }
    )


def each_table(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per group that was taken out, in the order given.

    Args:
        rows: mappings with group, n (examples in the group), nll_before, nll_after and, for
            classification, accuracy_before, accuracy_after; the changes are worked out here,
            further keys are kept, last.

    Returns:
        Columns: group, n, nll_before, nll_after, nll_change, accuracy_before,
        accuracy_after, accuracy_change. Changes are after − before: a positive nll_change
        means that the model is worse off without the group.

    Raises:
        InputError: a row lacks one of the first four keys.
    """
    derived = ("nll_change", "accuracy_change")
    rows = [{k: v for k, v in row.items() if k not in derived} for row in rows]
    order = ["group", "n", "nll_before", "nll_after", "accuracy_before", "accuracy_after"]
    for row in rows:
        missing = [key for key in order[:4] if key not in row]
        if missing:
            raise InputError(f"a row of what_if_each lacks {', '.join(missing)}; got {list(row)}")
    table = pd.DataFrame(rows, columns=order + sorted({k for r in rows for k in r} - {*order}))
    for column in [*order[2:], *({"error"} & {*table.columns})]:
        table[column] = table[column].astype(np.float64)
    table.insert(4, "nll_change", table["nll_after"] - table["nll_before"])
    table.insert(7, "accuracy_change", table["accuracy_after"] - table["accuracy_before"])
    return table
