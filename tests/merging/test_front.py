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
        method="fisher", budget=5, progress=False, threads=1,
    )  # fmt: skip
    assert len(curve.points) == 5
    ax = plot_merge_curve(curve)
    line = next(line for line in ax.lines if line.get_label() == "front")
    assert list(line.get_xdata()) == sorted(p.nlls[0] for p in curve.front)
    assert "A" in ax.get_xlabel()


class Point(nn.Module):
    """Its output is its weight, whatever it is given."""

    def __init__(self, at: Tensor) -> None:
        super().__init__()
        self.at = nn.Parameter(at.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.at.expand(len(x), -1)


def test_checkpoints_of_a_task_follow_a_curved_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of several minima, L = −log Σ_k exp(−c_k − ½ (θ − m_k)ᵀ H_k (θ − m_k)), are what the
    mixture says, to rounding: its merges are their minima, found by a grid. Of one minimum each
    the losses are foretold wrong."""
    monkeypatch.setattr("blr_analysis.merging.curve.FRONT", 20)  # which takes a tenth of the time
    generator = torch.Generator().manual_seed(0)
    n = 5
    means = torch.tensor([[[-3.0, 0.0], [0.0, 3.0]], [[3.0, 0.5], [0.5, 4.0]]])
    curved = 0.5 + 2 * torch.rand(2, 2, 2, generator=generator)
    offsets = torch.tensor([[0.0, 0.4], [0.3, 0.0]])

    def loss(t: int) -> Any:
        def of(outputs: Tensor, targets: Tensor) -> Tensor:
            steps = outputs[:, None] - means[t].to(outputs)
            rises = offsets[t] + 0.5 * (curved[t].to(outputs) * steps.square()).sum(-1)
            return -torch.logsumexp(-rises, -1) / n

        return of

    data = torch.zeros(n, 1), torch.zeros(n)
    tasks = {
        name: Task(Point(means[t, 0]), data, likelihood=loss(t)) for t, name in enumerate("AB")
    }
    models = {name: [{"at": m} for m in means[t]] for t, name in enumerate("AB")}
    h = {name: [{"at": c / n} for c in curved[t]] for t, name in enumerate("AB")}
    base = {"at": torch.zeros(2)}
    how: dict[str, Any] = {
        "method": "fisher",
        "search": "front",
        "progress": False,
        "n_data": [n, n],
    }
    curve = merge_curve(base, models, tasks, precisions=h, **how)
    grid = torch.cartesian_prod(torch.linspace(-4, 4, 801), torch.linspace(-1, 5, 601))
    losses = torch.stack([loss(t)(grid, None) for t in (0, 1)])
    assert len(curve.front) > 4
    # The Laplace mixture leaves out what the other component adds at a minimum: some e⁻¹⁰.
    for point in curve.points:
        parts = [sum(point.checkpoints[:2]), sum(point.checkpoints[2:])]
        assert parts == pytest.approx(list(point.weights), abs=1e-6)
        assert point.predicted == pytest.approx(point.nlls, abs=1e-3)
        alphas = torch.tensor(point.weights)
        least = float((alphas @ losses).min())
        ours = sum(a * v for a, v in zip(point.weights, point.nlls, strict=True))
        assert ours == pytest.approx(least, abs=1e-3)
    one = {name: own[:1] for name, own in models.items()}
    single = merge_curve(base, one, tasks, precisions={k: v[:1] for k, v in h.items()}, **how)
    apart = [abs(p.predicted[0] - p.nlls[0]) for p in single.points]
    assert max(apart) > 0.3
    assert {"predicted_A", "predicted_B"} <= set(curve.table)
    bare = merge_curve(
        base, one, tasks, **how | {"precisions": {k: v[:1] for k, v in h.items()}, "n_data": None}
    )
    assert bare.points[0].predicted == ()  # per example of how many?
    for wrong, word in (
        (how | {"n_data": None}, "n_data"),
        (how | {"search": "grid"}, "front"),
        (how | {"precisions": one}, "precis"),
    ):
        with pytest.raises(InputError, match=word):
            merge_curve(base, models, tasks, **{"precisions": h, **wrong})


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
