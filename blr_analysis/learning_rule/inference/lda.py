"""Online latent Dirichlet allocation: stochastic variational inference as the rule.

The model has K topics β_k ~ Dir(η) over a vocabulary. Each document d has proportions θ_d ~ Dir(α)
of the topics, and each of its words has one topic. n_dw counts word w in document d. The factors of
a document, q(θ_d) = Dir(γ_d) and responsibilities φ, take steps with ρ = 1 until they stand still
(Hoffman, Blei and Bach, 2010, Algorithm 1):

    φ_dwk ∝ exp( E[log θ_dk] + E[log β_kw] ),      γ_dk = α + Σ_w n_dw φ_dwk

The topics q(β_k) = Dir(λ_k) take one step with ρ_t < 1 after every minibatch of B documents
(Hoffman et al., 2013; Khan & Rue, section 5.3):

    λ ← (1 − ρ_t) λ + ρ_t ( η + N/B Σ_{d∈batch} n_dw φ_dwk ),      ρ_t = (t + τ_0)^−κ

With B = N and ρ = 1 this is variational Bayes by coordinate ascent.

Given the responsibilities, the words of a document are conjugate to the topics. Then β can be
integrated out exactly, as in every conjugate model:

    log ∫ p(w_d | β) q(β) dβ  ≥  L_d(λ) + Σ_k KL( Dir(λ_k) ‖ Dir(λ_k + n_d φ_dk) )

L_d is the bound of the local step. It uses E_q[log β], which is far below log E_q[β] for words that
are rare in the topics; the second term makes up for that. Leave-one-out takes this bound at the
topics without the document, λ^{\\d} = λ − n_d φ_d.
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

BLOCK = 64  # documents that are computed at a time
START_SHAPE = 100.0  # of the Gamma distribution of random topics; scikit-learn's and Hoffman's


@dataclass(frozen=True)
class Documents:
    """D documents of a similar length, padded to L different words with counts of 0.

    Attributes:
        counts: n_dw ``[D, L]``.
        topic_factors: t_dwk = exp(E[log β_kw] − s_dw) ``[D, L, K]``.
        shift: s_dw, the largest E[log β_kw] over topics, ``[D, L]``. It avoids underflow and does
            not change φ, which is normalised for each word.
    """

    counts: Tensor
    topic_factors: Tensor
    shift: Tensor

    @classmethod
    def of(cls, counts: Tensor, expected_logs: Tensor) -> Documents:
        """Documents from n_dw ``[D, L]`` and E[log β_kw] ``[D, L, K]``."""
        shift = expected_logs.amax(2)
        topic_factors = (expected_logs - shift.unsqueeze(2)).exp_()
        return cls(counts, topic_factors, shift)

    def only(self, chosen: Tensor) -> Documents:
        """The documents that are chosen, by index or mask."""
        return Documents(self.counts[chosen], self.topic_factors[chosen], self.shift[chosen])

    def norm(self, theta: Tensor) -> Tensor:
        """The normaliser of φ, Σ_k θ_dk t_dwk ``[D, L]``, above 0; θ = exp ψ(γ) ``[D, K]``."""
        norm = torch.bmm(theta.unsqueeze(1), self.topic_factors.mT).squeeze(1)
        return norm.clamp_(min=torch.finfo(theta.dtype).tiny)

    def sites(self, gamma: Tensor) -> Tensor:
        """n_dw φ_dwk ``[D, L, K]``, from γ ``[D, K]``."""
        theta = gamma.digamma().exp_()
        count_by_norm = (self.counts / self.norm(theta)).unsqueeze(2)
        return count_by_norm * self.topic_factors * theta.unsqueeze(1)

    def bound(self, gamma: Tensor, prior: Dirichlet) -> Tensor:
        """E[log p(w_d, z_d, θ_d | β)] + H(q(θ_d, z_d)) at the best φ for γ, in nats ``[D]``."""
        theta = gamma.digamma().exp_()
        log_words = self.norm(theta).log() + self.shift
        log_words = log_words - gamma.sum(1, keepdim=True).digamma()
        return (self.counts * log_words).sum(1) - Dirichlet(gamma).kl(prior)


@dataclass(frozen=True)
class LDA(Model):
    """Latent Dirichlet allocation, by stochastic variational inference; in double precision.

    Priors, schedule and the end of the local step have the names and defaults of scikit-learn's
    ``LatentDirichletAllocation``.

    Attributes:
        n_topics: K.
        doc_topic_prior: α; 1/K if None.
        topic_word_prior: η; 1/K if None.
        learning_decay: κ of the schedule.
        learning_offset: τ_0 of the schedule.
        max_local_iter: the largest number of local iterations.
        local_tol: the local iterations of a document end when the mean change of γ_d over topics
            is smaller.

    Raises:
        InputError: a setting is out of range.

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
        """Dir(η) of all K topics, ``[K, V]`` with V = ``n_words``."""
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

        Each pass takes the documents in a new random order. The factors of a document start
        afresh in each pass, because those found under early topics are a poor start. Memory is
        bounded by the counts and λ ``[K, V]``.

        Args:
            counts: whole numbers ``[N, V]``: a SciPy sparse matrix, a tensor or an array.
            passes: the largest number of passes over the documents.
            batch_size: B. None takes all documents at once with ρ = 1. Then the ELBO rises, as long
                as the local iterations converge, and to the same factors as before.
            start: q(β) before the first step, such as the ``q`` of another fit; None draws it.
            tol: without minibatches, stop when the ELBO per word changes by at most this.
            seed: of the random start and of the order of documents.
            progress: whether to show a bar; None shows it on a terminal after a second.

        Returns:
            The topics. ``history`` is the ELBO per word after each pass, in nats. Every document
            is scored by the topics of its step, and the KL divergence is that of the last step.

        Raises:
            DataError: counts are negative, not whole or not finite, or a document has no words.
            InputError: an argument is out of range, or the start has another shape.
        """
        data = self.check(counts)
        n_documents = data.shape[0]
        prior = self.prior(data.shape[1])
        generator = torch.Generator().manual_seed(at_least(0, "seed", seed))
        q = _random_topics(prior, generator) if start is None else start
        q = self._in_vocabulary("start", q, prior)
        size = n_documents if batch_size is None else positive_int("batch_size", batch_size)
        n_words = float(data.sum())

        def one_pass(t: int) -> float:
            nonlocal q
            order = torch.randperm(n_documents, generator=generator)
            batches = order.split(size)
            first_step = t * len(batches) + 1
            rates = [self.rho(first_step + k) for k in range(len(batches))]
            q, elbo = self._pass(q, data, batches, [1.0] if batch_size is None else rates)
            return elbo / n_words

        noisy = batch_size is not None or tol == 0
        run = until_flat(one_pass, "ELBO", max_iter=passes, tol=tol, noisy=noisy, progress=progress)
        return FittedTopics(q=q, **run, prior=prior, model=self, data=data)

    def _pass(
        self, q: Dirichlet, data: Any, batches: Sequence[Tensor], rates: Sequence[float]
    ) -> tuple[Dirichlet, float]:
        """q(β) after one step on every minibatch, and the ELBO.

        A document's share of the ELBO is computed before the step of its minibatch; the divergence
        from the prior before the last step.
        """
        prior = self.prior(data.shape[1])
        n_documents = data.shape[0]
        bound = 0.0
        before = q
        for batch, rho in zip(batches, rates, strict=True):
            before = q
            site, bound_of_batch = self._summed(q, rows(data, batch))
            bound += bound_of_batch
            factor = n_documents / len(batch)
            q = toward(q, prior, {"log": factor * site}, rho)
        return q, bound - float(before.kl(prior).sum())

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
        words_in_document = np.diff(counts.indptr)
        empty = np.flatnonzero(words_in_document == 0)
        if len(empty) > 0:
            raise DataError(f"document {empty[0]} (of {len(empty)}) has no words: leave it out")
        return counts

    def step(
        self, q: Dirichlet, data: Any, *, n_documents: int | None = None, rho: float = 1.0
    ) -> Dirichlet:
        """q(β) after one step on one minibatch of a stream.

        Args:
            q: q(β) before the step, ``[K, V]``.
            data: the minibatch, ``[B, V]``.
            n_documents: N, the number of documents in the whole stream; None: ``data`` are all.
            rho: the learning rate ρ; :meth:`rho` computes that of the schedule.

        Raises:
            DataError: the errors of :meth:`fit`.
            InputError: q has another vocabulary, or an argument is out of range.
        """
        data = self.check(data)
        prior = self.prior(data.shape[1])
        factor = 1.0
        if n_documents is not None:
            factor = positive_int("n_documents", n_documents) / data.shape[0]
        q = self._in_vocabulary("q", q, prior)
        site, _ = self._summed(q, data)
        return toward(q, prior, {"log": factor * site}, rho)

    def sites(self, q: Dirichlet, data: Any) -> Natural:
        """n_dw φ_dwk of every document, a dense tensor ``[M, K, V]``."""
        sites = []
        for i in range(data.shape[0]):
            site, _ = self._summed(q, data[i : i + 1])
            sites.append(site)
        return {"log": torch.stack(sites)}

    def log_predictive(self, q: Dirichlet, data: Any) -> Tensor:
        """A lower bound on log ∫ p(w_d | β) q(β) dβ of each document, in nats ``[M]``.

        β is integrated out given the responsibilities, which makes the bound tighter than the one
        in scikit-learn's perplexity.
        """
        return self.predictive_bounds(q, data, without_itself=False)

    def predictive_bounds(self, q: Dirichlet, data: Any, *, without_itself: bool) -> Tensor:
        """The bound for each document, in nats ``[M]``.

        Args:
            q: q(β), ``[K, V]``.
            data: M documents.
            without_itself: each document is scored by λ − n_d φ_d, the topics without it.
        """
        bounds = q.concentration.new_zeros(data.shape[0])
        for places, words, documents in _blocks(q, data):
            word_parameters = q.concentration.mT[words]  # λ_kw, [D, L, K]
            totals = q.concentration.sum(1)  # Σ_w λ_kw, [K]
            gamma = self._local_fixed_point(documents)
            if without_itself:
                sites = documents.sites(gamma)
                word_parameters, totals = self._without_sites(word_parameters, totals, sites)
                expected_logs = word_parameters.digamma() - totals.digamma().unsqueeze(1)
                documents = Documents.of(documents.counts, expected_logs)
                gamma = self._local_fixed_point(documents)
            sites = documents.sites(gamma)
            gain_of_words = _gain(word_parameters, sites).sum((1, 2))
            gain_of_totals = _gain(totals, sites.sum(1)).sum(1)
            bound = documents.bound(gamma, self.document_prior())
            bounds[places] = bound + gain_of_words - gain_of_totals
        return bounds

    def _without_sites(
        self, word_parameters: Tensor, totals: Tensor, sites: Tensor
    ) -> tuple[Tensor, Tensor]:
        """λ_kw − n_dw φ_dwk ``[D, L, K]``, and their sums over the vocabulary ``[D, K]``.

        The difference is bounded from below by the prior's η, to which documents can only add.
        """
        eta = self.prior(2).concentration[0, 0]
        reduced = torch.maximum(word_parameters - sites, word_parameters.clamp(max=eta))
        removed = word_parameters - reduced
        return reduced, totals - removed.sum(1)

    def _summed(self, q: Dirichlet, data: Any) -> tuple[Tensor, float]:
        """Σ_d n_dw φ_dwk ``[K, V]`` of these documents, and the sum of their bounds, in nats."""
        site = torch.zeros_like(q.concentration.mT)
        bound = 0.0
        for _, words, documents in _blocks(q, data):
            gamma = self._local_fixed_point(documents)
            site.index_add_(0, words.flatten(), documents.sites(gamma).flatten(0, 1))
            bound += float(documents.bound(gamma, self.document_prior()).sum())
        return site.mT, bound

    def _local_fixed_point(self, documents: Documents) -> Tensor:
        """γ ``[D, K]`` after the local iterations, which start from ones.

        The iterations of each document end by themselves, so that its γ does not depend on the
        others.
        """
        alpha = self.document_prior().concentration
        moving = torch.arange(len(documents.counts))
        gamma = alpha.new_ones(len(moving), self.n_topics)
        for _ in range(self.max_local_iter):
            before = gamma[moving]
            theta = before.digamma().exp_()
            count_by_norm = (documents.counts / documents.norm(theta)).unsqueeze(1)
            expected_counts = theta * torch.bmm(count_by_norm, documents.topic_factors).squeeze(1)
            gamma[moving] = alpha + expected_counts
            still_moves = (gamma[moving] - before).abs().mean(1) >= self.local_tol
            if not bool(still_moves.any()):
                break
            if not bool(still_moves.all()):
                moving = moving[still_moves]
                documents = documents.only(still_moves)
        return gamma

    def _in_vocabulary(self, name: str, q: Any, prior: Dirichlet) -> Dirichlet:
        """q(β) in double precision; an InputError where its shape is not that of the prior."""
        sizes = [*prior.concentration.shape]
        instance(name, q, Dirichlet, f"a Dirichlet [K, V] = {sizes}, such as the q of a fit")
        if [*q.concentration.shape] != sizes:
            raise InputError(f"{name} must be [K, V] = {sizes}, got {[*q.concentration.shape]}")
        return Dirichlet(q.concentration.double())


def _refuse_numbers_that_are_no_counts(counts: Any) -> None:
    """Raise :class:`DataError` for the first stored entry that is no positive whole number."""
    numbers = counts.data
    with np.errstate(invalid="ignore"):
        is_count = np.isfinite(numbers) & (numbers > 0) & (numbers % 1 == 0)
    if is_count.all():
        return
    documents, _ = counts.tocoo().coords
    document = documents[~is_count][0]
    number = numbers[~is_count][0]
    raise DataError(f"a count of document {document} is no whole number from 0 up: {number}")


def _random_topics(prior: Dirichlet, generator: torch.Generator) -> Dirichlet:
    """Topics whose λ_kw are draws from Gamma(100, 1/100)."""
    shape = torch.full_like(prior.concentration, START_SHAPE)
    return Dirichlet(log_gamma_draw(shape, generator).exp() / START_SHAPE)


def _blocks(q: Dirichlet, data: Any) -> Iterator[tuple[Tensor, Tensor, Documents]]:
    """The documents in blocks of similar length.

    Yields:
        Which documents a block has ``[D]``, the columns of their words ``[D, L]``, and the block.
    """
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
    """log Γ(x + n) − log Γ(x) − n ψ(x), entry by entry: one term of KL(Dir(λ) ‖ Dir(λ + n φ))."""
    return torch.lgamma(x + n) - torch.lgamma(x) - n * x.digamma()


class FittedTopics(Fitted[Dirichlet]):
    """Fitted topics: ``q`` has one Dirichlet for each topic, ``[K, V]``; examples are documents.

    The site of a document is n_dw φ_dwk ``[K, V]``, with φ computed under the present topics. It
    is a dense tensor: where ``sites`` of all documents do not fit in memory, call ``site_of`` with
    a few documents.
    """

    note: ClassVar[str] = ONE_STEP

    def transform(self, counts: Any) -> Tensor:
        """E[θ_d] of further documents: their proportions of topics, ``[M, K]``.

        Raises:
            DataError: the errors of :meth:`LDA.fit`, or the counts have another vocabulary.
        """
        data = self.model.check(counts)
        gamma = self.q.concentration.new_ones(data.shape[0], self.model.n_topics)
        for places, _, documents in _blocks(self.q, data):
            gamma[places] = self.model._local_fixed_point(documents)
        return Dirichlet(gamma).mean

    def perplexity(self, counts: Any) -> float:
        """exp(−ELBO per word) of documents; lower is better. It equals scikit-learn's.

        The ELBO is the sum of the documents' bounds, less KL(q(β) ‖ p(β)) of all topics. The KL
        divergence does not grow with the number of documents, so that only perplexities of the
        same documents can be compared.

        Raises:
            DataError: the errors of :meth:`transform`.
        """
        data = self.model.check(counts)
        _, bound = self.model._summed(self.q, data)
        divergence = float(self.q.kl(self.prior).sum())  # type: ignore[arg-type]
        return math.exp((divergence - bound) / data.sum())

    def topics(self, vocabulary: Sequence[str], top: int = 10) -> TopicWords:
        """The most probable words of each topic.

        Args:
            vocabulary: the V words of the columns.
            top: the number of words for each topic.

        Raises:
            InputError: the vocabulary has another length.
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

        The factors of a document are computed afresh under the topics without it; the bound is
        that of :meth:`LDA.log_predictive`. Far from a fixed point λ − λ̃_d can be below the prior;
        then the prior is taken.
        """
        return self.model.predictive_bounds(self.q, self.data, without_itself=True)

    def _total(self, chosen: Tensor) -> Natural:
        """Σ_{d∈M} λ̃_d of these documents."""
        site, _ = self.model._summed(self.q, rows(self.data, chosen))
        return {"log": site}


@dataclass(frozen=True)
class TopicWords(Tabular):
    """The most probable words of topics; ``table`` has a row for each topic and word.

    Attributes:
        words: the words of each topic, the most probable first.
        probabilities: E[β_kw] of these words.
    """

    words: list[tuple[str, ...]]
    probabilities: list[tuple[float, ...]]

    def __str__(self) -> str:
        return "\n".join(f"{k:>3}  {' '.join(words)}" for k, words in enumerate(self.words))
