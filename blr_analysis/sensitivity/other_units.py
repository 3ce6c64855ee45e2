"""Whether test data are like the training's: other units, another normalisation, other labels.

    z_i = ‖(x_i − mean x) / std x‖ / √D          over the D numbers of an input that vary

mean and spread are the training's. Of data that were prepared alike the median z of the test lies
among the training's own; and the model explains test targets better than it explains training
targets that are shuffled, unless units, labels or the model are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.posterior.input_ranges import numbers_of
from blr_analysis.posterior.predictive import scored_by
from blr_analysis.task import Task

SAMPLE = 512  # examples of either task, spread evenly
FEWEST = 20  # examples, below which nothing is said of training data, or of a mean loss
ERRORS = 3.0  # standard errors


@dataclass(frozen=True)
class Sample:
    """Inputs ``[n, D]`` (None where there are none of real numbers), outputs and targets."""

    inputs: Tensor | None
    outputs: Tensor
    targets: Tensor


def unlike_training(task: Task, test: Task, mean: Mapping[str, Tensor]) -> str:
    """In one line how test data differ from the training data; "" where they do not.

    Example:
        >>> x, y = torch.randn(60, 3), torch.arange(60) % 2
        >>> task, test = (Task(torch.nn.Linear(3, 2), (scale * x, y)) for scale in (1.0, 255.0))
        >>> test = test.with_model(task)
        >>> print(unlike_training(task, test, task.parameters()))  # doctest: +ELLIPSIS
        test inputs are ... the training's spread, training inputs ...: other units?
        >>> unlike_training(task, task, task.parameters())
        ''
    """
    same = test.examples is task.examples
    if same or task.likelihood.is_sequence or task.n_data < FEWEST:
        return ""
    training_sample = _sample(task, mean)
    test_sample = _sample(test, mean)
    of_inputs = _of_inputs(training_sample, test_sample)
    return of_inputs or _of_losses(task, training_sample, test_sample)


def _sample(task: Task, mean: Mapping[str, Tensor]) -> Sample:
    rows = torch.linspace(0, task.n_data - 1, min(task.n_data, SAMPLE)).long().unique()
    inputs: list[Tensor | None] = []
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches(indices=rows):
            inputs.append(numbers_of(batch, len(indices)))
            f, y = task.run(batch, mean, indices)
            outputs.append(f.cpu().double())
            targets.append(y.cpu())
    numbers = [part for part in inputs if part is not None]
    widths = {part.shape[1] for part in numbers}
    has_table = len(numbers) == len(inputs) and len(widths) == 1
    table = torch.cat(numbers) if has_table else None
    return Sample(table, torch.cat(outputs), torch.cat(targets))


def _of_inputs(training: Sample, test: Sample) -> str:
    """Whether test inputs have another size than those of the training."""
    if training.inputs is None or test.inputs is None:
        return ""
    if training.inputs.shape[1] != test.inputs.shape[1]:
        return ""
    centre = training.inputs.mean(0)
    spread = training.inputs.std(0)
    varies = spread > 0
    if not bool(varies.any()):
        return ""

    def sizes(x: Tensor) -> Tensor:
        return ((x - centre) / spread)[:, varies].square().mean(1).sqrt()

    training_sizes = sizes(training.inputs)
    low = float(training_sizes.min())
    high = float(training_sizes.max())
    typical = float(sizes(test.inputs).median())
    if low <= typical <= high:
        return ""
    return (
        f"test inputs are {typical:.3g} times the training's spread, training inputs "
        f"{low:.3g} to {high:.3g}: other units?"
    )


def _of_losses(task: Task, training: Sample, test: Sample) -> str:
    """Whether test targets are explained no better than shuffled training targets."""
    scored = scored_by(task.likelihood)
    n = len(training.targets)
    m = len(test.targets)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    shuffled = scored.nll(training.outputs, training.targets[order])
    chance = float(shuffled.mean())
    training_loss = float(scored.nll(training.outputs, training.targets).mean())
    test_loss = float(scored.nll(test.outputs, test.targets).mean())
    noise = ERRORS * float(shuffled.std()) * math.sqrt(1 / n + 1 / m)
    is_far_above = test_loss > chance + noise
    explains_training = training_loss < chance - noise
    test_is_no_better = test_loss > chance - noise
    explains_training_alone = explains_training and test_is_no_better and m >= FEWEST
    if not (is_far_above or explains_training_alone):
        return ""
    return (
        f"test losses are {test_loss:.3g}, those of shuffled training targets {chance:.3g}: "
        "other units or labels?"
    )
