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

COLOURS = (canvas.BLUE, canvas.ORANGE, canvas.GREY, canvas.SKY, canvas.BLACK)
MARKERS = "o^sDv"
LINES = ("-", "--", ":", "-.", "-")
ACROSS = "gradient mismatch per example  ‖∇ℓ(θ_merged) − ∇ℓ(θ_t)‖ / N  (→ worse)"
LABELS_OF_ALL = 12  # up to here, every point has its label
MOST_LABELS = 24


def plot_mismatch(result: Any, ax: Axes | None = None, *, measure: str = "nll") -> Axes:
    """Draw each task's gradient mismatch against what the merge costs it.

    One point per task and merge, named after its task; of more than 12 points, those are named
    where a task loses most. With several merges, a line leads from each task's point in one merge
    to its point in the next. The cost is measured on the held-out tasks where there are any, else
    on the training data.

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
    y, data = _costs(rows, measure)
    finite = np.isfinite(x) & np.isfinite(y)
    if not finite.any():
        raise InputError(f"there is no finite mismatch with a finite {measure} to draw")
    ax = canvas.axes_or_new(ax)
    merges = np.array([row["merge"] for row in rows])
    tasks = np.array([row["task"] for row in rows])
    for task in dict.fromkeys(tasks):
        path = (tasks == task) & finite
        if path.sum() > 1:
            ax.plot(x[path], y[path], color="0.75", lw=0.8, zorder=1)
    names = list(dict.fromkeys(merges.tolist()))
    for k, name in enumerate(names):
        points = (merges == name) & finite
        look = {**_look(k), "ls": "", "s": 46, "linewidths": 0.6, "edgecolors": "black"}
        ax.scatter(x[points], y[points], label=name, zorder=3, **look)
    ax.axhline(0.0, color="0.4", lw=0.8, ls="--", zorder=0)
    ax.set_xscale(**canvas.scale_of(x[finite]))
    ax.margins(x=0.12, y=0.12)
    ax.set_xlabel(ACROSS)
    cost = "rise of the NLL [nats per example]" if measure == "nll" else "accuracy lost"
    ax.set_ylabel(f"{cost}, {data}  (→ worse)")
    ax.set_title("What the merge costs each task")
    if len(names) > 1:
        ax.legend()
    labelled = _labelled(tasks, y, np.flatnonzero(finite))
    points_labelled = np.column_stack([x, y])[labelled]
    canvas.label_points(ax, points_labelled, [str(task) for task in tasks[labelled]])
    return ax


def _labelled(tasks: np.ndarray, costs: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The points to label: all where they are few, else the costliest point of each task."""
    if len(points) <= LABELS_OF_ALL:
        return points
    rising = points[np.argsort(costs[points], kind="stable")]
    costliest = {str(tasks[k]): k for k in rising}  # the last point of a task replaces the others
    return np.array(sorted(costliest.values()))[:MOST_LABELS]


def _costs(rows: Sequence[Any], measure: str) -> tuple[np.ndarray, str]:
    """The cost of the merge against θ_t, on held-out data where there are any, and its data."""
    sign = 1 if measure == "nll" else -1

    def lost(prefix: str) -> np.ndarray:
        ends = [[row[f"{prefix}{measure}_{at}"] for at in ("own", "merged")] for row in rows]
        return sign * np.diff(np.array(ends, dtype=float), axis=1)[:, 0]

    on_test_data = lost("test_")
    if np.isfinite(on_test_data).any():
        return on_test_data, "test data"
    return lost(""), "training data"


def _look(k: int) -> dict[str, Any]:
    """Colour, marker and line of the k-th merge, method or task."""
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
    values = canvas.as_array([getattr(point, measure) for point in curve.points])
    finite = values[np.isfinite(values)]
    if not len(finite):
        raise InputError(f"the merges have no finite {measure} to draw")
    ax = canvas.axes_or_new(ax)
    if curve.shape == "shared":
        x = np.array([point.weights[0] for point in curve.points])
        best_x = curve.best.weights[0]
        _draw_over_weights(ax, curve, x, values, measure)
        ax.set_xlabel("weight α of every model")
    else:
        x = np.arange(1, len(curve.points) + 1)
        best_x = curve.points.index(curve.best) + 1
        _draw_in_order(ax, curve, x, values)
        canvas.count_ticks(ax)
        ax.set_xlabel("merge, in the order tried")
    canvas.diamond(ax, best_x, getattr(curve.best, measure), f"best: {_best_weights(curve)}")
    if measure == "nll" and (finite > 0).all():
        ax.set_yscale(**canvas.scale_of(finite))
    unit = canvas.MEASURES[measure]
    ax.set_ylabel(f"mean {unit}" if len(curve.tasks) > 1 else unit)
    ax.legend(fontsize=8)
    ax.set_title(_curve_title(curve))
    return ax


def _draw_over_weights(
    ax: Axes, curve: Any, x: np.ndarray, values: np.ndarray, measure: str
) -> None:
    """Draw the curve of each method over α; of a single method, the curves of its tasks too."""
    has_single_method = len(curve.methods) == 1
    has_single_task = len(curve.tasks) == 1
    for k, method in enumerate(curve.methods):
        points = np.flatnonzero([point.method == method for point in curve.points])
        points = points[np.argsort(x[points], kind="stable")]
        label = method
        if has_single_method:
            label = curve.tasks[0] if has_single_task else "mean"
        if has_single_method and not has_single_task:
            _draw_tasks(ax, curve, x, points, measure)
        canvas.drawn(ax, x[points], values[points], label, {**_look(k), "lw": 2.0})


def _draw_tasks(ax: Axes, curve: Any, x: np.ndarray, points: np.ndarray, measure: str) -> None:
    column = "nlls" if measure == "nll" else "accuracies"
    values = canvas.as_array([getattr(point, column) for point in curve.points])  # [K, tasks]
    for t, task in enumerate(curve.tasks):
        thin = {**_look(t + 1), "lw": 1.0, "ms": 4, "mew": 0.4}
        canvas.drawn(ax, x[points], values[points, t], task, thin)


def _draw_in_order(ax: Axes, curve: Any, x: np.ndarray, values: np.ndarray) -> None:
    """Draw the merges of each method as points, in the order tried."""
    for k, method in enumerate(curve.methods):
        points = np.flatnonzero([point.method == method for point in curve.points])
        canvas.drawn(ax, x[points], values[points], method, {**_look(k), "ls": ""})


def _best_weights(curve: Any) -> str:
    """The best α, with its method where several were tried over one α."""
    best = curve.best
    if curve.shape != "shared":
        weights = ", ".join(f"{alpha:.3g}" for alpha in best.weights[:6])
        return f"α = ({weights})"
    alpha = f"α = {best.weights[0]:.3g}"
    return f"{best.method}, {alpha}" if len(curve.methods) > 1 else alpha


def _curve_title(curve: Any) -> str:
    n = len(curve.tasks)
    tasks = "1 validation task" if n == 1 else f"{n:,} validation tasks"
    merges = curve.methods[0] if len(curve.methods) == 1 else "Merges"
    n_failures = sum(bool(point.failure) for point in curve.points)
    note = f" ({n_failures} could not be run)" if n_failures else ""
    return f"{merges} on {tasks}{note}"
