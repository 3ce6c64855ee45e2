"""Mixtures of Gaussians: the marginal against torch.distributions, autograd and quadrature."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from scipy import integrate
from torch import Tensor
from torch import distributions as td

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families import (
    DiagonalGaussian,
    FullGaussian,
    Gamma,
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

    mean, root = spread * real(size), real(size, size)
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
    theta = q.marginal.sample(6, generator=torch.Generator().manual_seed(0))
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
    theta = q.marginal.sample(5, generator=torch.Generator().manual_seed(0))
    joint = [q.log_prob({"theta": theta, "component": torch.full((5,), k)}).exp() for k in range(3)]
    wanted = torch.stack(joint, -1) / sum(joint)[:, None]
    torch.testing.assert_close(q.marginal.responsibilities(theta), wanted, rtol=1e-12, atol=1e-12)


def test_a_component_far_from_the_origin_keeps_its_density() -> None:
    components = DiagonalGaussian(
        torch.tensor([[1e6], [1e6 + 1]], dtype=DTYPE), torch.full((2, 1), 1e6, dtype=DTYPE)
    )
    q = GaussianMixture(torch.tensor([0.5, 0.5], dtype=DTYPE), components).marginal
    at = torch.tensor([1e6], dtype=DTYPE)
    wanted = math.log(0.5) + 0.5 * math.log(1e6 / (2 * math.pi))
    torch.testing.assert_close(q.log_prob(at).item(), wanted, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("means", "stds"),
    [((0.0, 0.5, 2.0), (1.0, 1.0, 1.0)), ((-30.0, 0.0, 40.0), (1.0, 2.0, 0.5)),
     ((0.0, 0.1, 5.0), (1.0, 1e-3, 3.0)), ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))],
)  # fmt: skip
def test_entropy_on_the_line(means: tuple[float, ...], stds: tuple[float, ...]) -> None:
    std = torch.tensor(stds, dtype=DTYPE)[:, None]
    q = GaussianMixture(
        WEIGHTS, DiagonalGaussian(torch.tensor(means, dtype=DTYPE)[:, None], std**-2)
    )

    def integrand(x: float) -> float:
        log_q = float(twin(q).log_prob(torch.tensor([x], dtype=DTYPE)))
        return -math.exp(log_q) * log_q

    edges = sorted(
        {m + s * z for m, s in zip(means, stds, strict=True) for z in (-12, -3, 0, 3, 12)}
    )
    wanted = sum(
        integrate.quad(integrand, a, b, epsabs=1e-12, epsrel=1e-12, limit=200)[0]
        for a, b in itertools.pairwise(edges)
    )
    assert q.marginal.entropy().item() == pytest.approx(wanted, rel=0, abs=1e-10)
    full = FullGaussian(q.components.mean, q.components.precision[..., None])
    assert GaussianMixture(WEIGHTS, full).marginal.entropy().item() == pytest.approx(
        wanted, abs=1e-10
    )


def test_entropy_on_the_line_of_copies_and_its_gradient() -> None:
    q = parts("diagonal", 1, (2,))
    alone = [
        GaussianMixture(WEIGHTS, DiagonalGaussian(q.components.mean[i], q.components.precision[i]))
        for i in range(2)
    ]
    wanted = torch.stack([a.marginal.entropy() for a in alone])
    torch.testing.assert_close(q.marginal.entropy(), wanted, rtol=1e-12, atol=1e-12)

    def entropy(mean: Tensor, log_precision: Tensor) -> Tensor:
        return GaussianMixture(
            WEIGHTS, DiagonalGaussian(mean, log_precision.exp())
        ).marginal.entropy()

    at = (alone[0].components.mean.clone(), alone[0].components.precision.log())
    assert torch.autograd.gradcheck(entropy, tuple(t.requires_grad_() for t in at))


def test_entropy_by_draws() -> None:
    """One component: −log q has mean H and variance P/2."""
    one = FullGaussian(torch.zeros(1, 3, dtype=DTYPE), torch.eye(3, dtype=DTYPE)[None])
    q = GaussianMixture(torch.ones(1, dtype=DTYPE), one)
    found = q.marginal.entropy(10_000, generator=torch.Generator().manual_seed(0))
    assert abs(found - one.entropy()[0]) <= 5 * math.sqrt(1.5 / 10_000)
    overlapping = parts("full", 2)
    draws = overlapping.marginal.sample(40_000, generator=torch.Generator().manual_seed(1))
    values = -twin(overlapping).log_prob(draws)
    error = values.std() / 200
    found = overlapping.marginal.entropy(20_000, generator=torch.Generator().manual_seed(2))
    assert abs(found - values.mean()) <= 5 * math.sqrt(2.5) * error
    with pytest.raises(InputError, match="n must be"):
        overlapping.marginal.entropy(0)


@kinds
def test_pull_back_is_the_gradient_in_the_expectation_parameters(kind: str) -> None:
    """E_q[f] of a quadratic f has a closed form in μ: ⟨g, Σ μ_k⟩ + ½⟨H, Σ M_k⟩."""
    q = parts(kind, 2)
    slope, root = (
        torch.tensor([1.0, -2.0], dtype=DTYPE),
        torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=DTYPE),
    )
    curvature = root if kind == "full" else root.diagonal()
    at = {k: v.clone().requires_grad_() for k, v in q.expectation.items()}
    moved = q.with_expectation(at)
    second = moved.expectation["square"].sum(0)
    value = slope @ moved.expectation["linear"].sum(0) + 0.5 * (curvature * second).sum()
    wanted = dict(zip(at, torch.autograd.grad(value, list(at.values())), strict=True))
    mean = q.components.mean
    gradient = slope + (mean @ root if kind == "full" else mean * curvature)
    found = q.pull_back(gradient, curvature.expand(3, *curvature.shape))
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-10, atol=1e-10)


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
        means, stds = q.components.mean, q.components.precision.rsqrt()
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


def test_wrong_mixtures_are_named() -> None:
    components = DiagonalGaussian(torch.zeros(2, 1), torch.ones(2, 1))
    with pytest.raises(InputError, match="sum to 1"):
        GaussianMixture(torch.tensor([0.5, 0.6]), components)
    with pytest.raises(InputError, match="weights must lie above 0"):
        GaussianMixture(torch.tensor([0.0, 1.0]), components)
    with pytest.raises(InputError, match="one weight for each component"):
        GaussianMixture(torch.tensor([0.2, 0.3, 0.5]), components)
    with pytest.raises(InputError, match="components must be a FullGaussian"):
        GaussianMixture(torch.tensor([0.5, 0.5]), Gamma(torch.ones(2), torch.ones(2)))
    q = GaussianMixture(torch.tensor([0.5, 0.5]), components)
    with pytest.raises(InputError, match="from 0 to 1"):
        q.log_prob({"theta": torch.zeros(1), "component": torch.tensor(2)})
    with pytest.raises(InputError, match="same weights"):
        q.kl(GaussianMixture(torch.tensor([0.4, 0.6]), components))
