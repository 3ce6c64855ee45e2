"""Online latent Dirichlet allocation: stochastic variational inference as the rule.

Topics β_k ~ Dir(η) over a vocabulary, proportions θ_d ~ Dir(α) of each document, a topic for each
word. The local factors take steps with ρ = 1 until they stand still; the topics q(β_k) = Dir(λ_k)
take one step with ρ_t < 1 after every minibatch of B documents (Hoffman, Blei and Bach, 2010;
Hoffman et al., 2013; Khan & Rue, section 5.3):

    λ ← (1 − ρ_t) λ + ρ_t ( η + N/B Σ_{d∈batch} n_dw φ_dwk ),      ρ_t = (t + τ_0)^−κ

With B = N and ρ = 1 that is variational Bayes by coordinate ascent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.checks import at_least, instance, positive_int, positive_number, tolerance
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import Natural, add, scale, subtract
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.families.drawing import log_gamma_draw
from blr_analysis.learning_rule.inference.documents import (
    Counts,
    Local,
    OwnTopics,
    SameTopics,
    local_step,
    log_predictive,
    read_counts,
    settle,
)
from blr_analysis.learning_rule.inference.fitted import CHUNK, ONE_STEP, Fitted, Sites
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.progress import track
from blr_analysis.views import Tabular

Passes = Iterator[tuple[Dirichlet, Tensor, float]]
"""q(β), γ and the ELBO after each pass."""


@dataclass(frozen=True)
class LDA:
    """Latent Dirichlet allocation, by stochastic variational inference.

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
        dtype: of all computation.

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
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        at_least(2, "n_topics", self.n_topics)  # one topic is a word count
        positive_int("max_local_iter", self.max_local_iter)
        for name in ("doc_topic_prior", "topic_word_prior"):
            if getattr(self, name) is not None:
                positive_number(name, getattr(self, name))
        positive_number("local_tol", self.local_tol)
        if tolerance("learning_decay", self.learning_decay) > 1:
            raise InputError(f"learning_decay must lie in [0, 1], got {self.learning_decay!r}")
        tolerance("learning_offset", self.learning_offset)
        if self.dtype not in (torch.float32, torch.float64):
            raise InputError(f"dtype must be torch.float32 or torch.float64, got {self.dtype}")

    def prior(self, n_words: int) -> Dirichlet:
        """Dir(η), a copy for each topic."""
        eta = 1 / self.n_topics if self.topic_word_prior is None else self.topic_word_prior
        return Dirichlet(torch.full((self.n_topics, n_words), eta, dtype=self.dtype))

    def document_prior(self) -> Dirichlet:
        """Dir(α)."""
        alpha = 1 / self.n_topics if self.doc_topic_prior is None else self.doc_topic_prior
        return Dirichlet(torch.full((self.n_topics,), alpha, dtype=self.dtype))

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
        early topics led them is a poor place to go on from. Memory is bounded by the counts,
        γ ``[N, K]`` and λ ``[K, V]``.

        Args:
            counts: whole numbers ``[N, V]``: a SciPy sparse matrix, a tensor (dense or sparse) or
                an array.
            passes: how often each document is seen, at most.
            batch_size: B. None for all documents at once with ρ = 1, where the ELBO never falls.
            start: q(β) to begin from, such as that of another fit; random if None.
            tol: stop when the ELBO per word changes by at most this from one pass to the next.
            seed: of the random start and of the order of documents.
            progress: show a bar (None: on a terminal).

        Returns:
            The topics. ``history`` is the ELBO per word after each pass, in nats: exact where
            ``batch_size`` is None (with the topics that the local step saw), otherwise with
            every document scored when it was met and the topics as they were last.

        Raises:
            DataError: counts that are negative, not whole, not finite, or a document without
                words.
            InputError: an argument out of range, or a start of another shape.
        """
        data = read_counts(counts, self.dtype)
        passes, n_data = positive_int("passes", passes), len(data)
        tolerance("tol", tol)
        at_least(0, "seed", seed)
        generator, prior = torch.Generator().manual_seed(seed), self.prior(data.n_words)
        if start is None:  # every λ_kw from Gamma(100, 1/100), as scikit-learn's and Hoffman's
            hundreds = torch.full_like(prior.concentration, 100.0)
            q = Dirichlet(log_gamma_draw(hundreds, generator).exp() / 100)
        else:
            q = _alike("start", start, prior)
        if batch_size is None:
            shown = track(range(passes), label="topics", show=progress)
            turns = self._ascent(data, q, prior, shown)
        else:
            size = positive_int("batch_size", batch_size)
            orders = (torch.randperm(n_data, generator=generator) for _ in range(passes))
            batches = (batch for order in orders for batch in order.split(size))
            total = passes * -(-n_data // size)
            shown = track(batches, total=total, label="topics", show=progress)
            turns = self._stochastic(data, q, prior, shown)
        words, history, gamma, flat = float(data.totals.sum()), [], q.concentration, False
        for q, gamma, elbo in turns:  # noqa: B007
            history.append(elbo / words)
            flat = len(history) > 1 and abs(history[-1] - history[-2]) <= tol
            if flat:
                break

        def site_of(chosen: Tensor) -> Natural:
            local = self.local(data, chosen, q, start=gamma[chosen], expected="each")
            return {"log": local.expected}  # type: ignore[dict-item]

        return FittedTopics(
            q=q,
            history=history,
            objective="ELBO",
            prior=prior,
            n_data=n_data,
            site_of=site_of,
            predictive=self.log_predictive,
            data=data,
            converged=flat,
            step=lambda q, data, kept: _moved(q, prior, self.local(data, kept, q), 1.0, 1.0),
            model=self,
            documents=Dirichlet(gamma),
        )

    def _stochastic(
        self, data: Counts, q: Dirichlet, prior: Dirichlet, batches: Iterable[Tensor]
    ) -> Passes:
        """Steps with ρ_t on minibatches, each pass over all documents in some order."""
        gamma = prior.concentration.new_ones(len(data), self.n_topics)
        bound, seen = 0.0, 0
        for step, batch in enumerate(batches, start=1):
            local = self.local(data, batch, q)
            gamma[batch] = local.gamma
            bound, seen = bound + float(local.bound.sum()), seen + len(batch)
            last, q = q, _moved(q, prior, local, len(data) / len(batch), self.rho(step))
            if seen == len(data):
                yield q, gamma, bound - float(last.kl(prior).sum())
                bound, seen = 0.0, 0

    def _ascent(
        self, data: Counts, q: Dirichlet, prior: Dirichlet, passes: Iterable[int]
    ) -> Passes:
        """Coordinate ascent: ρ = 1, all documents in each step.

        Documents start afresh until that would lower the ELBO; from then on, where they were.
        """
        rows, start, gamma, highest = torch.arange(len(data)), None, None, -math.inf
        for _ in passes:
            penalty = float(q.kl(prior).sum())
            local = self.local(data, rows, q, start=start)
            if start is None and float(local.bound.sum()) - penalty < highest:
                local = self.local(data, rows, q, start=gamma)
                start = gamma
            highest, gamma = float(local.bound.sum()) - penalty, local.gamma
            start = None if start is None else gamma
            q = _moved(q, prior, local, 1.0, 1.0)
            yield q, gamma, highest

    def step(self, q: Dirichlet, counts: Any, *, n_documents: int, rho: float) -> Dirichlet:
        """One step on one minibatch of a stream: q(β) after it.

        Args:
            q: q(β) so far, ``[K, V]``.
            counts: the minibatch, ``[B, V]``.
            n_documents: N, documents in the whole stream.
            rho: the learning rate; :meth:`rho` is the schedule.

        Raises:
            DataError: as :meth:`fit`, or another vocabulary.
        """
        data = read_counts(counts, self.dtype)
        prior = self.prior(data.n_words)
        q = _alike("q", q, prior)
        local = self.local(data, torch.arange(len(data)), q)
        ratio = positive_int("n_documents", n_documents) / len(data)
        return _moved(q, prior, local, ratio, rho)

    def local(
        self,
        data: Counts,
        rows: Tensor,
        q: Dirichlet,
        *,
        start: Tensor | None = None,
        expected: str | None = "sum",
    ) -> Local:
        """The local step for these documents, with the settings of this model."""
        return local_step(
            data,
            rows,
            q,
            self.document_prior(),
            start=start,
            tol=self.local_tol,
            max_iter=self.max_local_iter,
            expected=expected,
        )

    def log_predictive(self, q: Dirichlet, counts: Any) -> Tensor:
        """A lower bound on log ∫ p(w_d | β) q(β) dβ of each document, in nats, ``[M]``.

        The bound of the local step, behind scikit-learn's perplexity, with β integrated out given
        the responsibilities, which makes it tighter:

            L_d(λ) + Σ_k KL( Dir(λ_k) ‖ Dir(λ_k + n_d φ_dk) )

        Raises:
            DataError: as :meth:`fit`, or another vocabulary.
        """
        data = read_counts(counts, self.dtype, n_words=q.concentration.shape[-1])
        rows = torch.arange(len(data))
        gamma = self.local(data, rows, q, expected=None).gamma
        documents = OwnTopics(data, rows, q, self.prior(data.n_words))
        return log_predictive(documents, gamma, self.document_prior())


def _moved(q: Dirichlet, prior: Dirichlet, local: Local, ratio: float, rho: float) -> Dirichlet:
    """The rule for ℓ̄ = −log p(β) − N/B Σ_d E[log p(w_d, z_d | θ_d, β)]."""
    site = {"log": ratio * local.expected}  # type: ignore[operator]
    return blr_step(q, scale(add(prior.natural, site), -1.0), rho)


def _alike(name: str, q: Any, prior: Dirichlet) -> Dirichlet:
    """q(β) in the dtype of the prior, or what is wrong with it."""
    instance(name, q, Dirichlet, "a Dirichlet, such as the q of a fit")
    wanted, given = prior.concentration.shape, q.concentration.shape
    if wanted != given:
        raise InputError(f"{name} must have the shape [K, V] = {[*wanted]}, got {[*given]}")
    return Dirichlet(q.concentration.to(prior.concentration.dtype))


@dataclass(frozen=True, eq=False, repr=False)
class FittedTopics(Fitted[Dirichlet]):
    """Topics: ``q`` has a copy for each, ``[K, V]``; examples are documents.

    A document's site is n_dw φ_dwk ``[K, V]``, with φ found anew under the topics as they are. It
    is dense: ask ``site_of`` for few documents where ``sites`` of all would not fit in memory.

    Attributes:
        model: the settings.
        documents: q(θ_d) of the documents that were fitted, as they were last met, ``[N, K]``.
    """

    model: LDA = None  # type: ignore[assignment]
    documents: Dirichlet = None  # type: ignore[assignment]
    note: ClassVar[str] = ONE_STEP

    def _with(self, add: Any) -> Counts:
        return self.data.followed_by(read_counts(add, self.model.dtype, self.data.n_words))

    def transform(self, counts: Any) -> Tensor:
        """E[θ_d] of further documents: their proportions of topics, ``[M, K]``.

        Raises:
            DataError: as :meth:`LDA.fit`, or another vocabulary than the one fitted.
        """
        return Dirichlet(self._score(counts)[1].gamma).mean

    def perplexity(self, counts: Any) -> float:
        """exp(−ELBO per word) of documents, scikit-learn's ``perplexity``; lower is better.

        The ELBO is that of these documents alone: the sum of their bounds, less KL(q(β) ‖ p(β))
        of all topics. That last term does not depend on the documents: few of them make it weigh
        more, so that perplexities can be compared on the same documents only.

        Raises:
            DataError: as :meth:`transform`.
        """
        data, local = self._score(counts)
        bound = local.bound.sum() - self.q.kl(self.prior).sum()  # type: ignore[arg-type]
        return math.exp(-float(bound / data.counts.sum()))

    def topics(self, vocabulary: Sequence[str], top: int = 10) -> TopicWords:
        """The most probable words of each topic.

        Args:
            vocabulary: the words of the columns, V of them.
            top: how many words.

        Raises:
            InputError: a vocabulary of another length.
        """
        n_words = self.q.concentration.shape[-1]
        several = hasattr(vocabulary, "__iter__") and not isinstance(vocabulary, str)
        names = [str(word) for word in vocabulary] if several else []
        if len(names) != n_words:
            got = len(names) if several else repr(vocabulary)
            raise InputError(f"vocabulary must be {n_words} words, got {got}")
        best = self.q.mean.topk(min(positive_int("top", top), n_words), -1)
        words = [tuple(names[i] for i in row) for row in best.indices.tolist()]
        return TopicWords(words, [tuple(row) for row in best.values.tolist()])

    def _told(self, chosen: Tensor) -> Natural:
        start, q = self.documents.concentration, self.q
        parts = chosen.split(CHUNK)
        local = (self.model.local(self.data, part, q, start=start[part]) for part in parts)
        return {"log": sum(part.expected for part in local)}  # type: ignore[misc]

    def _less(self, sites: Sites) -> Dirichlet:
        """q(β) without documents, λ − Σ_d n_dw φ_dwk: the first step of fitting again.

        Raises:
            InputError: topics so far from a fixed point that they hold less of a word than these
                documents ask back.
        """
        left = subtract(self.q.natural, sites)  # type: ignore[arg-type]
        if bool((left["log"] <= -1).any()):
            raise InputError(
                "the topics hold less of a word: go on with fit(…, batch_size=None, start=fitted.q)"
            )
        return self.q.with_natural(left)

    def left_out(self) -> Tensor:
        """A lower bound on log p(w_d | λ − λ̃_d) of every document, in nats ``[N]``.

        The documents' factors are found afresh under the topics without them; the bound is that
        of :meth:`LDA.log_predictive`. Where topics hold less of a word than a document accounts
        for, as far from a fixed point, the prior is what stays of it; a warning says where that
        happens to more than one word in a hundred.
        """
        rows, alpha = torch.arange(self.n_data), self.model.document_prior()
        settled = partial(
            settle, prior=alpha, tol=self.model.local_tol, max_iter=self.model.max_local_iter
        )
        gamma = settled(SameTopics(self.data, rows, self.q), self.documents.concentration)
        documents = OwnTopics(self.data, rows, self.q, self.prior, gamma)  # type: ignore[arg-type]
        return log_predictive(documents, settled(documents, torch.ones_like(gamma)), alpha)

    def _score(self, counts: Any) -> tuple[Counts, Local]:
        model, n_words = self.model, self.q.concentration.shape[-1]
        data = read_counts(counts, model.dtype, n_words=n_words)
        return data, model.local(data, torch.arange(len(data)), self.q, expected=None)


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
