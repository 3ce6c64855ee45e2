"""How much each training sequence shapes a model of tokens, and its loss without it.

For a sequence i with loss ℓ_i = Σ_t ℓ_it and gradient g_i = Σ_t ∇ℓ_it,

    self-influence      g_iᵀ Σ g_i             the first-order rise of ℓ_i without the sequence
    leave-one-out loss  ℓ_i + g_iᵀ Σ g_i

from one backward pass per sequence. Nothing of size T·C outlives its chunk: what is kept is three
numbers per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.engine import Chunking, chunks
from blr_analysis.backprop.loss import loss_per_token, perplexity
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.stationarity import caveat_of
from blr_analysis.sensitivity.corrections import self_influence
from blr_analysis.sensitivity.results import LeftOut, NetworkScores
from blr_analysis.task import Task


@dataclass(frozen=True, kw_only=True)
class SequenceScores(NetworkScores):
    """What :func:`blr_analysis.sensitivity` gives on sequences; tensors on the CPU.

    Attributes:
        losses: ℓ_i, the SUM over the tokens of a sequence that count, in nats, ``[N]``.
        self_influence: g_iᵀ Σ g_i, ``[N]``: the first-order rise of ℓ_i, in nats, when the
            sequence is left out; larger is more influential. Like ℓ_i it grows with the length.
        tokens: how many tokens count, ``[N]``.
        loss_per_token, perplexity: Σ losses / Σ tokens, and exp of it.
        table: one row per sequence: index, tokens, loss, loss_per_token, self_influence, and the
            task's metadata columns.

    Errors, variances and outputs have T·C numbers per sequence and are not held; see
    :func:`blr_analysis.token_sensitivity` for single tokens.
    """

    tokens: Tensor

    @property
    def loss_per_token(self) -> float:
        return loss_per_token(self.losses, self.tokens)

    @property
    def perplexity(self) -> float:
        return perplexity(self.losses, self.tokens)

    def __repr__(self) -> str:
        return (
            f"SequenceScores(N={len(self)}, {int(self.tokens.sum())} tokens, "
            f"{self.likelihood.name}, perplexity={self.perplexity:.4g}; see .table, .plot()"
            f"{self._noted})"
        )


@dataclass(frozen=True, kw_only=True)
class SequenceLeaveOneOut(LeftOut):
    """What :func:`blr_analysis.leave_one_out` gives on sequences; tensors on the CPU.

    Attributes:
        losses: ℓ_i + g_iᵀ Σ g_i, the loss of each sequence (summed over its tokens) without it,
            to first order, in nats, ``[N]``.
        losses_before: ℓ_i, with it.
        tokens: how many tokens count, ``[N]``.
        nll: the mean of ``losses``, in nats per SEQUENCE.
        nll_per_token, perplexity: Σ losses / Σ tokens in nats per token, and exp of it; the same
            with ``_before``.
        correction: "first_order" for each sequence.
    """

    tokens: Tensor
    correction: list[str]
    likelihood: Likelihood

    @property
    def nll_per_token(self) -> float:
        return loss_per_token(self.losses, self.tokens)

    @property
    def nll_per_token_before(self) -> float:
        return loss_per_token(self.losses_before, self.tokens)

    @property
    def perplexity(self) -> float:
        return perplexity(self.losses, self.tokens)

    @property
    def perplexity_before(self) -> float:
        return perplexity(self.losses_before, self.tokens)

    def __repr__(self) -> str:
        return (
            f"SequenceLeaveOneOut(perplexity {self.perplexity_before:.4g} -> "
            f"{self.perplexity:.4g}, N={len(self)}, {int(self.tokens.sum())} tokens{self._noted})"
        )


def sequence_scores(
    task: Task,
    q: Posterior,
    chunking: Chunking,
) -> SequenceScores:
    """Losses, self-influences and token counts of a task's sequences, chunk by chunk.

    Raises:
        ModelError, DataError: as :func:`blr_analysis.sensitivity`; also a sequence without a
            single token that counts.
    """
    parts: list[tuple[Tensor, ...]] = []
    for chunk in chunks(task, q.mean, chunking, columns=1, label="sequences"):
        losses = chunk.likelihood.nll(chunk.outputs, chunk.targets)
        error = chunk.likelihood.error(chunk.outputs, chunk.targets)
        influence = self_influence(q, chunk, error)
        tokens = tokens_of(task, chunk.targets)
        parts.append((losses.cpu(), influence.cpu(), tokens.cpu()))
    losses, influence, tokens = (torch.cat(p) for p in zip(*parts, strict=True))
    return SequenceScores(
        losses=losses,
        self_influence=influence,
        tokens=tokens,
        likelihood=task.likelihood,
        metadata=task.metadata,
        note=caveat_of(q),
    )


def sequence_leave_one_out(
    task: Task,
    q: Posterior,
    correction: str,
    chunking: Chunking,
) -> SequenceLeaveOneOut:
    """Every sequence's loss as if the model had been trained without it, to first order.

    Raises:
        InputError: the cavity is asked for, which needs V_i.
    """
    if correction == "cavity":
        raise InputError(
            'correction="cavity" needs the variance of all T·C outputs of a sequence; use '
            '"first_order"'
        )
    scores = sequence_scores(task, q, chunking)
    return SequenceLeaveOneOut(
        losses=scores.losses + scores.self_influence,
        losses_before=scores.losses,
        tokens=scores.tokens,
        correction=["first_order"] * len(scores),
        likelihood=task.likelihood,
        metadata=task.metadata,
        note=scores.note,
    )


def tokens_of(task: Task, targets: Tensor) -> Tensor:
    """How many tokens of each sequence count, ``[B]``."""
    counted = task.likelihood.counted(targets)
    if counted is None:
        raise InputError(f"the {task.likelihood.name} likelihood has one target per example")
    return counted.sum(-1)
