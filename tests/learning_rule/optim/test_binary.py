"""BayesBiNN and straight-through estimation: transcriptions, the rule itself, and their limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from learning_rule.optim.makers import BATCH, N, X, Y, draw, flat, loss_of, make, network
from looks import distance, values
from torch import Tensor, nn

from blr_analysis import Posterior
from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.families import CategoricalFamily
from blr_analysis.learning_rule.optim import STE, BayesBiNN
from blr_analysis.learning_rule.optim.binary import (
    draw_signs,
    logistic_noise,
    relax,
    relaxed_slope,
    signs,
)
from blr_analysis.learning_rule.rule import blr_step


def gradient(model: nn.Module, weights: list[Tensor], t: int) -> list[Tensor]:
    """Of the t-th minibatch's loss at these weights."""
    own = values(model)
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)
    found = list(torch.autograd.grad(loss_of(model, t), [*model.parameters()]))
    with torch.no_grad():
        for p, w in zip(model.parameters(), own, strict=True):
            p.copy_(w)
    return found


def train(optimizer: Any, model: nn.Module, steps: int, draws: int = 1) -> None:
    for t in range(steps):
        for _ in range(draws):
            draw("", optimizer, lambda t=t: loss_of(model, t))
        optimizer.step()


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
    cold = relax(many, logistic_noise(many, generator), 1e-12)
    for draws in (draw_signs(many, generator), cold):
        assert draws.abs().eq(1).all()
        assert ((draws.mean(0) - mean).abs() < 4 * error).all()


# BayesBiNN ---------------------------------------------------------------------------------------


def transcription(
    model: nn.Module,
    steps: int,
    *,
    lr: float,
    tau: float = 1.0,
    floor: float = 0.0,
    beta: float = 0.0,
    prior: float = 0.0,
    draws: int = 1,
) -> list[Tensor]:
    """Khan & Rue's Eq. 52 with N/M scaling."""
    generator, lam = torch.Generator().manual_seed(7), values(model)
    average = [torch.zeros_like(x) for x in lam]
    for t in range(steps):
        total = [torch.zeros_like(value) for value in lam]
        for _ in range(draws):
            weights, slopes = [], []
            for value in lam:
                u = torch.rand(value.shape, dtype=value.dtype, generator=generator)
                w = torch.tanh((value + 0.5 * torch.log(u / (1 - u))) / tau)
                weights.append(w)
                slopes.append((1 - w**2 + floor) / (tau * (1 - torch.tanh(value) ** 2 + floor)))
            for k, g in enumerate(gradient(model, weights, t)):
                total[k] += N * slopes[k] * g / draws
        for k, g in enumerate(total):
            average[k] = beta * average[k] + (1 - beta) * (g + lam[k] - prior)
            lam[k] = lam[k] - lr * average[k] / (1 - beta ** (t + 1))
    return lam


CASES: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.002},
    "momentum": {"lr": 0.002, "tau": 0.7, "beta": 0.9},
    "prior": {"lr": 0.002, "prior": 0.3, "beta": 0.5},
    "draws": {"lr": 0.005, "draws": 3, "floor": 1e-3},
}


@pytest.mark.parametrize("case", CASES)
def test_bayesbinn_is_its_transcription(case: str) -> None:
    given, model = CASES[case], network()
    wanted = transcription(model, 40, **given)
    names = {"tau": "temperature", "beta": "beta1", "floor": "floor", "prior": "prior"}
    settings = {"floor": 0.0, **{names[k]: v for k, v in given.items() if k in names}}
    generator = torch.Generator().manual_seed(7)
    optimizer = BayesBiNN(model.parameters(), given["lr"], N, generator=generator, **settings)
    train(optimizer, model, 40, given.get("draws", 1))
    assert distance(wanted, values(network())) > 0.05  # it went somewhere
    assert distance(values(model), wanted) < 1e-10


def test_a_step_is_the_rule_for_a_bernoulli() -> None:
    """Two classes, whose λ is the difference of both logits and whose μ is P(w = 1)."""
    model = network()
    q = [CategoricalFamily(2 * p.unsqueeze(-1)) for p in values(model)]
    prior = [torch.full_like(p, 0.2) for p in values(model)]
    optimizer = BayesBiNN(model.parameters(), 0.05, N, prior=prior)
    draw("", optimizer, lambda: loss_of(model, 0))
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    for found, member, g, natural in zip(values(model), q, gradients, prior, strict=True):
        wanted = blr_step(member, {"indicator": 2 * (g - natural).unsqueeze(-1)}, 0.05)
        torch.testing.assert_close(found, wanted.log_odds[..., 0] / 2, rtol=1e-12, atol=1e-14)


# STE ---------------------------------------------------------------------------------------------


def straight_through(latent: list[Tensor], model: nn.Module, steps: int, lr: float) -> Iterator:
    """Khan & Rue's Eq. 48: the latent weights after every step."""
    for t in range(steps):
        for value, g in zip(latent, gradient(model, [*map(signs, latent)], t), strict=True):
            value -= lr * g
        yield [v.clone() for v in latent]


@pytest.mark.parametrize("scale", [1e-2, 1e-3])
def test_ste_is_the_limit_without_noise_and_temperature(scale: float) -> None:
    """δ = 0 and τ = ε → 0: sign forward, and s = 1/(1 − μ²) backward.

    Latent weights have no scale in straight-through estimation, only signs. So λ = c θ, moved
    by α = c·lr/N, is the same algorithm, and for c → 0 μ and the forgetting (1 − α) vanish:
    λ/c → θ at the rate of c.
    """
    lr, steps, model = 0.05, 40, network()
    start = values(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    cold = {"temperature": 1e-12, "floor": 1e-12, "noise": 0.0}
    optimizer = BayesBiNN(model.parameters(), scale * lr / N, N, **cold)
    latent = start
    for t, latent in enumerate(straight_through(values(network()), network(), steps, lr)):
        draw("", optimizer, lambda t=t: loss_of(model, t))
        optimizer.step()
        assert distance([p / scale for p in values(model)], latent) < scale
    assert sum(int((signs(a) != signs(b)).sum()) for a, b in zip(start, latent, strict=True)) > 5


class Through(nn.Module):
    def forward(self, theta: Tensor) -> Tensor:
        return theta + (signs(theta) - theta).detach()


@pytest.mark.parametrize("name", ["SGD", "SGD with momentum", "Adam"])
def test_ste_is_torchs_optimizer_behind_a_straight_through_sign(name: str) -> None:
    kind = torch.optim.Adam if name == "Adam" else torch.optim.SGD
    momentum = {"momentum": 0.9} if "momentum" in name else {}
    model, other = network(), network()
    for layer in (other[0], other[2]):
        for part in ("weight", "bias"):
            nn.utils.parametrize.register_parametrization(layer, part, Through())
    optimizer, torchs = (
        STE(model.parameters(), 0.02, name),
        kind([p for k in (0, 2) for p in other[k].parametrizations.parameters()], 0.02, **momentum),
    )
    train(optimizer, model, 60)
    for t in range(60):
        torchs.zero_grad()
        rows = slice(BATCH * t % N, BATCH * t % N + BATCH)
        nn.functional.cross_entropy(other(X[rows].double()), Y[rows]).backward()
        torchs.step()
    found = {round(float(v), 9) for v in flat(model.parameters())}
    assert found == {round(float(v), 9) for v in flat(other.parameters())}
    assert (signs(flat(model.parameters())) != signs(flat(network().parameters()))).any()


def test_ste_clips_as_binaryconnect() -> None:
    for clip, most in ((0.3, 0.3), (9.0, 1.0)):
        model = network()
        train(STE(model.parameters(), 0.5, clip=clip), model, 10)
        largest = float(flat(model.parameters()).abs().max())
        assert largest == pytest.approx(0.3, abs=1e-12) if most == clip else largest > 0.4


# The face ----------------------------------------------------------------------------------------


def test_contexts_show_signs_draws_and_means() -> None:
    model = network()
    before, optimizer = values(model), make("BayesBiNN", model)
    with optimizer.mode_params():
        assert distance(values(model), [signs(p) for p in before]) == 0
    with optimizer.mean_params():
        assert distance(values(model), [torch.tanh(p) for p in before]) == 0
    seen = []
    for _ in range(2):
        with optimizer.sampled_params():
            seen.append(values(model))
    assert all(p.abs().eq(1).all() for p in seen[0] + seen[1]) and distance(*seen) == 2
    with optimizer.sampled_params(train=True):
        inside = flat(model.parameters()).abs()
        assert (inside < 1).any() and inside.max() <= 1
        loss_of(model, 0).backward()
    assert distance(values(model), before) == 0
    for name in ("BayesBiNN", "STE", "STE with Adam"):
        optimizer = make(name, model)
        train(optimizer, model, 1)
        with pytest.raises(OptimizerError, match=name):  # a Bernoulli is no Gaussian
            Posterior.from_optimizer(optimizer, model)
