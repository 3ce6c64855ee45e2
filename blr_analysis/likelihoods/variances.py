"""Regression with learned noise: a mean and a variance for every target."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import positive_number
from blr_analysis.errors import DataError, ModelError
from blr_analysis.likelihoods.base import Likelihood


class MeanAndVariance(Likelihood):
    """A Gaussian of learned mean μ and variance v: the loss of ``torch.nn.GaussianNLLLoss``.

        ℓ = ½ Σ_c (log v_c + (y_c − μ_c)²/v_c),   e = ((μ − y)/v,  (v − (y − μ)²)/(2v²))
        Λ = E[e eᵀ] = diag(1/v, 1/(2v²))

    Outputs are ``[B, 2C]``: C means, then C variances (as the loss takes them, after softplus or
    exp), or a pair ``(means, variances)`` of ``[B, C]`` each; targets are ``[B, C]``. ∂²ℓ/∂f² has
    negative eigenvalues everywhere, so that Λ is its mean under the model, the Fisher information;
    ``fit_laplace(curvature="exact")`` takes the Hessian itself.

    Both miss that 1/v grows. On eight small models the linearised rise of the loss without each
    example, summed over the examples, was 0.25 to 1.05 of the rise after retraining. The rise by
    ``leave_one_out`` under "full", which leaves out the examples that matter exactly, was 0.96 to
    1.00 of it, and 0.88 where a retraining without one example ended in another minimum.

    Args:
        full: whether ``nll`` holds ½ log 2π.
        eps: the least variance; below it v counts as eps, with its gradient, as in torch.

    Raises:
        InputError: eps is not positive.
        DataError: an odd number of outputs, targets of another shape.
        ModelError: a negative variance.
    """

    name = "mean_and_variance"
    is_classification = False

    def __init__(self, *, full: bool = False, eps: float = 1e-6) -> None:
        self.full = full
        self.eps = positive_number("eps", eps)

    def join(self, outputs: Any) -> Any:
        is_pair = isinstance(outputs, (tuple, list)) and len(outputs) == 2
        if not (is_pair and all(isinstance(part, Tensor) for part in outputs)):
            return outputs
        mean, v = (part.unsqueeze(-1) if part.ndim == 1 else part for part in outputs)
        if mean.shape != v.shape:
            raise DataError(f"means {tuple(mean.shape)} and variances {tuple(v.shape)} differ")
        return torch.cat((mean, v), -1)

    def check_outputs(self, outputs: Tensor) -> None:
        super().check_outputs(outputs)
        if outputs.shape[-1] % 2:
            raise DataError(
                f"means and variances are 2·C outputs, got {outputs.shape[-1]}; join them with "
                "torch.cat((mean, var), -1)"
            )
        _, variances = outputs.detach().chunk(2, -1)
        if bool((variances < 0).any()):
            raise ModelError("a predicted variance is negative; end the model in exp or softplus")

    def prepare_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        return super().prepare_targets(targets, self.mean(outputs))

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        """Every finite number is possible under a Gaussian."""

    def entries(self, outputs: Tensor, targets: Tensor) -> int:
        return targets.numel()

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """μ and v, ``[B, C]`` each; a v below eps is eps, with the gradient of v."""
        mean, v = outputs.chunk(2, -1)
        rise = v.detach().clamp_min(self.eps) - v.detach()
        return mean, v + rise

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, v = self._parts(outputs)
        residual = mean - targets
        of_mean = residual / v
        of_variance = (v - residual.square()) / (2 * v.square())
        return torch.cat((of_mean, of_variance), -1)

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _, v = self._parts(outputs)
        return torch.diag_embed(torch.cat((v.rsqrt(), math.sqrt(0.5) / v), -1))

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, v = self._parts(outputs)
        constant = math.log(2 * math.pi) if self.full else 0.0
        losses = v.log() + (mean - targets).square() / v + constant
        return 0.5 * losses.sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        mean, _ = outputs.chunk(2, -1)
        return mean

    def noise(self, outputs: Tensor) -> Tensor | None:
        _, v = self._parts(outputs)
        return v

    def distance(self, before: Tensor, after: Tensor) -> Tensor:
        """‖μ' − μ‖₂."""
        return torch.linalg.vector_norm(self.mean(after) - self.mean(before), dim=-1)

    def moved(self, outputs: Tensor, step: Tensor) -> Tensor:
        """Linear in μ and log v, v' = v exp(Δv / v): a variance stays above 0."""
        mean, v = self._parts(outputs)
        mean_step, v_step = step.chunk(2, -1)
        return torch.cat((mean + mean_step, v * (v_step / v).exp()), -1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean, v = self._parts(outputs)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return mean + v.sqrt() * noise
