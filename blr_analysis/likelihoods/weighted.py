"""A likelihood whose examples have a weight each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.likelihoods.base import Likelihood


class Weighted(Likelihood):
    """w_i ≥ 0 times the loss of example i, and so times its e_i and Λ_i.

    Made by ``Task(..., weights=w)``. ``of`` are the weights of the examples that the outputs
    belong to, in their order: those of a batch are ``likelihood.at(indices)``.

    The objective is Σ_i w_i ℓ_i: for a training loss that divides it by Σ_i w_i, with an L2
    penalty ``weight_decay``, δ = weight_decay · Σ_i w_i. What a model predicts, and whether it is
    right, has no weight.

    Raises:
        InputError: outputs of another number of examples than there are weights.

    Example:
        >>> from blr_analysis.likelihoods import Gaussian
        >>> w = Weighted(Gaussian(), torch.tensor([1.0, 3.0]))
        >>> w.error(torch.ones(2, 1), torch.zeros(2, 1)).flatten()
        tensor([1., 3.])
    """

    def __init__(self, plain: Likelihood, of: Tensor) -> None:
        self._plain, self._of = plain, of
        self.name = plain.name
        self.is_classification = plain.is_classification
        self.integer_targets = plain.integer_targets
        self.is_sequence = plain.is_sequence

    def __repr__(self) -> str:
        return f"{self._plain!r} with {len(self._of)} weights"

    @property
    def recorded(self) -> str:
        return f"{self._plain.recorded}, weighted"

    @property
    def plain(self) -> Likelihood:
        return self._plain

    @property
    def kind(self) -> Likelihood:
        return self._plain.kind

    def at(self, indices: Tensor) -> Likelihood:
        return Weighted(self._plain, self._of[indices.cpu()])

    def _beside(self, values: Tensor, power: float = 1.0) -> Tensor:
        if len(values) != len(self._of):
            raise InputError(
                f"{len(self._of)} weights for {len(values)} examples; use likelihood.at(indices)"
            )
        w = self._of.to(values) ** power
        return values * w.view(-1, *[1] * (values.ndim - 1))

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._beside(self._plain.error(outputs, targets))

    def drawn_error(self, outputs: Tensor, targets: Tensor, drawn: Tensor) -> Tensor:
        return self._beside(self._plain.drawn_error(outputs, targets, drawn), 0.5)

    def hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._beside(self._plain.hessian(outputs, targets))

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._beside(self._plain.hessian_root(outputs, targets), 0.5)

    def hessian_parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        parts = self._plain.hessian_parts(outputs, targets)
        return parts and (self._beside(parts[0]), self._beside(parts[1], 0.5))

    def hessian_times(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        w = self._beside(torch.ones_like(outputs))  # vectors may lead with other dimensions
        return w * self._plain.hessian_times(outputs, targets, vectors)

    def moved(self, outputs: Tensor, step: Tensor) -> Tensor:
        return self._plain.moved(outputs, step)

    def length(self, before: Tensor, after: Tensor) -> Tensor:
        return self._plain.length(before, after)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._beside(self._plain.nll(outputs, targets))

    def check_outputs(self, outputs: Tensor) -> None:
        self._plain.check_outputs(outputs)

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        self._plain.check_values(targets, outputs)

    def looks_normalised(self, outputs: Tensor) -> bool:
        return self._plain.looks_normalised(outputs)

    def join(self, outputs: Any) -> Any:
        return self._plain.join(outputs)

    def prepare(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self._plain.prepare(outputs, targets)

    def prepare_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        return self._plain.prepare_targets(targets, outputs)

    def counted(self, targets: Tensor) -> Tensor | None:
        return self._plain.counted(targets)

    def mean(self, outputs: Tensor) -> Tensor:
        return self._plain.mean(outputs)

    def prediction(self, outputs: Tensor) -> Tensor:
        return self._plain.prediction(outputs)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return self._plain.correct(outputs, targets)

    def distance(self, before: Tensor, after: Tensor) -> Tensor:
        return self._plain.distance(before, after)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self._plain.sample(outputs, generator)

    def resample(
        self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        return self._plain.resample(outputs, targets, generator)
