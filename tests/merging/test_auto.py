"""What ``method="auto"`` takes and why; propagated statistics against a merge by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp
from oracles import relative
from parts import normal
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blr_analysis.backprop.loss import SequenceEvaluation
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Folder
from blr_analysis.merging.auto import chosen
from blr_analysis.merging.card import model_card
from blr_analysis.merging.curve import merge_curve
from blr_analysis.merging.folders import execute
from blr_analysis.merging.job import Job, Member
from blr_analysis.merging.merge import merge
from blr_analysis.merging.plan import make_plan as plan_folders
from blr_analysis.merging.precisions import open_precision
from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.task import Task


@pytest.fixture(scope="module")
def family() -> dict[str, Any]:
    """Two models trained on halves of what one function says, and data for both to see."""
    teacher, base = mlp(seed=5), mlp(seed=1)
    tasks, held = [], []
    for t in range(2):
        x = normal(300, 4, seed=t) * torch.tensor([1.0, 1.0, 0.1, 0.1]).roll(2 * t)
        y = teacher(3 * x).argmax(1)
        own = copy.deepcopy(base)
        optimizer = torch.optim.Adam(own.parameters(), 0.02)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(own(x[:200]), y[:200]).backward()
            optimizer.step()
        tasks.append(Task(own, (x[:200], y[:200])))
        held.append(Task(base, (x[200:], y[200:])))
    models = [{n: p.detach() for n, p in t.model.named_parameters()} for t in tasks]
    start = {n: p.detach() for n, p in base.named_parameters()}
    return {"base": start, "models": models, "tasks": tasks, "validate": held}


def test_by_validation_it_takes_the_best_that_was_tried(family: dict[str, Any]) -> None:
    given = {k: family[k] for k in ("base", "models", "validate")}
    fitted = [fit_laplace(t, structure="kron", prior_precision=1.0) for t in family["tasks"]]
    merged = merge(**given, precisions=fitted, tasks=family["tasks"], method="auto")
    choice = merged.choice
    assert choice.best.nll == min(p.nll for p in choice.points) <= choice.average.nll
    names = {p.method for p in choice.points}
    assert {
        "average",
        "fisher, kron, shrink 1, power 0, damping 0.1",
        "propagated, shrink 0.9",
    } <= names
    again = merge(family["base"], family["models"], **choice.settings)
    assert all(torch.equal(merged[n], t) for n, t in again.items())
    assert choice.name in repr(choice)
    best = merge(**given, precisions=fitted, method="auto", criterion="accuracy").choice
    assert best.best.accuracy == max(p.accuracy for p in best.points)


@pytest.mark.parametrize("criterion", ["nll", "accuracy"])
def test_the_average_stays_unless_it_is_surely_behind(
    family: dict[str, Any], criterion: str
) -> None:
    """The standard error is of paired differences, by hand from the models' own outputs."""
    fitted = [fit_laplace(t, structure="kron", prior_precision=1.0) for t in family["tasks"]]
    stayed = []
    for count in (100, 1):
        held = [t.subset(range(count)) for t in family["validate"]]
        given: dict[str, Any] = {"validate": held, "criterion": criterion, "method": "auto"}
        choice = merge(family["base"], family["models"], precisions=fitted, **given).choice
        value = "nll" if criterion == "nll" else "accuracy"
        best = (min if criterion == "nll" else max)(getattr(p, value) for p in choice.points)
        gain, error = choice.gain
        assert gain == pytest.approx(abs(best - getattr(choice.average, value)), abs=1e-6)
        stayed.append(choice.name == "average")
        assert stayed[-1] == (gain <= error) == ("the average stays" in repr(choice))
        if count == 1 or stayed[-1]:
            continue
        states = [merge(family["base"], family["models"], **choice.settings)]
        states.append(merge(None, family["models"], method="linear"))
        means, squares = [], []
        for task in held:
            each, (x, y) = [], task.dataset.dataset.tensors
            for state in states:
                f = torch.func.functional_call(task.model, dict(state), (x[:count],))
                nll = nn.functional.cross_entropy(f, y[:count], reduction="none")
                each.append(-nll if criterion == "nll" else (f.argmax(1) == y[:count]).double())
            apart = (each[0] - each[1]).detach().numpy()
            means.append(apart.mean())
            squares.append(apart.std(ddof=1) ** 2 / count)
        assert choice.gain == pytest.approx((sum(means) / 2, sum(squares) ** 0.5 / 2), rel=1e-4)
    assert stayed == [False, True]


def test_by_the_losses_of_the_tasks(family: dict[str, Any]) -> None:
    """Without data of their own to choose by: statistics of every other example, judged by the
    rest; what is taken is made with all of them."""
    tasks, models = family["tasks"], family["models"]
    merged = merge(family["base"], models, tasks=tasks, method="auto")
    settings = dict(merged.choice.settings)
    again = merge(family["base"], models, **settings)
    assert all(torch.equal(merged[n], t) for n, t in again.items())
    settings["tasks"] = [t.subset(range(0, t.n_data, 2)) for t in settings["tasks"]]
    half = merge(family["base"], models, **settings)
    average = merge(None, models, method="linear")
    losses = {}
    for name, state in (("average", average), (merged.choice.name, half)):
        each = []
        for task in tasks:
            x, y = task.dataset.tensors
            model = copy.deepcopy(task.model)
            model.load_state_dict(dict(state))
            each.append(nn.functional.cross_entropy(model(x[1::2]), y[1::2]).item())
        losses[name] = sum(each) / len(each)
    tried = {p.method: p.nll for p in merged.choice.points}
    assert {n: tried[n] for n in losses} == pytest.approx(losses, rel=1e-5)
    assert tried[merged.choice.name] == min(tried.values()) < tried["average"]
    assert merged.choice.by == "nll"
    assert "that the models have seen" in repr(merged.choice)


def test_by_the_predicted_gap(family: dict[str, Any]) -> None:
    """½ (θ − θ_t)ᵀ H_t (θ − θ_t), by the posterior's own products; least for the Fisher average."""
    fitted = [fit_laplace(t, structure="gram") for t in family["tasks"]]
    merged = merge(family["base"], family["models"], precisions=fitted, method="auto")
    assert merged.choice.name.startswith("fisher, gram")
    assert merged.choice.by == "gap"
    for q, gap in zip(fitted, merged.choice.best.nlls, strict=True):
        step = {n: merged[n] - q.mean[n] for n in q.mean}
        flat = float(q.prior_precision)
        product = q.precision_product({n: s.unsqueeze(0) for n, s in step.items()})
        truth = sum(float(((product[n][0] - flat * s) * s).sum()) for n, s in step.items()) / 2
        assert gap == pytest.approx(truth, rel=1e-4)


def test_the_sizes_of_precisions_do_not_count(family: dict[str, Any]) -> None:
    """The roots of each task's are divided by what it loses in the average: those of a task that is
    sure of its data, and has small ones, count as much."""
    models = family["models"]
    fitted = [fit_laplace(t, structure="diag", prior_precision=1e-9) for t in family["tasks"]]
    small = [fitted[0], scaled(fitted[1], 1e-3)]

    roots = [{n: (q.precision(n) - 1e-9).clamp_min(0).sqrt() for n in q.mean} for q in fitted]

    def gaps_of(state: Any) -> list[float]:
        pairs = zip(roots, models, strict=True)
        return [open_precision(h).gap(state, m) for h, m in pairs]

    gaps = gaps_of(merge(None, models, method="linear"))
    merged = [merge(None, models, precisions=p, method="auto") for p in (fitted, small)]
    truth = merge(None, models, precisions=roots, method="fisher", weights=[1 / g for g in gaps])
    for made in merged:
        assert made.choice.name.endswith("balanced")
        for name, value in made.items():
            assert relative(value, truth[name]) < 1e-5
    given_up = gaps_of(merge(None, models, precisions=small, method="fisher"))
    assert given_up[1] > gaps[1]


def scaled(q: Posterior, scale: float) -> Posterior:
    return Posterior(
        q.mean, q.form.zeros().plus(q.form, scale), prior_precision=1e-9 * scale,
        n_data=q.n_data, record=q.record,
    )  # fmt: skip


def test_folders_take_the_same(family: dict[str, Any], tmp_path) -> None:
    places = {"base": family["base"], **dict(zip("ab", family["models"], strict=True))}
    for name, state in places.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
    fitted = [fit_laplace(t, structure="gram") for t in family["tasks"]]
    for name, q in zip("ab", fitted, strict=True):
        q.save(tmp_path / name / "precision")
    folders = [tmp_path / "a", tmp_path / "b"]
    given = {"method": "auto", "validate": family["validate"]}
    report = merge(
        tmp_path / "base", folders, precisions=[f / "precision" for f in folders],
        out=tmp_path / "out", **given,
    )  # fmt: skip
    memory = merge(family["base"], family["models"], precisions=fitted, **given)
    assert report.choice.name == memory.choice.name
    assert report.plan.method.name == memory.choice.settings["method"]


@pytest.mark.parametrize("normalize", [None, True, False])
@pytest.mark.parametrize(
    ("structures", "damping"),
    [
        ("gram gram", None),
        ("gram gram", 5.0),
        ("kron kron", 5.0),
        ("gram kron", 5.0),
        ("diag diag", None),
    ],
)
def test_a_job_of_folders_writes_what_was_validated(
    family: dict[str, Any], tmp_path, structures: str, damping: float | None, normalize: bool | None
) -> None:
    """The folder's losses are those of the choice; the merge is that of its settings."""
    places = {"base": family["base"], **dict(zip("ab", family["models"], strict=True))}
    for name, state in places.items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
    for name, task, structure in zip("ab", family["tasks"], structures.split(), strict=True):
        fit_laplace(task, structure=structure).save(tmp_path / name / "precision")
    members = tuple(
        Member(tmp_path / n, tmp_path / n / "precision", w) for n, w in (("a", 1.0), ("b", 0.4))
    )
    job = Job(
        method="gradient_matching", members=members, base=tmp_path / "base", delta=30.0,
        normalize=normalize, damping=damping,
    )  # fmt: skip
    job, choice = chosen(job, family["validate"])
    report = execute(plan_folders(job), tmp_path / "out", progress=False)
    written = load_file(report.folder / "model.safetensors")
    for task, nll in zip(family["validate"], choice.best.nlls, strict=True):
        x, y = task.dataset.tensors
        model = copy.deepcopy(task.model)
        model.load_state_dict(written)
        loss = nn.functional.cross_entropy(model(x), y).item()
        assert loss == pytest.approx(nll, rel=1e-5)
    truth = merge(family["base"], family["models"], **{**choice.settings, "n_data": None})
    assert all(torch.equal(written[n], t) for n, t in truth.items())


def test_the_average_is_the_average_and_every_merge_is_tried_once(family: dict[str, Any]) -> None:
    """Whatever normalize says, which makes every α of task arithmetic one merge."""
    given = {k: family[k] for k in ("base", "models", "validate")}
    average = merge(None, family["models"], method="linear")
    for normalize in (None, True, False):
        choice = merge(**given, method="auto", normalize=normalize).choice
        nlls = [p.nll for p in choice.points]
        assert len(set(nlls)) == len(nlls)
        for task, nll in zip(family["validate"], choice.average.nlls, strict=True):
            x, y = task.dataset.tensors
            model = copy.deepcopy(task.model)
            model.load_state_dict(dict(average))
            loss = nn.functional.cross_entropy(model(x), y).item()
            assert nll == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("shrink", [0.9, None])
def test_propagated_statistics_by_hand(family: dict[str, Any], shrink: float | None) -> None:
    """The first layer as RegMean; the second with its inputs from the merged first one. Unless it
    is given, shrinkage is by the variance of the moments' means over the examples."""
    how: dict[str, Any] = {"tasks": family["tasks"], "method": "fisher", "shrink": shrink}
    merged = merge(None, family["models"], **how)
    inputs = [t.fetch(torch.arange(t.n_data))[0] for t in family["tasks"]]
    for layer in ("0", "2"):
        top: Any = 0.0
        bottom: Any = 0.0
        for a, w in zip(inputs, family["models"], strict=True):
            a = torch.cat([a, torch.ones(len(a), 1)], 1)
            products = a[:, :, None] * a[:, None, :]
            apart = ~torch.eye(a.shape[1], dtype=torch.bool)
            chance = products.var(0)[apart].sum() / len(a) / products.mean(0)[apart].square().sum()
            kept = (1 - chance).clamp_min(0) if shrink is None else shrink
            gram = torch.lerp((a.mT @ a).diagonal().diag(), a.mT @ a, kept)
            joint = torch.cat([w[f"{layer}.weight"], w[f"{layer}.bias"][:, None]], 1)
            top, bottom = top + joint @ gram, bottom + gram
        truth = top @ torch.linalg.inv(bottom)
        assert relative(merged[f"{layer}.weight"], truth[:, :-1]) < 1e-8
        assert relative(merged[f"{layer}.bias"], truth[:, -1]) < 1e-8
        weight, bias = merged[f"{layer}.weight"], merged[f"{layer}.bias"]
        inputs = [torch.tanh(a @ weight.mT + bias) for a in inputs]
    half = merge(None, family["models"], **how, out_dtype=torch.bfloat16)
    assert all(torch.equal(t, merged[n].to(torch.bfloat16)) for n, t in half.items())


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_propagated_statistics_of_folders(
    family: dict[str, Any], tmp_path: Path, out_dtype: torch.dtype | None
) -> None:
    """The same numbers as in memory, with a model at a time; the card says how."""
    folders = [tmp_path / name for name in "ab"]
    for folder, state in zip(folders, family["models"], strict=True):
        folder.mkdir()
        save_file(state, folder / "model.safetensors")
        (folder / "config.json").write_text('{"dtype": "float64"}')
    how: dict[str, Any] = {"tasks": family["tasks"], "weights": [1.0, 2.0], "out_dtype": out_dtype}
    report = merge(None, folders, **how, method="fisher", out=tmp_path / "out")
    memory = merge(None, family["models"], **how, method="fisher")
    written = Folder.open(tmp_path / "out").tensors()
    assert all(torch.equal(written[n], t) for n, t in memory.items())
    assert "A_t" in model_card(report)
    assert (tmp_path / "out" / "config.json").is_file()
    chosen = merge(None, folders, tasks=family["tasks"], method="auto", out=tmp_path / "auto")
    in_memory = merge(None, family["models"], tasks=family["tasks"], method="auto")
    assert chosen.choice.name == in_memory.choice.name
    written = Folder.open(tmp_path / "auto").tensors()
    assert all(torch.equal(written[n], t) for n, t in in_memory.items())
    for more, word in (({"rank": 2}, "rank"), ({"precisions": [None, None]}, "precisions")):
        with pytest.raises(InputError, match=word):
            merge(None, folders, **how, **more, method="fisher", out=tmp_path / "no")


class Branched(nn.Module):
    """Layers that are given one tensor, one that follows a change of it in place, one run twice."""

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
                lambda _, given, __, rows=rows: rows.append(given[0].clone())
            )
            run(x)
            handle.remove()
            a = torch.cat([torch.cat(rows), torch.ones(30 * len(rows), 1)], 1)
            gram = 0.9 * a.mT @ a + 0.1 * (a.mT @ a).diagonal().diag()
            own = getattr(model, name)
            top = top + torch.cat([own.weight, own.bias[:, None]], 1) @ gram
            bottom = bottom + gram
        truth = (top @ torch.linalg.inv(bottom)).detach()
        assert relative(merged[f"{name}.weight"], truth[:, :-1]) < 1e-8
        assert relative(merged[f"{name}.bias"], truth[:, -1]) < 1e-8
        for run in runs:
            getattr(run, name).load_state_dict(
                {"weight": merged[f"{name}.weight"], "bias": merged[f"{name}.bias"]}
            )


def test_propagated_statistics_run_no_further_than_they_must() -> None:
    """Of six layers three are given one tensor: of 1 + 4 sweeps a task three reach the top."""
    models = [Branched(t) for t in (1, 2)]
    runs = [0]

    def count(*_: Any) -> None:
        runs[0] += 1

    models[0].top.register_forward_hook(count)
    tasks = [Task(m, (torch.randn(30, 3).double(), torch.arange(30) % 3)) for m in models]
    merge(None, models, tasks=tasks, method="fisher")
    assert runs[0] == 3  # the order; the layer that runs twice; the top


class Other(nn.Module):
    """Layers of the same names that are never run."""

    def __init__(self) -> None:
        super().__init__()
        parts: Tensor | Any = mlp()
        self._modules.update(parts._modules)

    def forward(self, x: Tensor) -> Tensor:
        return self._modules["0"](x)[:, :3]  # type: ignore[misc]


def test_bad_input(family: dict[str, Any]) -> None:
    base, models, tasks = (family[k] for k in ("base", "models", "tasks"))
    with pytest.raises(InputError, match="validate"):
        merge(base, models, method="auto")
    curved = [{n: torch.ones_like(t) for n, t in models[0].items()}, None]
    with pytest.raises(InputError, match="every model"):
        merge(base, models, method="auto", validate=tasks, precisions=curved)
    with pytest.raises(InputError, match="damping"):
        merge(base, models, method="fisher", precisions=curved[:1] * 2, damping=0.1)
    with pytest.raises(InputError, match="shrink is of precisions with factors"):
        merge(base, models, method="fisher", precisions=curved[:1] * 2, shrink=0.9)
    with pytest.raises(InputError, match="weights= has no effect"):
        merge(base, models, method="auto", validate=tasks, weights=[1.0, 0.5])
    with pytest.raises(InputError, match="rank"):
        merge(base, models, method="auto", validate=tasks, rank=4)
    with pytest.raises(InputError, match="criterion"):
        merge(base, models, method="auto", validate=tasks, criterion="loss")
    with pytest.raises(InputError, match="fisher"):
        merge(base, models, tasks=tasks)
    with pytest.raises(InputError, match="1 tasks for 2"):
        merge(base, models, tasks=tasks[:1], method="fisher")
    with pytest.raises(InputError, match="at least 0"):
        merge(base, models, tasks=tasks, method="fisher", weights=[1.0, -0.5])
    for option in (
        {"power": 0.5}, {"damping": 0.1}, {"n_data": [5, 5]}, {"missing_precision": "zero"},
        {"trust": True},
    ):  # fmt: skip
        for method in ("fisher", "auto"):
            with pytest.raises(InputError, match=f"{next(iter(option))}=.*precisions="):
                merge(base, models, tasks=tasks, method=method, **option)
    for option in ({"shrink": 0.5}, {"delta": 1.0}):
        with pytest.raises(InputError, match=f"{next(iter(option))}=.*precisions="):
            merge(base, models, validate=tasks, method="auto", **option)
    large = [{n: 1e6 * t for n, t in m.items()} for m in models]
    with pytest.raises(ModelError, match="float16"):
        merge(base, large, tasks=tasks, method="fisher", out_dtype=torch.float16)
    other = Task(Other().double(), tasks[1].fetch(torch.arange(5)))
    with pytest.raises(ModelError, match=r"2\.weight"):
        merge(base, models, tasks=[tasks[0], other], method="fisher")


def test_an_accuracy_that_no_task_has() -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    models = [nn.Linear(3, 1) for _ in range(3)]
    tasks = [Task(m, (x, y), likelihood="gaussian") for m in models[1:]]
    for call in (merge, merge_curve):
        how = {"tasks": tasks, "method": "task_arithmetic"}
        how = how if call is merge_curve else {"validate": tasks, "method": "auto"}
        with pytest.raises(InputError, match="no task has an accuracy"):
            call(models[0], models[1:], criterion="accuracy", progress=False, **how)  # type: ignore
