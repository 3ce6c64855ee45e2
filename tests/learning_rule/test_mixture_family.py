"""Mixtures of Gaussians: the marginal against torch.distributions, autograd and quadrature."""

from __future__ import annotations

import math

import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor
from torch import distributions as td

from blr_analysis.learning_rule.families import (
    DiagonalGaussian,
    FullGaussian,
    GaussianMixture,
    add,
    scale,
)

DTYPE = torch.float64
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=DTYPE)


def parts(
    kind: str, size: int, copies: tuple[int, ...] = (), spread: float = 1.0
) -> GaussianMixture:
    generator = torch.Generator().manual_seed(size)

    def real(*event: int) -> Tensor:
        return torch.randn((*copies, 3, *event), generator=generator, dtype=DTYPE)

    mean = spread * real(size)
    root = real(size, size)
    weights = WEIGHTS.expand(*copies, 3)
    if kind == "diagonal":
        return GaussianMixture(weights, DiagonalGaussian(mean, real(size).exp()))
    precision = root @ root.mT + 0.5 * torch.eye(size, dtype=DTYPE)
    return GaussianMixture(weights, FullGaussian(mean, precision))


def twin(q: GaussianMixture) -> td.MixtureSameFamily:
    precision = q.components.precision
    if isinstance(q.components, DiagonalGaussian):
        precision = torch.diag_embed(precision)
    inner = td.MultivariateNormal(q.components.mean, precision_matrix=precision)
    return td.MixtureSameFamily(td.Categorical(q.weights), inner)


kinds = pytest.mark.parametrize("kind", ["full", "diagonal"])


@kinds
@pytest.mark.parametrize("copies", [(), (2,)])
def test_the_marginal_and_its_derivatives(kind: str, copies: tuple[int, ...]) -> None:
    q = parts(kind, 3, copies)
    theta = q.sample(6, generator=torch.Generator().manual_seed(0))["theta"]
    torch.testing.assert_close(
        q.marginal.log_prob(theta), twin(q).log_prob(theta), rtol=1e-12, atol=1e-12
    )
    for _ in range(2):  # once at draws, once far out, where responsibilities are 0 and 1
        points = theta.clone().requires_grad_()
        (score,) = torch.autograd.grad(twin(q).log_prob(points).sum(), points, create_graph=True)
        rows = [
            torch.autograd.grad(score[..., i].sum(), points, retain_graph=True)[0] for i in range(3)
        ]
        torch.testing.assert_close(q.marginal.score(theta), score, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            q.marginal.hessian(theta), torch.stack(rows, -1), rtol=1e-9, atol=1e-9
        )
        theta = 20 * theta


@kinds
def test_responsibilities_are_bayes_rule(kind: str) -> None:
    q = parts(kind, 2)
    theta = q.sample(5, generator=torch.Generator().manual_seed(0))["theta"]
    joint = [q.log_prob({"theta": theta, "component": torch.full((5,), k)}).exp() for k in range(3)]
    reference = torch.stack(joint, -1) / sum(joint)[:, None]
    torch.testing.assert_close(
        q.marginal.responsibilities(theta), reference, rtol=1e-12, atol=1e-12
    )


def test_a_component_far_from_the_origin_keeps_its_density() -> None:
    components = DiagonalGaussian(
        torch.tensor([[1e6], [1e6 + 1]], dtype=DTYPE), torch.full((2, 1), 1e6, dtype=DTYPE)
    )
    q = GaussianMixture(torch.tensor([0.5, 0.5], dtype=DTYPE), components).marginal
    at = torch.tensor([1e6], dtype=DTYPE)
    reference = math.log(0.5) + 0.5 * math.log(1e6 / (2 * math.pi))
    torch.testing.assert_close(q.log_prob(at).item(), reference, rtol=1e-14, atol=0)


@kinds
def test_pull_back_is_the_gradient_in_the_expectation_parameters(kind: str) -> None:
    """E_q[f] of a quadratic f has a closed form in μ: ⟨g, Σ μ_k⟩ + ½⟨H, Σ M_k⟩."""
    q = parts(kind, 2)
    slope = torch.tensor([1.0, -2.0], dtype=DTYPE)
    root = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=DTYPE)
    curvature = root if kind == "full" else root.diagonal()
    at = {k: v.clone().requires_grad_() for k, v in q.expectation.items()}
    moved = q.with_expectation(at)
    second = moved.expectation["square"].sum(0)
    value = slope @ moved.expectation["linear"].sum(0) + 0.5 * (curvature * second).sum()
    reference = dict(zip(at, torch.autograd.grad(value, list(at.values())), strict=True))
    mean = q.components.mean
    gradient = slope + (mean @ root if kind == "full" else mean * curvature)
    actual = q.pull_back(gradient, curvature.expand(3, *curvature.shape))
    for key in reference:
        torch.testing.assert_close(actual[key], reference[key], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_the_step_of_the_rule_for_mixtures_reaches_a_mixture_target() -> None:
    """ℓ̄ = −log p with p a mixture: λ_k ← λ_k − ρ ∇_μ_k E_q[ℓ̄ + log q] (K&R 28) stops at p."""
    target = parts("diagonal", 1, spread=6.0)
    start = DiagonalGaussian(target.components.mean + 0.3, 1.3 * target.components.precision)
    q = GaussianMixture(WEIGHTS, start)

    def rise(theta: Tensor) -> tuple[Tensor, Tensor]:
        score = q.marginal.score(theta) - target.marginal.score(theta)
        hessian = q.marginal.hessian(theta) - target.marginal.hessian(theta)
        return score, hessian.squeeze(-1)

    places, shares = (torch.from_numpy(x) for x in _hermite(60))
    for _ in range(1500):
        means = q.components.mean
        stds = q.components.precision.rsqrt()
        nodes = means + stds * places[:, None, None]
        score, hessian = rise(nodes)
        expected = [(shares[:, None, None] * v).sum(0) for v in (score, hessian)]
        q = q.with_natural(add(q.natural, scale(q.pull_back(*expected), -0.3)))
    torch.testing.assert_close(q.components.mean, target.components.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        q.components.precision, target.components.precision, rtol=1e-6, atol=1e-6
    )


def _hermite(count: int):

    places, shares = hermegauss(count)
    return places, shares / math.sqrt(2 * math.pi)
