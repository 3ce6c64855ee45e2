"""Integrals over Gaussian numbers by rules of their own, from narrow Gaussians to wide ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy.special import expit, gammaln, log_ndtr, ndtr
from scipy.stats import norm
from torch import Tensor

from blr_analysis.learning_rule.families import DiagonalGaussian
from blr_analysis.learning_rule.inference import scalar_likelihoods as quadrature
from blr_analysis.learning_rule.inference.scalar_likelihoods import (
    Inaccurate,
    ScalarLikelihood,
    expected,
    expected_log_prob,
    expected_mean,
    log_expected,
    log_predictive,
    scalar_likelihood,
)
from blr_analysis.likelihoods import Gaussian

Oracle = Callable[[float, Any], Any]
NOISE = 0.1  # of Student's t with 4 degrees of freedom


def student(y: Tensor, f: Tensor) -> Tensor:
    return -2.5 * torch.log1p((y - f).square() / (4 * NOISE**2)) + math.log(0.375 / NOISE)


def plain_counts(y: Tensor, f: Tensor) -> Tensor:
    """Poisson as a user writes it: no closed form is known."""
    return y * f - f.exp() - torch.lgamma(y + 1)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def counts(y: float, f: Any) -> Any:
    return y * f - np.exp(f) - gammaln(y + 1)


# likelihood, its log-probability and its mean in NumPy, targets
CASES: dict[str, tuple[ScalarLikelihood, Oracle, Oracle | None, tuple[float, ...]]] = {
    "bernoulli": (
        scalar_likelihood("bernoulli"),
        lambda y, f: -np.logaddexp(0, (1 - 2 * y) * f),
        lambda y, f: expit(f),
        (0.0, 1.0),
    ),
    "probit": (
        scalar_likelihood("probit"),
        lambda y, f: log_ndtr((2 * y - 1) * f),
        lambda y, f: ndtr(f),
        (0.0, 1.0),
    ),
    "gaussian": (
        scalar_likelihood(Gaussian(0.3)),
        lambda y, f: -((y - f) ** 2) / 0.6 - math.log(2 * math.pi * 0.3) / 2,
        lambda y, f: f,
        (-1.0, 2.5),
    ),
    "poisson": (scalar_likelihood("poisson"), counts, lambda y, f: np.exp(f), (0.0, 7.0)),
    "plain counts": (scalar_likelihood(plain_counts), counts, None, (0.0, 7.0)),
    "Student": (
        scalar_likelihood(student),
        lambda y, f: -2.5 * np.log1p((y - f) ** 2 / (4 * NOISE**2)) + math.log(0.375 / NOISE),
        None,
        (-1.0, 2.5),
    ),
}
NODES, WEIGHTS = np.polynomial.legendre.leggauss(100)


def integral(f: Callable[[Any], Any], mean: float, sd: float) -> float:
    """∫ f(t) N(t | m, sd²) dt, by Gauss and Legendre on panels that narrow towards what bends."""
    edges = {mean + sd * k for k in range(-12, 13, 3)} | {mean + sd**2}
    bends = [c + w for c in (-1.0, 0.0, 2.0, 2.5) for w in (-8, -1, -0.3, 0, 0.3, 1, 8)]
    points = np.array(sorted(edges | {b for b in bends if min(edges) < b < max(edges)}))
    center, half = (points[1:] + points[:-1]) / 2, np.diff(points) / 2
    t = center + half * NODES[:, None]
    with np.errstate(over="ignore"):  # exp(−∞) is 0
        return float((f(t) * norm.pdf(t, mean, sd) * half * WEIGHTS[:, None]).sum())


def numbers(mean: float, sd: float) -> DiagonalGaussian:
    return DiagonalGaussian(double(mean), double(sd) ** -2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sd", [0.1, 1.0, 5.0, 20.0, 100.0])
def test_every_likelihood_at_every_width(name: str, sd: float) -> None:
    likelihood, oracle, mean_of, targets = CASES[name]
    for target, mean in zip(targets, (0.3 * sd, -0.7 * sd), strict=True):
        f, y = numbers(mean, sd), double(target)
        wanted = math.log(integral(lambda t, y=target: np.exp(oracle(y, t)), mean, sd))
        assert float(log_predictive(likelihood, f, y)) == pytest.approx(wanted, rel=1e-9)
        grows = name in ("poisson", "plain counts")
        if not grows or sd <= 5:
            wanted = integral(lambda t, y=target: oracle(y, t), mean, sd)
            found = float(expected_log_prob(likelihood, f, y))
            assert found == pytest.approx(wanted, rel=1e-9)
        if mean_of is not None and (not grows or sd <= 5):
            wanted = integral(lambda t, m=mean_of: m(0.0, t), mean, sd)
            assert float(expected_mean(likelihood, f)) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "sd"),
    [(n, s) for n in ("bernoulli", "probit", "Student") for s in (0.1, 3.0, 100.0)]
    + [("poisson", 0.1), ("poisson", 3.0)],
)
def test_derivatives_in_mean_and_variance(name: str, sd: float) -> None:
    """∂E/∂m = E[∇], ∂E/∂v = ½ E[∇²] = E[z ∇] / (2 sd), integrals of their own."""
    likelihood, _, _, targets = CASES[name]
    target = targets[1]
    slopes: dict[str, Callable[[Any], Any]] = {
        "bernoulli": lambda t: expit(-t),
        "probit": lambda t: np.exp(norm.logpdf(t) - log_ndtr(t)),
        "poisson": lambda t: target - np.exp(t),
        "Student": lambda t: 5 * (target - t) / (4 * NOISE**2 + (target - t) ** 2),
    }
    center = 0.4 * sd
    mean = double(center).requires_grad_()
    variance = double(sd**2).requires_grad_()
    f, y = DiagonalGaussian(mean, 1 / variance), double(target)
    found = torch.autograd.grad(expected_log_prob(likelihood, f, y).sum(), (mean, variance))
    slope = integral(slopes[name], center, sd)
    bend = integral(lambda t: slopes[name](t) * (t - center) / (2 * sd**2), center, sd)
    assert float(found[0]) == pytest.approx(slope, rel=1e-8, abs=1e-12)
    assert float(found[1]) == pytest.approx(bend, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize(("y", "sd"), [(100.0, 0.1), (10_000.0, 0.1), (1000.0, 10.0), (3.0, 20.0)])
def test_counts_that_pull_the_mass_away(y: float, sd: float) -> None:
    """log p pulls the integrand up to 90 standard deviations from the mean of f."""

    def counts(y: float, f: Any) -> Any:
        return y * f - mpmath.exp(f) - mpmath.loggamma(y + 1)

    mode = mpmath.findroot(lambda t: y - mpmath.exp(t) - t / sd**2, min(math.log(y), y * sd**2))
    width = 1 / mpmath.sqrt(mpmath.exp(mode) + 1 / sd**2)

    def integrand(t: Any) -> Any:
        return mpmath.exp(counts(y, t) - counts(y, mode) - (t**2 - mode**2) / (2 * sd**2))

    area = mpmath.quad(integrand, [mode + k * width for k in range(-60, 31, 3)])
    shift = counts(y, mode) - mode**2 / (2 * sd**2)
    wanted = shift + mpmath.log(area) - mpmath.log(2 * mpmath.pi * sd**2) / 2
    found = log_predictive(scalar_likelihood("poisson"), numbers(0.0, sd), double(y))
    assert float(found) == pytest.approx(float(wanted), rel=1e-9)


def test_exponentials_of_wide_numbers_are_reached() -> None:
    """E[e^f] = e^{v/2}: at sd = 20 the mass is 20 standard deviations out."""
    f = DiagonalGaussian(torch.zeros(2).double(), double(1 / 9, 1 / 400))
    torch.testing.assert_close(expected(f, torch.exp), (0.5 / f.precision).exp(), rtol=1e-9, atol=0)
    torch.testing.assert_close(log_expected(f, lambda t: t), 0.5 / f.precision, rtol=1e-9, atol=0)


def test_wide_and_narrow_side_by_side_and_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sd = double(0.1, 3.0, 80.0, 1.0)
    mean = double(0.0, 1.0, -50.0, 2.0).requires_grad_()
    f, y = DiagonalGaussian(mean, sd**-2), double(1.0, 0.0, 1.0, 1.0)
    likelihood = CASES["bernoulli"][0]

    def run() -> tuple[Tensor, Tensor, Tensor]:
        values = expected_log_prob(likelihood, f, y)
        (slope,) = torch.autograd.grad(values.sum(), mean)
        return values, slope, log_predictive(likelihood, f, y)

    whole = run()
    monkeypatch.setattr(quadrature, "BLOCK", 100)  # 25 nodes at once
    for ours, theirs in zip(run(), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    alone = [expected_log_prob(likelihood, numbers(float(m), float(s)), y[i : i + 1])
             for i, (m, s) in enumerate(zip(mean.detach(), sd, strict=True))]  # fmt: skip
    torch.testing.assert_close(torch.cat(alone), whole[0].detach(), rtol=1e-9, atol=1e-12)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def function(t: Tensor) -> Tensor:
        seen.append(t.numel())
        return torch.sigmoid(t)

    f = DiagonalGaussian(torch.zeros(1000).double(), torch.full((1000,), 1e-4).double())
    expected(f, function)
    assert max(seen) <= quadrature.BLOCK and sum(seen) > quadrature.BLOCK


def test_single_precision() -> None:
    f = DiagonalGaussian(torch.tensor([0.0, 30.0]), torch.tensor([1.0, 1e-4]))
    y = torch.tensor([1.0, 0.0])
    for name in ("bernoulli", "probit"):
        likelihood = scalar_likelihood(name)
        wide = DiagonalGaussian(f.mean.double(), f.precision.double())
        found = log_predictive(likelihood, f, y)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), log_predictive(likelihood, wide, y.double()),
                                   rtol=1e-5, atol=1e-5)  # fmt: skip


def test_a_narrow_peak_in_a_wide_number_is_not_missed() -> None:
    """A robust likelihood, flat but for a peak: nodes √v apart agree with each other without it."""

    def log_robust(t: Tensor) -> Tensor:
        peak = -0.5 * (t - 7.3).square() + math.log(0.95 / math.sqrt(2 * math.pi))
        return torch.logaddexp(peak, torch.full_like(t, math.log(5e-5)))

    f = numbers(0.0, 1000.0)
    peak = 0.95 * math.exp(-0.5 * 7.3**2 / 1_000_001) / math.sqrt(2 * math.pi * 1_000_001)
    assert float(log_expected(f, log_robust)) == pytest.approx(math.log(peak + 5e-5), rel=1e-9)


def test_what_the_most_nodes_do_not_settle_is_said() -> None:
    def steps(t: Tensor) -> Tensor:
        return (t > 0.3).to(t)

    with pytest.warns(Inaccurate, match=r"uncertain by .* at 55297 nodes.*up to 3"):
        expected(numbers(0.0, 3.0), steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = expected(numbers(0.0, 3.0), torch.abs)  # a kink is settled
    assert float(found) == pytest.approx(3 * math.sqrt(2 / math.pi), rel=1e-7)
