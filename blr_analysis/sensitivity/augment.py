"""What a training drew of its inputs: crops, flips, masks, noise.

An analysis reads examples that stand still; a training by a recipe reads them as it drew them, by a
function of a minibatch's inputs or by a data set that draws each example when it is read.
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
    """The same examples, read as the recipe's training draws them.

    Args:
        part: examples of ``home``, some of them with other labels, or added ones.

    Raises:
        InputError: added examples, where ``augment`` is a data set that does not hold them.
    """
    augment = recipe.augment
    if augment is None:
        return part
    examples = part.examples
    relabelled = isinstance(part.dataset, Labelled)
    if callable(augment):

        def collate(items: list[Any]) -> Any:
            return _changed(examples.collate(items), augment, relabelled)

        return part.reading(replace(examples, collate=collate))
    dataset = augment.dataset if isinstance(augment, DataLoader) else augment
    if relabelled:
        items, targets = part.dataset.datasets
        dataset = Labelled(Subset(dataset, items.indices), targets)
    elif part.dataset is not home.dataset:
        raise InputError("augment= is a data set without the added examples; give a function")
    return part.reading(replace(examples, dataset=dataset))


def _changed(batch: Any, augment: Callable[[Any], Any], relabelled: bool) -> Any:
    """A batch with the inputs that ``augment`` makes of its own."""
    if relabelled:
        inside, targets = batch
        return _changed(inside, augment, False), targets
    with told_as(InputError, "the recipe's augment failed on a minibatch's inputs"):
        if isinstance(batch, Mapping):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            return {**batch, **augment(inputs)}
        if isinstance(batch, tuple | list):
            return (augment(batch[0]), *batch[1:])
        return augment(batch)
