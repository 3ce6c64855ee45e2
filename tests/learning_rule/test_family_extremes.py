"""Families at the edges of their domains, against fifty digits of mpmath; and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families import (
    Beta,
    DiagonalGaussian,
    Dirichlet,
    FullGaussian,
    Gamma,
    GaussianMixture,
    NormalWishart,
    Wishart,
    add,
    special,
)
from blr_analysis.learning_rule.families import (
    CategoricalFamily as Categorical,
)

EPS = 2.0**-52
EXTREMES = [1e-3, 0.02, 0.7, 1.0, 3.3, 19.999, 20.0, 1e3, 1e6]


@pytest.fixture(autouse=True)
def _digits():
    with mpmath.workdps(50):
        yield


def t(*values: float) -> Tensor:
    actual = torch.tensor(values, dtype=torch.float64)
    return actual[0] if len(values) == 1 else actual


def close(actual: Tensor, expected: Any, relative: float = 16 * EPS, absolute: float = 0) -> bool:
    return abs(mpmath.mpf(actual.item()) - expected) <= relative * abs(expected) + absolute


class TestSpecialFunctions:
    @pytest.mark.parametrize("x", EXTREMES)
    def test_values(self, x: float) -> None:
        a = mpmath.mpf(x)
        slack = 64 * EPS if x < 20 else 0  # a few units in the last place of terms near 1
        assert close(
            special.log_minus_digamma(t(x)), mpmath.log(a) - mpmath.digamma(a), absolute=slack
        )
        assert close(special.trigamma_excess(t(x)), mpmath.psi(1, a) - 1 / a, absolute=slack)
        assert close(
            special.inverse_digamma(torch.digamma(t(x))), a, 64 * EPS * max(1, math.log(x))
        )

    @pytest.mark.parametrize("size", [1, 2, 5])
    @pytest.mark.parametrize("above", EXTREMES)
    def test_excess_logarithm_and_its_inverse(self, size: int, above: float) -> None:
        x = t(above + 0.5 * (size - 1))
        a = mpmath.mpf(x.item())
        expected = size * mpmath.log(a) - sum(
            mpmath.digamma(a - mpmath.mpf(j) / 2) for j in range(size)
        )
        actual = special.excess_logarithm(x, size)
        rounding = above / x.item()  # what x's own rounding does to its distance from the edge
        assert close(actual, expected, 64 * EPS / rounding)
        again = special.invert_excess_logarithm(actual, size)
        assert again.item() == pytest.approx(x.item(), rel=256 * EPS)

    def test_derivatives_of_the_inverse(self) -> None:
        at = t(1e-2, 0.3, 2.0, 40.0).requires_grad_()
        for size in (1, 3):
            assert torch.autograd.gradcheck(
                lambda e, s=size: special.invert_excess_logarithm(e, s), at
            )
            assert torch.autograd.gradgradcheck(
                lambda e, s=size: special.invert_excess_logarithm(e, s), at, atol=1e-4, rtol=1e-5
            )


class TestConcentrations:
    @pytest.mark.parametrize("a", EXTREMES)
    @pytest.mark.parametrize("b", [1e-8, 1.0, 1e8])
    def test_gamma_maps(self, a: float, b: float) -> None:
        q = Gamma(t(a), t(b))
        again = q.with_expectation(q.expectation)
        # relative error of a ≈ that of log a/b − E[log θ], which is 1/(2a) for large a
        slack = 64 * EPS * max(1.0, a) * (1 + abs(math.log(b)))
        assert again.shape.item() == pytest.approx(a, rel=slack)
        for key, value in q.expectation.items():
            assert again.expectation[key].item() == pytest.approx(
                value.item(), rel=32 * EPS, abs=1e-13
            )

    @pytest.mark.parametrize(
        "alpha",
        [
            (1e-3, 1e-3),
            (1e-3,) * 50,
            (1e6, 1e6),
            (1e6, 1e-3),
            (1e-3, 1.0, 1e3, 1e6),
            (1e3,) * 5,
            (0.1, 5e5, 3.0),
            (1.0,) * 1000,
        ],
    )
    def test_dirichlet_maps(self, alpha: tuple[float, ...]) -> None:
        q = Dirichlet(t(*alpha))
        again = q.with_expectation(q.expectation)
        torch.testing.assert_close(again.expectation, q.expectation, rtol=64 * EPS, atol=64 * EPS)
        # F⁻¹ times the rounding of the ψ that make up μ
        inverse = [1 / mpmath.psi(1, mpmath.mpf(x)) for x in alpha]
        total = mpmath.fsum(mpmath.mpf(x) for x in alpha)
        shared = 1 + sum(inverse) / (1 / mpmath.psi(1, total) - sum(inverse))
        rounding = EPS * max(abs(mpmath.digamma(x)) for x in (*alpha, total))
        for actual, expected, own_map in zip(again.concentration, alpha, inverse, strict=True):
            assert close(actual, mpmath.mpf(expected), 8 * EPS, 2 * own_map * shared * rounding)

    def test_derivatives_of_the_inverse(self) -> None:
        at = Dirichlet(t(0.3, 2.0, 7.0)).expectation["log"].requires_grad_()

        def inverse(logs: Tensor) -> Tensor:
            return Dirichlet(t(1.0, 1.0, 1.0)).with_expectation({"log": logs}).concentration

        assert torch.autograd.gradcheck(inverse, at)
        assert torch.autograd.gradgradcheck(inverse, at, atol=1e-4, rtol=1e-5)

    @pytest.mark.parametrize(
        "make",
        [lambda a: Gamma(a, a), lambda a: Beta(a, a), lambda a: Dirichlet(torch.stack([a, a], -1))],
    )
    def test_draws_stay_inside(self, make: Callable[[Tensor], Gamma]) -> None:
        for a in (1e-3, 1e6):
            q = make(t(a))
            draws = q.sample(1000, generator=torch.Generator().manual_seed(0))
            assert bool(torch.isfinite(q.log_prob(draws)).all())

    def test_wishart_with_few_or_many_degrees_of_freedom(self) -> None:
        rate = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
        for dof in (1.001, 1.5, 3.0, 1e6):
            q = Wishart(t(dof), rate)
            again = q.with_expectation(q.expectation)
            assert again.dof.item() == pytest.approx(dof, rel=1e-14 * max(dof, 10))
            n = mpmath.mpf(dof)
            d = mpmath.mpf(1.75)
            digamma = mpmath.digamma(n / 2) + mpmath.digamma((n - 1) / 2)
            log_gamma = (
                mpmath.loggamma(n / 2) + mpmath.loggamma((n - 1) / 2) + mpmath.log(mpmath.pi) / 2
            )
            expected = -1.5 * mpmath.log(d) + 3 * mpmath.log(2) + log_gamma
            expected += -(n - 3) / 2 * digamma + n
            assert close(q.entropy(), expected, 1e-12, 4 * EPS * dof * math.log(dof + 2))


class TestGaussians:
    def test_far_from_the_origin_nothing_cancels(self) -> None:
        m = 1e8
        s = 1e8
        expected = 0.5 * math.log(s / (2 * math.pi)) - 0.5
        at = t(m)[None] + 1e-4
        exact = 0.5 * math.log(s / (2 * math.pi)) - 0.5 * s * (at.item() - m) ** 2
        for q in (
            DiagonalGaussian(t(m)[None], t(s)[None]),
            FullGaussian(t(m)[None], t(s)[None, None]),
        ):
            assert q.log_prob(at).item() == pytest.approx(exact, rel=1e-14)
            assert q.entropy().item() == pytest.approx(-expected, rel=1e-14)
            moved = type(q)(q.mean + 1, q.precision)
            assert q.kl(moved).item() == pytest.approx(0.5 * s, rel=1e-14)


def v(*values: float) -> Tensor:
    """A vector, also of one number."""
    return torch.tensor(values, dtype=torch.float64)


PAIR = DiagonalGaussian(torch.zeros(2, 1).double(), torch.ones(2, 1).double())
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Categorical(torch.zeros(2, 0)), "two classes"),
    (lambda: Categorical(t(0.0, 1.0)).with_expectation({"indicator": t(0.5, 0.5)}), "sum below 1"),
    (lambda: Categorical(t(0.0, 1.0)).log_prob(torch.tensor(3)), "from 0 to 2"),
    (lambda: Dirichlet(t(1.0, 0.0)), "above 0"),
    (lambda: Dirichlet(t(1.0)[None]), "two classes"),
    (lambda: Dirichlet(t(1.0, 1.0)).with_natural({"log": t(-1.0, 0.0)}), "above 0"),
    (lambda: Dirichlet(t(1.0, 1.0)).with_expectation({"log": t(-0.1, -0.2)}), "less than 1"),
    (lambda: Dirichlet(t(1.0, 1.0)).log_prob(t(0.5, 0.6)), "sum to 1"),
    (lambda: Beta(t(1.0), t(1.0, 1.0)), "agree in shape"),
    (lambda: Beta(t(1.0), t(1.0)).log_prob(t(1.0)), "strictly between 0 and 1"),
    (lambda: Gamma(t(1.0), t(1.0)).with_natural({"log": t(0.0), "linear": t(0.0)}), "rate"),
    (lambda: Gamma(t(1.0), t(1.0)).with_expectation({"log": t(0.1), "linear": t(1.0)}), "no Gamma"),
    (
        lambda: Gamma(t(1.0), t(1.0)).with_expectation({"log": t(-1.0), "linear": t(-1.0)}),
        "no Gamma",
    ),
    (lambda: Gamma(t(1.0), t(1.0)).log_prob(t(-1.0)), "points of a Gamma"),
    (lambda: Wishart(t(1.0), torch.eye(2, dtype=torch.float64)), "above 1"),
    (lambda: Wishart(t(3.0), torch.ones(2, 2, dtype=torch.float64)), "positive definite"),
    (lambda: Wishart(t(3.0), torch.eye(2, dtype=torch.float64).triu() + t(0.0, 1.0)), "symmetric"),
    (lambda: Wishart(t(3.0), torch.ones(2, 3, dtype=torch.float64)), "square"),
    (lambda: Wishart(t(3.0, 3.0), torch.eye(2, dtype=torch.float64)), "copies"),
    (
        lambda: NormalWishart(t(0.0, 0.0, 0.0), t(1.0), t(3.0), torch.eye(2, dtype=torch.float64)),
        "does not go with",
    ),
    (
        lambda: NormalWishart(t(0.0, 0.0), t(1.0, 1.0), t(3.0), torch.eye(2, dtype=torch.float64)),
        "kappa and dof",
    ),
    (lambda: DiagonalGaussian(t(0.0, math.nan), t(1.0, 1.0)), "mean must be finite"),
    (
        lambda: DiagonalGaussian(t(0.0, 1.0), t(1.0, 1.0)).with_expectation(
            {"linear": t(0.0, 1.0), "square": t(1.0, 1.0)}
        ),
        "above E",
    ),
    (
        lambda: FullGaussian(t(0.0, 1.0), torch.eye(2, dtype=torch.float64)).with_expectation(
            {"linear": t(0.0, 1.0), "square": torch.zeros(2, 2, dtype=torch.float64)}
        ),
        "no FullGaussian",
    ),
    # dtypes that do not go together, numbers where tensors are expected, half precision
    (lambda: DiagonalGaussian(v(0.0), v(1.0).float()), "mean and precision must agree in dtype"),
    (lambda: FullGaussian(v(0.0), torch.eye(1)), "mean and precision must agree in dtype"),
    (lambda: Gamma(v(1.0), v(1.0).float()), "shape and rate must agree in dtype"),
    (lambda: Wishart(torch.tensor(3.0), torch.eye(2).double()), "dof and rate must agree in dtype"),
    (
        lambda: NormalWishart(v(0.0, 0.0), torch.tensor(1.0), torch.tensor(3.0), torch.eye(2)),
        "mean and kappa and dof must agree in dtype",
    ),
    (
        lambda: GaussianMixture(torch.tensor([1.0]), DiagonalGaussian(v(0.0)[None], v(1.0)[None])),
        "weights and components must agree in dtype",
    ),
    (lambda: DiagonalGaussian(v(0.0), 1.0), "precision must be a tensor.*got float"),
    (
        lambda: DiagonalGaussian(v(0.0), torch.ones(1, dtype=torch.long)),
        "precision must be a tensor of floating-point numbers, got torch.int64",
    ),
    (lambda: DiagonalGaussian(v(0.0), v(math.nan)), "precision must be finite"),
    (lambda: FullGaussian(v(0.0), None), "precision must be a tensor.*got NoneType"),
    (lambda: FullGaussian(v(0.0).half(), torch.eye(1).half()), "single or double precision"),
    (
        lambda: Gamma(torch.tensor(1.0).bfloat16(), torch.tensor(1.0).bfloat16()),
        "shape must be in single or double precision, got torch.bfloat16",
    ),
    (
        lambda: FullGaussian(v(0.0, 0.0), torch.tensor([[1.0, 0.5], [0.0, 1.0]]).double()),
        "precision must be symmetric",
    ),
    (lambda: Gamma(v(1.0), v(1.0)).sample(generator=3), "generator must be a torch.Generator"),
    # divergences between distributions over different points
    (
        lambda: DiagonalGaussian(v(0.0, 0.0), v(1.0, 1.0)).kl(DiagonalGaussian(v(0.0), v(1.0))),
        r"one shape, got \(2,\) and \(1,\)",
    ),
    (lambda: Dirichlet(v(1.0, 1.0)).kl(Dirichlet(v(1.0, 1.0, 1.0))), "one shape"),
    (
        lambda: Wishart(t(3.0), torch.eye(2).double()).kl(Wishart(t(3.0), torch.eye(1).double())),
        "one shape",
    ),
    (
        lambda: Gamma(v(1.0, 1.0), v(1.0, 1.0)).kl(Gamma(v(1.0, 1.0, 1.0), v(1.0, 1.0, 1.0))),
        "one shape",
    ),
    # points of another shape
    (lambda: DiagonalGaussian(v(0.0, 0.0), v(1.0, 1.0)).log_prob(v(0.0)), r"tensor \[..., 2\]"),
    (
        lambda: FullGaussian(v(0.0, 0.0), torch.eye(2).double()).log_prob(v(0.0, 0.0, 0.0)),
        r"tensor \[..., 2\]",
    ),
    (lambda: FullGaussian(v(0.0).float(), torch.eye(1)).log_prob(v(0.0)), "convert one"),
    (lambda: DiagonalGaussian(v(0.0), v(1.0)).log_prob(None), "real numbers, got NoneType"),
    (lambda: DiagonalGaussian(v(0.0), v(1.0)).log_prob(0.5), "real numbers, got float"),
    (lambda: Categorical(v(0.0)).log_prob(None), "classes must be a tensor"),
    (lambda: Beta(v(1.0), v(1.0)).log_prob(0.5), "real numbers, got float"),
    (lambda: Gamma(v(1.0, 1.0), v(1.0, 1.0)).log_prob(v(1.0, 1.0, 1.0)), r"got \(3,\)"),
    (lambda: Dirichlet(v(1.0, 1.0)).log_prob(v(0.2, 0.3, 0.5)), r"tensor \[..., 2\]"),
    (
        lambda: GaussianMixture(
            v(1.0), DiagonalGaussian(v(0.0, 0.0)[None], v(1.0, 1.0)[None])
        ).marginal.log_prob(v(0.0)),
        r"tensor \[..., 2\]",
    ),
    # parameters and derivatives of another shape
    (
        lambda: DiagonalGaussian(v(0.0), v(1.0)).with_natural({"linear": 1.0, "square": 1.0}),
        "linear must be a tensor of 1 dimensions",
    ),
    (
        lambda: FullGaussian(v(0.0), torch.eye(1).double()).with_natural(
            {"linear": v(0.0), "square": v(-0.5)}
        ),
        "square must be a tensor of 2",
    ),
    (
        lambda: FullGaussian(v(0.0), torch.eye(1).double()).with_natural(
            {"linear": v(0.0, 1.0), "square": -torch.eye(1).double()}
        ),
        "last dimensions must agree",
    ),
    (
        lambda: DiagonalGaussian(v(0.0, 0.0), v(1.0, 1.0)).pull_back(
            v(0.0, 0.0), torch.eye(2).double()
        ),
        "diagonal of the Hessian must be",
    ),
    (
        lambda: FullGaussian(v(0.0, 0.0), torch.eye(2).double()).pull_back(
            v(0.0, 0.0), v(1.0, 1.0)
        ),
        r"the Hessian must be \(2, 2\)",
    ),
    (
        lambda: GaussianMixture(v(1.0), DiagonalGaussian(v(0.0)[None], v(1.0)[None])).log_prob(
            {"theta": torch.zeros(7, 1), "component": torch.zeros(3, dtype=torch.long)}
        ),
        "a component for each point",
    ),
    (lambda: add({"a": v(0.0, 0.0)}, {"a": v(0.0, 0.0, 0.0)}), "do not go together"),
    # mixtures
    (lambda: GaussianMixture(t(0.5, 0.6), PAIR), "sum to 1"),
    (lambda: GaussianMixture(t(0.0, 1.0), PAIR), "weights must lie above 0"),
    (lambda: GaussianMixture(t(0.2, 0.3, 0.5), PAIR), "one weight for each component"),
    (lambda: GaussianMixture(t(0.5, 0.5), Gamma(t(1.0, 1.0), t(1.0, 1.0))), "FullGaussian"),
    (
        lambda: GaussianMixture(t(0.5, 0.5), PAIR).log_prob(
            {"theta": v(0.0), "component": torch.tensor(2)}
        ),
        "from 0 to 1",
    ),
    (
        lambda: GaussianMixture(t(0.5, 0.5), PAIR).kl(GaussianMixture(t(0.4, 0.6), PAIR)),
        "same weights",
    ),
    (lambda: GaussianMixture(t(0.5, 0.5), PAIR).expected_point(), "numbers have no mean"),
    (lambda: Categorical(t(0.0, 1.0)).expected_point(), "has no mean"),
]


@pytest.mark.parametrize(("attempt", "words"), REFUSED)
def test_what_is_outside_of_the_domain_is_named(attempt: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        attempt()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_elementwise_families_work_in_half_precision(dtype: torch.dtype) -> None:
    zero = torch.zeros(2, dtype=dtype)
    ones = torch.ones(2, dtype=dtype)
    for q in (DiagonalGaussian(zero, ones), Categorical(ones)):
        again = q.with_expectation(q.with_natural(q.natural).expectation)
        for key, value in q.natural.items():
            torch.testing.assert_close(again.natural[key], value, rtol=0.05, atol=0.05)
        assert q.log_prob(q.sample(3)).dtype == dtype


def test_double_natural_parameters_make_a_double_member() -> None:
    parts = DiagonalGaussian(torch.zeros(2, 1), torch.ones(2, 1))
    for q in (parts, GaussianMixture(torch.tensor([0.5, 0.5]), parts)):
        double = q.with_natural({key: value.double() for key, value in q.natural.items()})
        assert double.log_partition().dtype == torch.float64
