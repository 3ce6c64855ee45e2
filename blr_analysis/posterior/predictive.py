"""What a posterior predicts: the model's answers, averaged over weights drawn from it.

    p̄ = 1/K Σ_k p_k,    p_k = p(y | f_θₖ(x)),    θₖ ~ q

The uncertainty of an answer has two parts. The networks disagree because the posterior is wide:
more data would settle that part. Each network alone is unsure because the data are noisy.

    entropy        H[p̄]                      both parts
    information    H[p̄] − 1/K Σ_k H[p_k]     the first: what the label would tell of the weights
    variance       1/K Σ_k (E_k y − E y)²    of the mean prediction, without the noise of y

For a Gaussian likelihood of variance σ², p̄ is a mixture whose entropy has no closed form. A normal
distribution with the same variance v + σ² stands for it, where v is the variance above. Its entropy
is ½ log 2πe (v + σ²) and its information ½ log (1 + v/σ²), summed over the outputs.

:mod:`blr_analysis.posterior.averaging` runs the networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
)
from blr_analysis.views import Plottable, Tabular

BINS = 15  # bins of confidence; calibration errors are usually reported with so many


class Bins(NamedTuple):
    """Mean confidence, accuracy and number of the answers in each bin of confidence, ``[bins]``;
    empty bins are left out."""

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


class Answers(NamedTuple):
    """The probability that the network gives to each of its answers, and 1 where the answer is
    right, 0 where it is wrong."""

    confidence: Tensor
    is_right: Tensor


@dataclass(frozen=True)
class Predictions(Tabular, Plottable):
    """p(y | x) averaged over draws of the weights, on the CPU.

    There is one row per example, in the order of the data, ``[M]``. Sequences and images have one
    row per token or pixel that counts.

    Attributes:
        mean: E[y | x]: probabilities, means or rates ``[N, C]``; None for sequences, whose
            ``probabilities`` are per token.
        losses: −log p(y_i | x_i) in nats, ``[M]``, with the constants that ``GaussianNLLLoss`` and
            ``PoissonNLLLoss`` leave out. For a loss ℓ that is no −log p (``MSELoss``, functions),
            −log E[exp(−ℓ)]; the repr names the loss. NaN where the target is ignored. None without
            labels.
        targets: ``[N]`` or ``[N, C]``; None for sequences and without labels.
        draws: the number of networks that were averaged; 0: one, at the posterior's mean.
        note: what is missing, or that the inputs are in other units than those of the training, in
            one line.
        probabilities: p̄ of every row, ``[M, C]``; None for regression.
        labels: the classes of the rows, or numbers shaped as the targets; None without labels.
        variance: that of the mean prediction over the draws, ``[M, C]``; None for a single network.
        entropy: of p̄ in nats, ``[M]``; summed over several binary outputs. None for counts, and
            where the likelihood has no noise (``MSELoss``, functions).
        information: how much of the entropy the label would settle, in nats, ``[M]``; None where
            ``entropy`` is, and for a single network.
        example: the index of the sequence that each row belongs to, ``[M]``; None for other data.
    """

    mean: Tensor | None
    losses: Tensor | None
    targets: Tensor | None
    draws: int
    likelihood: Likelihood
    note: str = ""
    probabilities: Tensor | None = None
    labels: Tensor | None = None
    variance: Tensor | None = None
    entropy: Tensor | None = None
    information: Tensor | None = None
    example: Tensor | None = None

    def __len__(self) -> int:
        for rows in (self.losses, self.mean, self.entropy):
            if rows is not None:
                return len(rows)
        return 0

    def table_columns(self) -> dict[str, Any]:
        """The table's columns in order; attributes that are None have no column."""
        columns: dict[str, Any] = {
            "example": self.example,
            "loss": self.losses,
            "target": self.targets,
            "mean": self.mean,
            "variance": None if self.variance is None else self.variance.sum(-1),
            "entropy": self.entropy,
            "information": self.information,
        }
        return {name: values for name, values in columns.items() if values is not None}

    def __repr__(self) -> str:
        facts = [f"{len(self):,}", f"draws={self.draws}"]
        scores = {
            self.measure: self.nll,
            "accuracy": self.accuracy,
            "rmse": self.rmse,
            "r2": self.r2,
            "calibration_error": self.calibration_error,
            "brier": self.brier,
        }
        facts += [f"{name}={score:.4g}" for name, score in scores.items() if score is not None]
        if self.losses is None:
            facts.append("no labels: no nll, accuracy or brier")
        note = f"; {self.note}" if self.note else ""
        return f"Predictions({', '.join(facts)}{note})"

    @property
    def measure(self) -> str:
        """The name of ``losses``: "nll", or that of a loss which is no −log p."""
        return measure_of(self.likelihood)

    @property
    def nll(self) -> float | None:
        """The mean of ``losses``, in nats per example or token; None without labels.

        Leave-one-out and what-ifs report another number, the loss of the training: it has class
        weights, and lacks the constants of a density.
        """
        return None if self.losses is None else float(self.losses.double().nanmean())

    @property
    def accuracy(self) -> float | None:
        """The share of rows whose most probable answer is right; None for regression and without
        labels.

        With several binary outputs an answer is right where all of them are.
        """
        answers = self._answers()
        if answers is None or self.probabilities is None:
            return None
        has_binary_outputs = isinstance(self.likelihood, Bernoulli)
        answers_per_row = self.probabilities.shape[-1] if has_binary_outputs else 1
        row_is_right = answers.is_right.view(-1, answers_per_row).amin(-1)
        return float(row_is_right.mean())

    @property
    def rmse(self) -> float | None:
        """The root of the mean squared error of ``mean``, in the targets' units; None where the
        likelihood is not Gaussian."""
        if self._regression is None:
            return None
        return regression.rmse(*self._regression)

    @property
    def r2(self) -> float | None:
        """The share of the targets' variance that ``mean`` explains; None where ``rmse`` is."""
        if self._regression is None:
            return None
        return regression.r2(*self._regression)

    @property
    def _regression(self) -> tuple[Tensor, Tensor] | None:
        """Predictions and targets of a regression; None for other likelihoods."""
        is_regression = isinstance(self.likelihood, Gaussian)
        if not is_regression or self.mean is None or self.targets is None:
            return None
        return self.mean, self.targets

    @property
    def calibration_error(self) -> float | None:
        """ECE = Σ_b (n_b / n) abs(accuracy_b − confidence_b) over 15 equal bins of confidence.

        Confidence is the probability of the answer; several binary outputs count one by one. None
        for regression and without labels.
        """
        bins = self.reliability()
        if bins is None:
            return None
        gaps = (bins.accuracy - bins.confidence).abs()
        return float((gaps * bins.counts).sum() / bins.counts.sum())

    @property
    def brier(self) -> float | None:
        """The mean of Σ_c (p_c − y_c)² over the rows that count: 0 at best, 2 at worst.

        For binary outputs, the mean of (p − y)² over all of them: 1 at worst. None for regression
        and without labels.
        """
        if self.probabilities is None or self.labels is None:
            return None
        p = self.probabilities.double()
        if isinstance(self.likelihood, Bernoulli):
            return float((p - self.labels).square().mean())
        counted = self._counted()
        labels = self.labels[counted]
        if labels.ndim == 2:  # probabilities of the classes
            targets = labels.double()
        else:
            targets = torch.nn.functional.one_hot(labels, p.shape[-1]).double()
        return float((p[counted] - targets).square().sum(-1).mean())

    def reliability(self) -> Bins | None:
        """Mean confidence and accuracy of the answers in 15 equal bins of confidence, as
        ``plot()`` draws them; None for regression and without labels."""
        answers = self._answers()
        if answers is None:
            return None
        bin_numbers = (answers.confidence * BINS).long().clamp(max=BINS - 1)
        zeros = torch.zeros(BINS, dtype=torch.float64)
        counts = zeros.index_add(0, bin_numbers, torch.ones_like(answers.confidence))
        confidence = zeros.index_add(0, bin_numbers, answers.confidence) / counts
        accuracy = zeros.index_add(0, bin_numbers, answers.is_right) / counts
        is_filled = counts > 0
        return Bins(confidence[is_filled], accuracy[is_filled], counts[is_filled])

    def _answers(self) -> Answers | None:
        """The answers of the rows that count; None for regression and without labels.

        The answer of a row is its most probable class; several binary outputs are as many answers.
        """
        if self.probabilities is None or self.labels is None:
            return None
        p = self.probabilities.double()
        if isinstance(self.likelihood, Bernoulli):
            is_right = (p > 0.5) == (self.labels > 0.5)
            confidence = torch.maximum(p, 1 - p)
            return Answers(confidence.flatten(), is_right.flatten().double())
        confidence, predicted_classes = p.max(-1)
        has_class_probabilities = self.labels.ndim == 2
        classes = self.labels.argmax(-1) if has_class_probabilities else self.labels
        is_right = predicted_classes == classes
        counted = self._counted()
        return Answers(confidence[counted], is_right[counted].double())

    def _counted(self) -> Tensor:
        """Which rows have a label that counts, ``[M]``."""
        assert self.losses is not None
        return ~self.losses.isnan()


def measure_of(kind: Likelihood) -> str:
    """The name of a likelihood's losses: "nll", or that of a loss which is no −log p."""
    if isinstance(kind, Function):
        return f"loss of {kind!r}"
    if not isinstance(kind, Gaussian) or kind.normalized:
        return "nll"
    is_square = kind.variance == 0.5  # ℓ = (f − y)² / 2σ² is then (f − y)²
    return "squared error" if is_square else f"loss of {kind!r}"


def scored_by(likelihood: Likelihood) -> Likelihood:
    """The likelihood by which predictions are scored.

    It has no class weights and no label smoothing, which belong to the training, and it has the
    constants that make a loss −log p.
    """
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
