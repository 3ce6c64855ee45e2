"""What a model's output says about a target: four exponential-family likelihoods.

Each likelihood is written with its natural link, so that with f = f_θ(x) the model output

    ℓ(y, f) = A(f) − fᵀy + const,   e = ∂ℓ/∂f = E[y|f] − y,   Λ = ∂²ℓ/∂f² = Cov[y|f] ⪰ 0

(the Gaussian divides both by its noise variance σ²). Shapes: outputs ``[B, C]``, error
``[B, C]``, hessian ``[B, C, C]``, nll ``[B]``.

    >>> import torch
    >>> from blr_analysis.likelihoods import Categorical
    >>> f, y = torch.zeros(1, 2), torch.tensor([1])
    >>> Categorical().error(f, y)
    tensor([[ 0.5000, -0.5000]])
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from blr_analysis.errors import DataError, InputError, ModelError


class Likelihood(ABC):
    """One exponential-family likelihood: its error e, Hessian Λ, loss, mean and samples.

    A likelihood of your own subclasses this and is passed as ``Task(..., likelihood=obj)``.
    """

    name: str
    is_classification: bool
    integer_targets: bool = False

    @abstractmethod
    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Prediction error e = ∂ℓ/∂f, ``[B, C]``."""

    @abstractmethod
    def hessian_root(self, outputs: Tensor) -> Tensor:
        """A root L of the output Hessian, Λ = L Lᵀ, ``[B, C, C]``."""

    @abstractmethod
    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of each example, in nats, ``[B]``."""

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """E[y | f]: probabilities, means or rates, ``[B, C]``."""

    @abstractmethod
    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Targets drawn from the model's own predictive distribution (the Fisher's labels)."""

    @abstractmethod
    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        """Raise :class:`DataError` where a target lies outside the likelihood's support."""

    def hessian(self, outputs: Tensor) -> Tensor:
        """Output Hessian Λ = ∂²ℓ/∂f², ``[B, C, C]``."""
        root = self.hessian_root(outputs)
        return root @ root.mT

    def prediction(self, outputs: Tensor) -> Tensor:
        """What the model would answer: the class, or the mean; ``[B]`` (``[B, C]`` if C > 1)."""
        mean = self.mean(outputs)
        return mean.squeeze(-1) if mean.shape[-1] == 1 else mean

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Whether each prediction is right, ``[B]`` bool; None for regression."""
        return None

    def distance(self, before: Tensor, after: Tensor) -> Tensor:
        """How far a prediction moved between two outputs, ``[B]``.

        Classification: ‖E[y|f'] − E[y|f]‖₁ in probability. Regression: ‖f' − f‖₂.
        """
        if self.is_classification:
            return (self.mean(after) - self.mean(before)).abs().sum(-1)
        return torch.linalg.vector_norm(after - before, dim=-1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def check_outputs(self, outputs: Tensor) -> None:
        """Raise :class:`DataError` unless the outputs are ``[B, C]`` with a C ≥ 1 that fits."""
        if outputs.ndim != 2 or outputs.shape[-1] == 0:
            raise DataError(
                f"the {self.name} likelihood needs outputs of shape [batch, C], got "
                f"{tuple(outputs.shape)}; reshape them in Task(..., forward=...)"
            )

    def prepare_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets in the shape and dtype that :meth:`error` and :meth:`nll` take, checked."""
        if targets.shape != outputs.shape:
            if outputs.shape[-1] == 1 and targets.shape == outputs.shape[:-1]:
                targets = targets.unsqueeze(-1)
            else:
                raise DataError(
                    f"targets of shape {tuple(targets.shape)} do not fit outputs of shape "
                    f"{tuple(outputs.shape)} under the {self.name} likelihood; "
                    "give one target per output"
                )
        if targets.is_complex():
            raise DataError(f"{self.name} targets must be real numbers, got {targets.dtype}")
        targets = targets.to(outputs.dtype)
        if not bool(torch.isfinite(targets).all()):
            raise DataError(f"{self.name} targets contain NaN or inf; drop or mend those examples")
        self.check_values(targets, outputs)
        return targets


class Categorical(Likelihood):
    """Softmax classification, C ≥ 2 logits, integer targets 0 … C−1.

    e = softmax(f) − onehot(y),  Λ = diag(p) − ppᵀ = LLᵀ with L = diag(√p) − p√pᵀ.
    """

    name = "categorical"
    is_classification = True
    integer_targets = True

    def check_outputs(self, outputs: Tensor) -> None:
        super().check_outputs(outputs)
        if outputs.shape[-1] < 2:
            raise DataError(
                "the categorical likelihood needs at least 2 logits per example, got 1; "
                'use likelihood="bernoulli" for a single logit'
            )

    def prepare_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        if targets.ndim == 2 and targets.shape[-1] == 1:
            targets = targets.squeeze(-1)
        if targets.shape != outputs.shape[:1]:
            raise DataError(
                f"categorical targets must be one class index per example, shape "
                f"[{outputs.shape[0]}], got {tuple(targets.shape)}; "
                "turn one-hot targets into indices with y.argmax(-1)"
            )
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise DataError(
                f"categorical targets must be integers, got {targets.dtype}; use y.long()"
            )
        targets = targets.long()
        self.check_values(targets, outputs)
        return targets

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        if targets.numel():
            low, high = (int(v) for v in torch.aminmax(targets))
            if low < 0 or high >= outputs.shape[-1]:
                raise DataError(
                    f"categorical targets must lie in 0 … {outputs.shape[-1] - 1} (the model has "
                    f"{outputs.shape[-1]} logits), found {low if low < 0 else high}"
                )

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.softmax(-1) - F.one_hot(targets, outputs.shape[-1]).to(outputs.dtype)

    def hessian(self, outputs: Tensor) -> Tensor:
        p = outputs.softmax(-1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)

    def hessian_root(self, outputs: Tensor) -> Tensor:
        p = outputs.softmax(-1)
        root = p.sqrt()
        return torch.diag_embed(root) - p.unsqueeze(-1) * root.unsqueeze(-2)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def prediction(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(-1) == targets

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.multinomial(outputs.softmax(-1), 1, generator=generator).squeeze(-1)


class _Independent(Likelihood):
    """C conditionally independent scalar outputs, so that Λ is diagonal."""

    @abstractmethod
    def scale(self, outputs: Tensor) -> Tensor:
        """The diagonal of Λ, ``[B, C]``."""

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


BY_NAME: dict[str, type[Likelihood]] = {
    kind.name: kind for kind in (Categorical, Bernoulli, Gaussian, Poisson)
}


def resolve(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood of this name, or the object itself.

    >>> resolve("poisson").name
    'poisson'
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in BY_NAME:
        return BY_NAME[likelihood]()
    raise InputError(
        f"likelihood must be one of {', '.join(map(repr, BY_NAME))} or a Likelihood object, "
        f"got {likelihood!r}"
    )
