"""Groups removed, added, relabelled: exact for linear regression, compared with retraining else.

Every number on ``evaluate`` is a real forward pass at the new weights, done again here by hand.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import mlp
from oracles import dense_jacobian, dense_precision, fit_at_rest, flatten, rows, unflatten
from oracles_retraining import flat, linear, retrained, standardised, trained, with_ones, without
from scipy.stats import spearmanr
from sklearn.datasets import load_breast_cancer, load_iris
from snapshots import untouched
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.backprop.engine import QUIET
from blr_analysis.errors import InputError, ModelError
from blr_analysis.sensitivity.objective import share

KINDS = {"categorical": 3, "bernoulli": 1, "gaussian": 2, "poisson": 1}


def regression(n: int, d: int, c: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    y = x @ torch.randn(d, c, generator=g, dtype=torch.float64)
    return x, y + 0.5 * torch.randn(n, c, generator=g, dtype=torch.float64)


def fitted(
    x: Tensor, y: Tensor, delta: float = 1.0, structure: str = "full", **options
) -> tuple[blr.Task, blr.Posterior]:
    """Linear regression trained to the optimum, and its exact posterior."""
    model = trained("gaussian", x, y, delta, y.shape[1])
    task = blr.Task(model, (x, y), likelihood="gaussian", **options)
    q = fit_at_rest(task, structure=structure, prior_precision=delta)
    return task, q


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# Linear regression: exact, whatever the group.


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_removing_any_group_from_linear_regression_is_retraining(data) -> None:
    n, d, c = (
        data.draw(st.integers(2, 12)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 3)),
    )
    group = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n - 1))
    delta = data.draw(st.floats(0.01, 100))
    x, y = regression(n, d, c, data.draw(st.integers(0, 10**6)))
    task, q = fitted(x, y, delta)
    result = blr.what_if(task, q, remove=sorted(group))
    weights = without(n, sorted(group))
    truth = retrained("gaussian", x, y, weights, delta, c)[0]
    close(flat(result.parameters), truth, 1e-7)
    kept = with_ones(x)[weights[0] == 1]
    gram = kept.T @ kept + delta * torch.eye(d + 1, dtype=torch.float64)
    left = dense_precision(result.posterior)[: c * d, : c * d]
    close(left, torch.kron(torch.eye(c), gram[:d, :d]), 1e-7)
    assert result.removed == len(group) and result.posterior.n_data == n - len(group)


@pytest.mark.parametrize("noise", [1.0, 0.25])
def test_the_posterior_left_is_the_one_fitted_to_what_is_left(noise: float) -> None:
    x, y = regression(20, 3, 2)
    gaussian = blr.Gaussian(variance=noise)
    model = linear(retrained("gaussian", x, y, torch.ones(1, 20), noise * 0.7, 2)[0])
    task = blr.Task(model, (x, y), likelihood=gaussian)
    q = fit_at_rest(task, structure="full", prior_precision=0.7)
    result = blr.what_if(task, q, remove=range(5, 12))
    kept = [*range(5), *range(12, 20)]
    theta = retrained("gaussian", x[kept], y[kept], torch.ones(1, 13), noise * 0.7, 2)[0]
    again = blr.Task(linear(theta), (x[kept], y[kept]), likelihood=gaussian)
    p = fit_at_rest(again, structure="full", prior_precision=0.7)
    close(flat(result.posterior.mean), flat(p.mean))
    close(dense_precision(result.posterior), dense_precision(p))
    close(result.posterior.variance("weight"), p.variance("weight"))
    assert result.posterior.n_data == p.n_data == 13
    assert result.floored == 0.0


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_removing_in_two_steps_is_removing_at_once(structure: str) -> None:
    """The posterior that is left can be used further, on the task that is left."""
    x, y = regression(20, 3)
    task, q = fitted(x, y, structure=structure)
    once = blr.what_if(task, q, remove=[2, 3, 11])
    first = blr.what_if(task, q, remove=[3])
    rest = task.subset([i for i in range(20) if i != 3])
    second = blr.what_if(rest, first.posterior, remove=[2, 10])
    if structure == "full":  # exact; the others keep no correlations between the steps
        close(flat(second.parameters), flat(once.parameters))
    close(dense_precision(second.posterior), dense_precision(once.posterior))
    assert second.posterior.n_data == 17
    assert len(blr.sensitivity(rest, first.posterior)) == 19


@settings(deadline=None, max_examples=20)
@given(
    structure=st.sampled_from(["full", "kron", "diag"]),
    group=st.sets(st.integers(0, 9), min_size=1, max_size=9),
    seed=st.integers(0, 10**6),
)
def test_adding_after_removing_returns_the_start(
    structure: str, group: set[int], seed: int
) -> None:
    x, y = regression(10, 3, 1, seed)
    task, q = fitted(x, y, structure=structure)
    chosen = sorted(group)
    removed = blr.what_if(task, q, remove=chosen)
    rest = task.subset([i for i in range(10) if i not in group])
    back = blr.what_if(rest, removed.posterior, add=task.subset(chosen))
    assert back.added == len(chosen) and back.posterior.n_data == 10
    close(dense_precision(back.posterior), dense_precision(q), 1e-8)
    if structure == "full":
        close(flat(back.parameters), flat(q.mean), 1e-8)


def test_a_single_example_with_another_like_it_counts_twice() -> None:
    torch.manual_seed(0)
    one = torch.randn(1, 4, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    model = nn.Linear(4, 1).double()
    task = blr.Task(model, one, likelihood="bernoulli")
    q = fit_at_rest(task, structure="full", prior_precision=1.0)
    result = blr.what_if(task, q, add=task)
    with torch.no_grad():  # off the minimum: one step along the second copy's gradient
        x, p = one[0].squeeze(), model(one[0]).sigmoid().item()
    moved = (flat(result.parameters) - flat(q.mean)).squeeze()
    gradient = (p - 1) * torch.cat([x, x.new_ones(1)])
    close(moved / moved.norm(), -gradient / gradient.norm())


def test_adding_new_examples_is_training_on_them_too() -> None:
    x, y = regression(25, 3)
    task, q = fitted(x[:20], y[:20])
    new = blr.Task(nn.Linear(3, 1).double(), (x[20:], y[20:]), likelihood="gaussian")
    result = blr.what_if(task, q, add=new)
    truth = retrained("gaussian", x, y, torch.ones(1, 25), 1.0)[0]
    close(flat(result.parameters), truth)
    assert result.added == 5 and result.posterior.n_data == 25


def test_removing_all_and_adding_others_starts_again_from_the_prior() -> None:
    x, y = regression(25, 3)
    task, q = fitted(x[:20], y[:20], delta=0.3)
    new = blr.Task(task.model, (x[20:], y[20:]), likelihood="gaussian")
    result = blr.what_if(task, q, remove=torch.ones(20, dtype=torch.bool), add=new)
    close(flat(result.parameters), retrained("gaussian", x[20:], y[20:], torch.ones(1, 5), 0.3)[0])
    assert result.posterior.n_data == 5


@settings(deadline=None, max_examples=15)
@given(
    labels=st.dictionaries(
        st.integers(0, 9), st.floats(-5, 5, allow_nan=False), min_size=1, max_size=6
    )
)
def test_relabelling_linear_regression_is_retraining(labels: dict[int, float]) -> None:
    x, y = regression(10, 3)
    task, q = fitted(x, y, delta=0.5)
    result = blr.what_if(task, q, relabel=labels)
    changed = y.clone()
    for i, value in labels.items():
        changed[i] = value
    close(flat(result.parameters), retrained("gaussian", x, changed, torch.ones(1, 10), 0.5)[0])
    close(dense_precision(result.posterior), dense_precision(q), 1e-12)
    assert result.relabelled == len(labels) and result.posterior.n_data == 10


def test_all_three_at_once() -> None:
    x, y = regression(23, 3)
    task, q = fitted(x[:20], y[:20])
    new = blr.Task(task.model, (x[20:], y[20:]), likelihood="gaussian")
    result = blr.what_if(task, q, remove=[0, 1], add=new, relabel={5: 9.25})
    changed = y.clone()
    changed[5] = 9.25
    truth = retrained("gaussian", x, changed, without(23, [0, 1]), 1.0)[0]
    close(flat(result.parameters), truth)
    assert result.posterior.n_data == 21
    assert repr(result).startswith("WhatIf(2 removed, 3 added, 1 relabelled: nll ")


def test_what_relabelling_to_the_old_label_does_is_nothing() -> None:
    x, y = regression(10, 3)
    task, q = fitted(x, y)
    result = blr.what_if(task, q, relabel={4: y[4, 0]})
    close(flat(result.parameters), flat(q.mean), 1e-15)
    assert result.nll == result.before.nll


# Other likelihoods: the formula by dense algebra, and how near it comes to retraining.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_equals_the_dense_formula(kind: str, structure: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(4)
    n, c = 14, KINDS[kind]
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    y = torch.randint(c if kind == "categorical" else 2, (n,), generator=g)
    if kind in ("gaussian", "poisson"):
        y = torch.randint(4, (n, c), generator=g)
    model = mlp(outputs=c)
    exact = blr.Task(model, (x, y), likelihood=kind)
    q = fit_at_rest(exact, structure=structure, prior_precision=0.5)
    task = blr.Task(copy.deepcopy(model).to(dtype), (x.to(dtype), y), likelihood=kind)
    result = blr.what_if(task, q, remove=[1, 4, 5], solver="posterior")

    jacobian = dense_jacobian(exact, q.mean)[[1, 4, 5]]
    f = model(x).detach()
    target = exact.likelihood.prepare_targets(y, f)
    e = exact.likelihood.error(f, target)[[1, 4, 5]]
    curvature = exact.likelihood.hessian(f, target)[[1, 4, 5]]
    gradient = torch.einsum("ncp,nc->p", jacobian, e)
    s = dense_precision(q)
    group = torch.einsum("ncp,ncd,ndq->pq", jacobian, curvature, jacobian)
    if structure == "diag":
        left = s - group.diagonal().diag()
    elif structure == "full":
        left = s - group
    else:  # the group's curvature projected on the posterior's eigenvectors
        left = s - dense_projection(q, group)
    mean = flatten(q.mean) + torch.linalg.solve(left, gradient)
    tolerance = 1e-9 if dtype == torch.float64 else 5e-4
    close(flatten(result.parameters).double(), mean, tolerance)
    assert all(p.dtype == dtype and p.device.type == "cpu" for p in result.parameters.values())
    assert result.floored == 0


def dense_projection(q: blr.Posterior, group: Tensor) -> Tensor:
    """U diag(Uᵀ G U) Uᵀ with the orthogonal U of the Kronecker blocks."""
    turned = rows(q.form.forward(unflatten(torch.eye(len(group)).double(), q.mean)))
    return turned @ (turned.T @ group @ turned).diagonal().diag() @ turned.T


@pytest.mark.parametrize(
    ("kind", "load", "outputs", "total", "usual"),
    [
        ("bernoulli", load_breast_cancer, 1, 1.094, 0.11),
        ("categorical", load_iris, 3, 1.034, 0.03),
    ],
)
def test_removed_groups_against_retraining(
    kind: str, load, outputs: int, total: float, usual: float
) -> None:
    """Thirty random groups of a twentieth of the data each.

    ``total``: the predicted over the true sum of the changes of the mean loss, as measured;
    ``usual``: a bound on the median relative error of the change of all logits (the worst of the
    thirty groups: 0.20 and 0.17).
    """
    x, y = standardised(load)
    g = torch.Generator().manual_seed(0)
    groups = [torch.randperm(len(x), generator=g)[: len(x) // 20] for _ in range(30)]
    task = blr.Task(trained(kind, x, y, 1.0, outputs), (x, y), likelihood=kind)
    q = fit_at_rest(task, structure="full", prior_precision=1.0)
    truth = retrained(kind, x, y, without(len(x), *groups), 1.0, outputs)
    before, z = flat(q.mean), with_ones(x)
    predicted, true, gaps = [], [], []
    for group, theta in zip(groups, truth, strict=True):
        result = blr.what_if(task, q, remove=group, solver="posterior")
        moved, exact = (flat(result.parameters) - before) @ z.T, (theta - before) @ z.T
        gaps.append(float((moved - exact).norm() / exact.norm()))
        f = z @ theta.T
        losses = task.likelihood.nll(f, task.likelihood.prepare_targets(y, f))
        predicted.append(result.nll - result.before.nll)
        true.append(float(losses.mean()) - result.before.nll)
    assert sum(predicted) / sum(true) == pytest.approx(total, abs=5e-3)
    assert spearmanr(predicted, true)[0] > 0.99
    assert sorted(gaps)[15] < usual and max(gaps) < 0.2


# What comes back.


def classification(seed: int = 0, **options) -> tuple[blr.Task, blr.Posterior]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 4, generator=g, dtype=torch.float64)
    y = (x[:, :3] + 0.5 * torch.randn(60, 3, generator=g)).argmax(1)
    task = blr.Task(trained("categorical", x, y, 1.0, 3), (x, y), **options)
    return task, fit_at_rest(task, structure="full", prior_precision=1.0)


def test_numbers_are_real_forward_passes_on_evaluate() -> None:
    task, q = classification()
    x, y = classification(seed=1)[0].dataset.tensors
    test = blr.Task(task.model, (x, y), batch_size=7)
    with untouched(task.model):
        result = blr.what_if(task, q, remove=lambda row: row.target == 2, evaluate=test)
    theta = flat(result.parameters)
    f = with_ones(x) @ theta.T
    losses = nn.functional.cross_entropy(f, y, reduction="none")
    assert result.nll == pytest.approx(float(losses.mean()), rel=1e-12)
    close(result.after.losses, losses, 1e-12)
    assert result.accuracy == float((f.argmax(1) == y).double().mean())
    f = with_ones(x) @ flat(q.mean).T
    assert result.before.nll == pytest.approx(float(nn.functional.cross_entropy(f, y)), rel=1e-12)
    assert result.before.accuracy == float((f.argmax(1) == y).double().mean())
    assert result.nll > result.before.nll and result.accuracy < result.before.accuracy
    assert torch.equal(result.targets, y)
    assert result.solver == "cg" and result.passes <= 61


def test_without_evaluate_the_training_data_are_looked_at() -> None:
    task, q = classification()
    one = blr.what_if(task, q, remove=[0])
    two = blr.what_if(task, q, remove=[0], evaluate=task)
    assert one.nll == two.nll and len(one.targets) == 60


def test_apply_loads_the_new_weights() -> None:
    task, q = classification()
    result = blr.what_if(task, q, remove=[3, 4])
    model = copy.deepcopy(task.model).float()
    assert result.apply(model) is model
    assert torch.equal(model.weight, result.parameters["weight"].float())
    assert not torch.equal(task.model.weight, result.parameters["weight"])
    for wrong in (nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 3))):
        with untouched(wrong), pytest.raises(ModelError, match="cannot apply"):
            result.apply(wrong)
    with pytest.raises(InputError, match="model must be"):
        result.apply(None)


def test_evaluate_may_hold_another_model_object() -> None:
    """Its examples count; the weights, frozen layers and buffers are the trained model's."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=g)
    y = torch.randint(2, (40,), generator=g)

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).eval()
        model[0].requires_grad_(False)
        return model

    model = build()
    model[1].running_mean.fill_(0.3)
    model[0].weight.data.mul_(2)
    task = blr.Task(model, (x, y))
    q = fit_at_rest(task, structure="full", prior_precision=1.0)
    fresh = build()
    test = blr.Task(fresh, (x[:20] + 1, y[:20]))
    with untouched(fresh), untouched(model):
        result = blr.what_if(task, q, remove=[0], evaluate=test)
    same = blr.Task(model, (x[:20] + 1, y[:20]))
    expected = blr.what_if(task, q, remove=[0], evaluate=same)
    assert result.nll == expected.nll and result.before.nll == expected.before.nll
    f = model(x[:20] + 1).detach()
    assert result.before.nll == pytest.approx(float(nn.functional.cross_entropy(f, y[:20])))


def test_a_group_beyond_the_learned_precision_is_floored_and_said() -> None:
    """A posterior whose precision is below the group's share: S − S_G stays at the prior."""
    x, y = regression(20, 2)
    model = trained("gaussian", x, y, 1.0)
    task = blr.Task(model, (x, y), likelihood="gaussian")
    thin = blr.Posterior(
        task.parameters(),
        {"weight": torch.tensor([[1.5, 400.0]]).double(), "bias": torch.tensor([3.0]).double()},
        prior_precision=1.0,
        n_data=20,
    )
    result = blr.what_if(task, thin, remove=range(10))
    assert result.floored == pytest.approx(2 / 3)
    precision = result.posterior.precision("weight")[0]
    assert float(precision[0]) == 1.0 and float(result.posterior.precision("bias")) == 1.0
    assert float(precision[1]) == pytest.approx(400 - float(x[:10, 1].square().sum()))


# One row per group.


@pytest.mark.parametrize("by", ["target", "source"])
def test_each_row_is_one_what_if(by: str) -> None:
    names = ["web", "book", "code", "web"] * 15
    task, q = classification(metadata={"source": names})
    test = blr.Task(task.model, classification(seed=1)[0].dataset.tensors)
    table = blr.what_if_each(task, q, by=by, evaluate=test)
    measured = [f"{kind}_{when}" for kind in ("nll", "accuracy")
                for when in ("before", "after", "change")]  # fmt: skip
    about = ["converged", "error", "nll_high", "nll_low", "note", "passes", "solver"]
    assert list(table) == ["group", "n", *measured, *about]
    assert table.group.tolist() == ([0, 1, 2] if by == "target" else ["book", "code", "web"])
    for row in table.itertuples():
        one = blr.what_if(task, q, remove=lambda r, g=row.group: r[by] == g, evaluate=test)
        assert row.n == one.removed
        assert row.nll_after == one.nll and row.accuracy_after == one.accuracy
        assert row.nll_before == one.before.nll and row.accuracy_before == one.before.accuracy
        assert row.nll_change == pytest.approx(one.nll - one.before.nll)
        assert row.accuracy_change == pytest.approx(one.accuracy - one.before.accuracy)
    assert table.n.sum() == 60


def test_each_for_regression_has_no_accuracy() -> None:
    x, y = regression(12, 2)
    task, q = fitted(x, y, metadata={"site": [1, 2, 3] * 4})
    table = blr.what_if_each(task, q, by="site")
    assert table.accuracy_after.isna().all() and table.accuracy_change.isna().all()
    for row in table.itertuples():
        truth = retrained(
            "gaussian", x, y, without(12, [i for i in range(12) if i % 3 + 1 == row.group]), 1.0
        )
        f = with_ones(x) @ truth[0].T
        exact = 0.5 * float((f - y).square().mean()) + 0.5 * torch.log(
            torch.tensor(2 * torch.pi, dtype=torch.float64)
        )
        assert row.nll_after == pytest.approx(float(exact), rel=1e-9)


# The shares themselves.


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_the_share_of_a_group_is_the_sum_of_its_parts(data) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    structure = data.draw(st.sampled_from(["full", "kron", "diag"]))
    group = data.draw(st.lists(st.integers(0, 11), min_size=2, max_size=12, unique=True))
    cut = data.draw(st.integers(1, len(group) - 1))
    g = torch.Generator().manual_seed(5)
    x = torch.randn(12, 4, generator=g, dtype=torch.float64)
    y = torch.randint(2, (12,), generator=g)
    if kind == "gaussian":
        y = torch.randn(12, 2, generator=g, dtype=torch.float64)
    task = blr.Task(mlp(outputs=KINDS[kind]), (x, y), likelihood=kind, batch_size=5)
    q = fit_at_rest(task, structure=structure, prior_precision=1.0)
    whole, one, two = (
        share(task, q, torch.tensor(part), QUIET) for part in (group, group[:cut], group[cut:])
    )
    for name, value in whole.gradient.items():
        close(one.gradient[name] + two.gradient[name], value, 1e-11)
    for key, value in whole.curvature.tensors().items():
        if "eigenvectors" not in key:
            close(one.curvature.tensors()[key] + two.curvature.tensors()[key], value, 1e-10)
    assert one.count + two.count == whole.count == len(group)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_switched_off_outside_do_not_matter(context) -> None:
    task, q = classification()
    expected = blr.what_if(task, q, remove=[1, 2], relabel={5: 0})
    with context():
        found = blr.what_if(task, q, remove=[1, 2], relabel={5: 0})
        inside = fit_at_rest(task, structure="full", prior_precision=1.0)
    assert found.nll == expected.nll
    again = blr.what_if(task, inside, remove=[1, 2], relabel={5: 0})
    assert again.nll == expected.nll
    rest = task.subset([i for i in range(60) if i not in (1, 2)])
    assert blr.what_if(rest, found.posterior, remove=[0]).removed == 1


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_what_changes_is_the_mean_over_several_posteriors(kind: str) -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(30) % 3 if kind == "categorical" else x[:, :3]
    tasks = [blr.Task(mlp(seed=seed), (x, y), likelihood=kind) for seed in (3, 4)]
    qs = [fit_at_rest(t, prior_precision=5.0) for t in tasks]
    options = dict(remove=[1, 4], solver="posterior")
    first, last = (blr.what_if(tasks[0], q, **options) for q in qs)
    found = blr.what_if(tasks[0], qs, **options)
    change = (first.nll - first.before.nll + last.nll - last.before.nll) / 2
    assert found.before.nll == last.before.nll
    assert found.nll == pytest.approx(last.before.nll + change, rel=1e-12)
    assert found.checkpoints == 2 and "2 checkpoints" in repr(found)
    for name, value in last.parameters.items():
        assert torch.equal(found.parameters[name], value)
    if kind == "categorical":
        assert len(found.by_class) == 3
        changes = [a.accuracy - a.before.accuracy for a in (first, last)]
        assert found.accuracy - found.before.accuracy == pytest.approx(sum(changes) / 2)
