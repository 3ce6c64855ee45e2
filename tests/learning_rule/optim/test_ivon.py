"""IVON beside the package ``ivon-opt`` with the same noise, and what ``steps`` and the start do."""

from __future__ import annotations

import math
from typing import Any

import ivon as ivon_opt
import pytest
import torch
from optimizer_makers import flat, loss_of, network, step
from torch import Tensor, nn

from blr_analysis.learning_rule.optim import IVON


def train_two_groups(make: Any, draws: int, **options: Any) -> dict[str, Tensor]:
    """Weights, precision and momentum after 50 steps, as flat vectors over both groups."""
    model = network()
    second = {"params": model[2].parameters(), "lr": 0.05, "weight_decay": 1e-2, "hess_init": 0.25}
    groups = [{"params": model[0].parameters()}, second]
    optimizer = make(groups, lr=0.1, ess=64, hess_init=0.5, **options)
    torch.manual_seed(0)
    for t in range(50):
        step("", optimizer, lambda t=t: loss_of(model, t), draws)
    if make is IVON:
        states = [optimizer.state[p] for p in model.parameters()]
    else:
        states = optimizer.param_groups
    vectors = {"weights": flat(model.parameters())}
    for name in ("hess", "momentum"):
        vectors[name] = flat(state[name] for state in states)
    return vectors


@pytest.mark.parametrize("hess_approx", ["price", "gradsq"])
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta1": 0.5, "beta2": 0.9, "debias": False},
        {"beta2": 0.99, "rescale_lr": False, "clip_radius": 0.1},
        {"beta1": 0.0, "beta2": 0.999, "clip_radius": 0.02},
    ],
)
def test_agrees_with_ivon_opt(hess_approx: str, draws: int, options: dict[str, Any]) -> None:
    options = {"hess_approx": hess_approx, **options}
    ours = train_two_groups(IVON, draws, **options)
    theirs = train_two_groups(ivon_opt.IVON, draws, **options)
    for name in ("weights", "hess", "momentum"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.slow
def test_a_start_by_the_weights_keeps_the_noise_below_them(grouped: bool) -> None:
    """Noise is 0.05 of their size at first, and 0.15 of it after a loss without gradients."""
    noise = torch.Generator().manual_seed(0)
    weight = nn.Parameter(0.2 * torch.randn(100, 200, generator=noise))
    bias = nn.Parameter(torch.full((5,), 100.0))
    params: Any = [{"params": iter([weight])}, {"params": [bias]}] if grouped else [weight, bias]
    optimizer = IVON(
        params, lr=0.1, ess=6, hess_init="weights", weight_decay=0.0, steps=400, generator=noise
    )

    def spread() -> float:
        mean = weight.detach().clone()
        with optimizer.sampled_params():
            return float((weight.detach() - mean).std() / mean.square().mean().sqrt())

    assert spread() == pytest.approx(0.05, rel=0.02)
    for _ in range(400):
        with optimizer.sampled_params(train=True):
            weight.grad = torch.zeros_like(weight)
            bias.grad = torch.zeros_like(bias)
        optimizer.step()
    assert spread() == pytest.approx(0.15, rel=0.02)


def test_steps_set_how_fast_the_start_is_forgotten() -> None:
    param = nn.Parameter(torch.ones(3))

    def beta2(**settings: Any) -> float:
        return IVON([param], lr=0.1, **settings).param_groups[0]["beta2"]

    assert beta2(ess=10) == beta2(ess=10, steps=None) == 0.99999
    assert beta2(ess=10, steps=100, beta2=0.5) == 0.5
    for ess, hess_init in ((4000, 1.0), (4000, 5.0), (40_000, 0.3)):
        weight_of_start = beta2(ess=ess, hess_init=hess_init, steps=10_000) ** 10_000
        assert (ess * hess_init * weight_of_start) ** -0.5 == pytest.approx(0.05, rel=1e-2)
    assert beta2(ess=1e9, steps=1000) ** 1000 == pytest.approx(math.exp(-5), rel=2e-2)
    assert beta2(ess=1, steps=1000) ** 1000 == pytest.approx(math.exp(-1), rel=2e-2)
    assert beta2(ess=1e9, steps=1) == 0
    state = IVON([param], lr=0.1, ess=10, steps=7).state_dict()
    assert "steps" not in state["param_groups"][0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"hess_init": 0.2, "weight_decay": 1e-3},
        {"rescale_lr": False},
        {"rescale_lr": "gradient"},
    ],
)
def test_with_steps_no_weight_moves_further_than_a_twentieth(settings: dict[str, Any]) -> None:
    def moved(**bounds: Any) -> Tensor:
        param = nn.Parameter(torch.ones(3, dtype=torch.float64))
        noise = torch.Generator().manual_seed(0)
        options = {**settings, **bounds}
        optimizer = IVON([param], lr=20.0, ess=1e9, steps=10**12, generator=noise, **options)
        with optimizer.sampled_params(train=True):
            (param * torch.tensor([1e-4, 1.0, -50.0])).sum().backward()
        optimizer.step()
        return param.detach() - 1

    bounded = moved()
    free = moved(clip_radius=1e9)
    torch.testing.assert_close(bounded, free.clamp(-0.05, 0.05), rtol=1e-10, atol=0)
    assert free.abs().max() > 1
    assert 0 < free[0].abs() < 0.05
    without = IVON([nn.Parameter(torch.ones(3))], lr=20.0, ess=1e9, **settings)
    assert without.param_groups[0]["clip_radius"] == math.inf


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_by_the_gradient_the_first_step_has_the_length_of_the_rate(scale: float) -> None:
    """So it is whatever the loss is multiplied by; entries without gradient do not count."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    settings = {"lr": 0.01, "ess": 1e9, "beta2": 1.0, "weight_decay": 0.0}  # h stays
    optimizer = IVON([param], rescale_lr="gradient", **settings)

    def step_along(*slopes: float) -> Tensor:
        before = param.detach().clone()
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (scale * (param * torch.tensor(slopes)).sum()).backward()
        optimizer.step()
        return param.detach() - before

    assert step_along(0.0, 0.0, 0.0, 0.0).abs().max() == 0  # nothing to go by yet
    moved = step_along(0.0, 1.0, -2.0, 2.0)
    assert moved[0] == 0
    # the zeros before weigh 0.9 · 0.1 / (1 − 0.81) in the debiased momentum
    share = 0.1 / (1 - 0.9**2)
    assert moved[1:].square().mean().sqrt() == pytest.approx(0.01 * share, rel=1e-3)
    size = optimizer.param_groups[0]["gradient_size"]
    step_along(9.0, 9.0, 9.0, 9.0)
    assert optimizer.param_groups[0]["gradient_size"] == size
