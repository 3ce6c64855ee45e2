"""Products of independent members of families: mean fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from blr_analysis.checks import at_least
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import ExponentialFamily, Natural


@dataclass(frozen=True, eq=False)
class Product(ExponentialFamily):
    """q(θ) = Π_j q_j(θ_j), a mean field; θ is a dictionary with one entry for each factor.

    λ, μ and T(θ) are flat dictionaries keyed ``"factor.statistic"``, so that the rule moves all
    factors at once. Factors may have copies of different shapes: they are parts of one θ and
    their numbers are summed, but for the first ``copies`` dimensions, which all factors share.

    Attributes:
        factors: name → member of a family. A name has no dot in it.
        copies: how many leading dimensions are copies of the whole product.

    Raises:
        InputError: no factors, a name with a dot, something that is no family, or factors whose
            first ``copies`` dimensions differ; ``copies`` that is no whole number.

    Example:
        >>> from blr_analysis.learning_rule.families import DiagonalGaussian, Gamma
        >>> q = Product({"mean": DiagonalGaussian(torch.zeros(2), torch.ones(2)),
        ...              "precision": Gamma(torch.ones(3), torch.ones(3))})
        >>> sorted(q.natural), q.log_partition().shape
        (['mean.linear', 'mean.square', 'precision.linear', 'precision.log'], torch.Size([]))
        >>> q["precision"].natural["linear"]
        tensor([-1., -1., -1.])
    """

    factors: Mapping[str, ExponentialFamily]
    copies: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.factors, Mapping) or not self.factors:
            raise InputError("a product needs a dictionary of one factor or more")
        object.__setattr__(self, "factors", dict(self.factors))
        for name, factor in self.factors.items():
            if not isinstance(name, str) or "." in name:
                raise InputError(f"a factor's name must be a text without dots, got {name!r}")
            if not isinstance(factor, ExponentialFamily):
                raise InputError(f"factor {name!r} must be a member of a family, got {factor!r}")
        at_least(0, "copies", self.copies)
        shared = {tuple(_shape(factor)[: self.copies]) for factor in self.factors.values()}
        if len(shared) > 1 or len(next(iter(shared))) < self.copies:
            raise InputError(
                f"the factors must share their first {self.copies} dimensions, got "
                f"{ {name: tuple(_shape(factor)) for name, factor in self.factors.items()} }"
            )

    def __getitem__(self, name: str) -> ExponentialFamily:
        """The factor of this name."""
        if name not in self.factors:
            raise InputError(f"no factor is called {name!r}; there are {', '.join(self.factors)}")
        return self.factors[name]

    @property
    def ranks(self) -> Mapping[str, int]:  # type: ignore[override]
        return {
            f"{name}.{key}": rank + len(_shape(factor)) - self.copies
            for name, factor in self.factors.items()
            for key, rank in factor.ranks.items()
        }

    @property
    def natural(self) -> Natural:
        return _flat({name: factor.natural for name, factor in self.factors.items()})

    @property
    def expectation(self) -> Natural:
        return _flat({name: factor.expectation for name, factor in self.factors.items()})

    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        given = self._split(natural)
        return self._with({k: q.with_natural(given[k]) for k, q in self.factors.items()})

    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        given = self._split(expectation)
        return self._with({k: q.with_expectation(given[k]) for k, q in self.factors.items()})

    def with_factors(self, **factors: ExponentialFamily) -> Self:
        """The same product with some factors replaced, as coordinate-wise updates do."""
        for name in factors:
            self[name]
        return self._with({**self.factors, **factors})

    def statistics(self, theta: Mapping[str, Any]) -> Natural:
        self._check_point(theta, tuple(self.factors))
        return _flat({k: q.statistics(theta[k]) for k, q in self.factors.items()})

    def log_partition(self) -> Tensor:
        return self._total(lambda name, q: q.log_partition())

    def log_base(self, theta: Mapping[str, Any]) -> Tensor:
        self._check_point(theta, tuple(self.factors))
        return self._total(lambda name, q: q.log_base(theta[name]))

    def expected_log_base(self) -> Tensor:
        return self._total(lambda name, q: q.expected_log_base())

    def base_gradient(self) -> Natural:
        return _flat({name: factor.base_gradient() for name, factor in self.factors.items()})

    def log_prob(self, theta: Mapping[str, Any]) -> Tensor:
        self._check_point(theta, tuple(self.factors))
        return self._total(lambda name, q: q.log_prob(theta[name]))

    def entropy(self) -> Tensor:
        return self._total(lambda name, q: q.entropy())

    def _check_keys(self, given: Mapping[str, Tensor]) -> None:
        """Names only: each factor looks at its own tensors."""
        self._check_point(given, tuple(self.ranks))

    def _check_alike(self, other: Any) -> None:
        self._check_point(other.factors, tuple(self.factors))
        if other.copies != self.copies:
            raise InputError(
                f"KL needs as many copies in both, got {self.copies} and {other.copies}"
            )

    def _kl(self, other: Self) -> Tensor:
        return self._total(lambda name, q: q.kl(other.factors[name]))

    def expected_point(self) -> dict[str, Any]:
        """The mean of each factor, by its name."""
        return {k: q.expected_point() for k, q in self.factors.items()}

    def sample(
        self, n: int | None = None, *, generator: torch.Generator | None = None
    ) -> dict[str, Any]:
        """One draw for each factor, by its name."""
        return {k: q.sample(n, generator=generator) for k, q in self.factors.items()}

    def _with(self, factors: Mapping[str, ExponentialFamily]) -> Self:
        return type(self)(factors, self.copies)

    def _total(self, number: Callable[[str, ExponentialFamily], Tensor]) -> Tensor:
        """The sum over factors and over their parts of a number per copy."""
        sums = []
        for name, factor in self.factors.items():
            value, parts = number(name, factor), len(_shape(factor)) - self.copies
            sums.append(value.flatten(value.ndim - parts).sum(-1) if parts else value)
        try:
            return sum(sums[1:], start=sums[0])
        except RuntimeError as error:
            shapes = dict(zip(self.factors, (tuple(x.shape) for x in sums), strict=True))
            raise InputError(f"the factors' points do not go together: {shapes}") from error

    def _split(self, given: Mapping[str, Tensor]) -> dict[str, Natural]:
        return {
            name: {key: given[f"{name}.{key}"] for key in factor.ranks}
            for name, factor in self.factors.items()
        }


def _flat(nested: Mapping[str, Mapping[str, Tensor]]) -> Natural:
    return {f"{name}.{key}": v for name, inner in nested.items() for key, v in inner.items()}


def _shape(factor: ExponentialFamily) -> torch.Size:
    """The copies of a factor."""
    key, rank = next(iter(factor.ranks.items()))
    shape = factor.natural[key].shape
    return shape[: len(shape) - rank]
