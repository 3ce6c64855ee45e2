"""Models whose examples see one latent number each: fit, predictions and left-out scores.

With f_i = φ_iᵀθ + e_i every question about an example is one about a Gaussian number: leaving it
out subtracts a pair of numbers from the natural parameters of f_i (the cavity), and predicting is
an integral over f. Nothing of the size of the posterior is copied for an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blr_analysis.data import chosen_indices
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import Natural, subtract
from blr_analysis.learning_rule.families.gaussian import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.inference.cvi import (
    Expectation,
    Problem,
    aims,
    latent,
    run,
    spread,
    summed,
)
from blr_analysis.learning_rule.inference.factors import real
from blr_analysis.learning_rule.inference.fitted import Fitted, moved, rows
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    ScalarLikelihood,
    check_elementwise,
    checked_targets,
    expected_mean,
    log_predictive,
    scalar_likelihood,
)
from blr_analysis.likelihoods import Likelihood

# x [M, D] → the rows φ(x) [M, P], and the variance of f that θ does not explain, [M].
Features = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LatentFitted(Fitted[FullGaussian]):
    """A :class:`Fitted` posterior over θ with latent numbers f_i = φ_iᵀθ.

    Attributes:
        problem: the prior, the design Φ ``[N, P]``, the targets and the likelihood.
        messages: the sites as Gaussian messages to the f_i, natural parameters ``[N]`` each; in
            the family of ``q`` they are :attr:`sites`.
        features: inputs → their rows of the design.

    Example:
        >>> from blr_analysis.learning_rule.inference import GaussianProcess
        >>> x = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
        >>> fitted = GaussianProcess().fit((x, torch.tensor([0.0, 0.0, 1.0])))
        >>> fitted.predict(torch.tensor([[0.5]]))
        tensor([0.4820], dtype=torch.float64)
        >>> fitted.left_out().exp()
        tensor([0.5452, 0.5000, 0.4425], dtype=torch.float64)
    """

    problem: Problem
    messages: Natural
    features: Features

    def latent(self, x: Tensor) -> DiagonalGaussian:
        """The marginals of f at inputs ``[M, D]`` under q."""
        return latent(self.q, *self.features(x))

    def predict(self, x: Tensor) -> Tensor:
        """E_q[E[y|f]] at inputs ``[M, D]``: the probability of y = 1, or the expected count.

        Raises:
            InputError: a likelihood given as a function, which says nothing of E[y|f], or whose
                mean does not work element by element.
        """
        return expected_mean(self.problem.likelihood, self.latent(x))

    def without(self, indices: Any) -> FullGaussian:
        """λ − Σ_{i∈M} λ̃_i; see :meth:`Fitted.without`. Holds one matrix, whatever M is."""
        chosen = torch.tensor(sorted(set(chosen_indices(indices, self.n_data))), dtype=torch.long)
        if not len(chosen):
            return self.q
        design = rows(self.problem.design, chosen)
        return moved(self.q, summed(design, _rows(self.messages, chosen)), -1.0)

    def cavities(self) -> DiagonalGaussian:
        """f_i under the posterior without example i, λ − λ̃_i: ``[N]`` Gaussian numbers."""
        marginals = latent(self.q, self.problem.design)
        without = marginals.with_natural(subtract(marginals.natural, self.messages))
        residual = self.problem.residual
        return DiagonalGaussian(
            without.mean, without.precision / (1 + residual * without.precision)
        )

    def left_out(self) -> Tensor:
        """log p(y_i | λ − λ̃_i) of every example, in nats ``[N]``; see :meth:`Fitted.left_out`."""
        return log_predictive(self.problem.likelihood, self.cavities(), self.problem.targets)


@dataclass(frozen=True)
class LatentModel(ABC):
    """A Gaussian θ, and a likelihood that sees one number f_i = φ_iᵀθ + e_i of it."""

    @property
    def _sparse(self) -> bool:
        """Whether θ leaves part of f unexplained at the examples themselves."""
        return False

    @abstractmethod
    def _told(self, data: Any) -> tuple[FullGaussian, Features, Tensor, Tensor]:
        """The prior, what makes rows of the design, and the examples x, y, checked."""

    @torch.no_grad()
    def fit(
        self,
        data: tuple[Tensor, Tensor],
        *,
        rho: float = 1.0,
        halving: bool = True,
        tol: float = 1e-10,
        max_iter: int = 500,
        expectation: Expectation | None = None,
        progress: bool | None = None,
    ) -> LatentFitted:
        """The Gaussian that maximises the ELBO, by the rule in its site form (K&R 60).

        Args:
            data: (x ``[N, D]``, y ``[N]``). For regression put a column of ones for an intercept;
                of a process, the dtype of x, single or double, is that of the computation (double
                is wise, and taken for all others).
            rho: ρ in (0, 1], with ``halving`` the first that is tried in each step.
            halving: halve ρ, step by step, until the ELBO does not fall; False for random
                expectations, or for the rule as it is written.
            tol: stop when the ELBO changes by at most this many nats.
            max_iter: at most this many steps.
            expectation: (marginals of f, function) → E of it, element by element; in closed form
                or by quadrature to 1e-9 by default;
                ``partial(at_samples, n=100, generator=generator)`` is Monte Carlo.
            progress: True shows a bar, False does not, None on a terminal when it takes long.

        Returns:
            The posterior: ``history`` is the ELBO in nats, ``sites`` are those of the rule.

        Raises:
            DataError: examples that are misshapen, not finite, or outside the support.
            InputError: no step improves the ELBO, settings out of range, a likelihood or an
                expectation that does not work element by element, or a kernel that is none.
        """
        likelihood = scalar_likelihood(self.likelihood)  # type: ignore[attr-defined]
        prior, features, x, y = self._told(data)
        design, residual = features(x)
        left = residual if self._sparse else 0.0
        problem = Problem(prior, design, y, likelihood, expectation, left)
        state, history, converged = run(
            problem, rho=rho, halving=halving, tol=tol, max_iter=max_iter, progress=progress
        )

        def predictive(q: FullGaussian, new: Any) -> Tensor:
            inputs, targets = checked_pair(new, prior.mean, likelihood)
            return log_predictive(likelihood, latent(q, *features(inputs)), targets)

        def site_of(indices: Tensor) -> Natural:
            return spread(rows(design, indices), _rows(state.sites, indices))

        return LatentFitted(
            q=state.q,
            history=history,
            objective="ELBO",
            prior=prior,
            n_data=len(y),
            site_of=site_of,
            predictive=predictive,
            data=(x, y),
            converged=converged,
            step=partial(_step, problem, features),
            problem=problem,
            messages=state.sites,
            features=features,
        )


def _step(
    problem: Problem, features: Features, q: FullGaussian, data: Any, kept: Tensor
) -> FullGaussian:
    """λ_prior + Σ_i ∇_μ E_q[log p(y_i|f_i)] of these examples."""
    x, y = rows(data, kept)
    design, residual = features(x)
    left = residual if isinstance(problem.residual, Tensor) else 0.0
    there = replace(problem, design=design, targets=y, residual=left)
    told, _ = aims(latent(q, design, left), y, problem.likelihood, problem.expectation)
    return there.posterior(told)


def check_prior(prior: Any, kind: type) -> None:
    """Raise unless a prior over coefficients is one member of this family."""
    if not isinstance(prior, kind) or prior.mean.ndim != 1:
        raise InputError(
            f"the prior must be a {kind.__name__} over θ [P], without copies, got "
            f"{type(prior).__name__}"
        )


def checked_inputs(x: Any, like: Tensor, columns: int) -> Tensor:
    """Inputs ``[M, D]`` in the dtype and on the device of ``like``.

    Raises:
        DataError: not finite, or another number of columns.
    """
    x = real("x", x, like, 2)
    if x.shape[-1] != columns:
        raise DataError(f"x has {x.shape[-1]} columns; the model takes {columns}")
    return x


def checked_pair(data: Any, like: Tensor, likelihood: ScalarLikelihood) -> tuple[Tensor, Tensor]:
    """(x ``[N, D]``, y ``[N]``) in a dtype and on a device.

    Raises:
        DataError: no such pair, numbers that are not finite, targets outside the support.
        InputError: a likelihood that does not work element by element.
    """
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError("the data are a pair (x [N, D], y [N])")
    x, y = real("x", data[0], like, 2), real("y", data[1], like, 1)
    if len(x) != len(y):
        raise DataError(f"x and y must have the same length, got {len(x)} and {len(y)}")
    y = checked_targets(likelihood, y)
    check_elementwise(likelihood, y)
    return x, y


def _rows(sites: Natural, chosen: Tensor) -> Natural:
    return {name: value[chosen.to(value.device)] for name, value in sites.items()}


@dataclass(frozen=True)
class GeneralizedLinear(LatentModel):
    """p(y_i | x_iᵀθ), θ ~ N(m_0, S_0⁻¹), with a full Gaussian posterior (K&R, section 5.4).

    Attributes:
        prior: p(θ); its dtype and device are those of the computation (double is wise).
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
    likelihood: str | Likelihood | ScalarLikelihood | Callable[[Tensor, Tensor], Tensor] = (
        "bernoulli"
    )

    def __post_init__(self) -> None:
        check_prior(self.prior, FullGaussian)
        scalar_likelihood(self.likelihood)

    def _told(self, data: Any) -> tuple[FullGaussian, Features, Tensor, Tensor]:
        like = self.prior.mean

        def features(x: Tensor) -> tuple[Tensor, Tensor]:
            x = checked_inputs(x, like, len(like))
            return x, x.new_zeros(len(x))

        return (
            self.prior,
            features,
            *checked_pair(data, like, scalar_likelihood(self.likelihood)),
        )
