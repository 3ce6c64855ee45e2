"""Find test data in other units, with another normalisation or other labels than the training data.

    z_i = ‖(x_i − mean x) / std x‖ / √D          over the D numbers of an input that vary

Mean and standard deviation are those of the training data. If both data were prepared in the same
way, the median z of the test data lies between the smallest and the largest z of the training data,
and the model explains test targets better than shuffled training targets. Of a few test examples,
which somebody may have chosen because they are predicted worst, losses say nothing, and inputs only
where all of them lie outside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.data.examples import evenly_spread
from blr_analysis.posterior.input_ranges import numbers_of
from blr_analysis.posterior.predictive import scored_by
from blr_analysis.task import Task

SAMPLE = 512  # examples of either task, spread evenly
FEWEST = 20  # with fewer training examples, nothing is said; of fewer test examples, little
ERRORS = 3.0  # standard errors, by which mean losses must differ


@dataclass(frozen=True)
class Sample:
    """Inputs ``[n, D]`` (None if they are no real numbers), outputs and targets of n examples."""

    inputs: Tensor | None
    outputs: Tensor
    targets: Tensor


def unlike_training(
    task: Task, test: Task, mean: Mapping[str, Tensor], *, names_classes: bool = True
) -> str:
    """One line on how the test data differ from the training data; "" if they do not.

    Args:
        mean: the model's weights.
        names_classes: whether the line may be on classes that no training example has.

    Example:
        >>> x, y = torch.randn(60, 3), torch.arange(60) % 2
        >>> task, test = (Task(torch.nn.Linear(3, 2), (scale * x, y)) for scale in (1.0, 255.0))
        >>> test = test.with_model(task)
        >>> print(unlike_training(task, test, task.parameters()))  # doctest: +ELLIPSIS
        test inputs are ... the training's spread, training inputs ...: other units?
        >>> unlike_training(task, task, task.parameters())
        ''
    """
    are_same_data = test.examples is task.examples
    if are_same_data or task.likelihood.is_sequence or task.n_data < FEWEST:
        return ""
    training_sample = _sample(task, mean)
    test_sample = _sample(test, mean)
    line = _on_inputs(training_sample, test_sample)
    line = line or _on_losses(task, training_sample, test_sample)
    if line or not names_classes:
        return line
    return _on_classes(task, mean, training_sample, test_sample)


def _sample(task: Task, mean: Mapping[str, Tensor]) -> Sample:
    """At most SAMPLE examples of a task, with their outputs at these weights."""
    rows = evenly_spread(task.n_data, SAMPLE)
    inputs: list[Tensor | None] = []
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches(indices=rows):
            inputs.append(numbers_of(batch, len(indices)))
            batch_outputs, batch_targets = task.run(batch, mean, indices)
            outputs.append(batch_outputs.cpu().double())
            targets.append(batch_targets.cpu())
    numbers = [part for part in inputs if part is not None]
    widths = {part.shape[1] for part in numbers}
    is_matrix = len(numbers) == len(inputs) and len(widths) == 1
    return Sample(
        inputs=torch.cat(numbers) if is_matrix else None,
        outputs=torch.cat(outputs),
        targets=torch.cat(targets),
    )


def _on_inputs(training: Sample, test: Sample) -> str:
    """One line if the median test input is smaller or larger than all training inputs; else "".

    Of a few test inputs, all must be.
    """
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
        """z of every input."""
        return ((x - centre) / spread)[:, varies].square().mean(1).sqrt()

    training_sizes = sizes(training.inputs)
    low = float(training_sizes.min())
    high = float(training_sizes.max())
    test_sizes = sizes(test.inputs)
    typical = float(test_sizes.median())
    is_inside = (test_sizes >= low) & (test_sizes <= high)
    are_few = len(test_sizes) < FEWEST
    if low <= typical <= high or (are_few and bool(is_inside.any())):
        return ""
    return (
        f"test inputs are {typical:.3g} times the training's spread, training inputs "
        f"{low:.3g} to {high:.3g}: other units?"
    )


def _on_losses(task: Task, training: Sample, test: Sample) -> str:
    """One line if test losses are no better than those of shuffled training targets; else "".

    Nothing is said of a few test examples.
    """
    if len(test.targets) < FEWEST:
        return ""
    scored = scored_by(task.likelihood)
    n_training = len(training.targets)
    n_test = len(test.targets)
    order = torch.randperm(n_training, generator=torch.Generator().manual_seed(0))
    shuffled_losses = scored.nll(training.outputs, training.targets[order])
    chance = float(shuffled_losses.mean())
    training_loss = float(scored.nll(training.outputs, training.targets).mean())
    test_loss = float(scored.nll(test.outputs, test.targets).mean())
    noise = ERRORS * float(shuffled_losses.std()) * math.sqrt(1 / n_training + 1 / n_test)
    is_far_above = test_loss > chance + noise
    explains_training = training_loss < chance - noise
    explains_test = test_loss <= chance - noise
    explains_training_alone = explains_training and not explains_test
    if not (is_far_above or explains_training_alone):
        return ""
    return (
        f"test losses are {test_loss:.3g}, those of shuffled training targets {chance:.3g}: "
        "other units or labels, or rows chosen for their losses?"
    )


def _on_classes(task: Task, mean: Mapping[str, Tensor], training: Sample, test: Sample) -> str:
    """One line on classes of the test data that no training example has; "" without any.

    All training targets are read only where those of the sample lack a class.
    """
    are_indices = training.targets.ndim == 1 and not test.targets.is_floating_point()
    if not task.likelihood.is_classification or not are_indices:
        return ""
    ignored = getattr(task.likelihood, "ignore_index", None)
    absent = set(test.targets.tolist()) - set(training.targets.tolist()) - {ignored}
    is_whole = len(training.targets) == task.n_data
    if absent and not is_whole:
        absent -= _targets_of(task, mean)
    if not absent:
        return ""
    return f"test data have classes that no training example has: {some(sorted(absent))}"


def _targets_of(task: Task, mean: Mapping[str, Tensor]) -> set[int]:
    """The classes of all examples, by forward passes."""
    classes: set[int] = set()
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches():
            _, targets = task.run(batch, mean, indices)
            classes |= set(targets.tolist())
    return classes
