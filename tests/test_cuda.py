"""What a CUDA device computes is what the CPU computes: engine, analyses, optimizers, files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import optimizers
import pytest
import torch
from models import classes, minimised, mlp
from readings import task_of, ways
from tiny_lm import sequences, tiny_lm
from tiny_lm import task_of as lm_task
from torch import Tensor, nn
from zoo import CASES

import blr_analysis as blr
from blr_analysis.sensitivity.token_scores import token_sensitivity

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CLOSE = 1e-9  # float64 on both sides: sums in another order
N = 60


def close(there: Any, here: Any, tolerance: float = CLOSE) -> None:
    there, here = (torch.as_tensor(v).double().cpu() for v in (there, here))
    gap = float((there - here).norm() / here.norm().clamp_min(1e-30))
    assert gap < tolerance, f"{gap:.1e}"


def table(device: str, dtype: torch.dtype = torch.float64) -> blr.Task:
    """A small classifier near its minimum, and its data, on one device."""
    x, y = classes(1, n=N)
    model = minimised(mlp(), (x, y), 1.0, steps=60)
    data = (x.to(device, dtype), y.to(device))
    return blr.Task(model.to(device, dtype), data, metadata={"half": ["a", "b"] * (N // 2)})


def fit(task: blr.Task, structure: str = "kron", **options: Any) -> blr.Posterior:
    options |= {"rank": 12} if structure == "lowrank" else {}
    return blr.fit_laplace(task, structure=structure, prior_precision=1.0, **options)


@pytest.mark.parametrize("name", CASES)
def test_every_layer(name: str) -> None:
    here = task_of(CASES[name](), "gaussian")
    model = copy.deepcopy(here.model).cuda()
    data = tuple(t.cuda() for t in here.dataset.tensors)
    there = blr.Task(model, data, likelihood="gaussian", forward=here.forward)
    q = fit(here, "diag")
    p = fit(there, "diag")
    # 3e-9 was measured with weight normalisation, whose CUDA kernel is torch's own.
    tolerance = 1e-8 if "weight_norm" in name else CLOSE
    for parameter in q.mean:
        close(p.variance(parameter), q.variance(parameter), tolerance)
    scores = blr.sensitivity(here, q)
    actual = blr.sensitivity(there, p)
    for field in ("error", "variance", "self_influence"):
        close(getattr(actual, field), getattr(scores, field), tolerance)


def test_convolutions_in_single_precision() -> None:
    """cuDNN takes TF32 for them by default; they are read by their rules all the same."""
    layers = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(128, 3)
    model = nn.Sequential(*layers)
    x = torch.randn(20, 2, 8, 8)
    y = torch.arange(20) % 3
    there = blr.Task(copy.deepcopy(model).cuda(), (x.cuda(), y.cuda()))
    here = blr.Task(model.double(), (x, y))
    assert set(ways(there).values()) == {"convolution", "linear"}
    scores = [blr.sensitivity(t, fit(t, "diag")) for t in (there, here)]
    close(scores[0].variance, scores[1].variance, 0.01)


def left_out(task: blr.Task, q: blr.Posterior, _: Path) -> Tensor:
    """By a posterior that lies elsewhere."""
    scores = blr.sensitivity(task, q.to("cpu"))
    return torch.cat([scores.deviation, blr.leave_one_out(task, q).logits.flatten()])


def indexed(task: blr.Task, q: blr.Posterior, place: Path) -> blr.Index:
    """With numbers that are not rounded to bytes."""
    return blr.Index.build(task, q, place, dtype="float32")


def read_back(task: blr.Task, q: blr.Posterior, place: Path) -> Any:
    """A posterior that is saved there is read anywhere."""
    q.save(place)
    return blr.sensitivity(table("cpu"), blr.Posterior.load(place)).deviation


ANALYSES: list[tuple[Callable[..., Any], float]] = [
    (
        lambda t, q, _: (
            blr.what_if(t, q, remove=range(0, N, 2), evaluate=t, solver="posterior").nll
        ),
        1e-6,
    ),
    (lambda t, q, _: blr.what_if(t, q, remove=[0, 5, 9], solver="cg").nll, 1e-6),
    (lambda t, q, _: blr.what_if_each(t, q, by="half", evaluate=t)["nll_after"].to_numpy(), 1e-6),
    (lambda t, q, _: blr.influence(t, q, t, normalize=True).as_subclass(Tensor), 1e-6),
    (lambda t, q, _: blr.influence(t, q, t, k=3).helpful_values, 1e-6),
    (lambda t, q, _: blr.suspicious(t, q).unfamiliarity, 1e-6),
    (lambda t, q, _: blr.calibrate(t, q).variance("0.weight"), 1e-6),
    (lambda t, q, _: blr.select_prior_precision(t, [0.3, 1.0]).table.iloc[:, 1].to_numpy(), 1e-6),
    (lambda t, q, _: q.predict(t, draws=3000).nll, 0.05),  # draws of another generator
    (lambda t, q, place: indexed(t, q, place).influence(t).as_subclass(Tensor), 1e-5),
    (
        lambda t, q, _: blr.merge(
            q.mean, [{n: p * k for n, p in q.mean.items()} for k in (2.0, 0.3)], method="ties"
        )["0.weight"].cpu(),
        CLOSE,
    ),
    (read_back, CLOSE),
]
ROWS = [(call, "kron", torch.float64, tolerance) for call, tolerance in ANALYSES]
ROWS += [
    (left_out, s, torch.float64, 1e-6 if s == "lowrank" else CLOSE)
    for s in ("kron", "diag", "full", "lowrank")
]
ROWS += [
    (lambda t, q, _: blr.sensitivity(t, q).variance, "diag", dtype, 0.05)
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("call", "structure", "dtype", "tolerance"), ROWS)
def test_every_analysis(
    call: Any, structure: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    there, here = (
        torch.as_tensor(call(task, fit(task, structure), tmp_path / task.device.type))
        for task in (table("cuda", dtype), table("cpu"))
    )
    assert there.device.type == "cpu"
    close(there, here, tolerance)


@pytest.mark.parametrize("tied", [False, True])
def test_language_models(tied: bool) -> None:
    results = []
    for device in ("cuda", "cpu"):
        task = lm_task(tiny_lm(tied=tied).to(device), sequences(12))
        q = fit(task, "diag", curvature="empirical_fisher")
        influence = blr.influence(task, q, task).as_subclass(Tensor)
        tokens = token_sensitivity(task, q).table.select_dtypes("number").to_numpy()
        results.append((blr.sensitivity(task, q).self_influence, influence, tokens))
    for there, here in zip(*results, strict=True):
        close(there, here)


@pytest.mark.parametrize("row", optimizers.ROWS)
def test_optimizers_train_there(row: str, tmp_path: Path) -> None:
    """Ten steps; the state saves, loads, and goes on the same."""
    x, y = table("cuda", torch.float32).dataset.tensors

    def made(seed: int) -> tuple[nn.Module, Any]:
        model = mlp().to("cuda", torch.float32)
        return model, optimizers.ROWS[row](model, N, torch.Generator("cuda").manual_seed(seed))

    def train(model: nn.Module, step: Any, count: int) -> None:
        draws: list[Any] = [partial(getattr(step, "sampled_params", nullcontext), True)]
        draws += [step.adversarial_params] if row == "BSAM" else []
        for _ in range(count):
            for draw in draws:
                with draw():
                    step.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
            step.step()

    model, step = made(3)
    other, again = made(5)
    train(model, step, 10)
    assert all(bool(p.isfinite().all()) and p.is_cuda for p in model.parameters())
    torch.save({"m": model.state_dict(), "o": step.state_dict()}, tmp_path / "c.pt")
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    other.load_state_dict(saved["m"])
    again.load_state_dict(saved["o"])
    train(model, step, 3)
    train(other, again, 3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
