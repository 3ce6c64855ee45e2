"""The weights that minimise an objective F, by three kinds of moves from where a model stands.

All are preconditioned by a posterior's precision M, and F never rises (but for rounding):

    Newton          (S + μ) d = −∇F(θ),  S = Σ_i J_iᵀ Λ_i J_i + diag(δ) far from a minimum, the
                    Hessian near it (for a generalised linear model the two are one); the damping
                    μ rises until F falls (Levenberg, 1944; Marquardt, 1963)
    Gauss–Newton    S(θ) d = −∇F(θ), then a line search on real forward passes
    secant          d = −H ∇F(θ), H the limited-memory BFGS matrix that starts from M⁻¹, likewise

Newton moves train a model to its optimum, with a posterior fitted anew at each step. The other two
go from the trained weights to those that changed data would have given, with the learned
posterior, in few passes: a product with S costs two passes over the data, a secant move one. On a
quadratic F both follow the same search directions (Nazareth, 1979); elsewhere the secant move
looks at the true gradient twice as often, which is what counts where the loss falls off
exponentially, as it does for the logit of a class that is gone: a Gauss–Newton step moves that by
one nat, however far it has to go.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from blr_analysis.backprop.tree import add, dot, norm, scaled
from blr_analysis.errors import BLRError, ModelError, PosteriorError, told_as
from blr_analysis.posterior.laplace import fit_laplace
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures import Structure, Tree
from blr_analysis.sensitivity.curvature import Operator, Solution, cg
from blr_analysis.sensitivity.objective import Objective, Point, whole
from blr_analysis.task import Task

TRIES = 20  # dampings of one Newton step, each four times the last
GAIN = 0.1  # of the decrease that the quadratic promises is enough for a Newton step
MOST_PRODUCTS = 50  # of the curvature, per Newton step
SERVES = 20  # passes of a Newton step up to which its preconditioner serves the next one too
WINDOW = 8  # Newton steps in which a descent either gets on or is over
STILL = 0.9  # of the least residual before them: what was no better than that has not got on
LEVEL = 1e-3  # of F: nor has what fell less
NEAR = 0.3  # residual: from here on the Hessian leads faster than the GGN
MEMORY = 20  # pairs of moves and changes of the gradient that a secant move knows of
SUFFICIENT = 1e-4  # of the decrease that the slope promises (Armijo)
LESS = 0.9  # of the slope along a move, at its end
NOTHING = 1e-14  # nats
HALVINGS = 12


@dataclass(frozen=True)
class AcceptedMove:
    """One accepted move: which kind, passes spent so far, F after it, and the decrease expected
    of the next, ½ ∇Fᵀ M⁻¹ ∇F in nats."""

    kind: str
    passes: float
    objective: float
    decrement: float


@dataclass
class Descent:
    """Where the descent stands; :meth:`newton`, :meth:`gauss_newton` and :meth:`secant` move it.

    Attributes:
        point: the present weights with F and its gradient there.
        passes: over the data: one for F with its gradient; for a Newton or Gauss–Newton step one
            to linearise and two for each product with S.
        damping: μ of the next Newton step.
        moves: the accepted ones, the start first.
        enough: of the first decrement, what may be left.
        stalled: no step along the last direction lowered F (as far as rounding lets one see).
    """

    data: Objective
    preconditioner: Structure
    point: Point
    memory_budget: int | None = None
    passes: float = 1.0
    moves: list[AcceptedMove] = field(default_factory=list)
    stalled: bool = False
    enough: float = 0.0
    damping: float = 0.0
    _pairs: list[tuple[Tree, Tree, float]] = field(default_factory=list)  # s, y and sᵀy

    def __post_init__(self) -> None:
        self._note("start")

    @property
    def decrement(self) -> float:
        """½ ∇Fᵀ M⁻¹ ∇F: the decrease of F in nats that the posterior expects of the next step."""
        gradient = self.point.gradient
        return 0.5 * dot(gradient, self.preconditioner.solve(gradient))

    @property
    def converged(self) -> bool:
        """Whether next to nothing is left to gain: of what there was at the start, no more than
        ``enough`` or one unit in the last place, or, where no step along the last direction
        lowered F, a decrease that rounding hides in F."""
        left, first = self.decrement, self.moves[0].decrement
        if left <= max(max(self._eps, self.enough) * first, NOTHING):
            return True
        return self.stalled and left <= 1e2 * self._eps * max(1.0, abs(self.point.value))

    @property
    def _eps(self) -> float:
        return torch.finfo(next(iter(self.point.params.values())).dtype).eps

    def newton(self, form: Structure) -> None:
        """One damped Newton step, preconditioned by the posterior's precision at these weights."""
        here, least = self.point, self.data.prior.smallest
        times = self._curvature("hessian" if here.residual < NEAR else "ggn")
        for _ in range(TRIES):
            self.preconditioner = form.plus_prior(self.damping) if self.damping else form
            solved = self._damped(times)
            if bool(solved.indefinite.any()):  # no minimum lies that way; the GGN is never so
                times = self._curvature("ggn")
                solved = self._damped(times)
            move = solved.x
            promised = 0.5 * (self.damping * dot(move, move) - dot(here.gradient, move))
            there = self._at(add(here.params, 1.0, move))
            if there is not None and self._better(there, promised):
                gain = (here.value - there.value) / promised if promised > 0 else 1.0
                if gain > 0.75 and self.damping > 1e-3 * least:
                    self.damping /= 4
                self.point = there
                self._note("newton")
                return
            self.damping = max(4 * self.damping, least)
        self.stalled = True

    def _damped(self, times: Operator) -> Solution:
        """(S + μ)⁻¹ times the downhill direction, the more exactly the nearer the minimum."""
        damping = self.damping
        solved = cg(
            (lambda v: add(times(v), damping, v)) if damping else times,
            scaled(self.point.gradient, -1.0),
            preconditioner=self.preconditioner,
            tolerance=min(0.1, math.sqrt(self.point.residual)),
            max_iterations=MOST_PRODUCTS,
            progress=False,
        )
        self.passes += 2 * solved.iterations
        return solved

    def _better(self, there: Point, promised: float) -> bool:
        """Whether F fell as promised; where rounding hides that, whether its slope did."""
        here = self.point
        rounding = 10 * self._eps * abs(here.value)
        if not there.value <= here.value + rounding - GAIN * promised:
            return False
        return promised > rounding or norm(there.gradient) < norm(here.gradient)

    def gauss_newton(self, *, tolerance: float, iterations: int) -> None:
        """One damped Gauss–Newton step: S p = −∇F to this tolerance, in at most so many products.

        Raises:
            PosteriorError: the curvature overflows.
        """
        solved = cg(
            self._curvature("ggn"),
            scaled(self.point.gradient, -1.0),
            preconditioner=self._inverse_hessian,
            tolerance=tolerance,
            max_iterations=iterations,
            progress=False,
        )
        self.passes += 2 * solved.iterations
        self._search(solved.x, "gauss_newton")

    def secant(self) -> None:
        """One quasi-Newton step; the first is the posterior's own, and so is the next where the
        memory has led nowhere."""
        self._search(self.next_step(), "secant")
        if self.stalled and self._pairs and not self.converged:
            self._pairs, self.stalled = [], False
            self._search(self.next_step(), "secant")

    def next_step(self) -> Tree:
        """−H ∇F: what the next secant move would try; no pass over the data."""
        return scaled(self._inverse_hessian(self.point.gradient), -1.0)

    def _inverse_hessian(self, v: Tree) -> Tree:
        """H v by the two-loop recursion (Nocedal, 1980), from M⁻¹ scaled to the last pair."""
        r, coefficients = dict(v), []
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

    def _search(self, direction: Tree, kind: str) -> None:
        """Go along the direction as far as F falls; F and its gradient are taken together."""
        here = self.point
        slope = dot(here.gradient, direction)
        size = 1.0
        for _ in range(HALVINGS if slope < 0 else 0):
            there = self._at(add(here.params, size, direction))
            rise = float("inf") if there is None else there.value - here.value
            if there is not None and (
                rise <= SUFFICIENT * size * slope or self._flatter(there, direction, rise, slope)
            ):
                self._remember(scaled(direction, size), add(there.gradient, -1.0, here.gradient))
                self.point = there
                self._note(kind)
                return
            best = -slope * size**2 / (2 * (rise - slope * size))  # of a parabola
            size = min(0.5 * size, max(0.1 * size, best)) if rise < float("inf") else 0.1 * size
        self.stalled = True

    def _flatter(self, there: Point, direction: Tree, rise: float, slope: float) -> bool:
        """Whether F is level as far as rounding lets one see, and its slope is less than before
        (the approximate Wolfe condition of Hager & Zhang, 2005)."""
        level = 4 * self._eps * max(1.0, abs(self.point.value))
        return abs(rise) <= level and abs(dot(there.gradient, direction)) <= LESS * abs(slope)

    def _remember(self, move: Tree, change: Tree) -> None:
        """The gradient's change along a move, unless no curvature is seen in it."""
        if (along := dot(move, change)) > 1e-12 * dot(move, move):
            self._pairs = [*self._pairs, (move, change, along)][-MEMORY:]

    def _curvature(self, kind: str) -> Operator:
        """v ↦ S v, or the Hessian's, here."""
        self.passes += 1
        return self.data.precision(self.point.params, kind=kind, memory_budget=self.memory_budget)

    def _at(self, params: Tree) -> Point | None:
        """F and its gradient; None where the model breaks down so far out."""
        self.passes += 1
        try:
            return self.data.at(params)
        except BLRError:
            return None

    def _note(self, kind: str) -> None:
        decrement = self.decrement
        if not decrement >= 0:
            raise PosteriorError("the changed data's gradient is not finite; raise prior_precision")
        self.moves.append(AcceptedMove(kind, self.passes, self.point.value, decrement))


Watch = Callable[[Descent], None]


def descend(
    descent: Descent,
    *,
    steps: int | None,
    passes: float,
    tolerance: float,
    watch: Watch | None = None,
) -> None:
    """Move until the steps are made, the passes spent, or nothing is left to gain.

    * ``steps=1``: one Gauss–Newton step, its system solved to ``tolerance``;
    * ``steps=K``: K times a rough Gauss–Newton step (two products at most) and six secant moves,
      some 12 passes;
    * ``steps=None``: secant moves alone.
    """

    def over() -> bool:
        if watch is not None:
            watch(descent)
        return descent.stalled or descent.converged or descent.passes >= passes

    if steps == 1:
        room = int((passes - descent.passes - 2) // 2)
        descent.gauss_newton(tolerance=tolerance, iterations=max(1, room))
        over()
        return
    if steps is None:
        while not over():
            descent.secant()
        return
    for _ in range(steps):
        if over():
            return
        descent.gauss_newton(tolerance=0.3, iterations=2)
        for _ in range(6):
            if over():
                return
            descent.secant()
    over()


def train(
    task: Task, prior_precision: Given | Prior, *, structure: str, tolerance: float, max_steps: int
) -> Descent:
    """Train the task's model, in place, to the minimum of Σ_i ℓ_i + ½ θᵀ diag(δ) θ downhill of it.

    Args:
        task: under a model of one's own; see :func:`on_a_copy`.
        prior_precision: δ, a number, or one per parameter name (number or tensor).
        structure: of the posterior that preconditions.
        tolerance: the ``point.residual`` to reach; a descent that gets stuck, does not get on
            (at the kinks of a ReLU network no gradient vanishes), or has taken ``max_steps``,
            ends above it.

    Raises:
        ModelError, DataError: as :meth:`Task.run`.
    """
    prior = Prior.of_any(prior_precision)

    def precision() -> Structure:
        return fit_laplace(task.quiet, structure=structure, prior_precision=prior).form

    params = {n: p.clone() for n, p in task.parameters().items()}
    form = precision()
    data = whole(task, prior)
    descent = Descent(data, form, data.at(params))
    track, spent = [(descent.point.value, descent.point.residual)], 0.0
    for _ in range(max_steps):
        if descent.point.residual <= tolerance or descent.stalled or _still(track):
            break
        form = precision() if spent > SERVES else form
        before = descent.passes
        descent.newton(form)
        spent = descent.passes - before
        track.append((descent.point.value, descent.point.residual))
        write(task, descent.point.params)
    return descent


def _still(track: list[tuple[float, float]]) -> bool:
    """Whether the last steps brought neither F nor the residual down."""
    if len(track) <= WINDOW:
        return False
    earlier, late = track[:-WINDOW], track[-WINDOW:]
    fell = earlier[-1][0] - late[-1][0]
    least = [min(residual for _, residual in part) for part in (earlier, late)]
    return fell <= LEVEL * abs(late[-1][0]) and least[1] > STILL * least[0]


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
    own = dict(task.model.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            own[name].copy_(value)
