"""A network of sequences, such as a language model.

For a sequence i with loss ℓ_i = Σ_t ℓ_it and gradient g_i = Σ_t ∇ℓ_it,

    self-influence      g_iᵀ Σ g_i             the first-order rise of ℓ_i without the sequence
    leave-one-out loss  ℓ_i + g_iᵀ Σ g_i

take one backward pass per sequence. The T·C outputs of a sequence live only as long as their chunk;
a few numbers per sequence are stored. The trace of the prediction variance is estimated with K
random vectors z_k of signs ±1 at the outputs of the tokens that count (Hutchinson, 1990). Each
takes one backward pass:

    tr V_i ≈ 1/K Σ_k z_kᵀ V_i z_k,    V_i = J_i Σ J_iᵀ

The spread of the K terms gives the standard error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, chunks
from blr_analysis.backprop.record import indices_of_rank
from blr_analysis.data.batches import mask_and_labels
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import CausalLM
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.corrections import self_influence
from blr_analysis.sensitivity.results import LeaveOneOut, Scores
from blr_analysis.sensitivity.subjects.contract import Suspects, first_by
from blr_analysis.sensitivity.subjects.network import Network
from blr_analysis.sensitivity.training_errors import mean_errors, mean_losses
from blr_analysis.task import Task

WORSE_THAN_A_GUESS = "no estimate: left-out tokens are predicted worse than by their frequency"
DRAWS = 4  # K, the random vectors of a sequence

Draw = Callable[[Chunk, torch.Generator], Tensor]


class Sequences(Network):
    """A network of sequences: it has one number per example where :class:`Network` has a vector."""

    kind = "a network of sequences"

    def _scores_at(self, task: Task, posterior: Posterior, variance: bool | None) -> Scores:
        return sequence_scores(task, posterior, variance=bool(variance))

    def left_out(self, correction: str = "auto", refine: int = 0) -> LeaveOneOut:
        if correction == "cavity":
            raise InputError('correction="cavity" needs one output per example; use "first_order"')
        if refine:
            raise InputError("refine= takes no sequences; use refine=0")
        scores = self.scores()
        assert scores.self_influence is not None
        calibration = self.posterior.calibration
        result = LeaveOneOut(
            losses=scores.losses + scores.self_influence,
            losses_before=scores.losses,
            tokens=scores.tokens,
            correction=["first_order"] * len(scores),
            chance=chance_per_token(self.task),
            measured=None if calibration is None else calibration.highest_left_out_loss,
            likelihood=self.likelihood,
            metadata=self.metadata,
            note=self.note,
        )
        if not result.is_below_chance:
            return result
        return replace(result, note="; ".join(filter(None, [WORSE_THAN_A_GUESS, self.note])))

    def suspects(self, left_out: LeaveOneOut, share: float) -> Suspects:
        assert left_out.tokens is not None
        losses = torch.stack([mean_losses(self.task, q) for _, q in self.runs]).mean(0)
        losses_per_token = losses / left_out.tokens
        guess = guessed_losses(self.task)
        above_guess = losses_per_token
        if guess is not None:
            guess = guess / left_out.tokens
            above_guess = losses_per_token - guess
        return Suspects(
            losses=losses_per_token,
            training=self._last_losses() / left_out.tokens,
            left_out=left_out.losses / left_out.tokens,
            contradicted=first_by(above_guess, share),
            unfamiliarity=self._unfamiliarity(),
            guess=guess,
        )

    def described(self, indices: Tensor, test: Any = None) -> dict[str, Tensor]:
        return {}

    def cheap_columns(self) -> dict[str, Tensor]:
        return {}

    def _unfamiliarity(self) -> Tensor:
        """tr(Λ_i V_i) of every sequence ``[N]``, estimated with labels that the model draws."""
        traces = []
        for chunk in chunks(self.task, self.posterior.mean, columns=1, label="unfamiliarity"):
            estimate, _ = trace(self.posterior, chunk, drawn_errors)
            traces.append(estimate.cpu())
        return torch.cat(traces)


def sequence_scores(
    task: Task, posterior: Posterior, *, variance: bool = False, indices: Tensor | None = None
) -> Scores:
    """Losses, self-influences and token counts of a task's sequences, chunk by chunk.

    Args:
        variance: whether tr V_i is estimated.
        indices: the sequences; None: all.

    Raises:
        ModelError, DataError: the errors of :func:`blr_analysis.sensitivity`, or a sequence has no
            token that counts.
    """
    # Ranks divide the sequences, but not with random signs, which depend on the chunks.
    is_divided = indices is None and not variance
    rows = indices_of_rank(task, posterior.mean) if is_divided else indices
    errors = mean_errors(task, posterior)
    parts: list[dict[str, Tensor]] = []
    for chunk in chunks(task, posterior.mean, columns=1, indices=rows, label="sequences"):
        error = errors(task, chunk)
        influence = self_influence(posterior, chunk, error, last=not variance)
        values = {
            "losses": chunk.likelihood.nll(chunk.outputs, chunk.targets),
            "self_influence": posterior.temperature * influence,
            "tokens": counted_tokens(chunk).sum(-1),
            "error": torch.linalg.vector_norm(error.flatten(1), dim=1),
        }
        if variance:
            values["variance"], values["variance_error"] = trace(posterior, chunk, signs)
        parts.append({name: value.cpu() for name, value in values.items()})
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if is_divided and rows is not None:
        columns = {
            name: ranks.gathered(column, rows, task.n_data) for name, column in columns.items()
        }
    return Scores(
        **columns,
        likelihood=task.likelihood,
        metadata=task.metadata,
        note=posterior.note,
    )


def chance_per_token(task: Task) -> float | None:
    """The entropy of the labels that count, in nats.

    It is the loss of a token that is guessed by the frequencies of labels. None where the batches
    do not show their labels.
    """
    counts = label_counts(task)
    if counts is None:
        return None
    return float(torch.distributions.Categorical(counts.double()).entropy())


def guessed_losses(task: Task) -> Tensor | None:
    """What a guess by the tokens' frequencies loses at each text, ``[N]`` in nats.

    A text whose words stand in no order is predicted no better than that, however frequent they
    are. None where the task is no causal language model, or its batches do not show their labels.
    """
    is_text = isinstance(task.likelihood.kind, CausalLM)
    counts = label_counts(task) if is_text else None
    if counts is None:
        return None
    ignored = getattr(task.likelihood.kind, "ignore_index", None)
    surprise = -(counts.double() / counts.sum()).log()
    losses = []
    for _, batch in task.batches():
        labels = mask_and_labels(batch)[1][:, 1:].cpu()  # nothing predicts the first token
        is_counted = labels != ignored
        token_losses = surprise[labels.masked_fill(~is_counted, 0)]
        losses.append(token_losses.where(is_counted, 0.0).sum(1))
    return torch.cat(losses)


def label_counts(task: Task) -> Tensor | None:
    """How often each label that counts stands in the data; None where batches do not show them."""
    ignored = getattr(task.likelihood.kind, "ignore_index", None)
    counts = torch.zeros(0, dtype=torch.long)
    for _, batch in task.batches():
        _, labels = mask_and_labels(batch)
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        counted = labels[labels != ignored].flatten().cpu()
        if len(counted) > 0 and int(counted.min()) < 0:
            return None
        counts_of_batch = torch.bincount(counted, minlength=len(counts))
        n_new_labels = len(counts_of_batch) - len(counts)
        counts = counts_of_batch + torch.nn.functional.pad(counts, (0, n_new_labels))
    return counts


def counted_tokens(chunk: Chunk) -> Tensor:
    """Which tokens of a chunk count, ``[B, T]``."""
    counted = chunk.likelihood.counted(chunk.targets)
    assert counted is not None
    return counted


def trace(posterior: Posterior, chunk: Chunk, draw: Draw) -> tuple[Tensor, Tensor]:
    """1/K Σ_k z_kᵀ V_i z_k with z_k from ``draw``, and its standard error, ``[B]`` each."""
    first_index = int(chunk.indices[0])
    terms = []
    for k in range(DRAWS):
        generator = torch.Generator().manual_seed(DRAWS * first_index + k)
        terms.append(self_influence(posterior, chunk, draw(chunk, generator)))
    stacked = torch.stack(terms)
    return stacked.mean(0), stacked.std(0) / DRAWS**0.5


def signs(chunk: Chunk, generator: torch.Generator) -> Tensor:
    """Random ±1 at every output of the tokens that count, 0 elsewhere; E[z zᵀ] is the identity."""
    counted = counted_tokens(chunk)
    bits = torch.empty(chunk.outputs.shape, dtype=torch.int8).random_(2, generator=generator)
    plus_minus = bits.to(chunk.outputs).mul_(2).sub_(1)
    return plus_minus.mul_(counted.unsqueeze(-1))


def drawn_errors(chunk: Chunk, generator: torch.Generator) -> Tensor:
    """The errors z of labels that the model draws from its predictions; E[z zᵀ] is Λ."""
    outputs = chunk.outputs.cpu()
    targets = chunk.targets.cpu()
    labels = chunk.likelihood.resample(outputs, targets, generator).to(chunk.targets)
    return chunk.likelihood.drawn_error(chunk.outputs, chunk.targets, labels)
