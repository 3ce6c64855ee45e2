"""Merges of whole tensors as vectors: spherical means, and the stock of models.

Each is a sum Σ_t c_t v_t of the models (or of their steps θ_t − θ_0) whose coefficients c depend on
the vectors' lengths and angles alone. One pass over a tensor gives their products G = V Vᵀ; the
sum then streams like any other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blr_analysis.errors import InputError

STRAIGHT = 0.9995  # a cosine above it: the arc is a line
TINY = 1e-5  # lengths and angles below it are none
NO_LENGTH = 1e-8  # a vector that is no longer has no direction


def slerp(gram: Tensor, weights: Tensor) -> Tensor:
    """The point at t = α_2 / (α_1 + α_2) of the arc from the first vector to the second.

        sin((1 − t)φ)/sin φ · v_1 + sin(tφ)/sin φ · v_2,      φ the angle between them

    A vector of zeros has no angle; φ is a right angle then, as in mergekit.

    Source: Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985.

    >>> slerp(torch.eye(2).double(), torch.tensor([1.0, 1.0]).double())
    tensor([0.7071, 0.7071], dtype=torch.float64)
    """
    t = float(weights[1] / weights.sum())
    lengths = gram.diagonal().sqrt()
    have_angle = bool((lengths > NO_LENGTH).all())
    cosine = float(gram[0, 1] / lengths.prod()) if have_angle else 0.0
    if abs(cosine) > STRAIGHT:
        return torch.tensor([1 - t, t], dtype=gram.dtype)
    angle = math.acos(cosine)
    shares = [math.sin((1 - t) * angle), math.sin(t * angle)]
    return torch.tensor(shares, dtype=gram.dtype) / math.sin(angle)


def multislerp(gram: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of the directions, times the mean length: where :func:`karcher` starts.

    (mergekit's method of this name takes a step from there along the mean of vectors that are
    orthogonal to it, which is 0.)
    """
    return karcher(gram, weights, steps=0)


def karcher(gram: Tensor, weights: Tensor, *, steps: int = 10) -> Tensor:
    """The weighted mean of the directions on the sphere, times the mean length.

    From u = Σ α v/|v|, made a unit vector: the tangents Σ α φ/sin φ (v/|v| − cos φ u), with φ
    the angle between v and u, are walked along as an arc until they are shorter than 1e-5.

    Source: Karcher, "Riemannian center of mass and mollifier smoothing", 1977.

    >>> gram = torch.tensor([[4.0, 0.0], [0.0, 1.0]]).double()
    >>> karcher(gram, torch.tensor([0.5, 0.5]).double())
    tensor([0.5303, 1.0607], dtype=torch.float64)
    """
    lengths = gram.diagonal().sqrt()
    has_direction = lengths > TINY
    shares = torch.where(has_direction, weights, 0.0)
    if not float(shares.sum()):
        return torch.zeros_like(weights)
    shares = shares / shares.sum()
    per_length = torch.where(has_direction, 1 / lengths, 0.0)
    mean = _unit(shares * per_length, gram)
    for _ in range(steps):
        cosines = (gram @ mean * per_length).clamp(-1, 1)
        angles = cosines.acos()
        pulls = shares * torch.where(angles > TINY, angles / angles.sin(), 0.0)
        tangent = pulls * per_length - (pulls @ cosines) * mean
        size = _length(tangent, gram)
        if size < TINY:
            break
        mean = _unit(math.cos(size) * mean + math.sin(size) / size * tangent, gram)
    return (weights @ lengths) / weights.sum() * mean


def _length(coefficients: Tensor, gram: Tensor) -> float:
    """‖Σ c v‖."""
    return float((coefficients @ gram @ coefficients).clamp_min(0).sqrt())


def _unit(coefficients: Tensor, gram: Tensor) -> Tensor:
    """The coefficients of a vector of length 1."""
    length = _length(coefficients, gram)
    if length < TINY:
        raise InputError("the models point opposite ways: there is no spherical mean of them")
    return coefficients / length


def model_stock(gram: Tensor, weights: Tensor) -> Tensor:
    """t/T of each of T steps, as far as they agree: t = T c / (1 + (T − 1) c), with c the mean
    cosine between two of them.

    Source: Jang et al., "Model Stock: all we need is just a few fine-tuned models", ECCV 2024.

    >>> gram = torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double()
    >>> model_stock(gram, torch.ones(2).double())                # c = 1/2: t = 2/3
    tensor([0.3333, 0.3333], dtype=torch.float64)
    """
    count = len(weights)
    lengths = gram.diagonal().sqrt().clamp_min(1e-30)
    cosines = (gram / lengths / lengths[:, None]).clamp(-1, 1)
    mean = float(cosines.triu(1).sum()) / max(count * (count - 1) / 2, 1)
    return torch.full_like(weights, mean / (1 + (count - 1) * mean))
