"""Any family, any loss: closed forms where the posterior is in the family, a grid where not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inference_problems import F64
from torch import Tensor
from torch import distributions as td

from blr_analysis.errors import InputError
from blr_analysis.learning_rule import fit
from blr_analysis.learning_rule.by_samples import estimated
from blr_analysis.learning_rule.families import (
    BernoulliFamily,
    Beta,
    CategoricalFamily,
    DiagonalGaussian,
    Dirichlet,
    ExponentialFamily,
    FixedFullGaussian,
    FixedGaussian,
    FullGaussian,
    Gamma,
    GaussianMixture,
    NormalWishart,
    Wishart,
)
from blr_analysis.learning_rule.inference.fitted import NotConverged

ONE = torch.tensor(1.0)
CENTRE = torch.tensor([3.0, -2.0])
MATRIX = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
COUNTS = torch.tensor([3.0, 5.0, 1.0])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def quadratic(theta: Tensor) -> Tensor:
    gap = theta - CENTRE
    return 0.5 * gap @ MATRIX @ gap


# name → start, loss, λ of the member nearest to exp(−loss), which may be its density exactly
CASES: dict[str, tuple[ExponentialFamily, Callable[[Any], Tensor], dict[str, Any]]] = {
    "Gamma": (Gamma(ONE, ONE), lambda t: -(4 * t.log() - 2 * t), {"log": 4.0, "linear": -2.0}),
    "Gamma, copies": (
        Gamma(torch.ones(3), torch.ones(3)),
        lambda t: -(COUNTS * t.log() - 2 * t).sum(),
        {"log": COUNTS, "linear": torch.full((3,), -2.0)},
    ),
    "Beta": (
        Beta(ONE, ONE),
        lambda t: -(7 * t.log() + 3 * torch.log1p(-t)),
        {"log": 7.0, "log_complement": 3.0},
    ),
    "Dirichlet": (Dirichlet(torch.ones(3)), lambda t: -(COUNTS * t.log()).sum(), {"log": COUNTS}),
    "categorical": (
        CategoricalFamily(torch.zeros(2)),
        lambda k: -torch.tensor([1.0, 0.5, 0.0])[k],
        {"indicator": torch.tensor([1.0, 0.5])},
    ),
    "signs": (
        BernoulliFamily(torch.zeros(3)),
        lambda t: -(torch.tensor([0.5, -1.0, 0.2]) * t).sum(),
        {"linear": torch.tensor([0.5, -1.0, 0.2])},
    ),
    "full Gaussian": (
        FullGaussian(torch.zeros(2), torch.eye(2)),
        quadratic,
        {"linear": MATRIX @ CENTRE, "square": -0.5 * MATRIX},
    ),
    "diagonal Gaussian": (
        DiagonalGaussian(torch.zeros(2), torch.ones(2)),
        quadratic,
        {"linear": torch.tensor([2.0, 3.0]) * CENTRE, "square": -0.5 * torch.tensor([2.0, 3.0])},
    ),
    "fixed Gaussian": (
        FixedGaussian(torch.zeros(2), torch.tensor([3.0, 3.0])),
        quadratic,
        {"linear": 3 * CENTRE},
    ),
    "fixed full Gaussian": (
        FixedFullGaussian(torch.zeros(2), 2 * MATRIX),
        quadratic,
        {"linear": 2 * MATRIX @ CENTRE},
    ),
    "Wishart": (
        Wishart(torch.tensor(4.0), torch.eye(2)),
        lambda t: -(3 * torch.logdet(t) - 0.5 * (t * MATRIX).sum()),
        {"logdet": 3.0, "linear": -0.5 * MATRIX},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_posterior_of_each_family(name: str) -> None:
    start, loss, expected = CASES[name]
    fitted = fit(
        start, loss, rho=0.4, n_iter=60, samples=300, generator=generator(), progress=False
    )
    target = start.with_natural({key: torch.as_tensor(value) for key, value in expected.items()})
    assert type(fitted.q) is type(start)
    assert fitted.converged
    assert bool((fitted.q.kl(target) < 2e-3).all())
    assert float(start.kl(target).sum()) > 0.05  # it had a way to go


@pytest.mark.parametrize("name", ["Gamma", "Beta", "full Gaussian", "fixed Gaussian"])
@pytest.mark.parametrize("gradients", ["path", "score"])
def test_both_gradients_are_that_of_the_expectation(name: str, gradients: str) -> None:
    """The mean of estimates is autograd of the closed form of E_q[ℓ̄], within four errors."""
    start, loss, expected = CASES[name]
    source = generator()
    rounds = [estimated(start, loss, 200, gradients, source)[1] for _ in range(30)]
    mu = {key: value.clone().requires_grad_() for key, value in start.expectation.items()}
    if "Gaussian" in name:
        member: Any = start.with_expectation(mu)
        precision = member.precision
        if precision.ndim == 1:
            precision = torch.diag(precision)
        gap = member.mean - CENTRE
        value = 0.5 * (gap @ MATRIX @ gap + (MATRIX * torch.linalg.inv(precision)).sum())
    else:
        value = -sum(expected[key] * mu[key] for key in mu)
    slopes = torch.autograd.grad(value, list(mu.values()))
    for key, slope in zip(mu, slopes, strict=True):
        estimates = torch.stack([gradient[key] for gradient in rounds])
        error = estimates.std(0) / math.sqrt(len(rounds))
        gap = (estimates.mean(0) - slope).abs()
        assert (gap <= 4 * error + 1e-5).all(), key


def test_a_posterior_that_is_no_gamma_beside_a_grid() -> None:
    """Counts whose rate has a log-normal prior: the nearest Gamma by KL on a grid of θ."""
    y = torch.tensor([2.0, 1.0, 3.0], dtype=F64)

    def loss(theta: Tensor) -> Tensor:
        log_prior = -theta.log() - 0.5 * (theta.log() / 0.8).square()
        return -(y.sum() * theta.log() - len(y) * theta) - log_prior

    start = Gamma(ONE.double(), ONE.double())
    fitted = fit(
        start, loss, rho=0.4, n_iter=80, samples=200, generator=generator(), progress=False
    )
    theta = torch.linspace(1e-4, 12, 600, dtype=F64).unsqueeze(1)
    log_target = -loss(theta)

    def divergence(shape: Tensor, rate: Tensor) -> Tensor:
        log_q = td.Gamma(shape, rate).log_prob(theta)
        return (log_q.exp() * (log_q - log_target)).sum(0) * float(theta[1] - theta[0])

    shapes = torch.linspace(5, 9, 41, dtype=F64)
    rates = torch.linspace(2, 6, 41, dtype=F64)
    pairs = torch.cartesian_prod(shapes, rates)
    best = pairs[divergence(*pairs.unbind(1)).argmin()]
    assert fitted.shape == pytest.approx(float(best[0]), rel=0.03)
    assert fitted.rate == pytest.approx(float(best[1]), rel=0.03)


def test_a_mean_and_a_precision_by_a_loss_of_both() -> None:
    """Draws that are dictionaries: the conjugate posterior of two observations."""
    prior = NormalWishart(torch.zeros(2), ONE, torch.tensor(4.0), torch.eye(2))
    y = torch.tensor([[1.0, 0.5], [-0.5, 2.0]])

    def loss(theta: dict[str, Tensor]) -> Tensor:
        precision = theta["precision"]
        gaps = y - theta["mean"]
        log_likelihood = 0.5 * len(y) * torch.logdet(precision)
        log_likelihood = log_likelihood - 0.5 * (gaps @ precision * gaps).sum()
        # Normal–Wishart of κ = 1, ν = 4, V⁻¹ = I in two dimensions, up to a constant
        log_prior = torch.logdet(precision) - 0.5 * precision.trace()
        log_prior = log_prior - 0.5 * theta["mean"] @ precision @ theta["mean"]
        return -log_likelihood - log_prior

    fitted = fit(prior, loss, rho=0.4, n_iter=40, generator=generator(), progress=False)
    assert fitted.q.kappa == pytest.approx(3.0, rel=0.02)
    assert fitted.q.dof == pytest.approx(6.0, rel=0.02)
    torch.testing.assert_close(fitted.q.mean, y.sum(0) / 3, rtol=0.02, atol=0.02)


def test_losses_that_torch_cannot_vectorise_and_what_has_no_gradient() -> None:
    """One draw after the other, with the same result; steps of a loss by the score."""
    source = generator()

    def branching(theta: Tensor) -> Tensor:
        return -(4 * theta.log() - 2 * theta) if bool(theta > 0) else theta

    settings: dict[str, Any] = {"rho": 0.4, "n_iter": 20, "samples": 20, "progress": False}
    branched = fit(Gamma(ONE, ONE), branching, generator=generator(), **settings)
    vectorised = fit(Gamma(ONE, ONE), CASES["Gamma"][1], generator=generator(), **settings)
    torch.testing.assert_close(branched.q.natural, vectorised.q.natural)
    start = DiagonalGaussian(torch.zeros(1), torch.ones(1))
    settings |= {"n_iter": 200, "samples": 400, "rho": 0.1, "tol": 0.1, "generator": source}
    fitted = fit(
        start,
        lambda t: 4.0 * (t < 0).float().sum() + t.square().sum() / 2,
        gradients="score",
        **settings,
    )
    assert float(fitted.mean) > 0.5  # most of the mass above 0


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: fit(Gamma, CASES["Gamma"][1]), "a member to begin from"),  # type: ignore[type-var]
    (lambda: fit(Gamma(ONE, ONE), lambda t: t * torch.ones(2)), "a number"),
    (lambda: fit(Gamma(ONE, ONE), lambda t: 3.0), "a number"),  # type: ignore[arg-type, return-value]
    (lambda: fit(Gamma(ONE, ONE), lambda t: t / 0), "not finite"),
    (lambda: fit(Gamma(ONE, ONE), lambda t: t.detach() * 2), "no gradient"),
    (
        lambda: fit(CategoricalFamily(torch.zeros(1)), lambda k: k * 1.0, gradients="path"),
        "no path",
    ),
    (lambda: fit(Gamma(ONE, ONE), torch.log, gradients="exact"), "gradients must be"),
    (lambda: fit(Gamma(ONE, ONE), torch.log, samples=1), "samples must be"),
    (lambda: fit(Gamma(ONE, ONE), torch.log, n_iter=3), "n_iter must be"),
    (lambda: fit(Gamma(ONE, ONE), torch.log, rho=2.0, progress=False), "rho must be"),
]


@pytest.mark.parametrize(("call", "word"), BAD)
def test_what_cannot_be(call: Callable[[], Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        call()


@pytest.mark.parametrize(("rho", "n_iter"), [(0.05, 8), (1e-3, 100), (lambda t: 0.1 / t, 40)])
def test_a_fit_that_is_not_at_rest_says_so(rho: Any, n_iter: int) -> None:
    """Also where steps are so small that nothing seems to move."""
    start = DiagonalGaussian(torch.full((1,), -20.0), torch.ones(1))
    with pytest.warns(NotConverged, match="from its rest"):
        fitted = fit(
            start,
            lambda t: t.square().sum(),
            rho=rho,
            n_iter=n_iter,
            generator=generator(),
            progress=False,
        )
    assert not fitted.converged
    assert abs(float(fitted.mean)) > 1


def test_a_mixture_of_gaussians_is_a_family_too() -> None:
    """Both components find the quadratic, each with its own draws."""
    parts = DiagonalGaussian(torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1))
    start = GaussianMixture(torch.tensor([0.5, 0.5]), parts)
    fitted = fit(
        start,
        lambda t: 2 * (t["theta"] - 3).square().sum(),
        rho=0.3,
        n_iter=60,
        samples=200,
        generator=generator(),
        progress=False,
    )
    assert fitted.q.components.mean == pytest.approx(torch.full((2, 1), 3.0), abs=0.1)
