"""Gradient mismatch against plain autograd, and against quadratics where it is known."""

from __future__ import annotations

import copy
import math
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp
from models_on_disk import State, copied, examples, write_model
from tiny_lm import tiny_lm
from torch import Tensor, nn
from torch.nn import functional as F

from blr_analysis.errors import InputError, ModelError, StorageError
from blr_analysis.merging import gradient_mismatch, merge
from blr_analysis.posterior import Posterior
from blr_analysis.task import Task


def average(*states: State) -> State:
    return {n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]}


def loaded(model: nn.Module, weights: State) -> nn.Module:
    merged = copy.deepcopy(model)
    merged.load_state_dict(weights)
    return merged


def by_autograd(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, float, float]:
    """Gradient of the summed loss as one vector, the loss, and the accuracy."""
    f = model(x)
    loss = F.cross_entropy(f, y, reduction="sum")
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    accuracy = float((f.argmax(1) == y).double().mean())
    return torch.cat([g.flatten() for g in grads]), float(loss.detach()), accuracy


def flat(weights: State) -> Tensor:
    return torch.cat([t.flatten() for t in weights.values()])


@pytest.mark.parametrize("batch_size", [256, 5, 1])
def test_every_number_by_plain_autograd(batch_size: int) -> None:
    models = {"a": mlp(seed=1), "b": mlp(seed=2)}
    data = {"a": examples(3), "b": examples(4, 11)}
    test_data = {"a": examples(5, 9), "b": examples(6, 8)}
    tasks = {k: Task(models[k], data[k], batch_size=batch_size) for k in models}
    tests = {k: Task(mlp(seed=9), test_data[k], batch_size=batch_size) for k in ("b", "a")}
    merged = average(*map(copied, models.values()))
    curved = {k: {n: torch.rand_like(t) + 0.1 for n, t in merged.items()} for k in models}
    before = {k: copied(m) for k, m in models.items()}
    actual = gradient_mismatch(tasks, merged, precisions=curved, tests=tests, progress=False)
    table = actual.table.set_index("task")
    assert list(table.index) == ["a", "b"]
    assert set(table["merge"]) == {"merged"}
    total: Any = 0
    for k, model in models.items():
        merged_model = loaded(model, merged)
        g, loss, accuracy = by_autograd(model, *data[k])
        g_merged, loss_merged, accuracy_merged = by_autograd(merged_model, *data[k])
        total = total + g_merged
        n = len(data[k][1])
        step = flat(merged) - flat(before[k])
        h = flat(curved[k])
        _, test_loss, test_accuracy = by_autograd(model, *test_data[k])
        _, test_loss_merged, test_accuracy_merged = by_autograd(merged_model, *test_data[k])
        n_test = len(test_data[k][1])
        change = g_merged - g
        gap = loss_merged - loss
        expected = {
            "n_data": n,
            "mismatch": float(change.norm()),
            "mismatch_per_example": float(change.norm()) / n,
            "mismatch_in_metric": float((change**2 / h).sum().sqrt()),
            "gradient_own": float(g.norm()),
            "gradient_merged": float(g_merged.norm()),
            "distance": float(step.norm()),
            "gap": gap,
            "gap_per_example": gap / n,
            "gap_by_gradient": float((g + g_merged) @ step) / 2,
            "gap_by_precision": float(g @ step + (h * step**2).sum() / 2),
            "nll_own": loss / n,
            "nll_merged": loss_merged / n,
            "accuracy_own": accuracy,
            "accuracy_merged": accuracy_merged,
            "test_nll_own": test_loss / n_test,
            "test_nll_merged": test_loss_merged / n_test,
            "test_accuracy_own": test_accuracy,
            "test_accuracy_merged": test_accuracy_merged,
        }
        assert set(expected) == set(table.columns) - {"merge"}
        for column, value in expected.items():
            assert table.loc[k, column] == pytest.approx(value, rel=1e-10, abs=1e-12), column
        assert all(torch.equal(t, before[k][n]) for n, t in model.state_dict().items())
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert actual.joint["merged"] == pytest.approx(float(total.norm()), rel=1e-10)


def linear_tasks(count: int, prior: float) -> tuple[list[Task], list[State], list[State]]:
    """Regressions whose features are orthogonal, so that XᵀX is diagonal; H_t; θ_t from base 0."""
    tasks = []
    curved = []
    models = []
    for t in range(count):
        g = torch.Generator().manual_seed(t)
        q, _ = torch.linalg.qr(torch.randn(12, 3, generator=g, dtype=torch.float64))
        x = q * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        y = torch.randn(12, generator=g, dtype=torch.float64)
        h = (x**2).sum(0)
        model = nn.Linear(3, 1, bias=False).double()
        model.load_state_dict({"weight": ((x.T @ y) / (h + prior))[None]})
        tasks.append(Task(model, (x, y), likelihood="gaussian"))
        curved.append({"weight": h[None]})
        models.append(copied(model))
    return tasks, curved, models


@pytest.mark.parametrize("prior", [0.0, 0.8])
def test_gradient_matching_of_linear_regressions_is_the_optimum_of_all(prior: float) -> None:
    tasks, curved, models = linear_tasks(3, prior)
    base = {"weight": torch.zeros(1, 3, dtype=torch.float64)}
    options: dict[str, Any] = dict(dtype=torch.float64)
    merges = {
        "matching": merge(base, models, precisions=curved, delta=prior, **options),
        "arithmetic": merge(base, models, method="task_arithmetic", **options),
    }
    xs = torch.cat([task.dataset.tensors[0] for task in tasks])
    ys = torch.cat([task.dataset.tensors[1] for task in tasks])
    best = torch.linalg.solve(xs.T @ xs + prior * torch.eye(3).double(), xs.T @ ys)
    torch.testing.assert_close(merges["matching"]["weight"][0], best, rtol=0, atol=1e-12)
    actual = gradient_mismatch(tasks, merges, precisions=curved)
    # At the optimum the gradients of the tasks and of the prior cancel …
    assert actual.joint["matching"] == pytest.approx(prior * float(best.norm()), abs=1e-12)
    assert actual.joint["arithmetic"] > 1
    # … and the gradient of each task is H_t (θ* − θ_t).
    rows = actual.table[actual.table["merge"] == "matching"]
    for mismatch, h, model in zip(rows.mismatch, curved, models, strict=True):
        gradient = h["weight"][0] * (best - model["weight"][0])
        assert mismatch == pytest.approx(float(gradient.norm()), rel=1e-10)
    totals = actual.totals()
    assert totals["matching"] < totals["arithmetic"]
    assert "arithmetic: mismatch" in repr(actual)
    assert actual.totals("gap")["matching"] < actual.totals("gap")["arithmetic"]
    with pytest.raises(InputError, match="column"):
        actual.totals("task")


def test_the_tensors_share_the_gap_by_gradient() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    task = Task(model, (torch.randn(9, 3), torch.arange(9) % 2))
    home = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved = {name: p + 0.3 * torch.randn_like(p) for name, p in home.items()}
    result = gradient_mismatch(task, moved, models=[home])
    (row,) = result.rows
    (parts,) = result.tensors.values()
    assert parts.keys() == home.keys()
    assert sum(parts.values()) == pytest.approx(row["gap_by_gradient"], rel=1e-4)
    x, y = task.dataset.tensors
    slopes = []
    for weights in (home, moved):
        leaves = {name: p.clone().requires_grad_() for name, p in weights.items()}
        outputs = torch.func.functional_call(model, leaves, (x,))
        loss = torch.nn.functional.cross_entropy(outputs, y, reduction="sum")
        gradients = torch.autograd.grad(loss, [*leaves.values()])
        slopes.append(dict(zip(leaves, gradients, strict=True)))
    for name, part in parts.items():
        step = moved[name] - home[name]
        expected = sum(float((slope[name] * step).sum()) for slope in slopes) / 2
        assert part == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_for_quadratics_all_forecasts_are_the_gap() -> None:
    tasks, curved, models = linear_tasks(3, 0.0)
    table = gradient_mismatch(tasks, average(*models), precisions=curved).table
    assert min(table.gap) > 0.1
    in_metric = table.mismatch_in_metric**2 / 2
    for forecast in (table.gap_by_gradient, table.gap_by_precision, in_metric):
        assert forecast.tolist() == pytest.approx(table.gap.tolist(), rel=1e-10)


def test_a_posterior_foretells_by_its_data_part_and_measures_by_the_whole() -> None:
    tasks, curved, models = linear_tasks(2, 0.0)
    whole = [{n: t + 3.0 for n, t in h.items()} for h in curved]
    posteriors = [
        Posterior(m, s, prior_precision=3.0, n_data=12) for m, s in zip(models, whole, strict=True)
    ]
    merged = average(*models)
    actual = gradient_mismatch(tasks, merged, precisions=posteriors).table
    by_data = gradient_mismatch(tasks, merged, precisions=curved).table
    by_whole = gradient_mismatch(tasks, merged, precisions=whole).table
    assert actual.gap_by_precision.tolist() == pytest.approx(by_data.gap_by_precision.tolist())
    in_metric = by_whole.mismatch_in_metric.tolist()
    assert actual.mismatch_in_metric.tolist() == pytest.approx(in_metric)
    assert (by_data.gap_by_precision < by_whole.gap_by_precision).all()
    assert (by_data.mismatch_in_metric > by_whole.mismatch_in_metric).all()


def test_one_model_for_all_tasks_with_the_weights_named() -> None:
    models = [mlp(seed=1), mlp(seed=2)]
    data = [examples(3), examples(4)]
    apart = [Task(m, d) for m, d in zip(models, data, strict=True)]
    shared = mlp(seed=7)
    together = [Task(shared, d) for d in data]
    merged = average(*map(copied, models))
    expected = gradient_mismatch(apart, merged).table
    for weights in (list(map(copied, models)), models):
        actual = gradient_mismatch(together, merged, models=weights).table
        assert actual.drop(columns="merge").equals(expected.drop(columns="merge"))
    with pytest.raises(InputError, match="share one model"):
        gradient_mismatch(together, merged)


def test_several_merges_are_made_when_their_turn_comes_and_let_go_of() -> None:
    models = [mlp(seed=1), mlp(seed=2)]
    tasks = [Task(m, examples(3 + k)) for k, m in enumerate(models)]
    storages: list[weakref.ref] = []

    def mixed(share: float) -> State:
        assert all(ref() is None for ref in storages)
        first, second = map(copied, models)
        actual = {n: share * first[n] + (1 - share) * second[n] for n in first}
        storages.append(weakref.ref(actual["0.weight"].untyped_storage()))
        return actual

    merges = {f"{share}": partial(mixed, share) for share in (0.0, 0.5, 1.0)}
    table = gradient_mismatch(tasks, merges).table.set_index(["merge", "task"])
    assert list(table.index) == [(m, t) for m in merges for t in "12"]
    assert len(storages) == 3
    assert table.loc[("0.0", "2"), "mismatch"] == 0
    assert table.loc[("1.0", "1"), "mismatch"] == 0
    averaged = loaded(models[0], average(*map(copied, models)))
    expected = gradient_mismatch(tasks, averaged).table.mismatch.tolist()
    assert table.loc["0.5"].mismatch.tolist() == pytest.approx(expected, rel=1e-12)


def test_buffers_and_frozen_parameters_are_those_of_the_merge() -> None:
    def with_norm(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)
        model = nn.Sequential(*layers).double().train()
        model(torch.randn(30, 4, dtype=torch.float64) * seed)
        model[0].requires_grad_(False)
        return model.eval()

    models = [with_norm(1), with_norm(2)]
    data = [examples(3), examples(4)]
    tasks = [Task(m, d, batch_size=4) for m, d in zip(models, data, strict=True)]
    floats = average(*({n: t.double() for n, t in copied(m).items()} for m in models))
    merged = {n: t.to(models[0].state_dict()[n].dtype) for n, t in floats.items()}
    before = [copied(m) for m in models]
    table = gradient_mismatch(tasks, merged).table
    for k, (model, (x, y)) in enumerate(zip(models, data, strict=True)):
        g, loss, _ = by_autograd(model, x, y)
        g_merged, loss_merged, _ = by_autograd(loaded(model, merged), x, y)
        assert table.mismatch[k] == pytest.approx(float((g_merged - g).norm()), rel=1e-10)
        assert table.gap[k] == pytest.approx(loss_merged - loss, rel=1e-10)
        assert all(torch.equal(t, before[k][n]) for n, t in model.state_dict().items())
        parameters = {n: merged[n] for n, _ in model.named_parameters()}
        with_own_buffers = gradient_mismatch(tasks[k], parameters).table
        assert with_own_buffers.gap.item() != pytest.approx(table.gap[k])
    wrong = {**merged, "3.weight": merged["3.weight"] * math.nan}
    with pytest.raises(InputError, match="NaN"):
        gradient_mismatch(tasks, wrong)
    assert all(torch.equal(t, before[0][n]) for n, t in models[0].state_dict().items())
    models[0].train()
    with pytest.raises(ModelError, match=r"task '1'.*mixes examples"):
        gradient_mismatch(tasks, merged)


def test_sequences_with_tied_weights_under_either_name() -> None:
    x = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 1]])
    model = tiny_lm(1, tied=True)
    merged_model = tiny_lm(2, tied=True)
    f = merged_model(x).logits.detach()
    y = f.argmax(-1)  # three tokens right in one sequence, two wrong in the other
    y[1] = (y[1] + 1) % 6
    y[0, 3:] = -100
    y[1, 2:] = -100
    task = Task(model, (x, y), likelihood="tokens", batch_size=1)
    loss = float(F.cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum"))
    merged = copied(merged_model)
    step = flat(dict(merged_model.named_parameters())) - flat(dict(model.named_parameters()))
    for left_out in ("read.weight", "words.weight", None):
        stored = {n: t for n, t in merged.items() if n != left_out}
        (row,) = gradient_mismatch(task, stored).rows
        assert row["nll_merged"] == pytest.approx(loss / 2, rel=1e-10)
        assert row["accuracy_merged"] == pytest.approx(3 / 5)
        assert row["distance"] == pytest.approx(float(step.norm()))
    merged["read.weight"] += 1
    with pytest.raises(InputError, match=r"'words.weight' and 'read.weight' differ"):
        gradient_mismatch(task, merged)


def test_merges_in_folders(tmp_path: Path) -> None:
    models = [mlp(seed=1), mlp(seed=2)]
    tasks = [Task(m, examples(3 + k)) for k, m in enumerate(models)]
    folders = [write_model(tmp_path / str(k), copied(model)) for k, model in enumerate(models)]
    expected = gradient_mismatch(tasks, average(*map(copied, models))).table
    report = merge(None, folders, method="linear", dtype=torch.float64, out=tmp_path / "merged")
    for merged in (report, tmp_path / "merged", str(tmp_path / "merged" / "model.safetensors")):
        actual = gradient_mismatch(tasks, merged, models=folders).table
        assert actual.mismatch.tolist() == pytest.approx(expected.mismatch.tolist(), rel=1e-9)
    with pytest.raises(StorageError, match="nowhere"):
        gradient_mismatch(tasks, tmp_path / "nowhere")


MODELS = [mlp(seed=1), mlp(seed=2)]
TASKS = [Task(m, examples(3 + k)) for k, m in enumerate(MODELS)]
MERGED = average(*map(copied, MODELS))
CURVED = [{n: torch.ones_like(t) for n, t in MERGED.items()}] * 2
FROZEN = copy.deepcopy(MODELS[0]).requires_grad_(False)
LINEAR = nn.Linear(4, 3).double()


@pytest.mark.parametrize(
    ("tasks", "merged", "options", "word"),
    [
        ([], MERGED, {}, "at least one"),
        ({"a": MODELS[0]}, MERGED, {}, "task 'a' must be a blr_analysis.Task"),
        (TASKS, {}, {}, "at least one state dict"),
        (TASKS, {"x": lambda: None}, {}, r"merged \(x\) must be a state dict"),
        (TASKS, {**MERGED, "extra": torch.ones(2)}, {}, "'extra'"),
        (TASKS, {"0.weight": MERGED["0.weight"]}, {}, "lacks trainable"),
        (TASKS, {**MERGED, "0.bias": torch.ones(7)}, {}, r"\(7,\)"),
        (TASKS, {**MERGED, "0.bias": torch.ones(5).long()}, {}, "int64"),
        (TASKS, {**MERGED, "0.bias": MERGED["0.bias"] / 0}, {}, "NaN or inf"),
        (TASKS, MERGED, {"models": [copied(MODELS[0])]}, "one for each of 2"),
        (TASKS, MERGED, {"models": [MERGED, {"w": torch.ones(1)}]}, "fine-tuned model of task '2'"),
        (TASKS, MERGED, {"tests": TASKS[:1]}, "tests must hold one"),
        (TASKS, MERGED, {"precisions": CURVED[:1]}, "one for each of 2"),
        (TASKS, MERGED, {"precisions": [CURVED[0], {"w": torch.ones(1)}]}, "does not fit"),
        ([Task(FROZEN, examples(3))], MERGED, {}, "requires_grad"),
        (
            [Task(LINEAR, examples(3))],
            MERGED,
            {"models": [copied(LINEAR)]},
            "task '1'.*another model",
        ),
    ],
)
def test_bad_input(tasks: Any, merged: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        gradient_mismatch(tasks, merged, **options)
