"""Every family: one contract, and densities, entropies and divergences of others.

A new family is one line in FAMILIES: how to make a member at random and, where there is one, its
twin of ``torch.distributions``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributions as td

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families import (
    BernoulliFamily,
    Beta,
    DiagonalGaussian,
    Dirichlet,
    ExponentialFamily,
    FixedFullGaussian,
    FixedGaussian,
    FullGaussian,
    Gamma,
    GaussianMixture,
    Natural,
    NormalWishart,
    Wishart,
)
from blr_analysis.learning_rule.families import (
    CategoricalFamily as Categorical,
)


class Parameters:
    """Random parameters, float64, with given copies."""

    def __init__(self, seed: int, copies: tuple[int, ...] = (), size: int = 3) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.copies = copies
        self.size = size

    def real(self, *event: int) -> Tensor:
        shape = (*self.copies, *event)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def positive(self, *event: int, above: float = 0.0) -> Tensor:
        return above + self.real(*event).exp()

    def matrix(self, *event: int) -> Tensor:
        root = self.real(*event, self.size, self.size)
        return root @ root.mT + torch.eye(self.size, dtype=torch.float64)

    def simplex(self, k: int) -> Tensor:
        return torch.softmax(self.real(k), -1)


@dataclass(frozen=True)
class Case:
    make: Callable[[Parameters], ExponentialFamily]
    twin: Callable[[Any], Any] | None = None
    to_twin: Callable[[Tensor], Tensor] = lambda theta: theta


def _mixture(kind: Callable[[Parameters], Any]) -> Callable[[Parameters], GaussianMixture]:
    def make(p: Parameters) -> GaussianMixture:
        weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).expand(*p.copies, 3)
        inner = Parameters(0, (*p.copies, 3), p.size)
        inner.generator = p.generator
        return GaussianMixture(weights, kind(inner))

    return make


def _diagonal(p: Parameters) -> DiagonalGaussian:
    return DiagonalGaussian(p.real(p.size), p.positive(p.size))


def _full(p: Parameters) -> FullGaussian:
    return FullGaussian(p.real(p.size), p.matrix())


def _fixed(p: Parameters) -> FixedGaussian:
    precision = torch.linspace(0.5, 2.0, p.size, dtype=torch.float64)
    return FixedGaussian(p.real(p.size), precision.expand(*p.copies, p.size))


def _fixed_full(p: Parameters) -> FixedFullGaussian:
    precision = torch.eye(p.size, dtype=torch.float64) + 0.3
    return FixedFullGaussian(p.real(p.size), precision.expand(*p.copies, p.size, p.size))


def _normal_wishart(p: Parameters) -> NormalWishart:
    return NormalWishart(p.real(p.size), p.positive(), p.positive(above=p.size + 1), p.matrix())


FAMILIES = {
    "DiagonalGaussian": Case(
        _diagonal, lambda q: _independent(td.Normal(q.mean, q.precision.rsqrt()))
    ),
    "FullGaussian": Case(
        _full, lambda q: td.MultivariateNormal(q.mean, precision_matrix=q.precision)
    ),
    "FixedGaussian": Case(_fixed, lambda q: _independent(td.Normal(q.mean, q.precision.rsqrt()))),
    "FixedFullGaussian": Case(
        _fixed_full, lambda q: td.MultivariateNormal(q.mean, precision_matrix=q.precision)
    ),
    "Bernoulli": Case(
        lambda p: BernoulliFamily(p.real(p.size)),
        lambda q: _independent(td.Bernoulli(logits=2 * q.half_logit)),
        to_twin=lambda theta: (theta + 1) / 2,
    ),
    "Categorical": Case(
        lambda p: Categorical(p.real(p.size)), lambda q: td.Categorical(logits=q.log_probs)
    ),
    "Beta": Case(lambda p: Beta(p.positive(), p.positive()), lambda q: td.Beta(q.a, q.b)),
    "Dirichlet": Case(
        lambda p: Dirichlet(p.positive(p.size + 1)), lambda q: td.Dirichlet(q.concentration)
    ),
    "Gamma": Case(lambda p: Gamma(p.positive(), p.positive()), lambda q: td.Gamma(q.shape, q.rate)),
    "Wishart": Case(
        lambda p: Wishart(p.positive(above=p.size + 1), p.matrix()),
        lambda q: td.Wishart(q.dof, precision_matrix=q.rate),
    ),
    "NormalWishart": Case(_normal_wishart),
    "GaussianMixture, full": Case(_mixture(_full)),
    "GaussianMixture, diagonal": Case(_mixture(_diagonal)),
}

every_family = pytest.mark.parametrize("name", FAMILIES)
WITH_A_TWIN = [k for k, case in FAMILIES.items() if case.twin]
NO_DIVERGENCE = ("Wishart",)  # in torch.distributions of batches
few_examples = settings(max_examples=6, deadline=None)
members = given(
    seed=st.integers(0, 10**6), copies=st.sampled_from([(), (2,), (2, 3)]), size=st.integers(1, 4)
)


def _independent(inner: td.Distribution) -> td.Distribution:
    return td.Independent(inner, 1)


def make(name: str, seed: int, copies: tuple[int, ...] = (), size: int = 3) -> Any:
    return FAMILIES[name].make(Parameters(seed, copies, size))


def leaves(parameters: Natural) -> Natural:
    """Copies that autograd differentiates by."""
    return {k: v.detach().clone().requires_grad_() for k, v in parameters.items()}


def gradients(value: Tensor, at: Natural) -> Natural:
    if not value.requires_grad:
        return {k: torch.zeros_like(v) for k, v in at.items()}
    actual = torch.autograd.grad(
        value, list(at.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(at, actual, strict=True))


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def tree(value: Any, f: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return f(value)
    return {k: tree(v, f) for k, v in value.items()}


def one_copy(value: Any, i: int) -> Any:
    """The i-th copy of a member: every tensor in it, at i."""
    if isinstance(value, Tensor):
        return value[i]
    if isinstance(value, dict):
        return {k: one_copy(v, i) for k, v in value.items()}
    return replace(value, **{f.name: one_copy(getattr(value, f.name), i) for f in fields(value)})


def is_symmetric(value: Tensor) -> bool:
    square = value.ndim > 1 and value.shape[-1] == value.shape[-2]
    return square and torch.equal(value, value.mT)


class TestContract:
    @every_family
    @few_examples
    @members
    def test_natural_and_expectation_parameters_determine_the_member(
        self, name: str, seed: int, copies: tuple[int, ...], size: int
    ) -> None:
        q = make(name, seed, copies, size)
        for again in (q.with_natural(q.natural), q.with_expectation(q.expectation)):
            assert_same(again.natural, q.natural, 1e-9)
            assert_same(again.expectation, q.expectation, 1e-9)
        assert q.log_partition().shape == q.entropy().shape == copies

    @every_family
    @few_examples
    @members
    def test_the_gradient_of_the_log_partition_is_the_expectation(
        self, name: str, seed: int, copies: tuple[int, ...], size: int
    ) -> None:
        q = make(name, seed, copies, size)
        natural = leaves(q.natural)
        actual = gradients(q.with_natural(natural).log_partition().sum(), natural)
        assert_same(actual, q.expectation)

    @every_family
    @few_examples
    @members
    def test_the_gradient_of_the_entropy(
        self, name: str, seed: int, copies: tuple[int, ...], size: int
    ) -> None:
        q = make(name, seed, copies, size)
        expectation = leaves(q.expectation)
        moved = q.with_expectation(expectation)
        actual = gradients(moved.entropy().sum(), expectation)
        base = q.base_gradient()  # of the entropy as well: H = A − ⟨λ, μ⟩ − E[log h]
        assert_same(actual, {k: -v - base[k] for k, v in q.natural.items()}, 1e-8)

    @every_family
    @few_examples
    @members
    def test_the_density_is_of_the_family(
        self, name: str, seed: int, copies: tuple[int, ...], size: int
    ) -> None:
        q = make(name, seed, copies, size)
        theta = q.sample(4, generator=torch.Generator().manual_seed(seed))
        actual = q._inner(q.natural, q.statistics(theta)) + q.log_base(theta) - q.log_partition()
        assert q.log_prob(theta).shape == (4, *copies)
        assert_same(q.log_prob(theta), actual)
        inner = q._inner(q.natural, q.expectation)
        assert_same(q.entropy(), q.log_partition() - inner - q.expected_log_base())

    @every_family
    @few_examples
    @members
    def test_kl_is_the_bregman_divergence_of_the_log_partition(
        self, name: str, seed: int, copies: tuple[int, ...], size: int
    ) -> None:
        p = Parameters(seed, copies, size)
        q = FAMILIES[name].make(p)
        second = FAMILIES[name].make(p)
        gap = {k: second.natural[k] - v for k, v in q.natural.items()}
        bregman = second.log_partition() - q.log_partition() - q._inner(gap, q.expectation)
        assert_same(q.kl(second), bregman, 1e-9)
        assert bool((q.kl(second) > 0).all())
        assert_same(q.kl(q), torch.zeros(copies, dtype=torch.float64))

    @every_family
    @pytest.mark.parametrize("size", [1, 3])
    def test_the_natural_gradient_is_the_gradient_in_the_expectation_parameters(
        self, name: str, size: int
    ) -> None:
        q = make(name, 7, (), size)
        keys = list(q.natural)
        shapes = [v.shape for v in q.natural.values()]
        counts = [v.numel() for v in q.natural.values()]

        def unflat(vector: Tensor) -> Natural:
            parts = zip(keys, vector.split(counts), shapes, strict=True)
            return {k: part.reshape(shape) for k, part, shape in parts}

        def flat(parameters: Natural) -> Tensor:
            return torch.cat([parameters[k].reshape(-1) for k in keys])

        def symmetric(vector: Tensor) -> Tensor:
            # μ stores symmetric matrices entry by entry; a member reads both off-diagonal entries
            parts = unflat(vector)
            for key, value in parts.items():
                if is_symmetric(q.natural[key]):
                    parts[key] = 0.5 * (value + value.mT)
            return flat(parts)

        weights = Parameters(8, (), 1).real(3, sum(counts))

        def loss(mu: Tensor) -> Tensor:
            return torch.sin(weights @ symmetric(mu) / 10).sum()

        lam = flat(q.natural)
        mu = flat(q.expectation)
        fisher = torch.autograd.functional.hessian(
            lambda v: q.with_natural(unflat(v)).log_partition().sum(), lam
        )
        in_natural = torch.func.grad(lambda v: loss(flat(q.with_natural(unflat(v)).expectation)))
        actual = torch.linalg.pinv(fisher, rtol=1e-12, hermitian=True) @ in_natural(lam)
        assert_same(actual, torch.func.grad(loss)(mu), 1e-7)

    @every_family
    def test_copies_are_independent(self, name: str) -> None:
        p = Parameters(3, (2, 3))
        q = FAMILIES[name].make(p)
        second = FAMILIES[name].make(p)
        theta = q.sample(5, generator=torch.Generator().manual_seed(0))
        for i in range(2):
            for j in range(3):
                alone = one_copy(one_copy(q, i), j)
                second_alone = one_copy(one_copy(second, i), j)
                points = tree(theta, lambda t, i=i, j=j: t[:, i, j])
                assert_same(alone.entropy(), q.entropy()[i, j], 1e-12)
                assert_same(alone.kl(second_alone), q.kl(second)[i, j], 1e-12)
                assert_same(alone.log_prob(points), q.log_prob(theta)[:, i, j], 1e-12)
                again = q.with_expectation(q.expectation)
                actual = alone.with_expectation(alone.expectation)
                assert_same(actual.natural, one_copy(one_copy(again.natural, i), j), 1e-9)

    @every_family
    def test_draws(self, name: str) -> None:
        """Mean statistics, entropy and divergence within five standard errors; seeded."""
        n = 20_000
        p = Parameters(5, (2,), 2)
        q = FAMILIES[name].make(p)
        second = FAMILIES[name].make(p)
        theta = q.sample(n, generator=torch.Generator().manual_seed(0))
        actual = dict(q.statistics(theta))
        expected = dict(q.expectation)
        log_q = q.log_prob(theta)
        actual |= {"entropy": -log_q, "divergence": log_q - second.log_prob(theta)}
        expected |= {"entropy": q.entropy(), "divergence": q.kl(second)}
        if isinstance(theta, Tensor) and theta.is_floating_point():
            actual["mean"] = theta
            expected["mean"] = q.expected_point()
        for key, values in actual.items():
            error = values.std(0) / math.sqrt(n)
            gap = (values.mean(0) - expected[key]).abs()
            assert (gap <= 5 * error + 1e-12).all(), key

    @every_family
    def test_draws_follow_the_generator(self, name: str) -> None:
        q = make(name, 2, (2,))
        draws = [q.sample(generator=torch.Generator().manual_seed(k)) for k in (1, 2, 2)]
        assert_same(draws[1], draws[2], 0)
        first, second, _ = map(q.log_prob, draws)
        assert first.shape == (2,)
        assert not torch.equal(first, second)
        for n in (-1, 0, 1.5):
            with pytest.raises(InputError, match="n must be"):
                q.sample(n)

    @every_family
    def test_float32_stays_float32(self, name: str) -> None:
        q = make(name, 4)
        narrow = _narrow(q)
        assert {v.dtype for v in narrow.expectation.values()} == {torch.float32}
        assert narrow.with_expectation(narrow.expectation).entropy().dtype == torch.float32
        theta = narrow.sample(3, generator=torch.Generator().manual_seed(0))
        assert narrow.log_prob(theta).dtype == torch.float32

    @every_family
    def test_wrong_parameters_are_named(self, name: str) -> None:
        q = make(name, 6, (2,))
        for kind in ("natural", "expectation"):
            right = getattr(q, kind)
            take = q.with_natural if kind == "natural" else q.with_expectation
            with pytest.raises(InputError, match="takes a dictionary of"):
                take({"other": torch.zeros(1)})
            for key in right:
                with pytest.raises(InputError):
                    take({**right, key: torch.full_like(right[key], math.nan)})
        with pytest.raises(InputError, match="takes a dictionary of"):
            q.with_expectation({})
        with pytest.raises(InputError, match="divergence"):
            q.kl(_Stranger())


class _Stranger:
    pass


def _narrow(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float()
    if isinstance(value, dict):
        return {k: _narrow(v) for k, v in value.items()}
    return replace(value, **{f.name: _narrow(getattr(value, f.name)) for f in fields(value)})


def _twin(name: str, q: Any) -> td.Distribution:
    twin = FAMILIES[name].twin
    assert twin is not None
    return twin(q)


class TestTwins:
    """Against torch.distributions."""

    @pytest.mark.parametrize("name", WITH_A_TWIN)
    @few_examples
    @members
    def test_density_and_entropy(
        self, name: str, seed: int, copies: tuple[int, ...], size: int
    ) -> None:
        case = FAMILIES[name]
        q = make(name, seed, copies, size)
        twin = _twin(name, q)
        theta = q.sample(5, generator=torch.Generator().manual_seed(seed))
        assert_same(q.log_prob(theta), twin.log_prob(case.to_twin(theta)), 1e-9)
        assert_same(q.entropy(), twin.entropy(), 1e-9)

    @pytest.mark.parametrize("name", [k for k in WITH_A_TWIN if k not in NO_DIVERGENCE])
    @few_examples
    @members
    def test_divergence(self, name: str, seed: int, copies: tuple[int, ...], size: int) -> None:
        p = Parameters(seed, copies, size)
        q = FAMILIES[name].make(p)
        second = FAMILIES[name].make(p)
        expected = td.kl_divergence(_twin(name, q), _twin(name, second))
        assert_same(q.kl(second), expected, 1e-9)

    @few_examples
    @members
    def test_divergence_of_wisharts(self, seed: int, copies: tuple[int, ...], size: int) -> None:
        """Copy by copy: with a batch, torch's own differs from what it says of each member."""
        p = Parameters(seed, copies, size)
        pairs = [FAMILIES["Wishart"].make(p) for _ in range(2)]
        dofs = [q.dof.flatten() for q in pairs]
        rates = [q.rate.reshape(-1, size, size) for q in pairs]
        alone = [
            td.kl_divergence(
                *(td.Wishart(d[i], precision_matrix=r[i]) for d, r in zip(dofs, rates, strict=True))
            )
            for i in range(len(dofs[0]))
        ]
        assert_same(pairs[0].kl(pairs[1]).flatten(), torch.stack(alone).detach(), 1e-9)
