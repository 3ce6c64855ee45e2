"""The forecast of a merge's cost, against dense algebra and against quadratic losses."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from models import mlp, normal
from models_on_disk import State, curved, near, state, write_model
from torch import nn

import blr_analysis as blr
from blr_analysis.errors import BLRError
from blr_analysis.merging import Job, Member, forecast, make_plan

COUNT = 100  # examples that the precisions on disk are sums over


def job_of(
    base: Any, models: list[Any], precisions: list[Any], method: str = "fisher", **settings: Any
) -> Job:
    pairs = zip(models, precisions, strict=True)
    members = tuple(Member(model, precision=precision) for model, precision in pairs)
    return Job(method, members, base, **settings)


def quadratic_rises(weights: State, model: State, precision: State) -> dict[str, float]:
    """½ Σ H (θ − θ_t)² of every tensor."""
    rises = {}
    for name, h in precision.items():
        step = (weights[name] - model[name]).double()
        rises[name] = float((h.double() * step.square()).sum()) / 2
    return rises


@pytest.mark.parametrize("method", ["fisher", "gradient_matching", "task_arithmetic", "linear"])
def test_diagonals_by_hand(method: str) -> None:
    """½ Σ H (θ − θ_t)² at the merge and at the base, tensor by tensor, whatever the method."""
    base = state(0)
    models = [near(base, 1), near(base, 2)]
    precisions = [curved(1), curved(2)]
    job = job_of(base, models, precisions, method=method, delta=0.0)
    actual = forecast(make_plan(job), progress=False)
    if method in ("fisher", "gradient_matching"):
        merged = blr.merge(base, models, method=method, precisions=precisions)
    else:
        merged = blr.merge(base, models, method=method)
    for task, model, precision in zip(actual.tasks, models, precisions, strict=True):
        rises = quadratic_rises(merged, model, precision)
        total = sum(rises.values())
        assert task.rise == pytest.approx(total, rel=1e-5)
        has_base = method != "linear"
        if has_base:
            rise_at_base = sum(quadratic_rises(base, model, precision).values())
            assert task.share == pytest.approx(total / rise_at_base, rel=1e-5)
        for name, share in task.tensors.items():
            assert share == pytest.approx(rises[name] / total, rel=1e-4, abs=1e-9)
        assert task.low < task.rise < task.high


@pytest.mark.parametrize("structure", ["diag", "kron", "gram"])
def test_quadratic_losses_rise_as_foretold(structure: str) -> None:
    """Linear regression: with one output and unit noise the moments of inputs are the Hessian."""
    base = nn.Linear(3, 1, bias=False)
    tasks = []
    for t in range(2):
        x = torch.eye(3).repeat(10, 1) * torch.tensor([1.0, 2.0, 0.5]).roll(t)
        model = copy.deepcopy(base)
        y = x @ torch.tensor([1.0, -1.0, float(t)])
        model.weight.data = torch.linalg.lstsq(x, y[:, None]).solution.mT
        tasks.append(blr.Task(model, (x, y), likelihood="gaussian"))
    precisions = [blr.fit_laplace(t, structure=structure, prior_precision=1.0) for t in tasks]
    models = [task.model for task in tasks]
    job = job_of(base, models, precisions)
    actual = forecast(make_plan(job), progress=False)
    merged = blr.merge(base, models, method="fisher", precisions=precisions)
    for task, model in zip(actual.tasks, tasks, strict=True):
        x, y = model.dataset.tensors
        rises = []
        for weight in (merged["weight"], base.weight):
            residual = (x @ weight.detach().mT).squeeze(-1) - y
            rises.append(float(residual.square().mean()) / 2)
        assert task.share == pytest.approx(rises[0] / rises[1], rel=1e-3)
        if structure != "gram":
            assert task.rise == pytest.approx(rises[0], rel=1e-3)
        else:
            assert math.isnan(task.rise)  # input moments have no unit of the loss


def test_interference_and_cost_by_least_squares() -> None:
    """Interference is the rise from the nearest point θ_t + c (θ_0 − θ_t) in the metric of H_t; the
    cost is the mean of Q + I in H_t and in the mean H, geometrically."""
    base = {"w": torch.tensor([0.0, 0.0, 0.0]), "v": torch.tensor([0.5, 0.0])}
    models = [
        {"w": torch.tensor([1.0, 0.2, 0.0]), "v": torch.tensor([0.5, 0.3])},
        {"w": torch.tensor([-0.4, 1.0, 0.3]), "v": torch.tensor([1.5, 0.0])},
    ]
    precisions = [
        {"w": torch.tensor([1.0, 4.0, 2.0]), "v": torch.tensor([3.0, 1.0])},
        {"w": torch.tensor([2.0, 1.0, 1.0]), "v": torch.tensor([0.5, 2.0])},
    ]
    actual = forecast(make_plan(job_of(base, models, precisions)), progress=False)
    merged = blr.merge(base, models, precisions=precisions, method="fisher")

    def joined(state: State) -> torch.Tensor:
        return torch.cat([state[name].double() for name in base])

    def distances(h: torch.Tensor, model: State) -> tuple[float, float]:
        """Half the squared distance of the merge from the model, and from the line."""
        step = h.sqrt() * (joined(merged) - joined(model))
        back = h.sqrt() * (joined(base) - joined(model))
        share = torch.linalg.lstsq(back[:, None], step[:, None]).solution.squeeze()
        from_line = step - share * back
        return float(step.square().sum()) / 2, float(from_line.square().sum()) / 2

    curvatures = [joined(precision) for precision in precisions]
    for task, model, h in zip(actual.tasks, models, curvatures, strict=True):
        rise, interference = distances(h, model)
        mean_rise, mean_interference = distances((curvatures[0] + curvatures[1]) / 2, model)
        assert task.interference == pytest.approx(interference, rel=1e-5)
        cost = math.sqrt((rise + interference) * (mean_rise + mean_interference))
        assert task.cost == pytest.approx(cost, rel=1e-5)
    assert actual.cost == pytest.approx(sum(task.cost for task in actual.tasks) / 2)


def test_what_each_verdict_says() -> None:
    """A small part of the base's cost is safe; as much as the base's cost is too far."""
    base = {"w": torch.zeros(4)}
    models = [{"w": torch.tensor([1.0, 0.0, 0.0, 0.0])}, {"w": torch.tensor([0.0, 60.0, 0.0, 0.0])}]
    precisions = [{"w": torch.tensor([1.0, 0.5, 1.0, 1.0])}, {"w": torch.ones(4)}]
    plan = make_plan(job_of(base, models, precisions, method="task_arithmetic"))
    first, second = forecast(plan, progress=False).tasks
    assert first.verdict == "too far apart"
    assert second.verdict == "safe"
    assert second.high < second.base_rise / second.factor
    assert "smaller weight" in forecast(plan, progress=False).note


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_safe_is_where_two_ranges_do_not_meet(structure: str) -> None:
    base = mlp(seed=1)
    task = blr.Task(mlp(seed=2), (normal(60, 4, seed=0), torch.arange(60) % 3))
    posterior = blr.fit_laplace(task, structure=structure, prior_precision=1.0)
    verdicts = []
    for left in (0.025, 0.075, 0.25):  # of the way; its square is the share of the base's rise
        job = job_of(base, [task.model], [posterior], method="task_arithmetic", scale=1 - left)
        (actual,) = forecast(make_plan(job), progress=False).tasks
        assert actual.share == pytest.approx(left**2, rel=1e-3)
        assert forecast(make_plan(job), progress=False).is_by_diagonals == (structure == "diag")
        ranges_meet = actual.rise * actual.factor >= actual.base_rise / actual.factor
        assert (actual.verdict == "safe") == (not ranges_meet)
        verdicts.append(actual.verdict)
    widest = {"diag": ["safe", "uncertain", "uncertain"], "kron": ["safe", "safe", "uncertain"]}
    assert verdicts == widest[structure]


def test_weak_precisions_call_nothing_safe() -> None:
    """Neither those of fewer examples than inputs, nor those of a model that is sure of all."""
    base = mlp(seed=1)
    model = mlp(seed=2)
    for count, verdict in ((60, "safe"), (4, "uncertain")):
        task = blr.Task(model, (normal(count, 4, seed=0), torch.arange(count) % 3))
        for structure in ("kron", "gram"):
            posterior = blr.fit_laplace(task, structure=structure, prior_precision=1.0)
            job = job_of(base, [model], [posterior], method="task_arithmetic", scale=0.99)
            prediction = forecast(make_plan(job), progress=False)
            assert prediction.tasks[0].verdict == verdict
            assert ("too few examples" in prediction.note) == (verdict == "uncertain")
    vanished = {name: torch.full_like(h, 1e-6) for name, h in model.state_dict().items()}
    job = job_of(base, [model], [vanished], method="task_arithmetic", scale=0.99)
    (actual,) = forecast(make_plan(job), progress=False).tasks
    assert actual.share == pytest.approx(1e-4, rel=1e-3)
    assert actual.verdict == "uncertain"


def test_gram_says_how_far_outputs_move() -> None:
    """By forward passes: the squared move of each layer's outputs at θ_t's inputs, over that back
    to the base. A small sum is not safe where one layer moves far."""
    base = mlp(seed=1)
    model = mlp(seed=2)
    x = normal(60, 4, seed=0)
    posterior = blr.fit_laplace(
        blr.Task(model, (x, torch.arange(60) % 3)), structure="gram", prior_precision=1.0
    )
    moves = {}
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            with torch.no_grad():
                moves[name] = (layer(x) - base.get_submodule(name)(x)).square().sum()
        x = layer(x).detach()
    first, last = moves
    for left, verdict in ((0.05, "safe"), (0.12, "uncertain")):
        shares = {first: 0.0, last: left**2}  # a task arithmetic with α goes back by 1 − α
        member = Member(
            model, precision=posterior, weight=lambda name, left=left: 1 - left * (last in name)
        )
        job = Job("task_arithmetic", (member,), base)
        prediction = forecast(make_plan(job), progress=False)
        (task,) = prediction.tasks
        total = sum(moves[name] * share for name, share in shares.items()) / sum(moves.values())
        assert task.share == pytest.approx(float(total), rel=1e-4)
        assert task.largest_share == pytest.approx(left**2, rel=1e-4)
        assert task.verdict == verdict
        assert ("one layer" in prediction.note) == (verdict == "uncertain")


def test_folders_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_model(tmp_path / "base", state(0))
    for t in (1, 2):
        write_model(tmp_path / f"ft{t}", near(state(0), t), precision=curved(t))
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        "merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: ft1}, {model: ft2}]\n"
    )
    job = job_of(
        base,
        [tmp_path / "ft1", tmp_path / "ft2"],
        [tmp_path / "ft1/precision", tmp_path / "ft2/precision"],
    )
    actual = forecast(make_plan(job), progress=False)
    memory = job_of(state(0), [near(state(0), t) for t in (1, 2)], [curved(1), curved(2)])
    expected = forecast(make_plan(memory), progress=False)
    for task, in_memory in zip(actual.tasks, expected.tasks, strict=True):
        assert task.rise * COUNT == pytest.approx(in_memory.rise, rel=1e-5)
        assert task.share == pytest.approx(in_memory.share, rel=1e-5)
    _, output, _ = run(capsys, "merge", recipe, "--dry-run")
    assert "Forecast: rise of each task's loss, nats for each example" in output
    assert "uncertain" in output or "safe" in output
    assert re.search(r"\ncost 0\.\d+: orders merges", output)
    assert "diagonal precisions hardly order merges" in output
    assert not (tmp_path / "out").exists()


def test_without_precisions_there_is_no_forecast() -> None:
    base = state(0)
    job = Job("linear", (Member(near(base, 1)),), base)
    with pytest.raises(BLRError, match="needs the precision"):
        forecast(make_plan(job), progress=False)


def test_layers_whose_tensors_arrive_apart() -> None:
    """Factors need a whole layer, also where the merge itself goes tensor by tensor; at half of the
    way from the base to the model a quarter of the base's rise remains."""
    base = mlp(seed=1)
    x = normal(60, 4, seed=0)
    task = blr.Task(mlp(seed=2), (x, torch.arange(60) % 3))
    posterior = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
    job = job_of(base, [task.model], [posterior], method="task_arithmetic", scale=0.5)
    (actual,) = forecast(make_plan(job), progress=False).tasks
    assert actual.share == pytest.approx(0.25, rel=1e-5)
    assert actual.interference == pytest.approx(0.0, abs=1e-9)


def test_a_merge_that_needs_no_precision_is_shown_without_a_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The precision beside a model does not fit it."""
    write_model(tmp_path / "base", state(0))
    write_model(tmp_path / "ft", near(state(0), 1), precision={"other": torch.ones(3)})
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: ft}]\n")
    code, output, _ = run(capsys, "merge", recipe, "--dry-run")
    assert code == 0
    assert "No forecast: " in output
    assert "another model" in output
