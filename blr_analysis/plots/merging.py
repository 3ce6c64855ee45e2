"""Will a merge work, and with which weights? Mismatch against loss gap; losses over α."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.checks import one_of
from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import (
    BLACK,
    BLUE,
    GREY,
    MEASURES,
    ORANGE,
    SKY,
    VERMILLION,
    as_array,
    axes_or_new,
    count_ticks,
    curve,
    diamond,
    label_points,
    scale_of,
)

__all__ = ["plot_merge_curve", "plot_mismatch"]

COLOURS, MARKERS, LINES = (BLUE, ORANGE, GREY, SKY, BLACK), "o^sDv", ("-", "--", ":", "-.", "-")
ACROSS = {
    "mismatch_per_example": "gradient mismatch per example  ‖∇ℓ(θ_merged) − ∇ℓ(θ_t)‖ / N",
    "mismatch": "gradient mismatch  ‖∇ℓ(θ_merged) − ∇ℓ(θ_t)‖",
    "mismatch_in_metric": "gradient mismatch in the metric of the precision [√nats]",
    "distance": "distance  ‖θ_merged − θ_t‖",
}
FEW, MOST_LABELS = 12, 24


def plot_mismatch(
    result: Any,
    ax: Axes | None = None,
    *,
    measure: str = "nll",
    across: str = "mismatch_per_example",
) -> Axes:
    """Draw each task's gradient mismatch against what the merge costs it.

    One point per task and merge, named after its task (of more than 12, for each task that where
    it loses most); with several merges, a line leads from each task's point in one merge to its
    point in the next. Where held-out tasks were given, the
    cost is that on them, else that on the training data.

    Args:
        result: what :func:`blr_analysis.gradient_mismatch` returns.
        ax: where to draw; a new figure if None.
        measure: "nll": the rise of the mean loss; "accuracy": how much of it is lost.
        across: what the horizontal axis shows: "mismatch_per_example", "mismatch",
            "mismatch_in_metric" or "distance".

    Returns:
        The Axes.

    Raises:
        InputError: an unknown word, or nothing finite to draw.
    """
    one_of("measure", measure, tuple(MEASURES))
    one_of("across", across, tuple(ACROSS))
    rows = list(result.rows)
    x = np.array([row[across] for row in rows], dtype=float)
    y, where = _costs(rows, measure)
    known = np.isfinite(x) & np.isfinite(y)
    if not known.any():
        raise InputError(f"there is no finite {across} with a finite {measure} to draw")
    ax = axes_or_new(ax)
    merges = list(dict.fromkeys(row["merge"] for row in rows))
    tasks = np.array([row["task"] for row in rows])
    of = np.array([merges.index(row["merge"]) for row in rows])
    for name in dict.fromkeys(tasks):
        path = (tasks == name) & known
        if path.sum() > 1:
            ax.plot(x[path], y[path], color="0.75", lw=0.8, zorder=1)
    for k, merge in enumerate(merges):
        _scatter(ax, x, y, (of == k) & known, k, s=46, linewidths=0.6, label=merge, zorder=3)
    ax.axhline(0.0, color="0.4", lw=0.8, ls="--", zorder=0)
    ax.set_xscale(**scale_of(x[known]))
    ax.margins(x=0.12, y=0.12)
    ax.set_xlabel(f"{ACROSS[across]}  (→ worse)")
    what = "rise of the NLL [nats per example]" if measure == "nll" else "accuracy lost"
    ax.set_ylabel(f"{what}, {where}  (→ worse)")
    ax.set_title("What the merge costs each task")
    if len(merges) > 1:
        ax.legend()
    shown = np.flatnonzero(known)
    if len(shown) > FEW:  # of each task the point where it loses most
        highest = {str(tasks[k]): k for k in shown[np.argsort(y[shown], kind="stable")]}
        shown = np.array(sorted(highest.values()))[:MOST_LABELS]
    label_points(ax, np.column_stack([x, y])[shown], [str(t) for t in tasks[shown]])
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


def _scatter(
    ax: Axes, x: np.ndarray, y: np.ndarray, chosen: np.ndarray, k: int, **look: Any
) -> None:
    """Some points, in the k-th colour and marker."""
    look = {**_look(k), "ls": "", "edgecolors": "black", **look}
    ax.scatter(x[chosen], y[chosen], **look)


def plot_merge_curve(
    curve: Any, ax: Axes | None = None, *, measure: str | None = None, method: str | None = None
) -> Axes:
    """Draw how merges do over the weights that were tried, the best marked.

    One α for all models: a curve per task and their mean or, with several methods and none
    named, the mean of each method. Anything else: the merges in the order tried.

    Args:
        curve: what :func:`blr_analysis.merge_curve` returns.
        ax: where to draw; a new figure if None.
        measure: "nll" or "accuracy"; None: what the curve's best goes by.
        method: one of several methods; None: all.

    Returns:
        The Axes.

    Raises:
        InputError: an unknown measure or method, or nothing finite to draw.
    """
    measure = one_of("measure", curve.criterion if measure is None else measure, tuple(MEASURES))
    if method is not None:
        one_of("method", method, curve.methods)
    if not any(np.isfinite(getattr(p, measure)) for p in curve.points):
        raise InputError(f"the merges have no finite {measure} to draw")
    ax = axes_or_new(ax)
    best = curve.best_of(method)
    if curve.shape == "shared":
        _curves(curve, ax, measure, method, best)
    else:
        _order(curve, ax, measure, method, best)
    lost = sum(bool(p.failure) for p in curve.points)
    note = f" ({lost} could not be run)" if lost else ""
    one = method or (curve.methods[0] if len(curve.methods) == 1 else None)
    n = len(curve.tasks)
    ax.set_title(f"{one or 'Merges'} on {n:,} validation task{'s' * (n != 1)}{note}")
    return ax


def _curves(merges: Any, ax: Axes, measure: str, method: str | None, best: Any) -> None:
    methods = merges.methods if method is None else (method,)
    of_task, drawn = "nlls" if measure == "nll" else "accuracies", []
    for k, name in enumerate(methods):
        points = sorted((p for p in merges.points if p.method == name), key=lambda p: p.weights)
        alpha = [p.weights[0] for p in points]
        means = as_array([getattr(p, measure) for p in points])
        curves = [(means, "mean" if len(methods) == 1 else name, {**_look(k), "lw": 2.0})]
        if len(methods) == 1 and len(merges.tasks) > 1:
            each = as_array([getattr(p, of_task) for p in points]).T
            thin = {"lw": 1.0, "ms": 4, "mew": 0.4}
            looks = [{**_look(t + 1), **thin} for t in range(len(each))]
            curves = [*zip(each, merges.tasks, looks, strict=True), *curves]
        elif len(methods) == 1:
            curves = [(means, merges.tasks[0], curves[0][2])]
        for values, label, look in curves:
            curve(ax, alpha, values, label, look)
            drawn.append(values)
    ax.axvline(best.weights[0], color=VERMILLION, lw=0.8, zorder=1)
    who = f"best: {best.method}, " if len(methods) > 1 else "best: "
    diamond(ax, best.weights[0], getattr(best, measure), f"{who}α = {best.weights[0]:.3g}")
    _scale(ax, measure, np.concatenate(drawn))
    ax.set_xlabel("weight α of every model")
    ax.set_ylabel(f"mean {MEASURES[measure]}" if len(methods) > 1 else MEASURES[measure])
    ax.legend(fontsize=8)


def _order(curve: Any, ax: Axes, measure: str, method: str | None, best: Any) -> None:
    points = [p for p in curve.points if method in (None, p.method)]
    values = as_array([getattr(p, measure) for p in points])
    place = np.arange(1, len(points) + 1)
    for k, name in enumerate(dict.fromkeys(p.method for p in points)):
        mine = np.isfinite(values) & [p.method == name for p in points]
        _scatter(ax, place, values, mine, k, s=22, linewidths=0.4, label=name, zorder=2)
    shown = ", ".join(f"{a:.3g}" for a in best.weights[:6]) + " …" * (len(best.weights) > 6)
    diamond(ax, points.index(best) + 1, getattr(best, measure), f"best: α = ({shown})")
    _scale(ax, measure, values)
    ax.set_xlabel("merge, in the order tried")
    count_ticks(ax)
    ax.set_ylabel(f"mean {MEASURES[measure]}")
    ax.legend(fontsize=8)


def _scale(ax: Axes, measure: str, values: np.ndarray) -> None:
    """Logarithmic where losses, all positive, span more than a linear axis can show."""
    values = values[np.isfinite(values)]
    if measure == "nll" and bool((values > 0).all()):
        ax.set_yscale(**scale_of(values))
