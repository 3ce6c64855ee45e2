"""Layers that are matrix products: their gradients are sums of outer products.

G_c = Σ_t d_ct a_tᵀ needs only the layer's inputs a and the output gradients d; what the posterior
asks of G_c is computed from them by the cheaper of several forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

HELD = 2**20  # numbers of one example's G_c that are made at once
CACHED = 2**17  # numbers that are made and used at once, so that they stay in the cache


@dataclass(frozen=True)
class MatrixShape:
    """How a parameter is read as ``groups`` matrices ``[O, I]``: Linear, Conv, transposed."""

    groups: int
    rows: int
    columns: int
    shape: tuple[int, ...]
    transposed: bool = False

    def matrix(self, parameter: Tensor) -> Tensor:
        """Parameter ``[..., *shape]`` → ``[..., g, O, I]``."""
        lead = parameter.shape[: parameter.ndim - len(self.shape)]
        if self.transposed:
            return parameter.mT.unsqueeze(-3)
        return parameter.reshape(*lead, self.groups, self.rows, self.columns)

    def parameter(self, matrix: Tensor) -> Tensor:
        """``[..., g, O, I]`` → ``[..., *shape]``."""
        if self.transposed:
            return matrix.squeeze(-3).mT
        return matrix.reshape(*matrix.shape[:-3], *self.shape)


@dataclass(frozen=True)
class Outer:
    """G_c = Σ_t d_ct a_tᵀ (and Σ_t d_ct for the bias): Linear, convolution, HF Conv1D.

    ``inputs`` a: ``[B, g, T, I]``; ``grads`` d: K tensors ``[B, g, T, O]``. T runs over sequence
    or image positions and over the calls of a shared module, so sharing is exact.
    """

    weight: str | None
    bias: str | None
    layout: MatrixShape
    inputs: Tensor
    grads: list[Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n in (self.weight, self.bias) if n is not None)

    @property
    def positions(self) -> int:
        return self.inputs.shape[2]

    def joined(self, other: Outer) -> Outer:
        """Two calls of the same weights: positions side by side, added before any square."""
        return Outer(
            self.weight,
            self.bias,
            self.layout,
            torch.cat([self.inputs, other.inputs], dim=2),
            [torch.cat([a, b], dim=2) for a, b in zip(self.grads, other.grads, strict=True)],
        )

    def stacked(self) -> Tensor:
        """d as one tensor ``[B, g, K, T, O]``."""
        return torch.stack(self.grads, dim=2)

    def jacobian(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.weight is not None:
            matrices = self.matrices().movedim(2, 1)
            found[self.weight] = self.layout.parameter(matrices)
        if self.bias is not None:
            found[self.bias] = self._bias_grads().movedim(2, 1).flatten(2)
        return found

    def gram(self, variance: Mapping[str, Tensor]) -> Tensor:
        weight = None if self.weight is None else self.layout.matrix(variance[self.weight])
        bias = None
        if self.bias is not None:
            bias = variance[self.bias].reshape(self.layout.groups, self.layout.rows)
        return weighted_gram(self, weight, bias)

    def square_sum(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.weight is not None:
            found[self.weight] = self.layout.parameter(matrix_square_sum(self))
        if self.bias is not None:
            found[self.bias] = self._bias_grads().square().sum((0, 2)).flatten()
        return found

    def matrices(self) -> Tensor:
        """G_c = Σ_t d_ct a_tᵀ for every column, ``[B, g, K, O, I]``."""
        b, g, t, i = self.inputs.shape
        k, o = len(self.grads), self.grads[0].shape[-1]
        if t == 1:
            return self.stacked().mT * self.inputs.unsqueeze(2)
        left = torch.stack([d.mT for d in self.grads], dim=2).reshape(b * g, k * o, t)
        return torch.bmm(left, self.inputs.reshape(b * g, t, i)).view(b, g, k, o, i)

    def _bias_grads(self) -> Tensor:
        return torch.stack([d.sum(2) for d in self.grads], dim=2)  # [B, g, K, O]

    def joint_matrices(self) -> Tensor:
        """G with the bias gradient as a last input column, ``[B, g, K, O, I (+1)]``."""
        if self.bias is None:
            return self.matrices()
        if self.weight is None:
            return self._bias_grads().unsqueeze(-1)
        return torch.cat([self.matrices(), self._bias_grads().unsqueeze(-1)], dim=-1)

    def second_moments(self, *, padded: bool = False) -> tuple[Tensor, Tensor]:
        """Σ a aᵀ (with a 1 joined to a for the bias) and Σ d dᵀ: ``[g, I', I']``, ``[g, O, O]``.

        Sums run over examples and positions, and over columns for d. ``padded`` leaves positions
        out on which no column depends, so that padding does not count.
        """
        _, g, _, i = self.inputs.shape
        a = self.inputs.transpose(0, 1).reshape(g, -1, i)
        one = a.new_ones(*a.shape[:-1], 1)
        if padded:
            used = torch.stack([(d != 0).any(-1).any(1) for d in self.grads]).any(0)  # [B, T]
            one = one * used.reshape(1, -1, 1)
            a = a * one
        if self.bias is not None:
            a = torch.cat([a, one], dim=-1)
        if self.weight is None:
            a = a[..., -1:]
        right = a.mT @ a
        left = sum(
            (m.mT @ m for m in (d.transpose(0, 1).reshape(g, -1, d.shape[-1]) for d in self.grads)),
            start=a.new_zeros(()),
        )
        return right, left


def weighted_gram(term: Outer, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """⟨G_c ∘ σ², G_c'⟩ with σ² ``[g, O, I]`` and a bias variance ``[g, O]``, by the cheaper form.

    * one position: s_o = Σ_i σ²_oi a_i² + σ²_o, then Σ_o d_co s_o d_c'o;
    * few positions: the same with the kernel M_o[t, t'] = Σ_i σ²_oi a_ti a_t'i;
    * many positions: G_c itself, layer by layer.
    """
    t, k = term.positions, len(term.grads)
    if t == 1:
        return _scaled_gram(term.stacked().squeeze(3), _row_scale(term, weight, bias))
    if weight is not None and _few_positions(t, k, weight.shape[-1]):
        return _position_gram(term, weight, bias)
    total = term.inputs.new_zeros(())
    if weight is not None:
        for rows in _row_blocks(term):
            part = _of_rows(term, rows).matrices()
            total = total + flat_gram(part, weight[:, rows].unsqueeze(1))
    if bias is not None:
        total = total + flat_gram(term._bias_grads(), bias.unsqueeze(1))
    return total


def _few_positions(t: int, k: int, i: int) -> bool:
    """Whether the kernel over pairs of positions multiplies less than G_c does."""
    return t * (t + 1) // 2 * (i + 2 * k + k * k) <= (k * t + k * k) * i


def gram_numbers(layout: MatrixShape, t: int, k: int) -> float:
    """Numbers that :func:`weighted_gram` holds per example for t positions and k columns."""
    g, o, i = layout.groups, layout.rows, layout.columns
    if t == 1:
        return 1.5 * k * g * o
    if _few_positions(t, k, i):
        return t * (t + 1) / 2 * g * (i + 2 * o + 2 * k * o)
    return 2.5 * min(k * g * o * i, max(HELD, k * g * i))


def _row_blocks(term: Outer, held: int = HELD) -> list[slice]:
    """Rows of G_c, as many at a time as hold up to ``held`` numbers per example."""
    _, g, _, i = term.inputs.shape
    o = term.grads[0].shape[-1]
    most = max(1, held // (len(term.grads) * g * i))
    return [slice(start, start + most) for start in range(0, o, most)]


def _of_rows(term: Outer, rows: slice) -> Outer:
    """The term of some of the weight's rows."""
    grads = [d[..., rows] for d in term.grads]
    return Outer(term.weight, None, term.layout, term.inputs, grads)


def _scaled_gram(d: Tensor, scale: Tensor) -> Tensor:
    """Σ_o d_co s_o d_c'o from d ``[B, g, K, O]`` and s ``[B, g, O]``; overwrites both."""
    if d.shape[2] == 1:
        return d.squeeze(2).square_().mul_(scale).sum((1, 2)).view(-1, 1, 1)
    d = d.mul_(scale.sqrt_().unsqueeze(2)).transpose(1, 2).flatten(2)
    return torch.bmm(d, d.mT)


def _row_scale(term: Outer, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Σ_i σ²_oi a_i² + σ²_o for terms of one position, ``[B, g, O]``."""
    a = term.inputs.squeeze(2)
    if weight is None:
        assert bias is not None
        return bias.expand(len(a), *bias.shape).clone()
    if len(weight) == 1:
        scale = _by_rows(a.squeeze(1), weight[0], torch.square).unsqueeze(1)
        return scale if bias is None else scale.add_(bias)
    scale = torch.einsum("bgi,goi->bgo", a.square(), weight)
    return scale if bias is None else scale + bias


def _by_rows(a: Tensor, variance: Tensor, squared: Callable[[Tensor], Tensor]) -> Tensor:
    """``squared(a) @ varianceᵀ``, some rows at a time: what is squared never leaves the cache."""
    found = a.new_empty(len(a), len(variance))
    rows = max(64, CACHED // a.shape[-1])
    for part, out in zip(a.split(rows), found.split(rows), strict=True):
        torch.mm(squared(part), variance.mT, out=out)
    return found


def rotated_gram(term: Outer, right: Tensor, left: Tensor, variance: Tensor) -> Tensor:
    """⟨U_Gᵀ G_c U_A ∘ σ², U_Gᵀ G_c' U_A⟩ with σ² ``[g, O, I']``, ``[B, K, K]``."""
    if term.positions == 1 and term.weight is not None and len(right) == 1:
        basis, i = right[0], term.inputs.shape[-1]

        def squared(part: Tensor) -> Tensor:
            if len(basis) == i:
                return (part @ basis).square_()
            return torch.addmm(basis[-1], part, basis[:-1]).square_()

        scale = _by_rows(term.inputs.reshape(-1, i), variance[0], squared).unsqueeze(1)
        return _scaled_gram(term.stacked().squeeze(3) @ left, scale)
    turned = rotated(term, right, left)
    if isinstance(turned, Outer):
        return weighted_gram(turned, variance, None)
    return flat_gram(turned, variance.unsqueeze(1))


def _position_gram(term: Outer, weight: Tensor, bias: Tensor | None) -> Tensor:
    a, d = term.inputs, term.stacked()  # [B, g, T, I], [B, g, K, T, O]
    rows, cols = torch.triu_indices(a.shape[2], a.shape[2], device=a.device)
    pairs = a[:, :, rows] * a[:, :, cols]  # [B, g, T(T+1)/2, I]
    kernel = torch.einsum("bgpi,goi->bgpo", pairs, weight)
    if bias is not None:
        kernel = kernel + bias.unsqueeze(1)
    kernel = kernel * torch.where(rows == cols, 0.5, 1.0).to(a.dtype)[:, None]
    left = (d[:, :, :, rows] * kernel.unsqueeze(2)).transpose(1, 2).flatten(2)
    half = left @ d[:, :, :, cols].transpose(1, 2).flatten(2).mT
    return half + half.mT


def flat_gram(columns: Tensor, variance: Tensor) -> Tensor:
    """⟨G_c ∘ σ², G_c'⟩ from ``[B, g, K, ...]`` and σ² ``[g, 1, ...]`` (broadcast), ``[B, K, K]``.

    Overwrites ``columns``.
    """
    flat = columns.mul_(variance.sqrt()).transpose(1, 2).flatten(2)
    return torch.bmm(flat, flat.mT)


def matrix_square_sum(term: Outer) -> Tensor:
    """Σ_i Σ_c G_ic², ``[g, O, I]``."""
    if term.positions == 1:
        d = sum((d.squeeze(2).square() for d in term.grads), start=term.inputs.new_zeros(()))
        return torch.einsum("bgo,bgi->goi", d, term.inputs.squeeze(2).square())
    most = HELD // max(1, 2 * len(term.inputs))  # of one example, so that a block stays small
    blocks = [
        _of_rows(term, rows).matrices().square_().sum((0, 2)) for rows in _row_blocks(term, most)
    ]
    return torch.cat(blocks, dim=1)


def rotated(term: Outer, right: Tensor, left: Tensor) -> Outer | Tensor:
    """The term in the basis U_Gᵀ G U_A: ``right`` U_A ``[g, I', I']``, ``left`` U_G ``[g, O, O]``.

    Rotates a and d, giving an :class:`Outer`, or G itself, giving ``[B, g, K, O, I']``: whichever
    multiplies less. U_A has one more row than a where a bias is joined.
    """
    _, _, t, i = term.inputs.shape
    k, o, joint = len(term.grads), left.shape[-1], right.shape[-1]
    before = t * i * joint + k * t * o * o
    after = k * o * joint * (joint + o)
    if t > 1 and (after < before or term.weight is None):
        return left.mT.unsqueeze(1) @ term.joint_matrices() @ right.unsqueeze(1)
    if term.weight is None:
        a = right[:, :1].unsqueeze(0).expand(len(term.inputs), -1, t, -1)
    elif len(right) == 1:
        flat = term.inputs.reshape(-1, i)
        a = flat @ right[0] if joint == i else torch.addmm(right[0, -1], flat, right[0, :-1])
        a = a.view(*term.inputs.shape[:-1], joint)
    else:
        a = term.inputs @ right[:, :i]
        a = a if joint == i else a + right[:, -1:]
    d = [grad @ left for grad in term.grads]
    return Outer(term.weight or term.bias, None, MatrixShape(len(right), o, joint, ()), a, d)
