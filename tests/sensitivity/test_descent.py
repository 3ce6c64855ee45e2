"""What-if by a descent on the changed data, against brute-force retraining."""

from __future__ import annotations

import pytest
import torch
from oracles import relative
from oracles_retraining import (
    flat,
    retrained,
    trained,
    without,
)
from parts import normal
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.posterior.prior import Prior
from blr_analysis.sensitivity.minimise import Descent
from blr_analysis.sensitivity.objective import changed

DELTA = 2.0


def objective(model: nn.Module, x: Tensor, y: Tensor, delta: float) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    return loss + delta / 2 * sum(p.square().sum() for p in model.parameters())


def retrain(model: nn.Module, x: Tensor, y: Tensor, delta: float) -> int:
    """L-BFGS from where the model stands; how many gradients it took."""
    fit = torch.optim.LBFGS(
        model.parameters(),
        max_iter=3000,
        history_size=30,
        tolerance_grad=1e-5,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    taken = 0

    def closure() -> Tensor:
        nonlocal taken
        taken += 1
        fit.zero_grad()
        loss = objective(model, x, y, delta)
        loss.backward()
        return loss

    fit.step(closure)
    slope = torch.autograd.grad(objective(model, x, y, delta), list(model.parameters()))
    assert max(float(g.abs().max()) for g in slope) < 1e-4
    return taken


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()


def digits(n: int) -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:n]
    return torch.tensor(pixels)[order] / 16, torch.tensor(labels)[order]


def regression(**options) -> tuple[blr.Task, blr.Posterior, Tensor, Tensor]:
    x, y = normal(40, 5), normal(40, seed=1)
    task = blr.Task(trained("gaussian", x, y, DELTA), (x, y), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA)
    return task, q, x, y


def test_linear_regression_is_solved_exactly_whatever_the_preconditioner() -> None:
    task, q, x, y = regression()
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
    labels, weights = y.clone(), torch.zeros(1, 220)
    weights[:, :200] = 1
    asked: dict = {}
    if change in ("remove", "all"):
        asked["remove"] = y[:200] == 1
        asked["remove"][:40] = False
        weights[0, :200][asked["remove"]] = 0
    if change in ("add", "all"):
        asked["add"] = new
        weights[:, 200:] = 1
    if change in ("relabel", "all"):
        asked["relabel"] = {i: 1 - float(y[i]) for i in (3, 0, 17, 30)}
        for i, label in asked["relabel"].items():
            labels[i] = label
    result = blr.what_if(task, q, **asked, solver="cg", passes=500)
    truth = retrained("bernoulli", x, labels, weights, DELTA)[0]
    assert result.converged
    assert relative(flat(result.parameters), truth) < 1e-5
    one = blr.what_if(task, q, **asked, solver="posterior")
    assert relative(flat(one.parameters), truth) > 0.01


def rough(steps: int = 30) -> tuple[blr.Task, blr.Posterior]:
    """A network that was stopped early."""
    x, y = digits(300)
    model = network()
    fit = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        fit.zero_grad()
        objective(model, x, y, DELTA).backward()
        fit.step()
    task = blr.Task(model, (x, y))
    return task, blr.fit_laplace(task, structure="kron", prior_precision=DELTA)


def test_the_objective_never_rises_and_passes_are_counted(monkeypatch) -> None:
    task, q = rough()
    seen = 0
    run = blr.Task.run

    def counted(self, batch, params, indices=None):
        nonlocal seen
        seen += 0 if indices is None else len(indices)
        return run(self, batch, params, indices)

    monkeypatch.setattr(blr.Task, "run", counted)
    data = changed(task, q.prior, leaving=torch.arange(0, 300, 3))
    descent = Descent(data, q.form, data.at(dict(q.mean)))
    values, start = [descent.point.value], seen
    while descent.passes < 20:
        descent.move()
        values.append(descent.point.value)
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0] - 1e-3
    assert (seen - start) / 200 == descent.passes - 1  # of the 200 that stay
    result = blr.what_if(
        task, q, remove=range(0, 300, 3), evaluate=task.subset([0]), solver="cg", passes=20
    )
    assert 0 < result.passes <= 21
    assert "off the minimum" in repr(result)


def test_relabelled_examples_have_their_new_targets() -> None:
    x, y = digits(30)
    task = blr.Task(network(), (x, y), batch_size=4)
    labels = {7: 1, 2: 9, 29: 0}
    data = changed(task, Prior.of_any(DELTA), leaving=torch.tensor([0, 1]), labels=labels)
    assert data.n_data == 28
    new = y.clone()
    for i, label in labels.items():
        new[i] = label
    kept = torch.arange(2, 30)
    params = {n: p.detach() for n, p in task.model.named_parameters()}
    truth = objective(task.model, x[kept], new[kept], DELTA)
    point = data.at(params)
    assert point.value == pytest.approx(float(truth.detach()), rel=1e-12)
    slopes = torch.autograd.grad(truth, list(task.model.parameters()))
    for found, expected in zip(point.gradient.values(), slopes, strict=True):
        assert relative(found, expected) < 1e-12


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_a_rare_class(structure: str) -> None:
    """One step, for up to a hundredth of the data, falls nats short of retraining, which the
    descent is."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 4, generator=g, dtype=torch.float64)
    y = torch.zeros(1000, dtype=torch.long)
    y[:300], y[300:308] = 1, 2
    x[y == 1, 0] += 2
    x[y == 2, 1] += 4
    task = blr.Task(trained("categorical", x, y, 0.1, 3), (x, y))
    q = blr.fit_laplace(task, structure=structure, prior_precision=0.1)
    test = blr.Task(task.model, (x[300:308], y[300:308]))
    result = blr.what_if(task, q, remove=y == 2, evaluate=test, solver="cg")
    without = trained("categorical", x[y != 2], y[y != 2], 0.1, 3)
    truth = nn.functional.cross_entropy(without(x[y == 2]), y[y == 2]).item()
    assert result.nll == pytest.approx(truth, rel=1e-2)
    one = blr.what_if(task, q, remove=y == 2, evaluate=test)
    assert one.solver == "posterior"
    assert one.passes == 0
    assert one.nll < truth - 1
