"""The weights that minimise Σ_i ℓ_i(θ) + ½ θᵀ diag(δ) θ, by damped Newton steps on the whole data.

Each step solves (S + μ) d = −∇ by conjugate gradients, preconditioned by the Laplace posterior at
the present weights. S is the generalised Gauss–Newton matrix of the objective far from an optimum,
its Hessian near it (for a generalised linear model the two are one), and damping μ rises until the
objective does not (Levenberg, 1944; Marquardt, 1963).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch

from blr_analysis.errors import ModelError
from blr_analysis.posterior.laplace import fit_laplace
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures import Structure, Tree
from blr_analysis.sensitivity.curvature import Precision, Solution, cg
from blr_analysis.sensitivity.objective import Point, dot, norm, whole
from blr_analysis.task import Task

TRIES = 20  # dampings of one step, each four times the last
GAIN = 0.1  # of the decrease that the quadratic promises is enough
MOST_PRODUCTS = 50  # of the curvature, per step
NEAR = 0.3  # residual: from here on the Hessian leads faster than the GGN


@dataclass(frozen=True)
class Optimum:
    """Where the descent ended.

    Attributes:
        params: the weights by name.
        residual: ‖∇‖ / (‖Σ_i ∇ℓ_i‖ + ‖δθ‖): the gradient, relative to the two parts that cancel
            in it at an optimum.
        converged: whether the residual fell below the tolerance.
        steps: Newton steps taken.
    """

    params: Tree
    residual: float
    converged: bool
    steps: int


def on_a_copy(task: Task) -> Task:
    """The same task under a copy of its model, which may be trained in place.

    Raises:
        ModelError: the model cannot be copied.
    """
    try:
        model = copy.deepcopy(task.model)
    except Exception as error:  # the user's own code
        raise ModelError(
            f"the model cannot be copied ({type(error).__name__}: {error}); its weights must be "
            "leaves and its attributes such that copy.deepcopy takes them"
        ) from error
    return Task(
        model,
        task.examples,
        likelihood=task.likelihood,
        forward=task.forward,
        batch_size=task.batch_size,
        device=task.device,
        metadata=task.metadata,
    )


def descend(
    task: Task, prior_precision: Given | Prior, *, structure: str, tolerance: float, max_steps: int
) -> Optimum:
    """Train the task's model, in place, to the optimum nearest downhill.

    Args:
        task: under a model of one's own; see :func:`on_a_copy`.
        prior_precision: δ, a number, or one per parameter name (number or tensor).
        structure: of the posterior that preconditions.
        tolerance: the residual to reach; a descent that gets stuck, or takes ``max_steps``, is
            marked as not converged.

    Raises:
        ModelError, DataError: as :meth:`Task.run`.
    """
    params = {n: p.clone() for n, p in task.parameters().items()}
    prior = Prior.of_any(prior_precision)
    objective = whole(task, prior)
    here = objective.at(params)
    damping, steps, least = 0.0, 0, prior.smallest
    while here.residual > tolerance and steps < max_steps:
        q = fit_laplace(task, structure=structure, prior_precision=prior, progress=False)
        kind = "hessian" if here.residual < NEAR else "ggn"
        precision = Precision(task, params, prior, kind=kind)
        downhill = {n: -g for n, g in here.gradient.items()}
        for _ in range(TRIES):
            solved = _solved(precision, q.form, damping, downhill, here.residual)
            if bool(solved.indefinite.any()):  # no minimum lies that way; the GGN is never so
                precision = Precision(task, params, prior)
                solved = _solved(precision, q.form, damping, downhill, here.residual)
            move = solved.x
            trial = {n: p + move[n] for n, p in params.items()}
            try:
                there = objective.at(trial)
            except ModelError:  # the step was so long that the outputs overflow
                there = None
            promised = 0.5 * (dot(downhill, move) + damping * dot(move, move))
            if _better(there, here, promised):
                break
            damping = max(4 * damping, least)
        else:
            break
        assert there is not None
        gain = (here.value - there.value) / promised if promised > 0 else 1.0
        damping = damping / 4 if gain > 0.75 and damping > 1e-3 * least else damping
        params, here, steps = trial, there, steps + 1
        write(task, params)
    return Optimum(params, here.residual, here.residual <= tolerance, steps)


def write(task: Task, params: Tree) -> None:
    """Put these weights into the task's model."""
    own = dict(task.model.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            own[name].copy_(value)


def _solved(
    precision: Precision, form: Structure, damping: float, downhill: Tree, residual: float
) -> Solution:
    """(S + μ)⁻¹ times the downhill direction, the more exactly the nearer the optimum."""

    def damped(v: Tree) -> Tree:
        found = precision.times(v)
        return {n: x + damping * v[n] for n, x in found.items()} if damping else found

    return cg(
        damped,
        downhill,
        preconditioner=form.plus_prior(damping) if damping else form,
        tolerance=min(0.1, math.sqrt(residual)),
        max_iterations=MOST_PRODUCTS,
        progress=False,
    )


def _better(there: Point | None, here: Point, promised: float) -> bool:
    """Whether the objective fell as promised; where rounding hides that, whether its slope did."""
    eps = torch.finfo(next(iter(here.gradient.values())).dtype).eps
    rounding = 10 * eps * abs(here.value)
    if there is None or not there.value <= here.value + rounding - GAIN * promised:
        return False
    return promised > rounding or norm(there.gradient) < norm(here.gradient)
