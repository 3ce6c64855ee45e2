"""Groups removed, added, relabelled: exact for linear regression, compared with retraining else.

Every number on ``evaluate`` is a real forward pass at the new weights, done again here by hand.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import fit_at_rest
from oracles_retraining import flat, retrained, standardised, trained, with_ones, without
from scipy.stats import spearmanr
from sklearn.datasets import load_breast_cancer, load_iris
from snapshots import untouched
from torch import Tensor, nn

import blr_analysis as blr


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


@settings(deadline=None, max_examples=15)
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
    result = blr.what_if(task, q, remove=sorted(group), solver="posterior")
    truth = retrained("gaussian", x, y, without(n, sorted(group)), delta, c)[0]
    close(flat(result.parameters), truth, 1e-7)
    assert result.removed == len(group)


def test_a_single_example_with_another_like_it_counts_twice() -> None:
    torch.manual_seed(0)
    one = torch.randn(1, 4, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    model = nn.Linear(4, 1).double()
    task = blr.Task(model, one, likelihood="bernoulli")
    q = fit_at_rest(task, structure="full", prior_precision=1.0)
    result = blr.what_if(task, q, add=task, solver="posterior")
    with torch.no_grad():  # off the minimum: one step along the second copy's gradient
        x, p = one[0].squeeze(), model(one[0]).sigmoid().item()
    moved = (flat(result.parameters) - flat(q.mean)).squeeze()
    gradient = (p - 1) * torch.cat([x, x.new_ones(1)])
    close(moved / moved.norm(), -gradient / gradient.norm())


def test_adding_new_examples_is_training_on_them_too() -> None:
    x, y = regression(25, 3)
    task, q = fitted(x[:20], y[:20])
    new = blr.Task(nn.Linear(3, 1).double(), (x[20:], y[20:]), likelihood="gaussian")
    result = blr.what_if(task, q, add=new, solver="posterior")
    close(flat(result.parameters), retrained("gaussian", x, y, torch.ones(1, 25), 1.0)[0])
    assert result.added == 5


def test_removing_all_and_adding_others_starts_again_from_the_prior() -> None:
    x, y = regression(25, 3)
    task, q = fitted(x[:20], y[:20], delta=0.3)
    new = blr.Task(task.model, (x[20:], y[20:]), likelihood="gaussian")
    every = torch.ones(20, dtype=torch.bool)
    result = blr.what_if(task, q, remove=every, add=new, solver="posterior")
    close(flat(result.parameters), retrained("gaussian", x[20:], y[20:], torch.ones(1, 5), 0.3)[0])


@settings(deadline=None, max_examples=8)
@given(
    labels=st.dictionaries(
        st.integers(0, 9), st.floats(-5, 5, allow_nan=False), min_size=1, max_size=6
    )
)
def test_relabelling_linear_regression_is_retraining(labels: dict[int, float]) -> None:
    x, y = regression(10, 3)
    task, q = fitted(x, y, delta=0.5)
    result = blr.what_if(task, q, relabel=labels, solver="posterior")
    changed = y.clone()
    for i, value in labels.items():
        changed[i] = value
    close(flat(result.parameters), retrained("gaussian", x, changed, torch.ones(1, 10), 0.5)[0])
    assert result.relabelled == len(labels)


def test_all_three_at_once() -> None:
    x, y = regression(23, 3)
    task, q = fitted(x[:20], y[:20])
    new = blr.Task(task.model, (x[20:], y[20:]), likelihood="gaussian")
    asked = {"remove": [0, 1], "add": new, "relabel": {5: 9.25}}
    result = blr.what_if(task, q, **asked, solver="posterior")
    changed = y.clone()
    changed[5] = 9.25
    truth = retrained("gaussian", x, changed, without(23, [0, 1]), 1.0)[0]
    close(flat(result.parameters), truth)
    assert repr(result).startswith("WhatIf(2 removed, 3 added, 1 relabelled: nll ")


def test_what_relabelling_to_the_old_label_does_is_nothing() -> None:
    x, y = regression(10, 3)
    task, q = fitted(x, y)
    result = blr.what_if(task, q, relabel={4: y[4, 0]})
    close(flat(result.parameters), flat(q.mean), 1e-14)
    assert result.nll == pytest.approx(result.before.nll, rel=1e-14)


# Other likelihoods: the formula by dense algebra, and how near it comes to retraining.


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


# One row per group.


@pytest.mark.parametrize("by", ["target", "source"])
def test_each_row_is_one_what_if(by: str) -> None:
    names = ["web", "book", "code", "web"] * 15
    task, q = classification(metadata={"source": names})
    test = blr.Task(task.model, classification(seed=1)[0].dataset.tensors)
    table = blr.what_if_each(task, q, by=by, evaluate=test)
    measured = [f"{kind}_{when}" for kind in ("nll", "accuracy")
                for when in ("before", "after", "change")]  # fmt: skip
    about = ["converged", "nll_high", "nll_low", "note", "passes", "solver"]
    assert set(table) == {"group", "n", *measured, *about}
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
