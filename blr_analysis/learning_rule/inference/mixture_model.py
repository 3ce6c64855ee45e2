"""What all mixtures share: who belongs to which component, and what components are told.

Data y_i with a latent class z_i, and components whose log-density is linear in statistics:

    log p(y_i, z_i = k | θ) = log π_k + ⟨T(y_i), θ_k⟩ + const,

where T(y_i) are the statistics of the example and θ_k whatever stands for the component: its
natural parameters at a point (EM), or their expectations under q (variational message passing).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.base import Natural
from blr_analysis.learning_rule.families.dirichlet import CategoricalFamily
from blr_analysis.learning_rule.families.drawing import device_of
from blr_analysis.learning_rule.inference.conjugate import bayes
from blr_analysis.learning_rule.inference.factors import real


def assign(log_weights: Tensor, scores: Tensor) -> CategoricalFamily:
    """q(z): one step of the rule at ρ = 1, λ_i = λ_0 + λ̃_i (Khan & Rue, 5.2, the E-step).

    Args:
        log_weights: log π_k up to a constant, or its expectation, ``[K]``.
        scores: log p(y_i | z_i = k) up to a constant, or its expectation, ``[N, K]``.

    Returns:
        N copies of a distribution over K classes.

    Example:
        >>> q = assign(torch.tensor([0.5, 0.5]).log(), torch.tensor([[0.0, 0.0], [0.0, 100.0]]))
        >>> q.probs
        tensor([[0.5000, 0.5000],
                [0.0000, 1.0000]])
    """
    prior = CategoricalFamily.from_logits(log_weights.expand_as(scores))
    return bayes(prior, {"indicator": scores[:, :-1] - scores[:, -1:]})


def paired(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """⟨left_i, right_k⟩ of N examples and K components, ``[N, K]``."""
    return sum(
        (left[key].reshape(len(left[key]), -1) @ right[key].reshape(len(right[key]), -1).mT)
        for key in left
    )  # type: ignore[return-value]


def pooled(weights: Tensor, statistics: Mapping[str, Tensor]) -> Natural:
    """Σ_i r_ik T(y_i), for each component: ``[K, …]`` from weights ``[N, K]``."""
    return {key: torch.tensordot(weights.mT, value, 1) for key, value in statistics.items()}


def shared(weights: Tensor, statistics: Mapping[str, Tensor]) -> Natural:
    """r_ik T(y_i), example by example: ``[N, K, …]``."""
    return {
        key: torch.einsum("nk,n...->nk...", weights, value) for key, value in statistics.items()
    }


def check_data(data: Any, n_components: int, columns: int | None = None) -> Tensor:
    """The data ``[N, D]`` in double precision, or what is wrong with them.

    Args:
        data: what was given.
        n_components: the fewest examples that there may be.
        columns: D, where it is known.

    Raises:
        DataError: data that are misshapen, not finite or too few.
    """
    like = torch.empty((), dtype=torch.float64, device=getattr(data, "device", None))
    data = real("data", data, like, 2)
    if len(data) < n_components:
        raise DataError(f"{n_components} components need as many examples, got {len(data)}")
    if columns is not None and data.shape[1] != columns:
        raise DataError(f"data must be [N, {columns}], as fitted, got {tuple(data.shape)}")
    return data.detach()


def first_responsibilities(
    data: Tensor, n_components: int, start: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Where to begin: r ``[N, K]`` as given, or each example to the nearest of K seeds.

    The seeds are examples: the first uniformly, each further one with a probability in
    proportion to its squared distance from those before it (Arthur & Vassilvitskii, 2007).

    Raises:
        InputError: responsibilities of another shape, negative, not summing to 1, or the same for
            two components.
    """
    if start is None:
        return _seeded(data, n_components, generator)
    shape = (len(data), n_components)
    if not isinstance(start, Tensor) or start.is_complex() or start.shape != shape:
        got = list(start.shape) if isinstance(start, Tensor) else type(start).__name__
        raise InputError(f"start must be responsibilities {[*shape]}, got {got}")
    start = start.to(data)
    off = (start.sum(1) - 1).abs() > 1e-6
    if not bool((start >= 0).all()) or bool(off.any()):
        raise InputError("each example's responsibilities must be 0 or more and sum to 1")
    check_apart(start.mT)
    return start.detach()


def check_apart(components: Tensor) -> None:
    """Raise unless no two rows ``[K, …]`` agree: such components would stay together for ever.

    >>> check_apart(torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
    Traceback (most recent call last):
    ...
    blr_analysis.errors.InputError: two components of start are the same: move one a little
    """
    if len(torch.unique(components, dim=0)) < len(components):
        raise InputError("two components of start are the same: move one a little")


def _seeded(data: Tensor, n_components: int, generator: torch.Generator | None) -> Tensor:
    device = device_of(data, generator)
    spread = data.std(0)
    scaled = ((data - data.mean(0)) / torch.where(spread > 0, spread, 1.0)).to(device)
    chosen = torch.randint(len(data), (1,), generator=generator, device=device)
    gaps = torch.cdist(scaled, scaled[chosen])
    for _ in range(n_components - 1):
        weights = gaps.amin(1).square()
        weights = weights if bool((weights > 0).any()) else torch.ones_like(weights)
        chosen = torch.multinomial(weights, 1, generator=generator)
        gaps = torch.cat([gaps, torch.cdist(scaled, scaled[chosen])], 1)
    return one_hot(gaps.argmin(1), n_components).to(data)
