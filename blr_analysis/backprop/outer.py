"""Layers that are matrix products: their gradients are sums of outer products.

G_c = Σ_t d_ct a_tᵀ needs only the layer's inputs a and the output gradients d; what the posterior
asks of G_c is computed from them by the cheaper of several forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Basis, Joint, MatrixShape
from blr_analysis.backprop.single import batch_product, product
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
    slices,
    taken,
)

EXPLICIT = 2**20  # numbers of one example's G_c that are made at once
BLOCK = 2**18  # numbers of G of one column that are made and used at once: they stay in the cache
STACKED = 2**19  # numbers of output gradients of several columns that are put side by side at once
CACHED = 2**18  # numbers that are made and used at once, so that they stay in the cache
TURNED = 2**19  # the same of inputs turned into a basis: products of few rows are slow
TALL = 512  # rows of output gradients: from them on columns are multiplied one by one
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
        """Every column is cut once: a slice each takes longer than what is made of it."""
        each = (self.inputs, *self.grads)
        for a, *d in zip(*(x.split(max(1, size)) for x in each), strict=True):
            part = Outer(self.joint, a, d)
            vars(part)["alike"] = self.alike
            yield part

    @cached_property
    def alike(self) -> Tensor | None:
        """The columns ``[K, g, O]`` of one position where autograd expands what all examples have
        alike: unit rows, of the layer that gives the outputs."""
        if self.positions > 1 or any(d.stride(0) for d in self.grads):
            return None
        return torch.cat([d[:1] for d in self.grads]).squeeze(2)

    def columns(self, chosen: slice) -> Outer:
        return replace(self, grads=self.grads[chosen])

    @property
    def matrix(self) -> MatrixShape | None:
        layout = self.layout
        plain = self.weight is not None and layout.groups == 1 and not layout.transposed
        return layout if plain else None

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
        layout, t = self.layout, self.positions
        inputs = self.inputs.numel() / self.n_examples
        return TermCost(inputs, gram=lambda columns: gram_numbers(layout, t, columns))

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
            left, right = (x.transpose(0, 1).flatten(1, 2) for x in (d, self.inputs))
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
        b, _, r = weights.shape
        if not keeps_factors(self, r):
            return super().combined(weights, into)
        term = self.cast(weights.dtype)
        assert term.weight is not None
        _, g, t, i = term.inputs.shape
        o = term.layout.rows
        a = term.inputs.transpose(0, 1).reshape(g, b * t, i)
        for at in slices(r, HELD // (g * o * max(b * t, i))):
            d = torch.einsum("bkr,bgkto->gbtro", weights[..., at], term.stacked())
            matrices = product(d.reshape(g, b * t, -1).mT, a).view(g, -1, o, i).transpose(0, 1)
            into[term.weight][at] += term.layout.parameter(matrices)
            if term.bias is not None:
                into[term.bias][at] += d.sum((1, 2)).transpose(0, 1).reshape(-1, g * o)
        return None

    def joints(self) -> list[Joint]:
        weight = [] if self.weight is None else [Joint(self.weight, None, self.layout)]
        size = (self.layout.groups * self.layout.rows,)
        return weight + ([] if self.bias is None else [by_rows(self.bias, size)])

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
            seen = self.inputs[at] @ right[:, :i]
            if joint.bias is not None:
                seen += right[:, -1:]
            shares.append(seen.mul_(d[at] @ left).sum((1, 2)))
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
        k, o = len(self.grads), self.grads[0].shape[-1]
        if t == 1:
            return self.stacked().mT * self.inputs.unsqueeze(2)
        if k == 1:
            left, right = self.grads[0].reshape(b * g, t, o), self.inputs.reshape(b * g, t, i)
            return batch_product(left.mT.contiguous(), right).view(b, g, 1, o, i)
        if self.grads[0].stride(-1) == 1:  # side by side as they are; of images, positions are last
            left = torch.stack(self.grads, dim=3).reshape(b * g, t, k * o).mT
        else:
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
        right = product(a.mT, a)
        parts = (part.movedim(2, 0).flatten(1, 3) for part in _together(self.grads))
        left = sum((product(m.mT, m) for m in parts), start=a.new_zeros(()))
        return right, left


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
    """Numbers that :func:`weighted_gram` holds per example for t positions and k columns."""
    g, o, i = layout.groups, layout.rows, layout.columns
    if t == 1:
        return 2.5 * k * g * o
    return 2.5 * min(k * g * o * i, max(BLOCK if k == 1 else EXPLICIT, k * g * i))


def _blocks(term: Outer) -> Iterator[tuple[slice, slice, Tensor]]:
    """G_c ``[b, g, K, rows, I]`` of some examples and some of its rows, small enough to be used
    while it is in the cache; of several columns, as many rows as a bound for each example says.
    What belongs to these rows stays there for all examples."""
    b, g, t, i = term.inputs.shape
    k, o = len(term.grads), term.grads[0].shape[-1]
    if k == 1:
        some, held = BLOCK // (g * o * i), BLOCK
    else:
        some, held = STACKED // (g * k * t * o), EXPLICIT
    for rows in slices(o, held // (k * g * i)):
        block = term.rows(rows)
        for examples in slices(b, some):
            yield examples, rows, (block if some >= b else block.part(examples)).matrices()


def _one_position_gram(
    term: Outer, scale: Tensor, left: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Σ_o (d_c U)_o s_o (d_c' U)_o from s ``[B, g, O]``, which is overwritten, and U ``[O, O]``."""
    if term.alike is not None and scale.shape[1] == 1:
        rows = term.alike[:, 0]  # [K, O]
        unit = torch.equal(rows, torch.eye(*rows.shape, dtype=rows.dtype, device=rows.device))
        if left is None and unit:
            if into is None:
                return torch.diag_embed(scale.squeeze(1))
            into.diagonal(dim1=1, dim2=2).add_(scale.squeeze(1))
            return into
        turned = rows if left is None else left if unit else rows @ left
        half = turned * scale.sqrt_()
        return added_bmm(into, half, half.mT)
    scale = scale.unsqueeze(2)
    if len(term.grads) == 1:
        d = term.grads[0] if left is None else term.grads[0] @ left
        return added(into, (d.square() * scale).sum((1, 2, 3)).view(-1, 1, 1))
    half = torch.stack(term.grads)
    half = half if left is None else product(half, left)
    half = half.mul_(scale.sqrt_()).flatten(2).transpose(0, 1)
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
        scale = _by_rows(a.squeeze(1), weight[0], CACHED, torch.square).unsqueeze(1)
        return scale if bias is None else scale.add_(bias)
    scale = torch.einsum("bgi,goi->bgo", a.square(), weight)
    return scale if bias is None else scale + bias


def _by_rows(
    a: Tensor, variance: Tensor, numbers: int, squared: Callable[[Tensor], Tensor]
) -> Tensor:
    """``squared(a) @ varianceᵀ``, so many numbers at a time: what is squared stays in the cache."""
    products = a.new_empty(len(a), len(variance))
    rows = max(64, numbers // a.shape[-1])
    for part, out in zip(a.split(rows), products.split(rows), strict=True):
        out.copy_(product(squared(part), variance.mT))
    return products


def rotated_gram(term: Outer, basis: Basis, variance: Tensor, into: Tensor | None = None) -> Tensor:
    """⟨U_Gᵀ G_c U_A ∘ σ², U_Gᵀ G_c' U_A⟩ with σ² ``[g, O, I']``, ``[B, K, K]``."""
    if term.positions == 1 and term.weight is not None and len(basis.right) == 1:
        right, i = basis.right[0], term.inputs.shape[-1]

        def squared(part: Tensor) -> Tensor:
            if len(right) == i:
                return product(part, right).square_()
            return product(part, right[:-1], right[-1]).square_()

        rows = term.inputs.reshape(-1, i)
        scale = _by_rows(rows, variance[0], TURNED, squared).unsqueeze(1)
        left = None if basis.left is None else basis.left[0]
        return _one_position_gram(term, scale, left, into)
    b, k = term.n_examples, term.n_columns
    some = max(1, STACKED // (k * term.grads[0][0].numel()))
    if k > 1 and term.positions > 1 and some < b:
        parts = (term.part(examples) for examples in slices(b, some))
        return added(into, torch.cat([rotated_gram(part, basis, variance) for part in parts]))
    turned = rotated(term, basis)
    if isinstance(turned, Outer):
        return weighted_gram(turned, variance, None, into)
    return added(into, flat_gram(turned, variance.unsqueeze(1)))


def flat_gram(columns: Tensor, variance: Tensor) -> Tensor:
    """⟨G_c ∘ σ², G_c'⟩ from ``[B, g, K, ...]`` and σ² ``[g, 1, ...]`` (broadcast), ``[B, K, K]``.

    Overwrites ``columns``.
    """
    if columns.shape[2] == 1:
        each = variance.expand(columns.shape[1], 1, *columns.shape[3:]).reshape(-1)
        return (columns.square_().flatten(1) @ each).view(-1, 1, 1)
    flat = columns.mul_(variance.sqrt()).transpose(1, 2).flatten(2)
    return torch.bmm(flat, flat.mT)


def _add_position_squares(a: Tensor, squares: Tensor, into: Tensor) -> None:
    """Add Σ_i d_i² a_iᵀ² to ``into``, ``[g, O, I]``, of one position, from d² ``[B, g, 1, O]``.

    The squares of a are made of some examples at a time: they stay in the cache.
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
    _, _, t, i = term.inputs.shape
    right, left = basis.right, basis.left
    k, (g, o, joint) = len(term.grads), basis.shape
    before = t * i * joint + k * t * o * o
    after = k * o * joint * (joint + o)
    if t > 1 and (after < before or term.weight is None):
        matrices = term.joint_matrices()
        matrices = matrices if left is None else left.mT.unsqueeze(1) @ matrices
        return matrices @ right.unsqueeze(1)
    if term.weight is None:
        a = right[:, :1].unsqueeze(0).expand(len(term.inputs), -1, t, -1)
    elif g == 1 and t > 1 and term.inputs.stride(-1) > 1:  # patches: positions last, not copied
        turn = right[:, :i].mT.contiguous().expand(len(term.inputs), -1, -1)
        a = batch_product(turn, term.inputs.squeeze(1).mT)
        a = (a if joint == i else a.add_(right[0, -1].unsqueeze(1))).mT.unsqueeze(1)
    elif g == 1:
        flat = term.inputs.reshape(-1, i)
        bias = None if joint == i else right[0, -1]
        a = product(flat, right[0, :i], bias)
        a = a.view(*term.inputs.shape[:-1], joint)
    else:
        a = term.inputs @ right[:, :i]
        a = a if joint == i else a + right[:, -1:]
    if left is None:
        d = term.grads
    elif t == g == 1:
        d = [x for part in _together(term.grads) for x in product(part, left[0]).unbind()]
    elif g == 1 and term.grads[0].stride(-1) == 1:
        d = [product(grad.reshape(-1, o), left[0]).view(grad.shape) for grad in term.grads]
    else:
        d = [grad @ left for grad in term.grads]
    return Outer(Joint(basis.key, None, MatrixShape(*basis.shape, basis.shape)), a, d)


def keeps_factors(term: Outer, r: int) -> bool:
    """Whether Σ_t d_tᵀ U a_t takes less, for r of U, than forming G and multiplying it with U."""
    t, k, o, i = term.positions, len(term.grads), term.layout.rows, term.layout.columns
    if term.weight is None:
        return False
    if k > 1:
        return t * r * (i + k) <= k * r * i + k * t * i
    return t * r * (o * i + min(o, i)) <= t * o * i + SKINNY * r * o * i


def factored_products(
    term: Outer, stack: Mapping[str, Tensor], scale: Mapping[str, Tensor] | None, room: int | None
) -> Tensor:
    """Σ_t d_ctᵀ (U_k a_t), ``[B, K, r]``; of one column, the longer side is summed over first."""
    assert term.weight is not None
    a, d, dtype = term.inputs, term.stacked(), term.inputs.dtype
    swapped = len(term.grads) == 1 and d.shape[-1] > a.shape[-1]
    if swapped:
        a, d = d.squeeze(2), a.unsqueeze(2)
    b, g, k, t, o = d.shape
    r = len(stack[term.weight])
    a = a.transpose(0, 1).reshape(g, b * t, -1)
    shares = d.new_empty(b, k, r)
    copied = scale is not None or stack[term.weight].dtype != dtype
    size = min(HELD if copied or k > 1 else HELD // 4, room or HELD) // (g * b * t * o)
    if copied or swapped:
        size = min(size, min(HELD, room or HELD) // stack[term.weight].shape[1:].numel())
    for at in slices(r, size):
        taken_up = taken(stack, term.weight, at, dtype, scale)
        u = term.layout.matrix(taken_up.view(-1, *term.layout.shape))
        u = (u.mT if swapped else u).transpose(0, 1).reshape(g, -1, a.shape[-1])
        x = product(a, u.mT)
        if term.bias is not None and not swapped:
            bias = taken(stack, term.bias, at, dtype, scale).view(-1, g, o)
            x += bias.transpose(0, 1).reshape(g, 1, -1)
        x = x.view(g, b, t, -1, o)
        if g == t == 1:
            shares[..., at] = torch.bmm(d[:, 0, :, 0], x[0, :, 0].mT)
        else:
            shares[..., at] = torch.einsum("gbtro,bgkto->bkr", x, d)
    if term.bias is not None and swapped:
        bias = taken(stack, term.bias, slice(None), dtype, scale)
        shares += term._bias_grads().transpose(1, 2).flatten(2) @ bias.mT
    return shares


def explicit_products(
    term: Outer,
    stack: Mapping[str, Tensor],
    dtype: torch.dtype,
    scale: Mapping[str, Tensor] | None,
    room: int | None,
) -> Tensor:
    """⟨G_ic, U_k⟩, ``[B, K, r]``: G of some rows is made once, for all U."""
    assert term.weight is not None
    b, g, _, i = term.inputs.shape
    k, o = len(term.grads), term.layout.rows
    u = term.layout.matrix(stack[term.weight])
    s = None if scale is None else term.layout.matrix(scale[term.weight]).to(dtype)
    shares = term.inputs.new_zeros(b * k, len(u), dtype=dtype)
    for examples in slices(b, b if room is None else room // (2 * k * g * i)):
        part, into = term.part(examples), shares[examples.start * k : examples.stop * k]
        size = (len(into) + len(u)) * g * i
        for rows in slices(o, min(4 * BLOCK, room or 4 * BLOCK) // size):
            made = part.rows(rows).matrices().transpose(1, 2).reshape(len(into), -1)
            block = u[:, :, rows].to(dtype)
            block = block if s is None else block * s[:, rows]
            into.addmm_(made.to(dtype), block.reshape(len(u), -1).mT)
    if term.bias is not None:
        bias = taken(stack, term.bias, slice(None), dtype, scale)
        shares.addmm_(term._bias_grads().to(dtype).transpose(1, 2).reshape(b * k, -1), bias.mT)
    return shares.view(b, k, -1)
