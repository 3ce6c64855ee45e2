"""Runs a task's data through one network after another, and averages what they answer.

The sums over networks are held, never the answers of two networks at once. See
:mod:`blr_analysis.posterior.predictive` for the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.likelihoods import Bernoulli, Categorical, Likelihood, TokenCategorical
from blr_analysis.posterior.predictive import Predictions, scored_by
from blr_analysis.progress import bar
from blr_analysis.task import Task

NUMBERS_LIMIT = 2**27  # tokens times classes whose probabilities are held: half a GiB in float32
TOO_MANY = "too many tokens and classes to keep: no variance, entropy, accuracy"


def averaged(
    task: Task, networks: Iterable[Mapping[str, Tensor]], draws: int, note: str = ""
) -> Predictions:
    """The task's predictions averaged over networks.

    In memory are one network and N × C numbers, for sequences one number per token and class.

    Args:
        networks: the weights and buffers of each, by name.
        draws: how many they are; 0: one, at the posterior's mean.
        note: of the result.

    Raises:
        ModelError, DataError: as :meth:`Task.run`.
    """
    likelihood = scored_by(task.likelihood)
    n_networks = max(draws, 1)
    batches = torch.arange(task.n_data).split(task.batch_size)
    total: Answers | None = None
    progress = bar(n_networks * len(batches), "predictions", task.progress)
    with progress, torch.no_grad(), task.evaluation():
        for params in networks:
            parts = []
            for indices in batches:
                parts.append(_answers(task, params, indices, likelihood, len(batches)))
                progress.update()
            answers = Answers.joined(parts)
            total = answers if total is None else total.plus(answers)
    assert total is not None
    return _predictions(total, n_networks, draws, likelihood, note)


def _predictions(
    total: Answers, n_networks: int, draws: int, likelihood: Likelihood, note: str
) -> Predictions:
    """The averages of the sums over the networks."""
    losses = None
    if total.log_likelihoods is not None:
        losses = (math.log(n_networks) - total.log_likelihoods).to(total.dtype)
    if total.rows is None or total.squares is None:
        notes = "; ".join(filter(None, [note, TOO_MANY]))
        return Predictions(None, losses, None, draws, likelihood, notes)
    mean = total.rows / n_networks
    mean_square = total.squares / n_networks
    variance = (mean_square - mean.double().square()).clamp_min(0).to(mean.dtype)
    entropy, information = _uncertainty(total, n_networks, likelihood, mean, variance)
    has_several_networks = n_networks > 1
    is_sequence = likelihood.is_sequence
    return Predictions(
        mean=None if is_sequence else mean,
        losses=losses,
        targets=None if is_sequence else total.targets,
        draws=draws,
        likelihood=likelihood,
        note=note,
        probabilities=mean if likelihood.is_classification else None,
        labels=total.targets if likelihood.is_classification else None,
        variance=variance if has_several_networks else None,
        entropy=entropy,
        information=information if has_several_networks else None,
        example=total.examples if is_sequence else None,
    )


def _uncertainty(
    total: Answers, n_networks: int, likelihood: Likelihood, mean: Tensor, variance: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """H[p̄] and H[p̄] − 1/K Σ_k H[p_k] of every row; None of a likelihood without an entropy."""
    noise = None if total.noise is None else total.noise / n_networks
    entropy = entropy_of(likelihood, mean, variance, noise)
    if entropy is None or total.entropies is None:
        return entropy, None
    return entropy, (entropy - total.entropies / n_networks).clamp_min(0)


@dataclass
class Answers:
    """What a network answers, or the sums over several networks.

    There is one row per example, or per token that counts, ``[M]``.

    Attributes:
        dtype: of the outputs.
        log_likelihoods: log Σ_k p(y_i | f_k(x_i)) in float64; None without labels.
        rows: Σ_k E[y | f_k(x)], ``[M, C]``; None where they are too many to hold.
        squares: Σ_k E[y | f_k(x)]² in float64.
        entropies: Σ_k H[p_k], ``[M]``; None of a likelihood without an entropy.
        noise: Σ_k σ_k², where the likelihood has a variance.
        targets: of the rows; None without labels.
        examples: the index of the example that each row belongs to.
    """

    dtype: torch.dtype
    log_likelihoods: Tensor | None = None
    rows: Tensor | None = None
    squares: Tensor | None = None
    entropies: Tensor | None = None
    noise: Tensor | None = None
    targets: Tensor | None = None
    examples: Tensor | None = None

    def without_rows(self) -> Answers:
        """The losses alone."""
        return Answers(self.dtype, self.log_likelihoods)

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """One network's answers for all examples, from those for each batch."""
        all_have_rows = all(part.rows is not None for part in parts)
        if not all_have_rows:
            parts = [part.without_rows() for part in parts]
        return cls(
            dtype=parts[-1].dtype,
            log_likelihoods=_joined([part.log_likelihoods for part in parts]),
            rows=_joined([part.rows for part in parts]),
            squares=_joined([part.squares for part in parts]),
            entropies=_joined([part.entropies for part in parts]),
            noise=_joined([part.noise for part in parts]),
            targets=_joined([part.targets for part in parts]),
            examples=_joined([part.examples for part in parts]),
        )

    def plus(self, further: Answers) -> Answers:
        """The sums with those of further networks, for the same examples."""
        log_likelihoods = None
        if self.log_likelihoods is not None and further.log_likelihoods is not None:
            log_likelihoods = torch.logaddexp(self.log_likelihoods, further.log_likelihoods)
        return Answers(
            dtype=self.dtype,
            log_likelihoods=log_likelihoods,
            rows=_sum(self.rows, further.rows),
            squares=_sum(self.squares, further.squares),
            entropies=_sum(self.entropies, further.entropies),
            noise=_sum(self.noise, further.noise),
            targets=self.targets,
            examples=self.examples,
        )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts one behind the other; None where all are."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """The sum; None where one of the two is."""
    if left is None or right is None:
        return None
    return left + right


def _answers(
    task: Task,
    params: Mapping[str, Tensor],
    indices: Tensor,
    likelihood: Likelihood,
    n_batches: int,
) -> Answers:
    """One network's answers for a batch; without rows where those of all batches are too many."""
    outputs, targets = task.predicted(task.fetch(indices), params, indices)
    log_likelihoods = None
    if targets is not None:
        log_likelihoods = -_losses(likelihood, outputs, targets).double().cpu()
    if likelihood.is_sequence and outputs.numel() * n_batches > NUMBERS_LIMIT:
        return Answers(outputs.dtype, log_likelihoods)
    examples = indices
    if isinstance(likelihood, TokenCategorical):
        counted = _counted_tokens(likelihood, outputs, targets)
        examples = indices.repeat_interleave(counted.sum(1).cpu())
        outputs = outputs[counted]
        targets = None if targets is None else targets[counted]
    mean = likelihood.mean(outputs)
    noise = likelihood.noise(outputs)
    no_variance = torch.zeros_like(mean)
    return Answers(
        dtype=outputs.dtype,
        log_likelihoods=log_likelihoods,
        rows=mean.cpu(),
        squares=mean.double().square().cpu(),
        entropies=_on_cpu(entropy_of(likelihood, mean, no_variance, noise)),
        noise=_on_cpu(noise),
        targets=_on_cpu(targets),
        examples=examples,
    )


def _counted_tokens(
    likelihood: TokenCategorical, outputs: Tensor, targets: Tensor | None
) -> Tensor:
    """Which tokens have a label that counts, ``[B, T]``; without labels all of them."""
    if targets is not None:
        return likelihood.counted(targets)
    return torch.ones(outputs.shape[:2], dtype=torch.bool, device=outputs.device)


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def entropy_of(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, noise: Tensor | None
) -> Tensor | None:
    """H[y] of each row in nats, ``[M]``; None of counts and of losses that are no −log p.

    Args:
        mean: the mean prediction, ``[M, C]``.
        variance: of the mean prediction, ``[M, C]``.
        noise: σ² of a Gaussian likelihood; None of others.

    >>> entropy_of(Categorical(), torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.zeros(2, 2), None)
    tensor([0.6931, 0.0000])
    """
    if noise is not None:
        return 0.5 * (2 * math.pi * math.e * (variance + noise)).log().sum(-1)
    if isinstance(likelihood, Bernoulli):
        return -(torch.xlogy(mean, mean) + torch.xlogy(1 - mean, 1 - mean)).sum(-1)
    if isinstance(likelihood, Categorical):
        return -torch.xlogy(mean, mean).sum(-1)
    return None


def _losses(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """−log p of every example, NaN where the target is ignored; for sequences, of every token that
    counts."""
    if isinstance(likelihood, TokenCategorical):
        counted = likelihood.counted(targets)
        return likelihood.token_nll(outputs, targets)[counted]
    losses = likelihood.nll(outputs, targets)
    if not isinstance(likelihood, Categorical) or likelihood.ignore_index is None:
        return losses
    has_class_probabilities = targets.ndim == 2
    if has_class_probabilities:
        return losses
    return losses.masked_fill(targets == likelihood.ignore_index, torch.nan)
