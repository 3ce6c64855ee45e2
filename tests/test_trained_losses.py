"""What the analyses say of models trained by weighted, smoothed and other losses, against
retraining and against the same data with every example as often as its weight says."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from likelihood_cases import each, focal
from models import normal
from oracles import fit_at_rest, relative
from oracles_retraining import (
    Loss,
    leave_one_out_weights,
    retrained,
    standardised,
    trained,
    with_ones,
)
from sklearn import datasets
from torch import Tensor, nn
from torch.nn.functional import one_hot

import blr_analysis as blr
from blr_analysis.likelihoods import Categorical, Function

DELTA = 0.1
WEIGHTS = torch.tensor([15.0, 1.0, 1.0]).double()
VARIANCES = torch.tensor([0.2, 1.5]).double()
MODULES = {
    "plain": nn.CrossEntropyLoss(),
    "mixup": nn.CrossEntropyLoss(),
    "weights of 15": nn.CrossEntropyLoss(WEIGHTS),
    "smoothing 0.2": nn.CrossEntropyLoss(label_smoothing=0.2),
    "pos_weight": nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
    "poisson": nn.PoissonNLLLoss(),
}
# As a task takes it, and as torch computes it from linear outputs.
LOSSES: dict[str, tuple[Any, Loss]] = {
    **{name: (module, each(module)) for name, module in MODULES.items()},
    "focal": (Function(focal, like=Categorical()), focal),
    "variances": (blr.Gaussian(VARIANCES), lambda f, y: ((f - y) ** 2 / VARIANCES / 2).sum(1)),
    "learned variances": (
        nn.GaussianNLLLoss(),
        lambda f, y: ((f[:, :1] - y) ** 2 / f[:, 1:].exp() + f[:, 1:]).sum(1) / 2,
    ),
}


def iris(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and the targets that a loss takes."""
    x, y = standardised(datasets.load_iris)
    shares = one_hot(y, 3).double()
    if name == "mixup":
        generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(len(x), generator=generator)
        lam = torch.rand(len(x), 1, generator=generator, dtype=torch.float64)
        return lam * x + (1 - lam) * x[rows], lam * shares + (1 - lam) * shares[rows]
    if "variances" in name:
        return x[:, :2], x[:, 2:3] if "learned" in name else x[:, 2:]
    targets = {"pos_weight": shares, "poisson": (3 * shares + 1).round()}
    return x, targets.get(name, y)


def left_out(x: Tensor, y: Tensor, c: int, loss: Loss) -> tuple[nn.Linear, Tensor]:
    """A linear model at its minimum, and each example's true rise, trained anew without it."""
    best = trained(loss, x, y, DELTA, c)
    alone = retrained(loss, x, y, leave_one_out_weights(len(x)), DELTA, c)
    outputs = torch.einsum("ncd,nd->nc", alone, with_ones(x))
    return best, (loss(outputs, y) - loss(best(x), y)).detach()


class Spread(nn.Module):
    """A pair: means, and positive variances."""

    def forward(self, f: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = f.chunk(2, -1)
        return mean, log_variance.exp()


@pytest.mark.parametrize("name", LOSSES)
def test_leave_one_out_is_what_retraining_gives(name: str) -> None:
    """The total rise of a linear model's loss, each example left out and trained anew."""
    likelihood, loss = LOSSES[name]
    x, y = iris(name)
    head, rise = left_out(x, y, 2 if "variances" in name else 3, loss)
    curved = name == "learned variances"  # by more than the mean of its Hessian
    model = nn.Sequential(head, Spread()) if curved else head
    task = blr.Task(model, (x, y), likelihood=likelihood)
    how = {"structure": "full", "curvature": "exact" if curved else "ggn"}
    q = blr.fit_laplace(task, **how, prior_precision=DELTA)
    loo = blr.leave_one_out(task, q, refine=15 if curved else 0)
    estimate = loo.losses - loo.losses_before
    assert float(estimate.sum() / rise.sum()) == pytest.approx(1, abs=0.02)
    assert float(torch.corrcoef(torch.stack([estimate, rise]))[0, 1]) > 0.99


def small(likelihood: Any, targets: Tensor, outputs: int, **options: Any) -> blr.Task:
    torch.manual_seed(0)
    head = [Spread()] if isinstance(likelihood, nn.GaussianNLLLoss) else []
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs), *head).double()
    return blr.Task(model, (normal(12, 3), targets), likelihood=likelihood, **options)


THREE = torch.arange(12) % 3
TIMES = torch.tensor([1, 2, 3, 1, 4, 1, 1, 2, 5, 1, 1, 3])


def both(**options: Any) -> list[tuple[blr.Task, blr.Posterior, Tensor]]:
    """Data with whole weights, and with every example as often; the copies' originals."""
    weighted = small("categorical", THREE, 3, weights=TIMES, batch_size=5)
    rows = torch.arange(12).repeat_interleave(TIMES)
    copies = blr.Task(weighted.model, (normal(12, 3)[rows], THREE[rows]))
    pairs = ((weighted, torch.arange(12)), (copies, rows))
    return [(task, fit_at_rest(task, prior_precision=0.5, **options), i) for task, i in pairs]


@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("curvature", ["ggn", "exact"])
def test_weights_are_copies_to_posterior_and_influence(structure: str, curvature: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Hessian is negative in places
        (task, q, _), (copied, copies, rows) = both(structure=structure, curvature=curvature)
    g = {n: normal(*m.shape, seed=4) for n, m in q.mean.items()}
    ours = q.form.solve(g)
    theirs = copies.form.solve(g)
    assert all(relative(ours[n], theirs[n]) < 1e-10 for n in g)
    test = blr.Task(task.model, (normal(5, 3, seed=8), torch.arange(5) % 3))
    theirs = blr.influence(copied, copies, test)
    summed = torch.zeros(12, 5).to(theirs).index_add(0, rows, theirs)
    assert relative(blr.influence(task, q, test), summed) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("change", ["remove", "relabel"])
@pytest.mark.parametrize("solver", ["posterior", "cg"])
def test_weights_are_copies_to_what_if(change: str, solver: str) -> None:
    actual = []
    for task, q, rows in both(structure="full"):
        chosen = [i for i, row in enumerate(rows.tolist()) if row in (1, 4)]
        asked = {"remove": chosen} if change == "remove" else {"relabel": dict.fromkeys(chosen, 0)}
        actual.append(blr.what_if(task, q, solver=solver, **asked))
    ours, copies = actual
    assert all(relative(p, copies.parameters[n]) < 1e-6 for n, p in ours.parameters.items())
    assert ours.before.loss == pytest.approx(copies.before.loss)
    assert ours.accuracy is not None


def test_weighted_examples_are_known_by_their_indices() -> None:
    (task, q, _), _ = both(structure="full")
    scores = blr.sensitivity(task, q)
    order = normal(12).argsort()
    part = task.subset(order)
    as_if = blr.Posterior(q.mean, q.form, prior_precision=q.prior, n_data=12, record=q.record)
    again = blr.sensitivity(part, as_if)
    for name in ("losses", "self_influence", "leverage", "error"):
        assert relative(getattr(again, name), getattr(scores, name)[order]) < 1e-12
    assert relative(blr.leave_one_out(task, q).losses_before, scores.losses) < 1e-12
    plain = each(nn.CrossEntropyLoss())(scores.outputs, scores.targets)
    assert relative(scores.losses, TIMES * plain) < 1e-12


TASKS: dict[str, tuple[Any, Tensor, int]] = {
    "class weights": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), THREE, 3),
    "soft targets": ("categorical", normal(12, 3, seed=2).softmax(-1), 3),
    "ignored": (nn.CrossEntropyLoss(ignore_index=0), THREE, 3),
    "focal": (Function(focal, like=Categorical()), THREE, 3),
    "function": (focal, THREE, 3),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), torch.arange(12) % 2, 1),
    "huber": (nn.HuberLoss(), normal(12, 2, seed=2), 2),
    "variances": (nn.GaussianNLLLoss(), normal(12, 1, seed=2), 2),
}


PAIRS = [(name, "full") for name in TASKS]
PAIRS += [("class weights", structure) for structure in ("kron", "diag", "lowrank")]


@pytest.mark.parametrize(("name", "structure"), PAIRS)
def test_every_analysis_takes_the_loss(name: str, structure: str) -> None:
    """Left-out outputs against the dense formula; the rest answers with finite numbers."""
    task = small(*TASKS[name])
    q = fit_at_rest(task, structure=structure, prior_precision=3.0)
    scores = blr.sensitivity(task, q)
    f = scores.outputs
    y = scores.targets
    v = scores.variance
    e = task.likelihood.error(f, y)
    hessian = task.likelihood.hessian(f, y)
    cavity = torch.linalg.solve(torch.eye(f.shape[1]).to(f) - v @ hessian, v)
    loo = blr.leave_one_out(task, q, correction="cavity")
    told = torch.tensor([word == "cavity" for word in loo.correction])
    after = task.likelihood.moved(f, torch.einsum("bcd,bd->bc", cavity, e))
    assert bool(told.any())
    assert relative(loo.logits[told], after[told]) < 1e-9
    if name == "ignored":  # what does not count
        assert bool((loo.losses[y == 0] == 0).all())
        right = (loo.predictions == y)[y != 0]
        assert loo.accuracy == pytest.approx(float(right.double().mean()))
    result = blr.what_if(task, q, remove=[1, 5])
    numbers = [loo.losses, scores.deviation, blr.influence(task, q, task)]
    numbers += [torch.tensor(result.nll), blr.suspicious(task, q).left_out]
    assert all(bool(torch.isfinite(x).all()) for x in numbers if x is not None)
    assert len(scores.table) == len(loo.table) == 12


@pytest.mark.parametrize(
    ("likelihood", "outputs", "last"),
    [("categorical", 2, nn.Softmax(-1)), ("bernoulli", 1, nn.Sigmoid())],
)
def test_probabilities_given_as_logits_are_warned_of_once(likelihood, outputs, last) -> None:
    layer = nn.Linear(2, outputs).double()
    data = (5 * normal(20, 2), torch.arange(20) % 2)
    layer.weight.data = 3 * normal(outputs, 2, seed=1)
    task = blr.Task(nn.Sequential(layer, last), data, likelihood=likelihood, batch_size=10)
    with pytest.warns(UserWarning, match="look like probabilities") as seen:
        blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = blr.Task(nn.Sequential(layer), data, likelihood=likelihood)
        blr.fit_laplace(logits, structure="diag", prior_precision=1.0)
