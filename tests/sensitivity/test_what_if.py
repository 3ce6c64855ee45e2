"""Groups removed, added, relabelled: exact for linear regression, compared with retraining else.

Every number on ``evaluate`` is a real forward pass at the new weights, done again here by hand.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import fit_at_rest
from oracles_retraining import flat, retrained, trained, with_ones, without
from snapshots import untouched
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.sensitivity.what_if import cost_of_what_if


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


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_change_of_linear_regression_is_retraining(data) -> None:
    """Examples that leave (also all of them, where others come), come, and have other targets."""
    n = data.draw(st.integers(2, 10))
    d = data.draw(st.integers(1, 4))
    c = data.draw(st.integers(1, 3))
    new = data.draw(st.integers(0, 4))
    removed = data.draw(st.sets(st.integers(0, n - 1), max_size=n if new else n - 1))
    stay = [i for i in range(n) if i not in removed]
    target = st.lists(st.floats(-5, 5), min_size=c, max_size=c)
    labels = {}
    if stay:
        labels = data.draw(st.dictionaries(st.sampled_from(stay), target))
    if not (removed or new or labels):
        labels = {stay[0]: [1.0] * c}
    delta = data.draw(st.floats(0.01, 100))
    x, y = regression(n + new, d, c, data.draw(st.integers(0, 10**6)))
    task, q = fitted(x[:n], y[:n], delta)
    change: dict = {}
    if removed:
        change["remove"] = sorted(removed)
    if new:
        change["add"] = blr.Task(nn.Linear(d, c).double(), (x[n:], y[n:]), likelihood="gaussian")
    y = y.clone()  # the task's are its own
    if labels:
        change["relabel"] = {i: torch.tensor(v, dtype=y.dtype) for i, v in labels.items()}
        for i, value in change["relabel"].items():
            y[i] = value
    result = blr.what_if(task, q, **change, solver="posterior")
    truth = retrained("gaussian", x, y, without(n + new, sorted(removed)), delta, c)[0]
    close(flat(result.parameters), truth, 1e-7)
    counts = result.removed, result.added, result.relabelled
    assert counts == (len(removed), new, len(labels))
    assert f"{len(removed)} removed" in repr(result) or not removed


def classification(seed: int = 0, **options) -> tuple[blr.Task, blr.Posterior]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 4, generator=g, dtype=torch.float64)
    y = (x[:, :3] + 0.5 * torch.randn(60, 3, generator=g)).argmax(1)
    task = blr.Task(trained("categorical", x, y, 1.0, 3), (x, y), **options)
    return task, fit_at_rest(task, structure="full", prior_precision=1.0)


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
    same_model = blr.Task(model, (x[:20] + 1, y[:20]))
    expected = blr.what_if(task, q, remove=[0], evaluate=same_model)
    assert result.nll == expected.nll
    assert result.before.nll == expected.before.nll
    f = model(x[:20] + 1).detach()
    assert result.before.nll == pytest.approx(float(nn.functional.cross_entropy(f, y[:20])))


@pytest.mark.parametrize("by", ["target", "source"])
def test_each_row_is_one_what_if(by: str) -> None:
    names = ["web", "book", "code", "web"] * 15
    task, q = classification(metadata={"source": names})
    test = blr.Task(task.model, classification(seed=1)[0].dataset.tensors)
    table = blr.what_if_each(task, q, by=by, evaluate=test)
    measured = [
        f"{kind}_{when}" for kind in ("nll", "accuracy") for when in ("before", "after", "change")
    ]
    columns = ["converged", "nll_high", "nll_low", "note", "passes", "solver"]
    assert set(table) == {"group", "n", *measured, *columns}
    assert table.group.tolist() == ([0, 1, 2] if by == "target" else ["book", "code", "web"])
    for row in table.itertuples():
        single = blr.what_if(task, q, remove=lambda r, g=row.group: r[by] == g, evaluate=test)
        assert row.n == single.removed
        assert row.nll_after == single.nll
        assert row.accuracy_after == single.accuracy
        assert row.nll_before == single.before.nll
        assert row.accuracy_before == single.before.accuracy
        assert row.nll_change == pytest.approx(single.nll - single.before.nll)
        assert row.accuracy_change == pytest.approx(single.accuracy - single.before.accuracy)
    assert table.n.sum() == 60


def test_each_for_regression_has_no_accuracy() -> None:
    x, y = regression(12, 2)
    task, q = fitted(x, y, metadata={"site": [1, 2, 3] * 4})
    table = blr.what_if_each(task, q, by="site")
    assert table.accuracy_after.isna().all()
    assert table.accuracy_change.isna().all()
    for row in table.itertuples():
        truth = retrained(
            "gaussian", x, y, without(12, [i for i in range(12) if i % 3 + 1 == row.group]), 1.0
        )
        f = with_ones(x) @ truth[0].T
        exact = 0.5 * float((f - y).square().mean()) + 0.5 * torch.log(
            torch.tensor(2 * torch.pi, dtype=torch.float64)
        )
        assert row.nll_after == pytest.approx(float(exact), rel=1e-9)


# What it takes


def trained_network(**options) -> tuple[blr.Task, blr.Posterior]:
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    y = torch.arange(40) % 3
    recipe = blr.Recipe("adam", lr=1e-2, epochs=12, batch_size=10)
    model = nn.Linear(3, 3)
    task = blr.Task(model, (x, y), recipe=recipe, metadata={"source": ["a", "b"] * 20}, **options)
    return task, blr.fit_laplace(task, structure="diag", prior_precision=1.0)


@pytest.mark.parametrize("solver", ["auto", "posterior", "cg", "replay", "retrain"])
def test_the_cost_is_that_of_the_answer(solver: str) -> None:
    task, q = trained_network(progress=False)
    options: dict = {"remove": list(range(9)), "solver": solver, "seeds": 2}
    cost = cost_of_what_if(task, q, **options)
    result = blr.what_if(task, q, **options)
    assert cost.solver == result.solver
    if solver == "cg":
        assert cost.passes >= result.passes - 1  # a line search may look once more
    else:
        assert cost.passes == result.passes
    assert (cost.seconds > 0) == (cost.passes > 0)


def test_auto_takes_no_more_passes_than_whole_trainings() -> None:
    task, q = trained_network(progress=False)
    options: dict = {"remove": list(range(9))}
    whole = cost_of_what_if(task, q, solver="retrain", **options)
    assert cost_of_what_if(task, q, **options).passes <= whole.passes


def test_the_cost_of_a_training_function_is_known_after_the_first() -> None:
    task, q = trained_network(progress=False)
    task.recipe = blr.Recipe(train=lambda data, seed: task.model)
    cost = cost_of_what_if(task, q, remove=list(range(9)), solver="retrain")
    assert str(cost) == "by whole trainings by your train=; the first one shows how long they take"


def test_trainings_of_a_function_show_how_many_are_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    task, q = trained_network(progress=True)
    task.recipe = blr.Recipe(train=lambda data, seed: copy.deepcopy(task.model))
    blr.what_if(task, q, remove=list(range(9)), solver="retrain", seeds=2)
    assert "what if: trainings" in capsys.readouterr().err


def test_the_cost_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    task, q = trained_network(progress=True)
    capsys.readouterr()
    blr.what_if(task, q, remove=list(range(9)), seeds=2)
    cost = str(cost_of_what_if(task, q, remove=list(range(9)), seeds=2)).partition(",")[0]
    shown = capsys.readouterr().err
    assert f"what if: {cost}" in shown
    assert "24 passes over the data" in cost
    blr.what_if_each(task, q, by="source", seeds=2)
    shown = capsys.readouterr().err
    assert shown.count("what if: by ") == 1
    assert "48 passes over the data" in shown
    task.progress = False
    blr.what_if(task, q, remove=list(range(9)), seeds=2)
    assert capsys.readouterr().err == ""
