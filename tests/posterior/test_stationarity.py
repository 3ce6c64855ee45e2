"""At the minimum or not: closed forms, converged and stopped models, another loss than named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from models import classes
from oracles import dense_jacobian, flatten
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.posterior.stationarity import stationarity

DELTA = 2.0


def trained(
    seed: int, dtype: torch.dtype, steps: int, weight: Tensor | None = None
) -> tuple[blr.Task, blr.Posterior]:
    """A logistic regression after so many L-BFGS steps on the (weighted) sum of losses."""
    x, y = classes(seed, dtype)
    torch.manual_seed(seed)
    model = nn.Linear(4, 3).to(dtype)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, tolerance_grad=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, weight, reduction="sum")
        loss = loss + DELTA / 2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    task = blr.Task(model, (x, y))
    return task, blr.fit_laplace(task, structure="full", prior_precision=DELTA, progress=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_converged_stopped_and_of_another_loss(seed: int, dtype: torch.dtype) -> None:
    there = stationarity(*trained(seed, dtype, 200))
    assert there.at_minimum and there.decrement < 1e-4 and there.least_group == 1
    early = stationarity(*trained(seed, dtype, 2))
    assert not early.at_minimum and early.decrement > 10 * there.decrement
    weight = torch.tensor([15.0, 1.0, 1.0], dtype=dtype)
    other = stationarity(*trained(seed, dtype, 200, weight))
    assert not other.near and "not at the minimum" in other.verdict


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_the_numbers_against_dense_algebra(structure: str) -> None:
    task, _ = trained(0, torch.float64, 3)
    start = {n: torch.full_like(p, 0.2) for n, p in task.parameters().items()}
    q = blr.fit_laplace(
        task, structure=structure, prior_precision=DELTA, initial=start, progress=False
    )
    found = stationarity(task, q)
    x, y = classes(0)
    error = torch.softmax(task.model(x).detach(), 1) - nn.functional.one_hot(y, 3)
    each = torch.einsum("nc,ncp->np", error, dense_jacobian(task, task.parameters()))
    pull = DELTA * (flatten(q.mean) - 0.2)
    g = each.sum(0) + pull
    assert found.residual == pytest.approx(float(g.norm() / (each.sum(0).norm() + pull.norm())))
    sizes = [p.numel() for p in q.mean.values()]

    def half_square(v: Tensor) -> float:
        parts = v.split(sizes)
        tree = {n: p.view_as(m) for (n, m), p in zip(q.mean.items(), parts, strict=True)}
        return 0.5 * float(v @ flatten(q.covariance_product(tree)))

    assert found.decrement == pytest.approx(half_square(g))
    assert found.pull == pytest.approx(sum(map(half_square, each)) / len(each))
    for name, mine, of_all in zip(q.mean, each.split(sizes, 1), g.split(sizes), strict=True):
        noise, size = float(mine.norm()), float(of_all.norm())
        expected = {"gradient": size, "noise": noise}
        assert found.blocks[name] == pytest.approx(expected)
    assert found.least_group == math.ceil(10 * found.decrement / found.pull)
    assert stationarity(task, q) is found


def test_calibrate_certifies_only_what_it_checked() -> None:
    for steps, unchecked in ((200, False), (2, True)):
        weight = torch.tensor([15.0, 1.0, 1.0], dtype=torch.float64) if unchecked else None
        task, q = trained(0, torch.float64, steps, weight)
        better = blr.calibrate(task, q, 8, kind="ggn", progress=False)
        assert (better.record["calibration"]["unchecked"] is not None) == unchecked
        assert ("unchecked" in repr(better)) == unchecked


def test_the_record_keeps_it_and_every_result_says_it(tmp_path: Path) -> None:
    x, y = classes(0)
    model = nn.Linear(4, 3).double()
    task = blr.Task(model, (x, y))
    q = blr.fit_laplace(task, progress=False)
    assert q.stationarity is not None and not q.stationarity.at_minimum
    other = blr.fit_laplace(task, prior_precision=q.prior_precision, progress=False)
    assert other.stationarity is not None  # also where nothing was to be chosen
    assert stationarity(task, other).decrement == pytest.approx(q.stationarity.decrement)
    q.save(tmp_path / "q.safetensors")
    back = blr.Posterior.load(tmp_path / "q.safetensors")
    assert back.stationarity == q.stationarity == stationarity(task, back)
    table = q.stationarity.table.set_index("parameter")
    block = q.stationarity.blocks["bias"]
    assert table.batch["bias"] == pytest.approx(len(x) * (block["noise"] / block["gradient"]) ** 2)
    results = [
        blr.sensitivity(task, q, progress=False),
        blr.leave_one_out(task, q, progress=False),
        blr.influence(task, q, task, progress=False),
        blr.what_if(task, q, remove=[0], progress=False),
    ]
    assert all(q.stationarity.verdict in repr(result) for result in results)
    assert results[-1].posterior.stationarity is None  # of another mean


def test_another_loss_is_measured_anew() -> None:
    task, q = trained(0, torch.float64, 200)
    assert stationarity(task, q).at_minimum
    weight = torch.tensor([15.0, 1.0, 1.0], dtype=torch.float64)
    weighted = blr.Task(task.model, task.examples, likelihood=nn.CrossEntropyLoss(weight))
    assert not stationarity(weighted, q).at_minimum
