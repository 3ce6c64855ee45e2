"""Steps of the rule on the sites of a :class:`Problem`.

    λ̃_i ← (1 − ρ) λ̃_i + ρ ∇_μ E_q[log p(y_i|θ)]          (Khan & Rue, Eq. 60)

A step over all examples is halved until the ELBO does not fall. A step over a minibatch knows no
ELBO of all examples; there the user's schedule lowers ρ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import Natural, scale
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian
from blr_analysis.learning_rule.inference.conjugate import toward
from blr_analysis.learning_rule.inference.latent_problem import (
    Problem,
    Q,
    expectation_gradients,
    latent,
)

HALVINGS = 20  # so that the shortest step is a millionth of the whole one
NEWTON_STEPS = 50  # at most, on the way to the mode
ENOUGH_GAIN = 1.0  # nats; a Newton step that gains less ends the way to the mode
ROUNDING = 1e-14  # rounding error of an ELBO, relative to its size
NEARLY_FLAT = 1e-7  # relative change of the ELBO by a whole step, which rounding can explain


@dataclass(frozen=True, eq=False)
class State(Generic[Q]):
    """One iterate.

    Attributes:
        sites: λ̃_i, natural parameters of Gaussian messages to f_i: ``{"linear", "square"}``,
            ``[N]`` each.
        q: λ_prior + Σ λ̃_i.
        fresh_sites: ∇_μ E_q[log p(y_i|f_i)] at q, toward which the sites move.
        elbo: Σ_i E_q[log p(y_i|f_i)] − KL(q ‖ prior), in nats.
    """

    sites: Natural
    q: Q
    fresh_sites: Natural
    elbo: float


def look(problem: Problem[Q], sites: Natural) -> State[Q]:
    """The state of these sites: their posterior, its ELBO, and the sites that the rule moves to.

    Raises:
        InputError: the posterior's precision is not positive definite.
    """
    q = problem.posterior(sites)
    fresh_sites, expectations = problem.fresh_sites(q)
    elbo = float(expectations.sum() - q.kl(problem.prior))
    return State(sites, q, fresh_sites, elbo)


def step(problem: Problem[Q], state: State[Q], rho: float, node: Tensor | float = 1.0) -> State[Q]:
    """One step of the rule in its site form (Khan & Rue, Eq. 60).

    ``node`` multiplies ρ: 1 for all of θ, a unit vector for one node of a mean field.
    """
    step_size = rho * node
    sites = {
        name: site + step_size * (state.fresh_sites[name] - site)
        for name, site in state.sites.items()
    }
    return look(problem, sites)


def minibatch_step(problem: Problem[Q], q: Q, rho: float, factor: float) -> tuple[Q, float]:
    """One step of the rule on a minibatch whose examples count ``factor`` = N/B times.

        λ ← (1 − ρ) λ + ρ (λ_prior + N/B Σ_{i∈B} ∇_μ E_q[log p(y_i|θ)])

    Returns:
        q after the step, and the estimate of the ELBO before it, in nats.

    Raises:
        InputError: the step leaves the family.
    """
    fresh_sites, expectations = problem.fresh_sites(q)
    elbo = factor * float(expectations.sum()) - float(q.kl(problem.prior))
    all_sites = scale(problem.total(fresh_sites), factor)
    return toward(q, problem.prior, all_sites, rho), elbo


def halved(attempt: Callable[[float], State[Q]], state: State[Q], rho: float) -> State[Q]:
    """``attempt(ρ)``, with ρ halved until its ELBO is not below that of ``state``.

    The halving is a departure from the rule. A step that leaves the family counts as a fall. Where
    the whole step changes the ELBO by no more than rounding, ``state`` is a fixed point and is
    returned.

    Raises:
        InputError: no step improves the ELBO: log p(y|f) or its derivatives are not finite.
    """
    size = 1 + abs(state.elbo)
    is_at_rest = False
    for k in range(HALVINGS):
        try:
            after = attempt(rho / 2**k)
        except InputError:  # a precision that is not positive definite
            continue
        if after.elbo >= state.elbo - ROUNDING * size:
            return after
        if k == 0:
            is_at_rest = after.elbo >= state.elbo - NEARLY_FLAT * size
    if is_at_rest:
        return state
    raise InputError(
        f"no step along the natural gradient improves the ELBO ({state.elbo:.6g} nats): scale the "
        "inputs, take a narrower prior, or turn the sign of a loss given for log p(y|f)"
    )


def near_the_mode(problem: Problem[Q]) -> Natural:
    """Sites near the mode of log p(y|f) + log p(θ), computed with Var(f_i) of at most 1.

    A wide prior makes expectations such as E_q[e^f] so large that a first step from the prior gives
    precisions from which floating point does not recover. This is Newton's method with the same
    expected derivatives that sites are made of. Its steps are halved until log p rises, and it ends
    with a step that gains less than a nat.
    """

    def log_joint(theta: Tensor) -> float:
        log_likelihood = problem.likelihood.log_prob(problem.targets, problem.design @ theta)
        return float(log_likelihood.sum() + problem.prior.log_prob(theta))

    q = problem.prior
    theta = problem.prior.mean
    sites: Natural = {}
    highest = log_joint(theta)
    for _ in range(NEWTON_STEPS):
        precision = latent(q, problem.design).precision.clamp_min(1.0)
        narrow = DiagonalGaussian(problem.design @ theta, precision)
        of_f, _ = expectation_gradients(narrow, problem.targets, problem.likelihood)
        sites = problem.sites_at(theta, of_f)
        q = problem.posterior(sites)
        newton_step = q.mean - theta
        candidates = (theta + 0.5**k * newton_step for k in range(HALVINGS))
        theta = next((t for t in candidates if log_joint(t) > highest), theta)
        before = highest
        highest = log_joint(theta)
        if highest - before < ENOUGH_GAIN:
            break
    return sites


def start(problem: Problem[Q]) -> State[Q]:
    """The state near the mode; where its numbers are out of range, the prior with sites of 0."""
    try:
        state = look(problem, near_the_mode(problem))
        if math.isfinite(state.elbo):
            return state
    except InputError:  # a precision that is not positive definite, or values out of range
        pass
    zero = torch.zeros_like(problem.targets)
    sites = problem.sites_at(problem.prior.mean, {"linear": zero, "square": zero})
    return look(problem, sites)


def swept(problem: Problem[Q], state: State[Q], rho: float) -> State[Q]:
    """The state after one step for each node, in turn."""
    for node in problem.nodes:
        step_of_node = partial(step, problem, state, node=node)
        state = halved(step_of_node, state, rho)
    return state
