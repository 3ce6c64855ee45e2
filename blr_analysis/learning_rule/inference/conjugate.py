"""Conjugate Bayes: one step of the rule with ρ = 1 (Khan & Rue, section 5.1).

A likelihood is conjugate to a family where it is linear in the family's statistics,

    log p(y|θ) = ⟨λ̃(y), T(θ)⟩ + c(y),

so that ∇_μ E_q[log p(y|θ)] = λ̃(y) whatever q is, and the rule lands on the posterior at once
(Eq. 54). All that is said about a model here is λ̃ and c; posterior, predictive and evidence are
the same for all of them:

    λ = λ_0 + Σ_i λ̃(y_i),      log p(y|D) = A(λ + λ̃(y)) − A(λ) + c(y).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural, add, scale
from blr_analysis.learning_rule.inference.factors import Factor
from blr_analysis.learning_rule.inference.fitted import Fitted, Model, count, moved, rows, total
from blr_analysis.learning_rule.rule import blr_step

Q = TypeVar("Q", bound=ExponentialFamily)


@dataclass(frozen=True)
class Conjugate(Model, Generic[Q]):
    """A conjugate model: a prior, and the factor of one example; in double precision.

    The posterior of one fit may be the prior of the next: sequential and batch agree.

    Attributes:
        prior: a member of the family.
        factor: one of :mod:`blr_analysis.learning_rule.inference.factors`.

    Raises:
        InputError: a factor that is none, a prior of another family than its, or with copies.

    Example:
        >>> from blr_analysis.learning_rule.families import FullGaussian
        >>> from blr_analysis.learning_rule.inference import linear
        >>> prior = FullGaussian(torch.zeros(1), torch.eye(1))
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0])
        >>> Conjugate(prior, linear(noise_variance=1.0)).fit((x, y)).q.mean
        tensor([1.1667], dtype=torch.float64)
    """

    prior: Q
    factor: Factor

    def __post_init__(self) -> None:
        if not isinstance(self.factor, Factor):
            raise InputError(f"factor must be one such as bernoulli(), got {self.factor!r}")
        if not isinstance(self.prior, self.factor.family) or self.prior.log_partition().ndim:
            wanted, got = self.factor.family.__name__, type(self.prior).__name__
            raise InputError(f"the prior of this factor is one {wanted} without copies, got {got}")

    def fit(self, data: Any) -> Fitted[Q]:
        """The posterior, by one step of the rule; its history is the log evidence.

        Args:
            data: what the factor asks for: a tensor ``[N, …]`` or a tuple of them.

        Returns:
            The posterior with sites, predictive and left-out densities, all of them exact.

        Raises:
            DataError: examples that are missing, misshapen, not finite or out of range.
            InputError: data so large that the posterior is lost in rounding.
        """
        data, prior = self.check(data), wide(self.prior)
        q = self.step(prior, data)
        constant = self.factor.constant(data).sum()
        evidence = float((q.log_partition() - prior.log_partition() + constant).detach())
        return Fitted(q, [evidence], "log evidence", prior=prior, model=self, data=data)

    def check(self, data: Any) -> Any:
        return self.factor.check(data, wide(self.prior))

    def sites(self, q: Q, data: Any) -> Natural:
        return self.factor.site(data)

    def step(self, q: Q, data: Any) -> Q:
        told = total(lambda chosen: self.sites(q, rows(data, chosen)), torch.arange(count(data)))
        return bayes(wide(self.prior), told)

    def log_predictive(self, q: Q, data: Any) -> Tensor:
        """A(λ + λ̃(y)) − A(λ) + c(y)."""
        if self.factor.predictive is not None:
            return self.factor.predictive(q, data)
        after = moved(q, self.sites(q, data), 1.0)
        return after.log_partition() - q.log_partition() + self.factor.constant(data)


def bayes(prior: Q, site: Natural) -> Q:
    """The posterior λ_0 + λ̃: the rule at ρ = 1 for the loss −log prior − ⟨λ̃, T(θ)⟩.

    Raises:
        InputError: λ_0 + λ̃ is outside of the family.

    >>> from blr_analysis.learning_rule.families import Beta
    >>> bayes(Beta(torch.tensor(1.0), torch.tensor(1.0)),
    ...       {"log": torch.tensor(2.0), "log_complement": torch.tensor(1.0)})
    Beta(a=tensor(3.), b=tensor(2.))
    """
    return toward(prior, prior, site, 1.0)


def toward(q: Q, prior: Q, told: Natural, rho: float) -> Q:
    """One step of the rule for the loss −log prior − ⟨λ̃, T(θ)⟩."""
    return blr_step(q, scale(add(prior.natural, told, prior.base_gradient()), -1.0), rho)


def wide(q: Q) -> Q:
    """The same distribution in double precision."""
    return q.with_natural({name: value.double() for name, value in q.natural.items()})
