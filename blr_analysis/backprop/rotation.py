"""U_Gᵀ G_c U_A of a layer that is a matrix product: its factors rotated, or G itself.

U_A ``[g, I', I']`` turns the inputs and U_G ``[g, O, O]`` the output gradients. Where a bias is
joined to the weight, U_A has one more row than the inputs have numbers: that of an input of 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis.backprop.factored_gram import (
    examples_at_once,
    flat_gram,
    one_position_gram,
    squares_times,
    weighted_gram,
)
from blr_analysis.backprop.factors import Factors
from blr_analysis.backprop.matmul import batch_product, product
from blr_analysis.backprop.matrices import Basis, Joint, MatrixShape
from blr_analysis.backprop.terms import added, slices

ROTATED_INPUTS = 2**19
"""Numbers of inputs that are rotated and squared at once: fewer make the product slow, more leave
the cache."""


def rotated_factors(factors: Factors, basis: Basis) -> Factors | None:
    """The factors of U_Gᵀ G U_A; None where G itself takes fewer multiplications to rotate."""
    if _rotates_matrices(factors, basis):
        return None
    joint = Joint(basis.key, None, MatrixShape(*basis.shape, basis.shape))
    inputs = _rotated_inputs(factors, basis.right)
    return Factors(joint, inputs, _rotated_grads(factors, basis.left))


def rotated_matrices(factors: Factors, basis: Basis) -> Tensor:
    """U_Gᵀ G U_A from G itself, ``[B, g, K, O, I']``."""
    matrices = factors.joint_matrices()
    if basis.left is not None:
        matrices = basis.left.mT.unsqueeze(1) @ matrices
    return matrices @ basis.right.unsqueeze(1)


def rotated_gram(
    factors: Factors, basis: Basis, variance: Tensor, into: Tensor | None = None
) -> Tensor:
    """⟨U_Gᵀ G_c U_A ∘ σ², U_Gᵀ G_c' U_A⟩ with σ² ``[g, O, I']``, ``[B, K, K]``."""
    has_one_position = factors.n_positions == 1
    if has_one_position and factors.weight is not None and len(basis.right) == 1:
        scale = _rotated_row_scale(factors.inputs, basis.right[0], variance[0])
        left = None if basis.left is None else basis.left[0]
        return one_position_gram(factors, scale, left, into)
    n_examples = factors.n_examples
    size = max(1, examples_at_once(factors))
    if factors.n_columns > 1 and not has_one_position and size < n_examples:
        parts = (factors.part(examples) for examples in slices(n_examples, size))
        return added(into, torch.cat([rotated_gram(part, basis, variance) for part in parts]))
    turned = rotated_factors(factors, basis)
    if turned is not None:
        return weighted_gram(turned, variance, None, into)
    return added(into, flat_gram(rotated_matrices(factors, basis), variance.unsqueeze(1)))


def _rotated_row_scale(inputs: Tensor, right: Tensor, variance: Tensor) -> Tensor:
    """Σ_i σ²_oi (U_Aᵀ a)_i² of terms of one position, ``[B, 1, O]``."""
    i = inputs.shape[-1]
    bias = right[-1] if len(right) > i else None

    def rotated_and_squared(rows: Tensor) -> Tensor:
        return product(rows, right[:i], bias).square_()

    rows = inputs.reshape(-1, i)
    return squares_times(rows, variance, ROTATED_INPUTS, rotated_and_squared).unsqueeze(1)


def _rotates_matrices(factors: Factors, basis: Basis) -> bool:
    """Whether G itself takes fewer multiplications to rotate than a and d."""
    t = factors.n_positions
    if t == 1:
        return False
    if factors.weight is None:
        return True
    _, o, joint = basis.shape
    k = factors.n_columns
    for_factors = t * factors.inputs.shape[-1] * joint + k * t * o * o
    for_matrices = k * o * joint * (joint + o)
    return for_matrices < for_factors


def _rotated_inputs(factors: Factors, right: Tensor) -> Tensor:
    """U_Aᵀ a ``[B, g, T, I']``."""
    inputs = factors.inputs
    n_examples, _, t, i = inputs.shape
    g, _, joint = right.shape
    has_bias = joint > i
    if factors.weight is None:
        return right[:, :1].unsqueeze(0).expand(n_examples, -1, t, -1)
    if g > 1:
        a = inputs @ right[:, :i]
        return a + right[:, -1:] if has_bias else a
    if t > 1 and inputs.stride(-1) > 1:  # patches, with positions last, are not copied
        turn = right[:, :i].mT.contiguous().expand(n_examples, -1, -1)
        a = batch_product(turn, inputs.squeeze(1).mT)
        if has_bias:
            a += right[0, -1].unsqueeze(1)
        return a.mT.unsqueeze(1)
    bias = right[0, -1] if has_bias else None
    a = product(inputs.reshape(-1, i), right[0, :i], bias)
    return a.view(*inputs.shape[:-1], joint)


def _rotated_grads(factors: Factors, left: Tensor | None) -> list[Tensor]:
    """U_Gᵀ d, column by column."""
    grads = factors.grads
    if left is None:
        return grads
    if len(left) > 1:
        return [d @ left for d in grads]
    if factors.n_positions == 1:
        stacks = [product(stack, left[0]) for stack in factors.stacks()]
        return [d for stack in stacks for d in stack.unbind()]
    if grads[0].stride(-1) == 1:
        o = left.shape[-1]
        return [product(d.reshape(-1, o), left[0]).view(d.shape) for d in grads]
    return [d @ left for d in grads]
