"""Dropout as a row: plain transcriptions with the same masks, and the mixture it comes from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from learning_rule.optim.makers import BATCH, N, X, Y, draw, dropout, loss_of, network
from looks import distance, values
from torch import Tensor, nn

from blr_analysis import Posterior
from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim import RowOptimizer
from blr_analysis.learning_rule.optim.dropout import Dropout

KEEP = 0.6


def dropped_out(model: Any, t: int, z: Tensor, reduction: str = "mean") -> Tensor:
    """The loss of the t-th minibatch; units, not weights, are multiplied by z: K&R's Eq. 39."""
    rows = slice(BATCH * t % N, BATCH * t % N + BATCH)
    h = torch.tanh(model[0](X[rows].double())) * z
    outputs = nn.functional.linear(h, model[2].weight, model[2].bias)
    return nn.functional.cross_entropy(outputs, Y[rows], reduction=reduction)


def shares(model: Any) -> list[float]:
    return [KEEP if p is model[2].weight else 1.0 for p in model.parameters()]


# Eqs. 42 and 43 ----------------------------------------------------------------------------------


def sgd(p: Tensor, h: Tensor, u: Tensor, each: Tensor, kept: float, t: int) -> Any:
    """S = I and no smoothing: ordinary dropout, with lr/π₁ for the weights that leave units."""
    return p - 0.1 * each.mean(0) / kept, h, u


def adam(p: Tensor, h: Tensor, u: Tensor, each: Tensor, kept: float, t: int) -> Any:
    """A diagonal S, its square root, momentum and bias corrections."""
    g = each.mean(0)
    u, h = 0.9 * u + 0.1 * g / kept, 0.99 * h + 0.01 * g**2 / kept
    root = (h / (1 - 0.99**t)).sqrt() + 1e-8
    return p - 0.01 * (u / (1 - 0.9**t)) / root, h, u


def gauss_newton(p: Tensor, h: Tensor, u: Tensor, each: Tensor, kept: float, t: int) -> Any:
    """Σ g_i², per example by brute force, and a prior."""
    h = 0.9 * h + 0.1 * each.square().mean(0) / kept
    return p - 0.05 * (each.mean(0) / kept + 0.02 * p) / (h + 0.02), h, u


OGN = {"lr": 0.05, "beta1": 0.0, "beta2": 0.9, "weight_decay": 0.02, "hess_init": 0.5}
LINES: dict[str, tuple[dict[str, Any], Callable[..., Any], float]] = {
    "SGD": ({"lr": 0.1}, sgd, 0.0),
    "Adam": ({"lr": 0.01, "beta2": 0.99}, adam, 0.0),
    "OGN": (OGN, gauss_newton, 0.5),
}


@pytest.mark.parametrize("row", LINES)
def test_line_by_line(row: str) -> None:
    settings, transcription, start = LINES[row]
    model, other, generator = network(), network(), torch.Generator().manual_seed(3)
    optimizer = dropout(model, torch.Generator().manual_seed(3), row, **settings)
    params, missing = list(other.parameters()), 0
    h, u = ([torch.full_like(p, x) for p in params] for x in (start, 0.0))
    for t in range(1, 16):
        draw(row, optimizer, lambda t=t: loss_of(model, t))
        optimizer.step()
        z = (torch.rand(1, 6, generator=generator, dtype=torch.float64) < KEEP).double()
        losses = dropped_out(other, t, z, "none")
        each = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
        for k, (p, rows) in enumerate(zip(params, zip(*each, strict=True), strict=True)):
            p.data, h[k], u[k] = transcription(
                p.detach(), h[k], u[k], torch.stack(rows), shares(other)[k], t
            )
        missing += int((1 - z).sum())
    assert distance(values(model), values(other)) < 1e-11
    assert distance(values(model), values(network())) > 0.01 and missing > 20


def test_rows_that_sample_are_dropped_out_too() -> None:
    """IVON's row: θ = z ∘ (m + ε), ĥ = S ε ∘ z ∘ g / π₁ (App. G with its ε₁ kept)."""
    param = nn.Parameter(torch.tensor([[0.5, -1.0, 2.0, 1.5]], dtype=torch.float64))
    start = param.detach().clone()
    settings = {"lr": 0.1, "ess": 4.0, "weight_decay": 0.5, "hess_init": 1.0, "beta1": 0.0}
    optimizer = Dropout(
        [param], row="IVON", keep=0.5, generator=torch.Generator().manual_seed(9), **settings
    )
    with optimizer.sampled_params(train=True):
        theta = param.detach().clone()
        (param**3).sum().backward()
    optimizer.step()
    z = (theta != 0).double()
    assert 0 < z.sum() < 4
    noise = torch.where(z == 1, theta - start, torch.zeros_like(theta))
    g = 3 * theta**2 * z / 0.5
    estimate, h, rho = 4 * 1.5 * noise * g, torch.ones_like(start), 1 - 0.999
    h = h + rho * (estimate - h) + 0.5 * rho**2 * (estimate - h) ** 2 / 1.5
    torch.testing.assert_close(optimizer.state[param]["hess"], h, rtol=1e-12, atol=0)
    moved = start - 0.1 * (g + 0.5 * start) / (h + 0.5)
    torch.testing.assert_close(param.detach(), moved, rtol=1e-12, atol=0)


@pytest.mark.parametrize("row", ["SGD with momentum", "RMSprop", "Adam", "AdamW", "Vadam", "IVON"])
def test_nothing_dropped_is_the_row_itself(row: str) -> None:
    ends = []
    for kind in (Dropout, RowOptimizer):
        model, generator = network(), torch.Generator().manual_seed(3)
        settings = {"ess": N, "weight_decay": 0.01, "hess_init": 0.1, "generator": generator}
        optimizer = kind(model.parameters(), row=row, lr=0.01, **settings)
        for t in range(20):
            draw(row, optimizer, lambda t=t, m=model: loss_of(m, t))
            optimizer.step()
        ends.append(values(model))
    assert distance(*ends) == 0


@pytest.mark.slow
def test_the_mean_gradient_is_that_of_the_mixture() -> None:
    """(1/π₁) ∇_m E_q[ℓ], by enumeration of all masks (App. G, Eq. 84)."""
    m = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:
        return (w.sum(-1) - 1) ** 2 + torch.sin(w[..., 0] * w[..., 1])

    copies = nn.Parameter(m.expand(1, 3).clone())
    found = []
    optimizer = Dropout([copies], lr=0.1, keep=KEEP, generator=torch.Generator().manual_seed(3))
    for _ in range(1000):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss(copies).sum().backward()
        assert copies.grad is not None
        found.append(copies.grad.clone())
        optimizer._gathered.clear()
    drawn = torch.cat(found)
    count = len(drawn)
    leaf = m.clone().requires_grad_()
    expected = torch.zeros(())
    for z in itertools.product([0.0, 1.0], repeat=3):
        share = math.prod(KEEP if kept else 1 - KEEP for kept in z)
        expected = expected + share * loss(leaf * torch.tensor(z).double())
    (wanted,) = torch.autograd.grad(expected / KEEP, leaf)
    assert ((drawn.mean(0) - wanted).abs() < 4 * drawn.std(0) / math.sqrt(count)).all()


# π₁ learned -------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["SGD", "Adam"])
def test_the_share_moves_by_autograds_gradient_of_relaxed_units(row: str) -> None:
    """λ ← λ − ρ (ess/J · dℓ/dπ + λ − λ₀), by autograd; clipping is followed."""
    rho, tau, prior, model = 0.02, 0.3, 0.8, network()
    settings = {"temperature": tau, "keep_prior": prior, "keep_lr": rho}
    optimizer = dropout(model, torch.Generator().manual_seed(3), row, **settings)
    generator, share = torch.Generator().manual_seed(3), torch.tensor(KEEP, dtype=torch.float64)
    for t in range(4):
        share.requires_grad_()
        slope = 0.0
        for _ in range(2):  # draws
            u = torch.rand(1, 6, generator=generator, dtype=torch.float64)
            z = ((u.logit() + share.logit()) / tau).sigmoid()
            slope += torch.autograd.grad(dropped_out(model, t, z) / 2, share)[0]
            draw(row, optimizer, lambda t=t: loss_of(model, t))
        shrunk = 0.25 if t % 2 else 1.0
        for p in model.parameters():
            p.grad.mul_(shrunk)
        optimizer.step()
        gap = share.logit() - torch.tensor(prior, dtype=torch.float64).logit()
        moved = share.logit() - rho * (N / 6 * shrunk * slope + gap)
        share = moved.sigmoid().detach()
        assert optimizer.param_groups[0]["keep"] == pytest.approx(float(share), rel=1e-9)
    assert abs(float(share) - KEEP) > 0.01


@pytest.mark.slow
def test_a_learned_share_is_that_of_the_variational_optimum() -> None:
    """min over π of N E[ℓ] + J KL(π ‖ π₀), by enumeration of masks, weights held fixed."""
    m = torch.tensor([[1.0, 0.7, 0.5, -0.4]], dtype=torch.float64)
    ess, prior = 20.0, 0.5

    def loss(w: Tensor) -> Tensor:
        return 0.5 * (w.sum(-1) - 1.8).square()

    masks = torch.tensor([*itertools.product([0.0, 1.0], repeat=4)]).double()
    grid = torch.linspace(0.01, 0.99, 981).double()[:, None]
    shares = (grid ** masks.sum(1)) * (1 - grid) ** (4 - masks.sum(1))
    kl = grid * (grid / prior).log() + (1 - grid) * ((1 - grid) / (1 - prior)).log()
    best = float(grid[int((ess * shares @ loss(masks * m) + 4 * kl[:, 0]).argmin())])
    param = nn.Parameter(m.clone())
    optimizer = Dropout(
        [param], lr=0.0, keep=0.3, keep_lr=0.01, keep_prior=prior, temperature=0.1, ess=ess,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    found = []
    for _ in range(1200):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss(param).sum().backward()
        optimizer.step()
        found.append(optimizer.param_groups[0]["keep"])
    assert sum(found[600:]) / 600 == pytest.approx(best, abs=0.04)
    assert abs(best - 0.3) > 0.2


# The face ----------------------------------------------------------------------------------------


def test_prediction_at_the_mean_and_by_draws() -> None:
    """Units along the channels of a convolution, too."""
    model = network()
    before, optimizer = values(model), dropout(model, torch.Generator().manual_seed(3), "SGD")
    with optimizer.mean_params():
        wanted = [s * p for s, p in zip(shares(model), before, strict=True)]
        assert distance(values(model), wanted) == 0
    kernel = nn.Parameter(torch.ones(3, 4, 2, 2))
    other = Dropout([kernel], 0.1, keep=KEEP, generator=torch.Generator().manual_seed(3))
    for seen, weight, kind in ((model[2].weight, before[2], optimizer), (kernel, kernel, other)):
        kept, weight = [], weight.detach().clone()
        for _ in range(400):
            with kind.sampled_params():
                units = (seen != 0).double().movedim(1, 0).flatten(1)
                assert torch.equal(units, units[:, :1].expand_as(units))
                kept.append(units[:, 0])
        assert torch.equal(seen, weight)
        share, error = torch.stack(kept).mean(0), math.sqrt(KEEP * (1 - KEEP) / 400)
        assert ((share - KEEP).abs() < 4 * error).all()
    draw("SGD", optimizer, lambda: loss_of(model, 0))
    optimizer.step()
    with pytest.raises(OptimizerError, match="dropout"):  # no Gaussian
        Posterior.from_optimizer(optimizer, model)
