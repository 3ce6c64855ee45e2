"""Newton's method against closed forms and Laplace; its steps are in optimizer_papers.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blr_analysis.learning_rule.optim import Newton
from blr_analysis.posterior import fit_laplace
from blr_analysis.task import Task


def test_one_step_solves_ridge_regression() -> None:
    """ρ = 1: mean and precision are the closed form's (K&R 14), whatever the start."""
    generator = torch.Generator().manual_seed(0)
    delta = 3.0
    x = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(60, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 1, bias=False).double()
    optimizer = Newton(model.parameters(), ess=60, weight_decay=delta / 60)
    loss = optimizer.step(lambda: 0.5 * (model(x) - y).square().mean())
    precision = x.T @ x + delta * torch.eye(5).double()
    solution = torch.linalg.solve(precision, x.T @ y)[:, 0]
    assert float(loss) > 0
    assert (model.weight.detach()[0] - solution).abs().max() < 1e-12
    learned = optimizer.state[model.weight]["precision"]
    assert (learned - precision).abs().max() < 1e-12 * precision.abs().max()


def test_the_precision_of_other_parameters_is_forgotten() -> None:
    a, b, fresh = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    scales = torch.tensor([1.0, 10.0, 100.0])

    def loss() -> Tensor:
        return 0.5 * (scales * (a - 1) ** 2).sum() + 0.5 * ((b - 2) ** 2).sum()

    optimizer = Newton([a, b], lr=0.5)
    fresh_optimizer = Newton([fresh], lr=0.5)
    for k in range(7):  # six steps of a, then one of b
        a.requires_grad_(k < 6)
        b.requires_grad_(k == 6)
        optimizer.step(loss)
    fresh_optimizer.step(lambda: 0.5 * ((fresh - 2) ** 2).sum())
    torch.testing.assert_close(b, fresh)


def test_laplace_is_one_step_at_the_mode() -> None:
    """The rule at ρ = 1 with the Hessian at the mode: S = ∇²ℓ̄, as fit_laplace has it."""
    torch.manual_seed(0)
    x = torch.randn(40, 3).double()
    y = torch.randint(2, (40,))
    model = nn.Linear(3, 2).double()
    delta = 2.0
    optimizer = Newton(model.parameters(), ess=40, weight_decay=delta / 40)
    for _ in range(8):
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    laplace = fit_laplace(Task(model, (x, y)), structure="full", prior_precision=delta)
    variances = torch.linalg.inv(optimizer.state[model.weight]["precision"]).diagonal()
    actual = torch.cat([laplace.variance(n).flatten() for n, _ in model.named_parameters()])
    torch.testing.assert_close(actual.double(), variances, rtol=1e-8, atol=0)
