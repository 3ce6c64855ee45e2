"""Runs a task's data through one network after another, and averages their predictions.

In memory are the sums over the networks and the answers of one network. See
:mod:`blr_analysis.posterior.predictive` for the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.likelihoods import Bernoulli, Categorical, Likelihood, TokenCategorical
from blr_analysis.posterior.networks import Network
from blr_analysis.posterior.predictive import Predictions, scored_by
from blr_analysis.progress import bar
from blr_analysis.task import Task

NUMBERS_LIMIT = 2**27  # tokens times classes whose probabilities are stored; 512 MiB in float32
TOO_MANY = "too many tokens and classes to keep: no variance, entropy, accuracy"


def averaged(task: Task, networks: Iterable[Network], draws: int, note: str = "") -> Predictions:
    """The task's predictions averaged over networks.

    In memory are one network and N × C numbers, for sequences one number per token and class.

    Args:
        networks: one after another.
        draws: the number of networks; 0 for a single one, at the posterior's mean.
        note: the note of the result.

    Raises:
        ModelError, DataError: as :meth:`Task.run`.
    """
    likelihood = scored_by(task.likelihood)
    n_networks = max(draws, 1)
    batches = torch.arange(task.n_data).split(task.batch_size)
    total: Answers | None = None
    progress = bar(n_networks * len(batches), "predictions", task.progress)
    with progress, torch.no_grad(), task.evaluation():
        for network in networks:
            parts = []
            for indices in batches:
                parts.append(_answers(task, network, indices, likelihood, len(batches)))
                progress.update()
            answers = Answers.joined(parts)
            total = answers if total is None else total.plus(answers)
    assert total is not None
    return _predictions(total, n_networks, draws, likelihood, note)


def _predictions(
    total: Answers, n_networks: int, draws: int, likelihood: Likelihood, note: str
) -> Predictions:
    """The predictions, from sums over the networks."""
    losses = None
    if total.log_likelihoods is not None:
        losses = (math.log(n_networks) - total.log_likelihoods).to(total.dtype)
    if total.means is None or total.squared_means is None:
        return Predictions(
            mean=None,
            losses=losses,
            targets=None,
            draws=draws,
            likelihood=likelihood,
            note=f"{note}; {TOO_MANY}" if note else TOO_MANY,
        )
    mean = total.means / n_networks
    mean_square = total.squared_means / n_networks
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
    """The entropy H[p̄] and the information H[p̄] − 1/K Σ_k H[p_k] of every row.

    Both are None for a likelihood without an entropy.
    """
    noise = None if total.noise is None else total.noise / n_networks
    entropy = entropy_of(likelihood, mean, variance, noise)
    if entropy is None or total.entropies is None:
        return entropy, None
    mean_entropy = total.entropies / n_networks
    return entropy, (entropy - mean_entropy).clamp_min(0)


@dataclass
class Answers:
    """What a network answers, or the sums over several networks.

    There is one row per example, or per token that counts, ``[M]``.

    Attributes:
        dtype: of the outputs.
        log_likelihoods: log Σ_k p(y_i | f_k(x_i)) in float64; None without labels.
        means: Σ_k E[y | f_k(x)], ``[M, C]``; None where they are too many to store.
        squared_means: Σ_k E[y | f_k(x)]² in float64.
        entropies: Σ_k H[p_k], ``[M]``; None for a likelihood without an entropy.
        noise: Σ_k σ_k², where the likelihood has a variance.
        targets: the targets of the rows; None without labels.
        examples: the index of the example that each row belongs to.
    """

    dtype: torch.dtype
    log_likelihoods: Tensor | None = None
    means: Tensor | None = None
    squared_means: Tensor | None = None
    entropies: Tensor | None = None
    noise: Tensor | None = None
    targets: Tensor | None = None
    examples: Tensor | None = None

    def losses_alone(self) -> Answers:
        """The answers without all that has a row per token."""
        return Answers(self.dtype, self.log_likelihoods)

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """One network's answers for all examples, from those for each batch."""
        all_have_means = all(part.means is not None for part in parts)
        if not all_have_means:
            parts = [part.losses_alone() for part in parts]
        return cls(
            dtype=parts[-1].dtype,
            log_likelihoods=_joined([part.log_likelihoods for part in parts]),
            means=_joined([part.means for part in parts]),
            squared_means=_joined([part.squared_means for part in parts]),
            entropies=_joined([part.entropies for part in parts]),
            noise=_joined([part.noise for part in parts]),
            targets=_joined([part.targets for part in parts]),
            examples=_joined([part.examples for part in parts]),
        )

    def plus(self, other: Answers) -> Answers:
        """The sums together with those of other networks, for the same examples."""
        log_likelihoods = None
        if self.log_likelihoods is not None and other.log_likelihoods is not None:
            log_likelihoods = torch.logaddexp(self.log_likelihoods, other.log_likelihoods)
        return Answers(
            dtype=self.dtype,
            log_likelihoods=log_likelihoods,
            means=_sum(self.means, other.means),
            squared_means=_sum(self.squared_means, other.squared_means),
            entropies=_sum(self.entropies, other.entropies),
            noise=_sum(self.noise, other.noise),
            targets=self.targets,
            examples=self.examples,
        )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts one behind the other; None where all parts are None."""
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """The sum; None where either tensor is None."""
    if left is None or right is None:
        return None
    return left + right


def _answers(
    task: Task,
    network: Network,
    indices: Tensor,
    likelihood: Likelihood,
    n_batches: int,
) -> Answers:
    """One network's answers for a batch; the losses alone where there are too many tokens."""
    outputs, targets = network.predicted(task, indices)
    log_likelihoods = None
    if targets is not None:
        log_likelihoods = -_losses(likelihood, outputs, targets).double().cpu()
    numbers_of_all_batches = outputs.numel() * n_batches
    if likelihood.is_sequence and numbers_of_all_batches > NUMBERS_LIMIT:
        return Answers(outputs.dtype, log_likelihoods)
    examples = indices
    if isinstance(likelihood, TokenCategorical):
        counted = _counted_tokens(likelihood, outputs, targets)
        tokens_per_example = counted.sum(1).cpu()
        examples = indices.repeat_interleave(tokens_per_example)
        outputs = outputs[counted]
        targets = None if targets is None else targets[counted]
    mean = likelihood.mean(outputs)
    noise = likelihood.noise(outputs)
    no_variance = torch.zeros_like(mean)  # of the mean prediction of a single network
    return Answers(
        dtype=outputs.dtype,
        log_likelihoods=log_likelihoods,
        means=mean.cpu(),
        squared_means=mean.double().square().cpu(),
        entropies=_on_cpu(entropy_of(likelihood, mean, no_variance, noise)),
        noise=_on_cpu(noise),
        targets=_on_cpu(targets),
        examples=examples,
    )


def _counted_tokens(
    likelihood: TokenCategorical, outputs: Tensor, targets: Tensor | None
) -> Tensor:
    """Which tokens have a label that counts, ``[B, T]``; all of them where there are no labels."""
    if targets is not None:
        return likelihood.counted(targets)
    return torch.ones(outputs.shape[:2], dtype=torch.bool, device=outputs.device)


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def entropy_of(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, noise: Tensor | None
) -> Tensor | None:
    """H[y] of each row in nats, ``[M]``; None for counts and for losses that are no −log p.

    Args:
        mean: the mean prediction, ``[M, C]``.
        variance: the variance of the mean prediction, ``[M, C]``.
        noise: σ² of a Gaussian likelihood; None for others.

    >>> entropy_of(Categorical(), torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.zeros(2, 2), None)
    tensor([0.6931, 0.0000])
    """
    is_normal = noise is not None
    if is_normal:
        return 0.5 * (2 * math.pi * math.e * (variance + noise)).log().sum(-1)
    if isinstance(likelihood, Bernoulli):
        return -(torch.xlogy(mean, mean) + torch.xlogy(1 - mean, 1 - mean)).sum(-1)
    if isinstance(likelihood, Categorical):
        return -torch.xlogy(mean, mean).sum(-1)
    return None


def _losses(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """−log p of every example, or of every token that counts in sequences.

    It is NaN where the target of an example is ignored.
    """
    if isinstance(likelihood, TokenCategorical):
        counted = likelihood.counted(targets)
        return likelihood.token_nll(outputs, targets)[counted]
    losses = likelihood.nll(outputs, targets)
    if not isinstance(likelihood, Categorical) or likelihood.ignore_index is None:
        return losses
    targets_are_probabilities = targets.ndim == 2
    if targets_are_probabilities:
        return losses
    is_ignored = targets == likelihood.ignore_index
    return losses.masked_fill(is_ignored, torch.nan)
