"""The posterior for random subsets, against closed forms and exact retraining."""

from __future__ import annotations

import sys

import pytest
import torch
from models import mlp
from oracles import dense_ggn, dense_jacobian, dense_precision
from oracles_retraining import flat, linear, retrained, trained, with_ones
from parts import normal
from scipy.stats import spearmanr
from sklearn.datasets import load_diabetes, load_wine
from snapshots import untouched
from torch import Tensor, nn
from torch.func import functional_call

import blr_analysis as blr
from blr_analysis.errors import BLRError, InputError, PosteriorError
from blr_analysis.sensitivity.minimise import on_a_copy, train

DELTA = 2.0


def fit(task: blr.Task, structure: str = "full", delta=DELTA, **options) -> blr.Posterior:
    return blr.fit_laplace(
        task, structure=structure, prior_precision=delta, progress=False, **options
    )


def subset(task: blr.Task, q: blr.Posterior, keep: float = 0.5, **options) -> blr.Posterior:
    return blr.subset_posterior(task, q, keep, progress=False, **options)


def standardised(data: tuple) -> tuple[Tensor, Tensor]:
    x, y = (torch.tensor(a) for a in data)
    return (x - x.mean(0)) / x.std(0), y


def ridge(n: int = 120, c: int = 1) -> blr.Task:
    """Ridge regression on the first patients of the diabetes data, at its optimum."""
    x, y = standardised(load_diabetes(return_X_y=True))
    x, y = x[:n], torch.stack([(y[:n] - y[:n].mean()) / y[:n].std(), x[:n, 2].sin()], 1)[:, :c]
    return blr.Task(trained("gaussian", x, y, DELTA, c), (x, y), likelihood="gaussian")


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
@pytest.mark.parametrize("keep", [0.5, 0.2, 1.0])
def test_ridge_regression_at_a_weight_is_its_closed_form(structure: str, keep: float) -> None:
    task = ridge()
    x, y = task.dataset.tensors
    z = with_ones(x)
    gram = keep * z.T @ z
    exact = gram + DELTA * torch.eye(len(gram), dtype=torch.float64)
    theta = torch.linalg.solve(exact, keep * z.T @ y)
    with untouched(task.model):
        found = subset(task, fit(task), keep, effective=False, structure=structure)
    torch.testing.assert_close(flat(found.mean).T, theta, rtol=1e-8, atol=1e-8)
    assert found.structure == structure and found.prior_precision == DELTA
    if structure == "full":
        torch.testing.assert_close(dense_precision(found), exact, rtol=1e-8, atol=1e-8)
    own = torch.cat([found.precision("weight").flatten(), found.precision("bias")])
    if structure in ("full", "diag"):
        torch.testing.assert_close(own, exact.diagonal(), rtol=1e-8, atol=1e-8)
    assert found.record["subset"] == {
        "keep": keep,
        "weight": keep,
        "effective": False,
        "residual": pytest.approx(0, abs=1e-8),
        "converged": True,
    }


def test_all_data_kept_is_the_posterior_itself() -> None:
    task = ridge()
    q = fit(task, "kron")
    found = subset(task, q, 1.0)
    assert found.record["subset"]["weight"] == 1 and found.structure == "kron"
    torch.testing.assert_close(dense_precision(found), dense_precision(q))
    torch.testing.assert_close(found.mean, q.mean)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(("keep", "n"), [(0.5, 120), (0.5, 25), (0.1, 60), (0.9, 14)])
def test_the_effective_weight_solves_its_fixed_point(keep: float, n: int, outputs: int) -> None:
    task = ridge(n, outputs)
    weight = subset(task, fit(task), keep).record["subset"]["weight"]
    z = with_ones(task.dataset.tensors[0])
    height = torch.linalg.solve(weight * z.T @ z + DELTA * torch.eye(11).double(), z.T)
    leverage = (z * height.T).sum(1)
    v = float(leverage.square().sum() / leverage.sum())
    assert weight == pytest.approx(keep / (1 + (1 - weight) * v), rel=2e-4)
    assert 0 < weight < 0.98 * keep


def test_the_mean_of_random_halves_is_that_of_the_effective_weight() -> None:
    x = standardised(load_diabetes(return_X_y=True))[0][:40]
    g = torch.Generator().manual_seed(0)
    task = blr.Task(linear(torch.zeros(1, 11).double()), (x, x[:, :1]), likelihood="gaussian")
    q = fit(task)
    kept = (torch.rand(4000, 40, generator=g) < 0.5).double()
    z, eye = with_ones(x), DELTA * torch.eye(11).double()
    variances = torch.linalg.inv(torch.einsum("kn,ni,nj->kij", kept, z, z) + eye).mean(0)
    off = []
    for effective in (False, True):
        sigma = torch.linalg.inv(dense_precision(subset(task, q, effective=effective)))
        off.append(float((sigma / variances).diagonal().log().abs().mean()))
    assert off[1] < off[0] / 3


def datamodeling(influence: Tensor, kept: Tensor, losses: Tensor) -> float:
    """Mean rank correlation over the test examples, with scipy's ranks."""
    said = -(kept.double() @ influence.as_subclass(Tensor).double())
    pairs = zip(said.T.numpy(), losses.T.numpy(), strict=True)
    return float(torch.tensor([spearmanr(a, b)[0] for a, b in pairs]).mean())


def test_retrained_halves_are_predicted_better_than_from_all_data() -> None:
    x, y = standardised(load_wine(return_X_y=True))
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=g)
    (x, x_test), (y, y_test) = (t[order].split([90, len(t) - 90]) for t in (x, y))
    delta = 0.5
    kept = torch.stack([torch.randperm(90, generator=g) < 45 for _ in range(100)])
    theta = retrained("categorical", x, y, kept, delta, outputs=3)
    f = with_ones(x_test) @ theta.mT
    losses = f.logsumexp(-1) - f.gather(-1, y_test.expand(100, -1)[..., None])[..., 0]
    task = blr.Task(trained("categorical", x, y, delta, 3), (x, y))
    tests = blr.Task(task.model, (x_test, y_test))
    q = fit(task, delta=delta)
    found = [q, subset(task, q, effective=False), subset(task, q)]
    whole, half, effective = (
        datamodeling(blr.influence(task, p, tests, progress=False), kept, losses) for p in found
    )
    assert whole > 0.5  # an estimate worth improving
    assert effective > half > whole
    assert effective - whole > 0.02


def network(dtype: torch.dtype = torch.float64) -> blr.Task:
    x, y = standardised(load_wine(return_X_y=True))
    return blr.Task(mlp(13, 4, 3, seed=0).to(dtype), (x[::3].to(dtype), y[::3]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_network_moves_to_a_stationary_point_of_the_weighted_objective(dtype) -> None:
    task = network(dtype)
    with untouched(task.model):
        found = subset(task, fit(task, "kron"), 0.3, tolerance=1e-5, max_steps=200)
    about = found.record["subset"]
    assert about["converged"] and about["residual"] <= 1e-5
    assert found.structure == "kron" and found.mean["0.weight"].dtype == dtype
    leaves = {n: m.clone().requires_grad_() for n, m in found.mean.items()}
    x, y = task.dataset.tensors
    f = functional_call(task.model, leaves, (x,))
    loss = nn.functional.cross_entropy(f, y, reduction="sum") * about["weight"]
    slopes = torch.autograd.grad(loss, list(leaves.values()))
    pulls = [DELTA * m for m in leaves.values()]
    gap = sum(float((s + p).detach().square().sum()) for s, p in zip(slopes, pulls, strict=True))
    size = sum(float(s.square().sum()) for s in slopes)
    assert (gap / size) ** 0.5 < 1e-4 and size > 0.01


def test_a_descent_that_does_not_get_on_is_over(monkeypatch) -> None:
    """At the kinks of a ReLU network, where no gradient vanishes; little is missed."""
    x, y = standardised(load_wine(return_X_y=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 3)).double()
    task = blr.Task(model, (x + 0.8 * normal(*x.shape), y))
    options = {"structure": "full", "tolerance": 1e-9, "max_steps": 90}
    short = train(on_a_copy(task), 0.3, **options)
    monkeypatch.setattr(sys.modules[train.__module__], "WINDOW", 1000)
    long = train(on_a_copy(task), 0.3, **options)
    assert len(short.moves) < 0.5 * len(long.moves)
    assert short.point.value < 1.01 * long.point.value
    q = fit(task, "kron", delta=0.3)
    with pytest.warns(RuntimeWarning, match="ended at a residual"):
        found = subset(task, q, 0.5, effective=False, tolerance=1e-9, max_steps=60)
    assert "residual" in repr(found)


def test_a_prior_of_each_parameter_and_the_curvature_at_the_new_weights() -> None:
    task = network()
    delta = {n: 1.0 + k for k, n in enumerate(task.parameters())}
    delta["0.bias"] = torch.full_like(task.parameters()["0.bias"], 0.7)
    found = subset(task, fit(task, delta=delta), effective=False, max_steps=200)
    assert found.record["subset"]["converged"] and found.prior_precision is not None
    prior = torch.cat([torch.as_tensor(delta[n]).expand(m.shape).flatten().double()
                       for n, m in found.mean.items()])  # fmt: skip
    moved = blr.Task(mlp(13, 4, 3, seed=0), task.dataset.tensors)
    moved.model.load_state_dict(found.mean)
    exact = 0.5 * dense_ggn(moved, dense_jacobian(moved, found.mean)) + prior.diag()
    torch.testing.assert_close(dense_precision(found), exact, rtol=1e-8, atol=1e-8)


def test_what_was_fixed_stays_fixed() -> None:
    task = network()
    task.model[0].weight.requires_grad_(False)
    q = fit(task)
    task.model[0].weight.requires_grad_(True)
    with untouched(task.model):
        found = subset(task, q, max_steps=200)
    assert set(found.mean) == {"0.bias", "2.weight", "2.bias"}
    assert blr.influence(task, found, task, progress=False).shape == (60, 60)


def test_a_rank_that_was_chosen_is_kept() -> None:
    task = network()
    found = subset(task, fit(task, "lowrank", rank=5), effective=False, tolerance=0.1)
    assert found.record["rank"] == 5
    assert subset(task, fit(task), structure="lowrank", tolerance=0.1).record["rank"] > 5


def test_a_descent_that_does_not_converge_is_marked_and_warned_of() -> None:
    task = network()
    with pytest.warns(RuntimeWarning, match="max_steps"):
        found = subset(task, fit(task), effective=False, max_steps=1)
    assert not found.record["subset"]["converged"]
    assert found.record["subset"]["residual"] > 1e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"keep": k}, "keep must be") for k in (0, -0.5, 1.5, float("nan"), "half", True, None)),
        ({"structure": "dense"}, "structure must be"),
        ({"effective": 1}, "effective must be"),
        ({"tolerance": 0}, "tolerance must be"),
        ({"max_steps": 0}, "max_steps must be"),
    ],
)
def test_bad_input_is_named(options: dict, words: str) -> None:
    task = ridge()
    with pytest.raises(InputError, match=words):
        subset(task, fit(task), **options)


def test_what_cannot_be_weighed_is_refused() -> None:
    task = ridge()
    q = fit(task)
    with pytest.raises(PosteriorError, match="another model"):
        subset(network(), q)
    flat_prior = blr.Posterior(q.mean, q.form, prior_precision=0.0, n_data=q.n_data)
    with pytest.raises(BLRError, match="prior_precision"):
        subset(task, flat_prior)
