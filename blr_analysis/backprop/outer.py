"""Layers that are matrix products: their gradients are sums of outer products.

G_c = Σ_t d_ct a_tᵀ needs only the layer's inputs a and the output gradients d. Whatever the
posterior asks of G_c is computed from these two, by the cheapest of several forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from blr_analysis.backprop.matmul import batch_product, product
from blr_analysis.backprop.matrices import Basis, Joint, MatrixShape
from blr_analysis.backprop.terms import (
    HELD,
    Dense,
    Term,
    TermCost,
    Tree,
    added,
    added_bmm,
    by_rows,
    rank_one,
    scaled_rows,
    slices,
)

EXPLICIT = 2**20  # numbers of one example's G_c in memory at once
BLOCK = 2**18  # numbers of G of one column that are made and used at once: they stay in the cache
STACKED = 2**19  # numbers of output gradients of several columns that are put side by side at once
CACHED = 2**18  # numbers of squared inputs that are made and used at once: they stay in the cache
TURNED = 2**19  # the same of inputs turned into a basis: products of few rows are slow
TALL = 512  # rows of output gradients from which on columns are multiplied one by one
SKINNY = 3  # a product of few rows with very long ones takes this many times its multiplications


@dataclass(frozen=True)
class Outer(Term):
    """G_c = Σ_t d_ct a_tᵀ (and Σ_t d_ct for the bias): Linear, convolution, HF Conv1D.

    ``inputs`` a: ``[B, g, T, I]``; ``grads`` d: K tensors ``[B, g, T, O]``. T runs over sequence
    or image positions and over the calls of a shared module, so sharing is exact.
    """

    joint: Joint
    inputs: Tensor
    grads: list[Tensor]

    @property
    def weight(self) -> str | None:
        return self.joint.weight

    @property
    def bias(self) -> str | None:
        return self.joint.bias

    @property
    def layout(self) -> MatrixShape:
        return self.joint.layout

    @property
    def names(self) -> tuple[str, ...]:
        return self.joint.names

    @property
    def n_examples(self) -> int:
        return len(self.inputs)

    @property
    def n_columns(self) -> int:
        return len(self.grads)

    @property
    def positions(self) -> int:
        return self.inputs.shape[2]

    def part(self, chosen: slice) -> Outer:
        return Outer(self.joint, self.inputs[chosen], [d[chosen] for d in self.grads])

    def divided(self, size: int) -> Iterator[Outer]:
        """Every tensor is split once for all parts, which is faster than slicing it for each."""
        splits = [x.split(max(1, size)) for x in (self.inputs, *self.grads)]
        for inputs, *grads in zip(*splits, strict=True):
            part = Outer(self.joint, inputs, grads)
            vars(part)["alike"] = self.alike
            yield part

    @cached_property
    def alike(self) -> Tensor | None:
        """The columns ``[K, g, O]`` where they are the same for all examples, as the unit vectors
        are at the layer that gives the outputs; autograd expands these."""
        if self.positions > 1 or any(d.stride(0) for d in self.grads):
            return None
        return torch.cat([d[:1] for d in self.grads]).squeeze(2)

    def columns(self, chosen: slice) -> Outer:
        return replace(self, grads=self.grads[chosen])

    @property
    def matrix(self) -> MatrixShape | None:
        layout = self.layout
        if self.weight is None or layout.groups > 1 or layout.transposed:
            return None
        return layout

    def rows(self, chosen: slice) -> Outer:
        shape = (chosen.stop - chosen.start, self.layout.columns)
        joint = replace(self.joint, layout=MatrixShape(1, *shape, shape))
        return Outer(joint, self.inputs, [d[..., chosen] for d in self.grads])

    def cast(self, dtype: torch.dtype) -> Outer:
        return Outer(self.joint, self.inputs.to(dtype), [d.to(dtype) for d in self.grads])

    def joined(self, other: Term) -> Outer | None:
        """Two calls of the same weights: positions side by side, added before any square."""
        if not isinstance(other, Outer) or other.joint != self.joint:
            return None
        inputs = torch.cat([self.inputs, other.inputs], dim=2)
        pairs = zip(self.grads, other.grads, strict=True)
        return Outer(self.joint, inputs, [torch.cat(pair, dim=2) for pair in pairs])

    def cost(self) -> TermCost:
        layout = self.layout
        positions = self.positions
        return TermCost(
            inputs=self.inputs.numel() / self.n_examples,
            gram=lambda columns: gram_numbers(layout, positions, columns),
        )

    def stacked(self) -> Tensor:
        """d as one tensor ``[B, g, K, T, O]``."""
        return torch.stack(self.grads, dim=2)

    def jacobian(self) -> Tree:
        g: Tree = {}
        if self.weight is not None:
            g[self.weight] = self.layout.parameter(self.matrices().movedim(2, 1))
        if self.bias is not None:
            g[self.bias] = self._bias_grads().movedim(2, 1).flatten(2)
        return g

    def gram(self, variance: Mapping[str, Tensor], into: Tensor | None = None) -> Tensor:
        weight = None if self.weight is None else self.layout.matrix(variance[self.weight])
        bias = None
        if self.bias is not None:
            bias = variance[self.bias].reshape(self.layout.groups, self.layout.rows)
        return weighted_gram(self, weight, bias, into)

    @property
    def zeros(self) -> Tree:
        return {n: self.inputs.new_zeros(shape) for n, shape in self.joint.shapes.items()}

    def add_square_sum(self, into: Tree) -> None:
        weight = None if self.weight is None else self.layout.matrix(into[self.weight])
        if self.positions == 1:
            squares = sum((d.square() for d in self.grads[1:]), start=self.grads[0].square())
            if weight is not None:
                _add_position_squares(self.inputs, squares, weight)
            if self.bias is not None:
                into[self.bias] += squares.sum((0, 2)).flatten()
            return
        if weight is not None:
            for _, rows, part in _blocks(self):
                weight[:, rows] += part.square_().sum((0, 2))
        if self.bias is not None:
            into[self.bias] += self._bias_grads().square().sum((0, 2)).flatten()

    def sum(self) -> Tree:
        d = sum(self.grads[1:], start=self.grads[0])
        sums: Tree = {}
        if self.weight is not None:
            left = d.transpose(0, 1).flatten(1, 2)
            right = self.inputs.transpose(0, 1).flatten(1, 2)
            sums[self.weight] = self.layout.parameter(torch.bmm(left.mT, right))
        if self.bias is not None:
            sums[self.bias] = d.sum((0, 2)).flatten()
        return sums

    def products(
        self,
        stack: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        scale: Mapping[str, Tensor] | None = None,
        room: int | None = None,
    ) -> Tensor:
        """⟨Σ_t d_ct a_tᵀ, U_k⟩ = Σ_t d_ctᵀ (U_k a_t), or with G itself where that is cheaper."""
        if self.weight is None:
            return super().products(stack, dtype=dtype, scale=scale, room=room)
        if not keeps_factors(self, len(stack[self.weight])):
            return explicit_products(self, stack, dtype, scale, room)
        return factored_products(self.cast(dtype), stack, scale, room)

    def combined(self, weights: Tensor, into: Tree) -> None:
        """Σ_t (Σ_c t_ck d_ct) a_tᵀ, or with G itself where that is cheaper."""
        r = weights.shape[-1]
        if not keeps_factors(self, r):
            super().combined(weights, into)
            return
        term = self.cast(weights.dtype)
        assert term.weight is not None
        b, g, t, i = term.inputs.shape
        o = term.layout.rows
        a = term.inputs.transpose(0, 1).reshape(g, b * t, i)
        for at in slices(r, HELD // (g * o * max(b * t, i))):
            d = torch.einsum("bkr,bgkto->gbtro", weights[..., at], term.stacked())
            matrices = product(d.reshape(g, b * t, -1).mT, a).view(g, -1, o, i).transpose(0, 1)
            into[term.weight][at] += term.layout.parameter(matrices)
            if term.bias is not None:
                into[term.bias][at] += d.sum((1, 2)).transpose(0, 1).reshape(-1, g * o)

    def joints(self) -> list[Joint]:
        joints = []
        if self.weight is not None:
            joints.append(Joint(self.weight, None, self.layout))
        if self.bias is not None:
            joints.append(by_rows(self.bias, (self.layout.groups * self.layout.rows,)))
        return joints

    def projected(self, joint: Joint, left: Tensor, right: Tensor, room: int) -> Tensor:
        """Σ_t (r·d_t)(s·a_t), a bias as one more input of 1."""
        (d,) = self.grads
        if joint.weight is None or joint.weight != self.weight:  # the bias alone
            bias = {self.bias: d.sum(2).flatten(1)}
            return rank_one(joint.join(bias), left, right, room)  # type: ignore[arg-type]
        i = self.inputs.shape[-1]
        size = room // (3 * left.shape[-1] * self.inputs[0, ..., 0].numel())
        shares = []
        for at in slices(len(d), size):
            by_inputs = self.inputs[at] @ right[:, :i]  # s·a_t
            if joint.bias is not None:
                by_inputs += right[:, -1:]
            by_grads = d[at] @ left  # r·d_t
            shares.append(by_inputs.mul_(by_grads).sum((1, 2)))
        return torch.cat(shares)

    def factors(
        self, *, padded: bool = False, vocabulary: int = 0
    ) -> tuple[Joint, Tensor, Tensor] | None:
        if self.layout.rows == vocabulary:
            return None
        return self.joint, *self.second_moments(padded=padded)

    def rotated(self, basis: Basis) -> Term:
        turned = rotated(self, basis)
        if isinstance(turned, Outer):
            return turned
        return Dense({basis.key: turned.movedim(2, 1)})

    def rotated_gram(self, basis: Basis, variance: Tensor, into: Tensor | None = None) -> Tensor:
        return rotated_gram(self, basis, variance, into)

    def matrices(self) -> Tensor:
        """G_c = Σ_t d_ct a_tᵀ for every column, ``[B, g, K, O, I]``."""
        b, g, t, i = self.inputs.shape
        if t == 1:
            return self.stacked().mT * self.inputs.unsqueeze(2)
        k = len(self.grads)
        o = self.grads[0].shape[-1]
        if k == 1:
            left = self.grads[0].reshape(b * g, t, o).mT.contiguous()
        elif self.grads[0].stride(-1) == 1:
            left = torch.stack(self.grads, dim=3).reshape(b * g, t, k * o).mT
        else:  # positions are last in memory, as of images
            left = torch.stack([d.mT for d in self.grads], dim=2).reshape(b * g, k * o, t)
        return batch_product(left, self.inputs.reshape(b * g, t, i)).view(b, g, k, o, i)

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

        Sums run over examples and positions, and over columns for d. ``padded`` leaves out
        positions on which no column depends, so that padding does not count.
        """
        _, g, _, i = self.inputs.shape
        a = self.inputs.transpose(0, 1).reshape(g, -1, i)
        ones = a.new_ones(*a.shape[:-1], 1)
        if padded:
            used = torch.stack([(d != 0).any(-1).any(1) for d in self.grads]).any(0)  # [B, T]
            ones = ones * used.reshape(1, -1, 1)
            a = a * ones
        if self.weight is None:
            a = ones
        elif self.bias is not None:
            a = torch.cat([a, ones], dim=-1)
        left = a.new_zeros(())
        for part in _together(self.grads):
            d = part.movedim(2, 0).flatten(1, 3)
            left = left + product(d.mT, d)
        return product(a.mT, a), left


def weighted_gram(
    term: Outer, weight: Tensor | None, bias: Tensor | None, into: Tensor | None = None
) -> Tensor:
    """⟨G_c ∘ σ², G_c'⟩ with σ² ``[g, O, I]`` and a bias variance ``[g, O]``, by the cheaper form.

    * one position: s_o = Σ_i σ²_oi a_i² + σ²_o, then Σ_o d_co s_o d_c'o;
    * several: G_c itself, some of its rows at a time.
    """
    k = len(term.grads)
    if term.positions == 1:
        return _one_position_gram(term, _row_scale(term, weight, bias), into=into)
    total = term.inputs.new_zeros(len(term.inputs), k, k) if into is None else into
    if weight is not None:
        for examples, rows, part in _blocks(term):
            total[examples] += flat_gram(part, weight[:, rows].unsqueeze(1))
    if bias is not None:
        total += flat_gram(term._bias_grads(), bias.unsqueeze(1))
    return total


def gram_numbers(layout: MatrixShape, t: int, k: int) -> float:
    """Numbers that :func:`weighted_gram` needs per example for t positions and k columns."""
    g = layout.groups
    o = layout.rows
    i = layout.columns
    if t == 1:
        return 2.5 * k * g * o
    block = BLOCK if k == 1 else EXPLICIT
    return 2.5 * min(k * g * o * i, max(block, k * g * i))


def _blocks(term: Outer) -> Iterator[tuple[slice, slice, Tensor]]:
    """G_c ``[b, g, K, rows, I]`` of some examples and some rows, so small that it is used while it
    is in the cache.

    Whatever belongs to these rows stays in the cache for all examples. Of several columns, the
    number of rows follows from a bound for each example.
    """
    n_examples, g, t, i = term.inputs.shape
    k = len(term.grads)
    o = term.grads[0].shape[-1]
    if k == 1:
        examples_at_once = BLOCK // (g * o * i)
        numbers = BLOCK
    else:
        examples_at_once = STACKED // (g * k * t * o)
        numbers = EXPLICIT
    for rows in slices(o, numbers // (k * g * i)):
        block = term.rows(rows)
        if examples_at_once >= n_examples:
            yield slice(0, n_examples), rows, block.matrices()
            continue
        for examples in slices(n_examples, examples_at_once):
            yield examples, rows, block.part(examples).matrices()


def _one_position_gram(
    term: Outer, scale: Tensor, left: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Σ_o (d_c U)_o s_o (d_c' U)_o from s ``[B, g, O]``, which is overwritten, and U ``[O, O]``."""
    if term.alike is not None and scale.shape[1] == 1:
        return _alike_gram(term.alike[:, 0], scale, left, into)
    scale = scale.unsqueeze(2)
    if len(term.grads) == 1:
        d = term.grads[0] if left is None else term.grads[0] @ left
        return added(into, (d.square() * scale).sum((1, 2, 3)).view(-1, 1, 1))
    d = torch.stack(term.grads)
    if left is not None:
        d = product(d, left)
    half = d.mul_(scale.sqrt_()).flatten(2).transpose(0, 1)
    return added_bmm(into, half, half.mT)


def _alike_gram(columns: Tensor, scale: Tensor, left: Tensor | None, into: Tensor | None) -> Tensor:
    """The same for columns d_c ``[K, O]`` that all examples share, and s ``[B, 1, O]``."""
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
    half = turned * scale.sqrt_()
    return added_bmm(into, half, half.mT)


def _together(columns: list[Tensor]) -> Iterator[Tensor]:
    """Output gradients ``[k, B, g, T, O]`` of one column, or of several where each has few rows."""
    rows = columns[0][..., 0].numel()
    for at in slices(len(columns), TALL // rows):
        part = columns[at]
        yield part[0].unsqueeze(0) if len(part) == 1 else torch.stack(part)


def _row_scale(term: Outer, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Σ_i σ²_oi a_i² + σ²_o for terms of one position, ``[B, g, O]``."""
    a = term.inputs.squeeze(2)
    if weight is None:
        assert bias is not None
        return bias.expand(len(a), *bias.shape).clone()
    if len(weight) == 1:
        scale = _squares_times(a.squeeze(1), weight[0], CACHED, torch.square).unsqueeze(1)
    else:
        scale = torch.einsum("bgi,goi->bgo", a.square(), weight)
    return scale if bias is None else scale.add_(bias)


def _squares_times(
    a: Tensor, variance: Tensor, numbers: int, squared: Callable[[Tensor], Tensor]
) -> Tensor:
    """``squared(a) @ varianceᵀ``, so many numbers at a time: the squares stay in the cache."""
    products = a.new_empty(len(a), len(variance))
    n_rows = max(64, numbers // a.shape[-1])
    for rows, into in zip(a.split(n_rows), products.split(n_rows), strict=True):
        into.copy_(product(squared(rows), variance.mT))
    return products


def rotated_gram(term: Outer, basis: Basis, variance: Tensor, into: Tensor | None = None) -> Tensor:
    """⟨U_Gᵀ G_c U_A ∘ σ², U_Gᵀ G_c' U_A⟩ with σ² ``[g, O, I']``, ``[B, K, K]``."""
    if term.positions == 1 and term.weight is not None and len(basis.right) == 1:
        scale = _rotated_row_scale(term.inputs, basis.right[0], variance[0])
        left = None if basis.left is None else basis.left[0]
        return _one_position_gram(term, scale, left, into)
    n_examples = term.n_examples
    k = term.n_columns
    size = max(1, STACKED // (k * term.grads[0][0].numel()))
    if k > 1 and term.positions > 1 and size < n_examples:
        parts = (term.part(examples) for examples in slices(n_examples, size))
        return added(into, torch.cat([rotated_gram(part, basis, variance) for part in parts]))
    turned = rotated(term, basis)
    if isinstance(turned, Outer):
        return weighted_gram(turned, variance, None, into)
    return added(into, flat_gram(turned, variance.unsqueeze(1)))


def _rotated_row_scale(inputs: Tensor, right: Tensor, variance: Tensor) -> Tensor:
    """Σ_i σ²_oi (U_Aᵀ a)_i² for terms of one position, ``[B, 1, O]``; U_A has one more row than a
    where a bias is joined."""
    i = inputs.shape[-1]
    bias = right[-1] if len(right) > i else None

    def squared(rows: Tensor) -> Tensor:
        return product(rows, right[:i], bias).square_()

    return _squares_times(inputs.reshape(-1, i), variance, TURNED, squared).unsqueeze(1)


def flat_gram(columns: Tensor, variance: Tensor) -> Tensor:
    """⟨G_c ∘ σ², G_c'⟩ from ``[B, g, K, ...]`` and σ² ``[g, 1, ...]`` (broadcast), ``[B, K, K]``.

    Overwrites ``columns``.
    """
    if columns.shape[2] == 1:
        weights = variance.expand(columns.shape[1], 1, *columns.shape[3:]).reshape(-1)
        return (columns.square_().flatten(1) @ weights).view(-1, 1, 1)
    flat = columns.mul_(variance.sqrt()).transpose(1, 2).flatten(2)
    return torch.bmm(flat, flat.mT)


def _add_position_squares(a: Tensor, squares: Tensor, into: Tensor) -> None:
    """Add Σ_i d_i² a_iᵀ² to ``into``, ``[g, O, I]``, for one position, from d² ``[B, g, 1, O]``.

    The inputs of some examples at a time are squared: these stay in the cache.
    """
    g, o, i = into.shape
    sums = a.new_zeros(g, o, i)
    for rows in slices(len(a), max(o, CACHED // (g * i))):
        d = squares[rows].squeeze(2).permute(1, 2, 0)  # [g, O, B]
        sums.baddbmm_(d, a[rows].squeeze(2).square().transpose(0, 1))
    into += sums


def rotated(term: Outer, basis: Basis) -> Outer | Tensor:
    """The term in the basis U_Gᵀ G U_A: U_A ``[g, I', I']``, U_G ``[g, O, O]``.

    Rotates a and d, giving an :class:`Outer`, or G itself, giving ``[B, g, K, O, I']``: whichever
    multiplies less. U_A has one more row than a where a bias is joined.
    """
    if _rotates_matrices(term, basis):
        matrices = term.joint_matrices()
        if basis.left is not None:
            matrices = basis.left.mT.unsqueeze(1) @ matrices
        return matrices @ basis.right.unsqueeze(1)
    joint = Joint(basis.key, None, MatrixShape(*basis.shape, basis.shape))
    return Outer(joint, _rotated_inputs(term, basis.right), _rotated_grads(term, basis.left))


def _rotates_matrices(term: Outer, basis: Basis) -> bool:
    """Whether G itself takes fewer multiplications to rotate than a and d."""
    t = term.positions
    if t == 1:
        return False
    if term.weight is None:
        return True
    _, o, joint = basis.shape
    k = len(term.grads)
    of_factors = t * term.inputs.shape[-1] * joint + k * t * o * o
    of_matrices = k * o * joint * (joint + o)
    return of_matrices < of_factors


def _rotated_inputs(term: Outer, right: Tensor) -> Tensor:
    """U_Aᵀ a ``[B, g, T, I']``; U_A has one more row than a where a bias is joined."""
    n_examples, _, t, i = term.inputs.shape
    g, _, joint = right.shape
    has_bias = joint > i
    if term.weight is None:
        return right[:, :1].unsqueeze(0).expand(n_examples, -1, t, -1)
    if g > 1:
        a = term.inputs @ right[:, :i]
        return a + right[:, -1:] if has_bias else a
    if t > 1 and term.inputs.stride(-1) > 1:  # patches, with positions last, are not copied
        turn = right[:, :i].mT.contiguous().expand(n_examples, -1, -1)
        a = batch_product(turn, term.inputs.squeeze(1).mT)
        if has_bias:
            a += right[0, -1].unsqueeze(1)
        return a.mT.unsqueeze(1)
    bias = right[0, -1] if has_bias else None
    a = product(term.inputs.reshape(-1, i), right[0, :i], bias)
    return a.view(*term.inputs.shape[:-1], joint)


def _rotated_grads(term: Outer, left: Tensor | None) -> list[Tensor]:
    """U_Gᵀ d, column by column."""
    if left is None:
        return term.grads
    if len(left) > 1:
        return [d @ left for d in term.grads]
    if term.positions == 1:
        parts = [product(part, left[0]) for part in _together(term.grads)]
        return [d for part in parts for d in part.unbind()]
    if term.grads[0].stride(-1) == 1:
        o = left.shape[-1]
        return [product(d.reshape(-1, o), left[0]).view(d.shape) for d in term.grads]
    return [d @ left for d in term.grads]


def keeps_factors(term: Outer, r: int) -> bool:
    """Whether Σ_t d_tᵀ U a_t takes less, for r of U, than forming G and multiplying it with U."""
    if term.weight is None:
        return False
    t = term.positions
    k = len(term.grads)
    o = term.layout.rows
    i = term.layout.columns
    if k > 1:
        return t * r * (i + k) <= k * r * i + k * t * i
    return t * r * (o * i + min(o, i)) <= t * o * i + SKINNY * r * o * i


def factored_products(
    term: Outer, stack: Mapping[str, Tensor], scale: Mapping[str, Tensor] | None, room: int | None
) -> Tensor:
    """Σ_t d_ctᵀ (U_k a_t), ``[B, K, r]``; of one column, the longer side is summed over first."""
    assert term.weight is not None
    a = term.inputs
    d = term.stacked()
    is_swapped = len(term.grads) == 1 and d.shape[-1] > a.shape[-1]
    if is_swapped:
        a = d.squeeze(2)
        d = term.inputs.unsqueeze(2)
    b, g, k, t, o = d.shape
    a = a.transpose(0, 1).reshape(g, b * t, -1)
    u = stack[term.weight]
    shares = d.new_empty(b, k, len(u))
    is_copied = scale is not None or u.dtype != d.dtype
    numbers = min(HELD, room or HELD)
    if not is_copied and k == 1:
        numbers = min(HELD // 4, room or HELD)
    size = numbers // (g * b * t * o)
    if is_copied or is_swapped:
        size = min(size, min(HELD, room or HELD) // u.shape[1:].numel())
    for at in slices(len(u), size):
        rows = scaled_rows(stack, term.weight, at, d.dtype, scale)
        matrices = term.layout.matrix(rows.view(-1, *term.layout.shape))
        if is_swapped:
            matrices = matrices.mT
        x = product(a, matrices.transpose(0, 1).reshape(g, -1, a.shape[-1]).mT)
        if term.bias is not None and not is_swapped:
            bias = scaled_rows(stack, term.bias, at, d.dtype, scale).view(-1, g, o)
            x += bias.transpose(0, 1).reshape(g, 1, -1)
        x = x.view(g, b, t, -1, o)
        if g == t == 1:
            shares[..., at] = torch.bmm(d[:, 0, :, 0], x[0, :, 0].mT)
        else:
            shares[..., at] = torch.einsum("gbtro,bgkto->bkr", x, d)
    if term.bias is not None and is_swapped:
        bias = scaled_rows(stack, term.bias, slice(None), d.dtype, scale)
        shares += term._bias_grads().transpose(1, 2).flatten(2) @ bias.mT
    return shares


def explicit_products(
    term: Outer,
    stack: Mapping[str, Tensor],
    dtype: torch.dtype,
    scale: Mapping[str, Tensor] | None,
    room: int | None,
) -> Tensor:
    """⟨G_ic, s ∘ U_k⟩, ``[B, K, r]``: G of some rows is made once, for all U."""
    assert term.weight is not None
    b, g, _, i = term.inputs.shape
    k = len(term.grads)
    u = term.layout.matrix(stack[term.weight])
    s = None if scale is None else term.layout.matrix(scale[term.weight]).to(dtype)
    shares = term.inputs.new_zeros(b * k, len(u), dtype=dtype)
    for examples in slices(b, b if room is None else room // (2 * k * g * i)):
        part = term.part(examples)
        into = shares[examples.start * k : examples.stop * k]
        numbers_per_row = (len(into) + len(u)) * g * i
        for rows in slices(term.layout.rows, min(4 * BLOCK, room or 4 * BLOCK) // numbers_per_row):
            gradients = part.rows(rows).matrices().transpose(1, 2).reshape(len(into), -1)
            block = u[:, :, rows].to(dtype)
            if s is not None:
                block = block * s[:, rows]
            into.addmm_(gradients.to(dtype), block.reshape(len(u), -1).mT)
    if term.bias is not None:
        bias = scaled_rows(stack, term.bias, slice(None), dtype, scale)
        bias_grads = term._bias_grads().to(dtype).transpose(1, 2).reshape(b * k, -1)
        shares.addmm_(bias_grads, bias.mT)
    return shares.view(b, k, -1)
