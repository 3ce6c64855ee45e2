"""The weights that minimise an objective F, by quasi-Newton moves from where a model stands.

    d = −H ∇F(θ),   H the limited-memory BFGS matrix that starts from M⁻¹

with M the precision of a posterior, then a line search on real forward passes, so that F never
rises (but for rounding). Each move costs one pass over the data. On a quadratic F the directions
are those of conjugate gradients preconditioned by M (Nazareth, 1979); elsewhere a move looks at the
true gradient twice as often as a Gauss–Newton step does, which is what counts where the loss falls
off exponentially, as it does for the logit of a class that is gone.

From the trained weights to those that changed data would have given, M is the learned posterior's.
To train a model to its optimum M is fitted anew every few moves: the first one after that is a
Gauss–Newton step.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch

from blr_analysis.backprop.tree import add, dot, scaled
from blr_analysis.errors import BLRError, ModelError, PosteriorError, told_as
from blr_analysis.posterior.laplace import fit_laplace
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures import Structure, Tree
from blr_analysis.sensitivity.objective import Objective, Point, whole
from blr_analysis.task import Task

SERVES = 20  # moves that a fitted posterior serves, in training
STILL = 0.9  # of the residual before: moves that leave more of it have not got on …
LEVEL = 1e-3  # … if F fell by less than this share of it, too
MEMORY = 20  # moves, with the change of the gradient along each, that a move remembers
SUFFICIENT = 1e-4  # of the decrease that the slope promises (Armijo)
LESS = 0.9  # of the slope along a move, at its end
NOTHING = 1e-14  # nats
HALVINGS = 12


@dataclass
class Descent:
    """Where the descent stands; :meth:`move` and :meth:`run` go on.

    Attributes:
        point: the present weights with F and its gradient there.
        passes: over the data, one for F with its gradient.
        decrements: ½ ∇Fᵀ M⁻¹ ∇F at the start and after every accepted move: the decrease of F in
            nats that the posterior expects of the next.
        stalled: no step along the last direction lowered F (as far as rounding lets one see).
        enough: the share of the first decrement that may be left.
    """

    data: Objective
    preconditioner: Structure
    point: Point
    passes: float = 1.0
    decrements: list[float] = field(default_factory=list)
    stalled: bool = False
    enough: float = 0.0
    _pairs: list[tuple[Tree, Tree, float]] = field(default_factory=list)  # s, y and sᵀy

    def __post_init__(self) -> None:
        self._note()

    @property
    def converged(self) -> bool:
        """Whether next to nothing is left to gain: of what there was at the start, no more than
        ``enough`` or one unit in the last place, or, where no step along the last direction
        lowered F, a decrease that rounding hides in F."""
        left, first = self.decrements[-1], self.decrements[0]
        if left <= max(max(self._eps, self.enough) * first, NOTHING):
            return True
        return self.stalled and left <= 1e2 * self._eps * max(1.0, abs(self.point.value))

    @property
    def _eps(self) -> float:
        return torch.finfo(next(iter(self.point.params.values())).dtype).eps

    def run(self, passes: float) -> None:
        """Move until the passes are spent or nothing is left to gain."""
        while not (self.stalled or self.converged or self.passes >= passes):
            self.move()

    def move(self) -> None:
        """One quasi-Newton step; the first is the posterior's own, and so is the next where the
        memory has led nowhere."""
        self._search(self._direction())
        if self.stalled and self._pairs and not self.converged:
            self._pairs = []
            self.stalled = False
            self._search(self._direction())

    def _direction(self) -> Tree:
        """−H ∇F."""
        return scaled(self._inverse_hessian(self.point.gradient), -1.0)

    def _inverse_hessian(self, v: Tree) -> Tree:
        """H v by the two-loop recursion (Nocedal, 1980), from M⁻¹ scaled to the last pair."""
        r = dict(v)
        coefficients: list[float] = []
        for s, y, along in reversed(self._pairs):
            a = dot(s, r) / along
            coefficients.append(a)
            r = add(r, -a, y)
        r = self.preconditioner.solve(r)
        if self._pairs:
            _, y, along = self._pairs[-1]
            r = scaled(r, along / dot(y, self.preconditioner.solve(y)))
        for (s, y, along), a in zip(self._pairs, reversed(coefficients), strict=True):
            r = add(r, a - dot(y, r) / along, s)
        return r

    def _search(self, direction: Tree) -> None:
        """Go along the direction as far as F falls; F and its gradient are taken together."""
        slope = dot(self.point.gradient, direction)
        if not slope < 0:
            self.stalled = True
            return
        size = 1.0
        for _ in range(HALVINGS):
            point = self._at(add(self.point.params, size, direction))
            rise = math.inf if point is None else point.value - self.point.value
            if point is not None and self._falls(point, direction, size, slope):
                self._go(scaled(direction, size), point)
                return
            size = _shorter(size, rise, slope)
        self.stalled = True

    def _falls(self, point: Point, direction: Tree, size: float, slope: float) -> bool:
        """Whether F falls by enough of what the slope promises; or F is level as far as rounding
        lets one see, and its slope is less than before (the approximate Wolfe condition of Hager &
        Zhang, 2005)."""
        rise = point.value - self.point.value
        if rise <= SUFFICIENT * size * slope:
            return True
        level = 4 * self._eps * max(1.0, abs(self.point.value))
        return abs(rise) <= level and abs(dot(point.gradient, direction)) <= LESS * abs(slope)

    def _go(self, move: Tree, point: Point) -> None:
        """Stand at the new point, and remember the gradient's change along the move, unless there
        is no curvature in it."""
        change = add(point.gradient, -1.0, self.point.gradient)
        along = dot(move, change)
        if along > 1e-12 * dot(move, move):
            self._pairs = [*self._pairs, (move, change, along)][-MEMORY:]
        self.point = point
        self._note()

    def _at(self, params: Tree) -> Point | None:
        """F and its gradient; None where the model breaks down so far out."""
        self.passes += 1
        try:
            return self.data.at(params)
        except BLRError:
            return None

    def _note(self) -> None:
        """Write down ½ ∇Fᵀ M⁻¹ ∇F."""
        gradient = self.point.gradient
        decrement = 0.5 * dot(gradient, self.preconditioner.solve(gradient))
        if not decrement >= 0:
            raise PosteriorError("the changed data's gradient is not finite; raise prior_precision")
        self.decrements.append(decrement)


def _shorter(size: float, rise: float, slope: float) -> float:
    """The next step to try along a direction: to the lowest point of a parabola through F here,
    its slope, and F at the step before."""
    if not rise < math.inf:
        return 0.1 * size
    lowest = -slope * size**2 / (2 * (rise - slope * size))
    return min(0.5 * size, max(0.1 * size, lowest))


def train(
    task: Task, prior_precision: Given | Prior, *, structure: str, tolerance: float, rounds: int
) -> Point:
    """Train the task's model, in place, to the minimum of Σ_i ℓ_i + ½ θᵀ diag(δ) θ downhill of it.

    Args:
        task: under a model of one's own; see :func:`on_a_copy`.
        prior_precision: δ, a number, or one per parameter name (number or tensor).
        structure: of the posterior that preconditions.
        tolerance: the ``residual`` to reach; a descent that gets stuck, does not get on (at the
            kinks of a ReLU network no gradient vanishes), or has fitted ``rounds`` posteriors,
            ends above it.

    Raises:
        ModelError, DataError: as :meth:`Task.run`.
    """
    prior = Prior.of_any(prior_precision)
    data = whole(task, prior)
    point = data.at({n: p.clone() for n, p in task.parameters().items()})
    for _ in range(rounds):
        if point.residual <= tolerance:
            break
        form = fit_laplace(task.quiet, structure=structure, prior_precision=prior).form
        before = point
        descent = Descent(data, form, point)
        while len(descent.decrements) <= SERVES and not descent.stalled:
            if descent.point.residual <= tolerance:
                break
            descent.move()
        point = descent.point
        write(task, point.params)
        is_level = before.value - point.value <= LEVEL * abs(point.value)
        if is_level and point.residual > STILL * before.residual:
            break
    return point


def on_a_copy(task: Task) -> Task:
    """The same task under a copy of its model, which may be trained in place.

    Raises:
        ModelError: the model cannot be copied.
    """
    with told_as(ModelError, "the model cannot be copied", "copy.deepcopy must take it"):
        model = copy.deepcopy(task.model)
    return task.under(model, task.device)


def write(task: Task, params: Tree) -> None:
    """Put these weights into the task's model."""
    parameters = dict(task.model.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            parameters[name].copy_(value)
