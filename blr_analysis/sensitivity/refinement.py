"""Single examples left out by a few moves on the data that stay, where an estimate is too rough.

An estimate from V_i linearises the model and the losses of all others around m. For the handful of
examples whose removal moves the model far, that is what it gets wrong; and they make up most of
the total. Each of them is left out by quasi-Newton moves from m that know the posterior
(:mod:`blr_analysis.sensitivity.minimise`), and a real forward pass gives its outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.progress import track
from blr_analysis.sensitivity.minimise import Descent, descend
from blr_analysis.sensitivity.objective import changed
from blr_analysis.sensitivity.solving import drifts, own_slope
from blr_analysis.task import Task

PASSES = 12  # over the data, for each example


@dataclass(frozen=True)
class Refined:
    """Some examples, each left out by a descent; on the CPU.

    Attributes:
        outputs: of each without itself, ``[K, C]``.
        found: ``[K]``; False where m is so far from the minimum of its own objective that the
            moves would show the training that goes on. The outputs there are those at m.
        decrement: what one more move would gain, relative to the first, ``[K]``.
        passes: over the data, in all.
    """

    outputs: Tensor
    found: Tensor
    decrement: Tensor
    passes: float


def refined(
    task: Task,
    q: Posterior,
    rows: Tensor,
    *,
    passes: int = PASSES,
    progress: bool | None = None,
) -> Refined:
    """Leave each of these examples out by at most so many passes over the others."""
    own = own_slope(task, q)
    outputs, found = [], torch.zeros(len(rows), dtype=torch.bool)
    decrement, spent = torch.ones(len(rows), dtype=torch.float64), 1.0
    for k, row in enumerate(track(rows, total=len(rows), label="descents", show=progress)):
        alone = row.reshape(1)
        pull = loss_and_gradient(task, q.mean, alone)[0]
        params = q.mean
        if not drifts(q, own, pull):
            data = changed(task, q.prior, leaving=alone)
            descent = Descent.start(data, dict(q.mean), q.form)
            descend(descent, steps=None, passes=passes, tolerance=1.0)
            params, found[k] = descent.point.params, True
            spent += descent.passes
            first = descent.moves[0].decrement
            decrement[k] = descent.moves[-1].decrement / first if first > 0 else 0.0
        with torch.no_grad(), task.evaluation():
            f, _ = task.run(task.fetch(alone), params, alone)
        outputs.append(f.cpu())
    return Refined(torch.cat(outputs), found, decrement, spent)
