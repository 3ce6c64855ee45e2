"""Fitted posteriors: brute force, closed forms, Monte Carlo, curvlinops and laplace-torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import approximated
from curvlinops import EKFACLinearOperator
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from models import example_models, mlp, normal, randomised, seeded
from oracles import (
    dense_ggn,
    dense_jacobian,
    dense_precision,
    flatten,
    outputs_of,
    relative,
    unflatten,
)
from tiny_transformers import build
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.utils.data import DataLoader, TensorDataset

from blr_analysis.likelihoods import Gaussian
from blr_analysis.posterior import Posterior, fit_at_weights, fit_laplace
from blr_analysis.posterior.fit import Fit, random_sequences, sampled_examples
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures.kronecker import factor_sums
from blr_analysis.recipe import Recipe
from blr_analysis.task import Task

STRUCTURES = ("diag", "kron", "full", "lowrank")
EXACT = 1e-10


def small(kind: str = "categorical", n: int = 9) -> Task:
    """An MLP with three outputs and targets of any kind."""
    targets = {
        "categorical": torch.arange(n) % 3,
        "bernoulli": torch.arange(3 * n).view(n, 3) % 2,
        "gaussian": normal(n, 3, seed=1),
        "poisson": torch.arange(3 * n).view(n, 3) % 4,
    }[kind]
    return Task(mlp(), (normal(n, 4), targets), likelihood=kind)


def convolutional() -> Task:
    with seeded(0):
        model = nn.Sequential(
            nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)
        )
    return Task(randomised(model), (normal(9, 2, 3, 3), torch.arange(9) % 3))


def curvature_of(task: Task, structure: str, **options: Any) -> Tensor:
    """S − δI as a dense matrix."""
    q = fit_at_weights(task, structure=structure, prior_precision=1.0, **options)
    return dense_precision(q) - torch.eye(len(flatten(q.mean)), dtype=torch.float64)


def gradients_of(task: Task, jacobian: Tensor) -> Tensor:
    """∇ℓ_i, ``[N, P]``."""
    targets = torch.cat([task.run(b, task.parameters())[1] for _, b in task.batches()])
    error = task.likelihood.error(outputs_of(task), targets)
    return torch.einsum("nc,ncp->np", error, jacobian)


@cache
def example(name: str) -> tuple[Task, Tensor]:
    """A task and its brute-force Jacobians, taken once."""
    model, x = example_models()[name]
    with torch.no_grad():
        task = Task(model, (x, torch.arange(len(x)) % model(x).shape[-1]))
    return task, dense_jacobian(task, task.parameters())


# The "ggn" of the other models: test_structures.py.
FITS = [(name, "empirical_fisher") for name in ("mlp", "images", "volumes", "words_tied")]
FITS += [("volumes", "ggn")]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("name", "curvature"), FITS)
def test_against_brute_force(name: str, curvature: str, structure: str) -> None:
    task, jacobian = example(name)
    g = gradients_of(task, jacobian)
    truth = dense_ggn(task, jacobian) if curvature == "ggn" else g.mT @ g
    settings = dict(prior_precision=0.3, curvature=curvature)
    q = fit_laplace(task, structure=structure, **settings)
    truth = approximated(q.form, truth) + 0.3 * torch.eye(len(truth), dtype=truth.dtype)
    assert relative(dense_precision(q), truth) < EXACT
    assert q.structure == structure
    assert q.n_data == task.n_data
    for parameter, m in task.parameters().items():
        assert torch.equal(q.mean[parameter], m)
        assert q.mean[parameter].data_ptr() != m.data_ptr(), "training on must not move the mean"


def many_outputs(kind: str = "categorical", hidden: int = 5, *, bias: bool = True) -> Task:
    """An MLP with 64 outputs, of which some are nearly certain."""
    with seeded(0):
        layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, hidden), nn.Tanh()
        model = nn.Sequential(*layers, nn.Linear(hidden, 64, bias=bias))
    targets = {
        "categorical": torch.arange(4),
        "weighted": torch.arange(4),
        "hooked": torch.arange(4),
        "scaled": torch.arange(4),
        "bernoulli": torch.arange(4 * 64).view(4, 64) % 2,
        "gaussian": normal(4, 64, seed=1),
    }[kind]
    of = "categorical" if kind in ("weighted", "hooked", "scaled") else kind
    weights = 0.1 + torch.arange(4) if kind == "weighted" else None
    model = randomised(model)
    model[-1].weight.data *= 5
    if kind == "scaled":  # the last layer's outputs are not the model's
        model.register_forward_hook(lambda *call: 2 * call[2])
    if kind == "hooked":  # what is added to the last layer is seen
        model[-1].register_forward_hook(lambda *call: call[2] + call[1][0][:, :1])
    return Task(model, (normal(4, 3), targets), likelihood=of, weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("hidden", [5, 20])
@pytest.mark.parametrize("kind", ["weighted", "hooked", "scaled", "bernoulli", "gaussian"])
def test_many_outputs_against_brute_force(kind: str, hidden: int, structure: str) -> None:
    task = many_outputs(kind, hidden, bias=kind != "bernoulli")
    truth = dense_ggn(task, dense_jacobian(task, task.parameters()))
    q = fit_laplace(task, structure=structure, prior_precision=0.3)
    truth = approximated(q.form, truth) + 0.3 * torch.eye(len(truth), dtype=truth.dtype)
    assert relative(dense_precision(q), truth) < EXACT


def test_labels_are_drawn_where_outputs_are_many() -> None:
    """The last layer is exact; the layers below agree with all columns on average over seeds."""
    with seeded(0):
        model = randomised(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 260)))
    task = Task(model, (normal(6, 3), torch.arange(6)))
    settings = {"structure": "diag", "prior_precision": 1.0}
    exact = fit_laplace(task, curvature="ggn", **settings)
    fits = [fit_at_weights(task, seed=seed, **settings) for seed in range(20)]
    assert "260 outputs is estimated from 16 drawn labels" in fits[0].note
    assert "drawn" not in exact.note
    for name in exact.mean:
        drawn = torch.stack([q.precision(name) for q in fits])
        truth = exact.precision(name)
        if name.startswith("2."):
            torch.testing.assert_close(drawn, truth.expand_as(drawn))
        else:
            error = drawn.std(0) / len(fits) ** 0.5
            assert bool(((drawn.mean(0) - truth).abs() < 4 * error).all())


def test_directions_are_seen_in_random_sums_of_many_columns() -> None:
    """Σ d dᵀ below the last layer agrees with its closed form on average over seeds; the last
    layer's is exact."""
    n = 256
    classes = 6
    with seeded(0):
        model = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, classes)))
    task = Task(model, (normal(n, 3), torch.arange(n) % classes))
    params = task.parameters()
    with torch.no_grad():
        hidden = model[:2](task.dataset.tensors[0])
        p = model[2](hidden).softmax(-1)
    hessians = p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
    gradients = params["2.weight"] * (1 - hidden.square()).unsqueeze(1)
    truth = torch.einsum("nch,ncd,ndg->hg", gradients, hessians, gradients)

    draws = []
    for seed in range(20):
        fit = Fit(task, params, Prior({None: 1.0}), "ggn", 1, seed, None, {})
        mixed = fit.mixed_columns(n)
        assert mixed is not None
        assert mixed < classes - 1
        moments = factor_sums(fit, None)
        draws.append(moments["0.weight"][2][0])
        torch.testing.assert_close(moments["2.weight"][2][0], hessians.sum(0).double())
    drawn = torch.stack(draws)
    error = drawn.std(0) / len(draws) ** 0.5
    assert bool(((drawn.mean(0) - truth).abs() < 4 * error).all())
    assert float((error / truth.diagonal().mean()).max()) < 0.1, "the test must be sharp"


@pytest.mark.parametrize(("tokens", "size"), [(3, 40), (12, 32)])
def test_directions_of_texts_are_seen_in_ten_times_as_many_tokens(tokens: int, size: int) -> None:
    """As the widest layer, of 12 inputs, has directions; in 32 texts at least."""
    ids = torch.randint(4, 16, (60, tokens))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    task = Task(build("llama", "causal_lm"), rows, likelihood="causal_lm")
    sample = sampled_examples(task)
    assert sample is not None
    assert len(sample) == size
    assert sampled_examples(task.subset(range(32))) is None


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_sampled_fit_is_that_of_the_sample_times_what_it_stands_for(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stationary δ too, which has the scale of the gradient and the curvature."""
    monkeypatch.setattr("blr_analysis.posterior.fit.LARGEST_SAMPLE", 40)
    ids = torch.randint(4, 16, (60, 3), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    model = build("llama", "causal_lm").double()
    task = Task(model, rows, likelihood="causal_lm")
    sample = random_sequences(task)
    assert sample is not None
    assert len(sample) == 40
    part = task.subset(sample)
    for delta in (2.0, None):
        arguments: dict[str, Any] = {"structure": structure, "curvature": "empirical_fisher"}
        arguments["prior_precision"] = delta
        whole = fit_laplace(task, sampled=True, **arguments)
        small = fit_laplace(part, **arguments)
        factor = task.n_data / len(sample)
        if delta is None:
            choices = [q.record["prior_choice"]["stationarity"] for q in (whole, small)]
            assert choices[0] == pytest.approx(factor * choices[1], rel=1e-6)
            continue
        assert whole.n_data == 60
        for name, values in whole.form.values.items():
            expected = factor * (small.form.values[name] - delta) + delta
            torch.testing.assert_close(values, expected)


def exact_hessian(task: Task) -> Tensor:
    """Σ_i ∇²ℓ_i by plain automatic differentiation of the summed loss."""
    params = task.parameters()
    (batch,) = [batch for _, batch in task.batches()]

    def loss(flat: Tensor) -> Tensor:
        f, y = task.run(batch, unflatten(flat, params))
        return task.likelihood.nll(f, y).sum()

    actual = hessian(loss, flatten(params))
    assert isinstance(actual, Tensor)
    return actual


@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian", "poisson"])
def test_exact_curvature_is_the_hessian(kind: str, structure: str) -> None:
    task = small(kind)
    truth = exact_hessian(task)
    size = len(truth)
    assert relative(dense_ggn(task, dense_jacobian(task, task.parameters())), truth) > 1e-3
    if structure == "diag":
        kept_part = truth.diagonal().clamp_min(0).diag()
        share = truth.diagonal() < 0
    else:
        values, vectors = torch.linalg.eigh(truth)
        kept_part = (vectors * values.clamp_min(0)) @ vectors.mT
        share = values < -1e-6
    settings = dict(structure=structure, prior_precision=0.3, curvature="exact")
    with pytest.warns(UserWarning, match="negative") if share.any() else nullcontext():
        q = fit_laplace(task, **settings)
    assert relative(dense_precision(q), kept_part + 0.3 * torch.eye(size).double()) < EXACT
    assert q.record["kind"] == "hessian"
    assert q.record["floored"] == pytest.approx(float(share.double().mean()))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_prior_by_name(structure: str, tmp_path: Path) -> None:
    task = small()
    prior = {n: 1 / 3 if n.startswith("0") else 3.0 for n in task.parameters()}
    rank = 42 if structure == "lowrank" else None
    flat = fit_laplace(task, structure=structure, prior_precision=1.0, rank=rank)
    by_name = fit_laplace(task, structure=structure, prior_precision=prior, rank=rank)
    for name, delta in prior.items():
        gap = by_name.precision(name) - flat.precision(name)
        assert relative(gap, torch.full_like(gap, delta - 1)) < 1e-9
    by_name.save(tmp_path / "q")
    assert Posterior.load(tmp_path / "q").prior_precision == prior


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian", "poisson"])
def test_monte_carlo_fisher_is_unbiased(kind: str) -> None:
    """vᵀF̂v is within four standard errors of vᵀGv, taken over independent fits of 200 labels an
    example, which are small."""
    task = small(kind)
    ggn = dense_ggn(task, dense_jacobian(task, task.parameters()))
    settings: dict[str, Any] = {"curvature": "mc_fisher", "samples": 200}
    fits = torch.stack([curvature_of(task, "full", seed=seed, **settings) for seed in range(12)])
    v = normal(6, len(ggn), seed=7)
    truth = torch.einsum("dp,pq,dq->d", v, ggn, v)
    estimates = torch.einsum("dp,spq,dq->sd", v, fits, v)
    error = estimates.std(0) / 12**0.5
    assert float((error / truth).max()) < 0.06, "the test must be sharp"
    assert float(((estimates.mean(0) - truth) / error).abs().max()) < 4


@pytest.mark.parametrize("structure", STRUCTURES)
def test_monte_carlo_fisher_is_reproducible(structure: str) -> None:
    """The seed decides the labels, not the global generator, and all passes see the same."""
    task = small()
    before = torch.get_rng_state()
    settings: dict[str, Any] = {"curvature": "mc_fisher", "samples": 3}
    first = curvature_of(task, structure, seed=1, **settings)
    again = curvature_of(task, structure, seed=1, **settings)
    another_seed = curvature_of(task, structure, seed=2, **settings)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert relative(another_seed, first) > 0.01
    trace = float(curvature_of(task, "full", seed=1, **settings).trace())
    assert float(first.trace()) == pytest.approx(trace, rel=1e-10)


@pytest.mark.parametrize("make", [small, convolutional, many_outputs])
@pytest.mark.parametrize(
    ("curvature", "fisher"), [("ggn", "type-2"), ("empirical_fisher", "empirical")]
)
def test_kronecker_equals_curvlinops_ekfac(make, curvature: str, fisher: str) -> None:
    """The same eigenvalue-corrected K-FAC, with the bias joined to the weight as we do.

    curvlinops treats weights and biases apart by default, which is another (coarser) matrix with
    the same trace; it knows Linear and Conv2d without groups, so the comparison stops there.
    """
    task = make()
    data = [task.dataset.tensors]
    params = list(task.model.parameters())
    eye = torch.eye(sum(p.numel() for p in params), dtype=torch.float64)
    loss = nn.CrossEntropyLoss(reduction="sum")
    theirs = [
        EKFACLinearOperator(
            task.model, loss, params, data, fisher_type=fisher, separate_weight_and_bias=apart
        )
        @ eye
        for apart in (False, True)
    ]
    ours = curvature_of(task, "kron", curvature=curvature)
    assert relative(ours, theirs[0]) < EXACT
    assert float(theirs[1].trace()) == pytest.approx(float(ours.trace()), rel=1e-10)


@pytest.fixture
def double() -> Iterator[None]:
    """laplace-torch passes its matrices through torch's default precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_posterior_precision_equals_laplace_torch(kind: str, structure: str) -> None:
    """Prior included; laplace-torch's ``sigma_noise`` is the square root of our variance.

    Its "kron" keeps plain Kronecker factors, without corrected eigenvalues, and is another matrix.
    """
    x = normal(9, 4)
    y = torch.arange(9) % 3 if kind == "categorical" else normal(9, 3, seed=1)
    sigma = torch.tensor([0.4 if kind == "gaussian" else 1.0], dtype=torch.float64)
    model = mlp()
    theirs = Laplace(
        model,
        "classification" if kind == "categorical" else "regression",
        subset_of_weights="all",
        hessian_structure=structure,
        prior_precision=0.5,
        sigma_noise=sigma,
        backend=CurvlinopsGGN,
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=4))
    likelihood = "categorical" if kind == "categorical" else Gaussian(0.4**2)
    task = Task(model, (x, y), likelihood=likelihood)
    ours = fit_laplace(task, structure=structure, prior_precision=0.5)
    truth = theirs.posterior_precision
    assert relative(dense_precision(ours), truth.diag() if structure == "diag" else truth) < EXACT


@pytest.mark.parametrize("structure", STRUCTURES)
def test_off_a_minimum_there_are_posteriors_at_the_checkpoints(structure: str) -> None:
    """Each is the fit at those weights and buffers; at a minimum, or of inputs, there are none."""
    x = normal(9, 4)
    y = torch.arange(9) % 3
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    model = randomised(model)
    states = [{n: t + d for n, t in model.state_dict().items()} for d in (0.1, 0.2)]
    task = Task(model, (x, y), checkpoints=states)
    q = fit_laplace(task, structure=structure, prior_precision=0.3)
    assert q.at_minimum is False
    assert len(q.run) == 3
    assert q.run[-1] is q
    for number, (early, state) in enumerate(zip(q.earlier, states, strict=True), 1):
        model_then = copy.deepcopy(model)
        model_then.load_state_dict(state)
        alone = fit_laplace(Task(model_then, (x, y)), structure=structure, prior_precision=0.3)
        assert early.record["checkpoint"] == number
        assert not early.earlier
        assert torch.equal(early.buffers["1.running_var"], state["1.running_var"])
        assert relative(dense_precision(early), dense_precision(alone)) < EXACT
    assert not fit_laplace(task, structure="gram").earlier


def test_the_recipes_first_weights_are_the_priors_mean() -> None:
    first = {n: p + 0.1 for n, p in mlp().state_dict().items()}
    recipe = Recipe("sgd", lr=0.1, epochs=2, batch_size=3, initial=first)
    task = Task(mlp(), (normal(9, 4), torch.arange(9) % 3), recipe=recipe)
    q = fit_laplace(task, prior_precision=1.0)
    assert q.initial is not None
    assert torch.equal(q.initial["0.bias"], first["0.bias"])
    assert q.record["recipe"]["optimizer"] == "sgd"


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(structure="lowrank", rank=1), "rank 1 explains"),
        (dict(structure="full", curvature="exact"), "Hessian is negative"),
    ],
)
def test_warnings_are_at_the_line_of_the_user(
    options: dict[str, Any], message: str, resumes: bool, tmp_path: Path
) -> None:
    """However deep inside the fit their cause is found."""
    if resumes:
        options = {**options, "unfinished": tmp_path}
    with pytest.warns(UserWarning, match=message) as caught:
        fit_laplace(small("categorical"), prior_precision=0.3, **options)
    assert {warning.filename for warning in caught} == {__file__}
