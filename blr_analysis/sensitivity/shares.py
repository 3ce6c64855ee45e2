"""A group's share of the posterior, λ̃_G = Σ_{i∈G} λ̃_i, and the posterior without or with it.

    λ^{\\G} = λ − λ̃_G:    S^{\\G} = S − S_G,    m^{\\G} = m + (S^{\\G})⁻¹ Σ_{i∈G} J_iᵀ e_i

with S_G = Σ_{i∈G} J_iᵀ Λ_i J_i in the posterior's own structure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunking, chunks
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.tree import add
from blr_analysis.errors import DataError, InputError, PosteriorError
from blr_analysis.posterior.fingerprint import made_of
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import curvature_root
from blr_analysis.posterior.structures import Structure, Tree
from blr_analysis.task import Task


@dataclass(frozen=True)
class Share:
    """A group's share of the posterior: Σ J_iᵀ e_i and Σ J_iᵀ Λ_i J_i."""

    gradient: Tree
    curvature: Structure
    count: int


def share(
    task: Task,
    q: Posterior,
    indices: Tensor | None,
    chunking: Chunking,
) -> Share:
    """Σ_{i∈G} J_iᵀ e_i and S_G in the posterior's structure, at the posterior's mean."""
    curvature = q.form.zeros()
    for chunk in chunks(task, q.mean, chunking, indices=indices, label="the group's share"):
        curvature = curvature.add(chunk.terms(curvature_root(chunk)))
    count = task.n_data if indices is None else len(indices)
    return Share(loss_and_gradient(task, q.mean, indices)[0], curvature, count)


def relabelled(task: Task, q: Posterior, labels: Mapping[int, Any], chunking: Chunking) -> Share:
    """Old shares out, new ones in: the e_i change, and Λ_i where the loss makes it know the label.

    Raises:
        DataError: a new label that is no target of the likelihood.
        InputError: the examples are sequences.
    """
    if task.likelihood.is_sequence:
        raise InputError(
            "relabel= takes one target per example; for sequences use remove= and add="
        )
    chosen = torch.tensor(sorted(labels))
    outputs, targets = [], []
    with torch.no_grad(), task.evaluation():
        for indices, batch in task.batches(indices=chosen):
            f, y = task.run(batch, q.mean, indices)
            outputs.append(f)
            targets.append(y)
    f, y = torch.cat(outputs), torch.cat(targets)
    try:
        new = torch.stack([as_target(labels[int(i)]) for i in chosen])
        new = task.likelihood.prepare_targets(new.to(f.device), f)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"relabel must map indices to targets: {error}") from error
    likelihood, curvature = task.likelihood.at(chosen), q.form.zeros()
    change = likelihood.error(f, new) - likelihood.error(f, y)
    roots = [(sign, likelihood.hessian_root(f, t)) for sign, t in ((-1, y), (1, new))]
    if not torch.equal(roots[0][1], roots[1][1]):
        for sign, root in roots:
            part, start = q.form.zeros(), 0
            for chunk in chunks(task, q.mean, chunking, indices=chosen):
                stop = start + len(chunk.indices)
                part = part.add(chunk.terms(root[start:stop].mT))
                start = stop
            curvature = curvature.plus(part, sign)
    return Share(loss_and_gradient(task, q.mean, chosen, change)[0], curvature, 0)


def as_target(value: Any) -> Tensor:
    """A label as a tensor; Python's floats keep their 64 bits."""
    try:
        return value.cpu() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{value!r} is no number; give that of its class") from error


def step(q: Posterior, changes: Sequence[tuple[int, Share]]) -> tuple[Posterior, float]:
    """λ ∓ Σ λ̃: the posterior with the shares taken out (−1) or put in (+1).

    Returns:
        The new posterior, and the fraction of its precision that had to be raised to the prior.

    Raises:
        PosteriorError: the new mean is not finite, the new precision not positive.
    """
    form, n_data = q.form, q.n_data
    pull = {n: torch.zeros_like(m) for n, m in q.mean.items()}
    for sign, part in changes:
        form = form.plus(part.curvature, sign)
        n_data += sign * part.count
        pull = add(pull, -sign, part.gradient)
    form, floored = form.floored(q.prior.within(q.record))
    mean = add(q.mean, 1.0, form.solve(pull))
    if not all(bool(torch.isfinite(m).all()) for m in mean.values()):
        raise PosteriorError(
            "the step is not finite: raise prior_precision, or remove fewer examples"
        )
    return made_of(q, mean, form, n_data=n_data, kind="what_if"), floored
