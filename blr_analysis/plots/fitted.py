"""How the fit of a probabilistic model went."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import BLUE, VERMILLION, axes_or_new

__all__ = ["plot_history"]


def plot_history(fitted: Any, ax: Axes | None = None) -> Axes:
    """The objective of a :class:`blr_analysis.learning_rule.inference.Fitted` by iteration.

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
    ax = axes_or_new(ax)
    steps = np.arange(1, len(values) + 1)
    ax.plot(steps, values, color=BLUE, marker="." if len(values) < 50 else None)
    if not fitted.converged:
        ax.plot(steps[-1:], values[-1:], color=VERMILLION, marker="x", label="not converged")
        ax.legend()
    ax.set_xlabel("iteration")
    ax.set_ylabel(f"{fitted.objective} [nats]")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax
