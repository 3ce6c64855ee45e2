"""Are inputs in the units of the data that a posterior was learned with?

A posterior stores two ranges over its examples: of the mean of an example's input numbers, and of
their spread (standard deviation). Inputs that were prepared alike have their median mean and median
spread inside these ranges. Raw pixels do not, where the training had standardised ones. The ranges
cannot tell more: :mod:`blr_analysis.sensitivity.other_units` compares with the training data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from blr_analysis.data.examples import evenly_spread
from blr_analysis.errors import BLRError
from blr_analysis.posterior.facts import Numbers
from blr_analysis.task import Task

SAMPLE = 128  # examples, spread evenly over the data
FEWEST_OF_TRAINING = 20  # examples: fewer show no range
FEWEST_FOR_MEDIAN = 5  # examples: fewer may stand out by themselves, and get wider ranges
ROUNDING = 1e-3  # of a range's larger end, by which a median may be outside

# The ranges of the first task with which a posterior that has none was analysed.
_FIRST_RANGES: WeakKeyDictionary[object, Numbers] = WeakKeyDictionary()


def remember(posterior: object, task: Task) -> None:
    """Store the ranges of the first task with which a posterior without ranges is analysed."""
    ranges = input_ranges(task)
    if ranges is not None:
        _FIRST_RANGES.setdefault(posterior, ranges)


def remembered(posterior: object) -> Numbers | None:
    """The ranges that :func:`remember` stored; None where it stored none."""
    return _FIRST_RANGES.get(posterior)


def input_ranges(task: Task) -> Numbers | None:
    """The least and the largest mean and spread of an example's input numbers.

    None for fewer than 20 examples, and for inputs without real numbers.

    Example:
        >>> x = torch.stack([torch.arange(20.0), torch.arange(20.0) + 4], 1)
        >>> input_ranges(Task(torch.nn.Linear(2, 2), (x, torch.arange(20) % 2)))
        {'mean': [2.0, 21.0], 'spread': [2.0, 2.0]}
    """
    if task.n_data < FEWEST_OF_TRAINING:
        return None
    moments = _moments(task)
    if moments is None:
        return None
    return {name: [float(m.min()), float(m.max())] for name, m in moments.items()}


def other_units(ranges: Numbers | None, task: Task) -> str:
    """A line where a task's inputs are outside of these ranges; "" where they are inside.

    Args:
        ranges: of the training; None: unknown, and the line is "".

    Example:
        >>> x, y = torch.randn(60, 3), torch.arange(60) % 2
        >>> task, raw = (Task(torch.nn.Linear(3, 2), (scale * x, y)) for scale in (1.0, 255.0))
        >>> ranges = input_ranges(task)
        >>> print(other_units(ranges, raw))  # doctest: +ELLIPSIS
        inputs have a spread of ..., training inputs 0... to ...: other units?
        >>> other_units(ranges, task)
        ''
    """
    if ranges is None:
        return ""
    moments = _moments(task)
    if moments is None:
        return ""
    for name in ("spread", "mean"):
        low, high = ranges[name]
        slack = ROUNDING * max(abs(low), abs(high))
        if task.n_data < FEWEST_FOR_MEDIAN:
            slack += (high - low) / 2
        median = float(moments[name].median())
        if not low - slack <= median <= high + slack:
            return (
                f"inputs have a {name} of {median:.3g}, training inputs {low:.3g} to {high:.3g}: "
                "other units?"
            )
    return ""


def _moments(task: Task) -> dict[str, Tensor] | None:
    """Mean and spread of the input numbers of some examples, ``[n]`` by these names; None where an
    example has no real numbers, or cannot be read."""
    sample = evenly_spread(task.n_data, SAMPLE)
    batches: list[Tensor] = []
    try:
        for indices, batch in task.batches(indices=sample):
            numbers = numbers_of(batch, len(indices))
            if numbers is None or numbers.shape[1] == 0:
                return None
            batches.append(numbers)
    except BLRError:  # the analysis that follows raises it with a better message
        return None
    return {
        "mean": torch.cat([numbers.mean(1) for numbers in batches]),
        "spread": torch.cat([numbers.std(1, correction=0) for numbers in batches]),
    }


def numbers_of(batch: Any, size: int) -> Tensor | None:
    """The real numbers of a batch's inputs, ``[B, D]`` in float64; None where there are none.

    Args:
        size: B, the number of examples in the batch.
    """
    inputs = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(inputs, Mapping):
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.is_floating_point()]
    with_rows = [x for x in tensors if x.ndim and len(x) == size]
    rows = [x.reshape(size, -1).cpu().double() for x in with_rows]
    return torch.cat(rows, 1) if rows else None
