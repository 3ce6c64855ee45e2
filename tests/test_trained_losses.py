"""What the analyses say of models trained by weighted, smoothed and other losses, against
retraining and against the same data with every example as often as its weight says."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from oracles import fit_at_rest, relative
from parts import normal
from sklearn import datasets
from test_likelihoods import focal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import blr_analysis as blr
from blr_analysis.likelihoods import Categorical, Function

Loss = Callable[[Tensor, Tensor], Tensor]
DELTA = 0.1
CLASS_WEIGHTS = torch.tensor([15.0, 1.0, 1.0], dtype=torch.float64)
LOSSES: dict[str, tuple[object, Loss]] = {
    "plain": ("categorical", lambda f, y: cross_entropy(f, y, reduction="none")),
    "weights of 15": (
        nn.CrossEntropyLoss(CLASS_WEIGHTS),
        lambda f, y: cross_entropy(f, y, CLASS_WEIGHTS, reduction="none"),
    ),
    "smoothing 0.2": (
        nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda f, y: cross_entropy(f, y, label_smoothing=0.2, reduction="none"),
    ),
    "focal": (Function(focal, like=Categorical()), focal),
}


def minima(objective: Callable[[Tensor, Tensor], Tensor], theta: Tensor, keep: Tensor) -> Tensor:
    """Newton's for every row of ``keep`` at once, downhill on curvature below 0 too, with halved
    steps where the objective rises."""
    value = torch.vmap(objective)
    slope = torch.vmap(torch.func.grad(objective))
    curvature = torch.vmap(torch.func.hessian(objective))
    for _ in range(100):
        gradient = slope(theta, keep)
        if float(gradient.norm(dim=1).max()) < 1e-8:
            return theta
        values, turn = torch.linalg.eigh(curvature(theta, keep))
        step = (turn @ ((turn.mT @ gradient.unsqueeze(2)) / values.abs().unsqueeze(2))).squeeze(2)
        start = value(theta, keep) + 1e-10
        while bool((rises := value(theta - step, keep) > start).any()):
            step[rises] /= 2
        theta = theta - step
    raise AssertionError("no minimum")


class Spread(nn.Module):
    """A mean and a positive variance from two outputs."""

    def forward(self, f: Tensor) -> Tensor:
        return torch.cat((f[:, :1], f[:, 1:].exp()), -1)


def iris(name: str) -> tuple[object, Loss, Tensor, Tensor, nn.Module]:
    """A loss as the task takes it and as torch computes it from linear outputs, x, y, the head."""
    x, y = (torch.tensor(t) for t in datasets.load_iris(return_X_y=True))
    x = (x - x.mean(0)) / x.std(0)
    if name in LOSSES:
        return *LOSSES[name], x, y, nn.Identity()
    generator = torch.Generator().manual_seed(0)
    shares, rows = one_hot(y, 3).double(), torch.randperm(len(x), generator=generator)
    lam = torch.rand(len(x), 1, generator=generator, dtype=torch.float64)
    if name == "mixup":
        x, y = lam * x + (1 - lam) * x[rows], lam * shares + (1 - lam) * shares[rows]
        return (
            "categorical",
            lambda f, y: cross_entropy(f, y, reduction="none"),
            x,
            y,
            nn.Identity(),
        )
    if name == "learned variances":
        y, x = x[:, 2:3].clone(), x[:, :2]

        def gaussian(f: Tensor, y: Tensor) -> Tensor:
            return ((f[:, :1] - y).square() / f[:, 1:].exp() + f[:, 1:]).sum(1) / 2

        return nn.GaussianNLLLoss(), gaussian, x, y, Spread()
    if name == "variances":
        y, x, variance = x[:, 2:].clone(), x[:, :2], torch.tensor([0.2, 1.5]).double()
        return (
            blr.Gaussian(variance),
            lambda f, y: ((f - y).square() / variance / 2).sum(1),
            x,
            y,
            nn.Identity(),
        )
    y = shares if name == "pos_weight" else (3 * shares + 1).round()
    module = {
        "pos_weight": nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHTS),
        "poisson": nn.PoissonNLLLoss(),
    }[name]
    each = copy.copy(module)
    each.reduction = "none"
    return module, lambda f, y: each(f, y).sum(1), x, y, nn.Identity()


def left_out(
    x: Tensor, y: Tensor, c: int, loss: Loss, delta: float = DELTA
) -> tuple[nn.Linear, Tensor]:
    """A linear model at its minimum, and each example's true rise, trained anew without it."""
    n, d = x.shape

    def losses(theta: Tensor) -> Tensor:
        return loss(x @ theta[: c * d].view(c, d).T + theta[c * d :], y)

    def objective(theta: Tensor, keep: Tensor) -> Tensor:
        return keep @ losses(theta) + delta / 2 * theta.square().sum()

    zero, every = torch.zeros(1, c * (d + 1)).double(), torch.ones(1, n).double()
    best = minima(objective, zero, every)
    alone = minima(objective, best.repeat(n, 1), every - torch.eye(n).double())
    best, rise = best[0], torch.vmap(losses)(alone).diagonal() - losses(best[0])
    linear = nn.Linear(d, c).double()
    linear.weight.data, linear.bias.data = best[: c * d].view(c, d).clone(), best[c * d :].clone()
    return linear, rise


@pytest.mark.parametrize(
    "name", [*LOSSES, "mixup", "pos_weight", "poisson", "variances", "learned variances"]
)
def test_leave_one_out_is_what_retraining_gives(name: str) -> None:
    """The total rise of a linear model's loss, each example left out and trained anew."""
    likelihood, loss, x, y, head = iris(name)
    linear, rise = left_out(x, y, 2 if "variances" in name else 3, loss)
    task = blr.Task(nn.Sequential(linear, head), (x, y), likelihood=likelihood)  # type: ignore[arg-type]
    curved = name == "learned variances"  # by more than the mean of its Hessian
    q = blr.fit_laplace(
        task,
        structure="full",
        curvature="exact" if curved else "ggn",
        prior_precision=DELTA,
    )
    loo = blr.leave_one_out(task, q, refine=15 if curved else 0)
    estimate = loo.losses - loo.losses_before
    assert float(estimate.sum() / rise.sum()) == pytest.approx(1, abs=0.02)
    assert float(torch.corrcoef(torch.stack([estimate, rise]))[0, 1]) > 0.99


def twice(weighted: bool) -> tuple[blr.Task, Tensor]:
    """Data with whole weights, or with every example as often; and the copies' originals."""
    x, y = normal(12, 3), torch.arange(12) % 3
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    w = torch.tensor([1, 2, 3, 1, 4, 1, 1, 2, 5, 1, 1, 3])
    if weighted:
        return blr.Task(model, (x, y), weights=w, batch_size=5), torch.arange(12)
    rows = torch.arange(12).repeat_interleave(w)
    return blr.Task(model, (x[rows], y[rows])), rows


def both(**options) -> tuple[tuple[blr.Task, blr.Posterior, Tensor], ...]:
    pairs = []
    for weighted in (True, False):
        task, rows = twice(weighted)
        q = fit_at_rest(task, prior_precision=0.5, **options)
        pairs.append((task, q, rows))
    return tuple(pairs)


@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("curvature", ["ggn", "exact"])
def test_weights_are_copies_to_the_posterior(structure: str, curvature: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Hessian is negative in places
        (_, q, _), (_, copies, _) = both(structure=structure, curvature=curvature)
    g = {n: normal(*m.shape, seed=4) for n, m in q.mean.items()}
    ours, theirs = q.form.solve(g), copies.form.solve(g)
    assert all(relative(ours[n], theirs[n]) < 1e-10 for n in g)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["remove", "relabel"])
@pytest.mark.parametrize("solver", ["posterior", "cg"])
def test_weights_are_copies_to_what_if(change: str, solver: str) -> None:
    found = []
    for task, q, rows in both(structure="full"):
        chosen = [i for i, row in enumerate(rows.tolist()) if row in (1, 4)]
        asked = {"remove": chosen} if change == "remove" else {"relabel": dict.fromkeys(chosen, 0)}
        found.append(blr.what_if(task, q, solver=solver, **asked))
    ours, copies = found
    assert all(relative(p, copies.parameters[n]) < 1e-6 for n, p in ours.parameters.items())
    assert ours.before.loss == pytest.approx(copies.before.loss)
    assert ours.accuracy is not None


def test_weights_are_copies_to_influence() -> None:
    (task, q, _), (copied, copies, rows) = both(structure="full")
    test = blr.Task(task.model, (normal(5, 3, seed=8), torch.arange(5) % 3))
    ours = blr.influence(task, q, test)
    theirs = blr.influence(copied, copies, test)
    summed = torch.zeros_like(ours).index_add(0, rows, theirs)
    assert relative(ours, summed) < 1e-10


def test_weighted_examples_are_known_by_their_indices() -> None:
    task, _ = twice(True)
    q = fit_at_rest(task, structure="full", prior_precision=0.5)
    scores = blr.sensitivity(task, q)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    again = blr.sensitivity(task.subset(order), _as_if(q, task.subset(order)))
    for name in ("losses", "self_influence", "leverage", "error"):
        assert relative(getattr(again, name), getattr(scores, name)[order]) < 1e-12
    loo = blr.leave_one_out(task, q)
    assert relative(loo.losses_before, scores.losses) < 1e-12
    w = torch.tensor([1.0, 2, 3, 1, 4, 1, 1, 2, 5, 1, 1, 3])
    plain = cross_entropy(scores.outputs, scores.targets, reduction="none")
    assert relative(scores.losses, w * plain) < 1e-12


def _as_if(q: blr.Posterior, task: blr.Task) -> blr.Posterior:
    return blr.Posterior(
        q.mean, q.form, prior_precision=q.prior, n_data=task.n_data, record=q.record
    )


def small(likelihood, targets: Tensor, outputs: int, head: nn.Module | None = None) -> blr.Task:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs), *([head] if head else [])]
    model = nn.Sequential(*layers).double()
    return blr.Task(model, (normal(len(targets), 3), targets), likelihood=likelihood)


class MeanVariance(nn.Module):
    def forward(self, f: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = f.chunk(2, -1)
        return mean, log_variance.exp()


TASKS: dict[str, Callable[[], blr.Task]] = {
    "class weights": lambda: small(
        nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1), torch.arange(12) % 3, 3
    ),
    "soft targets": lambda: small("categorical", normal(12, 3, seed=2).softmax(-1), 3),
    "ignored": lambda: small(nn.CrossEntropyLoss(ignore_index=0), torch.arange(12) % 3, 3),
    "focal": lambda: small(Function(focal, like=Categorical()), torch.arange(12) % 3, 3),
    "function": lambda: small(focal, torch.arange(12) % 3, 3),
    "pos_weight": lambda: small(
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), torch.arange(12) % 2, 1
    ),
    "huber": lambda: small(nn.HuberLoss(), normal(12, 2, seed=2), 2),
    "variances": lambda: small(nn.GaussianNLLLoss(), normal(12, 1, seed=2), 2, MeanVariance()),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_every_analysis_takes_the_loss(name: str, structure: str) -> None:
    """Left-out outputs against the dense formula; the rest answers with finite numbers."""
    task = TASKS[name]()
    q = fit_at_rest(task, structure=structure, prior_precision=3.0)
    scores = blr.sensitivity(task, q)
    f, y, v = scores.outputs, scores.targets, scores.variance
    assert v is not None
    e, hessian = task.likelihood.error(f, y), task.likelihood.hessian(f, y)
    cavity = torch.linalg.solve(torch.eye(f.shape[1]).to(f) - v @ hessian, v)
    loo = blr.leave_one_out(task, q, correction="cavity")
    told = torch.tensor([word == "cavity" for word in loo.correction])
    after = task.likelihood.moved(f, torch.einsum("bcd,bd->bc", cavity, e))
    assert bool(told.any())
    assert relative(loo.logits[told], after[told]) < 1e-9
    result = blr.what_if(task, q, remove=[1, 5])
    numbers = [loo.losses, scores.deviation, blr.influence(task, q, task)]
    numbers += [torch.tensor(result.nll), blr.suspicious(task, q).left_out]
    assert all(bool(torch.isfinite(x).all()) for x in numbers if x is not None)
    assert len(scores.table) == len(loo.table) == 12


def test_examples_of_ignored_classes_do_not_count() -> None:
    task = TASKS["ignored"]()
    q = blr.fit_laplace(task, structure="full", prior_precision=3.0)
    loo = blr.leave_one_out(task, q)
    ignored = loo.targets == 0
    assert bool((loo.losses[ignored] == 0).all())
    right = (loo.predictions == loo.targets)[~ignored]
    assert loo.accuracy == pytest.approx(float(right.double().mean()))


@pytest.mark.parametrize(("head", "likelihood"), [("softmax", "categorical"), ("sig", "bernoulli")])
def test_probabilities_given_as_logits_are_warned_of_once(head: str, likelihood: str) -> None:
    x, y = 5 * normal(20, 2), torch.arange(20) % 2
    last = nn.Softmax(-1) if head == "softmax" else nn.Sigmoid()
    model = nn.Sequential(nn.Linear(2, 2 if head == "softmax" else 1), last)
    nn.init.normal_(model[0].weight, std=3.0, generator=torch.Generator().manual_seed(0))
    task = blr.Task(model, (x, y), likelihood=likelihood, batch_size=10)
    with pytest.warns(UserWarning, match="look like probabilities") as seen:
        blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = blr.Task(nn.Sequential(model[0]), (x, y), likelihood=likelihood)
        blr.fit_laplace(logits, structure="diag", prior_precision=1.0)
