"""Training again by a recipe: of all data or of others, whole or shortened.

A copy of the model trains, each module in the mode in which it was while the task's model trained,
on the loss that the task was told of, reduced as that loss reduces; what comes out are its weights
and its buffers.
Minibatches are those of all data: an example comes at the same step whatever else has changed, so
that two trainings see the same minibatches but for the change.
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
Minibatch = list[tuple[Task, Tensor]]  # of each part some examples

RATES = (1e-2, 5e-3, 2e-3, 5e-4)  # of Adam, that a training of unknown recipe tries
DIVERGES = "a training by the recipe diverges: lower the recipe's lr="
ONE_VALUE = "Expected more than 1 value per channel"  # as torch's BatchNorm says it
EPOCHS = 8  # of a training of unknown recipe
BATCH = 32
TIMED = 4  # steps that say how long a training takes


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
    n_examples = task.n_data if n is None else n
    if recipe.train is not None:
        return _by_function(task, parts, recipe.train, seed)
    training = Training.of(task, parts, recipe, seed, n_examples)
    model = training.under.model
    best = None if recipe.validation is None else Best(training.under, recipe)
    trail = Trail(training.steps if best is None else None)
    begin_training(model, task.modes, recipe.mode)
    with torch.enable_grad(), torch.random.fork_rng(_generators_of(task)):
        torch.manual_seed(seed)
        for done, batch in enumerate(training.minibatches(seed, label), start=1):
            training.step(done, batch)
            if states is not None:
                trail.look(done, model)
            if best is not None and done % training.steps_in_epoch == 0:
                best.look(done)
                if best.gave_up:
                    break
                begin_training(model, task.modes, recipe.mode)
    if states is not None:
        states.extend(trail.until(training.steps if best is None else best.step))
    return copied(model) if best is None else best.state


def seconds_of(task: Task, parts: Sequence[Part], recipe: Recipe, seed: int) -> float:
    """How long a training by a recipe takes, as its second step and those after it tell; no
    ``train=``."""
    training = Training.of(task.quiet, parts, recipe, seed, task.n_data)
    begin_training(training.under.model, task.modes, recipe.mode)
    batches = islice(training.minibatches(seed, "timing"), TIMED + 1)
    times = [time.perf_counter()]
    with torch.enable_grad(), torch.random.fork_rng(_generators_of(task)):
        for done, batch in enumerate(batches, start=1):
            training.step(done, batch)
            times.append(time.perf_counter())
    durations = [end - start for start, end in pairwise(times)]
    usual = durations[1:] or durations  # the first step allocates
    return training.steps * sum(usual) / len(usual)


@dataclass(frozen=True)
class Training:
    """A training by a recipe, from its first weights.

    Attributes:
        under: the copy of the task that trains.
        parts: the data that count, as the training draws them.
        n: the examples that minibatches are made of.
        recipe, optimizer, reduction: how.
        steps: in all.
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
        """From fresh weights, or those of the recipe."""
        under = on_a_copy(task)
        first = drawn(task, seed) if recipe.initial is None else recipe.initial
        _load(under.model, first)
        steps = recipe.steps(n)
        n_counted = sum(len(indices) for _, indices, _ in parts)
        return cls(
            under=under,
            parts=[
                (drawing(part, task, recipe).under(under.model, task.device), indices, places)
                for part, indices, places in parts
            ],
            n=n,
            recipe=recipe,
            optimizer=recipe.made(under.model, n_data=n_counted, steps=steps),
            reduction=task.reduction if recipe.reduction is None else Reduction(recipe.reduction),
            steps=steps,
        )

    @property
    def steps_in_epoch(self) -> int:
        return math.ceil(self.n / self.recipe.batch_size)

    @property
    def planned_steps(self) -> int:
        """Of the schedule of rates, which may have been cut."""
        if self.recipe.schedule_epochs is None:
            return self.steps
        return self.recipe.schedule_epochs * self.steps_in_epoch

    def minibatches(self, seed: int, label: str) -> Iterator[Minibatch]:
        """One for each step, with a bar."""
        batches = islice(_minibatches(self.parts, self.n, self.recipe, seed), self.steps)
        return track(batches, total=self.steps, label=label, show=self.under.progress)

    def step(self, number: int, batch: Minibatch) -> None:
        """The step of this number, from 1; none on an empty minibatch."""
        if any(len(indices) for _, indices in batch):
            self.recipe.set_rate(self.optimizer, (number - 1) / self.planned_steps)
            _step(self.under, batch, self.optimizer, self.recipe, self.reduction)


def _generators_of(task: Task) -> list[torch.device]:
    """The GPUs whose random generators a training uses, beside the processor's."""
    return [task.device] if task.device.type == "cuda" else []


class _OneValue(ModelError):
    """A minibatch has one value for each channel of a BatchNorm, and so no variance."""


def _step(
    under: Task,
    batch: Minibatch,
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


def _loss(under: Task, batch: Minibatch, reduction: Reduction) -> Tensor:
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
    under: Task, batch: Minibatch, leaves: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Outputs and targets of each part of a minibatch: of all in one forward pass, as BatchNorm
    takes them, where they can be put together."""
    parts = [task.fetch(indices) for task, indices in batch]
    are_relabelled = [isinstance(task.dataset, Labelled) for task, _ in batch]
    inputs = [
        part[0] if relabelled else part
        for part, relabelled in zip(parts, are_relabelled, strict=True)
    ]
    are_run_alike = all(
        relabelled or task.forward is under.forward
        for (task, _), relabelled in zip(batch, are_relabelled, strict=True)
    )
    together = _joined(inputs) if are_run_alike and len(batch) > 1 else None
    if together is None:
        return [
            task.run(part, leaves, indices)
            for (task, indices), part in zip(batch, parts, strict=True)
        ]
    sizes = [len(indices) for _, indices in batch]
    outputs, targets = under.run(together, leaves)
    answers = []
    for k, pair in enumerate(zip(outputs.split(sizes), targets.split(sizes), strict=True)):
        if are_relabelled[k]:
            _, new_targets = parts[k]
            task, _ = batch[k]
            pair = checked(pair[0], new_targets, task.likelihood, None)
        answers.append(pair)
    return answers


def _joined(parts: list[Any]) -> Any:
    """Batches as one; None of such as differ in more than their length."""
    flat = [tree_flatten(tuple(part) if isinstance(part, list) else part) for part in parts]
    leaves_of_parts, structures = zip(*flat, strict=True)
    if any(structure != structures[0] for structure in structures):
        return None
    columns = list(zip(*leaves_of_parts, strict=True))  # one leaf of all parts each
    if not all(_fit_together(column) for column in columns):
        return None
    return tree_unflatten([torch.cat(column) for column in columns], structures[0])


def _fit_together(column: Sequence[Any]) -> bool:
    """Whether these are tensors that differ in their length alone."""
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in column):
        return False
    return all(leaf.shape[1:] == column[0].shape[1:] for leaf in column)


def _minibatches(parts: Sequence[Part], n: int, recipe: Recipe, seed: int) -> Iterator[Minibatch]:
    """Every example once in an epoch; what is gone leaves a minibatch smaller, what is new joins
    one."""
    order_generator = torch.Generator().manual_seed(2 * seed)
    joining_generator = torch.Generator().manual_seed(2 * seed + 1)
    n_new = sum(int((places >= n).sum()) for *_, places in parts)
    steps_in_epoch = math.ceil(n / recipe.batch_size)
    for _ in range(math.ceil(recipe.epochs)):
        ranks_of_data = torch.randperm(n, generator=order_generator).argsort()
        ranks_of_new = torch.randint(n, (n_new,), generator=joining_generator)
        step = torch.cat([ranks_of_data, ranks_of_new]) // recipe.batch_size
        parts_by_step = []
        for task, indices, places in parts:
            step_of_example = step[places]
            by_step = step_of_example.argsort(stable=True)
            counts = torch.bincount(step_of_example, minlength=steps_in_epoch).tolist()
            parts_by_step.append((task, indices[by_step].split(counts)))
        for k in range(steps_in_epoch):
            yield [(task, indices[k]) for task, indices in parts_by_step if len(indices[k])]


def _by_function(
    task: Task, parts: Sequence[Part], train: Callable[[Any, int], Any], seed: int
) -> State:
    """What a user's own training makes of these data."""
    subsets: list[Subset[Any]] = []
    for part, indices, _ in parts:
        dataset = part.dataset
        if isinstance(dataset, Labelled):
            dataset = dataset.inside
        subsets.append(Subset(dataset, indices.tolist()))
    data = subsets[0] if len(subsets) == 1 else ConcatDataset(subsets)
    with torch.enable_grad(), torch.random.fork_rng(_generators_of(task)):
        torch.manual_seed(seed)
        result = train(data, seed)
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
    recorded = None if posterior is None else posterior.record.get("recipe")
    if posterior is not None and recorded:
        return Recipe(**recorded, initial=posterior.initial)
    return default_recipe(task, posterior)


def default_recipe(task: Task, posterior: Posterior | None = None) -> Recipe:
    """Adam for a few epochs, its rate falling as a cosine from the one of four that lowers the loss
    most in one epoch."""
    initial = None if posterior is None else posterior.initial
    batch_size = min(BATCH, task.n_data)

    def loss_after_an_epoch(lr: float) -> float:
        recipe = Recipe("adam", lr=lr, epochs=1, batch_size=batch_size, initial=initial)
        try:
            state = trained(task.quiet, whole_data(task), recipe, 0)
            return evaluated(task, state)[0].nll
        except ModelError:  # it diverges
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
