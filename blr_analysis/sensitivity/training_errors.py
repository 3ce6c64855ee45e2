"""The errors and losses of a training: of its checkpoints, in the mean.

    ē_i = mean_t ∂ℓ_i/∂f (t)

An example's site is the average of what it pulled while the model was trained; at the end, what was
learned by heart has no error left.
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

PART = 0.7  # of the logits: errors there stand for the run's (python -m benchmarks.field)


def stands_alone(task: Task, q: Posterior) -> bool:
    """Whether only the end of a training of classes is known, off its minimum."""
    has_classes = isinstance(task.likelihood.kind, Categorical | Bernoulli)
    return has_classes and not (q.earlier or q.at_minimum or "checkpoint" in q.record)


def mean_errors(task: Task, q: Posterior) -> Errors:
    """ē_i = mean_t e_i(t) over a posterior's run, of the examples of a chunk at its mean.

    Where only the end is known, off a minimum, the errors of classes part of the way there stand
    for those of the run: softmax(.7 f) − y.
    """
    checkpoints = [(task.holding(earlier.buffers), earlier) for earlier in q.earlier]
    part = PART if stands_alone(task, q) else 1.0

    def errors(task: Task, chunk: Chunk) -> Tensor:
        total = chunk.likelihood.error(part * chunk.outputs, chunk.targets)
        for task_at_buffers, checkpoint in checkpoints:
            outputs = _outputs_at(task_at_buffers, checkpoint, chunk)
            total = total + chunk.likelihood.error(outputs.to(chunk.outputs), chunk.targets)
        return total / (1 + len(checkpoints))

    return errors


def _outputs_at(task: Task, checkpoint: Posterior, chunk: Chunk) -> Tensor:
    """The outputs of a chunk's examples at an earlier posterior, as wide as the chunk's."""
    with torch.no_grad(), task.evaluation():
        outputs, _ = task.run(task.fetch(chunk.indices), checkpoint.mean, chunk.indices)
    if outputs.ndim > 2:  # a chunk may have padded its sequences further
        outputs = pad(outputs, (0, 0, 0, chunk.outputs.shape[1] - outputs.shape[1]))
    return outputs


def widest(y: Tensor) -> Tensor:
    """Targets on the CPU, real numbers in double precision."""
    return y.cpu().double() if y.is_floating_point() else y.cpu()


def losses_at(task: Task, state: Mapping[str, Tensor], chosen: Tensor | None = None) -> Tensor:
    """The unweighted losses of examples at these weights and buffers, in float64."""
    subset = task if chosen is None else task.subset(chosen)
    if task.likelihood.is_sequence:
        return evaluated(subset, dict(state))[0].losses.double()
    scored = scored_by(task.likelihood)
    losses: list[Tensor] = []
    with torch.no_grad(), subset.evaluation():
        for indices, batch in subset.batches():
            f, y = subset.run(batch, state, indices)
            losses.append(scored.nll(f.cpu().double(), widest(y)))
    return torch.cat(losses)


def mean_losses(task: Task, q: Posterior) -> Tensor:
    """The same, averaged over a posterior's run: wrong labels are learned late."""
    losses = [losses_at(task, dict(p.mean) | dict(p.buffers)) for p in q.run]
    return torch.stack(losses).mean(0)
