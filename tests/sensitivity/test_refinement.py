"""Examples left out by a descent, against exact retraining."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from oracles_retraining import leave_one_out_weights, retrained, trained, with_ones
from parts import normal
from scipy.stats import pearsonr
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.sensitivity.corrections import OVERSTATED, bound_of


@cache
def breast_cancer(n: int, delta: float) -> tuple[blr.Task, torch.Tensor]:
    """The task, and the true rise of every example's loss when it is left out."""
    data = load_breast_cancer()
    x = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0))[:n]
    y = torch.tensor(data.target)[:n].double()
    model = trained("bernoulli", x, y, delta)
    task = blr.Task(model, (x, y), likelihood="bernoulli")
    theta = retrained("bernoulli", x, y, leave_one_out_weights(n), delta)[:, 0]
    f = (with_ones(x) * theta).sum(1, keepdim=True)
    before = model(x).detach()
    rise = [task.likelihood.nll(g, y[:, None]) for g in (f, before)]
    return task, rise[0] - rise[1]


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_few_that_matter_make_leave_one_out_agree_with_retraining(structure: str) -> None:
    task, true = breast_cancer(300, 1.0)
    q = blr.fit_laplace(task, structure=structure, prior_precision=1.0, progress=False)
    rough = blr.leave_one_out(task, q, correction="cavity", progress=False)
    fine = blr.leave_one_out(task, q, correction="cavity", refine=40, progress=False)
    assert fine.correction.count("descent") == 40
    assert "descent for 40" in repr(fine)
    assert (fine.table["correction"] == "descent").sum() == 40
    kept = torch.tensor([word != "descent" for word in fine.correction])
    assert torch.equal(fine.logits[kept], rough.logits[kept])
    gap, old = (float((loo.losses - loo.losses_before - true).abs().sum()) for loo in (fine, rough))
    assert gap < 0.2 * old
    if structure == "full":
        estimate = fine.losses - fine.losses_before
        assert pearsonr(estimate, true)[0] > 0.9999
        assert float(estimate.sum() / true.sum()) == pytest.approx(1, abs=0.02)


def test_linear_regression_needs_no_refinement() -> None:
    x, y = normal(25, 3), normal(25, seed=1)
    task = blr.Task(trained("gaussian", x, y, 1.0), (x, y), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
    rough, fine = (blr.leave_one_out(task, q, refine=k, progress=False) for k in (0, 25))
    assert fine.correction == ["descent"] * 25
    torch.testing.assert_close(fine.logits, rough.logits, rtol=1e-5, atol=1e-5)


def test_a_model_away_from_its_minimum_keeps_its_estimates() -> None:
    torch.manual_seed(0)
    task = blr.Task(torch.nn.Linear(3, 2), (normal(20, 3).float(), torch.arange(20) % 2))
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
    rough = blr.leave_one_out(task, q, progress=False)
    with pytest.warns(RuntimeWarning, match="5 of 5 examples keep their estimate"):
        fine = blr.leave_one_out(task, q, refine=5, progress=False)
    assert "descent" not in fine.correction
    assert torch.equal(fine.logits, rough.logits)


@pytest.mark.parametrize("refine", [-1, 21, 1.5, True, "all"])
def test_bad_numbers(refine) -> None:
    task = blr.Task(torch.nn.Linear(3, 2), (normal(20, 3).float(), torch.arange(20) % 2))
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0, progress=False)
    with pytest.raises(InputError, match="refine must be"):
        blr.leave_one_out(task, q, refine=refine)


def retrained_network(model: nn.Module, x: Tensor, y: Tensor, delta: float) -> nn.Module:
    """From these weights to the minimum of Σ (f − y)² and δ's penalty."""
    descent = torch.optim.LBFGS(
        model.parameters(),
        max_iter=250,
        history_size=40,
        tolerance_grad=1e-9,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        descent.zero_grad()
        weights = sum(p.square().sum() for p in model.parameters())
        loss = (model(x) - y).square().sum() + delta / 2 * weights
        loss.backward()
        return loss

    descent.step(objective)  # pyright: ignore[reportArgumentType]
    return model


@pytest.mark.slow
def test_a_network_of_a_gaussian_is_refined_unasked() -> None:
    """A linear model's cavity is exact; a network's is rough where leverages are high."""
    torch.manual_seed(0)
    x, delta = 1.5 * normal(60, 2), 0.1
    y = (x[:, :1].sin() * x[:, 1:]) + 0.3 * normal(60, 1, seed=1)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = retrained_network(model, x, y, delta).eval()
    task = blr.Task(model, (x, y), likelihood=nn.MSELoss())
    fitted = dict(structure="full", prior_precision=delta, progress=False)
    q = blr.fit_laplace(task, **fitted)
    rough, loo = (blr.leave_one_out(task, q, refine=k, progress=False) for k in (0, None))
    high = [i for i, word in enumerate(loo.correction) if word == "descent"]
    assert high and set(high) == set((rough.leverage > 0.5).nonzero().flatten().tolist())
    true = []
    for i in high:
        rest = [k for k in range(60) if k != i]
        other = retrained_network(copy.deepcopy(model), x[rest], y[rest], delta)
        true.append((other(x[i]) - y[i]).square().sum().detach())
    errors = [float((a.losses[high] - torch.stack(true)).abs().sum()) for a in (loo, rough)]
    assert errors[0] < 0.8 * errors[1]
    hessian = blr.fit_laplace(task, curvature="exact", **fitted)  # which may hold less than Λ_i
    assert bound_of(hessian) == OVERSTATED < bound_of(q)
