"""Which training examples hold a prediction up, and which pull it down?"""

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
        k: bars of either sign, or fewer where the result holds fewer of that sign.
        images: pictures of the training examples, drawn beside their bars; see
            :func:`blr_analysis.plots.image_of`.
        names: what targets are called, ``names[target]``.

    Returns:
        The Axes; the bars from top to bottom are ``ax.patches``.

    Raises:
        InputError: no such test example, k below 1 or above what the result holds, or an image
            that is none.

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
    helps, harms = result.sides(test)
    indices, values = (
        torch.cat([helpful[:k], harmful[:k].flip(0)]).numpy()
        for helpful, harmful in zip(helps, harms, strict=True)
    )
    place = np.arange(len(values))
    ax = canvas.axes_or_new(ax, (6.4, 1.4 + 0.36 * max(3, len(values))))
    for at, value in zip(place, values, strict=True):
        colour, hatch = (canvas.BLUE, "") if value >= 0 else (canvas.ORANGE, "///")
        ax.barh(at, value, 0.72, color=colour, ec="black", lw=0.7, hatch=hatch)
    ax.axvline(0, color="black", lw=0.8)
    known = result.pairs.described(torch.from_numpy(indices.copy()))
    ticks = [f"#{i}" for i in indices]
    if known:
        targets = zip(ticks, known["target"].tolist(), strict=True)
        ticks = [f"{tick}  {_name(target, names)}" for tick, target in targets]
    ax.set_yticks(place, ticks)
    ax.invert_yaxis()
    if images is not None:
        pictures = [image_of(images, int(index)) for index in indices]
        canvas.label_points(ax, np.column_stack([values, place]), [""] * len(place), pictures)
    measure, quantity = result.pairs.measure, result.pairs.quantity
    unit = "of the test loss [nats]" if measure == "loss" else f"of {measure}"
    what = f"rise {unit} without the training example"
    what = what if quantity == "influence" else quantity.replace("_", " ")
    ax.set_xlabel(f"{what}\n← it harms      it helps →")
    ax.set_ylabel("training example")
    asked = result.pairs.described(torch.tensor([test]), test=True)
    title = f"What shapes test example #{test}"
    if asked:
        said = [_name(asked[key].tolist()[0], names) for key in ("target", "prediction")]
        title += ": {}, predicted {}".format(*said)
    ax.set_title(title)
    return ax


def _name(target: Any, names: canvas.Names | None) -> str:
    values = target if isinstance(target, list) else [target]
    return ", ".join(canvas.name_of(value, names) for value in values)
