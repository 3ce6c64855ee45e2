"""A loss or an accuracy before and after a change of the data, as bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from blr_analysis.checks import one_of
from blr_analysis.errors import InputError
from blr_analysis.plots import _canvas as canvas

__all__ = ["has_classes", "plot_what_if", "whole"]

MAX_GROUPS = 20  # of more groups, those that change most are drawn, and the title says so
MAX_STRAIGHT_LENGTH = 60  # characters of all groups' names; longer ones are slanted
MAX_STRAIGHT_NAME = 12  # characters of one name


def plot_what_if(
    result: Any,
    ax: Axes | None = None,
    *,
    truth: Mapping[Any, float] | None = None,
    measure: str = "nll",
    names: canvas.Names | None = None,
) -> Axes:
    """Draw a loss or accuracy before and after a perturbation, a pair of bars per group.

    Args:
        result: what :func:`blr_analysis.what_if` returns (the whole evaluation set, and each
            of its classes where it has classes), or the table of
            :func:`blr_analysis.what_if_each` (one pair for each group taken out).
        ax: where to draw; a new figure if None.
        truth: the same measure after retraining, drawn as diamonds, by group (``{3: 0.52}``;
            "all" is the whole set).
        measure: "nll" or "accuracy".
        names: what groups are called on the axis, ``names[group]``.

    Returns:
        The Axes.

    Raises:
        InputError: the result has no such measure, or truth does not fit its groups.

    Example:
        >>> import pandas as pd
        >>> each = pd.DataFrame({"group": [0, 1], "nll_before": [.1, .1], "nll_after": [.6, .3]})
        >>> ax = plot_what_if(each, truth={1: 0.35})
        >>> [container.get_label() for container in ax.containers]
        ['before', 'after, predicted']
    """
    one_of("measure", measure, tuple(canvas.MEASURES))
    is_by_group = hasattr(result, "columns")
    table = result if is_by_group else whole(result)
    key = "group" if "group" in table else "class"
    values = _before_and_after(table, key, measure)
    retrained = _truths(truth or {}, table[key].tolist())
    drawn = _largest_changes(values)
    groups = [canvas.shortened(canvas.name_of(table[key].iloc[k], names)) for k in drawn]
    width = min(12.0, max(5.0, 2.0 + 0.55 * len(groups)))
    ax = canvas.axes_or_new(ax, (width, 4.4))
    intervals = None
    if measure == "nll" and "nll_low" in table:
        intervals = table[["nll_low", "nll_high"]].to_numpy(float)[drawn]
    before, after = values[drawn].T
    _draw(ax, before, after, retrained[drawn], intervals)
    _name_groups(ax, groups)
    _name_axes(ax, measure, is_by_group)
    title = "What if a group were gone?" if is_by_group else "What if?"
    if len(groups) < len(table):
        title += f" ({len(groups)} of {len(table)} groups, the largest changes)"
    ax.set_title(title)
    ax.legend(loc="upper center", ncols=2, fontsize=9)
    return ax


def _largest_changes(values: np.ndarray) -> np.ndarray:
    """The rows of the :data:`MAX_GROUPS` largest changes, in the order of the table.

    Args:
        values: before and after, ``[G, 2]``.
    """
    change = np.abs(values[:, 1] - values[:, 0])
    return np.sort(np.argsort(-change, kind="stable")[:MAX_GROUPS])


def _name_axes(ax: Axes, measure: str, is_by_group: bool) -> None:
    """Name both axes; an accuracy goes from 0 to 1."""
    ax.set_xlabel("group taken out" if is_by_group else "evaluated on")
    ax.set_ylabel(canvas.MEASURES[measure])
    if measure == "accuracy":
        ax.set_yticks(np.linspace(0, 1, 6))


def _before_and_after(table: pd.DataFrame, key: str, measure: str) -> np.ndarray:
    """The measure before and after for each group, ``[G, 2]``.

    Raises:
        InputError: the table lacks a column, or rows, or numbers that are finite.
    """
    ends = [f"{measure}_before", f"{measure}_after"]
    columns = {key, *ends}
    if not columns <= set(table) or not len(table):
        raise InputError(
            f"expected a table with rows and {', '.join(sorted(columns))}; "
            f"got {len(table)} rows of {list(table)}"
        )
    values = table[ends].to_numpy(float)
    if not np.isfinite(values).all():
        raise InputError(f"the {measure} is not a finite number for every group")
    return values


def _draw(
    ax: Axes,
    before: np.ndarray,
    after: np.ndarray,
    retrained: np.ndarray,
    intervals: np.ndarray | None,
) -> None:
    """Draw a pair of bars for each group, its range, and a diamond for the retrained model.

    Args:
        before, after: the measure of each group, ``[G]``.
        retrained: the same after retraining, ``[G]``; NaN where it is unknown.
        intervals: the range of ``after``, ``[G, 2]``; None: there are no ranges.
    """
    places = canvas.paired_bars(ax, before, after, ("before", "after, predicted"), canvas.SKY)
    heights = np.concatenate([before, after, retrained, [0.0]])
    if intervals is not None and np.isfinite(intervals).any():
        low, high = intervals.T
        ax.vlines(places, low, high, color="black", lw=1.5, label="likely range", zorder=2.5)
        heights = np.append(heights, intervals)
    if np.isfinite(retrained).any():
        _draw_retrained(ax, places, retrained)
    bottom = 1.3 * float(np.nanmin(heights))
    top = 1.3 * float(np.nanmax(heights))
    if top == 0:
        top = -0.3 * bottom or 1.0  # room for the legend above losses below 0
    ax.set_ylim(bottom, top)


def _draw_retrained(ax: Axes, places: np.ndarray, values: np.ndarray) -> None:
    """Draw a diamond for each value that is known."""
    is_known = np.isfinite(values)
    ax.plot(
        places[is_known],
        values[is_known],
        ls="",
        marker="D",
        ms=8,
        mfc="white",
        mec="black",
        mew=1.5,
        label="after, retrained",
        zorder=3,
    )


def _name_groups(ax: Axes, groups: list[str]) -> None:
    """Name the groups below the axis, slanted where the names are long."""
    places = range(len(groups))
    lengths = [len(group) for group in groups]
    are_long = sum(lengths) > MAX_STRAIGHT_LENGTH or max(lengths) > MAX_STRAIGHT_NAME
    if are_long:
        ax.set_xticks(places, groups, rotation=45, ha="right")
    else:
        ax.set_xticks(places, groups)


def whole(result: Any) -> pd.DataFrame:
    """The table of a what-if: a row for the whole evaluation set, and one for each class."""
    measured = {}
    for measure in canvas.MEASURES:
        measured[f"{measure}_before"] = [getattr(result.before, measure)]
        measured[f"{measure}_after"] = [getattr(result, measure)]
    table = pd.DataFrame({"class": ["all"], "n": len(result.targets), **measured})
    if has_classes(result):
        table = pd.concat([table, result.by_class], ignore_index=True)
    return table.astype(dict.fromkeys(measured, float))


def has_classes(result: Any) -> bool:
    """Whether a what-if result has one class for each example."""
    if result.accuracy is None:
        return False
    targets = result.targets
    return targets.ndim == 1 or targets.shape[-1] == 1


def _truths(truth: Mapping[Any, float], groups: list[Any]) -> np.ndarray:
    """The retrained value of each group, ``[G]``; NaN where it is unknown.

    Raises:
        InputError: a value of another group.
    """
    unknown = [group for group in truth if group not in groups]
    if unknown:
        raise InputError(f"truth names groups that were not analysed: {unknown}")
    return np.array([float(truth.get(group, np.nan)) for group in groups])
