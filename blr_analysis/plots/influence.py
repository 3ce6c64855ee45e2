"""The training examples that help a prediction most, and those that harm it most."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from blr_analysis.plots import _canvas as canvas
from blr_analysis.plots.examples import image_of
from blr_analysis.sensitivity.influence.results import SHOWN, Influence, TopInfluence, index_of_test

__all__ = ["plot_influence"]


def plot_influence(
    result: Influence | TopInfluence,
    ax: Axes | None = None,
    *,
    test: int = 0,
    k: int = SHOWN,
    images: Any = None,
    names: canvas.Names | None = None,
) -> Axes:
    """The most helpful and the most harmful training examples of one test example, as bars.

    Bars to the right: without this example the test loss would rise (it helps). To the left:
    it would fall (it harms). Each bar is named by the index and the target of its example.

    Args:
        result: what :func:`blr_analysis.influence` returns.
        ax: where to draw; a new figure if None.
        test: index of the test example.
        k: bars of either sign; fewer where the result has fewer examples of that sign.
        images: of the training examples, drawn beside their bars; see
            :func:`blr_analysis.plots.image_of`.
        names: what targets are called, ``names[target]``.

    Returns:
        The Axes; the bars from top to bottom are ``ax.patches``.

    Raises:
        InputError: no such test example, k below 1 or above the result's own, or something else
            than an image.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(30, 2), torch.randint(3, (30,))
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
        >>> q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
        >>> ax = blr.influence(task, q, task).plot(test=7, k=3)
        >>> len(ax.patches)
        6
    """
    if isinstance(result, Influence):
        result = result.top(min(k, result.shape[0]))
    test = index_of_test(test, len(result.helpful))
    (helpful, helpful_values), (harmful, harmful_values) = result.sides(test)
    indices = torch.cat([helpful[:k], harmful[:k].flip(0)]).numpy()
    values = torch.cat([helpful_values[:k], harmful_values[:k].flip(0)]).numpy()
    places = np.arange(len(values))
    ax = canvas.axes_or_new(ax, (6.4, 1.4 + 0.36 * max(3, len(values))))
    _draw_bars(ax, places, values)
    ax.set_yticks(places, _ticks(result, indices, names))
    ax.invert_yaxis()
    if images is not None:
        pictures = [image_of(images, int(index)) for index in indices]
        canvas.label_points(ax, np.column_stack([values, places]), [""] * len(places), pictures)
    ax.set_xlabel(f"{_quantity(result)}\n← it harms      it helps →")
    ax.set_ylabel("training example")
    ax.set_title(_title(result, test, names))
    return ax


def _draw_bars(ax: Axes, places: np.ndarray, values: np.ndarray) -> None:
    """Draw a horizontal bar for each value; colour and hatch tell which examples harm."""
    for place, value in zip(places, values, strict=True):
        helps = value >= 0
        colour = canvas.BLUE if helps else canvas.ORANGE
        hatch = "" if helps else "///"
        ax.barh(place, value, 0.72, color=colour, ec="black", lw=0.7, hatch=hatch)
    ax.axvline(0, color="black", lw=0.8)


def _ticks(result: TopInfluence, indices: np.ndarray, names: canvas.Names | None) -> list[str]:
    """The index of each training example, and its target if it has one."""
    columns = result.pairs.described(torch.from_numpy(indices.copy()))
    if not columns:
        return [f"#{index}" for index in indices]
    pairs = zip(indices, columns["target"].tolist(), strict=True)
    return [f"#{index}  {_name(target, names)}" for index, target in pairs]


def _quantity(result: TopInfluence) -> str:
    """The length of a bar, in words with units."""
    measure = result.pairs.measure
    quantity = result.pairs.quantity
    if quantity != "influence":
        return quantity.replace("_", " ")
    unit = "of the test loss [nats]" if measure == "loss" else f"of {measure}"
    return f"rise {unit} without the training example"


def _title(result: TopInfluence, test: int, names: canvas.Names | None) -> str:
    """The test example, with its target and prediction if it has them."""
    title = f"What shapes test example #{test}"
    columns = result.pairs.described(torch.tensor([test]), test=True)
    if not columns:
        return title
    target = _name(columns["target"].tolist()[0], names)
    prediction = _name(columns["prediction"].tolist()[0], names)
    return f"{title}: {target}, predicted {prediction}"


def _name(target: Any, names: canvas.Names | None) -> str:
    """The name of a target, or the names of several."""
    values = target if isinstance(target, list) else [target]
    return ", ".join(canvas.name_of(value, names) for value in values)
