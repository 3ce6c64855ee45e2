"""Outputs that are independent of each other, given the model: labels, numbers, counts."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from blr_analysis.errors import DataError, InputError, ModelError
from blr_analysis.likelihoods.base import Likelihood


class _Independent(Likelihood):
    """C conditionally independent scalar outputs, so that Λ is diagonal."""

    @abstractmethod
    def scale(self, outputs: Tensor) -> Tensor:
        """The diagonal of Λ, ``[B, C]``."""

    def hessian_times(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return self.scale(outputs) * vectors

    def hessian_root(self, outputs: Tensor) -> Tensor:
        return torch.diag_embed(self.scale(outputs).sqrt())


class Bernoulli(_Independent):
    """Logistic classification: one logit per (binary) target; e = σ(f) − y, Λ = p(1−p).

    C > 1 means C independent labels; an example counts as correct when all of them are.
    """

    name = "bernoulli"
    is_classification = True

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise DataError("bernoulli targets must be 0 or 1; found other values")

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sigmoid() - targets

    def scale(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid()

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return losses.sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def prediction(self, outputs: Tensor) -> Tensor:
        hard = (outputs > 0).long()
        return hard.squeeze(-1) if hard.shape[-1] == 1 else hard

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs > 0) == (targets > 0.5)).all(-1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(outputs.sigmoid(), generator=generator)


class Gaussian(_Independent):
    """Regression with known noise variance σ²: e = (f − y)/σ², Λ = I/σ².

    ``nll`` holds the normalising constant ½ log 2πσ², so that it is a log-density; the mean
    squared error is read off with ``variance=1`` as 2·nll − log 2π.
    """

    name = "gaussian"
    is_classification = False

    def __init__(self, variance: float = 1.0) -> None:
        if not (isinstance(variance, (int, float)) and math.isfinite(variance) and variance > 0):
            raise InputError(
                f"Gaussian noise variance must be a positive finite number, got {variance!r}"
            )
        self.variance = float(variance)

    def __repr__(self) -> str:
        return f"Gaussian(variance={self.variance:g})"

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        """Every finite number is possible under a Gaussian."""

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) / self.variance

    def scale(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 1 / self.variance)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        constant = math.log(2 * math.pi * self.variance)
        return 0.5 * ((outputs - targets).square() / self.variance + constant).sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.empty_like(outputs).normal_(generator=generator)
        return outputs + math.sqrt(self.variance) * noise


class Poisson(_Independent):
    """Counts with log-rate f: e = exp(f) − y, Λ = exp(f)."""

    name = "poisson"
    is_classification = False

    def check_outputs(self, outputs: Tensor) -> None:
        super().check_outputs(outputs)
        found = outputs.detach()
        if bool((found > math.log(torch.finfo(found.dtype).max)).any()):
            raise ModelError(
                f"the model's log-rates reach {float(found.max()):.3g}, whose exp overflows "
                f"{found.dtype}; check the weights (the poisson likelihood takes the rate's log)"
            )

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        if not bool(((targets >= 0) & (targets == targets.round())).all()):
            raise DataError("poisson targets must be counts 0, 1, 2, …; found other values")

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.exp() - targets

    def scale(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.exp() - targets * outputs + torch.lgamma(targets + 1)).sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(outputs.exp(), generator=generator)
