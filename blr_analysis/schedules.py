"""Schedules of a learning rate: the factor of the rate over a training, by name or as points.

    rate(k) = lr · factor(k / steps)

The part of the steps, k / steps, is 0 at the first step and 1 after the last. Points are pairs
(part, factor), with straight lines between them. Any schedule of a trainer can be written as
points, which fit any number of steps.
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
MAX_GAP = 1e-5  # between the factors of a training and those of the schedule that describes it


def checked_schedule(schedule: Any, warmup: Any) -> Schedule:
    """The schedule, if it and its warmup can be used; points come back as pairs of floats.

    Raises:
        InputError: the name is unknown, the schedule is neither a name nor points, points come
            with a warmup, or the warmup is out of range.

    >>> checked_schedule([(0, 0), (0.1, 1), (1, 0)], 0.0)
    [[0.0, 0.0], [0.1, 1.0], [1.0, 0.0]]
    """
    is_number = isinstance(warmup, int | float) and not isinstance(warmup, bool)
    if not (is_number and 0 <= warmup < 1):
        raise InputError(f"warmup must be a share of the steps, 0 or more, below 1, got {warmup!r}")
    if schedule is None or (isinstance(schedule, str) and schedule in FORMULAS):
        return schedule
    if isinstance(schedule, str) or not isinstance(schedule, Sequence):
        raise InputError(
            "schedule must be None, 'cosine', 'linear' or points (part of the steps, factor), got "
            f"{schedule!r}"
        )
    if warmup:
        raise InputError("warmup= goes with a schedule's name; write it as points of the schedule")
    return _checked_points(schedule)


def _checked_points(points: Sequence[Any]) -> list[list[float]]:
    """The points as pairs of floats.

    Two points with the same part are a jump.

    Raises:
        InputError: a point is no pair of numbers, the parts fall, or a number is out of range.
    """
    try:
        pairs = [[float(part), float(factor)] for part, factor in points]
    except (TypeError, ValueError):
        pairs = []
    parts = [part for part, _ in pairs]
    parts_rise = all(before <= after for before, after in pairwise(parts))
    parts_in_range = bool(parts) and parts[0] >= 0 and parts[-1] <= 1
    factors_in_range = all(0 <= factor < math.inf for _, factor in pairs)
    if not (parts_in_range and parts_rise and factors_in_range):
        raise InputError(
            "points of a schedule are pairs (part, factor), parts rising from 0 to 1, factors 0 or "
            "more"
        )
    return pairs


def factor_at(schedule: Schedule, warmup: float, part: float) -> float:
    """The factor of the rate after this part of the steps.

    A named schedule rises from 0 in the warmup, and its formula begins after it. Before the first
    point and after the last one the factor is theirs.

    >>> [factor_at("linear", 0.2, part) for part in (0.0, 0.1, 0.2, 0.6)]
    [0.0, 0.5, 1.0, 0.5]
    >>> factor_at([(0, 0), (0.5, 1)], 0.0, 0.25)
    0.5
    """
    if schedule is None or isinstance(schedule, str):
        if part < warmup:
            return part / warmup
        part_after_warmup = (part - warmup) / (1 - warmup)
        return FORMULAS[schedule](part_after_warmup)
    next_point = bisect_right(schedule, part, key=lambda point: point[0])
    if next_point == 0:
        return schedule[0][1]
    if next_point == len(schedule):
        return schedule[-1][1]
    start, factor_at_start = schedule[next_point - 1]
    end, factor_at_end = schedule[next_point]
    rise = factor_at_end - factor_at_start
    return factor_at_start + rise * (part - start) / (end - start)


def schedule_of_factors(factors: Sequence[float]) -> tuple[Schedule, float]:
    """The schedule and the warmup that have these factors, one for each step.

    The schedule is a name where one fits, and otherwise points without a warmup.

    >>> schedule_of_factors([0.0, 0.5, 1.0, 0.75, 0.5, 0.25])
    ('linear', 0.3333333333333333)
    >>> schedule_of_factors([1.0, 1.0, 0.5, 0.5])
    ([[0.0, 1.0], [0.25, 1.0], [0.5, 0.5], [0.75, 0.5]], 0.0)
    """
    steps = len(factors)
    warmup = factors.index(max(factors)) / steps  # a warmup ends where the rate is largest
    for name in FORMULAS:
        factors_by_name = [factor_at(name, warmup, k / steps) for k in range(steps)]
        gaps = [abs(a - b) for a, b in zip(factors_by_name, factors, strict=True)]
        if max(gaps) <= MAX_GAP:
            return name, warmup
    values = torch.tensor(factors, dtype=torch.float64)
    points = [[k / steps, factors[k]] for k in _corners(values)]
    return points, 0.0


def _corners(values: Tensor) -> list[int]:
    """The places of values between which straight lines come close to all others.

    Source: Douglas and Peucker, 1973: the value farthest from a line becomes a corner.
    """
    last = len(values) - 1
    corners = {0, last}
    unchecked_lines = [(0, last)]
    while unchecked_lines:
        start, end = unchecked_lines.pop()
        way = torch.linspace(0, 1, end - start + 1, dtype=values.dtype)
        line = values[start] + (values[end] - values[start]) * way
        gaps = (values[start : end + 1] - line).abs()
        farthest = int(gaps.argmax())
        if float(gaps[farthest]) > MAX_GAP:
            corner = start + farthest
            corners.add(corner)
            unchecked_lines += [(start, corner), (corner, end)]
    return sorted(corners)
