"""What a CUDA device computes is what the CPU computes: engine, analyses, optimizers, files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optimizers
import pytest
import torch
from models import mlp
from readings import ways
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
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=g, dtype=torch.float64)
    y = (x @ torch.randn(4, 3, generator=g, dtype=torch.float64)).argmax(1)
    model = mlp(outputs=3)
    step = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        step.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss = loss + 0.5 * sum((p**2).sum() for p in model.parameters())
        loss.backward()
        return loss

    step.step(closure)
    data = (x.to(device, dtype), y.to(device))
    return blr.Task(model.to(device, dtype), data, metadata={"half": ["a", "b"] * (N // 2)})


def pair() -> tuple[blr.Task, blr.Task]:
    return table("cuda"), table("cpu")


def fit(task: blr.Task, structure: str = "kron", **options: Any) -> blr.Posterior:
    if structure == "lowrank":
        options["rank"] = 12
    return blr.fit_laplace(task, structure=structure, prior_precision=1.0, **options)


@pytest.mark.parametrize("name", CASES)
def test_every_layer(name: str) -> None:
    case = CASES[name]()
    with torch.no_grad():
        run = case.forward or (lambda m, b: m(*b) if isinstance(b, tuple) else m(b))
        try:
            outputs = run(case.model, case.inputs)
        except Exception:
            pytest.skip("not a batch of plain tensors")
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or not isinstance(case.inputs, Tensor):
        pytest.skip("not a batch of plain tensors")
    g = torch.Generator().manual_seed(0)
    y = torch.randn(outputs.shape, generator=g, dtype=torch.float64)
    results = []
    for device in ("cuda", "cpu"):
        task = blr.Task(
            copy.deepcopy(case.model).to(device),
            (case.inputs.to(device), y.to(device)),
            likelihood="gaussian",
            forward=case.forward,
        )
        q = fit(task, "diag")
        results.append((q, blr.sensitivity(task, q)))
    (qc, there), (qh, here) = results
    # 3e-9 was measured with weight normalisation, whose CUDA kernel is torch's own.
    tolerance = 1e-8 if "weight_norm" in name else CLOSE
    for parameter in qh.mean:
        close(qc.variance(parameter), qh.variance(parameter), tolerance)
    for field in ("error", "variance", "self_influence"):
        close(getattr(there, field), getattr(here, field), tolerance)


def test_convolutions_in_single_precision() -> None:
    """cuDNN takes TF32 for them by default; they are read by their rules all the same."""
    layers = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(128, 3)
    model = nn.Sequential(*layers)
    x, y = torch.randn(20, 2, 8, 8), torch.arange(20) % 3
    there = blr.Task(copy.deepcopy(model).cuda(), (x.cuda(), y.cuda()))
    here = blr.Task(model.double(), (x, y))
    assert set(ways(there).values()) == {"convolution", "linear"}
    scores = [blr.sensitivity(t, fit(t, "diag")) for t in (there, here)]
    close(scores[0].variance, scores[1].variance, 0.01)


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "lowrank"])
def test_fits_and_leave_one_out(structure: str) -> None:
    (there, here), close_to = pair(), 1e-6 if structure == "lowrank" else CLOSE
    q, p = fit(there, structure), fit(here, structure)
    loo, expected = (blr.leave_one_out(t, f) for t, f in ((there, q), (here, p)))
    close(loo.logits, expected.logits, close_to)
    assert loo.logits.device.type == "cpu"
    close(
        blr.sensitivity(there, q.to("cpu")).deviation,
        blr.sensitivity(here, p).deviation,
        close_to,
    )


ANALYSES: dict[str, Callable[[blr.Task, blr.Posterior], Any]] = {
    "what_if": lambda t, q: blr.what_if(
        t, q, remove=range(0, N, 2), evaluate=t, solver="posterior"
    ).nll,
    "what_if cg": lambda t, q: blr.what_if(t, q, remove=[0, 5, 9], solver="cg").nll,
    "what_if default": lambda t, q: blr.what_if(t, q, remove=[0, 5, 9]).nll,
    "what_if_each": lambda t, q: blr.what_if_each(
        t, q, by="half", evaluate=t
    ).select_dtypes("number").to_numpy(),
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
    "memory_map": lambda t, q: blr.memory_map(
        blr.sensitivity(t, q)
    ).table.select_dtypes("number").to_numpy(),
}  # fmt: skip


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis(name: str) -> None:
    there, here = pair()
    q, p = fit(there), fit(here)
    tolerance = 0.05 if name == "predict" else 1e-6  # draws of another generator
    close(ANALYSES[name](there, q), ANALYSES[name](here, p), tolerance)


@pytest.mark.parametrize("tied", [False, True])
def test_language_models(tied: bool) -> None:
    ids = sequences(12)
    results = []
    for device in ("cuda", "cpu"):
        task = lm_task(tiny_lm(tied=tied).to(device), ids)
        q = fit(task, "diag", curvature="empirical_fisher")
        results.append(
            (
                blr.sensitivity(task, q).self_influence,
                blr.influence(task, q, task).as_subclass(Tensor),
                token_sensitivity(task, q).table.select_dtypes("number").to_numpy(),
            )
        )
    for there, here in zip(*results, strict=True):
        close(there, here)


def test_an_index(tmp_path: Path) -> None:
    there, here = pair()
    found = []
    for name, task in (("cuda", there), ("cpu", here)):
        index = blr.Index.build(task, fit(task), tmp_path / name)
        found.append(index.influence(task).as_subclass(Tensor))
    close(*found, 1e-5)


@pytest.mark.parametrize("row", optimizers.ROWS)
def test_optimizers_train_there(row: str, tmp_path: Path) -> None:
    """Ten steps lower the loss; the state saves, loads, and goes on the same."""
    task = table("cuda", torch.float32)
    x, y = task.dataset.tensors
    model = mlp(outputs=3).to("cuda", torch.float32)
    step = optimizers.ROWS[row](model, N, torch.Generator("cuda").manual_seed(3))
    draw = getattr(step, "sampled_params", None)

    def train(model: nn.Module, step: Any, count: int) -> None:
        for _ in range(count):
            if draw is None:
                step.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
            else:
                with step.sampled_params(train=True):
                    step.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
            if row == "BSAM":
                with step.adversarial_params():
                    step.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
            step.step()

    train(model, step, 10)
    assert all(bool(p.isfinite().all()) and p.is_cuda for p in model.parameters())
    torch.save({"m": model.state_dict(), "o": step.state_dict()}, tmp_path / "c.pt")
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    other = mlp(outputs=3).to("cuda", torch.float32)
    other.load_state_dict(saved["m"])
    again = optimizers.ROWS[row](other, N, torch.Generator("cuda").manual_seed(5))
    again.load_state_dict(saved["o"])
    train(model, step, 3)
    train(other, again, 3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    here = table("cpu")
    there = table("cuda", dtype)
    p = fit(here, "diag")
    scores = blr.sensitivity(there, fit(there, "diag"))
    close(scores.variance, blr.sensitivity(here, p).variance, 0.05)


def test_a_posterior_is_saved_and_read_anywhere(tmp_path: Path) -> None:
    there, _ = pair()
    q = fit(there)
    q.save(tmp_path / "q.safetensors")
    read = blr.Posterior.load(tmp_path / "q.safetensors")
    close(
        blr.sensitivity(there, read).deviation,
        blr.sensitivity(there, q).deviation,
    )


def test_merging_there() -> None:
    models = [{k: v.cuda() for k, v in mlp(seed=s).state_dict().items()} for s in range(3)]
    here = [{k: v.cpu() for k, v in m.items()} for m in models]
    for method in ("linear", "task_arithmetic", "ties"):
        a, b = (blr.merge(m[0], m[1:], method=method) for m in (models, here))
        for name in b:
            close(a[name], b[name])
