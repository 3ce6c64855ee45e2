"""Merging under precisions with structure: against dense solves, RegMean, averages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import HFConv1D, Images, Words, mlp, normal, randomised, seeded
from models_on_disk import copied, write_model
from oracles import dense_precision, flatten, relative, unflatten
from tiny_lm import TinyLM
from torch import Tensor, nn

from blr_analysis.errors import BLRError, InputError, PosteriorError
from blr_analysis.files import Folder
from blr_analysis.merging.card import model_card, outcome
from blr_analysis.merging.merge import merge
from blr_analysis.posterior import Posterior, fit_laplace, write_precision
from blr_analysis.task import Task

State = dict[str, Tensor]
EXACT = 1e-7  # conjugate gradients stop at a residual of 1e-8


def tasks_of(model: nn.Module, x: Tensor, classes: int, count: int = 3) -> list[Task]:
    """Copies of a model, each moved its own way, with data of its own scale."""
    tasks = []
    for t in range(count):
        own = copy.deepcopy(model)
        for k, p in enumerate(own.parameters()):
            p.data += 0.3 * normal(*p.shape, seed=100 * t + k)
        inputs = (1 + t) * x.roll(t, -1) if x.is_floating_point() else x.roll(t, -1)
        tasks.append(Task(own, (inputs, torch.arange(len(x)).roll(t) % classes)))
    return tasks


def convolutional() -> nn.Module:
    with seeded(0):
        layers = [nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), HFConv1D(3, 48)]
        return randomised(nn.Sequential(*layers))


CASES: dict[str, Any] = {
    "mlp": lambda: (mlp(), normal(40, 4), 3),
    "convolution": lambda: (convolutional(), normal(30, 2, 3, 3), 3),
    "images": lambda: (randomised(Images()), normal(20, 2, 8, 8), 3),
    "attention": lambda: (randomised(Words(tied=False)), torch.arange(60).view(12, 5) ** 2 % 7, 7),
}


@pytest.fixture(scope="module", params=list(CASES))
def family(request: pytest.FixtureRequest) -> tuple[State, list[Task]]:
    with seeded(0):
        model, x, classes = CASES[request.param]()
    return dict(model.named_parameters()), tasks_of(model, x, classes)


def weights_of(task: Task) -> State:
    return {n: p.detach() for n, p in task.model.named_parameters()}


def fitted_mlps(structure: str, **how: Any) -> tuple[list[Task], list[Posterior], list[State]]:
    tasks = tasks_of(*CASES["mlp"]())
    fitted = [fit_laplace(t, structure=structure, **how) for t in tasks]
    return tasks, fitted, [weights_of(t) for t in tasks]


def on_disk(root: Path, models: list[State], fitted: list[Posterior]) -> tuple[list, list]:
    """The folders of models and posteriors."""
    places = [root / f"q{k}" for k in range(len(fitted))]
    for q, place in zip(fitted, places, strict=True):
        q.save(place)
    return [write_model(root / f"m{k}", state) for k, state in enumerate(models)], places


def data_part(q: Posterior) -> Tensor:
    """H = S − δ as a dense matrix."""
    dense = dense_precision(q)
    return dense - float(q.prior_precision) * torch.eye(len(dense), dtype=torch.float64)


def dense_merge(
    base: State, models: list[State], h: list[Tensor], alphas: list[float], first: Tensor
) -> Tensor:
    """The formula with matrices, in float64."""
    start = flatten(base)
    total = first + sum(a * m for a, m in zip(alphas, h, strict=True))
    pull = sum(
        a * (first + m) @ (flatten(w) - start) for a, m, w in zip(alphas, h, models, strict=True)
    )
    return start + torch.linalg.solve(total, pull)


@pytest.mark.parametrize("structure", ["gram", "kron", "diag"])
@pytest.mark.parametrize("alphas", [[1.0, 0.5, 2.0], [1.0, 1.0, -0.05]])
def test_against_the_dense_solve(
    family: tuple[State, list[Task]], structure: str, alphas: list[float]
) -> None:
    """With the base's precision and δ, and with α that differ, one of them below 0."""
    base, tasks = family
    fitted = [fit_laplace(t, structure=structure, prior_precision=0.1) for t in tasks]
    models = [weights_of(t) for t in tasks]
    delta = 0.3 if min(alphas) > 0 else 30.0
    first = fit_laplace(tasks[1], structure=structure, prior_precision=2.0)
    merged = merge(
        base,
        models,
        precisions=fitted,
        weights=alphas,
        base_precision=first,
        delta=delta,
        trust=True,
        damping=0.0,
        dtype=torch.float64,
    )
    eye = torch.eye(len(flatten(base)), dtype=torch.float64)
    held = [data_part(q) for q in fitted]
    truth = dense_merge(base, models, held, alphas, data_part(first) + delta * eye)
    assert relative(flatten(merged), truth) < EXACT


@pytest.mark.parametrize("structure", ["gram", "kron"])
@pytest.mark.parametrize(("shrink", "power"), [(0.9, 1.0), (0.0, 1.0), (0.7, 0.5), (1.0, 0.0)])
def test_shrinkage_and_power(structure: str, shrink: float, power: float) -> None:
    base = copied(mlp())
    _, fitted, models = fitted_mlps(structure, prior_precision=1e-9)
    family = {"shrink": shrink, "power": power, "delta": 0.1, "damping": 0.25}
    merged = merge(base, models, precisions=fitted, dtype=torch.float64, **family)
    held = []
    for q in fitted:
        dense = torch.zeros_like(data_part(q))
        at = 0
        for block in q.form.blocks:
            s = q.form.values[block.key][0] - 1e-9
            left = torch.eye(len(s)).double() if block.left is None else block.left[0]
            if block.left is not None:  # A is the mean over the outputs, by G's mean eigenvalue
                g = s.mean(1, keepdim=True) / block.inputs
                s = s * torch.where(g > 1e-6 * g.max(), g, torch.inf) ** (power - 1)
            basis = torch.kron(left.contiguous(), block.right[0].contiguous())
            s = s + 0.25 * s.mean()
            joint = basis @ s.flatten().diag() @ basis.mT
            joint = shrink * joint + (1 - shrink) * joint.diagonal().diag()
            o = len(left)
            i = block.right.shape[-1]
            order = torch.arange(o * i).view(o, i)
            order = torch.cat([order[:, :-1].flatten(), order[:, -1]])  # weight, then bias
            size = o * i
            dense[at : at + size, at : at + size] = joint[order][:, order]
            at += size
        held.append(dense)
    start = 0.1 * torch.eye(len(held[0]), dtype=torch.float64)
    truth = dense_merge(base, models, held, [1.0] * 3, start)
    assert relative(flatten(merged), truth) < EXACT


@pytest.mark.parametrize(
    "more",
    [{}, {"damping": 0.5, "shrink": 0.6}, {"weights": [1.0, -0.1], "delta": 9.0, "based": True}],
)
def test_a_table_that_is_head_and_embedding(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row v has Σ h hᵀ of the head's inputs and the times that token v was looked up, by hand."""
    tasks = []
    ids = torch.arange(60).view(6, 10).square() % 97
    for k in range(3):
        with seeded(k):
            model = randomised(TinyLM(tied=True, vocabulary=97)).double()
        rows = ids.roll(k, 0)[: 4 + k] // (1 + k)
        tasks.append(Task(model, (rows, rows), likelihood="causal_lm"))
    fitted = [fit_laplace(t, structure="gram", prior_precision=0.5) for t in tasks]
    places = [tmp_path / str(k) for k in range(3)]
    for q, place in zip(fitted, places, strict=True):
        q.save(place)
    base, *models = (weights_of(t) for t in tasks)
    based = more.pop("based", False)
    alphas = more.pop("weights", [1.0, 2.0])
    monkeypatch.setattr("blr_analysis.merging.layer_pieces.rows_at_once", lambda joint: 64)
    how: dict[str, Any] = {"dtype": torch.float64, "weights": alphas, **more}
    how |= {} if based else {"method": "fisher"}
    first = {"base_precision": fitted[0]} if based else {}
    merged = merge(base, models, precisions=fitted[1:], **how, **first)["words.weight"]
    again = {"base_precision": places[0]} if based else {}
    stored = merge(base, models, precisions=places[1:], **how, **again)["words.weight"]
    assert relative(stored, merged) < 1e-9

    held = []
    for task in tasks:
        seen = []
        looked = torch.zeros(97).double()
        hook = task.model.read.register_forward_pre_hook(lambda m, x, s=seen: s.append(x[0]))
        rows = task.fetch(torch.arange(task.n_data))[0]
        task.model(rows)
        hook.remove()
        looked += torch.bincount(rows.flatten(), minlength=97)
        inputs = torch.cat([x.detach().flatten(0, 1) for x in seen])
        a = inputs.mT @ inputs
        a = torch.lerp(a.diagonal().diag(), a, more.get("shrink", 1.0))
        each = a + looked[:, None, None] * torch.eye(4).double()
        mean = each.diagonal(dim1=-2, dim2=-1).mean()
        held.append(each + more.get("damping", 0.0) * mean * torch.eye(4).double())
    start = held[0] + more.get("delta", 0.0) * torch.eye(4).double() if based else 0 * held[0]
    zero = base["words.weight"]
    total = start + sum(a * h for a, h in zip(alphas, held[1:], strict=True))
    parts = zip(alphas, held[1:], models, strict=True)
    pull = sum(a * (start + h) @ (m["words.weight"] - zero)[..., None] for a, h, m in parts)
    truth = zero + torch.linalg.solve(total, pull)[..., 0]
    assert relative(merged, truth) < 1e-7


def test_without_damping_the_solution_nearest_to_the_average() -> None:
    """Logits of a softmax are known up to a constant, so that G is singular."""
    _, fitted, models = fitted_mlps("kron", prior_precision=1.0)
    names = ("2.weight", "2.bias")
    merged = merge(
        None, models, precisions=fitted, method="fisher", damping=0.0, dtype=torch.float64
    )
    size = sum(merged[n].numel() for n in names)
    held = [data_part(q)[-size:, -size:] for q in fitted]
    rows = [torch.cat([m[n].flatten() for n in names]).double() for m in models]
    average = torch.stack(rows).mean(0)
    pull = sum(h @ (w - average) for h, w in zip(held, rows, strict=True))
    nearest = average + torch.linalg.pinv(sum(held), rtol=1e-6, hermitian=True) @ pull
    assert relative(torch.cat([merged[n].flatten() for n in names]), nearest) < 1e-4


@pytest.mark.parametrize("structure", ["gram", "kron"])
def test_equal_precisions_are_the_average(family: tuple[State, list[Task]], structure: str) -> None:
    """Also where they are singular: fewer examples than inputs."""
    base, tasks = family
    few = Task(tasks[0].model, tuple(part[:2] for part in tasks[0].fetch(torch.arange(9))))
    for task in (tasks[0], few):
        q = fit_laplace(task, structure=structure, prior_precision=0.5)
        models = [weights_of(t) for t in tasks]
        merged = merge(
            base, models, precisions=[q] * 3, method="fisher", trust=True, dtype=torch.float64
        )
        average = torch.stack([flatten(m) for m in models]).mean(0)
        plain = {n for n in base if n in getattr(q.form, "plain", {})}
        kept = [n for n in base if n not in plain or float(q.form.values[n].min()) > 0.51]
        pairs = zip(merged.items(), unflatten(average, base).values(), strict=True)
        for (n, ours), truth in pairs:
            if n in kept:
                assert relative(ours, truth) < EXACT, n


@pytest.mark.parametrize("structure", ["gram", "kron"])
def test_folders_and_memory_agree(tmp_path: Path, structure: str) -> None:
    _, fitted, models = fitted_mlps(structure)
    folders, places = on_disk(tmp_path, models, fitted)
    report = merge(None, folders, precisions=places, method="fisher", out=tmp_path / "out")
    memory = merge(None, models, precisions=fitted, method="fisher")
    written = Folder.open(report.folder).tensors()
    assert all(torch.equal(written[n], t) for n, t in memory.items())
    assert set(report.solves) == {"0.weight", "2.weight"}
    assert all(s.residual <= 1e-8 for s in report.solves.values())
    assert any(s.iterations for s in report.solves.values()) == (structure == "kron")
    card = model_card(report, "")
    assert f"| q0, {structure}, " in card
    assert "2 layers merged as one matrix" in " ".join(outcome(report))


def test_singular_moments_keep_the_average_and_are_counted() -> None:
    """Along inputs that no task ever saw the weights are averaged."""
    one = nn.Linear(3, 2, bias=False).double()
    two = nn.Linear(3, 2, bias=False).double()
    x = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).double()
    tasks = [Task(m, (x * k, torch.tensor([0, 1]))) for m, k in ((one, 1.0), (two, 3.0))]
    fitted = [fit_laplace(t, structure="gram") for t in tasks]
    models = [weights_of(t) for t in tasks]
    merged = merge(None, models, precisions=fitted, method="fisher", dtype=torch.float64)["weight"]
    a, b = (m["weight"] for m in models)
    assert relative(merged[:, :2], (a + 9 * b)[:, :2] / 10) < 1e-5
    assert relative(merged[:, 2], (a + b)[:, 2] / 2) < 1e-12


@pytest.mark.parametrize(("count", "said"), [(3, True), (300, False)])
def test_moments_of_few_examples_are_shrunk_and_said(
    count: int, said: bool, tmp_path: Path
) -> None:
    """By the variance of their mean over its square, by hand; 3 rows of 4 inputs are singular."""
    torch.manual_seed(0)
    one = nn.Linear(4, 2, bias=False).double()
    two = nn.Linear(4, 2, bias=False).double()
    rows = [normal(count, 4), normal(count, 4, seed=1).cumsum(1)]
    pairs = zip((one, two), rows, strict=True)
    tasks = [Task(m, (x, torch.arange(count) % 2)) for m, x in pairs]
    fitted = [fit_laplace(t, structure="gram") for t in tasks]
    apart = ~torch.eye(4, dtype=torch.bool)
    shrunk = []
    for x in rows:
        products = x[:, :, None] * x[:, None, :]
        spread = products.var(0)[apart].sum() / count
        kept = 1 - spread / products.mean(0)[apart].square().sum()
        shrunk.append(torch.where(apart, kept.clamp_min(0), 1.0) * products.sum(0))
    models = [weights_of(t) for t in tasks]
    w = [m["weight"] for m in models]

    def regmean(one: Tensor, two: Tensor) -> Tensor:
        return torch.linalg.solve(one + two, w[0] @ one + w[1] @ two, left=False)

    on_the_way = regmean(*shrunk)
    stored = on_the_way if said else regmean(*(x.mT @ x for x in rows))
    folders, places = on_disk(tmp_path, models, fitted)
    fisher: dict[str, Any] = {"method": "fisher", "dtype": torch.float64}
    report = merge(None, folders, precisions=places, out=tmp_path / "out", **fisher)
    assert relative(Folder.open(report.folder).tensor("weight"), stored) < EXACT
    assert any("shrink as measured" in line for line in outcome(report)) == said
    for how, truth in (({"tasks": tasks}, on_the_way), ({"precisions": fitted}, stored)):
        assert relative(merge(None, models, **fisher, **how)["weight"], truth) < EXACT


def test_swapped_precisions_are_refused(tmp_path) -> None:
    """In memory by the posterior's mean, on disk by the fingerprint that was recorded."""
    for structure in ("diag", "gram"):
        _, fitted, models = fitted_mlps(structure, prior_precision=1.0)
        with pytest.raises(PosteriorError, match=r"swapped.*trust"):
            merge(None, models, precisions=fitted[::-1], method="fisher")
        merge(None, models, precisions=fitted[::-1], method="fisher", trust=True)
        rounded = [{n: w.bfloat16() for n, w in m.items()} for m in models]
        merge(None, rounded, precisions=fitted, method="fisher")  # another dtype, the same weights
    places = [write_model(tmp_path / f"m{k}", state) for k, state in enumerate(models)]
    for place, state in zip(places, models, strict=True):
        curved = {n: torch.ones_like(w) for n, w in state.items()}
        about = {"kind": "fisher_mc", "definition": "ones", "n_data": 3}
        write_precision(place / "precision", curved, **about, model=place)
    stored = [p / "precision" for p in places]
    for k, given in enumerate((stored, stored[::-1])):
        how = {"precisions": given, "method": "fisher", "out": tmp_path / f"out{k}"}
        if k:
            with pytest.raises(PosteriorError, match=r"swapped.*trust"):
                merge(None, places, **how)
        merge(None, places, **how, trust=bool(k))


def test_threads_and_memory_do_not_matter() -> None:
    """A layer of many rows, taken some at a time; too little memory is said with what it needs."""
    tasks = []
    for t in range(2):
        with seeded(t):
            model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 700), nn.Linear(700, 5))
        tasks.append(Task(model, (t + normal(150, 100).float(), torch.arange(150) % 5)))
    fitted = [fit_laplace(task, structure="gram") for task in tasks]
    assert all(q.form.basis_shapes()["1.weight"] == (1, 700, 101) for q in fitted)
    models = [weights_of(task) for task in tasks]
    how: dict[str, Any] = {"precisions": fitted, "method": "fisher"}
    with pytest.raises(InputError, match="at least") as told:
        merge(None, models, **how, max_memory=2**17)
    least = int(str(told.value).rsplit(" ", 1)[1])
    merged = merge(None, models, **how, threads=4, max_memory=2**32)
    small = merge(None, models, **how, max_memory=least)
    assert all(torch.equal(merged[n], t) for n, t in small.items())


def test_precisions_that_do_not_fit() -> None:
    model, x, classes = CASES["mlp"]()
    tasks = tasks_of(model, x, classes, count=2)
    given = {s: fit_laplace(tasks[0], structure=s) for s in ("gram", "diag", "lowrank", "kron")}
    given["other"] = fit_laplace(Task(mlp(hidden=6), tasks[0].dataset.tensors), structure="gram")
    given["bad"] = copy.deepcopy(given["gram"])
    next(iter(given["bad"].form.values.values())).fill_(float("nan"))
    models, apart = [weights_of(t) for t in tasks], lambda n: 1.0 + ("bias" in n)
    for pair, how, word in (
        (("gram", "diag"), {}, "alike"),
        (("gram", "other"), {}, r"0\.weight"),
        (("gram", "bad"), {}, "NaN"),
        (("lowrank", "lowrank"), {}, "lowrank"),
        (("gram", "gram"), {"damping": -1.0}, "damping"),
        (("kron", "kron"), {"max_memory": 1000}, "memory"),
        (("gram", "gram"), {"weights": [apart, 1.0]}, "same weights"),
    ):
        with pytest.raises(BLRError, match=word):
            held = [given[name] for name in pair]
            merge(None, models, precisions=held, method="fisher", trust=True, **how)
