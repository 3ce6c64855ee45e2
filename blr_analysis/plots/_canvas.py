"""Parts of every picture: new axes, colours, and the rule for logarithmic axes.

Nothing here touches pyplot or rcParams: a figure made here belongs to its caller alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, HPacker, OffsetBox, OffsetImage, TextArea
from matplotlib.ticker import MaxNLocator

from blr_analysis.errors import InputError

# Okabe & Ito (2008): readers with any kind of colour blindness can tell these colours apart.
# Markers and hatches differ wherever colours do, so that a grey print says the same.
BLACK = "#000000"
BLUE = "#0072B2"
ORANGE = "#E69F00"
VERMILLION = "#D55E00"
SKY = "#56B4E9"
GREY = "#7F7F7F"
FOUR = (GREY, BLUE, ORANGE, VERMILLION)

Labels = Sequence[Any] | Mapping[int, Any]
Names = Sequence[str] | Mapping[Any, str]
MEASURES = {"nll": "loss per example  (→ worse)", "accuracy": "accuracy  (→ better)"}
UNITS = {
    "deviation": "deviation without the example  (→ shapes more)",
    "self_influence": "self-influence gᵀΣg [nats]  (→ shapes more)",
    "leverage": "leverage  (→ shapes more)",
    "loss": "loss [nats]  (→ worse)",
    "left_out_loss": "left-out loss [nats]  (→ worse)",
}
MAX_LINEAR_SPAN = 30.0  # a factor between values that a linear axis can still show
THUMBNAIL = 26  # points of the longer side
BAR_WIDTH = 0.38  # of the distance between two places
LEADER = {"arrowstyle": "-", "lw": 0.5, "color": "0.5", "shrinkB": 3, "relpos": (0, 0.5)}
LOO = "leave-one-out, from training data"
# Label, colour, marker and line of each data set, in every picture.
LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "train": ("training data", {"color": GREY, "marker": "s", "ls": ":"}),
    "loo": (LOO, {"color": BLUE, "marker": "o", "ls": "-"}),
    "test": ("test data", {"color": ORANGE, "marker": "^", "ls": "--"}),
}


class Picture(Axes):
    """Axes of a new figure, which a notebook shows at the end of a cell."""

    name = "blr_analysis"

    def savefig(self, path: Any, **options: Any) -> None:
        """Save the whole figure, as ``figure.savefig`` does."""
        whole_figure(self).savefig(path, **options)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=96)
        return file.getvalue()


def axes_or_new(ax: Any, size: tuple[float, float] = (6.4, 4.8)) -> Axes:
    """``ax`` itself, or the Axes of a new figure that pyplot does not know.

    Raises:
        InputError: ``ax`` is something else than Axes.
    """
    if ax is None:
        return Figure(figsize=size, layout="constrained").add_subplot(axes_class=Picture)
    if not isinstance(ax, Axes):
        raise InputError(f"ax must be a matplotlib Axes or None; got {type(ax).__name__}")
    return ax


def scale_of(values: np.ndarray) -> dict[str, Any]:
    """Options of ``set_xscale``: a linear axis, or a logarithmic one that is linear near 0.

    The axis is logarithmic where the positive values span more than a linear axis can show: their
    5 % and 95 % quantiles, or their median and maximum, lie more than a factor of 30 apart. Its
    linear part ends at the smallest positive value; outliers do not stretch the axis, so that it
    ends at least twelve decades below the largest value, and six where no more than one in a
    hundred of the positive values is smaller than that.
    """
    positive = values[values > 0]
    if len(positive) < 2:
        return {"value": "linear"}
    quantiles = np.quantile(positive, [0.01, 0.05, 0.5, 0.95, 1.0])
    one_percent, low, median, high, largest = map(float, quantiles)
    fits_linear_axis = high <= MAX_LINEAR_SPAN * low and largest <= MAX_LINEAR_SPAN * median
    if fits_linear_axis:
        return {"value": "linear"}
    floor = max(float(positive.min()), min(largest * 1e-6, one_percent), largest * 1e-12)
    return {"value": "symlog", "linthresh": floor, "linscale": 0.3}


def dot_style(n: int, styles: Sequence[tuple[float, int, float]]) -> tuple[int, float]:
    """Size and opacity of the dots of a scatter plot of n points.

    Args:
        styles: (largest number of points, size, opacity), from few points to many.

    >>> dot_style(500, [(100, 20, 0.8), (float("inf"), 4, 0.2)])
    (4, 0.2)
    """
    return next((size, opacity) for most_points, size, opacity in styles if n <= most_points)


def label_points(
    ax: Axes,
    points: np.ndarray,
    texts: Sequence[str],
    images: Sequence[np.ndarray] | None = None,
) -> None:
    """Label points ``[K, 2]`` in a column beside the axes, in the order of their heights.

    Args:
        images: stand before the texts; None: there are none.
    """
    if not len(points):
        return
    heights = ax.transData.transform(points)[:, 1]
    order: list[int] = np.argsort(-heights, kind="stable").tolist()
    step = min(0.11, 1 / len(points))
    for place, k in enumerate(order):
        x, y = map(float, points[k])
        box = AnnotationBbox(
            _label(texts[k], None if images is None else images[k]),
            (x, y),
            xybox=(1.03, 0.97 - place * step),
            boxcoords="axes fraction",
            box_alignment=(0, 0.5),
            arrowprops=LEADER,
            annotation_clip=False,
            frameon=False,
            pad=0,
            zorder=5,
        )
        ax.add_artist(box)


def _label(text: str, image: np.ndarray | None) -> OffsetBox:
    """A text, behind an image unless that is None."""
    words = TextArea(text, textprops={"fontsize": 8})
    if image is None:
        return words
    zoom = THUMBNAIL / max(image.shape[:2])
    picture = OffsetImage(image, zoom=zoom, cmap="gray", interpolation="nearest")
    return HPacker(children=[picture, words], align="center", pad=0, sep=3)


def as_array(values: Any) -> np.ndarray:
    """A float64 array of a tensor, a sequence or a number."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def count_of(n: int) -> str:
    """ "1 example", "60,000 examples"."""
    return "1 example" if n == 1 else f"{n:,} examples"


def named(indices: Iterable[int], labels: Labels | None) -> list[str]:
    """ "7", or "7: labels[7]", for each index.

    Raises:
        InputError: labels that do not cover an index.
    """
    if labels is None:
        return [str(i) for i in indices]
    try:
        return [f"{i}: {labels[i]}" for i in indices]
    except (IndexError, KeyError) as fault:
        raise InputError("labels do not cover every example: pass one for each index") from fault


def name_of(value: Any, names: Names | None = None) -> str:
    """``names[value]``; without that the value itself, in short: 3 for 3.0."""
    with suppress(KeyError, IndexError, TypeError):
        return str(names[value])  # type: ignore[index]
    if not isinstance(value, float | np.floating):
        return str(value)
    digits = 15 if float(value).is_integer() else 4
    return f"{value:.{digits}g}"


def shortened(text: str, limit: int = 24) -> str:
    """A user's text as a tick label, in one line."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    return text[: limit - 1] + "…"


def drawn(ax: Axes, x: Any, values: Any, label: str, look: Mapping[str, Any]) -> np.ndarray:
    """Draw a curve through the finite values.

    Returns:
        Whether each value is finite, ``[K]``.
    """
    values = as_array(values)
    finite = np.isfinite(values)
    if finite.any():
        look = {"lw": 1.6, "ms": 5, "mec": "black", "mew": 0.5, **look}
        heights = np.where(finite, values, np.nan)
        ax.plot(x, heights, label=label, markevery=max(1, len(values) // 30), **look)
    return finite


def diamond(ax: Axes, x: float, y: float, label: str, **look: Any) -> None:
    """Mark the chosen point."""
    look = {"ms": 9, "mfc": VERMILLION, "mec": "black", "zorder": 5, **look}
    ax.plot([x], [y], ls="", marker="D", label=label, **look)


def count_ticks(ax: Axes) -> None:
    """Set whole numbers as ticks of the x axis."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def whole_figure(ax: Axes) -> Figure:
    """The figure around all subfigures that these axes are drawn on."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def paired_bars(
    ax: Axes, first: np.ndarray, second: np.ndarray, labels: tuple[str, str], colour: str
) -> np.ndarray:
    """Draw two bars side by side at each place; up to six pairs show their values, upright where a
    bar is narrower than its number.

    Returns:
        The places of the second bars.
    """
    places = np.arange(len(first))
    left = places - BAR_WIDTH / 2
    right = places + BAR_WIDTH / 2
    edge: dict[str, Any] = {"ec": "black", "lw": 0.7}
    first_bars = ax.bar(left, first, BAR_WIDTH, color=colour, label=labels[0], **edge)
    second_bars = ax.bar(
        right, second, BAR_WIDTH, color=ORANGE, hatch="///", label=labels[1], **edge
    )
    if len(first) <= 6:
        for bars in (first_bars, second_bars):
            rotation = 0 if len(first) == 1 else 90
            ax.bar_label(bars, fmt="%.2g", padding=2, fontsize=8, rotation=rotation)
    if len(first) == 1:
        ax.set_xlim(-1, 1)
    return right
