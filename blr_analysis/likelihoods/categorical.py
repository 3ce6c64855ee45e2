"""One of C classes for each example."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blr_analysis.errors import DataError
from blr_analysis.likelihoods.base import Likelihood


class Categorical(Likelihood):
    """Softmax classification, C ≥ 2 logits, integer targets 0 … C−1.

    e = softmax(f) − onehot(y),  Λ = diag(p) − ppᵀ = LLᵀ with L = diag(√p) − p√pᵀ.
    """

    name = "categorical"
    is_classification = True
    integer_targets = True

    def check_outputs(self, outputs: Tensor) -> None:
        if outputs.ndim == 3:
            raise DataError(
                "the categorical likelihood needs outputs of shape [batch, C], got "
                f'{tuple(outputs.shape)}; for one class per token use likelihood="tokens" or '
                '"causal_lm", or reshape them in Task(..., forward=...)'
            )
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

    def hessian_times(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        p = outputs.softmax(-1)
        return p * (vectors - (p * vectors).sum(-1, keepdim=True))

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
