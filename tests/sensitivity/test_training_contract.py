"""Trainings by a recipe against plain loops of torch's own losses: every loss on every path."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import normal
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.likelihoods import MeanAndVariance, TokenCategorical
from blr_analysis.sensitivity.training import trained, whole_data

# the last minibatch has three examples
N = 13
EPOCHS = 4
BATCH = 5
LR = 0.03
SHORT = 2
REMOVED = [1, 5, 6]
Loss = Callable[[Any, Tensor, Tensor], Tensor]  # outputs, targets and rows of a minibatch -> scalar

CLASSES = torch.arange(N) % 3
IGNORED = CLASSES.masked_fill(torch.arange(N) % 4 == 1, -100)
SHARES = normal(N, 3, seed=2).softmax(-1)
REAL = normal(N, 3, seed=3)
LABELS = (normal(N, 3, seed=4) > 0).double()
COUNTS = torch.arange(3 * N).view(N, 3).remainder(4).double()
WORDS = (torch.arange(6 * N).view(N, 6) * 5).remainder(3)
SOME = WORDS.masked_fill(torch.arange(6 * N).view(N, 6).remainder(N) < 4, -100)
PER_CLASS = torch.tensor([0.1, 7.0, 30.0]).double()
PER_EXAMPLE = torch.arange(1, N + 1).double() / 4


class Focal(nn.CrossEntropyLoss):
    """A subclass, whose mean divides by the sum of the weights."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(input, target, reduction="none")
        losses = self.weight[target] * (1 - (-losses).exp()) ** 2 * losses
        if self.reduction == "none":
            return losses
        return losses.sum() / self.weight[target].sum()


class Cauchy(nn.Module):
    """A user's own, with a reduction."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = (1 + (outputs - targets).square()).log()
        return losses if self.reduction == "none" else getattr(losses, self.reduction)()


class Variances(nn.Module):
    def forward(self, f: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = f.chunk(2, -1)
        return mean, log_variance.exp()


def of(module: Any) -> Loss:
    """A module's own loss, as a user's loop calls it."""
    return lambda f, y, rows: module(f, y)


def gaussian_nll(module: nn.GaussianNLLLoss) -> Loss:
    return lambda f, y, rows: module(f[0], y, f[1])


def quartic(f: Tensor, y: Tensor) -> Tensor:
    return ((f - y) ** 2 + 0.1 * (f - y) ** 4).sum(-1)


def per_token(f: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    return F.cross_entropy(f.flatten(0, 1), y.flatten())


def next_token(f: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    return F.cross_entropy(f[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def each(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y, reduction="none")


@dataclass
class Case:
    likelihood: Any
    targets: Tensor
    loss: Loss | None = None  # None: the module's own
    outputs: int = 3
    tail: type[nn.Module] | None = None
    tokens: bool = False
    task: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)

    def model(self, seed: int = 1) -> nn.Sequential:
        torch.manual_seed(seed)
        first = nn.Embedding(5, 4) if self.tokens else nn.Linear(4, 4)
        tail = {None: [], nn.LogSoftmax: [nn.LogSoftmax(-1)]}.get(self.tail)
        tail = [self.tail()] if tail is None and self.tail is not None else tail or []
        return nn.Sequential(first, nn.Tanh(), nn.Linear(4, self.outputs), *tail).double()

    @property
    def inputs(self) -> Tensor:
        return (torch.arange(6 * N).view(N, 6) * 7).remainder(5) if self.tokens else normal(N, 4)

    def reduced(self, f: Any, rows: Tensor) -> Tensor:
        loss = self.loss or of(self.likelihood)
        return loss(f, self.targets[rows], rows)


CE = nn.CrossEntropyLoss
BCE = nn.BCEWithLogitsLoss
CASES: dict[str, Case] = {
    "categorical": Case("categorical", CLASSES, of(CE())),
    "categorical, ignored": Case(blr.Categorical(ignore_index=-100), IGNORED, of(CE())),
    "categorical, weights": Case(blr.Categorical(PER_CLASS), CLASSES, of(CE(PER_CLASS))),
    "cross entropy": Case(CE(), CLASSES),
    "cross entropy, weights": Case(CE(PER_CLASS), CLASSES),
    "cross entropy, ignored": Case(CE(), IGNORED),
    "cross entropy, another ignored": Case(CE(ignore_index=2), CLASSES),
    "cross entropy, smoothed": Case(CE(label_smoothing=0.2), CLASSES),
    "cross entropy, everything": Case(CE(PER_CLASS, label_smoothing=0.2), IGNORED),
    "cross entropy, sum": Case(CE(reduction="sum"), IGNORED),
    "cross entropy, weights, sum": Case(CE(PER_CLASS / 9, reduction="sum"), CLASSES),
    "cross entropy, none": Case(
        CE(reduction="none"), IGNORED, lambda f, y, rows: each(f, y).mean()
    ),
    "soft targets": Case(CE(), SHARES),
    "soft targets, weights": Case(CE(PER_CLASS), SHARES),
    "nll": Case(nn.NLLLoss(), CLASSES, tail=nn.LogSoftmax),
    "nll, weights": Case(nn.NLLLoss(PER_CLASS), IGNORED, tail=nn.LogSoftmax),
    "focal": Case(Focal(PER_CLASS), CLASSES),
    "bernoulli": Case("bernoulli", LABELS[:, :1], of(BCE()), outputs=1),
    "labels": Case(BCE(), LABELS),
    "labels, pos_weight": Case(BCE(pos_weight=PER_CLASS), LABELS),
    "labels, weight": Case(BCE(weight=PER_CLASS), LABELS),
    "labels, sum": Case(BCE(reduction="sum"), LABELS),
    "soft margin": Case(nn.SoftMarginLoss(), 2 * LABELS - 1),
    "multilabel soft margin": Case(nn.MultiLabelSoftMarginLoss(), LABELS),
    "gaussian": Case("gaussian", REAL, lambda f, y, rows: ((f - y) ** 2).sum() / (2 * len(f))),
    "mse": Case(nn.MSELoss(), REAL),
    "mse of one": Case(nn.MSELoss(), REAL[:, :1], outputs=1),
    "mse, sum": Case(nn.MSELoss(reduction="sum"), REAL),
    "mse, none": Case(nn.MSELoss(reduction="none"), REAL, lambda f, y, rows: F.mse_loss(f, y)),
    "huber": Case(nn.HuberLoss(), REAL),
    "huber, sum": Case(nn.HuberLoss(reduction="sum"), REAL),
    "smooth l1": Case(nn.SmoothL1Loss(), REAL),
    "poisson": Case("poisson", COUNTS, lambda f, y, rows: (f.exp() - y * f).sum() / len(f)),
    "poisson module": Case(nn.PoissonNLLLoss(), COUNTS),
    "poisson module, full, sum": Case(nn.PoissonNLLLoss(full=True, reduction="sum"), COUNTS),
    "gaussian nll": Case(
        nn.GaussianNLLLoss(), REAL, gaussian_nll(nn.GaussianNLLLoss()), 6, Variances
    ),
    "gaussian nll, sum": Case(
        nn.GaussianNLLLoss(full=True, reduction="sum"),
        REAL[:, :1],
        gaussian_nll(nn.GaussianNLLLoss(reduction="sum")),
        2,
        Variances,
    ),
    "mean and variance": Case(
        MeanAndVariance(), REAL[:, :1], gaussian_nll(nn.GaussianNLLLoss()), 2, Variances
    ),
    "a user's module": Case(Cauchy("mean"), REAL),
    "a user's module, sum": Case(Cauchy("sum"), REAL),
    "a user's function": Case(quartic, REAL, lambda f, y, rows: quartic(f, y).mean()),
    "tokens": Case("tokens", SOME, per_token, tokens=True),
    "tokens, weights": Case(
        TokenCategorical(weight=PER_CLASS),
        SOME,
        lambda f, y, rows: CE(PER_CLASS)(f.flatten(0, 1), y.flatten()),
        tokens=True,
    ),
    "causal_lm": Case("causal_lm", SOME, next_token, tokens=True),
    "weights of examples": Case(
        "categorical",
        CLASSES,
        lambda f, y, rows: (PER_EXAMPLE[rows] * each(f, y)).mean(),
        task={"weights": PER_EXAMPLE},
    ),
    "weights of examples, their sum": Case(
        "categorical",
        CLASSES,
        lambda f, y, rows: (PER_EXAMPLE[rows] * each(f, y)).sum() / PER_EXAMPLE[rows].sum(),
        task={"weights": PER_EXAMPLE},
        recipe={"reduction": "weights"},
    ),
    "a sum, said": Case(
        "categorical", CLASSES, of(CE(reduction="sum")), recipe={"reduction": "sum"}
    ),
    "a mean over labels, said": Case(
        "bernoulli", LABELS, of(BCE()), recipe={"reduction": "entries"}
    ),
    "a mean over examples, said": Case(
        nn.MSELoss(),
        REAL,
        lambda f, y, rows: ((f - y) ** 2).sum() / len(f),
        recipe={"reduction": "mean"},
    ),
}


def minibatches(n: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """The rows of every step, as a training by a recipe draws them."""
    order = torch.Generator().manual_seed(2 * seed)
    for _ in range(epochs):
        rank = torch.randperm(n, generator=order).argsort()
        for k in range(math.ceil(n / BATCH)):
            yield (rank // BATCH == k).nonzero().flatten()


def by_hand(
    case: Case, rows: Tensor, *, n: int, short: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """Plain SGD on these rows of the data, whose minibatches are those of n examples."""
    model = case.model()
    x = case.inputs
    lr = LR * EPOCHS / SHORT if short else LR
    epochs = SHORT if short else EPOCHS
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    batches = list(minibatches(n, epochs, seed))
    for k, places in enumerate(batches):
        chosen = rows[places] if n == len(rows) else places[torch.isin(places, rows)]
        if short:
            optimizer.param_groups[0]["lr"] = lr * (
                0.5 + 0.5 * math.cos(math.pi * k / len(batches))
            )
        optimizer.zero_grad()
        case.reduced(model(x[chosen]), chosen).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def task_of(case: Case) -> blr.Task:
    recipe = blr.Recipe(
        "sgd",
        lr=LR,
        epochs=EPOCHS,
        batch_size=BATCH,
        initial=case.model().state_dict(),
        **case.recipe,
    )
    data = (case.inputs, case.targets)
    options = {"likelihood": case.likelihood, "recipe": recipe, "progress": False, **case.task}
    return blr.Task(case.model(7), data, **options)


def by_rerun(task: blr.Task, q: blr.Posterior, monkeypatch: Any) -> Any:
    return blr.rerun(task, seeds=1)[0].mean


def by_retraining(task: blr.Task, q: blr.Posterior, monkeypatch: Any) -> Any:
    return blr.what_if(task, q, remove=REMOVED, solver="retrain", seeds=1).parameters


def by_replay(task: blr.Task, q: blr.Posterior, monkeypatch: Any) -> Any:
    options: dict[str, Any] = {"solver": "replay", "seeds": 1, "passes": SHORT}
    return blr.what_if(task, q, remove=REMOVED, **options).parameters


def by_calibration(task: blr.Task, q: blr.Posterior, monkeypatch: Any) -> Any:
    """The first of the trainings that a calibration makes."""
    module = import_module("blr_analysis.sensitivity.calibrate")
    actual = []

    def spied(*args: Any, **options: Any) -> Any:
        actual.append(trained(*args, **options))
        return actual[-1]

    monkeypatch.setattr(module, "trained", spied)
    blr.calibrate(task, q)
    return actual[0]


def all_rows() -> Tensor:
    return torch.arange(N)


def without(removed: Any) -> Tensor:
    keep = torch.ones(N, dtype=torch.bool)
    keep[removed] = False
    return keep.nonzero().flatten()


def tenth() -> Tensor:
    return torch.randperm(N, generator=torch.Generator().manual_seed(0))[:2]


PATHS: dict[str, tuple[Any, Callable[[Case], dict[str, Tensor]]]] = {
    "rerun": (by_rerun, lambda case: by_hand(case, all_rows(), n=N)),
    "retrain": (by_retraining, lambda case: by_hand(case, without(REMOVED), n=N - len(REMOVED))),
    "replay": (by_replay, lambda case: by_hand(case, without(REMOVED), n=N, short=True)),
    "calibrate": (by_calibration, lambda case: by_hand(case, without(tenth()), n=N)),
}


@pytest.fixture(scope="module", autouse=True)
def _first_training() -> None:
    """torch imports its compiler when the first optimizer is made."""
    by_hand(CASES["mse"], all_rows(), n=N)


def check(case: Case, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same weights, as a part of the way from the first ones."""
    first = case.model().state_dict()
    for parameter, value in expected.items():
        way = (value - first[parameter]).norm()
        assert float(way) > 0
        assert float((actual[parameter] - value).norm() / way) < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_a_training_is_on_the_loss_that_was_given(name: str) -> None:
    case = CASES[name]
    task = task_of(case)
    assert task.recipe is not None
    check(case, trained(task, whole_data(task), task.recipe, 0), by_hand(case, all_rows(), n=N))


# The fast test above holds every loss; every path shares that training, and a third holds them.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not calibrated")
@pytest.mark.parametrize("name", [*CASES][::3])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_trains_on_the_loss_that_was_given(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    ours, oracle = PATHS[path]
    task = task_of(case)
    curvature = "empirical_fisher" if case.tokens else "ggn"
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0, curvature=curvature)
    check(case, ours(task, q, monkeypatch), oracle(case))


@pytest.mark.parametrize("name", ["cross entropy, weights", "mse", "a user's module", "mse, sum"])
def test_relabelled_and_added_examples_are_reduced_with_the_others(name: str) -> None:
    """One sum and one divisor for a minibatch of several parts."""
    case = CASES[name]
    task = task_of(case)
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    relabelled = copy.copy(case)
    relabelled.targets = case.targets.clone()
    relabelled.targets[[2, 7]] = case.targets[[1, 3]]
    labels = {i: relabelled.targets[i] for i in (2, 7)}
    options: dict[str, Any] = {"solver": "replay", "seeds": 1, "passes": SHORT}
    actual = blr.what_if(task, q, relabel=labels, **options).parameters
    expected = by_hand(relabelled, all_rows(), n=N, short=True)
    for parameter, value in expected.items():
        torch.testing.assert_close(actual[parameter], value, rtol=1e-9, atol=1e-12)


def test_a_minibatch_without_anything_that_counts_moves_nothing() -> None:
    case = Case(CE(), torch.full((N,), -100).scatter_(0, torch.tensor([3]), 1))
    task = task_of(case)
    assert task.recipe is not None
    state = trained(task, whole_data(task), task.recipe, 0)
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
