"""Non-conjugate variational inference: the rule site by site (Khan & Rue, section 5.4).

    q(θ) ∝ p(θ) Π_i exp⟨λ̃_i, T(θ)⟩,
    λ̃_i ← (1 − ρ) λ̃_i + ρ ∇_μ E_q[log p(y_i|θ)]              (K&R 60; Khan & Lin, 2017)

for a Gaussian q(θ) and likelihoods that see one number of θ each, f_i = φ_iᵀθ: regression with a
link, and Gaussian processes (:mod:`~blr_analysis.learning_rule.inference.gp`). Four modules do it:
the integrals over one number (:mod:`.scalar_likelihoods`), the examples and their sites
(:mod:`.latent_problem`), the steps (:mod:`.ascent`), and here the fit and its answers.

Every question about an example is a question about one Gaussian number f_i. To leave the example
out, two numbers are subtracted from the natural parameters of f_i; the result is called the cavity.
To predict, p(y|f) is integrated over f.

*Non-conjugate message passing* has one factor for every coefficient
(:mod:`.mean_field`; Knowles & Minka, 2011; K&R 5.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import Natural, subtract
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.inference.ascent import look, minibatch_step, start, step, swept
from blr_analysis.learning_rule.inference.conjugate import columns, wide
from blr_analysis.learning_rule.inference.fitted import (
    Fitted,
    minibatch,
    rate_at,
    rows,
    until_flat,
)
from blr_analysis.learning_rule.inference.latent_problem import Features, Problem, latent, summed
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    AnyLikelihood,
    ScalarLikelihood,
    expected_log_prob,
    expected_mean,
    log_predictive,
    scalar_likelihood,
)

__all__ = [
    "AnyLikelihood",
    "Features",
    "GeneralizedLinear",
    "LatentFitted",
    "LatentModel",
    "Problem",
    "Regression",
    "ScalarLikelihood",
    "expected_log_prob",
    "expected_mean",
    "latent",
    "log_predictive",
    "look",
    "scalar_likelihood",
    "step",
]


@dataclass(frozen=True, eq=False, repr=False)
class LatentFitted(Fitted[FullGaussian]):
    """A :class:`Fitted` posterior over θ with latent numbers f_i = φ_iᵀθ.

    Attributes:
        model: the :class:`Problem`: prior, design Φ ``[N, P]``, targets and likelihood.
        messages: the sites as Gaussian messages to the f_i, natural parameters ``[N]`` each.
            :attr:`sites` are the same in the family of ``q``.

    Example:
        >>> from blr_analysis.learning_rule.inference import GaussianProcess
        >>> x = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
        >>> fitted = GaussianProcess().fit((x, torch.tensor([0.0, 0.0, 1.0])))
        >>> fitted.predict(torch.tensor([[0.5]]))
        tensor([0.4820], dtype=torch.float64)
        >>> fitted.left_out().exp()
        tensor([0.5452, 0.5000, 0.4425], dtype=torch.float64)
    """

    def site_of(self, chosen: Tensor) -> Natural:
        """λ̃_i of these examples in the family of ``q``: ``[M, P]`` and ``[M, P, P]``."""
        design = self.model.design[chosen]
        messages = rows(self.messages, chosen)
        square = torch.einsum("n,np,nq->npq", messages["square"], design, design)
        return {"linear": messages["linear"].unsqueeze(1) * design, "square": square}

    def _total(self, chosen: Tensor) -> Natural:
        """Σ_{i∈M} λ̃_i, without any matrix for a single example."""
        return summed(self.model.design[chosen], rows(self.messages, chosen))

    def latent(self, x: Tensor) -> DiagonalGaussian:
        """The marginals of f at inputs ``[M, D]`` under q."""
        design, residual = self.model.features(x)
        return latent(self.q, design, residual)

    def predict(self, x: Tensor) -> Tensor:
        """E_q[E[y|f]] at inputs ``[M, D]``: the probability of y = 1, or the expected count.

        Raises:
            InputError: the likelihood is a function log p(y|f), from which E[y|f] is not known.
        """
        return expected_mean(self.model.likelihood, self.latent(x))

    def perturbation(self) -> tuple[Tensor, Tensor, Tensor]:
        """The errors e_i, curvatures Λ_i and variances V_i of the memory-perturbation equation.

        e_i and Λ_i are the first and second derivatives of minus the logarithm of the site, at the
        mean of f_i; V_i = Var_q[f_i]. At a fixed point e_i = E_q[∂ℓ_i/∂f_i] and
        Λ_i = E_q[∂²ℓ_i/∂f_i²] (K&R 60).

        Returns:
            e, Λ and V, ``[N]`` each.
        """
        marginals = latent(self.q, self.model.design)
        curvature = -2 * self.messages["square"]
        error = curvature * marginals.mean - self.messages["linear"]
        return error, curvature, 1 / marginals.precision

    def cavities(self) -> DiagonalGaussian:
        """f_i under the posterior without example i, λ − λ̃_i: ``[N]`` Gaussian numbers."""
        marginals = latent(self.q, self.model.design)
        cavity = marginals.with_natural(subtract(marginals.natural, self.messages))
        variance_ratio = 1 + self.model.residual * cavity.precision  # Var(φ_iᵀθ + e_i) / Var(φ_iᵀθ)
        return DiagonalGaussian(cavity.mean, cavity.precision / variance_ratio)

    def left_out(self) -> Tensor:
        """log p(y_i | λ − λ̃_i) of every example, in nats ``[N]``; see :meth:`Fitted.left_out`."""
        return log_predictive(self.model.likelihood, self.cavities(), self.model.targets)


class LatentModel:
    """A Gaussian θ, and a likelihood that depends on it through one number f_i = φ_iᵀθ + e_i.

    Attributes:
        problem: data → a :class:`Problem`: the prior, the likelihood and the features.
        kind: the class of what :meth:`fit` returns.
    """

    problem: Any
    kind: ClassVar[type[Fitted[Any]]] = LatentFitted

    @torch.no_grad()
    def fit(
        self,
        data: tuple[Tensor, Tensor],
        *,
        rho: float | Callable[[int], float] = 1.0,
        batch: int | None = None,
        generator: torch.Generator | None = None,
        **stopping: Any,
    ) -> Any:
        """The Gaussian that maximises the ELBO, by the rule in its site form (K&R 60).

        Args:
            data: (x ``[N, D]``, y ``[N]``). For regression put a column of ones for an intercept.
            rho: ρ in (0, 1], or t → ρ_t from t = 1. A step over all examples tries this ρ first
                and halves it until the ELBO does not fall.
            batch: B, the size of a minibatch; None takes all examples in each step. Minibatches
                are stochastic variational inference: ``max_iter`` steps, with a falling ρ_t such
                as (t + 10)^(−0.7).
            generator: draws the minibatches.
            stopping: ``max_iter``, ``tol`` (of the ELBO, in nats) and ``progress`` (whether to
                show a bar; None shows it on a terminal after a second).

        Returns:
            The posterior: ``history`` is the ELBO in nats, ``sites`` are those of the rule. With
            minibatches ``history`` is a noisy estimate of the ELBO before each step,
            ``converged`` is False, and the sites are computed at the last q.

        Raises:
            DataError: examples are misshapen, not finite, or outside the support.
            InputError: no step improves the ELBO, a setting is out of range, the likelihood does
                not work element by element, or the kernel is no kernel.
        """
        problem = self.problem(data)
        data = problem.check(data)
        problem = problem.on(data)
        if batch is None:
            q, sites, run = _over_all(problem, rho, stopping)
        else:
            q, sites, run = _over_minibatches(problem, rho, batch, generator, stopping)
        return self.kind(q=q, **run, prior=problem.prior, model=problem, data=data, messages=sites)


Rate = float | Callable[[int], float]


def _over_all(
    problem: Problem[Any], rho: Rate, stopping: dict[str, Any]
) -> tuple[Any, Natural, dict[str, Any]]:
    """q, its sites, and how the fit went, by steps over all examples."""
    rate_at(rho, 1)  # refuses a wrong rho before the first computation
    state = start(problem)

    def sweep(t: int) -> float:
        nonlocal state
        state = swept(problem, state, rate_at(rho, t + 1))
        return state.elbo

    run = until_flat(sweep, "ELBO", **stopping)
    return state.q, state.sites, run


def _over_minibatches(
    problem: Problem[Any],
    rho: Rate,
    batch: int,
    generator: torch.Generator | None,
    stopping: dict[str, Any],
) -> tuple[Any, Natural, dict[str, Any]]:
    """q, its sites, and how the fit went, by minibatches, from near the mode of the first one."""
    n_data = len(problem.targets)
    first_batch = minibatch(n_data, batch, generator)
    q = start(problem.of(first_batch)).q

    def step_on_batch(t: int) -> float:
        nonlocal q
        chosen = minibatch(n_data, batch, generator)
        factor = n_data / len(chosen)
        q, elbo = minibatch_step(problem.of(chosen), q, rate_at(rho, t + 1), factor)
        return elbo

    run = until_flat(step_on_batch, "ELBO", noisy=True, **stopping)
    sites, _ = problem.fresh_sites(q)
    return q, sites, run


class Regression(LatentModel):
    """A regression p(y_i | x_iᵀθ) with a Gaussian prior p(θ).

    Attributes:
        family: the class of the prior.
        problems: the class of the :class:`Problem`.
    """

    family: ClassVar[type]
    problems: ClassVar[type[Problem[Any]]] = Problem
    prior: Any
    likelihood: Any

    def __post_init__(self) -> None:
        if not isinstance(self.prior, self.family) or self.prior.mean.ndim != 1:
            name = self.family.__name__
            raise InputError(f"the prior must be a {name} over θ [P], without copies")
        scalar_likelihood(self.likelihood)

    def problem(self, data: Any) -> Problem[Any]:
        prior = wide(self.prior)

        def features(x: Tensor) -> tuple[Tensor, Tensor]:
            x = columns(x, prior.mean, len(prior.mean))
            return x, x.new_zeros(len(x))

        return self.problems(prior, scalar_likelihood(self.likelihood), features)


@dataclass(frozen=True)
class GeneralizedLinear(Regression):
    """p(y_i | x_iᵀθ), θ ~ N(m_0, S_0⁻¹), with a full Gaussian posterior (K&R, section 5.4).

    Attributes:
        prior: p(θ).
        likelihood: ``"bernoulli"`` (logistic regression, y in 0 and 1), ``"probit"``,
            ``"poisson"`` (log-rates), ``"gaussian"``, a likelihood object, or a function
            (y, f) → log p(y|f), element by element.

    Raises:
        InputError: the prior is no FullGaussian, or the likelihood is unknown.

    Example:
        >>> import torch
        >>> prior = FullGaussian(torch.zeros(1).double(), torch.eye(1).double())
        >>> x, y = torch.tensor([[1.0], [2.0], [-1.0]]), torch.tensor([1.0, 1.0, 0.0])
        >>> fitted = GeneralizedLinear(prior).fit((x, y))
        >>> fitted.q.mean, fitted.predict(torch.tensor([[1.0]]))
        (tensor([0.9757], dtype=torch.float64), tensor([0.7057], dtype=torch.float64))
    """

    prior: FullGaussian
    likelihood: AnyLikelihood = "bernoulli"
    family: ClassVar[type] = FullGaussian
