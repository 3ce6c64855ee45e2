"""The rule, and that the rows are it: each step beside torch's optimizers, a minimiser, or the
natural parameters written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inference_problems import F64
from optimizer_makers import N, loss_of, network, step
from optimizer_papers import BATCH, START, Run, learned
from scipy import optimize
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule import blr_step, mirror_step, natural_momentum, optim
from blr_analysis.learning_rule.expectations import NO_CURVATURE
from blr_analysis.learning_rule.families import (
    BernoulliFamily,
    Beta,
    CategoricalFamily,
    DiagonalGaussian,
    ExponentialFamily,
    FixedFullGaussian,
    FixedGaussian,
    FullGaussian,
    Gamma,
    GaussianMixture,
    Natural,
)
from blr_analysis.learning_rule.inference import GaussianMixtureEM, SkewNormal, likelihood_step
from blr_analysis.learning_rule.inference.fitted import NotConverged
from blr_analysis.learning_rule.inference.functions import newton_step
from blr_analysis.learning_rule.inference.skew_normal import skew_step
from blr_analysis.learning_rule.moves import Block, Move
from blr_analysis.learning_rule.moves import step as move_step

THETA = torch.tensor([0.3, -0.7, 0.2, 1.0], dtype=F64)
SCALES = torch.tensor([4.0, 9.0, 2.0, 30.0], dtype=F64)
ROOT = torch.tensor([[2.0, 0.0, 0.0, 0.0], [1, 3, 0, 0], [0, 1, 1, 0], [2, 0, 1, 2]], dtype=F64)
MATRIX = ROOT @ ROOT.mT


def loss(theta: Tensor) -> Tensor:
    return (theta - 1).square().square().sum() + theta.cos().prod()


slope = torch.func.grad(loss)
bend = torch.func.hessian(loss)


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Fixed covariances: gradient descent and momentum ------------------------------------------------


def test_gradient_descent_is_the_rule_with_a_fixed_covariance() -> None:
    """K&R 1.3.1 and 35: torch's SGD where S = I, S⁻¹∇ℓ for any other."""
    theta = torch.nn.Parameter(THETA.clone())
    descent = torch.optim.SGD([theta], lr=0.05)
    q = FixedGaussian(THETA, torch.ones_like(THETA))
    diagonal = FixedGaussian(THETA, SCALES)
    full = FixedFullGaussian(THETA, MATRIX)
    moved = [THETA.clone()]
    by_hand = [THETA, THETA]
    for _ in range(10):
        descent.zero_grad()
        loss(theta).backward()
        descent.step()
        q = blr_step(q, q.pull_back(slope(q.mean)), 0.05)
        diagonal = blr_step(diagonal, diagonal.pull_back(slope(diagonal.mean)), 0.05)
        full = blr_step(full, full.pull_back(slope(full.mean)), 0.05)
        block = Block(moved, [slope(moved[0])])
        move_step(block, NO_CURVATURE, Move(), {"lr": 0.05, "weight_decay": 0.0}, 1)
        by_hand[0] = by_hand[0] - 0.05 * slope(by_hand[0]) / SCALES
        by_hand[1] = by_hand[1] - 0.05 * torch.linalg.solve(MATRIX, slope(by_hand[1]))
    close(q.mean, theta.detach())
    close(moved[0], theta.detach())
    close(diagonal.mean, by_hand[0])
    close(full.mean, by_hand[1])


def test_natural_momentum_is_the_heavy_ball_where_the_covariance_is_fixed() -> None:
    """K&R 75: torch's SGD with momentum, in coordinates where S = I."""
    q = previous = FixedGaussian(THETA, SCALES)
    scaled = torch.nn.Parameter(THETA * SCALES.sqrt())
    heavy_ball = torch.optim.SGD([scaled], lr=0.05, momentum=0.8)
    for _ in range(20):
        gradient = q.pull_back(slope(q.mean))
        after = natural_momentum(q, previous, gradient, 0.05, 0.8)
        previous = q
        q = after
        heavy_ball.zero_grad()
        loss(scaled / SCALES.sqrt()).backward()
        heavy_ball.step()
    close(q.mean, scaled.detach() / SCALES.sqrt())
    with pytest.raises(InputError, match="gamma"):
        natural_momentum(q, previous, gradient, 0.05, -0.1)


def test_natural_momentum_with_a_precision_that_moves() -> None:
    """S' = (1 − ρ)S + ρH + γ(S − S₋),  S'(m' − m) = −ρ g + γ S₋ (m − m₋), from K&R 80."""
    previous = DiagonalGaussian(THETA + 0.1, SCALES * 1.1)
    q = DiagonalGaussian(THETA, SCALES)
    g = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=F64)
    h = torch.tensor([2.0, 1.0, 7.0, 0.1], dtype=F64)
    after = natural_momentum(q, previous, q.pull_back(g, h), 0.3, 0.2)
    precision = 0.7 * SCALES + 0.3 * h + 0.2 * (SCALES - previous.precision)
    shift = -0.3 * g + 0.2 * previous.precision * (THETA - previous.mean)
    close(after.precision, precision)
    close(after.mean, THETA + shift / precision)


# Mirror descent ----------------------------------------------------------------------------------

MEMBERS: dict[str, ExponentialFamily] = {
    "Gamma": Gamma(torch.tensor(3.0, dtype=F64), torch.tensor(2.0, dtype=F64)),
    "Beta": Beta(torch.tensor(2.0, dtype=F64), torch.tensor(1.5, dtype=F64)),
    "categorical": CategoricalFamily(torch.tensor([0.3, -0.4], dtype=F64)),
    "signs": BernoulliFamily(torch.tensor([0.2, -0.5], dtype=F64)),
    "Gaussian": DiagonalGaussian(THETA[:1], SCALES[:1]),
    "fixed Gaussian": FixedGaussian(THETA[:2], SCALES[:2]),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_mirror_descent_is_the_rule_and_the_minimum_of_its_objective(name: str) -> None:
    """K&R 22, minimised over members by their natural parameters, without the mirror map."""
    q = MEMBERS[name]
    rho = 0.4
    generator = torch.Generator().manual_seed(0)
    gradient = {
        key: 0.3 * torch.randn(value.shape, generator=generator, dtype=F64) - value
        for key, value in q.natural.items()
    }
    mu = mirror_step(q, q.expectation, gradient, rho)
    after = blr_step(q, gradient, rho)
    close(mu, after.expectation, 1e-10)

    keys = list(q.natural)
    sizes = [q.natural[key].numel() for key in keys]

    def objective(entries: Any) -> tuple[float, Any]:
        flat = torch.tensor(entries, dtype=F64, requires_grad=True)
        parts = flat.split(sizes)
        natural = {key: part.view_as(q.natural[key]) for key, part in zip(keys, parts, strict=True)}
        member = q.with_natural(natural)
        slopes = {key: gradient[key] + q.natural[key] + q.base_gradient()[key] for key in keys}
        linear = sum((slopes[key] * value).sum() for key, value in member.expectation.items())
        value = linear + member.kl(q) / rho
        (actual,) = torch.autograd.grad(value, flat)
        return float(value.detach()), actual.numpy()

    start = torch.cat([q.natural[key].reshape(-1) for key in keys]).numpy()
    minimum = optimize.minimize(objective, start, jac=True, method="BFGS", tol=1e-12)
    actual = torch.cat([after.natural[key].reshape(-1) for key in keys])
    close(torch.tensor(minimum.x), actual, 1e-5)


def data_of(name: str) -> Tensor:
    return MEMBERS[name].sample(50, generator=torch.Generator().manual_seed(1))


def mean_log_likelihood(q: ExponentialFamily, theta: Tensor) -> Tensor:
    return q.log_prob(theta).mean(0).sum()


@pytest.mark.parametrize("name", ["Gamma", "Beta", "categorical", "signs", "fixed Gaussian"])
def test_steps_of_maximum_likelihood(name: str) -> None:
    """They are autograd's gradients in λ and in μ, and minima of mirror descent's objective."""
    q = MEMBERS[name]
    theta = data_of(name)
    rho = 0.3

    def differentiated(make: Any, parameters: Natural) -> Natural:
        leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
        value = mean_log_likelihood(make(leaves), theta)
        slopes = torch.autograd.grad(value, list(leaves.values()))
        return dict(zip(leaves, slopes, strict=True))

    in_natural = differentiated(q.with_natural, q.natural)
    in_expectation = differentiated(q.with_expectation, q.expectation)
    plain = likelihood_step(q, theta, rho, along="gradient")
    natural = likelihood_step(q, theta, rho, along="natural")
    mirror = likelihood_step(q, theta, rho, along="mirror")
    for key, value in q.natural.items():
        close(plain.natural[key], value + rho * in_natural[key], 1e-10)
        close(natural.natural[key], value + rho * in_expectation[key], 1e-7)
        # ∇_λ' of ⟨T̄ − μ, λ'⟩ − KL(q ‖ q_λ') / ρ is 0 there
        pull = in_natural[key] - (mirror.expectation[key] - q.expectation[key]) / rho
        close(pull, torch.zeros_like(pull), 1e-9)
    again = likelihood_step(q, theta, rho, along="expectation")
    close(again.natural, mirror.natural)


# Rows whose code writes its own step -------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.3, 1.0])
def test_newton_on_a_function_is_the_rule_and_a_retraction(rho: float) -> None:
    q = FullGaussian(THETA, MATRIX)
    gradient = slope(THETA)
    hessian = bend(THETA) + 3 * torch.eye(4, dtype=F64)
    actual = newton_step(q, gradient, hessian - MATRIX, rho)
    change = hessian - MATRIX
    retraction = 0.5 * rho**2 * change @ torch.linalg.solve(MATRIX, change)
    precision = MATRIX + rho * change + (retraction if rho < 1 else 0)
    close(actual.precision, precision, 1e-10)
    close(actual.mean, THETA - rho * torch.linalg.solve(precision, gradient), 1e-10)


def test_the_skew_normal_moves_by_the_rule_with_its_own_entropy() -> None:
    """λ + ρ ∇_μ ELBO, the gradient by differences through the expectation parameters."""
    q = SkewNormal(*torch.tensor([0.2, 1.5, 0.8], dtype=F64))

    def log_joint(theta: Tensor) -> Tensor:
        return 2 * theta - theta.exp()

    actual = skew_step(q, log_joint, 0.4)
    for key, value in q.expectation.items():

        def elbo_at(changed: Tensor, key: str = key) -> float:
            moved = SkewNormal.from_expectation({**q.expectation, key: changed})
            return float(moved.elbo(log_joint))

        step_size = 1e-5
        gradient = (elbo_at(value + step_size) - elbo_at(value - step_size)) / (2 * step_size)
        expected = float(q.natural[key]) + 0.4 * gradient
        assert float(actual.natural[key]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("covariance", ["full", "diag"])
def test_em_is_the_rule_for_classes_and_mirror_descent_for_components(covariance: str) -> None:
    """E-step: Bayes at ρ = 1. M-step at ρ: the mirror of the expected complete likelihood."""
    rho = 0.4
    mean = torch.tensor([[-1.0, 0.0], [1.5, 0.5]], dtype=F64)
    if covariance == "full":
        identities = torch.eye(2, dtype=F64).expand(2, 2, 2).contiguous()
        components: Any = FullGaussian(mean, identities)
    else:
        components = DiagonalGaussian(mean, torch.ones_like(mean))
    q = GaussianMixture(torch.tensor([0.4, 0.6], dtype=F64), components)
    y = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    uniform = CategoricalFamily(torch.zeros(30, 1, dtype=F64))
    log_joint = q.weights.log() + components.log_prob(y.unsqueeze(1))
    log_odds = {"indicator": -(log_joint[:, :1] - log_joint[:, 1:])}
    responsibilities = blr_step(uniform, log_odds, 1.0).probs
    close(responsibilities, q.marginal.responsibilities(y), 1e-10)

    with pytest.warns(NotConverged):
        fitted = GaussianMixtureEM(2, covariance, floor=1e-12).fit(
            y, start=q, rho=rho, max_iter=1, progress=False
        )
    statistics = components.statistics(y.unsqueeze(1))
    actual = fitted.q.expectation  # of the joint: π_k μ_k
    for key, value in statistics.items():
        complete = torch.einsum(
            "nk,nk...->k...", responsibilities, value.expand(30, 2, *value.shape[2:])
        )
        expected = (1 - rho) * q.expectation[key] + rho * complete / 30
        close(actual[key], expected, 1e-8)


@pytest.mark.parametrize(("kind", "rows"), [(optim.OGGN, "curved"), (optim.SLANG, "each")])
def test_structured_rows_take_the_rules_step(kind: Any, rows: str) -> None:
    """Without momentum and damping, at lr = 1 − β₂ = ρ, over the whole precision."""
    rho = 0.2
    run = Run()
    model = network()
    optimizer = kind(
        model,
        rank=50,
        lr=rho,
        ess=N,
        weight_decay=0.05,
        beta1=0.0,
        beta2=1 - rho,
        damping=0.0,
        generator=torch.Generator().manual_seed(3),
    )
    identity = torch.eye(len(START), dtype=F64)
    q = FullGaussian(START, learned(model, optimizer))

    def noted() -> Tensor:
        run.drawn_weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return loss_of(model, 1)

    step(kind.__name__, optimizer, noted)
    place = run.drawn_weights[-1]
    factor = getattr(run, rows)(place, 1)
    hessian = N / BATCH * factor.mT @ factor + 0.05 * N * identity
    gradient = N * (run.gradient(place, 1) + 0.05 * q.mean)
    after = blr_step(q, q.pull_back(gradient, hessian), rho)
    close(torch.cat([p.detach().flatten() for p in model.parameters()]), after.mean, 1e-8)
    close(learned(model, optimizer), after.precision, 1e-8)
