"""Regression whose noise is learned, too: a mean and a variance for every target."""

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

    Outputs ``[B, 2C]``: C means, then C variances (as the loss takes them, after softplus or
    exp), or a pair ``(means, variances)`` of ``[B, C]`` each; targets ``[B, C]``. ∂²ℓ/∂f² has
    negative eigenvalues everywhere, so that Λ is its mean under the model, the Fisher information;
    ``fit_laplace(curvature="exact")`` takes the Hessian itself. Neither sees how 1/v grows: the
    linearised total rise of the loss without each example was 0.25 to 1.05 of retraining's on
    eight small models, that of ``leave_one_out`` under "full", which truly leaves out those that
    matter, 0.96 to 1.00, and 0.88 where retraining without one example ended in another minimum.

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
        self.full, self.eps = full, positive_number("eps", eps)

    def join(self, outputs: Any) -> Any:
        pair = isinstance(outputs, (tuple, list)) and len(outputs) == 2
        if not (pair and all(isinstance(x, Tensor) for x in outputs)):
            return outputs
        mean, v = (x.unsqueeze(-1) if x.ndim == 1 else x for x in outputs)
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
        if bool((outputs.detach().chunk(2, -1)[1] < 0).any()):
            raise ModelError("a predicted variance is negative; end the model in exp or softplus")

    def prepare_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        return super().prepare_targets(targets, outputs.chunk(2, -1)[0])

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        """Every finite number is possible under a Gaussian."""

    def entries(self, outputs: Tensor, targets: Tensor) -> int:
        return targets.numel()

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """μ and v; below eps, v is eps with the gradient of v."""
        mean, v = outputs.chunk(2, -1)
        return mean, v + (v.detach().clamp_min(self.eps) - v.detach())

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, v = self._parts(outputs)
        rest = mean - targets
        return torch.cat((rest / v, (v - rest.square()) / (2 * v.square())), -1)

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        _, v = self._parts(outputs)
        return torch.diag_embed(torch.cat((v.rsqrt(), math.sqrt(0.5) / v), -1))

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, v = self._parts(outputs)
        constant = math.log(2 * math.pi) if self.full else 0.0
        return 0.5 * (v.log() + (mean - targets).square() / v + constant).sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.chunk(2, -1)[0]

    def distance(self, before: Tensor, after: Tensor) -> Tensor:
        """‖μ' − μ‖₂."""
        return torch.linalg.vector_norm(self.mean(after) - self.mean(before), dim=-1)

    def moved(self, outputs: Tensor, step: Tensor) -> Tensor:
        """Linear in μ and log v, v' = v exp(Δv / v): a variance stays above 0."""
        mean, v = self._parts(outputs)
        ahead, wider = step.chunk(2, -1)
        return torch.cat((mean + ahead, v * (wider / v).exp()), -1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean, v = self._parts(outputs)
        return mean + v.sqrt() * torch.empty_like(mean).normal_(generator=generator)
