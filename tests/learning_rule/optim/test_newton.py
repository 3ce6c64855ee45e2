"""Newton's method, Laplace, and the Gauss–Newton rows where the answer is known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from blr_analysis.learning_rule.families import FullGaussian
from blr_analysis.learning_rule.optim import OGN, VOGN, Newton
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.posterior import fit_laplace
from blr_analysis.task import Task


def regression(n: int = 60, p: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, 1, generator=generator, dtype=torch.float64)


def test_one_step_solves_ridge_regression() -> None:
    """ρ = 1: mean and precision are the closed form's (K&R 14), whatever the start."""
    x, y = regression()
    delta = 3.0
    model = nn.Linear(5, 1, bias=False).double()
    optimizer = Newton(model.parameters(), ess=60, weight_decay=delta / 60)
    loss = optimizer.step(lambda: 0.5 * (model(x) - y).square().mean())
    precision = x.T @ x + delta * torch.eye(5).double()
    solution = torch.linalg.solve(precision, x.T @ y)[:, 0]
    assert float(loss) > 0
    assert (model.weight.detach()[0] - solution).abs().max() < 1e-12
    learned = optimizer.state[model.weight]["precision"]
    assert (learned - precision).abs().max() < 1e-12 * precision.abs().max()


def test_logistic_regression_converges_quadratically() -> None:
    """To scikit-learn's solution; the number of right digits doubles with every step."""
    found = load_breast_cancer()
    x = (found.data[:, :8] - found.data[:, :8].mean(0)) / found.data[:, :8].std(0)
    strength = 0.5
    sklearn = LogisticRegression(
        C=1 / strength, fit_intercept=False, solver="newton-cholesky", tol=1e-13, max_iter=100
    )
    solution = torch.tensor(sklearn.fit(x, found.target).coef_[0])
    inputs, targets = torch.tensor(x), torch.tensor(found.target).double()
    model = nn.Linear(8, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    n = len(x)
    optimizer = Newton(model.parameters(), ess=n, weight_decay=strength / n)
    errors = []
    for _ in range(12):
        optimizer.step(lambda: F.binary_cross_entropy_with_logits(model(inputs)[:, 0], targets))
        errors.append(float((model.weight.detach()[0] - solution).norm() / solution.norm()))
    assert errors[-1] < 1e-10
    digits = -np.log10([error for error in errors if 1e-9 < error < 0.1])
    assert len(digits) >= 3 and all(b > 1.7 * a for a, b in itertools.pairwise(digits))


def test_less_than_one_averages_hessians() -> None:
    """As blr_step does on the full Gaussian, step by step."""
    x, y = regression(seed=1)
    model = nn.Linear(5, 1, bias=False).double()
    optimizer = Newton(model.parameters(), lr=0.4, ess=60, weight_decay=0.05, hess_init=0.3)
    q = FullGaussian(model.weight.detach()[0].clone(), 60 * 0.35 * torch.eye(5).double())

    def loss(theta: Tensor) -> Tensor:
        return torch.cosh(x @ theta - y[:, 0]).sum() + 60 * 0.5 * 0.05 * theta.square().sum()

    for _ in range(4):
        optimizer.step(lambda: torch.cosh(model(x) - y).mean())
        gradient, hessian = torch.func.grad(loss)(q.mean), torch.func.hessian(loss)(q.mean)
        q = blr_step(q, q.pull_back(gradient, hessian), 0.4)
        torch.testing.assert_close(model.weight.detach()[0], q.mean, rtol=1e-10, atol=1e-12)
    learned = optimizer.state[model.weight]["precision"]
    torch.testing.assert_close(learned, q.precision, rtol=1e-10, atol=1e-10)


def test_the_precision_of_other_parameters_is_forgotten() -> None:
    a, b, fresh = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    scales = torch.tensor([1.0, 10.0, 100.0])

    def loss() -> Tensor:
        return 0.5 * (scales * (a - 1) ** 2).sum() + 0.5 * ((b - 2) ** 2).sum()

    optimizer, other = Newton([a, b], lr=0.5), Newton([fresh], lr=0.5)
    b.requires_grad_(False)
    for _ in range(6):
        optimizer.step(loss)
    a.requires_grad_(False)
    b.requires_grad_(True)
    optimizer.step(loss)
    other.step(lambda: 0.5 * ((fresh - 2) ** 2).sum())
    torch.testing.assert_close(b, fresh)


def test_laplace_is_one_step_at_the_mode() -> None:
    """The rule at ρ = 1 with the Hessian at the mode: S = ∇²ℓ̄, as fit_laplace has it."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 3).double(), torch.randint(2, (40,))
    model = nn.Linear(3, 2).double()
    delta = 2.0
    optimizer = Newton(model.parameters(), ess=40, weight_decay=delta / 40)
    for _ in range(8):
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    laplace = fit_laplace(Task(model, (x, y)), structure="full", prior_precision=delta)
    learned = optimizer.state[next(model.parameters())]["precision"]
    variances = torch.linalg.inv(learned).diagonal()
    found = torch.cat([laplace.variance(n).flatten() for n, _ in model.named_parameters()])
    torch.testing.assert_close(found.double(), variances, rtol=1e-8, atol=0)


# The Gauss–Newton rows, where squared residuals are known ---------------------------------------


def with_unit_residuals(n: int, p: int, delta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Data whose ridge solution leaves residuals of ±1: there Σ g_i² is Σ x_i² exactly.

    Xᵀ r = δ θ defines the solution θ for any signs r; y = X θ + r.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    signs = torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1
    theta = x.T @ signs / delta
    return x, x @ theta + signs, theta


def test_ogn_finds_the_closed_form_posterior_of_linear_regression() -> None:
    n, delta = 80, 30.0
    x, y, theta = with_unit_residuals(n, 4, delta)
    model = nn.Linear(4, 1, bias=False).double()
    optimizer = OGN(
        model.parameters(), lr=0.2, ess=n, beta1=0.0, beta2=0.8, weight_decay=delta / n, model=model
    )
    for _ in range(160):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (0.5 * (model(x)[:, 0] - y).square()).mean().backward()
        optimizer.step()
    precision = n * (optimizer.state[model.weight]["hess"][0] + delta / n)
    torch.testing.assert_close(model.weight.detach()[0], theta, rtol=1e-9, atol=0)
    exactly = (x.T @ x).diagonal() + delta
    torch.testing.assert_close(precision, exactly, rtol=1e-8, atol=0)


@pytest.mark.slow
def test_vogn_finds_it_within_the_noise_of_its_draws() -> None:
    """Averaged over draws, a residual's square grows by the variance of its prediction."""
    n, delta = 400, 60.0
    x, y, theta = with_unit_residuals(n, 3, delta)
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = VOGN(
        model.parameters(),
        lr=0.02,
        ess=n,
        beta1=0.0,
        beta2=0.98,
        weight_decay=delta / n,
        model=model,
        generator=torch.Generator().manual_seed(0),
    )
    means, precisions = [], []
    for step in range(1500):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (0.5 * (model(x)[:, 0] - y).square()).mean().backward()
        optimizer.step()
        if step >= 500:
            means.append(model.weight.detach()[0].clone())
            precisions.append(n * (optimizer.state[model.weight]["hess"][0] + delta / n))
    mean, precision = torch.stack(means).mean(0), torch.stack(precisions).mean(0)
    predicted = (x.square() / precision).sum(1)  # the variance of each prediction
    expected = (x.square() * (1 + predicted)[:, None]).sum(0) + delta
    assert ((mean - theta).abs() < 0.2 / precision.sqrt()).all()
    torch.testing.assert_close(precision, expected, rtol=0.01, atol=0)
    exactly = (x.T @ x).diagonal() + delta
    torch.testing.assert_close(precision, exactly, rtol=0.03, atol=0)
