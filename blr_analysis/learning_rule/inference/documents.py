"""Counts of words in documents, and the local step of a topic model on them.

Each document d has topic proportions θ_d ~ Dir(α), and each of its words a topic. Given the topics
q(β_k) = Dir(λ_k), the factors of a document are found by turning two updates of the rule with
ρ = 1 until they stand still (Hoffman, Blei and Bach, 2010, Algorithm 1):

    φ_dwk ∝ exp( E[log θ_dk] + E[log β_kw] ),      γ_dk = α + Σ_w n_dw φ_dwk

Documents of similar length are padded to one length and turned together, in blocks that fit the
processor's cache; a document that stands still leaves its block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blr_analysis.errors import DataError
from blr_analysis.learning_rule.families.dirichlet import Dirichlet

BLOCK = 1 << 17
"""Entries of a block's table of words by topics; it is held twice."""
ROUND = 5
"""Turns before documents that stand still are sorted out, at first."""


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

    @cached_property
    def totals(self) -> Tensor:
        """Words of each document, ``[N]``."""
        return sums(self.starts, self.counts)

    @property
    def lengths(self) -> Tensor:
        """Entries of each document, ``[N]``."""
        return self.starts.diff()

    def blocks(self, rows: Tensor, n_topics: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Blocks of documents: positions in ``rows`` ``[D]``, words and counts ``[D, L]``.

        What is padded has the word 0 and the count 0.
        """
        lengths, order = self.lengths[rows].sort()
        sizes, begin = lengths.tolist(), 0
        while begin < len(sizes):
            end = begin + 1
            while end < len(sizes) and (end + 1 - begin) * sizes[end] * n_topics <= BLOCK:
                end += 1
            place = torch.arange(sizes[end - 1])
            entry = self.starts[rows[order[begin:end]]].unsqueeze(1) + place
            inside = place < lengths[begin:end].unsqueeze(1)
            entry = torch.where(inside, entry, 0)
            words, counts = _rows(self.words, entry), _rows(self.counts, entry)
            yield order[begin:end], words * inside, counts * inside
            begin = end


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
    logs = topics.expectation["log"]
    shift = logs.amax(0)
    table = (logs - shift).exp_().T.contiguous()  # [V, K]; φ does not see a word's own factor
    words = _Words(counts, rows, table)
    gamma = logs.new_ones(len(rows), len(logs)) if start is None else start
    gamma = settle(words, gamma, prior.concentration, tol=tol, max_iter=max_iter)
    loglik, ratios = words.read(gamma, shift)
    bound = loglik - counts.totals[rows] * gamma.sum(1).digamma() - Dirichlet(gamma).kl(prior)
    if expected is None:
        return Local(gamma, bound, None)
    return Local(gamma, bound, words.expected(gamma, ratios, each=expected == "each"))


Ratios = tuple[Tensor, Tensor, Tensor]
"""Documents ``[nnz]``, words and n_dw / Σ_k exp(…) of every entry of a few documents."""


@dataclass(frozen=True)
class _Words:
    """The words of some documents, with t_wk ∝ exp E[log β_kw] ``[V, K]``."""

    counts: Counts
    rows: Tensor
    table: Tensor

    def blocks(self, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Documents ``[D]``, words ``[D, L]``, their table ``[D, L, K]``, counts ``[D, L]``."""
        for at, words, number in self.counts.blocks(self.rows[chosen], self.table.shape[1]):
            yield chosen[at], words, _rows(self.table, words), number

    def read(self, gamma: Tensor, shift: Tensor) -> tuple[Tensor, Ratios]:
        """Σ_w n_dw log Σ_k exp(ψ(γ_dk) + E[log β_kw]) ``[D]``, and the ratios."""
        loglik, parts = gamma.new_empty(len(gamma)), []
        for at, words, near, number in self.blocks(torch.arange(len(gamma))):
            theta = gamma[at].digamma().exp_().unsqueeze(1)
            norm = _norm(theta, near.mT).squeeze(1)
            loglik[at] = (number * (norm.log() + shift[words])).sum(1)
            inside = number > 0
            owner = at.unsqueeze(1).expand_as(words)[inside]
            parts.append((owner, words[inside], (number / norm)[inside]))
        owners, slots, ratios = (torch.cat(part) for part in zip(*parts, strict=True))
        return loglik, (owners, slots, ratios)

    def expected(self, gamma: Tensor, ratios: Ratios, *, each: bool) -> Tensor:
        """Σ_d n_dw φ_dwk ``[K, V]``, or the terms ``[D, K, V]``."""
        (owners, slots, values), (n_words, n_topics) = ratios, self.table.shape
        copies = len(gamma) if each else 1
        place = torch.stack([slots + owners * n_words if each else slots, owners])
        shape = (copies * n_words, len(gamma))
        spread = torch.sparse_coo_tensor(place, values, shape, check_invariants=False)
        found = (spread @ gamma.digamma().exp_()).view(copies, n_words, n_topics) * self.table
        return (found if each else found[0]).mT


def settle(words: _Words, gamma: Tensor, alpha: Tensor, *, tol: float, max_iter: int) -> Tensor:
    """γ ``[D, K]`` at its fixed point; each document stops by itself.

    Documents that have not stopped after a round of turns go on in blocks of their own, so that
    the slowest of a block does not keep the others.
    """
    gamma, left, done = gamma.clone(), torch.arange(len(gamma)), 0
    while len(left) and done < max_iter:
        turns = min(max(ROUND, done // 2), max_iter - done)
        moving = []
        for at, _, near, number in words.blocks(left):
            gamma[at], stopped = turned(gamma[at], near, number, alpha, tol, turns)
            moving.append(at[~stopped])
        left, done = torch.cat(moving), done + turns
    return gamma


def turned(
    gamma: Tensor, table: Tensor, counts: Tensor, alpha: Tensor, tol: float, turns: int
) -> tuple[Tensor, Tensor]:
    """γ ``[D, K]`` where each document first stood still, or after all turns; and which did.

    Args:
        gamma: where to begin.
        table: exp E[log β] of each document's words, up to a factor per word, ``[D, L, K]``.
        counts: ``[D, L]``.
        alpha: ``[K]``.
        tol: see :func:`local_step`.
        turns: how many.
    """
    across, number = table.mT.contiguous(), counts.unsqueeze(1)
    path = [gamma.unsqueeze(1)]
    for _ in range(turns):
        theta = path[-1].digamma().exp_()
        ratio = number / _norm(theta, across)
        path.append(torch.addcmul(alpha, theta, torch.bmm(ratio, table)))
    walk = torch.cat(path, 1)
    still = walk.diff(dim=1).abs_().mean(2) < tol  # [D, turns]
    stopped = still.any(1)
    first = torch.where(stopped, still.int().argmax(1), turns - 1)
    return walk[torch.arange(len(walk)), first + 1], stopped


def _norm(theta: Tensor, across: Tensor) -> Tensor:
    """Σ_k θ_dk t_dkl ``[D, 1, L]``, above 0."""
    return torch.bmm(theta, across).clamp_(min=torch.finfo(theta.dtype).tiny)


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]``, by the faster way."""
    return table.index_select(0, index.flatten()).view(*index.shape, *table.shape[1:])


def read_counts(counts: Any, dtype: torch.dtype, n_words: int | None = None) -> Counts:
    """Sparse counts, checked.

    Args:
        counts: ``[N, V]``: anything with SciPy's ``tocsr()``, a tensor or an array.
        dtype: of the counts from here on.
        n_words: V, where it is known.

    Raises:
        DataError: no matrix, another vocabulary, counts that are negative, not whole or not
            finite, or a document without words.
    """
    starts, words, values, size = _compressed(counts)
    if n_words is not None and size != n_words:
        raise DataError(
            f"counts have {size} words, but the topics were fitted on a vocabulary of {n_words}: "
            "count words by that vocabulary, in its order"
        )
    owner = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    for wrong, what in (
        (~torch.isfinite(values), "not finite"),
        (values < 0, "negative"),
        (values != values.round(), "not a whole number"),
    ):
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise DataError(
                f"the count of word {int(words[first])} in document {int(owner[first])} is {what}: "
                f"{float(values[first])!r}"
            )
    empty = (sums(starts, values) == 0).nonzero().flatten()
    if len(empty):
        raise DataError(
            f"{len(empty)} documents have no words (the first is document {int(empty[0])}): leave "
            "them out, they say nothing about topics"
        )
    return Counts(starts, words, values.to(dtype), size)


def sums(starts: Tensor, values: Tensor) -> Tensor:
    """The sum of each row's entries, ``[N]``."""
    owner = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    return values.new_zeros(len(starts) - 1).index_add_(0, owner, values)


def _compressed(counts: Any) -> tuple[Tensor, Tensor, Tensor, int]:
    """Starts, words, counts and the vocabulary's size; copies of what the caller holds."""
    if hasattr(counts, "tocsr"):
        rows = counts.tocsr()
        shape = rows.shape
        starts, words = (
            torch.from_numpy(np.array(x, np.int64)) for x in (rows.indptr, rows.indices)
        )
        values = torch.from_numpy(np.array(rows.data, np.float64))
    else:
        matrix = counts if isinstance(counts, Tensor) else torch.as_tensor(np.asarray(counts))
        shape = matrix.shape
        if len(shape) != 2 or matrix.is_complex():
            raise DataError(f"counts must be a real matrix [N, V], got shape {tuple(shape)}")
        entries = matrix.detach().cpu().to_sparse_coo().coalesce()
        owner, words = entries.indices()
        starts = torch.cat([owner.new_zeros(1), owner.bincount(minlength=shape[0]).cumsum(0)])
        values = entries.values().double()
    if not shape[0] or shape[1] < 2:
        raise DataError(f"counts need a document and two words or more, got shape {tuple(shape)}")
    return starts, words, values, int(shape[1])
