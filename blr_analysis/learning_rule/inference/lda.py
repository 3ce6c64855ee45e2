"""Online latent Dirichlet allocation: stochastic variational inference as the rule.

Topics β_k ~ Dir(η) over a vocabulary, proportions θ_d ~ Dir(α) of each document, a topic for each
word. The local factors take steps with ρ = 1 until they stand still (Hoffman, Blei and Bach, 2010,
Algorithm 1),

    φ_dwk ∝ exp( E[log θ_dk] + E[log β_kw] ),      γ_dk = α + Σ_w n_dw φ_dwk

and the topics q(β_k) = Dir(λ_k) one step with ρ_t < 1 after every minibatch of B documents (Hoffman
et al., 2013; Khan & Rue, section 5.3):

    λ ← (1 − ρ_t) λ + ρ_t ( η + N/B Σ_{d∈batch} n_dw φ_dwk ),      ρ_t = (t + τ_0)^−κ

With B = N and ρ = 1 that is variational Bayes by coordinate ascent.

Given its responsibilities, the words of a document are conjugate to the topics, so that β can be
integrated out exactly, as in every conjugate model:

    log ∫ p(w_d | β) q(β) dβ  ≥  L_d(λ) + Σ_k KL( Dir(λ_k) ‖ Dir(λ_k + n_d φ_dk) )

with L_d the bound of the local step, whose E_q[log β] is far below log E_q[β] for words that the
topics have hardly seen. Leave-one-out asks for it at λ^{\\d} = λ − n_d φ_d.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from blr_analysis.checks import at_least, instance, positive_int, positive_number, share
from blr_analysis.errors import DataError, InputError, told_as
from blr_analysis.learning_rule.families.base import Natural
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.families.drawing import log_gamma_draw
from blr_analysis.learning_rule.inference.conjugate import toward
from blr_analysis.learning_rule.inference.fitted import (
    ONE_STEP,
    Fitted,
    Model,
    rows,
    until_flat,
)
from blr_analysis.views import Tabular

BLOCK = 64  # documents


@dataclass(frozen=True)
class Documents:
    """D documents of a similar length, padded to L words; where padded, counts are 0.

    Attributes:
        counts: n_dw ``[D, L]``.
        table: exp(E[log β_kw] − s_dw) ``[D, L, K]``.
        shift: s_dw, the largest of E[log β_kw], ``[D, L]``: φ does not see a word's own factor.
    """

    counts: Tensor
    table: Tensor
    shift: Tensor

    @classmethod
    def of(cls, counts: Tensor, logs: Tensor) -> Documents:
        """From E[log β_kw] ``[D, L, K]``."""
        shift = logs.amax(2)
        return cls(counts, (logs - shift.unsqueeze(2)).exp_(), shift)

    def only(self, chosen: Tensor) -> Documents:
        """Those of ``chosen``."""
        return Documents(self.counts[chosen], self.table[chosen], self.shift[chosen])

    def norm(self, theta: Tensor) -> Tensor:
        """Σ_k θ_dk t_dwk ``[D, L]``, above 0; θ = exp ψ(γ) ``[D, K]``."""
        norm = torch.bmm(theta.unsqueeze(1), self.table.mT).squeeze(1)
        return norm.clamp_(min=torch.finfo(theta.dtype).tiny)

    def sites(self, gamma: Tensor) -> Tensor:
        """n_dw φ_dwk ``[D, L, K]``."""
        theta = gamma.digamma().exp_()
        shares = (self.counts / self.norm(theta)).unsqueeze(2)
        return shares * self.table * theta.unsqueeze(1)

    def bound(self, gamma: Tensor, prior: Dirichlet) -> Tensor:
        """E[log p(w_d, z_d, θ_d | β)] + H(q(θ_d, z_d)) at φ's optimum, in nats ``[D]``."""
        log_words = self.norm(gamma.digamma().exp_()).log() + self.shift
        log_words = log_words - gamma.sum(1, keepdim=True).digamma()
        return (self.counts * log_words).sum(1) - Dirichlet(gamma).kl(prior)


@dataclass(frozen=True)
class LDA(Model):
    """Latent Dirichlet allocation, by stochastic variational inference; in double precision.

    Priors, schedule and stopping of the local step are those of scikit-learn's
    ``LatentDirichletAllocation``, by its names and defaults.

    Attributes:
        n_topics: K.
        doc_topic_prior: α; 1/K if None.
        topic_word_prior: η; 1/K if None.
        learning_decay: κ of the schedule.
        learning_offset: τ_0 of the schedule.
        max_local_iter: the most turns of the local step.
        local_tol: it stops for a document when γ_d changes by less than this, on average.

    Raises:
        InputError: a setting out of its range.

    Example:
        >>> counts = torch.tensor([[3, 2, 0, 0], [2, 3, 0, 0], [0, 0, 4, 1], [0, 0, 1, 5]])
        >>> fitted = LDA(n_topics=2).fit(counts, passes=20, batch_size=None, progress=False)
        >>> sorted(fitted.topics(["cat", "dog", "sun", "moon"], top=2).words)
        [('dog', 'cat'), ('moon', 'sun')]
    """

    n_topics: int
    doc_topic_prior: float | None = None
    topic_word_prior: float | None = None
    learning_decay: float = 0.7
    learning_offset: float = 10.0
    max_local_iter: int = 100
    local_tol: float = 1e-3

    def __post_init__(self) -> None:
        at_least(2, "n_topics", self.n_topics)  # one topic is a word count
        positive_int("max_local_iter", self.max_local_iter)
        positive_number("learning_offset", self.learning_offset)
        positive_number("local_tol", self.local_tol)
        if self.doc_topic_prior is not None:
            positive_number("doc_topic_prior", self.doc_topic_prior)
        if self.topic_word_prior is not None:
            positive_number("topic_word_prior", self.topic_word_prior)
        share("learning_decay", self.learning_decay)

    def prior(self, n_words: int) -> Dirichlet:
        """Dir(η), a copy for each topic."""
        eta = self.topic_word_prior or 1 / self.n_topics
        return Dirichlet(torch.full((self.n_topics, n_words), eta, dtype=torch.float64))

    def document_prior(self) -> Dirichlet:
        """Dir(α)."""
        alpha = self.doc_topic_prior or 1 / self.n_topics
        return Dirichlet(torch.full((self.n_topics,), alpha, dtype=torch.float64))

    def rho(self, step: int) -> float:
        """ρ_t = (t + τ_0)^−κ of the t-th step, t = 1, 2, …"""
        return (positive_int("step", step) + self.learning_offset) ** -self.learning_decay

    def fit(
        self,
        counts: Any,
        *,
        passes: int = 10,
        batch_size: int | None = 256,
        start: Dirichlet | None = None,
        tol: float = 0.0,
        seed: int = 0,
        progress: bool | None = None,
    ) -> FittedTopics:
        """q(β) from the counts of words in documents.

        Documents come in a new random order in each pass, and their factors start afresh: where
        early topics led them is a poor place to go on from. Memory is bounded by the counts and
        λ ``[K, V]``.

        Args:
            counts: whole numbers ``[N, V]``: a SciPy sparse matrix, a tensor or an array.
            passes: how often each document is seen, at most.
            batch_size: B. None for all documents at once with ρ = 1, where the ELBO rises as far
                as the local step goes to its end, and documents do not come to rest elsewhere.
            start: q(β) to begin from, such as that of another fit; random if None.
            tol: without minibatches, stop when the ELBO per word changes by at most this.
            seed: of the random start and of the order of documents.
            progress: show a bar (None: on a terminal).

        Returns:
            The topics. ``history`` is the ELBO per word after each pass, in nats, with every
            document scored when it was met and the topics as they were last.

        Raises:
            DataError: counts that are negative, not whole, not finite, or a document without
                words.
            InputError: an argument out of range, or a start of another shape.
        """
        data = self.check(counts)
        prior = self.prior(data.shape[1])
        generator = torch.Generator().manual_seed(at_least(0, "seed", seed))
        if start is None:
            start = _random_topics(prior, generator)
        q = self._alike("start", start, prior)
        if batch_size is not None:
            positive_int("batch_size", batch_size)
        n_words = float(data.sum())

        def one_pass(t: int) -> float:
            nonlocal q
            order = torch.randperm(data.shape[0], generator=generator)
            batches = order.split(batch_size or len(order))
            first = t * len(batches) + 1
            numbers = range(first, first + len(batches))
            rates = [1.0 if batch_size is None else self.rho(number) for number in numbers]
            q, elbo = self._pass(q, data, batches, rates)
            return elbo / n_words

        noisy = batch_size is not None or tol == 0
        run = until_flat(one_pass, "ELBO", max_iter=passes, tol=tol, noisy=noisy, progress=progress)
        return FittedTopics(q=q, **run, prior=prior, model=self, data=data)

    def _pass(
        self, q: Dirichlet, data: Any, batches: Sequence[Tensor], rates: Sequence[float]
    ) -> tuple[Dirichlet, float]:
        """q(β) after a step on every minibatch, and the ELBO, with the topics as they were last."""
        prior = self.prior(data.shape[1])
        n_documents = data.shape[0]
        bound = 0.0
        scored_by = q
        for batch, rho in zip(batches, rates, strict=True):
            scored_by = q
            site, bound_of_batch = self._summed(q, rows(data, batch))
            bound += bound_of_batch
            q = toward(q, prior, {"log": n_documents / len(batch) * site}, rho)
        return q, bound - float(scored_by.kl(prior).sum())

    def check(self, data: Any) -> Any:
        """The counts as a sparse matrix, a copy; see :meth:`fit`."""
        if isinstance(data, Tensor):
            data = data.detach().cpu().to_dense().numpy()
        with told_as(DataError, "counts must be a real matrix [N, V], as CountVectorizer's"):
            counts: Any = csr_array(data, dtype=np.float64, copy=True)
        if counts.ndim != 2 or counts.shape[0] == 0 or counts.shape[1] < 2:
            raise DataError(f"counts need a document and two words or more, got {counts.shape}")
        counts.sum_duplicates()
        counts.eliminate_zeros()
        _refuse_numbers_that_are_no_counts(counts)
        empty = np.flatnonzero(np.diff(counts.indptr) == 0)
        if len(empty):
            raise DataError(f"document {empty[0]} (of {len(empty)}) has no words: leave it out")
        return counts

    def step(
        self, q: Dirichlet, data: Any, *, n_documents: int | None = None, rho: float = 1.0
    ) -> Dirichlet:
        """One step on one minibatch of a stream: q(β) after it.

        Args:
            q: q(β) so far, ``[K, V]``.
            data: the minibatch, ``[B, V]``.
            n_documents: N, documents in the whole stream; None: these are all.
            rho: the learning rate; :meth:`rho` is the schedule.

        Raises:
            DataError: as :meth:`fit`, or another vocabulary.
        """
        data = self.check(data)
        prior = self.prior(data.shape[1])
        ratio = 1.0
        if n_documents is not None:
            ratio = positive_int("n_documents", n_documents) / data.shape[0]
        q = self._alike("q", q, prior)
        site, _ = self._summed(q, data)
        return toward(q, prior, {"log": ratio * site}, rho)

    def sites(self, q: Dirichlet, data: Any) -> Natural:
        """n_dw φ_dwk of every document, ``[M, K, V]``: dense."""
        sites = []
        for i in range(data.shape[0]):
            site, _ = self._summed(q, data[i : i + 1])
            sites.append(site)
        return {"log": torch.stack(sites)}

    def log_predictive(self, q: Dirichlet, data: Any) -> Tensor:
        """A lower bound on log ∫ p(w_d | β) q(β) dβ of each document, with β integrated out given
        the responsibilities: tighter than that behind scikit-learn's perplexity."""
        return self.foretold(q, data, without=False)

    def foretold(self, q: Dirichlet, data: Any, *, without: bool) -> Tensor:
        """The bound for each document under q(β), or under λ − n_d φ_d.

        λ_kw − n_dw φ_dwk stays at or above the prior's η, to which the other documents only add.
        """
        smallest = self.prior(2).concentration[0, 0]
        bounds = q.concentration.new_zeros(data.shape[0])
        for places, words, documents in _blocks(q, data):
            of_words = q.concentration.mT[words]  # λ_kw, [D, L, K]
            totals = q.concentration.sum(1)
            gamma = self._settled(documents)
            if without:
                reduced = of_words - documents.sites(gamma)
                reduced = torch.maximum(reduced, of_words.clamp(max=smallest))
                totals = totals - (of_words - reduced).sum(1)
                of_words = reduced
                logs = of_words.digamma() - totals.digamma().unsqueeze(1)
                documents = Documents.of(documents.counts, logs)
                gamma = self._settled(documents)
            sites = documents.sites(gamma)
            gain = _gain(of_words, sites).sum((1, 2)) - _gain(totals, sites.sum(1)).sum(1)
            bounds[places] = documents.bound(gamma, self.document_prior()) + gain
        return bounds

    def _summed(self, q: Dirichlet, data: Any) -> tuple[Tensor, float]:
        """Σ_d n_dw φ_dwk ``[K, V]`` of these documents, and the sum of their bounds."""
        site = torch.zeros_like(q.concentration.mT)
        bound = 0.0
        for _, words, documents in _blocks(q, data):
            gamma = self._settled(documents)
            site.index_add_(0, words.flatten(), documents.sites(gamma).flatten(0, 1))
            bound += float(documents.bound(gamma, self.document_prior()).sum())
        return site.mT, bound

    def _settled(self, documents: Documents) -> Tensor:
        """γ ``[D, K]`` at its fixed point, from ones; each document stops by itself."""
        alpha = self.document_prior().concentration
        moving = torch.arange(len(documents.counts))
        gamma = alpha.new_ones(len(moving), self.n_topics)
        for _ in range(self.max_local_iter):
            before = gamma[moving]
            theta = before.digamma().exp_()
            weights = (documents.counts / documents.norm(theta)).unsqueeze(1)
            gamma[moving] = alpha + theta * torch.bmm(weights, documents.table).squeeze(1)
            still_moves = (gamma[moving] - before).abs().mean(1) >= self.local_tol
            if not bool(still_moves.any()):
                break
            if not bool(still_moves.all()):
                moving = moving[still_moves]
                documents = documents.only(still_moves)
        return gamma

    def _alike(self, name: str, q: Any, prior: Dirichlet) -> Dirichlet:
        """q(β) in double precision; :class:`InputError` where it is another vocabulary's."""
        sizes = [*prior.concentration.shape]
        instance(name, q, Dirichlet, f"a Dirichlet [K, V] = {sizes}, such as the q of a fit")
        if [*q.concentration.shape] != sizes:
            raise InputError(f"{name} must be [K, V] = {sizes}, got {[*q.concentration.shape]}")
        return Dirichlet(q.concentration.double())


def _refuse_numbers_that_are_no_counts(counts: Any) -> None:
    """Raise :class:`DataError` for the first entry that is no whole number."""
    with np.errstate(invalid="ignore"):
        is_count = np.isfinite(counts.data) & (counts.data > 0) & (counts.data % 1 == 0)
    if is_count.all():
        return
    document = counts.tocoo().coords[0][~is_count][0]
    number = counts.data[~is_count][0]
    raise DataError(f"a count of document {document} is no whole number from 0 up: {number}")


def _random_topics(prior: Dirichlet, generator: torch.Generator) -> Dirichlet:
    """Every λ_kw from Gamma(100, 1/100), as scikit-learn and Hoffman draw them."""
    hundreds = torch.full_like(prior.concentration, 100.0)
    return Dirichlet(log_gamma_draw(hundreds, generator).exp() / 100)


def _blocks(q: Dirichlet, data: Any) -> Iterator[tuple[Tensor, Tensor, Documents]]:
    """Documents of similar length together: their places ``[D]``, their words ``[D, L]``, and the
    documents."""
    if data.shape[1] != q.concentration.shape[-1]:
        raise DataError(
            f"counts have {data.shape[1]} words, the topics a vocabulary of "
            f"{q.concentration.shape[-1]}: count by it"
        )
    logs = q.expectation["log"].mT.contiguous()
    lengths = np.diff(data.indptr)
    by_length = np.argsort(lengths, kind="stable")
    n_blocks = math.ceil(len(lengths) / BLOCK)
    for places in np.array_split(by_length, n_blocks):
        longest = lengths[places[-1]]
        position = np.arange(longest)
        is_word = position < lengths[places][:, None]
        entry = np.where(is_word, data.indptr[places][:, None] + position, 0)
        words = torch.from_numpy(data.indices[entry]).long()
        counts = torch.from_numpy(np.where(is_word, data.data[entry], 0.0))
        yield torch.from_numpy(places), words, Documents.of(counts, logs[words])


def _gain(x: Tensor, n: Tensor) -> Tensor:
    """log Γ(x + n) − log Γ(x) − n ψ(x)."""
    return torch.lgamma(x + n) - torch.lgamma(x) - n * x.digamma()


class FittedTopics(Fitted[Dirichlet]):
    """Topics: ``q`` has a copy for each, ``[K, V]``; examples are documents.

    A document's site is n_dw φ_dwk ``[K, V]``, with φ found anew under the topics as they are. It
    is dense: ask ``site_of`` for few documents where ``sites`` of all would not fit in memory.
    """

    note: ClassVar[str] = ONE_STEP

    def transform(self, counts: Any) -> Tensor:
        """E[θ_d] of further documents: their proportions of topics, ``[M, K]``.

        Raises:
            DataError: as :meth:`LDA.fit`, or another vocabulary than the one fitted.
        """
        data = self.model.check(counts)
        gamma = self.q.concentration.new_ones(data.shape[0], self.model.n_topics)
        for places, _, documents in _blocks(self.q, data):
            gamma[places] = self.model._settled(documents)
        return Dirichlet(gamma).mean

    def perplexity(self, counts: Any) -> float:
        """exp(−ELBO per word) of documents, scikit-learn's ``perplexity``; lower is better.

        The ELBO is that of these documents alone: the sum of their bounds, less KL(q(β) ‖ p(β))
        of all topics. That last term does not depend on the documents: few of them make it weigh
        more, so that perplexities can be compared on the same documents only.

        Raises:
            DataError: as :meth:`transform`.
        """
        data = self.model.check(counts)
        _, bound = self.model._summed(self.q, data)
        divergence = float(self.q.kl(self.prior).sum())  # type: ignore[arg-type]
        return math.exp((divergence - bound) / data.sum())

    def topics(self, vocabulary: Sequence[str], top: int = 10) -> TopicWords:
        """The most probable words of each topic.

        Args:
            vocabulary: the words of the columns, V of them.
            top: how many words.

        Raises:
            InputError: a vocabulary of another length.
        """
        names = [*map(str, vocabulary)]
        n_words = self.q.concentration.shape[-1]
        if len(names) != n_words:
            raise InputError(f"vocabulary must be {n_words} words, got {len(names)}")
        n_top = min(positive_int("top", top), n_words)
        probabilities, words = self.q.mean.topk(n_top, -1)
        return TopicWords(
            words=[tuple(names[i] for i in topic) for topic in words.tolist()],
            probabilities=[tuple(topic) for topic in probabilities.tolist()],
        )

    def left_out(self) -> Tensor:
        """A lower bound on log p(w_d | λ − λ̃_d) of every document, in nats ``[N]``.

        The documents' factors are found afresh under the topics without them; the bound is that
        of :meth:`LDA.log_predictive`. Where topics hold less of a word than a document accounts
        for, which happens far from a fixed point, the prior stays.
        """
        return self.model.foretold(self.q, self.data, without=True)

    def _total(self, chosen: Tensor) -> Natural:
        site, _ = self.model._summed(self.q, rows(self.data, chosen))
        return {"log": site}


@dataclass(frozen=True)
class TopicWords(Tabular):
    """Words of topics, the most probable first; ``table`` has a row for each topic and word.

    Attributes:
        words: for each topic.
        probabilities: E[β_kw] of the same.
    """

    words: list[tuple[str, ...]]
    probabilities: list[tuple[float, ...]]

    def __str__(self) -> str:
        return "\n".join(f"{k:>3}  {' '.join(words)}" for k, words in enumerate(self.words))
