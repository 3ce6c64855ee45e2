"""What ``method="auto"`` takes and why; propagated statistics against a merge by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp, normal
from models_on_disk import write_model
from oracles import relative
from torch import Tensor, nn

from blr_analysis.errors import ModelError
from blr_analysis.files import Folder
from blr_analysis.merging import Job, Member, execute, make_plan
from blr_analysis.merging.auto import chosen
from blr_analysis.merging.card import model_card
from blr_analysis.merging.merge import merge
from blr_analysis.posterior import fit_laplace
from blr_analysis.task import Task


@pytest.fixture(scope="module")
def family() -> dict[str, Any]:
    """Two models trained on the labels of one teacher, and validation tasks for both."""
    teacher = mlp(seed=5)
    base = mlp(seed=1)
    tasks = []
    validation = []
    for t in range(2):
        x = normal(300, 4, seed=t) * torch.tensor([1.0, 1.0, 0.1, 0.1]).roll(2 * t)
        y = teacher(3 * x).argmax(1)
        tuned = copy.deepcopy(base)
        optimizer = torch.optim.Adam(tuned.parameters(), 0.02)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(tuned(x[:200]), y[:200]).backward()
            optimizer.step()
        tasks.append(Task(tuned, (x[:200], y[:200])))
        validation.append(Task(base, (x[200:], y[200:])))
    models = [{n: p.detach() for n, p in t.model.named_parameters()} for t in tasks]
    start = {n: p.detach() for n, p in base.named_parameters()}
    return {"base": start, "models": models, "tasks": tasks, "validate": validation}


def losses(task: Task, state: Any, rows: Any = slice(None)) -> Tensor:
    """The loss of each example, by plain torch."""
    x, y = (part[rows] for part in task.dataset.tensors)
    model = copy.deepcopy(task.model)
    model.load_state_dict({n: state[n] for n in model.state_dict()})
    return nn.functional.cross_entropy(model(x), y, reduction="none").detach()


def first_examples(task: Task, count: int) -> Task:
    return Task(task.model, tuple(x[:count] for x in task.dataset.tensors))


@pytest.mark.parametrize("count", [100, 1])
def test_by_validation_it_takes_the_best_where_it_is_surely_ahead(
    family: dict[str, Any], count: int
) -> None:
    """Ahead of the average by more than the standard error of paired differences, by hand."""
    fitted = [fit_laplace(t, structure="kron", prior_precision=1.0) for t in family["tasks"]]
    validation = [first_examples(task, count) for task in family["validate"]]
    models = family["models"]
    arguments = {"precisions": fitted, "tasks": family["tasks"], "validate": validation}
    merged = merge(family["base"], models, method="auto", **arguments)
    choice = merged.choice
    points = {p.method: p for p in merged.choice.points}
    assert "average" in points
    assert "fisher, kron, shrink 1, power 0, damping 0.1" in points
    assert "propagated, shrink 0.9" in points
    average = merge(None, models, method="linear")
    best = min(points, key=lambda n: points[n].nll)
    for state, point in ((merged, choice.best), (average, choice.average)):
        actual = [float(losses(t, state).mean()) for t in validation]
        assert point.nlls == pytest.approx(actual, rel=1e-5)
    gain, error = choice.gain
    assert gain == pytest.approx(choice.average.nll - points[best].nll, abs=1e-6)
    average_stays = count == 1  # one example has no standard error
    assert (choice.name == "average") == average_stays
    assert ("the average stays" in repr(choice)) == average_stays
    if not average_stays:
        assert choice.name == best
        gains = [losses(t, average) - losses(t, merged) for t in validation]
        expected = sum(float(gain_of_task.var()) / count for gain_of_task in gains) ** 0.5 / 2
        assert error == pytest.approx(expected, rel=1e-4)
        assert gain > error


def test_by_the_losses_of_the_tasks(family: dict[str, Any], tmp_path: Path) -> None:
    """Without validation data, statistics of every second example are judged by the others; the
    choice is then made with all examples, in memory and in folders alike."""
    tasks = family["tasks"]
    models = family["models"]
    merged = merge(family["base"], models, tasks=tasks, method="auto")
    choice = merged.choice
    assert choice.name.startswith("propagated")
    assert "that the models have seen" in repr(choice)
    settings: dict[str, Any] = {"method": "fisher", "shrink": choice.settings["shrink"]}
    again = merge(None, models, tasks=tasks, **settings)
    assert all(torch.equal(merged[n], t) for n, t in again.items())
    halves = [Task(t.model, tuple(x[::2] for x in t.dataset.tensors)) for t in tasks]
    half = merge(None, models, tasks=halves, **settings)
    actual = [float(losses(t, half, slice(1, None, 2)).mean()) for t in tasks]
    assert choice.best.nlls == pytest.approx(actual, rel=1e-5)
    folders = [write_model(tmp_path / n, m) for n, m in zip("ab", models, strict=True)]
    base = write_model(tmp_path / "base", family["base"])
    report = merge(base, folders, tasks=tasks, method="auto", out=tmp_path / "out")
    written = Folder.open(report.folder).tensors()
    assert all(torch.equal(written[n], t) for n, t in merged.items())
    assert "A_t" in model_card(report, "")


@pytest.mark.parametrize(
    ("structures", "damping"),
    [("gram gram", None), ("kron kron", 5.0), ("gram kron", 5.0), ("diag diag", None)],
)
def test_a_job_of_folders_writes_what_was_validated(
    family: dict[str, Any], tmp_path: Path, structures: str, damping: float | None
) -> None:
    members = []
    weights = (1.0, 0.4)
    for k, structure in enumerate(structures.split()):
        folder = write_model(tmp_path / f"model{k}", family["models"][k])
        fit_laplace(family["tasks"][k], structure=structure).save(folder / "precision")
        members.append(Member(folder, folder / "precision", weights[k]))
    base = write_model(tmp_path / "base", family["base"])
    job = Job("gradient_matching", tuple(members), base, delta=30.0, damping=damping)
    job, choice = chosen(job, family["validate"])
    assert (choice.name != "average") == (choice.best.nll < choice.average.nll)
    written = Folder.open(execute(make_plan(job), tmp_path / "out").folder).tensors()
    actual = [float(losses(t, written).mean()) for t in family["validate"]]
    assert choice.best.nlls == pytest.approx(actual, rel=1e-5)


def test_auto_under_normalized_weights(family: dict[str, Any]) -> None:
    """Normalised, every α of task arithmetic is the average, which is tried once."""
    arguments = {k: family[k] for k in ("base", "models", "validate")}
    for normalize in (None, True, False):
        choice = merge(**arguments, method="auto", normalize=normalize).choice
        nlls = [p.nll for p in choice.points]
        assert len(nlls) == (1 if normalize else 8)
        assert len(set(nlls)) == len(nlls)


def test_auto_keeps_the_base_where_every_merge_is_worse(family: dict[str, Any]) -> None:
    """For models that are far on the wrong side of the base the result is the base and says so."""
    base = family["base"]
    models = [
        {name: tensor + scale * torch.ones_like(tensor) for name, tensor in base.items()}
        for scale in (30.0, 50.0)
    ]
    with pytest.warns(UserWarning, match="the result is the base"):
        merged = merge(base, models, method="auto", validate=family["validate"])
    assert merged.choice.name == "base"
    assert "no merge is better than the base" in repr(merged.choice)
    for name, tensor in base.items():  # merges are computed in float32
        assert torch.equal(merged[name], tensor.float().to(tensor.dtype))


def measured_shrinkage(inputs: Tensor) -> Tensor:
    """1 − Σ var(mean of x_i x_j) / Σ (mean of x_i x_j)² over i ≠ j, at least 0."""
    products = inputs[:, :, None] * inputs[:, None, :]
    off_diagonal = ~torch.eye(inputs.shape[1], dtype=torch.bool)
    variance = products.var(0)[off_diagonal].sum() / len(inputs)
    square = products.mean(0)[off_diagonal].square().sum()
    return (1 - variance / square).clamp_min(0)


@pytest.mark.parametrize("shrink", [0.9, None])
def test_propagated_statistics_by_hand(family: dict[str, Any], shrink: float | None) -> None:
    """The first layer is merged as RegMean, the second with its inputs from the merged first one.
    By default shrinkage follows from the variance of the moments' means over the examples."""
    settings: dict[str, Any] = {"tasks": family["tasks"], "method": "fisher", "shrink": shrink}
    merged = merge(None, family["models"], **settings)
    inputs = [t.fetch(torch.arange(t.n_data))[0] for t in family["tasks"]]
    for layer in ("0", "2"):
        top: Any = 0.0
        bottom: Any = 0.0
        for a, w in zip(inputs, family["models"], strict=True):
            a = torch.cat([a, torch.ones(len(a), 1)], 1)
            factor = measured_shrinkage(a) if shrink is None else shrink
            gram = torch.lerp((a.mT @ a).diagonal().diag(), a.mT @ a, factor)
            joint = torch.cat([w[f"{layer}.weight"], w[f"{layer}.bias"][:, None]], 1)
            top = top + joint @ gram
            bottom = bottom + gram
        truth = top @ torch.linalg.inv(bottom)
        assert relative(merged[f"{layer}.weight"], truth[:, :-1]) < 1e-8
        assert relative(merged[f"{layer}.bias"], truth[:, -1]) < 1e-8
        weight = merged[f"{layer}.weight"]
        bias = merged[f"{layer}.bias"]
        inputs = [torch.tanh(a @ weight.mT + bias) for a in inputs]
    half = merge(None, family["models"], **settings, out_dtype=torch.bfloat16)
    assert all(torch.equal(t, merged[n].to(torch.bfloat16)) for n, t in half.items())
    large = [{n: 1e6 * t for n, t in m.items()} for m in family["models"]]
    with pytest.raises(ModelError, match="float16"):
        merge(None, large, **settings, out_dtype=torch.float16)


class Branched(nn.Module):
    """Three layers that share an input, one after a change of it in place, and one run twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in ("q", "k", "v", "after", "twice", "top"):
            setattr(self, name, nn.Linear(3, 3).double())

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.q(x) * self.k(x).sigmoid() + self.v(x)
        x.tanh_()
        y = self.twice(y + self.after(x)).tanh()
        return self.top(self.twice(y))


def test_propagated_statistics_of_layers_that_share_inputs_or_run_twice() -> None:
    models = [Branched(t) for t in (1, 2)]
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(30, 3, generator=generator).double() for _ in models]
    tasks = [Task(m, (x, torch.arange(30) % 3)) for m, x in zip(models, data, strict=True)]
    merged = merge(None, models, tasks=tasks, method="fisher", shrink=0.9)
    runs = [copy.deepcopy(m) for m in models]
    for name in ("q", "k", "v", "after", "twice", "top"):
        top: Any = 0.0
        bottom: Any = 0.0
        for model, run, x in zip(models, runs, data, strict=True):
            rows: list[Tensor] = []
            handle = getattr(run, name).register_forward_hook(
                lambda _, inputs, __, rows=rows: rows.append(inputs[0].clone())
            )
            run(x)
            handle.remove()
            a = torch.cat([torch.cat(rows), torch.ones(30 * len(rows), 1)], 1)
            gram = 0.9 * a.mT @ a + 0.1 * (a.mT @ a).diagonal().diag()
            layer = getattr(model, name)
            top = top + torch.cat([layer.weight, layer.bias[:, None]], 1) @ gram
            bottom = bottom + gram
        truth = (top @ torch.linalg.inv(bottom)).detach()
        assert relative(merged[f"{name}.weight"], truth[:, :-1]) < 1e-8
        assert relative(merged[f"{name}.bias"], truth[:, -1]) < 1e-8
        for run in runs:
            getattr(run, name).load_state_dict(
                {"weight": merged[f"{name}.weight"], "bias": merged[f"{name}.bias"]}
            )


def test_propagated_statistics_run_no_further_than_they_must() -> None:
    """Three of six layers share an input: of 1 + 4 sweeps of a task three reach the top."""
    models = [Branched(t) for t in (1, 2)]
    runs = [0]

    def count(*_: Any) -> None:
        runs[0] += 1

    models[0].top.register_forward_hook(count)
    tasks = [Task(m, (torch.randn(30, 3).double(), torch.arange(30) % 3)) for m in models]
    merge(None, models, tasks=tasks, method="fisher")
    assert runs[0] == 3  # the order; the layer that runs twice; the top


def test_tasks_that_run_other_layers(family: dict[str, Any]) -> None:
    model = mlp()
    model.forward = lambda x: model[0](x)[:, :3]  # the second layer is never run
    task = Task(model, family["tasks"][1].fetch(torch.arange(5)))
    with pytest.raises(ModelError, match=r"2\.weight"):
        merge(None, family["models"], tasks=[family["tasks"][0], task], method="fisher")
