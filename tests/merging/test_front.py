"""Pareto fronts over the task weights, and what previews call models and take as data."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from blr_analysis.errors import InputError
from blr_analysis.merging.curve import MergeCurve, merge_curve, undominated
from blr_analysis.plots import plot_merge_curve
from blr_analysis.posterior import fit_laplace
from blr_analysis.task import Task


@pytest.fixture(scope="module")
def family() -> dict[str, Any]:
    """Three linear regressions that want different things of one weight matrix."""
    models, tasks = [], {}
    for t, name in enumerate("ABC"):
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(40, 3, generator=generator) * torch.tensor([1.0, 0.3, 2.0]).roll(t)
        y = x @ torch.randn(3, generator=generator)
        model = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.linalg.lstsq(x, y[:, None]).solution.mT)
        models.append(model.state_dict())
        tasks[name] = Task(model, (x, y), likelihood="gaussian")
    return {"models": models, "tasks": tasks, "base": {"weight": torch.zeros(1, 3)}}


def test_the_front_of_quadratic_losses_lies_on_it(family: dict[str, Any]) -> None:
    """Every merge Σ_t α_t H_t θ_t / Σ_t α_t H_t is undominated there: all that is run is on the
    front, and no weights of a fine grid beat it."""
    fitted = [fit_laplace(t, structure="gram") for t in family["tasks"].values()]
    how = {"method": "fisher", "precisions": fitted, "progress": False}
    curve = merge_curve(family["base"], family["models"], family["tasks"], search="front", **how)
    assert curve.models == curve.tasks == ("A", "B", "C")
    assert 8 <= len(curve.points) <= 12
    assert len(curve.front) == len(curve.points)
    assert curve.table["front"].all()
    rows = [r for r in itertools.product([0.1, 0.4, 0.7], repeat=3)]
    fine = merge_curve(family["base"], family["models"], family["tasks"], weights=rows, **how)
    for point in curve.front:
        for other in fine.points:
            below = [b < a - 1e-6 for a, b in zip(point.nlls, other.nlls, strict=True)]
            above = [b > a + 1e-6 for a, b in zip(point.nlls, other.nlls, strict=True)]
            assert any(above) or not any(below)
    assert plot_merge_curve(curve).get_ylabel().startswith("NLL on worst")


def test_of_two_tasks_it_is_drawn_as_a_line(family: dict[str, Any]) -> None:
    two = dict(list(family["tasks"].items())[:2])
    fitted = {n: fit_laplace(t, structure="diag", prior_precision=1.0) for n, t in two.items()}
    curve = merge_curve(
        family["base"], family["models"][:2], two, search="front", precisions=fitted,
        method="fisher", budget=5, progress=False,
    )  # fmt: skip
    assert len(curve.points) == 5
    ax = plot_merge_curve(curve)
    line = next(line for line in ax.lines if line.get_label() == "front")
    assert list(line.get_xdata()) == sorted(p.nlls[0] for p in curve.front)
    assert "A" in ax.get_xlabel()


def test_undominated() -> None:
    losses = torch.rand(60, 3, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    rows = losses.tolist()

    def beaten(row: list[float]) -> bool:
        return any(all(a <= b for a, b in zip(o, row, strict=True)) and o != row for o in rows)

    truth = {tuple(row) for row in rows if not beaten(row)}
    assert {tuple(rows[k]) for k in undominated(losses)} == truth


class Pairs(Dataset[tuple[dict[str, Tensor], int]]):
    """Batches of a dict of arguments and a target."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], int]:
        return {"input": torch.ones(3) * i}, i % 2


def test_dicts_with_targets_beside_them() -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]
    tasks = {"A": Task(models[0], Pairs()), "B": Task(models[1], Pairs())}
    curve: MergeCurve = merge_curve(
        models[0], models, tasks, method="linear", weights=[1.0], progress=False
    )
    assert set(curve.weights) == {"A", "B"}
    x = torch.arange(6.0)[:, None].expand(6, 3)
    mean = [
        (a + b) / 2 for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
    ]
    truth = nn.functional.cross_entropy(x @ mean[0].mT + mean[1], torch.arange(6) % 2)
    assert curve.best.nll == pytest.approx(float(truth), rel=1e-5)


def test_bad_input(family: dict[str, Any]) -> None:
    fitted = [fit_laplace(t, structure="gram") for t in family["tasks"].values()]
    base, models, tasks = family["base"], family["models"], family["tasks"]
    for given, how in (
        ({"A": tasks["A"]}, {"precisions": fitted}),
        (tasks, {}),
        (tasks, {"precisions": fitted, "weights": [1.0]}),
    ):
        with pytest.raises(InputError, match="front"):
            merge_curve(base, models, given, method="fisher", search="front", **how)
    with pytest.raises(InputError, match="budget"):
        merge_curve(base, models, tasks, search="front", precisions=fitted, budget=0)
