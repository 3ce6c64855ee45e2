"""Online learning as the rule, one example after another (Khan & Rue, section 5.4).

Each round takes one loss ℓ_t and the step size ρ = η, and counts the entropy relative to the last
posterior q_t. Then the rule is

    λ ← λ − η ∇_μ E_q[ℓ_t]          ⇔   q ← argmin  E_q[ℓ_t] + KL(q ‖ q_t) / η   (K&R 22).

It is Bayes' rule with e^(−η ℓ_t) in the place of the likelihood: exponential weights.

* :func:`experts` are exponential weights over K experts (Hedge), without any approximation.
* :class:`OnlineNewton` are exponential weights over Gaussians. It replaces the loss by its tangent
  and the square of its gradient, both at the mean (the delta method).
* :func:`likelihood_step` is one step of maximum likelihood: a gradient step (K&R 18), a natural
  gradient step (K&R 19), or a mirror descent.
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
from blr_analysis.learning_rule.families.categorical import CategoricalFamily
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.conjugate import Factor, bayes, real
from blr_analysis.learning_rule.inference.fitted import Fitted, Model, answer, count, rows, stacked
from blr_analysis.learning_rule.natural_gradient import natural_gradient
from blr_analysis.learning_rule.rule import blr_step


def experts(n_experts: int, rate: float) -> Factor:
    """Losses L ``[N, K]`` of K experts in N rounds; conjugate to :class:`CategoricalFamily`.

    A round is a likelihood −η L_k of expert k: its site is λ̃ = −η (L_k − L_K), and its constant
    term is c = −η L_K. The posterior's weights are proportional to π_k e^(−η Σ_t L_tk), as in
    Hedge. The log evidence times −1/η is the mix loss, which is at most log(K)/η above the loss of
    the best expert. ``without(rounds)`` is exact: it forgets these rounds.

    Raises:
        InputError: there are fewer than two experts, or the rate is not positive.

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
        experts_of_losses = losses.shape[1]
        experts_of_prior = prior.log_odds.shape[-1] + 1
        if not experts_of_losses == experts_of_prior == n_experts:
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

    The loss is approximated by ⟨g, θ − m⟩ + γ/2 ⟨g, θ − m⟩². The paper's A is S/γ. A fit is one
    pass over the data. The site of a round is what the round added to λ: :meth:`Fitted.without`
    subtracts it and leaves the gradients of the other rounds as they were; :meth:`Fitted.refitted`
    makes a new pass over the remaining rounds. The log predictive of an example is −ℓ at the mean.

    Args:
        prior: N(m, S⁻¹) before the first round.
        loss: (θ ``[P]``, one example) → a number, by torch operations.
        rate: γ; at most ½ min(1/(4GD), α) for the regret's guarantee.

    Raises:
        InputError: the prior is no FullGaussian, or the rate is not positive.

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

        ``history`` holds the loss of every round before its step. The sum of these losses, less
        that of the best fixed θ, is the regret.

        Args:
            data: a tensor ``[N, …]`` or a tuple of them, one example for each round, in order.

        Raises:
            DataError: there are no examples.
            InputError: the loss is no number, its gradient is not finite, or rounding makes the
                precision singular.
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
        """The posterior after one pass over these examples from the prior; ``q`` has no effect."""
        if count(data) == 0:
            return self.prior
        return self.fit(data).q

    def log_predictive(self, q: FullGaussian, data: Any) -> Tensor:
        """−ℓ of each example at the mean of q ``[M]``; q is one Gaussian, or one per example."""
        n_data = count(data)
        n_parameters = q.mean.shape[-1]
        means = q.mean.expand(n_data, n_parameters)
        losses = [self.loss(means[t], rows(data, t)) for t in torch.arange(n_data)]
        return -torch.stack(losses)

    def _loss(self, theta: Tensor, example: Any) -> Tensor:
        """ℓ of one example, a number; InputError where the user's function gives no number."""
        contract = "loss must be a function (theta, example) -> a number"
        return answer(contract, torch.Size([]), self.loss, theta, example)


def likelihood_step(
    q: ExponentialFamily, theta: Any, rho: float, *, along: str = "natural"
) -> ExponentialFamily:
    """One step of maximum likelihood for data that are modelled by the family of q.

        gradient:     λ ← λ + ρ (T̄ − μ)              (steepest ascent, K&R 18)
        natural:      λ ← λ + ρ F(λ)⁻¹ (T̄ − μ)       (K&R 19; F = ∇²A)
        mirror:       λ ← argmax ⟨T̄ − μ, λ'⟩ − KL(q ‖ q_λ') / ρ
        expectation:  μ ← μ + ρ (T̄ − μ)              (the mirror descent, written in μ)

    T̄ is the mean of T(θ) over the data, and T̄ − μ is the gradient of the mean log-likelihood with
    respect to λ. The first two are the rule without its entropy. At ρ = 1 the mirror descent
    reaches the maximum in one step from any λ, and the natural gradient step is Newton's method.

    Args:
        q: p(·; λ) before the step.
        theta: the data, with a leading dimension, in the form that ``q.statistics`` takes.
        rho: ρ in (0, 1].
        along: ``"gradient"``, ``"natural"``, ``"mirror"`` or ``"expectation"``.

    Returns:
        p(·; λ) after the step.

    Raises:
        InputError: ρ is outside of (0, 1], ``along`` has another name, or the step leaves the
            family.

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
    # blr_step adds the gradient of the entropy, −λ − ∇_μ E[log h]. Maximum likelihood has no
    # entropy, so the loss contains what cancels it.
    without_entropy = add(gradient, q.natural, q.base_gradient())
    loss_gradient = scale(without_entropy, -1.0)
    return blr_step(q, loss_gradient, rho)
