"""Documents of a topic model: counts, factors given the topics, and how well those foretell them.

Each document d has topic proportions θ_d ~ Dir(α), and each of its words a topic. Given the topics
q(β_k) = Dir(λ_k), the factors of a document are found by turning two updates of the rule with
ρ = 1 until they stand still (Hoffman, Blei and Bach, 2010, Algorithm 1):

    φ_dwk ∝ exp( E[log θ_dk] + E[log β_kw] ),      γ_dk = α + Σ_w n_dw φ_dwk

Documents turn in blocks of similar length that are padded to one length; those that stand still
leave.

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
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blr_analysis.errors import DataError
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.families.special import lgamma_divergence
from blr_analysis.learning_rule.inference.fitted import NotConverged

WASTE = 1 << 14
"""Entries of a block's table of words by topics that may be padding."""
MOST = 1 << 20
"""Entries of a block's table."""
WITHHELD = 0.01
"""The share of all words from which on a warning says that they could not be taken out."""


# Counts


@dataclass(frozen=True)
class Counts:
    """A sparse matrix of counts by its rows.

    Attributes:
        starts: ``[N + 1]``; the entries of document d are ``starts[d]`` to ``starts[d + 1]``.
        words: columns, ``[nnz]``.
        counts: ``[nnz]``.
        n_words: V, the size of the vocabulary.
    """

    starts: Tensor
    words: Tensor
    counts: Tensor
    n_words: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def followed_by(self, more: Counts) -> Counts:
        """Documents after these."""
        starts = torch.cat([self.starts, self.starts[-1] + more.starts[1:]])
        words, counts = torch.cat([self.words, more.words]), torch.cat([self.counts, more.counts])
        return Counts(starts, words, counts, self.n_words)

    @property
    def lengths(self) -> Tensor:
        """Entries of each document, ``[N]``."""
        return self.starts.diff()

    @cached_property
    def owners(self) -> Tensor:
        """The document of each entry, ``[nnz]``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @cached_property
    def totals(self) -> Tensor:
        """Words of each document, ``[N]``."""
        return self.counts.new_zeros(len(self)).index_add_(0, self.owners, self.counts)

    @cached_property
    def _padded(self) -> list[Tensor]:
        """Words and counts, and at the end an entry for what is padded."""
        return [torch.cat([t, t.new_zeros(1)]) for t in (self.words, self.counts)]

    def blocks(self, rows: Tensor, n_topics: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Blocks of documents: positions in ``rows`` ``[D]``, words and counts ``[D, L]``.

        Documents come by length; what is padded has the word 0 and the count 0.
        """
        lengths, order = self.lengths[rows].sort(stable=True)
        starts, (words, counts) = self.starts[rows[order]], self._padded
        for part in _similar(lengths.tolist(), WASTE // n_topics, MOST // n_topics):
            place = torch.arange(int(lengths[part.stop - 1]))
            entry = starts[part].unsqueeze(1) + place
            entry.masked_fill_(place >= lengths[part].unsqueeze(1), len(self.words))
            yield order[part], gather(words, entry), gather(counts, entry)


def _similar(sizes: list[int], waste: int, most: int) -> Iterator[slice]:
    """Rising sizes in slices that, once padded to their largest, waste little and hold little.

    >>> list(_similar([1, 2, 2, 9, 9, 9], 2, 20))
    [slice(0, 3, None), slice(3, 5, None), slice(5, 6, None)]
    """
    begin, padding = 0, 0
    for at in range(1, len(sizes)):
        padding += (at - begin) * (sizes[at] - sizes[at - 1])
        if padding > waste or (at + 1 - begin) * sizes[at] > most:
            yield slice(begin, at)
            begin, padding = at, 0
    yield slice(begin, len(sizes))


def gather(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]``, by the faster way."""
    return table.index_select(0, index.flatten()).view(*index.shape, *table.shape[1:])


def read_counts(given: Any, dtype: torch.dtype, n_words: int | None = None) -> Counts:
    """Sparse counts, checked; copies of what the caller holds.

    Args:
        given: ``[N, V]``: anything with SciPy's ``tocsr()``, a tensor or an array;
            or counts that have been read.
        dtype: of the counts from here on.
        n_words: V, where it is known.

    Raises:
        DataError: no matrix of numbers, another vocabulary, counts that are negative, not whole
            or not finite, or a document without words.
    """
    if isinstance(given, Counts):  # of a fit
        return given
    if hasattr(given, "tocsr"):
        rows = given.tocsr()
        shape, parts = rows.shape, (rows.indptr, rows.indices, rows.data)
        kinds = (np.int64, np.int64, np.float64)
        starts, words, values = (
            torch.from_numpy(np.array(x, kind)) for x, kind in zip(parts, kinds, strict=True)
        )
    else:
        matrix = given if isinstance(given, Tensor) else _array(given)
        shape = matrix.shape
        if len(shape) != 2 or matrix.is_complex():
            raise DataError(f"counts must be a real matrix [N, V], got shape {tuple(shape)}")
        entries = matrix.detach().cpu().to_sparse_coo().coalesce()
        owner, words = entries.indices()
        starts = torch.cat([owner.new_zeros(1), owner.bincount(minlength=shape[0]).cumsum(0)])
        values = entries.values().double()
    if not shape[0] or shape[1] < 2:
        raise DataError(f"counts need a document and two words or more, got shape {tuple(shape)}")
    counts = Counts(starts, words, values, int(shape[1]))
    if n_words not in (None, counts.n_words):
        raise DataError(
            f"counts have {counts.n_words} words, the topics a vocabulary of {n_words}: count by it"
        )
    for wrong, what in (
        (~torch.isfinite(values), "not finite"),
        (values < 0, "negative"),
        (values != values.round(), "not a whole number"),
    ):
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            place = f"word {int(words[first])} in document {int(counts.owners[first])}"
            raise DataError(f"the count of {place} is {what}: {float(values[first])!r}")
    empty = (counts.totals == 0).nonzero().flatten()
    if len(empty):
        raise DataError(f"document {int(empty[0])} (of {len(empty)}) has no words: leave it out")
    return Counts(starts, words, values.to(dtype), counts.n_words)


def _array(given: Any) -> Tensor:
    """A tensor of what NumPy takes for an array of numbers."""
    try:
        array = np.asarray(given)
        if array.dtype.kind in "biufc":
            return torch.as_tensor(array)
    except ValueError:  # rows of unequal lengths
        pass
    raise DataError(
        f"counts must be a real matrix [N, V], got {type(given).__name__}: see CountVectorizer"
    )


# The local step


@dataclass(frozen=True)
class Local:
    """The local factors of D documents.

    Attributes:
        gamma: q(θ_d) = Dir(γ_d), ``[D, K]``.
        bound: E[log p(w_d, z_d, θ_d | β)] + H(q(θ_d, z_d)) in nats, ``[D]``.
        expected: Σ_d n_dw φ_dwk, ``[K, V]``; for each document, ``[D, K, V]``, if asked for apart;
            None if not asked for.
    """

    gamma: Tensor
    bound: Tensor
    expected: Tensor | None


@dataclass(frozen=True)
class PaddedDocuments:
    """Some documents, padded to L words.

    Attributes:
        at: which ones, ``[D]``.
        words: their columns, ``[D, L]``.
        counts: n_dw, ``[D, L]``; 0 where padded.
        table: t_dwk = exp(E[log β_kw] − s_dw), ``[D, L, K]``.
        shift: s_dw, the largest of E[log β_kw], ``[D, L]``: φ does not see a word's own factor.
    """

    at: Tensor
    words: Tensor
    counts: Tensor
    table: Tensor
    shift: Tensor

    def only(self, chosen: Tensor) -> PaddedDocuments:
        """Some of them."""
        parts = (self.at, self.words, self.counts, self.table, self.shift)
        return PaddedDocuments(*(part[chosen] for part in parts))

    def norm(self, theta: Tensor) -> Tensor:
        """Σ_k θ_dk t_dwk ``[D, L]``, above 0; θ = exp ψ(γ) ``[D, K]``."""
        norm = torch.bmm(theta.unsqueeze(1), self.table.mT).squeeze(1)
        return norm.clamp_(min=torch.finfo(theta.dtype).tiny)

    def loglik(self, norm: Tensor) -> Tensor:
        """Σ_w n_dw log Σ_k exp(ψ(γ_dk) + E[log β_kw]), ``[D]``."""
        return (self.counts * (norm.log() + self.shift)).sum(1)

    def sites(self, theta: Tensor, norm: Tensor) -> Tensor:
        """n_dw φ_dwk, ``[D, L, K]``."""
        return (self.counts / norm).unsqueeze(-1) * self.table * theta.unsqueeze(1)


@dataclass(frozen=True)
class SameTopics:
    """Documents ``rows`` that all see q(β), ``[K, V]``."""

    counts: Counts
    rows: Tensor
    topics: Dirichlet

    @cached_property
    def seen(self) -> tuple[Tensor, Tensor]:
        """exp(E[log β] − s) ``[V, K]`` and s ``[V]``."""
        logs = self.topics.expectation["log"]
        shift = logs.amax(0)
        return (logs - shift).exp_().T.contiguous(), shift

    def blocks(self, chosen: Tensor) -> Iterator[PaddedDocuments]:
        """These documents, by their positions."""
        (table, shift), n_topics = self.seen, len(self.topics.concentration)
        for at, words, counts in self.counts.blocks(self.rows[chosen], n_topics):
            yield PaddedDocuments(
                chosen[at], words, counts, gather(table, words), gather(shift, words)
            )


def local_step(
    counts: Counts,
    rows: Tensor,
    topics: Dirichlet,
    prior: Dirichlet,
    *,
    start: Tensor | None = None,
    tol: float = 1e-3,
    max_iter: int = 100,
    expected: str | None = "sum",
) -> Local:
    """q(θ_d) and the responsibilities of these documents, by fixed point.

    Args:
        counts: all documents.
        rows: which ones, ``[D]``.
        topics: q(β), ``[K, V]``.
        prior: Dir(α) of the proportions, ``[K]``.
        start: γ ``[D, K]`` to begin from; ones if None.
        tol: a document is done when the entries of γ_d change by less than this on average.
        max_iter: the most turns for a document.
        expected: ``"sum"``, ``"each"`` (document) or None: the expected counts to return.
    """
    documents = SameTopics(counts, rows, topics)
    if start is None:
        start = topics.concentration.new_ones(len(rows), len(prior.concentration))
    gamma = settle(documents, start, prior, tol=tol, max_iter=max_iter)
    bound = _proportions_bound(gamma, counts.totals[rows], prior)
    each, (n_topics, n_words) = expected == "each", topics.concentration.shape
    told = gamma.new_zeros((len(gamma) if each else 1) * n_words, n_topics)
    for block in documents.blocks(torch.arange(len(gamma))):
        theta = exp_digamma(gamma[block.at])
        norm = block.norm(theta)
        bound[block.at] += block.loglik(norm)
        if expected is not None:
            place = block.words + n_words * block.at.unsqueeze(1) if each else block.words
            told.index_add_(0, place.flatten(), block.sites(theta, norm).flatten(0, 1))
    if expected is None:
        return Local(gamma, bound, None)
    return Local(gamma, bound, told.view(-1, n_words, n_topics).mT if each else told.mT)


def exp_digamma(x: Tensor) -> Tensor:
    """exp ψ(x)."""
    return x.digamma().exp_()


def _proportions_bound(gamma: Tensor, totals: Tensor, prior: Dirichlet) -> Tensor:
    """The part of the bound that the words of a document do not see, ``[D]``."""
    return -totals * gamma.sum(1).digamma() - Dirichlet(gamma).kl(prior)


def settle(
    documents: SameTopics, gamma: Tensor, prior: Dirichlet, *, tol: float, max_iter: int
) -> Tensor:
    """γ ``[D, K]`` at its fixed point; each document stops by itself."""
    gamma = gamma.clone()
    for block in documents.blocks(torch.arange(len(gamma))):
        for _ in range(max_iter):
            before = gamma[block.at]
            theta = exp_digamma(before)
            told = torch.bmm((block.counts / block.norm(theta)).unsqueeze(1), block.table)
            after = prior.concentration + theta * told.squeeze(1)
            gamma[block.at] = after
            moving = (after - before).abs().mean(1) >= tol
            if not bool(moving.any()):
                break
            if not bool(moving.all()):
                block = block.only(moving)
    return gamma


# How well topics foretell a document


@dataclass(frozen=True)
class OwnDocuments(PaddedDocuments):
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
class OwnTopics(SameTopics):
    """Documents that each see topics of their own: q(β), or q(β) less their site.

    λ_kw − n_dw φ_dwk is not let fall below the prior's η, to which the other documents only add.

    Attributes:
        prior: Dir(η).
        gamma: γ of the sites that are taken out, ``[D, K]``; None: nothing is.
    """

    prior: Dirichlet
    gamma: Tensor | None = None

    @cached_property
    def _known(self) -> tuple[Tensor, Tensor]:
        """λ, and η, or λ where that is less; ``[V, K]`` both."""
        known = self.topics.concentration.T.contiguous()
        return known, torch.minimum(known, self.prior.concentration.T)

    def blocks(self, chosen: Tensor) -> Iterator[OwnDocuments]:
        known, least = self._known
        totals = known.sum(0)
        for block in super().blocks(chosen):
            whole, every = gather(known, block.words), totals.expand(len(block.at), -1)
            if self.gamma is None:
                yield OwnDocuments(
                    **vars(block), known=whole, totals=every, withheld=every.new_zeros(1)
                )
                continue
            theta = exp_digamma(self.gamma[block.at])
            wanted = whole - block.sites(theta, block.norm(theta))
            left = torch.maximum(wanted, gather(least, block.words))
            every = every - (whole - left).sum(1)
            logs = left.digamma() - every.digamma().unsqueeze(1)
            shift = logs.amax(2)
            table = (logs - shift.unsqueeze(2)).exp_()
            withheld = (left - wanted).sum((1, 2))
            yield OwnDocuments(
                block.at, block.words, block.counts, table, shift, left, every, withheld
            )


def log_predictive(documents: OwnTopics, gamma: Tensor, prior: Dirichlet) -> Tensor:
    """The bound on log ∫ p(w_d | β) q(β) dβ at these γ ``[D, K]``, in nats, ``[D]``.

    Args:
        documents: with the topics that each of them sees.
        gamma: their fixed points.
        prior: Dir(α).
    """
    totals, withheld = documents.counts.totals[documents.rows], 0.0
    bound = _proportions_bound(gamma, totals, prior)
    for block in documents.blocks(torch.arange(len(gamma))):
        theta = exp_digamma(gamma[block.at])
        norm = block.norm(theta)
        sites, known = block.sites(theta, norm), block.known
        gain = lgamma_divergence(known + sites, known).sum((1, 2))
        gain -= lgamma_divergence(block.totals + sites.sum(1), block.totals).sum(1)
        bound[block.at] += block.loglik(norm) + gain
        withheld += float(block.withheld.sum())
    if withheld > WITHHELD * float(totals.sum()):
        warnings.warn(
            f"{withheld / float(totals.sum()):.1%} of the words cannot be taken out, as the topics "
            "are far from a fixed point; go on with fit(counts, batch_size=None, start=fitted.q)",
            NotConverged,
            stacklevel=3,
        )
    return bound
