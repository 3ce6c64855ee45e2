"""Conjugate models against textbook posteriors and scipy's predictives; online learning by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.linear_model import Ridge
from torch import Tensor

from blr_analysis.learning_rule.families import (
    Beta,
    CategoricalFamily,
    Dirichlet,
    ExponentialFamily,
    FullGaussian,
    Gamma,
    NormalWishart,
    add,
    scale,
    subtract,
)
from blr_analysis.learning_rule.inference import (
    Conjugate,
    Factor,
    OnlineNewton,
    bernoulli,
    categorical,
    experts,
    gaussian,
    likelihood_step,
    linear,
    poisson,
)
from blr_analysis.learning_rule.inference.fitted import rows
from blr_analysis.learning_rule.rule import blr_step

NOISE = 0.7


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def draws(n: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64)


def spread(size: int) -> Tensor:
    root = draws(size, size, seed=9)
    return root @ root.mT + torch.eye(size, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    prior: ExponentialFamily
    factor: Factor
    data: Callable[[int], Any]
    fields: str
    posterior: Callable[[Any], tuple[Any, ...]]  # its parameters, by the textbook

    @property
    def model(self) -> Conjugate:
        return Conjugate(self.prior, self.factor)


def textbook_normal_wishart(y: Tensor) -> tuple[Any, ...]:
    """Murphy, Probabilistic Machine Learning: Advanced Topics, 3.4.4."""
    prior = CASES["gaussian"].prior
    n, mean = len(y), y.mean(0)
    kappa = prior.kappa + n
    scatter = (y - mean).mT @ (y - mean)
    gap = mean - prior.mean
    rate = prior.rate + scatter + prior.kappa * n / kappa * torch.outer(gap, gap)
    return (prior.kappa * prior.mean + n * mean) / kappa, kappa, prior.dof + n, rate


def textbook_linear(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Bishop, Pattern Recognition and Machine Learning, 3.50 and 3.51."""
    prior, (x, y) = CASES["linear"].prior, data
    precision = prior.precision + x.mT @ x / NOISE
    return torch.linalg.solve(precision, prior.precision @ prior.mean + x.mT @ y / NOISE), precision


CASES = {
    "bernoulli": Case(
        Beta(number(0.8), number(2.5)),
        bernoulli(),
        lambda n: (draws(n) > 0.3).double(),
        "a b",
        lambda y: (0.8 + y.sum(), 2.5 + (1 - y).sum()),
    ),
    "poisson": Case(
        Gamma(number(1.7), number(0.4)),
        poisson(),
        lambda n: (3 * draws(n).exp()).floor(),
        "shape rate",
        lambda y: (1.7 + y.sum(), number(0.4 + len(y))),
    ),
    "categorical": Case(
        Dirichlet(torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)),
        categorical(3),
        lambda n: (draws(n).abs() * 2).long().clamp(max=2),
        "concentration",
        lambda y: (torch.tensor([0.5, 1.0, 3.0]).double() + torch.bincount(y.long(), minlength=3),),
    ),
    "gaussian": Case(
        NormalWishart(draws(3, seed=8), number(0.6), number(4.5), spread(3)),
        gaussian(),
        lambda n: 2 * draws(n, 3) + 1,
        "mean kappa dof rate",
        textbook_normal_wishart,
    ),
    "linear": Case(
        FullGaussian(draws(3, seed=8), spread(3)),
        linear(NOISE),
        lambda n: (draws(n, 3), 3 * draws(n, seed=1)),
        "mean precision",
        textbook_linear,
    ),
}
every = pytest.mark.parametrize("name", CASES)


def same(found: ExponentialFamily, wanted: ExponentialFamily, tol: float = 1e-12) -> None:
    for key, value in wanted.natural.items():
        torch.testing.assert_close(found.natural[key], value, rtol=tol, atol=tol)


@every
def test_one_step_is_the_textbook_posterior_wherever_it_starts(name: str) -> None:
    case, data = CASES[name], CASES[name].data(23)
    fitted, elsewhere = case.model.fit(data), case.model.fit(case.data(30)).q
    for field, wanted in zip(case.fields.split(), case.posterior(data), strict=True):
        torch.testing.assert_close(getattr(fitted.q, field), wanted, rtol=1e-12, atol=1e-12)
    told = {k: v.sum(0) for k, v in fitted.sites.items()}
    same(blr_step(elsewhere, scale(add(fitted.prior.natural, told), -1.0), 1.0), fitted.q)


@every
def test_sequential_equals_batch(name: str) -> None:
    case, data = CASES[name], CASES[name].data(12)
    first = case.model.fit(rows(data, torch.arange(5)))
    second = Conjugate(first.q, case.factor).fit(rows(data, torch.arange(5, 12)))
    both = case.model.fit(data)
    same(second.q, both.q)
    assert first.history[0] + second.history[0] == pytest.approx(both.history[0], rel=1e-12)


def test_predictives_equal_scipy() -> None:
    q = {name: case.model.fit(case.data(11)).q for name, case in CASES.items()}
    beta, gamma, nw, normal = (q[k] for k in ("bernoulli", "poisson", "gaussian", "linear"))
    shape = nw.rate * (nw.kappa + 1) / (nw.kappa * (nw.dof - 2))
    x, y = CASES["linear"].data(6)
    deviation = (NOISE + ((x @ normal.covariance) * x).sum(1)).sqrt()
    wanted = {
        "bernoulli": stats.betabinom(1, float(beta.a), float(beta.b)).logpmf,
        "poisson": stats.nbinom(float(gamma.shape), float(gamma.rate / (gamma.rate + 1))).logpmf,
        "categorical": lambda y: np.log(q["categorical"].mean.numpy())[y.astype(int)],
        "gaussian": stats.multivariate_t(nw.mean.numpy(), shape.numpy(), float(nw.dof) - 2).logpdf,
        "linear": lambda data: stats.norm(x @ normal.mean, deviation).logpdf(y),
    }
    for name, log_density in wanted.items():
        data = CASES[name].data(6)
        found = CASES[name].model.fit(CASES[name].data(11)).log_predictive(data)
        reference = log_density(data.numpy() if isinstance(data, Tensor) else data)
        np.testing.assert_allclose(found, reference, rtol=1e-11, err_msg=name)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_evidence_equals_quadrature(name: str) -> None:
    prior, data = CASES[name].prior, CASES[name].data(5)
    rule = stats.bernoulli if name == "bernoulli" else stats.poisson

    def joint(theta: float) -> float:
        likelihood = float(rule(theta).pmf(data.numpy()).prod())
        return likelihood * math.exp(float(prior.log_prob(number(theta))))

    upper = 1.0 if name == "bernoulli" else np.inf
    area = integrate.quad(joint, 0, upper, epsabs=0, epsrel=1e-9, limit=200)[0]
    fitted = CASES[name].model.fit(data)
    assert fitted.objective == "log evidence"
    assert fitted.history[0] == pytest.approx(math.log(area), rel=1e-8)


def test_the_evidence_of_a_regression_is_the_density_of_its_targets() -> None:
    prior, (x, y) = CASES["linear"].prior, CASES["linear"].data(12)
    covariance = x @ prior.covariance @ x.mT + NOISE * torch.eye(12).double()
    wanted = stats.multivariate_normal((x @ prior.mean).numpy(), covariance.numpy()).logpdf(y)
    assert CASES["linear"].model.fit((x, y)).history[0] == pytest.approx(wanted, rel=1e-11)


def test_ridge_regression_is_the_mean() -> None:
    """K&R 1.3.3: minimise Σ (y − xᵀθ)²/2 + δ|θ|²/2."""
    x, y = CASES["linear"].data(40)
    prior = FullGaussian(torch.zeros(3).double(), 2.5 * torch.eye(3).double())
    q = Conjugate(prior, linear(1.0)).fit((x, y)).q
    wanted = Ridge(alpha=2.5, fit_intercept=False).fit(x.numpy(), y.numpy()).coef_
    np.testing.assert_allclose(q.mean, wanted, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_counts_keep_their_digits(dtype: torch.dtype) -> None:
    """Whatever the prior's precision: against the negative binomial."""
    y = torch.poisson(torch.full((20,), 1e5), generator=torch.Generator().manual_seed(0)).to(dtype)
    prior = Gamma(torch.tensor(1.0, dtype=dtype), torch.tensor(1e-5, dtype=dtype))
    fitted = Conjugate(prior, poisson()).fit(y)
    shape, rate, chain = 1.0, float(prior.rate), 0.0
    for each in y.tolist():
        chain += stats.nbinom.logpmf(int(each), shape, rate / (rate + 1))
        shape, rate = shape + each, rate + 1
    assert fitted.history[-1] == pytest.approx(chain, abs=1e-5)
    others = [stats.nbinom.logpmf(int(c), shape - c, (rate - 1) / rate) for c in y.tolist()]
    torch.testing.assert_close(fitted.left_out(), torch.tensor(others), rtol=0, atol=1e-4)


# Exponential weights, online Newton steps and natural gradients of likelihoods.


RATE = 0.4


def test_exponential_weights_are_hedge() -> None:
    """Round by round in the multiplicative form, with the regret that the theory allows."""
    table = torch.rand(25, 4, generator=torch.Generator().manual_seed(0)).double()
    model = Conjugate(CategoricalFamily(torch.zeros(3).double()), experts(4, RATE))
    fitted = model.fit(table)
    weights, mix = torch.full((4,), 0.25).double(), 0.0
    for row in table:
        shrunk = weights * (-RATE * row).exp()
        mix -= float(shrunk.sum().log()) / RATE
        weights = shrunk / shrunk.sum()
    torch.testing.assert_close(fitted.q.probs, weights)
    assert -fitted.history[0] / RATE == pytest.approx(mix)
    assert mix <= float(table.sum(0).min()) + math.log(4.0) / RATE
    torch.testing.assert_close(fitted.without([0, 1, 2]).probs, model.fit(table[3:]).q.probs)


def test_online_newton_line_by_line() -> None:
    """A ← A + g gᵀ, w ← w − A⁻¹ g / γ (Hazan et al., 2007, without the projection)."""
    x = draws(30, 3, seed=1)
    y = (x.sum(1) > 0).double()

    def loss(w: Tensor, example: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.softplus(-(2 * example[1] - 1) * (example[0] @ w))

    gamma, epsilon = 0.5, 2.0
    prior = FullGaussian(torch.zeros(3).double(), gamma * epsilon * torch.eye(3).double())
    fitted = OnlineNewton(prior, loss, gamma).fit((x, y))
    w, a, total = torch.zeros(3).double(), epsilon * torch.eye(3).double(), []
    for xi, yi in zip(x, y, strict=True):
        sign = 2 * yi - 1
        total.append(float(torch.log1p((-sign * (xi @ w)).exp())))
        g = -sign * torch.sigmoid(-sign * (xi @ w)) * xi
        a = a + torch.outer(g, g)
        w = w - torch.linalg.solve(a, g) / gamma
    torch.testing.assert_close(fitted.q.mean, w)
    torch.testing.assert_close(fitted.q.precision, gamma * a)
    assert fitted.history == pytest.approx(total)


def test_a_step_of_the_rule_is_a_mirror_descent() -> None:
    """q_{t+1} makes ⟨∇, μ⟩ + KL(q ‖ q_t)/ρ least: any other member has more (K&R 22)."""
    x, y, rho = draws(6, 2, seed=2), torch.ones(6).double(), 0.3
    q = FullGaussian(torch.ones(2).double(), torch.eye(2).double())
    site = {k: v.sum(0) for k, v in linear(1.0).site((x, y)).items()}
    moved = blr_step(q, scale(site, -1.0), rho)
    whole = subtract(q.natural, site)  # of the negative log-likelihood and the entropy

    def objective(p: FullGaussian) -> float:
        inner = sum((whole[k] * p.expectation[k]).sum() for k in whole)
        return float(inner + p.kl(q) / rho)

    for seed in range(20):
        root = torch.eye(2).double() + 0.05 * draws(2, 2, seed=seed)
        mean = moved.mean + 0.05 * draws(2, seed=seed + 20)
        other = FullGaussian(mean, root @ moved.precision @ root.mT)
        assert objective(other) > objective(moved)


@pytest.mark.parametrize("along", ["natural", "expectation"])
def test_natural_gradients_of_a_likelihood_find_its_maximum(along: str) -> None:
    """Gamma: log k − ψ(k) = log mean − mean log, the equation of its maximum."""
    y = torch.tensor([0.5, 1.0, 2.5, 4.0, 1.5]).double()
    q = Gamma(number(1.0), number(1.0))
    for _ in range(25):
        q = likelihood_step(q, y, 1.0, along=along)
    k = q.shape
    torch.testing.assert_close(k.log() - torch.digamma(k), y.mean().log() - y.log().mean())
    torch.testing.assert_close(k / q.rate, y.mean())


def test_a_natural_gradient_by_hand() -> None:
    """F⁻¹ ∇ with the Fisher matrix of a gamma, entry by entry (K&R 19)."""
    q = Gamma(number(2.0), number(1.5))
    y = torch.tensor([0.5, 1.0, 2.5]).double()
    a, b = q.shape, q.rate
    fisher = torch.tensor([[torch.polygamma(1, a), 1 / b], [1 / b, a / b**2]]).double()
    gap = torch.stack([y.log().mean() - (torch.digamma(a) - b.log()), y.mean() - a / b])
    wanted = torch.stack([a - 1, -b]) + 0.2 * torch.linalg.solve(fisher, gap)
    found = likelihood_step(q, y, 0.2)
    torch.testing.assert_close(torch.stack([found.shape - 1, -found.rate]), wanted)
