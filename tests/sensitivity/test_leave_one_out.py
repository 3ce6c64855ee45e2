"""Leave-one-out against closed forms (PRESS, Cook) and against retraining without each example."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import fit_at_rest
from oracles_retraining import (
    leave_one_out_weights,
    linear,
    retrained,
    standardised,
    trained,
    with_ones,
)
from scipy.stats import spearmanr
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import blr_analysis as blr
from blr_analysis.posterior.structures import Full
from blr_analysis.sensitivity import LeaveOneOut


def regression(n: int = 30, d: int = 4, c: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    x = x @ torch.randn(d, d, generator=g, dtype=torch.float64)  # correlated columns
    y = x @ torch.randn(d, c, generator=g, dtype=torch.float64)
    return x, y + 0.5 * torch.randn(n, c, generator=g, dtype=torch.float64)


def ridge_task(
    x: Tensor, y: Tensor, delta: float, noise: float = 1.0
) -> tuple[blr.Task, Tensor, Tensor]:
    """The exact ridge solution as a task, its hat values, and its residuals."""
    z = with_ones(x)
    scale = noise * delta
    if z.shape[1] <= len(z):
        fit = torch.linalg.solve(z.T @ z + scale * torch.eye(z.shape[1]).double(), z.T)
    else:  # the same matrix, (ZᵀZ + c)⁻¹ Zᵀ = Zᵀ (ZZᵀ + c)⁻¹
        fit = torch.linalg.solve(z @ z.T + scale * torch.eye(len(z)).double(), z).T
    theta = fit @ y
    hat = (z * fit.T).sum(1)
    task = blr.Task(linear(theta.T), (x, y), likelihood=blr.Gaussian(variance=noise))
    return task, hat, y - z @ theta


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize(("delta", "noise"), [(1.0, 1.0), (3.0, 0.25), (1e-6, 2.0)])
@pytest.mark.parametrize("outputs", [1, 3])
def test_linear_regression_is_press(
    structure: str, delta: float, noise: float, outputs: int
) -> None:
    x, y = regression(c=outputs)
    task, hat, residual = ridge_task(x, y, delta, noise)
    q = blr.fit_laplace(task, structure=structure, prior_precision=delta)
    loo = blr.leave_one_out(task, q, correction="cavity")
    left_out = residual / (1 - hat)[:, None]
    torch.testing.assert_close(y - loo.logits, left_out, rtol=1e-9, atol=1e-11)
    press = float(left_out.square().mean())
    assert loo.mse == pytest.approx(press, rel=1e-9)
    nll = 0.5 * press * outputs / noise + 0.5 * outputs * math.log(2 * math.pi * noise)
    assert loo.nll == pytest.approx(nll, rel=1e-9)
    assert loo.leverage.tolist() == pytest.approx(hat.tolist(), rel=1e-8)
    assert loo.accuracy is None


def test_press_is_what_retraining_gives() -> None:
    """The closed form itself, checked once by leaving every example out in earnest."""
    x, y = regression(n=12)
    task, *_ = ridge_task(x, y, 0.5)
    q = blr.fit_laplace(task, structure="full", prior_precision=0.5)
    loo = blr.leave_one_out(task, q)
    theta = retrained("gaussian", x, y, leave_one_out_weights(12), 0.5)
    truth = torch.einsum("ncd,nd->nc", theta, with_ones(x))
    torch.testing.assert_close(loo.logits, truth, rtol=1e-9, atol=1e-11)


def test_cooks_distance() -> None:
    """D_i = r_i² h_i / (p s² (1 − h_i)²): the squared shift of all fits in units of p s².

    With the noise variance s² of the Gaussian likelihood, the self-influence is r_i² h_i / s²
    and the cavity's deviation |r_i| h_i / (1 − h_i).
    """
    x, y = regression()
    n = len(x)
    p = 5
    task, hat, residual = ridge_task(x, y, 0.0)
    z = with_ones(x)
    s2 = float(residual.square().sum()) / (n - p)
    theta = retrained("gaussian", x, y, leave_one_out_weights(n), 0.0)[:, 0]
    full = torch.linalg.solve(z.T @ z, z.T @ y[:, 0])
    cook = (z @ (theta - full).T).square().sum(0) / (p * s2)  # by its definition, retraining each

    measured = blr.Task(task.model, (x, y), likelihood=blr.Gaussian(variance=s2))
    form = Full(z.T @ z / s2, {"weight": (1, 4), "bias": (1,)})
    q = blr.Posterior(task.parameters(), form, prior_precision=0.0, n_data=n)
    scores = blr.sensitivity(measured, q)
    loo = blr.leave_one_out(measured, q)
    by_influence = scores.self_influence / (p * (1 - hat) ** 2)
    by_deviation = loo.deviation.square() / (p * s2 * hat)
    torch.testing.assert_close(by_influence, cook, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(by_deviation, cook, rtol=1e-9, atol=1e-13)
    assert scores.deviation.tolist() == pytest.approx((residual[:, 0].abs() * hat).tolist())


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(2, 15),
    d=st.integers(1, 5),
    c=st.integers(1, 3),
    delta=st.floats(1e-2, 100),
    noise=st.floats(0.1, 10),
    seed=st.integers(0, 10**6),
)
def test_press_for_any_shape(n: int, d: int, c: int, delta: float, noise: float, seed: int) -> None:
    x, y = regression(n, d, c, seed)
    task, hat, residual = ridge_task(x, y, delta, noise)
    q = blr.fit_laplace(task, structure="full", prior_precision=delta)
    loo = blr.leave_one_out(task, q)
    has_cavity = loo.leverage < 1 - 1e-6  # where an example decides alone, no cavity is taken
    assert loo.correction == ["cavity" if k else "bounded" for k in has_cavity]
    left_out = residual / (1 - hat)[:, None]
    for rows, rtol in ((has_cavity & (hat < 0.999), 1e-6), (has_cavity, 1e-2)):  # 1 − h cancels
        torch.testing.assert_close((y - loo.logits)[rows], left_out[rows], rtol=rtol, atol=1e-8)


# Exact retraining of a classifier.


class Retrained:
    """Logistic regression from which every example was left out in earnest, δ = 1."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.task = blr.Task(trained("bernoulli", x, y, 1.0), (x, y), likelihood="bernoulli")
        theta = retrained("bernoulli", x, y, leave_one_out_weights(len(x)), 1.0)
        self.logits = torch.einsum("ncd,nd->nc", theta, with_ones(x))
        self.before, self.losses = (
            nn.functional.binary_cross_entropy_with_logits(
                f, y.double()[:, None], reduction="none"
            ).flatten()
            for f in (self.task.model(x).detach(), self.logits)
        )
        self.rise = self.losses - self.before
        self.loo = cache(self._loo)

    def _loo(self, structure: str, correction: str = "auto") -> LeaveOneOut:
        """The estimate from the training data alone."""
        q = blr.fit_laplace(self.task, structure=structure, prior_precision=1.0)
        return blr.leave_one_out(self.task, q, correction=correction)

    def total(self, structure: str, correction: str = "auto") -> float:
        """Estimated over true total rise of the loss."""
        rise = self.loo(structure, correction).losses - self.before
        return float(rise.sum() / self.rise.sum())

    def rank(self, structure: str, correction: str = "auto") -> float:
        rise = self.loo(structure, correction).losses - self.before
        return float(spearmanr(rise, self.rise)[0])


@pytest.fixture(scope="module")
def cancer() -> Retrained:
    return Retrained(*standardised(load_breast_cancer))


@pytest.mark.slow
def test_breast_cancer_with_the_full_posterior(cancer: Retrained) -> None:
    loo = cancer.loo("full")
    assert set(loo.correction) == {"cavity"}
    assert cancer.total("full") == pytest.approx(1.012, abs=2e-3)
    assert cancer.rank("full") > 0.9999
    assert loo.nll == pytest.approx(float(cancer.losses.mean()), rel=5e-3)
    right = (cancer.logits[:, 0] > 0) == (cancer.task.dataset.tensors[1] == 1)
    assert loo.accuracy == float(right.double().mean())
    assert loo.nll > 1.4 * float(cancer.before.mean())  # the training loss alone deceives


@pytest.mark.parametrize(("structure", "total", "rows"), [("kron", 0.668, 3), ("diag", 1.177, 4)])
def test_breast_cancer_with_cheaper_posteriors(
    cancer: Retrained, structure: str, total: float, rows: int
) -> None:
    assert cancer.total(structure) == pytest.approx(total, abs=2e-3)
    assert cancer.rank(structure) > 0.998
    q = blr.fit_laplace(cancer.task, structure=structure, prior_precision=1.0)
    better = blr.calibrate(cancer.task, q)  # by exact solves of a probe
    assert abs(math.log(better.temperature)) < 1
    estimate = blr.leave_one_out(cancer.task, better).losses - cancer.before
    assert float(estimate.sum() / cancer.rise.sum()) == pytest.approx(1, abs=0.2)
    loo = cancer.loo(structure, "cavity")
    over = loo.leverage >= 0.9
    assert int(over.sum()) == rows
    assert loo.correction == ["bounded" if o else "cavity" for o in over]
    # Overstated variances give overstated totals, but the ranking stays.
    assert 1.2 < cancer.total(structure, "cavity") < 10
    assert cancer.rank(structure, "cavity") > 0.998


# What the corrections mean.


def softmax_task(scale: float) -> tuple[blr.Task, blr.Posterior]:
    """Softmax over three classes with a diagonal posterior whose V is ``scale`` times larger."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(12, 4, generator=g, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=g)
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 4, generator=g, dtype=torch.float64))
        model.bias.zero_()
    task = blr.Task(model, (x, y))
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    form = q.form.zeros().plus(q.form, 1 / scale)
    return task, blr.Posterior(q.mean, form, prior_precision=1.0, n_data=12)


@pytest.mark.parametrize("size", ["small", "at the bound", "large"])
def test_the_bounded_move_in_several_dimensions(size: str) -> None:
    """Against the spectral definition with an explicit inverse of the whitened system.

    With Λ = Σ_k l_k l_kᵀ in eigenvectors of ΛV, the cavity's excess V Λ^{1/2} g(A) Λ^{1/2} V e.
    """
    task, q = softmax_task({"small": 0.1, "at the bound": 1.0, "large": 1e4}[size])
    scores = blr.sensitivity(task, q)
    loo = blr.leave_one_out(task, q, correction="cavity")
    assert bool(torch.isfinite(loo.logits).all())
    for i in range(len(scores)):
        f, v, e = (t[i] for t in (scores.outputs, scores.variance, scores.error))
        p = f.softmax(-1)
        values, vectors = torch.linalg.eig((p.diag() - torch.outer(p, p)) @ v)  # not symmetric
        g = torch.tensor(
            [1 / (1 - a) if a < 0.9 else 0.81 / (a**2 * 0.1) for a in values.real],
            dtype=torch.float64,
        )
        spectral = (vectors @ (g * values.real).diag().to(vectors)) @ torch.linalg.inv(vectors)
        expected = f + v @ e + v @ spectral.real @ e
        torch.testing.assert_close(loo.logits[i], expected, rtol=1e-7, atol=1e-9)
        assert (loo.correction[i] == "bounded") == (float(loo.leverage[i]) >= 0.9)
    words = {"small": {"cavity"}, "large": {"bounded"}}
    assert size not in words or set(loo.correction) == words[size]


def test_a_move_grows_continuously_through_the_bound() -> None:
    """One output: the move is e v / (1 − h) up to h = 0.9, then grows on without a jump."""
    x = torch.ones(1, 1, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(2.0)
    task = blr.Task(model, (x, torch.zeros(1, 1, dtype=torch.float64)), likelihood="gaussian")
    moves = []
    sizes = (0.5, 0.899999, 0.900001, 0.95, 0.999, 1.0, 1.001, 2.0, 50.0, 1e6)
    for h in sizes:
        precision = {"weight": torch.full((1, 1), 1 / h, dtype=torch.float64)}
        q = blr.Posterior(task.parameters(), precision, prior_precision=0.0, n_data=1)
        loo = blr.leave_one_out(task, q, correction="cavity")
        moves.append(float(loo.logits[0, 0] - 2.0) / (2.0 * h))  # in units of the first order
    assert moves[0] == pytest.approx(2.0)
    assert moves[1] == pytest.approx(moves[2], rel=1e-4)
    assert all(1 <= m <= 10 * (1 + 1e-9) for m in moves)
    lengths = [m * h for m, h in zip(moves, sizes, strict=True)]
    assert lengths == sorted(lengths)
    assert moves[-1] == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("structure", ["kron", "diag"])
@pytest.mark.parametrize("correction", ["first_order", "cavity"])
def test_hundreds_of_classes(structure: str, correction: str) -> None:
    """Leverages by products with V and Λ, and V of the last layer by its shared unit columns."""
    n = 5
    c = 120
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, c)).double()
    x = torch.randn(n, 3, dtype=torch.float64)
    y = torch.arange(n) * 7
    with torch.no_grad():
        model[2].weight *= 3
    task = blr.Task(model, (x, y))
    q = fit_at_rest(task, structure=structure, prior_precision=3.0)
    loo = blr.leave_one_out(task, q, correction=correction)
    assert set(loo.correction) <= {correction, "bounded"}
    assert correction in loo.correction
    jacobians = jacrev(lambda w: functional_call(model, w, (x,)))(q.mean)
    for i in range(n):
        jacobian = {m: whole[i].detach() for m, whole in jacobians.items()}
        solved = q.form.solve(jacobian)
        v = sum(jacobian[m].flatten(1) @ solved[m].flatten(1).T for m in q.mean)
        f = model(x[i]).detach()
        p = f.softmax(-1)
        hessian = p.diag() - p.outer(p)
        error = p - nn.functional.one_hot(y[i], c)
        largest = torch.linalg.eigvals(v @ hessian).real.max()
        assert float(loo.leverage[i]) == pytest.approx(float(largest), rel=1e-3)
        if loo.correction[i] == correction:
            system = torch.eye(c, dtype=torch.float64)
            if correction == "cavity":
                system = system - v @ hessian
            moved = f + torch.linalg.solve(system, v @ error)
            torch.testing.assert_close(loo.logits[i], moved, rtol=1e-8, atol=1e-10)


@dataclass
class Ignored:
    """Examples of which a third has an ignored target, and the others alone, each with a fit."""

    counts: Tensor
    task: blr.Task
    q: blr.Posterior
    task_alone: blr.Task
    q_alone: blr.Posterior


@pytest.fixture
def ignored() -> Ignored:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (60,), generator=generator)
    counts = torch.arange(60) % 3 > 0
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    labels = torch.where(counts, y, -100)
    task = blr.Task(model, (x, labels), likelihood=nn.CrossEntropyLoss())
    task_alone = blr.Task(model, (x[counts], y[counts]))
    q = fit_at_rest(task, structure="full", prior_precision=1.0)
    q_alone = fit_at_rest(task_alone, structure="full", prior_precision=1.0)
    return Ignored(counts, task, q, task_alone, q_alone)


def test_ignored_examples_leave_no_trace_in_left_out_losses(ignored: Ignored) -> None:
    loo = blr.leave_one_out(ignored.task, ignored.q)
    expected = blr.leave_one_out(ignored.task_alone, ignored.q_alone)
    assert loo.nll == pytest.approx(expected.nll)
    assert loo.accuracy == expected.accuracy
    row = blr.Monitor(ignored.task)(ignored.q, 1)
    expected_row = blr.Monitor(ignored.task_alone)(ignored.q_alone, 1)
    for name in ("train_nll", "loo_nll", "train_accuracy"):
        assert row[name] == pytest.approx(expected_row[name])


def test_ignored_examples_leave_no_trace_in_removals(ignored: Ignored) -> None:
    task = ignored.task
    alone = ignored.task_alone
    first = int(ignored.counts.nonzero()[0])
    result = blr.what_if(task, ignored.q, remove=[first], evaluate=task, solver="posterior")
    expected = blr.what_if(alone, ignored.q_alone, remove=[0], evaluate=alone, solver="posterior")
    assert result.before.nll == pytest.approx(expected.before.nll)
    assert result.nll == pytest.approx(expected.nll)
    assert result.after.nll == pytest.approx(expected.after.nll)
    assert result.after.accuracy == pytest.approx(expected.after.accuracy)


def test_ignored_examples_are_not_suspected(ignored: Ignored) -> None:
    suspicions = blr.suspicious(ignored.task, ignored.q)
    expected = blr.suspicious(ignored.task_alone, ignored.q_alone)
    assert suspicions.proposed is not None
    assert torch.equal(suspicions.proposed[ignored.counts], expected.proposed)
    assert (suspicions.proposed[~ignored.counts] == -100).all()
    kinds_of_ignored = {suspicions.kind[i] for i in (~ignored.counts).nonzero().flatten()}
    assert "label" not in kinds_of_ignored


# Examples left out by a descent, against exact retraining.


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_few_that_matter_make_leave_one_out_agree_with_retraining(
    cancer: Retrained, structure: str
) -> None:
    q = blr.fit_laplace(cancer.task, structure=structure, prior_precision=1.0)
    rough = cancer.loo(structure, "cavity")
    fine = blr.leave_one_out(cancer.task, q, correction="cavity", refine=20)
    assert fine.correction.count("descent") == 20
    assert "descent for 20" in repr(fine)
    steep = int((rough.leverage > 0.5).sum())
    assert f"{steep} left-out losses are rough estimates (leverage above 0.5)" in repr(rough)
    assert (fine.table["correction"] == "descent").sum() == 20
    is_rough = torch.tensor([word != "descent" for word in fine.correction])
    assert torch.equal(fine.logits[is_rough], rough.logits[is_rough])
    error = (fine.losses - cancer.losses)[~is_rough].abs().sum()
    error_before = (rough.losses - cancer.losses)[~is_rough].abs().sum()
    assert float(error) < 0.05 * float(error_before)
    if structure == "full":
        estimate = fine.losses - fine.losses_before
        assert float(estimate.sum() / cancer.rise.sum()) == pytest.approx(1, abs=0.01)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("by", ["ignored label", "weight of 0"])
def test_an_example_without_a_gradient_moves_nothing(by: str) -> None:
    """The minimum is the same without it; the others are as retraining leaves them, no warning."""
    n = 12
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(n) % 3
    counts = torch.arange(n) % 4 > 0
    weights = leave_one_out_weights(n) * counts
    without = retrained("categorical", x, y, weights, 1.0, outputs=3)
    model = linear(retrained("categorical", x, y, counts[None], 1.0, outputs=3)[0])
    if by == "ignored label":
        labels = torch.where(counts, y, -100)
        task = blr.Task(model, (x, labels), likelihood=nn.CrossEntropyLoss())
    else:
        task = blr.Task(model, (x, y), weights=counts.double())
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    loo = blr.leave_one_out(task, q, refine=n)
    assert loo.correction == ["descent"] * n
    truth = torch.einsum("ncd,nd->nc", without, with_ones(x))
    torch.testing.assert_close(loo.logits, truth, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(loo.logits[~counts], truth[~counts], rtol=1e-8, atol=1e-8)


def test_a_model_away_from_its_minimum_keeps_its_estimates() -> None:
    torch.manual_seed(0)
    task = blr.Task(nn.Linear(3, 2), (torch.randn(20, 3), torch.arange(20) % 2))
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    rough = blr.leave_one_out(task, q)
    with pytest.warns(RuntimeWarning, match="5 of 5 examples keep their estimate"):
        fine = blr.leave_one_out(task, q, refine=5)
    assert "descent" not in fine.correction
    assert torch.equal(fine.logits, rough.logits)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_moves_that_are_too_long_are_no_estimate(likelihood: str) -> None:
    """Left out below chance, with leverages above 1: said, and printed as no estimate."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 40, generator=g)
    if likelihood == "categorical":
        y = (x[:, 0] > 0).long()
        model = torch.nn.Linear(40, 2)
    else:
        y = (x[:, :1] > 0).float()
        model = torch.nn.Linear(40, 1)
    task = blr.Task(model, (x, y), likelihood=likelihood)
    loose = {n: torch.full_like(p, 1e-3) for n, p in task.parameters().items()}
    tight = {n: torch.full_like(p, 1e5) for n, p in task.parameters().items()}

    def loo_of(precision: dict[str, Tensor]) -> LeaveOneOut:
        q = blr.Posterior(task.parameters(), precision, prior_precision=1e-4, n_data=60)
        return blr.leave_one_out(task, q)

    wild = loo_of(loose)
    tame = loo_of(tight)
    assert (wild.leverage >= 1).all()
    assert wild.is_below_chance
    assert "no estimate" in repr(wild)
    assert "below chance" in wild.note
    assert "accuracy" not in repr(wild)
    assert "nll" not in repr(wild)
    assert not tame.is_below_chance
    assert "no estimate" not in repr(tame)
