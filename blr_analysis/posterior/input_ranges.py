"""Whether inputs are in the units of the data that a posterior was learned with.

    mean of the numbers of x_i,    spread of the numbers of x_i

A posterior keeps the least and the largest of both over its examples. Inputs that were prepared
alike have their medians between them; raw pixels beside standardised ones do not. A posterior alone
cannot say more: :mod:`blr_analysis.sensitivity.other_units` compares with the training task itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from blr_analysis.errors import BLRError
from blr_analysis.posterior.facts import Numbers
from blr_analysis.task import Task

SAMPLE = 128  # examples, spread evenly
FEWEST = 20  # training examples, below which nothing is said
SEVERAL = 5  # examples whose median lies inside; fewer may stand out by themselves

_AT_FIRST: WeakKeyDictionary[object, Numbers] = WeakKeyDictionary()  # by posterior


def remember(posterior: object, task: Task) -> None:
    """Keep the ranges of the first task that a posterior without a fit is analysed with."""
    ranges = input_ranges(task)
    if ranges is not None:
        _AT_FIRST.setdefault(posterior, ranges)


def remembered(posterior: object) -> Numbers | None:
    """What was kept."""
    return _AT_FIRST.get(posterior)


def input_ranges(task: Task) -> Numbers | None:
    """The least and the largest mean and spread of an example's inputs; None of few examples and
    of inputs without real numbers.

    Example:
        >>> x = torch.stack([torch.arange(20.0), torch.arange(20.0) + 4], 1)
        >>> input_ranges(Task(torch.nn.Linear(2, 2), (x, torch.arange(20) % 2)))
        {'mean': [2.0, 21.0], 'spread': [2.0, 2.0]}
    """
    if task.n_data < FEWEST:
        return None
    moments = _moments(task)
    if moments is None:
        return None
    return {name: [float(m.min()), float(m.max())] for name, m in moments.items()}


def other_units(ranges: Numbers | None, task: Task) -> str:
    """In one line how the inputs of a task differ from those of these ranges; "" where they do not,
    and where nobody knows the ranges.

    Example:
        >>> x, y = torch.randn(60, 3), torch.arange(60) % 2
        >>> task, raw = (Task(torch.nn.Linear(3, 2), (scale * x, y)) for scale in (1.0, 255.0))
        >>> ranges = input_ranges(task)
        >>> print(other_units(ranges, raw))  # doctest: +ELLIPSIS
        inputs have a spread of ..., training inputs 0... to ...: other units?
        >>> other_units(ranges, task)
        ''
    """
    moments = None if ranges is None else _moments(task)
    if ranges is None or moments is None:
        return ""
    for name in ("spread", "mean"):
        low, high = ranges[name]
        slack = 1e-3 * max(abs(low), abs(high))
        if task.n_data < SEVERAL:
            slack += (high - low) / 2
        typical = float(moments[name].median())
        if not low - slack <= typical <= high + slack:
            return (
                f"inputs have a {name} of {typical:.3g}, training inputs {low:.3g} to {high:.3g}: "
                "other units?"
            )
    return ""


def _moments(task: Task) -> dict[str, Tensor] | None:
    """Mean and spread of the numbers of some examples' inputs, ``[n]``; None without such."""
    rows = torch.linspace(0, task.n_data - 1, min(task.n_data, SAMPLE)).long().unique()
    try:
        inputs = [numbers_of(batch, len(i)) for i, batch in task.batches(indices=rows)]
    except BLRError:  # the analysis will say it better
        return None
    if any(x is None or not x.shape[1] for x in inputs):
        return None
    numbers = [x for x in inputs if x is not None]
    return {
        "mean": torch.cat([x.mean(1) for x in numbers]),
        "spread": torch.cat([x.std(1, correction=0) for x in numbers]),
    }


def numbers_of(batch: Any, size: int) -> Tensor | None:
    """The real numbers of a batch's inputs, ``[B, D]`` in float64; None where there are none."""
    inputs = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(inputs, Mapping):
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
    leaves = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.is_floating_point()]
    rows = [x.reshape(size, -1).cpu().double() for x in leaves if x.ndim and len(x) == size]
    return torch.cat(rows, 1) if rows else None
