"""Kronecker factors collected while a model trains, and the checkpoints that keep them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import graph, mlp, normal, tokens
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

import blr_analysis as blr
from blr_analysis.errors import ModelError, PosteriorError
from blr_analysis.posterior import KroneckerRecorder

N = 24


def images(m: Any, x: Tensor) -> Tensor:
    """Convolutions in groups, a norm, and a layer that is called twice."""
    h = m.norm(torch.tanh(m.first(x))).mean((2, 3))
    return m.last(torch.tanh(m.twice(torch.tanh(m.twice(h)))))


def words(m: Any, ids: Tensor) -> Tensor:
    return m.last(torch.tanh(m.inner(m.norm(m.table(ids)))).mean(1))


def example(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    if name == "mlp":
        model = mlp()
        x = normal(N, 4)
    elif name == "images":
        first = nn.Conv2d(2, 4, 3, padding=1, groups=2)
        twice = nn.Linear(4, 4)
        last = nn.Linear(4, 3, bias=False)
        model = graph(images, first=first, norm=nn.GroupNorm(2, 4), twice=twice, last=last)
        x = normal(N, 2, 5, 5)
    else:
        ends = {"table": nn.Embedding(7, 4), "last": nn.Linear(5, 3)}
        model = graph(words, norm=nn.LayerNorm(4), inner=nn.Linear(4, 5), **ends)
        x = tokens(N, 6)
    return model.train(), x, torch.arange(N) % 3


def passed(model: nn.Module, x: Tensor, y: Tensor, size: int, lr: float = 0.0, **loss: Any) -> None:
    """One epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for chosen in torch.arange(len(x)).split(size):
        optimizer.zero_grad()
        reduction = loss.get("reduction", "mean")
        value = cross_entropy(model(x[chosen]), y[chosen], reduction=reduction)
        (loss.get("times", 1.0) * value).backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["mlp", "images", "words"])
@pytest.mark.parametrize(
    "loss", [{}, {"reduction": "sum"}, {"times": 0.25}], ids=["mean", "sum", "scaled"]
)
def test_at_fixed_weights_the_factors_are_those_of_a_fit(name: str, loss: dict) -> None:
    model, x, y = example(name)
    recorder = KroneckerRecorder(
        model, every=1, reduction=loss.get("reduction", "mean"), scale=loss.get("times", 1.0)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passed(model, x, y, 6, **loss)
    assert recorder.factors
    assert recorder.recorded == N // 6
    q = blr.Posterior.from_recorder(recorder, model, n_data=N, prior_precision=2.0)
    task = blr.Task(model, (x, y))
    fit = blr.fit_laplace(task, curvature="empirical_fisher", prior_precision=2.0)
    for theirs in fit.form.blocks:
        right, left = recorder.factors[theirs.key]
        for basis, factor in ((theirs.right, right), (theirs.left, left)):
            turned = basis.mT @ factor @ basis  # the eigenvectors of one are those of the other
            off = turned - torch.diag_embed(turned.diagonal(0, -2, -1))
            assert float(off.norm()) < 1e-10 * float(factor.norm())
        inputs = float(right.diagonal(0, -2, -1).mean())
        assert N * inputs == pytest.approx(theirs.inputs)  # and of the same scale
    for parameter in fit.form.plain:  # norms and embeddings: exactly
        torch.testing.assert_close(q.precision(parameter), fit.precision(parameter))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_scaled_by_its_positions(stride: int) -> None:
    """S = N · A ⊗ G / T, of sums over the T positions, by patches and gradients cut out by hand."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 2, stride=stride)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(N, 2, 5, 5).double()
    y = torch.arange(N) % 3
    model(x)
    recorder = KroneckerRecorder(model.train(), every=1)
    passed(model, x, y, 8)
    q = blr.Posterior.from_recorder(recorder, model, n_data=N, prior_precision=2.0)
    z = conv(x).detach().requires_grad_()
    cross_entropy(model[1:](z), y, reduction="sum").backward()
    d = z.grad.flatten(2).mT  # [N, T, O]
    a = unfold(x, 2, stride=stride).mT
    a = torch.cat([a, torch.ones(*a.shape[:2], 1).double()], 2)
    positions = d.shape[1]
    assert positions == (16 if stride == 1 else 4)
    inputs, outputs = (torch.einsum("nti,ntj->ij", v, v) / N for v in (a, d))
    block = next(b for b in q.form.blocks if b.key == "0.weight")
    s = q.form.values[block.key][0] - 2.0
    u = torch.kron(block.left[0].contiguous(), block.right[0].contiguous())
    dense = (u * s.flatten()) @ u.mT
    torch.testing.assert_close(dense, N * torch.kron(outputs, inputs) / positions)


@pytest.mark.parametrize("every", [1, 100])
def test_accumulated_microbatches_take_a_scale_and_are_warned_of_without(every: int) -> None:
    for scale in (1.0, 0.5):
        model, x, y = example("mlp")
        recorder = KroneckerRecorder(model, every=every, scale=scale)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for chosen in torch.arange(N).split(N // 2):
                (cross_entropy(model(x[chosen]), y[chosen]) / 2).backward()
        recorder.remove()
        assert [("scale=1/k" in str(w.message)) for w in caught] == [True] * (scale == 1)
    recorded_rows = slice(None) if every == 1 else slice(N // 2)
    d = (model(x).softmax(1) - nn.functional.one_hot(y, 3)).detach()[recorded_rows]
    torch.testing.assert_close(recorder.factors["2.weight"][1][0], d.T @ d / len(d))


@pytest.mark.parametrize("beta2", [None, 0.9])
def test_what_is_kept_is_the_mean_over_the_recorded_passes(beta2: float | None) -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=3, beta2=beta2)
    factors = []
    for k in range(7):
        if k % 3 == 0:
            alone = KroneckerRecorder(copy.deepcopy(model), every=1)
            passed(alone._model, x, y, N)
            factors.append(alone.factors["0.weight"][1])
        passed(model, x, y, N, lr=0.5)
    weights = torch.tensor([1.0] * 3 if beta2 is None else [beta2**2, beta2, 1.0]).double()
    mean = sum(w * g for w, g in zip(weights / weights.sum(), factors, strict=True))
    torch.testing.assert_close(recorder.factors["0.weight"][1], mean)
    assert (recorder.passes, recorder.recorded) == (7, 3)


def test_evaluation_copies_and_removed_hooks_record_nothing() -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=1)
    passed(model.eval(), x, y, N)
    with torch.no_grad():
        model.train()(x)
    assert recorder.passes == 0
    passed(model, x, y, N)
    passed(copy.deepcopy(model), x[:7], y[:7], 7)  # which takes the hooks along
    recorder.remove()
    passed(model, x, y, N)
    assert recorder.recorded == recorder.passes == 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_recording_is_saved_and_goes_on(tmp_path: Path) -> None:
    model, x, y = example("words")
    whole, first = (KroneckerRecorder(model, every=1) for _ in range(2))
    passed(model, x, y, 6)
    torch.save({"recorder": first.state_dict()}, tmp_path / "run.pt")
    first.remove()
    restored = KroneckerRecorder(model, every=1)
    restored.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True)["recorder"])
    passed(model, x, y, 6, lr=0.1)
    of_whole = blr.Posterior.from_recorder(whole, model, n_data=N, prior_precision=1.0)
    of_restored = blr.Posterior.from_recorder(restored, model, n_data=N, prior_precision=1.0)
    for name in of_whole.mean:
        torch.testing.assert_close(of_whole.precision(name), of_restored.precision(name))
    of_whole.save(tmp_path / "q.safetensors")
    again = blr.Posterior.load(tmp_path / "q.safetensors")
    assert again.record["kind"] == "kron_recorded"
    assert again.record["recorded"] == 8


def test_the_prior_is_found_and_the_posterior_serves() -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=2)
    for _ in range(10):
        passed(model, x, y, 6, lr=0.3)
    q = blr.Posterior.from_recorder(recorder, model, n_data=N)
    start = {n: torch.zeros_like(p) for n, p in model.state_dict().items()}
    around = blr.Posterior.from_recorder(recorder, model, n_data=N, initial=start)
    wrapped = blr.Posterior.from_recorder(recorder, nn.DataParallel(model), n_data=N)
    assert wrapped.mean.keys() == q.mean.keys()
    assert q.prior_precision == around.prior_precision == wrapped.prior_precision > 0
    assert q.record["prior_choice"]["rule"] == "evidence"
    assert "evidence" in repr(q)
    assert blr.sensitivity(blr.Task(model, (x, y)), q).self_influence.min() >= 0


def test_layers_that_take_no_part_are_named_and_inputs_that_are_overwritten() -> None:
    _, x, y = example("mlp")
    unused = graph(lambda m, x: m.used(x), used=mlp(), spare=nn.Linear(4, 3)).train()
    recorder = KroneckerRecorder(unused, every=1)
    passed(unused, x, y, N)
    with pytest.raises(PosteriorError, match=r"spare\.weight"):
        blr.Posterior.from_recorder(recorder, unused, n_data=N, prior_precision=1.0)

    outer = nn.Sequential(nn.Linear(4, 3))
    outer[0].weight.requires_grad_(False)
    KroneckerRecorder(outer, every=1)
    inputs = torch.randn(6, 4)
    loss = cross_entropy(outer(inputs), torch.arange(6) % 3)
    inputs.add_(1.0)
    with pytest.raises(ModelError, match="in place"):
        loss.backward()


@pytest.mark.parametrize("kind", ["kron", "adam", "ivon"])
def test_checkpoints_on_disk_hold_all_that_was_learned(kind: str, tmp_path: Path) -> None:
    """The same posteriors as from memory, each as it was at its step; nothing but safetensors."""
    makers: dict[str, Any] = {
        "kron": lambda p: torch.optim.SGD(p, lr=0.3),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "ivon": lambda p: blr.IVON(p, lr=0.1, ess=N, weight_decay=0.1, steps=32),
    }
    posteriors = []
    for folder in (None, tmp_path / "run"):
        model, x, y = example("mlp")
        torch.manual_seed(3)
        optimizer = makers[kind](model.parameters())
        checkpoints = blr.Checkpoints(
            model,
            steps=32,
            folder=folder,
            structure="kron" if kind == "kron" else None,
            optimizer=None if kind == "kron" else optimizer,
        )
        for _ in range(32):
            optimizer.zero_grad()
            draws = optimizer.sampled_params(train=True) if kind == "ivon" else torch.enable_grad()
            with draws:
                cross_entropy(model(x), y).backward()
            optimizer.step()
            checkpoints.step()
        before = {n: p.clone() for n, p in model.state_dict().items()}
        prior_precision = None if kind == "ivon" else 1.0  # IVON knows its own
        q = checkpoints.posterior(n_data=N, prior_precision=prior_precision)
        assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
        posteriors.append(q)
    assert [p.record["checkpoint"] for p in posteriors[0].earlier] == [1, 2, 3]
    for in_memory, on_disk in zip(posteriors[0].run, posteriors[1].run, strict=True):
        for name in in_memory.mean:
            assert torch.equal(in_memory.mean[name], on_disk.mean[name])
            assert torch.equal(in_memory.precision(name), on_disk.precision(name))
    files = sorted((tmp_path / "run").iterdir())
    assert files
    assert all(file.suffix == ".safetensors" for file in files)
    task = blr.Task(model, (x, y), checkpoints=files[-3:])  # weights alone are taken
    assert len(task.checkpoints) == 3
