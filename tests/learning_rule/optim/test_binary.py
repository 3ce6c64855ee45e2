"""BayesBiNN and straight-through estimation: transcriptions, the rule itself, and their limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from looks import distance, look, values
from torch import Tensor, nn

from blr_analysis.learning_rule.families import CategoricalFamily
from blr_analysis.learning_rule.optim.binary import (
    STE,
    BayesBiNN,
    draw_signs,
    logistic_noise,
    relax,
    relaxed_slope,
    signs,
)
from blr_analysis.learning_rule.rule import blr_step

N, BATCH = 120, 20


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    return nn.Sequential(*layers).double()


def minibatches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (N,), generator=generator)
    for step in range(steps):
        start = BATCH * step % N
        yield x[start : start + BATCH], y[start : start + BATCH]


def loss_at(model: nn.Module, weights: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    names = [name for name, _ in model.named_parameters()]
    outputs = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x,))
    return nn.functional.cross_entropy(outputs, y)


def gradient(model: nn.Module, weights: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    leaves = [w.clone().requires_grad_() for w in weights]
    return list(torch.autograd.grad(loss_at(model, leaves, x, y), leaves))


# Relaxed signs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [2.0, 1.0, 0.3])
def test_the_slope_is_the_derivative_along_the_mean(temperature: float) -> None:
    torch.manual_seed(2)
    mean = (2 * torch.rand(50, dtype=torch.float64) - 1).requires_grad_()
    noise = logistic_noise(mean.detach())
    relaxed = relax(torch.atanh(mean), noise, temperature)
    (derivative,) = torch.autograd.grad(relaxed.sum(), mean)
    slope = relaxed_slope(torch.atanh(mean.detach()), noise, temperature)
    torch.testing.assert_close(slope, derivative, rtol=1e-9, atol=1e-12)


def test_the_slope_keeps_its_digits_where_tanh_rounds_to_one() -> None:
    half_logit = torch.tensor([25.0, -30.0, 12.0])
    assert torch.tanh(half_logit).abs().eq(1).all()  # 1 − μ² is 0 in float32
    noise = torch.tensor([-20.0, 3.0, 0.5])
    wanted = (half_logit.double().cosh() / (half_logit + noise).double().cosh()) ** 2
    found = relaxed_slope(half_logit, noise, 1.0)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=0)


def test_the_mean_slope_is_one_at_temperature_zero() -> None:
    """Straight-through estimation's identity, E[s] → dE[sign(λ + δ)]/dμ = 1."""
    uniform = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    noise = (uniform.log() - torch.log1p(-uniform)) / 2
    half_logit = torch.full_like(noise, 0.3)
    errors = [abs(relaxed_slope(half_logit, noise, t).mean().item() - 1) for t in (0.4, 0.2, 0.1)]
    assert errors[1] < errors[0] / 3 and errors[2] < errors[1] / 3  # of second order in τ
    assert errors[2] < 0.02


def test_the_floor_makes_cold_slopes_those_of_a_natural_gradient() -> None:
    half_logit = torch.tensor([0.5, -1.5], dtype=torch.float64)
    found = relaxed_slope(half_logit, torch.zeros(2), 1e-10, 1e-10)
    torch.testing.assert_close(found, half_logit.cosh() ** 2, rtol=1e-8, atol=0)


def test_draws_have_the_means_of_the_family() -> None:
    half_logit, count = torch.tensor([-1.2, 0.0, 0.4], dtype=torch.float64), 100_000
    generator = torch.Generator().manual_seed(3)
    mean = half_logit.tanh()
    error = ((1 - mean**2) / count).sqrt()
    many = half_logit.expand(count, 3)
    for draws in (
        draw_signs(many, generator),
        relax(many, logistic_noise(many, generator), 1e-12),
    ):
        assert draws.abs().eq(1).all()
        assert ((draws.mean(0) - mean).abs() < 4 * error).all()


# BayesBiNN ---------------------------------------------------------------------------------------


def transcription(
    lam: list[Tensor],
    model: nn.Module,
    steps: int,
    *,
    lr: float,
    tau: float,
    floor: float = 0.0,
    beta: float = 0.0,
    prior: list[Tensor] | float = 0.0,
    draws: int = 1,
    stale: bool = False,
) -> list[Tensor]:
    """Khan & Rue's Eq. 52 with N/M scaling; ``stale`` makes public code's mistake, μ of the λ
    before the update."""
    generator = torch.Generator().manual_seed(7)
    lam = [x.clone() for x in lam]
    priors = prior if isinstance(prior, list) else [torch.full_like(x, prior) for x in lam]
    average = [torch.zeros_like(x) for x in lam]
    mu = [torch.tanh(x) for x in lam]
    for t, (x, y) in enumerate(minibatches(steps), start=1):
        total = [torch.zeros_like(value) for value in lam]
        for _ in range(draws):
            weights, slopes = [], []
            for value, mean in zip(lam, mu, strict=True):
                u = torch.rand(value.shape, dtype=value.dtype, generator=generator)
                w = torch.tanh((value + 0.5 * torch.log(u / (1 - u))) / tau)
                weights.append(w)
                slopes.append((1 - w**2 + floor) / (tau * (1 - mean**2 + floor)))
            for k, g in enumerate(gradient(model, weights, x, y)):
                total[k] += N * slopes[k] * g / draws
        old = [torch.tanh(value) for value in lam]
        for k, g in enumerate(total):
            average[k] = beta * average[k] + (1 - beta) * (g + lam[k] - priors[k])
            lam[k] = lam[k] - lr * average[k] / (1 - beta**t)
        mu = old if stale else [torch.tanh(value) for value in lam]
    return lam


CASES: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.002, "tau": 1.0},
    "momentum": {"lr": 0.002, "tau": 0.7, "beta": 0.9},
    "prior": {"lr": 0.002, "tau": 1.0, "prior": 0.3, "beta": 0.5},
    "draws": {"lr": 0.005, "tau": 1.0, "draws": 3, "floor": 1e-3},
}


@pytest.mark.parametrize("case", CASES)
def test_bayesbinn_is_its_transcription(case: str) -> None:
    settings = CASES[case]
    model = network()
    wanted = transcription(values(model), model, 60, **settings)
    optimizer = BayesBiNN(
        model.parameters(),
        settings["lr"],
        N,
        temperature=settings["tau"],
        floor=settings.get("floor", 0.0),
        beta1=settings.get("beta", 0.0),
        prior=settings.get("prior", 0.0),
        generator=torch.Generator().manual_seed(7),
    )
    for x, y in minibatches(60):
        for _ in range(settings.get("draws", 1)):
            look(optimizer, model, x, y)
        optimizer.step()
    assert distance(wanted, values(network())) > 0.1  # it went somewhere
    assert distance(values(model), wanted) < 1e-10


def test_a_step_is_the_rule_for_a_bernoulli() -> None:
    """Two classes, whose λ is the difference of both logits and whose μ is P(w = 1)."""
    model = network()
    q = [CategoricalFamily(2 * p.unsqueeze(-1)) for p in values(model)]
    prior = [torch.full_like(p, 0.2) for p in values(model)]
    optimizer = BayesBiNN(model.parameters(), 0.05, N, prior=prior)
    look(optimizer, model, *next(minibatches(1)))
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    for found, member, g, natural in zip(values(model), q, gradients, prior, strict=True):
        wanted = blr_step(member, {"indicator": 2 * (g - natural).unsqueeze(-1)}, 0.05)
        torch.testing.assert_close(found, wanted.log_odds[..., 0] / 2, rtol=1e-12, atol=1e-14)


# The limit ---------------------------------------------------------------------------------------


def straight_through(latent: list[Tensor], model: nn.Module, steps: int, lr: float) -> Any:
    """Khan & Rue's Eq. 48: the signs and the latent weights after every step."""
    latent = [x.clone() for x in latent]
    for x, y in minibatches(steps):
        for value, g in zip(latent, gradient(model, [signs(v) for v in latent], x, y), strict=True):
            value -= lr * g
        yield [v.clone() for v in latent]


@pytest.mark.parametrize("scale", [1e-2, 1e-3])
def test_ste_is_the_limit_without_noise_and_temperature(scale: float) -> None:
    """δ = 0 and τ = ε → 0: sign forward, and s = 1/(1 − μ²) backward.

    Latent weights have no scale in straight-through estimation, only signs. So λ = c θ, moved
    by α = c·lr/N, is the same algorithm, and for c → 0 μ and the forgetting (1 − α) vanish:
    λ/c → θ at the rate of c.
    """
    lr, steps = 0.05, 40
    model = network()
    start = values(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    optimizer = BayesBiNN(
        model.parameters(), scale * lr / N, N, temperature=1e-12, floor=1e-12, noise=0.0
    )
    path = straight_through(start, model, steps, lr)
    for (x, y), latent in zip(minibatches(steps), path, strict=True):
        look(optimizer, model, x, y)
        optimizer.step()
        assert distance([p / scale for p in values(model)], latent) < scale
    turned = sum(int((signs(a) != signs(b)).sum()) for a, b in zip(start, latent, strict=True))
    assert turned > 5


# STE ---------------------------------------------------------------------------------------------


class Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor) -> Tensor:
        return torch.where(theta >= 0, 1.0, -1.0).to(theta)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Through(nn.Module):
    def forward(self, theta: Tensor) -> Tensor:
        return Signs.apply(theta)  # type: ignore[return-value]


MADE: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "SGD": ({"lr": 0.05}, lambda p: torch.optim.SGD(p, lr=0.05)),
    "SGD with momentum": (
        {"lr": 0.05, "row": "SGD with momentum", "beta1": 0.8},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8),
    ),
    "Adam": ({"lr": 0.01, "row": "Adam"}, lambda p: torch.optim.Adam(p, lr=0.01)),
}


@pytest.mark.parametrize("case", MADE)
def test_ste_is_torchs_optimizer_behind_a_straight_through_sign(case: str) -> None:
    settings, make = MADE[case]
    model, other = network(), network()
    for layer in (other[0], other[2]):  # type: ignore[index]
        nn.utils.parametrize.register_parametrization(layer, "weight", Through())
    optimizer, torchs = STE(model.parameters(), **settings), make(other.parameters())
    for x, y in minibatches(100):
        look(optimizer, model, x, y)
        optimizer.step()
        torchs.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        torchs.step()
    assert distance(values(model), values(other)) < 1e-12
    assert any(
        (signs(a) != signs(b)).any() for a, b in zip(values(model), values(network()), strict=True)
    )


def test_ste_clips_as_binaryconnect() -> None:
    model, free = network(), network()
    optimizer, unclipped = STE(model.parameters(), 0.5, clip=0.3), STE(free.parameters(), 0.5)
    for x, y in minibatches(10):
        look(optimizer, model, x, y)
        optimizer.step()
        look(unclipped, free, x, y)
        unclipped.step()
    assert max(float(p.detach().abs().max()) for p in model.parameters()) == pytest.approx(
        0.3, abs=1e-12
    )
    assert max(float(p.detach().abs().max()) for p in free.parameters()) > 0.3


# The face ----------------------------------------------------------------------------------------


def bayes(params: Any, **settings: Any) -> BayesBiNN:
    generator = torch.Generator().manual_seed(4)
    return BayesBiNN(params, 0.02, N, beta1=0.9, generator=generator, **settings)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "BayesBiNN": bayes,
    "STE": lambda params: STE(params, 0.05),
    "STE with Adam": lambda params: STE(params, 0.05, "Adam"),
}


def test_contexts_show_signs_draws_and_means() -> None:
    model = network()
    before = values(model)
    optimizer = bayes(model.parameters())
    with optimizer.mode_params():
        assert distance(values(model), [signs(p) for p in before]) == 0
    with optimizer.mean_params():
        assert distance(values(model), [torch.tanh(p) for p in before]) == 0
    with optimizer.sampled_params():
        first = values(model)
    with optimizer.sampled_params():
        second = values(model)
    assert all(p.abs().eq(1).all() for p in first + second) and distance(first, second) == 2
    with optimizer.sampled_params(train=True):
        inside = torch.cat([p.flatten() for p in values(model)])
        assert (inside.abs() < 1).any() and inside.abs().max() <= 1
        optimizer.zero_grad()
        model(torch.ones(2, 5).double()).sum().backward()
    assert distance(values(model), before) == 0


def test_the_rule_forgets_towards_the_prior() -> None:
    """With no loss, λ ← λ + α (λ₀ − λ)."""
    param = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = BayesBiNN([param], 0.1, N, prior=0.3)
    for _ in range(20):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (0 * param.sum()).backward()
        optimizer.step()
    wanted = torch.full((4,), 0.3 + 0.7 * 0.9**20, dtype=torch.float64)
    torch.testing.assert_close(param.detach(), wanted, rtol=1e-12, atol=0)
