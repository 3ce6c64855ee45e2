"""One number for the error, and one for the variance, of each example."""

from __future__ import annotations

import torch
from torch import Tensor


def error_size(error: Tensor) -> Tensor:
    """[N] ‖e_i‖₂ in float64, from e [N, C], or from the norms themselves."""
    error = error.detach().cpu().double()
    if error.ndim == 1:
        return error.abs()
    return torch.linalg.vector_norm(error, dim=-1)


def variance_size(variance: Tensor | None) -> Tensor | None:
    """[N] tr V_i in float64, from V [N, C, C] or from the traces themselves."""
    if variance is None:
        return None
    variance = variance.detach().cpu()
    if variance.ndim == 1:
        return variance.double()
    return variance.diagonal(dim1=-2, dim2=-1).double().sum(-1)
