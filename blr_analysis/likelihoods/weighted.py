"""A likelihood with a weight for each example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.likelihoods.base import Likelihood


def _unweighted(name: str) -> Any:
    """A method that calls the plain likelihood's method of this name."""

    def method(self: Weighted, *arguments: Any, **options: Any) -> Any:
        plain_method = getattr(self._plain, name)
        return plain_method(*arguments, **options)

    return method


def _weighted(name: str, power: float = 1.0) -> Any:
    """A method that multiplies the result of the plain likelihood's method of this name by w^power.

    The power is ½ for a root of Λ, because w Λ = (√w L)(√w L)ᵀ.
    """

    def method(self: Weighted, *arguments: Any) -> Tensor:
        plain_method = getattr(self._plain, name)
        return self._times_weights(plain_method(*arguments), power)

    return method


class Weighted(Likelihood):
    """A likelihood whose losses are multiplied by weights w_i ≥ 0, and so are its e_i and Λ_i.

    ``Task(..., weights=w)`` makes it.

    Args:
        plain: the likelihood without weights.
        weights: w, ``[N]``. Each method takes the outputs of these N examples, in the same order;
            ``likelihood.at(indices)`` takes those of a batch.

    The objective is Σ_i w_i ℓ_i. A training loss that divides it by Σ_i w_i and has an L2 penalty
    ``weight_decay`` has the prior precision δ = weight_decay · Σ_i w_i. Weights do not change what
    a model predicts, nor whether a prediction is right.

    Raises:
        InputError: the number of outputs differs from the number of weights.

    Example:
        >>> from blr_analysis.likelihoods import Gaussian
        >>> w = Weighted(Gaussian(), torch.tensor([1.0, 3.0]))
        >>> w.error(torch.ones(2, 1), torch.zeros(2, 1)).flatten()
        tensor([1., 3.])
    """

    def __init__(self, plain: Likelihood, weights: Tensor) -> None:
        self._plain = plain
        self._weights = weights
        self.name = plain.name
        self.is_classification = plain.is_classification
        self.integer_targets = plain.integer_targets
        self.is_sequence = plain.is_sequence

    def __repr__(self) -> str:
        return f"{self._plain!r} with {len(self._weights)} weights"

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
        return Weighted(self._plain, self._weights[indices.cpu()])

    def _times_weights(self, values: Tensor, power: float = 1.0) -> Tensor:
        """Values ``[B, ...]`` times w^power."""
        n_weights = len(self._weights)
        if len(values) != n_weights:
            raise InputError(
                f"{n_weights} weights for {len(values)} examples; use likelihood.at(indices)"
            )
        w = self._weights.to(values) ** power
        trailing = [1] * (values.ndim - 1)
        return values * w.view(-1, *trailing)

    # The loss and its derivatives
    nll = _weighted("nll")
    mass = _weighted("mass")
    error = _weighted("error")
    hessian = _weighted("hessian")
    drawn_error = _weighted("drawn_error", 0.5)
    hessian_root = _weighted("hessian_root", 0.5)

    def hessian_parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        parts = self._plain.hessian_parts(outputs, targets)
        if parts is None:
            return None
        diagonal, vector = parts
        return self._times_weights(diagonal), self._times_weights(vector, 0.5)

    def hessian_times(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        # Vectors may have further dimensions in front, so w takes the shape of the outputs.
        w = self._times_weights(torch.ones_like(outputs))
        return w * self._plain.hessian_times(outputs, targets, vectors)

    # How outputs and targets are read
    join = _unweighted("join")
    check_outputs = _unweighted("check_outputs")
    by_token = _unweighted("by_token")
    noise = _unweighted("noise")
    check_values = _unweighted("check_values")
    prepare = _unweighted("prepare")
    prepare_targets = _unweighted("prepare_targets")
    looks_normalised = _unweighted("looks_normalised")
    as_module_takes = _unweighted("as_module_takes")
    entries = _unweighted("entries")
    counted = _unweighted("counted")

    # What the model predicts
    mean = _unweighted("mean")
    prediction = _unweighted("prediction")
    correct = _unweighted("correct")
    moved = _unweighted("moved")
    check_moved = _unweighted("check_moved")
    distance = _unweighted("distance")
    sample = _unweighted("sample")
    resample = _unweighted("resample")
