"""Passes over documents: the steps of q(β), on minibatches or on all of them at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blr_analysis.learning_rule.families.base import add, scale
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.inference.counts import Counts
from blr_analysis.learning_rule.inference.documents import Local
from blr_analysis.learning_rule.rule import blr_step

if TYPE_CHECKING:
    from blr_analysis.learning_rule.inference.lda import LDA

Passes = Iterator[tuple[Dirichlet, Tensor, float]]
"""q(β), γ and the ELBO after each pass."""


def stochastic(
    model: LDA, data: Counts, q: Dirichlet, prior: Dirichlet, batches: Iterable[Tensor]
) -> Passes:
    """Steps with ρ_t on minibatches, each pass over all documents in some order."""
    gamma = prior.concentration.new_ones(len(data), model.n_topics)
    bound, seen = 0.0, 0
    for step, batch in enumerate(batches, start=1):
        local = model.local(data, batch, q)
        gamma[batch] = local.gamma
        bound, seen = bound + float(local.bound.sum()), seen + len(batch)
        last, q = q, moved(q, prior, local, len(data) / len(batch), model.rho(step))
        if seen == len(data):
            yield q, gamma, bound - float(last.kl(prior).sum())
            bound, seen = 0.0, 0


def ascent(
    model: LDA, data: Counts, q: Dirichlet, prior: Dirichlet, passes: Iterable[int]
) -> Passes:
    """Coordinate ascent: ρ = 1, all documents in each step.

    Documents start afresh until that would lower the ELBO; from then on, where they were.
    """
    rows, start, gamma, highest = torch.arange(len(data)), None, None, -math.inf
    for _ in passes:
        penalty = float(q.kl(prior).sum())
        local = model.local(data, rows, q, start=start)
        if start is None and float(local.bound.sum()) - penalty < highest:
            local = model.local(data, rows, q, start=gamma)
            start = gamma
        highest, gamma = float(local.bound.sum()) - penalty, local.gamma
        start = None if start is None else gamma
        q = moved(q, prior, local, 1.0, 1.0)
        yield q, gamma, highest


def moved(q: Dirichlet, prior: Dirichlet, local: Local, ratio: float, rho: float) -> Dirichlet:
    """The rule for ℓ̄ = −log p(β) − N/B Σ_d E[log p(w_d, z_d | θ_d, β)]."""
    site = {"log": ratio * local.expected}  # type: ignore[operator]
    return blr_step(q, scale(add(prior.natural, site), -1.0), rho)
