"""Merges of a layer's matrices without data: by the spectra of steps, or by inputs they stand for.

Each function takes the steps Δ_t = θ_t − θ_0 of one weight as matrices ``[O, I]`` in float64, with
weights α_t, and returns the step of the merge. Sources:

* :func:`iso_c`: Marczak et al., "No task left behind: isotropic model merging with common and
  task-specific subspaces", ICML 2025;
* :func:`tsv_m`: Gargiulo et al., "Task singular vectors: reducing task interference in model
  merging", CVPR 2025;
* :func:`wudi`: Cheng et al., "Whoever started the interference should end it: guiding data-free
  model merging via task vectors", ICML 2025;
* :func:`ace`: Xu et al., "ACE-Merging: data-free model merging with adaptive covariance
  estimation", CVPR 2026; only its closed form is here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SINGULAR = 1e-10  # of the largest value; along directions below it no task has moved


def iso_c(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """σ̄ U Vᵀ, where U S Vᵀ = Σ_t α_t Δ_t and σ̄ is the mean of S: all directions count the same.

    Only singular values above 0 are in S, so that directions without any step stay as they are.

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
    """U⊥ S V⊥ᵀ: the first singular vectors of every task, made orthogonal to each other.

    A matrix has at most r = min(O, I) singular vectors. Each of T tasks contributes its first r/T,
    and at least one. U joins the left ones of all tasks, V the right ones, and S their singular
    values times α_t. With U = P D Qᵀ, the orthogonal matrix nearest to U is U⊥ = P Qᵀ; V⊥ likewise.
    Vectors whose singular value is 0 are left out, because they belong to no task.
    """
    vectors_per_task = max(1, min(steps[0].shape) // len(steps))
    lefts = []
    values = []
    rights = []
    for step, weight in zip(steps, weights, strict=True):
        left, value, right = _singular_vectors(step)
        lefts.append(left[:, :vectors_per_task])
        values.append(weight * value[:vectors_per_task])
        rights.append(right[:vectors_per_task].mT)
    left = _nearest_orthogonal(torch.cat(lefts, 1))
    right = _nearest_orthogonal(torch.cat(rights, 1))
    return (left * torch.cat(values)) @ right.mT


def _singular_vectors(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and Vᵀ without the vectors of singular value 0, which are not unique."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    is_moved = values > SINGULAR * values.max()
    return left[:, is_moved], values[is_moved], right[is_moved]


def _nearest_orthogonal(matrix: Tensor) -> Tensor:
    """P Qᵀ, where P D Qᵀ is the singular value decomposition of the matrix."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def wudi(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The Δ that minimises Σ_t α_t ‖(Δ − Δ_t) Δ_tᵀ‖² / ‖Δ_t‖²: rows of Δ_t stand for inputs.

    In closed form Δ = (Σ_t α_t Δ_t C_t)(Σ_t α_t C_t)⁻¹ with C_t = Δ_tᵀΔ_t/‖Δ_t‖²; it is 0 along
    directions without any step. (The paper takes 300 steps of Adam from Σ_t Δ_t towards it.)
    """
    return ace(steps, weights, damping=0.0)


def ace(steps: Sequence[Tensor], weights: Sequence[float], damping: float = 1.0) -> Tensor:
    """(Σ_t α_t Δ_t C_t)(Σ_t α_t C_t)⁻¹ with C_t = Δ_tᵀΔ_t/‖Δ_t‖² + d/I: RegMean without data.

    A layer's step is a sum of gradients, so that each of its rows is a sum of the layer's inputs.
    Δ_tᵀΔ_t therefore stands for the second moments of the inputs of task t. The damping d is in
    units of their mean; the larger it is, the nearer is the merge to the average. (The spectral
    refinement that the paper does afterwards is left out.)
    """
    n_inputs = steps[0].shape[1]
    right = torch.zeros_like(steps[0])
    total = torch.zeros(n_inputs, n_inputs, dtype=right.dtype)
    for step, weight in zip(steps, weights, strict=True):
        squared_norm = float(step.square().sum())
        if squared_norm == 0:
            continue  # the task left the layer as it was, and its inputs are unknown
        moments = step.mT @ step / squared_norm
        moments.diagonal().add_(damping / n_inputs)
        right += weight * (step @ moments)
        total += weight * moments
    values, vectors = torch.linalg.eigh(total)
    is_defined = values.abs() > SINGULAR * values.abs().max()
    inverse = torch.where(is_defined, 1 / values, 0.0)
    return (right @ vectors * inverse) @ vectors.mT


def _weighted_sum(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ_t α_t Δ_t."""
    terms = [weight * step for step, weight in zip(steps, weights, strict=True)]
    return torch.stack(terms).sum(0)
