"""Non-conjugate variational inference: the rule site by site (Khan & Rue, section 5.4).

    q(θ) ∝ p(θ) Π_i exp⟨λ̃_i, T(θ)⟩,
    λ̃_i ← (1 − ρ) λ̃_i + ρ ∇_μ E_q[log p(y_i|θ)]              (K&R 60; Khan & Lin, 2017)

for a Gaussian q(θ) and likelihoods that see one number of θ each, f_i = φ_iᵀθ: regression with a
link, and Gaussian processes (:mod:`~blr_analysis.learning_rule.inference.gp`). A site is then a
pair of numbers, the natural parameters of a Gaussian message to f_i, and its share of λ is of rank
one: (a_i φ_i, −½ b_i φ_i φ_iᵀ). What the likelihood gives is an expectation over one Gaussian
number, by quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from blr_analysis.checks import positive_int, share, tolerance
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import Natural, add, scale
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.inference.fitted import answer, until_flat
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    ScalarLikelihood,
    expected_log_prob,
)
from blr_analysis.progress import track

# E_q[·] of a function of the latent numbers, element by element, such as at_samples.
Expectation = Callable[[DiagonalGaussian, Callable[[Tensor], Tensor]], Tensor]
HALVINGS = 20
STARTS = 50
Q = TypeVar("Q", FullGaussian, DiagonalGaussian)


@dataclass(frozen=True, eq=False)
class Problem:
    """A Gaussian prior, and examples that see one number of θ each.

    Attributes:
        prior: p(θ), over P numbers.
        design: Φ ``[N, P]``, whose rows are φ_i.
        targets: y ``[N]``.
        likelihood: log p(y_i|f_i).
        expectation: how E_q[log p(y_i|f_i)] is taken; None: in closed form or by quadrature.
        residual: Var(e_i) of f_i = φ_iᵀθ + e_i, where θ does not explain f_i wholly, ``[N]``.
    """

    prior: FullGaussian
    design: Tensor
    targets: Tensor
    likelihood: ScalarLikelihood
    expectation: Expectation | None = None
    residual: Tensor | float = 0.0

    def posterior(self, sites: Natural) -> FullGaussian:
        """λ_prior + Σ_i λ̃_i as a distribution, from ``[N]`` sites."""
        return self.prior.with_natural(add(self.prior.natural, summed(self.design, sites)))


@dataclass(frozen=True, eq=False)
class State(Generic[Q]):
    """One iterate.

    Attributes:
        sites: λ̃_i, natural parameters of Gaussian messages to f_i: ``{"linear", "square"}``,
            ``[N]`` each.
        q: λ_prior + Σ λ̃_i.
        aims: ∇_μ E_q[log p(y_i|f_i)] at q, toward which the sites move.
        elbo: Σ_i E_q[log p(y_i|f_i)] − KL(q ‖ prior), in nats.
    """

    sites: Natural
    q: Q
    aims: Natural
    elbo: float


def latent(q: FullGaussian, design: Tensor, residual: Tensor | float = 0.0) -> DiagonalGaussian:
    """The marginals of f_i = φ_iᵀθ + e_i, Var(e_i) = ``residual``, under q.

    With N copies in ``q``, each goes with its own row of the design ``[N, P]``.
    """
    factor = torch.linalg.cholesky(q.precision)
    if q.mean.ndim == 1:
        roots = torch.linalg.solve_triangular(factor, design.mT, upper=False).mT
    else:
        roots = torch.linalg.solve_triangular(factor, design.unsqueeze(-1), upper=False).squeeze(-1)
    variance = roots.square().sum(-1) + residual
    return DiagonalGaussian((design * q.mean).sum(-1), 1 / above_zero(variance))


def above_zero(variance: Tensor) -> Tensor:
    """Var(f_i), or ε where f_i is 0 for sure: φ_i = 0, as for an example without any feature."""
    return torch.where(variance > 0, variance, torch.finfo(variance.dtype).eps)


def summed(design: Tensor, sites: Natural) -> Natural:
    """Σ_i λ̃_i in the family of q(θ), from the sites' pairs of numbers."""
    square = design.mT @ (sites["square"].unsqueeze(-1) * design)
    return {"linear": design.mT @ sites["linear"], "square": square}


def spread(design: Tensor, sites: Natural) -> Natural:
    """λ̃_i in the family of q(θ), one by one: ``[N, P]`` and ``[N, P, P]``."""
    outer = design.unsqueeze(-1) * design.unsqueeze(-2)
    return {
        "linear": sites["linear"].unsqueeze(-1) * design,
        "square": sites["square"].unsqueeze(-1).unsqueeze(-1) * outer,
    }


def aims(
    marginals: DiagonalGaussian,
    targets: Tensor,
    likelihood: ScalarLikelihood,
    expectation: Expectation | None = None,
) -> tuple[Natural, Tensor]:
    """∇_μ E_q[log p(y_i|f_i)], and the expectations themselves, for each example.

    The derivatives in the mean and the variance are those of the expectation as it is computed
    (∂/∂v E = ½ E[∂²], Price), so that a fixed point of the rule is a stationary point of the ELBO
    to rounding.

    Returns:
        Natural parameters of the sites, ``[N]`` each, and E_q[log p(y_i|f_i)] ``[N]``.

    Raises:
        InputError: an ``expectation`` that is no such function, or says nothing of the variance.
    """
    mean = marginals.mean.detach().requires_grad_()
    variance = (1 / marginals.precision).detach().requires_grad_()
    with torch.enable_grad():
        there = DiagonalGaussian(mean, 1 / variance)
        if expectation is None:
            values = expected_log_prob(likelihood, there, targets)
        else:
            wanted = "expectation must be a function (marginals of f, function) -> E of it, [N]"
            told = partial(likelihood.log_prob, targets)
            values = answer(wanted, mean.shape, expectation, there, told)
            if not values.requires_grad:
                raise InputError(f"{wanted}, differentiable in the marginals")
        slope, half_bend = torch.autograd.grad(values.sum(), (mean, variance), allow_unused=True)
    if slope is None or half_bend is None:
        raise InputError("expectation must depend on mean and variance of f, not on the mean alone")
    return marginals.pull_back(slope, 2 * half_bend), values.detach()


def look(problem: Problem, sites: Natural) -> State[FullGaussian]:
    """The state of these sites: their posterior, its ELBO, and where the sites should go.

    Raises:
        InputError: the sites make no positive definite precision.
    """
    q = problem.posterior(sites)
    marginals = latent(q, problem.design, problem.residual)
    goal, values = aims(marginals, problem.targets, problem.likelihood, problem.expectation)
    return State(sites, q, goal, float(values.sum() - q.kl(problem.prior)))


def step(problem: Problem, state: State[FullGaussian], rho: float) -> State[FullGaussian]:
    """One step of the rule in its site form (Khan & Rue, Eq. 60)."""
    return look(problem, add(scale(state.sites, 1 - rho), scale(state.aims, rho)))


def plain(attempt: Callable[[float], State[Q]], state: State[Q], rho: float) -> State[Q]:
    """``attempt(ρ)``, the rule as it is written.

    Raises:
        InputError: it leaves the family.
    """
    try:
        return attempt(rho)
    except InputError as error:
        raise InputError(
            f"a step of rho={rho:g} leaves the Gaussians: take a smaller rho or halving=True "
            f"({suspicion(state.aims, state.elbo)})"
        ) from error


def rounding(state: State[Any]) -> float:
    """What is lost in the last digit of an ELBO."""
    return torch.finfo(state.q.mean.dtype).eps * (1 + abs(state.elbo))


def halved(attempt: Callable[[float], State[Q]], state: State[Q], rho: float) -> State[Q]:
    """``attempt(ρ)``, with ρ halved until its ELBO is not below that of ``state``.

    A departure from the rule; what leaves the family counts as a fall. Where even the whole step
    changes q and its ELBO by rounding only, ``state`` is the fixed point and is returned.

    Raises:
        InputError: no step improves the ELBO: log p(y|f) or its derivatives are not finite.
    """
    slack = 64 * rounding(state)
    small = torch.finfo(state.q.mean.dtype).eps ** 0.45
    resting = False
    for k in range(HALVINGS):
        try:
            after = attempt(rho / 2**k)
        except InputError:  # a precision that is not positive definite
            continue
        if after.elbo >= state.elbo - slack:
            return after
        if k == 0 and after.elbo >= state.elbo - small * (1 + abs(state.elbo)):
            resting = float(after.q.kl(state.q)) <= small
    if resting:
        return state
    raise InputError(
        f"no step along the natural gradient improves the ELBO ({state.elbo:.6g} nats): "
        f"{suspicion(state.aims, state.elbo)}"
    )


def suspicion(aims: Natural, elbo: float) -> str:
    """What is likely wrong where no step succeeds."""
    upward = int((aims["square"] > 0).sum())
    if not math.isfinite(elbo):
        return "E_q[log p(y|f)] is not finite: scale the inputs, or take a narrower prior"
    if upward:
        return (
            f"log p(y|f) curves upward in f at {upward} of {len(aims['square'])} examples: was a "
            "loss given for it, with the wrong sign?"
        )
    return "scale the inputs, or where expectations are random take halving=False with a small rho"


def start(problem: Problem, *, near: bool) -> State[FullGaussian]:
    """Sites of zero, so that q is the prior; with ``near`` those of a q near the mode.

    Where a prior leaves f wide, E_q[e^f] and its like are so large that the first step gives
    precisions from which there is no way back in floating point.
    """
    if near:
        try:
            state = look(problem, _near_the_mode(problem))
        except InputError:  # a precision that is not positive definite, or values out of range
            pass
        else:
            if math.isfinite(state.elbo):
                return state
    return look(problem, _no_sites(problem))


def _no_sites(problem: Problem) -> Natural:
    return dict.fromkeys(("linear", "square"), torch.zeros_like(problem.targets))


def _near_the_mode(problem: Problem) -> Natural:
    """Sites of examples near the mode of log p(y|f) + log p(θ), seen through f no wider than 1.

    Newton's method with the smoothed derivatives that the sites are made of, its steps halved
    until the mode is nearer; the last of them gains less than a nat.
    """

    def height(theta: Tensor) -> float:
        fit = problem.likelihood.log_prob(problem.targets, problem.design @ theta).sum()
        return float(fit + problem.prior.log_prob(theta))

    q, theta = problem.prior, problem.prior.mean
    best, sites = height(theta), _no_sites(problem)
    for _ in range(STARTS):
        widths = latent(q, problem.design).precision.clamp_min(1.0)
        narrow = DiagonalGaussian(problem.design @ theta, widths)
        sites, _ = aims(narrow, problem.targets, problem.likelihood, problem.expectation)
        q = problem.posterior(sites)
        tried = (theta + 0.5**k * (q.mean - theta) for k in range(HALVINGS))
        higher = next((t for t in tried if height(t) > best), theta)
        before, theta = best, higher
        best = height(theta)
        if best - before < 1:
            break
    return sites


def run(
    problem: Problem,
    *,
    rho: float = 1.0,
    halving: bool = True,
    tol: float = 1e-10,
    max_iter: int = 500,
    progress: bool | None = None,
) -> tuple[State[FullGaussian], list[float], bool]:
    """From the sites of :func:`start` to a fixed point.

    Args:
        problem: the prior and the examples.
        rho: ρ in (0, 1] of each step; with ``halving`` the first that is tried.
        halving: whether ρ is halved, step by step, until the ELBO does not fall.
        tol: stop when the ELBO changes by at most this many nats (or by rounding only).
        max_iter: at most this many steps.
        progress: True shows a bar, False does not, None on a terminal when it takes long.

    Returns:
        The last state, the ELBO after each step, and whether it stopped by ``tol``.

    Raises:
        InputError: settings out of range, or a likelihood under which no step succeeds.
    """
    share("rho", rho)
    positive_int("max_iter", max_iter)
    tolerance("tol", tol)
    state = start(problem, near=halving)

    def elbos() -> Iterator[float]:
        nonlocal state
        for _ in track(range(max_iter), label="sites", show=progress):
            attempt = partial(step, problem, state)
            state = (halved if halving else plain)(attempt, state, rho)
            yield state.elbo

    def allowed(_: float) -> float:
        return max(tol, 4 * rounding(state))

    history, converged = until_flat(elbos(), tol=allowed, what="the ELBO")
    return state, history, converged
