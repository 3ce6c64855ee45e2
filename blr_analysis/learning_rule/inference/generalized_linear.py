"""Regression with a link: Bayesian logistic, probit and Poisson regression, f_i = x_iᵀθ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blr_analysis.learning_rule.families.gaussian import FullGaussian
from blr_analysis.learning_rule.inference.latent_fit import (
    Features,
    LatentModel,
    check_prior,
    checked_inputs,
    checked_pair,
)
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    ScalarLikelihood,
    scalar_likelihood,
)
from blr_analysis.likelihoods import Likelihood


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
