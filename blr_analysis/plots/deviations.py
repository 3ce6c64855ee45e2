"""How much does each example shape the model? Deviations, the largest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import (
    BLUE,
    VERMILLION,
    Scale,
    as_array,
    axes_or_new,
    choose_scale,
    count_of,
)
from blr_analysis.plots._labels import label_points

__all__ = ["plot_deviations"]


def plot_deviations(
    scores: Any,
    ax: Axes | None = None,
    *,
    labels: Sequence[Any] | Mapping[int, Any] | None = None,
    n_labels: int = 8,
) -> Axes:
    """Draw the deviations in falling order, the largest labelled by their index.

    A steep start means that a few examples shape the model; a flat curve, that all do alike.
    Ranks are on a logarithmic axis from 100 examples on, deviations where the first is more
    than a hundred times that at 5 % of the ranks. Where the scores carry no deviation (too many
    outputs), the self-influence takes its place, and the axis says so.

    Args:
        scores: what :func:`blr_analysis.sensitivity` returns, or its table, or any part of it:
            ``deviation`` [N] and, in a table, ``index``.
        ax: where to draw; a new figure if None.
        labels: shown beside the index of a labelled example; ``labels[index]``.
        n_labels: how many examples to label.

    Returns:
        The Axes.

    Raises:
        InputError: neither deviation nor self-influence, no examples, or values not finite.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"index": [7, 8, 9], "deviation": [0.1, 0.3, 0.2]})
        >>> plot_deviations(table).lines[0].get_ydata().tolist()
        [0.3, 0.2, 0.1]
    """
    values, unit = _values(scores)
    index = as_array(scores["index"] if _is_table(scores) else np.arange(len(values))).astype(int)
    order = np.argsort(-values, kind="stable")
    steep = values[order[0]] > 100 * values[order[len(values) // 20]]
    scale = choose_scale(values) if steep else Scale(False)
    height = scale.draw(values[order])
    rank = np.arange(1, len(values) + 1)
    ax = axes_or_new(ax)
    few = len(values) <= 100
    ax.plot(rank, height, color=BLUE, lw=1.5, marker="." if few else "", zorder=2)
    ax.fill_between(rank, height, height.min() if scale.log else 0, color=BLUE, alpha=0.15, lw=0)
    ax.set_xscale("linear" if few else "log")
    ax.set_yscale(scale.name)
    if few:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.set_xlim(0.5, len(values) + 0.5)
    else:
        ax.set_xlim(0.8, len(values) * 1.1)
    low, high = scale.limits(height if scale.log else np.append(height, 0.0), 0.03, 0.12)
    ax.set_ylim(max(low, 0.0) if not scale.log else low, high)
    top = order[: max(n_labels, 0)]
    top = top[values[top] > 0]
    try:
        texts = [f"{i}" if labels is None else f"{i}: {labels[i]}" for i in index[top].tolist()]
    except (IndexError, KeyError) as fault:
        raise InputError("labels do not cover every example: pass one for each index") from fault
    points = np.column_stack([rank, height])
    ax.plot(*points[: len(top)].T, ls="", marker="D", ms=5, mfc=VERMILLION, mec="black", zorder=3)
    label_points(ax, points[: len(top)], texts, points)
    ax.set_xlabel("rank (1 = shapes the model most)")
    ax.set_ylabel(f"{unit}{scale.note}")
    ax.set_title(f"How far predictions would move: {count_of(len(values))}")
    return ax


def _is_table(scores: Any) -> bool:
    return hasattr(scores, "columns")


def _values(scores: Any) -> tuple[np.ndarray, str]:
    """The deviations and their name with units, or the self-influences where there are none."""
    units = {
        "deviation": _deviation_unit(getattr(scores, "likelihood", None)),
        "self_influence": "self-influence gᵀΣg [nats]  (→ shapes more)",
    }
    for name, unit in units.items():
        found = scores.get(name) if _is_table(scores) else getattr(scores, name, None)
        values = None if found is None else as_array(found).reshape(-1)
        if values is None or (len(values) and np.isnan(values).all()):
            continue
        if not len(values):
            raise InputError("plot_deviations got no examples: pass at least one")
        if not np.isfinite(values).all():
            raise InputError(
                f"{(~np.isfinite(values)).sum()} of {len(values)} {name}s are not finite"
            )
        return values, unit
    raise InputError(
        "plot_deviations expects scores, or their table, with a deviation or a self_influence; "
        f"got {type(scores).__name__}"
    )


def _deviation_unit(likelihood: Any) -> str:
    if likelihood is None:
        return "deviation without the example  (→ shapes more)"
    if likelihood.is_classification:
        return "deviation ‖Δp‖₁, 0 to 2  (→ shapes more)"
    return "deviation ‖Δf‖₂ [output]  (→ shapes more)"
