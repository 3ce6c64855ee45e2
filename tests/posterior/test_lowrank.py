"""Low rank plus diagonal against curvlinops, brute-force Jacobians and the full posterior."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from curvlinops import GGNLinearOperator
from models import mlp, normal
from oracles import dense_ggn, dense_jacobian, flatten, relative, rows, unflatten
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.backprop.engine import chunks

SIZE = 43  # parameters of the MLP
TOLERANCE = 0.05  # of what a rank that is grown may leave
pytestmark = pytest.mark.filterwarnings("ignore:rank .* explains")


def task_of(n: int = 40) -> blr.Task:
    return blr.Task(mlp(), (normal(n, 4), torch.arange(n) % 3))


def fitted(task: blr.Task, structure: str = "lowrank", prior: Any = 0.5, **options: Any) -> Any:
    return blr.fit_laplace(task, structure=structure, prior_precision=prior, **options)


def ggn_of(task: blr.Task) -> Tensor:
    return dense_ggn(task, dense_jacobian(task, task.parameters()))


def variances(task: blr.Task, q: blr.Posterior) -> Tensor:
    sweep = chunks(task.quiet, q.mean)
    return torch.cat([q.form.gram(chunk.jacobian_terms()) for chunk in sweep])


@pytest.mark.parametrize("curvature", ["ggn", "empirical_fisher", "mc_fisher"])
def test_at_full_rank_it_is_the_full_posterior(curvature: str) -> None:
    task = task_of(9)
    low = fitted(task, "lowrank", curvature=curvature, rank=SIZE - 1)
    full = fitted(task, "full", curvature=curvature)
    assert low.form.rank == (18 if curvature == "ggn" else 9)  # two independent outputs, or one
    assert low.record["explained"] == pytest.approx(1, abs=1e-9)
    assert relative(variances(task, low), variances(task, full)) < 1e-8
    if curvature != "ggn":
        return
    logits = blr.leave_one_out(task, low).logits
    assert relative(logits, blr.leave_one_out(task, full).logits) < 1e-8
    removal = blr.what_if(task, low, remove=[0, 3], solver="posterior")
    expected = blr.what_if(task, full, remove=[0, 3], solver="posterior")
    assert relative(flatten(removal.parameters), flatten(expected.parameters)) < 1e-8


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_leading_directions_are_those_of_curvlinops(rank: int) -> None:
    task = task_of()
    params = list(task.model.parameters())
    loss = nn.CrossEntropyLoss(reduction="sum")
    eye = torch.eye(SIZE, dtype=torch.float64)
    ggn = GGNLinearOperator(task.model, loss, params, [task.dataset.tensors]) @ eye
    values, vectors = torch.linalg.eigh(ggn)
    form = fitted(task, rank=rank).form
    assert form.rank == rank
    assert relative(torch.linalg.eigvalsh(form.core), values[-rank:]) < 1e-6
    projection = rows(form.basis) @ vectors[:, -rank:]
    assert float(torch.linalg.svdvals(projection)[-1]) > 1 - 1e-6


PRIORS = [20.0, {"0.weight": 0.1, "0.bias": 3.0, "2.weight": 40.0, "2.bias": 1.0}]


@pytest.mark.parametrize("prior", PRIORS)
def test_directions_lead_in_the_priors_metric_and_the_rest_is_its_diagonal(prior: Any) -> None:
    """δ^½ times the eigenvectors of δ^-½ G δ^-½, against dense algebra; D is the prior and what
    the directions leave of G's diagonal."""
    task = task_of()
    rank = 7
    q = fitted(task, prior=prior, rank=rank)
    delta = flatten({n: torch.full_like(m, q.prior.of(n)) for n, m in q.mean.items()})
    ggn = ggn_of(task)
    _, vectors = torch.linalg.eigh(ggn / delta.outer(delta).sqrt())
    wanted, _ = torch.linalg.qr(delta.sqrt().unsqueeze(1) * vectors[:, -rank:])
    basis = rows(q.form.basis)
    assert relative(basis @ basis.mT, torch.eye(rank).double()) < 1e-10
    assert relative(basis.mT @ basis, wanted @ wanted.mT) < 1e-6
    inside = basis.mT @ (basis @ ggn @ basis.mT) @ basis
    left = (ggn - inside).diagonal().clamp_min(0)
    unit = unflatten(torch.eye(SIZE).double(), q.mean)
    truth = inside + left.diag() + delta.diag()
    assert relative(rows(q.form.times(unit)), truth) < 1e-8


def test_directions_are_looked_for_until_no_trace_is_missing() -> None:
    """Equal eigenvalues end a Krylov space early: here 24 of 30, in blocks of 8."""
    x = torch.eye(30, dtype=torch.float64)[:24]
    model = nn.Linear(30, 1, bias=False).double()
    task = blr.Task(model, (x, torch.zeros(24, 1).double()), likelihood="gaussian")
    q = fitted(task, prior=1e-3)
    assert q.record["rank"] >= 23
    assert q.record["explained"] > 1 - TOLERANCE
    assert fitted(task, prior=1e-3, rank=24).record["explained"] == pytest.approx(1)


def test_no_gradients_change_nothing() -> None:
    form = fitted(task_of(), rank=5).form
    assert torch.equal(form.add([]).core, form.core)


@pytest.mark.parametrize("prior", PRIORS)
def test_what_is_said_to_be_explained_is_explained(prior: Any) -> None:
    """In the prior's own metric, by no more directions than the bound needs."""
    task = task_of()
    q = fitted(task, prior=prior)
    delta_of_weights = {n: torch.full_like(m, q.prior.of(n)) for n, m in q.mean.items()}
    delta = flatten(delta_of_weights)
    values = torch.linalg.eigvalsh(ggn_of(task) / delta.outer(delta).sqrt()).flip(0)
    explained = (values / (1 + values)).cumsum(0)
    rank = q.record["rank"]
    share = float(explained[rank - 1] / explained[-1])
    assert 1 - TOLERANCE <= q.record["explained"] <= share + 1e-9
    missing = (values.sum() - values.cumsum(0)).clamp_min(0)
    left = (SIZE - torch.arange(1, SIZE + 1)).clamp_min(1)
    least = explained / (explained + missing / (1 + missing / left))
    assert rank <= int((least >= 1 - TOLERANCE).nonzero()[0]) + 2


def test_single_precision_bears_a_small_prior() -> None:
    """gᵀΣg is a difference of numbers up to a million times as large."""
    x = 3 * normal(12, 4)
    y = normal(12, 3, seed=1)
    double = blr.Task(mlp(), (x, y), likelihood="gaussian")
    single = blr.Task(mlp().float(), (x.float(), y.float()), likelihood="gaussian")
    truth = variances(double, fitted(double, "full", prior=1e-4))
    ours = variances(single, fitted(single, prior=1e-4, rank=SIZE - 1))
    lengths = dense_jacobian(double, double.parameters()).square().sum(-1).max() / 1e-4
    assert float(lengths) > 1e5 * float(truth.abs().max()), "the test must be hard"
    assert ours.dtype == torch.float32
    assert relative(ours.double(), truth) < 1e-3


def test_a_rank_too_small_for_influence_says_so() -> None:
    for rank, is_too_small in ((1, True), (30, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            q = fitted(task_of(), rank=rank)
        is_warned = any("influence" in str(w.message) for w in caught)
        assert is_warned == is_too_small
        assert ("influence" in repr(q)) == is_too_small
        assert (q.record["explained"] < 0.9) == is_too_small


def test_no_curvature_at_all() -> None:
    model = nn.Linear(3, 2, bias=False).double()
    q = fitted(blr.Task(model, (torch.zeros(5, 3).double(), torch.arange(5) % 2)))
    assert q.record["rank"] == 0
    assert torch.equal(q.variance("weight"), torch.full((2, 3), 2.0).double())
