"""Pictures of training and fitting: the estimated test loss, sensitivities, the choice of δ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.checks import one_of
from blr_analysis.errors import InputError
from blr_analysis.plots import _canvas as canvas

__all__ = ["plot_history", "plot_leave_one_out", "plot_monitor", "plot_prior_selection"]

LINES = ("-", "--", "-.", ":")
# Quantiles, their label, and the opacity of the band between them.
BANDS = ((0.05, 0.95, "5 % to 95 %", 0.3), (0.25, 0.75, "25 % to 75 %", 0.6))
MAX_MARKED = 30  # epochs whose points are marked on the curves


def plot_monitor(
    monitor: Any,
    ax: Axes | None = None,
    *,
    kind: str = "generalisation",
    measure: str | None = None,
) -> Axes:
    """Draw the record of a :class:`blr_analysis.Monitor` by epoch.

    ``kind="generalisation"`` draws the leave-one-out estimate beside training and test loss. Where
    the estimate turns upwards while the training loss falls, the model begins to overfit.
    ``kind="sensitivities"`` draws a measure of all watched examples: bands around 50 and 90 % of
    the examples, the median, and the examples that are highest at the end. As training goes on,
    most examples matter less and a few matter more.

    Args:
        monitor: with at least one recorded epoch.
        ax: where to draw; a new figure if None.
        kind: "generalisation" or "sensitivities".
        measure: "nll" (default) or "accuracy"; for sensitivities one of the monitor's ``keep``
            (by default "deviation", or the first of them).

    Returns:
        The Axes.

    Raises:
        InputError: nothing recorded, an unknown kind or measure.
    """
    one_of("kind", kind, ("generalisation", "sensitivities"))
    if not len(monitor):
        raise InputError("the monitor has recorded nothing yet: call monitor(posterior, epoch)")
    ax = canvas.axes_or_new(ax)
    if kind == "generalisation":
        _generalisation(monitor, ax, measure or "nll")
    else:
        _sensitivities(monitor, ax, measure)
    ax.set_xlabel("epoch")
    canvas.count_ticks(ax)
    return ax


def _generalisation(monitor: Any, ax: Axes, measure: str) -> None:
    """Draw the measure on training data, by leave-one-out, and on test data."""
    one_of("measure", measure, tuple(canvas.MEASURES))
    for data, (label, look) in canvas.LOOKS.items():
        values = [row[f"{data}_{measure}"] for row in monitor.rows]
        canvas.drawn(ax, monitor.epochs, values, label, look)
    if not ax.lines:
        raise InputError(f"the monitor has recorded no finite {measure}")
    ax.set_ylabel(canvas.MEASURES[measure])
    ax.set_title("Leave-one-out estimate against test data")
    ax.legend()


def _sensitivities(monitor: Any, ax: Axes, measure: str | None) -> None:
    """Draw bands and median of a measure over the watched examples, and the highest examples."""
    if not monitor.keep:
        raise InputError("the monitor keeps nothing of single examples: build it with keep=")
    if measure is None:
        measure = "deviation" if "deviation" in monitor.keep else str(monitor.keep[0])
    values = canvas.as_array(monitor.history(measure))  # [epochs, examples]
    if not np.isfinite(values).all():
        raise InputError(f"the monitor's {measure} is not finite everywhere; draw another measure")
    epochs = np.asarray(monitor.epochs)
    marker = "." if len(epochs) <= MAX_MARKED else ""
    for low, high, label, alpha in BANDS:
        edges = np.quantile(values, [low, high], axis=1)
        ax.fill_between(
            epochs, *edges, color=canvas.SKY, alpha=alpha, lw=0, label=f"{label} of examples"
        )
    median = np.median(values, axis=1)
    ax.plot(epochs, median, color=canvas.BLACK, lw=1.8, marker=marker, label="median")
    order = np.argsort(-values[-1], kind="stable")[: len(LINES)]
    for place, color, dash in zip(order.tolist(), reversed(canvas.FOUR), LINES, strict=False):
        label = f"example {int(monitor.indices[place])}"
        ax.plot(epochs, values[:, place], color=color, lw=1.2, marker=marker, ls=dash, label=label)
    ax.set_yscale(**canvas.scale_of(values.reshape(-1)))
    ax.set_ylabel(canvas.UNITS[measure])
    ax.set_title(f"Sensitivities while training: {canvas.count_of(values.shape[1])}")
    ax.legend(fontsize=8)


def plot_prior_selection(selection: Any, ax: Axes | None = None) -> Axes:
    """Draw the leave-one-out NLL over the prior precisions, and mark the one that was chosen.

    Training and test NLL stand beside it; fits that did not converge are crossed out.

    Args:
        selection: what :func:`blr_analysis.select_prior_precision` returns.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes, the prior precision on a logarithmic axis.
    """
    ax = canvas.axes_or_new(ax)
    delta = np.array([row["prior_precision"] for row in selection.rows])
    for data, (label, look) in canvas.LOOKS.items():
        values = np.array([row[f"{data}_nll"] for row in selection.rows], dtype=float)
        finite = canvas.drawn(ax, delta, values, label, look)
        if data == "loo":
            failed = np.array([row.get("converged") is False for row in selection.rows])
            _cross_out(ax, delta[finite & failed], values[finite & failed])
    (best_row,) = [row for row in selection.rows if row["prior_precision"] == selection.best]
    ax.axvline(selection.best, color=canvas.VERMILLION, lw=0.8, ls="-", zorder=1)
    label = f"chosen: {selection.best:g}"
    canvas.diamond(ax, selection.best, best_row["loo_nll"], label, zorder=3)
    ax.set_xscale("log")
    ax.set_xlabel("prior precision δ")
    ax.set_ylabel(canvas.MEASURES["nll"])
    edge = " (at the edge of the grid)" if selection.at_edge else ""
    ax.set_title(f"Prior precision by leave-one-out{edge}")
    ax.legend()
    return ax


def _cross_out(ax: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """Cross out the fits that did not converge."""
    if not len(x):
        return
    ax.plot(
        x,
        y,
        ls="",
        marker="x",
        ms=9,
        color=canvas.BLACK,
        zorder=4,
        label="did not converge",
    )


def plot_leave_one_out(
    loo_values: Any,
    test_values: Any,
    ax: Axes | None = None,
    *,
    labels: Sequence[Any] | None = None,
    measure: str = "nll",
) -> Axes:
    """Draw leave-one-out estimates beside the test values that they estimate.

    A pair of bars stands for two numbers, or for each class, model or prior precision.

    Args:
        loo_values: a number, [K] numbers, or what :func:`blr_analysis.leave_one_out` returns.
        test_values: as many, measured on test data.
        ax: where to draw; a new figure if None.
        labels: [K] names under the bars; None: 1 … K.
        measure: "nll" or "accuracy", or the label of the axis for another measure.

    Returns:
        The Axes.

    Raises:
        InputError: no values, different numbers of them, or infinite ones (NaN is a gap).

    Example:
        >>> ax = plot_leave_one_out([0.9, 0.5, 0.4], [0.8, 0.5, 0.45])
        >>> [bars.get_label() for bars in ax.containers]
        ['leave-one-out, from training data', 'test data']
    """
    loo = _numbers(loo_values, measure)
    test = _numbers(test_values, measure)
    names = range(1, len(loo) + 1) if labels is None else labels
    for argument, values in (("test_values", test), ("labels", names)):
        if len(values) != len(loo):
            raise InputError(f"{argument} holds {len(values)} values for {len(loo)} loo_values")
    if not np.isfinite(np.concatenate([loo, test])).any():
        raise InputError("loo_values and test_values must be finite numbers (NaN marks a gap)")
    ax = canvas.axes_or_new(ax)
    canvas.paired_bars(ax, loo, test, (canvas.LOO, "test data"), canvas.BLUE)
    ax.set_xticks(range(len(loo)), [str(name) for name in names])
    ax.margins(y=0.25)
    ax.set_ylabel(canvas.MEASURES.get(measure, measure))
    ax.set_title("Leave-one-out estimate against test data")
    ax.legend()
    return ax


def _numbers(values: Any, measure: str) -> np.ndarray:
    """The measure of a leave-one-out result, ``[1]``, or plain numbers, ``[K]``."""
    if measure in canvas.MEASURES:
        values = getattr(values, measure, values)
    return canvas.as_array(values).reshape(-1)


def plot_history(fitted: Any, ax: Axes | None = None) -> Axes:
    """Draw the objective of a :class:`blr_analysis.learning_rule.inference.Fitted` by iteration.

    A fit that stopped at its limit of iterations ends in a cross.

    Args:
        fitted: with ``history``, ``objective`` and ``converged``.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Raises:
        InputError: an empty history.
    """
    values = np.asarray(fitted.history, dtype=float)
    if not len(values):
        raise InputError("the history is empty: there is nothing to draw")
    ax = canvas.axes_or_new(ax)
    steps = np.arange(1, len(values) + 1)
    ax.plot(steps, values, color=canvas.BLUE, marker="." if len(values) < 50 else None)
    if not fitted.converged:
        ax.plot(steps[-1:], values[-1:], color=canvas.VERMILLION, marker="x", label="not converged")
        ax.legend()
    ax.set_xlabel("iteration")
    ax.set_ylabel(f"{fitted.objective} [nats]")
    canvas.count_ticks(ax)
    return ax
