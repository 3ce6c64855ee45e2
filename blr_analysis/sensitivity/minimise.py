"""Minimise an objective F by quasi-Newton moves, from a model's present weights.

    d = −H ∇F(θ),   H the limited-memory BFGS matrix that starts from M⁻¹

M is the precision of a posterior. A line search follows; it evaluates F, so that F never rises (but
for rounding). Each move takes one pass over the data. On a quadratic F the directions are those of
conjugate gradients preconditioned by M (Nazareth, 1979). On other F a pass gives a new gradient,
where a Gauss–Newton step needs two; that counts where the loss falls off exponentially, as for the
logit of a class that was removed.

* To go from trained weights to those of changed data, M is the precision of the posterior.
* To train a model to its optimum, M is fitted anew every few moves. The first move after a fit is a
  Gauss–Newton step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from blr_analysis.backprop.tree import add, dot, scaled
from blr_analysis.errors import BLRError, PosteriorError
from blr_analysis.models import copied
from blr_analysis.posterior.laplace import fit_laplace
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures import Structure, Tree
from blr_analysis.sensitivity.objective import Objective, Point, whole_objective
from blr_analysis.task import Task

MOVES_PER_FIT = 20  # of a training, until M is fitted anew
# A training gives up when the moves of a fit leave more than this share of the residual, and lower
# F by less than this share of it.
STUCK_RESIDUAL = 0.9
STUCK_DECREASE = 1e-3
MEMORY = 20  # pairs of a move and the gradient's change that BFGS uses
SUFFICIENT = 1e-4  # share of the decrease that the slope promises (Armijo's condition)
FLATTER = 0.9  # share of the slope that may be left at the end of a move of level F
NOTHING = 1e-14  # nats, a decrement that counts as 0
TRIALS = 12  # of the line search
SHORTEST_CUT = 0.1  # of a step, by which the next trial may be shorter at most


@dataclass
class Descent:
    """The state of a descent, which :meth:`move` and :meth:`run` continue.

    Attributes:
        data: the objective F.
        preconditioner: the precision M.
        point: the present weights with F and its gradient.
        passes: the number of passes over the data so far; each gives F with its gradient.
        decrements: ½ ∇Fᵀ M⁻¹ ∇F at the start and after every move: the decrease of F, in nats, that
            the posterior expects from the next move.
        stalled: whether no step along the last direction lowered F by more than rounding.
        enough: the descent ends when the decrement is this share of the first one.
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
        self._append_decrement()

    @property
    def converged(self) -> bool:
        """Whether almost nothing is left to gain.

        The decrement is then a share ``enough`` of the first one, or rounding error of it. In a
        stalled descent it is also enough that rounding of F hides the decrement.
        """
        first = self.decrements[0]
        decrement = self.decrements[-1]
        if decrement <= max(max(self._eps, self.enough) * first, NOTHING):
            return True
        hidden_by_rounding = 1e2 * self._eps * max(1.0, abs(self.point.value))
        return self.stalled and decrement <= hidden_by_rounding

    @property
    def _eps(self) -> float:
        """The relative rounding error of the weights' dtype."""
        return torch.finfo(next(iter(self.point.params.values())).dtype).eps

    def run(self, passes: float) -> None:
        """Move until the passes are spent or nothing is left to gain."""
        while not (self.stalled or self.converged or self.passes >= passes):
            self.move()

    def move(self) -> None:
        """Make one quasi-Newton step.

        The first step is that of the preconditioner alone. A step that stalls is repeated with it
        alone, after BFGS has forgotten its pairs.
        """
        self._search(self._direction())
        if self.stalled and self._pairs and not self.converged:
            self._pairs = []
            self.stalled = False
            self._search(self._direction())

    def _direction(self) -> Tree:
        """The direction −H ∇F of the next move."""
        return scaled(self._inverse_hessian(self.point.gradient), -1.0)

    def _inverse_hessian(self, v: Tree) -> Tree:
        """H v by the two-loop recursion (Nocedal, 1980), from M⁻¹ scaled to the last pair.

        A pair is a move s and the gradient's change y along it; ``along`` is sᵀy.
        """
        r = dict(v)
        coefficients: list[float] = []
        for s, y, along in reversed(self._pairs):
            coefficient = dot(s, r) / along
            coefficients.append(coefficient)
            r = add(r, -coefficient, y)
        r = self.preconditioner.solve(r)
        if self._pairs:
            _, y, along = self._pairs[-1]
            r = scaled(r, along / dot(y, self.preconditioner.solve(y)))
        for (s, y, along), coefficient in zip(self._pairs, reversed(coefficients), strict=True):
            r = add(r, coefficient - dot(y, r) / along, s)
        return r

    def _search(self, direction: Tree) -> None:
        """Move to the first trial point along the direction at which F falls; else stall."""
        slope = dot(self.point.gradient, direction)
        if not slope < 0:
            self.stalled = True
            return
        size = 1.0
        for _ in range(TRIALS):
            point = self._at(add(self.point.params, size, direction))
            if point is None:
                size = SHORTEST_CUT * size
            elif self._falls(point, direction, size, slope):
                self._accept(scaled(direction, size), point)
                return
            else:
                rise = point.value - self.point.value
                size = _shorter(size, rise, slope)
        self.stalled = True

    def _falls(self, point: Point, direction: Tree, size: float, slope: float) -> bool:
        """Whether F falls by a sufficient share of what the slope promises.

        Where rounding hides the change of F, it is enough that the slope is flatter at the new
        point (the approximate Wolfe condition of Hager & Zhang, 2005).
        """
        rise = point.value - self.point.value
        if rise <= SUFFICIENT * size * slope:
            return True
        rounding = 4 * self._eps * max(1.0, abs(self.point.value))
        is_level = abs(rise) <= rounding
        new_slope = dot(point.gradient, direction)
        return is_level and abs(new_slope) <= FLATTER * abs(slope)

    def _accept(self, move: Tree, point: Point) -> None:
        """Take the new point, and store the pair for BFGS if F curves upwards along the move."""
        change = add(point.gradient, -1.0, self.point.gradient)
        along = dot(move, change)
        if along > 1e-12 * dot(move, move):
            self._pairs = [*self._pairs, (move, change, along)][-MEMORY:]
        self.point = point
        self._append_decrement()

    def _at(self, params: Tree) -> Point | None:
        """F and its gradient at these weights; None where the model breaks down."""
        self.passes += 1
        try:
            return self.data.at(params)
        except BLRError:
            return None

    def _append_decrement(self) -> None:
        """Append the decrement ½ ∇Fᵀ M⁻¹ ∇F at the present point."""
        gradient = self.point.gradient
        decrement = 0.5 * dot(gradient, self.preconditioner.solve(gradient))
        if not decrement >= 0:
            raise PosteriorError("the changed data's gradient is not finite; raise prior_precision")
        self.decrements.append(decrement)


def _shorter(size: float, rise: float, slope: float) -> float:
    """The next step to try along a direction, after a step of this size made F rise.

    It leads to the lowest point of the parabola with the slope at 0 and the rise at ``size``, and
    is between a tenth and a half of ``size``.
    """
    if not rise < math.inf:
        return SHORTEST_CUT * size
    lowest = -slope * size**2 / (2 * (rise - slope * size))
    return min(0.5 * size, max(SHORTEST_CUT * size, lowest))


def train(
    task: Task, prior_precision: Given | Prior, *, structure: str, tolerance: float, rounds: int
) -> Point:
    """Train the task's model, in place, to a minimum of Σ_i ℓ_i + ½ θᵀ diag(δ) θ.

    Args:
        task: has a model that may be changed; see :func:`on_a_copy`.
        prior_precision: δ, a number, or one per parameter name (number or tensor).
        structure: the structure of the posterior that preconditions.
        tolerance: the ``residual`` at which the training ends. It may end above: when it stalls or
            makes no progress (at the kinks of a ReLU network no gradient vanishes), or after
            ``rounds``.
        rounds: the largest number of posteriors that are fitted.

    Returns:
        The weights at the end, with F and its gradient.

    Raises:
        ModelError, DataError: the errors of :meth:`Task.run`.
    """
    prior = Prior.of_any(prior_precision)
    data = whole_objective(task, prior)
    point = data.at({name: weight.clone() for name, weight in task.parameters().items()})
    for _ in range(rounds):
        if point.residual <= tolerance:
            break
        form = fit_laplace(task.quiet, structure=structure, prior_precision=prior).form
        before = point
        descent = Descent(data, form, point)
        while len(descent.decrements) <= MOVES_PER_FIT and not descent.stalled:
            if descent.point.residual <= tolerance:
                break
            descent.move()
        point = descent.point
        write(task, point.params)
        is_level = before.value - point.value <= STUCK_DECREASE * abs(point.value)
        is_stuck = is_level and point.residual > STUCK_RESIDUAL * before.residual
        if is_stuck:
            break
    return point


def on_a_copy(task: Task) -> Task:
    """The task under a copy of its model, which may be trained in place.

    Raises:
        ModelError: the model cannot be copied.
    """
    return task.under(copied(task.model), task.device)


def write(task: Task, params: Tree) -> None:
    """Copy these weights into the task's model."""
    parameters = dict(task.model.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            parameters[name].copy_(value)
