"""Non-conjugate variational inference: the rule site by site (Khan & Rue, section 5.4).

    q(θ) ∝ p(θ) Π_i exp⟨λ̃_i, T(θ)⟩,
    λ̃_i ← (1 − ρ) λ̃_i + ρ ∇_μ E_q[log p(y_i|θ)]              (K&R 60; Khan & Lin, 2017)

for a Gaussian q(θ) and likelihoods that see one number of θ each, f_i = φ_iᵀθ: regression with a
link, and Gaussian processes (:mod:`~blr_analysis.learning_rule.inference.gp`). It is told in four
parts: the integrals over one number (:mod:`.scalar_likelihoods`), what examples tell θ
(:mod:`.latent_problem`), how their sites move (:mod:`.ascent`), and here the fit and its answers.

Every question about an example is one about a Gaussian number: leaving it out subtracts a pair of
numbers from the natural parameters of f_i (the cavity), and predicting is an integral over f.

*Non-conjugate message passing* has a factor of its own for every coefficient
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
        messages: the sites as Gaussian messages to the f_i, natural parameters ``[N]`` each; in
            the family of ``q`` they are :attr:`sites`.

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
        design, sites = rows((self.model.design, self.messages), chosen)
        square = torch.einsum("n,np,nq->npq", sites["square"], design, design)
        return {"linear": sites["linear"].unsqueeze(1) * design, "square": square}

    def _total(self, chosen: Tensor) -> Natural:
        """Σ_{i∈M} λ̃_i, in one matrix, whatever M is."""
        return summed(*rows((self.model.design, self.messages), chosen))

    def latent(self, x: Tensor) -> DiagonalGaussian:
        """The marginals of f at inputs ``[M, D]`` under q."""
        return latent(self.q, *self.model.features(x))

    def predict(self, x: Tensor) -> Tensor:
        """E_q[E[y|f]] at inputs ``[M, D]``: the probability of y = 1, or the expected count.

        Raises:
            InputError: a likelihood given as a function, which says nothing of E[y|f].
        """
        return expected_mean(self.model.likelihood, self.latent(x))

    def perturbation(self) -> tuple[Tensor, Tensor, Tensor]:
        """e_i, Λ_i and V_i, ``[N]`` each: −∂/∂m_i and −∂²/∂m_i² of the site of f_i at its mean m_i
        under q, and Var_q[f_i]. At a fixed point e_i = E_q[∂ℓ_i/∂f_i] and Λ_i = E_q[∂²ℓ_i/∂f_i²]
        (K&R 60)."""
        marginals = latent(self.q, self.model.design)
        curvature = -2 * self.messages["square"]
        error = curvature * marginals.mean - self.messages["linear"]
        return error, curvature, 1 / marginals.precision

    def cavities(self) -> DiagonalGaussian:
        """f_i under the posterior without example i, λ − λ̃_i: ``[N]`` Gaussian numbers."""
        marginals = latent(self.q, self.model.design)
        without = marginals.with_natural(subtract(marginals.natural, self.messages))
        widened = 1 + self.model.residual * without.precision
        return DiagonalGaussian(without.mean, without.precision / widened)

    def left_out(self) -> Tensor:
        """log p(y_i | λ − λ̃_i) of every example, in nats ``[N]``; see :meth:`Fitted.left_out`."""
        return log_predictive(self.model.likelihood, self.cavities(), self.model.targets)


class LatentModel:
    """A Gaussian θ, and a likelihood that sees one number f_i = φ_iᵀθ + e_i of it.

    Attributes:
        problem: data → the prior, the likelihood and the features.
        kind: of the fit.
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
            rho: ρ in (0, 1], or t → ρ_t from t = 1. Over all examples it is the first that is
                tried in each step, and halved until the ELBO does not fall.
            batch: B examples at each step, drawn with ``generator``: ``max_iter`` steps of
                stochastic variational inference, with ρ_t = (t + 10)^(−0.7) for example; None: all
                of them.
            generator: of the minibatches.
            stopping: ``max_iter``, ``tol`` (of the ELBO, in nats) and ``progress`` (whether to
                show a bar; None: on a terminal after a second).

        Returns:
            The posterior: ``history`` is the ELBO in nats, ``sites`` are those of the rule. Of
            minibatches ``history`` is a noisy estimate of it before each step, ``converged`` is
            False, and the sites are those at the last q.

        Raises:
            DataError: examples that are misshapen, not finite, or outside the support.
            InputError: no step improves the ELBO, settings out of range, a likelihood that does
                not work element by element, or a kernel that is none.
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
    rate_at(rho, 1)
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
    """The same by steps over minibatches, from the posterior of a first one alone."""
    n_data = len(problem.targets)
    q = start(problem.of(minibatch(n_data, batch, generator))).q

    def step_on_some(t: int) -> float:
        nonlocal q
        chosen = minibatch(n_data, batch, generator)
        q, elbo = minibatch_step(problem.of(chosen), q, rate_at(rho, t + 1), n_data / len(chosen))
        return elbo

    run = until_flat(step_on_some, "ELBO", noisy=True, **stopping)
    sites, _ = problem.aims(q)
    return q, sites, run


class Regression(LatentModel):
    """p(y_i | x_iᵀθ) and a Gaussian prior p(θ)."""

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
        InputError: a prior that is no FullGaussian, or an unknown likelihood.

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
