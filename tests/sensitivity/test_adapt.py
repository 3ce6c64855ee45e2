"""New data after old ones: against the fit of all data by closed forms and by LBFGS."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import BLRError, InputError, PosteriorError

DELTA = 2.0
OLD = slice(0, 40)
NEW = slice(40, 70)
STRUCTURES = ("full", "kron", "diag")


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(70, 4, generator=generator, dtype=torch.float64)


def continuous() -> tuple[Tensor, Tensor]:
    x = inputs()
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(70, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64) + noise


def classes() -> tuple[Tensor, Tensor]:
    x = inputs()
    return x, (x[:, 0] + 0.5 * x[:, 1].square() > 0.3).long()


def linear(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, outputs, bias=False).double()


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """The minimum of ½‖y − xθ‖² + ½ δ‖θ‖²."""
    return torch.linalg.solve(x.T @ x + DELTA * torch.eye(4, dtype=x.dtype), x.T @ y)


def minimise(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Train to the minimum of Σ cross entropy + ½ δ‖θ‖², by torch's LBFGS."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        for parameter in model.parameters():
            loss = loss + 0.5 * DELTA * parameter.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def regression() -> tuple[nn.Module, blr.Posterior]:
    """A linear model at its ridge solution of the old data, and its exact posterior."""
    x, y = continuous()
    model = linear(1)
    with torch.no_grad():
        model.weight.copy_(ridge(x[OLD], y[OLD]))
    old = blr.Task(model, (x[OLD], y[OLD]), likelihood="gaussian")
    return model, blr.fit_laplace(old, structure="full", prior_precision=DELTA)


def classification(structure: str) -> tuple[nn.Module, blr.Posterior]:
    x, y = classes()
    model = linear(2)
    minimise(model, x[OLD], y[OLD])
    old = blr.Task(model, (x[OLD], y[OLD]))
    return model, blr.fit_laplace(old, structure=structure, prior_precision=DELTA)


@pytest.mark.parametrize("count", [0, 1, 10, 40])
def test_of_a_linear_regression_it_is_the_ridge_of_all_data(count: int) -> None:
    """However much of the old data is in the memory: the quadratic is exact."""
    x, y = continuous()
    model, posterior = regression()
    weights = copy.deepcopy(model.state_dict())
    new = blr.Task(model, (x[NEW], y[NEW]), likelihood="gaussian")
    memory = None
    if count:
        memory = blr.Task(model, (x[:count], y[:count]), likelihood="gaussian")
    result = blr.adapt(new, posterior, memory)
    expected = ridge(x, y)
    torch.testing.assert_close(result.parameters["weight"].flatten(), expected, rtol=1e-7, atol=0)
    matrix = x.T @ x + DELTA * torch.eye(4, dtype=x.dtype)
    torch.testing.assert_close(result.posterior.form.matrix, matrix, rtol=1e-9, atol=1e-9)
    assert result.posterior.n_data == 70
    assert result.converged
    assert torch.equal(model.weight, weights["weight"])
    result.apply(model)
    torch.testing.assert_close(model.weight.flatten(), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_with_all_old_data_in_the_memory_it_is_the_fit_of_both(structure: str) -> None:
    """Whatever the posterior's structure: nothing of the quadratic is left but the prior."""
    x, y = classes()
    model, posterior = classification(structure)
    memory = blr.Task(model, (x[OLD], y[OLD]))
    result = blr.adapt(blr.Task(model, (x[NEW], y[NEW])), posterior, memory)
    together = linear(2)
    minimise(together, x, y)
    expected = together.weight.detach()
    torch.testing.assert_close(result.parameters["weight"], expected, rtol=1e-3, atol=1e-4)


def test_without_memory_it_is_the_minimum_under_the_posterior_as_prior() -> None:
    x, y = classes()
    model, posterior = classification("full")
    result = blr.adapt(blr.Task(model, (x[NEW], y[NEW])), posterior)
    weight = result.parameters["weight"].clone().requires_grad_()
    gap = (weight - posterior.mean["weight"]).flatten()
    loss = nn.functional.cross_entropy(x[NEW] @ weight.T, y[NEW], reduction="sum")
    objective = loss + 0.5 * gap @ posterior.form.matrix @ gap
    (gradient,) = torch.autograd.grad(objective, weight)
    assert float(gradient.norm()) < 1e-2
    assert "memory=" in result.note


def test_a_network_forgets_less_with_a_memory() -> None:
    """Old classes after new ones: the memory's losses say more than the quadratic."""
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(4, 6, generator=generator)
    y = torch.arange(200) % 4
    x = centres[y] + torch.randn(200, 6, generator=generator)
    is_old = y < 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    minimise(model, x[is_old], y[is_old])
    posterior = blr.fit_laplace(blr.Task(model, (x[is_old], y[is_old])), prior_precision=DELTA)
    new = blr.Task(model, (x[~is_old], y[~is_old]))
    old = blr.Task(model, (x[is_old], y[is_old]))
    memory = blr.Task(model, (x[is_old][:10], y[is_old][:10]))
    with_all = blr.adapt(new, posterior, old, evaluate=old)
    with_some = blr.adapt(new, posterior, memory, evaluate=old)
    with_none = blr.adapt(new, posterior, None, evaluate=old)
    assert with_all.nll < with_some.nll < with_none.nll


def test_it_measures_where_it_is_asked() -> None:
    x, y = classes()
    model, posterior = classification("kron")
    new = blr.Task(model, (x[NEW], y[NEW]))
    old = blr.Task(model, (x[OLD], y[OLD]))
    result = blr.adapt(new, posterior, evaluate=old)
    before = nn.functional.cross_entropy(model(x[OLD]), y[OLD]).item()
    assert result.before.nll == pytest.approx(before, rel=1e-6)
    result.apply(model)
    after = nn.functional.cross_entropy(model(x[OLD]), y[OLD]).item()
    assert result.nll == pytest.approx(after, rel=1e-6)
    assert "30 added" in repr(result)


def test_few_passes_are_said() -> None:
    x, y = classes()
    model, posterior = classification("diag")
    result = blr.adapt(blr.Task(model, (x[NEW], y[NEW])), posterior, passes=2)
    assert not result.converged
    assert "give more passes" in result.note


def refused() -> dict[str, tuple[dict[str, Any], type[BLRError], str]]:
    """By a name: the arguments, the error, and words of its message."""
    x, y = classes()
    model, posterior = classification("kron")
    new = blr.Task(model, (x[NEW], y[NEW]))
    old = blr.Task(model, (x[OLD], y[OLD]))
    low_rank = blr.fit_laplace(old, structure="lowrank", rank=2, prior_precision=DELTA)
    everything = blr.Task(model, (x, y))
    narrow = blr.Task(nn.Linear(3, 2).double(), (x[:, :3], y))
    gaussian = blr.Task(linear(1), (x[OLD], y[OLD].double()), likelihood="gaussian")
    arguments = {"task": new, "posterior": posterior}
    return {
        "data as they are": ({**arguments, "task": (x, y)}, InputError, "task must be"),
        "no posterior": ({**arguments, "posterior": None}, InputError, "posterior must be"),
        "no room": ({**arguments, "posterior": low_rank}, InputError, "is no prior"),
        "no task": ({**arguments, "memory": (x, y)}, InputError, "memory must be"),
        "more than all": ({**arguments, "memory": everything}, InputError, "part of the"),
        "no passes": ({**arguments, "passes": 0}, InputError, "passes"),
        "another model": ({**arguments, "task": narrow}, PosteriorError, "another model"),
        "other losses": ({**arguments, "memory": gaussian}, InputError, "have the likelihood"),
    }


REFUSED = refused()


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    arguments, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        blr.adapt(**arguments)


@pytest.mark.parametrize("trained", [True, False])
def test_a_memory_of_a_model_off_its_minimum_is_named(trained: bool) -> None:
    """Only at a minimum do all old examples leave the prior N(0, 1/δ) behind."""
    x, y = classes()
    model = linear(2)
    if trained:
        minimise(model, x[OLD], y[OLD])
    old = blr.Task(model, (x[OLD], y[OLD]))
    posterior = blr.fit_laplace(old, structure="full", prior_precision=DELTA)
    result = blr.adapt(blr.Task(model, (x[NEW], y[NEW])), posterior, old)
    joint = copy.deepcopy(model)
    minimise(joint, x, y)
    distance = (result.parameters["weight"] - joint.weight).norm() / joint.weight.norm()
    assert (distance < 1e-2) == trained
    assert ("off its minimum" in result.note) != trained
