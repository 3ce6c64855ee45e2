"""At the minimum or not: closed forms, converged and stopped models, another loss than named."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import classes
from oracles import dense_jacobian, flatten
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import PosteriorWarning
from blr_analysis.posterior.stationarity import recognise, stationarity

DELTA = 2.0
FIFTEEN = torch.tensor([15.0, 1.0, 1.0], dtype=torch.float64)


def trained(
    seed: int, steps: int, weight: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> tuple[blr.Task, blr.Posterior]:
    """A logistic regression after so many L-BFGS steps on the (weighted) sum of losses."""
    x, y = classes(seed, dtype)
    torch.manual_seed(seed)
    model = nn.Linear(4, 3).to(dtype)
    how: Any = {"tolerance_grad": 0, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=steps, **how)

    def closure() -> Tensor:
        optimizer.zero_grad()
        weights = None if weight is None else weight.to(dtype)
        loss = nn.functional.cross_entropy(model(x), y, weights, reduction="sum")
        loss = loss + DELTA / 2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    task = blr.Task(model, (x, y))
    return task, blr.fit_laplace(task, structure="full", prior_precision=DELTA)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(2))
def test_converged_stopped_and_of_another_loss(seed: int, dtype: torch.dtype) -> None:
    task, q = trained(seed, 200, dtype=dtype)
    there = stationarity(task, q)
    assert there.at_minimum and there.decrement < 1e-4 and there.least_group == 1
    assert q.at_minimum and q.note == "" and "at its minimum" in repr(q)
    task, q = trained(seed, 2, dtype=dtype)
    early = stationarity(task, q)
    assert not early.at_minimum and early.decrement > 10 * there.decrement
    other = stationarity(*trained(seed, 200, FIFTEEN, dtype))
    assert not other.near and "not at the minimum" in other.verdict


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_the_numbers_against_dense_algebra(structure: str) -> None:
    task, _ = trained(0, 3)
    start = {n: torch.full_like(p, 0.2) for n, p in task.parameters().items()}
    q = blr.fit_laplace(task, structure=structure, prior_precision=DELTA, initial=start)
    found = stationarity(task, q)
    x, y = classes(0)
    error = torch.softmax(task.model(x).detach(), 1) - nn.functional.one_hot(y, 3)
    each = torch.einsum("nc,ncp->np", error, dense_jacobian(task, task.parameters()))
    pull = DELTA * (flatten(q.mean) - 0.2)
    g = each.sum(0) + pull
    assert found.residual == pytest.approx(float(g.norm() / (each.sum(0).norm() + pull.norm())))

    def half_square(v: Tensor) -> float:
        parts = v.split([p.numel() for p in q.mean.values()])
        tree = {n: p.view_as(m) for (n, m), p in zip(q.mean.items(), parts, strict=True)}
        return 0.5 * float(v @ flatten(q.form.solve(tree)))

    assert found.decrement == pytest.approx(half_square(g))
    assert found.pull == pytest.approx(sum(map(half_square, each)) / len(each))
    assert found.least_group == math.ceil(10 * found.decrement / found.pull)
    assert stationarity(task, q) is found


def test_the_record_keeps_it(tmp_path: Path) -> None:
    task = blr.Task(nn.Linear(4, 3).double(), classes(0))
    q = blr.fit_laplace(task)
    assert q.stationarity is not None and q.at_minimum is False
    assert "a guess" in q.note and q.temperature == 0.15 and q.temperature_error is None
    other = blr.fit_laplace(task, prior_precision=q.prior_precision)
    assert other.stationarity is not None  # also where nothing was to be chosen
    assert other.stationarity.decrement == pytest.approx(q.stationarity.decrement)
    q.save(tmp_path / "q.safetensors")
    back = blr.Posterior.load(tmp_path / "q.safetensors")
    assert back.stationarity == q.stationarity == stationarity(task, back)
    assert repr(back) == repr(q) and "off its minimum, temperature=0.15" in repr(q)
    diag = blr.fit_laplace(task, structure="diag")
    assert diag.temperature == 1 and "a ranking" in diag.note
    measured = q.changed(record=q.record | {"calibration": {"temperature": 0.4, "error": 0.1}})
    assert (measured.temperature, measured.temperature_error, measured.note) == (0.4, 0.1, "")


def test_another_loss_is_measured_anew() -> None:
    task, q = trained(0, 200)
    assert stationarity(task, q).at_minimum
    weighted = blr.Task(task.model, task.examples, likelihood=nn.CrossEntropyLoss(FIFTEEN))
    assert not stationarity(weighted, q).at_minimum


# A posterior warns of a model or of data that are not its own, and of nothing else.


class Net(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Linear(4, 8), nn.Linear(8, 3), act

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x)))


def fitted(structure: str = "kron") -> tuple[blr.Task, blr.Posterior]:
    torch.manual_seed(0)
    task = blr.Task(Net(nn.Tanh()), classes(0, torch.float32))
    return task, blr.fit_laplace(task, structure=structure, prior_precision=1.0)


def others() -> dict[str, blr.Task]:
    """Tasks of the same shapes and the same N."""
    task, _ = fitted()
    (x, y), weights = classes(0, torch.float32), copy.deepcopy(task.model)
    with torch.no_grad():
        for p in weights.parameters():
            p.normal_()
    body = Net(nn.ReLU())
    body.load_state_dict(task.model.state_dict())
    order = torch.randperm(len(x))
    return {
        "weights": blr.Task(weights, (x, y)),
        "another model": blr.Task(body, (x, y)),
        "other inputs": blr.Task(task.model, (x[order], y[order])),
        "other targets": blr.Task(task.model, (x, (y + 1) % 3)),
    }


@pytest.mark.parametrize("word", ["weights", "another model", "other inputs", "other targets"])
def test_another_model_and_other_data_are_told_once(word: str, tmp_path: Path) -> None:
    _, q = fitted()
    q.save(tmp_path / "q")
    task = others()[word]
    for met in (q, blr.Posterior.load(tmp_path / "q")):
        with pytest.warns(PosteriorWarning, match=word):
            blr.sensitivity(task, met)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PosteriorWarning)
            blr.leave_one_out(task, met)


def test_a_captured_posterior_knows_what_it_met_first() -> None:
    task, fit = fitted("diag")
    precision = {n: fit.precision(n) for n in fit.mean}
    q = blr.Posterior(fit.mean, precision, prior_precision=1.0, n_data=task.n_data)
    blr.sensitivity(task, q)
    with pytest.warns(PosteriorWarning, match="other targets"):
        blr.sensitivity(others()["other targets"], q)


@pytest.mark.filterwarnings("error::blr_analysis.errors.PosteriorWarning")
def test_lawful_uses_are_not_told(tmp_path: Path) -> None:
    task, q = fitted()
    x, y = classes(0, torch.float32)
    blr.what_if(task, q, remove=[0, 3], relabel={1: 0}, solver="posterior")
    blr.influence(task, q, blr.Task(task.model, (-x, y)))
    wide = copy.deepcopy(task.model).double()
    blr.sensitivity(blr.Task(wide, (x.double(), y)), q)
    q.save(tmp_path / "q")
    blr.sensitivity(blr.Task(copy.deepcopy(task.model), (x, y)), blr.Posterior.load(tmp_path / "q"))
    half = task.subset(range(0, 40))
    blr.sensitivity(half, blr.fit_laplace(half, prior_precision=1.0))
    some = y.clone()
    some[:3] = (some[:3] + 1) % 3  # a few labels mended
    blr.sensitivity(blr.Task(task.model, (x, some)), q)


def test_it_costs_one_pass_of_eight_examples() -> None:
    task, q = fitted()
    seen: list[int] = []
    other = blr.Task(task.model, classes(0, torch.float32))
    other.model.register_forward_hook(lambda _, args, out: seen.append(len(out)))
    recognise(other, q, q, own_weights=True)
    assert sum(seen) == 8


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()], ids=["MSE", "BCE"])
def test_a_mean_over_outputs_has_more_terms_than_examples(loss: nn.Module) -> None:
    n, c, w = 40, 5, 0.02
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    y = (x @ torch.randn(3, c, generator=generator) > 0).float()
    for said, terms in (({}, n), ({"tokens": n * c}, n * c)):
        torch.manual_seed(0)
        model = nn.Linear(3, c)
        made = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=w)
        for _ in range(20):
            made.zero_grad()
            loss(model(x), y).backward()
            made.step()
        q = blr.Posterior.from_optimizer(made, model, n_data=n, **said)
        assert q.prior_precision == pytest.approx(terms * w)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            blr.sensitivity(blr.Task(model, (x, y), likelihood=loss), q)
        told = [str(t.message) for t in told if t.category is PosteriorWarning]
        assert any(f"tokens={n * c}" in words for words in told) is not bool(said)
