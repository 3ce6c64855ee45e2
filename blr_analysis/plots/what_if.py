"""What would the model be like without a group? Bars before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.checks import one_of
from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import (
    MEASURES,
    SKY,
    as_array,
    axes_or_new,
    name_of,
    paired_bars,
    shortened,
)

__all__ = ["plot_what_if"]

MAX_GROUPS = 20
VANISHING = 0.04  # of the axis
Truth = Mapping[Any, float] | Sequence[float] | float


def plot_what_if(
    result: Any,
    ax: Axes | None = None,
    *,
    truth: Truth | None = None,
    measure: str = "nll",
    names: Mapping[Any, str] | Sequence[str] | None = None,
    max_groups: int = MAX_GROUPS,
) -> Axes:
    """Draw a loss or accuracy before and after a perturbation, a pair of bars per group.

    Args:
        result: what :func:`blr_analysis.what_if` returns (the whole evaluation set, and each
            of its classes where it has classes), or the table of
            :func:`blr_analysis.what_if_each` (one pair for each group taken out).
        ax: where to draw; a new figure if None.
        truth: the same measure after retraining, drawn as diamonds: by group
            (``{3: 0.52}``; "all" is the whole set), one for each group in order (NaN where
            unknown), or one number for a single group or "all".
        measure: "nll" or "accuracy".
        names: what groups are called on the axis, ``names[group]``.
        max_groups: of more groups, those that change most are drawn, and the title says so.

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
    one_of("measure", measure, tuple(MEASURES))
    is_table = hasattr(result, "columns")
    groups, before, after = _from_table(result, measure) if is_table else _of(result, measure)
    known = _truths(truth, groups)
    total = len(groups)
    if total > max_groups:
        change = np.nan_to_num(np.abs(after - before))
        keep = np.sort(np.argsort(-change, kind="stable")[:max_groups])
        groups = [groups[k] for k in keep]
        before, after, known = before[keep], after[keep], known[keep]
    ax = axes_or_new(ax, (min(12.0, max(5.0, 2.0 + 0.55 * len(groups))), 4.4))
    _draw(ax, before, after, known)
    shown = [shortened(name_of(group, names)) for group in groups]
    long = sum(map(len, shown)) > 60 or max(map(len, shown)) > 12
    tilt = {"rotation": 45, "ha": "right"} if long else {}
    ax.set_xticks(range(len(shown)), shown, **tilt)
    ax.set_xlabel("group taken out" if is_table else "evaluated on")
    ax.set_ylabel(MEASURES[measure])
    rest = f" ({len(groups)} of {total} groups, the largest changes)" if len(groups) < total else ""
    ax.set_title(("What if a group were gone?" if is_table else "What if?") + rest)
    if measure == "accuracy":
        ax.set_yticks(np.linspace(0, 1, 6))
    handles, texts = ax.get_legend_handles_labels()
    order = np.argsort([text.endswith("retrained") for text in texts], kind="stable")
    handles, texts = zip(*[(handles[k], texts[k]) for k in order], strict=True)
    ax.legend(handles, texts, loc="upper center", ncols=3, fontsize=9)
    return ax


def _draw(ax: Axes, before: np.ndarray, after: np.ndarray, known: np.ndarray) -> None:
    second = paired_bars(ax, before, after, ("before", "after, predicted"), SKY)
    there = np.isfinite(known)
    if there.any():
        ax.plot(second[there], known[there], ls="", marker="D", ms=8, mfc="white",
                mec="black", mew=1.5, label="after, retrained", zorder=3)  # fmt: skip
    drawn = np.concatenate([before, after, known, [0.0]])
    low, high = 1.3 * float(np.nanmin(drawn)), 1.3 * float(np.nanmax(drawn))
    ax.set_ylim(low, top := high or -0.3 * low or 1.0)  # room for the legend above losses below 0
    if len(before) > 6:
        for place, value in enumerate(before):
            if abs(value) < VANISHING * (top - low):  # a bar that nobody sees says its number
                ax.annotate(f"{value:.2g}", (place - 0.19, value), xytext=(0, 2), ha="center",
                            textcoords="offset points", rotation=90, fontsize=7)  # fmt: skip


def _from_table(table: Any, measure: str) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Groups and values from a table by group, or by class."""
    key = next((name for name in ("group", "class") if name in table.columns), None)
    wanted = [f"{measure}_before", f"{measure}_after"]
    if key is None or not set(wanted) <= set(table.columns) or not len(table):
        got = f"{len(table)} rows of {list(table.columns)}"
        raise InputError(f"expected a table with rows and group, {', '.join(wanted)}; got {got}")
    before, after = (as_array(table[name]) for name in wanted)
    return table[key].tolist(), *_finite(before, after, measure)


def _of(result: Any, measure: str) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Groups and values of one what-if: the whole evaluation set, then its classes."""
    if not hasattr(result, measure) or not hasattr(result, "before"):
        got = type(result).__name__
        raise InputError(f"plot_what_if expects what what_if(...) returns; got {got}")
    whole = as_array([getattr(result.before, measure), getattr(result, measure)])
    groups, before, after = ["all"], whole[:1], whole[1:]
    targets = getattr(result, "targets", None)
    one_each = targets is None or targets.ndim == 1 or targets.shape[-1] == 1
    if one_each and getattr(result, "accuracy", None) is not None:  # classes can be told apart
        more, b, a = _from_table(result.by_class, measure)
        groups, before, after = groups + more, np.append(before, b), np.append(after, a)
    return groups, *_finite(before, after, measure)


def _finite(before: np.ndarray, after: np.ndarray, measure: str) -> tuple[np.ndarray, np.ndarray]:
    if not np.isfinite(np.concatenate([before, after])).all():
        raise InputError(
            f"the {measure} is not a finite number for every group: "
            + ("regression has no accuracy; use measure='nll'" if measure == "accuracy" else
               "the step was too large for the model to bear")
        )  # fmt: skip
    return before, after


def _truths(truth: Truth | None, groups: list[Any]) -> np.ndarray:
    """One retrained value per group, NaN where unknown."""
    if truth is None:
        return np.full(len(groups), np.nan)
    if isinstance(truth, Mapping):
        strangers = [key for key in truth if key not in groups]
        if strangers:
            raise InputError(f"truth names groups that were not analysed: {strangers}")
        return np.array([float(truth.get(group, np.nan)) for group in groups])
    if np.ndim(truth) == 0 and (len(groups) == 1 or groups[0] == "all"):
        return np.array([float(as_array(truth))] + [np.nan] * (len(groups) - 1))
    values = np.atleast_1d(as_array(truth))
    if values.shape != (len(groups),):
        raise InputError(f"truth holds {values.size} values for {len(groups)} groups")
    return values
