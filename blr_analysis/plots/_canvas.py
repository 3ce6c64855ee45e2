"""What all pictures share: axes of one's own, colours, and when an axis is logarithmic.

Nothing here touches pyplot or rcParams: a figure made here belongs to its caller alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from blr_analysis.errors import InputError

# Okabe & Ito (2008): told apart with any kind of colour blindness. Markers and hatches differ
# as well wherever colours do, so that a grey print says the same.
BLACK, BLUE, ORANGE, VERMILLION = "#000000", "#0072B2", "#E69F00", "#D55E00"
SKY, GREY = "#56B4E9", "#7F7F7F"

Labels = Sequence[Any] | Mapping[int, Any]
MEASURES = {"nll": "NLL [nats per example]  (→ worse)", "accuracy": "accuracy  (→ better)"}
LOO = "leave-one-out, from training data"
# Colour, marker and line of what is measured where, in every picture.
LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "train": ("training data", {"color": GREY, "marker": "s", "ls": ":"}),
    "loo": (LOO, {"color": BLUE, "marker": "o", "ls": "-"}),
    "test": ("test data", {"color": ORANGE, "marker": "^", "ls": "--"}),
}


class Picture(Axes):
    """Axes of a figure of their own, which show themselves at the end of a notebook's cell."""

    name = "blr_analysis"

    def savefig(self, path: Any, **options: Any) -> None:
        """Save the whole figure, as ``figure.savefig`` does."""
        whole_figure(self).savefig(path, **options)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=96)
        return file.getvalue()


def axes_or_new(ax: Any, size: tuple[float, float] = (6.4, 4.8)) -> Axes:
    """The Axes given, or those of a new figure that pyplot does not know.

    Raises:
        InputError: ``ax`` is something else than Axes.
    """
    if ax is None:
        return Figure(figsize=size, layout="constrained").add_subplot(axes_class=Picture)
    if not isinstance(ax, Axes):
        raise InputError(f"ax must be a matplotlib Axes or None; got {type(ax).__name__}")
    return ax


@dataclass(frozen=True)
class AxisScale:
    """Linear or logarithmic; on a logarithmic axis, values below ``floor`` are drawn under it."""

    log: bool
    floor: float = 0.0
    clipped: int = 0

    def draw(self, values: np.ndarray) -> np.ndarray:
        """The values as they are drawn."""
        return np.where(values < self.floor, self.floor / 2, values) if self.log else values

    def line(self, threshold: float) -> float:
        """Where a threshold is drawn: 0 lies between the floor and what is drawn under it."""
        return threshold if threshold > 0 or not self.log else self.floor / 1.4

    def limits(self, drawn: np.ndarray, low_pad: float, high_pad: float) -> tuple[float, float]:
        """Axis limits around what is drawn, padded by fractions of the whole axis."""
        drawn = np.log10(drawn) if self.log else drawn
        low, high = float(drawn.min()), float(drawn.max())
        if high <= low:
            low, high = (low / 2, 1.5 * high) if low else (0.0, 1.0)
        width = (high - low) / (1 - low_pad - high_pad)
        low, high = low - low_pad * width, high + high_pad * width
        return (10 ** max(low, -307), 10 ** min(high, 308)) if self.log else (low, high)

    @property
    def name(self) -> Literal["linear", "log"]:
        return "log" if self.log else "linear"

    @property
    def note(self) -> str:
        """What to add to the axis label where values were moved to be seen; or nothing."""
        return f"\n({self.clipped:,} below {self.floor:.1g} at the edge)" if self.clipped else ""


def choose_scale(values: np.ndarray, threshold: float | None = None) -> AxisScale:
    """Logarithmic where the positive values span much more than a linear axis can show.

    That is: their 5 % and 95 % quantiles, or their median and maximum, lie more than a factor
    of 30 apart. The floor is the smallest positive value, or six decades below the largest as
    long as no more than one in a hundred of the positive values lies under it. A value keeps its
    side of the threshold.
    """
    positive = values[values > 0]
    if len(positive) < 2:
        return AxisScale(False)
    least, low, middle, high, top = np.quantile(positive, [0.01, 0.05, 0.5, 0.95, 1.0])
    if high <= 30 * low and top <= 30 * middle:
        return AxisScale(False)
    floor = float(positive.min())
    if threshold is None or threshold > 0:
        floor = max(floor, min(float(top) * 1e-6, float(least)))
    if threshold is not None and threshold > 0:
        floor = min(floor, threshold)
    return AxisScale(True, floor, int((values < floor).sum()))


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
    try:
        return [f"{i}" if labels is None else f"{i}: {labels[i]}" for i in indices]
    except (IndexError, KeyError) as fault:
        raise InputError("labels do not cover every example: pass one for each index") from fault


def name_of(value: Any, names: Mapping[Any, str] | Sequence[str] | None) -> str:
    """``names[value]``; the value itself where it has no name."""
    try:
        return str(value) if names is None else str(names[value])
    except (KeyError, IndexError, TypeError):
        return str(value)


def shortened(text: str, most: int = 24) -> str:
    """Somebody's word as a tick label, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def curve(ax: Axes, x: Any, values: Any, label: str, look: Mapping[str, Any]) -> np.ndarray:
    """A curve of values where they are finite: [K] bool."""
    values = as_array(values)
    known = np.isfinite(values)
    if known.any():
        look = {"lw": 1.6, "ms": 5, "mec": "black", "mew": 0.5, **look}
        shown = np.where(known, values, np.nan)
        ax.plot(x, shown, label=label, markevery=max(1, len(values) // 30), **look)
    return known


def diamond(ax: Axes, x: float, y: float, label: str, **look: Any) -> None:
    """The point that was chosen."""
    look = {"ms": 9, "mfc": VERMILLION, "mec": "black", "zorder": 5, **look}
    ax.plot([x], [y], ls="", marker="D", label=label, **look)


def count_ticks(ax: Axes) -> None:
    """Whole numbers below the axes."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def whole_figure(ax: Axes) -> Figure:
    """The figure around all subfigures that these axes are drawn on."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def paired_bars(
    ax: Axes, first: np.ndarray, second: np.ndarray, labels: tuple[str, str], colour: str
) -> np.ndarray:
    """Two bars side by side for each place, with their values where they are few.

    Returns:
        Where the second bars stand.
    """
    place, width = np.arange(len(first)), 0.38
    looks = ((first, -1, colour, ""), (second, 1, ORANGE, "///"))
    for (values, side, color, hatch), label in zip(looks, labels, strict=True):
        bars = ax.bar(place + side * width / 2, values, width, color=color, ec="black", lw=0.7,
                      hatch=hatch, label=label)  # fmt: skip
        if len(first) <= 6:
            ax.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    if len(first) == 1:
        ax.set_xlim(-1, 1)
    return place + width / 2
