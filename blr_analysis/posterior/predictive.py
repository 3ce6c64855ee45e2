"""What a posterior predicts: the model's answers, averaged over weights drawn from it.

    p̄ = 1/K Σ_k p_k,    p_k = p(y | f_θₖ(x)),    θₖ ~ q

The uncertainty of an answer has two parts. The networks disagree because the posterior is wide:
more data would settle that part. Each network alone is unsure because the data are noisy.

    entropy        H[p̄]                      both parts
    information    H[p̄] − 1/K Σ_k H[p_k]     the first: what the label would tell of the weights
    variance       1/K Σ_k (E_k y − E y)²    of the mean prediction, without the noise of y

A Gaussian likelihood of variance σ² has those of a normal distribution with the same variance v of
the mean prediction: ½ log 2πe (v + σ²) and ½ log (1 + v/σ²), summed over the outputs.

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

BINS = 15  # of confidence, as calibration errors are usually reported


class Bins(NamedTuple):
    """Mean confidence, accuracy and number of the answers in each bin of confidence, ``[bins]``;
    empty bins are left out."""

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


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
        variance: of the mean prediction over the draws, ``[M, C]``; None for a single network.
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
        judged = self._judged()
        if judged is None or self.probabilities is None:
            return None
        _, hits = judged
        n_outputs = self.probabilities.shape[-1] if isinstance(self.likelihood, Bernoulli) else 1
        all_right = hits.view(-1, n_outputs).amin(-1)
        return float(all_right.mean())

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
        judged = self._judged()
        if judged is None:
            return None
        confidence, hits = judged
        bins = (confidence * BINS).long().clamp(max=BINS - 1)
        zeros = torch.zeros(BINS, dtype=torch.float64)
        counts = zeros.index_add(0, bins, torch.ones_like(confidence))
        mean_confidence = zeros.index_add(0, bins, confidence) / counts
        accuracy = zeros.index_add(0, bins, hits) / counts
        is_filled = counts > 0
        return Bins(mean_confidence[is_filled], accuracy[is_filled], counts[is_filled])

    def _judged(self) -> tuple[Tensor, Tensor] | None:
        """The confidence of every answer that counts, and 1 where it is right, 0 where it is wrong;
        None for regression and without labels."""
        if self.probabilities is None or self.labels is None:
            return None
        p = self.probabilities.double()
        if isinstance(self.likelihood, Bernoulli):
            hits = (p > 0.5) == (self.labels > 0.5)
            return torch.maximum(p, 1 - p).flatten(), hits.flatten().double()
        confidence, answers = p.max(-1)
        has_class_probabilities = self.labels.ndim == 2
        classes = self.labels.argmax(-1) if has_class_probabilities else self.labels
        counted = self._counted()
        return confidence[counted], (answers == classes)[counted].double()

    def _counted(self) -> Tensor:
        """Which rows have a label that counts, ``[M]``."""
        assert self.losses is not None
        return ~self.losses.isnan()


def measure_of(kind: Likelihood) -> str:
    """The name of a likelihood's losses: "nll", or that of a loss which is no −log p."""
    if isinstance(kind, Gaussian) and not kind.normalized:
        is_square = kind.variance == 0.5  # ½ (f − y)² / ½
        return "squared error" if is_square else f"loss of {kind!r}"
    return f"loss of {kind!r}" if isinstance(kind, Function) else "nll"


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
