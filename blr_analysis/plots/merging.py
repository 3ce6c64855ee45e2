"""Pictures of merges: gradient mismatch against loss, and losses over the weights α."""

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
MISMATCH_LABEL = "gradient mismatch per example  ‖∇ℓ(θ_merged) − ∇ℓ(θ_t)‖ / N  (→ worse)"
MAX_POINTS_ALL_LABELLED = 12  # of more points, only the costliest of each task has a label
MAX_LABELS = 24


def plot_mismatch(result: Any, ax: Axes | None = None, *, measure: str = "nll") -> Axes:
    """Draw each task's gradient mismatch against the cost of the merge to this task.

    A point stands for a task and a merge, and is named after its task; of more than 12 points,
    only the costliest of each task is named. With several merges, a line leads from each task's
    point in one merge to its point in the next. The cost is measured on the held-out tasks if
    there are any, and otherwise on the training data.

    Args:
        result: what :func:`blr_analysis.gradient_mismatch` returns.
        ax: where to draw; a new figure if None.
        measure: "nll": the cost is the rise of the mean loss; "accuracy": the fall of accuracy.

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
    tasks = np.array([row["task"] for row in rows])
    _draw_merges(ax, rows, x, y, finite)
    ax.axhline(0.0, color="0.4", lw=0.8, ls="--", zorder=0)
    ax.set_xscale(**canvas.scale_of(x[finite]))
    ax.margins(x=0.12, y=0.12)
    ax.set_xlabel(MISMATCH_LABEL)
    cost = "rise of the NLL [nats per example]" if measure == "nll" else "accuracy lost"
    ax.set_ylabel(f"{cost}, {data}  (→ worse)")
    ax.set_title("What the merge costs each task")
    labelled = _labelled(tasks, y, np.flatnonzero(finite))
    points_labelled = np.column_stack([x, y])[labelled]
    canvas.label_points(ax, points_labelled, [str(task) for task in tasks[labelled]])
    return ax


def _draw_merges(
    ax: Axes, rows: Sequence[Any], x: np.ndarray, y: np.ndarray, finite: np.ndarray
) -> None:
    """Draw the points of each merge, and the line of each task from merge to merge."""
    merges = np.array([row["merge"] for row in rows])
    tasks = np.array([row["task"] for row in rows])
    for task in dict.fromkeys(tasks):
        points = (tasks == task) & finite
        if points.sum() > 1:
            ax.plot(x[points], y[points], color="0.75", lw=0.8, zorder=1)
    names = list(dict.fromkeys(merges.tolist()))
    for k, name in enumerate(names):
        points = (merges == name) & finite
        look = {**_look(k), "ls": "", "s": 46, "linewidths": 0.6, "edgecolors": "black"}
        ax.scatter(x[points], y[points], label=name, zorder=3, **look)
    if len(names) > 1:
        ax.legend()


def _labelled(tasks: np.ndarray, costs: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The points to label: all if they are few, and otherwise the costliest of each task."""
    if len(points) <= MAX_POINTS_ALL_LABELLED:
        return points
    rising = points[np.argsort(costs[points], kind="stable")]
    costliest = {str(tasks[k]): k for k in rising}  # the last point of a task replaces the others
    return np.array(sorted(costliest.values()))[:MAX_LABELS]


def _costs(rows: Sequence[Any], measure: str) -> tuple[np.ndarray, str]:
    """The cost of each merge to its task against θ_t, and the data on which it was measured.

    These are held-out data if there are any.
    """
    sign = 1 if measure == "nll" else -1

    def costs_on(prefix: str) -> np.ndarray:
        before = np.array([row[f"{prefix}{measure}_own"] for row in rows], dtype=float)
        after = np.array([row[f"{prefix}{measure}_merged"] for row in rows], dtype=float)
        return sign * (after - before)

    on_test_data = costs_on("test_")
    if np.isfinite(on_test_data).any():
        return on_test_data, "test data"
    return costs_on(""), "training data"


def _look(k: int) -> dict[str, Any]:
    """Colour, marker and line of the k-th merge, method or task."""
    k %= len(COLOURS)
    return {"color": COLOURS[k], "marker": MARKERS[k], "ls": LINES[k]}


def plot_merge_curve(curve: Any, ax: Axes | None = None, *, measure: str = "nll") -> Axes:
    """Draw the losses of merges over the weights that were tried, and mark the best.

    If all models had the same α, there is a curve for each task and one for their mean or, with
    several methods, the mean of each method. Otherwise the merges stand in the order tried.

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
    """Draw the curve of each task over α, thinner than the mean's."""
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
    """The best α, with its method if several were tried."""
    best = curve.best
    if curve.shape != "shared":
        weights = ", ".join(f"{alpha:.3g}" for alpha in best.weights[:6])
        return f"α = ({weights})"
    alpha = f"α = {best.weights[0]:.3g}"
    return f"{best.method}, {alpha}" if len(curve.methods) > 1 else alpha


def _curve_title(curve: Any) -> str:
    """The method, the number of tasks, and the number of merges that failed."""
    n = len(curve.tasks)
    tasks = "1 validation task" if n == 1 else f"{n:,} validation tasks"
    merges = curve.methods[0] if len(curve.methods) == 1 else "Merges"
    n_failures = sum(bool(point.failure) for point in curve.points)
    note = f" ({n_failures} could not be run)" if n_failures else ""
    return f"{merges} on {tasks}{note}"
