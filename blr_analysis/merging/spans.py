"""Merges of whole tensors as vectors: spherical means, and Model Stock.

Each of these merges is a sum Σ_t c_t v_t, where the v_t are the models' tensors, or their steps
θ_t − θ_0. The coefficients c_t depend on the lengths and angles of the v_t alone. One pass over a
tensor gives their inner products G = V Vᵀ, the functions here compute c from G, and a second pass
adds up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blr_analysis.errors import InputError

STRAIGHT = 0.9995  # above this cosine an arc is replaced by a line
TINY = 1e-5  # karcher takes lengths and angles up to this one for 0
NO_LENGTH = 1e-8  # slerp takes lengths up to this one for 0
SMALLEST_LENGTH = 1e-30  # a smaller length divides nothing


def slerp(gram: Tensor, weights: Tensor) -> Tensor:
    """The point at t = α_2 / (α_1 + α_2) of the arc from the first vector to the second.

        sin((1 − t)φ)/sin φ · v_1 + sin(tφ)/sin φ · v_2,      φ the angle between them

    A vector of zeros has no angle. φ is a right angle then, as in mergekit.

    Source: Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985.

    >>> slerp(torch.eye(2).double(), torch.tensor([1.0, 1.0]).double())
    tensor([0.7071, 0.7071], dtype=torch.float64)
    """
    t = float(weights[1] / weights.sum())
    lengths = gram.diagonal().sqrt()
    cosine = 0.0
    vectors_have_angle = bool((lengths > NO_LENGTH).all())
    if vectors_have_angle:
        cosine = float(gram[0, 1] / lengths.prod())
    if abs(cosine) > STRAIGHT:
        return torch.tensor([1 - t, t], dtype=gram.dtype)
    angle = math.acos(cosine)
    sines = [math.sin((1 - t) * angle), math.sin(t * angle)]
    return torch.tensor(sines, dtype=gram.dtype) / math.sin(angle)


def multislerp(gram: Tensor, weights: Tensor) -> Tensor:
    """The direction of Σ α v/|v|, times the mean length: the start of :func:`karcher`.

    The method of this name in mergekit takes one step more, along the mean of the tangents. They
    are orthogonal to that direction and average to 0: the step changes nothing.
    """
    return karcher(gram, weights, steps=0)


def karcher(gram: Tensor, weights: Tensor, *, steps: int = 10) -> Tensor:
    """The weighted mean of the directions on the sphere, times the mean length.

    The mean direction u starts at Σ α v/|v|, scaled to length 1. Each step moves u along the arc
    of the tangent Σ α φ/sin φ (v/|v| − cos φ u), where φ is the angle between v and u. The steps
    end when the tangent is shorter than 1e-5. ``direction`` and ``tangent`` are coefficients of the
    v_t, as all vectors here.

    Source: Karcher, "Riemannian center of mass and mollifier smoothing", 1977.

    >>> gram = torch.tensor([[4.0, 0.0], [0.0, 1.0]]).double()
    >>> karcher(gram, torch.tensor([0.5, 0.5]).double())
    tensor([0.5303, 1.0607], dtype=torch.float64)
    """
    lengths = gram.diagonal().sqrt()
    has_direction = lengths > TINY
    shares = torch.where(has_direction, weights, 0.0)
    total = shares.sum()
    if float(total) == 0:  # there is no direction to average
        return torch.zeros_like(weights)
    shares = shares / total
    per_length = torch.where(has_direction, 1 / lengths, 0.0)
    direction = _unit(shares * per_length, gram)
    for _ in range(steps):
        cosines = (gram @ direction * per_length).clamp(-1, 1)
        angles = cosines.acos()
        angle_by_sine = torch.where(angles > TINY, angles / angles.sin(), 0.0)
        pulls = shares * angle_by_sine
        tangent = pulls * per_length - (pulls @ cosines) * direction
        size = _length(tangent, gram)
        if size < TINY:
            break
        end_of_arc = math.cos(size) * direction + math.sin(size) / size * tangent
        direction = _unit(end_of_arc, gram)
    mean_length = (weights @ lengths) / weights.sum()
    return mean_length * direction


def _length(coefficients: Tensor, gram: Tensor) -> float:
    """‖Σ c v‖, the length of the vector with these coefficients."""
    return float((coefficients @ gram @ coefficients).clamp_min(0).sqrt())


def _unit(coefficients: Tensor, gram: Tensor) -> Tensor:
    """The coefficients of the same vector at length 1."""
    length = _length(coefficients, gram)
    if length < TINY:
        raise InputError("the models point opposite ways: there is no spherical mean of them")
    return coefficients / length


def model_stock(gram: Tensor, weights: Tensor) -> Tensor:
    """The mean of T steps times t = T c / (1 + (T − 1) c), where c is their mean cosine.

    Steps that agree (c = 1) are averaged, orthogonal steps (c = 0) cancel. The coefficient of each
    step is t/T. The paper's steps have equal angles. Of unequal ones mergekit takes the mean
    cosine, too, and FusionBench the cosine of the mean angle.

    Source: Jang et al., "Model Stock: all we need is just a few fine-tuned models", ECCV 2024.

    >>> gram = torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double()
    >>> model_stock(gram, torch.ones(2).double())                # c = 1/2: t = 2/3
    tensor([0.3333, 0.3333], dtype=torch.float64)
    """
    n_models = len(weights)
    n_pairs = n_models * (n_models - 1) / 2
    lengths = gram.diagonal().sqrt().clamp_min(SMALLEST_LENGTH)
    cosines = (gram / lengths / lengths[:, None]).clamp(-1, 1)
    mean_cosine = float(cosines.triu(1).sum()) / max(n_pairs, 1)
    coefficient = mean_cosine / (1 + (n_models - 1) * mean_cosine)
    return torch.full_like(weights, coefficient)
