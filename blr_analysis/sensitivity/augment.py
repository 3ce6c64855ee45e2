"""Augmented inputs of a training by a recipe: crops, flips, masks, noise.

An analysis reads examples without augmentation. A training by a recipe reads them with it: by a
function that changes a minibatch's inputs, or from a data set that augments an example when it is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Subset

from blr_analysis.errors import InputError, told_as
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity.objective import Labelled
from blr_analysis.task import Task


def drawing(part: Task, home: Task, recipe: Recipe) -> Task:
    """The task ``part`` with inputs augmented as in the recipe's training.

    Args:
        part: examples of ``home``, possibly with other labels, or examples that are added to it.
        home: the task that the recipe trains.
        recipe: its ``augment`` is None, a function, or a data set.

    Raises:
        InputError: examples are added, and ``augment`` is a data set that does not hold them.
    """
    augment = recipe.augment
    if augment is None:
        return part
    examples = part.examples
    is_relabelled = isinstance(part.dataset, Labelled)
    if callable(augment):

        def collate(items: list[Any]) -> Any:
            batch = examples.collate(items)
            if not is_relabelled:
                return _augmented(batch, augment)
            original, new_targets = batch
            return _augmented(original, augment), new_targets

        return part.reading(replace(examples, collate=collate))
    dataset = augment.dataset if isinstance(augment, DataLoader) else augment
    if is_relabelled:
        chosen, new_targets = part.dataset.datasets
        dataset = Labelled(Subset(dataset, chosen.indices), new_targets)
    elif part.dataset is not home.dataset:
        raise InputError("augment= is a data set without the added examples; give a function")
    return part.reading(replace(examples, dataset=dataset))


def _augmented(batch: Any, augment: Callable[[Any], Any]) -> Any:
    """The batch with augmented inputs and its own labels."""
    with told_as(InputError, "the recipe's augment failed on a minibatch's inputs"):
        if isinstance(batch, Mapping):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            return {**batch, **augment(inputs)}
        if isinstance(batch, tuple | list):
            return (augment(batch[0]), *batch[1:])
        return augment(batch)
