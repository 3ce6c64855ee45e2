"""Single examples as points (deviations, sums of sites, suspicions) and as images."""

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
IMAGES_IN_A_ROW = 8
CELL_INCHES = 1.15  # the width of an image with its margins
HALF_SIDE = 0.46  # half of the longer side of an image, in widths of its cell
MAX_RANKS_SHOWN = 100  # as points on a linear axis; more are a curve on a logarithmic one
STEEP = 100  # a factor between the largest height and that at 5 % of the ranks
RISE = "rise of its own loss without it [nats]  (→ shapes more)"


def plot_deviations(
    scores: Any, ax: Axes | None = None, *, labels: canvas.Labels | None = None, n_labels: int = 8
) -> Axes:
    """Draw the deviations in falling order, the largest labelled by their index.

    A steep start means that a few examples shape the model, and a flat curve that all shape it
    alike. The axis of ranks is logarithmic for more than 100 examples. The axis of deviations is
    logarithmic where the first exceeds the one at 5 % of the ranks a hundred times. Scores without
    a deviation (too many outputs) are drawn by their self-influence, which the axis names.

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
    n_finite = np.isfinite(values).sum()
    order = np.argsort(-values, kind="stable")[:n_finite]
    ax = canvas.axes_or_new(ax)
    _draw_ranked(ax, values[order])
    largest = order[: max(n_labels, 0)]
    largest = largest[values[largest] > 0]
    points = np.column_stack([np.arange(1, len(largest) + 1), values[largest]])
    ax.plot(*points.T, **LARGEST)
    index = largest
    if hasattr(scores, "iloc"):  # a part of a table names its examples itself
        index = np.asarray(scores["index"])[largest]
    canvas.label_points(ax, points, canvas.named(index.tolist(), labels))
    ax.set_xlabel("rank (1 = shapes the model most)")
    ax.set_ylabel(unit)
    ax.set_title(f"How far predictions would move: {canvas.count_of(len(order))}")
    return ax


def _draw_ranked(ax: Axes, heights: np.ndarray) -> None:
    """Draw falling heights over their ranks."""
    n = len(heights)
    rank = np.arange(1, n + 1)
    shows_every_point = n <= MAX_RANKS_SHOWN
    marker = "." if shows_every_point else ""
    ax.plot(rank, heights, color=canvas.BLUE, lw=1.5, marker=marker, zorder=2)
    ax.fill_between(rank, heights, color=canvas.BLUE, alpha=0.15, lw=0)
    ax.set_xscale("linear" if shows_every_point else "log")
    starts_steeply = heights[0] > STEEP * heights[n // 20]
    if starts_steeply:
        ax.set_yscale(**canvas.scale_of(heights))
    if shows_every_point:
        canvas.count_ticks(ax)
    ax.set_ylim(0)


def _values(scores: Any) -> tuple[np.ndarray, str]:
    """The deviations, or the self-influences without these, ``[N]``, and their name with units.

    Raises:
        InputError: neither of them, or values that are infinite.
    """
    losses_before = getattr(scores, "losses_before", None)
    if losses_before is not None:  # a leave-one-out
        return canvas.as_array(scores.losses - losses_before), RISE
    for name in ("deviation", "self_influence"):
        column = getattr(scores, name, None)
        if column is None:
            continue
        values = canvas.as_array(column).reshape(-1)
        if np.isinf(values).any():
            raise InputError(f"{np.isinf(values).sum()} {name}s are not finite")
        if np.isfinite(values).any():
            return values, _unit(scores, name)
    raise InputError(
        "expected scores of examples with a deviation or self_influence, "
        f"got {type(scores).__name__}"
    )


def _unit(scores: Any, name: str) -> str:
    """The name of a score with its units, for an axis."""
    likelihood = getattr(scores, "likelihood", None)
    if name == "deviation" and likelihood is not None:
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
    unfamiliarity = canvas.as_array(suspicions.unfamiliarity)
    losses = canvas.as_array(suspicions.losses)
    kinds = np.array(suspicions.kind)
    for kind, colour in COLOURS.items():
        chosen = kinds == kind
        count = int(chosen.sum())
        if not count:
            continue
        is_fault = kind != NO_FAULT
        name = kind if is_fault else "nothing suspected"
        ax.scatter(
            unfamiliarity[chosen],
            losses[chosen],
            s=26 if is_fault else 8,
            c=colour,
            marker=MARKERS[kind],
            alpha=0.9 if is_fault else 0.4,
            label=f"{name} ({count:,})",
        )
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
        example = images[int(index)]
    except (IndexError, KeyError, TypeError) as fault:
        raise InputError(f"images[{index}] does not exist: pass one image per example") from fault
    pixels = _pixels_of(example)
    picture = _channels_last(pixels)
    has_colours = picture.ndim == 3 and picture.shape[-1] in (3, 4)
    has_shape_of_image = picture.ndim == 2 or has_colours
    if not has_shape_of_image or not picture.size or picture.dtype.kind not in "buif":
        raise InputError(
            f"images[{index}] of shape {pixels.shape}, {picture.dtype}, is no image: "
            "expected [H, W], [C, H, W], [H, W, C] or a flattened square"
        )
    return _between_0_and_1(picture)


def _pixels_of(example: Any) -> np.ndarray:
    """The image of an example as an array, in its own layout and range."""
    image = example[0] if isinstance(example, tuple) else example
    if hasattr(image, "convert"):  # a PIL image
        image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    if hasattr(image, "detach"):  # a tensor
        image = image.detach().cpu()
    return np.asarray(image)


def _channels_last(pixels: np.ndarray) -> np.ndarray:
    """An image as ``[H, W]`` or ``[H, W, C]``; an array in another layout as it is."""
    if pixels.ndim == 1:
        side = math.isqrt(pixels.size)
        is_square = side**2 == pixels.size > 0
        return pixels.reshape(side, side) if is_square else pixels
    if pixels.ndim != 3:
        return pixels
    channel_counts = (1, 3, 4)
    could_be_first = pixels.shape[0] in channel_counts
    could_be_last = pixels.shape[-1] in channel_counts
    if could_be_first and not could_be_last:
        pixels = np.moveaxis(pixels, 0, -1)
    return pixels[:, :, 0] if pixels.shape[-1] == 1 else pixels


def _between_0_and_1(picture: np.ndarray) -> np.ndarray:
    """The image with values in 0 … 1: bytes divided by 255, other ranges stretched."""
    if picture.dtype == np.uint8:
        return picture / 255
    picture = np.nan_to_num(picture.astype(np.float64), posinf=0.0, neginf=0.0)
    low = picture.min()
    high = picture.max()
    if low >= 0 and high <= 1:
        return picture
    if high == low:
        return np.zeros_like(picture)
    return (picture - low) / (high - low)


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
        titles: above the images, of one line or two each; None: "#index".
        ax: where to draw; a new figure, sized to the grid, if None.
        columns: images in a row; None: 8, or all if there are fewer.
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
    chosen = [int(index) for index in indices]
    titles = _titles_of(chosen, titles)
    pictures = [image_of(images, index) for index in chosen]
    across = min(columns or IMAGES_IN_A_ROW, len(chosen))
    down = math.ceil(len(chosen) / across)
    title_height = _height_of_titles(titles)
    cell_height = 1 + title_height
    size = (CELL_INCHES * across + 0.2, CELL_INCHES * cell_height * down + 0.2)
    ax = canvas.axes_or_new(ax, size)
    for k, (picture, text) in enumerate(zip(pictures, titles, strict=True)):
        row, column = divmod(k, across)
        _draw_image(ax, picture, text, column + 0.5, row * cell_height + 0.5, cmap)
    ax.set(xlim=(0, across), ylim=(down * cell_height - title_height, -title_height))
    ax.set_aspect("equal")
    ax.set_axis_off()
    if title is not None:
        ax.set_title(title)
    return ax


def _titles_of(chosen: Sequence[int], titles: Sequence[str] | None) -> list[str]:
    """A title for each example: the user's, or "#index".

    Raises:
        InputError: no examples, or titles of another number.
    """
    if not chosen:
        raise InputError("plot_examples got no indices: pass at least one example")
    if titles is None:
        return [f"#{index}" for index in chosen]
    if len(titles) != len(chosen):
        raise InputError(f"{len(titles)} titles for {len(chosen)} examples: pass one for each")
    return [str(text) for text in titles]


def _height_of_titles(titles: Sequence[str]) -> float:
    """The height of the longest title, in heights of an image."""
    lines = max(text.count("\n") + 1 for text in titles)
    return 0.05 + 0.17 * lines


def _draw_image(ax: Axes, picture: np.ndarray, text: str, x: float, y: float, cmap: str) -> None:
    """Draw an image, its centre at (x, y), into a cell of width 1, and its title above it."""
    height, width = picture.shape[:2]
    half_width = HALF_SIDE * width / max(height, width)
    half_height = HALF_SIDE * height / max(height, width)
    extent = (x - half_width, x + half_width, y + half_height, y - half_height)
    image = ax.imshow(picture, cmap=cmap, extent=extent, interpolation="nearest")
    if picture.ndim == 2:
        image.set_clim(0, 1)
    ax.text(x, y - half_height - 0.02, text, ha="center", va="bottom", fontsize=8)
