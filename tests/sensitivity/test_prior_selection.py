"""The prior precision chosen by leave-one-out, against closed forms and exact retraining."""

from __future__ import annotations

import math

import pytest
import torch
from matplotlib.figure import Figure
from models import mlp
from oracles_retraining import (
    flat,
    leave_one_out_weights,
    linear,
    retrained,
    with_ones,
)
from sklearn.datasets import load_diabetes, load_iris
from sklearn.linear_model import RidgeCV
from snapshots import untouched
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.sensitivity import PriorSelection
from blr_analysis.sensitivity.minimise import on_a_copy, train

GRID = [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]


def select(task: blr.Task, grid=GRID, **options) -> PriorSelection:
    return blr.select_prior_precision(task, grid, **options)


def diabetes() -> tuple[Tensor, Tensor]:
    x, y = load_diabetes(return_X_y=True)
    x = torch.tensor(x)
    y = torch.tensor(y)
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def ridge(x: Tensor, y: Tensor, dtype: torch.dtype = torch.float64) -> blr.Task:
    model = nn.Linear(x.shape[1], 1, bias=False)
    nn.init.zeros_(model.weight)
    return blr.Task(model.to(dtype), (x.to(dtype), y.to(dtype)), likelihood="gaussian")


def press(x: Tensor, y: Tensor, delta: float) -> tuple[Tensor, float, float]:
    """The ridge solution, its mean squared left-out error, and its largest hat value."""
    gram = x.T @ x + delta * torch.eye(x.shape[1], dtype=x.dtype)
    w = torch.linalg.solve(gram, x.T @ y)
    hat = (x @ torch.linalg.inv(gram) * x).sum(1)
    return w, float(((y - x @ w) / (1 - hat)).square().mean()), float(hat.max())


def test_more_inputs_than_examples_are_press_too() -> None:
    g = torch.Generator().manual_seed(0)
    u = torch.randn(40, 30, generator=g, dtype=torch.float64)
    x = u @ torch.randn(30, 300, generator=g, dtype=torch.float64)
    y = u[:, 0] + torch.randn(40, generator=g, dtype=torch.float64)
    grid = [1.0, 1e3, 1e4, 1e5]
    selection = select(ridge(x, y), grid)
    truth = []
    for delta in grid:
        kernel = x @ x.T
        hat = kernel @ torch.linalg.inv(kernel + delta * torch.eye(40, dtype=x.dtype))
        truth.append(float(((y - hat @ y) / (1 - hat.diagonal())).square().mean()))
    squares = [2 * row["loo_nll"] - math.log(2 * math.pi) for row in selection.rows]
    assert squares == pytest.approx(truth, rel=1e-4)


def test_ridge_regression_is_press_and_chooses_what_ridge_cv_chooses() -> None:
    x, y = diabetes()
    selection = select(ridge(x, y), structure="full")
    for row in selection.rows:
        _, mse, hat = press(x, y, row["prior_precision"])
        nll = 0.5 * mse + 0.5 * math.log(2 * math.pi)
        assert row["loo_nll"] == pytest.approx(nll, rel=1e-9)
        assert row["max_leverage"] == pytest.approx(hat, rel=1e-8)
        assert row["converged"]
        assert row["residual"] <= 1e-8
        assert math.isnan(row["loo_accuracy"])
    theirs = RidgeCV(alphas=GRID, fit_intercept=False).fit(x.numpy(), y.numpy())
    assert selection.best == float(selection) == theirs.alpha_
    assert not selection.at_edge
    weight = selection.posterior.mean["weight"][0]
    assert weight.tolist() == pytest.approx(theirs.coef_.tolist(), rel=1e-7)
    assert selection.posterior.prior_precision == selection.best


@pytest.mark.parametrize("kind", ["bernoulli", "categorical", "poisson"])
def test_the_curve_of_a_generalised_linear_model_is_that_of_exact_retraining(kind: str) -> None:
    x, y = load_iris(return_X_y=True)
    x = torch.tensor(x)[30:130:2]
    y = torch.tensor(y)[30:130:2]
    x = (x - x.mean(0)) / x.std(0)
    outputs = 3 if kind == "categorical" else 1
    if kind == "bernoulli":
        y = (y == 1).double()[:, None]
    elif kind == "poisson":
        y = torch.poisson((0.5 + 0.4 * x[:, :1]).exp(), torch.Generator().manual_seed(0))
    likelihood = blr.likelihoods.resolve(kind)
    grid = [0.1, 1.0, 10.0, 100.0]
    start = linear(torch.zeros(outputs, x.shape[1] + 1, dtype=torch.float64))
    selection = select(blr.Task(start, (x, y), likelihood=kind), grid)
    truth = []
    for row in selection.rows:
        delta = row["prior_precision"]
        theta = retrained(kind, x, y, leave_one_out_weights(len(x)), delta, outputs)
        f = torch.einsum("ncd,nd->nc", theta, with_ones(x))
        truth.append(float(likelihood.nll(f, y).mean()))
        whole = retrained(kind, x, y, torch.ones(1, len(x)), delta, outputs)[0]
        fitted = likelihood.nll(with_ones(x) @ whole.T, y).mean()
        assert row["train_nll"] == pytest.approx(float(fitted), rel=1e-9)
        assert row["converged"]
        rise = (row["loo_nll"] - row["train_nll"]) / (truth[-1] - row["train_nll"])
        assert rise == pytest.approx(1, abs=0.06)  # of the left-out loss above the training loss
    assert selection.best == grid[truth.index(min(truth))]
    best = retrained(kind, x, y, torch.ones(1, len(x)), selection.best, outputs)[0]
    torch.testing.assert_close(flat(selection.posterior.mean), best, rtol=1e-6, atol=1e-9)


# The default fit.


def network(n: int = 40, **options) -> blr.Task:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
    return blr.Task(mlp(hidden=6, outputs=3), (x, y), **options)


def kinked() -> blr.Task:
    """A ReLU network's gradient vanishes nowhere."""
    task = network()
    task.model[1] = nn.ReLU()
    return task


def objective(task: blr.Task, params: dict[str, Tensor], delta: float) -> tuple[float, float]:
    """The objective and its gradient's norm, by plain autograd."""
    x, y = task.dataset.tensors
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    f = torch.func.functional_call(task.model, leaves, (x,))
    value = nn.functional.cross_entropy(f, y, reduction="sum")
    value = value + 0.5 * delta * sum(p.square().sum() for p in leaves.values())
    grads = torch.autograd.grad(value, list(leaves.values()))
    return float(value.detach()), math.sqrt(sum(float(g.square().sum()) for g in grads))


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.slow
def test_a_network_comes_to_a_stationary_point_downhill(structure: str) -> None:
    task = network()
    task_copy = on_a_copy(task)
    with untouched(task.model):
        reached = train(task_copy, 0.3, structure=structure, tolerance=1e-7, rounds=200)
    start, steep = objective(task, task.parameters(), 0.3)
    end, slope = objective(task, reached.params, 0.3)
    assert reached.residual <= 1e-7
    assert end < 0.8 * start
    assert slope < 1e-6 * steep
    for name, p in task_copy.parameters().items():
        assert torch.equal(p, reached.params[name])


@pytest.mark.slow
def test_a_fit_that_does_not_converge_is_said() -> None:
    selection = select(kinked(), [0.1, 1.0])
    assert [row["converged"] for row in selection.rows] == [False, False]
    assert "2 of the fits did not converge" in repr(selection)
    assert any(line.get_label() == "did not converge" for line in selection.plot().lines)
    assert "converge" not in repr(select(ridge(*diabetes()), [1.0, 10.0, 100.0]))


# One's own training.


def test_one_s_own_training_gets_a_copy_of_the_model_each_time() -> None:
    x, y = diabetes()
    task = ridge(x, y)
    starts = []

    def fit(copy_of_task: blr.Task, delta: float) -> blr.Posterior:
        assert copy_of_task.model is not task.model
        starts.append((delta, float(copy_of_task.model.weight.detach().abs().sum())))
        copy_of_task.model.weight.data = press(x, y, delta)[0][None]
        return blr.fit_laplace(copy_of_task, structure="full", prior_precision=delta)

    with untouched(task.model):
        selection = select(task, fit=fit)
    assert starts == [(delta, 0.0) for delta in GRID]  # always from the model's own weights
    theirs = select(task, structure="full")
    assert selection.best == theirs.best
    for a, b in zip(selection.rows, theirs.rows, strict=True):
        assert a["loo_nll"] == pytest.approx(b["loo_nll"], rel=1e-9)
    assert "converged" not in selection.table


# The grid, the test data, what comes back.


def test_a_best_at_the_edge_is_said() -> None:
    task = ridge(*diabetes())
    inside = select(task)
    assert not inside.at_edge
    assert "edge" not in repr(inside)
    for grid in (GRID[: GRID.index(inside.best) + 1], GRID[GRID.index(inside.best) :]):
        selection = select(task, grid)
        assert selection.best == inside.best
        assert selection.at_edge
        assert "at the edge of the grid" in repr(selection)
        assert "edge" in selection.plot().get_title()


def test_the_test_loss_stands_beside_the_estimate() -> None:
    x, y = diabetes()
    task = ridge(x[:300], y[:300])
    selection = select(task, structure="full", test=ridge(x[300:], y[300:]))
    for row in selection.rows:
        w, _, _ = press(x[:300], y[:300], row["prior_precision"])
        mse = float((y[300:] - x[300:] @ w).square().mean())
        nll = 0.5 * mse + 0.5 * math.log(2 * math.pi)
        assert row["test_nll"] == pytest.approx(nll, rel=1e-9)
    table = selection.table
    assert list(table)[:2] == ["prior_precision", "train_nll"]
    assert list(table)[2:5] == ["train_accuracy", "loo_nll", "loo_accuracy"]
    assert list(table)[5:9] == ["max_leverage", "rough", "test_nll", "test_accuracy"]
    assert table.loo_nll.idxmin() == GRID.index(selection.best)
    curves = {line.get_label(): list(line.get_ydata()) for line in selection.plot().lines}
    assert curves["leave-one-out, from training data"] == table.loo_nll.tolist()
    assert curves["test data"] == table.test_nll.tolist()
    assert curves[f"chosen: {selection.best:g}"] == [table.loo_nll.min()]
    axes = Figure().subplots()
    assert selection.plot(axes) is axes
    assert axes.get_xscale() == "log"
    assert "test data" not in [line.get_label() for line in select(task).plot().lines]
