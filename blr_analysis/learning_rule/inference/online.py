"""Online learning as the rule, one example after another (Khan & Rue, section 5.4).

With one loss at a time, ρ = η and the entropy counted relative to the last posterior, the rule is

    λ ← λ − η ∇_μ E_q[ℓ_t]          ⇔   q ← argmin  E_q[ℓ_t] + KL(q ‖ q_t) / η   (K&R 22),

Bayes' rule with e^(−η ℓ_t) in the place of a likelihood: exponential weights. :func:`experts` makes
Hedge of it, with no approximation; with the loss's tangent and the square of its gradient at the
mean (the delta method) it is :class:`OnlineNewton`. A mirror descent in μ is a natural gradient
step in λ; a mirror descent in λ is one in μ, which :func:`likelihood_step` has beside K&R's
Eq. 19.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import at_least, instance, one_of, positive_number, share
from blr_analysis.errors import DataError
from blr_analysis.learning_rule.families.base import ExponentialFamily, add, scale, subtract
from blr_analysis.learning_rule.families.dirichlet import CategoricalFamily
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.conjugate import Factor, bayes, real
from blr_analysis.learning_rule.inference.fitted import Fitted, Model, answer, count, rows, stacked
from blr_analysis.learning_rule.natural_gradient import natural_gradient
from blr_analysis.learning_rule.rule import blr_step


def experts(n_experts: int, rate: float) -> Factor:
    """Losses L ``[N, K]`` of K experts in N rounds; conjugate to :class:`CategoricalFamily`.

    Each round has the site λ̃ = −η (L_k − L_K) and the constant c = −η L_K. The posterior's weights
    are then proportional to π_k e^(−η Σ_t L_tk), as in Hedge, and −1/η times the log evidence is
    the mix loss, at most log(K)/η above the best expert's loss. ``without(rounds)`` forgets rounds,
    exactly.

    Raises:
        InputError: fewer than two experts, or a rate that is not positive.

    Example:
        >>> from blr_analysis.learning_rule.inference import Conjugate
        >>> losses = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
        >>> uniform = CategoricalFamily(torch.zeros(1))
        >>> Conjugate(uniform, experts(2, rate=1.0)).fit(losses).q.probs
        tensor([0.7311, 0.2689], dtype=torch.float64)

    Source: Littlestone & Warmuth, 1994; Freund & Schapire, 1997; van der Hoeven et al., COLT 2018.
    """
    at_least(2, "n_experts", n_experts)
    rate = positive_number("rate", rate)

    def check(losses: Any, prior: CategoricalFamily) -> Tensor:
        losses = real("losses", losses, like=prior.log_odds, ndim=2)
        has_all_losses = losses.shape[1] == n_experts
        has_all_odds = prior.log_odds.shape[-1] == n_experts - 1
        if not (has_all_losses and has_all_odds):
            raise DataError(f"losses and prior must be of {n_experts} experts")
        return losses

    return Factor(
        family=CategoricalFamily,
        check=check,
        site=lambda losses: {"indicator": -rate * (losses[:, :-1] - losses[:, -1:])},
        constant=lambda losses: -rate * losses[:, -1],
    )


@dataclass(frozen=True)
class OnlineNewton(Model):
    """The online Newton step: exponential weights over Gaussians, by the delta method.

        S ← S + γ g gᵀ,      m ← m − S⁻¹ g,      g = ∇ℓ_t(m)

    for the surrogate ⟨g, θ − m⟩ + γ/2 ⟨g, θ − m⟩² of the loss, with S = γ A in the paper's words.
    A fit is one pass over the data. The site of a round is what the round added to λ:
    :meth:`Fitted.without` subtracts it, and the other rounds keep their gradients. A further step
    is a new pass over the remaining rounds. The log predictive of an example is −ℓ at the mean.

    Args:
        prior: N(m, S⁻¹) before the first round.
        loss: (θ ``[P]``, one example) → a number, by torch operations.
        rate: γ; at most ½ min(1/(4GD), α) for the regret's guarantee.

    Raises:
        InputError: another prior, or a rate that is not positive.

    Example:
        >>> prior = FullGaussian(torch.zeros(1), torch.eye(1))
        >>> model = OnlineNewton(prior, lambda t, y: 0.5 * (t[0] - y).square(), rate=1.0)
        >>> model.fit(torch.tensor([2.0, 1.0])).q
        FullGaussian(mean=tensor([0.5119]), precision=tensor([[5.3600]]))

    Source: Hazan, Agarwal & Kale, 2007; van der Hoeven et al., COLT 2018; K&R 5.4.
    """

    prior: FullGaussian
    loss: Callable[[Tensor, Any], Tensor]
    rate: float

    def __post_init__(self) -> None:
        instance("prior", self.prior, FullGaussian, "a FullGaussian")
        positive_number("rate", self.rate)

    def fit(self, data: Any) -> Fitted[FullGaussian]:
        """One pass over the data.

        ``history`` holds the loss of every round before its step; the regret counts their sum.

        Args:
            data: a tensor ``[N, …]`` or a tuple of them, in their order.

        Raises:
            DataError: no examples.
            InputError: a loss that is no number, a gradient that is not finite, or a precision
                that rounding makes singular.
        """
        data = self.check(data)
        q = self.prior
        history = []
        sites = []
        for t in torch.arange(count(data)):
            gradient, loss = torch.func.grad_and_value(self._loss)(q.mean, rows(data, t))
            gradient = gradient.detach()
            curvature = self.rate * gradient.outer(gradient)
            site = scale(q.pull_back(gradient, curvature), -1.0)
            q = bayes(q, site)
            sites.append(site)
            history.append(float(loss.detach()))
        return Fitted(
            q=q,
            history=history,
            objective="loss of the round",
            prior=self.prior,
            model=self,
            data=data,
            messages=stacked(sites),
        )

    def step(self, q: FullGaussian, data: Any) -> FullGaussian:
        """The posterior of these examples alone: one pass from the prior, whatever ``q`` is."""
        if count(data) == 0:
            return self.prior
        return self.fit(data).q

    def log_predictive(self, q: FullGaussian, data: Any) -> Tensor:
        """−ℓ at the mean of q."""
        n_data = count(data)
        means = q.mean.expand(n_data, q.mean.shape[-1])  # q is for all examples, or one for each
        losses = [self.loss(means[t], rows(data, t)) for t in torch.arange(n_data)]
        return -torch.stack(losses)

    def _loss(self, theta: Tensor, example: Any) -> Tensor:
        contract = "loss must be a function (theta, example) -> a number"
        return answer(contract, torch.Size([]), self.loss, theta, example)


def likelihood_step(
    q: ExponentialFamily, theta: Any, rho: float, *, along: str = "natural"
) -> ExponentialFamily:
    """One step of maximum likelihood, q being the model of the data.

        gradient:     λ ← λ + ρ (T̄ − μ)              (steepest ascent, K&R 18)
        natural:      λ ← λ + ρ F(λ)⁻¹ (T̄ − μ)       (K&R 19; F = ∇²A)
        mirror:       λ ← argmax ⟨T̄ − μ, λ'⟩ − KL(q ‖ q_λ') / ρ
        expectation:  μ ← μ + ρ (T̄ − μ)              (the mirror descent, written in μ)

    T̄ is the mean of T(θ) over the data and T̄ − μ the gradient of the mean log-likelihood with
    respect to λ. The first two are the rule without its entropy. With ρ = 1 the mirror descent
    reaches the maximum in one step from anywhere, and the natural gradient is Newton's method.

    Args:
        q: p(·; λ) before the step.
        theta: data, as ``q.statistics`` takes them, with a leading dimension.
        rho: ρ in (0, 1].
        along: ``"gradient"``, ``"natural"``, ``"mirror"`` or ``"expectation"``.

    Raises:
        InputError: a ρ outside of (0, 1], unknown coordinates, or a step out of the family.

    Example:
        >>> from blr_analysis.learning_rule.families import Gamma
        >>> waits = torch.tensor([1.0, 2.0, 4.0])
        >>> start = Gamma(torch.tensor(1.0), torch.tensor(1.0))
        >>> q = likelihood_step(start, waits, 1.0, along="expectation")
        >>> q.shape / q.rate
        tensor(2.3333)
    """
    share("rho", rho)
    one_of("along", along, ("gradient", "natural", "mirror", "expectation"))
    statistics = {name: value.mean(0) for name, value in q.statistics(theta).items()}
    gradient = subtract(statistics, q.expectation)
    if along in ("mirror", "expectation"):
        return q.with_expectation(add(q.expectation, scale(gradient, rho)))
    if along == "natural":
        gradient = natural_gradient(q, gradient)
    # The rule subtracts ρ (λ + ∇ E[log h]), the entropy's share: added here, it cancels there.
    loss_gradient = scale(add(gradient, q.natural, q.base_gradient()), -1.0)
    return blr_step(q, loss_gradient, rho)
