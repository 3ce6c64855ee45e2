"""The default method: an average by precisions that are balanced and damped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from models import mlp, normal
from models_on_disk import State, curved, near, state, write_model
from safetensors.torch import load_file
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.files import Folder
from blr_analysis.merging.auto import by_precisions

WEIGHTS = [0.7, 1.0, 0.4]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def family() -> dict[str, Any]:
    """A base, three models and their precisions."""
    base = state(0)
    models = [near(base, t) for t in (1, 2, 3)]
    return {"base": base, "models": models, "precisions": [curved(t) for t in (1, 2, 3)]}


def balanced_average(models: list[State], precisions: list[State], power: float = 1.0) -> State:
    """Σ α (H / mean H + 3) θ / Σ α (H / mean H + 3), tensor by tensor in float64."""
    merged = {}
    for name in models[0]:
        total = torch.zeros_like(models[0][name], dtype=torch.float64)
        weighted = torch.zeros_like(total)
        for weight, model, precision in zip(WEIGHTS, models, precisions, strict=True):
            h = precision[name].double() ** power
            share = weight * (h / h.mean() + 3)
            total += share
            weighted += share * model[name].double()
        merged[name] = weighted / total
    return merged


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_diagonals_are_balanced_by_the_mean_of_each_tensor(
    family: dict[str, Any], power: float
) -> None:
    merged = blr.merge(**family, weights=WEIGHTS, power=power, dtype=torch.float64)
    truth = balanced_average(family["models"], family["precisions"], power)
    for name, value in truth.items():
        torch.testing.assert_close(merged[name].double(), value, rtol=1e-6, atol=1e-7)


def test_folders_pieces_and_threads_give_the_same(family: dict[str, Any], tmp_path: Path) -> None:
    folders = [
        write_model(tmp_path / f"ft{t}", model, precision=h)
        for t, (model, h) in enumerate(zip(family["models"], family["precisions"], strict=True))
    ]
    base = write_model(tmp_path / "base", family["base"])
    report = blr.merge(
        base,
        folders,
        precisions=[folder / "precision" for folder in folders],
        weights=WEIGHTS,
        threads=3,
        out=tmp_path / "out",
    )
    written = Folder.open(report.folder).tensors()
    memory = blr.merge(**family, weights=WEIGHTS)
    assert all(torch.equal(written[name], memory[name]) for name in memory)


def test_a_long_tensor_has_one_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    count = 2**19 + 77
    models = [{"w": torch.randn(count, generator=generator)} for _ in WEIGHTS]
    precisions = [{"w": torch.rand(count, generator=generator)} for _ in WEIGHTS]
    truth = balanced_average(models, precisions)["w"]
    for limits in ({"threads": 1}, {"threads": 3, "max_memory": 60_000_000}):
        merged = blr.merge(None, models, precisions=precisions, weights=WEIGHTS, **limits)
        torch.testing.assert_close(merged["w"].double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"delta": 0.3},
        {"base_precision": curved(4)},
        {"weights": [1.0, 1.0, -0.2]},
        {"weights": [1.0, 1.0, np.float32(-0.2)]},
        {"weights": [1.0, 1.0, lambda name: -0.2 if name == "scale" else 1.0]},
    ],
    ids=["delta", "base_precision", "a negative weight", "of NumPy", "for one tensor"],
)
def test_where_the_formula_is_asked_for_it_stands(
    family: dict[str, Any], changes: dict[str, Any]
) -> None:
    merged = blr.merge(**family, **changes)
    formula = blr.merge(**family, **changes, method="gradient_matching")
    assert all(torch.equal(merged[name], formula[name]) for name in formula)


def test_where_nobody_has_a_precision_the_average_stands(family: dict[str, Any]) -> None:
    nothing = [{name: torch.zeros_like(h) for name, h in p.items()} for p in family["precisions"]]
    merged = blr.merge(family["base"], family["models"], precisions=nothing, weights=WEIGHTS)
    average = blr.merge(None, family["models"], method="linear", weights=WEIGHTS)
    for name, value in average.items():
        torch.testing.assert_close(merged[name], value)


def test_auto_without_data(family: dict[str, Any]) -> None:
    """It is the default method where there are precisions, and the average elsewhere."""
    merged = blr.merge(**family, method="auto")
    default = blr.merge(**family)
    assert all(torch.equal(merged[name], default[name]) for name in default)
    assert "no data" in repr(merged.choice)
    bare = blr.merge(family["base"], family["models"], method="auto")
    average = blr.merge(None, family["models"], method="linear")
    assert bare.choice.name == "average"
    assert all(torch.equal(bare[name], average[name]) for name in average)


@pytest.mark.parametrize("with_precisions", [True, False])
def test_auto_without_data_in_a_recipe(
    family: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    with_precisions: bool,
) -> None:
    """No task has to be read, so that models of any architecture are merged."""
    lines = ["merge_method: auto", "base_model: base", "models:"]
    write_model(tmp_path / "base", family["base"])
    for t, (model, h) in enumerate(zip(family["models"], family["precisions"], strict=True)):
        write_model(tmp_path / f"ft{t}", model, precision=h if with_precisions else None)
        lines.append(f"  - model: ft{t}")
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("\n".join(lines))
    code, _, errors = run(capsys, "merge", recipe, tmp_path / "out")
    assert code == 0, errors
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for name in merged:
        truth = torch.stack([model[name] for model in family["models"]]).mean(0)
        if with_precisions:
            truth = blr.merge(**family)[name]
        torch.testing.assert_close(merged[name], truth)


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Models trained on inputs of different directions, and data that they have not seen."""
    teacher = mlp(seed=5)
    base = mlp(seed=1)
    tasks = []
    unseen = []
    for t in range(2):
        scale = torch.tensor([1.0, 1.0, 0.1, 0.1]).roll(2 * t)
        x = normal(400, 4, seed=t) * scale
        y = teacher(3 * x).argmax(1)
        model = copy.deepcopy(base)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[:200]), y[:200]).backward()
            optimizer.step()
        tasks.append(blr.Task(model, (x[:200], y[:200])))
        unseen.append((x[200:], y[200:]))
    return {"base": base, "tasks": tasks, "unseen": unseen}


def losses(model: nn.Module, merged: State, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    model = copy.deepcopy(model)
    model.load_state_dict(merged)
    with torch.no_grad():
        parts = [nn.functional.cross_entropy(model(x), y, reduction="none") for x, y in data]
    return torch.cat(parts)


@pytest.mark.parametrize("structure", ["diag", "gram", "kron"])
def test_it_does_not_lose_to_the_average(trained: dict[str, Any], structure: str) -> None:
    models = [task.model for task in trained["tasks"]]
    precisions = [blr.fit_laplace(task, structure=structure) for task in trained["tasks"]]
    default = blr.merge(trained["base"], models, precisions=precisions)
    average = blr.merge(None, models, method="linear")
    gain = losses(trained["base"], average, trained["unseen"])
    gain = gain - losses(trained["base"], default, trained["unseen"])
    standard_error = gain.std() / len(gain) ** 0.5
    assert float(gain.mean()) > -float(standard_error)


def inputs_precision(q: blr.Posterior, key: str, damping: float) -> Tensor:
    """A / mean(A) + d 1 in float64, A the mean of a layer's dense H over its outputs."""
    block = next(block for block in q.form.blocks if block.key == key)
    values = q.form.values[key][0].double() - q.prior.numbers(q.mean)[key]
    n_outputs = len(q.mean[key])
    left = torch.eye(n_outputs) if block.left is None else block.left[0]
    basis = torch.kron(left.double().contiguous(), block.right[0].double().contiguous())
    dense = basis @ values.expand(n_outputs, -1).flatten().diag() @ basis.mT
    n_inputs = values.shape[-1]
    blocks = dense.view(n_outputs, n_inputs, n_outputs, n_inputs)
    a = blocks.diagonal(dim1=0, dim2=2).mean(-1)
    return a / a.diagonal().mean() + damping * torch.eye(n_inputs).double()


@pytest.mark.parametrize(
    ("structure", "settings", "damping"),
    [
        ("gram", {}, 10.0),
        ("kron", {}, 3.0),
        ("gram", {"damping": 0.5}, 0.5),
        ("kron", {"damping": 0.5}, 0.5),
    ],
)
def test_of_factors_the_inputs_moments_are_taken(
    trained: dict[str, Any], structure: str, settings: dict[str, float], damping: float
) -> None:
    models = [task.model for task in trained["tasks"]]
    precisions = [blr.fit_laplace(task, structure=structure) for task in trained["tasks"]]
    merged = blr.merge(None, models, precisions=precisions, dtype=torch.float64, **settings)
    for layer in ("0", "2"):
        top: Any = 0.0
        bottom: Any = 0.0
        for model, q in zip(models, precisions, strict=True):
            linear = model.get_submodule(layer)
            joint = torch.cat([linear.weight, linear.bias[:, None]], 1).detach().double()
            a = inputs_precision(q, f"{layer}.weight", damping)
            top = top + joint @ a
            bottom = bottom + a
        truth = torch.linalg.solve(bottom, top, left=False)
        for name, value in (("weight", truth[:, :-1]), ("bias", truth[:, -1])):
            torch.testing.assert_close(merged[f"{layer}.{name}"].double(), value, **CLOSE)


@pytest.fixture(scope="module")
def wide() -> list[blr.Task]:
    """Models with 4 inputs and 30 hidden units, and 12 examples for each."""
    tasks = []
    for t in range(2):
        torch.manual_seed(t)
        model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3))
        tasks.append(blr.Task(model, (normal(12, 4, seed=t), torch.arange(12) % 3)))
    return tasks


@pytest.mark.parametrize("structure", ["gram", "kron"])
def test_layers_with_more_inputs_than_examples(wide: list[blr.Task], structure: str) -> None:
    """ "gram" is averaged there, and says so; "kron" takes its balanced diagonal."""
    models = [task.model for task in wide]
    precisions = [blr.fit_laplace(task, structure=structure) for task in wide]
    name = "2.weight"
    weights = [model.get_parameter(name).detach().double() for model in models]
    if structure == "gram":
        with pytest.warns(UserWarning, match="2 tensors are averaged"):
            merged = blr.merge(None, models, precisions=precisions)
        truth = torch.stack(weights).mean(0)
    else:
        merged = blr.merge(None, models, precisions=precisions)
        shares = []
        for q in precisions:
            block = next(block for block in q.form.blocks if block.key == name)
            values = q.form.values[name][0].double() - q.prior.numbers(q.mean)[name]
            h = block.left[0].double() ** 2 @ values @ block.right[0].double().mT ** 2
            shares.append((h / h.mean() + 3)[:, :-1])
        weighted = [share * weight for share, weight in zip(shares, weights, strict=True)]
        truth = torch.stack(weighted).sum(0) / torch.stack(shares).sum(0)
    torch.testing.assert_close(merged[name].double(), truth, **CLOSE)
    whole = blr.merge(None, models, precisions=precisions, shrink=1.0)
    assert not torch.allclose(whole[name], merged[name], rtol=1e-3)


@pytest.mark.parametrize("structure", ["diag", "gram", "kron"])
def test_large_damping_is_the_average_whatever_the_sizes(
    trained: dict[str, Any], structure: str
) -> None:
    """A model with nine times the other's data weighs no more than they do."""
    models = [task.model for task in trained["tasks"]]
    x, y = trained["tasks"][0].fetch(torch.arange(200))
    many = blr.Task(models[0], (torch.cat([x] * 9), torch.cat([y] * 9)))
    tasks = [many, trained["tasks"][1]]
    precisions = [blr.fit_laplace(task, structure=structure) for task in tasks]
    merged = blr.merge(None, models, precisions=precisions, damping=1e6)
    average = blr.merge(None, models, method="linear")
    for name, value in average.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-4, atol=1e-5)


def test_what_the_user_sets_stays() -> None:
    job = blr.merging.Job("fisher", (), damping=0.0, normalize=False)
    assert by_precisions(job).damping == 0.0
    assert by_precisions(job).normalize is False
