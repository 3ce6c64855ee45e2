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
from blr_analysis.learning_rule.families.drawing import device_of
from blr_analysis.learning_rule.inference.factors import real


def paired(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """⟨left_i, right_k⟩ of N examples and K components, ``[N, K]``."""
    return sum(
        (left[key].reshape(len(left[key]), -1) @ right[key].reshape(len(right[key]), -1).mT)
        for key in left
    )  # type: ignore[return-value]


def pooled(weights: Tensor, statistics: Mapping[str, Tensor]) -> Natural:
    """Σ_i r_ik T(y_i), for each component: ``[K, …]`` from weights ``[N, K]``."""
    return {key: torch.tensordot(weights.mT, value, 1) for key, value in statistics.items()}


def check_data(data: Any, fewest: int = 1, columns: int | None = None) -> Tensor:
    """The data ``[N, D]`` in double precision, or what is wrong with them.

    Args:
        data: what was given.
        fewest: examples that there must be.
        columns: D, where it is known.

    Raises:
        DataError: data that are misshapen, not finite or too few.
    """
    like = torch.empty((), dtype=torch.float64, device=getattr(data, "device", None))
    data = real("data", data, like, 2)
    if len(data) < fewest:
        raise DataError(f"{fewest} components need as many examples, got {len(data)}")
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
    if not isinstance(start, Tensor) or start.shape != shape:
        raise InputError(f"start must be responsibilities {[*shape]}")
    start = start.to(data)
    if not bool((start >= 0).all()) or not torch.allclose(start.sum(1), start.new_tensor(1.0)):
        raise InputError("each example's responsibilities must be 0 or more and sum to 1")
    check_apart(start.mT)
    return start.detach()


def check_apart(components: Tensor) -> None:
    """Raise unless no two rows ``[K, …]`` agree: such components would stay together for ever."""
    if len(torch.unique(components, dim=0)) < len(components):
        raise InputError("two components of start are the same: move one a little")


def _seeded(data: Tensor, n_components: int, generator: torch.Generator | None) -> Tensor:
    device = device_of(data, generator)
    spread = data.std(0)
    scaled = ((data - data.mean(0)) / torch.where(spread > 0, spread, 1.0)).to(device)
    chosen = torch.randint(len(data), (1,), generator=generator, device=device)
    gaps = torch.cdist(scaled, scaled[chosen])
    for _ in range(n_components - 1):
        weights = gaps.amin(1).square() + 1e-300  # all alike: any of them
        chosen = torch.multinomial(weights, 1, generator=generator)
        gaps = torch.cat([gaps, torch.cdist(scaled, scaled[chosen])], 1)
    return one_hot(gaps.argmin(1), n_components).to(data)
