"""Conjugate models against textbooks and scipy, online learning by hand, chains of states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from inference_problems import F64, M, draws, normal
from scipy import stats
from sklearn.linear_model import Ridge
from torch import Tensor

from blr_analysis.learning_rule import families as fam
from blr_analysis.learning_rule import inference as inf
from blr_analysis.learning_rule.inference import Conjugate, linear, poisson
from blr_analysis.learning_rule.inference.fitted import rows
from blr_analysis.learning_rule.rule import blr_step

NOISE = 0.7


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=F64)


def spread(size: int) -> Tensor:
    root = draws(size, size, seed=9)
    return root @ root.mT + torch.eye(size, dtype=F64)


@dataclass(frozen=True)
class Case:
    prior: fam.ExponentialFamily
    factor: inf.Factor
    data: Callable[[int], Any]
    fields: str  # names of the posterior's parameters
    posterior: Callable[[Any], tuple[Any, ...]]  # the values of these fields, by the textbook

    def fit(self, data: Any) -> inf.Fitted:
        return Conjugate(self.prior, self.factor).fit(data)


def textbook_normal_wishart(y: Tensor) -> tuple[Any, ...]:
    """Murphy, Probabilistic Machine Learning: Advanced Topics, 3.4.4."""
    prior = CASES["gaussian"].prior
    n = len(y)
    mean = y.mean(0)
    kappa = prior.kappa + n
    scatter = (y - mean).mT @ (y - mean)
    gap = mean - prior.mean
    rate = prior.rate + scatter + prior.kappa * n / kappa * torch.outer(gap, gap)
    return (prior.kappa * prior.mean + n * mean) / kappa, kappa, prior.dof + n, rate


def textbook_linear(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Bishop, Pattern Recognition and Machine Learning, 3.50 and 3.51."""
    prior = CASES["linear"].prior
    x, y = data
    precision = prior.precision + x.mT @ x / NOISE
    return torch.linalg.solve(precision, prior.precision @ prior.mean + x.mT @ y / NOISE), precision


SHARES = torch.tensor([0.5, 1.0, 3.0], dtype=F64)
CASES = {
    "bernoulli": Case(
        fam.Beta(number(0.8), number(2.5)),
        inf.bernoulli(),
        lambda n: (draws(n) > 0.3).double(),
        "a b",
        lambda y: (0.8 + y.sum(), 2.5 + (1 - y).sum()),
    ),
    "poisson": Case(
        fam.Gamma(number(1.7), number(0.4)),
        poisson(),
        lambda n: (3 * draws(n).exp()).floor(),
        "shape rate",
        lambda y: (1.7 + y.sum(), number(0.4 + len(y))),
    ),
    "categorical": Case(
        fam.Dirichlet(SHARES),
        inf.categorical(3),
        lambda n: (draws(n).abs() * 2).long().clamp(max=2),
        "concentration",
        lambda y: (SHARES + torch.bincount(y.long(), minlength=3),),
    ),
    "gaussian": Case(
        fam.NormalWishart(draws(3, seed=8), number(0.6), number(4.5), spread(3)),
        inf.gaussian(),
        lambda n: 2 * draws(n, 3) + 1,
        "mean kappa dof rate",
        textbook_normal_wishart,
    ),
    "linear": Case(
        fam.FullGaussian(draws(3, seed=8), spread(3)),
        linear(NOISE),
        lambda n: (draws(n, 3), 3 * draws(n, seed=1)),
        "mean precision",
        textbook_linear,
    ),
}
every = pytest.mark.parametrize("name", CASES)


def same(
    actual: fam.ExponentialFamily, expected: fam.ExponentialFamily, tol: float = 1e-12
) -> None:
    for key, value in expected.natural.items():
        torch.testing.assert_close(actual.natural[key], value, rtol=tol, atol=tol)


@every
def test_one_step_is_the_textbook_posterior_wherever_it_starts(name: str) -> None:
    case = CASES[name]
    data = CASES[name].data(23)
    fitted = case.fit(data)
    elsewhere = case.fit(case.data(30)).q
    for field, expected in zip(case.fields.split(), case.posterior(data), strict=True):
        torch.testing.assert_close(getattr(fitted.q, field), expected, rtol=1e-12, atol=1e-12)
    site_sums = {k: v.sum(0) for k, v in fitted.sites.items()}
    gradient = fam.scale(fam.add(fitted.prior.natural, site_sums), -1.0)
    same(blr_step(elsewhere, gradient, 1.0), fitted.q)


@every
def test_sequential_equals_batch(name: str) -> None:
    """The evidence is the product of the predictives, each of which is scipy's (see below)."""
    case = CASES[name]
    data = CASES[name].data(8)
    q = case.prior
    chain = 0.0
    for i in range(8):
        example = rows(data, torch.tensor([i]))
        fitted = Conjugate(q, case.factor).fit(example)
        chain += float(fitted.predictive(q, example))
        q = fitted.q
    batch = case.fit(data)
    same(q, batch.q)
    assert batch.objective == "log evidence"
    assert batch.history == pytest.approx([chain], rel=1e-11)


def test_predictives_equal_scipy() -> None:
    q = {name: case.fit(case.data(11)).q for name, case in CASES.items()}
    beta, gamma, nw, theta = (q[k] for k in ("bernoulli", "poisson", "gaussian", "linear"))
    shape = nw.rate * (nw.kappa + 1) / (nw.kappa * (nw.dof - 2))
    x, y = CASES["linear"].data(6)
    deviation = (NOISE + ((x @ theta.covariance) * x).sum(1)).sqrt()
    expected = {
        "bernoulli": stats.betabinom(1, float(beta.a), float(beta.b)).logpmf,
        "poisson": stats.nbinom(float(gamma.shape), float(gamma.rate / (gamma.rate + 1))).logpmf,
        "categorical": lambda y: np.log(q["categorical"].mean.numpy())[y.astype(int)],
        "gaussian": stats.multivariate_t(nw.mean.numpy(), shape.numpy(), float(nw.dof) - 2).logpdf,
        "linear": lambda data: stats.norm(x @ theta.mean, deviation).logpdf(y),
    }
    for name, log_density in expected.items():
        data = CASES[name].data(6)
        actual = CASES[name].fit(CASES[name].data(11)).log_predictive(data)
        reference = log_density(data.numpy() if isinstance(data, Tensor) else data)
        np.testing.assert_allclose(actual, reference, rtol=1e-11, err_msg=name)


def test_ridge_regression_is_the_mean() -> None:
    """K&R 1.3.3: minimise Σ (y − xᵀθ)²/2 + δ|θ|²/2."""
    x, y = CASES["linear"].data(40)
    q = Conjugate(normal(3, 2.5), linear(1.0)).fit((x, y)).q
    expected = Ridge(alpha=2.5, fit_intercept=False).fit(x.numpy(), y.numpy()).coef_
    np.testing.assert_allclose(q.mean, expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_counts_keep_their_digits(dtype: torch.dtype) -> None:
    """Evidence and left-out predictives are those of the negative binomial."""
    y = torch.poisson(torch.full((20,), 1e5), generator=torch.Generator().manual_seed(0)).to(dtype)
    prior = fam.Gamma(torch.tensor(1.0, dtype=dtype), torch.tensor(1e-5, dtype=dtype))
    fitted = Conjugate(prior, poisson()).fit(y)
    shape = 1.0
    rate = float(prior.rate)
    chain = 0.0
    for count in y.tolist():
        chain += stats.nbinom.logpmf(int(count), shape, rate / (rate + 1))
        shape = shape + count
        rate = rate + 1
    assert fitted.history[-1] == pytest.approx(chain, abs=1e-5)
    left_out = [stats.nbinom.logpmf(int(c), shape - c, (rate - 1) / rate) for c in y.tolist()]
    torch.testing.assert_close(fitted.left_out(), torch.tensor(left_out), rtol=0, atol=1e-4)


# Exponential weights, online Newton steps and natural gradients of likelihoods.


RATE = 0.4


def test_exponential_weights_are_hedge() -> None:
    """Round by round in the multiplicative form, with the regret that the theory allows."""
    table = torch.rand(25, 4, generator=torch.Generator().manual_seed(0)).double()
    prior = fam.CategoricalFamily(torch.zeros(3).double())
    fitted = Conjugate(prior, inf.experts(4, RATE)).fit(table)
    weights = torch.full((4,), 0.25).double()
    mix = 0.0
    for row in table:
        shrunk = weights * (-RATE * row).exp()
        mix -= float(shrunk.sum().log()) / RATE
        weights = shrunk / shrunk.sum()
    torch.testing.assert_close(fitted.q.probs, weights)
    assert -fitted.history[0] / RATE == pytest.approx(mix)
    assert mix <= float(table.sum(0).min()) + math.log(4.0) / RATE


def test_online_newton_line_by_line() -> None:
    """A ← A + g gᵀ, w ← w − A⁻¹ g / γ (Hazan et al., 2007, without the projection)."""
    x = draws(30, 3, seed=1)
    y = (x.sum(1) > 0).double()

    def loss(w: Tensor, example: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.softplus(-(2 * example[1] - 1) * (example[0] @ w))

    gamma = 0.5
    epsilon = 2.0
    fitted = inf.OnlineNewton(normal(3, gamma * epsilon), loss, gamma).fit((x, y))
    w = torch.zeros(3).double()
    a = epsilon * torch.eye(3).double()
    total = []
    for xi, yi in zip(x, y, strict=True):
        sign = 2 * yi - 1
        total.append(float(torch.log1p((-sign * (xi @ w)).exp())))
        g = -sign * torch.sigmoid(-sign * (xi @ w)) * xi
        a = a + torch.outer(g, g)
        w = w - torch.linalg.solve(a, g) / gamma
    torch.testing.assert_close(fitted.q.mean, w)
    torch.testing.assert_close(fitted.q.precision, gamma * a)
    assert fitted.history == pytest.approx(total)


@pytest.mark.parametrize("along", ["natural", "expectation"])
def test_natural_gradients_of_a_likelihood_find_its_maximum(along: str) -> None:
    """Gamma: log k − ψ(k) = log mean − mean log, the equation of its maximum."""
    y = torch.tensor([0.5, 1.0, 2.5, 4.0, 1.5]).double()
    q = fam.Gamma(number(1.0), number(1.0))
    for _ in range(25):
        q = inf.likelihood_step(q, y, 1.0, along=along)
    k = q.shape
    torch.testing.assert_close(k.log() - torch.digamma(k), y.mean().log() - y.log().mean())
    torch.testing.assert_close(k / q.rate, y.mean())


def test_a_natural_gradient_by_hand() -> None:
    """F⁻¹ ∇ with the Fisher matrix of a gamma, entry by entry (K&R 19)."""
    q = fam.Gamma(number(2.0), number(1.5))
    y = torch.tensor([0.5, 1.0, 2.5]).double()
    a = q.shape
    b = q.rate
    fisher = torch.tensor([[torch.polygamma(1, a), 1 / b], [1 / b, a / b**2]]).double()
    gap = torch.stack([y.log().mean() - (torch.digamma(a) - b.log()), y.mean() - a / b])
    expected = torch.stack([a - 1, -b]) + 0.2 * torch.linalg.solve(fisher, gap)
    actual = inf.likelihood_step(q, y, 0.2)
    torch.testing.assert_close(torch.stack([actual.shape - 1, -actual.rate]), expected)


# Chains of states: the filter and the smoother against a dense Gaussian


def random_model(seed: int, times: int = 7) -> tuple[inf.StateSpace, Tensor]:
    """Three states, two of them driven by noise; two components observed, some missing."""
    root, noise, observation = draws(3, 2, 3, seed=seed)
    spread = draws(3, 3, seed=seed + 30)
    model = inf.StateSpace(
        transition=0.6 * draws(3, 3, seed=seed + 40) + torch.eye(3, dtype=F64),
        transition_noise=root.mT @ root,
        observation=observation,
        observation_noise=noise @ noise.mT + 0.3 * torch.eye(2, dtype=F64),
        prior=fam.FullGaussian(spread[0], spread @ spread.mT + 0.2 * torch.eye(3, dtype=F64)),
    )
    data = 3 * draws(times, 2, seed=seed + 50)
    data[1, 0] = data[3, :] = data[5, 1] = math.nan
    return model, data


def dense(model: inf.StateSpace, data: np.ndarray, upto: int | None = None):
    """Marginal means and covariances of the states, and log p(y), from the joint Gaussian."""
    times = len(data)
    size = len(model.prior.mean)
    transition = model.transition.numpy()
    innovations = np.kron(np.eye(times), model.transition_noise.numpy())
    innovations[:size, :size] = np.linalg.inv(model.prior.precision.numpy())
    # All states from the first and the noises: x_t = Σ_s F^(t−s) ε_s, block by block.
    powers = [np.linalg.matrix_power(transition, t) for t in range(times)]
    zero = np.zeros_like(transition)
    gather = [[powers[t - s] if s <= t else zero for s in range(times)] for t in range(times)]
    states = np.block(gather)
    mean = states[:, :size] @ model.prior.mean.numpy()
    covariance = states @ innovations @ states.T
    matrix = np.kron(np.eye(times), model.observation.numpy())
    noise = np.kron(np.eye(times), model.observation_noise.numpy())
    observed = ~np.isnan(data.reshape(-1))
    observed[len(observed) if upto is None else upto * data.shape[1] :] = False
    matrix = matrix[observed]
    noise = noise[np.ix_(observed, observed)]
    residual = data.reshape(-1)[observed] - matrix @ mean
    marginal = matrix @ covariance @ matrix.T + noise
    gain = np.linalg.solve(marginal, matrix @ covariance).T
    posterior = (covariance - gain @ matrix @ covariance).reshape(times, size, times, size)
    quadratic = residual @ np.linalg.solve(marginal, residual)
    logdet = np.linalg.slogdet(2 * np.pi * marginal)[1]
    smoothed = (mean + gain @ residual).reshape(times, size)
    return smoothed, np.einsum("tatb->tab", posterior), -0.5 * (quadratic + logdet)


def close(actual: Tensor, expected: np.ndarray, tol: float = 1e-10) -> None:
    np.testing.assert_allclose(
        actual.numpy(), expected, rtol=tol, atol=tol * np.abs(expected).max()
    )


@pytest.mark.parametrize("seed", range(4))
def test_states_and_likelihood_equal_the_joint_gaussian(seed: int) -> None:
    """The smoother conditions on all observations, the filter on those up to its time."""
    model, data = random_model(seed)
    fitted = model.fit(data)
    mean, covariance, log_prob = dense(model, data.numpy())
    close(fitted.q.mean, mean)
    close(fitted.q.covariance, covariance)
    assert fitted.history[-1] == pytest.approx(log_prob, rel=1e-10)
    for time in (0, 2, 4, 6):
        mean, covariance, log_prob = dense(model, data.numpy(), upto=time + 1)
        close(fitted.filtered.mean[time], mean[time])
        close(fitted.filtered.covariance[time], covariance[time])
        assert fitted.history[time] == pytest.approx(log_prob, rel=1e-10)
        before, spread, _ = dense(model, data.numpy(), upto=time)
        close(fitted.predicted.mean[time], before[time])
        close(fitted.predicted.covariance[time], spread[time])


def test_observations_without_noise_are_interpolated() -> None:
    """A random walk with large steps."""
    series = 100 * draws(50, 1).cumsum(0)
    fitted = inf.StateSpace(M, 1469.0 * M, M, 1e-9 * M, normal(1, 1e-7)).fit(series)
    close(fitted.q.mean, series.numpy())


def test_left_out_and_without_equal_fits_without() -> None:
    model, data = random_model(8)
    fitted = model.fit(data)
    left_out = fitted.left_out()
    for t in range(len(data)):
        remaining = data.clone()
        remaining[t] = math.nan
        mean, _, log_rest = dense(model, remaining.numpy())
        _, _, log_all = dense(model, data.numpy())
        assert float(left_out[t]) == pytest.approx(log_all - log_rest, abs=1e-9)
        close(fitted.without([t]).mean, mean)
    remaining = data.clone()
    remaining[[0, 2, 6]] = math.nan
    close(fitted.without([0, 2, 6]).covariance, dense(model, remaining.numpy())[1])


def test_what_is_missing_says_nothing() -> None:
    """The sites of a missing observation are zero; with none at all a random walk has its prior's
    variances, 1, 2, 3."""
    model, data = random_model(3)
    sites = model.fit(data).sites
    assert not sites["linear"][3].any()
    assert not sites["square"][3].any()
    assert sites["linear"][2].any()
    assert torch.linalg.matrix_rank(sites["square"][1]) == 1
    fitted = inf.StateSpace(M, M, M, M, normal(1)).fit(torch.full((3, 1), math.nan))
    close(fitted.q.covariance.flatten(), np.array([1.0, 2.0, 3.0]))
    assert fitted.history == [0.0, 0.0, 0.0]
