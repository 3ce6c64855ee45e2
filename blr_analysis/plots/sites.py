"""What each example of a sum of sites does to the model, and to its own loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import BLUE, VERMILLION, as_array, axes_or_new, count_of
from blr_analysis.plots._labels import label_points
from blr_analysis.plots.deviations import plot_deviations

__all__ = ["plot_site_leave_one_out", "plot_site_scores"]

Labels = Sequence[Any] | Mapping[int, Any]


def plot_site_scores(
    scores: Any, ax: Axes | None = None, *, labels: Labels | None = None, n_labels: int = 8
) -> Axes:
    """Draw the deviations in falling order; what was not observed is left out.

    Args:
        scores: what :func:`blr_analysis.sensitivity` returns for a sum of sites.
        ax, labels, n_labels: see :func:`blr_analysis.plots.plot_deviations`.

    Returns:
        The Axes.
    """
    seen = scores.table.dropna(subset=["deviation"])
    ax = plot_deviations(seen, ax, labels=labels, n_labels=n_labels)
    unit = "log-predictive lost without it [nats]"
    ax.set_ylabel(ax.get_ylabel().replace("deviation without the example", unit))
    ax.set_title(f"What each tells about itself: {count_of(len(seen))}")
    return ax


def plot_site_leave_one_out(
    loo: Any, ax: Axes | None = None, *, labels: Labels | None = None, n_labels: int = 8
) -> Axes:
    """Draw every example's loss without it against its loss, the largest rises labelled.

    Points on the dashed line lose nothing when they are left out; those far above it are known
    to the model by themselves only.

    Args:
        loo: what :func:`blr_analysis.leave_one_out` returns for a sum of sites.
        ax: where to draw; a new figure if None.
        labels: shown beside the index of a labelled example; ``labels[index]``.
        n_labels: how many examples to label.

    Returns:
        The Axes.

    Raises:
        InputError: nothing was observed, or labels that do not cover every example.
    """
    points = np.column_stack([as_array(loo.losses_before), as_array(loo.losses)])
    seen = np.flatnonzero(np.isfinite(points).all(1))
    if not len(seen):
        raise InputError("no example has finite losses: there is nothing to draw")
    ax = axes_or_new(ax)
    ax.axline((points[seen[0], 0],) * 2, slope=1, color="0.25", lw=0.9, ls="--", zorder=0.5)
    ax.plot(*points[seen].T, ls="", marker="o", ms=4, color=BLUE, alpha=0.6, label="examples")
    top = seen[np.argsort(points[seen, 0] - points[seen, 1], kind="stable")][: max(n_labels, 0)]
    ax.plot(*points[top].T, ls="", marker="D", ms=5, mfc=VERMILLION, mec="black", zorder=3)
    try:
        texts = [f"{i}" if labels is None else f"{i}: {labels[i]}" for i in top.tolist()]
    except (IndexError, KeyError) as fault:
        raise InputError("labels do not cover every example: pass one for each index") from fault
    label_points(ax, points[top], texts, points[seen])
    ax.set_xlabel("loss with the example [nats]  (→ worse)")
    ax.set_ylabel("loss without the example [nats]  (→ worse)")
    ax.set_title(f"Leave-one-out of {count_of(len(seen))}: {loo.nll:.3g} nats each")
    return ax
