"""What a training run shows: generalisation estimated, sensitivities evolving, δ chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    SKY,
    VERMILLION,
    as_array,
    axes_or_new,
    choose_scale,
    count_of,
)

__all__ = ["plot_monitor", "plot_prior_selection"]

KINDS = ("generalisation", "sensitivities")
MEASURES = {
    "nll": "NLL [nats per example]  (→ worse)",
    "accuracy": "accuracy  (→ better)",
}
UNITS = {
    "deviation": "deviation without the example  (→ shapes more)",
    "self_influence": "self-influence gᵀΣg [nats]  (→ shapes more)",
    "leverage": "leverage  (→ shapes more)",
    "loss": "loss [nats]  (→ worse)",
    "left_out_loss": "left-out loss [nats]  (→ worse)",
}
LINES = ("-", "--", "-.", ":")
BANDS = ((0.05, 0.95, "5 % to 95 %", 0.3), (0.25, 0.75, "25 % to 75 %", 0.6))


def plot_monitor(
    monitor: Any,
    ax: Axes | None = None,
    *,
    kind: str = "generalisation",
    measure: str | None = None,
    top: int = 4,
    labels: Sequence[Any] | Mapping[int, Any] | None = None,
) -> Axes:
    """Draw what a :class:`blr_analysis.Monitor` has recorded, by epoch.

    ``kind="generalisation"``: the leave-one-out estimate beside training and test loss. Where
    the estimate turns upwards while the training loss falls, the model begins to overfit.
    ``kind="sensitivities"``: how a measure of every watched example evolves: bands that hold 50
    and 90 % of the examples, the median, and those examples that stand highest at the end. As
    training goes on, most examples matter less and a few matter more.

    Args:
        monitor: with at least one recorded epoch.
        ax: where to draw; a new figure if None.
        measure: "nll" (default) or "accuracy"; for sensitivities one that the monitor keeps
            ("deviation" by default, or the first that it keeps).
        top: how many single examples to draw.
        labels: shown beside the index of such an example; ``labels[index]``.

    Returns:
        The Axes.

    Raises:
        InputError: nothing recorded, an unknown kind or measure, labels that are missing.
    """
    if kind not in KINDS:
        raise InputError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    if not len(monitor):
        raise InputError("the monitor has recorded nothing yet: call monitor(posterior, epoch)")
    ax = axes_or_new(ax)
    if kind == "generalisation":
        _generalisation(monitor, ax, measure or "nll")
    else:
        _sensitivities(monitor, ax, measure, top, labels)
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return ax


def _generalisation(monitor: Any, ax: Axes, measure: str) -> None:
    if measure not in MEASURES:
        raise InputError(f"measure must be 'nll' or 'accuracy', got {measure!r}")
    epochs = np.asarray(monitor.epochs)
    curves = (
        ("train", "training data", GREY, "s", ":"),
        ("loo", "leave-one-out, from training data", BLUE, "o", "-"),
        ("test", "test data", ORANGE, "^", "--"),
    )
    for name, label, color, marker, style in curves:
        values = np.array([row[f"{name}_{measure}"] for row in monitor.rows], dtype=float)
        known = np.isfinite(values)
        if known.any():
            ax.plot(epochs, np.where(known, values, np.nan), color=color, ls=style, lw=1.6,
                    marker=marker, ms=5, mec="black", mew=0.5, label=label,
                    markevery=max(1, len(epochs) // 30))  # fmt: skip
    if not ax.lines:
        raise InputError(f"the monitor has recorded no finite {measure}")
    ax.set_ylabel(MEASURES[measure])
    ax.set_title("Leave-one-out estimate against test data")
    ax.legend()


def _sensitivities(
    monitor: Any,
    ax: Axes,
    measure: str | None,
    top: int,
    labels: Sequence[Any] | Mapping[int, Any] | None,
) -> None:
    if not monitor.keep:
        raise InputError("the monitor keeps nothing of single examples: build it with keep=")
    default = "deviation" if "deviation" in monitor.keep else monitor.keep[0]
    drawn: str = default if measure is None else measure
    values = as_array(monitor.history(drawn))  # [E, n]
    if not np.isfinite(values).all():
        raise InputError(f"the monitor's {drawn} is not finite everywhere; draw another measure")
    epochs, scale = np.asarray(monitor.epochs), choose_scale(values.reshape(-1))
    marker = "." if len(epochs) <= 30 else ""
    for low, high, label, alpha in BANDS:
        edges = scale.draw(np.quantile(values, [low, high], axis=1))
        ax.fill_between(epochs, *edges, color=SKY, alpha=alpha, lw=0, label=f"{label} of examples")
    ax.plot(epochs, scale.draw(np.median(values, axis=1)), color=BLACK, lw=1.8, marker=marker,
            label="median")  # fmt: skip
    order = np.argsort(-values[-1], kind="stable")[: max(top, 0)]
    for rank, place in enumerate(order.tolist()):
        index = int(monitor.indices[place])
        try:
            name = f"example {index}" if labels is None else f"{index}: {labels[index]}"
        except (IndexError, KeyError) as fault:
            raise InputError(
                "labels do not cover every example: pass one for each index"
            ) from fault
        color = (VERMILLION, BLUE, ORANGE, GREY)[rank % 4]
        ax.plot(epochs, scale.draw(values[:, place]), color=color, lw=1.2, marker=marker,
                ls=LINES[rank % 4], label=name)  # fmt: skip
    ax.set_yscale(scale.name)
    ax.set_ylabel(UNITS[drawn] + scale.note)
    ax.set_title(f"Sensitivities while training: {count_of(values.shape[1])}")
    ax.legend(fontsize=8)


def plot_prior_selection(selection: Any, ax: Axes | None = None) -> Axes:
    """Draw the leave-one-out NLL over the prior precisions, the chosen one marked.

    Training and test NLL stand beside it; fits that did not converge are crossed out.

    Args:
        selection: what :func:`blr_analysis.select_prior_precision` returns.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes, the prior precision on a logarithmic axis.
    """
    ax = axes_or_new(ax)
    delta = np.array([row["prior_precision"] for row in selection.rows])
    curves = (
        ("train_nll", "training data", GREY, "s", ":"),
        ("loo_nll", "leave-one-out, from training data", BLUE, "o", "-"),
        ("test_nll", "test data", ORANGE, "^", "--"),
    )
    for name, label, color, marker, style in curves:
        values = np.array([row[name] for row in selection.rows], dtype=float)
        known = np.isfinite(values)
        if known.any():
            ax.plot(delta, np.where(known, values, np.nan), color=color, ls=style, lw=1.6,
                    marker=marker, ms=5, mec="black", mew=0.5, label=label)  # fmt: skip
        if name == "loo_nll":
            stuck = known & [row.get("converged") is False for row in selection.rows]
            if stuck.any():
                ax.plot(delta[stuck], values[stuck], ls="", marker="x", ms=9, color=BLACK, zorder=4,
                        label="did not converge")  # fmt: skip
    (chosen,) = (r["loo_nll"] for r in selection.rows if r["prior_precision"] == selection.best)
    ax.axvline(selection.best, color=VERMILLION, lw=0.8, ls="-", zorder=1)
    ax.plot([selection.best], [chosen], ls="", marker="D", ms=9, mfc=VERMILLION, mec="black",
            zorder=3, label=f"chosen: {selection.best:g}")  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlabel("prior precision δ")
    ax.set_ylabel(MEASURES["nll"])
    edge = " (at the edge of the grid)" if selection.at_edge else ""
    ax.set_title(f"Prior precision by leave-one-out{edge}")
    ax.legend()
    return ax
