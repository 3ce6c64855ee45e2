"""What a posterior predicts: the model's answers, averaged over weights drawn from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """

    mean: Tensor | None
    losses: Tensor
    targets: Tensor | None
    draws: int
    likelihood: Likelihood

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
        said = {"accuracy": self.accuracy, "calibration_error": self.calibration_error}
        more = "".join(f", {name}={x:.4g}" for name, x in said.items() if x is not None)
        size = f"{len(self.losses):,}, draws={self.draws}"
        return f"Predictions({size}, {self.measure}={self.nll:.4g}{more})"

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
        """Of the most probable answers; of several labels, of examples with all of them right;
        None for regression and sequences."""
        judged = self._judged()
        if judged is None or self.mean is None:
            return None
        labels = self.mean.shape[-1] if isinstance(self.likelihood, Bernoulli) else 1
        return float(judged[1].view(-1, labels).amin(-1).mean())

    @property
    def calibration_error(self) -> float | None:
        """ECE = Σ_b (n_b / n) |accuracy_b − confidence_b| over 15 equal bins of confidence, the
        probability of the answer, label by label; None for regression and sequences."""
        judged = self._judged()
        if judged is None:
            return None
        confidence, right = judged
        bins = (confidence * BINS).long().clamp(max=BINS - 1)
        sums = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, right - confidence)
        return float(sums.abs().sum() / len(right))

    def _judged(self) -> tuple[Tensor, Tensor] | None:
        """Confidence in every answer that counts, and whether it is right."""
        if self.mean is None or self.targets is None or not self.likelihood.is_classification:
            return None
        p = self.mean.double()
        if isinstance(self.likelihood, Bernoulli):
            confidence, right = torch.maximum(p, 1 - p), (p > 0.5) == (self.targets > 0.5)
            return confidence.flatten(), right.flatten().double()
        confidence, said = p.max(-1)
        truth = self.targets.argmax(-1) if self.targets.ndim == 2 else self.targets
        counts = ~self.losses.isnan()
        return confidence[counts], (said == truth)[counts].double()


def measure_of(kind: Likelihood) -> str:
    """What its losses are: "nll", or the loss that is no −log p."""
    if isinstance(kind, Gaussian) and not kind.normalized:
        return "squared error" if kind.variance == 0.5 else f"loss of {kind!r}"
    return f"loss of {kind!r}" if isinstance(kind, Function) else "nll"


def averaged(task: Task, networks: Iterable[Mapping[str, Tensor]], draws: int) -> Predictions:
    """The task's predictions averaged over ``networks``, parameters by name; 0 draws count as one.

    One network is held at a time, and N × C probabilities (of sequences N × T losses).

    Raises:
        ModelError, DataError: as :meth:`Task.run`.
    """
    scored, passes = scored_by(task.likelihood), max(draws, 1)
    order = torch.arange(task.n_data).split(task.batch_size)
    log_p, mean, targets, dtype = torch.empty(0), None, None, torch.float64
    shown = bar(passes * len(order), "predictions", task.progress)
    with shown, torch.no_grad(), task.evaluation():
        for k, params in enumerate(networks):
            parts: list[tuple[Tensor, ...]] = []
            for indices in order:
                f, y = task.run(task.fetch(indices), params, indices)
                dtype, log_likelihood = f.dtype, -_losses(scored, f, y).double().cpu()
                said = () if scored.is_sequence else (scored.mean(f).cpu() / passes, y.cpu())
                parts.append((log_likelihood, *said))
                shown.update()
            now, *said = (torch.cat(part) for part in zip(*parts, strict=True))
            log_p = torch.logaddexp(log_p, now) if k else now
            if said:
                mean, targets = said[0] if mean is None else mean + said[0], said[1]
    return Predictions(mean, (math.log(passes) - log_p).to(dtype), targets, draws, scored)


def scored_by(likelihood: Likelihood) -> Likelihood:
    """Without weights and smoothing, which are how a model is trained and not what it predicts,
    and with the constants that make a loss −log p."""
    kind = likelihood.kind
    if isinstance(kind, Categorical):
        return type(kind)(ignore_index=kind.ignore_index)
    if isinstance(kind, MeanAndVariance):
        return MeanAndVariance(full=True, eps=kind.eps)
    whole = next((k for k in (Bernoulli, Poisson) if isinstance(kind, k)), None)
    return kind if whole is None else whole()


def _losses(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """−log p of every example that counts, of sequences of every token; NaN for ignored examples,
    tokens that are ignored are left out."""
    if isinstance(likelihood, TokenCategorical):
        return likelihood.token_nll(f, y)[likelihood.counted(y)]
    losses = likelihood.nll(f, y)
    ignored = likelihood.ignore_index if isinstance(likelihood, Categorical) else None
    if ignored is None or y.ndim == 2:
        return losses
    return losses.masked_fill(y == ignored, torch.nan)
