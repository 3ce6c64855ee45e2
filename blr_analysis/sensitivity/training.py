"""Training again by a recipe: of all data or of others, whole or shortened.

A copy of the model trains, each module in the mode in which it was while the task's model trained,
on the loss that the task was told of, reduced as that loss reduces; what comes out are its weights
and its buffers.
Minibatches are those of all data: an example comes at the same step whatever else has changed, so
that two trainings see the same minibatches but for the change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import ConcatDataset, Subset

from blr_analysis.backprop.loss import evaluated
from blr_analysis.checks import positive_int
from blr_analysis.data import checked
from blr_analysis.errors import ModelError
from blr_analysis.likelihoods import Reduction
from blr_analysis.modes import begin_training
from blr_analysis.posterior.facts import Rerun
from blr_analysis.posterior.laplace import fit_laplace
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.progress import track
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity.augment import drawing
from blr_analysis.sensitivity.endings import ending_note
from blr_analysis.sensitivity.first_weights import drawn
from blr_analysis.sensitivity.minimise import on_a_copy
from blr_analysis.sensitivity.objective import Labelled
from blr_analysis.sensitivity.stopping import Best, Trail, copied
from blr_analysis.sensitivity.training_errors import losses_at
from blr_analysis.snapshots import Snapshots, State, checked_state, state_of
from blr_analysis.task import Task

# A task, the examples of it that count, and where they stand in the data before a change; what is
# added stands behind.
Part = tuple[Task, Tensor, Tensor]

RATES = (1e-2, 5e-3, 2e-3, 5e-4)  # of Adam, that a training of unknown recipe tries
DIVERGES = "a training by the recipe diverges: lower the recipe's lr="
ONE_VALUE = "Expected more than 1 value per channel"  # as torch's BatchNorm says it
EPOCHS, BATCH = 8, 32  # of a training of unknown recipe


def whole_data(task: Task) -> list[Part]:
    """All examples of a task."""
    every = torch.arange(task.n_data)
    return [(task, every, every)]


def trained(
    task: Task,
    parts: Sequence[Part],
    recipe: Recipe,
    seed: int,
    *,
    n: int | None = None,
    states: list[State] | None = None,
    label: str = "training",
) -> State:
    """The weights and buffers that a recipe makes of these data, from fresh weights.

    Args:
        parts: the data that count.
        n: the examples that the minibatches are made of; None: all of the task's.
        states: takes those at 1/8, 1/4 and 1/2 of the steps.

    Raises:
        InputError: weights that cannot be drawn anew. ModelError: a loss that is not finite.
    """
    n = task.n_data if n is None else n
    if recipe.train is not None:
        return _by_function(task, parts, recipe.train, seed)
    under = on_a_copy(task)
    _load(under.model, recipe.initial if recipe.initial is not None else drawn(task, seed))
    frames = [
        (_of_training(part, task, under, recipe), rows, places) for part, rows, places in parts
    ]
    epoch = math.ceil(n / recipe.batch_size)  # in steps
    steps = recipe.steps(n)
    planned = steps if recipe.schedule_epochs is None else recipe.schedule_epochs * epoch
    optimizer = recipe.made(under.model, n_data=sum(len(i) for _, i, _ in parts), steps=steps)
    reduction = task.reduction if recipe.reduction is None else Reduction(recipe.reduction)
    best = None if recipe.validation is None else Best(under, recipe)
    trail = Trail(steps if best is None else None)
    begin_training(under.model, task.modes, recipe.mode)
    devices = [task.device] if task.device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        batches = islice(_minibatches(frames, n, recipe, seed), steps)
        shown = track(batches, total=steps, label=label, show=task.progress)
        for done, batch in enumerate(shown, start=1):
            if any(len(chosen) for _, chosen in batch):
                recipe.set_rate(optimizer, (done - 1) / planned)
                _step(under, batch, optimizer, recipe, reduction)
            if states is not None:
                trail.look(done, under.model)
            if best is not None and done % epoch == 0:
                best.look(done)
                if best.gave_up:
                    break
                begin_training(under.model, task.modes, recipe.mode)
    if states is not None:
        states.extend(trail.until(steps if best is None else best.step))
    return copied(under.model) if best is None else best.state


def _of_training(part: Task, task: Task, under: Task, recipe: Recipe) -> Task:
    """A part of the data under the model that trains, as the training draws it."""
    return drawing(part, task, recipe).under(under.model, task.device)


class _OneValue(ModelError):
    """A minibatch has one value for each channel of a BatchNorm, and so no variance."""


def _step(
    under: Task,
    batch: list[tuple[Task, Tensor]],
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    reduction: Reduction,
) -> None:
    """One step on the loss of a minibatch, reduced as it was in training; none where BatchNorm
    refuses it, as a minibatch of one example may be."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        try:
            loss = _loss(under, batch, reduction)
        except ModelError as error:
            if ONE_VALUE in str(error):
                raise _OneValue(str(error)) from error
            raise ModelError(f"{DIVERGES} ({error})") from error
        if not bool(loss.isfinite()):
            raise ModelError(DIVERGES)
        loss.backward()
        recipe.clip(optimizer)
        return loss

    buffers = under.model.named_buffers()
    counts = {name: count.clone() for name, count in buffers if count.ndim == 0}
    try:
        optimizer.step(closure)  # type: ignore[call-overload]
    except _OneValue:  # BatchNorm counts minibatches before it looks at them
        _load(under.model, counts)


def _loss(under: Task, batch: list[tuple[Task, Tensor]], reduction: Reduction) -> Tensor:
    """Σ ℓ_i / d: the losses of a minibatch as one number."""
    total = torch.zeros((), device=under.device)
    divisor = 0.0
    leaves = {n: p for n, p in under.model.named_parameters() if p.requires_grad}
    for (task, chosen), (f, y) in zip(batch, _answers(under, batch, leaves), strict=True):
        likelihood = task.likelihood.at(chosen)
        total = total + likelihood.nll(f, y).sum()
        divisor += float(reduction.divisor(likelihood, f.detach(), y))
    nothing_counts = divisor == 0
    return total if nothing_counts or reduction.word == "sum" else total / divisor


def _answers(
    under: Task, batch: list[tuple[Task, Tensor]], leaves: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Outputs and targets of each part of a minibatch: of all in one forward pass, as BatchNorm
    takes them, where they can be put together."""
    held = [task.fetch(chosen) for task, chosen in batch]
    renamed = [isinstance(task.dataset, Labelled) for task, _ in batch]
    inner = [part[0] if new else part for part, new in zip(held, renamed, strict=True)]
    alike = all(
        new or t.forward is under.forward for (t, _), new in zip(batch, renamed, strict=True)
    )
    whole = _joined(inner) if alike and len(batch) > 1 else None
    if whole is None:
        return [t.run(part, leaves, i) for (t, i), part in zip(batch, held, strict=True)]
    sizes = [len(chosen) for _, chosen in batch]
    pairs = zip(*(x.split(sizes) for x in under.run(whole, leaves)), strict=True)
    return [
        checked(f, held[k][1], batch[k][0].likelihood, None) if renamed[k] else (f, y)
        for k, (f, y) in enumerate(pairs)
    ]


def _joined(parts: list[Any]) -> Any:
    """Batches as one; None of such as differ in more than their length."""
    flat = [tree_flatten(tuple(p) if isinstance(p, list) else p) for p in parts]
    leaves, specs = zip(*flat, strict=True)
    if any(spec != specs[0] for spec in specs):
        return None
    rows = list(zip(*leaves, strict=True))
    if not all(isinstance(x, Tensor) and x.ndim for row in rows for x in row):
        return None
    if any(x.shape[1:] != row[0].shape[1:] for row in rows for x in row):
        return None
    return tree_unflatten([torch.cat(row) for row in rows], specs[0])


def _minibatches(
    parts: Sequence[Part], n: int, recipe: Recipe, seed: int
) -> Iterator[list[tuple[Task, Tensor]]]:
    """Every example once in an epoch; what is gone leaves a minibatch smaller, what is new joins
    one."""
    order, joining = (torch.Generator().manual_seed(2 * seed + k) for k in (0, 1))
    new = sum(int((places >= n).sum()) for *_, places in parts)
    each = math.ceil(n / recipe.batch_size)
    for _ in range(math.ceil(recipe.epochs)):
        rank = torch.randperm(n, generator=order).argsort()
        step = torch.cat([rank, torch.randint(n, (new,), generator=joining)]) // recipe.batch_size
        sorted_parts = []
        for task, indices, places in parts:
            at = step[places]
            by_step = at.argsort(stable=True)
            counts = torch.bincount(at, minlength=each).tolist()
            sorted_parts.append((task, indices[by_step].split(counts)))
        for k in range(each):
            yield [(task, rows[k]) for task, rows in sorted_parts if len(rows[k])]


def _by_function(
    task: Task, parts: Sequence[Part], train: Callable[[Any, int], Any], seed: int
) -> State:
    """What a user's own training makes of these data."""
    held = [part.dataset for part, *_ in parts]
    held = [data.inside if isinstance(data, Labelled) else data for data in held]
    sets = [Subset(data, rows.tolist()) for data, (_, rows, _) in zip(held, parts, strict=True)]
    devices = [task.device] if task.device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        result = train(sets[0] if len(sets) == 1 else ConcatDataset(sets), seed)
    state = result.state_dict() if isinstance(result, nn.Module) else result
    if not isinstance(state, Mapping):
        raise ModelError(f"train must return a model or a state dict, got {type(result).__name__}")
    return checked_state(state, task.model, "what train returned")


def _load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put these weights and buffers into a model."""
    with torch.no_grad():
        for name, place in state_of(model).items():
            if name in state:
                place.copy_(state[name])


def recipe_of(task: Task, posterior: Posterior | None = None) -> Recipe:
    """The task's recipe; else what the posterior's record knows; else a short default one."""
    if task.recipe is not None:
        return task.recipe
    if posterior is not None and (told := posterior.record.get("recipe")):
        return Recipe(**told, initial=posterior.initial)
    return default_recipe(task, posterior)


def default_recipe(task: Task, posterior: Posterior | None = None) -> Recipe:
    """Adam for a few epochs, its rate falling as a cosine from the one of four that lowers the loss
    most in one epoch."""
    initial = None if posterior is None else posterior.initial
    how: dict[str, Any] = {"batch_size": min(BATCH, task.n_data), "initial": initial}

    def reached(lr: float) -> float:
        recipe = Recipe("adam", lr=lr, epochs=1, **how)
        try:
            state = trained(task.quiet, whole_data(task), recipe, 0)
            return evaluated(task, state)[0].nll
        except ModelError:  # it diverges
            return math.inf

    best = min(RATES, key=reached)
    recipe = Recipe("adam", lr=best, epochs=EPOCHS, schedule="cosine", **how)
    recipe.known = False
    return recipe


@torch.inference_mode(False)  # also where the caller switched it on
def rerun(task: Task, seeds: int = 2) -> list[Posterior]:
    """Fitted posteriors of trainings from fresh weights, by the task's recipe.

    Each has its own weights, buffers and, off a minimum, earlier posteriors at 1/8, 1/4 and 1/2 of
    its steps. :func:`blr_analysis.influence`, ``sensitivity``, ``leave_one_out``, ``suspicious``
    and ``what_if`` take the list and average. Without a recipe a short default one is taken, and
    the posteriors' notes say so; they do too where the trainings end at another training loss than
    the task's model, by more than two seeds differ.

    Args:
        task: the model and the data it was trained on.
        seeds: how many trainings.

    Raises:
        InputError: weights that cannot be drawn anew, no positive number of seeds.
        ModelError: a training that diverges.

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> recipe = blr.Recipe("adam", lr=1e-2, epochs=4, batch_size=20)
        >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y), recipe=recipe)
        >>> posteriors = rerun(task, seeds=2)
        >>> blr.influence(task, posteriors, task).shape
        torch.Size([60, 60])
    """
    positive_int("seeds", seeds)
    recipe = recipe_of(task)
    # the Gauss-Newton matrix of a sequence has (T·C)² entries
    curvature = "empirical_fisher" if task.likelihood.is_sequence else "ggn"
    posteriors: list[Posterior] = []
    losses: list[Tensor] = []
    for seed in range(seeds):
        states: list[State] = []
        last = trained(task, whole_data(task), recipe, seed, states=states)
        losses.append(losses_at(task, last))
        under = on_a_copy(task)
        _load(under.model, last)
        under.recipe = recipe if recipe.known or recipe.missing else None
        under.checkpoints = Snapshots(states, under.model)
        posteriors.append(fit_laplace(under, curvature=curvature))
    note = ending(task, recipe, losses)
    missing = ", ".join(recipe.missing)
    return [
        q.changed(rerun=Rerun(seed, recipe.known, note, missing), ending=note)
        for seed, q in enumerate(posteriors)
    ]


def ending(task: Task, recipe: Recipe, losses: list[Tensor]) -> str:
    """Whether trainings by a recipe ended where the task's model did, in one line; "" if so.

    Args:
        losses: of all examples, where each of the trainings of seeds 0, 1, … ended.
    """
    if not recipe.known:
        return ""

    def another() -> Tensor:
        return losses_at(task, trained(task, whole_data(task), recipe, len(losses)))

    return ending_note(losses_at(task, task.parameters()), losses, another=another)
