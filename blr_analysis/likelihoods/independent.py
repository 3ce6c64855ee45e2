"""Outputs that are independent of each other, given the model: labels, numbers, counts."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blr_analysis.checks import one_of
from blr_analysis.errors import DataError, InputError, ModelError
from blr_analysis.likelihoods.base import MIN_TO_TELL_LOGITS, Likelihood, numbers, per_output


class _Independent(Likelihood):
    """C conditionally independent scalar outputs, so that Λ is diagonal."""

    @abstractmethod
    def scale(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The diagonal of Λ, ``[B, C]``."""

    def entries(self, outputs: Tensor, targets: Tensor) -> int:
        return targets.numel()

    def hessian_parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale(outputs, targets)
        return scale, torch.zeros_like(scale)

    def hessian_times(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        return self.scale(outputs, targets) * vectors

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.diag_embed(self.scale(outputs, targets).sqrt())


class Bernoulli(_Independent):
    """Logistic classification, one logit per target; the loss of ``torch.nn.BCEWithLogitsLoss``.

        ℓ = −Σ_c w_c (a_c y_c log σ(f_c) + (1 − y_c) log σ(−f_c)),   s_c = w_c (a_c y_c + 1 − y_c)
        e_c = s_c σ(f_c) − w_c a_c y_c,   Λ_cc = s_c σ(f_c) σ(−f_c)

    and so e = σ(f) − y, Λ = p(1−p) without settings. C > 1 means C independent labels; an example
    counts as correct when all of them are. Targets are 0 or 1, or between (soft).

    Args:
        pos_weight: a ≥ 0, one for all outputs or one for each.
        weight: w ≥ 0, the same.

    Raises:
        InputError: weights below 0.
        DataError: another number of weights than of outputs; targets outside 0 … 1.
    """

    name = "bernoulli"
    is_classification = True

    def __init__(self, pos_weight: Any = None, weight: Any = None) -> None:
        self.pos_weight = numbers("pos_weight", pos_weight)
        self.weight = numbers("weight", weight)

    def check_outputs(self, outputs: Tensor) -> None:
        super().check_outputs(outputs)
        self._weights(outputs)

    def looks_normalised(self, outputs: Tensor) -> bool:
        """Whether all outputs lie in 0 … 1, with some near either end.

        The logits of a weak model may lie in the middle of 0 … 1.
        """
        if len(outputs) < MIN_TO_TELL_LOGITS:
            return False
        low, high = (float(extreme) for extreme in outputs.aminmax())
        return 0 <= low < 0.1 and 0.9 < high <= 1

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        if not bool(((targets >= 0) & (targets <= 1)).all()):
            raise DataError("bernoulli targets must lie in 0 … 1; found other values")

    def _weights(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """a and w of every output, ``[C]`` or ``[1]`` each."""
        a = per_output("pos_weight", self.pos_weight, outputs)
        w = per_output("weight", self.weight, outputs)
        return a, w

    def _mass(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """s of every output, ``[B, C]``."""
        a, w = self._weights(outputs)
        return w * (a * targets + (1 - targets))

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        a, w = self._weights(outputs)
        return self._mass(outputs, targets) * outputs.sigmoid() - w * a * targets

    def scale(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._mass(outputs, targets) * outputs.sigmoid() * (-outputs).sigmoid()

    def drawn_error(self, outputs: Tensor, targets: Tensor, drawn: Tensor) -> Tensor:
        """√s (σ(f) − ŷ), whose mean square over ŷ ~ σ(f) is Λ."""
        return self._mass(outputs, targets).sqrt() * (outputs.sigmoid() - drawn)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        a, w = self._weights(outputs)
        losses = F.binary_cross_entropy_with_logits(
            outputs, targets, w, reduction="none", pos_weight=a
        )
        return losses.sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def prediction(self, outputs: Tensor) -> Tensor:
        labels = (outputs > 0).long()
        return labels.squeeze(-1) if labels.shape[-1] == 1 else labels

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs > 0) == (targets > 0.5)).all(-1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(outputs.sigmoid(), generator=generator)


class Gaussian(_Independent):
    """Regression with known noise variance σ²: e = (f − y)/σ², Λ = I/σ².

    Args:
        variance: σ², one for all outputs or one for each.
        normalized: whether ``nll`` holds the constant ½ log 2πσ², so that it is a log-density
            (the mean squared error is then, with ``variance=1``, 2·nll − log 2π). With
            ``variance=0.5, normalized=False`` it is Σ_c (f_c − y_c)²: ``torch.nn.MSELoss``, whose
            reduction "mean" divides the sum over examples by N·C.
    """

    name = "gaussian"
    is_classification = False

    def __init__(self, variance: Any = 1.0, *, normalized: bool = True) -> None:
        values = numbers("the noise variance", variance, positive=True)
        if values is None:
            raise InputError("the noise variance must be a positive number, got None")
        self.variance = values[0] if len(values) == 1 else values
        self.normalized = normalized

    def __repr__(self) -> str:
        if isinstance(self.variance, tuple):
            variance = str(list(self.variance))
        else:
            variance = f"{self.variance:g}"
        arguments = [f"variance={variance}"]
        if not self.normalized:
            arguments.append("normalized=False")
        return f"Gaussian({', '.join(arguments)})"

    def check_outputs(self, outputs: Tensor) -> None:
        super().check_outputs(outputs)
        self._variances(outputs)

    def _variances(self, outputs: Tensor) -> Tensor:
        """σ² of every output, ``[C]`` or ``[1]``."""
        values = self.variance if isinstance(self.variance, tuple) else (self.variance,)
        if any(math.isnan(value) for value in values):
            raise InputError("the residuals are 0: no noise to estimate; give one as likelihood=")
        return per_output("variance", values, outputs)

    def noise(self, outputs: Tensor) -> Tensor | None:
        if not self.normalized:  # a square, and no log-density
            return None
        return torch.ones_like(outputs) * self._variances(outputs)

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        """Every finite number is possible under a Gaussian."""

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) / self._variances(outputs)

    def scale(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (1 / self._variances(outputs)).expand_as(outputs)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        variances = self._variances(outputs)
        losses = (outputs - targets).square() / variances
        if self.normalized:
            losses = losses + (2 * math.pi * variances.double()).log().to(outputs)
        return 0.5 * losses.sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.empty_like(outputs).normal_(generator=generator)
        return outputs + self._variances(outputs).sqrt() * noise


class Poisson(_Independent):
    """Counts with log-rate f: e = exp(f) − y, Λ = exp(f).

    Args:
        constant: the term that ``nll`` adds to exp(f) − y f: "exact" adds log y!, so that it is a
            log-density; "none" adds 0, as ``torch.nn.PoissonNLLLoss`` does; "stirling" adds
            Stirling's approximation, as that loss does with ``full=True``.
    """

    name = "poisson"
    is_classification = False

    def __init__(self, constant: str = "exact") -> None:
        self.constant = one_of("constant", constant, ("exact", "stirling", "none"))

    def check_outputs(self, outputs: Tensor) -> None:
        super().check_outputs(outputs)
        log_rates = outputs.detach()
        largest = math.log(torch.finfo(log_rates.dtype).max)
        if bool((log_rates > largest).any()):
            raise ModelError(
                f"the model's log-rates reach {float(log_rates.max()):.3g}, whose exp overflows "
                f"{log_rates.dtype}; check the weights (poisson takes the log of the rate)"
            )

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        are_counts = (targets >= 0) & (targets == targets.round())
        if not bool(are_counts.all()):
            raise DataError("poisson targets must be counts 0, 1, 2, …; found other values")

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.exp() - targets

    def scale(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.exp()

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.constant == "exact":
            return (outputs.exp() - targets * outputs + torch.lgamma(targets + 1)).sum(-1)
        full = self.constant == "stirling"
        losses = F.poisson_nll_loss(outputs, targets, full=full, reduction="none")
        return losses.sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(outputs.exp(), generator=generator)
