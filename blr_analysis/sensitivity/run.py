"""The errors of a training: of its checkpoints, in the mean.

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

PART = 0.7  # of the logits, whose errors stand for the run's: python -m benchmarks.field


def stands_alone(task: Task, q: Posterior) -> bool:
    """Whether the end alone is known of a training of classes, off its minimum."""
    classes = isinstance(task.likelihood.kind, Categorical | Bernoulli)
    return classes and not (q.earlier or q.at_minimum or "checkpoint" in q.record)


def mean_errors(task: Task, q: Posterior) -> Callable[[Task, Chunk], Tensor]:
    """ē_i = mean_t e_i(t) over a posterior's run, of the examples of a chunk at its mean.

    Where the end alone is known, off a minimum, the errors of classes part of the way there stand
    for those of the run: softmax(.7 f) − y.
    """
    earlier = [(task.holding(p.buffers), p) for p in q.earlier]
    part = PART if stands_alone(task, q) else 1.0

    def errors(task: Task, chunk: Chunk) -> Tensor:
        total = chunk.likelihood.error(part * chunk.outputs, chunk.targets)
        for where, p in earlier:
            with torch.no_grad(), where.evaluation():
                f, _ = where.run(where.fetch(chunk.indices), p.mean, chunk.indices)
            if f.ndim > 2:  # a chunk may have padded its sequences further
                f = pad(f, (0, 0, 0, chunk.outputs.shape[1] - f.shape[1]))
            total = total + chunk.likelihood.error(f.to(chunk.outputs), chunk.targets)
        return total / (1 + len(earlier))

    return errors


def widest(y: Tensor) -> Tensor:
    """On the CPU, real numbers in double precision."""
    return y.cpu().double() if y.is_floating_point() else y.cpu()


def losses_at(task: Task, state: Mapping[str, Tensor], chosen: Tensor | None = None) -> Tensor:
    """The unweighted losses of examples at these weights and buffers, in float64."""
    held = task if chosen is None else task.subset(chosen)
    if task.likelihood.is_sequence:
        return evaluated(held, dict(state))[0].losses.double()
    scored, losses = scored_by(task.likelihood), []
    with torch.no_grad(), held.evaluation():
        for indices, batch in held.batches():
            f, y = held.run(batch, state, indices)
            losses.append(scored.nll(f.cpu().double(), widest(y)))
    return torch.cat(losses)


def mean_losses(task: Task, q: Posterior) -> Tensor:
    """The same, averaged over a posterior's run: wrong labels are learned late."""
    each = [losses_at(task, {**p.mean, **p.buffers}) for p in q.run]
    return torch.stack(each).mean(0)
