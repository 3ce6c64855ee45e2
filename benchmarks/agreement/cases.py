"""What estimates are compared with: a trained model, its data, and what retraining gave.

:mod:`benchmarks.agreement.from_truth` has those of ``benchmarks.truth``; :func:`small` makes a
case of its own in seconds, for trying things out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.peers.problem import mlp
from blr_analysis.likelihoods import Likelihood, resolve

State = dict[str, Tensor]
STRUCTURES = ("diag", "kron", "lowrank", "full")


@dataclass(frozen=True)
class Subsets:
    """Retrained on random subsets.

    Attributes:
        kept: which examples each retraining had, bool ``[K, N]``.
        losses: of every test example after it, ``[K, M]``.
        again: the same with another seed, for the ceiling; None where there is none.
    """

    kept: Tensor
    losses: Tensor
    again: Tensor | None = None


@dataclass(frozen=True)
class LeftOut:
    """Retrained without one example: which, and the rise of that example's own loss, ``[L]``."""

    indices: Tensor
    rise: Tensor


@dataclass(frozen=True)
class Removed:
    """Retrained without a group.

    Attributes:
        names: of the groups.
        indices: the examples of each.
        losses: of every test example after each removal, ``[G, M]``.
        before: with everything, ``[M]``.
        passes: gradient evaluations over the kept data that a retraining took, on average.
    """

    names: list[str]
    indices: list[Tensor]
    losses: Tensor
    before: Tensor
    passes: float

    def rise(self, count: int | None = None) -> Tensor:
        """Of the mean loss of the first ``count`` test examples, ``[G]``."""
        return (self.losses - self.before)[:, :count].double().mean(1)


@dataclass(frozen=True)
class Case:
    """A trained model in float64, its data, and what retraining gave (what there is of it)."""

    name: str
    widths: list[int]
    likelihood: str
    delta: float
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    checkpoints: list[State]  # the first is the model that is analysed
    dampings: tuple[float, ...] = ()  # for peers; δ where there are none
    subsets: Subsets | None = None
    left_out: LeftOut | None = None
    removed: Removed | None = None
    notes: list[str] = field(default_factory=list)
    structures: tuple[str, ...] = STRUCTURES  # to compare, as far as they are worth their time
    fits: dict[str, blr.Posterior] = field(default_factory=dict, repr=False)

    def model(self, which: int = 0) -> nn.Module:
        """The model with the weights of a checkpoint."""
        model = mlp(self.widths).double()
        model.load_state_dict(self.checkpoints[which])
        return model.eval()

    def task(self, which: int = 0) -> blr.Task:
        """Model and training data."""
        return blr.Task(self.model(which), (self.x, self.y), likelihood=self.observed())

    def fit(self, structure: str) -> blr.Posterior:
        """The Laplace posterior of the analysed model; fitted when it is first asked for."""
        if structure not in self.fits:
            self.fits[structure] = blr.fit_laplace(
                self.task(), structure=structure, prior_precision=self.delta
            )
        return self.fits[structure]

    def test_task(self, task: blr.Task, count: int | None = None) -> blr.Task:
        """The first ``count`` test examples under a task's model."""
        data = (self.x_test[:count], self.y_test[:count])
        return blr.Task(task.model, data, likelihood=self.observed())

    def observed(self) -> Likelihood:
        return resolve(self.likelihood)

    @property
    def size(self) -> int:
        """How many parameters."""
        return sum(p.numel() for p in self.checkpoints[0].values())


def retrained(
    model: nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood, delta: float
) -> nn.Module:
    """The model at the minimum of Σ ℓ_i + δ/2 ‖θ‖² nearest to its weights; changed in place."""
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=2000,
        history_size=30,
        tolerance_grad=1e-7,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def objective() -> float:
        optimizer.zero_grad()
        value = likelihood.nll(model(x), y).sum()
        value = value + 0.5 * delta * sum(p.square().sum() for p in parameters)
        value.backward()
        return value  # type: ignore[return-value]

    optimizer.step(objective)
    return model


def small(subsets: int = 20, left_out: int = 20) -> Case:
    """Logistic regression on 400 of scikit-learn's digits: convex, so retraining has no noise."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)[:500]
    inputs = torch.from_numpy(images)[order] / 16
    targets = torch.from_numpy(labels)[order]
    x = inputs[:400]
    y = targets[:400]
    x_test = inputs[400:]
    y_test = targets[400:]
    likelihood = resolve("categorical")
    delta = 1.0
    widths = [64, 10]
    full = retrained(mlp(widths).double(), x, y, likelihood, delta)

    def without(kept: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        model = mlp(widths).double()
        model.load_state_dict(full.state_dict())
        retrained(model, x[kept], y[kept], likelihood, delta)
        return lambda inputs, labels: likelihood.nll(model(inputs), labels).detach()

    every = torch.ones(len(x), dtype=torch.bool)
    before = without(every)(x, y)
    before_test = without(every)(x_test, y_test)
    rows = [torch.rand(len(x), generator=generator).argsort() < len(x) // 2 for _ in range(subsets)]
    chosen = torch.randperm(len(x), generator=generator)[:left_out]

    def all_but(gone: Tensor) -> Tensor:
        kept = every.clone()
        kept[gone] = False
        return kept

    rises = [without(all_but(i[None]))(x[i : i + 1], y[i : i + 1])[0] - before[i] for i in chosen]
    groups = [(y == c).nonzero().flatten() for c in range(10)]
    return Case(
        "small",
        widths,
        "categorical",
        delta,
        *(x, y, x_test, y_test),
        checkpoints=[{n: t.clone() for n, t in full.state_dict().items()}],
        subsets=Subsets(
            torch.stack(rows), torch.stack([without(kept)(x_test, y_test) for kept in rows])
        ),
        left_out=LeftOut(chosen, torch.stack(rises)),
        removed=Removed(
            [str(c) for c in range(10)],
            groups,
            torch.stack([without(all_but(g))(x_test, y_test) for g in groups]),
            before_test,
            passes=100.0,
        ),
    )
