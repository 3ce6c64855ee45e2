"""The rule as a mirror descent in the expectation parameters (Khan & Rue, section 2.2).

    μ ← argmin_μ'  ⟨∇_μ [E_q[ℓ̄] − H(q)], μ'⟩ + KL(q_μ' ‖ q_μ) / ρ          (K&R 22)

The mirror map ∇A* takes μ to λ, where the minimum is one step of the rule, and ∇A takes it back.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from blr_analysis.checks import share
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural, add, scale


def mirror_step(
    family: ExponentialFamily,
    expectation: Mapping[str, Tensor],
    loss_gradient: Mapping[str, Tensor],
    rho: float,
) -> Natural:
    """One step of mirror descent in μ: the point where K&R 22 is smallest.

    Args:
        family: a member of the family, which says what is fixed in it.
        expectation: μ before the step.
        loss_gradient: ∇_μ E_q[ℓ̄] there, statistic by statistic; ℓ̄ includes −log prior.
        rho: ρ in (0, 1].

    Returns:
        μ after the step.

    Raises:
        InputError: ρ out of range, a μ that no member has, or a step that leaves the family.

    Example:
        Two events in one unit of time, under the prior Gamma(1, 1): Bayes' rule at ρ = 1.

        >>> import torch
        >>> from blr_analysis.learning_rule.families import Gamma
        >>> prior = Gamma(torch.tensor(1.0), torch.tensor(1.0))
        >>> gradient = {"log": torch.tensor(-2.0), "linear": torch.tensor(2.0)}
        >>> mu = mirror_step(prior, prior.expectation, gradient, 1.0)
        >>> prior.with_expectation(mu)
        Gamma(shape=tensor(3.0000), rate=tensor(2.0000))

    Source: Raskutti & Mukherjee, "The information geometry of mirror descent", 2015; K&R 2.2.
    """
    share("rho", rho)
    q = family.with_expectation(expectation)
    minus_entropy_gradient = add(q.natural, q.base_gradient())
    objective_gradient = add(loss_gradient, minus_entropy_gradient)
    after = q.with_natural(add(q.natural, scale(objective_gradient, -rho)))
    return after.expectation
