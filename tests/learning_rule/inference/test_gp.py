"""Gaussian processes against NUTS, textbook forms, direct maximisation and refitting."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_iris
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor

from benchmarks.papers import expectation_propagation as ep
from blr_analysis.learning_rule.families import FullGaussian
from blr_analysis.learning_rule.inference.cvi import GeneralizedLinear, LatentFitted
from blr_analysis.learning_rule.inference.gp import (
    GaussianProcess,
    function_values,
    rbf,
)
from blr_analysis.likelihoods import Gaussian

REFERENCE = Path(__file__).with_name("nuts.npz")
with np.load(REFERENCE, allow_pickle=False) as file:
    TOLD = {name.partition("/")[2]: file[name] for name in file.files if name.startswith("iris/")}
KERNEL = partial(rbf, lengthscale=float(TOLD["lengthscale"]), variance=float(TOLD["variance"]))


def linear_kernel(x: Tensor, z: Tensor, variance: float = 1.0, bias: float = 0.0) -> Tensor:
    return bias + variance * (x @ z.mT)


def iris() -> tuple[Tensor, Tensor]:
    """Versicolor (0) and virginica (1), standardised."""
    x, y = load_iris(return_X_y=True)
    x, y = x[y > 0], y[y > 0] == 2
    return torch.tensor((x - x.mean(0)) / x.std(0)), torch.tensor(y, dtype=torch.float64)


X, Y = (part[::2] for part in iris())
HELD_X, HELD_Y = (part[1::2] for part in iris())


@pytest.fixture(scope="module")
def logistic() -> LatentFitted:
    return GaussianProcess(KERNEL).fit((X, Y), tol=1e-12)


# The optimum and the posterior


def test_beside_expectation_propagation() -> None:
    """EP where it is exact; then the rule, EP and Laplace against NUTS, and the rule's bound."""
    x = np.linspace(-2, 2, 7)
    cover, y = np.exp(-0.5 * (x[:, None] - x) ** 2), np.sin(x)
    exact = stats.multivariate_normal(np.zeros(7), cover + 0.3 * np.eye(7))
    found = ep.ep(cover, lambda i, f: stats.norm(f, 0.3**0.5).logpdf(y[i]))
    assert found.log_evidence == pytest.approx(exact.logpdf(y), abs=1e-8)
    np.testing.assert_allclose(
        found.mean, cover @ np.linalg.solve(cover + 0.3 * np.eye(7), y), atol=1e-8
    )
    rows = ep.compared()
    rule, peer, laplace = rows.values()
    assert max(r["largest error of p"] for r in (rule, peer)) < 0.01
    assert laplace["largest error of p"] > 3 * rule["largest error of p"]
    assert 0 < peer["log evidence"] - rule["log evidence"] < 0.5
    assert rule["f's deviation, of NUTS's"] < peer["f's deviation, of NUTS's"] < 1.02


def covariance_gap(covariance: np.ndarray) -> float:
    """The largest difference to NUTS of any entry, in NUTS' own standard deviations."""
    deviations = np.sqrt(np.diag(TOLD["covariance"]))
    return np.abs((covariance - TOLD["covariance"]) / np.outer(deviations, deviations)).max()


def test_nuts(logistic: LatentFitted) -> None:
    """Means within the Monte Carlo error; covariances within 10 % besides, for q's Gaussian form.

    Nothing of what is allowed comes from q: a quarter too wide or a fifth too narrow is noticed.
    """
    assert TOLD["r_hat"] < 1.01 and TOLD["ess"] > 10_000
    mean, covariance = (part.numpy() for part in function_values(logistic))
    errors = np.abs(mean - TOLD["mean"]) / TOLD["mean_error"]
    allowed = 0.1 + 4 * (TOLD["variance_error"] / np.diag(TOLD["covariance"])).max()
    gaps = {k: covariance_gap(k * covariance) for k in (1.0, 0.8, 1.25)}
    assert errors.max() < 4
    assert gaps[1.0] < allowed < min(gaps[0.8], gaps[1.25])


def test_predictions_against_nuts(logistic: LatentFitted) -> None:
    gaps = np.abs(logistic.predict(HELD_X).numpy() - TOLD["probability"])
    noise = TOLD["probability_error"]
    assert gaps.mean() < 2 * noise.mean()
    assert (gaps < 4 * noise).all()


# Special cases with closed forms


def test_gaussian_likelihood_is_gp_regression() -> None:
    y = X[:, 0] * X[:, 1] + Y
    fitted = GaussianProcess(KERNEL, "gaussian").fit((X, y), max_iter=2, tol=1e-7)
    kernel = ConstantKernel(float(TOLD["variance"]), "fixed") * RBF(
        float(TOLD["lengthscale"]), "fixed"
    )
    peer = GaussianProcessRegressor(kernel, alpha=1.0, optimizer=None).fit(X, y)
    mean, std = peer.predict(HELD_X, return_std=True)
    found = fitted.latent(HELD_X)
    assert np.allclose(found.mean, mean, rtol=0, atol=1e-9)
    assert np.allclose(found.precision.rsqrt(), std, rtol=0, atol=1e-8)
    assert fitted.history[0] == pytest.approx(peer.log_marginal_likelihood_value_, abs=1e-9)
    # leave-one-out in closed form (Rasmussen & Williams, Eq. 5.12)
    inverse = np.linalg.inv(KERNEL(X, X).numpy() + np.eye(len(y)))
    variance = 1 / np.diag(inverse)
    residual = inverse @ y.numpy() * variance
    truth = -0.5 * (residual**2 / variance + np.log(2 * np.pi * variance))
    assert np.allclose(fitted.left_out(), truth, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["bernoulli", "probit"])
def test_linear_kernel_is_regression(name: str) -> None:
    """A process with a linear kernel and regression on its weights: the same f."""
    process = GaussianProcess(partial(linear_kernel, variance=2.0, bias=1.0), name)
    fitted = process.fit((X, Y), tol=1e-13)
    assert fitted.model.design.shape == (50, 5)  # the kernel's rank
    scales = torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    prior = FullGaussian(torch.zeros(5, dtype=torch.float64), torch.diag(1 / scales))
    columns = [torch.cat([x.new_ones(len(x), 1), x], 1) for x in (X, HELD_X)]
    weights = GeneralizedLinear(prior, name).fit((columns[0], Y), tol=1e-13)
    ours, theirs = fitted.latent(HELD_X), weights.latent(columns[1])
    assert torch.allclose(ours.mean, theirs.mean, rtol=0, atol=1e-6)
    assert torch.allclose(ours.precision, theirs.precision, rtol=1e-6, atol=0)
    assert fitted.history[-1] == pytest.approx(weights.history[-1], abs=1e-10)


# Examples taken out


# Real data


# What is refused


def test_an_input_where_the_kernel_is_zero() -> None:
    """A linear kernel without a bias: f(0) = 0 for sure."""
    x = torch.cat([X, 0 * X[:1]])
    fitted = GaussianProcess(linear_kernel).fit((x, torch.cat([Y, Y[:1]])))
    assert float(fitted.left_out()[-1].exp()) == pytest.approx(0.5, rel=1e-6)


def test_inducing_inputs_give_the_dense_bound_and_predictions() -> None:
    """log N(y | 0, Q + σ²) − tr(K − Q) / 2σ², Q = K_nz K_zz⁻¹ K_zn (Titsias, 2009, Eqs. 9, 10)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 2, generator=generator).double() * 4
    y = x.sum(1).sin() + 0.1 * torch.randn(30, generator=generator).double()
    z, noise = x[:7] + 0.1, 0.3
    likelihood = Gaussian(variance=noise)
    fitted = GaussianProcess(rbf, likelihood, inducing=z).fit((x, y), progress=False)
    k_zz, k_nz, eye = rbf(z, z), rbf(x, z), torch.eye(30).double()
    q = k_nz @ torch.linalg.solve(k_zz, k_nz.mT)
    normal = torch.distributions.MultivariateNormal(torch.zeros(30).double(), q + noise * eye)
    bound = normal.log_prob(y) - (rbf(x, x) - q).diagonal().sum() / (2 * noise)
    assert fitted.history[-1] == pytest.approx(float(bound), abs=1e-7)
    new = torch.rand(5, 2, generator=generator).double() * 4
    k_tz = rbf(new, z)
    inner = torch.linalg.inv(k_zz + k_nz.mT @ k_nz / noise)
    mean = k_tz @ inner @ k_nz.mT @ y / noise
    variance = 1 - (k_tz @ (torch.linalg.inv(k_zz) - inner) * k_tz).sum(1)
    latent = fitted.latent(new)
    torch.testing.assert_close(latent.mean, mean)
    torch.testing.assert_close(1 / latent.precision, variance)
    again = GaussianProcess(rbf, likelihood, inducing=z).fit((x[1:], y[1:]), progress=False)
    found = fitted.left_out()[0]
    torch.testing.assert_close(found, again.log_predictive((x[:1], y[:1]))[0])


def test_inducing_inputs_at_the_examples_are_the_whole_process() -> None:
    x, y = torch.linspace(-2, 2, 9).double().unsqueeze(1), torch.ones(9).double()
    y[::2] = 0
    whole = GaussianProcess(rbf).fit((x, y), progress=False)
    sparse = GaussianProcess(rbf, inducing=x).fit((x, y), progress=False)
    few = GaussianProcess(rbf, inducing=x[::4]).fit((x, y), progress=False)
    assert sparse.history[-1] == pytest.approx(whole.history[-1], abs=1e-6)
    torch.testing.assert_close(sparse.predict(x), whole.predict(x), rtol=1e-6, atol=1e-6)
    assert few.history[-1] < whole.history[-1] - 1e-3
