"""The memory map as a picture: prediction error against prediction variance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.errors import InputError
from blr_analysis.memory_map import REGIONS, VARIANCES, MemoryMap
from blr_analysis.plots import _canvas as canvas
from blr_analysis.plots.examples import image_of

__all__ = ["ERROR_LABEL", "extremes", "plot_memory_map", "shares_above", "variance_label"]

ERROR_LABEL = "prediction error ‖e‖₂"
MARKERS = "os^D"  # of the regions, in their order, as are the colours
# The largest number of dots that are drawn in this style, their area in points², their opacity.
DOT_STYLES = [(300, 22, 0.85), (3000, 12, 0.55), (math.inf, 4, 0.2)]
MAX_EDGED = 3000  # with more dots, none has a black edge
# Where each region's name stands: x and y as shares of the axes, and the alignment of the text.
CORNERS = (
    (0.015, 0.015, "left", "bottom"),
    (0.985, 0.015, "right", "bottom"),
    (0.015, 0.985, "left", "top"),
    (0.985, 0.985, "right", "top"),
)


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
        images: the images of all examples; those of the extremes stand beside their labels, see
            :func:`blr_analysis.plots.image_of`.
        labels: ``labels[index]`` is shown beside the index of an extreme.
        n_extremes: the number of examples with labels; see :func:`extremes`.

    Raises:
        InputError: ``memory`` is no memory map; an extreme has no image or label.
    """
    if not isinstance(memory, MemoryMap):
        raise InputError(f"expected what memory_map(...) returns, got {type(memory).__name__}")
    ax = canvas.axes_or_new(ax, (8.0, 5.4))
    points = np.column_stack([memory.variance.numpy(), memory.error.numpy()])
    ax.set_xscale(**canvas.scale_of(points[:, 0]))
    ax.set_yscale(**canvas.scale_of(points[:, 1]))
    _draw_regions(ax, memory, points)
    ax.axvline(memory.variance_threshold, color="0.25", lw=0.9, ls="--", zorder=1.5)
    ax.axhline(memory.error_threshold, color="0.25", lw=0.9, ls="--", zorder=1.5)
    ax.margins(x=0.05, y=0.2)  # room for the regions' names
    _name_regions(ax, memory)
    _label_axes(ax, memory)
    ax.set_title(f"Memory map of {canvas.count_of(len(points))}")
    labelled = extremes(memory, n_extremes)
    pictures = None if images is None else [image_of(images, i) for i in labelled]
    canvas.label_points(ax, points[labelled], canvas.named(labelled, labels), pictures)
    x, y = points[labelled].T
    ax.scatter(x, y, s=30, fc="none", ec="black", lw=0.9, zorder=4, label="extremes")
    return ax


def _label_axes(ax: Axes, memory: MemoryMap) -> None:
    """Name each axis, its unit, the share of the examples above its threshold, and its meaning."""
    share_of_errors, share_of_variances = shares_above(memory)
    name = variance_label(memory)
    ax.set_xlabel(f"{name} [output²], {share_of_variances:.0%} beyond the line  (→ less certain)")
    ax.set_ylabel(f"{ERROR_LABEL} [nats/output], {share_of_errors:.0%} above  (→ more wrong)")


def _draw_regions(ax: Axes, memory: MemoryMap, points: np.ndarray) -> None:
    """Draw the points of each region in its colour and marker, smaller where they are many."""
    n = len(points)
    size, opacity = canvas.dot_style(n, DOT_STYLES)
    styles = zip(REGIONS, canvas.FOUR, MARKERS, strict=True)
    for order, (region, colour, marker) in enumerate(styles):
        x, y = points[memory.region == region].T
        has_edges = order > 0 and n <= MAX_EDGED
        ax.scatter(
            x,
            y,
            s=size,
            c=colour,
            marker=marker,
            alpha=opacity,
            linewidths=0.5 if has_edges else 0,
            edgecolors="black" if has_edges else None,
            label=region,
            zorder=2 + order / 10,
        )


def extremes(memory: MemoryMap, n: int = 8) -> list[int]:
    """The examples that shape the model most: the largest error × variance.

    Memorable examples come first. Where there are fewer than ``n``, uncertain and unpredictable
    ones follow, but no regular ones.

    Returns:
        At most ``n`` indices.
    """
    uncertain = memory.indices("uncertain").numpy()
    unpredictable = memory.indices("unpredictable").numpy()
    followers = np.concatenate([uncertain, unpredictable])
    products = memory.product.numpy()[followers]
    largest_first = np.argsort(-products, kind="stable")
    indices = np.concatenate([memory.memorable.numpy(), followers[largest_first]])
    return [int(i) for i in indices[: max(n, 0)]]


def variance_label(memory: MemoryMap) -> str:
    """The name of the map's variance on an axis."""
    return f"prediction {VARIANCES[memory.variance_kind]}"


def shares_above(memory: MemoryMap) -> tuple[float, float]:
    """The shares of the examples above the thresholds of error and variance."""
    has_high_error = memory.error > memory.error_threshold
    has_high_variance = memory.variance > memory.variance_threshold
    return float(has_high_error.double().mean()), float(has_high_variance.double().mean())


def _name_regions(ax: Axes, memory: MemoryMap) -> None:
    """Write each region's name and count into its corner."""
    n = len(memory.region)
    for (region, count), corner in zip(memory.counts().items(), CORNERS, strict=True):
        x, y, horizontal, vertical = corner
        ax.text(
            x,
            y,
            f"{region}\n{count:,} ({count / n:.1%})",
            transform=ax.transAxes,
            ha=horizontal,
            va=vertical,
            fontsize=9,
            fontweight="bold" if region == "memorable" else "normal",
            zorder=4,
            bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 1.5},
        )
