"""Relaxed signs, the rule for a Bernoulli, and what networks of signs show."""

from __future__ import annotations

import pytest
import torch
from optimizer_makers import N, advance, draw, flat, loss_of, network, trained
from optimizers import distance, values

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
    expected = (half_logit.double().cosh() / (half_logit + noise).double().cosh()) ** 2
    actual = relaxed_slope(half_logit, noise, 1.0)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=0)


def test_draws_have_the_means_of_the_family() -> None:
    half_logit = torch.tensor([-1.2, 0.0, 0.4], dtype=torch.float64)
    count = 100_000
    generator = torch.Generator().manual_seed(3)
    mean = half_logit.tanh()
    error = ((1 - mean**2) / count).sqrt()
    repeated = half_logit.expand(count, 3)
    cold = relax(repeated, logistic_noise(repeated, generator), 1e-12)
    for draws in (draw_signs(repeated, generator), cold):
        assert draws.abs().eq(1).all()
        assert ((draws.mean(0) - mean).abs() < 4 * error).all()


def test_a_step_is_the_rule_for_a_bernoulli() -> None:
    """A Bernoulli of two classes: λ is the difference of their logits, and μ is P(w = 1)."""
    model = network()
    q = [CategoricalFamily(2 * p.unsqueeze(-1)) for p in values(model)]
    prior = [torch.full_like(p, 0.2) for p in values(model)]
    optimizer = BayesBiNN(model.parameters(), 0.05, N, prior=prior)
    draw("", optimizer, lambda: loss_of(model, 0))
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    for actual, member, g, natural in zip(values(model), q, gradients, prior, strict=True):
        expected = blr_step(member, {"indicator": 2 * (g - natural).unsqueeze(-1)}, 0.05)
        torch.testing.assert_close(actual, expected.log_odds[..., 0] / 2, rtol=1e-12, atol=1e-14)


def test_ste_clips_as_binaryconnect() -> None:
    def largest_weight(clip: float) -> float:
        model = network()
        advance("STE", model, STE(model.parameters(), 0.5, clip=clip), 0, 20)
        return float(flat(model.parameters()).abs().max())

    assert largest_weight(clip=0.3) == pytest.approx(0.3, abs=1e-12)
    assert largest_weight(clip=9.0) > 0.4


def test_contexts_show_signs_draws_and_means() -> None:
    model, optimizer = trained("BayesBiNN", stop=0)
    before = values(model)
    with optimizer.mode_params():
        assert distance(values(model), [signs(p) for p in before]) == 0
    with optimizer.mean_params():
        assert distance(values(model), [torch.tanh(p) for p in before]) == 0
    draws = []
    for _ in range(2):
        with optimizer.sampled_params():
            draws.append(values(model))
    assert all(p.abs().eq(1).all() for p in draws[0] + draws[1])
    assert distance(*draws) == 2
    with optimizer.sampled_params(train=True):
        assert 0.1 < flat(model.parameters()).abs().max() < 1
        loss_of(model, 0).backward()
    assert distance(values(model), before) == 0
    for name in ("BayesBiNN", "STE", "STE with Adam"):
        model, optimizer = trained(name)
        with pytest.raises(OptimizerError, match=name):  # a Bernoulli is no Gaussian
            Posterior.from_optimizer(optimizer, model)
