"""Online latent Dirichlet allocation: stochastic variational inference as the rule.

Topics β_k ~ Dir(η) over a vocabulary, proportions θ_d ~ Dir(α) of each document, a topic for each
word. The local factors take steps with ρ = 1 until they stand still; the topics q(β_k) = Dir(λ_k)
take one step with ρ_t < 1 after every minibatch of B documents (Hoffman, Blei and Bach, 2010;
Hoffman et al., 2013; Khan & Rue, section 5.3):

    λ ← (1 − ρ_t) λ + ρ_t ( η + N/B Σ_{d∈batch} n_dw φ_dwk ),      ρ_t = (t + τ_0)^−κ

With B = N and ρ = 1 that is variational Bayes by coordinate ascent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import instance, positive_int, positive_number, tolerance
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import Natural
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.families.drawing import log_gamma_draw
from blr_analysis.learning_rule.inference.counts import Counts, read_counts
from blr_analysis.learning_rule.inference.document_predictive import OwnTopics, log_predictive
from blr_analysis.learning_rule.inference.documents import Local, local_step
from blr_analysis.learning_rule.inference.topic_passes import ascent, moved, stochastic
from blr_analysis.learning_rule.inference.topics import FittedTopics
from blr_analysis.progress import track


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
        if positive_int("n_topics", self.n_topics) < 2:
            raise InputError("n_topics must be 2 or more: one topic is a word count")
        positive_int("max_local_iter", self.max_local_iter)
        for name in ("doc_topic_prior", "topic_word_prior"):
            if getattr(self, name) is not None:
                positive_number(name, getattr(self, name))
        positive_number("local_tol", self.local_tol)
        if tolerance("learning_decay", self.learning_decay) > 1:
            raise InputError(
                f"learning_decay must lie between 0 and 1, got {self.learning_decay!r}"
            )
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
        generator = _seeded(seed)
        prior = self.prior(data.n_words)
        if start is not None:
            instance("start", start, Dirichlet, "a Dirichlet, such as the q of another fit")
        q = self._initial(prior, generator) if start is None else _same_shape(start, prior)
        if batch_size is None:
            shown = track(range(passes), label="topics", show=progress)
            turns = ascent(self, data, q, prior, shown)
        else:
            size = positive_int("batch_size", batch_size)
            orders = (torch.randperm(n_data, generator=generator) for _ in range(passes))
            batches = (batch for order in orders for batch in order.split(size))
            total = passes * -(-n_data // size)
            shown = track(batches, total=total, label="topics", show=progress)
            turns = stochastic(self, data, q, prior, shown)
        words, history, gamma = float(data.totals.sum()), [], q.concentration
        for q, gamma, elbo in turns:  # noqa: B007
            history.append(elbo / words)
            if _flat(history, tol):
                break
        return FittedTopics(
            q=q,
            history=history,
            objective="ELBO",
            prior=prior,
            n_data=n_data,
            site_of=lambda chosen: self._sites(data, chosen, q, gamma),
            predictive=self.log_predictive,
            data=data,
            converged=_flat(history, tol),
            model=self,
            documents=Dirichlet(gamma),
        )

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
        instance("q", q, Dirichlet, "a Dirichlet, such as the q of a fit")
        data = read_counts(counts, self.dtype, n_words=q.concentration.shape[-1])
        prior = self.prior(data.n_words)
        q = _same_shape(q, prior)
        local = self.local(data, torch.arange(len(data)), q)
        ratio = positive_int("n_documents", n_documents) / len(data)
        return moved(q, prior, local, ratio, rho)

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
        documents = OwnTopics.of(data, rows, q, self.prior(data.n_words))
        return log_predictive(documents, gamma, data.totals, self.document_prior())

    def _initial(self, prior: Dirichlet, generator: torch.Generator) -> Dirichlet:
        """Every λ_kw from Gamma(100, 1/100), as scikit-learn and Hoffman's own code start."""
        shape = torch.full_like(prior.concentration, 100.0)
        return Dirichlet(log_gamma_draw(shape, generator).exp() / 100)

    def _sites(self, data: Counts, rows: Tensor, q: Dirichlet, gamma: Tensor) -> Natural:
        return {"log": self.local(data, rows, q, start=gamma[rows], expected="each").expected}  # type: ignore[dict-item]


def _flat(history: Sequence[float], tol: float) -> bool:
    return len(history) > 1 and abs(history[-1] - history[-2]) <= tol


def _seeded(seed: int) -> torch.Generator:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed must be a whole number, at least 0, got {seed!r}")
    return torch.Generator().manual_seed(seed)


def _same_shape(q: Dirichlet, prior: Dirichlet) -> Dirichlet:
    wanted, found = prior.concentration.shape, q.concentration.shape
    if wanted != found:
        raise InputError(f"q(β) must have the shape [K, V] = {[*wanted]}, got {[*found]}")
    return Dirichlet(q.concentration.to(prior.concentration.dtype))
