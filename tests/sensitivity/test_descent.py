"""What-if by a descent on the changed data, against brute-force retraining."""

from __future__ import annotations

import copy
from functools import cache
from importlib import import_module

import pytest
import torch
from oracles import relative
from oracles_retraining import (
    flat,
    leave_one_out_weights,
    retrained,
    standardised,
    trained,
    with_ones,
    without,
)
from parts import normal
from scipy.stats import pearsonr
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.stationarity import stationarity
from blr_analysis.sensitivity.corrections import OVERSTATED, bound_of
from blr_analysis.sensitivity.objective import changed

DELTA = 2.0


def objective(model: nn.Module, x: Tensor, y: Tensor, delta: float) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    return loss + delta / 2 * sum(p.square().sum() for p in model.parameters())


def retrain(model: nn.Module, x: Tensor, y: Tensor, delta: float) -> int:
    """L-BFGS from where the model stands; how many gradients it took."""
    fit = torch.optim.LBFGS(
        model.parameters(),
        max_iter=3000,
        history_size=30,
        tolerance_grad=1e-5,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    taken = 0

    def closure() -> Tensor:
        nonlocal taken
        taken += 1
        fit.zero_grad()
        loss = objective(model, x, y, delta)
        loss.backward()
        return loss

    fit.step(closure)
    slope = torch.autograd.grad(objective(model, x, y, delta), list(model.parameters()))
    assert max(float(g.abs().max()) for g in slope) < 1e-4
    return taken


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()


def digits(n: int) -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:n]
    return torch.tensor(pixels)[order] / 16, torch.tensor(labels)[order]


def regression(**options) -> tuple[blr.Task, blr.Posterior, Tensor, Tensor]:
    x, y = normal(40, 5), normal(40, seed=1)
    task = blr.Task(trained("gaussian", x, y, DELTA), (x, y), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA)
    return task, q, x, y


@pytest.mark.parametrize("steps", [1, "converge"])
def test_linear_regression_is_solved_exactly_whatever_the_preconditioner(steps) -> None:
    task, q, x, y = regression()
    result = blr.what_if(task, q, remove=range(15), solver="cg", steps=steps)
    truth = retrained("gaussian", x, y, without(40, list(range(15))), DELTA)[0]
    tolerance = 1e-5 if steps == 1 else 1e-6
    assert relative(flat(result.parameters), truth) < tolerance
    assert result.solver == "cg" and (result.converged or steps == 1)


@pytest.mark.parametrize("change", ["remove", "add", "relabel", "all"])
def test_converged_descent_is_retraining(change: str) -> None:
    data = load_breast_cancer()
    x = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0))[:220]
    y = torch.tensor(data.target)[:220].double()
    model = trained("bernoulli", x[:200], y[:200], DELTA)
    task = blr.Task(model, (x[:200], y[:200]), likelihood="bernoulli")
    new = blr.Task(model, (x[200:], y[200:]), likelihood="bernoulli")
    q = blr.fit_laplace(task, structure="diag", prior_precision=DELTA)
    labels, weights = y.clone(), torch.zeros(1, 220)
    weights[:, :200] = 1
    asked: dict = {}
    if change in ("remove", "all"):
        asked["remove"] = y[:200] == 1
        asked["remove"][:40] = False
        weights[0, :200][asked["remove"]] = 0
    if change in ("add", "all"):
        asked["add"] = new
        weights[:, 200:] = 1
    if change in ("relabel", "all"):
        asked["relabel"] = {i: 1 - float(y[i]) for i in (3, 0, 17, 30)}
        for i, label in asked["relabel"].items():
            labels[i] = label
    result = blr.what_if(task, q, **asked, solver="cg", steps="converge")
    truth = retrained("bernoulli", x, labels, weights, DELTA)[0]
    assert result.converged and result.error < 1e-6
    assert relative(flat(result.parameters), truth) < 1e-5
    one = blr.what_if(task, q, **asked, solver="posterior")
    assert relative(flat(one.parameters), truth) > 0.01


@cache
def classes_retrained() -> tuple[blr.Task, blr.Task, list[float], list[int]]:
    """Training and test data, the test loss without every other class, and the gradients taken."""
    x, y = digits(800)
    model, test = network(), (x[500:], y[500:])
    x, y = x[:500], y[:500]
    retrain(model, x, y, DELTA)
    true, taken = [], []
    for c in range(0, 10, 2):
        again = network()
        again.load_state_dict(model.state_dict())
        taken.append(retrain(again, x[y != c], y[y != c], DELTA))
        true.append(float(nn.functional.cross_entropy(again(test[0]), test[1]).detach()))
    return blr.Task(model, (x, y)), blr.Task(model, test), true, taken


@pytest.mark.slow
@pytest.mark.parametrize(("structure", "options", "share"), [
    ("kron", {"passes": 40}, 0.02),
    ("diag", {"passes": 40}, 0.03),
    ("kron", {"steps": 3}, 0.03),
])  # fmt: skip
def test_class_removal_at_a_tenth_of_retrainings_cost(structure, options, share) -> None:
    task, test_task, true, taken = classes_retrained()
    y = task.dataset.tensors[1]
    q = blr.fit_laplace(task, structure=structure, prior_precision=DELTA)
    predicted, cost = [], []
    for c in range(0, 10, 2):
        result = blr.what_if(task, q, remove=y == c, evaluate=test_task, solver="cg", **options)
        predicted.append(result.nll)
        cost.append(result.passes)
    p, t = torch.tensor(predicted), torch.tensor(true)
    assert sum(cost) < 0.1 * sum(taken)
    assert pearsonr(predicted, true)[0] > 0.95
    assert float(((p - t).abs() / t).mean()) < share
    short = [
        blr.what_if(task, q, remove=y == c, evaluate=test_task, solver="posterior").nll
        for c in range(0, 10, 2)
    ]
    assert float(((torch.tensor(short) - t).abs() / t).mean()) > 5 * share


def rough(steps: int = 30) -> tuple[blr.Task, blr.Posterior]:
    """A network that was stopped early."""
    x, y = digits(300)
    model = network()
    fit = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        fit.zero_grad()
        objective(model, x, y, DELTA).backward()
        fit.step()
    task = blr.Task(model, (x, y))
    return task, blr.fit_laplace(task, structure="kron", prior_precision=DELTA)


@pytest.mark.parametrize("options", [{"passes": 20}, {"steps": 1}, {"steps": 2}])
def test_the_objective_never_rises_and_passes_are_counted(options, monkeypatch) -> None:
    task, q = rough()
    seen = 0
    run = blr.Task.run

    def counted(self, batch, params, indices=None):
        nonlocal seen
        seen += 0 if indices is None else len(indices)
        return run(self, batch, params, indices)

    monkeypatch.setattr(blr.Task, "run", counted)
    result = blr.what_if(
        task, q, remove=range(0, 300, 3), evaluate=task.subset([0]), solver="cg",
        **options,
    )  # fmt: skip
    values = [move.objective for move in result.moves]
    assert values == sorted(values, reverse=True) and len(values) > 1
    assert values[-1] < values[0] - 1e-3
    forward = seen / 200  # of the 200 that stay; a product with the GGN makes no forward pass
    assert forward <= result.passes + 4
    if "passes" in options:
        assert result.passes <= 21
    assert [m.passes for m in result.moves] == sorted({m.passes for m in result.moves})


def test_auto_does_not_descend_from_a_model_that_is_not_at_its_minimum() -> None:
    task, q = rough()
    settings = dict(remove=range(100), evaluate=task.subset([0]))
    assert blr.what_if(task, q, **settings).solver == "replay"
    assert blr.what_if(task, q, passes=9, **settings).solver == "replay"
    assert blr.what_if(task, q, solver="cg", passes=9, **settings).solver == "cg"
    assert blr.what_if(task, q, steps=1, **settings).solver == "cg"


def test_auto_says_what_it_picked() -> None:
    task, _ = rough()
    x, y = task.dataset.tensors
    retrain(task.model, x, y, DELTA)
    q = blr.fit_laplace(task, structure="kron", prior_precision=DELTA)
    settings = dict(evaluate=task.subset([0, 1]))
    small = blr.what_if(task, q, remove=[3], **settings)
    assert (small.solver, small.passes, small.error) == ("posterior", 0.0, None)
    large = blr.what_if(task, q, remove=range(100), passes=12, **settings)
    assert large.solver == "cg" and 0 < large.passes <= 13
    assert not large.converged and large.error is not None and large.error > 0
    assert "cg, 12 passes, not converged: one more step" in repr(large)
    for remove, how in (
        (range(100), {"passes": 5}),  # what is asked for is made
        (range(100), {"passes": 5, "steps": "converge"}),
        ([3], {"passes": 2}),
    ):
        few = blr.what_if(task, q, remove=remove, **how, **settings)
        assert few.solver == "cg" and 0 < few.passes <= how["passes"] + 1
    with pytest.raises(InputError, match="at least 2"):
        blr.what_if(task, q, remove=[3], passes=1, **settings)
    several = blr.what_if(task, q, remove=[3], steps=2, **settings)
    assert several.solver == "cg"


def test_error_shrinks_with_the_passes_and_tells_the_size_of_what_is_missing() -> None:
    task, q = rough(steps=150)
    settings = dict(remove=task.dataset.tensors[1] == 3, solver="cg")
    whole = blr.what_if(task, q, passes=400, **settings)
    errors, missing = [], []
    for passes in (4, 12, 40):
        result = blr.what_if(task, q, passes=passes, **settings)
        errors.append(result.error)
        missing.append(abs(result.nll - whole.nll))
    assert errors[2] < errors[1] < errors[0]
    assert missing[2] < missing[0] and missing[1] < missing[0]
    assert missing[0] < 30 * errors[0]


def test_relabelled_examples_have_their_new_targets() -> None:
    x, y = digits(30)
    task = blr.Task(network(), (x, y), batch_size=4)
    labels = {7: 1, 2: 9, 29: 0}
    data = changed(task, Prior.of_any(DELTA), leaving=torch.tensor([0, 1]), labels=labels)
    assert data.n_data == 28
    new = y.clone()
    for i, label in labels.items():
        new[i] = label
    kept = torch.arange(2, 30)
    params = {n: p.detach() for n, p in task.model.named_parameters()}
    truth = objective(task.model, x[kept], new[kept], DELTA)
    point = data.at(params)
    assert point.value == pytest.approx(float(truth.detach()), rel=1e-12)
    slopes = torch.autograd.grad(truth, list(task.model.parameters()))
    for found, expected in zip(point.gradient.values(), slopes, strict=True):
        assert relative(found, expected) < 1e-12


def test_sequences_converge_to_what_retraining_gives() -> None:
    ids = torch.randint(6, (24, 5), generator=torch.Generator().manual_seed(0))
    labels = (ids + ids.roll(1, 1)) % 4
    labels[::3, 3:] = -100
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4)).double()
    task = blr.Task(model, (ids, labels), likelihood="tokens")

    def loss(x: Tensor, y: Tensor) -> Tensor:
        summed = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        return summed + 0.5 * sum(p.square().sum() for p in model.parameters())

    def fit(x: Tensor, y: Tensor) -> float:
        newton = torch.optim.LBFGS(
            model.parameters(),
            max_iter=2000,
            tolerance_grad=1e-8,
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            newton.zero_grad()
            value = loss(x, y)
            value.backward()
            return value

        newton.step(closure)
        return float(loss(x, y).detach())

    fit(ids, labels)
    options = dict(structure="diag", curvature="empirical_fisher", prior_precision=1.0)
    q, looked = (blr.fit_laplace(task, **options) for _ in range(2))
    stationarity(task, looked)  # whoever has looked before, one example is answered alike
    one, same = (blr.what_if(task, each, remove=[0]) for each in (q, looked))
    assert (one.solver, one.passes, one.caveat) == (same.solver, same.passes, same.caveat)
    assert one.passes > 0 and one.nll == same.nll
    gone = list(range(8))
    result = blr.what_if(task, q, remove=gone, solver="cg", steps="converge")
    retrained_to = fit(ids[8:], labels[8:])
    assert result.moves[-1].objective == pytest.approx(retrained_to, rel=1e-8)
    assert result.moves[0].objective > retrained_to + 0.1
    every = torch.arange(6)[None]  # the two layers may turn against each other, the outputs not
    found = torch.func.functional_call(model, result.parameters, (every,))
    assert relative(found, model(every).detach()) < 1e-4


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_a_rare_class_is_more_than_one_step(structure: str) -> None:
    """One step falls nats short of retraining, which the descent is."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 4, generator=g, dtype=torch.float64)
    y = torch.zeros(1000, dtype=torch.long)
    y[:300], y[300:308] = 1, 2
    x[y == 1, 0] += 2
    x[y == 2, 1] += 4
    task = blr.Task(trained("categorical", x, y, 0.1, 3), (x, y))
    q = blr.fit_laplace(task, structure=structure, prior_precision=0.1)
    test = blr.Task(task.model, (x[300:308], y[300:308]))
    result = blr.what_if(task, q, remove=y == 2, evaluate=test)
    without = trained("categorical", x[y != 2], y[y != 2], 0.1, 3)
    truth = nn.functional.cross_entropy(without(x[y == 2]), y[y == 2]).item()
    assert result.solver == "cg"
    assert result.nll == pytest.approx(truth, rel=1e-2)


def test_a_whole_class_of_few_is_more_than_one_step() -> None:
    """The loss of those that stay falls as the step promises, and slopes across it."""
    torch.manual_seed(7)
    x = torch.randn(400, 2, dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    y[:4], x[:4] = 2, 3 + 0.2 * torch.randn(4, 2, dtype=torch.float64)
    task = blr.Task(trained("categorical", x, y, 0.1, 3), (x, y))
    q = blr.fit_laplace(task, structure="full", prior_precision=0.1)
    without = trained("categorical", x[4:], y[4:], 0.1, 3)
    truth = nn.functional.cross_entropy(without(x), y).item()
    result = blr.what_if(task, q, remove=range(4))
    assert result.nll == pytest.approx(truth, rel=1e-2)
    assert blr.what_if(task, q, remove=[10, 20, 30]).passes == 0


@pytest.mark.parametrize("change", ["relabel", "add", "remove"])
def test_one_example_that_leads_far_is_more_than_one_step(change: str) -> None:
    """A wrong label, or one that is gone and was alone, moves a fit of little prior by much."""
    (x, y), delta = standardised(load_wine), 0.01
    task = blr.Task(trained("categorical", x, y, delta, 3), (x, y))
    q = blr.fit_laplace(task, structure="full", prior_precision=delta)
    near, *_, far = blr.sensitivity(task, q).deviation.argsort().tolist()
    weights, labels, wrong = torch.ones(1, len(y)), y.clone(), (y[far] + 1) % 3
    asked: dict = {change: [far]}
    if change == "relabel":
        labels[far], asked = wrong, {"relabel": {far: int(wrong)}}
    elif change == "add":
        asked = {"add": blr.Task(task.model, (x[[far]], wrong[None]))}
        x, labels, weights = (
            torch.cat([x, x[[far]]]),
            torch.cat([y, wrong[None]]),
            torch.ones(1, 179),
        )
    else:
        weights[0, far] = 0
    truth = retrained("categorical", x, labels, weights, delta, 3)[0]
    result = blr.what_if(task, q, **asked)
    assert result.solver == "cg" and relative(flat(result.parameters), truth) < 0.02
    one = blr.what_if(task, q, **asked, solver="posterior")
    assert relative(flat(one.parameters), truth) > 0.1
    small = blr.what_if(task, q, remove=[near])
    assert (small.solver, small.passes) == ("posterior", 0.0)


@pytest.mark.parametrize(("delta", "index"), [(0.01, 3), (1.0, 15)])
def test_off_the_minimum_one_example_that_leads_far_is_said(delta: float, index: int) -> None:
    """Where the loss rises, and where it falls by less than a tenth of what the step promises."""
    x, y = standardised(load_wine)
    model = trained("categorical", x, y, delta, 3)
    with torch.no_grad():
        model.weight *= 1.3
    task = blr.Task(model, (x, y))
    q = blr.fit_laplace(task, structure="full", prior_precision=delta)
    wrong = {index: int(y[index] + 1) % 3}
    result = blr.what_if(task, q, relabel=wrong)
    assert result.solver == "posterior" and not result.converged and "fall" in repr(result)
    assert (result.damping < 1) == (delta < 1)
    data = changed(task, q.prior, leaving=torch.tensor([], dtype=torch.long), labels=wrong)
    assert data.value(result.parameters) <= data.value(q.mean) * (1 + 1e-6)


# Examples left out by a descent, against exact retraining.


@cache
def breast_cancer(n: int, delta: float) -> tuple[blr.Task, torch.Tensor]:
    """The task, and the true rise of every example's loss when it is left out."""
    data = load_breast_cancer()
    x = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0))[:n]
    y = torch.tensor(data.target)[:n].double()
    model = trained("bernoulli", x, y, delta)
    task = blr.Task(model, (x, y), likelihood="bernoulli")
    theta = retrained("bernoulli", x, y, leave_one_out_weights(n), delta)[:, 0]
    f = (with_ones(x) * theta).sum(1, keepdim=True)
    before = model(x).detach()
    rise = [task.likelihood.nll(g, y[:, None]) for g in (f, before)]
    return task, rise[0] - rise[1]


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_few_that_matter_make_leave_one_out_agree_with_retraining(structure: str) -> None:
    task, true = breast_cancer(300, 1.0)
    q = blr.fit_laplace(task, structure=structure, prior_precision=1.0)
    rough = blr.leave_one_out(task, q, correction="cavity")
    fine = blr.leave_one_out(task, q, correction="cavity", refine=40)
    assert fine.correction.count("descent") == 40
    assert "descent for 40" in repr(fine)
    assert (fine.table["correction"] == "descent").sum() == 40
    kept = torch.tensor([word != "descent" for word in fine.correction])
    assert torch.equal(fine.logits[kept], rough.logits[kept])
    gap, old = (float((loo.losses - loo.losses_before - true).abs().sum()) for loo in (fine, rough))
    assert gap < 0.2 * old
    if structure == "full":
        estimate = fine.losses - fine.losses_before
        assert pearsonr(estimate, true)[0] > 0.9999
        assert float(estimate.sum() / true.sum()) == pytest.approx(1, abs=0.02)


def test_linear_regression_needs_no_refinement() -> None:
    x, y = normal(25, 3), normal(25, seed=1)
    task = blr.Task(trained("gaussian", x, y, 1.0), (x, y), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    rough, fine = (blr.leave_one_out(task, q, refine=k) for k in (0, 25))
    assert fine.correction == ["descent"] * 25
    torch.testing.assert_close(fine.logits, rough.logits, rtol=1e-5, atol=1e-5)


def test_a_model_away_from_its_minimum_keeps_its_estimates() -> None:
    torch.manual_seed(0)
    task = blr.Task(torch.nn.Linear(3, 2), (normal(20, 3).float(), torch.arange(20) % 2))
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    rough = blr.leave_one_out(task, q)
    with pytest.warns(RuntimeWarning, match="5 of 5 examples keep their estimate"):
        fine = blr.leave_one_out(task, q, refine=5)
    assert "descent" not in fine.correction
    assert torch.equal(fine.logits, rough.logits)


def test_examples_that_hardly_pull_keep_their_estimates_at_a_minimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = normal(25, 3), normal(25, seed=1)
    task = blr.Task(trained("gaussian", x, y, 1.0), (x, y), likelihood="gaussian")
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    removal = import_module("blr_analysis.sensitivity.removal")
    monkeypatch.setattr(removal, "drifts", lambda *_: True)
    with pytest.warns(RuntimeWarning, match="2 of 2 examples keep .* pull is too small"):
        blr.leave_one_out(task, q, refine=2)


@pytest.mark.parametrize("refine", [-1, 21, 1.5, True, "all"])
def test_bad_numbers(refine) -> None:
    task = blr.Task(torch.nn.Linear(3, 2), (normal(20, 3).float(), torch.arange(20) % 2))
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    with pytest.raises(InputError, match="refine must be"):
        blr.leave_one_out(task, q, refine=refine)


def retrained_network(model: nn.Module, x: Tensor, y: Tensor, delta: float) -> nn.Module:
    """From these weights to the minimum of Σ (f − y)² and δ's penalty."""
    descent = torch.optim.LBFGS(
        model.parameters(),
        max_iter=250,
        history_size=40,
        tolerance_grad=1e-9,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        descent.zero_grad()
        weights = sum(p.square().sum() for p in model.parameters())
        loss = (model(x) - y).square().sum() + delta / 2 * weights
        loss.backward()
        return loss

    descent.step(objective)  # pyright: ignore[reportArgumentType]
    return model


@pytest.mark.slow
def test_a_network_of_a_gaussian_is_refined_unasked() -> None:
    """A linear model's cavity is exact; a network's is rough where leverages are high."""
    torch.manual_seed(0)
    x, delta = 1.5 * normal(60, 2), 0.1
    y = (x[:, :1].sin() * x[:, 1:]) + 0.3 * normal(60, 1, seed=1)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = retrained_network(model, x, y, delta).eval()
    task = blr.Task(model, (x, y), likelihood=nn.MSELoss())
    fitted = dict(structure="full", prior_precision=delta)
    q = blr.fit_laplace(task, **fitted)
    rough, loo = (blr.leave_one_out(task, q, refine=k) for k in (0, None))
    high = [i for i, word in enumerate(loo.correction) if word == "descent"]
    assert high and set(high) == set((rough.leverage > 0.5).nonzero().flatten().tolist())
    true = []
    for i in high:
        rest = [k for k in range(60) if k != i]
        other = retrained_network(copy.deepcopy(model), x[rest], y[rest], delta)
        true.append((other(x[i]) - y[i]).square().sum().detach())
    errors = [float((a.losses[high] - torch.stack(true)).abs().sum()) for a in (loo, rough)]
    assert errors[0] < 0.8 * errors[1]
    hessian = blr.fit_laplace(task, curvature="exact", **fitted)  # which may hold less than Λ_i
    assert bound_of(hessian) == OVERSTATED < bound_of(q)
