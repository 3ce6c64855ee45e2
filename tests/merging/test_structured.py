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

from blr_analysis.backprop.matrices import Basis, MatrixShape
from blr_analysis.errors import BLRError, InputError, PosteriorError
from blr_analysis.files import Folder
from blr_analysis.merging.card import model_card, outcome
from blr_analysis.merging.layers import Factors, Part, solver
from blr_analysis.merging.merge import merge
from blr_analysis.posterior import Posterior, fit_laplace, write_precision
from blr_analysis.task import Task

State = dict[str, Tensor]
EXACT = 1e-7  # conjugate gradients stop at a residual of 1e-8


def tasks_of(model: nn.Module, x: Tensor, classes: int, count: int = 3) -> list[Task]:
    """Copies of a model, each moved its own way, with data of its own scale."""
    tasks = []
    for t in range(count):
        tuned = copy.deepcopy(model)
        for k, p in enumerate(tuned.parameters()):
            p.data += 0.3 * normal(*p.shape, seed=100 * t + k)
        inputs = (1 + t) * x.roll(t, -1) if x.is_floating_point() else x.roll(t, -1)
        tasks.append(Task(tuned, (inputs, torch.arange(len(x)).roll(t) % classes)))
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


def fitted_mlps(structure: str, **settings: Any) -> tuple[list[Task], list[Posterior], list[State]]:
    tasks = tasks_of(*CASES["mlp"]())
    fitted = [fit_laplace(t, structure=structure, **settings) for t in tasks]
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
    """θ_0 + (H_0 + Σ α H_t)⁻¹ Σ α (H_0 + H_t)(θ_t − θ_0), with dense matrices in float64."""
    start = flatten(base)
    total = first.clone()
    pull = torch.zeros_like(start)
    for alpha, precision, model in zip(alphas, h, models, strict=True):
        total = total + alpha * precision
        pull = pull + alpha * (first + precision) @ (flatten(model) - start)
    return start + torch.linalg.solve(total, pull)


@pytest.mark.parametrize("structure", ["gram", "kron", "diag"])
def test_against_the_dense_solve(family: tuple[State, list[Task]], structure: str) -> None:
    """With the base's precision and δ, and with α that differ, one of them below 0."""
    base, tasks = family
    fitted = [fit_laplace(t, structure=structure, prior_precision=0.1) for t in tasks]
    models = [weights_of(t) for t in tasks]
    first = fit_laplace(tasks[1], structure=structure, prior_precision=2.0)
    eye = torch.eye(len(flatten(base)), dtype=torch.float64)
    precisions = [data_part(q) for q in fitted]
    for alphas, delta in (([1.0, 0.5, 2.0], 0.3), ([1.0, 1.0, -0.05], 30.0)):
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
        truth = dense_merge(base, models, precisions, alphas, data_part(first) + delta * eye)
        assert relative(flatten(merged), truth) < EXACT


def shrunk_block(q: Posterior, block: Any, shrink: float, power: float) -> Tensor:
    """The dense precision of a layer with G^power, damped by a quarter of its mean, shrunk; weight
    first, then bias."""
    s = q.form.values[block.key][0] - 1e-9  # without the prior
    if block.left is None:
        left = torch.eye(len(s)).double()
    else:
        left = block.left[0]
        g = s.mean(1, keepdim=True) / block.inputs  # eigenvalues of G, as the mean over inputs
        s = s * torch.where(g > 1e-6 * g.max(), g, torch.inf) ** (power - 1)
    basis = torch.kron(left.contiguous(), block.right[0].contiguous())
    s = s + 0.25 * s.mean()
    joint = basis @ s.flatten().diag() @ basis.mT
    joint = shrink * joint + (1 - shrink) * joint.diagonal().diag()
    order = torch.arange(len(joint)).view(len(left), -1)
    order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
    return joint[order][:, order]


@pytest.mark.parametrize("structure", ["gram", "kron"])
@pytest.mark.parametrize(("shrink", "power"), [(0.9, 1.0), (0.0, 1.0), (0.7, 0.5), (1.0, 0.0)])
def test_shrinkage_and_power(structure: str, shrink: float, power: float) -> None:
    base = copied(mlp())
    _, fitted, models = fitted_mlps(structure, prior_precision=1e-9)
    merged = merge(
        base,
        models,
        precisions=fitted,
        shrink=shrink,
        power=power,
        delta=0.1,
        damping=0.25,
        dtype=torch.float64,
    )
    precisions = [
        torch.block_diag(*(shrunk_block(q, block, shrink, power) for block in q.form.blocks))
        for q in fitted
    ]
    start = 0.1 * torch.eye(len(precisions[0]), dtype=torch.float64)
    truth = dense_merge(base, models, precisions, [1.0] * 3, start)
    assert relative(flatten(merged), truth) < EXACT


@pytest.mark.parametrize("alpha", [1.0, -0.05])
def test_without_off_diagonals_factors_are_divided_entry_by_entry(alpha: float) -> None:
    """Solved at once, and exactly; where negative α leave too little, the average stands."""
    generator = torch.Generator().manual_seed(0)

    def normal_matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layout = MatrixShape(1, 5, 4, (5, 4))
    parts = []
    diagonals = []
    for weight in (1.0, alpha):
        right = torch.linalg.qr(normal_matrix(4, 4)).Q
        left = torch.linalg.qr(normal_matrix(5, 5)).Q
        values = normal_matrix(1, 5, 4).square()
        basis = Basis("w", None, layout, right[None], left[None])
        parts.append(Part(weight, Factors(basis, values, shrink=0.0), takes_base=False))
        dense = torch.kron(left, right) @ values.flatten().diag() @ torch.kron(left, right).mT
        diagonals.append(dense.diagonal().view(1, 5, 4))
    models = [normal_matrix(1, 5, 4) for _ in parts]
    merged, solved = solver(parts, None, 0.0, (1, 5, 4))(None, models, 0)
    first, second = diagonals
    total = first + alpha * second
    is_defined = total > 0.1 * (first + abs(alpha) * second)
    average = (models[0] + alpha * models[1]) / (1 + alpha)
    weighted = (first * models[0] + alpha * second * models[1]) / total
    torch.testing.assert_close(merged, torch.where(is_defined, weighted, average))
    assert (solved.iterations, solved.undefined) == (0, int((~is_defined).sum()))


def tied_tasks() -> list[Task]:
    """Three language models whose head is their embedding, and sequences for each."""
    tasks = []
    ids = torch.arange(60).view(6, 10).square() % 97
    for k in range(3):
        with seeded(k):
            model = randomised(TinyLM(tied=True, vocabulary=97)).double()
        rows = ids.roll(k, 0)[: 4 + k] // (1 + k)
        tasks.append(Task(model, (rows, rows), likelihood="causal_lm"))
    return tasks


def precision_of_rows(task: Task, shrink: float, damping: float) -> Tensor:
    """Σ h hᵀ of the head's inputs, shrunk, plus the count of each token; damped, ``[V, D, D]``."""
    captured: list[Tensor] = []
    hook = task.model.read.register_forward_pre_hook(lambda _, x: captured.append(x[0]))
    rows = task.fetch(torch.arange(task.n_data))[0]
    task.model(rows)
    hook.remove()
    inputs = torch.cat([x.detach().flatten(0, 1) for x in captured])
    moments = inputs.mT @ inputs
    moments = torch.lerp(moments.diagonal().diag(), moments, shrink)
    counts = torch.bincount(rows.flatten(), minlength=97).double()
    eye = torch.eye(4).double()
    precision = moments + counts[:, None, None] * eye
    return precision + damping * precision.diagonal(dim1=-2, dim2=-1).mean() * eye


@pytest.mark.parametrize(
    ("alphas", "options"),
    [
        ([1.0, 2.0], {}),
        ([1.0, 2.0], {"damping": 0.5, "shrink": 0.6}),
        ([1.0, -0.1], {"delta": 9.0}),
    ],
    ids=["plain", "damped and shrunk", "with the base's precision"],
)
def test_a_table_that_is_head_and_embedding(
    alphas: list[float],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The precision of row v is Σ h hᵀ of the head's inputs plus the count of token v, by hand."""
    tasks = tied_tasks()
    fitted = [fit_laplace(t, structure="gram", prior_precision=0.5) for t in tasks]
    places = [tmp_path / str(k) for k in range(3)]
    for q, place in zip(fitted, places, strict=True):
        q.save(place)
    base, *models = (weights_of(t) for t in tasks)
    has_base_precision = "delta" in options
    monkeypatch.setattr("blr_analysis.merging.layer_pieces.rows_at_once", lambda joint: 64)

    def merged_by(precisions: list[Any]) -> Tensor:
        settings: dict[str, Any] = {"dtype": torch.float64, "weights": alphas, **options}
        if has_base_precision:
            settings["base_precision"] = precisions[0]
        else:
            settings["method"] = "fisher"
        return merge(base, models, precisions=precisions[1:], **settings)["words.weight"]

    merged = merged_by(fitted)
    assert relative(merged_by(places), merged) < 1e-9

    first, *precisions = (
        precision_of_rows(task, options.get("shrink", 1.0), options.get("damping", 0.0))
        for task in tasks
    )
    if has_base_precision:
        start = first + options["delta"] * torch.eye(4).double()
    else:
        start = torch.zeros_like(first)
    zero = base["words.weight"]
    total = start.clone()
    pull: Any = 0.0
    for alpha, h, model in zip(alphas, precisions, models, strict=True):
        total = total + alpha * h
        pull = pull + alpha * (start + h) @ (model["words.weight"] - zero)[..., None]
    truth = zero + torch.linalg.solve(total, pull)[..., 0]
    assert relative(merged, truth) < 1e-7


@pytest.mark.parametrize("is_propagated", [False, True], ids=["stored", "by tasks"])
def test_a_tied_table_has_its_merged_weights_under_both_names(is_propagated: bool) -> None:
    """Modules name a tied tensor twice; their dicts of trainable parameters name it once."""
    tasks = tied_tasks()
    settings: dict[str, Any] = {"method": "fisher", "dtype": torch.float64}
    if is_propagated:
        settings["tasks"] = tasks
    else:
        settings["precisions"] = [fit_laplace(t, structure="gram") for t in tasks]
    expected = merge(None, [weights_of(t) for t in tasks], **settings)
    merged = merge(None, [t.model for t in tasks], **settings)
    assert torch.equal(merged["words.weight"], expected["words.weight"])
    assert torch.equal(merged["read.weight"], expected["words.weight"])
    tasks[0].model.load_state_dict(merged)


def test_without_damping_the_solution_nearest_to_the_average() -> None:
    """A softmax ignores a constant that is added to all logits, so that G is singular."""
    _, fitted, models = fitted_mlps("kron", prior_precision=1.0)
    names = ("2.weight", "2.bias")
    merged = merge(
        None, models, precisions=fitted, method="fisher", damping=0.0, dtype=torch.float64
    )
    size = sum(merged[n].numel() for n in names)
    precisions = [data_part(q)[-size:, -size:] for q in fitted]
    rows = [torch.cat([m[n].flatten() for n in names]).double() for m in models]
    average = torch.stack(rows).mean(0)
    pull = sum(h @ (w - average) for h, w in zip(precisions, rows, strict=True))
    nearest = average + torch.linalg.pinv(sum(precisions), rtol=1e-6, hermitian=True) @ pull
    assert relative(torch.cat([merged[n].flatten() for n in names]), nearest) < 1e-4


@pytest.mark.parametrize("structure", ["gram", "kron"])
def test_equal_precisions_are_the_average(family: tuple[State, list[Task]], structure: str) -> None:
    """Also where they are singular: fewer examples than inputs."""
    base, tasks = family
    two_examples = Task(tasks[0].model, tuple(part[:2] for part in tasks[0].fetch(torch.arange(9))))
    for task in (tasks[0], two_examples):
        q = fit_laplace(task, structure=structure, prior_precision=0.5)
        models = [weights_of(t) for t in tasks]
        merged = merge(
            base, models, precisions=[q] * 3, method="fisher", trust=True, dtype=torch.float64
        )
        average = torch.stack([flatten(m) for m in models]).mean(0)
        plain = {n for n in base if n in getattr(q.form, "plain", {})}
        truths = unflatten(average, base)
        for name, ours in merged.items():
            has_precision = name not in plain or float(q.form.values[name].min()) > 0.51
            if has_precision:
                assert relative(ours, truths[name]) < EXACT, name


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
    first = nn.Linear(3, 2, bias=False).double()
    second = nn.Linear(3, 2, bias=False).double()
    x = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).double()
    tasks = [Task(m, (x * k, torch.tensor([0, 1]))) for m, k in ((first, 1.0), (second, 3.0))]
    fitted = [fit_laplace(t, structure="gram") for t in tasks]
    models = [weights_of(t) for t in tasks]
    merged = merge(None, models, precisions=fitted, method="fisher", dtype=torch.float64)["weight"]
    a, b = (m["weight"] for m in models)
    assert relative(merged[:, :2], (a + 9 * b)[:, :2] / 10) < 1e-5
    assert relative(merged[:, 2], (a + b)[:, 2] / 2) < 1e-12


@pytest.mark.parametrize(("count", "noted"), [(3, True), (300, False)])
def test_moments_of_few_examples_are_shrunk_and_said(
    count: int, noted: bool, tmp_path: Path
) -> None:
    """They shrink by the variance of their mean over its square; 3 rows give singular moments."""
    torch.manual_seed(0)
    first = nn.Linear(4, 2, bias=False).double()
    second = nn.Linear(4, 2, bias=False).double()
    rows = [normal(count, 4), normal(count, 4, seed=1).cumsum(1)]
    pairs = zip((first, second), rows, strict=True)
    tasks = [Task(m, (x, torch.arange(count) % 2)) for m, x in pairs]
    fitted = [fit_laplace(t, structure="gram") for t in tasks]
    off_diagonal = ~torch.eye(4, dtype=torch.bool)
    shrunk = []
    for x in rows:
        products = x[:, :, None] * x[:, None, :]
        variance = products.var(0)[off_diagonal].sum() / count
        factor = 1 - variance / products.mean(0)[off_diagonal].square().sum()
        shrunk.append(torch.where(off_diagonal, factor.clamp_min(0), 1.0) * products.sum(0))
    models = [weights_of(t) for t in tasks]
    w = [m["weight"] for m in models]

    def regmean(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve(a + b, w[0] @ a + w[1] @ b, left=False)

    propagated = regmean(*shrunk)
    stored = propagated if noted else regmean(*(x.mT @ x for x in rows))
    folders, places = on_disk(tmp_path, models, fitted)
    fisher: dict[str, Any] = {"method": "fisher", "dtype": torch.float64}
    report = merge(None, folders, precisions=places, out=tmp_path / "out", **fisher)
    assert relative(Folder.open(report.folder).tensor("weight"), stored) < EXACT
    assert any("shrink as measured" in line for line in outcome(report)) == noted
    by_tasks = merge(None, models, tasks=tasks, **fisher)["weight"]
    assert relative(by_tasks, propagated) < EXACT
    by_precisions = merge(None, models, precisions=fitted, **fisher)["weight"]
    assert relative(by_precisions, stored) < EXACT


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
        fields = {"kind": "fisher_mc", "definition": "ones", "n_data": 3}
        write_precision(place / "precision", curved, **fields, model=place)
    stored = [p / "precision" for p in places]
    merge(None, places, precisions=stored, method="fisher", out=tmp_path / "out")
    swapped: dict[str, Any] = {"precisions": stored[::-1], "method": "fisher"}
    with pytest.raises(PosteriorError, match=r"swapped.*trust"):
        merge(None, places, **swapped, out=tmp_path / "trusted")
    merge(None, places, **swapped, out=tmp_path / "trusted", trust=True)


def test_threads_and_memory_do_not_matter() -> None:
    """A layer of many rows is merged in pieces; the refusal of too little memory names a bound."""
    tasks = []
    for t in range(2):
        with seeded(t):
            model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 700), nn.Linear(700, 5))
        tasks.append(Task(model, (t + normal(150, 100).float(), torch.arange(150) % 5)))
    fitted = [fit_laplace(task, structure="gram") for task in tasks]
    assert all(q.form.basis_shapes()["1.weight"] == (1, 700, 101) for q in fitted)
    models = [weights_of(task) for task in tasks]
    arguments: dict[str, Any] = {"precisions": fitted, "method": "fisher"}
    with pytest.raises(InputError, match="at least") as refusal:
        merge(None, models, **arguments, max_memory=2**17)
    least = int(str(refusal.value).rsplit(" ", 1)[1])
    merged = merge(None, models, **arguments, threads=4, max_memory=2**32)
    small = merge(None, models, **arguments, max_memory=least)
    assert all(torch.equal(merged[n], t) for n, t in small.items())


@pytest.fixture(scope="module")
def two_tasks() -> list[Task]:
    model, x, classes = CASES["mlp"]()
    return tasks_of(model, x, classes, count=2)


@pytest.fixture(scope="module")
def posteriors(two_tasks: list[Task]) -> dict[str, Posterior]:
    """Posteriors of the first task by structure, one of another model, and one with NaN."""
    task = two_tasks[0]
    fitted = {s: fit_laplace(task, structure=s) for s in ("gram", "diag", "lowrank", "kron")}
    fitted["other"] = fit_laplace(Task(mlp(hidden=6), task.dataset.tensors), structure="gram")
    fitted["bad"] = copy.deepcopy(fitted["gram"])
    next(iter(fitted["bad"].form.values.values())).fill_(float("nan"))
    return fitted


def heavier_bias(name: str) -> float:
    return 2.0 if "bias" in name else 1.0


@pytest.mark.parametrize(
    ("first", "second", "settings", "word"),
    [
        ("gram", "diag", {}, "alike"),
        ("gram", "other", {}, r"0\.weight"),
        ("gram", "bad", {}, "NaN"),
        ("lowrank", "lowrank", {}, "lowrank"),
        ("gram", "gram", {"damping": -1.0}, "damping"),
        ("kron", "kron", {"max_memory": 1000}, "memory"),
        ("gram", "gram", {"weights": [heavier_bias, 1.0]}, "same weights"),
    ],
)
def test_precisions_that_do_not_fit(
    two_tasks: list[Task],
    posteriors: dict[str, Posterior],
    first: str,
    second: str,
    settings: dict[str, Any],
    word: str,
) -> None:
    models = [weights_of(task) for task in two_tasks]
    precisions = [posteriors[first], posteriors[second]]
    with pytest.raises(BLRError, match=word):
        merge(None, models, precisions=precisions, method="fisher", trust=True, **settings)
