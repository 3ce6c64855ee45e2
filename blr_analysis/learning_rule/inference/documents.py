"""Documents of a topic model: counts, factors given the topics, and how well those foretell them.

Each document d has topic proportions θ_d ~ Dir(α), and each of its words a topic. Given the topics
q(β_k) = Dir(λ_k), the factors of a document are found by turning two updates of the rule with
ρ = 1 until they stand still (Hoffman, Blei and Bach, 2010, Algorithm 1):

    φ_dwk ∝ exp( E[log θ_dk] + E[log β_kw] ),      γ_dk = α + Σ_w n_dw φ_dwk

Documents turn together, in blocks of similar length that are padded to one length; those that
stand still leave.

Given its responsibilities, the words of a document are conjugate to the topics, so that β can be
integrated out exactly, as in every conjugate model:

    log ∫ p(w_d | β) q(β) dβ  ≥  L_d(λ) + Σ_k KL( Dir(λ_k) ‖ Dir(λ_k + n_d φ_dk) )

with L_d the bound of the local step, whose E_q[log β] is far below log E_q[β] for words that the
topics have hardly seen. Leave-one-out asks for it at λ^{\\d} = λ − n_d φ_d.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
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
TOGETHER = 1 << 21
"""Entries of the tables of words by topics that turn together."""
ROUND = 10
"""Turns before documents that stand still are sorted out, at first."""
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

    @property
    def sizes(self) -> Tensor:
        """Entries of each document's table, ``[D]``."""
        return self.counts.lengths[self.rows] * len(self.topics.concentration)

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
    bound, parts = _proportions_bound(gamma, counts.totals[rows], prior), []
    for block in documents.blocks(torch.arange(len(gamma))):
        norm = block.norm(exp_digamma(gamma[block.at]))
        bound[block.at] += block.loglik(norm)
        owner = block.at.unsqueeze(1).expand_as(block.words)
        parts.append([t.flatten() for t in (owner, block.words, block.counts / norm)])
    if expected is None:
        return Local(gamma, bound, None)
    # Σ_d n_dw φ_dwk, or its terms: n_dw / Σ_k exp(…) as a sparse matrix, times θ and the table
    owners, words, ratios = (torch.cat(part) for part in zip(*parts, strict=True))
    each, (n_topics, n_words) = expected == "each", topics.concentration.shape
    copies = len(gamma) if each else 1
    place = torch.stack([words + owners * n_words if each else words, owners])
    shape = (copies * n_words, len(gamma))
    spread = torch.sparse_coo_tensor(place, ratios, shape, check_invariants=False)
    told = (spread @ exp_digamma(gamma)).view(copies, n_words, n_topics) * documents.seen[0]
    return Local(gamma, bound, (told if each else told[0]).mT)


def _proportions_bound(gamma: Tensor, totals: Tensor, prior: Dirichlet) -> Tensor:
    """The part of the bound that the words of a document do not see, ``[D]``."""
    return -totals * gamma.sum(1).digamma() - Dirichlet(gamma).kl(prior)


def settle(
    documents: SameTopics, gamma: Tensor, prior: Dirichlet, *, tol: float, max_iter: int
) -> Tensor:
    """γ ``[D, K]`` at its fixed point; each document stops by itself.

    Documents that have not stopped after a round of turns go on in blocks of their own, so that
    the slowest of a block does not keep the others.
    """
    gamma = gamma.clone()
    for group in _together(documents.sizes):
        left, done = group, 0
        while len(left) and done < max_iter:
            turns = min(-(-max(ROUND, done) // 2) if done else ROUND, max_iter - done)
            blocks = list(documents.blocks(left))
            left = torch.cat([block.at for block in blocks])
            gamma[left], stopped = _turned(gamma[left], blocks, prior.concentration, tol, turns)
            left, done = left[~stopped], done + turns
    return gamma


def _together(sizes: Tensor) -> Iterable[Tensor]:
    """Documents by size, in groups of at most TOGETHER entries (or of one document)."""
    sizes, order = sizes.sort(stable=True)
    group = sizes.cumsum(0).sub_(sizes).div_(TOGETHER, rounding_mode="floor")
    return order.split(group.unique_consecutive(return_counts=True)[1].tolist())


def _turned(
    gamma: Tensor, blocks: list[PaddedDocuments], alpha: Tensor, tol: float, turns: int
) -> tuple[Tensor, Tensor]:
    """γ ``[D, K]`` where each document first stood still, or after all turns; and which did.

    Args:
        gamma: where to begin; documents in the order of the blocks.
        blocks: of these documents.
        alpha: ``[K]``.
        tol: see :func:`local_step`.
        turns: how many.
    """
    sizes = [len(block.at) for block in blocks]
    theta, pull = torch.empty_like(gamma), torch.empty_like(gamma)
    views = [
        (own.unsqueeze(1), b.table, b.table.mT, b.counts.unsqueeze(1), told.unsqueeze(1))
        for b, own, told in zip(blocks, theta.split(sizes), pull.split(sizes), strict=True)
    ]
    ratios = [torch.empty_like(number) for *_, number, _ in views]
    tiny = gamma.new_tensor(torch.finfo(gamma.dtype).tiny)
    path = [gamma]
    for _ in range(turns):
        exp_digamma(path[-1], out=theta)
        for (own, table, across, number, told), ratio in zip(views, ratios, strict=True):
            torch.baddbmm(tiny, own, across, out=ratio)
            torch.bmm(torch.div(number, ratio, out=ratio), table, out=told)
        path.append(torch.addcmul(alpha, theta, pull))
    walk = torch.stack(path, 1)
    moved = torch.linalg.vector_norm(walk.diff(dim=1), ord=1, dim=2)
    still = moved < tol * gamma.shape[1]  # [D, turns]
    stopped = still.any(1)
    first = torch.where(stopped, still.int().argmax(1), turns - 1)
    return walk[torch.arange(len(walk)), first + 1], stopped


_SERIES = (0.022897181972846164, -0.015158839645639192, 0.007039124803594481)
_SERIES += (-0.003942176645161984, 0.003552258776664932, -0.006423608894659648)
_SERIES += (0.041666666658187725, 1.0000000000000053)
_SMALL = 4096
_numbers = cache(lambda dtype: tuple(torch.tensor((-1.25, -1.0, *_SERIES), dtype=dtype)))


def exp_digamma(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """exp ψ(x) for x > 0, to 12 digits; faster than the two functions for many x.

    ψ(x) = ψ(x + 4) − Σ_{i<4} 1/(x + i), and exp ψ(z + ½) = z·(1 + 1/24z² + …), here by the
    polynomial in 1/z² through its values at the Chebyshev nodes of z ≥ 3½.
    """
    if x.numel() < _SMALL:
        return torch.exp(x.digamma(), out=out)
    shift, minus_one, series, *coefficients = _numbers(x.dtype)
    middle = x + 1.5
    v = torch.addcmul(shift, middle, middle)
    z = middle + 2
    poles = middle.mul_(v).div_(torch.addcmul(minus_one, v, v)).mul_(-4).exp_()
    w = torch.mul(z, z, out=v).reciprocal_()
    for c in coefficients:
        series = torch.addcmul(c, series, w)
    return torch.mul(series.mul_(z), poles, out=out)


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
