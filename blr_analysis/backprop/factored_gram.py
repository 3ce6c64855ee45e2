"""⟨G_c ∘ σ², G_c'⟩ and Σ_i Σ_c G_c² of a layer that is a matrix product, by the cheapest form.

* One position: with s_o = Σ_i σ²_oi a_i² the inner product is Σ_o d_co s_o d_c'o.
* Several positions: G itself is formed, some of its rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from blr_analysis.backprop.factors import Factors
from blr_analysis.backprop.matmul import product
from blr_analysis.backprop.matrices import MatrixShape
from blr_analysis.backprop.terms import added, added_bmm, slices, sum_of_squares

# Numbers (not bytes) of a temporary tensor. The smaller ones stay in a processor's cache while they
# are used, which is why they are made in pieces.
MATRIX_OF_ONE_COLUMN = 2**18  # numbers of G of some rows and examples, where K = 1
MATRIX_OF_COLUMNS = 2**20  # numbers of G of one example and some rows, where K > 1
STACKED_GRADS = 2**19  # numbers of output gradients of several columns, side by side
SQUARED_INPUTS = 2**18  # numbers of squared inputs
COPIES = 2.5  # of output gradients or of a block of G, in memory at once


def weighted_gram(
    factors: Factors, weight: Tensor | None, bias: Tensor | None, into: Tensor | None = None
) -> Tensor:
    """⟨G_c ∘ σ², G_c'⟩ ``[B, K, K]``, added to ``into`` unless that is None.

    Args:
        weight: σ² of the weight, ``[g, O, I]``; None: it has none.
        bias: σ² of the bias, ``[g, O]``; None: it has none.
    """
    k = factors.n_columns
    if factors.n_positions == 1:
        return one_position_gram(factors, _row_scale(factors, weight, bias), into=into)
    gram = factors.inputs.new_zeros(factors.n_examples, k, k) if into is None else into
    if weight is not None:
        for examples, rows, matrices in matrix_blocks(factors):
            gram[examples] += flat_gram(matrices, weight[:, rows].unsqueeze(1))
    if bias is not None:
        gram += flat_gram(factors.bias_grads(), bias.unsqueeze(1))
    return gram


def gram_numbers(layout: MatrixShape, n_positions: int, n_columns: int) -> float:
    """Numbers of temporary tensors that :func:`weighted_gram` needs for each example."""
    outputs = n_columns * layout.groups * layout.rows
    if n_positions == 1:
        return COPIES * outputs
    one_row = n_columns * layout.groups * layout.columns
    block = MATRIX_OF_ONE_COLUMN if n_columns == 1 else MATRIX_OF_COLUMNS
    return COPIES * min(outputs * layout.columns, max(block, one_row))


def examples_at_once(factors: Factors) -> int:
    """How many examples have few enough output gradients to be stacked at once; may be 0."""
    numbers_per_example = factors.n_columns * factors.grads[0][0].numel()
    return STACKED_GRADS // numbers_per_example


def matrix_blocks(factors: Factors) -> Iterator[tuple[slice, slice, Tensor]]:
    """G_c ``[b, g, K, rows, I]`` of some examples and some rows, with both slices.

    A block is so small that it is used while it is in the cache. Whatever belongs to its rows stays
    there for all examples.
    """
    n_examples, g, _, i = factors.inputs.shape
    k = factors.n_columns
    o = factors.grads[0].shape[-1]
    if k == 1:
        numbers = MATRIX_OF_ONE_COLUMN
        size = numbers // (g * o * i)
    else:
        numbers = MATRIX_OF_COLUMNS
        size = examples_at_once(factors)
    for rows in slices(o, numbers // (k * g * i)):
        block = factors.rows(rows)
        if size >= n_examples:
            yield slice(0, n_examples), rows, block.matrices()
            continue
        for examples in slices(n_examples, size):
            yield examples, rows, block.part(examples).matrices()


def one_position_gram(
    factors: Factors, scale: Tensor, left: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Σ_o (d_c U)_o s_o (d_c' U)_o of terms of one position, ``[B, K, K]``.

    Args:
        scale: s ``[B, g, O]``; it is overwritten.
        left: U ``[O, O]``; None: the identity.
        into: what the result is added to; None: a new tensor.
    """
    if factors.shared_columns is not None and scale.shape[1] == 1:
        return _shared_columns_gram(factors.shared_columns[:, 0], scale, left, into)
    scale = scale.unsqueeze(2)
    if factors.n_columns == 1:
        d = factors.grads[0] if left is None else factors.grads[0] @ left
        squares = (d.square() * scale).sum((1, 2, 3))
        return added(into, squares.view(-1, 1, 1))
    d = torch.stack(factors.grads)
    if left is not None:
        d = product(d, left)
    root = d.mul_(scale.sqrt_()).flatten(2).transpose(0, 1)
    return added_bmm(into, root, root.mT)


def _shared_columns_gram(
    columns: Tensor, scale: Tensor, left: Tensor | None, into: Tensor | None
) -> Tensor:
    """:func:`one_position_gram` of columns d_c ``[K, O]`` that all examples share; s
    ``[B, 1, O]``."""
    unit = torch.eye(*columns.shape, dtype=columns.dtype, device=columns.device)
    is_unit = torch.equal(columns, unit)
    if left is not None:
        turned = left if is_unit else columns @ left
    elif not is_unit:
        turned = columns
    elif into is None:
        return torch.diag_embed(scale.squeeze(1))
    else:
        into.diagonal(dim1=1, dim2=2).add_(scale.squeeze(1))
        return into
    root = turned * scale.sqrt_()
    return added_bmm(into, root, root.mT)


def _row_scale(factors: Factors, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """s_o = Σ_i σ²_oi a_i² + σ²_o of terms of one position, ``[B, g, O]``."""
    a = factors.inputs.squeeze(2)
    if weight is None:
        assert bias is not None
        return bias.expand(len(a), *bias.shape).clone()
    if len(weight) == 1:
        scale = squares_times(a.squeeze(1), weight[0], SQUARED_INPUTS, torch.square).unsqueeze(1)
    else:
        scale = torch.einsum("bgi,goi->bgo", a.square(), weight)
    return scale if bias is None else scale.add_(bias)


def squares_times(
    inputs: Tensor, variance: Tensor, numbers: int, squared: Callable[[Tensor], Tensor]
) -> Tensor:
    """``squared(inputs) @ varianceᵀ``, ``[B, O]`` from ``[B, I]`` and ``[O, I]``.

    So few rows are taken at a time that their squares, about ``numbers`` numbers, stay in the
    cache.
    """
    products = inputs.new_empty(len(inputs), len(variance))
    n_rows = max(64, numbers // inputs.shape[-1])
    for rows, into in zip(inputs.split(n_rows), products.split(n_rows), strict=True):
        into.copy_(product(squared(rows), variance.mT))
    return products


def flat_gram(columns: Tensor, variance: Tensor) -> Tensor:
    """⟨G_c ∘ σ², G_c'⟩ from G ``[B, g, K, ...]`` and σ² ``[g, 1, ...]`` (broadcast), ``[B, K, K]``.

    Overwrites ``columns``.
    """
    if columns.shape[2] == 1:
        weights = variance.expand(columns.shape[1], 1, *columns.shape[3:]).reshape(-1)
        return (columns.square_().flatten(1) @ weights).view(-1, 1, 1)
    flat = columns.mul_(variance.sqrt()).transpose(1, 2).flatten(2)
    return torch.bmm(flat, flat.mT)


def add_square_sums(factors: Factors, weight: Tensor | None, bias: Tensor | None) -> None:
    """Add Σ_i Σ_c G_c² to the sums of the weight ``[g, O, I]`` and of the bias ``[g · O]``."""
    if factors.n_positions == 1:
        squares = sum_of_squares(factors.grads)
        if weight is not None:
            _add_outer_squares(factors.inputs, squares, weight)
        if bias is not None:
            bias += squares.sum((0, 2)).flatten()
        return
    if weight is not None:
        for _, rows, matrices in matrix_blocks(factors):
            weight[:, rows] += matrices.square_().sum((0, 2))
    if bias is not None:
        bias += factors.bias_grads().square().sum((0, 2)).flatten()


def _add_outer_squares(inputs: Tensor, grad_squares: Tensor, into: Tensor) -> None:
    """Add Σ_i d_i² a_iᵀ² to ``into``, ``[g, O, I]``, for one position, from d² ``[B, g, 1, O]``.

    The inputs of some examples at a time are squared: these squares stay in the cache.
    """
    g, o, i = into.shape
    sums = inputs.new_zeros(g, o, i)
    for examples in slices(len(inputs), max(o, SQUARED_INPUTS // (g * i))):
        d_squares = grad_squares[examples].squeeze(2).permute(1, 2, 0)  # [g, O, B]
        a_squares = inputs[examples].squeeze(2).square().transpose(0, 1)  # [g, B, I]
        sums.baddbmm_(d_squares, a_squares)
    into += sums
