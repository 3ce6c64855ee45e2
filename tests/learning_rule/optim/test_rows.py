"""The elementwise rows: torch's own optimizers, the rule itself, and plain transcriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.families import DiagonalGaussian
from blr_analysis.learning_rule.optim import (
    BSAM,
    IVON,
    OGN,
    RowOptimizer,
    Vadam,
    Vprop,
)
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.posterior import Posterior

N, BATCH = 120, 20
pytestmark = pytest.mark.filterwarnings("ignore:Using backward")  # the optimizer breaks the cycle


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 8), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(8, 3)).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 1, 6, 6, generator=generator, dtype=dtype)
    return x, torch.randint(3, (N,), generator=generator)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def train(make: Callable[..., Any], steps: int = 60, schedule: Any = None) -> Tensor:
    model = network()
    optimizer = make(model.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    x, y = data()
    for start in (BATCH * t % N for t in range(steps)):
        optimizer.zero_grad()
        batch = slice(start, start + BATCH)
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return flat(model.parameters())


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gradient descent": (
        lambda p: RowOptimizer(p, "gradient descent", lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ),
    "SGD": (
        lambda p: RowOptimizer(p, "SGD", lr=0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    ),
    "SGD with momentum": (
        lambda p: RowOptimizer(p, "SGD with momentum", lr=0.1, beta1=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "AdaGrad": (
        lambda p: RowOptimizer(p, "AdaGrad", lr=0.05, weight_decay=0.01, hess_init=0.1, eps=1e-3),
        lambda p: torch.optim.Adagrad(
            p, lr=0.05, weight_decay=0.01, initial_accumulator_value=0.1, eps=1e-3
        ),
    ),
    "AdaDelta": (
        lambda p: RowOptimizer(p, "AdaDelta", lr=1.0, beta2=0.9, weight_decay=0.01, eps=1e-4),
        lambda p: torch.optim.Adadelta(p, lr=1.0, rho=0.9, weight_decay=0.01, eps=1e-4),
    ),
    "RMSprop": (
        lambda p: RowOptimizer(p, "RMSprop", lr=0.01, beta2=0.99, weight_decay=0.01, eps=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.99, weight_decay=0.01, eps=1e-3),
    ),
    "Adam": (
        lambda p: RowOptimizer(p, "Adam", lr=0.01, beta1=0.8, beta2=0.95, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.01),
    ),
    "AdamW": (
        lambda p: RowOptimizer(p, "AdamW", lr=0.01, weight_decay=0.1, eps=1e-3),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, eps=1e-3),
    ),
}

SCHEDULES: dict[str, Any] = {
    "no schedule": None,
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.05, total_steps=61, cycle_momentum=False
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PAIRS)
def test_equals_torch(name: str, schedule: str) -> None:
    """60 steps of a convolutional network, weight decay and eps included."""
    ours, theirs = PAIRS[name]
    expected = train(theirs, schedule=SCHEDULES[schedule])
    found = train(ours, schedule=SCHEDULES[schedule])
    assert (found - flat(network().parameters())).norm() > 0.1  # it went somewhere
    assert (found - expected).abs().max() < 1e-12


def test_gradients_of_several_contexts_make_one_minibatch() -> None:
    """Squared after they are averaged: Adam squares the gradient of the minibatch."""
    x, y = data()
    whole, parts = network(), network()
    optimizers = [RowOptimizer(m.parameters(), "Adam", lr=0.01) for m in (whole, parts)]
    nn.functional.cross_entropy(whole(x), y).backward()
    optimizers[0].step()
    for half in (slice(0, N // 2), slice(N // 2, N)):
        with optimizers[1].sampled_params(train=True):
            optimizers[1].zero_grad()
            nn.functional.cross_entropy(parts(x[half]), y[half]).backward()
    optimizers[1].step()
    difference = flat(whole.parameters()) - flat(parts.parameters())
    assert difference.abs().max() < 1e-9


# The rule ------------------------------------------------------------------------------------


def test_a_row_without_departures_is_the_rule() -> None:
    """OGN without momentum: S and m move as blr_step moves them, at ρ = lr = 1 − beta2."""
    rho, ess, decay = 0.3, 50.0, 0.02
    torch.manual_seed(0)
    x, y = torch.randn(50, 4).double(), torch.randn(50, 1).double()
    model = nn.Linear(4, 1, bias=False).double()
    optimizer = OGN(
        model.parameters(),
        lr=rho,
        ess=ess,
        hess_init=0.7,
        beta1=0.0,
        beta2=1 - rho,
        weight_decay=decay,
        model=model,
    )
    q = DiagonalGaussian(
        model.weight.detach()[0].clone(), torch.full((4,), ess * (0.7 + decay)).double()
    )
    for _ in range(5):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (0.5 * (model(x) - y).square()).mean().backward()
        optimizer.step()
        gradients = (x @ q.mean - y[:, 0])[:, None] * x
        slope = gradients.sum(0) + ess * decay * q.mean
        hessian = gradients.square().sum(0) + ess * decay
        q = blr_step(q, q.pull_back(slope, hessian), rho)
        learned = ess * (optimizer.state[model.weight]["hess"][0] + decay)
        torch.testing.assert_close(model.weight.detach()[0], q.mean, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(learned, q.precision, rtol=1e-12, atol=1e-14)


# Rows that draw: the same noise for a plain transcription --------------------------------------


class Quadratic:
    """Minibatch gradients of a least-squares loss, and the noise of a generator."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randn(40, generator=generator, dtype=torch.float64)
        self.start = torch.randn(5, generator=generator, dtype=torch.float64)
        self.noise = torch.Generator().manual_seed(7)

    def rows(self, t: int) -> slice:
        return slice(8 * t % 40, 8 * t % 40 + 8)

    def loss(self, theta: Tensor, t: int) -> Tensor:
        rows = self.rows(t)
        return 0.5 * (self.x[rows] @ theta - self.y[rows]).square().mean()

    def gradient(self, theta: Tensor, t: int) -> Tensor:
        rows = self.rows(t)
        return self.x[rows].T @ (self.x[rows] @ theta - self.y[rows]) / 8

    def epsilon(self) -> Tensor:
        return torch.empty(5, dtype=torch.float64).normal_(generator=self.noise)


def run(make: Callable[..., Any], steps: int) -> tuple[Tensor, Any, Quadratic]:
    problem = Quadratic()
    theta = nn.Parameter(problem.start.clone())
    optimizer = make([theta], generator=torch.Generator().manual_seed(7))
    for t in range(steps):
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            problem.loss(theta, t).backward()
        if isinstance(optimizer, BSAM):
            with optimizer.adversarial_params():
                problem.loss(theta, t).backward()
        optimizer.step()
    return theta.detach(), optimizer, problem


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_vadam_line_by_line() -> None:
    """Khan et al., ICML 2018, Figure 1 (right)."""
    n, lam, alpha, gamma1, gamma2 = 40.0, 3.0, 0.05, 0.9, 0.97
    found, optimizer, problem = run(
        lambda p, **k: Vadam(
            p, lr=alpha, ess=n, weight_decay=lam / n, beta1=gamma1, beta2=gamma2, **k
        ),
        30,
    )
    mu, m, s = problem.start.clone(), torch.zeros(5).double(), torch.zeros(5).double()
    for t in range(1, 31):
        sigma = 1 / torch.sqrt(n * s + lam)
        theta = mu + sigma * problem.epsilon()
        g = problem.gradient(theta, t - 1)
        m = gamma1 * m + (1 - gamma1) * (g + lam * mu / n)
        s = gamma2 * s + (1 - gamma2) * (g * g)
        m_hat, s_hat = m / (1 - gamma1**t), s / (1 - gamma2**t)
        mu = mu - alpha * m_hat / (torch.sqrt(s_hat) + lam / n)
    assert_same(found, mu)
    assert_same(optimizer.state[optimizer.param_groups[0]["params"][0]]["hess"], s)


def test_a_second_moment_that_starts_above_0_is_not_corrected() -> None:
    """Corrected, a small gradient would be divided by the rounding error of the difference."""
    n, lam, alpha, start = 40.0, 3.0, 0.05, 0.4
    found, _, problem = run(
        lambda p, **k: Vadam(p, lr=alpha, ess=n, weight_decay=lam / n, hess_init=start, **k), 3
    )
    mu, m, s = (
        problem.start.clone(),
        torch.zeros(5).double(),
        torch.full((5,), start, dtype=torch.float64),
    )
    for t in range(1, 4):
        g = problem.gradient(mu + problem.epsilon() / torch.sqrt(n * s + lam), t - 1)
        m, s = 0.9 * m + 0.1 * (g + lam * mu / n), 0.999 * s + 0.001 * g**2
        mu = mu - alpha * m / (1 - 0.9**t) / (torch.sqrt(s) + lam / n)
    assert_same(found, mu)


def test_vprop_line_by_line() -> None:
    """The talk's pseudocode maximises f = −loss, a sum: ess = 1 and λ = weight_decay."""
    lam, alpha, beta = 2.0, 0.02, 0.1
    found, _, problem = run(
        lambda p, **k: Vprop(p, lr=alpha, ess=1.0, weight_decay=lam, beta2=1 - beta, **k), 30
    )
    mu, s = problem.start.clone(), torch.zeros(5).double()
    for t in range(30):
        theta = mu + problem.epsilon() / torch.sqrt(s + lam)
        g = problem.gradient(theta, t)
        s = (1 - beta) * s + beta * g**2
        mu = mu - alpha * (g + lam * mu) / torch.sqrt(s + lam)
    assert_same(found, mu)


def test_bsam_line_by_line() -> None:
    """Möllenhoff & Khan, ICLR 2023, Algorithm 1 (right)."""
    n, delta, gamma, rho = 40.0, 0.02, 0.1, 0.3
    alpha, beta1, beta2 = 0.05, 0.9, 0.9
    found, optimizer, problem = run(
        lambda p, **k: BSAM(
            p,
            lr=alpha,
            ess=n,
            hess_init=1 - delta,
            beta1=beta1,
            beta2=beta2,
            weight_decay=delta,
            radius=rho,
            damping=gamma,
            **k,
        ),
        30,
    )
    omega, s, g_m = problem.start.clone(), torch.ones(5).double(), torch.zeros(5).double()
    for t in range(30):
        theta = omega + problem.epsilon() / torch.sqrt(n * s)
        g = problem.gradient(theta, t)
        epsilon = rho * g / s
        g_eps = problem.gradient(omega + epsilon, t)
        g_m = beta1 * g_m + (1 - beta1) * (g_eps + delta * omega)
        s = beta2 * s + (1 - beta2) * (torch.sqrt(s) * g.abs() + delta + gamma)
        omega = omega - alpha * g_m / s
    assert_same(found, omega)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert_same(state["hess"] + delta, s)


@pytest.mark.parametrize("draws", [1, 3])
def test_ivons_row_is_ivon(draws: int) -> None:
    results = []
    for make in (
        lambda p, **k: IVON(p, rescale_lr=False, **k),
        lambda p, **k: RowOptimizer(p, "IVON", **k),
    ):
        model = network()
        optimizer = make(
            model.parameters(),
            lr=0.1,
            ess=N,
            hess_init=0.3,
            beta1=0.8,
            beta2=0.9,
            weight_decay=0.01,
            generator=torch.Generator().manual_seed(3),
        )
        x, y = data()
        for t in range(20):
            for k in range(draws):
                start = BATCH * (t + k) % N
                batch = slice(start, start + BATCH)
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        hess = flat(optimizer.state[p]["hess"] for p in model.parameters())
        results.append(torch.cat([flat(model.parameters()), hess]))
    assert_same(*results)


def test_clipping_holds_for_the_squares_too() -> None:
    """Gradients a tenth as long come from squares a hundredth as large."""
    x, y = data()
    hess = []
    for clipped in (False, True):
        model = network()
        optimizer = OGN(model.parameters(), lr=0.1, ess=N, beta2=0.0, model=model)
        with optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(model(x), y).backward()
        if clipped:
            for p in model.parameters():
                p.grad.mul_(0.1)
        optimizer.step()
        hess.append(flat(optimizer.state[p]["hess"] for p in model.parameters()))
    torch.testing.assert_close(hess[1], hess[0] / 100, rtol=1e-10, atol=0)


# The face -------------------------------------------------------------------------------------


def test_diagonal_newton_where_the_hessian_is_diagonal() -> None:
    """Hutchinson's estimate is exact there, and its magnitude is averaged (K&R 36)."""
    target = torch.tensor([1.0, -2.0, 3.0]).double()
    theta = nn.Parameter(torch.tensor([0.3, -0.4, 2.0]).double())
    beta, decay, lr = 0.7, 0.2, 0.5
    optimizer = RowOptimizer(
        [theta], "diagonal Newton", lr=lr, beta2=beta, weight_decay=decay, hess_init=0.5
    )
    m, h = theta.detach().clone(), torch.full((3,), 0.5).double()
    for _ in range(5):
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            (torch.cos(theta) - target * theta).sum().backward(create_graph=True)
        assert not theta.grad.requires_grad
        optimizer.step()
        h = beta * h + (1 - beta) * m.cos().abs()
        m = m - lr * (-m.sin() - target + decay * m) / (h + decay)
        assert_same(theta.detach(), m)
    assert_same(optimizer.state[theta]["hess"], h)
    optimizer.zero_grad()
    with pytest.raises(OptimizerError, match="create_graph"), optimizer.sampled_params(train=True):
        theta.square().sum().backward()


def test_diagonal_newton_finds_the_diagonal_of_a_network() -> None:
    """With many draws a step, against the Hessian in full; its posterior is ess·(h + δ)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.randint(2, (20,))
    optimizer = RowOptimizer(
        model.parameters(), "diagonal Newton", lr=0.0, ess=20.0, weight_decay=0.1, beta2=0.0,
        generator=torch.Generator().manual_seed(0), mc_samples=1000,
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward(create_graph=True)
        return loss

    optimizer.step(closure)
    params = dict(model.named_parameters())
    sizes = [p.numel() for p in params.values()]

    def loss_of(vector: Tensor) -> Tensor:
        parts = [v.view_as(p) for v, p in zip(vector.split(sizes), params.values(), strict=True)]
        named = dict(zip(params, parts, strict=True))
        return nn.functional.cross_entropy(torch.func.functional_call(model, named, (x,)), y)

    hessian = torch.func.hessian(loss_of)(flat(params.values()))
    exact = hessian.diagonal().abs()
    std = ((hessian.square().sum(1) - exact.square()) / optimizer.mc_samples).sqrt()
    hess = flat(optimizer.state[p]["hess"] for p in params.values())
    assert ((hess - exact).abs() < 4 * std).all() and std.norm() < 0.15 * exact.norm()
    posterior = Posterior.from_optimizer(optimizer, model)
    assert_same(flat(posterior.precision(n) for n in params), 20 * (hess + 0.1))
