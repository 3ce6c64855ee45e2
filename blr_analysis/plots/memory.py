"""The memory map as a picture: prediction error against prediction variance."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from blr_analysis.errors import InputError
from blr_analysis.memory_map import REGIONS, VARIANCES, MemoryMap
from blr_analysis.plots._canvas import (
    BLUE,
    GREY,
    ORANGE,
    VERMILLION,
    AxisScale,
    Labels,
    axes_or_new,
    choose_scale,
    count_of,
    named,
    whole_figure,
)
from blr_analysis.plots._labels import label_points, shelf_height
from blr_analysis.plots.examples import image_of

__all__ = ["extremes", "plot_memory_map"]

CROWD = 3000
"""From this many examples on, their density is drawn instead of each of them."""

_COLOURS = dict(zip(REGIONS, (GREY, BLUE, ORANGE, VERMILLION), strict=True))
_MARKERS = dict(zip(REGIONS, ("o", "s", "^", "D"), strict=True))
_GREYS = LinearSegmentedColormap.from_list("greys", ["0.85", "0.0"])


def plot_memory_map(
    memory: MemoryMap,
    ax: Axes | None = None,
    *,
    images: Any = None,
    labels: Labels | None = None,
    n_extremes: int = 8,
    crowd: int = CROWD,
    cmap: str = "gray",
) -> Axes:
    """Draw the error of every example against its variance, with the four regions named.

    Each axis is logarithmic where its values span more than a factor of about 30;
    zeros, and values a million times below the largest, are then drawn at the axis's lower
    edge, which its label says. Dashed lines are the thresholds. Regions differ by marker and
    colour; from ``crowd`` examples on, grey cells count them instead.

    Args:
        memory: what :func:`blr_analysis.memory_map` returns.
        ax: where to draw; a new figure if None.
        images: those of the extremes stand above all points; see
            :func:`blr_analysis.plots.image_of`.
        labels: shown beside the index of an extreme; ``labels[index]``.
        n_extremes: how many examples to label; see :func:`extremes`.
        crowd: how many examples are too many for one marker each.
        cmap: for images without colour.

    Returns:
        The Axes.

    Raises:
        InputError: ``memory`` is no memory map; an extreme has no image or label.
    """
    if not isinstance(memory, MemoryMap):
        got = type(memory).__name__
        raise InputError(f"plot_memory_map expects what memory_map(...) returns; got {got}")
    ax = axes_or_new(ax, (7.2, 5.4) if images is None else (8.8, 7.0))
    variance, error = memory.variance.numpy(), memory.error.numpy()
    across = choose_scale(variance, memory.variance_threshold)
    up = choose_scale(error, memory.error_threshold)
    x, y = across.draw(variance), up.draw(error)
    line_x = across.line(memory.variance_threshold)
    line_y = up.line(memory.error_threshold)
    room = _room(ax)
    shelf = 0.0 if images is None else shelf_height(ax)
    ax.set_xscale(across.name)
    ax.set_yscale(up.name)
    ax.set_xlim(across.limits(np.append(x, line_x), 0.05, 0.05))
    ax.set_ylim(up.limits(np.append(y, line_y), room, room + shelf))
    if len(x) >= crowd:
        _draw_density(ax, x, y, across, up)
        (_, right), (_, top) = ax.get_xlim(), ax.get_ylim()
        tint = {"fc": _COLOURS["memorable"], "alpha": 0.12, "lw": 0, "zorder": 0.5}
        ax.add_patch(Rectangle((line_x, line_y), right - line_x, top - line_y, **tint))
    else:
        _draw_each(ax, x, y, memory)
    ax.axvline(line_x, color="0.25", lw=0.9, ls="--", zorder=1.5)
    ax.axhline(line_y, color="0.25", lw=0.9, ls="--", zorder=1.5)
    _say_how_many_lie_beyond(ax, memory, line_x, line_y)
    names = _name_regions(ax, memory)
    variance_name = VARIANCES[memory.variance_kind]
    ax.set_xlabel(f"prediction {variance_name} [output²]  (→ less certain){across.note}")
    ax.set_ylabel(f"prediction error ‖e‖₂ [nats/output]  (→ more wrong){up.note}")
    ax.set_title(f"Memory map of {count_of(len(x))}")
    chosen = extremes(memory, n_extremes)
    pictures = None if images is None else [image_of(images, i) for i in chosen]
    points, above = np.column_stack([x, y]), (1 - room - shelf, 1 - room)
    label_points(
        ax, points[chosen], named(chosen, labels), points, pictures, cmap, avoid=names, shelf=above
    )
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


def _draw_each(ax: Axes, x: np.ndarray, y: np.ndarray, memory: MemoryMap) -> None:
    alpha = 0.85 if len(x) <= 300 else 0.55
    size = 22 if len(x) <= 300 else 12
    for order, region in enumerate(REGIONS):
        here = memory.region == region
        ax.scatter(
            x[here],
            y[here],
            s=size,
            c=_COLOURS[region],
            marker=_MARKERS[region],
            alpha=alpha,
            linewidths=0 if region == "regular" else 0.5,
            edgecolors="none" if region == "regular" else "black",
            label=region,
            zorder=2 + order / 10,
        )


def _draw_density(ax: Axes, x: np.ndarray, y: np.ndarray, across: AxisScale, up: AxisScale) -> None:
    low_high = (*ax.get_xlim(), *ax.get_ylim())
    cells = ax.hexbin(
        x,
        y,
        gridsize=(70, 40),
        xscale=across.name,
        yscale=up.name,
        mincnt=1,
        cmap=_GREYS,
        linewidths=0.1,
        zorder=1,
    )
    ax.set(xlim=low_high[:2], ylim=low_high[2:])
    counts = np.asarray(cells.get_array())
    cells.set_norm(LogNorm(1, max(10.0, float(counts.max()))))
    ax.figure.colorbar(cells, ax=ax, pad=0.02, label="examples per cell")


def _say_how_many_lie_beyond(ax: Axes, memory: MemoryMap, line_x: float, line_y: float) -> None:
    """Beside each threshold the share of the examples that it leaves above: what it was set by."""
    box = {"fc": "white", "ec": "none", "alpha": 0.75, "pad": 1}
    look: dict[str, Any] = {"color": "0.25", "fontsize": 7, "zorder": 4, "bbox": box}
    above = float((memory.error > memory.error_threshold).double().mean())
    beyond = float((memory.variance > memory.variance_threshold).double().mean())
    across, up = ax.get_yaxis_transform(), ax.get_xaxis_transform()
    ax.text(0.012, line_y, f"{above:.0%} above", transform=across, va="center", **look)
    ax.text(line_x, 0.3, f"{beyond:.0%} beyond", transform=up, ha="center", va="center",
            rotation=90, **look)  # fmt: skip


def _name_regions(ax: Axes, memory: MemoryMap) -> list[Text]:
    n = len(memory.region)
    names = []
    for region, count in memory.counts().items():
        high = REGIONS.index(region)
        name = ax.text(
            0.985 if high % 2 else 0.015,
            0.985 if high >= 2 else 0.015,
            f"{region}\n{count:,} ({_percent(count, n)})",
            transform=ax.transAxes,
            ha="right" if high % 2 else "left",
            va="top" if high >= 2 else "bottom",
            fontsize=9,
            fontweight="bold" if region == "memorable" else "normal",
            bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 1.5},
            zorder=4,
        )
        names.append(name)
    return names


def _room(ax: Axes) -> float:
    """The share of the axes' height that a region's two-line name takes."""
    height = max(ax.get_window_extent().height, 1.0) / whole_figure(ax).dpi
    return min(0.22, 2.9 * 9 / 72 / height + 0.02)


def _percent(count: int, n: int) -> str:
    share = 100 * count / n
    return f"{share:.0f} %" if share >= 10 or share == round(share) else f"{share:.1f} %"
