"""How well topics foretell a document, and the documents they were fitted on without themselves.

Given its responsibilities, the words of a document are conjugate to the topics, so that β can be
integrated out exactly, as in every conjugate model:

    log ∫ p(w_d | β) q(β) dβ  ≥  L_d(λ) + Σ_k KL( Dir(λ_k) ‖ Dir(λ_k + n_d φ_dk) )

with L_d the bound of the local step, whose E_q[log β] is far below log E_q[β] for words that the
topics have hardly seen. Leave-one-out asks for it at λ^{\\d} = λ − n_d φ_d.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.families.special import lgamma_divergence
from blr_analysis.learning_rule.inference.counts import Counts, gather
from blr_analysis.learning_rule.inference.documents import (
    Block,
    SameTopics,
    exp_digamma,
    proportions_bound,
)
from blr_analysis.learning_rule.inference.fitted import NotConverged

WITHHELD = 0.01
"""The share of all words from which on a warning says that they could not be taken out."""


@dataclass(frozen=True)
class OwnBlock(Block):
    """Documents, each with topics of its own.

    Attributes:
        known: λ of each document's words, ``[D, L, K]``.
        totals: Σ_w λ_kw over the whole vocabulary, ``[D, K]``.
        withheld: how much of the site could not be taken out, in words, ``[D]`` or ``[1]``.
    """

    known: Tensor
    totals: Tensor
    withheld: Tensor


@dataclass(frozen=True)
class OwnTopics:
    """Documents that each see topics of their own: q(β), or q(β) less their site.

    λ_kw − n_dw φ_dwk is not let fall below the prior's η, to which the other documents only add.

    Attributes:
        same: the documents, and q(β) as they all see it.
        known: λ of q(β), ``[V, K]``.
        least: η, ``[V, K]``, or λ where that is less.
        gamma: γ of the sites that are taken out, ``[D, K]``; None: nothing is.
    """

    same: SameTopics
    known: Tensor
    least: Tensor
    gamma: Tensor | None = None

    @classmethod
    def of(
        cls,
        counts: Counts,
        rows: Tensor,
        topics: Dirichlet,
        prior: Dirichlet,
        gamma: Tensor | None = None,
    ) -> OwnTopics:
        known = topics.concentration.T.contiguous()
        least = torch.minimum(known, prior.concentration.T)
        return cls(SameTopics.of(counts, rows, topics), known, least, gamma)

    @property
    def sizes(self) -> Tensor:
        return self.same.sizes

    def blocks(self, chosen: Tensor) -> Iterator[OwnBlock]:
        totals = self.known.sum(0)
        for block in self.same.blocks(chosen):
            whole = gather(self.known, block.words)
            every = totals.expand(len(block.at), -1)
            if self.gamma is None:
                yield OwnBlock(
                    **vars(block), known=whole, totals=every, withheld=every.new_zeros(1)
                )
            else:
                yield self._less(block, self.gamma[block.at], whole, every)

    def _less(self, block: Block, gamma: Tensor, whole: Tensor, totals: Tensor) -> OwnBlock:
        """The block without its documents' sites."""
        theta = exp_digamma(gamma)
        wanted = whole - block.sites(theta, block.norm(theta))
        left = torch.maximum(wanted, gather(self.least, block.words))
        totals = totals - (whole - left).sum(1)
        logs = left.digamma() - totals.digamma().unsqueeze(1)
        shift = logs.amax(2)
        table = (logs - shift.unsqueeze(2)).exp_()
        withheld = (left - wanted).sum((1, 2))
        return OwnBlock(block.at, block.words, block.counts, table, shift, left, totals, withheld)


def log_predictive(documents: OwnTopics, gamma: Tensor, totals: Tensor, prior: Dirichlet) -> Tensor:
    """The bound on log ∫ p(w_d | β) q(β) dβ at these γ ``[D, K]``, in nats, ``[D]``.

    Args:
        documents: with the topics that each of them sees.
        gamma: their fixed points.
        totals: words of each document, ``[D]``.
        prior: Dir(α).
    """
    found, withheld = torch.empty_like(totals), 0.0
    for block in documents.blocks(torch.arange(len(gamma))):
        theta = exp_digamma(gamma[block.at])
        norm = block.norm(theta)
        sites, known = block.sites(theta, norm), block.known
        gain = lgamma_divergence(known + sites, known).sum((1, 2))
        gain -= lgamma_divergence(block.totals + sites.sum(1), block.totals).sum(1)
        found[block.at] = block.loglik(norm) + gain
        withheld += float(block.withheld.sum())
    if withheld > WITHHELD * float(totals.sum()):
        warnings.warn(
            f"{withheld / float(totals.sum()):.1%} of the words cannot be taken out of topics that "
            "hold less of them than their documents account for: the fit is far from a fixed "
            "point; go on with fit(counts, batch_size=None, start=fitted.q)",
            NotConverged,
            stacklevel=3,
        )
    return found + proportions_bound(gamma, totals, prior)
