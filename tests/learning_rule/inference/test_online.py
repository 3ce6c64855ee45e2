"""Exponential weights, online Newton steps and natural gradients of likelihoods."""

from __future__ import annotations

import pytest
import torch

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families import (
    Categorical,
    FullGaussian,
    Gamma,
    scale,
    subtract,
)
from blr_analysis.learning_rule.inference import (
    Conjugate,
    OnlineNewton,
    experts,
    likelihood_step,
    linear,
)
from blr_analysis.learning_rule.rule import blr_step

RATE = 0.4


def losses() -> torch.Tensor:
    return torch.rand(25, 4, generator=torch.Generator().manual_seed(0)).double()


def test_exponential_weights_are_hedge() -> None:
    """Round by round in the multiplicative form, with the regret that the theory allows."""
    table = losses()
    fitted = Conjugate(Categorical(torch.zeros(3).double()), experts(4, RATE)).fit(table)
    weights, mix = torch.full((4,), 0.25).double(), 0.0
    for row in table:
        shrunk = weights * (-RATE * row).exp()
        mix -= float(shrunk.sum().log()) / RATE
        weights = shrunk / shrunk.sum()
    torch.testing.assert_close(fitted.q.probs, weights)
    assert -fitted.history[0] / RATE == pytest.approx(mix)
    assert mix <= float(table.sum(0).min()) + torch.tensor(4.0).log() / RATE
    again = Conjugate(Categorical(torch.zeros(3).double()), experts(4, RATE)).fit(table[3:])
    torch.testing.assert_close(fitted.without([0, 1, 2]).probs, again.q.probs)
    with pytest.raises(DataError):
        Conjugate(Categorical(torch.zeros(2).double()), experts(4, RATE)).fit(table)


def test_online_newton_line_by_line() -> None:
    """A ← A + g gᵀ, w ← w − A⁻¹ g / γ (Hazan et al., 2007, without the projection)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 3, generator=generator).double()
    y = (x.sum(1) > 0).double()

    def loss(w: torch.Tensor, example: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
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
    kept = fitted.sites
    torch.testing.assert_close(
        fitted.without(range(30)).natural, prior.natural, rtol=1e-9, atol=1e-9
    )
    assert kept["linear"].shape == (30, 3)


def test_a_step_of_the_rule_is_a_mirror_descent() -> None:
    """q_{t+1} makes ⟨∇, μ⟩ + KL(q ‖ q_t)/ρ least: any other member has more (K&R 22)."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(6, 2, generator=generator).double(), torch.ones(6).double()
    q = FullGaussian(torch.ones(2).double(), torch.eye(2).double())
    site = {k: v.sum(0) for k, v in linear(1.0).site((x, y)).items()}
    rho = 0.3
    gradient = scale(site, -1.0)  # of the negative log-likelihood; with the entropy: + λ
    moved = blr_step(q, gradient, rho)
    whole = subtract(q.natural, site)

    def objective(p: FullGaussian) -> float:
        inner = sum((whole[k] * p.expectation[k]).sum() for k in whole)
        return float(inner + p.kl(q) / rho)

    least = objective(moved)
    for _ in range(20):
        shift = 0.05 * torch.randn(2, generator=generator).double()
        root = torch.eye(2).double() + 0.05 * torch.randn(2, 2, generator=generator).double()
        other = FullGaussian(moved.mean + shift, root @ moved.precision @ root.mT)
        assert objective(other) > least


@pytest.mark.parametrize("along", ["natural", "expectation"])
def test_natural_gradients_of_a_likelihood_find_its_maximum(along: str) -> None:
    """Gamma: log k − ψ(k) = log mean − mean log, the equation of its maximum."""
    y = torch.tensor([0.5, 1.0, 2.5, 4.0, 1.5]).double()
    q = Gamma(torch.tensor(1.0).double(), torch.tensor(1.0).double())
    for _ in range(25):
        q = likelihood_step(q, y, 1.0, along=along)
    k = q.shape
    torch.testing.assert_close(k.log() - torch.digamma(k), y.mean().log() - y.log().mean())
    torch.testing.assert_close(k / q.rate, y.mean())


def test_a_natural_gradient_is_newton_for_a_gaussian_by_hand() -> None:
    """F⁻¹ ∇ against the Fisher matrix from autograd of log p, entry by entry (K&R 19)."""
    q = Gamma(torch.tensor(2.0).double(), torch.tensor(1.5).double())
    y = torch.tensor([0.5, 1.0, 2.5]).double()
    a, b = q.shape, q.rate
    fisher = torch.tensor([[torch.polygamma(1, a), 1 / b], [1 / b, a / b**2]]).double()
    gap = torch.stack([y.log().mean() - (torch.digamma(a) - b.log()), y.mean() - a / b])
    wanted = torch.stack([a - 1, -b]) + 0.2 * torch.linalg.solve(fisher, gap)
    found = likelihood_step(q, y, 0.2)
    torch.testing.assert_close(torch.stack([found.shape - 1, -found.rate]), wanted)
    with pytest.raises(InputError):
        likelihood_step(q, y, 0.2, along="theta")


def test_losses_that_are_none_and_no_examples_are_named() -> None:
    prior = FullGaussian(torch.zeros(2).double(), torch.eye(2).double())
    with pytest.raises(InputError, match="a number"):
        OnlineNewton(prior, lambda theta, y: theta - y, 1.0).fit(torch.ones(2).double())
    with pytest.raises(DataError, match="no examples"):
        OnlineNewton(prior, lambda theta, y: theta.sum(), 1.0).fit(torch.empty(0))
