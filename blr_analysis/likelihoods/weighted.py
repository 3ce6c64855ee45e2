"""A likelihood whose examples have a weight each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.likelihoods.base import Likelihood


def _plainly(name: str) -> Any:
    """The method of this name, as it is without weights."""

    def method(self: Weighted, *given: Any, **named: Any) -> Any:
        return getattr(self._plain, name)(*given, **named)

    return method


def _times(name: str, power: float = 1.0) -> Any:
    """The method of this name, its values times w to a power."""

    def method(self: Weighted, *given: Any) -> Tensor:
        return self._beside(getattr(self._plain, name)(*given), power)

    return method


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

    error, nll, hessian = _times("error"), _times("nll"), _times("hessian")
    mass = _times("mass")
    drawn_error, hessian_root = _times("drawn_error", 0.5), _times("hessian_root", 0.5)

    def hessian_parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        parts = self._plain.hessian_parts(outputs, targets)
        if parts is None:
            return None
        scale, low = parts
        return self._beside(scale), self._beside(low, 0.5)

    def hessian_times(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        w = self._beside(torch.ones_like(outputs))  # vectors may lead with other dimensions
        return w * self._plain.hessian_times(outputs, targets, vectors)

    check_outputs, check_values = _plainly("check_outputs"), _plainly("check_values")
    prepare, prepare_targets = _plainly("prepare"), _plainly("prepare_targets")
    entries, as_module_takes = _plainly("entries"), _plainly("as_module_takes")
    join, counted, looks_normalised = map(_plainly, ("join", "counted", "looks_normalised"))
    moved, distance = _plainly("moved"), _plainly("distance")
    mean, prediction, correct = map(_plainly, ("mean", "prediction", "correct"))
    sample, resample = _plainly("sample"), _plainly("resample")
