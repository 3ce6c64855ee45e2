"""From the trained weights to those that other data would have given, in few passes.

Two moves, both preconditioned by the learned posterior's precision M of the changed data, both
damped by a line search on real forward passes, so that the objective F never rises (but for
rounding):

    Gauss–Newton    S(θ) p = −∇F(θ),  S = Σ J_iᵀ Λ_i J_i + diag(δ), by conjugate gradients
    secant          p = −H ∇F(θ),     H = the limited-memory BFGS matrix that starts from M⁻¹

A product with S costs two passes over the data, a secant move one. On a quadratic F both follow
the same search directions (Nazareth, 1979); elsewhere the secant move looks at the true gradient
twice as often, which is what counts where the loss falls off exponentially, as it does for the
logit of a class that is gone: a Gauss–Newton step moves that by one nat, however far it has to go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from blr_analysis.errors import BLRError, PosteriorError
from blr_analysis.posterior.structures import Structure, Tree
from blr_analysis.sensitivity.curvature import cg
from blr_analysis.sensitivity.objective import Objective, Point, dot

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
    """Where the descent stands; :meth:`gauss_newton` and :meth:`secant` move it.

    Attributes:
        point: the present weights with F and its gradient there.
        passes: over the changed data: one for F with its gradient; for a Gauss–Newton step one to
            linearise and two for each product with S.
        moves: the accepted ones, the start first.
        stalled: no step along the last direction lowered F (as far as rounding lets one see).
    """

    data: Objective
    preconditioner: Structure
    point: Point
    memory_budget: int | None = None
    passes: float = 1.0
    moves: list[AcceptedMove] = field(default_factory=list)
    stalled: bool = False
    _pairs: list[tuple[Tree, Tree]] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        data: Objective,
        params: Tree,
        preconditioner: Structure,
        *,
        memory_budget: int | None = None,
    ) -> Descent:
        """At the trained weights; one pass."""
        found = cls(data, preconditioner, data.at(params), memory_budget)
        found._note("start")
        return found

    @property
    def decrement(self) -> float:
        """½ ∇Fᵀ M⁻¹ ∇F: the decrease of F in nats that the posterior expects of the next step."""
        gradient = self.point.gradient
        return 0.5 * dot(gradient, self.preconditioner.solve(gradient))

    @property
    def converged(self) -> bool:
        """Whether next to nothing is left to gain: of what there was at the start, no more than
        one unit in the last place, or, where no step along the last direction lowered F, a
        decrease that rounding hides in F."""
        left, first = self.decrement, self.moves[0].decrement
        if left <= max(self._eps * first, NOTHING):
            return True
        return self.stalled and left <= 1e2 * self._eps * max(1.0, abs(self.point.value))

    @property
    def _eps(self) -> float:
        return torch.finfo(next(iter(self.point.params.values())).dtype).eps

    def gauss_newton(self, *, tolerance: float, iterations: int) -> None:
        """One damped Gauss–Newton step: S p = −∇F to this tolerance, in at most so many products.

        Raises:
            PosteriorError: the curvature overflows.
        """
        here = self.point
        found = cg(
            self.data.precision(here.params, memory_budget=self.memory_budget),
            scaled(here.gradient, -1.0),
            preconditioner=self._inverse_hessian,
            tolerance=tolerance,
            max_iterations=iterations,
            progress=False,
        )
        self.passes += 1 + 2 * found.iterations
        self._search(found.x, "gauss_newton")

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
        for s, y in reversed(self._pairs):
            a = dot(s, r) / dot(s, y)
            coefficients.append(a)
            r = add(r, -a, y)
        r = self.preconditioner.solve(r)
        if self._pairs:
            s, y = self._pairs[-1]
            r = scaled(r, dot(s, y) / dot(y, self.preconditioner.solve(y)))
        for (s, y), a in zip(self._pairs, reversed(coefficients), strict=True):
            r = add(r, a - dot(y, r) / dot(s, y), s)
        return r

    def _search(self, direction: Tree, kind: str) -> None:
        """Go along the direction as far as F falls; F and its gradient are taken together."""
        here = self.point
        slope = dot(here.gradient, direction)
        size = 1.0
        for _ in range(HALVINGS if slope < 0 else 0):
            try:
                there = self.data.at(add(here.params, size, direction))
                rise = there.value - here.value
            except BLRError:  # the model breaks down this far out
                there, rise = None, float("inf")
            self.passes += 1
            if there is not None and (
                rise <= SUFFICIENT * size * slope or self._flatter(there, direction, rise, slope)
            ):
                self._accept(there, scaled(direction, size), kind)
                return
            best = -slope * size**2 / (2 * (rise - slope * size))  # of a parabola
            size = min(0.5 * size, max(0.1 * size, best)) if rise < float("inf") else 0.1 * size
        self.stalled = True

    def _flatter(self, there: Point, direction: Tree, rise: float, slope: float) -> bool:
        """Whether F is level as far as rounding lets one see, and its slope is less than before
        (the approximate Wolfe condition of Hager & Zhang, 2005)."""
        level = 4 * self._eps * max(1.0, abs(self.point.value))
        return abs(rise) <= level and abs(dot(there.gradient, direction)) <= LESS * abs(slope)

    def _accept(self, there: Point, move: Tree, kind: str) -> None:
        change = add(there.gradient, -1.0, self.point.gradient)
        if dot(move, change) > 1e-12 * dot(move, move):  # else no curvature is seen along it
            self._pairs = [*self._pairs, (move, change)][-MEMORY:]
        self.point = there
        self._note(kind)

    def _note(self, kind: str) -> None:
        decrement = self.decrement
        if not decrement >= 0:
            raise PosteriorError(
                "the gradient of the loss on the changed data is not finite; raise "
                "prior_precision, or use float64"
            )
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


def add(a: Tree, scale: float, b: Tree) -> Tree:
    """a + scale · b."""
    return {n: torch.add(x, b[n], alpha=scale) for n, x in a.items()}


def scaled(a: Tree, scale: float) -> Tree:
    """scale · a."""
    return {n: scale * x for n, x in a.items()}
