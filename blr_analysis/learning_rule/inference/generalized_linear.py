"""Regression with a link: Bayesian logistic, probit and Poisson regression, f_i = x_iᵀθ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.cvi import Expectation
from blr_analysis.learning_rule.inference.factors import real
from blr_analysis.learning_rule.inference.latent_fit import (
    LatentFitted,
    checked_pair,
    fit_latent,
)
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    ScalarLikelihood,
    scalar_likelihood,
)
from blr_analysis.likelihoods import Likelihood


@dataclass(frozen=True)
class GeneralizedLinear:
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
        if not isinstance(self.prior, FullGaussian) or self.prior.mean.ndim != 1:
            raise InputError(
                "the prior must be a FullGaussian over θ [P], got "
                f"{type(self.prior).__name__}; FullGaussian(torch.zeros(P), torch.eye(P)) is one"
            )
        scalar_likelihood(self.likelihood)

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
            data: (x ``[N, P]``, y ``[N]``); put a column of ones for an intercept.
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
            InputError: no step improves the ELBO, settings out of range, or a likelihood or an
                expectation that does not work element by element.
        """
        likelihood = scalar_likelihood(self.likelihood)

        def features(x: Tensor) -> tuple[Tensor, Tensor]:
            x = real("x", x, self.prior.mean, 2)
            if x.shape[-1] != len(self.prior.mean):
                raise DataError(
                    f"x has {x.shape[-1]} columns for a prior over {len(self.prior.mean)} "
                    "coefficients; give as many"
                )
            return x, x.new_zeros(len(x))

        return fit_latent(
            self.prior,
            features,
            likelihood,
            checked_pair(data, self.prior.mean, likelihood),
            rho=rho,
            halving=halving,
            tol=tol,
            max_iter=max_iter,
            expectation=expectation,
            progress=progress,
        )
