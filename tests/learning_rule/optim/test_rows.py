"""The elementwise rows: torch's own optimizers, the rule itself, and plain transcriptions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from learning_rule.optim.makers import BATCH, N, X, Y, draw, flat, loss_of, make, network
from torch import Tensor, nn

from blr_analysis.learning_rule.families import DiagonalGaussian
from blr_analysis.learning_rule.optim import BSAM, IVON, OGN, RowOptimizer, Vadam, Vprop
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.posterior import Posterior

pytestmark = pytest.mark.filterwarnings("ignore:Using backward")  # the optimizer breaks the cycle

# Row → its settings, torch's optimizer and the same settings there.
PAIRS: dict[str, tuple[dict[str, float], Callable[..., Any], dict[str, Any]]] = {
    "gradient descent": ({"lr": 0.1}, torch.optim.SGD, {}),
    "SGD": ({"lr": 0.1, "weight_decay": 0.01}, torch.optim.SGD, {}),
    "SGD with momentum": ({"lr": 0.1, "beta1": 0.8}, torch.optim.SGD, {"momentum": 0.8}),
    "AdaGrad": (
        {"lr": 0.05, "weight_decay": 0.01, "hess_init": 0.1, "eps": 1e-3},
        torch.optim.Adagrad,
        {"initial_accumulator_value": 0.1},
    ),
    "AdaDelta": (
        {"lr": 1.0, "beta2": 0.9, "weight_decay": 0.01, "eps": 1e-4},
        torch.optim.Adadelta,
        {"rho": 0.9},
    ),
    "RMSprop": (
        {"lr": 0.01, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-3},
        torch.optim.RMSprop,
        {"alpha": 0.99},
    ),
    "Adam": (
        {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.01},
        torch.optim.Adam,
        {"betas": (0.8, 0.95)},
    ),
    "AdamW": ({"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}, torch.optim.AdamW, {}),
}


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_equals_torch(name: str, cycle: bool) -> None:
    """60 steps, weight decay, eps and a schedule included."""
    settings, kind, others = PAIRS[name]
    shared = {k: v for k, v in settings.items() if k in ("lr", "weight_decay", "eps")}
    ends = []
    for ours in (True, False):
        model = network()
        params = model.parameters()
        optimizer = (
            RowOptimizer(params, name, **settings) if ours else kind(params, **shared, **others)
        )
        schedule: Any = None
        if cycle:
            options = {"total_steps": 61, "cycle_momentum": False}
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, **options)
        for t in range(60):
            optimizer.zero_grad()
            loss_of(model, t).backward()
            optimizer.step()
            if cycle:
                schedule.step()
        ends.append(flat(model.parameters()))
    assert (ends[0] - ends[1]).abs().max() < 1e-12
    assert (ends[0] - flat(network().parameters())).norm() > 0.1  # it went somewhere


def test_a_row_without_departures_is_the_rule() -> None:
    """OGN without momentum: S and m move as blr_step moves them, at ρ = lr = 1 − beta2."""
    rho, ess, decay = 0.3, 50.0, 0.02
    x, y = problem_data()
    model = nn.Linear(5, 1, bias=False).double()
    settings = {"hess_init": 0.7, "beta1": 0.0, "beta2": 1 - rho, "weight_decay": decay}
    optimizer = OGN(model.parameters(), rho, ess, model=model, **settings)
    start = torch.full((5,), ess * (0.7 + decay), dtype=torch.float64)
    q = DiagonalGaussian(model.weight.detach()[0].clone(), start)
    for _ in range(5):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (0.5 * (model(x)[:, 0] - y).square()).mean().backward()
        optimizer.step()
        gradients = (x @ q.mean - y)[:, None] * x * ess / len(x)
        slope = gradients.sum(0) + ess * decay * q.mean
        hessian = gradients.square().sum(0) * len(x) / ess + ess * decay
        q = blr_step(q, q.pull_back(slope, hessian), rho)
        learned = ess * (optimizer.state[model.weight]["hess"][0] + decay)
        assert_same(model.weight.detach()[0], q.mean)
        assert_same(learned, q.precision)


# The same noise and minibatches for a plain transcription ---------------------------------------


def problem_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 5, generator=generator).double(), torch.randn(
        40, generator=generator
    ).double()


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


Gradient = Callable[[Tensor], Tensor]
Draws = list[tuple[Tensor, Gradient]]
"""Standard normal noise, and the gradient of a minibatch's mean loss, of every draw of a step."""
LR, ESS, B1, B2, DECAY = 0.05, 40.0, 0.9, 0.97, 0.075


def vadam(m: Tensor, s: Tensor, u: Tensor, draws: Draws, t: int, start: float = 0.0) -> Any:
    """Khan et al., ICML 2018, Figure 1 (right); s that starts above 0 is not corrected."""
    ((z, gradient),) = draws
    g = gradient(m + z / torch.sqrt(ESS * (s + DECAY)))
    u, s = B1 * u + (1 - B1) * (g + DECAY * m), B2 * s + (1 - B2) * g * g
    s_hat = s if start else s / (1 - B2**t)
    return m - LR * (u / (1 - B1**t)) / (torch.sqrt(s_hat) + DECAY), s, u


def vprop(m: Tensor, s: Tensor, u: Tensor, draws: Draws, t: int) -> Any:
    """Khan et al., 2017, scaled by ess."""
    ((z, gradient),) = draws
    g = gradient(m + z / torch.sqrt(ESS * (s + DECAY)))
    s = B2 * s + (1 - B2) * g**2
    return m - LR * (g + DECAY * m) / torch.sqrt(s + DECAY), s, u


def bsam(m: Tensor, h: Tensor, u: Tensor, draws: Draws, t: int) -> Any:
    """Möllenhoff & Khan, ICLR 2023, Algorithm 1 (right), with s = h + δ."""
    ((z, gradient),), s = draws, h + DECAY
    g = gradient(m + z / torch.sqrt(ESS * s))
    u = B1 * u + (1 - B1) * (gradient(m + 0.3 * g / s) + DECAY * m)
    s = B2 * s + (1 - B2) * (torch.sqrt(s) * g.abs() + DECAY + 0.2)
    return m - LR * u / s, s - DECAY, u


def ivon(
    approx: str, debias: bool, rate: float, clip: float
) -> Callable[[Tensor, Tensor, Tensor, Draws, int], Any]:
    """Shen et al., ICML 2024, Algorithm 1."""

    def step(m: Tensor, h: Tensor, u: Tensor, draws: Draws, t: int) -> Any:
        variance = 1 / (ESS * (h + DECAY))
        g_hat, h_hat = torch.zeros_like(m), torch.zeros_like(m)
        for z, gradient in draws:
            noise = z * variance.sqrt()
            g = gradient(m + noise)
            g_hat += g / len(draws)
            h_hat += (g * noise / variance if approx == "price" else ESS * g**2) / len(draws)
        u = B1 * u + (1 - B1) * g_hat
        gap = h - h_hat
        h = h - (1 - B2) * gap + (1 - B2) ** 2 * gap**2 / (2 * (h + DECAY))
        u_bar = u / (1 - B1**t) if debias else u
        return m - rate * ((u_bar + DECAY * m) / (h + DECAY)).clamp(-clip, clip), h, u

    return step


H7 = {"hess_init": 0.7}
COMMON = {"ess": ESS, "weight_decay": DECAY, "beta1": B1, "beta2": B2}
LINES: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., Any], float, int]] = {
    "Vadam": (Vadam, {}, vadam, 0.0, 1),
    "Vadam, s above 0": (Vadam, {"hess_init": 0.4}, partial(vadam, start=0.4), 0.4, 1),
    "Vprop": (Vprop, {}, vprop, 0.0, 1),
    "bSAM": (BSAM, {"hess_init": 1.0, "radius": 0.3, "damping": 0.2}, bsam, 1.0, 1),
    "IVON's row": (partial(RowOptimizer, row="IVON"), H7, ivon("price", True, LR, 9e9), 0.7, 3),
    **{
        f"IVON, {approx}, {debias}, {rescale}": (
            partial(IVON, hess_approx=approx, debias=debias, rescale_lr=rescale, clip_radius=0.4),
            H7,
            ivon(approx, debias, LR * (0.7 + DECAY) if rescale else LR, 0.4),
            0.7,
            2,
        )
        for approx in ("price", "gradsq")
        for debias in (True, False)
        for rescale in (True, False)
    },
}


@pytest.mark.parametrize("name", LINES)
def test_line_by_line(name: str) -> None:
    kind, settings, transcription, start, draws = LINES[name]
    (x, y), noise = problem_data(), torch.Generator().manual_seed(7)
    theta = nn.Parameter(x[0].clone())
    generator = torch.Generator().manual_seed(7)
    optimizer = kind([theta], lr=LR, generator=generator, **COMMON, **settings)
    m, s, u = x[0].clone(), torch.full((5,), start, dtype=torch.float64), torch.zeros(5).double()
    for t in range(1, 21):
        seen: Draws = []
        for k in range(draws):
            rows = slice(8 * (t + k) % 40, 8 * (t + k) % 40 + 8)

            def gradient(at: Tensor, a: Tensor = x[rows], b: Tensor = y[rows]) -> Tensor:
                return a.T @ (a @ at - b) / 8

            with optimizer.sampled_params(train=True):
                theta.grad = gradient(theta.detach())
            if kind is BSAM:
                with optimizer.adversarial_params():
                    theta.grad = gradient(theta.detach())
            seen.append((torch.empty(5).double().normal_(generator=noise), gradient))
        optimizer.step()
        m, s, u = transcription(m, s, u, seen, t)
    assert_same(theta.detach(), m)
    assert_same(optimizer.state[theta]["hess"], s)
    assert optimizer.state[theta]["step"] == 20 and (m - x[0]).norm() > 0.04


def test_diagonal_newton_where_the_hessian_is_diagonal() -> None:
    """Hutchinson's estimate is exact there, and its magnitude is averaged (K&R 36)."""
    target = torch.tensor([1.0, -2.0, 3.0]).double()
    theta = nn.Parameter(torch.tensor([0.3, -0.4, 2.0]).double())
    settings = {"lr": 0.5, "beta2": 0.7, "weight_decay": 0.2, "hess_init": 0.5}
    optimizer = RowOptimizer([theta], "diagonal Newton", **settings)
    m, h = theta.detach().clone(), torch.full((3,), 0.5).double()
    for _ in range(5):
        draw("diagonal Newton", optimizer, lambda: (torch.cos(theta) - target * theta).sum())
        assert not theta.grad.requires_grad
        optimizer.step()
        h = 0.7 * h + 0.3 * m.cos().abs()
        m = m - 0.5 * (-m.sin() - target + 0.2 * m) / (h + 0.2)
        assert_same(theta.detach(), m)
    assert_same(optimizer.state[theta]["hess"], h)


@pytest.mark.slow
def test_diagonal_newton_finds_the_diagonal_of_a_network() -> None:
    """With many draws a step, against the Hessian in full; its posterior is ess·(h + δ)."""
    model = network()
    optimizer = make("diagonal Newton", model, lr=0.0, weight_decay=0.1, beta2=0.0)
    for _ in range(400):
        draw("diagonal Newton", optimizer, lambda: loss_of(model, 0))
    optimizer.step()
    params = dict(model.named_parameters())
    x, y = X[:BATCH].double(), Y[:BATCH]

    def loss(vector: Tensor) -> Tensor:
        parts = vector.split([p.numel() for p in params.values()])
        named = {n: v.view_as(p) for v, (n, p) in zip(parts, params.items(), strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, named, (x,)), y)

    hessian = torch.func.hessian(loss)(flat(params.values()))
    exact = hessian.diagonal().abs()
    std = ((hessian.square().sum(1) - exact.square()) / 400).sqrt()
    hess = flat(optimizer.state[p]["hess"] for p in params.values())
    assert ((hess - exact).abs() < 4.5 * std).all() and std.norm() < 0.2 * exact.norm()
    posterior = Posterior.from_optimizer(optimizer, model)
    assert_same(flat(posterior.precision(n) for n in params), N * (hess + 0.1))
