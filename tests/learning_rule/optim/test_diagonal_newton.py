"""Diagonal online Newton: the rule's step, the posterior that it leaves, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blr_analysis import Posterior
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule import blr_step
from blr_analysis.learning_rule.families import DiagonalGaussian
from blr_analysis.learning_rule.optim import DiagonalNewton

N = 30
DELTA = 2.0


def problem() -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    y = (x[:, :1] - x[:, 1:2] + 0.1).tanh()
    torch.manual_seed(0)
    return nn.Linear(4, 1, bias=False).double(), x, y


def test_it_is_the_rule_for_a_diagonal_gaussian() -> None:
    """K&R 37: one step size ρ for mean and precision, written by ``blr_step``."""
    model, x, y = problem()
    rho = 0.3
    optimizer = DiagonalNewton(
        model.parameters(), lr=rho, beta2=1 - rho, ess=N, weight_decay=DELTA / N, hess_init=1.0
    )
    mean = model.weight.detach()[0].clone()
    q = DiagonalGaussian(mean, torch.full_like(mean, N + DELTA))

    def total(theta: Tensor) -> Tensor:
        return (x @ theta - y[:, 0]).cosh().log().sum() + 0.5 * DELTA * theta @ theta

    for _ in range(6):
        optimizer.step(lambda: (model(x) - y).cosh().log().mean())
        gradient = torch.func.grad(total)(q.mean)
        hessian = torch.func.hessian(total)(q.mean).diagonal()
        q = blr_step(q, q.pull_back(gradient, hessian), rho)
        learned = N * optimizer.state[model.weight]["hess"][0] + DELTA
        torch.testing.assert_close(model.weight.detach()[0], q.mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(learned, q.precision, rtol=1e-10, atol=1e-12)


def test_its_posterior_is_the_diagonal_of_the_hessian() -> None:
    model, x, y = problem()
    optimizer = DiagonalNewton(model.parameters(), lr=0.5, beta2=0.0, ess=N, weight_decay=DELTA / N)
    for _ in range(3):
        optimizer.step(lambda: 0.5 * (model(x) - y).square().mean())
    posterior = Posterior.from_optimizer(optimizer, model)
    expected = x.square().sum(0) + DELTA
    actual = posterior.precision("weight")[0].to(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_a_loss_that_curves_down_moves_nothing() -> None:
    theta = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = DiagonalNewton([theta], lr=0.5, beta2=0.0)
    with pytest.raises(InputError, match="not positive"):
        optimizer.step(lambda: theta[0].square() - theta[1].square())
    assert theta.tolist() == [1.0, 2.0]
    with pytest.raises(OptimizerError, match="closure"):
        optimizer.step()
    with pytest.raises(OptimizerError, match="without backward"):

        def closure() -> Tensor:
            loss = theta.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
