"""Merges of a layer's matrices that need no data: spectra of the steps, and inputs guessed by them.

Each takes the steps Δ_t = θ_t − θ_0 of one weight as matrices ``[O, I]`` in float64, with weights
α_t, and gives the step of the merge. Sources:

* :func:`iso_c`: Marczak et al., "No task left behind: isotropic model merging with common and
  task-specific subspaces", ICML 2025;
* :func:`tsv_m`: Gargiulo et al., "Task singular vectors: reducing task interference in model
  merging", CVPR 2025;
* :func:`wudi`: Cheng et al., "Whoever started the interference should end it: guiding data-free
  model merging via task vectors", ICML 2025;
* :func:`ace`: Xu et al., "ACE-Merging: data-free model merging with adaptive covariance
  estimation", CVPR 2026, of which it is the closed form alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SINGULAR = 1e-10  # of the largest value: directions that no task has moved along


def iso_c(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """σ̄ U Vᵀ, where U S Vᵀ = Σ_t α_t Δ_t and σ̄ is the mean of S: all directions count the same.

    S are the singular values above 0: nothing moves along directions that no task has moved along.

    >>> iso_c([torch.diag(torch.tensor([3.0, 1.0]))], [1.0])
    tensor([[2., 0.],
            [0., 2.]])
    """
    total = _weighted_sum(steps, weights)
    left, values, right = _singular_vectors(total)
    if not len(values):
        return torch.zeros_like(total)
    return values.mean() * (left @ right)


def tsv_m(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """U⊥ S V⊥ᵀ: of each of T tasks the first r/T singular vectors, made orthogonal to the others'.

    U⊥ = P Qᵀ is the orthogonal matrix that is nearest to the joined U = P D Qᵀ of all tasks, and
    so is V⊥; S holds their singular values times α_t. With few singular vectors, each task has one.
    Vectors whose singular value is 0 are left out: they belong to no task.
    """
    lefts = []
    values = []
    rights = []
    for step, weight in zip(steps, weights, strict=True):
        left, value, right = _singular_vectors(step)
        count = max(1, min(step.shape) // len(steps))
        lefts.append(left[:, :count])
        values.append(weight * value[:count])
        rights.append(right[:count].mT)
    left = _nearest_orthogonal(torch.cat(lefts, 1))
    right = _nearest_orthogonal(torch.cat(rights, 1))
    return (left * torch.cat(values)) @ right.mT


def _singular_vectors(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and Vᵀ, without those where S is 0: such vectors are not unique."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    is_moved = values > SINGULAR * values.max()
    return left[:, is_moved], values[is_moved], right[is_moved]


def _nearest_orthogonal(matrix: Tensor) -> Tensor:
    """P Qᵀ of P D Qᵀ."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def wudi(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The minimum of Σ_t α_t ‖(Δ − Δ_t) Δ_tᵀ‖² / ‖Δ_t‖²: each task's rows stand for its inputs.

    In closed form (Σ_t α_t Δ_t C_t)(Σ_t α_t C_t)⁻¹, C_t = Δ_tᵀΔ_t/‖Δ_t‖²; 0 along directions that
    no task has moved along. (The paper walks there by 300 steps of Adam from Σ_t Δ_t and stops.)
    """
    return ace(steps, weights, damping=0.0)


def ace(steps: Sequence[Tensor], weights: Sequence[float], damping: float = 1.0) -> Tensor:
    """(Σ_t α_t Δ_t C_t)(Σ_t α_t C_t)⁻¹, C_t = Δ_tᵀΔ_t/‖Δ_t‖² + d/I: RegMean without data.

    A layer's step is a sum of gradients, and each of its rows a sum of the layer's inputs: Δ_tᵀΔ_t
    stands for the moments of the inputs of task t. The damping d is in units of their mean; the
    larger it is, the nearer is the merge to the average. (The paper's spectral refinement
    afterwards is left out.)
    """
    inputs = steps[0].shape[1]
    right = torch.zeros_like(steps[0])
    total = torch.zeros(inputs, inputs, dtype=right.dtype)
    for step, weight in zip(steps, weights, strict=True):
        size = float(step.square().sum())
        if not size:
            continue  # a task that left the layer as it was says nothing of its inputs
        moments = step.mT @ step / size
        moments.diagonal().add_(damping / inputs)
        right += weight * (step @ moments)
        total += weight * moments
    values, vectors = torch.linalg.eigh(total)
    is_defined = values.abs() > SINGULAR * values.abs().max()
    inverse = torch.where(is_defined, 1 / values, 0.0)
    return (right @ vectors * inverse) @ vectors.mT


def _weighted_sum(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    terms = [weight * step for step, weight in zip(steps, weights, strict=True)]
    return torch.stack(terms).sum(0)
