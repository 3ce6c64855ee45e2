"""The errors and losses of examples, averaged over the checkpoints of a training.

    ē_i = mean_t ∂ℓ_i/∂f (t)

The site of an example is the average of its pulls during the training. Its error at the end alone
is too small a pull: a memorised example has no error left there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from blr_analysis.backprop.engine import Chunk
from blr_analysis.backprop.loss import evaluated
from blr_analysis.likelihoods import Bernoulli, Categorical
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.predictive import scored_by
from blr_analysis.task import Task

Errors = Callable[[Task, Chunk], Tensor]
"""A function that returns ē for the examples of a chunk."""

LOGIT_FACTOR = 0.7
"""Errors at this factor times the final logits are close to the mean error of a run
(python -m benchmarks.field)."""


def knows_only_the_end(task: Task, q: Posterior) -> bool:
    """Whether q is the end of a classifier's run, off its minimum, and no earlier one is known."""
    is_classifier = isinstance(task.likelihood.kind, Categorical | Bernoulli)
    is_checkpoint_of_a_run = "checkpoint" in q.record
    is_end_of_a_run = not (q.at_minimum or is_checkpoint_of_a_run)
    return is_classifier and is_end_of_a_run and not q.earlier


def mean_errors(task: Task, q: Posterior) -> Errors:
    """A function that averages the errors of a chunk's examples over the run of a posterior.

    It returns ē_i = mean_t e_i(t) for a chunk whose outputs were computed at q's mean.

    Where only the end of the run is known, the errors at 0.7 times the final logits,
    softmax(0.7 f) − y, take the place of the mean; see :func:`knows_only_the_end`.
    """
    checkpoints = [(task.holding(earlier.buffers), earlier) for earlier in q.earlier]
    factor = LOGIT_FACTOR if knows_only_the_end(task, q) else 1.0

    def errors(_: Task, chunk: Chunk) -> Tensor:
        total = chunk.likelihood.error(factor * chunk.outputs, chunk.targets)
        for task_at_buffers, checkpoint in checkpoints:
            outputs = _outputs_at(task_at_buffers, checkpoint, chunk)
            total = total + chunk.likelihood.error(outputs.to(chunk.outputs), chunk.targets)
        return total / (1 + len(checkpoints))

    return errors


def _outputs_at(task: Task, checkpoint: Posterior, chunk: Chunk) -> Tensor:
    """The outputs of a chunk's examples at an earlier posterior, padded to the chunk's length."""
    with torch.no_grad(), task.evaluation():
        outputs, _ = task.run(task.fetch(chunk.indices), checkpoint.mean, chunk.indices)
    are_sequences = outputs.ndim > 2
    if are_sequences:  # the chunk may have padded them further
        missing_tokens = chunk.outputs.shape[1] - outputs.shape[1]
        outputs = pad(outputs, (0, 0, 0, missing_tokens))
    return outputs


def targets_on_cpu(y: Tensor) -> Tensor:
    """Targets on the CPU; real numbers in double precision, classes as they are."""
    return y.cpu().double() if y.is_floating_point() else y.cpu()


def losses_at(task: Task, state: Mapping[str, Tensor], chosen: Tensor | None = None) -> Tensor:
    """The unweighted losses of examples, ``[N]`` in float64.

    Args:
        state: the weights and buffers at which the losses are computed.
        chosen: the indices of the examples; None: all of them.
    """
    subset = task if chosen is None else task.subset(chosen)
    if task.likelihood.is_sequence:
        evaluation, _ = evaluated(subset, dict(state))
        return evaluation.losses.double()
    scored = scored_by(task.likelihood)
    losses: list[Tensor] = []
    with torch.no_grad(), subset.evaluation():
        for indices, batch in subset.batches():
            outputs, targets = subset.run(batch, state, indices)
            losses.append(scored.nll(outputs.cpu().double(), targets_on_cpu(targets)))
    return torch.cat(losses)


def mean_losses(task: Task, q: Posterior) -> Tensor:
    """The unweighted losses averaged over the posterior's run, ``[N]`` in float64.

    A model learns wrong labels late, so their average stays high.
    """
    losses = [losses_at(task, {**p.mean, **p.buffers}) for p in q.run]
    return torch.stack(losses).mean(0)
