"""Examples one by one: as points (deviations, sums of sites, what looks suspicious), as images."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import (
    BLUE,
    GREY,
    ORANGE,
    VERMILLION,
    AxisScale,
    Labels,
    as_array,
    axes_or_new,
    choose_scale,
    count_of,
    count_ticks,
    named,
)
from blr_analysis.plots._labels import label_points
from blr_analysis.sensitivity.suspicious import KINDS, NONE, Suspicions

__all__ = [
    "image_of",
    "plot_deviations",
    "plot_examples",
    "plot_site_leave_one_out",
    "plot_site_scores",
    "plot_suspicious",
]

_SUSPECTED = {
    "none": (GREY, ".", "nothing suspected"),
    "label": (VERMILLION, "x", "label"),
    "unfamiliar": (BLUE, "^", "unfamiliar"),
    "duplicate": (ORANGE, "s", "duplicate"),
}


def plot_deviations(
    scores: Any, ax: Axes | None = None, *, labels: Labels | None = None, n_labels: int = 8
) -> Axes:
    """Draw the deviations in falling order, the largest labelled by their index.

    A steep start means that a few examples shape the model; a flat curve, that all do alike.
    Ranks are on a logarithmic axis from 100 examples on, deviations where the first is more
    than a hundred times that at 5 % of the ranks. Where the scores carry no deviation (too many
    outputs), the self-influence takes its place, and the axis says so.

    Args:
        scores: what :func:`blr_analysis.sensitivity` returns, or its table, or any part of it:
            ``deviation`` [N] and, in a table, ``index``.
        ax: where to draw; a new figure if None.
        labels: shown beside the index of a labelled example; ``labels[index]``.
        n_labels: how many examples to label.

    Returns:
        The Axes.

    Raises:
        InputError: neither deviation nor self-influence, no examples, or values not finite.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"index": [7, 8, 9], "deviation": [0.1, 0.3, 0.2]})
        >>> plot_deviations(table).lines[0].get_ydata().tolist()
        [0.3, 0.2, 0.1]
    """
    values, unit = _values(scores)
    is_table = hasattr(scores, "columns")
    index = as_array(scores["index"] if is_table else np.arange(len(values))).astype(int)
    order = np.argsort(-values, kind="stable")
    steep = values[order[0]] > 100 * values[order[len(values) // 20]]
    scale = choose_scale(values) if steep else AxisScale(False)
    height = scale.draw(values[order])
    rank = np.arange(1, len(values) + 1)
    ax = axes_or_new(ax)
    few = len(values) <= 100
    ax.plot(rank, height, color=BLUE, lw=1.5, marker="." if few else "", zorder=2)
    ax.fill_between(rank, height, height.min() if scale.log else 0, color=BLUE, alpha=0.15, lw=0)
    ax.set_xscale("linear" if few else "log")
    ax.set_yscale(scale.name)
    if few:
        count_ticks(ax)
        ax.set_xlim(0.5, len(values) + 0.5)
    else:
        ax.set_xlim(0.8, len(values) * 1.1)
    low, high = scale.limits(height if scale.log else np.append(height, 0.0), 0.03, 0.12)
    ax.set_ylim(max(low, 0.0) if not scale.log else low, high)
    top = order[: max(n_labels, 0)]
    top = top[values[top] > 0]
    texts = named(index[top].tolist(), labels)
    points = np.column_stack([rank, height])
    ax.plot(*points[: len(top)].T, ls="", marker="D", ms=5, mfc=VERMILLION, mec="black", zorder=3)
    label_points(ax, points[: len(top)], texts, points)
    ax.set_xlabel("rank (1 = shapes the model most)")
    ax.set_ylabel(f"{unit}{scale.note}")
    ax.set_title(f"How far predictions would move: {count_of(len(values))}")
    return ax


def _values(scores: Any) -> tuple[np.ndarray, str]:
    """The deviations and their name with units, or the self-influences where there are none."""
    units = {
        "deviation": _deviation_unit(getattr(scores, "likelihood", None)),
        "self_influence": "self-influence gᵀΣg [nats]  (→ shapes more)",
    }
    for name, unit in units.items():
        is_table = hasattr(scores, "columns")
        values = scores.get(name) if is_table else getattr(scores, name, None)
        values = None if values is None else as_array(values).reshape(-1)
        if values is None or (len(values) and np.isnan(values).all()):
            continue
        if not len(values):
            raise InputError("plot_deviations got no examples: pass at least one")
        if not np.isfinite(values).all():
            raise InputError(f"{(~np.isfinite(values)).sum()} {name}s are not finite")
        return values, unit
    got = type(scores).__name__
    raise InputError(f"expected scores with a deviation or a self_influence, got {got}")


def _deviation_unit(likelihood: Any) -> str:
    if likelihood is None:
        return "deviation without the example  (→ shapes more)"
    if likelihood.is_classification:
        return "deviation ‖Δp‖₁, 0 to 2  (→ shapes more)"
    return "deviation ‖Δf‖₂ [output]  (→ shapes more)"


def plot_site_scores(
    scores: Any, ax: Axes | None = None, *, labels: Labels | None = None, n_labels: int = 8
) -> Axes:
    """Draw the deviations in falling order; what was not observed is left out.

    Args:
        scores: what :func:`blr_analysis.sensitivity` returns for a sum of sites.
        ax, labels, n_labels: see :func:`blr_analysis.plots.plot_deviations`.

    Returns:
        The Axes.
    """
    seen = scores.table.dropna(subset=["deviation"])
    ax = plot_deviations(seen, ax, labels=labels, n_labels=n_labels)
    unit = "log-predictive lost without it [nats]"
    ax.set_ylabel(ax.get_ylabel().replace("deviation without the example", unit))
    ax.set_title(f"What each tells about itself: {count_of(len(seen))}")
    return ax


def plot_site_leave_one_out(
    loo: Any, ax: Axes | None = None, *, labels: Labels | None = None, n_labels: int = 8
) -> Axes:
    """Draw every example's loss without it against its loss, the largest rises labelled.

    Points on the dashed line lose nothing when they are left out; those far above it are known
    to the model by themselves only.

    Args:
        loo: what :func:`blr_analysis.leave_one_out` returns for a sum of sites.
        ax: where to draw; a new figure if None.
        labels: shown beside the index of a labelled example; ``labels[index]``.
        n_labels: how many examples to label.

    Returns:
        The Axes.

    Raises:
        InputError: nothing was observed, or labels that do not cover every example.
    """
    points = np.column_stack([as_array(loo.losses_before), as_array(loo.losses)])
    seen = np.flatnonzero(np.isfinite(points).all(1))
    if not len(seen):
        raise InputError("no example has finite losses: there is nothing to draw")
    ax = axes_or_new(ax)
    ax.axline((points[seen[0], 0],) * 2, slope=1, color="0.25", lw=0.9, ls="--", zorder=0.5)
    ax.plot(*points[seen].T, ls="", marker="o", ms=4, color=BLUE, alpha=0.6, label="examples")
    top = seen[np.argsort(points[seen, 0] - points[seen, 1], kind="stable")][: max(n_labels, 0)]
    ax.plot(*points[top].T, ls="", marker="D", ms=5, mfc=VERMILLION, mec="black", zorder=3)
    label_points(ax, points[top], named(top.tolist(), labels), points[seen])
    ax.set_xlabel("loss with the example [nats]  (→ worse)")
    ax.set_ylabel("loss without the example [nats]  (→ worse)")
    ax.set_title(f"Leave-one-out of {count_of(len(seen))}: {loo.nll:.3g} nats each")
    return ax


def plot_suspicious(suspicions: Any, ax: Axes | None = None) -> Axes:
    """Draw the mean loss of each example over the run against how unfamiliar it is.

    Args:
        suspicions: what :func:`blr_analysis.suspicious` returns.
        ax: where to draw; a new figure if None.

    Returns:
        The Axes.

    Raises:
        InputError: something else.
    """
    if not isinstance(suspicions, Suspicions):
        got = type(suspicions).__name__
        raise InputError(f"plot_suspicious expects what suspicious(...) returns; got {got}")
    ax = axes_or_new(ax, (7.2, 5.0))
    unfamiliarity, up = as_array(suspicions.unfamiliarity), as_array(suspicions.losses)
    across = choose_scale(unfamiliarity)
    x, kind = across.draw(unfamiliarity), np.array(suspicions.kind)
    for name in (NONE, *KINDS):
        chosen = kind == name
        if chosen.any():
            colour, marker, words = _SUSPECTED[name]
            size, alpha = (8, 0.4) if name == NONE else (26, 0.9)
            label = f"{words} ({int(chosen.sum()):,})"
            ax.scatter(
                x[chosen], up[chosen], s=size, c=colour, marker=marker, alpha=alpha, label=label
            )
    ax.set_xscale(across.name)
    ax.set_ylabel("mean loss over the run [nats]  (→ label more suspicious)")
    ax.set_xlabel(f"unfamiliarity tr ΛV [parameters]  (→ less familiar){across.note}")
    ax.set_title(f"What looks wrong in {count_of(len(suspicions))}")
    ax.legend(loc="best", fontsize="small")
    return ax


def image_of(images: Any, index: int) -> np.ndarray:
    """Example ``index`` as an array for ``imshow``: [H, W] or [H, W, 3 or 4], between 0 and 1.

    Args:
        images: anything with ``images[index]``: a tensor or array [N, H, W], [N, C, H, W] or
            [N, H, W, C], flattened squares [N, H·H], a list, or a Dataset whose items start
            with the image. Values other than bytes or 0…1 are stretched to 0…1, image by image.

    Raises:
        InputError: there is no such example, or it is no image.
    """
    try:
        item = images[int(index)]
    except (IndexError, KeyError, TypeError) as fault:
        raise InputError(f"images[{index}] does not exist: pass one image per example") from fault
    item = item[0] if isinstance(item, tuple) else item
    item = item.detach().cpu().numpy() if hasattr(item, "detach") else item
    picture = np.asarray(item)
    shape = picture.shape
    if picture.ndim == 1 and math.isqrt(picture.size) ** 2 == picture.size > 0:
        picture = picture.reshape(math.isqrt(picture.size), -1)
    if picture.ndim == 3 and shape[0] in (1, 3, 4) and shape[-1] not in (1, 3, 4):
        picture = np.moveaxis(picture, 0, -1)
    if picture.ndim == 3 and picture.shape[-1] == 1:
        picture = picture[:, :, 0]
    fits = picture.ndim == 2 or (picture.ndim == 3 and picture.shape[-1] in (3, 4))
    if not fits or not picture.size or picture.dtype.kind not in "buif":
        raise InputError(
            f"images[{index}] of shape {shape}, {picture.dtype}, is no image: expected [H, W], "
            "[C, H, W], [H, W, C] or a flattened square"
        )
    return _stretched(picture)


def plot_examples(
    images: Any,
    indices: Iterable[Any],
    titles: Sequence[str] | None = None,
    ax: Axes | None = None,
    *,
    columns: int | None = None,
    title: str | None = None,
    cmap: str = "gray",
) -> Axes:
    """Show examples as a grid of images in one Axes, row by row in the order given.

    Args:
        images: see :func:`image_of`.
        indices: which examples, for instance ``memory.memorable[:24]``.
        titles: one line or two above each image; "#index" if None.
        ax: where to draw; a new figure, sized to the grid, if None.
        columns: images in a row; 8, or fewer where there are fewer images.
        title: above the whole grid.
        cmap: for images without colour; ``"gray_r"`` prints dark ink on white.

    Returns:
        The Axes; image k is ``ax.images[k]``, its title ``ax.texts[k]``.

    Raises:
        InputError: no indices, titles of another number, an index without an image.

    Example:
        >>> ax = plot_examples(np.random.default_rng(0).random((5, 8, 8)), [4, 0], ["a", "b"])
        >>> [text.get_text() for text in ax.texts]
        ['a', 'b']
    """
    chosen = [int(i) for i in indices]
    if not chosen:
        raise InputError("plot_examples got no indices: pass at least one example")
    titles = [f"#{i}" for i in chosen] if titles is None else [str(t) for t in titles]
    if len(titles) != len(chosen):
        raise InputError(f"{len(titles)} titles for {len(chosen)} examples: pass one for each")
    pictures = [image_of(images, i) for i in chosen]
    across = min(columns or 8, len(chosen))
    down = math.ceil(len(chosen) / across)
    lines = max(text.count("\n") + 1 for text in titles)
    room = 0.05 + 0.17 * lines  # of a cell, for its title
    ax = axes_or_new(ax, (1.15 * across + 0.2, 1.15 * (1 + room) * down + 0.2))
    for k, (picture, text) in enumerate(zip(pictures, titles, strict=True)):
        x, y = k % across + 0.5, (k // across) * (1 + room) + 0.5
        half = 0.46 * np.array(picture.shape[1::-1]) / max(picture.shape[:2])  # of its cell
        extent = (x - half[0], x + half[0], y + half[1], y - half[1])
        shown = ax.imshow(picture, cmap=cmap, extent=extent, interpolation="nearest")
        if picture.ndim == 2:
            shown.set_clim(0, 1)
        ax.text(x, y - half[1] - 0.02, text, ha="center", va="bottom", fontsize=8)
    ax.set(xlim=(0, across), ylim=(down * (1 + room) - room, -room), aspect="equal")
    ax.set_axis_off()
    if title is not None:
        ax.set_title(title)
    return ax


def _stretched(picture: np.ndarray) -> np.ndarray:
    if picture.dtype == np.uint8:
        return picture / 255
    picture = np.nan_to_num(picture.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = picture.min(), picture.max()
    if low >= 0 and high <= 1:
        return picture
    return (picture - low) / (high - low) if high > low else np.zeros_like(picture)
