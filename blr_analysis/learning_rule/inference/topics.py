"""What a fitted topic model answers: topics, proportions, perplexity, and documents taken out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blr_analysis.checks import positive_int
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families.base import subtract
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.inference.counts import Counts, read_counts
from blr_analysis.learning_rule.inference.document_predictive import OwnTopics, log_predictive
from blr_analysis.learning_rule.inference.documents import Documents, Local, SameTopics, settle
from blr_analysis.learning_rule.inference.fitted import CHUNK, Fitted
from blr_analysis.views import Tabular

if TYPE_CHECKING:
    from blr_analysis.learning_rule.inference.lda import LDA


@dataclass(frozen=True, eq=False)
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
        if isinstance(vocabulary, str) or not hasattr(vocabulary, "__iter__"):
            raise InputError(f"vocabulary must be {n_words} words, got {vocabulary!r}")
        names = [str(word) for word in vocabulary]
        if len(names) != n_words:
            raise InputError(f"vocabulary must have {n_words} words, got {len(names)}")
        best = self.q.mean.topk(min(positive_int("top", top), n_words), -1)
        words = [tuple(names[i] for i in row) for row in best.indices.tolist()]
        return TopicWords(words, [tuple(row) for row in best.values.tolist()])

    def without(self, indices: Any) -> Dirichlet:
        """q(β) without these documents, λ − Σ_d n_dw φ_dwk: the first step of fitting again.

        Args:
            indices: documents, as indices or as a mask ``[N]``.

        Raises:
            InputError: a document that does not exist, or topics so far from a fixed point that
                they hold less of a word than these documents ask back.
        """
        chosen = torch.tensor(sorted(set(chosen_indices(indices, self.n_data))), dtype=torch.long)
        left = self.q.natural
        for part in chosen.split(CHUNK) if len(chosen) else ():
            start = self.documents.concentration[part]
            removed = self.model.local(self.data, part, self.q, start=start).expected
            left = subtract(left, {"log": removed})  # type: ignore[dict-item]
        if bool((left["log"] <= -1).any()):
            raise InputError(
                "these documents account for more of a word than the topics hold: the fit is far "
                "from a fixed point; go on with fit(counts, batch_size=None, start=fitted.q)"
            )
        return self.q.with_natural(left)

    def left_out(self) -> Tensor:
        """A lower bound on log p(w_d | λ − λ̃_d) of every document, in nats ``[N]``.

        The documents' factors are found afresh under the topics without them; the bound is that
        of :meth:`LDA.log_predictive`. Where topics hold less of a word than a document accounts
        for, as far from a fixed point, the prior is what stays of it; a warning says where that
        happens to more than one word in a hundred.
        """
        rows, totals = torch.arange(self.n_data), self.data.totals
        gamma = self._settled(SameTopics.of(self.data, rows, self.q), self.documents.concentration)
        documents = OwnTopics.of(self.data, rows, self.q, self.prior, gamma)  # type: ignore[arg-type]
        gamma = self._settled(documents, torch.ones_like(gamma))
        return log_predictive(documents, gamma, totals, self.model.document_prior())

    def _settled(self, documents: Documents, gamma: Tensor) -> Tensor:
        model = self.model
        alpha = model.document_prior().concentration
        return settle(documents, gamma, alpha, tol=model.local_tol, max_iter=model.max_local_iter)

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
