"""Will a merge work, and with which weights? Mismatch against loss gap; losses over α."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.checks import one_of
from blr_analysis.errors import InputError
from blr_analysis.plots import _canvas as canvas

__all__ = ["plot_merge_curve", "plot_mismatch"]

COLOURS, MARKERS, LINES = (
    (canvas.BLUE, canvas.ORANGE, canvas.GREY, canvas.SKY, canvas.BLACK),
    "o^sDv",
    ("-", "--", ":", "-.", "-"),
)
ACROSS = "gradient mismatch per example  ‖∇ℓ(θ_merged) − ∇ℓ(θ_t)‖ / N  (→ worse)"
FEW, MOST_LABELS = 12, 24


def plot_mismatch(result: Any, ax: Axes | None = None, *, measure: str = "nll") -> Axes:
    """Draw each task's gradient mismatch against what the merge costs it.

    One point per task and merge, named after its task (of more than 12, for each task that where
    it loses most); with several merges, a line leads from each task's point in one merge to its
    point in the next. Where held-out tasks were given, the
    cost is that on them, else that on the training data.

    Args:
        result: what :func:`blr_analysis.gradient_mismatch` returns.
        ax: where to draw; a new figure if None.
        measure: "nll": the rise of the mean loss; "accuracy": how much of it is lost.

    Returns:
        The Axes.

    Raises:
        InputError: an unknown word, or nothing finite to draw.
    """
    one_of("measure", measure, tuple(canvas.MEASURES))
    rows = list(result.rows)
    x = np.array([row["mismatch_per_example"] for row in rows], dtype=float)
    y, where = _costs(rows, measure)
    known = np.isfinite(x) & np.isfinite(y)
    if not known.any():
        raise InputError(f"there is no finite mismatch with a finite {measure} to draw")
    ax = canvas.axes_or_new(ax)
    merges = list(dict.fromkeys(row["merge"] for row in rows))
    tasks = np.array([row["task"] for row in rows])
    of = np.array([merges.index(row["merge"]) for row in rows])
    for name in dict.fromkeys(tasks):
        path = (tasks == name) & known
        if path.sum() > 1:
            ax.plot(x[path], y[path], color="0.75", lw=0.8, zorder=1)
    for k, merge in enumerate(merges):
        mine = (of == k) & known
        look = {**_look(k), "ls": "", "s": 46, "linewidths": 0.6, "edgecolors": "black"}
        ax.scatter(x[mine], y[mine], label=merge, zorder=3, **look)
    ax.axhline(0.0, color="0.4", lw=0.8, ls="--", zorder=0)
    ax.set_xscale(**canvas.scale_of(x[known]))
    ax.margins(x=0.12, y=0.12)
    ax.set_xlabel(ACROSS)
    what = "rise of the NLL [nats per example]" if measure == "nll" else "accuracy lost"
    ax.set_ylabel(f"{what}, {where}  (→ worse)")
    ax.set_title("What the merge costs each task")
    if len(merges) > 1:
        ax.legend()
    shown = np.flatnonzero(known)
    if len(shown) > FEW:  # of each task the point where it loses most
        highest = {str(tasks[k]): k for k in shown[np.argsort(y[shown], kind="stable")]}
        shown = np.array(sorted(highest.values()))[:MOST_LABELS]
    canvas.label_points(ax, np.column_stack([x, y])[shown], [str(t) for t in tasks[shown]])
    return ax


def _costs(rows: Sequence[Any], measure: str) -> tuple[np.ndarray, str]:
    """How much worse than at θ_t, on held-out data where there are any."""
    sign = 1 if measure == "nll" else -1

    def lost(prefix: str) -> np.ndarray:
        ends = [[row[f"{prefix}{measure}_{at}"] for at in ("own", "merged")] for row in rows]
        return sign * np.diff(np.array(ends, dtype=float), axis=1)[:, 0]

    test = lost("test_")
    return (test, "test data") if np.isfinite(test).any() else (lost(""), "training data")


def _look(k: int) -> dict[str, Any]:
    """Colour, marker and line of the k-th thing."""
    k %= len(COLOURS)
    return {"color": COLOURS[k], "marker": MARKERS[k], "ls": LINES[k]}


def plot_merge_curve(curve: Any, ax: Axes | None = None, *, measure: str = "nll") -> Axes:
    """Draw how merges do over the weights that were tried, the best marked.

    One α for all models: a curve per task and their mean or, with several methods, the mean of
    each method. Anything else: the merges in the order tried.

    Args:
        curve: what :func:`blr_analysis.merge_curve` returns.
        ax: where to draw; a new figure if None.
        measure: "nll" or "accuracy".

    Returns:
        The Axes.

    Raises:
        InputError: an unknown measure, or nothing finite to draw.
    """
    one_of("measure", measure, tuple(canvas.MEASURES))
    methods, points, best = curve.methods, curve.points, curve.best
    values = canvas.as_array([getattr(p, measure) for p in points])
    if not np.isfinite(values).any():
        raise InputError(f"the merges have no finite {measure} to draw")
    ax, shared = canvas.axes_or_new(ax), curve.shape == "shared"
    x = np.array([p.weights[0] for p in points]) if shared else np.arange(1, len(points) + 1)
    for k, name in enumerate(methods):
        mine = np.flatnonzero([p.method == name for p in points])
        mine = mine[np.argsort(x[mine], kind="stable")]
        if shared and len(methods) == 1 and len(curve.tasks) > 1:
            each = canvas.as_array([p.nlls if measure == "nll" else p.accuracies for p in points])
            for t, task in enumerate(curve.tasks):
                thin = {**_look(t + 1), "lw": 1.0, "ms": 4, "mew": 0.4}
                canvas.drawn(ax, x[mine], each[mine, t], task, thin)
        label = name if len(methods) > 1 or not shared else "mean"
        label = curve.tasks[0] if label == "mean" and len(curve.tasks) == 1 else label
        look = {**_look(k), "lw": 2.0} if shared else {**_look(k), "ls": ""}
        canvas.drawn(ax, x[mine], values[mine], label, look)
    place = best.weights[0] if shared else points.index(best) + 1
    said = f"α = {best.weights[0]:.3g}"
    if not shared:
        said = "α = (" + ", ".join(f"{a:.3g}" for a in best.weights[:6]) + ")"
    said = f"{best.method}, {said}" if shared and len(methods) > 1 else said
    canvas.diamond(ax, place, getattr(best, measure), f"best: {said}")
    known = values[np.isfinite(values)]
    if measure == "nll" and bool((known > 0).all()):
        ax.set_yscale(**canvas.scale_of(known))
    if not shared:
        canvas.count_ticks(ax)
    ax.set_xlabel("weight α of every model" if shared else "merge, in the order tried")
    ax.set_ylabel(
        f"mean {canvas.MEASURES[measure]}" if len(curve.tasks) > 1 else canvas.MEASURES[measure]
    )
    ax.legend(fontsize=8)
    lost, n = sum(bool(p.failure) for p in curve.points), len(curve.tasks)
    who = methods[0] if len(methods) == 1 else "Merges"
    note = f" ({lost} could not be run)" if lost else ""
    ax.set_title(f"{who} on {n:,} validation task{'s' * (n != 1)}{note}")
    return ax
