"""A short training from the first weights, with and without a group: what their difference says.

A class that a network has learned is not unlearned as it would never have been learned: going on
from the trained weights, however the moves are made, predicts retraining badly. A few passes from
the first weights predict it well, because what a group does to the loss is decided early, and what
a short training lacks cancels in the difference

    ℓ_j^{\\G} ≈ ℓ_j(m) + ℓ_j(θ_K^{\\G}) − ℓ_j(θ_K)

θ_K and θ_K^{\\G} are trained for as many steps, on all data and on the changed data, from the same
weights, with the same kind of steps and the same step sizes. What is minimised in minibatches is
F(θ) / N, with F the objective of those data (:mod:`blr_analysis.sensitivity.objective`).

Which kind of steps trained the model, its weights tell: steps of Adam's kind move all weights
alike, those of SGD's (and IVON's) kind the ones with large gradients, see :func:`growth`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from blr_analysis.errors import BLRError, ModelError
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures import Tree
from blr_analysis.task import Task

Part = tuple[Task, Tensor]  # a task, and the examples of it that count

# Peak step sizes that are tried, and what part of the best one is taken: with momentum the largest
# that lowers the loss at once is too large for the steps that follow.
RATES = {"adam": (1e-2, 5e-3, 2e-3, 5e-4), "sgd": (0.6, 0.3, 0.15, 0.06, 0.02)}
TAKEN = {"adam": 1.0, "sgd": 1 / 3}
MOMENTUM = 0.9
PROBES = 0.4  # as many passes as this part of a training's go into finding its step size
STEPS = 120  # that a training should have at least, where the data allow it
SMALLEST, LARGEST = 8, 128  # examples in a minibatch
LOOKS = 500  # examples whose gradients say which weights have large ones


@dataclass(frozen=True)
class ReplayRecipe:
    """How a replay trains: the kind of its steps, their peak size and number, the size of its
    minibatches, and the seed of their order."""

    family: str
    lr: float
    steps: int
    batch: int
    seed: int


@dataclass(frozen=True)
class Replay:
    """The training on all data that others are compared with.

    Attributes:
        start: the first weights.
        recipe: how it trained.
        reference: θ_K, where it ended.
        likeness: how like each kind's growth of the weights is to the model's, a cosine by name;
            empty where the kind was given.
        passes: over the data, all in all, that it took to get here.
        each: passes of one more training.
    """

    start: Tree
    recipe: ReplayRecipe
    reference: Tree
    passes: float
    each: float
    likeness: dict[str, float] = field(default_factory=dict)

    def trained(self, parts: Sequence[Part], prior: Prior) -> Tree:
        """θ_K^{\\G}: the same training on the changed data.

        Raises:
            ModelError, DataError: as :meth:`Task.run`; ModelError where it diverges.
        """
        return _train(parts, prior, self.start, self.recipe).weights


def prepare(
    task: Task,
    weights: Tree,
    prior: Prior,
    start: Tree,
    *,
    passes: float,
    family: str | None = None,
    seed: int = 0,
) -> Replay:
    """Find the kind of steps and their size, and train on all data.

    Args:
        weights: m, the trained ones.
        start: the first ones, see :func:`first_weights`.
        passes: to be spent in all, one more training included.
        family: "adam" or "sgd"; None: told from the weights.
    """
    families = list(RATES) if family is None else [family]
    each = passes / (1 + (1 + PROBES) * len(families))
    whole = [(task, torch.arange(task.n_data))]
    batch = max(SMALLEST, min(LARGEST, int(task.n_data * each / STEPS)))
    steps = max(1, math.ceil(each * task.n_data / batch))
    runs: dict[str, tuple[ReplayRecipe, Tree]] = {}
    for name in families:
        recipe = _with_rate(whole, prior, start, ReplayRecipe(name, 0.0, steps, batch, seed))
        runs[name] = recipe, _train(whole, prior, start, recipe).weights
    likeness = {}
    if family is None:
        some = torch.randperm(task.n_data, generator=torch.Generator().manual_seed(seed))[:LOOKS]
        still = ReplayRecipe("sgd", 0.0, math.ceil(len(some) / SMALLEST), SMALLEST, seed)
        squares = _train([(task, some)], Prior.of_any(0.0), weights, still).squares
        own = growth(weights, start, squares)
        likeness = {
            name: float(torch.cosine_similarity(own, growth(w, start, squares), dim=0))
            for name, (_, w) in runs.items()
        }
    best = max(likeness, key=likeness.__getitem__) if likeness else families[0]
    recipe, reference = runs[best]
    spent = (1 + PROBES) * each * len(families)
    return Replay(start, recipe, reference, spent, each, likeness)


def first_weights(task: Task, seed: int) -> Tree | None:
    """The trainable weights drawn anew, each by its own layer; None where a layer has no way to.

    Raises:
        ModelError: the model cannot be copied.
    """
    try:
        model = copy.deepcopy(task.model)
    except Exception as error:  # the user's own code
        raise ModelError(
            f"the model cannot be copied ({error}); give solver='posterior'"
        ) from error
    drawn: set[int] = set()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            for name, inside in (("_reset_parameters", True), ("reset_parameters", False)):
                reset = getattr(module, name, None)
                if callable(reset):
                    reset()
                    drawn.update(id(p) for p in module.parameters(recurse=inside))
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if any(id(p) not in drawn for p in weights.values()):
        return None
    return {n: p.detach() for n, p in weights.items()}


def growth(weights: Tree, start: Tree, squares: Tree) -> Tensor:
    """log of how much larger the weights are than the first ones, ``[4 · matrices + vectors]``:
    each parameter in four parts, by the size of its gradients."""
    rows = []
    for name, w in weights.items():
        order = squares[name].flatten().argsort()
        for part in order.chunk(4) if w.ndim > 1 else [order]:
            now, then = (
                x.flatten()[part].double().square().mean().sqrt().clamp_min(1e-12)
                for x in (w, start[name])
            )
            rows.append((now / then).log())
    return torch.stack(rows)


def _with_rate(
    parts: Sequence[Part], prior: Prior, start: Tree, recipe: ReplayRecipe
) -> ReplayRecipe:
    """With the step size that lowers the loss most in the first few minibatches."""
    rates = RATES[recipe.family]
    steps = max(8, int(PROBES * recipe.steps / len(rates)))

    def reached(lr: float) -> float:
        try:
            probe = replace(recipe, lr=lr, steps=steps)
            late = _train(parts, prior, start, probe, constant=True).losses[-max(2, steps // 3) :]
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
    parts: Sequence[Part],
    prior: Prior,
    start: Tree,
    recipe: ReplayRecipe,
    *,
    constant: bool = False,
) -> _Trained:
    """Minibatch steps from ``start``; unless ``constant``, their size falls as a cosine."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in start.items()}
    optimizer: torch.optim.Optimizer
    if recipe.family == "adam":
        optimizer = torch.optim.Adam(leaves.values(), lr=recipe.lr)
    else:
        optimizer = torch.optim.SGD(leaves.values(), lr=recipe.lr, momentum=MOMENTUM)
    schedule: Callable[[int], float] = lambda k: 0.5 + 0.5 * math.cos(math.pi * k / recipe.steps)  # noqa: E731
    n_data = sum(len(indices) for _, indices in parts)
    squares = {n: torch.zeros_like(p) for n, p in start.items()}
    losses: list[float] = []
    batches = _minibatches(parts, recipe.batch, recipe.seed)
    with torch.enable_grad(), parts[0][0].evaluation():
        for k in range(recipe.steps):
            optimizer.param_groups[0]["lr"] = recipe.lr * (1.0 if constant else schedule(k))
            sums, size = [], 0
            for task, chosen in next(batches):
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
            pull = prior.times(prior.gap({n: p.detach() for n, p in leaves.items()}))
            for (name, p), part in zip(leaves.items(), slopes, strict=True):
                slope = part.to_dense() if part.is_sparse else part
                p.grad = slope + pull[name] / n_data
                squares[name] += slope.square()
            optimizer.step()
    return _Trained({n: p.detach() for n, p in leaves.items()}, losses, squares)


def _minibatches(parts: Sequence[Part], size: int, seed: int) -> Iterator[list[Part]]:
    """Without end: minibatches over all parts, every example once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.cat([torch.full((len(indices),), k) for k, (_, indices) in enumerate(parts)])
    index = torch.cat([indices for _, indices in parts])
    while True:
        order = torch.randperm(len(index), generator=generator)
        for chosen in order[: max(size, len(order) // size * size)].split(size):
            yield [
                (task, index[chosen[which[chosen] == k]])
                for k, (task, _) in enumerate(parts)
                if bool((which[chosen] == k).any())
            ]
