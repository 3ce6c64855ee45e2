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

Errors = Callable[[Task, Chunk], Tensor]  # ē of a chunk's examples

# Errors at this factor times the final logits are close to the mean error of a run
# (python -m benchmarks.field).
LOGIT_FACTOR = 0.7


def knows_only_the_end(task: Task, q: Posterior) -> bool:
    """Whether a classifier is off its minimum and has no earlier checkpoints."""
    has_classes = isinstance(task.likelihood.kind, Categorical | Bernoulli)
    knows_the_training = q.earlier or q.at_minimum or "checkpoint" in q.record
    return has_classes and not knows_the_training


def mean_errors(task: Task, q: Posterior) -> Errors:
    """A function (task, chunk) → ē_i = mean_t e_i(t) over the posterior's run, for a chunk at q's
    mean.

    A classifier off its minimum without earlier checkpoints has no run to average over. There the
    errors at 0.7 times the logits, softmax(0.7 f) − y, take the place of the mean.
    """
    checkpoints = [(task.holding(earlier.buffers), earlier) for earlier in q.earlier]
    factor = LOGIT_FACTOR if knows_only_the_end(task, q) else 1.0

    def errors(task: Task, chunk: Chunk) -> Tensor:
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
    if outputs.ndim > 2:  # sequences, which the chunk may have padded further
        missing_tokens = chunk.outputs.shape[1] - outputs.shape[1]
        outputs = pad(outputs, (0, 0, 0, missing_tokens))
    return outputs


def targets_in_float64(y: Tensor) -> Tensor:
    """Targets on the CPU; real numbers in double precision, classes as they are."""
    return y.cpu().double() if y.is_floating_point() else y.cpu()


def losses_at(task: Task, state: Mapping[str, Tensor], chosen: Tensor | None = None) -> Tensor:
    """The unweighted losses of examples at these weights and buffers, ``[N]`` in float64.

    Args:
        chosen: the indices of the examples; None: all of them.
    """
    subset = task if chosen is None else task.subset(chosen)
    if task.likelihood.is_sequence:
        return evaluated(subset, dict(state))[0].losses.double()
    scored = scored_by(task.likelihood)
    losses: list[Tensor] = []
    with torch.no_grad(), subset.evaluation():
        for indices, batch in subset.batches():
            outputs, targets = subset.run(batch, state, indices)
            losses.append(scored.nll(outputs.cpu().double(), targets_in_float64(targets)))
    return torch.cat(losses)


def mean_losses(task: Task, q: Posterior) -> Tensor:
    """The unweighted losses averaged over the posterior's run, ``[N]`` in float64.

    The average shows wrong labels, which a model learns late.
    """
    losses = [losses_at(task, {**p.mean, **p.buffers}) for p in q.run]
    return torch.stack(losses).mean(0)
