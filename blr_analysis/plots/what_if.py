"""What would the model be like without a group? Bars before and after."""

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

MOST_GROUPS = 20  # of more, those that change most are drawn, and the title says so


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
    table, by_group = (result, True) if hasattr(result, "columns") else (whole(result), False)
    key = "group" if "group" in table else "class"
    wanted = {key, f"{measure}_before", f"{measure}_after"}
    if not wanted <= {*table} or not len(table):
        got = f"{len(table)} rows of {list(table)}"
        raise InputError(f"expected a table with rows and {', '.join(sorted(wanted))}; got {got}")
    values = table[[f"{measure}_before", f"{measure}_after"]].to_numpy(float)
    if not np.isfinite(values).all():
        raise InputError(f"the {measure} is not a finite number for every group")
    known = _truths(truth or {}, table[key].tolist())
    kept = np.sort(np.argsort(-np.abs(values[:, 1] - values[:, 0]), kind="stable")[:MOST_GROUPS])
    groups = [canvas.shortened(canvas.name_of(table[key].iloc[k], names)) for k in kept]
    ax = canvas.axes_or_new(ax, (min(12.0, max(5.0, 2.0 + 0.55 * len(groups))), 4.4))
    ends = table[["nll_low", "nll_high"]].to_numpy(float)[kept] if "nll_low" in table else None
    before, after = values[kept].T
    _draw(ax, before, after, known[kept], ends if measure == "nll" else None)
    long = sum(map(len, groups)) > 60 or max(map(len, groups)) > 12
    ax.set_xticks(range(len(groups)), groups, **({"rotation": 45, "ha": "right"} if long else {}))
    ax.set_xlabel("group taken out" if by_group else "evaluated on")
    ax.set_ylabel(canvas.MEASURES[measure])
    rest = f" ({len(groups)} of {len(table)} groups, the largest changes)"
    title = "What if a group were gone?" if by_group else "What if?"
    ax.set_title(title + rest * (len(groups) < len(table)))
    if measure == "accuracy":
        ax.set_yticks(np.linspace(0, 1, 6))
    ax.legend(loc="upper center", ncols=2, fontsize=9)
    return ax


def _draw(
    ax: Axes, before: np.ndarray, after: np.ndarray, known: np.ndarray, ends: np.ndarray | None
) -> None:
    second = canvas.paired_bars(ax, before, after, ("before", "after, predicted"), canvas.SKY)
    drawn = np.concatenate([before, after, known, [0.0]])
    if ends is not None and np.isfinite(ends).any():
        ax.vlines(second, *ends.T, color="black", lw=1.5, label="likely between", zorder=2.5)
        drawn = np.append(drawn, ends)
    if (there := np.isfinite(known)).any():
        ax.plot(second[there], known[there], ls="", marker="D", ms=8, mfc="white", mec="black",
                mew=1.5, label="after, retrained", zorder=3)  # fmt: skip
    low, high = 1.3 * float(np.nanmin(drawn)), 1.3 * float(np.nanmax(drawn))
    ax.set_ylim(low, high or -0.3 * low or 1.0)  # room for the legend above losses below 0


def whole(result: Any) -> pd.DataFrame:
    """The whole evaluation set, then its classes where they can be told apart."""
    ends = {"before": result.before, "after": result}
    measured = {f"{m}_{at}": [getattr(r, m)] for m in canvas.MEASURES for at, r in ends.items()}
    table = pd.DataFrame({"class": ["all"], "n": len(result.targets), **measured})
    if has_classes(result):
        table = pd.concat([table, result.by_class], ignore_index=True)
    return table.astype(dict.fromkeys(measured, float))


def has_classes(result: Any) -> bool:
    """Whether what-if results can be told apart by class."""
    targets = result.targets
    return result.accuracy is not None and (targets.ndim == 1 or targets.shape[-1] == 1)


def _truths(truth: Mapping[Any, float], groups: list[Any]) -> np.ndarray:
    """One retrained value per group, NaN where unknown."""
    strangers = [key for key in truth if key not in groups]
    if strangers:
        raise InputError(f"truth names groups that were not analysed: {strangers}")
    return np.array([float(truth.get(group, np.nan)) for group in groups])
