"""Parameters without dimensions, parameters in another order in memory, and single precision."""

from __future__ import annotations

import pytest
import torch
from oracles import fit_at_rest, relative
from oracles_retraining import flat, trained
from parts import normal
from torch import Tensor, nn

import blr_analysis as blr


class Tempered(nn.Module):
    """A learned temperature, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


@pytest.fixture
def tempered() -> blr.Task:
    return blr.Task(Tempered().double(), (normal(20, 4), torch.arange(20) % 3))


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank", "full"])
def test_a_parameter_without_dimensions(tempered: blr.Task, structure: str) -> None:
    q = fit_at_rest(tempered, structure=structure, prior_precision=1.0)
    influence = blr.influence(tempered, q, tempered)
    scores = blr.sensitivity(tempered, q)
    assert relative(torch.as_tensor(influence.diagonal()), scores.self_influence) < 1e-9
    assert blr.leave_one_out(tempered, q, refine=2).correction.count("descent") == 2
    result = blr.what_if(tempered, q, remove=[0, 1, 2], solver="cg", passes=3)
    assert result.parameters["scale"].shape == ()


@pytest.mark.parametrize("variance", [1.0, 2500.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_descents_go_as_far_as_the_precision_allows(variance: float, dtype: torch.dtype) -> None:
    """Also where the objective is large beside what a removal changes of it."""
    x, y = normal(120, 4), 50 * normal(120, seed=1) + 150
    likelihood = blr.Gaussian(variance)
    model = trained("gaussian", x, y / variance**0.5, 1.0)
    z = torch.cat([x, torch.ones(120, 1).double()], 1)
    theta = torch.linalg.solve(z.T @ z / variance + torch.eye(5).double(), z.T @ y / variance)
    with torch.no_grad():
        model.weight.copy_(theta[None, :-1])
        model.bias.copy_(theta[-1:])
    task = blr.Task(model.to(dtype), (x.to(dtype), y.to(dtype)), likelihood=likelihood)
    q = fit_at_rest(task, structure="diag", prior_precision=1.0)
    result = blr.what_if(task, q, remove=range(40), solver="cg", passes=1000)
    kept = z[40:]
    truth = torch.linalg.solve(
        kept.T @ kept / variance + torch.eye(5).double(), kept.T @ y[40:] / variance
    )
    change = relative(flat(result.parameters)[0].double() - theta, truth - theta)
    assert change < (1e-5 if dtype == torch.float64 else 2e-2)
    full = fit_at_rest(task, structure="full", prior_precision=1.0)
    exact = blr.leave_one_out(task, full)
    fine = blr.leave_one_out(task, full, refine=5)
    torch.testing.assert_close(
        fine.losses - fine.losses_before,
        exact.losses - exact.losses_before,
        rtol=2e-2,
        atol=1e-4 * float(exact.losses.max()),
    )
