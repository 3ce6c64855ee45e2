"""Examples as images: one array that matplotlib can show, and a grid of the worst."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from blr_analysis.errors import InputError
from blr_analysis.plots._canvas import axes_or_new

__all__ = ["image_of", "plot_examples"]


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
