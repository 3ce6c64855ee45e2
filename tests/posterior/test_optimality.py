"""Both conditions of the rule's end (K&R 25 and 26), beside dense algebra."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import classes, minimised
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.posterior import checked
from blr_analysis.posterior.structures import Full

DELTA = 2.0


def regression() -> tuple[blr.Task, blr.Posterior]:
    """Of a linear model, conjugate: its exact posterior."""
    torch.manual_seed(0)
    x = torch.randn(30, 4, dtype=torch.float64)
    y = torch.randn(30, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        gram = x.T @ x + DELTA * torch.eye(4, dtype=torch.float64)
        model.weight.copy_(torch.linalg.solve(gram, x.T @ y)[None])
    task = blr.Task(model, (x, y), likelihood="gaussian")
    return task, blr.fit_laplace(task, structure="full", prior_precision=DELTA)


@pytest.mark.parametrize("draws", [0, 3])
def test_of_a_conjugate_model_both_hold(draws: int, tmp_path: Path) -> None:
    task, q = regression()
    assert q.precision_matches is None
    assert "Hessian" not in repr(q)
    q = checked(task, q, draws=draws)
    assert q.at_minimum
    assert q.precision_matches
    assert q.precision_match is not None
    assert q.precision_match.mismatch == pytest.approx(0, abs=1e-10)
    assert q.precision_match.ratio == pytest.approx(1, abs=1e-10)
    assert "at its minimum, precision = E[Hessian]" in repr(q)
    q.save(tmp_path / "q.safetensors")
    assert blr.Posterior.load(tmp_path / "q.safetensors").precision_match == q.precision_match


def test_each_can_fail_alone() -> None:
    task, q = regression()
    half_of_data = (q.form.matrix + DELTA * torch.eye(4)) / 2
    half = checked(task, q.changed(form=Full(half_of_data, q.form.shapes)))
    assert half.at_minimum is not None
    assert half.precision_matches is False
    assert half.precision_match is not None
    assert half.precision_match.mismatch == pytest.approx(1)  # twice of what is there is missing
    assert half.precision_match.ratio == pytest.approx(2)
    assert "precision off E[Hessian] by 100%" in repr(half)
    mean = {name: m + 1.0 for name, m in q.mean.items()}
    moved = checked(task, q.changed(mean=mean, stationarity=None))
    assert moved.at_minimum is False
    assert moved.precision_matches


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_mismatch_and_ratio_are_those_of_dense_algebra(structure: str) -> None:
    x, y = classes(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    task = blr.Task(minimised(network, (x, y), DELTA, steps=30), (x, y))
    fit = blr.fit_laplace(task, structure=structure, prior_precision=DELTA)
    q = checked(task, fit, probes=2000)
    shapes = {name: p.shape for name, p in q.mean.items()}

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in shapes.values()])
        weights = {n: v.view(s) for (n, s), v in zip(shapes.items(), pieces, strict=True)}
        return cross_entropy(functional_call(task.model, weights, (x,)), y, reduction="sum")

    flat = torch.cat([m.flatten() for m in q.mean.values()])
    truth = hessian(loss)(flat)
    eye = torch.eye(len(flat), dtype=torch.float64)
    pieces = eye.split([shape.numel() for shape in shapes.values()], dim=1)
    basis = {n: v.reshape(-1, *s) for (n, s), v in zip(shapes.items(), pieces, strict=True)}
    precision = torch.cat([v.flatten(1) for v in q.form.times(basis).values()], 1)
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    actual = root.T @ (precision - DELTA * eye) @ root
    expected = root.T @ truth @ root
    match = q.precision_match
    assert match is not None
    mismatch = float((expected - actual).norm() / actual.norm())
    assert match.mismatch == pytest.approx(mismatch, rel=0.1)
    ratio = float(expected.trace() / actual.trace())
    assert match.ratio == pytest.approx(ratio, rel=0.1)


def test_refusals() -> None:
    task, q = regression()
    for settings in ({"probes": 0}, {"draws": -1}):
        with pytest.raises(InputError, match=next(iter(settings))):
            checked(task, q, **settings)
