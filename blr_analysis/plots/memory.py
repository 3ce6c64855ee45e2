"""The memory map as a picture: prediction error against prediction variance."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.errors import InputError
from blr_analysis.memory_map import REGIONS, VARIANCES, MemoryMap
from blr_analysis.plots import _canvas as canvas
from blr_analysis.plots.examples import image_of

__all__ = ["extremes", "plot_memory_map", "shares_above"]

LOOKS = dict(zip(REGIONS, zip(canvas.FOUR, "os^D", strict=True), strict=True))


def plot_memory_map(
    memory: MemoryMap,
    ax: Axes | None = None,
    *,
    images: Any = None,
    labels: canvas.Labels | None = None,
    n_extremes: int = 8,
) -> Axes:
    """Draw the error of every example against its variance, with the four regions named.

    Each axis is logarithmic where its values span more than a factor of about 30, and linear near
    0. Dashed lines are the thresholds. Regions differ by marker and colour.

    Args:
        memory: what :func:`blr_analysis.memory_map` returns.
        ax: where to draw; a new figure if None.
        images: those of the extremes stand with their labels; see
            :func:`blr_analysis.plots.image_of`.
        labels: shown beside the index of an extreme; ``labels[index]``.
        n_extremes: how many examples to label; see :func:`extremes`.

    Raises:
        InputError: ``memory`` is no memory map; an extreme has no image or label.
    """
    if not isinstance(memory, MemoryMap):
        raise InputError(f"expected what memory_map(...) returns, got {type(memory).__name__}")
    ax = canvas.axes_or_new(ax, (8.0, 5.4))
    points = np.column_stack([memory.variance.numpy(), memory.error.numpy()])
    ax.set_xscale(**canvas.scale_of(points[:, 0]))
    ax.set_yscale(**canvas.scale_of(points[:, 1]))
    n = len(points)
    size, alpha = (22, 0.85) if n <= 300 else (12, 0.55) if n <= 3000 else (4, 0.2)
    for order, (region, (colour, marker)) in enumerate(LOOKS.items()):
        edge = {"linewidths": 0.5, "edgecolors": "black"} if order and n <= 3000 else {"lw": 0}
        ax.scatter(*points[memory.region == region].T, s=size, c=colour, marker=marker,
                   alpha=alpha, label=region, zorder=2 + order / 10, **edge)  # fmt: skip
    ax.axvline(memory.variance_threshold, color="0.25", lw=0.9, ls="--", zorder=1.5)
    ax.axhline(memory.error_threshold, color="0.25", lw=0.9, ls="--", zorder=1.5)
    ax.margins(x=0.05, y=0.2)  # room for the regions' names
    _name_regions(ax, memory)
    above, beyond = shares_above(memory)
    kind = VARIANCES[memory.variance_kind]
    ax.set_xlabel(f"prediction {kind} [output²], {beyond:.0%} beyond the line  (→ less certain)")
    ax.set_ylabel(f"prediction error ‖e‖₂ [nats/output], {above:.0%} above  (→ more wrong)")
    ax.set_title(f"Memory map of {canvas.count_of(n)}")
    chosen = extremes(memory, n_extremes)
    pictures = None if images is None else [image_of(images, i) for i in chosen]
    canvas.label_points(ax, points[chosen], canvas.named(chosen, labels), pictures)
    rings = {"s": 30, "fc": "none", "ec": "black", "lw": 0.9, "zorder": 4, "label": "extremes"}
    ax.scatter(*points[chosen].T, **rings)
    return ax


def extremes(memory: MemoryMap, n: int = 8) -> list[int]:
    """The examples that shape the model most: the largest error × variance.

    Memorable ones first; where there are fewer than ``n``, uncertain and unpredictable ones
    follow. Regular ones never.
    """
    rest = np.concatenate([memory.indices(r).numpy() for r in ("uncertain", "unpredictable")])
    rest = rest[np.argsort(-memory.product.numpy()[rest], kind="stable")]
    return [int(i) for i in np.concatenate([memory.memorable.numpy(), rest])[: max(n, 0)]]


def shares_above(memory: MemoryMap) -> tuple[float, float]:
    """The shares of the examples above the thresholds of error and variance."""
    error = memory.error > memory.error_threshold
    variance = memory.variance > memory.variance_threshold
    return float(error.double().mean()), float(variance.double().mean())


def _name_regions(ax: Axes, memory: MemoryMap) -> None:
    """In the corners, with their counts."""
    for place, (region, count) in enumerate(memory.counts().items()):
        right, top = place % 2, place >= 2
        weight = "bold" if region == "memorable" else "normal"
        ax.text(0.985 if right else 0.015, 0.985 if top else 0.015,
                f"{region}\n{count:,} ({count / len(memory.region):.1%})",
                transform=ax.transAxes, ha="right" if right else "left",
                va="top" if top else "bottom", fontsize=9, fontweight=weight, zorder=4,
                bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 1.5})  # fmt: skip
