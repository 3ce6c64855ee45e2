"""Which method agrees best with retraining, and how much agreement there is to have?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.plots import _canvas as canvas

__all__ = ["plot_validation"]


def plot_validation(result: Any, ax: Axes | None = None) -> Axes:
    """Draw the linear datamodeling score of every method, and its ceiling.

    The lines at the ends of the bars are ranges that should hold the score in four of five
    cases; so is the band around the ceiling.

    Args:
        result: what :func:`blr_analysis.validate` returns.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes; the bars from top to bottom are ``ax.patches``.
    """
    methods = result.agreements
    ax = canvas.axes_or_new(ax, (6.4, 1.6 + 0.45 * max(2, len(methods))))
    places = np.arange(len(methods))
    scores = [method.value for method in methods]
    lows = [method.low for method in methods]
    highs = [method.high for method in methods]
    ax.barh(places, scores, 0.6, color=canvas.SKY, ec="black", lw=0.7)
    ax.hlines(places, lows, highs, color="black", lw=1.5, zorder=3)
    ax.axvline(0, color="black", lw=0.8)
    if not math.isnan(result.ceiling):
        low, high = result.ceiling_range
        label = "what the noise of retraining allows"
        ax.axvline(result.ceiling, color=canvas.VERMILLION, ls="--", label=label, zorder=2)
        ax.fill_betweenx(
            [-0.5, len(methods) - 0.5], low, high, color=canvas.VERMILLION, alpha=0.15, zorder=0
        )
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)
    ax.set_yticks(places, [canvas.shortened(method.name) for method in methods])
    ax.invert_yaxis()
    ax.set_xlabel("rank correlation with retraining on halves  (→ better)")
    return ax
