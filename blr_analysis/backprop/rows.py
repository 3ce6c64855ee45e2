"""Embeddings: an example's gradient of a table has rows only for the ids that the example uses.

A table may be the read-out as well (tied weights). The read-out's gradient Σ_t d_t a_tᵀ differs
from 0 in every row. Its rows of the ids that the example looks up move to the look-up's term, and
d becomes 0 there. The two terms then have no row in common, so that squares and products of the
whole are sums over the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Joint, MatrixShape
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.terms import (
    TEMPORARY_NUMBERS,
    Apart,
    Dense,
    Term,
    TermCost,
    Tree,
    added_bmm,
    by_rows,
    slices,
    sum_of_squares,
)


@dataclass(frozen=True)
class Rows(Term):
    """Embedding: G_c has the row Σ_{t: id_t = v} d_ct for every id v that the example uses.

    An example has T slots, one for each id that it uses.

    Attributes:
        name: the parameter's name.
        shape: the table's shape, (number of ids, O).
        ids: ``[B, T]``, each id of an example once, in ascending order. An example with fewer than
            T ids has unused slots at its end, with id 0 and gradient 0.
        grads: K tensors ``[B, T, O]``, the sums of d over the positions of an id.
    """

    name: str
    shape: tuple[int, ...]
    ids: Tensor
    grads: list[Tensor]

    @classmethod
    def collect(cls, name: str, shape: tuple[int, ...], ids: Tensor, grads: list[Tensor]) -> Rows:
        """The term for ids ``[B, T]`` and K gradients ``[B, T, O]``, one for each position.

        Positions of an example with the same id are added up.
        """
        ordered_ids, order = ids.sort(dim=1)
        is_new = torch.ones_like(ordered_ids)
        is_new[:, 1:] = (ordered_ids[:, 1:] != ordered_ids[:, :-1]).long()
        slots = is_new.cumsum(1) - 1  # of each position, in the order of the ids
        unique_ids = torch.zeros_like(ids).scatter(1, slots, ordered_ids)
        sums = []
        for grad in grads:
            ordered_grad = grad.gather(1, order.unsqueeze(-1).expand_as(grad))
            index = slots.unsqueeze(-1).expand_as(grad)
            sums.append(torch.zeros_like(ordered_grad).scatter_add(1, index, ordered_grad))
        return cls(name, shape, unique_ids, sums)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def n_examples(self) -> int:
        return len(self.ids)

    @property
    def n_columns(self) -> int:
        return len(self.grads)

    def part(self, chosen: slice) -> Rows:
        return replace(self, ids=self.ids[chosen], grads=[d[chosen] for d in self.grads])

    def columns(self, chosen: slice) -> Rows:
        return replace(self, grads=self.grads[chosen])

    @property
    def matrix(self) -> MatrixShape:
        n_ids, width = self.shape
        return MatrixShape(groups=1, rows=n_ids, columns=width, shape=self.shape)

    def rows(self, chosen: slice) -> Rows:
        """The gradient's rows with these ids; the first of them becomes id 0.

        The result has as many slots as the example with most of these ids needs.
        """
        n_ids = chosen.stop - chosen.start
        width = self.shape[1]
        is_chosen = (self.ids >= chosen.start) & (self.ids < chosen.stop)
        n_slots = max(1, int(is_chosen.sum(1).max()))
        order = is_chosen.byte().argsort(dim=1, descending=True, stable=True)
        slots = order[:, :n_slots]  # the chosen ones, still in ascending order of their ids
        is_used = is_chosen.gather(1, slots)
        ids = (self.ids.gather(1, slots) - chosen.start) * is_used
        index = slots.unsqueeze(-1).expand(-1, -1, width)
        grads = [d.gather(1, index) * is_used.unsqueeze(-1) for d in self.grads]
        return Rows(self.name, (n_ids, width), ids, grads)

    def cast(self, dtype: torch.dtype) -> Rows:
        return replace(self, grads=[d.to(dtype) for d in self.grads])

    def joined(self, other: Term) -> Term | None:
        """The sum with another look-up in the same table, or with the table as a read-out."""
        if isinstance(other, Outer) and other.weight == self.name:
            return _tied(self, other)
        if not isinstance(other, Rows) or other.name != self.name:
            return None
        ids = torch.cat([self.ids, other.ids], dim=1)
        pairs = zip(self.grads, other.grads, strict=True)
        grads = [torch.cat(pair, dim=1) for pair in pairs]
        return Rows.collect(self.name, self.shape, ids, grads)

    def cost(self) -> TermCost:
        return TermCost(inputs=self.ids.numel() / self.n_examples)

    def stacked(self) -> Tensor:
        """d as one tensor ``[B, K, T, O]``."""
        return torch.stack(self.grads, dim=1)

    def jacobian(self) -> Tree:
        d = self.stacked()
        table = d.new_zeros(*d.shape[:2], *self.shape)
        index = self.ids[:, None, :, None].expand_as(d)
        return {self.name: table.scatter_add(2, index, d)}

    def gram(self, variance: Mapping[str, Tensor], into: Tensor | None = None) -> Tensor:
        scale = variance[self.name][self.ids]  # [B, T, O]
        d = self.stacked()
        return added_bmm(into, (d * scale.unsqueeze(1)).flatten(2), d.flatten(2).mT)

    @property
    def zeros(self) -> Tree:
        return {self.name: self.grads[0].new_zeros(self.shape)}

    def add_square_sum(self, into: Tree) -> None:
        """Add the squares into the table that ``into`` has; no second table is made."""
        squares = sum_of_squares(self.grads)
        table = into[self.name]
        table.index_add_(0, self.ids.flatten(), squares.flatten(0, 1).to(table))

    def sum(self) -> Tree:
        d = sum(self.grads[1:], start=self.grads[0])
        table = self.zeros[self.name]
        return {self.name: table.index_add_(0, self.ids.flatten(), d.flatten(0, 1))}

    def products(
        self,
        stack: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        scale: Mapping[str, Tensor] | None = None,
        room: int | None = None,
    ) -> Tensor:
        """Σ_t d_ktᵀ (s[id_t] ∘ U_r[id_t]) for column k, table r of the stack and scale s."""
        d = self.cast(dtype).stacked()
        tables = stack[self.name]
        numbers_per_table = 2 * self.grads[0].numel()  # its rows, and they times the scale
        tables_at_once = (room or TEMPORARY_NUMBERS) // numbers_per_table
        parts = []
        for chosen in slices(len(tables), tables_at_once):
            rows = tables[chosen][:, self.ids].to(dtype)
            if scale is not None:
                rows = rows * scale[self.name][self.ids].to(dtype)
            parts.append(torch.einsum("bkto,rbto->bkr", d, rows))
        return torch.cat(parts, dim=-1)

    def combined(self, weights: Tensor, into: Tree) -> None:
        d = self.cast(weights.dtype).stacked()
        tables = into[self.name]
        tables_at_once = TEMPORARY_NUMBERS // self.grads[0].numel()
        for chosen in slices(len(tables), tables_at_once):
            rows = torch.einsum("bkr,bkto->rbto", weights[..., chosen], d)
            tables[chosen].index_add_(1, self.ids.flatten(), rows.flatten(1, 2))

    def joints(self) -> list[Joint]:
        return [by_rows(self.name, self.shape)]

    def projected(self, joint: Joint, left: Tensor, right: Tensor, room: int) -> Tensor:
        """Σ_t r_k[id_t] (s_k · d_t) for every pair k of ``left`` r and ``right`` s; one column."""
        (d,) = self.grads
        numbers_per_example = 3 * d.shape[1] * left.shape[-1]  # two factors and their product
        parts = []
        for examples in slices(len(d), room // numbers_per_example):
            left_rows = left[0][self.ids[examples]]
            parts.append((left_rows * (d[examples] @ right[0])).sum(1))
        return torch.cat(parts)


def _tied(lookup: Rows, readout: Outer) -> Term | None:
    """The sum of a look-up's gradient and a read-out's, as two terms without a common row.

    None where the read-out stores the table in another layout.
    """
    layout = readout.layout
    has_same_layout = layout.shape == lookup.shape and not layout.transposed and layout.groups == 1
    if not has_same_layout:
        return None
    ids = lookup.ids
    slots = torch.arange(ids.shape[1], device=ids.device)
    is_used = (ids != 0) | (slots == 0)  # ids ascend: a later 0 is an unused slot
    ids_to_move = torch.where(is_used, ids, ids[:, :1])  # unused slots repeat the first id
    grads_of_used_ids: list[Tensor] = []
    grads_of_other_ids: list[Tensor] = []
    for d, lookup_grad in zip(readout.grads, lookup.grads, strict=True):
        index = ids_to_move[:, None, None, :].expand(*d.shape[:3], -1)
        readout_rows = d.gather(-1, index).squeeze(1).mT @ readout.inputs.squeeze(1)
        grads_of_used_ids.append(lookup_grad + readout_rows * is_used.unsqueeze(-1))
        grads_of_other_ids.append(d.scatter(-1, index, 0.0))
    joint_without_bias = replace(readout.joint, bias=None)
    parts: list[Term] = [
        Outer(joint_without_bias, readout.inputs, grads_of_other_ids),
        replace(lookup, grads=grads_of_used_ids),
    ]
    if readout.bias is not None:
        parts.append(Dense({readout.bias: _bias_grads(readout)}))
    return Apart(tuple(parts))


def _bias_grads(readout: Outer) -> Tensor:
    """The gradients of a read-out's bias ``[B, K, O]``: d summed over groups and positions."""
    return torch.stack([d.sum((1, 2)) for d in readout.grads], dim=1)
