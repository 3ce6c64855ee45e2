"""What-if by a descent on the changed data, against brute-force retraining."""

from __future__ import annotations

import pytest
import torch
from models import mlp, normal
from oracles import fit_at_rest, relative
from oracles_retraining import (
    flat,
    retrained,
    trained,
    without,
)
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.sensitivity.minimise import Descent
from blr_analysis.sensitivity.objective import objective_after

DELTA = 2.0


def test_linear_regression_is_solved_exactly_whatever_the_preconditioner() -> None:
    x = normal(40, 5)
    y = normal(40, seed=1)
    task = blr.Task(trained("gaussian", x, y, DELTA), (x, y), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA)
    result = blr.what_if(task, q, remove=range(15))
    truth = retrained("gaussian", x, y, without(40, list(range(15))), DELTA)[0]
    assert relative(flat(result.parameters), truth) < 1e-6
    assert result.solver == "cg"
    assert result.converged
    assert not result.note


@pytest.mark.parametrize("change", ["remove", "add", "relabel", "all"])
def test_converged_descent_is_retraining(change: str) -> None:
    data = load_breast_cancer()
    x = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0))[:220]
    y = torch.tensor(data.target)[:220].double()
    model = trained("bernoulli", x[:200], y[:200], DELTA)
    task = blr.Task(model, (x[:200], y[:200]), likelihood="bernoulli")
    new = blr.Task(model, (x[200:], y[200:]), likelihood="bernoulli")
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA)
    labels = y.clone()
    weights = torch.zeros(1, 220)
    weights[:, :200] = 1
    change_of_data: dict = {}
    if change in ("remove", "all"):
        change_of_data["remove"] = y[:200] == 1
        change_of_data["remove"][:40] = False
        weights[0, :200][change_of_data["remove"]] = 0
    if change in ("add", "all"):
        change_of_data["add"] = new
        weights[:, 200:] = 1
    if change in ("relabel", "all"):
        change_of_data["relabel"] = {i: 1 - float(y[i]) for i in (3, 0, 17, 30)}
        for i, label in change_of_data["relabel"].items():
            labels[i] = label
    result = blr.what_if(task, q, **change_of_data, solver="cg", passes=500)
    truth = retrained("bernoulli", x, labels, weights, DELTA)[0]
    assert result.converged
    assert relative(flat(result.parameters), truth) < 1e-5
    step = blr.what_if(task, q, **change_of_data, solver="posterior")
    assert relative(flat(step.parameters), truth) > 0.01


def test_the_objective_never_rises_and_passes_are_counted(monkeypatch) -> None:
    """Of a network far from its minimum."""
    task = blr.Task(mlp(), (normal(300, 4), torch.arange(300) % 3))
    q = blr.fit_laplace(task, structure="kron", prior_precision=DELTA)
    n_examples = 0
    run = blr.Task.run

    def counted(self, batch, params, indices=None):
        nonlocal n_examples
        n_examples += 0 if indices is None else len(indices)
        return run(self, batch, params, indices)

    monkeypatch.setattr(blr.Task, "run", counted)
    data = objective_after(task, q.prior, leaving=torch.arange(0, 300, 3))
    descent = Descent(data, q.form, data.at(dict(q.mean)))
    values = [descent.point.value]
    start = n_examples
    while descent.passes < 20:
        descent.move()
        values.append(descent.point.value)
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0] - 1e-3
    assert (n_examples - start) / 200 == descent.passes - 1  # of the 200 that stay
    result = blr.what_if(
        task, q, remove=range(0, 300, 3), evaluate=task.subset([0]), solver="cg", passes=20
    )
    assert 0 < result.passes <= 21
    assert "off the minimum" in repr(result)


@pytest.mark.parametrize("structure", ["kron", "full"])
@pytest.mark.slow
def test_a_rare_class(structure: str) -> None:
    """One step, for up to a hundredth of the data, falls nats short of retraining, which the
    descent is."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 4, generator=g, dtype=torch.float64)
    y = torch.zeros(1000, dtype=torch.long)
    y[:300] = 1
    y[300:308] = 2
    x[y == 1, 0] += 2
    x[y == 2, 1] += 4
    task = blr.Task(trained("categorical", x, y, 0.1, 3), (x, y))
    q = blr.fit_laplace(task, structure=structure, prior_precision=0.1)
    test = blr.Task(task.model, (x[300:308], y[300:308]))
    result = blr.what_if(task, q, remove=y == 2, evaluate=test, solver="cg")
    without = trained("categorical", x[y != 2], y[y != 2], 0.1, 3)
    truth = nn.functional.cross_entropy(without(x[y == 2]), y[y == 2]).item()
    assert result.nll == pytest.approx(truth, rel=1e-2)
    step = blr.what_if(task, q, remove=y == 2, evaluate=test)
    assert step.solver == "posterior"
    assert step.passes == 0
    assert step.nll < truth - 1


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
    x = normal(120, 4)
    y = 50 * normal(120, seed=1) + 150
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
    rest_inputs = z[40:]
    precision = rest_inputs.T @ rest_inputs / variance + torch.eye(5).double()
    truth = torch.linalg.solve(precision, rest_inputs.T @ y[40:] / variance)
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
