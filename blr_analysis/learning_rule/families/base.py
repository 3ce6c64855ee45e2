"""The base class of all exponential families, and sums of natural parameters.

    q(θ) = h(θ) exp( ⟨λ, T(θ)⟩ − A(λ) ),      μ = E_q[T(θ)] = ∇A(λ)

λ are the natural parameters, μ the expectation parameters, T the sufficient statistics, h the
base measure and A the log-partition (Khan & Rue, section 2). λ, μ and T(θ) are dictionaries of
tensors with the same keys, one for each statistic, and ⟨·, ·⟩ sums over all of their entries.

Leading dimensions of a distribution's parameters are *copies*: independent distributions side by
side, such as the factors of a mean field. Quantities that are one number for one distribution (A,
entropy, KL, log q) are one number per copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from blr_analysis.errors import InputError, told_as
from blr_analysis.learning_rule.families.domain import go_together

Natural = dict[str, Tensor]


class ExponentialFamily(ABC):
    """A distribution of an exponential family; immutable, and differentiable in its parameters.

    A family derives from this class and defines its abstract methods and :attr:`ranks`.

    Attributes:
        ranks: by the name of each statistic, how many trailing dimensions belong to one copy.

    Example:
        λ and μ determine each other, and log q(θ) is ⟨λ, T(θ)⟩ + log h(θ) − A(λ):

        >>> from blr_analysis.learning_rule.families import Gamma
        >>> q = Gamma(torch.tensor(3.0), torch.tensor(2.0))
        >>> q.with_expectation(q.expectation)
        Gamma(shape=tensor(3.0000), rate=tensor(2.0000))
        >>> theta, natural = torch.tensor(1.0), q.natural
        >>> inner = sum(natural[key] * value for key, value in q.statistics(theta).items())
        >>> inner - q.log_partition(), q.log_prob(theta)
        (tensor(-0.6137), tensor(-0.6137))
    """

    ranks: ClassVar[Mapping[str, int]]

    @property
    @abstractmethod
    def natural(self) -> Natural:
        """λ."""

    @property
    @abstractmethod
    def expectation(self) -> Natural:
        """μ = E_q[T(θ)] = ∇A(λ)."""

    def with_natural(self, natural: Mapping[str, Tensor]) -> Self:
        """The member of the family with these λ; fixed parameters, such as a precision, stay.

        Raises:
            InputError: λ is outside of the family's domain Ω.
        """
        self._check_keys(natural)
        return self._of_natural(natural)

    @abstractmethod
    def _of_natural(self, natural: Mapping[str, Tensor]) -> Self:
        """:meth:`with_natural` of parameters whose names and ranks are right."""

    def with_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        """The member with these μ: the inverse of :attr:`expectation`."""
        self._check_keys(expectation)
        return self._of_expectation(expectation)

    @abstractmethod
    def _of_expectation(self, expectation: Mapping[str, Tensor]) -> Self:
        """:meth:`with_expectation` of parameters whose names and ranks are right."""

    @abstractmethod
    def statistics(self, theta: Any) -> Natural:
        """T(θ), with the leading dimensions of θ.

        θ is a tensor, or for some families a dictionary of tensors.
        """

    @abstractmethod
    def log_partition(self) -> Tensor:
        """A(λ), one number per copy."""

    @abstractmethod
    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> Any:
        """A draw θ ~ q; with ``n``, n draws along a new leading dimension."""

    def expected_point(self) -> Any:
        """E_q[θ], in the form in which :meth:`sample` returns θ.

        Raises:
            InputError: θ has no mean.
        """
        return self.expectation["linear"]

    def log_base(self, theta: Any) -> Tensor:
        """log h(θ); 0 unless the family says otherwise."""
        return torch.zeros_like(self._inner(self.natural, self.statistics(theta)))

    def expected_log_base(self) -> Tensor:
        """E_q[log h(θ)], one number per copy."""
        return torch.zeros_like(self.log_partition())

    def base_gradient(self) -> Natural:
        """∇_μ E_q[log h(θ)]; 0 unless the family says otherwise."""
        return {name: value.new_zeros(()).expand_as(value) for name, value in self.natural.items()}

    def log_prob(self, theta: Any) -> Tensor:
        """log q(θ), in nats, one number per point and copy.

        Raises:
            InputError: the points have another shape, or a higher precision than the parameters, or
                are outside of the distribution's domain.
        """
        inner = self._inner(self.natural, self.statistics(theta))
        return inner + self.log_base(theta) - self.log_partition()

    def entropy(self) -> Tensor:
        """H(q) = A(λ) − ⟨λ, μ⟩ − E_q[log h], in nats, one number per copy."""
        inner = self._inner(self.natural, self.expectation)
        return self.log_partition() - inner - self.expected_log_base()

    def kl(self, other: Self) -> Tensor:
        """KL(q ‖ other) = A(λ') − A(λ) − ⟨λ' − λ, μ⟩, the Bregman divergence of A (K&R 21).

        In nats, one number per copy. The copies of the two are broadcast against each other.

        Raises:
            InputError: ``other`` is of another family, over points of another shape, or has other
                fixed parameters.
        """
        if type(other) is not type(self):
            raise InputError(f"the KL divergence is to another {type(self).__name__}")
        self._check_alike(other)
        return self._kl(other)

    def _check_alike(self, other: Any) -> None:
        """Raise :class:`InputError` unless both are over points of the same shape."""
        for key, rank in self.ranks.items():
            left = self.natural[key].shape
            right = other.natural[key].shape
            if not go_together(left, right, rank):
                raise InputError(
                    "the KL divergence needs parameters of one shape, got "
                    f"{tuple(left)} and {tuple(right)} for {key}"
                )

    def _kl(self, other: Any) -> Tensor:
        """:meth:`kl` of two members of one family; overridden where large terms would cancel."""
        gap = subtract(other.natural, self.natural)
        inner = self._inner(gap, self.expectation)
        return other.log_partition() - self.log_partition() - inner

    def _inner(self, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
        """⟨left, right⟩, one number per copy; leading dimensions are broadcast."""
        products = []
        for name, rank in self.ranks.items():
            product = left[name] * right[name]
            if rank > 0:
                product = product.flatten(product.ndim - rank).sum(-1)
            products.append(product)
        return sum(products[1:], start=products[0])

    def _check_keys(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise :class:`InputError` unless each statistic has one tensor, of its rank or more."""
        self._check_point(parameters, tuple(self.ranks))
        for key, rank in self.ranks.items():
            if getattr(parameters[key], "ndim", -1) < rank:
                raise InputError(f"{key} must be a tensor of {rank} dimensions or more")
        sizes = {parameters[key].shape[-1] for key, rank in self.ranks.items() if rank}
        if len(sizes) > 1:
            shapes = {key: tuple(value.shape) for key, value in parameters.items()}
            raise InputError(f"the last dimensions must agree, got {shapes}")

    def _check_point(self, point: Mapping[str, Any], names: Sequence[str]) -> None:
        """Raise :class:`InputError` unless ``point`` is a dictionary with exactly these keys."""
        if not isinstance(point, Mapping) or set(point) != set(names):
            raise InputError(f"{type(self).__name__} takes a dictionary of {', '.join(names)}")


def add(*terms: Mapping[str, Tensor]) -> Natural:
    """λ_1 + λ_2 + …, statistic by statistic.

    Raises:
        InputError: the terms have different statistics, or shapes that do not go together.

    >>> add({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 2.0])})
    {'a': tensor([2., 3.])}
    """
    first, *rest = terms
    if any(set(term) != set(first) for term in rest):
        raise InputError("natural parameters of different families")
    sums = dict(first)
    with told_as(InputError, "natural parameters do not go together"):
        for term in rest:
            sums = {name: total + term[name] for name, total in sums.items()}
    return sums


def scale(term: Mapping[str, Tensor], factor: float | Tensor) -> Natural:
    """c · λ.

    >>> scale({"a": torch.ones(2)}, 3.0)
    {'a': tensor([3., 3.])}
    """
    return {name: factor * value for name, value in term.items()}


def subtract(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Natural:
    """λ − λ'.

    Raises:
        InputError: the two have different statistics, or shapes that do not go together.

    >>> subtract({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 2.0])})
    {'a': tensor([ 0., -1.])}
    """
    return add(left, scale(right, -1.0))
