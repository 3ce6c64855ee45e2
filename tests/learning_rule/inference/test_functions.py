"""The rule on a loss of few variables: Newton's method, and what an expectation changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.expectations import ESTIMATES, places
from blr_analysis.learning_rule.families import FullGaussian
from blr_analysis.learning_rule.inference.functions import VariationalNewton, minima

F64 = torch.float64


def gaussian(mean: float, precision: float) -> FullGaussian:
    return FullGaussian(torch.tensor([mean], dtype=F64), torch.tensor([[precision]], dtype=F64))


def wall(t: Tensor) -> Tensor:
    """A minimum at 0 beside a wall on its left (K&R, Fig. 1a)."""
    return torch.exp(-4 * t[0]) / 4 + t[0]


WELLS = ((-3.0, -1.0, 0.25), (-2.5, 2.0, 1.2))  # −depth, place, width


def sharp_and_flat(t: Tensor) -> Tensor:
    """A deep sharp minimum and a shallow flat one (K&R, Fig. 1b)."""
    wells = [d * torch.exp(-0.5 * ((t[0] - c) / w) ** 2) for d, c, w in WELLS]
    return sum(wells, 0.01 * t[0] ** 2)


def flat_objective(m: float, s: float) -> float:
    """E_q[ℓ]/T − H(q) of it at T = 0.4 in closed form: a Gaussian under a Gaussian."""
    v = 1 / s
    wells = [
        d * w / math.sqrt(w**2 + v) * math.exp(-0.5 * (m - c) ** 2 / (w**2 + v))
        for d, c, w in WELLS
    ]
    return (sum(wells) + 0.01 * (m**2 + v)) / 0.4 - 0.5 * math.log(2 * math.pi * math.e * v)


def test_newton_solves_ridge_regression_in_one_step() -> None:
    x = torch.randn(30, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = x @ torch.arange(4.0, dtype=F64) + 1
    start = FullGaussian(torch.randn(4, dtype=F64), torch.eye(4, dtype=F64))
    rule = VariationalNewton(look="mean", rho=1.0, max_iter=2, tol=math.inf)
    q = rule.fit(lambda t: 0.5 * ((y - x @ t) ** 2).sum() + t @ t, start, progress=False).q
    precision = x.T @ x + 2 * torch.eye(4, dtype=F64)
    torch.testing.assert_close(q.precision, precision, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.mean, torch.linalg.solve(precision, x.T @ y), rtol=1e-11, atol=0)


def test_newton_on_logistic_regression_converges_quadratically() -> None:
    features, target = load_breast_cancer(return_X_y=True)
    features = (features - features.mean(0)) / features.std(0)
    sign = torch.tensor(2.0 * target - 1)
    x = torch.tensor(features)
    fit = LogisticRegression(C=0.1, fit_intercept=False, tol=1e-12, max_iter=10_000)
    reference = torch.tensor(fit.fit(features, target).coef_[0])

    def loss(t: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-sign * (x @ t)).sum() + 5 * t @ t

    q = FullGaussian(torch.zeros(30, dtype=F64), torch.eye(30, dtype=F64))
    errors = []
    rule = VariationalNewton(look="mean", rho=1.0, max_iter=2, tol=math.inf)
    for _ in range(4):
        q = rule.fit(loss, q, progress=False).q
        errors.append(float((q.mean - reference).norm()))
    # Two steps at a time: each error is below the square of the one before.
    assert errors[1] < errors[0] ** 2
    assert errors[-1] < 1e-6


def test_the_variational_solution_leaves_the_wall() -> None:
    """E_q[ℓ] = exp(−4m + 8/s)/4 + m, so that E_q[ℓ] − H(q) is least at s = 4, m = 2/s."""
    rule = VariationalNewton(samples=30, rho=0.2, max_iter=500)
    bayes = rule.fit(wall, gaussian(1.0, 1.0), progress=False).q
    newton = VariationalNewton(look="mean", rho=1.0).fit(wall, gaussian(0.3, 1.0), progress=False)
    assert abs(float(newton.q.mean)) < 1e-9
    assert float(bayes.mean) == pytest.approx(0.5, abs=1e-4)
    assert float(bayes.precision) == pytest.approx(4.0, rel=1e-4)


def test_the_variational_solution_prefers_the_flat_minimum() -> None:
    rule = VariationalNewton(samples=80, rho=0.2, temperature=0.4)
    q = rule.fit(sharp_and_flat, gaussian(-0.6, 0.5), progress=False).q
    found = minimize(
        lambda p: flat_objective(p[0], math.exp(p[1])),
        [2.0, 0.0],
        method="Nelder-Mead",
        options={"xatol": 1e-10, "fatol": 1e-14, "maxiter": 4000},
    )
    assert float(q.mean) == pytest.approx(found.x[0], abs=1e-4)
    assert float(q.precision) == pytest.approx(math.exp(found.x[1]), rel=1e-3)
    assert found.x[0] > 1
    # The sharp minimum is the lower one, and Newton's method finds it from the same side.
    (sharp,) = minima(sharp_and_flat, torch.tensor([[-0.9]], dtype=F64))
    (flat,) = minima(sharp_and_flat, torch.tensor([[2.1]], dtype=F64))
    assert float(sharp_and_flat(sharp)) < float(sharp_and_flat(flat))


def test_samples_come_near_the_quadrature() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = VariationalNewton().fit(lambda t: t[0].cosh(), gaussian(0.5, 1.0), progress=False)
    rule = VariationalNewton(look="samples", samples=200, max_iter=120, rho=0.05)
    noisy = rule.fit(lambda t: t[0].cosh(), gaussian(0.5, 1.0), generator=generator, progress=False)
    assert float(noisy.q.precision) == pytest.approx(float(exact.q.precision), rel=0.05)


def test_a_smaller_temperature_narrows_the_posterior() -> None:
    widths = [
        float(
            VariationalNewton(temperature=t)
            .fit(lambda x: x[0] ** 2, gaussian(1.0, 1.0), progress=False)
            .q.precision
        )
        for t in (1.0, 0.1)
    ]
    assert widths == pytest.approx([2.0, 20.0], rel=1e-4)


@pytest.mark.parametrize(
    "run",
    [
        lambda: VariationalNewton(rho=2.0),
        lambda: VariationalNewton(samples=0),
        lambda: VariationalNewton(samples=500),  # more nodes than there are
        lambda: VariationalNewton(temperature=0.0),
        lambda: VariationalNewton().fit(wall, torch.zeros(1)),
        lambda: VariationalNewton().fit(
            lambda t: t.sum(), FullGaussian(torch.zeros(2), torch.eye(2))
        ),
        lambda: VariationalNewton().fit(lambda t: t[0].log(), gaussian(0.0, 1.0)),
    ],
)
def test_bad_input_is_named(run: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        run()


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda t: t.outer(t), r"return one number.*got \[1, 1\]"),
        (lambda t: 3.0, "return one number"),
        (lambda t: t[7], "IndexError"),
        (lambda t: t.long().sum(), "return one number"),
        (lambda t: t[0] * math.nan, r"not finite at \[-?\d"),
        (lambda t: t.detach()[0] ** 2 + t[0] ** 2 * 0, "derivatives are all 0"),
    ],
)
@pytest.mark.parametrize("look", ["quadrature", "samples"])
def test_losses_that_are_none_are_named(loss: Any, match: str, look: str) -> None:
    with pytest.raises(InputError, match=match):
        VariationalNewton(look=look).fit(loss, gaussian(0.5, 1.0), progress=False)


def test_many_nodes_of_a_quadrature_are_few_enough() -> None:
    fitted = VariationalNewton(samples=370).fit(lambda t: t[0] ** 2, gaussian(0.5, 1.0))
    assert float(fitted.q.precision) == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("look", ["quadrature", "samples", "mean"])
def test_a_start_with_copies_is_named(look: str) -> None:
    copies = FullGaussian(torch.zeros(2, 1), torch.ones(2, 1, 1))
    with pytest.raises(InputError, match=r"one Gaussian, got copies \[2\]"):
        VariationalNewton(look=look).fit(lambda t: t[0] ** 2, copies)


# Curvatures


def regression(noise: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 3, dtype=F64, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    return x, y + noise * torch.randn(40, dtype=F64, generator=generator)


X, Y = regression()
PRIOR = FullGaussian(
    torch.tensor([0.2, 0.0, -0.1], dtype=F64),
    torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.1], [0.0, 0.1, 3.0]], dtype=F64),
)


def squared_errors(t: Tensor) -> Tensor:
    """One loss for each example, whose gradient is (x·t − y) x."""
    return 0.5 * (Y - X @ t).square()


def newton(curvature: str, look: str, **settings: Any) -> FullGaussian:
    """From N(0, I), to the data of PRIOR and the regression."""
    rule = VariationalNewton(curvature=curvature, look=look, **settings)
    start = FullGaussian(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))
    generator = torch.Generator().manual_seed(0)
    fitted = rule.fit(squared_errors, start, prior=PRIOR, generator=generator, progress=False)
    return fitted.q


def closed_form() -> FullGaussian:
    precision = PRIOR.precision + X.mT @ X
    told = PRIOR.precision @ PRIOR.mean + X.mT @ Y
    return FullGaussian(torch.linalg.solve(precision, told), precision)


@pytest.mark.parametrize("look", ["mean", "samples"])
def test_exact_curvature_of_regression_is_conjugate(look: str) -> None:
    """At ρ = 1 two steps are the posterior: pairs m ± ε have the mean of a linear gradient."""
    q = newton("exact", look, rho=1.0, max_iter=2, tol=math.inf, samples=4)
    wanted = closed_form()
    torch.testing.assert_close(q.precision, wanted.precision, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.mean, wanted.mean, rtol=1e-11, atol=1e-12)


def test_the_objective_with_a_prior_is_the_evidence() -> None:
    """−log of ∫ exp(−ℓ) p, by the determinants of linear regression, at the posterior."""
    wanted = closed_form()
    rule = VariationalNewton(look="samples", rho=1.0, max_iter=1)
    generator = torch.Generator().manual_seed(0)
    values = [
        rule.fit(squared_errors, wanted, prior=PRIOR, generator=generator, progress=False).history[
            0
        ]
        for _ in range(80)
    ]
    gap = Y - X @ PRIOR.mean
    cover = torch.eye(40, dtype=F64) + X @ torch.linalg.inv(PRIOR.precision) @ X.mT
    evidence = 0.5 * (gap @ torch.linalg.solve(cover, gap) + torch.logdet(cover))
    found = torch.tensor(values, dtype=F64)
    assert abs(float(found.mean() - evidence)) < 4 * float(found.std()) / 80**0.5


def test_gauss_newton_settles_at_the_sum_of_outer_products() -> None:
    """At the mean m is the mode for any curvature, and S = Σ g_i g_iᵀ + S_0 there, by hand."""
    q = newton("gauss_newton", "mean", rho=0.3, max_iter=3000, tol=1e-13)
    mode = closed_form().mean
    torch.testing.assert_close(q.mean, mode, rtol=1e-6, atol=1e-6)
    each = (X @ mode - Y).numpy()[:, None] * X.numpy()
    dense = sum(row[:, None] * row[None, :] for row in each)
    torch.testing.assert_close(
        q.precision, torch.tensor(dense) + PRIOR.precision, rtol=1e-5, atol=0
    )


def test_squared_gradients_rest_at_what_theorem_1_says() -> None:
    """With all examples in the batch, w = 0: the square of the sum takes the place of Σ g_i².

    At the mode Σ g_i is the prior's pull S_0 (m_0 − m), so that S = diag (S_0 (m_0 − m))² + S_0
    (Khan et al., ICML 2018, Theorem 1), far below OGN's.
    """
    mode = closed_form().mean
    pull = PRIOR.precision @ (PRIOR.mean - mode)
    rest = FullGaussian(mode, pull.square().diag() + PRIOR.precision)
    rule = VariationalNewton(curvature="squared_gradient", look="mean", max_iter=3, tol=math.inf)
    q = rule.fit(squared_errors, rest, prior=PRIOR, progress=False).q
    torch.testing.assert_close(q.mean, rest.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(q.precision, rest.precision, rtol=1e-10, atol=1e-10)
    each = (X @ mode - Y)[:, None] * X
    assert (pull.square() < 0.5 * each.square().sum(0)).all()


def quartic(t: Tensor) -> Tensor:
    """Not quadratic, and its variables depend on each other."""
    return (t**4).sum() / 8 + 0.3 * (t[0] * t[1]) ** 2 + 0.7 * t[0] * t[1] + t.square().sum()


@pytest.mark.parametrize("curvature", ["reparameterised", "hutchinson"])
def test_random_curvatures_agree_with_the_exact_one(curvature: str) -> None:
    """At the same places, over and over: their mean is that of the exact Hessians."""
    precision = torch.tensor([[3.0, 0.8], [0.8, 2.0]], dtype=F64)
    q = FullGaussian(torch.tensor([0.5, -0.3], dtype=F64), precision)
    generator = torch.Generator().manual_seed(1)
    rounds, found, exactly = 60, [], []
    for _ in range(rounds):
        points, shares = places(q, "samples", 20, generator=generator)
        for name, kept in ((curvature, found), ("exact", exactly)):
            hessians = ESTIMATES[name](quartic, points, q, generator)[1]
            kept.append(torch.tensordot(shares, hessians, 1))
    wanted = torch.stack(exactly)
    if curvature == "hutchinson":
        wanted = wanted.diagonal(dim1=1, dim2=2)
    gap = torch.stack(found) - wanted
    error = gap.std(0) / rounds**0.5
    assert (error > 1e-4).all()
    assert (gap.mean(0).abs() < 4 * error).all()


@pytest.mark.parametrize("curvature", ["reparameterised", "hutchinson"])
def test_random_curvatures_settle_where_the_exact_one_does(curvature: str) -> None:
    """The mean over the last steps, against the exact fixed point, by batches' own spread."""

    def separate(t: Tensor) -> Tensor:
        return (t**4).sum() / 8 + t.square().sum() - t[0]

    start = FullGaussian(torch.zeros(2, dtype=F64), 2 * torch.eye(2, dtype=F64))
    wanted = (
        VariationalNewton(look="samples", samples=400, rho=0.3, max_iter=60)
        .fit(separate, start, generator=torch.Generator().manual_seed(9), progress=False)
        .q
    )
    generator, q, precisions, means = torch.Generator().manual_seed(0), start, [], []
    rule = VariationalNewton(look="samples", curvature=curvature, samples=20, rho=0.1, max_iter=40)
    for _ in range(13):  # batches of 40 steps, the first of them left out
        q = rule.fit(separate, q, generator=generator, progress=False).q
        precisions.append(q.precision.diagonal())
        means.append(q.mean)
    for found, target in ((precisions, wanted.precision.diagonal()), (means, wanted.mean)):
        kept = torch.stack(found[1:])
        error = kept.std(0) / len(kept) ** 0.5
        assert ((kept.mean(0) - target).abs() < 4 * error + 0.02).all()


def test_reparameterised_by_quadrature_is_exact_by_quadrature() -> None:
    """Price's theorem, with no noise at all: one fixed point."""
    found, wanted = (
        VariationalNewton(curvature=name, samples=60, max_iter=400)
        .fit(lambda t: t[0].cosh() + t[0] ** 4, gaussian(0.5, 2.0), progress=False)
        .q
        for name in ("reparameterised", "exact")
    )
    torch.testing.assert_close(found.precision, wanted.precision, rtol=1e-8, atol=0)
    torch.testing.assert_close(found.mean, wanted.mean, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda: VariationalNewton(curvature="fisher"), "curvature must be one of 'exact'"),
        (
            lambda: VariationalNewton(curvature="reparameterised", look="mean"),
            "around the mean",
        ),
        (
            lambda: VariationalNewton(curvature="gauss_newton").fit(wall, gaussian(0.0, 1.0)),
            "gauss_newton",
        ),
        (
            lambda: VariationalNewton().fit(
                wall, gaussian(0.0, 1.0), prior=FullGaussian(torch.zeros(2, 1), torch.ones(2, 1, 1))
            ),
            r"prior must be one Gaussian, got copies \[2\]",
        ),
    ],
)
def test_curvatures_that_do_not_fit_are_named(run: Callable[[], object], match: str) -> None:
    with pytest.raises(InputError, match=match):
        run()
