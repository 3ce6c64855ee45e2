"""How much each training sequence shapes a model of tokens, and its loss without it.

For a sequence i with loss ℓ_i = Σ_t ℓ_it and gradient g_i = Σ_t ∇ℓ_it,

    self-influence      g_iᵀ Σ g_i             the first-order rise of ℓ_i without the sequence
    leave-one-out loss  ℓ_i + g_iᵀ Σ g_i

from one backward pass per sequence. Nothing of size T·C outlives its chunk: what is kept is a few
numbers per sequence. The trace of the prediction variance is estimated with random signs z_k at the
outputs of the tokens that count (Hutchinson, 1990), one backward pass each:

    tr V_i ≈ 1/K Σ_k z_kᵀ V_i z_k,    V_i = J_i Σ J_iᵀ

its standard error by the spread of the K terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, chunks
from blr_analysis.backprop.loss import PerToken
from blr_analysis.backprop.record import shared
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.sensitivity.corrections import self_influence
from blr_analysis.sensitivity.results import LeftOut, NetworkScores
from blr_analysis.sensitivity.run import mean_errors
from blr_analysis.task import Task

DRAWS = 4  # random cotangents of a sequence


@dataclass(frozen=True, kw_only=True)
class SequenceScores(PerToken, NetworkScores):
    """What :func:`blr_analysis.sensitivity` gives on sequences; tensors on the CPU.

    Attributes:
        losses: ℓ_i, the SUM over the tokens of a sequence that count, in nats, ``[N]``.
        self_influence: g_iᵀ Σ g_i, ``[N]``: the first-order rise of ℓ_i, in nats, when the
            sequence is left out; larger is more influential. Like ℓ_i it grows with the length.
        tokens: how many tokens count, ``[N]``.
        error: ‖e_i‖₂ over the outputs of all tokens, ``[N]``.
        variance: tr V_i over them, estimated, ``[N]``; None where it was not asked for.
        variance_error: its standard error, ``[N]``, or None.
        loss_per_token, perplexity: Σ losses / Σ tokens, and exp of it.
        table: one row per sequence: index, tokens, loss, loss_per_token, error, self_influence,
            variance and variance_error where they were asked for, and the task's metadata columns.

    The T·C outputs of a sequence are not held; see
    :func:`blr_analysis.sensitivity.token_sensitivity` for
    single tokens.
    """

    tokens: Tensor
    error: Tensor
    variance: Tensor | None = None
    variance_error: Tensor | None = None

    @property
    def loss_per_token(self) -> float:
        return self.nll_per_token

    def __repr__(self) -> str:
        return (
            f"SequenceScores(N={len(self)}, {int(self.tokens.sum())} tokens, "
            f"{self.likelihood.name}, perplexity={self.perplexity:.4g}; see .table, .plot()"
            f"{self._noted})"
        )


@dataclass(frozen=True, kw_only=True)
class SequenceLeaveOneOut(PerToken, LeftOut):
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
    def nll_per_token_before(self) -> float:
        return self._before.nll_per_token

    @property
    def perplexity_before(self) -> float:
        return self._before.perplexity

    @property
    def _before(self) -> SequenceLeaveOneOut:
        return replace(self, losses=self.losses_before)

    def __repr__(self) -> str:
        return (
            f"SequenceLeaveOneOut(perplexity {self.perplexity_before:.4g} -> "
            f"{self.perplexity:.4g}, N={len(self)}, {int(self.tokens.sum())} tokens{self._noted})"
        )


def sequence_scores(
    task: Task, q: Posterior, *, variance: bool = False, indices: Tensor | None = None
) -> SequenceScores:
    """Losses, self-influences and token counts of a task's sequences, chunk by chunk.

    Args:
        variance: whether tr V_i is estimated.
        indices: the sequences; None: all.

    Raises:
        ModelError, DataError: as :func:`blr_analysis.sensitivity`; also a sequence without a
            single token that counts.
    """
    parts: list[tuple[Tensor, ...]] = []
    split = indices is None and not variance  # whose draws go by chunk
    own = shared(task, q.mean) if split else indices
    errors = mean_errors(task, q)
    for chunk in chunks(task, q.mean, columns=1, indices=own, label="sequences"):
        losses = chunk.likelihood.nll(chunk.outputs, chunk.targets)
        error = errors(task, chunk)
        influence = q.temperature * self_influence(q, chunk, error, last=not variance)
        counted = task.likelihood.counted(chunk.targets)
        assert counted is not None
        tokens = counted.sum(-1)
        size = torch.linalg.vector_norm(error.flatten(1), dim=1)
        estimate = trace(q, chunk, signs) if variance else ()
        parts.append(tuple(t.cpu() for t in (losses, influence, tokens, size, *estimate)))
    columns = [torch.cat(p) for p in zip(*parts, strict=True)]
    if split and own is not None:
        columns = [ranks.gathered(t, own, task.n_data) for t in columns]
    losses, influence, tokens, size, *estimate = columns
    return SequenceScores(
        losses=losses,
        self_influence=influence,
        tokens=tokens,
        error=size,
        variance=estimate[0] if variance else None,
        variance_error=estimate[1] if variance else None,
        likelihood=task.likelihood,
        metadata=task.metadata,
        note=q.note,
    )


def sequence_leave_one_out(
    several: Sequence[tuple[Task, Posterior]], correction: str
) -> SequenceLeaveOneOut:
    """Every sequence's loss as if the model had been trained without it, to first order.

    Raises:
        InputError: the cavity is asked for, which needs V_i.
    """
    if correction == "cavity":
        raise InputError('correction="cavity" needs one output per example; use "first_order"')
    each = [sequence_scores(task, q) for task, q in several]
    scores = each[-1]
    return SequenceLeaveOneOut(
        losses=scores.losses + torch.stack([one.self_influence for one in each]).mean(0),
        losses_before=scores.losses,
        tokens=scores.tokens,
        correction=["first_order"] * len(scores),
        likelihood=scores.likelihood,
        metadata=scores.metadata,
        note=scores.note,
    )


def trace(
    q: Posterior, chunk: Chunk, draw: Callable[[Chunk, torch.Generator], Tensor]
) -> tuple[Tensor, Tensor]:
    """1/K Σ_k z_kᵀ V_i z_k for z_k that ``draw`` gives, and its standard error, ``[B]`` each."""
    first = int(chunk.indices[0])
    drawn = []
    for k in range(DRAWS):
        generator = torch.Generator().manual_seed(DRAWS * first + k)
        drawn.append(self_influence(q, chunk, draw(chunk, generator)))
    each = torch.stack(drawn)
    return each.mean(0), each.std(0) / DRAWS**0.5


def signs(chunk: Chunk, generator: torch.Generator) -> Tensor:
    """±1 at every output of the tokens that count, whose mean square is the identity."""
    counted = chunk.likelihood.counted(chunk.targets)
    assert counted is not None
    z = torch.empty(chunk.outputs.shape, dtype=torch.int8).random_(2, generator=generator)
    return z.to(chunk.outputs).mul_(2).sub_(1).mul_(counted.unsqueeze(-1))


def drawn_errors(chunk: Chunk, generator: torch.Generator) -> Tensor:
    """The errors of labels that the model itself draws, whose mean square is Λ."""
    outputs, targets = chunk.outputs.cpu(), chunk.targets.cpu()
    labels = chunk.likelihood.resample(outputs, targets, generator).to(chunk.targets)
    return chunk.likelihood.drawn_error(chunk.outputs, chunk.targets, labels)
