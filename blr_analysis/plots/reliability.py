"""A reliability plot: are answers right as often as the model is sure of them?"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from blr_analysis.errors import InputError
from blr_analysis.plots import _canvas as canvas
from blr_analysis.posterior.predictive import BINS

__all__ = ["plot_reliability"]


def plot_reliability(predictions: Any, ax: Axes | None = None) -> Axes:
    """Draw accuracy against confidence.

    The answers in each of 15 equal bins of confidence are one point: their mean confidence, and the
    share of them that are right. Below the diagonal the model is surer than it is right. The size
    of a point grows with the number of its answers, and the bars show their share.

    Args:
        predictions: what :meth:`blr_analysis.Posterior.predict` returns, of classes, with labels.
        ax: where to draw; a new figure if None.

    Raises:
        InputError: predictions of numbers, or without labels.
    """
    bins = predictions.reliability()
    if bins is None:
        raise InputError("a reliability plot takes predictions of classes, with labels")
    ax = canvas.axes_or_new(ax, (4.8, 4.8))
    shares = bins.counts / bins.counts.sum()
    ax.bar(
        bins.confidence.numpy(),
        shares.numpy(),
        width=0.5 / BINS,
        color=canvas.GREY,
        alpha=0.4,
        label="share of the answers",
    )
    ax.plot([0, 1], [0, 1], color=canvas.GREY, ls=":", label="as sure as right")
    sizes = 20 + 180 * shares.sqrt()
    ax.plot(bins.confidence.numpy(), bins.accuracy.numpy(), color=canvas.BLUE, lw=1)
    ax.scatter(
        bins.confidence.numpy(),
        bins.accuracy.numpy(),
        s=sizes.numpy(),
        color=canvas.BLUE,
        label=f"answers (ECE {predictions.calibration_error:.3f})",
    )
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.set_xlabel("confidence")
    ax.set_ylabel("accuracy  (→ better)")
    ax.legend(loc="upper left")
    return ax
