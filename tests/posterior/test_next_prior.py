"""The posterior as the next prior: two batches of a conjugate model in turn, and both at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import classes
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import BLRError, InputError, PosteriorError

DELTA = 2.0
PRECISION = DELTA * torch.eye(4, dtype=torch.float64)
ZERO = torch.zeros(4, dtype=torch.float64)
Batch = tuple[Tensor, Tensor]


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(50, generator=generator, dtype=torch.float64)
    return [(x[:20], y[:20]), (x[20:], y[20:])]


def at(mean: Tensor, batch: Batch) -> blr.Task:
    """A linear regression with noise of variance 1, at these weights."""
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(mean)
    return blr.Task(model, batch, likelihood="gaussian")


def ridge(x: Tensor, y: Tensor, precision: Tensor, mean: Tensor) -> Tensor:
    """The minimum of ½‖y − xθ‖² + ½ (θ − m)ᵀ S (θ − m)."""
    return torch.linalg.solve(x.T @ x + precision, x.T @ y + precision @ mean)


def fit_of_first_batch() -> blr.Posterior:
    x, y = batches()[0]
    task = at(ridge(x, y, PRECISION, ZERO), (x, y))
    return blr.fit_laplace(task, structure="full", prior_precision=DELTA)


def pull_of_prior(q: blr.Posterior) -> Tensor:
    """S₀ (θ − m₀)."""
    return q.prior.times(q.prior.gap(q.mean))["weight"]


def test_of_two_batches_it_is_the_posterior_of_both(tmp_path: Path) -> None:
    (x1, y1), (x2, y2) = batches()
    first = fit_of_first_batch()
    m2 = ridge(x2, y2, first.form.matrix, first.mean["weight"].flatten())
    second = blr.fit_laplace(at(m2, (x2, y2)), prior=first)
    x = torch.cat([x1, x2])
    y = torch.cat([y1, y2])
    at_once = blr.fit_laplace(
        at(ridge(x, y, PRECISION, ZERO), (x, y)), structure="full", prior_precision=DELTA
    )
    torch.testing.assert_close(second.mean["weight"], at_once.mean["weight"], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(second.form.matrix, at_once.form.matrix, rtol=1e-8, atol=1e-8)
    assert second.at_minimum
    assert second.n_data == 30
    assert "prior_precision=an earlier posterior" in repr(second)
    second.save(tmp_path / "q.safetensors")
    loaded = blr.Posterior.load(tmp_path / "q.safetensors")
    assert torch.equal(pull_of_prior(loaded), pull_of_prior(second))
    assert repr(loaded) == repr(second)


def test_analyses_have_it_in_their_objective() -> None:
    """A removal at the minimum under such a prior is exact for a linear model."""
    first_batch, (x2, y2) = batches()
    first = fit_of_first_batch()
    m1 = first.mean["weight"].flatten()
    m2 = ridge(x2, y2, first.form.matrix, m1)
    task = at(m2, (x2, y2))
    second = blr.fit_laplace(task, prior=first)
    without = ridge(x2[3:], y2[3:], first.form.matrix, m1)
    for solver in ("posterior", "cg"):
        answer = blr.what_if(task, second, remove=[0, 1, 2], solver=solver)
        actual = answer.parameters["weight"].flatten()
        torch.testing.assert_close(actual, without, rtol=1e-6, atol=1e-6)
    removal = blr.what_if(at(m1, first_batch), first, remove=[0], solver="posterior")
    without_first = removal.posterior
    third = blr.fit_laplace(task, prior=without_first)
    expected = without_first.form.matrix + x2.T @ x2
    torch.testing.assert_close(third.form.matrix, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_precisions_add_up(structure: str) -> None:
    x, y = classes(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    task = blr.Task(model, (x, y))
    first = blr.fit_laplace(task, structure=structure, prior_precision=DELTA)
    twice = blr.fit_laplace(task, prior=first)
    assert twice.structure == structure
    for name in first.mean:
        expected = 2 * first.precision(name) - DELTA
        torch.testing.assert_close(twice.precision(name), expected, rtol=1e-8, atol=1e-8)
    dense = blr.fit_laplace(task, structure="full", prior=first)
    data = blr.fit_laplace(task, structure="full", prior_precision=DELTA)
    for name in first.mean:
        expected = first.precision(name) + data.precision(name) - DELTA
        torch.testing.assert_close(dense.precision(name), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_a_precision_for_every_weight(structure: str) -> None:
    (x, y), _ = batches()
    delta = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    task = at(ridge(x, y, delta.diag(), ZERO), (x, y))
    q = blr.fit_laplace(task, structure=structure, prior_precision={"weight": delta[None]})
    expected = (x.T @ x).diagonal() + delta
    torch.testing.assert_close(q.precision("weight")[0], expected)
    if structure == "full":
        assert q.at_minimum


def refused_with(**settings: Any) -> Any:
    task = at(ZERO, batches()[0])
    return blr.fit_laplace(task, **settings)


def first_of(structure: str) -> blr.Posterior:
    return refused_with(structure=structure, prior_precision=1.0)


CASES: list[tuple[dict[str, Any], type[BLRError], str]] = [
    ({"prior": first_of("full"), "prior_precision": 1.0}, InputError, "leave the others out"),
    ({"prior": first_of("full"), "structure": "diag"}, InputError, "no room for a prior"),
    ({"prior": first_of("lowrank")}, InputError, "is no prior"),
    ({"prior": 3.0}, InputError, "prior must be a blr_analysis.Posterior; .* got float"),
    (
        {"prior_precision": {"weight": torch.ones(1, 4), "bias": 1.0}},
        PosteriorError,
        "got float for 'bias'",
    ),
    ({"prior_precision": {"weight": torch.ones(3)}}, PosteriorError, "does not fit the model"),
    ({"prior_precision": {"weight": -torch.ones(1, 4)}}, PosteriorError, "weight"),
    ({"prior_precision": {"weight": torch.ones(1, 4)}}, InputError, "structure='diag'"),
]


@pytest.mark.parametrize(("settings", "error", "word"), CASES)
def test_refused(settings: dict[str, Any], error: type[BLRError], word: str) -> None:
    with pytest.raises(error, match=word):
        refused_with(**settings)
