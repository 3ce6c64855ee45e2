"""Schedules of a learning rate: the factor of the rate over a training, by name or as points.

    rate(k) = lr · factor(k / steps)

Points are pairs (part of the steps, factor), with straight lines between them: whatever schedule a
trainer has can be written so, and be stretched to another number of steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError

Schedule = str | Sequence[Sequence[float]] | None

FORMULAS: dict[str | None, Callable[[float], float]] = {
    None: lambda part: 1.0,
    "cosine": lambda part: 0.5 + 0.5 * math.cos(math.pi * part),
    "linear": lambda part: 1.0 - part,
}
CLOSE = 1e-5  # of the rate at the start: how far points may be from the schedule


def checked(schedule: Any, warmup: Any) -> Schedule:
    """The schedule, where it is one and goes with this warmup.

    Raises:
        InputError: an unknown name, points that are none, a warmup of points or out of range.

    >>> checked([(0, 0), (0.1, 1), (1, 0)], 0.0)
    [[0.0, 0.0], [0.1, 1.0], [1.0, 0.0]]
    """
    is_number = isinstance(warmup, int | float) and not isinstance(warmup, bool)
    if not (is_number and 0 <= warmup < 1):
        raise InputError(f"warmup must be a share of the steps, 0 or more, below 1, got {warmup!r}")
    if schedule is None or (isinstance(schedule, str) and schedule in FORMULAS):
        return schedule
    if isinstance(schedule, str) or not isinstance(schedule, Sequence):
        wanted = "None, 'cosine', 'linear' or points (part of the steps, factor)"
        raise InputError(f"schedule must be {wanted}, got {schedule!r}")
    if warmup:
        raise InputError("warmup= goes with a schedule's name; write it as points of the schedule")
    return _checked_points(schedule)


def _checked_points(points: Sequence[Any]) -> list[list[float]]:
    try:
        pairs = [[float(part), float(factor)] for part, factor in points]
    except (TypeError, ValueError):
        pairs = []
    parts = [part for part, _ in pairs]
    rising = all(before <= after for before, after in pairwise(parts))
    inside = bool(parts) and parts[0] >= 0 and parts[-1] <= 1
    if not (inside and rising and all(0 <= factor < math.inf for _, factor in pairs)):
        raise InputError(
            "points of a schedule are pairs (part, factor), parts rising from 0 to 1, factors 0 or "
            "more"
        )
    return pairs


def factor_at(schedule: Schedule, warmup: float, part: float) -> float:
    """The factor of the rate when this part of the steps is made.

    >>> [factor_at("linear", 0.2, part) for part in (0.0, 0.1, 0.2, 0.6)]
    [0.0, 0.5, 1.0, 0.5]
    >>> factor_at([(0, 0), (0.5, 1)], 0.0, 0.25)
    0.5
    """
    if schedule is None or isinstance(schedule, str):
        if part < warmup:
            return part / warmup
        return FORMULAS[schedule]((part - warmup) / (1 - warmup))
    after = bisect_right(schedule, part, key=lambda point: point[0])
    if after == 0:
        return schedule[0][1]
    if after == len(schedule):
        return schedule[-1][1]
    (start, low), (end, high) = schedule[after - 1], schedule[after]
    return low + (high - low) * (part - start) / (end - start)


def described(factors: Sequence[float]) -> tuple[Schedule, float]:
    """A schedule and its warmup, from the factor at every step; by name where one fits.

    >>> described([0.0, 0.5, 1.0, 0.75, 0.5, 0.25])
    ('linear', 0.3333333333333333)
    >>> described([1.0, 1.0, 0.5, 0.5])
    ([[0.0, 1.0], [0.25, 1.0], [0.5, 0.5], [0.75, 0.5]], 0.0)
    """
    steps = len(factors)
    warmup = factors.index(max(factors)) / steps
    for name in FORMULAS:
        named = (factor_at(name, warmup, k / steps) for k in range(steps))
        if all(abs(a - b) <= CLOSE for a, b in zip(named, factors, strict=True)):
            return name, warmup
    values = torch.tensor(factors, dtype=torch.float64)
    return [[k / steps, factors[k]] for k in _corners(values)], 0.0


def _corners(values: Tensor) -> list[int]:
    """Places between which straight lines are close to all values (Douglas and Peucker, 1973)."""
    last = len(values) - 1
    corners = {0, last}
    open_ends = [(0, last)]
    while open_ends:
        start, end = open_ends.pop()
        line = torch.linspace(0, 1, end - start + 1, dtype=values.dtype)
        line = values[start] + (values[end] - values[start]) * line
        gaps = (values[start : end + 1] - line).abs()
        farthest = int(gaps.argmax())
        if float(gaps[farthest]) > CLOSE:
            corners.add(start + farthest)
            open_ends += [(start, start + farthest), (start + farthest, end)]
    return sorted(corners)
