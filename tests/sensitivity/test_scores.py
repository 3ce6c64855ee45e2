"""Error, variance, deviation and self-influence against dense Jacobians, on four likelihoods."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import mlp
from oracles import dense_jacobian, dense_precision, fit_at_rest
from snapshots import untouched
from torch import Tensor

import blr_analysis as blr
from blr_analysis.errors import InputError, PosteriorError, PosteriorWarning
from blr_analysis.sensitivity import scores as scores_module

N = 12
OUTPUTS = {"categorical": 3, "bernoulli": 1, "gaussian": 2, "poisson": 1}
STRUCTURES = ("diag", "kron", "full")
EXACT = {torch.float64: 1e-10, torch.float32: 2e-4}


def targets_for(kind: str, n: int = N, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    c = OUTPUTS[kind]
    if kind == "categorical":
        return torch.randint(c, (n,), generator=g)
    if kind == "bernoulli":
        return torch.randint(2, (n,), generator=g).double()
    if kind == "poisson":
        return torch.poisson(torch.full((n, c), 2.0, dtype=torch.float64), generator=g)
    return torch.randn(n, c, generator=g, dtype=torch.float64)


def task_for(kind: str, dtype: torch.dtype = torch.float64, **options) -> blr.Task:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(N, 4, generator=g, dtype=torch.float64)
    y = targets_for(kind)
    model = mlp(outputs=OUTPUTS[kind]).to(dtype)
    if y.is_floating_point():
        y = y.to(dtype)
    return blr.Task(model, (x.to(dtype), y), likelihood=kind, **options)


def loss(kind: str, f: Tensor, y: Tensor) -> Tensor:
    """ℓ of one example from torch's own distributions."""
    d = torch.distributions
    if kind == "categorical":
        return -d.Categorical(logits=f).log_prob(y)
    if kind == "bernoulli":
        return -d.Bernoulli(logits=f).log_prob(y.reshape(f.shape)).sum()
    if kind == "poisson":
        return -d.Poisson(f.exp()).log_prob(y.reshape(f.shape)).sum()
    return -d.Normal(f, 1.0).log_prob(y).sum()


def mean_of(kind: str, f: Tensor) -> Tensor:
    return {"categorical": lambda: f.softmax(-1), "bernoulli": f.sigmoid}.get(kind, lambda: f)()


def dense_covariance(posterior: blr.Posterior) -> Tensor:
    """Σ by inverting S."""
    return torch.linalg.inv(dense_precision(posterior))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", OUTPUTS)
def test_scores_equal_the_dense_computation(kind: str, structure: str, dtype: torch.dtype) -> None:
    exact_task = task_for(kind)
    exact = fit_at_rest(exact_task, structure=structure, prior_precision=0.7)
    task = task_for(kind, dtype)
    scores = blr.sensitivity(task, exact)

    f = exact_task.model(exact_task.dataset.tensors[0]).detach()
    y = exact_task.dataset.tensors[1]
    jacobian = dense_jacobian(exact_task, exact.mean)
    v = jacobian @ dense_covariance(exact) @ jacobian.mT
    e = torch.stack(
        [
            torch.func.grad(lambda out, t=t: loss(kind, out, t))(out)
            for out, t in zip(f, y, strict=True)
        ]
    )
    move = (v @ e[:, :, None])[:, :, 0]
    if kind in ("categorical", "bernoulli"):
        deviation = (mean_of(kind, f + move) - mean_of(kind, f)).abs().sum(1)
    else:
        deviation = move.square().sum(1).sqrt()
    losses = torch.stack([loss(kind, out, t) for out, t in zip(f, y, strict=True)])
    for name, truth in {
        "outputs": f,
        "error": e,
        "variance": v,
        "deviation": deviation,
        "self_influence": (e * move).sum(1),
        "losses": losses,
    }.items():
        found = getattr(scores, name)
        assert found.dtype == dtype and found.device.type == "cpu" and found.shape == truth.shape
        gap = float((found.double() - truth).norm() / truth.norm())
        assert gap < EXACT[dtype], f"{name}: {gap:.1e}"


@pytest.mark.parametrize("kind", OUTPUTS)
def test_one_backward_pass_gives_the_same_self_influence(kind: str) -> None:
    task = task_for(kind)
    q = fit_at_rest(task, structure="kron", prior_precision=0.7)
    whole = blr.sensitivity(task, q)
    light = blr.sensitivity(task, q, variance=False)
    assert light.variance is None and light.deviation is None and light.leverage is None
    torch.testing.assert_close(light.self_influence, whole.self_influence, rtol=1e-11, atol=0)
    assert light.table.variance.isna().all() and light.table.self_influence.notna().all()


def test_variances_are_left_out_where_they_would_be_too_many(monkeypatch) -> None:
    task = task_for("categorical")
    q = fit_at_rest(task, structure="diag", prior_precision=0.7)
    monkeypatch.setattr(scores_module, "MOST_OUTPUTS", 2)
    assert blr.sensitivity(task, q).variance is None
    assert blr.sensitivity(task, q, variance=True).variance.shape == (N, 3, 3)
    monkeypatch.setattr(scores_module, "MOST_OUTPUTS", 3)
    assert blr.sensitivity(task, q).variance is not None
    monkeypatch.setattr(scores_module, "MOST_NUMBERS", N * 9 - 1)
    assert blr.sensitivity(task, q).variance is None


def test_scores_are_taken_at_the_posterior_and_the_model_is_left_alone() -> None:
    task = task_for("categorical")
    q = fit_at_rest(task, structure="full", prior_precision=0.7)
    expected = blr.sensitivity(task, q)
    task.model(task.dataset.tensors[0]).sum().backward()  # gradients that must survive
    task.model.train()
    with torch.no_grad():
        for p in task.model.parameters():
            p.add_(1.0)
    with untouched(task.model):
        found = blr.sensitivity(task, q)
    assert torch.equal(found.variance, expected.variance)
    assert torch.equal(found.outputs, expected.outputs)


def test_frozen_parameters_carry_no_variance() -> None:
    task = task_for("gaussian")
    task.model[0].requires_grad_(False)
    q = fit_at_rest(task, structure="full", prior_precision=0.7)
    assert set(q.mean) == {"2.weight", "2.bias"}
    scores = blr.sensitivity(task, q)
    hidden = torch.tanh(task.model[0](task.dataset.tensors[0])).detach()
    z = torch.cat([hidden, torch.ones(N, 1)], 1)
    variance = (z @ torch.linalg.inv(z.T @ z + 0.7 * torch.eye(6, dtype=torch.float64)) * z).sum(1)
    expected = variance[:, None, None] * torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(scores.variance, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_switched_off_outside_do_not_matter(context) -> None:
    task = task_for("poisson")
    q = fit_at_rest(task, structure="kron", prior_precision=0.7)
    expected = blr.sensitivity(task, q)
    with context():
        found = blr.sensitivity(task, q)
    assert torch.equal(found.variance, expected.variance)


def test_several_posteriors_are_averaged() -> None:
    task = task_for("categorical")
    qs = [
        fit_at_rest(
            task_for("categorical").with_model(blr.Task(mlp(seed=seed), task.dataset)),
            structure=structure,
            prior_precision=0.7,
        )
        for seed, structure in ((3, "kron"), (4, "diag"), (5, "full"))
    ]
    each = [blr.sensitivity(task, q) for q in qs]
    found = blr.sensitivity(task, qs)
    for name in ("error", "variance", "deviation", "self_influence"):
        mean = torch.stack([getattr(scores, name) for scores in each]).mean(0)
        torch.testing.assert_close(getattr(found, name), mean)
    assert torch.equal(found.outputs, each[-1].outputs)
    assert blr.sensitivity(task, qs, variance=False).variance is None
    with pytest.raises(InputError, match="empty list"):
        blr.sensitivity(task, [])


def run_of_checkpoints(**settings: object) -> tuple[blr.Task, list[blr.Posterior]]:
    """Posteriors of two networks on the same data, as checkpoints of one run are."""
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tasks = [blr.Task(mlp(seed=seed), (x, torch.arange(30) % 3)) for seed in (3, 4)]
    return tasks[1], [fit_at_rest(t, **settings) for t in tasks]


ANALYSES = {
    "sensitivity": lambda task, q: blr.sensitivity(task, q).self_influence,
    "influence": lambda task, q: blr.influence(task, q, task).matrix,
    "what_if": lambda task, q: torch.tensor(
        blr.what_if(task, q, remove=[1], solver="posterior").nll
    ),
    "suspicious": lambda task, q: blr.suspicious(task, q, duplicates=False).gain,
}


@pytest.mark.parametrize("analysis", ANALYSES)
def test_checkpoints_take_the_last_ones_found_prior(analysis: str) -> None:
    asked = ANALYSES[analysis]
    task, (first, last) = run_of_checkpoints()
    assert first.prior_precision != last.prior_precision
    there = fit_at_rest(
        blr.Task(mlp(seed=3), (task.fetch(torch.arange(30))[0], torch.arange(30) % 3)),
        prior_precision=last.prior_precision,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", PosteriorWarning)  # of weights that are another checkpoint's
        given, found = asked(task, [there, last]), asked(task, [first, last])
    torch.testing.assert_close(found, given, rtol=1e-10, atol=1e-12)
    named = first.at(first.prior_precision)  # as a user gives it: it stays
    other = asked(task, [named, last])
    assert not torch.allclose(other, given, rtol=1e-6)


def test_checkpoints_of_other_first_weights_are_refused() -> None:
    start = [mlp(seed=seed).state_dict() for seed in (8, 9)]
    task, qs = run_of_checkpoints(prior_precision=1.0)
    ours, theirs = (
        blr.Posterior(q.mean, q.form, prior_precision=1.0, n_data=30, initial=initial)
        for q, initial in zip(qs, start, strict=True)
    )
    with pytest.raises(PosteriorError, match=r"posterior\[1\] has another initial"):
        blr.sensitivity(task, [ours, theirs])
