"""How the sites of a :class:`Problem` move: each toward what its example asks for at the present q.

    λ̃_i ← (1 − ρ) λ̃_i + ρ ∇_μ E_q[log p(y_i|θ)]          (Khan & Rue, Eq. 60)

A step over all examples is halved until the ELBO does not fall. Steps over minibatches have no
ELBO to look at: there ρ falls by a schedule of the user's.
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
from blr_analysis.learning_rule.inference.latent_problem import Problem, Q, aims, latent

HALVINGS = 20
NEWTON_STEPS = 50
ROUNDING = 1e-14  # of an ELBO, relative to its size
NEARLY_FLAT = 1e-7  # a change of the ELBO by a whole step that rounding can explain


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


def look(problem: Problem[Q], sites: Natural) -> State[Q]:
    """The state of these sites: their posterior, its ELBO, and where the sites should go.

    Raises:
        InputError: the sites make no positive definite precision.
    """
    q = problem.posterior(sites)
    targets, values = problem.aims(q)
    return State(sites, q, targets, float(values.sum() - q.kl(problem.prior)))


def step(problem: Problem[Q], state: State[Q], rho: float, node: Tensor | float = 1.0) -> State[Q]:
    """One step of the rule in its site form (Khan & Rue, Eq. 60), of one node of a mean field."""
    share = rho * node
    sites = {name: site + share * (state.aims[name] - site) for name, site in state.sites.items()}
    return look(problem, sites)


def minibatch_step(problem: Problem[Q], q: Q, rho: float, factor: float) -> tuple[Q, float]:
    """One step of the rule on a minibatch whose examples count ``factor`` = N/B times.

        λ ← (1 − ρ) λ + ρ (λ_prior + N/B Σ_{i∈B} ∇_μ E_q[log p(y_i|θ)])

    Returns:
        q after the step, and the estimate of the ELBO before it, in nats.

    Raises:
        InputError: the step leaves the family.
    """
    targets, values = problem.aims(q)
    elbo = factor * float(values.sum()) - float(q.kl(problem.prior))
    return toward(q, problem.prior, scale(problem.total(targets), factor), rho), elbo


def halved(attempt: Callable[[float], State[Q]], state: State[Q], rho: float) -> State[Q]:
    """``attempt(ρ)``, with ρ halved until its ELBO is not below that of ``state``.

    A departure from the rule; what leaves the family counts as a fall. Where even the whole step
    changes the ELBO by rounding only, ``state`` is the fixed point and is returned.

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
    """Sites of examples near the mode of log p(y|f) + log p(θ), seen through f no wider than 1.

    Where a prior leaves f wide, E_q[e^f] and its like are so large that from the prior itself the
    first step gives precisions from which there is no way back in floating point. So: Newton's
    method with the smoothed derivatives that the sites are made of, its steps halved until the
    mode is nearer; the last of them gains less than a nat.
    """

    def height(theta: Tensor) -> float:
        fit = problem.likelihood.log_prob(problem.targets, problem.design @ theta).sum()
        return float(fit + problem.prior.log_prob(theta))

    q = problem.prior
    theta = problem.prior.mean
    sites: Natural = {}
    highest = height(theta)
    for _ in range(NEWTON_STEPS):
        widths = latent(q, problem.design).precision.clamp_min(1.0)
        narrow = DiagonalGaussian(problem.design @ theta, widths)
        of_f, _ = aims(narrow, problem.targets, problem.likelihood)
        sites = problem.sites_at(theta, of_f)
        q = problem.posterior(sites)
        candidates = (theta + 0.5**k * (q.mean - theta) for k in range(HALVINGS))
        theta = next((t for t in candidates if height(t) > highest), theta)
        before = highest
        highest = height(theta)
        if highest - before < 1:
            break
    return sites


def start(problem: Problem[Q]) -> State[Q]:
    """The state near the mode, or where there is none the prior, with sites of zero."""
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
    """One step for each node."""
    for node in problem.nodes:
        state = halved(partial(step, problem, state, node=node), state, rho)
    return state
