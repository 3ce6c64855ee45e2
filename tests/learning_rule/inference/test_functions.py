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
from blr_analysis.learning_rule.families import FullGaussian
from blr_analysis.learning_rule.inference.functions import VariationalNewton
from blr_analysis.learning_rule.inference.multimodal import minima

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


@pytest.mark.parametrize("start", [-0.6, 2.5])
def test_the_variational_solution_prefers_the_flat_minimum(start: float) -> None:
    rule = VariationalNewton(samples=80, rho=0.05, temperature=0.4)
    q = rule.fit(sharp_and_flat, gaussian(start, 0.5), progress=False).q
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
    rule = VariationalNewton(look="samples", samples=200, max_iter=300, rho=0.05)
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
        (lambda t: t**2, "return one number"),
        (lambda t: 3.0, "return one number"),
        (lambda t: None, "return one number"),
        (lambda t, u: t[0], "return one number.*TypeError"),
        (lambda t: t[7], "IndexError"),
        (lambda t: int("x"), "ValueError"),
        (lambda t: t.long().sum(), "return one number"),
        (lambda t: t[0] * math.nan, r"not finite at \[-?\d"),
        (lambda t: t.detach()[0] ** 2 + t[0] ** 2 * 0, "taken out of torch"),
    ],
)
@pytest.mark.parametrize("look", ["quadrature", "samples"])
def test_losses_that_are_none_are_named(loss: Any, match: str, look: str) -> None:
    with pytest.raises(InputError, match=match):
        VariationalNewton(look=look).fit(loss, gaussian(0.5, 1.0), progress=False)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tol": None}, "tol must be 0 or more"),
        ({"tol": math.nan}, "tol must be 0 or more"),
        ({"samples": 500}, "at most 370 nodes, got 500"),
    ],
)
def test_settings_that_are_none_are_named(settings: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        VariationalNewton(**settings)


def test_many_nodes_of_a_quadrature_are_few_enough() -> None:
    fitted = VariationalNewton(samples=370).fit(lambda t: t[0] ** 2, gaussian(0.5, 1.0))
    assert float(fitted.q.precision) == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("look", ["quadrature", "samples", "mean"])
def test_a_start_with_copies_is_named(look: str) -> None:
    copies = FullGaussian(torch.zeros(2, 1), torch.ones(2, 1, 1))
    with pytest.raises(InputError, match=r"one Gaussian, got copies \[2\]"):
        VariationalNewton(look=look).fit(lambda t: t[0] ** 2, copies)
