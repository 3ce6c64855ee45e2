"""Classes and signs, and their probabilities: Beta and Dirichlet distributions, of concentrations
from 1e-3 to 1e6 and beyond; Bernoulli on ±1 and categorical ones, both minimal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural
from blr_analysis.learning_rule.families.domain import (
    above,
    expectation_inside,
    finite,
    points,
    same_shape,
)
from blr_analysis.learning_rule.families.drawing import log_gamma_draw, many, uniform
from blr_analysis.learning_rule.families.special import (
    inverse_digamma,
    trigamma,
)


@dataclass(frozen=True, eq=False)
class Dirichlet(ExponentialFamily):
    """Dirichlet(α) on probabilities θ of K classes: λ = α − 1, T(θ) = log θ, h = 1.

    μ_k = ψ(α_k) − ψ(Σ α). Counting an example of class k adds 1 to λ_k.

    Attributes:
        concentration: α > 0, ``[..., K]``.

    Raises:
        InputError: a concentration that is not positive and finite, or a single class.

    Example:
        >>> q = Dirichlet(torch.tensor([1.0, 2.0, 3.0]))
        >>> q.natural["log"], q.mean
        (tensor([0., 1., 2.]), tensor([0.1667, 0.3333, 0.5000]))
    """

    concentration: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"log": 1}

    def __post_init__(self) -> None:
        above("concentration", self.concentration, rank=1)
        if self.concentration.shape[-1] < 2:
            raise InputError("a Dirichlet distribution needs two classes or more, got one")

    @property
    def mean(self) -> Tensor:
        """E_q[θ] = α / Σ α."""
        return self.concentration / self.concentration.sum(-1, keepdim=True)

    def expected_point(self) -> Tensor:
        return self.mean

    @property
    def natural(self) -> Natural:
        return {"log": self.concentration - 1}

    @property
    def expectation(self) -> Natural:
        total = self.concentration.sum(-1, keepdim=True)
        return {"log": torch.digamma(self.concentration) - torch.digamma(total)}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        return type(self)(natural["log"] + 1)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        return type(self)(_concentration(expectation["log"]))

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.concentration, 1)
        finite("points of a Dirichlet distribution", theta)
        sums_to_one = (theta.sum(-1) - 1).abs() <= torch.finfo(theta.dtype).eps ** 0.5
        if not bool(sums_to_one.all()) or not bool((theta > 0).all()):
            raise InputError("points of a Dirichlet distribution are above 0 and sum to 1")
        return {"log": theta.log()}

    def log_partition(self) -> Tensor:
        return torch.lgamma(self.concentration).sum(-1) - torch.lgamma(self.concentration.sum(-1))

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Points of the simplex, ``[n, ..., K]``; none of their entries is 0."""
        logs = log_gamma_draw(many(self.concentration, n), generator)
        return torch.softmax(logs, -1).clamp(min=torch.finfo(logs.dtype).tiny)


@dataclass(frozen=True, eq=False)
class Beta(ExponentialFamily):
    """Beta(a, b) on (0, 1): λ = (a − 1, b − 1), T(θ) = (log θ, log(1 − θ)), h = 1.

    Attributes:
        a: > 0, ``[...]``.
        b: > 0, ``[...]``.

    Raises:
        InputError: a or b that is not positive and finite, or of different shapes.

    Example:
        A success (under a uniform prior) adds 1 to the first of λ.

        >>> q = Beta(torch.tensor(1.0), torch.tensor(1.0))
        >>> site = {"log": torch.tensor(1.0), "log_complement": torch.tensor(0.0)}
        >>> from blr_analysis.learning_rule.families.base import add
        >>> q.with_natural(add(q.natural, site)).mean
        tensor(0.6667)
    """

    a: Tensor
    b: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"log": 0, "log_complement": 0}

    def __post_init__(self) -> None:
        above("a", self.a)
        above("b", self.b)
        same_shape(a=self.a, b=self.b)

    @property
    def _dirichlet(self) -> Dirichlet:
        """The distribution of (θ, 1 − θ)."""
        return Dirichlet(torch.stack([self.a, self.b], -1))

    @property
    def mean(self) -> Tensor:
        """E_q[θ] = a / (a + b)."""
        return self.a / (self.a + self.b)

    def expected_point(self) -> Tensor:
        return self.mean

    @property
    def natural(self) -> Natural:
        return {"log": self.a - 1, "log_complement": self.b - 1}

    @property
    def expectation(self) -> Natural:
        up, down = self._dirichlet.expectation["log"].unbind(-1)
        return {"log": up, "log_complement": down}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        return type(self)(natural["log"] + 1, natural["log_complement"] + 1)

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        same_shape(**expectation)
        logs = torch.stack([expectation["log"], expectation["log_complement"]], -1)
        return type(self)(*_concentration(logs).unbind(-1))

    def statistics(self, theta: Tensor) -> Natural:
        points(theta, self.a, 0)
        finite("points of a Beta distribution", theta)
        if not bool(((theta > 0) & (theta < 1)).all()):
            raise InputError("points of a Beta distribution lie strictly between 0 and 1")
        return {"log": theta.log(), "log_complement": torch.log1p(-theta)}

    def log_partition(self) -> Tensor:
        return self._dirichlet.log_partition()

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Numbers strictly between 0 and 1, ``[n, ...]``."""
        up, down = (log_gamma_draw(many(x, n), generator) for x in (self.a, self.b))
        limits = torch.finfo(up.dtype)
        return torch.sigmoid(up - down).clamp(min=limits.tiny, max=1 - limits.eps / 2)


def _concentration(logs: Tensor) -> Tensor:
    """α with ψ(α_k) − ψ(Σ α) = ``logs`` ``[..., K]``, differentiable.

    Given the sum S, α_k = ψ⁻¹(logs_k + ψ(S)); Newton's method finds 1/S where these add up to S,
    from the left, where the function is concave. Two steps in all of α are recorded: derivatives
    are right to third order.
    """
    finite("expectation parameters", logs, rank=1)
    fixed = logs.detach()
    slack = -torch.expm1(torch.logsumexp(fixed, -1))
    expectation_inside("Dirichlet", slack > 0, "the exponentials of E[log θ] sum to less than 1")
    with torch.no_grad():
        inverse_sum = _inverse_sum(fixed, slack)
        alpha = inverse_digamma(fixed + torch.digamma(1 / inverse_sum).unsqueeze(-1))
    for _ in range(2):
        alpha = alpha - _newton_step(alpha, logs)
    return alpha


def _inverse_sum(logs: Tensor, slack: Tensor) -> Tensor:
    """1/S with Σ_k ψ⁻¹(logs_k + ψ(S)) = S; ``slack`` is 1 − Σ_k exp(logs_k)."""
    tolerance = 1e-14
    u = 2 * slack / (logs.shape[-1] - 1 + slack)
    for _ in range(100):
        parts = inverse_digamma(logs + torch.digamma(1 / u).unsqueeze(-1))
        slope = (1 / trigamma(parts)).sum(-1) * trigamma(1 / u)
        total = parts.sum(-1)
        before = u
        u = torch.maximum(u - (total * u - 1) / (total - slope / u), 0.1 * u)
        if bool(((u - before).abs() <= tolerance * u).all()):
            break
    return u


def _newton_step(alpha: Tensor, logs: Tensor) -> Tensor:
    """F⁻¹ (∇A(λ) − μ): F is a diagonal and a constant (Sherman & Morrison)."""
    total = alpha.sum(-1, keepdim=True)
    diagonal = trigamma(alpha)
    residual = torch.digamma(alpha) - torch.digamma(total) - logs
    shared = (residual / diagonal).sum(-1, keepdim=True)
    constant = 1 / trigamma(total) - (1 / diagonal).sum(-1, keepdim=True)
    return (residual + shared / constant) / diagonal


@dataclass(frozen=True, eq=False)
class CategoricalFamily(ExponentialFamily):
    """One of K classes: λ_k = log(p_k / p_K), μ_k = p_k, for k = 1 … K − 1.

    The minimal form, the last class being the one to compare with, so that λ and μ determine each
    other; :meth:`from_logits` takes K unnormalised log-probabilities, and :attr:`log_probs` has
    all K. θ is the index of a class, T(θ) the indicators of the first K − 1.

    Attributes:
        log_odds: λ ``[..., K − 1]``.

    Raises:
        InputError: λ is not finite, or there are no two classes.

    Example:
        >>> q = CategoricalFamily.from_logits(torch.tensor([0.2, 0.3, 0.5]).log())
        >>> q.expectation["indicator"], q.probs
        (tensor([0.2000, 0.3000]), tensor([0.2000, 0.3000, 0.5000]))
    """

    log_odds: Tensor
    ranks: ClassVar[Mapping[str, int]] = {"indicator": 1}

    def __post_init__(self) -> None:
        finite("log_odds", self.log_odds, rank=1, half=True)
        if self.log_odds.shape[-1] < 1:
            raise InputError("a categorical distribution needs two classes or more, got one")

    @classmethod
    def from_logits(cls, logits: Tensor) -> Self:
        """From log p up to a constant, ``[..., K]``."""
        finite("logits", logits, rank=1, half=True)
        return cls(logits[..., :-1] - logits[..., -1:])

    @property
    def log_probs(self) -> Tensor:
        """log p of all K classes, ``[..., K]``."""
        full = torch.cat([self.log_odds, torch.zeros_like(self.log_odds[..., :1])], -1)
        return torch.log_softmax(full, -1)

    @property
    def probs(self) -> Tensor:
        """p of all K classes, ``[..., K]``."""
        return self.log_probs.exp()

    @property
    def natural(self) -> Natural:
        return {"indicator": self.log_odds}

    @property
    def expectation(self) -> Natural:
        return {"indicator": self.probs[..., :-1]}

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        return type(self)(natural["indicator"])

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        probs = expectation["indicator"]
        last = 1 - probs.sum(-1, keepdim=True)
        inside = (probs > 0).all(-1) & (last > 0).squeeze(-1)
        expectation_inside("Categorical", inside, "they are above 0, and their sum below 1")
        return type(self)(probs.log() - last.log())

    def statistics(self, theta: Tensor) -> Natural:
        classes = self.log_odds.shape[-1] + 1
        points(theta, self.log_odds[..., 0], 0, "classes")
        is_inside = (theta >= 0) & (theta < classes)
        if theta.is_floating_point() or not bool(is_inside.all()):
            raise InputError(f"classes must be integers from 0 to {classes - 1}")
        return {"indicator": one_hot(theta.long(), classes)[..., :-1].to(self.log_odds.dtype)}

    def log_partition(self) -> Tensor:
        return -self.log_probs[..., -1]

    def entropy(self) -> Tensor:
        return -(self.probs * self.log_probs).sum(-1)

    def _kl(self, other: Self) -> Tensor:
        return (self.probs * (self.log_probs - other.log_probs)).sum(-1)

    def expected_point(self) -> Tensor:
        raise InputError("the mean of a class's number is no class: take .expectation")

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Indices of classes ``[n, ...]``, by the largest of Gumbel-perturbed log-probabilities."""
        logits = many(self.log_probs.detach(), n)
        gumbel = -(-uniform(logits, generator).log()).log()
        return (logits + gumbel).argmax(-1)
