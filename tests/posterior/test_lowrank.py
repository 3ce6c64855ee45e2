"""Low rank plus diagonal: exact where it spans everything, bounded where it does not."""

from __future__ import annotations

import warnings

import pytest
import torch
from curvlinops import GGNLinearOperator
from models import example_models, mlp
from oracles import dense_ggn, dense_jacobian, flatten, relative, rows, unflatten
from parts import normal
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.backprop import outer
from blr_analysis.backprop import rows as rows_module
from blr_analysis.backprop import terms as terms_module
from blr_analysis.backprop.engine import QUIET, Chunking, chunks
from blr_analysis.backprop.terms import Dense, products
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures import LowRank, full, lowrank
from blr_analysis.posterior.structures.sketch import sketch

SIZE = 43  # parameters of the MLP


def task_of(n: int = 40) -> blr.Task:
    return blr.Task(mlp(), (normal(n, 4), torch.arange(n) % 3))


def fitted(task: blr.Task, structure: str = "lowrank", prior=0.5, **options) -> blr.Posterior:
    return blr.fit_laplace(task, structure=structure, prior_precision=prior, **options)


def ggn_of(task: blr.Task) -> Tensor:
    return dense_ggn(task, dense_jacobian(task, task.parameters()))


def variances(task: blr.Task, q: blr.Posterior) -> Tensor:
    parts = chunks(task, q.mean, QUIET)
    return torch.cat([q.form.gram(chunk.jacobian_terms()) for chunk in parts])


# ------------------------------------------------------------------------ all directions kept


def test_single_precision_keeps_small_eigenvalues() -> None:
    """Beside curvature of 10⁶ δ: leverages are what they are in float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(100, 6, generator=generator, dtype=torch.float64).to(dtype)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2)).to(dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
        task = blr.Task(model, (x, torch.arange(100) % 2), likelihood="categorical")
        q = fitted(task, prior=1e-4, rank=60)
        found.append(blr.sensitivity(task, q).leverage.double())
    assert float((found[0] - found[1]).abs().max()) < 5e-3


def test_at_full_rank_it_is_the_full_posterior() -> None:
    task = task_of(9)  # a curvature of rank 18: two independent outputs each
    low, full = fitted(task, rank=SIZE - 1), fitted(task, "full")
    assert low.form.rank == 18
    assert low.record["explained"] == pytest.approx(1, abs=1e-9)
    assert relative(variances(task, low), variances(task, full)) < 1e-8
    one, two = (blr.leave_one_out(task, q) for q in (low, full))
    assert relative(one.logits, two.logits) < 1e-8
    assert one.correction == two.correction
    one, two = (blr.what_if(task, q, remove=[0, 3, 4], solver="posterior") for q in (low, full))
    assert relative(flatten(one.parameters), flatten(two.parameters)) < 1e-8
    assert one.nll == pytest.approx(two.nll, rel=1e-8)


# --------------------------------------------------------------------------- few directions


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_leading_directions_are_those_of_curvlinops(rank: int) -> None:
    task = task_of()
    params = list(task.model.parameters())
    loss = nn.CrossEntropyLoss(reduction="sum")
    eye = torch.eye(SIZE, dtype=torch.float64)
    ggn = GGNLinearOperator(task.model, loss, params, [task.dataset.tensors]) @ eye
    values, vectors = torch.linalg.eigh(ggn)
    form = fitted(task, rank=rank).form
    assert isinstance(form, LowRank)
    assert form.rank == rank
    ours = torch.linalg.eigvalsh(form.core)
    assert relative(ours, values[-rank:]) < 1e-6
    projection = rows(form.basis) @ vectors[:, -rank:]
    assert float(torch.linalg.svdvals(projection)[-1]) > 1 - 1e-6


def test_diagonal_is_that_of_the_curvature() -> None:
    """What the leading directions leave of the diagonal is kept beside them."""
    task = task_of()
    q = fitted(task, rank=3)
    diagonal = flatten({n: q.precision(n) for n in q.mean})
    assert relative(diagonal, ggn_of(task).diagonal() + 0.5) < 1e-10


@pytest.mark.parametrize("rank", [3, 6, 12])
def test_the_diagonal_of_the_rest_brings_variances_nearer(rank: int) -> None:
    task = task_of(80)
    q = fitted(task, rank=rank)
    form = q.form
    assert isinstance(form, LowRank)
    alone = LowRank({n: torch.full_like(m, 0.5) for n, m in q.mean.items()}, form.basis, form.core)
    without = blr.Posterior(q.mean, alone, prior_precision=0.5, n_data=80)
    truth = blr.sensitivity(task, fitted(task, "full")).self_influence
    kept, lost = (
        blr.sensitivity(task, p).self_influence.sum() / truth.sum() - 1 for p in (q, without)
    )
    assert abs(kept) < abs(lost)


PRIORS = [0.5, 20.0, {"0.weight": 0.1, "0.bias": 3.0, "2.weight": 40.0, "2.bias": 1.0}]


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("tolerance", [0.5, 0.2, 0.05, 1e-6])
def test_tolerance_is_kept(prior, tolerance: float) -> None:
    """What is said to be explained is explained, in the prior's own metric."""
    task = task_of()
    q = fitted(task, prior=prior, tolerance=tolerance)
    delta = flatten({n: torch.full_like(m, q.prior_precision[n] if isinstance(prior, dict)
                                        else prior) for n, m in q.mean.items()})  # fmt: skip
    values = torch.linalg.eigvalsh(ggn_of(task) / (delta.outer(delta)).sqrt()).flip(0)
    shares = (values / (1 + values)).cumsum(0) / (values / (1 + values)).sum()
    assert q.record["tolerance"] == tolerance
    rank = q.record["rank"]
    assert 1 - tolerance <= q.record["explained"] <= float(shares[rank - 1]) + 1e-9
    missing = (values.sum() - values.cumsum(0)).clamp_min(0)
    left = (SIZE - torch.arange(1, SIZE + 1)).clamp_min(1)
    least = (values / (1 + values)).cumsum(0)
    least = least / (least + missing / (1 + missing / left))
    needed = int((least >= 1 - tolerance).nonzero()[0]) + 1
    assert needed <= rank <= needed + 1, "no more directions than the bound needs"


@pytest.mark.parametrize("curvature", ["empirical_fisher", "mc_fisher"])
def test_other_curvatures(curvature: str) -> None:
    task = task_of(9)
    pair = [
        fitted(
            task, s, curvature=curvature, generator=torch.Generator().manual_seed(1),
            **({"rank": SIZE - 1} if s == "lowrank" else {}),
        )
        for s in ("lowrank", "full")
    ]  # fmt: skip
    assert pair[0].form.rank == 9  # one gradient each
    assert relative(variances(task, pair[0]), variances(task, pair[1])) < 1e-8


# -------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("name", ["mlp", "images", "volumes", "words_tied", "words"])
@pytest.mark.parametrize("held", [1, 200, 2**21])
def test_products_with_stacked_vectors(name: str, held: int, monkeypatch) -> None:
    """T = J Uᵀ and Jᵀ T against brute-force Jacobians, whatever is held at once."""
    for module in (outer, rows_module, terms_module):
        monkeypatch.setattr(module, "HELD", held)
    model, x = example_models()[name]
    with torch.no_grad():
        task = blr.Task(model, (x, torch.arange(len(x)) % model(x).shape[-1]))
    params = task.parameters()
    jacobian = dense_jacobian(task, params)
    flat = normal(30, jacobian.shape[-1], seed=4)
    scale = normal(jacobian.shape[-1], seed=5)
    stack = unflatten(flat, params)
    into = {n: torch.zeros_like(u) for n, u in stack.items()}
    found = []
    for chunk in chunks(task, params, Chunking(chunk_size=2, progress=False)):
        terms = chunk.jacobian_terms()
        found.append(products(terms, stack, dtype=torch.float64, scale=unflatten(scale, params)))
        for term in terms:
            term.combined(found[-1], into)
    truth = torch.einsum("ncp,rp->ncr", jacobian, flat * scale)
    assert relative(torch.cat(found), truth) < 1e-12
    assert relative(rows(into), torch.einsum("ncr,ncp->rp", truth, jacobian)) < 1e-12


@pytest.mark.parametrize("held", [1, 300])
def test_working_memory_does_not_matter(held: int, monkeypatch) -> None:
    task = task_of(12)
    q = fitted(task, rank=5)
    v = unflatten(normal(3, SIZE), q.mean)
    before = variances(task, q), q.variance("0.weight"), rows(q.covariance_product(v))
    monkeypatch.setattr(lowrank, "HELD", held)
    q = blr.Posterior(q.mean, q.form.to("cpu", torch.float64), prior_precision=0.5, n_data=12)
    after = variances(task, q), q.variance("0.weight"), rows(q.covariance_product(v))
    for one, two in zip(before, after, strict=True):
        assert relative(two, one) < 1e-12


def test_single_precision_bears_a_small_prior() -> None:
    """gᵀΣg is a difference of numbers up to a million times as large."""
    x, y = 3 * normal(12, 4), normal(12, 3, seed=1)
    double = blr.Task(mlp(), (x, y), likelihood="gaussian")
    single = blr.Task(mlp().float(), (x.float(), y.float()), likelihood="gaussian")
    truth = variances(double, fitted(double, "full", prior=1e-4))
    ours = variances(single, fitted(single, prior=1e-4, rank=SIZE - 1))
    assert ours.dtype == torch.float32
    lengths = dense_jacobian(double, double.parameters()).square().sum(-1).max() / 1e-4
    assert float(lengths) > 1e5 * float(truth.abs().max()), "the test must be hard"
    assert relative(ours.double(), truth) < 1e-3


def test_sketch_starts_again_where_a_space_closes() -> None:
    """An identity closes a Krylov space at once; new random vectors find the rest."""
    params = {"w": torch.zeros(30, dtype=torch.float64)}
    columns = {"w": torch.eye(30, dtype=torch.float64).unsqueeze(0)}
    term = Dense(columns)
    found = sketch(
        lambda label: [[term]],
        params,
        Prior({None: 1.0}),
        rank=None,
        tolerance=1e-9,
        most=30,
        size=30,
    )
    assert found.basis["w"].shape == (30, 30)
    assert found.share == pytest.approx(1)
    eye = torch.eye(30, dtype=torch.float64)
    assert relative(found.basis["w"] @ found.basis["w"].mT, eye) < 1e-10


# --------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("rank", [SIZE, 1000])
def test_rank_below_the_number_of_parameters(rank: int) -> None:
    with pytest.raises(InputError, match=r"rank must be below .* 43.*structure='full'"):
        fitted(task_of(), rank=rank)


@pytest.mark.parametrize("rank", [0, -1, 2.5, True, "3"])
def test_rank_is_a_positive_integer(rank) -> None:
    with pytest.raises(InputError, match="rank must be a positive integer"):
        fitted(task_of(), rank=rank)


@pytest.mark.parametrize("tolerance", [0, 1, -0.1, 2, float("nan"), "0.1", True])
def test_tolerance_is_a_share(tolerance) -> None:
    with pytest.raises(InputError, match="tolerance must"):
        fitted(task_of(), tolerance=tolerance)


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("option", [{"rank": 3}, {"tolerance": 0.1}])
def test_other_structures_have_no_rank(structure: str, option: dict) -> None:
    with pytest.raises(InputError, match=f"{next(iter(option))} belongs to structure='lowrank'"):
        fitted(task_of(), structure, **option)


def test_rank_or_tolerance() -> None:
    with pytest.raises(InputError, match="rank or tolerance, not both"):
        fitted(task_of(), rank=3, tolerance=0.1)


def test_a_rank_that_does_not_suffice_is_said(monkeypatch) -> None:
    monkeypatch.setattr(lowrank, "RANK_LIMIT", 3)
    with pytest.warns(UserWarning, match=r"3 directions explain .*give rank="):
        q = fitted(task_of(), tolerance=0.01)
    assert q.record["rank"] == 3
    assert q.record["explained"] < 0.99
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted(task_of(), rank=30).record["rank"] == 30


def test_a_model_too_large_for_full_is_sent_here(monkeypatch) -> None:
    monkeypatch.setattr(full, "LIMIT", 10)
    with pytest.raises(InputError, match="'lowrank'"):
        fitted(task_of(), "full")


def test_two_bases_do_not_add() -> None:
    one, two = fitted(task_of(), rank=3).form, fitted(task_of(30), rank=3).form
    with pytest.raises(InputError, match="one basis"):
        one.plus(two)
    same = fitted(task_of(), rank=3).form
    assert relative(one.plus(same.zeros()).core, one.core) < 1e-12


def test_check_names_what_is_wrong() -> None:
    form = fitted(task_of(), rank=3).form
    assert isinstance(form, LowRank)
    base = {**form.base, "0.bias": form.base["0.bias"] - 9}
    with pytest.raises(PosteriorError, match=r"0\.bias"):
        LowRank(base, form.basis, form.core).check()
    basis = {**form.basis, "2.bias": form.basis["2.bias"] * float("nan")}
    with pytest.raises(PosteriorError, match=r"2\.bias.*NaN"):
        LowRank(form.base, basis, form.core).check()
    with pytest.raises(PosteriorError, match="not positive definite"):
        LowRank(form.base, form.basis, form.core - 1e6 * torch.eye(3)).check()


def test_a_rank_too_small_for_influence_says_so() -> None:
    for rank, short in ((1, True), (30, False)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            q = fitted(task_of(), rank=rank)
        assert any("influence" in str(w.message) for w in said) == short
        assert ("influence" in repr(q)) == short == (q.record["explained"] < 0.9)


@pytest.mark.parametrize("other", [0.5, 0.01, 50.0])
def test_what_is_explained_is_that_of_the_prior(other: float) -> None:
    """Under another δ too, the bound of a fit from all eigenvalues."""
    task = task_of()
    q = fitted(task, rank=8)
    values = torch.linalg.eigvalsh(ggn_of(task)).flip(0) / other
    shares = (values / (1 + values)).cumsum(0)
    missing = values[8:].sum()
    least = shares[7] / (shares[7] + missing / (1 + missing / (SIZE - 8)))
    explained = q.at({n: other for n in q.mean}).record["explained"]
    assert explained == pytest.approx(float(least), rel=1e-3)
    assert explained <= float(shares[7] / shares[-1]) + 1e-9


def test_no_curvature_at_all() -> None:
    model = nn.Linear(3, 2, bias=False).double()
    q = fitted(blr.Task(model, (torch.zeros(5, 3).double(), torch.arange(5) % 2)))
    assert q.record["rank"] == 0
    assert torch.equal(q.variance("weight"), torch.full((2, 3), 2.0).double())
