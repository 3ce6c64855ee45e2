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
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

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
    training, asked = _sample(task, mean), _sample(test, mean)
    return _of_inputs(training, asked) or _of_losses(task, training, asked)


def _sample(task: Task, mean: Mapping[str, Tensor]) -> Sample:
    rows = torch.linspace(0, task.n_data - 1, min(task.n_data, SAMPLE)).long().unique()
    inputs: list[Tensor | None] = []
    answers: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches(indices=rows):
            inputs.append(_numbers(batch, len(indices)))
            f, y = task.run(batch, mean, indices)
            answers.append((f.cpu().double(), y.cpu()))
    outputs, targets = (torch.cat(part) for part in zip(*answers, strict=True))
    known = [part for part in inputs if part is not None]
    alike = len(known) == len(inputs) and len({part.shape[1] for part in known}) == 1
    return Sample(torch.cat(known) if alike else None, outputs, targets)


def _numbers(batch: Any, size: int) -> Tensor | None:
    """The real numbers of a batch's inputs, ``[B, D]``."""
    inputs = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(inputs, Mapping):
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
    leaves = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.is_floating_point()]
    rows = [x.reshape(size, -1).cpu().double() for x in leaves if x.ndim and len(x) == size]
    return torch.cat(rows, 1) if rows else None


def _of_inputs(training: Sample, asked: Sample) -> str:
    ours, theirs = training.inputs, asked.inputs
    if ours is None or theirs is None or ours.shape[1] != theirs.shape[1]:
        return ""
    centre, spread = ours.mean(0), ours.std(0)
    varied = spread > 0

    def sizes(x: Tensor) -> Tensor:
        return ((x - centre) / spread)[:, varied].square().mean(1).sqrt()

    if not bool(varied.any()):
        return ""
    usual, typical = sizes(ours), float(sizes(theirs).median())
    low, high = float(usual.min()), float(usual.max())
    if low <= typical <= high:
        return ""
    return (
        f"test inputs are {typical:.3g} times the training's spread, training inputs "
        f"{low:.3g} to {high:.3g}: other units?"
    )


def _of_losses(task: Task, training: Sample, asked: Sample) -> str:
    scored = scored_by(task.likelihood)
    n, m = len(training.targets), len(asked.targets)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    shuffled = scored.nll(training.outputs, training.targets[order])
    losses = scored.nll(asked.outputs, asked.targets)
    own = float(scored.nll(training.outputs, training.targets).mean())
    noise = ERRORS * float(shuffled.std()) * math.sqrt(1 / n + 1 / m)
    chance, found = float(shuffled.mean()), float(losses.mean())
    is_far_above = found > chance + noise
    only_training_is_explained = own < chance - noise and found > chance - noise and m >= FEWEST
    if not (is_far_above or only_training_is_explained):
        return ""
    return (
        f"test losses are {found:.3g}, those of shuffled training targets {chance:.3g}: "
        "other units or labels?"
    )
