"""L-BFGS in float64 down to a stated gradient norm, with every gradient evaluation counted.

Near the minimum the objective's rounding hides its decrease long before the gradient stops
falling, so steps are accepted by the approximate Wolfe conditions of Hager and Zhang (2005, SIAM
J. Optim. 16, §3): the objective may stay as it is (within rounding) as long as its slope shrinks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Objective = Callable[[Tensor], tuple[float, Tensor]]  # θ -> value, gradient
Solve = Callable[[Tensor], Tensor]  # an approximate inverse Hessian, times a vector

SUFFICIENT = 1e-4  # of the decrease that the slope promises
FLATTER = 0.9  # of the slope may be left
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-6}  # of the objective: what it may rise by


@dataclass
class Memory:
    """The last steps and gradient changes, and the two-loop product with them."""

    length: int = 40
    solve: Solve | None = None  # an approximate inverse Hessian to begin with
    pairs: deque[tuple[Tensor, Tensor, float]] = field(default_factory=deque)

    def copy(self) -> Memory:
        return replace(self, pairs=deque(self.pairs))

    def add(self, step: Tensor, change: Tensor) -> None:
        curvature = float(step @ change)
        if curvature > 1e-14 * float(step.norm() * change.norm()):
            self.pairs.append((step, change, curvature))
            if len(self.pairs) > self.length:
                self.pairs.popleft()

    def direction(self, gradient: Tensor) -> Tensor:
        """Minus the approximate inverse Hessian times the gradient."""
        q = -gradient
        weights = []
        for step, change, curvature in reversed(self.pairs):
            weights.append(float(step @ q) / curvature)
            q = q - weights[-1] * change
        if self.solve is not None:
            q = self.solve(q)
        elif self.pairs:
            _, change, curvature = self.pairs[-1]
            q = q * (curvature / float(change @ change))
        for (step, change, curvature), weight in zip(self.pairs, reversed(weights), strict=True):
            q = q + (weight - float(change @ q) / curvature) * step
        return q


@dataclass(frozen=True)
class Minimum:
    """Where the descent ended.

    Attributes:
        theta: the parameters ``[P]``.
        value, gradient_norm: of the objective there.
        tolerance: the gradient norm that was asked for.
        evaluations: how often value and gradient were computed over all examples.
        trace: ``[iterations, 3]``: evaluations so far, value, gradient norm.
        memory: the last steps and gradient changes, with which another descent may start.
        converged: whether ``gradient_norm <= tolerance``.
    """

    theta: Tensor
    value: float
    gradient_norm: float
    tolerance: float
    evaluations: int
    trace: Tensor
    memory: Memory

    @property
    def converged(self) -> bool:
        return self.gradient_norm <= self.tolerance


def minimise(
    objective: Objective,
    start: Tensor,
    *,
    relative: float = 0.0,
    absolute: float = 0.0,
    memory: Memory | None = None,
    max_evaluations: int = 20_000,
    dtype: torch.dtype = torch.float64,
) -> Minimum:
    """Follow the objective down from ``start`` until the gradient's norm is small enough.

    The tolerance is the larger of ``relative`` times the norm at the start and ``absolute``.
    A descent that cannot go on, or runs out of evaluations, ends with ``converged`` False.
    """
    theta = start.clone()
    pairs = (memory or Memory()).copy()
    value, gradient = objective(theta)
    norm = float(gradient.norm())
    used = 1
    tolerance = max(absolute, relative * norm)
    trace = [(used, value, norm)]
    while norm > tolerance and used < max_evaluations:
        direction = pairs.direction(gradient)
        slope = float(direction @ gradient)
        if not slope < 0:  # a bad memory: forget it
            if not pairs.pairs:
                break
            pairs.pairs.clear()
            continue
        first = 1.0 if pairs.pairs or pairs.solve is not None else min(1.0, 1.0 / norm)
        found = line_search(objective, theta, direction, value, slope, first, ROUNDING[dtype])
        used += found.evaluations
        if found.gradient is None:
            if not pairs.pairs:
                break
            pairs.pairs.clear()
            continue
        step = found.size * direction
        pairs.add(step, found.gradient - gradient)
        theta = theta + step
        value = found.value
        gradient = found.gradient
        norm = float(gradient.norm())
        trace.append((used, value, norm))
    table = torch.tensor(trace, dtype=torch.float64)
    return Minimum(theta, value, norm, tolerance, used, table, pairs)


@dataclass(frozen=True)
class Step:
    """A step that was found (``gradient`` None: none was), and what it took."""

    size: float
    value: float
    gradient: Tensor | None
    evaluations: int


def line_search(
    objective: Objective,
    theta: Tensor,
    direction: Tensor,
    value: float,
    slope: float,
    size: float,
    rounding: float = ROUNDING[torch.float64],
    tries: int = 25,
) -> Step:
    """A step length under the Wolfe or approximate Wolfe conditions, by bracketing."""
    low = 0.0
    low_slope = slope
    high = math.inf
    high_slope = math.nan
    slack = rounding * (abs(value) + 1)
    for tried in range(1, tries + 1):
        new, gradient = objective(theta + size * direction)
        new_slope = float(gradient @ direction)
        finite = math.isfinite(new) and math.isfinite(new_slope)
        falls = finite and new <= value + SUFFICIENT * size * slope
        still = finite and new <= value + slack and new_slope <= (2 * SUFFICIENT - 1) * slope
        if (falls or still) and abs(new_slope) <= -FLATTER * slope:
            return Step(size, new, gradient, tried)
        if (falls or still) and new_slope < 0:
            low = size
            low_slope = new_slope
        else:
            high = size
            high_slope = new_slope if finite else math.nan
        size = _next_size(low, low_slope, high, high_slope)
    return Step(0.0, value, None, tries)


def _next_size(low: float, low_slope: float, high: float, high_slope: float) -> float:
    if math.isinf(high):
        return 2 * low if low > 0 else 1.0
    width = high - low
    if high_slope > 0:  # where the slope's secant crosses zero
        guess = low - low_slope * width / (high_slope - low_slope)
        return min(max(guess, low + 0.1 * width), high - 0.1 * width)
    return low + (0.5 if math.isfinite(high_slope) else 0.1) * width
