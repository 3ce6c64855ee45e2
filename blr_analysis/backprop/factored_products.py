"""⟨G_c, U_r⟩ of a layer that is a matrix product with R stacked matrices U_r, and its adjoint.

Σ_t d_ctᵀ (U_r a_t) needs no G. Where R is large beside the number of positions, it takes fewer
multiplications to form G once for all U_r.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blr_analysis.backprop.factors import Factors
from blr_analysis.backprop.matmul import product
from blr_analysis.backprop.terms import TEMPORARY_NUMBERS, Tree, scaled_rows, slices

MATRIX_NUMBERS = 2**20  # numbers of G and of U, of some rows, that are multiplied at once
CACHED_NUMBERS = TEMPORARY_NUMBERS // 4  # numbers of U a of one column: they stay in the cache
FEW_ROWS_SLOWDOWN = 3
"""A product of few rows with very long ones takes so many times what its multiplications would."""


def keeps_factors(factors: Factors, n_stacked: int) -> bool:
    """Whether Σ_t d_tᵀ (U_r a_t) takes less time, for this many U_r, than forming G."""
    if factors.weight is None:
        return False
    r = n_stacked
    t = factors.n_positions
    k = factors.n_columns
    o = factors.layout.rows
    i = factors.layout.columns
    if k > 1:  # both forms have the same factor o, which is left out
        for_factors = t * r * (i + k)
        for_matrices = k * t * i + k * r * i
    else:
        for_factors = t * r * (o * i + min(o, i))
        for_matrices = t * o * i + FEW_ROWS_SLOWDOWN * r * o * i
    return for_factors <= for_matrices


def factored_products(
    factors: Factors,
    stack: Mapping[str, Tensor],
    scale: Mapping[str, Tensor] | None,
    room: int | None,
) -> Tensor:
    """Σ_t d_ctᵀ (U_r a_t) without G, ``[B, K, R]``.

    Of one column, U is multiplied with the longer of d and a first: (U_rᵀ d)ᵀ a is the same number,
    and what lies between is shorter.

    Args:
        stack: U ``[R, *shape]`` by name.
        scale: what every U_r is multiplied with, ``[*shape]`` by name; None: nothing.
        room: numbers of temporary tensors at most; None: :data:`TEMPORARY_NUMBERS`.
    """
    assert factors.weight is not None
    first = factors.inputs
    last = factors.stacked()
    begins_with_grads = factors.n_columns == 1 and last.shape[-1] > first.shape[-1]
    if begins_with_grads:
        first, last = last.squeeze(2), first.unsqueeze(2)
    dtype = first.dtype
    b, g, k, t, _ = last.shape
    first_rows = first.transpose(0, 1).reshape(g, b * t, -1)
    size = _stacked_at_once(factors, stack, scale, room, last, begins_with_grads=begins_with_grads)
    inner = first.new_empty(b, k, len(stack[factors.weight]))
    for chosen in slices(inner.shape[-1], size):
        u = scaled_rows(stack, factors.weight, chosen, dtype, scale)
        matrices = factors.layout.matrix(u.view(-1, *factors.layout.shape))
        if begins_with_grads:
            matrices = matrices.mT
        side_by_side = matrices.transpose(0, 1).reshape(g, -1, first.shape[-1])
        x = product(first_rows, side_by_side.mT)
        if factors.bias is not None and not begins_with_grads:
            bias = scaled_rows(stack, factors.bias, chosen, dtype, scale).view(len(u), g, -1)
            x += bias.transpose(0, 1).reshape(g, 1, -1)
        inner[..., chosen] = _inner(last, x.view(g, b, t, len(u), -1))
    if factors.bias is not None and begins_with_grads:
        inner += _bias_products(factors, stack, dtype, scale)
    return inner


def _stacked_at_once(
    factors: Factors,
    stack: Mapping[str, Tensor],
    scale: Mapping[str, Tensor] | None,
    room: int | None,
    last: Tensor,
    *,
    begins_with_grads: bool,
) -> int:
    """How many U_r are multiplied at once; may be 0.

    The product with the first factor has as many numbers for each U_r as one column of the last. A
    copy of U_r itself is made where it changes its precision, its scale or its layout.
    """
    assert factors.weight is not None
    u = stack[factors.weight]
    is_converted = scale is not None or u.dtype != last.dtype
    max_numbers = min(TEMPORARY_NUMBERS, room or TEMPORARY_NUMBERS)
    product_numbers = max_numbers
    if factors.n_columns == 1 and not is_converted:
        product_numbers = min(CACHED_NUMBERS, max_numbers)
    size = product_numbers // last[:, :, 0].numel()
    if is_converted or begins_with_grads:
        numbers_of_one = u.shape[1:].numel()  # the stack itself may be empty
        size = min(size, max_numbers // numbers_of_one)
    return size


def _inner(last: Tensor, x: Tensor) -> Tensor:
    """Σ_t Σ_o d_cto x_tro, ``[B, K, r]``, from d ``[B, g, K, T, O]`` and x ``[g, B, T, r, O]``."""
    n_groups = len(x)
    n_positions = x.shape[2]
    if n_groups == n_positions == 1:
        return torch.bmm(last[:, 0, :, 0], x[0, :, 0].mT)
    return torch.einsum("gbtro,bgkto->bkr", x, last)


def explicit_products(
    factors: Factors,
    stack: Mapping[str, Tensor],
    dtype: torch.dtype,
    scale: Mapping[str, Tensor] | None,
    room: int | None,
) -> Tensor:
    """⟨G_c, s ∘ U_r⟩, ``[B, K, R]``: G of some rows is formed once, for all U_r.

    ``stack``, ``scale`` and ``room`` as of :func:`factored_products`.
    """
    assert factors.weight is not None
    b, g, _, i = factors.inputs.shape
    k = factors.n_columns
    u = factors.layout.matrix(stack[factors.weight])
    s = None if scale is None else factors.layout.matrix(scale[factors.weight]).to(dtype)
    inner = factors.inputs.new_zeros(b * k, len(u), dtype=dtype)
    size = b if room is None else room // (2 * k * g * i)
    numbers = min(MATRIX_NUMBERS, room or MATRIX_NUMBERS)
    for examples in slices(b, size):
        part = factors.part(examples)
        into = inner[examples.start * k : examples.stop * k]
        numbers_per_row = (len(into) + len(u)) * g * i
        for rows in slices(factors.layout.rows, numbers // numbers_per_row):
            gradients = part.rows(rows).matrices().transpose(1, 2).reshape(len(into), -1)
            u_rows = u[:, :, rows].to(dtype)
            if s is not None:
                u_rows = u_rows * s[:, rows]
            into.addmm_(gradients.to(dtype), u_rows.reshape(len(u), -1).mT)
    inner = inner.view(b, k, -1)
    if factors.bias is not None:
        inner += _bias_products(factors, stack, dtype, scale)
    return inner


def _bias_products(
    factors: Factors,
    stack: Mapping[str, Tensor],
    dtype: torch.dtype,
    scale: Mapping[str, Tensor] | None,
) -> Tensor:
    """⟨Σ_t d_ct, s ∘ u_r⟩ of the bias, ``[B, K, R]``."""
    assert factors.bias is not None
    bias = scaled_rows(stack, factors.bias, slice(None), dtype, scale)
    return factors.bias_grads().to(dtype).transpose(1, 2).flatten(2) @ bias.mT


def add_factored_sums(factors: Factors, weights: Tensor, into: Tree) -> None:
    """Add Σ_i Σ_t (Σ_c w_icr d_ct) a_tᵀ to ``into``, ``[R, *shape]`` by name.

    ``weights`` w: ``[B, K, R]``.
    """
    assert factors.weight is not None
    b, g, t, i = factors.inputs.shape
    o = factors.layout.rows
    a = factors.inputs.transpose(0, 1).reshape(g, b * t, i)
    stacked_grads = factors.stacked()
    size = TEMPORARY_NUMBERS // (g * o * max(b * t, i))
    for chosen in slices(weights.shape[-1], size):
        d = torch.einsum("bkr,bgkto->gbtro", weights[..., chosen], stacked_grads)
        matrices = product(d.reshape(g, b * t, -1).mT, a).view(g, -1, o, i)
        into[factors.weight][chosen] += factors.layout.parameter(matrices.transpose(0, 1))
        if factors.bias is not None:
            sums = d.sum((1, 2)).transpose(0, 1)  # [r, g, O]
            into[factors.bias][chosen] += sums.reshape(-1, g * o)
