"""Which examples does the model know by rule, and which by heart?

A memory map sets the prediction error of every example against its prediction variance.
Their product is how far the prediction would move without the example (the memory
perturbation), so the four corners of the map are four kinds of examples:

====================  ======================  =======================
region                low variance            high variance
====================  ======================  =======================
high error            ``unpredictable``       ``memorable``
low error             ``regular``             ``uncertain``
====================  ======================  =======================

* regular: fitted, and many others support the fit; any one of them could go.
* uncertain: fitted, but the model is free to move there; few others support it.
* unpredictable: wrong, and the rest of the data insists; noise, or a wrong label.
* memorable: wrong and free to move; the example pulls the model by itself and is remembered
  rather than predicted. These shape the model most.

Source: Tailor, Chang, Swaroop, Nalisnick, Solin, Khan, "Memory maps to understand models".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from blr_analysis.checks import one_of, share
from blr_analysis.errors import DataError, InputError
from blr_analysis.sensitivity.sizes import error_size, variance_size
from blr_analysis.views import Plottable, Tabular

REGIONS = ("regular", "uncertain", "unpredictable", "memorable")
"""The four regions; the position in this tuple is ``2 * high_error + high_variance``."""

VARIANCES = {"trace": "variance tr V", "along_error": "variance along the error eᵀVe / ‖e‖²"}
"""The words for a map's variance, by ``variance_kind``; the second replaces a V that is missing."""


@dataclass(frozen=True, eq=False, repr=False)
class MemoryMap(Tabular, Plottable):
    """Error, variance and region of every example, in the order of the dataset.

    Attributes:
        error: [N] Euclidean norm of the prediction error e_i, float64; of sequences its root mean
            square over the tokens.
        variance: [N] prediction variance, float64, see ``variance_kind``; a trace of sequences is
            a mean over the tokens, and estimated.
        region: [N] array of strings, each one of :data:`REGIONS`.
        error_threshold: an error above it is high.
        variance_threshold: a variance above it is high.
        variance_kind: ``"trace"`` for tr V_i, ``"along_error"`` for e_iᵀV_ie_i / ‖e_i‖²
            (where the scores carry no V_i).
        scores: the scores that the map was made from.
    """

    error: Tensor
    variance: Tensor
    region: np.ndarray
    error_threshold: float
    variance_threshold: float
    variance_kind: Literal["trace", "along_error"]
    scores: Any = field(default=None)

    @property
    def product(self) -> Tensor:
        """[N] error times variance: the size of the memory perturbation V_i e_i."""
        return self.error * self.variance

    @property
    def memorable(self) -> Tensor:
        """Indices of the memorable examples, the largest error × variance first."""
        return self.indices("memorable")

    def counts(self) -> dict[str, int]:
        """How many examples each region holds, in the order of :data:`REGIONS`."""
        return {name: int((self.region == name).sum()) for name in REGIONS}

    def indices(self, region: str) -> Tensor:
        """Indices of the examples of one region, the largest error × variance first.

        Raises:
            InputError: ``region`` is none of :data:`REGIONS`.
        """
        one_of("region", region, REGIONS)
        inside = torch.from_numpy(np.flatnonzero(self.region == region))
        return inside[torch.argsort(self.product[inside], descending=True, stable=True)]

    def __repr__(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts().items())
        high = f"high error: > {self.error_threshold:.3g}, high {VARIANCES[self.variance_kind]}"
        return f"MemoryMap({counts}; {high}: > {self.variance_threshold:.3g})"


@torch.inference_mode(False)  # also where the caller switched it on
def memory_map(scores: Any, *, quantile: float = 0.9) -> MemoryMap:
    """Sort every example into one of four regions by its error and its variance.

    The error is ‖e_i‖₂ with e_i = ∂ℓ_i/∂f_i; the variance is tr V_i with V_i = J_i Σ J_iᵀ. If the
    scores have no V_i (too many outputs), the variance along the error replaces it: e_iᵀV_ie_i /
    ‖e_i‖² = self_influence / ‖e_i‖². The units are those of the outputs: 1/output for the error,
    output² for the variance. A value is high if it is above the quantile of all values, so that the
    memorable are few: a list short enough to be looked through.

    Args:
        scores: what :func:`blr_analysis.sensitivity` returns; of sequences with ``variance=True``.
        quantile: of the errors and of the variances, 0 … 1.

    Raises:
        DataError: no examples, or a value that is not finite.
        InputError: ``scores`` is something else, or the quantile is out of range.

    Source: Tailor et al., "Memory maps to understand models"; seen there as prediction
    error against prediction variance.

    Example:
        >>> from types import SimpleNamespace
        >>> error = torch.tensor([[0.1], [0.1], [-2.0], [2.0]])
        >>> variance = torch.tensor([0.1, 3.0, 0.1, 3.0]).reshape(4, 1, 1)
        >>> scores = SimpleNamespace(error=error, variance=variance, self_influence=None)
        >>> memory_map(scores, quantile=0.5).region.tolist()
        ['regular', 'uncertain', 'unpredictable', 'memorable']
    """
    if not isinstance(getattr(scores, "error", None), Tensor):
        raise InputError(
            "memory_map needs a prediction error and variance, which these scores lack; scores of "
            "any kind have .top(k) and .plot()"
        )
    if quantile != 0:
        share("quantile", quantile)
    tokens: Any = getattr(scores, "tokens", None)
    if tokens is None:
        tokens = 1
    error = error_size(scores.error) / tokens**0.5  # a long text has no larger error than a short
    trace = variance_size(getattr(scores, "variance", None))
    kind: Literal["trace", "along_error"]
    if trace is not None:
        kind = "trace"
        variance = trace / tokens
    else:
        kind = "along_error"
        variance = variance_along_error(scores.error, scores.self_influence)
    variance = variance.clamp(min=0)  # rounding may lead below 0
    if not len(error) or not bool((error + variance).isfinite().all()):
        raise DataError("memory_map needs finite scores, of one example or more")
    high_error = float(np.quantile(error.numpy(), quantile))
    high_variance = float(np.quantile(variance.numpy(), quantile))
    code = 2 * (error > high_error).long() + (variance > high_variance).long()
    region = np.array(REGIONS)[code.numpy()]
    return MemoryMap(error, variance, region, high_error, high_variance, kind, scores)


def variance_along_error(error: Tensor, self_influence: Tensor) -> Tensor:
    """[N] e_iᵀV_ie_i / ‖e_i‖² in float64; 0 where the error is 0."""
    square = error_size(error).square()
    return torch.where(square > 0, self_influence.detach().cpu().double() / square, 0.0)
