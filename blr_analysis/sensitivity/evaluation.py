"""How well a model does on a set of examples, by forward passes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from blr_analysis.backprop.engine import predict
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import TokenCategorical
from blr_analysis.progress import track
from blr_analysis.sensitivity.sequences import loss_per_token, perplexity
from blr_analysis.task import Task


@dataclass(frozen=True)
class Evaluation:
    """Losses ``[M]`` in nats and hits ``[M]`` (None for regression) on a set of examples."""

    losses: Tensor
    correct: Tensor | None

    @property
    def nll(self) -> float:
        return float(self.losses.double().mean())

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None else float(self.correct.double().mean())


@dataclass(frozen=True)
class SequenceEvaluation(Evaluation):
    """Of sequences: losses summed over their tokens, the fraction of tokens that are right.

    Attributes:
        nll: the mean of ``losses``, in nats per SEQUENCE.
        nll_per_token, perplexity: Σ losses / Σ tokens in nats per token, and exp of it.
        accuracy: of all tokens that count.
        tokens: how many count, ``[M]``.
    """

    tokens: Tensor

    @property
    def nll_per_token(self) -> float:
        return loss_per_token(self.losses, self.tokens)

    @property
    def perplexity(self) -> float:
        return perplexity(self.losses, self.tokens)

    @property
    def accuracy(self) -> float | None:
        if self.correct is None:
            return None
        return float((self.correct.double() * self.tokens).sum() / self.tokens.sum())


def evaluated(
    task: Task, params: Mapping[str, Tensor], *, progress: bool | None = None
) -> tuple[Evaluation, Tensor]:
    """Losses and hits of the whole task at these parameters, and its targets, on the CPU.

    Targets of sequences come back as one padded table ``[M, T]``.
    """
    likelihood = task.likelihood
    if likelihood.is_sequence:
        return _of_sequences(task, params, progress)
    outputs, targets = predict(task, params, progress=progress)
    losses = likelihood.nll(outputs, targets)
    return Evaluation(losses, likelihood.correct(outputs, targets)), targets


def _of_sequences(
    task: Task, params: Mapping[str, Tensor], progress: bool | None
) -> tuple[SequenceEvaluation, Tensor]:
    """Batch by batch: the outputs of one are gone before the next."""
    likelihood = task.likelihood
    if not isinstance(likelihood, TokenCategorical):
        raise InputError(f"cannot evaluate sequences under {likelihood!r}")
    parts, rows = [], []
    total = -(-task.n_data // task.batch_size)
    with torch.no_grad(), task.evaluation():
        for indices, batch in track(
            task.batches(), total=total, label="predictions", show=progress
        ):
            f, y = task.run(batch, params, indices)
            found = likelihood.nll(f, y), likelihood.correct(f, y), likelihood.counted(y).sum(-1)
            parts.append([t.cpu() for t in found])
            rows.append(y.cpu())
    losses, correct, tokens = (torch.cat(p) for p in zip(*parts, strict=True))
    longest = max(y.shape[1] for y in rows)
    padded = [pad(y, (0, longest - y.shape[1]), value=likelihood.ignore_index) for y in rows]
    return SequenceEvaluation(losses, correct, tokens), torch.cat(padded)
