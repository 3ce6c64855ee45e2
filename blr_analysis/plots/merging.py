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
    choose_scale,
    count_ticks,
    curve,
    diamond,
    whole_figure,
)
from blr_analysis.plots._labels import label_points

__all__ = ["plot_merge_curve", "plot_mismatch"]

COLOURS, MARKERS, LINES = (BLUE, ORANGE, GREY, SKY, BLACK), "o^sDv", ("-", "--", ":", "-.", "-")
LOOKS = [
    {"color": colour, "marker": marker, "ls": line}
    for colour, marker, line in zip(COLOURS, MARKERS, LINES, strict=True)
]
ACROSS = {
    "mismatch_per_example": "gradient mismatch per example  ‖∇ℓ(θ_merged) − ∇ℓ(θ_t)‖ / N",
    "mismatch": "gradient mismatch  ‖∇ℓ(θ_merged) − ∇ℓ(θ_t)‖",
    "mismatch_in_metric": "gradient mismatch in the metric of the precision [√nats]",
    "distance": "distance  ‖θ_merged − θ_t‖",
}
FEW, MOST_LABELS = 12, 40


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
    scale = choose_scale(x[known])
    drawn = scale.draw(x)
    for name in dict.fromkeys(tasks):
        path = (tasks == name) & known
        if path.sum() > 1:
            ax.plot(drawn[path], y[path], color="0.75", lw=0.8, zorder=1)
    for k, merge in enumerate(merges):
        _scatter(ax, drawn, y, (of == k) & known, k, s=46, linewidths=0.6, label=merge, zorder=3)
    ax.axhline(0.0, color="0.4", lw=0.8, ls="--", zorder=0)
    ax.set_xscale(scale.name)
    ax.margins(x=0.12, y=0.12)
    ax.set_xlabel(f"{ACROSS[across]}  (→ worse){scale.note}")
    what = "rise of the NLL [nats per example]" if measure == "nll" else "accuracy lost"
    ax.set_ylabel(f"{what}, {where}  (→ worse)")
    ax.set_title("What the merge costs each task")
    legend = [ax.legend()] if len(merges) > 1 else []
    shown = _to_label(tasks, y, known)
    points = np.column_stack([drawn, y])
    label_points(ax, points[shown], [str(t) for t in tasks[shown]], points[known], avoid=legend)
    return ax


def _to_label(tasks: np.ndarray, costs: np.ndarray, known: np.ndarray) -> np.ndarray:
    """All points where they are few; else, for each task, the one where it loses most."""
    places = np.flatnonzero(known)
    if len(places) > FEW:
        highest = {str(tasks[k]): k for k in places[np.argsort(costs[places], kind="stable")]}
        places = np.array(sorted(highest.values()))
    return places[:MOST_LABELS]


def _costs(rows: Sequence[Any], measure: str) -> tuple[np.ndarray, str]:
    """How much worse than at θ_t, on held-out data where all rows have them."""

    def lost(prefix: str) -> np.ndarray:
        own, merged = (
            np.array([row[f"{prefix}{measure}_{at}"] for row in rows], dtype=float)
            for at in ("own", "merged")
        )
        return merged - own if measure == "nll" else own - merged

    test = lost("test_")
    return (test, "test data") if np.isfinite(test).any() else (lost(""), "training data")


def _scatter(
    ax: Axes, x: np.ndarray, y: np.ndarray, chosen: np.ndarray, k: int, **look: Any
) -> None:
    """Some points, in the k-th colour and marker."""
    colour, marker = (LOOKS[k % len(LOOKS)][part] for part in ("color", "marker"))
    look = {"color": colour, "marker": marker, "edgecolors": "black", **look}
    ax.scatter(x[chosen], y[chosen], **look)


def plot_merge_curve(
    curve: Any, ax: Axes | None = None, *, measure: str | None = None, method: str | None = None
) -> Axes:
    """Draw how merges do over the weights that were tried, the best marked.

    One α for all models: a curve per task and their mean or, with several methods and none
    named, the mean of each method. All combinations of two models' weights: a map of the mean.
    Anything else: the merges in the order tried, and the best so far.

    Args:
        curve: what :func:`blr_analysis.merge_curve` returns.
        ax: where to draw; a new figure if None.
        measure: "nll" or "accuracy"; None: what the curve's best goes by.
        method: one of several methods; None: all, or for a map that of the best point.

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
    if curve.shape == "grid" and len(curve.models) == 2:
        _map(curve, ax, measure, best)
    elif curve.shape == "shared":
        _curves(curve, ax, measure, method, best)
    else:
        _order(curve, ax, measure, method, best)
    lost = sum(bool(p.failure) for p in curve.points)
    note = f" ({lost} could not be run)" if lost else ""
    one = method or (curve.methods[0] if len(curve.methods) == 1 else None)
    who = best.method if curve.shape == "grid" and len(curve.models) == 2 else one or "Merges"
    n = len(curve.tasks)
    ax.set_title(f"{who} on {n:,} validation task{'s' * (n != 1)}{note}")
    return ax


def _curves(merges: Any, ax: Axes, measure: str, method: str | None, best: Any) -> None:
    methods = merges.methods if method is None else (method,)
    drawn = []
    for k, name in enumerate(methods):
        points = sorted((p for p in merges.points if p.method == name), key=lambda p: p.weights)
        alpha = [p.weights[0] for p in points]
        if len(methods) == 1 and len(merges.tasks) > 1:
            for t, task in enumerate(merges.tasks):
                of_task = "nlls" if measure == "nll" else "accuracies"
                each = as_array([getattr(p, of_task)[t] for p in points])
                look = {**LOOKS[(t + 1) % len(LOOKS)], "lw": 1.0, "ms": 4, "mew": 0.4}
                curve(ax, alpha, each, task, look)
                drawn.append(each)
        label = "mean" if len(merges.tasks) > 1 else merges.tasks[0]
        mean = as_array([getattr(p, measure) for p in points])
        look = {**LOOKS[k % len(LOOKS)], "lw": 2.0}
        curve(ax, alpha, mean, name if len(methods) > 1 else label, look)
        drawn.append(mean)
    ax.axvline(best.weights[0], color=VERMILLION, lw=0.8, zorder=1)
    who = f"best: {best.method}, " if len(methods) > 1 else "best: "
    diamond(ax, best.weights[0], getattr(best, measure), f"{who}α = {best.weights[0]:.3g}")
    _scale(ax, measure, np.concatenate(drawn))
    ax.set_xlabel("weight α of every model")
    ax.set_ylabel(f"mean {MEASURES[measure]}" if len(methods) > 1 else MEASURES[measure])
    ax.legend(fontsize=8)


def _map(curve: Any, ax: Axes, measure: str, best: Any) -> None:
    points = [p for p in curve.points if p.method == best.method]
    first, second = (sorted({p.weights[t] for p in points}) for t in (0, 1))
    values = np.full((len(second), len(first)), np.nan)
    for p in points:
        values[second.index(p.weights[1]), first.index(p.weights[0])] = getattr(p, measure)
    values[~np.isfinite(values)] = np.nan
    shown = values[np.isfinite(values)]
    # Far from the best, losses grow without bound and would leave the map no colours.
    top = float(np.quantile(shown, 0.8)) if measure == "nll" else float(shown.max())
    over = measure == "nll" and bool(shown.max() > top)
    mesh = ax.pcolormesh(_edges(first), _edges(second), values, vmin=float(shown.min()),
                         vmax=max(top, float(shown.min()) + 1e-12), edgecolors="face",
                         cmap="viridis_r" if measure == "nll" else "viridis")  # fmt: skip
    first_best, second_best = best.weights
    diamond(ax, first_best, second_best, f"best: {getattr(best, measure):.3g}", mec="white")
    ax.set_facecolor("0.8")
    ax.set_xlabel(f"weight α of {curve.models[0]}")
    ax.set_ylabel(f"weight α of {curve.models[1]}")
    ax.legend(fontsize=8)
    extend = "max" if over else "neither"
    whole_figure(ax).colorbar(mesh, ax=ax, extend=extend, label=f"mean {MEASURES[measure]}")


def _order(curve: Any, ax: Axes, measure: str, method: str | None, best: Any) -> None:
    points = [p for p in curve.points if method in (None, p.method)]
    values = as_array([getattr(p, measure) for p in points])
    place = np.arange(1, len(points) + 1)
    for k, name in enumerate(dict.fromkeys(p.method for p in points)):
        mine = np.isfinite(values) & [p.method == name for p in points]
        _scatter(ax, place, values, mine, k, s=22, linewidths=0.4, label=name, zorder=2)
    sofar = np.minimum if measure == "nll" else np.maximum
    worst = np.inf if measure == "nll" else -np.inf
    ax.step(place, sofar.accumulate(np.where(np.isfinite(values), values, worst)), where="post",
            color="0.4", lw=1.0, label="best so far", zorder=1)  # fmt: skip
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
    if measure == "nll" and bool((values > 0).all()) and choose_scale(values).log:
        ax.set_yscale("log")


def _edges(values: Sequence[float]) -> np.ndarray:
    """Cell borders halfway between the values, which need not be evenly spaced."""
    v = np.array(values, dtype=float)
    if len(v) == 1:
        return np.array([v[0] - 0.5, v[0] + 0.5])
    middle = (v[1:] + v[:-1]) / 2
    return np.concatenate([[2 * v[0] - middle[0]], middle, [2 * v[-1] - middle[-1]]])
