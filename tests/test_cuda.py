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
from blr_analysis.sensitivity.tokens import token_sensitivity

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
    rank = 12 if structure == "lowrank" else None
    return blr.fit_laplace(task, structure=structure, prior_precision=1.0, rank=rank, **options)


def numbers(frame: Any) -> Any:
    return frame.select_dtypes("number").to_numpy()


@pytest.mark.parametrize("name", [name for name in CASES if name != "hugging_face"])
def test_every_layer(name: str) -> None:
    here = task_of(CASES[name](), "gaussian")
    model, data = copy.deepcopy(here.model).cuda(), tuple(t.cuda() for t in here.dataset.tensors)
    there = blr.Task(model, data, likelihood="gaussian", forward=here.forward)
    q, p = fit(here, "diag"), fit(there, "diag")
    # 3e-9 was measured with weight normalisation, whose CUDA kernel is torch's own.
    tolerance = 1e-8 if "weight_norm" in name else CLOSE
    for parameter in q.mean:
        close(p.variance(parameter), q.variance(parameter), tolerance)
    scores, found = blr.sensitivity(here, q), blr.sensitivity(there, p)
    for field in ("error", "variance", "self_influence"):
        close(getattr(found, field), getattr(scores, field), tolerance)


def test_convolutions_in_single_precision() -> None:
    """cuDNN takes TF32 for them by default; they are read by their rules all the same."""
    layers = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(128, 3)
    model, x, y = nn.Sequential(*layers), torch.randn(20, 2, 8, 8), torch.arange(20) % 3
    there = blr.Task(copy.deepcopy(model).cuda(), (x.cuda(), y.cuda()))
    here = blr.Task(model.double(), (x, y))
    assert set(ways(there).values()) == {"convolution", "linear"}
    scores = [blr.sensitivity(t, fit(t, "diag")) for t in (there, here)]
    close(scores[0].variance, scores[1].variance, 0.01)


ANALYSES: dict[str, Callable[[blr.Task, blr.Posterior], Any]] = {
    "what_if": lambda t, q: blr.what_if(
        t, q, remove=range(0, N, 2), evaluate=t, solver="posterior"
    ).nll,
    "what_if cg": lambda t, q: blr.what_if(t, q, remove=[0, 5, 9], solver="cg").nll,
    "what_if default": lambda t, q: blr.what_if(t, q, remove=[0, 5, 9]).nll,
    "what_if_each": lambda t, q: blr.what_if_each(
        t, q, by="half", evaluate=t
    )["nll_after"].to_numpy(),
    "influence": lambda t, q: blr.influence(t, q, t).as_subclass(Tensor),
    "influence normalised": lambda t, q: blr.influence(
        t, q, t, normalize=True
    ).as_subclass(Tensor),
    "top_influence": lambda t, q: blr.influence(t, q, t, k=3).helpful_values,
    "suspicious": lambda t, q: blr.suspicious(t, q).unfamiliarity,
    "calibrate": lambda t, q: blr.calibrate(t, q).variance("0.weight"),
    "select_prior_precision": lambda t, q: blr.select_prior_precision(
        t, [0.3, 1.0, 3.0]
    ).table.iloc[:, 1].to_numpy(),
    "predict": lambda t, q: q.predict(t, draws=3000).nll,
    "memory_map": lambda t, q: numbers(blr.memory_map(blr.sensitivity(t, q)).table),
    "posterior elsewhere": lambda t, q: blr.sensitivity(t, q.to("cpu")).deviation,
    "logits left out": lambda t, q: blr.leave_one_out(t, q).logits,
}  # fmt: skip
ROWS = [(name, "kron") for name in ANALYSES]
ROWS += [(name, s) for name in [*ANALYSES][-2:] for s in ("diag", "full", "lowrank")]


@pytest.mark.parametrize(("name", "structure"), ROWS)
def test_every_analysis(name: str, structure: str) -> None:
    there, here = (
        torch.as_tensor(ANALYSES[name](task, fit(task, structure)))
        for task in (table("cuda"), table("cpu"))
    )
    assert there.device.type == "cpu"
    tolerance = CLOSE if ROWS.index((name, structure)) >= len(ANALYSES) - 2 else 1e-6
    tolerance = 1e-6 if structure == "lowrank" else tolerance
    close(there, here, 0.05 if name == "predict" else tolerance)  # draws of another generator


@pytest.mark.parametrize("tied", [False, True])
def test_language_models(tied: bool) -> None:
    results = []
    for device in ("cuda", "cpu"):
        task = lm_task(tiny_lm(tied=tied).to(device), sequences(12))
        q = fit(task, "diag", curvature="empirical_fisher")
        influence = blr.influence(task, q, task).as_subclass(Tensor)
        tokens = numbers(token_sensitivity(task, q).table)
        results.append((blr.sensitivity(task, q).self_influence, influence, tokens))
    for there, here in zip(*results, strict=True):
        close(there, here)


def test_files(tmp_path: Path) -> None:
    """An index agrees; a posterior that is saved there is read anywhere."""
    found = []
    for device in ("cpu", "cuda"):
        task = table(device)
        q = fit(task)
        index = blr.Index.build(task, q, tmp_path / device)
        found.append(index.influence(task).as_subclass(Tensor))
    close(*found, 1e-5)
    q.save(tmp_path / "q.safetensors")
    read = blr.Posterior.load(tmp_path / "q.safetensors")
    close(blr.sensitivity(task, read).deviation, blr.sensitivity(task, q).deviation)


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

    (model, step), (other, again) = made(3), made(5)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    there, here = (
        blr.sensitivity(task, fit(task, "diag")) for task in (table("cuda", dtype), table("cpu"))
    )
    close(there.variance, here.variance, 0.05)


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_merging_there(method: str) -> None:
    here = [mlp(seed=s).state_dict() for s in range(3)]
    models = [{k: v.cuda() for k, v in m.items()} for m in here]
    a, b = (blr.merge(m[0], m[1:], method=method) for m in (models, here))
    for name in b:
        close(a[name], b[name])
