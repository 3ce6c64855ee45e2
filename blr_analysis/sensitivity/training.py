"""Train a model again by a recipe, on all its data or on changed data.

A copy of the model is trained. Its modules are in the modes in which they were while the task's
model was trained, and its loss is the task's loss with the same reduction. The result is the
weights and buffers at the end.

Minibatches are drawn for the unchanged data: an example comes at the same step whatever else has
changed. Two trainings of the same seed therefore see the same minibatches but for the change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import ConcatDataset, Subset

from blr_analysis.backprop.loss import evaluated
from blr_analysis.checks import positive_int
from blr_analysis.data.outputs import checked
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
from blr_analysis.sensitivity.first_weights import drawn, seeded
from blr_analysis.sensitivity.minimise import on_a_copy
from blr_analysis.sensitivity.objective import Labelled
from blr_analysis.sensitivity.stopping import Best, Trail, copied
from blr_analysis.sensitivity.training_errors import losses_at
from blr_analysis.snapshots import Snapshots, State, checked_state, state_of
from blr_analysis.task import Task

# A task, the indices of its examples that are trained on, and their places in the data before a
# change; added examples have places behind all others.
Part = tuple[Task, Tensor, Tensor]
Minibatch = list[tuple[Task, Tensor]]  # a task and indices for each part

# The default recipe, for a task without one:
RATES = (1e-2, 5e-3, 2e-3, 5e-4)  # of Adam; the best in one epoch is taken
EPOCHS = 8
BATCH = 32
TIMED = 4  # steps after the first one, whose time is measured

DIVERGES = "a training by the recipe diverges: lower the recipe's lr="
ONE_VALUE = "Expected more than 1 value per channel"  # torch's error for BatchNorm of one example


def whole_data(task: Task) -> list[Part]:
    """All examples of a task, as the only part."""
    every_example = torch.arange(task.n_data)
    return [(task, every_example, every_example)]


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
    """The weights and buffers after a training by a recipe, from fresh weights.

    Args:
        task: has the model.
        parts: the data to train on.
        seed: of first weights, minibatches and dropout.
        n: the number of places that minibatches are drawn from; None: the task's number of data.
        states: a list to which the states at 1/8, 1/4 and 1/2 of the steps are appended.
        label: of the progress bar.

    Raises:
        InputError: the first weights cannot be drawn anew.
        ModelError: a loss is not finite.
    """
    n_examples = task.n_data if n is None else n
    if recipe.train is not None:
        return _by_function(task, parts, recipe.train, seed)
    training = Training.of(task, parts, recipe, seed, n_examples)
    model = training.under.model
    best = None if recipe.validation is None else Best(training.under, recipe)
    trail = Trail(training.steps if best is None else None)
    begin_training(model, task.modes, recipe.mode)
    with torch.enable_grad(), seeded(task.device, seed):
        for step, batch in enumerate(training.minibatches(seed, label), start=1):
            training.step(step, batch)
            if states is not None:
                trail.look(step, model)
            ends_epoch = step % training.steps_in_epoch == 0
            if best is None or not ends_epoch:
                continue
            best.look(step)
            if best.gave_up:
                break
            begin_training(model, task.modes, recipe.mode)
    last_step = training.steps if best is None else best.step
    if states is not None:
        states.extend(trail.until(last_step))
    return copied(model) if best is None else best.state


def seconds_of(task: Task, parts: Sequence[Part], recipe: Recipe, seed: int) -> float:
    """The estimated seconds of a training by a recipe without ``train=``, from its first steps."""
    training = Training.of(task.quiet, parts, recipe, seed, task.n_data)
    begin_training(training.under.model, task.modes, recipe.mode)
    batches = islice(training.minibatches(seed, "timing"), TIMED + 1)
    times = [time.perf_counter()]
    with torch.enable_grad(), seeded(task.device, seed):
        for step, batch in enumerate(batches, start=1):
            training.step(step, batch)
            times.append(time.perf_counter())
    durations = [end - start for start, end in pairwise(times)]
    usual = durations[1:] or durations  # the first step also allocates memory
    return training.steps * sum(usual) / len(usual)


@dataclass(frozen=True)
class Training:
    """A training by a recipe, from its first weights.

    Attributes:
        under: the task under the copy of its model that is trained.
        parts: the data to train on, with augmented inputs.
        n: the number of places that minibatches are drawn from.
        recipe: the recipe.
        optimizer: the recipe's optimizer of the copy.
        reduction: from the losses of a minibatch to one number.
        steps: the number of steps.
    """

    under: Task
    parts: list[Part]
    n: int
    recipe: Recipe
    optimizer: torch.optim.Optimizer
    reduction: Reduction
    steps: int

    @classmethod
    def of(cls, task: Task, parts: Sequence[Part], recipe: Recipe, seed: int, n: int) -> Training:
        """A training that starts from fresh weights, or from those of the recipe."""
        under = on_a_copy(task)
        first_weights = drawn(task, seed) if recipe.initial is None else recipe.initial
        _load(under.model, first_weights)
        steps = recipe.steps(n)
        n_examples = sum(len(indices) for _, indices, _ in parts)
        augmented_parts = []
        for part, indices, places in parts:
            augmented = drawing(part, task, recipe).under(under.model, task.device)
            augmented_parts.append((augmented, indices, places))
        return cls(
            under=under,
            parts=augmented_parts,
            n=n,
            recipe=recipe,
            optimizer=recipe.made(under.model, n_data=n_examples, steps=steps),
            reduction=task.reduction if recipe.reduction is None else Reduction(recipe.reduction),
            steps=steps,
        )

    @property
    def steps_in_epoch(self) -> int:
        return math.ceil(self.n / self.recipe.batch_size)

    @property
    def planned_steps(self) -> int:
        """The steps of the schedule of rates, of which a shortened recipe makes the first."""
        if self.recipe.schedule_epochs is None:
            return self.steps
        return self.recipe.schedule_epochs * self.steps_in_epoch

    def minibatches(self, seed: int, label: str) -> Iterator[Minibatch]:
        """A minibatch for each step, with a progress bar."""
        batches = islice(_minibatches(self.parts, self.n, self.recipe, seed), self.steps)
        return track(batches, total=self.steps, label=label, show=self.under.progress)

    def step(self, number: int, batch: Minibatch) -> None:
        """Make the step of this number, counted from 1; an empty minibatch makes none."""
        is_empty = all(len(indices) == 0 for _, indices in batch)
        if is_empty:
            return
        self.recipe.set_rate(self.optimizer, (number - 1) / self.planned_steps)
        _step(self.under, batch, self.optimizer, self.recipe, self.reduction)


class _OneValue(ModelError):
    """A BatchNorm has one value per channel in a minibatch, and therefore no variance."""


def _step(
    under: Task,
    batch: Minibatch,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    reduction: Reduction,
) -> None:
    """Make one step on the loss of a minibatch.

    A minibatch that BatchNorm refuses, for example of one example, makes no step.
    """

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
    except _OneValue:  # BatchNorm has counted the minibatch already
        _load(under.model, counts)


def _loss(under: Task, batch: Minibatch, reduction: Reduction) -> Tensor:
    """The losses of a minibatch as one number: Σ ℓ_i, divided as the reduction says."""
    total = torch.zeros((), device=under.device)
    divisor = 0.0
    leaves = {name: p for name, p in under.model.named_parameters() if p.requires_grad}
    results = _outputs_and_targets(under, batch, leaves)
    for (task, indices), (outputs, targets) in zip(batch, results, strict=True):
        likelihood = task.likelihood.at(indices)
        total = total + likelihood.nll(outputs, targets).sum()
        divisor += float(reduction.divisor(likelihood, outputs.detach(), targets))
    no_example_counts = divisor == 0
    if no_example_counts or reduction.word == "sum":
        return total
    return total / divisor


def _outputs_and_targets(
    under: Task, batch: Minibatch, leaves: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Outputs and targets of each part of a minibatch.

    All parts are in one forward pass, so that BatchNorm sees the whole minibatch, if their inputs
    can be joined. Otherwise there is one forward pass for each part.
    """
    parts = [task.fetch(indices) for task, indices in batch]
    joined = _joined_inputs(under, batch, parts)
    if joined is None:
        return [
            task.run(part, leaves, indices)
            for (task, indices), part in zip(batch, parts, strict=True)
        ]
    all_outputs, all_targets = under.run(joined, leaves)
    sizes = [len(indices) for _, indices in batch]
    results = []
    for (task, _), part, outputs, targets in zip(
        batch, parts, all_outputs.split(sizes), all_targets.split(sizes), strict=True
    ):
        if isinstance(task.dataset, Labelled):
            _, new_targets = part
            results.append(checked(outputs, new_targets, task.likelihood, None))
        else:
            results.append((outputs, targets))
    return results


def _joined_inputs(under: Task, batch: Minibatch, parts: Sequence[Any]) -> Any:
    """The inputs of all parts as one batch; None of a single part, or if they cannot be joined."""
    if len(batch) == 1:
        return None
    inputs = []
    for (task, _), part in zip(batch, parts, strict=True):
        if isinstance(task.dataset, Labelled):
            original, _ = part
            inputs.append(original)
        elif task.forward is under.forward:
            inputs.append(part)
        else:
            return None
    return _joined(inputs)


def _joined(batches: list[Any]) -> Any:
    """Batches as one; None if they differ in more than their length."""
    flat = [tree_flatten(tuple(batch) if isinstance(batch, list) else batch) for batch in batches]
    leaves_of_batches, structures = zip(*flat, strict=True)
    if any(structure != structures[0] for structure in structures):
        return None
    columns = list(zip(*leaves_of_batches, strict=True))  # of one leaf in all batches
    if not all(_can_be_joined(column) for column in columns):
        return None
    return tree_unflatten([torch.cat(column) for column in columns], structures[0])


def _can_be_joined(column: Sequence[Any]) -> bool:
    """Whether these are tensors that differ only in their length."""
    if not all(isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in column):
        return False
    return all(leaf.shape[1:] == column[0].shape[1:] for leaf in column)


def _minibatches(parts: Sequence[Part], n: int, recipe: Recipe, seed: int) -> Iterator[Minibatch]:
    """The minibatches of all epochs, each with every example once.

    A removed example leaves its minibatch smaller. An added example joins a random minibatch.
    """
    order_generator = torch.Generator().manual_seed(2 * seed)
    joining_generator = torch.Generator().manual_seed(2 * seed + 1)
    n_added = sum(int((places >= n).sum()) for _, _, places in parts)
    steps_in_epoch = math.ceil(n / recipe.batch_size)
    for _ in range(math.ceil(recipe.epochs)):
        ranks_of_data = torch.randperm(n, generator=order_generator).argsort()
        ranks_of_added = torch.randint(n, (n_added,), generator=joining_generator)
        step_of_place = torch.cat([ranks_of_data, ranks_of_added]) // recipe.batch_size
        indices_by_step = []
        for _, indices, places in parts:
            step_of_example = step_of_place[places]
            order = step_of_example.argsort(stable=True)
            counts = torch.bincount(step_of_example, minlength=steps_in_epoch).tolist()
            indices_by_step.append(indices[order].split(counts))
        for step in range(steps_in_epoch):
            minibatch = []
            for (task, _, _), by_step in zip(parts, indices_by_step, strict=True):
                if len(by_step[step]) > 0:
                    minibatch.append((task, by_step[step]))
            yield minibatch


def _by_function(
    task: Task, parts: Sequence[Part], train: Callable[[Any, int], Any], seed: int
) -> State:
    """The weights and buffers that the user's own training function returns for these data."""
    subsets: list[Subset[Any]] = []
    for part, indices, _ in parts:
        dataset = part.dataset
        if isinstance(dataset, Labelled):
            dataset = dataset.inside
        subsets.append(Subset(dataset, indices.tolist()))
    data = subsets[0] if len(subsets) == 1 else ConcatDataset(subsets)
    with torch.enable_grad(), seeded(task.device, seed):
        result = train(data, seed)
    state = result.state_dict() if isinstance(result, nn.Module) else result
    if not isinstance(state, Mapping):
        raise ModelError(f"train must return a model or a state dict, got {type(result).__name__}")
    return checked_state(state, task.model, "what train returned")


def _load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy these weights and buffers into a model."""
    with torch.no_grad():
        for name, place in state_of(model).items():
            if name in state:
                place.copy_(state[name])


def recipe_of(task: Task, posterior: Posterior | None = None) -> Recipe:
    """The task's recipe, or the one in the posterior's record, or a short default one."""
    return known_recipe(task, posterior) or default_recipe(task, posterior)


def known_recipe(task: Task, posterior: Posterior | None = None) -> Recipe | None:
    """The task's recipe, or the one in the posterior's record; None without either."""
    if task.recipe is not None:
        return task.recipe
    recorded = None if posterior is None else posterior.record.get("recipe")
    if posterior is not None and recorded:
        return Recipe(**recorded, initial=posterior.initial)
    return None


def default_recipe(task: Task, posterior: Posterior | None = None) -> Recipe:
    """A few epochs of Adam, with a cosine schedule.

    The first rate is the one of four that lowers the loss most in one epoch.
    """
    initial = None if posterior is None else posterior.initial
    batch_size = min(BATCH, task.n_data)

    def loss_after_an_epoch(lr: float) -> float:
        recipe = Recipe("adam", lr=lr, epochs=1, batch_size=batch_size, initial=initial)
        try:
            state = trained(task.quiet, whole_data(task), recipe, 0)
            return evaluated(task, state)[0].nll
        except ModelError:  # the training diverges
            return math.inf

    recipe = Recipe(
        "adam",
        lr=min(RATES, key=loss_after_an_epoch),
        epochs=EPOCHS,
        batch_size=batch_size,
        schedule="cosine",
        initial=initial,
    )
    recipe.known = False
    return recipe


@torch.inference_mode(False)  # also where the caller switched it on
def rerun(task: Task, seeds: int = 2) -> list[Posterior]:
    """Train anew by the task's recipe, from fresh weights, and fit a posterior to each training.

    Each posterior has its own weights and buffers and, off a minimum, earlier posteriors at 1/8,
    1/4 and 1/2 of its steps. :func:`blr_analysis.influence`, ``sensitivity``, ``leave_one_out``,
    ``suspicious`` and ``what_if`` take the list and average over it.

    The posteriors' notes warn in two cases: the task has no recipe, so that a short default one is
    taken; or the trainings end at another training loss than the task's model, by more than two
    seeds differ.

    Args:
        task: the model and the data it was trained on.
        seeds: the number of trainings.

    Raises:
        InputError: the first weights cannot be drawn anew, or the number of seeds is not positive.
        ModelError: a training diverges.

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
    # The Gauss–Newton matrix of a sequence has (T·C)² entries, which are too many.
    curvature = "empirical_fisher" if task.likelihood.is_sequence else "ggn"
    posteriors: list[Posterior] = []
    losses: list[Tensor] = []
    for seed in track(range(seeds), total=seeds, label="trainings", show=task.progress):
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
    """One line if trainings by a recipe end at another loss than the task's model; "" if not.

    Args:
        losses: the losses of all examples at the end of the trainings with seeds 0, 1, …
    """
    if not recipe.known:
        return ""

    def another(further: int) -> Tensor:
        seed = len(losses) + further
        return losses_at(task, trained(task, whole_data(task), recipe, seed))

    return ending_note(losses_at(task, task.parameters()), losses, another=another)
