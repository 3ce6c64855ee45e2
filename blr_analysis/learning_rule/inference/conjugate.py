"""Conjugate Bayes: one step of the rule with ρ = 1 (Khan & Rue, section 5.1).

A likelihood is conjugate to a family where it is linear in the family's statistics,

    log p(y|θ) = ⟨λ̃(y), T(θ)⟩ + c(y),

so that ∇_μ E_q[log p(y|θ)] = λ̃(y) whatever q is, and the rule lands on the posterior at once
(Eq. 54). All that is said about a model here is λ̃ and c; posterior, predictive and evidence are
the same for all of them:

    λ = λ_0 + Σ_i λ̃(y_i),      log p(y|D) = A(λ + λ̃(y)) − A(λ) + c(y).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural, add, scale
from blr_analysis.learning_rule.families.domain import STEP
from blr_analysis.learning_rule.inference.factors import Factor
from blr_analysis.learning_rule.inference.fitted import Fitted, count, rows, total
from blr_analysis.learning_rule.rule import blr_step

Q = TypeVar("Q", bound=ExponentialFamily)


@dataclass(frozen=True)
class Conjugate(Generic[Q]):
    """A conjugate model: a prior, and the factor of one example.

    The posterior of one fit may be the prior of the next: sequential and batch agree.

    Attributes:
        prior: a member of the family; its dtype and device are those of the computation.
        factor: one of :mod:`blr_analysis.learning_rule.inference.factors`.

    Raises:
        InputError: a factor that is none, a prior of another family than its, or with copies.

    Example:
        >>> from blr_analysis.learning_rule.families import FullGaussian
        >>> from blr_analysis.learning_rule.inference import linear
        >>> prior = FullGaussian(torch.zeros(1), torch.eye(1))
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0])
        >>> Conjugate(prior, linear(noise_variance=1.0)).fit((x, y)).q.mean
        tensor([1.1667])
    """

    prior: Q
    factor: Factor

    def __post_init__(self) -> None:
        if not isinstance(self.factor, Factor):
            name = getattr(self.factor, "__name__", None)
            advice = f": call it, {name}(…)" if callable(self.factor) and name else ""
            raise InputError(f"factor must be a Factor, got {type(self.factor).__name__}{advice}")
        if not isinstance(self.prior, self.factor.family):
            raise InputError(
                f"this factor is conjugate to {self.factor.family.__name__}, got the prior "
                f"{type(self.prior).__name__}"
            )
        if self.prior.log_partition().ndim:
            raise InputError("the prior must be a single distribution, without copies")

    def fit(self, data: Any) -> Fitted[Q]:
        """The posterior, by one step of the rule; its history is the log evidence.

        Args:
            data: what the factor asks for: a tensor ``[N, …]`` or a tuple of them.

        Returns:
            The posterior with sites, predictive and left-out densities, all of them exact.

        Raises:
            DataError: examples that are missing, misshapen, not finite or out of range, or so
                large that the posterior is lost in rounding.
        """
        data = self.factor.check(data, self.prior)
        n_data = count(data)

        def site_of(chosen: Tensor) -> Natural:
            return self.factor.site(rows(data, chosen))

        sites = total(site_of, torch.arange(n_data))
        double = all(value.dtype == torch.float64 for value in sites.values())
        try:
            q, before = bayes(self.prior, sites), wide(self.prior)
            if not double:  # the evidence needs more digits of a sum than q does
                sites = total(lambda i: _double(site_of(i)), torch.arange(n_data))
            after = before.with_natural(add(before.natural, sites))
        except InputError as error:
            dtype = next(iter(self.prior.natural.values())).dtype
            raise DataError(
                f"the posterior is lost in the rounding of {dtype}: scale the data ({error})"
            ) from error
        evidence = _gain(before, after, self.factor.constant(data).double().sum())
        return Fitted(
            q=q,
            history=[float(evidence.detach())],
            objective="log evidence",
            prior=self.prior,
            n_data=n_data,
            site_of=site_of,
            predictive=self.log_predictive,
            data=data,
            step=self._step,
        )

    def _step(self, q: Q, data: Any, kept: Tensor) -> Q:
        """The posterior of these examples, wherever it starts."""
        if not len(kept):
            return self.prior
        held = self.factor.check(rows(data, kept), self.prior)
        sites = total(lambda i: self.factor.site(rows(held, i)), torch.arange(len(kept)))
        return bayes(self.prior, sites)

    def log_predictive(self, q: Q, data: Any) -> Tensor:
        """log ∫ p(y|θ) q(θ) dθ = A(λ + λ̃(y)) − A(λ) + c(y), in nats, ``[M]``."""
        if not isinstance(q, self.factor.family):
            wanted = self.factor.family.__name__
            raise InputError(f"q must be a {wanted}, as fitted.q is, got {type(q).__name__}")
        data = self.factor.check(data, self.prior)
        if self.factor.predictive is not None:
            return self.factor.predictive(q, data)
        before = wide(q)
        after = before.with_natural(add(before.natural, _double(self.factor.site(data))))
        gain = _gain(before, after, self.factor.constant(data).double())
        return gain.to(next(iter(q.natural.values())).dtype)


def _double(site: Natural) -> Natural:
    return {name: value.double() for name, value in site.items()}


def _gain(before: Q, after: Q, constant: Tensor) -> Tensor:
    """A(after) − A(before) + c.

    Raises:
        DataError: its terms are so large that little but rounding is left of their sum.
    """
    terms = torch.stack(torch.broadcast_tensors(after.log_partition(), constant)).detach()
    gain = after.log_partition() - before.log_partition() + constant
    lost = torch.finfo(gain.dtype).eps * terms.abs().amax(0)
    if bool((lost > 0.1 * gain.detach().abs().clamp_min(1.0)).any()):
        raise DataError("log p(y) is lost in rounding: scale the data, or count in other units")
    return gain


def bayes(prior: Q, site: Natural) -> Q:
    """The posterior λ_0 + λ̃: the rule at ρ = 1 for the loss −log prior − ⟨λ̃, T(θ)⟩.

    Raises:
        InputError: λ_0 + λ̃ is outside of the family.

    >>> from blr_analysis.learning_rule.families import Beta
    >>> bayes(Beta(torch.tensor(1.0), torch.tensor(1.0)),
    ...       {"log": torch.tensor(2.0), "log_complement": torch.tensor(1.0)})
    Beta(a=tensor(3.), b=tensor(2.))
    """
    gradient = scale(add(prior.natural, site, prior.base_gradient()), -1.0)
    with _of_data():
        return blr_step(prior, gradient, 1.0)


def wide(q: Q) -> Q:
    """The same distribution in double precision: a small difference of log-partitions needs it."""
    with _of_data():
        return q.with_natural(_double(q.natural))


@contextmanager
def _of_data() -> Iterator[None]:
    """Where no rate could be smaller, what leaves the family comes of the data."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{str(error).removesuffix(STEP)}: centre and scale the data") from error
