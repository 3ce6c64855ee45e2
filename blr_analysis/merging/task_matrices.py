"""Merges of a layer's matrices without data, from what the steps of the tasks say by themselves.

Three methods look at the singular vectors of the steps. Two others take the rows of a step for
inputs of the layer, because a step is a sum of gradients, and each of its rows a sum of inputs.

Each function takes the steps Δ_t = θ_t − θ_0 of one weight as matrices ``[O, I]`` in float64, with
weights α_t, and returns the step of the merge. Sources:

* :func:`iso_c`, :func:`iso_cts`: Marczak et al., "No task left behind: isotropic model merging with
  common and task-specific subspaces", ICML 2025;
* :func:`tsv_m`: Gargiulo et al., "Task singular vectors: reducing task interference in model
  merging", CVPR 2025;
* :func:`wudi`: Cheng et al., "Whoever started the interference should end it: guiding data-free
  model merging via task vectors", ICML 2025;
* :func:`ace`: Xu et al., "ACE-Merging: data-free model merging with adaptive covariance
  estimation", CVPR 2026; only its closed form is here.

The authors' code multiplies the averaged steps of other tensors by λ, too; here they are averaged
whatever λ is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SINGULAR = 1e-10  # relative to the largest value; a smaller one is 0 but for rounding
COMMON = 0.8  # iso_cts: the share of the singular vectors that are the sum's, as in the paper


def iso_c(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """σ̄ U Vᵀ, where U S Vᵀ = Σ_t α_t Δ_t and σ̄ is the mean of S.

    The merge moves equally far along all singular vectors. Those of singular value 0 are left out
    of U, S and V, so that the merge does not move where no task has moved.

    >>> iso_c([torch.diag(torch.tensor([3.0, 1.0]))], [1.0])
    tensor([[2., 0.],
            [0., 2.]])
    """
    total = _weighted_sum(steps, weights)
    left, values, right = _singular_vectors(total)
    if not len(values):
        return torch.zeros_like(total)
    return values.mean() * (left @ right)


def iso_cts(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """σ̄ U⊥ V⊥ᵀ: :func:`iso_c`, with some singular vectors of each task by itself.

    A matrix has at most r = min(O, I) singular vectors. The first 0.8 r of Σ_t α_t Δ_t are common.
    Every task contributes an equal number of the others: the first singular vectors of what the
    common U leave of its step, α_t (Δ_t − U Uᵀ Δ_t). The numbers are rounded so that the tasks'
    are equal. U⊥ and V⊥ are the orthogonal matrices nearest to all left and to all right vectors,
    as in :func:`tsv_m`; σ̄ is the mean of their singular values. Vectors whose singular value is 0
    are left out.
    """
    n_vectors = min(steps[0].shape)
    n_specific = n_vectors - int(COMMON * n_vectors)
    vectors_per_task = round(n_specific / len(steps))
    n_common = n_vectors - vectors_per_task * len(steps)
    left, values, right = _singular_vectors(_weighted_sum(steps, weights))
    common = left[:, :n_common]
    left_vectors = [common]
    singular_values = [values[:n_common]]
    right_vectors = [right[:n_common].mT]
    for step, weight in zip(steps, weights, strict=True):
        weighted = weight * step
        rest = weighted - common @ (common.mT @ weighted)
        left, values, right = _singular_vectors(rest, size=float(weighted.norm()))
        left_vectors.append(left[:, :vectors_per_task])
        singular_values.append(values[:vectors_per_task])
        right_vectors.append(right[:vectors_per_task].mT)
    all_values = torch.cat(singular_values)
    if not len(all_values):
        return torch.zeros_like(steps[0])
    left = _nearest_orthogonal(torch.cat(left_vectors, dim=1))
    right = _nearest_orthogonal(torch.cat(right_vectors, dim=1))
    return all_values.mean() * (left @ right.mT)


def tsv_m(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """U⊥ S V⊥ᵀ: the first singular vectors of every task, made orthogonal to each other.

    A matrix has at most r = min(O, I) singular vectors. Each of T tasks contributes its first r/T,
    and at least one. The columns of U are the left vectors of all tasks, those of V the right
    vectors, and S has their singular values times α_t. With the singular value decomposition
    U = P D Qᵀ, the orthogonal matrix nearest to U is U⊥ = P Qᵀ; V⊥ likewise. Vectors whose
    singular value is 0 are left out, because they are arbitrary.
    """
    vectors_per_task = max(1, min(steps[0].shape) // len(steps))
    left_vectors = []
    singular_values = []
    right_vectors = []
    for step, weight in zip(steps, weights, strict=True):
        left, values, right = _singular_vectors(step)
        left_vectors.append(left[:, :vectors_per_task])
        singular_values.append(weight * values[:vectors_per_task])
        right_vectors.append(right[:vectors_per_task].mT)
    left = _nearest_orthogonal(torch.cat(left_vectors, dim=1))
    right = _nearest_orthogonal(torch.cat(right_vectors, dim=1))
    return (left * torch.cat(singular_values)) @ right.mT


def _singular_vectors(matrix: Tensor, size: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and Vᵀ without the vectors of singular value 0, which are not unique.

    Args:
        size: of the numbers whose rounding may have left a 0 as a small value; None: the largest
            singular value.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    is_positive = values > SINGULAR * (values[:1] if size is None else size)
    return left[:, is_positive], values[is_positive], right[is_positive]


def _nearest_orthogonal(matrix: Tensor) -> Tensor:
    """P Qᵀ, where P D Qᵀ is the singular value decomposition of the matrix, without zeros in D.

    Columns that depend on each other, as equal steps have them, span no direction of their own.
    """
    left, _, right = _singular_vectors(matrix)
    return left @ right


def wudi(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The Δ that minimises Σ_t α_t ‖(Δ − Δ_t) Δ_tᵀ‖² / ‖Δ_t‖².

    On the rows of Δ_t, which are taken for inputs of task t, the merge and the task's own step
    then give nearly the same outputs. In closed form Δ = (Σ_t α_t Δ_t C_t)(Σ_t α_t C_t)⁻¹ with
    C_t = Δ_tᵀΔ_t/‖Δ_t‖²; it is 0 along directions where no task has moved. (The authors' code takes
    300 steps of Adam towards it, from Σ_t Δ_t. At its rate of 1e-5 no entry moves further than
    .003: steps with larger entries stay near their sum.) Where Σ_t α_t C_t has small eigenvalues
    the minimum can be far beyond all Δ_t, which :func:`ace` damps.
    """
    return ace(steps, weights, damping=0.0)


def ace(steps: Sequence[Tensor], weights: Sequence[float], damping: float = 1.0) -> Tensor:
    """(Σ_t α_t Δ_t C_t)(Σ_t α_t C_t)⁻¹ with C_t = Δ_tᵀΔ_t/‖Δ_t‖² + d/I.

    This is RegMean's formula, in which C_t is the second moment of the layer's inputs in task t.
    Here no data are needed: Δ_tᵀΔ_t stands for the second moment, because the rows of Δ_t are sums
    of inputs. The damping d is in units of the mean eigenvalue of Δ_tᵀΔ_t/‖Δ_t‖²; the larger it
    is, the nearer is the merge to the average. (The spectral refinement that the paper does
    afterwards is left out.)
    """
    n_inputs = steps[0].shape[1]
    sum_of_products = torch.zeros_like(steps[0])  # Σ_t α_t Δ_t C_t
    sum_of_moments = torch.zeros(n_inputs, n_inputs, dtype=sum_of_products.dtype)  # Σ_t α_t C_t
    for step, weight in zip(steps, weights, strict=True):
        squared_norm = float(step.square().sum())
        if squared_norm == 0:
            continue  # the task left the layer as it was, so that its inputs are unknown
        moments = step.mT @ step / squared_norm
        moments.diagonal().add_(damping / n_inputs)
        sum_of_products += weight * (step @ moments)
        sum_of_moments += weight * moments
    values, vectors = torch.linalg.eigh(sum_of_moments)
    has_inverse = values.abs() > SINGULAR * values.abs().max()
    inverse_values = torch.where(has_inverse, 1 / values, 0.0)
    return ((sum_of_products @ vectors) * inverse_values) @ vectors.mT


def _weighted_sum(steps: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ_t α_t Δ_t."""
    terms = [weight * step for step, weight in zip(steps, weights, strict=True)]
    return torch.stack(terms).sum(0)
