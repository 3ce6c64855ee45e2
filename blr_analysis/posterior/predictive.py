"""What a posterior predicts: the model's answers, averaged over weights drawn from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis import regression
from blr_analysis.likelihoods import (
    Bernoulli,
    Categorical,
    Function,
    Gaussian,
    Likelihood,
    MeanAndVariance,
    Poisson,
    TokenCategorical,
)
from blr_analysis.progress import bar
from blr_analysis.task import Task
from blr_analysis.views import Tabular

BINS = 15


@dataclass(frozen=True)
class Predictions(Tabular):
    """p(y | x) averaged over draws of the weights, for every example, on the CPU.

    Attributes:
        mean: E[y | x], probabilities, means or rates ``[N, C]``; None for sequences.
        losses: −log p(y_i | x_i) in nats, with the constants that ``GaussianNLLLoss`` and
            ``PoissonNLLLoss`` leave out, ``[N]``; of sequences one per token, ``[tokens]``. NaN
            where the target is ignored. Of losses that are no −log p (``MSELoss``, the square;
            functions), −log E[exp(−ℓ)] of that loss; the repr calls it by its name.
        targets: ``[N]`` or ``[N, C]``; None for sequences.
        draws: how many networks were averaged; 0: one, at the posterior's mean.
        note: whether the inputs are in other units than those of the training, in one line.
    """

    mean: Tensor | None
    losses: Tensor
    targets: Tensor | None
    draws: int
    likelihood: Likelihood
    note: str = ""

    def __len__(self) -> int:
        return len(self.losses)

    def table_columns(self) -> dict[str, Any]:
        """Columns of the table in order."""
        columns: dict[str, Any] = {"loss": self.losses}
        if self.targets is not None:
            columns["target"] = self.targets
        if self.mean is not None:
            columns["mean"] = self.mean
        return columns

    def __repr__(self) -> str:
        facts = [f"{len(self.losses):,}", f"draws={self.draws}", f"{self.measure}={self.nll:.4g}"]
        if self.accuracy is not None:
            facts.append(f"accuracy={self.accuracy:.4g}")
        if self.rmse is not None:
            facts += [f"rmse={self.rmse:.4g}", f"r2={self.r2:.4g}"]
        if self.calibration_error is not None:
            facts.append(f"calibration_error={self.calibration_error:.4g}")
        note = f"; {self.note}" if self.note else ""
        return f"Predictions({', '.join(facts)}{note})"

    @property
    def measure(self) -> str:
        """What ``losses`` are: "nll", or the loss that is no −log p."""
        return measure_of(self.likelihood)

    @property
    def nll(self) -> float:
        """The mean of ``losses``, in nats per example (of sequences: per token). Leaving one out
        and what-ifs state the loss of training: with weights and without those constants."""
        return float(self.losses.double().nanmean())

    @property
    def accuracy(self) -> float | None:
        """The share of examples whose most probable answer is right, of several labels all of
        them; None for regression and sequences."""
        judged = self._judged()
        if judged is None or self.mean is None:
            return None
        _, hits = judged
        labels = self.mean.shape[-1] if isinstance(self.likelihood, Bernoulli) else 1
        return float(hits.view(-1, labels).amin(-1).mean())

    @property
    def rmse(self) -> float | None:
        """The root of the mean squared error of ``mean``, in the targets' units; None where the
        likelihood is not Gaussian."""
        if self._numbers is None:
            return None
        return regression.rmse(*self._numbers)

    @property
    def r2(self) -> float | None:
        """The share of the targets' variance that ``mean`` explains; None as ``rmse``."""
        if self._numbers is None:
            return None
        return regression.r2(*self._numbers)

    @property
    def _numbers(self) -> tuple[Tensor, Tensor] | None:
        """Predictions and targets of a regression."""
        is_regression = isinstance(self.likelihood, Gaussian)
        if not is_regression or self.mean is None or self.targets is None:
            return None
        return self.mean, self.targets

    @property
    def calibration_error(self) -> float | None:
        """ECE = Σ_b (n_b / n) |accuracy_b − confidence_b| over 15 equal bins of confidence, the
        probability of the answer, label by label; None for regression and sequences."""
        judged = self._judged()
        if judged is None:
            return None
        confidence, hits = judged
        bins = (confidence * BINS).long().clamp(max=BINS - 1)
        gaps = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, hits - confidence)
        return float(gaps.abs().sum() / len(hits))

    def _judged(self) -> tuple[Tensor, Tensor] | None:
        """Confidence in every answer that counts, and whether it is right."""
        if self.mean is None or self.targets is None or not self.likelihood.is_classification:
            return None
        p = self.mean.double()
        if isinstance(self.likelihood, Bernoulli):
            hits = (p > 0.5) == (self.targets > 0.5)
            return torch.maximum(p, 1 - p).flatten(), hits.flatten().double()
        confidence, answer = p.max(-1)
        truth = self.targets.argmax(-1) if self.targets.ndim == 2 else self.targets
        counts = ~self.losses.isnan()
        return confidence[counts], (answer == truth)[counts].double()


def measure_of(kind: Likelihood) -> str:
    """What a likelihood's losses are: "nll", or the loss that is no −log p."""
    if isinstance(kind, Gaussian) and not kind.normalized:
        return "squared error" if kind.variance == 0.5 else f"loss of {kind!r}"
    return f"loss of {kind!r}" if isinstance(kind, Function) else "nll"


def averaged(
    task: Task, networks: Iterable[Mapping[str, Tensor]], draws: int, note: str = ""
) -> Predictions:
    """The task's predictions averaged over ``networks``, parameters by name; 0 draws count as one.

    One network is held at a time, and N × C probabilities (of sequences N × T losses).

    Raises:
        ModelError, DataError: as :meth:`Task.run`.
    """
    scored = scored_by(task.likelihood)
    n_networks = max(draws, 1)
    batches = torch.arange(task.n_data).split(task.batch_size)
    answers: Answers | None = None
    progress = bar(n_networks * len(batches), "predictions", task.progress)
    with progress, torch.no_grad(), task.evaluation():
        for params in networks:
            parts = []
            for indices in batches:
                parts.append(_answers(task, params, indices, scored, n_networks))
                progress.update()
            of_network = Answers.joined(parts)
            answers = of_network if answers is None else answers.plus(of_network)
    assert answers is not None
    losses = (math.log(n_networks) - answers.log_likelihoods).to(answers.dtype)
    return Predictions(answers.mean, losses, answers.targets, draws, scored, note)


@dataclass
class Answers:
    """What a network answers, or several together.

    Attributes:
        log_likelihoods: log Σ_k p(y_i | f_k(x_i)), of sequences of every token, in float64.
        dtype: of the outputs.
        mean: 1/K Σ_k E[y | f_k(x)] over the networks so far; None for sequences.
        targets: None for sequences.
    """

    log_likelihoods: Tensor
    dtype: torch.dtype
    mean: Tensor | None = None
    targets: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """Those for all examples, from those for a batch each."""
        log_likelihoods = torch.cat([part.log_likelihoods for part in parts])
        dtype = parts[-1].dtype
        means = [part.mean for part in parts if part.mean is not None]
        targets = [part.targets for part in parts if part.targets is not None]
        if not means:
            return cls(log_likelihoods, dtype)
        return cls(log_likelihoods, dtype, torch.cat(means), torch.cat(targets))

    def plus(self, other: Answers) -> Answers:
        """Those of the networks of both."""
        log_likelihoods = torch.logaddexp(self.log_likelihoods, other.log_likelihoods)
        if self.mean is None or other.mean is None:
            return Answers(log_likelihoods, self.dtype)
        return Answers(log_likelihoods, self.dtype, self.mean + other.mean, self.targets)


def _answers(
    task: Task,
    params: Mapping[str, Tensor],
    indices: Tensor,
    scored: Likelihood,
    n_networks: int,
) -> Answers:
    """One network's for some examples, its mean divided by K."""
    f, y = task.run(task.fetch(indices), params, indices)
    log_likelihoods = -_losses(scored, f, y).double().cpu()
    if scored.is_sequence:
        return Answers(log_likelihoods, f.dtype)
    return Answers(log_likelihoods, f.dtype, scored.mean(f).cpu() / n_networks, y.cpu())


def scored_by(likelihood: Likelihood) -> Likelihood:
    """Without weights and smoothing, which are how a model is trained and not what it predicts,
    and with the constants that make a loss −log p."""
    kind = likelihood.kind
    if isinstance(kind, Categorical):
        return type(kind)(ignore_index=kind.ignore_index)
    if isinstance(kind, MeanAndVariance):
        return MeanAndVariance(full=True, eps=kind.eps)
    if isinstance(kind, Bernoulli):
        return Bernoulli()
    if isinstance(kind, Poisson):
        return Poisson()
    return kind


def _losses(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """−log p of every example, NaN where it is ignored; of sequences of every token that counts."""
    if isinstance(likelihood, TokenCategorical):
        return likelihood.token_nll(f, y)[likelihood.counted(y)]
    losses = likelihood.nll(f, y)
    ignored = likelihood.ignore_index if isinstance(likelihood, Categorical) else None
    if ignored is None or y.ndim == 2:
        return losses
    return losses.masked_fill(y == ignored, torch.nan)
