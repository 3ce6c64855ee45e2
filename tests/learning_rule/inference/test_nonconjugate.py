"""Non-conjugate message passing against a direct maximisation of the ELBO."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer
from torch import Tensor

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.inference import (
    Conjugate,
    MeanFieldRegression,
    NotConverged,
    linear,
)


def prior(size: int) -> DiagonalGaussian:
    return DiagonalGaussian(0.1 * torch.ones(size).double(), 0.7 * torch.ones(size).double())


def logistic() -> tuple[Tensor, Tensor]:
    """Real tumours: two thirds benign; five correlated measurements and an intercept."""
    x, y = load_breast_cancer(return_X_y=True)
    x = (x[:150, :5] - x[:150, :5].mean(0)) / x[:150, :5].std(0)
    return torch.from_numpy(np.column_stack([np.ones(150), x])), torch.from_numpy(y[:150]).double()


def counts() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(80), rng.normal(size=(80, 3))])
    return torch.from_numpy(x), torch.from_numpy(
        rng.poisson(np.exp(x @ [0.5, 0.6, -0.4, 0.2]))
    ).double()


def best_mean_field(
    x: np.ndarray, y: np.ndarray, name: str, center: float = 0.1, precision: float = 0.7
) -> tuple[np.ndarray, np.ndarray, float]:
    """Means, variances and the ELBO, by a general optimiser and NumPy's quadrature."""
    places, weights = np.polynomial.hermite_e.hermegauss(64)
    weights = weights / weights.sum()

    def loss(point: np.ndarray) -> float:
        mean, variance = point[: x.shape[1]], np.exp(point[x.shape[1] :])
        centre, spread = x @ mean, x**2 @ variance
        if name == "poisson":
            fit = y * centre - np.exp(centre + spread / 2)
            fit = fit - np.array([np.log(np.arange(1, k + 1)).sum() for k in y])
        else:
            f = centre[:, None] + np.sqrt(spread)[:, None] * places
            fit = (-np.logaddexp(0, -(2 * y[:, None] - 1) * f)) @ weights
        gap = precision * (variance + (mean - center) ** 2) - 1 - np.log(precision * variance)
        return gap.sum() / 2 - fit.sum()

    start = np.repeat([0.0, -3.0], x.shape[1])  # far from where exp overflows
    found = minimize(loss, start, method="BFGS", options={"gtol": 1e-6})
    return found.x[: x.shape[1]], np.exp(found.x[x.shape[1] :]), -found.fun


@pytest.mark.parametrize(("name", "data"), [("bernoulli", logistic()), ("poisson", counts())])
def test_sweeps_find_the_best_mean_field(name: str, data: tuple[Tensor, Tensor]) -> None:
    fitted = MeanFieldRegression(prior(data[0].shape[1]), name).fit(data)
    mean, variance, elbo = best_mean_field(data[0].numpy(), data[1].numpy(), name)
    np.testing.assert_allclose(fitted.q.mean, mean, atol=2e-4)
    np.testing.assert_allclose(1 / fitted.q.precision, variance, rtol=1e-4)
    assert fitted.converged and fitted.history[-1] == pytest.approx(elbo, abs=1e-6)


@pytest.mark.parametrize("rho", [1.0, 0.5])
@pytest.mark.parametrize("sweeps", [1, 2, 5])
def test_prior_and_messages_add_up_after_every_sweep(rho: float, sweeps: int) -> None:
    with pytest.warns(NotConverged):
        fitted = MeanFieldRegression(prior(4)).fit(counts(), rho=rho, max_iter=sweeps)
    for key, value in fitted.q.natural.items():
        total = fitted.prior.natural[key] + fitted.sites[key].sum(0)
        torch.testing.assert_close(value, total, rtol=1e-11, atol=1e-11)


def test_a_conjugate_factor_gives_the_conjugate_mean() -> None:
    """Gaussian noise: the exact posterior's mean, and the diagonal of its precision."""
    x, y = counts()
    fitted = MeanFieldRegression(prior(4), "gaussian").fit((x, y), tol=1e-12)
    start = FullGaussian(prior(4).mean, torch.diag(prior(4).precision))
    exact = Conjugate(start, linear(1.0)).fit((x, y)).q
    torch.testing.assert_close(fitted.q.mean, exact.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fitted.q.precision, exact.precision.diagonal())


def correlated_counts() -> tuple[Tensor, Tensor]:
    """Two columns nearly the same: a sweep at ρ = 1 overshoots."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 10, generator=generator, dtype=torch.float64)
    x[:, 1] = x[:, 0] + 0.4 * x[:, 1]
    return x, torch.poisson((x[:, 0] * 0.8 + x[:, 2] * 0.5 + 1).exp(), generator=generator)


def test_halving_keeps_the_elbo_from_falling() -> None:
    data = correlated_counts()
    start = DiagonalGaussian(torch.zeros(10).double(), torch.ones(10).double())
    with pytest.warns(NotConverged):
        wild = MeanFieldRegression(start).fit(data, halving=False, max_iter=5)
    assert np.diff(wild.history).min() < -1000, "sweeps at ρ = 1 were expected to overshoot"
    fitted = MeanFieldRegression(start).fit(data)
    assert fitted.converged
    assert np.diff(fitted.history).min() > -1e-9
    _, _, elbo = best_mean_field(data[0].numpy(), data[1].numpy(), "poisson", 0.0, 1.0)
    assert fitted.history[-1] == pytest.approx(elbo, abs=1e-4)
    for key, value in fitted.q.natural.items():
        total = fitted.prior.natural[key] + fitted.sites[key].sum(0)
        torch.testing.assert_close(value, total, rtol=1e-9, atol=1e-8)


def test_left_out_follows_fitting_again() -> None:
    x, y = counts()
    fitted = MeanFieldRegression(prior(4)).fit((x, y))
    left_out, before = fitted.left_out(), fitted.log_predictive((x, y))
    again = []
    for i in range(0, 80, 8):
        keep = torch.arange(80) != i
        rest = MeanFieldRegression(prior(4)).fit((x[keep], y[keep]), tol=1e-6)
        again.append(float(rest.log_predictive((x[i : i + 1], y[i : i + 1]))))
    drop, wanted = (before - left_out)[::8], before[::8] - torch.tensor(again)
    assert float((drop - wanted).norm() / wanted.norm()) < 0.3
    assert np.corrcoef(drop, wanted)[0, 1] > 0.95


def test_wrong_input_is_named() -> None:
    x, y = counts()
    model = MeanFieldRegression(prior(4))
    with pytest.raises(DataError, match="3 columns"):
        model.fit((x[:, :3], y))
    with pytest.raises(DataError, match="same length, got 79 and 80"):
        model.fit((x[1:], y))
    with pytest.raises(DataError):
        model.fit((x, -y - 1))
    with pytest.raises(InputError, match="rho"):
        model.fit((x, y), rho=0.0)
    with pytest.raises(InputError, match="must be a DiagonalGaussian"):
        MeanFieldRegression(FullGaussian(torch.zeros(2), torch.eye(2)))
    with pytest.raises(InputError, match="likelihood must be one of"):
        MeanFieldRegression(prior(4), "cauchy")
    with pytest.warns(NotConverged, match="the ELBO still changed"):
        model.fit((x, y), max_iter=2)


def test_likelihoods_and_settings_that_are_none_are_named() -> None:
    data = counts()
    with pytest.raises(InputError, match="mixes examples"):
        MeanFieldRegression(prior(4), lambda y, f: -((f - f.mean()) ** 2)).fit(data)
    upward = MeanFieldRegression(prior(4), lambda y, f: f**2)
    with pytest.raises(InputError, match=r"no step along the natural gradient.*curves upward"):
        upward.fit(data)
    with pytest.raises(InputError, match=r"leaves the Gaussians.*curves upward"):
        upward.fit(data, halving=False)
    with pytest.raises(InputError, match="tol must be 0 or more"):
        MeanFieldRegression(prior(4)).fit(data, tol=None)  # type: ignore[arg-type]


def test_an_example_without_any_feature_says_nothing() -> None:
    x, y = counts()
    wanted = MeanFieldRegression(prior(4)).fit((x, y))
    fitted = MeanFieldRegression(prior(4)).fit((torch.cat([x, 0 * x[:1]]), torch.cat([y, y[:1]])))
    torch.testing.assert_close(fitted.q.mean, wanted.q.mean, rtol=1e-6, atol=1e-8)
