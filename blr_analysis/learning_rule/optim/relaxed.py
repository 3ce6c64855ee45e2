"""Relaxed signs: continuous numbers in the place of draws from a Bernoulli on ±1.

For λ = ½ log(p / (1 − p)), uniform ε and the temperature τ (Maddison et al., 2017; Khan & Rue,
Eq. 50),

    w = tanh((λ + δ) / τ),      δ = ½ log(ε / (1 − ε)),

tends to a draw sign(λ + δ) as τ → 0. Its slope along the mean μ = tanh λ (Eq. 51) is

    s = dw/dμ = (1 − w²) / (τ (1 − μ²)).

Averaged over the noise, s → dE[sign(λ + δ)]/dμ = 1: the identity that straight-through
estimation puts there. Without noise, s → 0 at any λ ≠ 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blr_analysis.learning_rule.families.drawing import uniform


def signs(theta: Tensor) -> Tensor:
    """±1, with +1 at 0.

    >>> signs(torch.tensor([-2.0, 0.0, 3.0]))
    tensor([-1.,  1.,  1.])
    """
    ones = torch.ones_like(theta)
    return torch.where(theta >= 0, ones, -ones)


def draw_signs(half_logit: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A draw of ±1 with means tanh λ."""
    return signs(torch.sigmoid(2 * half_logit) - uniform(half_logit, generator))


def logistic_noise(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """δ = ½ log(ε / (1 − ε)) for uniform ε, shaped as ``like``."""
    drawn = uniform(like, generator)
    return (drawn.log() - torch.log1p(-drawn)) / 2


def relax(half_logit: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """w = tanh((λ + δ) / τ), Khan & Rue, Eq. 50.

    >>> relax(torch.tensor([0.5, -0.5]), torch.zeros(2), 0.01)
    tensor([ 1., -1.])
    """
    return torch.tanh((half_logit + noise) / temperature)


def relaxed_slope(
    half_logit: Tensor, noise: Tensor, temperature: float, floor: float = 0.0
) -> Tensor:
    """s = (1 − w² + floor) / (τ (1 − μ² + floor)), which at floor 0 is dw/dμ.

    1 − tanh² is computed from its logarithm, for it does not vanish where tanh rounds to ±1.

    >>> relaxed_slope(torch.tensor([0.3]), torch.zeros(1), 1.0)
    tensor([1.])
    """
    above, below = _log_sech2((half_logit + noise) / temperature), _log_sech2(half_logit)
    if floor == 0:
        return (above - below).exp() / temperature
    return (above.exp() + floor) / (temperature * (below.exp() + floor))


def _log_sech2(x: Tensor) -> Tensor:
    """log(1 − tanh² x)."""
    size = x.abs()
    return math.log(4.0) - 2 * size - 2 * torch.log1p(torch.exp(-2 * size))
