"""Mixtures over networks: Eqs. 29 and 30 line by line, and deep ensembles as their limit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from optimizer_makers import flat
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.learning_rule.families import DiagonalGaussian, GaussianMixture
from blr_analysis.learning_rule.optim import IVON, Mixture
from blr_analysis.posterior import predict

N = 30.0
INPUTS = torch.linspace(-1, 1, 8).double().view(4, 2)
TARGETS = torch.ones(4, 1).double()


def pair(far: float) -> tuple[list[nn.Module], list[IVON], Mixture]:
    """Two networks at a distance ``far``, their optimizers, and the mixture of both."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    models: list[nn.Module] = [first, copy.deepcopy(first)]
    with torch.no_grad():
        for p in models[1].parameters():
            p += far * torch.randn_like(p)
    settings: dict[str, Any] = {"lr": 0.05, "ess": N, "weight_decay": 0.1}
    settings |= {"beta1": 0.0, "beta2": 0.9}
    optimizers = []
    for seed, (model, hess_init) in enumerate(zip(models, (0.7, 0.8), strict=True)):
        generator = torch.Generator().manual_seed(seed)
        settings |= {"hess_init": hess_init, "generator": generator}
        optimizers.append(IVON(model.parameters(), rescale_lr=False, **settings))
    return models, optimizers, Mixture(optimizers)


def step(models: list[nn.Module], optimizers: list[IVON], mixture: Mixture | None) -> list[Tensor]:
    """One backward pass of every component; its drawn weights are returned."""
    draws = []
    for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(INPUTS), TARGETS)
            if mixture is not None:
                loss = loss + mixture.overlap(k)
            loss.backward()
            draws.append(flat(model.parameters()))
    return draws


def test_a_step_is_that_of_the_paper() -> None:
    """With the family's own ∇ log q and m, S as Khan & Rue write them, IVON's retraction added."""
    models, optimizers, mixture = pair(0.02)
    means = torch.stack([flat(m.parameters()) for m in models])
    precisions = torch.tensor([0.8, 0.9]).double() * N
    parts = DiagonalGaussian(means, precisions.unsqueeze(1).expand_as(means).contiguous())
    q = GaussianMixture(torch.full((2,), 0.5).double(), parts).marginal
    draws = step(models, optimizers, mixture)
    for k, (model, theta) in enumerate(zip(models, draws, strict=True)):
        s = parts.precision[k]
        m = means[k]
        drawn = copy.deepcopy(model)
        nn.utils.vector_to_parameters(theta, drawn.parameters())
        nn.functional.mse_loss(drawn(INPUTS), TARGETS).backward()
        loss = N * flat(p.grad for p in drawn.parameters()) + 0.1 * N * m
        log_q = q.score(theta)
        # E[∇ log q] and E[∇² log q] by the draw; those of log q_k, −S(θ − m) and −S, cancel there
        gradient = loss + log_q + s * (theta - m)
        pulled = gradient - 0.1 * N * m
        hessian = s * (theta - m) * pulled + 0.1 * N - s
        new = s + 0.1 * hessian + 0.01 * hessian.square() / (2 * s)
        optimizers[k].step()
        actual = flat(optimizers[k].state[p]["hess"] for p in model.parameters())
        torch.testing.assert_close(N * (actual + 0.1), new)
        torch.testing.assert_close(flat(model.parameters()), m - 0.05 * gradient / new)
        assert (log_q + s * (theta - m)).norm() > 0.1  # they do overlap


def test_far_from_each_other_they_are_a_deep_ensemble() -> None:
    together = pair(50.0)
    alone = pair(50.0)
    for _ in range(5):
        step(*together)
        step(alone[0], alone[1], None)
        for optimizer in (*together[1], *alone[1]):
            optimizer.step()
    for ours, theirs in zip(together[0], alone[0], strict=True):
        actual = flat(ours.parameters())
        torch.testing.assert_close(actual, flat(theirs.parameters()), rtol=1e-12, atol=1e-12)


def test_predictions_and_analyses_take_the_mixture() -> None:
    models, optimizers, mixture = pair(1.0)
    for _ in range(3):
        step(models, optimizers, mixture)
        for optimizer in optimizers:
            optimizer.step()
    qs = [blr.Posterior.from_optimizer(o, m) for o, m in zip(optimizers, models, strict=True)]
    x = torch.randn(int(N), 2).double()
    y = torch.randn(int(N), 1).double()
    task = blr.Task(models[0], (x, y), likelihood="gaussian")
    mixed = predict(task, qs, draws=0)
    means = [m(x).detach() for m in models]
    torch.testing.assert_close(mixed.mean, (means[0] + means[1]) / 2)
    densities = [(-0.5 * (y - f).square()).exp() for f in means]
    expected = -(sum(densities) / 2).log() + 0.5 * torch.log(torch.tensor(2 * torch.pi))
    torch.testing.assert_close(mixed.losses, expected.squeeze(1))
    assert predict(task, qs, draws=3).draws == 6
    assert blr.sensitivity(task, qs).deviation.shape[0] == len(y)
