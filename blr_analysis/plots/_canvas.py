"""What all pictures share: axes of one's own, colours, and when an axis is logarithmic.

Nothing here touches pyplot or rcParams: a figure made here belongs to its caller alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blr_analysis.errors import InputError

# Okabe & Ito (2008): told apart with any kind of colour blindness. Markers and hatches differ
# as well wherever colours do, so that a grey print says the same.
BLACK, BLUE, ORANGE, VERMILLION = "#000000", "#0072B2", "#E69F00", "#D55E00"
SKY, GREY = "#56B4E9", "#7F7F7F"


def axes_or_new(ax: Any, size: tuple[float, float] = (6.4, 4.8)) -> Axes:
    """The Axes given, or those of a new figure that pyplot does not know.

    Raises:
        InputError: ``ax`` is something else than Axes.
    """
    if ax is None:
        return Figure(figsize=size, layout="constrained").subplots()
    if not isinstance(ax, Axes):
        raise InputError(f"ax must be a matplotlib Axes or None; got {type(ax).__name__}")
    return ax


@dataclass(frozen=True)
class Scale:
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


def choose_scale(values: np.ndarray, threshold: float | None = None) -> Scale:
    """Logarithmic where the positive values span much more than a linear axis can show.

    That is: their 5 % and 95 % quantiles, or their median and maximum, lie more than a factor
    of 30 apart. The floor is the smallest positive value, or six decades below the largest as
    long as no more than a quarter of the positive values lie under it. A value keeps its side
    of the threshold.
    """
    positive = values[values > 0]
    if len(positive) < 2:
        return Scale(False)
    low, quarter, middle, high, top = np.quantile(positive, [0.05, 0.25, 0.5, 0.95, 1.0])
    if high <= 30 * low and top <= 30 * middle:
        return Scale(False)
    floor = float(positive.min())
    if threshold is None or threshold > 0:
        floor = max(floor, min(float(top) * 1e-6, float(quarter)))
    if threshold is not None and threshold > 0:
        floor = min(floor, threshold)
    return Scale(True, floor, int((values < floor).sum()))


def as_array(values: Any) -> np.ndarray:
    """A float64 array of a tensor, a sequence or a number."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def count_of(n: int) -> str:
    """ "1 example", "60,000 examples"."""
    return "1 example" if n == 1 else f"{n:,} examples"
