"""A short training from the first weights, with and without a group: what their difference says.

A class that a network has learned is not unlearned as it would never have been learned: going on
from the trained weights, however the moves are made, predicts retraining badly. A few passes from
the first weights predict it well, because what a group does to the loss is decided early, and what
a short training lacks cancels in the difference

    ℓ_j^{\\G} ≈ ℓ_j(m) + ℓ_j(θ_K^{\\G}) − ℓ_j(θ_K)

θ_K and θ_K^{\\G} are trained for as many steps, on all data and on the changed data, from the same
weights, with the same kind of steps, the same step sizes and, but for the change, the same
minibatches: their order moves the loss more than a small group does. Minibatches lower the mean
loss, with no decay of the weights: that a training ends is what holds them back. (As many epochs of
half the data are half as many steps: of groups that large, retraining for as many epochs loses
more. Smaller steps for fewer data say so, and mistake small groups: they are not taken. Steps are
fewer where one class remains, whose loss falls all the way.)

How the model was trained, its weights tell (:func:`shortfall`). Steps of Adam's kind move all
weights alike, those of SGD's (and IVON's) kind the ones with large gradients; and steps that make
the weights larger than the model's are too large, however well they lower the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr_analysis.errors import BLRError, ModelError
from blr_analysis.posterior.structures import Tree
from blr_analysis.progress import Bar, bar
from blr_analysis.task import Task

# A task, the examples of it that count, and where they stand in the data before the change; what
# is added stands behind.
Part = tuple[Task, Tensor, Tensor]

# Peak step sizes that are tried, and what part of the best one is taken: with momentum the largest
# that lowers the loss at once is too large for the steps that follow.
RATES = {"adam": (1e-2, 5e-3, 2e-3, 5e-4), "sgd": (0.6, 0.3, 0.15, 0.06, 0.02)}
TAKEN = {"adam": 1.0, "sgd": 1 / 3}
# What is left of one class is fitted at once, and what is said of the other grows with the step
# size: the middle between the one taken and the best.
ALONE = {family: taken**-0.5 for family, taken in TAKEN.items()}
# As unlike the model's, at most, are the weights of its own kind of steps, and next to the other's.
UNLIKE, CLEAR = 0.5, 2 / 3
MOMENTUM = 0.9
PROBES = 0.4  # as many passes as this part of a training's go into finding its step size
HALVINGS = 3  # of the step size, at most, where the weights grow beyond the model's
STEPS = 120  # that a training should have at least: of small data more passes
SMALLEST, LARGEST = 8, 64  # examples in a minibatch
LOOKS = 500  # examples whose gradients say which weights have large ones


@dataclass(frozen=True)
class ReplayRecipe:
    """How a replay trains: the kind of its steps, their peak size and number, the size of its
    minibatches, the seed of their order, and how many examples there are before any change."""

    family: str
    lr: float
    steps: int
    batch: int
    seed: int
    n_data: int


@dataclass(frozen=True)
class Replay:
    """The training on all data that others are compared with.

    Attributes:
        start: the first weights.
        recipe: how it trained.
        reference: θ_K, where it ended.
        passes: over the data, all in all, that it took to get here.
        each: passes of one more training.
        unlike: how unlike each kind's weights are to the model's, the spread of
            :func:`shortfall`, by name.
        shuffled: the part of the first weights that could not be drawn anew.
    """

    start: Tree
    recipe: ReplayRecipe
    reference: Tree
    passes: float
    each: float
    unlike: dict[str, float]
    shuffled: float = 0.0

    @property
    def clear(self) -> bool:
        """Whether its kind of steps, and not the other, makes weights like the model's."""
        least, *others = sorted(self.unlike.values())
        return least < UNLIKE and all(least < CLEAR * other for other in others)

    def trained(
        self, parts: Sequence[Part], *, alone: bool = False, progress: bool | None = None
    ) -> Tree:
        """θ_K^{\\G}: the same training on the changed data; of one class alone as many epochs,
        not steps, by step sizes of ALONE.

        Raises:
            ModelError, DataError: as :meth:`Task.run`; ModelError where it diverges.
        """
        recipe = self.recipe
        if alone:
            epochs = sum(len(indices) for _, indices, _ in parts) / recipe.n_data
            lr, steps = recipe.lr * ALONE[recipe.family], math.ceil(recipe.steps * epochs)
            recipe = replace(recipe, lr=lr, steps=steps)
        with bar(recipe.steps, "what if: a short training without", progress) as shown:
            return _train(parts, self.start, recipe, shown).weights


def prepare(
    task: Task,
    weights: Tree,
    start: Tree,
    *,
    passes: float,
    groups: int = 1,
    family: str | None = None,
    seed: int = 0,
    shuffled: float = 0.0,
    progress: bool | None = None,
) -> Replay:
    """Find the kind of steps and their size, and train on all data.

    Args:
        weights: m, the trained ones.
        start: the first ones, see
            :mod:`blr_analysis.sensitivity.groups.first_weights`.
        passes: to be spent for each group, its own training and its part of what all share.
        groups: how many share what is done here.
        family: "adam" or "sgd"; None: told from the weights.
    """
    families = list(RATES) if family is None else [family]
    each = passes / _shares(family, groups)
    whole = [(task, torch.arange(task.n_data), torch.arange(task.n_data))]
    batch = max(SMALLEST, min(LARGEST, int(task.n_data * each / STEPS)))
    steps = max(1, math.ceil(each * task.n_data / batch))
    some = torch.randperm(task.n_data, generator=torch.Generator().manual_seed(seed))[:LOOKS]
    looks = math.ceil(len(some) / SMALLEST)
    still = ReplayRecipe("sgd", 0.0, looks, SMALLEST, seed, len(some))
    spent = 0.0
    total = looks + sum(steps + len(RATES[name]) * _probe(steps, name) for name in families)
    with bar(total, "short trainings on all data", progress) as shown:
        squares = _train([(task, some, torch.arange(len(some)))], weights, still, shown).squares

        def tried(recipe: ReplayRecipe) -> tuple[ReplayRecipe, Tree, Tensor]:
            reached = _train(whole, start, recipe, shown).weights
            return recipe, reached, shortfall(weights, reached, squares)

        runs = {}
        for name in families:
            recipe = ReplayRecipe(name, 0.0, steps, batch, seed, task.n_data)
            runs[name] = tried(_with_rate(whole, start, recipe, shown))
            spent += (1 + PROBES) * each
        unlike = {name: float(short.std()) for name, (*_, short) in runs.items()}
        recipe, reference, short = runs[min(unlike, key=unlike.__getitem__)]
        for _ in range(HALVINGS):
            if float(short.mean()) >= 0:
                break
            shown.total += steps
            recipe, reference, short = tried(replace(recipe, lr=recipe.lr / 2))
            spent += each
    return Replay(start, recipe, reference, spent / groups, each, unlike, shuffled)


def enough(n_data: int, *, groups: int = 1, family: str | None = None) -> int:
    """Passes for each group with which a training has STEPS steps of the smallest minibatches."""
    return math.ceil(STEPS * SMALLEST / n_data * _shares(family, groups))


def _shares(family: str | None, groups: int) -> float:
    """What a group costs, its own training and its part of what all share, in trainings."""
    families = len(RATES) if family is None else 1
    return 1 + (1 + (1 + PROBES) * families) / groups


def shortfall(weights: Tree, reached: Tree, squares: Tree) -> Tensor:
    """log of how much larger the model's weights are than those reached, ``[4 · matrices +
    vectors]``: of each parameter in four parts, by the size of its gradients."""
    rows = []
    for name, w in weights.items():
        order = squares[name].flatten().argsort()
        for part in order.chunk(4) if w.ndim > 1 else [order]:
            own, other = (
                x.flatten()[part].double().square().mean().sqrt().clamp_min(1e-12)
                for x in (w, reached[name])
            )
            rows.append((own / other).log())
    return torch.stack(rows)


def _probe(steps: int, family: str) -> int:
    """Steps of the training that tries one step size."""
    return max(8, int(PROBES * steps / len(RATES[family])))


def _with_rate(
    parts: Sequence[Part], start: Tree, recipe: ReplayRecipe, shown: Bar
) -> ReplayRecipe:
    """With the step size that lowers the loss most in the first few minibatches."""
    rates, steps = RATES[recipe.family], _probe(recipe.steps, recipe.family)

    def reached(lr: float) -> float:
        try:
            probe = replace(recipe, lr=lr, steps=steps)
            late = _train(parts, start, probe, shown, constant=True).losses[-max(2, steps // 3) :]
        except BLRError:  # too large a step
            return math.inf
        return sum(late) / len(late)

    return replace(recipe, lr=TAKEN[recipe.family] * min(rates, key=reached))


@dataclass(frozen=True)
class _Trained:
    """Where a training ended, the losses of its minibatches, the sum of their squared gradients."""

    weights: Tree
    losses: list[float]
    squares: Tree


def _train(
    parts: Sequence[Part], start: Tree, recipe: ReplayRecipe, shown: Bar, *, constant: bool = False
) -> _Trained:
    """Minibatch steps from ``start``; unless ``constant``, their size falls as a cosine."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in start.items()}
    optimizer: torch.optim.Optimizer
    if recipe.family == "adam":
        optimizer = torch.optim.Adam(leaves.values(), lr=recipe.lr)
    else:
        optimizer = torch.optim.SGD(leaves.values(), lr=recipe.lr, momentum=MOMENTUM)
    schedule: Callable[[int], float] = lambda k: 0.5 + 0.5 * math.cos(math.pi * k / recipe.steps)  # noqa: E731
    squares = {n: torch.zeros_like(p) for n, p in start.items()}
    losses: list[float] = []
    batches = _minibatches(parts, recipe)
    with torch.enable_grad(), parts[0][0].evaluation():
        for k in range(recipe.steps):
            optimizer.param_groups[0]["lr"] = recipe.lr * (1.0 if constant else schedule(k))
            sums, size = [], 0
            for task, chosen, _ in next(batches):
                outputs, targets = task.run(task.fetch(chosen), leaves, chosen)
                sums.append(task.likelihood.at(chosen).nll(outputs, targets).sum())
                size += len(chosen)
            mean = torch.stack(sums).sum() / size
            losses.append(float(mean.detach()))
            if not math.isfinite(losses[-1]):
                raise ModelError("a replay of the training diverges; give solver='posterior'")
            slopes = torch.autograd.grad(
                mean, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
            for (name, p), part in zip(leaves.items(), slopes, strict=True):
                slope = part.to_dense() if part.is_sparse else part
                p.grad = slope
                squares[name] += slope.square()
            optimizer.step()
            shown.update()
    return _Trained({n: p.detach() for n, p in leaves.items()}, losses, squares)


def _minibatches(parts: Sequence[Part], recipe: ReplayRecipe) -> Iterator[list[Part]]:
    """Without end: minibatches over all parts, every example once before any comes again.

    An example comes at the same step whatever else has changed, so that two trainings see the same
    minibatches but for the change: what is gone leaves one smaller, what is new joins one.
    """
    n, size = recipe.n_data, recipe.batch
    order, joining = (torch.Generator().manual_seed(recipe.seed + k) for k in (0, 1))
    new = sum(int((places >= n).sum()) for *_, places in parts)
    while True:
        rank = torch.randperm(n, generator=order).argsort()
        step = torch.cat([rank, torch.randint(n, (new,), generator=joining)]) // size
        for k in range(max(1, n // size)):
            now = [(task, indices[step[at] == k], at[step[at] == k]) for task, indices, at in parts]
            if any(len(at) for *_, at in now):
                yield [part for part in now if len(part[1])]
