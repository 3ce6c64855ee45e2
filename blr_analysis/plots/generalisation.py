"""Does the leave-one-out estimate, made from training data alone, follow the test loss?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import BLUE, ORANGE, as_array, axes_or_new

__all__ = ["plot_leave_one_out"]

_DIRECTION = {"nll": "NLL [nats per example]  (→ worse)", "accuracy": "accuracy  (→ better)"}


def plot_leave_one_out(
    loo_values: Any,
    test_values: Any,
    ax: Axes | None = None,
    *,
    epochs: Sequence[float] | None = None,
    labels: Sequence[Any] | None = None,
    measure: str = "nll",
) -> Axes:
    """Draw leave-one-out estimates beside the test values they foretell.

    Two numbers, or numbers with ``labels`` (one per class, model or prior precision), are
    drawn as pairs of bars; otherwise the values are taken to follow training, as two curves.

    Args:
        loo_values: a number, [K] numbers, or what :func:`blr_analysis.leave_one_out` returns.
        test_values: as many, measured on test data.
        ax: where to draw; a new figure if None.
        epochs: [K] where the curves' points lie; 1 … K if None.
        labels: [K] names under the bars.
        measure: "nll" or "accuracy", or the words for another axis label.

    Returns:
        The Axes.

    Raises:
        InputError: no values, different numbers of them, or infinite ones (NaN is a gap).

    Example:
        >>> ax = plot_leave_one_out([0.9, 0.5, 0.4], [0.8, 0.5, 0.45])
        >>> [line.get_label() for line in ax.lines]
        ['leave-one-out, from training data', 'test data']
    """
    loo, test = _numbers(loo_values, measure), _numbers(test_values, measure)
    for name, other in (("test_values", test), ("epochs", epochs), ("labels", labels)):
        if other is not None and len(other) != len(loo):
            raise InputError(f"{name} holds {len(other)} values for {len(loo)} loo_values")
    if not np.isfinite(np.concatenate([loo, test])).any() or np.isinf([*loo, *test]).any():
        raise InputError("loo_values and test_values must be finite numbers (NaN marks a gap)")
    ax = axes_or_new(ax)
    if labels is not None or len(loo) == 1:
        _bars(ax, loo, test, labels or [""])
    else:
        x = np.arange(1, len(loo) + 1) if epochs is None else as_array(epochs)
        marks: dict[str, Any] = {"lw": 1.6, "ms": 5, "markevery": max(1, len(loo) // 30)}
        ax.plot(x, loo, color=BLUE, marker="o", label="leave-one-out, from training data", **marks)
        ax.plot(x, test, color=ORANGE, marker="^", ls="--", mec="black", mew=0.5,
                label="test data", **marks)  # fmt: skip
        ax.set_xlabel("epoch")
        if epochs is None:
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylabel(_DIRECTION.get(measure, measure))
    ax.set_title("Leave-one-out estimate against test data")
    ax.legend()
    return ax


def _bars(ax: Axes, loo: np.ndarray, test: np.ndarray, labels: Sequence[Any]) -> None:
    place, width = np.arange(len(loo)), 0.38
    first = ax.bar(
        place - width / 2,
        loo,
        width,
        color=BLUE,
        edgecolor="black",
        label="leave-one-out, from training data",
    )
    second = ax.bar(
        place + width / 2,
        test,
        width,
        color=ORANGE,
        edgecolor="black",
        hatch="///",
        label="test data",
    )
    if len(loo) <= 6:
        for bars in (first, second):
            ax.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    ax.set_xticks(place, [str(name) for name in labels])
    if len(loo) == 1:
        ax.set_xlim(-1, 1)
    ax.margins(y=0.25)


def _numbers(values: Any, measure: str) -> np.ndarray:
    values = getattr(values, measure, values) if measure in _DIRECTION else values
    numbers = np.atleast_1d(as_array(values))
    if numbers.ndim != 1 or not len(numbers):
        raise InputError(
            f"expected a number or a list of numbers to draw; got shape {numbers.shape}"
        )
    return numbers
