"""What a posterior predicts: the model's answers, averaged over weights drawn from it.

    p̄ = 1/K Σ_k p_k,    p_k = p(y | f_θₖ(x)),    θₖ ~ q

How sure the answer is splits in two. What the networks disagree on is the posterior's: more data
would settle it. What each of them leaves open is the data's.

    entropy        H[p̄]
    information    H[p̄] − 1/K Σ_k H[p_k]             what the label would tell of the weights
    variance       1/K Σ_k (E_k y − E y)²            of the mean prediction, without y's own noise

Of a Gaussian likelihood with variance σ² both are those of a normal of the same variance v:
½ log 2πe (v + σ²) and ½ log (1 + v/σ²), summed over the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
    TokenCategorical,
)
from blr_analysis.progress import bar
from blr_analysis.task import Task
from blr_analysis.views import Plottable, Tabular

BINS = 15
MOST_NUMBERS = 2**27  # tokens times classes whose probabilities are kept: half a GiB in float32
TOO_MANY = "too many tokens and classes to keep: no variance, entropy, accuracy"


class Bins(NamedTuple):
    """Answers by how sure they are, the bins that hold some; ``[bins]`` each."""

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Predictions(Tabular, Plottable):
    """p(y | x) averaged over draws of the weights, on the CPU: one row per example, of sequences
    and images one per token or pixel that counts, in order, ``[M]``.

    Attributes:
        mean: E[y | x], probabilities, means or rates ``[N, C]``; None for sequences, whose
            ``probabilities`` are per token.
        losses: −log p(y_i | x_i) in nats, with the constants that ``GaussianNLLLoss`` and
            ``PoissonNLLLoss`` leave out, ``[M]``. NaN where the target is ignored. Of losses that
            are no −log p (``MSELoss``, the square; functions), −log E[exp(−ℓ)] of that loss; the
            repr calls it by its name. None without labels.
        targets: ``[N]`` or ``[N, C]``; None for sequences and without labels.
        draws: how many networks were averaged; 0: one, at the posterior's mean.
        note: what is missing, or whether the inputs are in other units than those of the training,
            in one line.
        probabilities: p̄ of every row, ``[M, C]``; None for regression.
        labels: the classes of the rows, or as the targets; None without labels.
        variance: of the mean prediction over the draws, ``[M, C]``; None of a single network.
        entropy: of p̄ in nats, ``[M]``; of several binary outputs the sum of theirs. None where
            the likelihood has no noise of its own (``MSELoss``, functions) and for counts.
        information: how much of it the label would settle, in nats, ``[M]``; None as ``entropy``,
            and of a single network.
        example: of sequences, to which one each row belongs, ``[M]``; None elsewhere.
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
        """Columns of the table in order; what is not there has none."""
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
        """What ``losses`` are: "nll", or the loss that is no −log p."""
        return measure_of(self.likelihood)

    @property
    def nll(self) -> float | None:
        """The mean of ``losses``, in nats per example (of sequences: per token); None without
        labels. Leaving one out and what-ifs state the loss of training: with weights and without
        those constants."""
        return None if self.losses is None else float(self.losses.double().nanmean())

    @property
    def accuracy(self) -> float | None:
        """The share of examples (tokens, pixels) whose most probable answer is right, of several
        labels all of them; None for regression and without labels."""
        judged = self._judged()
        if judged is None or self.probabilities is None:
            return None
        _, hits = judged
        labels = self.probabilities.shape[-1] if isinstance(self.likelihood, Bernoulli) else 1
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
        """ECE = Σ_b (n_b / n) abs(accuracy_b − confidence_b) over 15 equal bins of confidence, the
        probability of the answer, label by label; None for regression and without labels."""
        bins = self.reliability()
        if bins is None:
            return None
        gaps = (bins.accuracy - bins.confidence).abs()
        return float((gaps * bins.counts).sum() / bins.counts.sum())

    @property
    def brier(self) -> float | None:
        """Σ_c (p_c − y_c)², the mean over the examples that count, 0 at best and 2 at worst; of
        binary outputs (p − y)², the mean over all of them, 1 at worst. None for regression and
        without labels."""
        if self.probabilities is None or self.labels is None:
            return None
        p = self.probabilities.double()
        if isinstance(self.likelihood, Bernoulli):
            return float((p - self.labels).square().mean())
        counts = self._counted()
        if self.labels.ndim == 2:
            shares = self.labels[counts].double()
        else:
            shares = torch.nn.functional.one_hot(self.labels[counts], p.shape[-1]).double()
        return float((p[counts] - shares).square().sum(-1).mean())

    def reliability(self) -> Bins | None:
        """Mean confidence and accuracy of the answers in 15 equal bins of confidence, what
        ``plot()`` draws; None for regression and without labels."""
        judged = self._judged()
        if judged is None:
            return None
        confidence, hits = judged
        places = (confidence * BINS).long().clamp(max=BINS - 1)
        zeros = torch.zeros(BINS, dtype=torch.float64)
        counts = zeros.index_add(0, places, torch.ones_like(confidence))
        holds_some = counts > 0
        confidences = zeros.index_add(0, places, confidence) / counts
        accuracies = zeros.index_add(0, places, hits) / counts
        return Bins(confidences[holds_some], accuracies[holds_some], counts[holds_some])

    def _judged(self) -> tuple[Tensor, Tensor] | None:
        """Confidence in every answer that counts, and whether it is right."""
        if self.probabilities is None or self.labels is None:
            return None
        p = self.probabilities.double()
        if isinstance(self.likelihood, Bernoulli):
            hits = (p > 0.5) == (self.labels > 0.5)
            return torch.maximum(p, 1 - p).flatten(), hits.flatten().double()
        confidence, answer = p.max(-1)
        truth = self.labels.argmax(-1) if self.labels.ndim == 2 else self.labels
        counts = self._counted()
        return confidence[counts], (answer == truth)[counts].double()

    def _counted(self) -> Tensor:
        """Which rows have a label that counts, ``[M]``."""
        assert self.losses is not None
        return ~self.losses.isnan()


def measure_of(kind: Likelihood) -> str:
    """What a likelihood's losses are: "nll", or the loss that is no −log p."""
    if isinstance(kind, Gaussian) and not kind.normalized:
        return "squared error" if kind.variance == 0.5 else f"loss of {kind!r}"
    return f"loss of {kind!r}" if isinstance(kind, Function) else "nll"


def averaged(
    task: Task, networks: Iterable[Mapping[str, Tensor]], draws: int, note: str = ""
) -> Predictions:
    """The task's predictions averaged over ``networks``, parameters by name; 0 draws count as one.

    One network is held at a time, and N × C numbers, of sequences one for each token and class.

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
                parts.append(_answers(task, params, indices, scored, len(batches)))
                progress.update()
            of_network = Answers.joined(parts)
            answers = of_network if answers is None else answers.plus(of_network)
    assert answers is not None
    return _predictions(answers, n_networks, draws, scored, note)


def _predictions(
    answers: Answers, n_networks: int, draws: int, likelihood: Likelihood, note: str
) -> Predictions:
    losses = None
    if answers.log_likelihoods is not None:
        losses = (math.log(n_networks) - answers.log_likelihoods).to(answers.dtype)
    if answers.rows is None or answers.squares is None:
        notes = "; ".join(filter(None, [note, TOO_MANY]))
        return Predictions(None, losses, None, draws, likelihood, notes)
    mean = answers.rows / n_networks
    spread = (answers.squares / n_networks - mean.double().square()).clamp_min(0).to(mean.dtype)
    noise = None if answers.noise is None else answers.noise / n_networks
    entropy = entropy_of(likelihood, mean, spread, noise)
    information = None
    if entropy is not None and answers.entropies is not None:
        information = (entropy - answers.entropies / n_networks).clamp_min(0)
    is_one = n_networks == 1
    is_sequence = likelihood.is_sequence
    return Predictions(
        mean=None if is_sequence else mean,
        losses=losses,
        targets=None if is_sequence else answers.targets,
        draws=draws,
        likelihood=likelihood,
        note=note,
        probabilities=mean if likelihood.is_classification else None,
        labels=answers.targets if likelihood.is_classification else None,
        variance=None if is_one else spread,
        entropy=entropy,
        information=None if is_one else information,
        example=answers.examples if is_sequence else None,
    )


@dataclass
class Answers:
    """What a network answers, or the sums over several; a row per example or token that counts.

    Attributes:
        dtype: of the outputs.
        log_likelihoods: log Σ_k p(y_i | f_k(x_i)) in float64; None without labels.
        rows: Σ_k E[y | f_k(x)], ``[M, C]``; None where they are too many.
        squares: Σ_k E[y | f_k(x)]² in float64.
        entropies: Σ_k H[p_k], ``[M]``; None of a likelihood without one.
        noise: Σ_k σ_k², where the likelihood has a variance.
        targets: of the rows; None without labels.
        examples: to which one each row belongs.
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
        """Those for all examples, from those for a batch each."""
        all_have_rows = all(part.rows is not None for part in parts)
        if not all_have_rows:
            parts = [part.without_rows() for part in parts]
        return cls(
            parts[-1].dtype,
            _joined([part.log_likelihoods for part in parts]),
            _joined([part.rows for part in parts]),
            _joined([part.squares for part in parts]),
            _joined([part.entropies for part in parts]),
            _joined([part.noise for part in parts]),
            _joined([part.targets for part in parts]),
            _joined([part.examples for part in parts]),
        )

    def plus(self, other: Answers) -> Answers:
        """Those of the networks of both."""
        log_likelihoods = None
        if self.log_likelihoods is not None and other.log_likelihoods is not None:
            log_likelihoods = torch.logaddexp(self.log_likelihoods, other.log_likelihoods)
        return Answers(
            self.dtype,
            log_likelihoods,
            _sum(self.rows, other.rows),
            _sum(self.squares, other.squares),
            _sum(self.entropies, other.entropies),
            _sum(self.noise, other.noise),
            self.targets,
            self.examples,
        )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return None if one is None or other is None else one + other


def _answers(
    task: Task, params: Mapping[str, Tensor], indices: Tensor, scored: Likelihood, n_batches: int
) -> Answers:
    """One network's for some examples, without rows where those of all batches are too many."""
    batch = task.fetch(indices)
    outputs, targets = task.predicted(batch, params, indices)
    log_likelihoods = None
    if targets is not None:
        log_likelihoods = -_losses(scored, outputs, targets).double().cpu()
    if scored.is_sequence and outputs.numel() * n_batches > MOST_NUMBERS:
        return Answers(outputs.dtype, log_likelihoods)
    examples = indices
    if isinstance(scored, TokenCategorical):
        counts = torch.ones(outputs.shape[:2], dtype=torch.bool, device=outputs.device)
        if targets is not None:
            counts = scored.counted(targets)
            targets = targets[counts]
        examples = indices.repeat_interleave(counts.sum(1).cpu())
        outputs = outputs[counts]
    mean = scored.mean(outputs)
    noise = scored.noise(outputs)
    entropies = entropy_of(scored, mean, torch.zeros_like(mean), noise)
    return Answers(
        outputs.dtype,
        log_likelihoods,
        mean.cpu(),
        mean.double().square().cpu(),
        None if entropies is None else entropies.cpu(),
        None if noise is None else noise.cpu(),
        None if targets is None else targets.cpu(),
        examples,
    )


def entropy_of(
    likelihood: Likelihood, mean: Tensor, spread: Tensor, noise: Tensor | None
) -> Tensor | None:
    """H[y] in nats, ``[M]``, where the mean prediction is ``mean`` and has the variance ``spread``;
    None of counts and of losses that are no −log p.

    >>> entropy_of(Categorical(), torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.zeros(2, 2), None)
    tensor([0.6931, 0.0000])
    """
    if noise is not None:
        return 0.5 * (2 * math.pi * math.e * (spread + noise)).log().sum(-1)
    if isinstance(likelihood, Bernoulli):
        return -(torch.xlogy(mean, mean) + torch.xlogy(1 - mean, 1 - mean)).sum(-1)
    if isinstance(likelihood, Categorical):
        return -torch.xlogy(mean, mean).sum(-1)
    return None


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
