"""Examples one by one: as points (deviations, sums of sites, what looks suspicious), as images."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.errors import InputError
from blr_analysis.plots import _canvas as canvas
from blr_analysis.sensitivity.results import FAULTS, NO_FAULT

__all__ = ["image_of", "plot_deviations", "plot_examples", "plot_suspicious"]

COLOURS = dict(zip((NO_FAULT, *FAULTS), canvas.FOUR, strict=True))
MARKERS = dict(zip((NO_FAULT, *FAULTS), ".^sx", strict=True))
LARGEST = {"ls": "", "marker": "D", "ms": 5, "mfc": canvas.VERMILLION, "mec": "black", "zorder": 3}
RISE = "rise of its own loss without it [nats]  (→ shapes more)"


def plot_deviations(
    scores: Any, ax: Axes | None = None, *, labels: canvas.Labels | None = None, n_labels: int = 8
) -> Axes:
    """Draw the deviations in falling order, the largest labelled by their index.

    A steep start means that a few examples shape the model; a flat curve, that all do alike.
    Ranks are on a logarithmic axis from 100 examples on, deviations where the first is more
    than a hundred times that at 5 % of the ranks. Where the scores carry no deviation (too many
    outputs), the self-influence takes its place, and the axis says so.

    Args:
        scores: what :func:`blr_analysis.sensitivity` returns, or any part of its table; or a
            leave-one-out of sites.
        ax: where to draw; a new figure if None.
        labels: shown beside the index of a labelled example; ``labels[index]``.
        n_labels: how many examples to label.

    Raises:
        InputError: neither deviation nor self-influence, no examples, or values not finite.

    Example:
        >>> from types import SimpleNamespace
        >>> scores = SimpleNamespace(deviation=np.array([0.1, 0.3, 0.2]))
        >>> plot_deviations(scores).lines[0].get_ydata().tolist()
        [0.3, 0.2, 0.1]
    """
    values, unit = _values(scores)
    index = np.asarray(scores["index"]) if hasattr(scores, "iloc") else np.arange(len(values))
    order = np.argsort(-values, kind="stable")[: np.isfinite(values).sum()]
    height, few = values[order], len(order) <= 100
    points = np.column_stack([np.arange(1, len(order) + 1), height])
    ax = canvas.axes_or_new(ax)
    ax.plot(*points.T, color=canvas.BLUE, lw=1.5, marker="." if few else "", zorder=2)
    ax.fill_between(*points.T, color=canvas.BLUE, alpha=0.15, lw=0)  # type: ignore[misc]
    ax.set_xscale("linear" if few else "log")
    if height[0] > 100 * height[len(order) // 20]:
        ax.set_yscale(**canvas.scale_of(height))
    if few:
        canvas.count_ticks(ax)
    ax.set_ylim(0)
    top = order[: max(n_labels, 0)]
    top = top[values[top] > 0]
    ax.plot(*points[: len(top)].T, **LARGEST)
    canvas.label_points(ax, points[: len(top)], canvas.named(index[top].tolist(), labels))
    ax.set_xlabel("rank (1 = shapes the model most)")
    ax.set_ylabel(unit)
    ax.set_title(f"How far predictions would move: {canvas.count_of(len(order))}")
    return ax


def _values(scores: Any) -> tuple[np.ndarray, str]:
    """The deviations and their name with units, or the self-influences where there are none."""
    if (before := getattr(scores, "losses_before", None)) is not None:  # of a leave-one-out
        return canvas.as_array(scores.losses - before), RISE
    for name in ("deviation", "self_influence"):
        found = getattr(scores, name, None)
        values = canvas.as_array([] if found is None else found).reshape(-1)
        if np.isinf(values).any():
            raise InputError(f"{np.isinf(values).sum()} {name}s are not finite")
        if np.isfinite(values).any():
            return values, _unit(scores, name)
    got = type(scores).__name__
    raise InputError(f"expected scores of examples with a deviation or self_influence, got {got}")


def _unit(scores: Any, name: str) -> str:
    if name == "deviation" and (likelihood := getattr(scores, "likelihood", None)) is not None:
        unit = "‖Δp‖₁, 0 to 2" if likelihood.is_classification else "‖Δf‖₂ [output]"
        return f"deviation {unit}  (→ shapes more)"
    return canvas.UNITS[name]


def plot_suspicious(suspicions: Any, ax: Axes | None = None) -> Axes:
    """Draw the mean loss of each example over the run against how unfamiliar it is.

    Args:
        suspicions: what :func:`blr_analysis.suspicious` returns.
        ax: where to draw; a new figure if None.
    """
    ax = canvas.axes_or_new(ax, (7.2, 5.0))
    unfamiliarity, losses = (
        canvas.as_array(suspicions.unfamiliarity),
        canvas.as_array(suspicions.losses),
    )
    kinds = np.array(suspicions.kind)
    for kind, colour in COLOURS.items():
        chosen = kinds == kind
        size, alpha = (8, 0.4) if kind == NO_FAULT else (26, 0.9)
        label = f"{'nothing suspected' if kind == NO_FAULT else kind} ({int(chosen.sum()):,})"
        if chosen.any():
            ax.scatter(unfamiliarity[chosen], losses[chosen], s=size, c=colour,
                       marker=MARKERS[kind], alpha=alpha, label=label)  # fmt: skip
    ax.set_xscale(**canvas.scale_of(unfamiliarity))
    ax.set_ylabel("mean loss over the run [nats]  (→ label more suspicious)")
    ax.set_xlabel("unfamiliarity tr ΛV [parameters]  (→ less familiar)")
    ax.set_title(f"What looks wrong in {canvas.count_of(len(suspicions))}")
    ax.legend(loc="best", fontsize="small")
    return ax


def image_of(images: Any, index: int) -> np.ndarray:
    """Example ``index`` as an array for ``imshow``: [H, W] or [H, W, 3 or 4], between 0 and 1.

    Args:
        images: anything with ``images[index]``: a tensor or array [N, H, W], [N, C, H, W] or
            [N, H, W, C], flattened squares [N, H·H], a list, also of PIL images, or a Dataset
            whose items start with the image. Values other than bytes or 0…1 are stretched to 0…1,
            image by image.

    Raises:
        InputError: there is no such example, or it is no image.
    """
    try:
        item = images[int(index)]
    except (IndexError, KeyError, TypeError) as fault:
        raise InputError(f"images[{index}] does not exist: pass one image per example") from fault
    item = item[0] if isinstance(item, tuple) else item
    if hasattr(item, "convert"):  # of PIL
        item = item.convert("L" if item.mode in ("1", "L") else "RGB")
    picture = np.asarray(item.detach().cpu() if hasattr(item, "detach") else item)
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
    if picture.dtype == np.uint8:
        return picture / 255
    picture = np.nan_to_num(picture.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = picture.min(), picture.max()
    if low >= 0 and high <= 1:
        return picture
    return (picture - low) / (high - low) if high > low else np.zeros_like(picture)


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
    ax = canvas.axes_or_new(ax, (1.15 * across + 0.2, 1.15 * (1 + room) * down + 0.2))
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
